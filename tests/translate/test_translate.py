"""Configurations of other trainers, as guides give them, become files that this parser takes and that plan a run."""

import json
import re
import sys
import tomllib
from dataclasses import replace
from operator import itemgetter
from pathlib import Path
from typing import Any

import documents
import pytest
from train_cases import config_from, pretrain

from megalite.common.optional_packages import MissingPackageError
from megalite.config.megatron_flags import known_flags
from megalite.config.option import flags_of
from megalite.config.options import ConfigError
from megalite.launch.rank_info import RankInfo
from tools.translate import main
from tools.translation.external_config import read_mapping
from tools.translation.rules import BUILT_IN, FIELDS, NO_EQUIVALENT, Translation, ValueStore, convert_option
from tools.translation.source_keys import NOOP_VERDICT, TABLES, SourceConfig, SourceKey, load_format
from tools.translation.translate import FORMATS, translate, translate_key

HERE = Path(__file__).parent
PAGE = documents.ROOT / "docs/from_other_trainers.md"
SECTIONS = {  # a section of the page -> the tables that its keys are in
    "DeepSpeed": "deepspeed",
    "Accelerate and FSDP": "accelerate",
    "torchtitan": "torchtitan",
    "nanotron": "nanotron",
    "NeMo and Megatron-Bridge": "bridge nemo",
}
REST = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "seq_length": 32,
    "micro_batch_size": 2,
    "lr": 0.01,
}
REST |= {"train_iters": 4}  # options that a file may lack
CASES: dict[str, dict[str, Any]] = tomllib.loads((HERE / "cases.toml").read_text("utf-8"))


@pytest.mark.parametrize("name", CASES)
def test_translated_file_plans_a_run(name: str, tmp_path: Path, capsys, monkeypatch) -> None:
    case, ranks = CASES[name], CASES[name]["ranks"]
    assert main([str(HERE / name), "--gpus", str(ranks)]) == case["code"]
    text = capsys.readouterr().out
    tables = tomllib.loads(text)
    values = {"preset": tables.pop("preset", None)} | {
        key: value for table in tables.values() for key, value in table.items()
    }
    assert case["sets"].items() <= values.items() and case["comment"] in text
    missing = set(re.findall(r"^#   (\w+)(?:=0)? is not set", text, re.MULTILINE))
    flags = [f"--{key.replace('_', '-')}={value}" for key, value in REST.items() if key in missing]
    (tmp_path / "run.toml").write_text(text)
    config = config_from(["--config", str(tmp_path / "run.toml"), *flags, "--mock-data", "--vocab-size=128"])
    data = replace(config.data, tokenizer_type=None, tokenizer_model=None, vocab_file=None, merge_file=None)
    monkeypatch.chdir(tmp_path)
    plan = replace(config, data=data, train=replace(config.train, dry_run=True))
    assert pretrain(plan, RankInfo(world_size=ranks, local_world_size=ranks)) == 0
    names = [key.name for key in SourceConfig("bridge", read_mapping(str(HERE / name))).iterate(defaults=False)]
    assert len(names) > 9 and all(re.search(rf"^#   (.*, )?{re.escape(key)} = ", text, re.M) for key in names)


def example_of_page() -> dict[str, str]:
    (_, source), (_, typed), (_, target) = documents.fenced_blocks(PAGE)
    translate_argv, train_argv = (command.argv for command in documents.commands_of(typed, PAGE.name))
    _, _, file, *flags = translate_argv
    return dict(file=file, flags=" ".join(flags), train=" ".join(train_argv[2:]), text=source, writes=target)


EXAMPLES: dict[str, dict[str, str]] = tomllib.loads((HERE / "examples.toml").read_text("utf-8"))


