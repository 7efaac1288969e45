"""The command line: Megatron-LM's spellings, every problem at once, exit code 2, no torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from megatron_lines import LINES

from megalite import cli
from megalite.config import ConfigError, build, options, padded_vocab_size
from megalite.config_check import check
from megalite.config_toml import parse_toml, to_toml
from megalite.megatron import IGNORED, UNSUPPORTED
from megalite.models.families import PRESETS

ROOT = Path(__file__).resolve().parents[1]
GOOD = """--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --micro-batch-size 2 --global-batch-size 16
 --train-iters 10 --lr 1e-3 --mock-data --vocab-size 100"""

# flags added to GOOD -> what the one message must contain (name=value and the remedy's key word)
BAD: list[tuple[str, str]] = [
    ("--num-layers 0", "num_layers=0"),
    ("--hidden-size 65", "hidden_size=65 is not a multiple"),
    ("--tensor-model-parallel-size 3", "use 1, 2 or 4"),
    ("--tensor-model-parallel-size 0", "tensor_model_parallel_size=0"),
    ("--group-query-attention --num-query-groups 3", "num_query_groups=3 does not divide"),
    ("--num-query-groups 2", "add --group-query-attention"),
    ("--ffn-hidden-size 129 --tensor-model-parallel-size 2", "ffn_hidden_size=129"),
    ("--seq-length 31 --tensor-model-parallel-size 2", "seq_length=31"),
    ("--max-position-embeddings 16", "max_position_embeddings=16 is below"),
    ("--hidden-dropout 1.0", "hidden_dropout=1.0"),
    ("--attention-dropout 2", "attention_dropout=2.0"),
    ("--hidden-dropout -0.1", "hidden_dropout=-0.1 is negative"),
    ("--rotary-percent 0", "rotary_percent=0.0"),
    ("--rotary-percent 1.5", "rotary_percent=1.5"),
    ("--position-embedding-type rope --rotary-percent 0.2", "odd number"),
    ("--context-parallel-size 2", "context_parallel_size=2"),
    ("--pipeline-model-parallel-size 8", "is above num_layers=4"),
    ("--num-virtual-stages-per-pipeline-rank 2", "virtual pipeline stages need"),
    ("--num-layers-per-virtual-pipeline-stage 1", "virtual pipeline stages need"),
    ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 3", "does not divide the 2 layers"),
    (
        "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1 --num-virtual-stages-per-pipeline-rank 2",
        "give one",
    ),
    ("--train-samples 100", "exclude each other"),
    ("--lr-decay-samples 100", "use lr_decay_iters"),
    ("--lr-warmup-samples 100", "use lr_warmup_iters"),
    ("--lr-warmup-iters 20", "lr_warmup_iters=20 is not below"),
    ("--lr-warmup-fraction 0.1 --lr-warmup-iters 2", "give one"),
    ("--lr-warmup-fraction 1.5", "lr_warmup_fraction=1.5"),
    ("--lr-warmup-init 5", "lr_warmup_init=5.0 is above lr"),
    ("--lr-decay-style WSD --lr-wsd-decay-iters 2 --lr-warmup-fraction 0.9", "lr_wsd_decay_iters=2 is longer"),
    ("--peak-tflops 0", "peak_tflops=0 is too small"),
    ("--distributed-timeout-minutes 1e300", "longer than any collective"),
    ("--distributed-backend nccl --device cpu", "use gloo"),
    ("--distributed-backend mpi", "distributed_backend=mpi is in no torch wheel"),
    ("--keep-last 1", "keep_last=1 has no effect"),
    ("--exit-on-missing-checkpoint", "add --load"),
    ("--num-layers x", "num_layers='x' is not an int"),
    ("--min-lr 1.0", "min_lr=1.0 is above"),
    ("--lr nan", "lr=nan is not finite"),
    ("--lr inf", "lr=inf is not finite"),
    ("--lr -1", "lr=-1.0 is negative"),
    ("--lr x", "lr='x' is not a float"),
    ("--lr-decay-style WSD", "needs --lr-wsd-decay-iters"),
    ("--lr-decay-style WSD --lr-wsd-decay-iters 9 --lr-warmup-iters 2", "lr_wsd_decay_iters=9 is longer"),
    ("--lr-decay-style round", "lr_decay_style='round' is not one of"),
    ("--swiglu --hidden-size 16", "give --ffn-hidden-size"),
    ("--adam-beta1 1.0", "adam_beta1=1.0"),
    ("--adam-beta2 1.5", "adam_beta2=1.5"),
    ("--exp-avg-dtype bf16 --optimizer sgd", "exp_avg_dtype=bf16 is for the AdamW that is built in"),
    ("--exp-avg-sq-dtype fp8", "exp_avg_sq_dtype='fp8' is not one of"),
    ("--weight-decay -1", "weight_decay=-1.0"),
    ("--clip-grad -1", "clip_grad=-1.0"),
    ("--bf16 --fp16", "bf16 and fp16 exclude"),
    ("--recompute-granularity full", "needs --recompute-method"),
    ("--recompute-method block", "no effect"),
    ("--rampup-batch-size 4 4", "three numbers"),
    ("--rampup-batch-size 4 5 100", "is not reached"),
    ("--rampup-batch-size 32 4 100", "is not reached"),
    ("--save-interval 0 --save x", "save_interval=0"),
    ("--data-path x", "mock_data and data_path"),
    ("--tokenizer-type HuggingFaceTokenizer", "needs --tokenizer-model"),
    ("--tokenizer-type SentencePieceTokenizer", "needs --tokenizer-model"),
    ("--tokenizer-type GPT2BPETokenizer", "needs --vocab-file"),
    ("--tokenizer-type Magic", "tokenizer_type='Magic' is not one of"),
    ("--micro-batch-size 0", "micro_batch_size=0"),
    ("--log-interval 0", "log_interval=0"),
    ("--vocab-size 0", "vocab_size=0"),
    ("--num-layer 3", "did you mean --num-layers?"),
    ("--tensor-model-paralel-size 2", "did you mean --tensor-model-parallel-size?"),
    ("--num-experts 8", "experts are not supported"),
    ("--window-size 7", "window_size=7 is not two numbers; give LEFT,RIGHT"),
    ("--window-size 7,0,0", "window_size=7,0,0 is not two numbers"),
    ("--window-size 7,x", "window_size=['7,x'] is not an ints"),
    ("--window-size 7,1", "window_size=7,1 has 1 on the right, where a causal model sees nothing; use 7,0"),
    ("--window-size 7,-1", "window_size=7,-1 has -1 on the right"),
    ("--window-size 0,0", "window_size=0,0 leaves a token itself alone; give at least 1,0"),
    ("--window-size=-1,0", "window_size=-1,0 is no window; give at least 1,0, or leave it away"),
    ("--window-attn-skip-freq 2", "window_attn_skip_freq=2 has no effect; add --window-size"),
    ("--window-size 7,0 --window-attn-skip-freq 0", "window_attn_skip_freq=0 is below 1"),
    ("--window-size 7,0 --window-attn-skip-freq 1", "window_attn_skip_freq=1 leaves no layer with the window"),
    ("--window-size 7,0 --window-attn-skip-freq [1,0]", "has 2 numbers for 4 layers; give one for each"),
    ("--window-size 7,0 --window-attn-skip-freq [2]*4", "is neither a number nor a list of 0 and 1"),
    ("--window-size 7,0 --window-attn-skip-freq exit()", "window_attn_skip_freq=exit() is neither"),
    ("--fp8-format hybrid", "use --bf16"),
    ("--batch-size 3", "use --micro-batch-size"),
    ("--trust-remote-code", "may run code"),
    ("--preset gpt9", "preset='gpt9' is unknown"),
    ("--config /no/such.toml", "cannot be read"),
]


@pytest.mark.parametrize("flags,message", BAD, ids=[b[0] for b in BAD])
def test_a_bad_configuration_is_refused_with_value_rule_and_remedy(flags: str, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        cli.read([*GOOD.split(), *flags.split()], PRESETS)
    assert any(message in problem for problem in error.value.problems), error.value.problems
    assert all("\n" not in problem for problem in error.value.problems)


def test_a_flag_without_its_value_is_one_problem() -> None:
    with pytest.raises(ConfigError) as error:
        cli.read([*GOOD.split(), "--window-size", "-1,-1"], PRESETS)  # which looks like a flag
    (problem,) = error.value.problems
    assert "--window-size" in problem and "expected at least one argument" in problem


def test_a_save_without_an_interval_is_told_to_be_only_at_the_end() -> None:
    _, notes = cli.read([*GOOD.split(), "--save", "x"], PRESETS)
    assert notes == ["save=x without --save-interval saves only when the run ends or stops; a crash loses all"]
    assert cli.read([*GOOD.split(), "--save", "x", "--save-interval-mins", "9"], PRESETS)[1] == []


def test_all_problems_come_at_once_and_before_torch() -> None:
    flags = [*GOOD.split(), "--hidden-dropout", "3", "--min-lr", "9", "--bf16", "--fp16"]
    with pytest.raises(ConfigError) as error:
        cli.read(flags, PRESETS)
    assert len(error.value.problems) == 3
    more = ["--hidden-sise", "4", "--train-iters", "x", "--lr-decay-style", "round"]
    with pytest.raises(ConfigError) as error:
        cli.read([*flags, *more], PRESETS)
    assert len(error.value.problems) == 6
    code = (
        "import sys\nfrom megalite import cli\nfrom megalite.models.families import PRESETS\n"
        "try:\n    cli.parse(sys.argv[1:], PRESETS)\nfinally:\n    print('torch' in sys.modules)"
    )
    for options_ in ([], ["-O"]):
        words = [sys.executable, *options_, "-c", code, *flags]
        result = subprocess.run(words, capture_output=True, text=True, timeout=30, cwd=ROOT)
        assert result.returncode == 2 and result.stdout == "False\n" and result.stderr.count("pretrain_gpt.py:") == 3


@pytest.mark.parametrize("spelt", ["7,0", "(7,0)", "7 0", "(7, 0)"])
def test_a_window_is_spelt_as_megatrons_or_as_two_words(spelt: str) -> None:
    words = [spelt] if "(" in spelt else spelt.split()
    config, notes = cli.read([*GOOD.split(), "--window-size", *words, "--window-attn-skip-freq", "3"], PRESETS)
    assert config.model.windows == (8, 8, None, 8) and notes == []
    assert build(parse_toml(to_toml(config), "x")) == config
    config, notes = cli.read([*GOOD.split(), "--window-size=31,0", "--window-attn-skip-freq=[0]*2+[1]*2"], PRESETS)
    assert config.model.windows == (None, None, 32, 32)
    assert notes == ["window_size=31,0 has no effect on sequences of 32 tokens"]


@pytest.mark.parametrize("world,message", [(3, "world size 3"), (16, "use 16 or 32")])
def test_what_depends_on_the_world_size(world: int, message: str) -> None:
    config, _ = cli.read([*GOOD.split(), "--tensor-model-parallel-size", "2", "--global-batch-size", "20"], PRESETS)
    assert any(message in problem for problem in check(config, world))
    assert check(config, 4) == []


@pytest.mark.parametrize("name", sorted(LINES))
def test_megatron_lines_parse_with_notes(name: str) -> None:
    world, line = LINES[name]
    config, notes = cli.read(line.split(), PRESETS)
    assert check(config, world) == []
    assert any("--use-mcore-models is ignored" in note for note in notes)


def test_layers_of_precedence(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        'preset = "tiny"\nlr = 0.5\n[model]\nnum_layers = 3\n[train]\nmicro_batch_size = 2\ntrain_iters = 5\n'
    )
    config, _ = cli.read(["--config", str(path), "--mock-data", "--num-layers", "2"], PRESETS)
    assert (config.model.num_layers, config.model.hidden_size, config.optim.lr) == (2, 256, 0.5)
    again = build(parse_toml(to_toml(config), "x"))
    assert again == config


@pytest.mark.parametrize(
    "text,message",
    [
        ('lr = "3e-4"', "lr='3e-4' is not a float"),
        ("num_layers = 2.5", "num_layers=2.5 is not an int"),
        ("num_layers = true", "num_layers=True is not an int"),
        ("[model]\nlr = 1.0", "belongs in [optim]"),
        ("lr = 1.0\nlr = 2.0", "is not TOML"),
        ("lr = 1.0\n[optim]\nlr = 2.0", "given twice"),
        ("[modle]\nx = 1", "unknown section"),
        ("colour = 1", "unknown key colour"),
    ],
)
def test_a_bad_toml_names_the_key(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        cli.read([*[w for w in GOOD.split()], "--config", str(path)], PRESETS)
    assert message in str(error.value)


def test_a_flag_has_one_meaning() -> None:
    ours = [flag for _, f in options() for flag, _ in cli.spellings(f)]
    assert len(ours) == len(set(ours))
    assert not set(ours) & set(IGNORED) and not set(ours) & set(UNSUPPORTED) and not set(IGNORED) & set(UNSUPPORTED)


def test_the_padded_vocabulary_does_not_depend_on_usual_tp() -> None:
    assert {padded_vocab_size(50257, 128, tp) for tp in (1, 2, 4, 8, 16, 64, 128)} == {50304}
    assert padded_vocab_size(100, 1, 3) == 102


def test_documents_and_examples_are_up_to_date() -> None:
    made = subprocess.run(
        [sys.executable, "tools/document_flags.py"], capture_output=True, text=True, cwd=ROOT, timeout=30, check=True
    )
    assert made.stdout == (ROOT / "docs/flags.md").read_text(), "python tools/document_flags.py > docs/flags.md"
    worlds = {"llama2_70b_64gpu.toml": 64}
    found = sorted((ROOT / "examples").glob("*.toml"))
    assert len(found) >= 3
    for path in found:
        extra = [] if "data_path" in path.read_text() else ["--mock-data"]
        config, _ = cli.read(["--config", str(path), *extra], PRESETS)
        assert check(config, worlds.get(path.name, 1)) == []


@pytest.mark.parametrize("path", sorted(p.name for p in (ROOT / "examples").glob("*.toml")))
def test_examples_dry_run(path: str) -> None:
    words = [sys.executable, "pretrain_gpt.py", "--config", f"examples/{path}", "--dry-run"]
    text = (ROOT / "examples" / path).read_text()
    env_world = {"RANK": "0", "WORLD_SIZE": "64" if "64gpu" in path else "1", "LOCAL_RANK": "0"}
    env_world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29511", "PATH": "", "OMP_NUM_THREADS": "1"}
    if "tokenizer_model" in text:  # the quickstart's data may not be there: the plan needs only a vocabulary
        kept = [line for line in text.splitlines() if not line.startswith(("data_path", "tokenizer_", "split"))]
        copy = ROOT / "runs" / f".{path}"
        copy.parent.mkdir(exist_ok=True)
        copy.write_text("\n".join(kept).replace("[data]", "[data]\nvocab_size = 8000\nmock_data = true"))
        words[3] = str(copy)
    else:
        words += ["--mock-data"]
    result = subprocess.run(words, capture_output=True, text=True, timeout=60, cwd=ROOT, env=env_world)
    assert result.returncode == 0 and "layers per stage" in result.stdout, result.stderr
