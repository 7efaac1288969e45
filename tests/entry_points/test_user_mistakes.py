"""What newcomers get wrong, typed as they type it: the answer names the value, the rule and the remedy."""

import importlib.util
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import programs
import pytest
import toml_tables
import torch

ROOT = Path(__file__).resolve().parents[2]
MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 8 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 2 --train-iters 4 --eval-iters 0 --lr 1e-3 --device cpu"
)
FREE = f"{MODEL} --mock-data --vocab-size 256"
GOOD, DATA = f"{FREE} --dry-run", f"{MODEL} --vocab-size 256 --dry-run"
PAIR = "--data-path mine_text_document"
JSON = "--tokenizer-type HuggingFaceTokenizer --tokenizer-model"
WORDS = {"model": MODEL, "free": FREE, "good": GOOD, "data": DATA, "pair": PAIR, "json": JSON}
MISTAKES = toml_tables.read("entry_points/user_mistakes")
if torch.cuda.is_available():
    del MISTAKES["no card"]
if importlib.util.find_spec("wandb") is None:
    said = "wandb_project='mine' needs the package wandb; pip install wandb (or megalite[wandb])"
    MISTAKES["no wandb"] = {"line": "{free} --wandb-project mine", "code": 3, "lines": 1, "said": [said]}


def typed(
    line: str, folder: Path, program: str = "pretrain_gpt.py", ok: bool = False
) -> subprocess.CompletedProcess[str]:
    return programs.python(program, *line.split(), cwd=folder, ok=ok)


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the newcomer types: files of other programs, a data set, two tokenizers, a checkpoint."""
    folder = tmp_path_factory.mktemp("home")
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
    typed(f"{FREE} --save kept --save-interval 4", folder, ok=True)
    return folder


@pytest.mark.parametrize("name", MISTAKES)
def test_user_mistake_gets_its_message(name: str, home: Path) -> None:
    wrong = MISTAKES[name]
    done = typed(wrong["line"].format_map(WORDS), home)
    answer = done.stdout + done.stderr
    assert done.returncode == wrong["code"] and "Traceback" not in answer, answer
    assert all(part in answer for part in wrong["said"]), answer
    told = [line for line in answer.splitlines() if "is given twice" not in line]  # here and in the line before
    assert len(told) <= wrong.get("lines", len(told))


def test_odd_environment_gives_no_traceback(tmp_path: Path) -> None:
    """A TMPDIR beyond what a socket's path may have, and every warning an error, of Python's own too."""
    long = tmp_path / ("x" * 120)
    long.mkdir()
    env = {**os.environ, "TMPDIR": str(long), "PYTHONWARNINGS": "error", "OMP_NUM_THREADS": "1"}
    done = programs.python("pretrain_gpt.py", *FREE.split(), *"--nproc 2 --save s".split(), cwd=tmp_path, env=env)
    assert done.returncode == 0 and done.stderr.startswith("note: save=s without"), done.stderr
    assert len(done.stderr.splitlines()) == 1 and not [*long.iterdir()], done.stderr


@pytest.mark.parametrize("words", [["pretrain_gpt.py"], ["-m", "megalite", "train"]])
def test_ctrl_c_during_imports_gives_no_traceback(words: list[str], tmp_path: Path) -> None:
    """`-X importtime` tells when the first module of the package has come: others follow, torch among them."""
    line = [sys.executable, "-X", "importtime", *words, *FREE.split()]
    process = programs.Popen([*line, "--run-dir", str(tmp_path)], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    for said in process.stderr:
        if "megalite.config" in said:
            process.send_signal(signal.SIGINT)
            break
    assert "Traceback" not in process.stderr.read()
    assert process.wait() in (130, -signal.SIGINT)
