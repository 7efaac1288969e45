"""What newcomers get wrong, typed as they type it: the answer names the value, the rule and the remedy."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import programs
import pytest
from train_cases import SMALL, signalled

ROOT = Path(__file__).resolve().parent.parent
MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 8 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 2 --train-iters 4 --eval-iters 0 --lr 1e-3 --device cpu"
)
GOOD = f"{MODEL} --mock-data --vocab-size 256 --dry-run"
DATA = f"{MODEL} --vocab-size 256 --dry-run"
TOML = """
[model]
num_layers = 2
hidden_size = 32
num_attention_heads = 8
seq_length = 32
max_position_embeddings = 32
[train]
micro_batch_size = 2
train_iters = 4
[optim]
lr = 1e-3
[precision]
bf16 = true
[data]
mock_data = true
vocab_size = 256
"""


@dataclass(frozen=True)
class Mistake:
    """`said`: each is in the answer; `lines`: more than these is noise, None: a run or a plan follows."""

    line: str
    code: int
    said: tuple[str, ...]
    lines: int | None = 1


USAGE, PREFLIGHT = 2, 3
MISTAKES = {
    "a misspelt flag": Mistake(
        f"{GOOD} --tensor-model-paralel-size 2",
        USAGE,
        ("--tensor-model-paralel-size", "unknown flag", "did you mean --tensor-model-parallel-size?"),
    ),
    "three at once": Mistake(
        f"{GOOD} --train-itres 9 --lr abc --micro-batch-size x",
        USAGE,
        ("did you mean --train-iters?", "lr='abc' is not a float", "micro_batch_size='x' is not an int; write it as"),
        lines=3,
    ),
    "tp": Mistake(
        f"{GOOD} --tp 2", USAGE, ("world size 1 is not a multiple of tp 2", "start a multiple of it, as with --nproc 2")
    ),
    "learning rate": Mistake(f"{GOOD} --learning-rate 3e-4", USAGE, ("unknown flag --learning-rate; use --lr",)),
    "epochs": Mistake(f"{GOOD} --epochs 3", USAGE, ("unknown flag --epochs; use --train-iters or --train-samples",)),
    "model": Mistake(f"{GOOD} --model llama", USAGE, ("unknown flag --model; use --preset NAME, or --load DIR",)),
    "underscores": Mistake(
        f"{GOOD} --save_interval 3", 0, ("save_interval=3 has no effect without --save",), lines=None
    ),
    "tp that does not divide": Mistake(
        f"{GOOD} --tp 3 --nproc 3",
        USAGE,
        ("tensor_model_parallel_size=3 does not divide num_attention_heads=8: use 1, 2, 4 or 8",),
        lines=4,
    ),
    "world": Mistake(
        f"{GOOD} --tp 2 --nproc 3", USAGE, ("world size 3 is not a multiple of tp 2 x pp 1 = 2; start a multiple",)
    ),
    "global batch": Mistake(
        f"{GOOD} --global-batch-size 7", USAGE, ("global_batch_size=7 is not a multiple of", "= 2: use 6 or 8")
    ),
    "positions": Mistake(
        f"{GOOD} --seq-length 5000",
        USAGE,
        ("max_position_embeddings=32 is below seq_length=5000; make it at least that",),
    ),
    "two precisions": Mistake(f"{GOOD} --bf16 --fp16", USAGE, ("bf16 and fp16 exclude each other; give one",)),
    "a switch with a value": Mistake(f"{GOOD} --bf16 false", 0, ("precision         fp32",), lines=None),
    "a switch with =": Mistake(f"{GOOD} --bf16=true", 0, ("precision         bf16",), lines=None),
    "neither true nor false": Mistake(
        f"{GOOD} --bf16=maybe", USAGE, ("--bf16=maybe is neither true nor false; give one, or nothing behind it",)
    ),
    "a stray word": Mistake(
        f"{GOOD} stray", USAGE, ("'stray' behind --dry-run; a flag stands before its value, as in --lr 3e-4",)
    ),
    "a switch off over TOML": Mistake(
        "--config run.toml --no-bf16 --device cpu --dry-run", 0, ("precision         fp32",), lines=None
    ),
    "too many processes": Mistake(
        f"{MODEL} --mock-data --vocab-size 256 --nproc 4000", USAGE, ("nproc=4000 is more than 8 x", "start fewer")
    ),
    "no such TOML": Mistake(
        "--config rum.toml", USAGE, ("config='rum.toml' cannot be read (No such file or directory); give a TOML file",)
    ),
    "broken TOML": Mistake(
        "--config broken.toml", USAGE, ("config='broken.toml' is not TOML", "at line 2", "mend that line")
    ),
    "a misspelt key": Mistake(
        "--config misspelt.toml",
        USAGE,
        ("config='misspelt.toml': unknown key num_layer in [model]; did you mean num_layers?",),
    ),
    "preset": Mistake(
        "--preset gpt2-smal --micro-batch-size 2 --train-iters 4 --lr 1e-3 --mock-data",
        USAGE,
        ("preset='gpt2-smal' is unknown; use one of gpt2, gpt2-large",),
    ),
    "experts": Mistake(
        f"{GOOD} --num-experts 8", USAGE, ("--num-experts: mixtures of experts are not supported", "train a dense")
    ),
    "context parallel": Mistake(
        f"{GOOD} --context-parallel-size 2", USAGE, ("context_parallel_size=2 is not supported yet; use 1",)
    ),
    "fp8": Mistake(f"{GOOD} --fp8-format hybrid", USAGE, ("--fp8-format: FP8", "not supported", "use --bf16")),
    "DeepSpeed's JSON": Mistake(
        "--config ds.json",
        USAGE,
        (
            "config='ds.json' is JSON (DeepSpeed); write it as TOML, a line name = value for each option",
            "; train_micro_batch_size_per_gpu is --micro-batch-size",
        ),
    ),
    "Accelerate's YAML": Mistake(
        "--config fsdp.yaml",
        USAGE,
        ("config='fsdp.yaml' is YAML (Accelerate); write it as TOML", "is --bf16 or --fp16"),
    ),
    "values that are misspelt, or of others": Mistake(
        f"{GOOD} --lr-decay-style cosin --activation gleu --normalization rms_norm --optimizer lion --hidden-size 100 "
        "--position-embedding-type rope --ddp 4",
        USAGE,
        (
            "lr_decay_style='cosin' is not one of constant, linear, cosine, inverse-square-root, WSD; did you mean cosine?",
            "activation='gleu' is not one of gelu, gelu_erf, squared_relu, swiglu; did you mean gelu?",
            "normalization='rms_norm' is not one of LayerNorm, RMSNorm; did you mean RMSNorm?",
            "optimizer=lion is not supported: there is AdamW and SGD; use adam",
            "hidden_size=100 is not a multiple of num_attention_heads=8: use 96 or 112, or set --kv-channels",
            "unknown flag --ddp; use --nproc N; ranks beyond tp x pp are data parallel",
        ),
        lines=6,
    ),
    "a flag that is given twice": Mistake(
        f"{GOOD} --lr 3e-4 --bf16 --bf16", 0, ("note: lr is given twice, as 1e-3 and as 3e-4; the last",), lines=None
    ),
    "a value that the shell has split": Mistake(
        f"{GOOD} --step-batch-size-schedule 0:6 250B:1536",
        USAGE,
        (
            "'250B:1536' behind --step-batch-size-schedule 0:6; quote a value",
            "--step-batch-size-schedule '0:6 250B:1536'",
        ),
    ),
    "a preset that is nearly one": Mistake(
        "--preset llama3-8 --micro-batch-size 2 --train-iters 4 --lr 1e-3 --mock-data",
        USAGE,
        ("preset='llama3-8' is unknown; did you mean llama3-8b?",),
    ),
    "a schedule of batch sizes": Mistake(
        f"{GOOD} --step-batch-size-schedule 2,1K:4",
        USAGE,
        ("step_batch_size_schedule='2,1K:4' has '2'; write TOKENS:SIZE, as 0:768 250B:1536",),
    ),
    "gpu": Mistake(f"{GOOD} --device gpu", USAGE, ("device=gpu is not supported: torch calls it cuda; use cuda",)),
    "a wrong prefix": Mistake(
        f"{DATA} --data-path mine",
        PREFLIGHT,
        ("mine.idx: No such file or directory; did you mean mine_text_document?",),
    ),
    "a wrong folder": Mistake(
        f"{DATA} --data-path data/mine",
        PREFLIGHT,
        ("data/mine.idx: No such file", "the directory data does not exist; give the prefix of a .bin/.idx pair"),
    ),
    "a suffix": Mistake(
        f"{DATA} --data-path mine_text_document.bin",
        PREFLIGHT,
        ("mine_text_document.bin: the prefix of a pair is given without suffix; give mine_text_document",),
    ),
    "no vocabulary": Mistake(
        f"{MODEL} --mock-data", USAGE, ("vocab_size is not set; give a tokenizer", "or --vocab-size")
    ),
    "a tokenizer of another kind": Mistake(
        f"{MODEL} --dry-run --data-path mine_text_document --tokenizer-type HuggingFaceTokenizer --tokenizer-model x.model",
        PREFLIGHT,
        ("tokenizer_model=x.model is not a tokenizer.json", "give --tokenizer-type SentencePieceTokenizer"),
    ),
    "another tokenizer than the data's": Mistake(
        f"{MODEL} --dry-run --data-path mine_text_document --tokenizer-type HuggingFaceTokenizer "
        "--tokenizer-model words/tokenizer.json",
        PREFLIGHT,
        (
            "mine_text_document: made with ByteTokenizer",
            "but this run has words/tokenizer.json",
            "or preprocess it again",
        ),
    ),
    "a split": Mistake(
        f"{GOOD} --split a,b", USAGE, ("split='a,b' is not up to three numbers", "use for example 969,30,1")
    ),
    "an unwritable folder": Mistake(
        f"{MODEL} --mock-data --vocab-size 256 --save /proc/nope --save-interval 2",
        PREFLIGHT,
        ("save='/proc/nope' cannot be written (", "give --save a writable directory"),
        lines=2,
    ),
    "a save without interval": Mistake(
        f"{GOOD} --save kept",
        0,
        ("save=kept without --save-interval saves only when the run ends or stops; a crash loses all",),
        lines=None,
    ),
    "too large": Mistake(
        f"{MODEL} --mock-data --vocab-size 256 --num-layers 1000 --hidden-size 16384 --num-attention-heads 128",
        PREFLIGHT,
        (
            "GiB per rank, the memory is",
            "use more ranks (tensor, pipeline or data parallel), --bf16 or a smaller model",
        ),
    ),
    "a vocabulary below the tokenizer's": Mistake(
        f"{DATA} --vocab-size 100 --data-path mine_text_document --tokenizer-type ByteTokenizer",
        PREFLIGHT,
        ("vocab_size=100 is below the 257 of ByteTokenizer; leave it out",),
    ),
    "a preset's vocabulary": Mistake(
        f"--preset gpt2 {MODEL} --data-path mine_text_document --tokenizer-type ByteTokenizer --dry-run",
        0,
        ("vocabulary 257",),
        lines=None,
    ),
}
if importlib.util.find_spec("wandb") is None:
    MISTAKES["no wandb"] = Mistake(
        f"{MODEL} --mock-data --vocab-size 256 --wandb-project mine",
        PREFLIGHT,
        ("wandb_project='mine' needs the package wandb; pip install wandb (or megalite[wandb])",),
    )


def typed(line: str, folder: Path, program: str = "pretrain_gpt.py") -> subprocess.CompletedProcess[str]:
    words = [sys.executable, str(ROOT / program), *line.split()]
    return programs.run(words, cwd=folder, capture_output=True, text=True, timeout=60)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the newcomer types: a TOML file in three states, a data set, two tokenizers."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "run.toml").write_text(TOML)
    (folder / "broken.toml").write_text("[model]\nnum_layers 2\n")
    (folder / "misspelt.toml").write_text(TOML.replace("num_layers", "num_layer"))
    (folder / "ds.json").write_text('{"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}}')
    (folder / "fsdp.yaml").write_text("compute_environment: LOCAL_MACHINE\nmixed_precision: bf16\n")
    (folder / "x.model").write_bytes(bytes(range(128, 256)))
    (folder / "words").mkdir()
    words = {"type": "WordLevel", "vocab": {"a": 0, "<|endoftext|>": 1}, "unk_token": "a"}
    ends = {"id": 1, "content": "<|endoftext|>", "special": True}
    ends |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    whole = {"version": "1.0", "added_tokens": [ends], "model": words}
    (folder / "words/tokenizer.json").write_text(json.dumps(whole))
    (folder / "t.jsonl").write_text('{"text": "the quick brown fox jumps over a lazy dog, and so on"}\n' * 50)
    line = "--input t.jsonl --output-prefix mine --tokenizer-type ByteTokenizer --append-eod --workers 1"
    made = typed(line, folder, "tools/preprocess_data.py")
    assert made.returncode == 0, made.stderr
    return folder


@pytest.mark.parametrize("name", MISTAKES)
def test_the_answer_to_a_mistake(name: str, home: Path) -> None:
    wrong = MISTAKES[name]
    done = typed(wrong.line, home)
    answer = done.stdout + done.stderr
    assert done.returncode == wrong.code, answer
    assert "Traceback" not in answer
    for part in wrong.said:
        assert part in answer
    if wrong.lines is not None:
        told = [line for line in answer.splitlines() if "is given twice" not in line]  # here and in the line before
        assert len(told) <= wrong.lines


@pytest.fixture(scope="module")
def saved(home: Path) -> Path:
    done = typed(f"{MODEL} --mock-data --vocab-size 256 --save kept --save-interval 4", home)
    assert done.returncode == 0, done.stderr
    return home


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        (
            "--load kept --hidden-size 64",
            USAGE,
            ["hidden_size: 64 here, 32 in the", "--use-checkpoint-args takes them"],
        ),
        ("--load kept --train-iters 6 --bf16", USAGE, ["decay in samples=12, but 8", "--override-opt-param-scheduler"]),
        ("--load kpet", 0, ["load='kpet' holds no checkpoint, but kept does", "--exit-on-missing-checkpoint stops it"]),
        ("--load kpet --exit-on-missing-checkpoint", USAGE, ["load='kpet' holds no checkpoint, but kept does"]),
        ("--device cuda", USAGE, ["device=cuda but torch sees no card; use --device cpu"]),
    ],
)
def test_the_answer_to_a_wrong_resume(flags: str, code: int, said: list[str], saved: Path) -> None:
    if "cuda" in flags:
        import torch

        if torch.cuda.is_available():
            return
    done = typed(f"{MODEL} --mock-data --vocab-size 256 {flags}", saved)
    answer = done.stdout + done.stderr
    assert done.returncode == code and "Traceback" not in answer, answer
    assert code == 0 or len(answer.splitlines()) <= 10
    for part in said:
        assert part in answer


@pytest.mark.parametrize("name,saves", [("SIGINT", False), ("SIGUSR1", True)])
def test_a_run_that_is_stopped_says_where_and_how_to_go_on(name: str, saves: bool, tmp_path: Path) -> None:
    flags = [*SMALL, "--train-iters", "100000", "--log-interval", "5"]
    flags += ["--save", str(tmp_path), "--save-interval", "50000", "--exit-signal", "SIGUSR1"] if saves else []
    code, out, err = signalled(*flags, number=getattr(signal, name))
    assert "Traceback" not in out + err and code == (75 if saves else 130)
    if saves:
        assert f"to go on the same command with --load {tmp_path}" in " ".join(out.split())
    else:
        assert "interrupted at step" in err and "--save DIR keeps what a run has done" in err


def test_an_odd_environment_is_no_traceback(tmp_path: Path) -> None:
    """A TMPDIR beyond what a socket's path may have, and every warning an error, of Python's own too."""
    long = tmp_path / ("x" * 120)
    long.mkdir()
    words = [sys.executable, str(ROOT / "pretrain_gpt.py"), *MODEL.split(), *"--mock-data --vocab-size 256".split()]
    env = {**os.environ, "TMPDIR": str(long), "PYTHONWARNINGS": "error", "OMP_NUM_THREADS": "1"}
    flags = "--nproc 2 --save s".split()
    done = programs.run([*words, *flags], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0 and done.stderr.startswith("note: save=s without"), done.stderr
    assert len(done.stderr.splitlines()) == 1 and not [*long.iterdir()], done.stderr


@pytest.mark.parametrize("words", [["pretrain_gpt.py"], ["-m", "megalite", "train"]])
def test_ctrl_c_among_the_imports_is_no_traceback(words: list[str], tmp_path: Path) -> None:
    """`-X importtime` tells when the first module of the package has come: others follow, torch among them."""
    line = [sys.executable, "-X", "importtime", *words, *MODEL.split(), "--mock-data", "--vocab-size", "256"]
    process = programs.Popen([*line, "--run-dir", str(tmp_path)], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for said in process.stderr:
        if "megalite.config" in said:
            process.send_signal(signal.SIGINT)
            break
    assert "Traceback" not in process.stderr.read()
    assert process.wait() in (130, -signal.SIGINT)
