"""Paths in a checkpoint that lead outside of it.

A note names such a path before it is opened, and no export copies the file unless it is a tokenizer.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import test_convert_megatron as megatron_cases
import torch
from hugging_face_cases import write_tokenizer
from test_convert_hugging_face import MEGATRONS, save_run
from train_cases import config_from

from megalite.data.errors import DataError
from megalite.launch.rank_info import RankInfo
from megalite.training.checkpointing import initial_state as origin
from megalite.training.job.preflight import preflight
from tools import convert_checkpoint, generate

SECRET = "root:$6$salt$hash:19000:0:99999:7:::\n"
KINDS = ("HuggingFaceTokenizer", "SentencePieceTokenizer", "TikTokenizer")
TRAIN = "--micro-batch-size 1 --train-iters 1 --lr 1e-3 --mock-data --eval-iters 0 --device cpu --use-checkpoint-args"


def write_secret(directory: Path) -> Path:
    path = directory / "elsewhere" / "shadow"
    path.parent.mkdir()
    path.write_text(SECRET)
    return path


def save_checkpoint(directory: Path, kind: str, model: Path, **options: Any) -> Path:
    save_run(directory, {**MEGATRONS["llama"], "tokenizer_type": kind, "tokenizer_model": str(model), **options}, False)
    return directory


def is_announced(err: str, path: Path) -> bool:
    """Return whether the first line is the note about this path in a checkpoint."""
    first = err.splitlines()[0] if err else ""
    return first.startswith("note: ") and str(path) in first and "not below it" in first


def run_generate(run: Path) -> int:
    try:
        return generate.main(["--load", str(run), "--prompt", "the", "--max-new-tokens", "1"])
    except SystemExit as error:
        return int(error.code or 0)


WAYS: dict[str, Callable[[Path, Path], int]] = {
    "generate": lambda run, out: run_generate(run),
    "to hf": lambda run, out: convert_checkpoint.main(["--load", str(run), "--to-hf", str(out)]),
    "to megatron": lambda run, out: convert_checkpoint.main(["--load", str(run), "--to-megatron", str(out)]),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("way", WAYS)
def test_tokenizer_path_of_a_checkpoint_is_announced(way: str, kind: str, tmp_path: Path, capsys) -> None:
    path = write_secret(tmp_path)
    options = {"tiktoken_pattern": "cl100k"} if kind == "TikTokenizer" else {}
    run = save_checkpoint(tmp_path / "run", kind, path, **options)
    code = WAYS[way](run, tmp_path / "out")
    err = capsys.readouterr().err
    assert is_announced(err, path) and "salt" not in err
    assert (code == 0) == (way != "generate")
    file_contents = [file.read_bytes() for file in (tmp_path / "out").rglob("*") if file.is_file()]
    assert not any(SECRET.encode() in content for content in file_contents)


def test_tokenizer_inside_the_checkpoint_is_not_announced(tmp_path: Path, capsys) -> None:
    (tokenizer_dir := tmp_path / "run" / "tokenizer").mkdir(parents=True)
    write_tokenizer(tokenizer_dir, 9)
    run = save_checkpoint(tmp_path / "run", "HuggingFaceTokenizer", tokenizer_dir)
    assert run_generate(run) == 0
    assert "note:" not in capsys.readouterr().err
    tokenizer_dir.rename(tmp_path / "moved")
    tokenizer_dir.symlink_to(tmp_path / "moved")
    assert run_generate(run) == 0
    assert is_announced(capsys.readouterr().err, tokenizer_dir)


def test_run_with_checkpoint_args_announces_the_path(tmp_path: Path) -> None:
    path, notes = write_secret(tmp_path), list[str]()
    run = save_checkpoint(tmp_path / "run", "HuggingFaceTokenizer", path)
    config = origin.complete_config(config_from([*TRAIN.split(), "--load", str(run)]), notes.append)
    assert is_announced("\n".join(notes), path)
    with pytest.raises(DataError, match="is not a tokenizer.json"):
        preflight(config, RankInfo())


@pytest.mark.parametrize("name", ["tokenizer_model", "vocab_file"])
def test_tokenizer_path_in_megatron_args_is_announced(name: str, tmp_path: Path, capsys) -> None:
    path = write_secret(tmp_path)
    kind = "GPT2BPETokenizer" if name == "vocab_file" else "SentencePieceTokenizer"
    args: dict[str, Any] = {"tokenizer_type": kind, name: str(path), "merge_file": str(path)}
    megatron_cases.write(tmp_path / "theirs", megatron_cases.Case(), **args)
    argv = ["--from-megatron", str(tmp_path / "theirs"), "--save", str(tmp_path / "ours")]
    assert convert_checkpoint.main(argv) == 0
    assert is_announced(capsys.readouterr().err, path)
    notes: list[str] = []
    shape = {"seq_length": "16", "max_position_embeddings": "32"}
    flags = [word for key, value in shape.items() for word in (f"--{key.replace('_', '-')}", value)]
    origin.complete_config(config_from([*TRAIN.split(), "--load", str(tmp_path / "theirs"), *flags[:2]]), notes.append)
    assert is_announced("\n".join(notes), path)


def test_megatron_args_that_are_not_paths_are_ignored() -> None:
    args = argparse.Namespace(tokenizer_type="SentencePieceTokenizer", tokenizer_model=5, vocab_size=True)
    args.merge_file, args.vocab_file = torch.zeros(1), ["a"]
    assert origin.tokenizer_from_args(args) == {"tokenizer_type": "SentencePieceTokenizer"}
