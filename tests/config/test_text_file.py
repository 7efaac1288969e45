"""Commands that read a complete file refuse a pipe, a device, a directory and a huge file at once, with one line."""

import json
import os
import sys
from pathlib import Path

import programs
import pytest

from megalite.common.text_file import TextFileError, read_ends, read_small_bytes, read_small_text
from megalite.config.config_file import MAX_PROBLEMS, parse_config_text
from megalite.config.options import ConfigError
from megalite.training.logging.event_log import read_jsonl
from megalite.training.logging.status import read_status

MODEL = (
    "--num-layers 2 --hidden-size 32 --num-attention-heads 8 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 2 --train-iters 4 --eval-iters 0 --lr 1e-3 --device cpu --dry-run"
)
KINDS = ("pipe", "device", "directory", "huge")
TOKENIZER = f"pretrain_gpt.py {MODEL} --mock-data --tokenizer-type"
# the command, the file's name in its directory, the exit code of docs/logging.md
READERS = {
    "--config": ("pretrain_gpt.py --config {file}", "run.toml", 2),
    "--plugin": (f"pretrain_gpt.py {MODEL} --mock-data --vocab-size 64 --plugin {{file}}", "plugin.py", 2),
    "--data-args-path": (f"pretrain_gpt.py {MODEL} --vocab-size 64 --data-args-path {{file}}", "list", 3),
    "--per-split-data-args-path": (
        f"pretrain_gpt.py {MODEL} --vocab-size 64 --per-split-data-args-path {{file}}",
        "list",
        3,
    ),
    "tokenizer.json": (f"{TOKENIZER} HuggingFaceTokenizer --tokenizer-model {{file}}", "tokenizer.json", 3),
    "vocab.json": (f"{TOKENIZER} GPT2BPETokenizer --vocab-file {{file}} --merge-file {{file}}", "vocab.json", 3),
    "SentencePiece": (f"{TOKENIZER} SentencePieceTokenizer --tokenizer-model {{file}}", "x.model", 3),
    "plan --cluster": ("tools/plan.py --preset tiny --cluster {file}", "cluster.toml", 2),
    "plan --profile": ("tools/plan.py --preset tiny --num-gpus 1 --profile {file}", "profile.json", 2),
    "plan --hf": ("tools/plan.py --hf {file}", "config.json", 2),
    "translate JSON": ("tools/translate.py {file}", "ds.json", 2),
    "translate TOML": ("tools/translate.py {file}", "run.toml", 2),
    "generate --prompts-file": ("tools/generate.py --load {directory} --prompts-file {file}", "prompts", 2),
    "sweep": ("tools/sweep.py {file} --lr 1e-3,1e-4", "run.toml", 2),
    "plot plan": ("tools/plot.py plan {file}", "plan.json", 3),
    "logs": ("tools/logs.py --short {directory}", "ranks/rank-00000.log", 1),
}


def make_file(kind: str, path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "directory":
        path.mkdir()
    else:
        with open(path, "wb") as file:
            file.truncate(100 << 20)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("reader", READERS)
def test_command_refuses_pipes_devices_and_huge_files(reader: str, kind: str, tmp_path: Path) -> None:
    line, name, code = READERS[reader]
    path = tmp_path / name
    make_file(kind, path)
    result = programs.run_python(*line.format(file=path, directory=tmp_path).split(), cwd=tmp_path, timeout=60)
    assert "Traceback" not in result.stderr, result.stderr
    if (reader, kind) == ("logs", "huge"):  # a log may be that long
        assert result.returncode == 0 and "bytes in its middle are left out" in result.stderr
        return
    assert result.returncode == code, (result.returncode, result.stdout, result.stderr)
    errors = [line for line in result.stderr.splitlines() if str(path) in line]
    assert len(errors) == 1 and len(errors[0]) < 500, result.stderr


@pytest.mark.parametrize("section", ["", "[model]\n"])
def test_config_with_many_wrong_keys_is_refused_quickly(section: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_config_text(section + "".join(f"unknown_{n} = 1\n" for n in range(20_000)), "run.toml")
    assert len(caught.value.problems) == MAX_PROBLEMS + 1
    assert caught.value.problems[-1].endswith("has more wrong keys; correct these first")


@pytest.mark.parametrize("kind", KINDS)
def test_read_text_raises(kind: str, tmp_path: Path) -> None:
    path = tmp_path / "file"
    make_file(kind, path)
    with pytest.raises(TextFileError, match=r"file: cannot be read \(.*\); give a TOML file$") as caught:
        read_small_text(path, "a TOML file")
    assert isinstance(caught.value.__cause__, OSError)
    assert read_status(tmp_path) == {}
    if kind != "huge":
        assert [*read_jsonl(path)] == []
        with pytest.raises(OSError, match="file"):
            read_ends(path)


def test_read_limit_counts_bytes(tmp_path: Path) -> None:
    """The size of a file in /proc is 0."""
    path = tmp_path / "file"
    path.write_bytes(b"a\r\nb\r" + "é".encode())
    assert read_small_text(path, "it", 7) == "a\nb\né"
    with pytest.raises(TextFileError, match="more than 6 bytes"):
        read_small_text(path, "it", 6)
    if sys.platform == "linux":
        with pytest.raises(OSError, match="more than 10 bytes"):
            read_small_bytes("/proc/self/status", 10)
    path.write_bytes(b"\xff")
    with pytest.raises(TextFileError, match=r"file: is not UTF-8 text .*; give it$"):
        read_small_text(path, "it")
    with pytest.raises(TextFileError, match="null"):
        read_small_text("a\0b", "it")
    with pytest.raises(TextFileError, match=r"No such file or directory\); give it$"):
        read_small_text(tmp_path / "none", "it")


def test_ends_of_a_long_log_are_complete_lines(tmp_path: Path) -> None:
    path = tmp_path / "file"
    lines = [f"line {n:03}\n" for n in range(100)]
    path.write_text("".join(lines))
    assert read_ends(path, 900) == ("".join(lines), 0)
    text, left_out = read_ends(path, 200)
    assert text.splitlines(keepends=True) == lines[:11] + lines[-11:] and left_out == 9 * (100 - 22)


def test_endless_row_is_not_read_completely(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    rows = [json.dumps({"step": 1}), " " * (3 << 20), json.dumps({"step": 2})]
    path.write_text("\n".join(rows))
    assert [row for _, row in read_jsonl(path)] == [{"step": 1}, {"step": 2}]