@pytest.mark.parametrize("name", ["deepspeed", *EXAMPLES])
def test_translated_example_equals_the_documented_file(name: str, tmp_path: Path, capsys, monkeypatch) -> None:
    example = example_of_page() if name == "deepspeed" else EXAMPLES[name]
    monkeypatch.chdir(tmp_path)
    Path(example["file"]).write_text(example["text"])
    assert main([example["file"], *example["flags"].split()]) == 0
    text, expected = capsys.readouterr().out, tomllib.loads(example["writes"])
    written = tomllib.loads(text)
    assert {section: written[section] for section in expected} == expected
    Path("run.toml").write_text(text)
    config = config_from(example["train"].split())
    assert pretrain(config, RankInfo(world_size=config.parallel.nproc, local_world_size=8)) == 0


@pytest.mark.parametrize("title", SECTIONS)
def test_every_documented_key_has_a_row(title: str) -> None:
    section = PAGE.read_text("utf-8").partition(f"\n## {title}\n")[2].partition("\n## ")[0]
    cells = re.findall(r"^\| (.*?) \| ", section, re.MULTILINE)
    keys = {key.rpartition(".")[2] for cell in cells for key in re.findall(r"`([a-z]\w*(?:\.\w+)*)[`:]", cell)}
    tables = [documents.ROOT / f"tools/translation/formats/{table}.toml" for table in SECTIONS[title].split()]
    table = "".join(path.read_text("utf-8") for path in tables)
    flags = {flag[2:].replace("-", "_") for flag in known_flags()}
    others = flags | {"model", "train", "ds_report", "deepspeed"}
    others |= {"json", "toml", "yaml"}  # column titles of the tables
    assert len(keys) > 5 and [key for key in sorted(keys - others) if not re.search(rf"\b{key}\b", table)] == []


def test_every_external_key_has_a_row() -> None:
    listed = tomllib.loads((HERE / "keys.toml").read_text("utf-8"))
    keys = [
        (name, SourceKey(key_name, section, key_name, "x"))
        for name, sections in listed.items()
        for section, names in sections.items()
        for key_name in names.split()
    ]
    assert len(keys) > 1400 and [key for name, key in keys if SourceConfig(name, {}).row(key) is None] == []
    assert SourceConfig("deepspeed", {}).row(SourceKey("staeg", "zero_optimization", "staeg", 2)) is None


def test_rows_name_existing_options() -> None:
    flags = {flag for f in FIELDS.values() for flag, _ in flags_of(f)} | known_flags().keys() | {"--preset"}
    sections = [section for name in FORMATS for key, section in load_format(name).items() if key not in TABLES]
    rows = [row for section in sections for row in section.values()]
    for row in [text for entry in rows for text in (entry.values() if isinstance(entry, dict) else [entry])]:
        assert re.fullmatch(r"[+>~] .+|[=!]\S* .+", row), row
        assert {*re.findall(r"(?<![\w-])--[a-z][\w-]*", row)} <= flags, row
        for option, equals, value in (word.partition("=") for word in row[2:].split() * (row[0] == "+")):
            assert option in FIELDS and (not equals or convert_option(option, value) is not None), row


LISTED: dict[str, dict[str, str]] = tomllib.loads((HERE / "keys.toml").read_text("utf-8"))


def rows_of(name: str) -> set[tuple[str, str]]:
    """Return (section, key) of each row of a table, and of each key that is translated as a Megatron-LM flag."""
    table = load_format(name)
    rows = {(section, key) for section, rows in table.items() if section not in TABLES for key in rows}
    return rows | {(section, key) for section, keys in LISTED.get(name, {}).items() for key in keys.split()}


@pytest.mark.parametrize("name", FORMATS)
def test_always_true_verdicts_need_no_flag(name: str) -> None:
    """For any value of a key, a verdict that names a flag to set is not "built in"."""
    file = SourceConfig(name, {})
    for section, key in sorted(rows_of(name)):
        row = file.table.get(section, {}).get(key, {})
        values = [True, "on", 7] + [value for value in (row if isinstance(row, dict) else {}) if value != "*"]
        for value in values:
            verdict = translate_key(
                file, SourceKey(f"{section}.{key}", section, key, value), Translation(name, ValueStore()), []
            )
            names_a_flag = re.search(r"(?<![\w-])--[a-z]", verdict.text)
            assert verdict.kind != BUILT_IN or not names_a_flag, (name, section, key, value, verdict.text)


