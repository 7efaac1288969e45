"""Mistakes of newcomers, typed as they type them: the message names the value, the rule and the remedy."""

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
PLACEHOLDERS = {"model": MODEL, "free": FREE, "good": GOOD, "data": DATA, "pair": PAIR, "json": JSON}
MISTAKES = toml_tables.read_table("entry_points/user_mistakes")
if torch.cuda.is_available():
    del MISTAKES["no GPU"]
if importlib.util.find_spec("wandb") is None:
    message = "wandb_project='mine' needs the package wandb; pip install wandb (or megalite[wandb])"
    MISTAKES["no wandb"] = {"line": "{free} --wandb-project mine", "code": 3, "lines": 1, "messages": [message]}


def run_program(
    line: str, directory: Path, program: str = "pretrain_gpt.py", check: bool = False
) -> subprocess.CompletedProcess[str]:
    return programs.run_python(program, *line.split(), cwd=directory, check=check)


@pytest.fixture(scope="module")
def newcomer_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with files of other programs, a data set, two tokenizers and a checkpoint."""
    directory = tmp_path_factory.mktemp("home")
    (directory / "ds.json").write_text('{"train_micro_batch_size_per_gpu": 2, "zero_optimization": {"stage": 1}}')
    (directory / "fsdp.yaml").write_text("compute_environment: LOCAL_MACHINE\nmixed_precision: bf16\n")
    (directory / "x.model").write_bytes(bytes(range(128, 256)))
    (directory / "words").mkdir()
    word_level = {"type": "WordLevel", "vocab": {"a": 0, "<|endoftext|>": 1}, "unk_token": "a"}
    end_token = {"id": 1, "content": "<|endoftext|>", "special": True}
    end_token |= dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    tokenizer = {"version": "1.0", "added_tokens": [end_token], "model": word_level}
    (directory / "words/tokenizer.json").write_text(json.dumps(tokenizer))
    (directory / "t.jsonl").write_text('{"text": "the quick brown fox jumps over a lazy dog, and so on"}\n' * 50)
    line = "--input t.jsonl --output-prefix mine --tokenizer-type ByteTokenizer --append-eod --workers 1"
    run_program(line, directory, "tools/preprocess_data.py", check=True)
    run_program(f"{FREE} --save kept --save-interval 4", directory, check=True)
    return directory


@pytest.mark.parametrize("name", MISTAKES)
def test_user_mistake_gets_its_message(name: str, newcomer_dir: Path) -> None:
    mistake = MISTAKES[name]
    done = run_program(mistake["line"].format_map(PLACEHOLDERS), newcomer_dir)
    output = done.stdout + done.stderr
    assert done.returncode == mistake["code"] and "Traceback" not in output, output
    assert all(part in output for part in mistake["messages"]), output
    # a placeholder and the line itself may give the same flag
    lines = [line for line in output.splitlines() if "is given twice" not in line]
    assert len(lines) <= mistake.get("lines", len(lines))


def test_odd_environment_gives_no_traceback(tmp_path: Path) -> None:
    """Test a TMPDIR that is too long for a socket's path, with every warning an error, Python's own too."""
    long = tmp_path / ("x" * 120)
    long.mkdir()
    env = {**os.environ, "TMPDIR": str(long), "PYTHONWARNINGS": "error", "OMP_NUM_THREADS": "1"}
    done = programs.run_python("pretrain_gpt.py", *FREE.split(), *"--nproc 2 --save s".split(), cwd=tmp_path, env=env)
    assert done.returncode == 0 and done.stderr.startswith("note: save=s without"), done.stderr
    assert len(done.stderr.splitlines()) == 1 and not [*long.iterdir()], done.stderr


@pytest.mark.parametrize("argv", [["pretrain_gpt.py"], ["-m", "megalite", "train"]])
def test_ctrl_c_during_imports_gives_no_traceback(argv: list[str], tmp_path: Path) -> None:
    """`-X importtime` prints when the first module of the package is imported; others follow, torch among them."""
    command = [sys.executable, "-X", "importtime", *argv, *FREE.split()]
    process = programs.Popen([*command, "--run-dir", str(tmp_path)], cwd=ROOT, stderr=subprocess.PIPE, text=True)
    for stderr_line in process.stderr:
        if "megalite.config" in stderr_line:
            process.send_signal(signal.SIGINT)
            break
    assert "Traceback" not in process.stderr.read()
    assert process.wait() in (130, -signal.SIGINT)
