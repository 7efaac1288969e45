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

from megalite.config import translate as tables
from megalite.config.field import spellings
from megalite.config.foreign_config import read_mapping
from megalite.config.megatron_flags import known_flags
from megalite.config.options import ConfigError
from megalite.config.packages import MissingPackage
from megalite.config.translate import FIELDS, FORMATS, Key, table_of, translate
from megalite.launch.ranks import Ranks
from megalite.models.families import PRESETS
from tools.translate import main

HERE = Path(__file__).parent
PAGES = {"deepspeed": "deepspeed", "accelerate": "accelerate", "torchtitan": "torchtitan", "nanotron": "nanotron"}
PAGES |= {"nemo": "bridge"}  # page -> the table that its keys are of
REST = {
    "num_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "seq_length": 32,
    "micro_batch_size": 2,
    "lr": 0.01,
}
REST |= {"train_iters": 4}  # what a file lacks
CASES: dict[str, dict[str, Any]] = tomllib.loads((HERE / "cases.toml").read_text("utf-8"))


@pytest.mark.parametrize("name", CASES)
def test_a_file_becomes_one_that_plans_a_run(name: str, tmp_path: Path, capsys, monkeypatch) -> None:
    case, ranks = CASES[name], CASES[name]["ranks"]
    assert main([str(HERE / name), "--gpus", str(ranks)]) == case["code"]
    text = capsys.readouterr().out
    read = tomllib.loads(text)
    values = {"preset": read.pop("preset", None)} | {
        key: value for part in read.values() for key, value in part.items()
    }
    assert case["sets"].items() <= values.items() and case["said"] in text
    missing = set(re.findall(r"^#   (\w+)(?:=0)? is not set", text, re.MULTILINE))
    words = [f"--{key.replace('_', '-')}={value}" for key, value in REST.items() if key in missing]
    (tmp_path / "run.toml").write_text(text)
    config = config_from(["--config", str(tmp_path / "run.toml"), *words, "--mock-data", "--vocab-size=128"])
    data = replace(config.data, tokenizer_type=None, tokenizer_model=None, vocab_file=None, merge_file=None)
    monkeypatch.chdir(tmp_path)
    plan = replace(config, data=data, train=replace(config.train, dry_run=True))
    assert pretrain(plan, Ranks(world=ranks, local_world=ranks)) == 0
    keys = [key.name for key in tables._keys(read_mapping(str(HERE / name)), {})]
    assert all(f"#   {key} = " in text for key in keys), "every key has a verdict"


@pytest.mark.parametrize("name", PAGES)
def test_the_worked_example_of_a_page(name: str, tmp_path: Path, capsys, monkeypatch) -> None:
    """What its first command prints is what the page shows, and its second plans that; the keys it names have rows."""
    page = documents.ROOT / f"docs/from_{name}.md"
    (_, source), (_, typed), (_, target) = documents.fences(page)
    first, second = documents.commands_of(typed, page.name)
    monkeypatch.chdir(tmp_path)
    Path(first.words[2]).write_text(source)
    assert main([*first.words[2:]]) == 0
    text, shown = capsys.readouterr().out, tomllib.loads(target)
    assert {section: tomllib.loads(text)[section] for section in shown} == shown
    Path("run.toml").write_text(text)
    config = config_from([*second.words[2:]])
    assert pretrain(config, Ranks(world=config.parallel.nproc, local_world=8)) == 0
    rows = re.findall(r"^\| (`.*?) \| ", page.read_text("utf-8").partition("## What does not")[0], re.MULTILINE)
    keys = {key.rpartition(".")[2] for row in rows for key in re.findall(r"`([a-z]\w*(?:\.\w+)*)`", row)}
    table = (documents.ROOT / f"megalite/config/translate/{PAGES[name]}.toml").read_text("utf-8")
    flags = {flag[2:].replace("-", "_") for flag in known_flags()} | {"model", "train", "ds_report"}
    assert len(keys) > 5 and [key for key in sorted(keys - flags) if not re.search(rf"\b{key}\b", table)] == []


def test_every_key_of_the_others_has_a_row() -> None:
    listed = tomllib.loads((HERE / "keys.toml").read_text("utf-8"))
    keys = [
        (name, Key(k, at, k, "x", False)) for name, of in listed.items() for at, ks in of.items() for k in ks.split()
    ]
    assert len(keys) > 1400 and [key for name, key in keys if tables._row_of(name, key) is None] == []
    assert tables._row_of("deepspeed", Key("staeg", "zero_optimization", "staeg", 2, False)) is None


def test_rows_are_of_options_and_flags_that_there_are() -> None:
    flags = {flag for f in FIELDS.values() for flag, _ in spellings(f)} | known_flags().keys() | {"--preset"}
    sections = [of for name in FORMATS for at, of in table_of(name).items() if at not in ("defaults", "settings")]
    rows = [row for of in sections for row in of.values()]
    for row in [text for one in rows for text in (one.values() if isinstance(one, dict) else [one])]:
        assert re.fullmatch(r"[+>] .+|[=!]\S* .+", row), row
        assert {*re.findall(r"(?<![\w-])--[a-z][\w-]*", row)} <= flags, row
        for option, equals, value in (word.partition("=") for word in row[2:].split() * (row[0] == "+")):
            assert option in FIELDS and (not equals or tables._typed(option, value) is not None), row


FAULTS: list[dict[str, Any]] = tomllib.loads((HERE / "wrong.toml").read_text("utf-8"))["faults"]


@pytest.mark.parametrize("fault", FAULTS, ids=itemgetter("said"))
def test_what_contradicts_itself_is_one_error(fault: dict[str, Any], tmp_path: Path) -> None:
    keys = json.loads((HERE / "zero2.json").read_text("utf-8")) | fault.get("keys", {})
    (tmp_path / "ds").write_text(fault.get("text", json.dumps(keys)))
    with pytest.raises(ConfigError) as error:
        translate(str(tmp_path / "ds"), fault["gpus"] or None, PRESETS)
    assert len(error.value.problems) == 1 and fault["said"] in error.value.problems[0]


def test_what_is_typed_wrong_or_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "ds.json"
    keys = {"train_batch_size": 8, "zero_optimization": {"staeg": 2}, "bf16": {"enabled": True}, "a\n[model]\nlr": 1}
    keys |= {"comet": {"enabled": True, "api_key": "TOP"}, "gradient_clipping": "much", "steps_per_print": "${x}"}
    file.write_text(json.dumps(keys))
    text, whole = translate(str(file), 8, PRESETS)
    assert not whole and "zero_optimization.staeg = 2: no key that is known" in text and "TOP" not in text
    assert tomllib.loads(text).keys() == {"train", "precision"} and "could not convert string to float" in text
    assert 'steps_per_print = "${x}": it stands for the value of another key; write that' in text
    monkeypatch.setitem(sys.modules, "yaml", None)
    with pytest.raises(
        MissingPackage, match=r"needs the package pyyaml; pip install pyyaml \(or megalite\[translate\]\)"
    ):
        translate(str(HERE / "fsdp.yaml"), 8, PRESETS)