@pytest.mark.parametrize("name", FORMATS)
def test_unlisted_value_is_never_ignored(name: str) -> None:
    """This holds for a value that is filled in later and for another spelling of true."""
    file = SourceConfig(name, {})
    tables = [
        (section, key, row)
        for section, key in sorted(rows_of(name))
        if isinstance(row := file.table.get(section, {}).get(key), dict)
    ]
    assert len(tables) > 10
    for section, key, row in tables:
        has_effect = any(item[0] != "=" for item in row.values())
        for value in [item for item in ("auto", "???", "${x.y}", "maybe") if item not in row] if has_effect else []:
            verdict = translate_key(
                file, SourceKey(f"{section}.{key}", section, key, value), Translation(name, ValueStore()), []
            )
            assert verdict.kind == NO_EQUIVALENT or (value == "maybe" and verdict.text != NOOP_VERDICT[2:]), (
                section,
                key,
                value,
                verdict,
            )
        for value in [item for item in (1, "yes", "ON") if str(item).lower() not in row] if "true" in row else []:
            as_true, as_is = (
                translate_key(
                    file, SourceKey(f"{section}.{key}", section, key, item), Translation(name, ValueStore()), []
                )
                for item in (True, value)
            )
            assert (as_is.kind, as_is.text, as_is.values) == (as_true.kind, as_true.text, as_true.values), (
                section,
                key,
                value,
            )


