"""What newcomers get wrong, typed as they type it: the answer names the value, the rule and the remedy."""

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

ROOT = Path(__file__).resolve().parent.parent
MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 8 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 2 --train-iters 4 --eval-iters 0 --lr 1e-3 --device cpu"
)
FREE = f"{MODEL} --mock-data --vocab-size 256"
GOOD, DATA = f"{FREE} --dry-run", f"{MODEL} --vocab-size 256 --dry-run"
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


def usage(line: str, *said: str, lines: int = 1) -> Mistake:
    return Mistake(line, 2, said, lines)


def preflight(line: str, *said: str, lines: int = 1) -> Mistake:
    return Mistake(line, 3, said, lines)


PAIR = "--data-path mine_text_document"
JSON = "--tokenizer-type HuggingFaceTokenizer --tokenizer-model"
# One of each kind, as the program says it: tests/config has every message of the command line, in this process.
MISTAKES = {
    "ten at once": usage(
        f"{GOOD} --train-itres 9 --lr abc --micro-batch-size x --hidden-size 100 --lr-decay-style cosin --activation gleu "
        "--normalization rms_norm --optimizer lion --position-embedding-type rope --ddp 4 "
        "--step-batch-size-schedule 0:6 250B:1536",
        *("did you mean --train-iters?", "lr='abc' is not a float", "micro_batch_size='x' is not an int; write it as"),
        "lr_decay_style='cosin' is not one of constant, linear, cosine, inverse-square-root, WSD; did you mean cosine?",
        "activation='gleu' is not one of gelu, gelu_erf, squared_relu, swiglu; did you mean gelu?",
        "normalization='rms_norm' is not one of LayerNorm, RMSNorm; did you mean RMSNorm?",
        "optimizer=lion is not supported: there is AdamW, SGD, Muon, LAMB and LARS; use adam or muon",
        "hidden_size=100 is not a multiple of num_attention_heads=8: use 96 or 112, or set --kv-channels",
        "unknown flag --ddp; use --nproc N; ranks beyond tp x pp are data parallel",
        "'250B:1536' after --step-batch-size-schedule 0:6; quote a value",
        lines=10,
    ),
    "tp": usage(
        f"{GOOD} --tp 2", "world size 1 is not a multiple of tp 2", "start a multiple of it, as with --nproc 2"
    ),
    "a stray word": usage(f"{GOOD} stray", "'stray' after --dry-run; a flag stands before its value, as in --lr 3e-4"),
    "too many processes": usage(f"{FREE} --nproc 4000", "nproc=4000 is more than 8 x", "start fewer"),
    "DeepSpeed's JSON": usage(
        "--config ds.json",
        "config='ds.json' is JSON (DeepSpeed); write it as TOML, a line name = value for each option",
        "; train_micro_batch_size_per_gpu is --micro-batch-size",
    ),
    "Accelerate's YAML": usage("--config fsdp.yaml", "is YAML (Accelerate); write it as TOML", "is --bf16 or --fp16"),
    "a flag that is given twice": Mistake(
        f"{GOOD} --lr 3e-4 --save_interval 3",
        0,
        ("note: lr is given twice, as 1e-3 and", "no effect without --save"),
        None,
    ),
    "a wrong prefix": preflight(
        f"{DATA} --data-path mine", "mine.idx: No such file", "did you mean mine_text_document?"
    ),
    "no vocabulary": usage(f"{MODEL} --mock-data", "vocab_size is not set; give a tokenizer", "or --vocab-size"),
    "a tokenizer of another kind": preflight(
        f"{MODEL} --dry-run {PAIR} {JSON} x.model",
        *("tokenizer_model=x.model is not a tokenizer.json", "give --tokenizer-type SentencePieceTokenizer"),
    ),
    "another tokenizer than the data's": preflight(
        f"{MODEL} --dry-run {PAIR} {JSON} words/tokenizer.json",
        *("made with ByteTokenizer", "but this run has words/tokenizer.json", "or preprocess it again"),
    ),
    "an unwritable folder": preflight(
        f"{FREE} --save /proc/nope --save-interval 2",
        "save='/proc/nope' cannot be written (",
        "a writable directory",
        lines=2,
    ),
    "too large": preflight(
        f"{FREE} --num-layers 1000 --hidden-size 16384 --num-attention-heads 128",
        *(
            "GiB per rank, the memory is",
            "use more ranks (tensor, pipeline or data parallel), --bf16 or a smaller model",
        ),
    ),
    "a vocabulary below the tokenizer's": preflight(
        f"{DATA} --vocab-size 100 {PAIR} --tokenizer-type ByteTokenizer",
        "vocab_size=100 is below the 257 of ByteTokenizer",
    ),
    "a preset's vocabulary": Mistake(
        f"--preset gpt2 {MODEL} {PAIR} --tokenizer-type ByteTokenizer --dry-run", 0, ("vocabulary 257",), None
    ),
}
if importlib.util.find_spec("wandb") is None:
    MISTAKES["no wandb"] = preflight(
        f"{FREE} --wandb-project mine",
        "wandb_project='mine' needs the package wandb; pip install wandb (or megalite[wandb])",
    )


