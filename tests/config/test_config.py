"""The configuration from the command line: Megatron-LM's flags, all problems at once, exit code 2, no torch."""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from toml_tables import MESSAGES

import pretrain_gpt
from docs.document_flags import OUTSIDE, flags_page, megatron_page
from megalite.config import cli
from megalite.config.config_file import dump_config, parse_config_text
from megalite.config.megatron_flags import DEPENDENT, INSTEAD, NO_EFFECT, OPTION, REFUSED, WARNED, known_flags
from megalite.config.option import _PATH_OPTIONS, flag_name, flags_of, option_spec, type_name
from megalite.config.options import ConfigError, build, iter_options, padded_vocab_size, replace_options
from megalite.config.validation import find_problems
from megalite.models.families import PRESETS

ROOT = Path(__file__).resolve().parents[2]
GOOD = """--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 --global-batch-size 16
 --train-iters 10 --lr 1e-3 --mock-data --vocab-size 100"""

BAD: dict[str, str] = MESSAGES["config"] | {
    f"--seed=-1{'0' * 400}": "is negative; give 0 or more"
}  # larger than any float


@pytest.mark.parametrize("flags,message", BAD.items(), ids=[flags[:80] for flags in BAD])
def test_bad_configuration_is_refused_with_value_rule_and_remedy(flags: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        cli.read([*GOOD.split(), *flags.split()], PRESETS)
    assert any(message in problem for problem in error.value.problems), error.value.problems
    assert all("\n" not in problem for problem in error.value.problems)


@pytest.mark.parametrize("width", [192, 20])
def test_dense_layer_width_is_checked_only_with_dense_layers(width: int) -> None:
    """3 ranks can shard a width of 192, but not swiglu's default of 512; 20 channels give no default width."""
    heads = f"--hidden-size {width} --num-attention-heads {6 if width == 192 else 2} --seq-length 48 --swiglu"
    flags = f"{heads} --disable-bias-linear --num-experts 6 --moe-ffn-hidden-size 24"
    flags += " --tensor-model-parallel-size 3" * (width == 192)
    cli.read([*GOOD.split(), *flags.split()], PRESETS)
    with pytest.raises(ConfigError, match="ffn_hidden_size=512|too small for the default width of swiglu"):
        cli.read([*GOOD.split(), *flags.split(), "--moe-layer-freq", "2"], PRESETS)


def test_gpt2_files_select_the_gpt2_tokenizer() -> None:
    gpt2_files = "--vocab-file v.json --merge-file m.txt"
    config, notes = cli.read([*GOOD.split(), *gpt2_files.split()], PRESETS)
    assert config.data.tokenizer_type == "GPT2BPETokenizer" and notes == []
    assert build(parse_config_text(dump_config(config), "x")) == config
    config, notes = cli.read([*GOOD.split(), *gpt2_files.split(), "--tokenizer-type", "NullTokenizer"], PRESETS)
    expected_notes = [
        f"{x} has no effect with --tokenizer-type NullTokenizer" for x in ("vocab_file=v.json", "merge_file=m.txt")
    ]
    assert config.data.tokenizer_type == "NullTokenizer" and notes == expected_notes


NULL, LLAMA2 = "--tokenizer-type NullTokenizer", "--tokenizer-type Llama2Tokenizer --tokenizer-model x.model"
BYTES, GPT2 = "--tokenizer-type ByteTokenizer", "--vocab-file v.json --merge-file m.txt"
SIZES = {"": 8192, NULL: 8192, f"{NULL} --vocab-size 99": 99, BYTES: None, GPT2: None, LLAMA2: None}


@pytest.mark.parametrize("tokenizer,size", [*SIZES.items(), (f"{BYTES} --vocab-size 300", 300)])
def test_preset_vocabulary_applies_without_a_tokenizer(tokenizer: str, size: int | None) -> None:
    flags = "--preset tiny --mock-data --micro-batch-size 1 --train-iters 1"
    assert cli.read([*flags.split(), *tokenizer.split()], PRESETS)[0].data.vocab_size == size


@pytest.mark.parametrize("name", ["tiny", "small"])
def test_tiny_preset_learning_rate_can_be_overridden(name: str) -> None:
    flags = f"--preset {name} --mock-data --micro-batch-size 1 --train-iters 1"
    assert cli.read(flags.split(), PRESETS)[0].optim.lr == PRESETS[name]["lr"]
    assert cli.read([*flags.split(), "--lr", "7e-5"], PRESETS)[0].optim.lr == 7e-5


def test_embedding_rows_can_be_set() -> None:
    for tp in ("1", "2"):
        flags = ["--padded-vocab-size", "160", "--tensor-model-parallel-size", tp]
        model = cli.read([*GOOD.split(), *flags], PRESETS)[0].model
        assert padded_vocab_size(97, model.make_vocab_size_divisible_by, int(tp)) == 160


@pytest.mark.parametrize("flags,notes", MESSAGES["notes"].items())
def test_silently_accepted_megatron_values_are_noted(flags: str, notes: list[str]) -> None:
    assert cli.read([*GOOD.split(), *flags.split()], PRESETS)[1] == notes


@pytest.mark.parametrize("flags,expected", MESSAGES["derived_values"].items())
def test_defaults_equal_megatrons(flags: str, expected: dict, tmp_path: Path) -> None:
    """The run's TOML file gives the same configuration."""
    config, _ = cli.read([*GOOD.split(), *flags.split()], PRESETS)
    actual = {name: getattr(config.model, name) for name in expected}
    assert {name: list(value) if isinstance(value, tuple) else value for name, value in actual.items()} == expected
    path = tmp_path / "run.toml"
    path.write_text(dump_config(config))
    assert cli.read(["--config", str(path)], PRESETS)[0] == config
    assert build(parse_config_text(dump_config(config), "x")) == config


def test_options_of_older_checkpoints_keep_their_meaning() -> None:
    """Before `apply_megatron_defaults`, gelu was the tanh form and the default was as many groups as heads."""
    stored = "num_layers = 1\nhidden_size = 64\nnum_attention_heads = 4\nadd_bias_linear = false\n"
    model = build(parse_config_text(stored + "group_query_attention = true", "x")).model
    assert (model.activation, model.num_kv_groups) == ("gelu", 4)


def test_all_problems_are_reported_before_torch_is_imported() -> None:
    flags = [*GOOD.split(), "--hidden-dropout", "3", "--min-lr", "9", "--bf16", "--fp16"]
    code = (
        "import sys\nfrom megalite.config import cli\nfrom megalite.models.families import PRESETS\n"
        "try:\n    cli.parse_config_or_exit(sys.argv[1:], PRESETS)\nfinally:\n    print('torch' in sys.modules)"
    )
    argv = [sys.executable, "-O", "-c", code, *flags]
    result = subprocess.run(argv, capture_output=True, text=True, timeout=30, cwd=ROOT)
    assert result.returncode == 2 and result.stdout == "False\n" and result.stderr.count("pretrain_gpt.py:") == 3


@pytest.mark.parametrize("spelling", ["7,0", "(7,0)", "7 0", "(7, 0)"])
def test_window_size_spellings(spelling: str) -> None:
    values = [spelling] if "(" in spelling else spelling.split()
    config, notes = cli.read([*GOOD.split(), "--window-size", *values, "--window-attn-skip-freq", "3"], PRESETS)
    assert config.model.layer_windows == (8, 8, None, 8) and notes == []
    assert build(parse_config_text(dump_config(config), "x")) == config
    config, notes = cli.read([*GOOD.split(), "--window-size=31,0", "--window-attn-skip-freq=[0]*2+[1]*2"], PRESETS)
    assert config.model.layer_windows == (None, None, 32, 32)
    assert notes == ["window_size=31,0 has no effect on sequences of 32 tokens"]


TP2 = "--tensor-model-parallel-size 2 --global-batch-size 20"
OF_WORLD = [(TP2, 3, 4, "world size 3"), (TP2, 16, 4, "use 16 or 32")]
OF_WORLD += [("--profile-ranks 0 5", 4, 8, "profile_ranks=5 is not among 4 ranks; give 0 to 3")]
OF_WORLD += [
    ("--eval-micro-batch-size 4 --eval-global-batch-size 8", 4, 2, "=8 is not a multiple of eval_micro_batch_size 4")
]


@pytest.mark.parametrize("flags,world,good,message", OF_WORLD)
def test_rules_that_depend_on_the_world_size(flags: str, world: int, good: int, message: str) -> None:
    config, _ = cli.read([*GOOD.split(), *flags.split()], PRESETS)
    assert any(message in problem for problem in find_problems(config, world))
    assert find_problems(config, good) == []


def test_precedence_of_preset_file_and_flags(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    model = "[model]\nnum_layers = 3\n[train]\ntrain_iters = 5\nmicro_batch_size = 2\n"
    path.write_text(f'preset = "tiny"\nlr = 0.5\n{model}')
    config, _ = cli.read(["--config", str(path), "--mock-data", "--num-layers", "2"], PRESETS)
    assert (config.model.num_layers, config.model.hidden_size, config.optim.lr) == (2, 256, 0.5)
    assert build(parse_config_text(dump_config(config), "x")) == config


LONG = {  # too long for a line of the table
    f"seq_length = {'9' * 5000}": "is not TOML",
    f"lr = {'9' * 400}": f"lr={'9' * 200}... is beyond a float",
    f"num_layers = '{'x' * 99_999}'": f"num_layers='{'x' * 199}... is not an int",
    f'data_path = ["1", "/tmp/{"x" * 5000}"]': "data_path is longer than a path may be",
    f'load = "{"x" * 241}/y"': "load is longer than a path may be",
}


@pytest.mark.parametrize("text,message", [*MESSAGES["toml"].items(), *LONG.items()], ids=lambda text: text[:60])
def test_bad_toml_names_the_key(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "run.toml").write_text(text)
    problems = "\n".join(list_problems([*GOOD.split(), "--config", str(tmp_path / "run.toml")]))
    assert message in problems and "secret" not in problems


@pytest.mark.parametrize(
    "url",
    ["sftp://me@host/x", "abfs://container@account/x", "s3://b/x?versionId=a1", "hdfs://host:8020/a@b", "/a?token=b@c"],
)
def test_url_with_a_plain_user_name_is_accepted(url: str) -> None:
    config, _ = cli.read([*GOOD.split(), "--save", url], PRESETS)
    assert config.checkpoint.save == url


def test_paths_are_recognized_and_must_be_utf_8() -> None:
    """Options that are described as a file, a directory or a prefix are recognized by name."""
    path_words = re.compile(r"\b(file|files|directory|PREFIX|vocab.json|merges.txt|data prefixes)\b")
    texts = [f for _, f in iter_options() if type_name(f) in ("str", "strs") and not option_spec(f).choices]
    described = {f.name for f in texts if path_words.search(option_spec(f).help)} | {"pretrained_checkpoint"}
    assert {f.name for f in texts if _PATH_OPTIONS.fullmatch(f.name)} == described
    with pytest.raises(ConfigError, match=r"run_dir is not UTF-8 text \(b'runs/\\xff'\); rename it"):
        cli.read([*GOOD.split(), "--run-dir", os.fsdecode(b"runs/\xff")], PRESETS)
    layout = ["--pipeline-model-parallel-layout", "E|" + "t|" * 200 + "L"]
    assert not [p for p in list_problems([*GOOD.split(), *layout]) if "longer" in p]


def list_problems(argv: list[str]) -> list[str]:
    with pytest.raises(ConfigError) as error:
        cli.read(argv, PRESETS)
    return error.value.problems


def test_flag_names_are_unique() -> None:
    flags = [flag for _, f in iter_options() for flag, _ in flags_of(f)]
    assert len(flags) == len(set(flags))
    listed = {flag for flag, known in known_flags().items() if known.verdict == OPTION}
    assert listed <= set(flags), "megatron_flags.txt lists options that do not exist"
    assert not set(flags) & (known_flags().keys() - listed), "options that megatron_flags.txt does not list as options"


def test_padded_vocabulary_is_independent_of_common_tp_sizes() -> None:
    assert {padded_vocab_size(50257, 128, tp) for tp in (1, 2, 4, 8, 16, 64, 128)} == {50304}
    assert padded_vocab_size(100, 1, 3) == 102


def rows_in(page: str) -> list[list[str]]:
    """Return the cells of each row about a flag."""
    return [line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| `--")]


def test_every_option_has_a_row_in_flags_page() -> None:
    row_of: dict[str, list[str]] = {}
    for cells in rows_in(flags_page()):
        for flag in re.findall(r"`(--[^`]+)`", cells[0]):
            assert flag not in row_of, f"{flag} has two rows"
            row_of[flag] = cells
    rows = list(iter_options())
    assert len(rows_in(flags_page())) == len(rows)
    for _, option in rows:
        shown = [flag for flag, _ in flags_of(option) if flag in row_of]
        cells = row_of[shown[0]]
        assert all(row_of[flag] is cells for flag in shown), option.name
        assert cells[-1] == option_spec(option).help.replace("|", "&#124;"), option.name
        for flag, value in flags_of(option):
            is_default = type_name(option) == "bool" and value is option.default
            assert flag in row_of or is_default or flag == f"--disable-{flag_name(option.name)[2:]}", flag


def test_every_megatron_flag_has_a_row_with_its_verdict() -> None:
    verdicts = {OPTION: "works", NO_EFFECT: "no effect", DEPENDENT: "dependent", WARNED: "warning", REFUSED: "refused"}
    listed = {name: flag for name, flag in known_flags().items() if flag.verdict != INSTEAD}
    rows = {cells[0].strip("`"): cells[1:] for cells in rows_in(megatron_page())}
    assert [cells[0].strip("`") for cells in rows_in(megatron_page())] == list(listed)
    for name, flag in listed.items():
        verdict, *reason = rows[name]
        assert verdict == verdicts[flag.verdict] and flag.reason in " ".join(reason), name
        assert reason or flag.verdict == OPTION, name
    parser = [flag.verdict for flag in listed.values() if flag.group not in OUTSIDE]
    counts = dict(re.findall(r"^\| ([a-z ]+) \| (\d+) \|", megatron_page(), re.MULTILINE))
    assert {word: int(number) for word, number in counts.items()} == {
        "all": len(parser),
        **{word: parser.count(verdict) for verdict, word in verdicts.items()},
    }


@pytest.mark.parametrize("path", sorted(p.name for p in (ROOT / "examples").glob("*.toml")))
def test_example_configs_dry_run(path: str, tmp_path: Path, capsys) -> None:
    text, more = (ROOT / "examples" / path).read_text(), ["--mock-data"]
    if "tokenizer_model" in text:  # the quickstart's data may not be there: the plan needs only a vocabulary
        remaining = [line for line in text.splitlines() if not line.startswith(("data_path", "tokenizer_", "split"))]
        text, more = "\n".join(remaining).replace("[data]", "[data]\nvocab_size = 8000\nmock_data = true"), []
    (tmp_path / path).write_text(text)
    assert pretrain_gpt.main(["--config", str(tmp_path / path), "--dry-run", *more]) == 0
    assert "layers per stage" in capsys.readouterr().out


def test_options_are_replaced_by_name_in_any_section() -> None:
    config = build({"train_iters": 7})
    changed = replace_options(config, train_iters=9, micro_batch_size=3)
    assert changed == replace(config, train=replace(config.train, train_iters=9, micro_batch_size=3))
    with pytest.raises(TypeError, match="micro_batches: no option has this name"):
        replace_options(config, micro_batches=3)
