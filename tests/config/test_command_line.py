"""The command line: spellings of switches, near misses, flags of other programs, all problems in one list; --help."""

import random
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from toml_tables import MESSAGES

import pretrain_gpt
from megalite.common import environment
from megalite.config import cli
from megalite.config.megatron_flags import DEPENDENT, NO_EFFECT, REFUSED, WARNED, classify_flags, known_flags
from megalite.config.option import flag_name, flags_of, type_name
from megalite.config.options import SECTIONS, ConfigError, iter_options
from megalite.models.families import PRESETS

ROOT = Path(__file__).resolve().parents[2]
GOOD = """--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 --global-batch-size 16
 --train-iters 10 --lr 1e-3 --mock-data --vocab-size 100""".split()


def list_problems(argv: list[str], world: int = 1) -> list[str]:
    try:
        cli.parse_config(argv, PRESETS, world=lambda config: world)
    except ConfigError as error:
        return error.problems
    return []


ON = ["--bf16", "--bf16 true", "--bf16=1", "--no-bf16=false"]
OFF = ["--bf16 --no-bf16", "--disable-bf16", "--bf16=false", "--bf16 False", "--preset tiny --bf16 off"]


@pytest.mark.parametrize("flags", [*ON, *OFF])
def test_switch_has_both_spellings_and_takes_a_value(flags: str) -> None:
    assert cli.read([*GOOD, *flags.split()], PRESETS)[0].precision.bf16 is (flags in ON)


def test_flag_can_switch_off_a_switch_of_the_config_file(tmp_path: Path) -> None:
    switches = [f for _, f in iter_options() if type_name(f) == "bool"]
    assert len(switches) > 20
    for f in switches:
        for flag, value in flags_of(f):
            assert cli.parse_args([flag]).values[f.name] is value
            assert cli.parse_args([f"{flag}=false"]).values[f.name] is not value
        assert {value for _, value in flags_of(f)} == {True, False}
    path = tmp_path / "run.toml"
    path.write_text("bf16 = true\nno_save_optim = true\nsave = 'x'\n")
    config, _ = cli.read([*GOOD, "--config", str(path), "--no-bf16", "--save-optim"], PRESETS)
    assert (config.precision.bf16, config.checkpoint.no_save_optim) == (False, False)


def test_underscores_and_short_names_are_taken() -> None:
    flags = "--tp 2 --pp=2 --dp 3 --cp 1 --log_interval 7 --swiglu".split()
    config, _ = cli.read([*GOOD, *flags], PRESETS)
    parallel = config.parallel
    assert (
        parallel.tensor_model_parallel_size,
        parallel.pipeline_model_parallel_size,
        parallel.data_parallel_size,
    ) == (2, 2, 3)
    assert config.log.log_interval == 7 and config.model.activation == "swiglu"
    assert cli.read([*GOOD, "--preset", "tiny", "--swiglu=false"], PRESETS)[0].model.activation != "swiglu"
    checkpoint_flag = "--use-checkpoint-opt_param-scheduler"
    assert not any("unknown" in line for line in list_problems([*GOOD, "--load", "x", checkpoint_flag]))


def test_dp_sets_the_number_of_ranks(capsys: pytest.CaptureFixture[str]) -> None:
    argv = [*GOOD, "--tp", "2", "--dp", "4"]
    assert list_problems(argv, 8) == []
    problem = "data_parallel_size=4 x tp 2 x pp 1 is not the world size 2; start 8 ranks, or leave it out"
    assert list_problems(argv, 2) == [problem]
    assert pretrain_gpt.main([*argv, "--dry-run"]) == 0 and "dp 4" in capsys.readouterr().out


SUGGESTIONS: dict[str, str] = MESSAGES["suggestions"]


@pytest.mark.parametrize("flag", SUGGESTIONS)
def test_unknown_flag_suggests_a_near_spelling(flag: str) -> None:
    (problem,) = list_problems([*GOOD, flag, "3"])
    assert problem.startswith(f"unknown flag {flag}; {SUGGESTIONS[flag]}")


@pytest.mark.parametrize("flag", ["--deepspeed", "--ds-config=x.json", "--embed-layernorm", "--patch-tokenizer-type=x"])
def test_flags_of_other_programs_are_recognized(flag: str) -> None:
    (problem,) = list_problems([*GOOD, flag])
    assert re.match(rf"{flag.partition('=')[0]}: a flag of (DeepSpeed|BLOOM's fork|Pai-Megatron-Patch)", problem)


@settings(max_examples=200)
@given(
    st.lists(st.sampled_from([*MESSAGES["argument_errors"].items()]), min_size=1, max_size=8, unique=True),
    st.randoms(use_true_random=False),
)
def test_all_problems_are_listed_at_once(faults: list[tuple[str, str]], order: random.Random) -> None:
    parts = [flags.split() for flags, _ in faults]
    order.shuffle(parts)
    problems = list_problems([*GOOD, *(word for part in parts for word in part)])
    reported = {flags: [p for p in problems if message in p] for flags, message in faults}
    # these have more than one problem in a world of one rank
    clashes = {"--tp 3", "--dp 5", "--context-parallel-size 3", "--global-batch-size 7"}
    assert all(reported.values()), (reported, problems)
    if not clashes & reported.keys():
        assert len(problems) == len(faults), problems