VERDICTS: dict[str, tuple[dict[str, Any], str]] = {
    "bf16 by a number": ({"train_batch_size": 8, "bf16": {"enabled": 1}}, "bf16 = true"),
    "shared experts by a number": (
        {"model": {"model_config": {"moe_config": {"enable_shared_expert": 1, "num_experts": 4}}}},
        "moe_shared_expert_intermediate_size = 5632\nmoe_shared_expert_gate = true",
    ),
    "a section that a number switches off": (
        {"train_batch_size": 8, "tensorboard": {"enabled": 0, "output_path": "tb"}},
        'tensorboard.output_path = "tb": its section is off',
    ),
    "sets of a size that is filled in": (
        {"train_batch_size": 8, "zero_optimization": {"stage": 3, "mics_shard_size": "auto"}},
        'mics_shard_size = "auto": the script that reads the file fills it in; give --num-distributed-optimizer-instances',
    ),
    "a way of sharding that NeMo has not": (
        {"model": {"mcore_gpt": True, "fsdp": True, "fsdp_sharding_strategy": "hybrid"}},
        'model.fsdp = true, model.fsdp_sharding_strategy = "hybrid": NeMo supports only full and grad',
    ),
    "a switch that is computed": (
        {"model": {"mcore_gpt": True, "fsdp": "${oc.env:FSDP}"}},
        'model.fsdp = "${oc.env:FSDP}": it is computed from other values; write its value',
    ),
    "shared experts": (
        {"model": {"model_config": {"moe_config": {"enable_shared_expert": True, "num_experts": 4}}}},
        "moe_shared_expert_intermediate_size = 5632\nmoe_shared_expert_gate = true",
    ),
    "no shared experts": (
        {"model": {"model_config": {"moe_config": {"shared_expert_intermediate_size": 9, "enable_shared_expert": False}}}},
        "shared_expert_intermediate_size = 9: has no effect without enable_shared_expert",
    ),
    "a z-loss": (
        {"model": {"model_config": {"is_llama_config": True, "z_loss_enabled": True}}},
        "z_loss_coeff = 0.0001",
    ),
    "positions that nanotron does not scale": (
        {"model": {"model_config": {"is_llama_config": True, "rope_scaling": {"type": "yarn", "factor": 4.0}}}},
        "nanotron does not read it, and does not scale positions either",
    ),
    "a checkpoint of nanotron": (
        {"checkpoints": {"resume_checkpoint_path": "a/b", "checkpoints_path": "a"}},
        'resume_checkpoint_path = "a/b": a checkpoint of nanotron is not read',
    ),
    "gradients that are reduced in bf16": (
        {"training": {"mixed_precision_reduce": "bfloat16"}},
        "grad_reduce_in_bf16 = true",
    ),
    "a compiled model": ({"compile": {"enable": True, "components": ["model"]}}, "compile = true"),
    "a compiled loss": ({"compile": {"enable": True, "components": ["loss"]}}, "the loss has its own kernel"),
    "the best checkpoints": (
        {"exp_manager": {"checkpoint_callback_params": {"save_top_k": 3, "monitor": "val_loss"}}},
        "save_top_k = 3: the newest checkpoints are kept, not those with the lowest loss; give --keep-last N",
    ),
    "the newest checkpoints": (
        {"exp_manager": {"checkpoint_callback_params": {"save_top_k": 3, "monitor": "step", "mode": "max"}}},
        "keep_last = 3",
    ),
    "a value that is to be given": (
        {"trainer": {"max_steps": "???", "devices": 1, "num_nodes": 1}},
        'max_steps = "???": the file leaves it unset; give --train-iters',
    ),
    "a tokenizer that is to be given": (
        {"model": {"tokenizer": {"model": "???", "library": "sentencepiece"}}},
        'model.tokenizer.model = "???": the file leaves it unset; give --tokenizer-model',
    ),
    "a reference": (
        {"model": {"encoder_seq_length": 64, "max_position_embeddings": "${.encoder_seq_length}",
                   "data": {"seq_length": "${model.encoder_seq_length}"}}},
        'model.max_position_embeddings = "${.encoder_seq_length}": max_position_embeddings = 64',
    ),
    "a reference to itself": (
        {"model": {"encoder_seq_length": "${model.encoder_seq_length}", "mcore_gpt": True}},
        "it is computed from other values; write its value",
    ),
    "a computed value": (
        {"model": {"encoder_seq_length": 64, "mcore_gpt": True, "tokenizer": {"model": "${oc.env:HOME}/x"}}},
        "it is computed from other values; write its value",
    ),
    "a computed value in a list": (
        {"model": {"mcore_gpt": True, "optim": {"name": "adamw", "betas": [0.9, "${x:1}"]}}},
        "it is computed from other values; write its value",
    ),
    "a port": (
        {"distributed_type": "FSDP", "num_processes": 4, "main_process_port": 29501},
        "torchrun --nproc_per_node 4 --master_port 29501 -m megalite train",
    ),
    "a port of several machines": (
        {"distributed_type": "FSDP", "num_processes": 4, "num_machines": 2, "machine_rank": 1,
         "main_process_ip": "10.0.0.1", "main_process_port": 29501},
        "--nnodes 2 --node_rank 1 --master_addr 10.0.0.1 --master_port 29501 -m",
    ),
    "Muon": (
        {"train_batch_size": 8, "optimizer": {"type": "Muon", "params": {"lr": 0.02}}},
        "muon_momentum = 0.95\nmuon_nesterov = true\nmuon_coefficient_type = \"simple\"",
    ),
    "SGD": (
        {"train_batch_size": 8, "optimizer": {"type": "SGD", "params": {"lr": 0.02}}},
        "sgd_momentum = 0.0",
    ),
    "Adam's own weight decay": (
        {"train_batch_size": 8, "optimizer": {"type": "Adam", "params": {"adam_w_mode": False}}},
        "adam_w_mode = false: the weight decay is AdamW's; Adam's",
    ),
    "MLflow's switch": ({"tensorboard": {"enabled": True}, "train_batch_size": 8}, 'tensorboard_dir = "runs"'),
    "an old torchtitan": (
        {"training": {"batch_size": 2, "compile": True, "seed": 7, "tensor_parallel_degree": 2, "data_parallel_degree": 4},
         "checkpoint": {"enable_checkpoint": True, "interval": 3}, "lr_scheduler": {"lr_min": 0.5}},
        "lr_scheduler.lr_min = 0.5 (now lr_scheduler.min_lr_factor): min_lr = 0.0004",
    ),
    "a switch that is off under its old name": (
        {"checkpoint": {"enable_checkpoint": False, "interval": 3}, "training": {"steps": 5}},
        "checkpoint.interval = 3, checkpoint.folder (default)",
    ),
    "quantized matmuls": ({"float8": {"enable_float8_linear": True}, "training": {"steps": 5}}, "no equivalent (1)"),
    "an unknown key": ({"training": {"steps": 5, "gradient_noise": 1}}, "gradient_noise = 1: unknown here, so nothing is set"),
    "a misspelt key": ({"training": {"stepps": 5, "seq_len": 1}}, "stepps = 5: unknown here; did you mean steps?"),
    "a key with dots": ({"training.steps": 5, "training": {"seq_len": 1}}, "training.steps = 5: unknown here"),
    "the name of another's section": (
        {"model": {"num_layers": 2, "vision": {"name": "clip", "lr": 1}}, "train": {"micro_batch_size": 1}},
        'model.vision.name = \"clip\", model.vision.lr = 1: unknown here',
    ),
    "a reference of a trainer that has none": ({"train_batch_size": "${x}"}, "it is computed from other values"),
}  # fmt: skip