def typed(
    line: str, folder: Path, program: str = "pretrain_gpt.py", ok: bool = False
) -> subprocess.CompletedProcess[str]:
    return programs.python(program, *line.split(), cwd=folder, ok=ok)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the newcomer types: a TOML file in three states, a data set, two tokenizers."""
    folder = tmp_path_factory.mktemp("home")
    (folder / "run.toml").write_text(TOML)
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
    typed(line, folder, "tools/preprocess_data.py", ok=True)
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
    typed(f"{FREE} --save kept --save-interval 4", home, ok=True)
    return home


@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        ("--load kept --hidden-size 64", 2, ["hidden_size: 64 here, 32 in the", "--use-checkpoint-args takes them"]),
        ("--load kept --train-iters 6 --bf16", 2, ["decay in samples=12, but 8", "--override-opt-param-scheduler"]),
        ("--load kpet", 0, ["load='kpet' holds no checkpoint, but kept does", "--exit-on-missing-checkpoint stops it"]),
        ("--device cuda", 2, ["device=cuda but torch sees no card; use --device cpu"]),
    ],
)
def test_the_answer_to_a_wrong_resume(flags: str, code: int, said: list[str], saved: Path) -> None:
    if "cuda" in flags:
        import torch

        if torch.cuda.is_available():
            return
    done = typed(f"{FREE} {flags}", saved)
    answer = done.stdout + done.stderr
    assert done.returncode == code and "Traceback" not in answer, answer
    assert code == 0 or len(answer.splitlines()) <= 10
    for part in said:
        assert part in answer


def test_an_odd_environment_is_no_traceback(tmp_path: Path) -> None:
    """A TMPDIR beyond what a socket's path may have, and every warning an error, of Python's own too."""
    long = tmp_path / ("x" * 120)
    long.mkdir()
    env = {**os.environ, "TMPDIR": str(long), "PYTHONWARNINGS": "error", "OMP_NUM_THREADS": "1"}
    done = programs.python("pretrain_gpt.py", *FREE.split(), *"--nproc 2 --save s".split(), cwd=tmp_path, env=env)
    assert done.returncode == 0 and done.stderr.startswith("note: save=s without"), done.stderr
    assert len(done.stderr.splitlines()) == 1 and not [*long.iterdir()], done.stderr


@pytest.mark.parametrize("words", [["pretrain_gpt.py"], ["-m", "megalite", "train"]])
def test_ctrl_c_among_the_imports_is_no_traceback(words: list[str], tmp_path: Path) -> None:
    """`-X importtime` tells when the first module of the package has come: others follow, torch among them."""
    line = [sys.executable, "-X", "importtime", *words, *FREE.split()]
    process = programs.Popen([*line, "--run-dir", str(tmp_path)], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    for said in process.stderr:
        if "megalite.config" in said:
            process.send_signal(signal.SIGINT)
            break
    assert "Traceback" not in process.stderr.read()
    assert process.wait() in (130, -signal.SIGINT)