FLAGS = sorted({flag for _, f in iter_options() for flag, _ in flags_of(f)} | known_flags().keys())
ODD_VALUES = ["", "\x00", *"0 -1 2 1e300 nan x true [1]*9 - -- --= = 1,2 '99,1,0' tiny".split()]


@settings(max_examples=200)
@given(st.lists(st.one_of(st.sampled_from(FLAGS), st.sampled_from(ODD_VALUES), st.text(max_size=6)), max_size=24))
def test_command_line_never_ends_in_a_traceback(argv: list[str]) -> None:
    for line in list_problems([*GOOD, *argv], 4):
        assert line and "\n" not in line


def test_unsupported_feature_is_named_once() -> None:
    flags = [("--moe-token-drop-policy", ["probs"]), ("--moe-pad-expert-input-to-capacity", [])]
    alone = classify_flags(flags)
    assert not alone.problems and len(alone.notes) == 1 and "only with --" in alone.notes[0]
    with_capacity = classify_flags(
        [*flags, ("--moe-expert-capacity-factor", ["1"]), ("--moe-expert-rank-capacity-factor", ["2"])]
    )
    problem = "--moe-expert-capacity-factor, --moe-expert-rank-capacity-factor: no token is dropped"
    problem += ", however many an expert receives; leave it out"
    assert with_capacity.problems == [problem] and not with_capacity.notes
    assert not classify_flags([("--moe-input-jitter-eps", ["0"]), ("--main-grads-dtype", ["fp32"])]).problems
    assert [bool(classify_flags([("--error-injection-rate", [rate])]).warnings) for rate in "30"] == [True, False]


def test_megatron_flag_table_is_complete() -> None:
    known = known_flags()
    others = ("gone from Megatron-LM", "other programs of Megatron-LM", "DeepSpeed", "forks of Megatron-LM")
    parser = [f for f in known.values() if f.group not in (*others, "spellings of other programs")]
    assert len(parser) == 874  # spellings of its parser at d98e8a64 without --help, - and _ taken as one
    for name, flag in known.items():
        assert flag.group and (flag.reason or flag.verdict in (DEPENDENT, "+")), name
        if flag.verdict == DEPENDENT:
            assert any(f.feature == flag.feature and f.verdict in (REFUSED, WARNED) for f in known.values()), name
        if flag.verdict == NO_EFFECT:
            assert "yet" not in flag.reason, f"{name}: a missing feature must be refused or warned about"


def test_missing_files_are_in_the_list_of_problems(tmp_path: Path) -> None:
    file_flags = ["--data-path", "0.3", str(tmp_path / "a"), "0.7", str(tmp_path / "b")]
    file_flags += ["--tokenizer-type", "Llama2Tokenizer", "--tokenizer-model", str(tmp_path / "none.model")]
    argv = [*(word for word in GOOD if word != "--mock-data"), *file_flags, "--run-dir", str(tmp_path / "run")]
    program = "import sys, pretrain_gpt as p; c = p.main(sys.argv[1:]); print('torch' in sys.modules); sys.exit(c)"
    command = [sys.executable, "-c", program, *argv]
    for extra, code, lines in (([], 3, 3), (["--bf16", "--fp16", "--lr", "x"], 2, 5)):
        run = subprocess.run([*command, *extra], cwd=ROOT, capture_output=True, text=True, timeout=60)
        errors = run.stderr.splitlines()
        assert run.returncode == code and len(errors) == lines, run.stderr
        assert run.stdout == ("False\n" if code == 3 else ""), "torch takes seconds to import"
        assert sum("No such file or directory" in line for line in errors) == 3
    assert not (tmp_path / "run").exists()


def test_ignored_flag_that_changes_the_training_is_a_warning() -> None:
    argv = [*GOOD, "--load", "x"]
    config = cli.read([*argv, "--override-lr-scheduler"], PRESETS)[0]  # the spelling of older scripts
    assert config.checkpoint.override_opt_param_scheduler
    config = cli.read([*argv, "--use-checkpoint-lr-scheduler"], PRESETS)[0]
    assert config.checkpoint.use_checkpoint_opt_param_scheduler
    assert "main weights start as the weights" in list_problems([*argv, "--load-main-params-from-ckpt"])[0]
    assert "--position-embedding-type" in list_problems([*GOOD, "--rope-type", "yarn"])[0]
    assert list_problems([*GOOD, "--rope-type", "rope"]) == []
    assert cli.parse_config([*GOOD, "--ddp-reduce-scatter-with-fp32-accumulation"], PRESETS).warnings
    spellings = (
        ([], "auto"),
        (["--async-save"], "on"),
        (["--async-save", "--bf16"], "on"),
        (["--async-save=true"], "on"),
        (["--async-save", "off"], "off"),
        (["--async-save=auto"], "auto"),
        (["--no-async-save"], "off"),
    )
    for flags, async_save in spellings:
        assert cli.read([*GOOD, *flags], PRESETS)[0].checkpoint.async_save == async_save