@pytest.mark.parametrize("name", VERDICTS)
def test_translation_verdict(name: str, tmp_path: Path) -> None:
    tree, message = VERDICTS[name]
    (tmp_path / "x.json").write_text(json.dumps(tree))
    text, _ = translate(str(tmp_path / "x.json"), None if "num_processes" in tree else 8)
    assert message in text, text
    tomllib.loads(text)


def test_keys_with_equal_messages_are_one_line(tmp_path: Path) -> None:
    dataset = {f"option_{i}": i for i in range(1, 8)}
    stage = {"name": "main", "start_training_step": 1, "data": {"dataset": dataset, "seed": 42}}
    (tmp_path / "x.json").write_text(json.dumps({"data_stages": [stage]}))
    text, _ = translate(str(tmp_path / "x.json"), None)
    assert "no equivalent (7)" in text and text.count("write token files with megalite preprocess") == 1
    assert all(f"data_stages[0].data.dataset.option_{i} = {i}" in text for i in range(1, 8))


FAULTS: list[dict[str, Any]] = tomllib.loads((HERE / "wrong.toml").read_text("utf-8"))["faults"]


@pytest.mark.parametrize("fault", FAULTS, ids=itemgetter("message"))
def test_contradictory_keys_are_one_error(fault: dict[str, Any], tmp_path: Path) -> None:
    keys = json.loads((HERE / "zero2.json").read_text("utf-8")) | fault.get("keys", {})
    (tmp_path / "ds").write_text(fault.get("text", json.dumps(keys)))
    with pytest.raises(ConfigError) as error:
        translate(str(tmp_path / "ds"), fault["gpus"] or None)
    assert len(error.value.problems) == 1 and fault["message"] in error.value.problems[0]


def test_misspelled_and_secret_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "ds.json"
    keys = {"train_batch_size": 8, "zero_optimization": {"staeg": 2}, "bf16": {"enabled": True}, "a\n[model]\nlr": 1}
    keys |= {"comet": {"enabled": True, "api_key": "TOP"}, "gradient_clipping": "much", "steps_per_print": "${x}"}
    file.write_text(json.dumps(keys))
    text, is_complete = translate(str(file), 8)
    assert (
        not is_complete
        and "zero_optimization.staeg = 2: unknown here; did you mean stage?" in text
        and "TOP" not in text
    )
    assert tomllib.loads(text)["train"] == {"micro_batch_size": 1, "global_batch_size": 8}
    assert "lr" not in tomllib.loads(text)["optim"], "a key is data, whatever is in its name"
    assert 'gradient_clipping = "much": "much" is not a number; write one' in text
    assert 'steps_per_print = "${x}": it is computed from other values; write its value' in text
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(
        MissingPackageError, match=r"needs the package pyyaml; pip install pyyaml \(or megalite\[translate\]\)"
    ):
        translate(str(HERE / "fsdp.yaml"), 8)
