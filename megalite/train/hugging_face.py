"""A run that begins with the weights of a Hugging Face directory.

--load (or, while --load holds no checkpoint, --pretrained-checkpoint) may name a directory with config.json and
safetensors files: each rank reads its part of the weights, and everything else begins afresh.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megalite.checkpoint import storage
from megalite.checkpoint.foreign_load import fill_from
from megalite.checkpoint.hugging_face import HuggingFaceModel, open_model
from megalite.checkpoint.manifest import CheckpointError
from megalite.checkpoint.name_map import specs_of
from megalite.checkpoint.shared import together
from megalite.config import Config, DataConfig
from megalite.data.hugging_face_files import tokenizer_beside
from megalite.data.indexed import DataError
from megalite.data.tokenizer import build_tokenizer
from megalite.parallel.comm import broadcast_
from megalite.train.checkpoints import options_that_differ, with_checkpoint_args, with_model
from megalite.train.datasets import open_tokenizer
from megalite.train.setup import SetupError
from megalite.train.state import Run


def named_by(config: Config) -> Path | None:
    """The model directory that --load or --pretrained-checkpoint names, whether the run begins with it or not."""
    c = config.checkpoint
    found = [Path(name) for name in (c.load, c.pretrained_checkpoint) if name is not None]
    return next((f for f in found if (f / "config.json").is_file() and not storage.steps_in(f)), None)


def source_of(config: Config) -> Path | None:
    """The model directory that the run begins with; None where it begins with a checkpoint, or without weights."""
    c, folder = config.checkpoint, named_by(config)
    if folder is None or (c.load is not None and storage.steps_in(c.load)):
        return None
    missing = c.load is not None and folder != Path(c.load)
    return None if missing and c.exit_on_missing_checkpoint else folder


def with_source(config: Config) -> Config:
    """`config` with what the checkpoint or the model directory says: the model's options with --use-checkpoint-args,
    and, of a model directory, vocabulary and tokenizer where none is given. Raises SetupError with all that
    contradicts it at once."""
    folder = named_by(config)
    if folder is None:
        return with_checkpoint_args(config)
    try:
        theirs = open_model(folder, config.model.seq_length or None)
    except CheckpointError as error:
        raise SetupError(str(error)) from None
    problems: list[str] = []
    if source_of(config) is None:
        config = with_checkpoint_args(config)
    else:
        if config.checkpoint.ckpt_step is not None:
            problems.append(f"ckpt_step={config.checkpoint.ckpt_step}, but {folder} has no steps; leave it away")
        if config.checkpoint.use_checkpoint_args:
            config = with_model(config, theirs.model, str(folder))
        else:
            problems += _contradictions(config, theirs)
    tokenizer, more = _tokenizer(config.data, theirs)
    if problems or more:
        remedy = "; mend it, or give --use-checkpoint-args and leave the model's options away"
        raise SetupError("\n".join(line + remedy for line in [*problems, *more]))
    return replace(config, data=replace(config.data, **tokenizer))


def _contradictions(config: Config, theirs: HuggingFaceModel) -> list[str]:
    lines = options_that_differ(config.model, theirs.model, str(theirs.folder))
    here, there = config.model.positions, theirs.model.positions
    if theirs.model.position_embedding_type == "learned_absolute" and here != there:
        lines.append(f"max_position_embeddings: {here} here, {there} in {theirs.folder}")
    return lines


def _tokenizer(data: DataConfig, theirs: HuggingFaceModel) -> tuple[dict[str, Any], list[str]]:
    """(options of the vocabulary, contradictions). A tokenizer may have fewer tokens than the model has rows."""
    rows, given = theirs.vocab_size, data.vocab_size
    if data.tokenizer_type is not None and given is None:
        tokenizer = open_tokenizer(data)
        given = None if tokenizer is None or tokenizer.vocab_size <= rows else tokenizer.vocab_size
    if given is not None and given != rows:
        return {}, [f"vocab_size: {given} here, {rows} in {theirs.folder}"]
    options: dict[str, Any] = {} if data.vocab_size is not None else {"vocab_size": rows}
    if data.tokenizer_type is None:
        options |= usable_tokenizer(theirs.folder, rows)
    return options, []


def usable_tokenizer(folder: Path, rows: int) -> dict[str, Any]:
    """The data options of the tokenizer in a model directory if it opens and has at most `rows` tokens."""
    options = tokenizer_beside(folder)
    try:
        found = build_tokenizer(**options) if options else None
    except DataError:
        return {}
    return dict(options) if found is not None and found.vocab_size <= rows else {}


def start(run: Run, config: Config) -> tuple[Path, list[str]] | None:
    """Fill the weights of the model directory that the run begins with: (it, what is worth telling); None where the
    run does not begin with one; collective. Raises CheckpointError, on all ranks where one cannot read its part."""
    folder, mesh = source_of(config), run.mesh
    chosen = torch.tensor(int(folder is not None), dtype=torch.int32, device=mesh.device)
    if not int(broadcast_(chosen, mesh.world)):  # what the first rank sees decides: a new checkpoint may show late
        return None

    def read() -> tuple[Path, HuggingFaceModel]:
        if folder is None:
            raise CheckpointError(
                "it is not there, although rank 0 sees it: share the directory, or copy it to all nodes"
            )
        theirs = open_model(folder, config.model.seq_length)
        pieces = [entry.piece for entry in run.optimizer.pieces()]
        main = [piece for piece in pieces if piece.name.startswith("optimizer.main/")]  # in half precision: more exact
        wanted = main or [piece for piece in pieces if piece.name.startswith("model/")]
        fill_from(theirs.tensors, wanted, specs_of(theirs.model, theirs.vocab_size), str(folder))
        return folder, theirs

    folder, theirs = together(mesh, read, f"reading the weights of {folder}")
    run.optimizer.after_load()
    dtype = str(theirs.dtype)[6:]
    notes = [f"weights of {theirs.family} in {dtype}; step, optimizer and data begin afresh"]
    if config.checkpoint.load is not None and Path(config.checkpoint.load) == folder and config.checkpoint.save:
        notes.append(
            "a restart with this --load begins afresh again; to go on, give --load "
            f"{config.checkpoint.save} --pretrained-checkpoint {folder}"
        )
    return folder, notes