def test_notes_are_printed_by_one_rank(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys) -> None:
    argv = [*GOOD, "--sequence-parallel", "--dry-run", "--save", str(tmp_path)]
    rank_env = {"MASTER_ADDR": "localhost", "MASTER_PORT": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}
    note_counts = []
    for rank in "01":
        for name, value in {**rank_env, "RANK": rank, "LOCAL_RANK": rank}.items():
            monkeypatch.setenv(name, value)
        assert pretrain_gpt.main(argv) == 0
        note_counts.append(capsys.readouterr().err.count("note: "))
    assert note_counts[0] > 0 and note_counts[1] == 0


def test_secrets_are_not_repeated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Under a scheduler the console is a file that others can read."""
    (tmp_path / "odd.toml").write_text('"\\u001b[2Jkey" = 1\n')
    url = "s3://KEY:SECRET@b/x?token=SECRET"
    with pytest.raises(SystemExit, match="2"):
        cli.parse_config_or_exit([*GOOD, url, "--preset", url, "--config", str(tmp_path / "odd.toml")], PRESETS)
    with pytest.raises(SystemExit, match="2"):
        cli.parse_config_or_exit([*GOOD, "--config", url], PRESETS)
    cli.parse_config_or_exit([*GOOD, "--load", url, "--load", "runs/x"], PRESETS)
    stderr = capsys.readouterr().err
    assert stderr.count("s3://***@b/x?***") == 4 and "SECRET" not in stderr
    assert "\x1b" not in stderr and "\\x1b[2Jkey" in stderr


# ---- --help: the first page, a group, all options


def flags_in(text: str) -> set[str]:
    return set(re.findall(r"^  (--[\w-]+)", text, re.MULTILINE))


def run_program(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "pretrain_gpt.py", *args], cwd=ROOT, capture_output=True, text=True)


def test_help_first_page() -> None:
    page = cli.help_text("", sorted(PRESETS))
    options_text, _, examples_text = page.partition("examples:")
    first = cli.HELP_PAGES["first"].split()
    assert flags_in(options_text) == {flag_name(name) for name in first}
    assert len(first) == 15 and "--tensor-model-parallel-size INT, --tp INT" in options_text
    examples = re.findall(r"^  # .*\n((?:.*\\\n)*.*)$", examples_text, re.MULTILINE)
    assert len(examples) == 3
    for example in examples:
        argv = shlex.split(example.replace("\\\n", " "))
        cli.read(argv[next(i for i, word in enumerate(argv) if word.startswith("--")) :], PRESETS)  # raises if wrong
    assert set(re.findall(r"--help (\w+)", examples_text)) == {*SECTIONS, "all"} == {*cli.HELP_PAGES["groups"], "all"}


def test_help_lists_each_flag_in_its_group_and_in_all() -> None:
    every = flags_in(cli.help_text("all", ["one"]))
    pages = {section: flags_in(cli.help_text(section, ["one"])) for section in SECTIONS}
    assert every == set().union(*pages.values()) and {"--preset", "--config"} <= every
    for section, f in iter_options():
        assert flags_of(f)[0][0] in pages[section]
    assert {"--tensor-model-parallel-size", "--no-overlap-grad-reduce"} <= {
        *run_program("--help", "all").stdout.split()
    }


PAGES = {"": None, "--lr 3": None, "--help": "", "-h": "", "--help data": "data", "--help=data": "data"}


@pytest.mark.parametrize("line,page", [*PAGES.items(), ("--lr 3 --help --bf16", ""), ("--lr 3 -h all --bf16", "all")])
def test_help_argument_selects_the_page(line: str, page: str | None) -> None:
    assert cli.requested_help_topic(line.split()) == page


def test_help_unknown_page_suggests_the_nearest() -> None:
    result = run_program("--help", "dta")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "pretrain_gpt.py: --help dta is not a page of the help; did you mean data?\n"
    assert "give one of model, parallel, train" in run_program("--help", "xyz").stderr


def test_help_needs_few_modules_and_no_torch() -> None:
    """It takes 0.2 to 0.3 s, most of it for imports."""
    argv = [sys.executable, "-X", "importtime", "pretrain_gpt.py", "--help"]
    imported = subprocess.run(argv, cwd=ROOT, capture_output=True, text=True).stderr
    assert "megalite.config.cli" in imported and not re.search(r"\| +(torch|numpy|rich)\b", imported)
    assert imported.count("import time:") < 300  # 213 with Python 3.11, 99 of them its own


@pytest.mark.parametrize(
    ("text", "threads"), [("two", None), ("0", None), ("-1", None), ("3", 3), ("4,2", 4), ("", None)]
)
def test_invalid_omp_num_threads_is_reported(text: str, threads: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", text)
    warning = f"OMP_NUM_THREADS={text} is not a number of threads, and has no effect: set a number of 1 or more"
    assert environment.threads_of(text) == threads
    assert environment.env_warnings() == ([warning] if text and threads is None else [])
