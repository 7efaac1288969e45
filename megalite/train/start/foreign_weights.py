"""A run that begins with the weights of another program: a Hugging Face directory, or checkpoints of Megatron-LM.

--load (or, while --load holds no checkpoint of ours, --pretrained-checkpoint) may name a directory with config.json and
safetensors files, or one of Megatron-LM's, of format torch_dist or torch: each rank reads its part of the weights, and
everything else begins afresh.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megalite.checkpoint.format.manifest import CheckpointError
from megalite.checkpoint.run.agreement import together
from megalite.checkpoint.storage import protocol as storage
from megalite.checkpoint.storage.location import is_megatron, is_url
from megalite.config.console import show
from megalite.config.options import Config, DataConfig, ModelConfig
from megalite.data.errors import DataError
from megalite.data.tokenizers.hugging_face_files import tokenizer_beside
from megalite.data.tokenizers.tokenizer_types import TYPES, build_tokenizer
from megalite.interop.convert import Foreign, fill_from
from megalite.interop.hugging_face.model_files import open_model
from megalite.interop.megatron import rank_files as megatron
from megalite.interop.megatron.rank_files import true_vocab_size
from megalite.interop.megatron.torch_dist import open_checkpoint
from megalite.models.specs import specs_of
from megalite.parallel.comm import first_says
from megalite.train.setup import SetupError
from megalite.train.sources import TOKENIZER, open_tokenizer
from megalite.train.start.resume import options_that_differ, with_checkpoint_args, with_model
from megalite.train.state import Run

UNKNOWN_VOCABULARY = "the checkpoint does not tell its true vocabulary: rows that pad it count as tokens"


@dataclass(frozen=True)
class Weights:
    """Another program's model that was opened. `rows`: of its embedding, of which `vocab_size` are tokens, where that
    is known; `padded`: there may be more than these; `tokenizer`: the options of the one that goes with it."""

    folder: Path
    what: str
    model: ModelConfig
    rows: int
    vocab_size: int | None
    padded: bool
    dtype: torch.dtype
    tokenizer: dict[str, Any]
    tensors: Sequence[Foreign]


def open_weights(folder: Path, seq_length: int | None, step: int | None) -> Weights:
    """Raises CheckpointError. `step`: of Megatron-LM's checkpoints; None: the one that it would load."""
    found = None if (folder / "config.json").is_file() else megatron.find(folder, step)
    if found is None:
        model = open_model(folder, seq_length)
        tokenizer = usable(tokenizer_beside(folder), model.vocab_size)
        rows = model.vocab_size
        return Weights(folder, model.family, model.model, rows, rows, False, model.dtype, tokenizer, model.tensors)
    theirs = open_checkpoint(found, lambda line: None)
    rows = theirs.padded_vocab_size
    tokenizer = usable(tokenizer_named_in(theirs.args), rows)
    vocab_size = true_vocab_size(theirs.args, rows, build_tokenizer(**tokenizer).vocab_size if tokenizer else None)
    what = f"Megatron-LM's {found.name}"
    return Weights(found, what, theirs.model, rows, vocab_size, True, theirs.dtype, tokenizer, theirs.tensors)


def _is_foreign(folder: Path) -> bool:
    if storage.steps_in(folder):
        return False
    return (folder / "config.json").is_file() or is_megatron(folder) or megatron.holds(folder)


def named_by(config: Config) -> Path | None:
    """The other program's directory that --load or --pretrained-checkpoint names, begun with or not."""
    c = config.checkpoint
    found = [Path(name) for name in (c.load, c.pretrained_checkpoint) if name is not None]
    return next(filter(_is_foreign, found), None)


def source_of(config: Config) -> Path | None:
    """The directory that the run begins with; None where it begins with a checkpoint, or without weights."""
    c, folder = config.checkpoint, named_by(config)
    if folder is None or (c.load is not None and storage.steps_in(c.load)):
        return None
    missing = c.load is not None and folder != Path(c.load)
    return None if missing and c.exit_on_missing_checkpoint else folder


def _opened(config: Config, folder: Path) -> Weights:
    c = config.checkpoint
    step = c.ckpt_step if c.load is not None and Path(c.load) == folder else None
    return open_weights(folder, config.model.seq_length or None, step)


def with_source(config: Config) -> Config:
    """`config` with what the checkpoint or the directory says: the model's options with --use-checkpoint-args, and, of
    another program's directory, vocabulary and tokenizer where none is given. Raises SetupError with all that
    contradicts it at once."""
    folder, c = named_by(config), config.checkpoint
    if c.save is not None and not is_url(c.save) and megatron.holds(Path(c.save)):
        raise SetupError(f"save={c.save!r} holds checkpoints of Megatron-LM, which are kept; give another directory")
    if folder is None:
        return with_checkpoint_args(config)
    try:
        theirs = _opened(config, folder)
    except CheckpointError as error:
        raise SetupError(str(error)) from None
    problems: list[str] = []
    if source_of(config) is None:
        config = with_checkpoint_args(config)
    else:
        if c.ckpt_step is not None and not theirs.padded:
            problems.append(f"ckpt_step={c.ckpt_step}, but {folder} has no steps; drop --ckpt-step")
        if c.use_checkpoint_args:
            config = with_model(config, theirs.model, str(folder))
        else:
            remedy = "; correct it, or give --use-checkpoint-args and drop the model's options"
            problems += [line + remedy for line in _contradictions(config, theirs)]
    tokenizer, more = _tokenizer(config.data, theirs)
    if problems or more:
        raise SetupError("\n".join([*problems, *more]))
    return replace(config, data=replace(config.data, **tokenizer))


def _contradictions(config: Config, theirs: Weights) -> list[str]:
    lines = options_that_differ(config.model, theirs.model, str(theirs.folder))
    here, there = config.model.positions, theirs.model.positions
    if theirs.model.position_embedding_type == "learned_absolute" and here != there:
        lines.append(f"max_position_embeddings: {here} here, {there} in {theirs.folder}")
    return lines


def _tokenizer(data: DataConfig, theirs: Weights) -> tuple[dict[str, Any], list[str]]:
    """(options of the vocabulary, contradictions). A tokenizer may have fewer tokens than the model has rows."""
    rows, given = theirs.rows, data.vocab_size
    if data.tokenizer_type is not None and given is None:
        tokenizer = open_tokenizer(data)
        given = None if tokenizer is None else tokenizer.vocab_size
        if given is not None and given <= rows and not theirs.padded:
            given = None
    if given is not None and (given > rows if theirs.padded else given != rows):
        remedy = "drop --vocab-size" if data.vocab_size is not None else "give the model's own tokenizer"
        return {}, [f"vocab_size: {given} here, {rows} in {theirs.folder}; {remedy}"]
    if given is not None and (data.tokenizer_type is not None or theirs.tokenizer.get("vocab_size", given) != given):
        return {}, []
    options = dict(theirs.tokenizer) if data.tokenizer_type is None else {}
    if data.vocab_size is None:
        options["vocab_size"] = theirs.vocab_size or rows  # the weights decide, as in a conversion
    return options, []


def tokenizer_named_in(args: Namespace) -> dict[str, Any]:
    """The data options of the tokenizer that Megatron-LM's args name, of the kinds that megalite has."""
    if getattr(args, "tokenizer_type", None) not in TYPES:
        return {}
    return {name: value for name in TOKENIZER if (value := getattr(args, name, None)) is not None}


def usable(options: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """The data options of a tokenizer if it opens here and has at most `rows` tokens, else none."""
    try:
        found = build_tokenizer(**options) if options else None
    except DataError:
        return {}
    return dict(options) if found is not None and found.vocab_size <= rows else {}


def start(run: Run, config: Config) -> tuple[Path, list[str]] | None:
    """Fill the weights of the directory that the run begins with: (it, what is worth telling); None where the run does
    not begin with one; collective. Raises CheckpointError, on all ranks where one cannot read its part."""
    folder, mesh = source_of(config), run.mesh
    if not first_says(folder is not None, mesh):  # what the first rank sees decides: a new checkpoint may show late
        return None

    def read() -> tuple[Path, Weights]:
        if folder is None:
            raise CheckpointError("it does not exist here, but rank 0 sees it: share it, or copy it to all nodes")
        theirs = _opened(config, folder)
        pieces = [entry.piece for entry in run.optimizer.pieces()]
        main = [piece for piece in pieces if piece.name.startswith("optimizer.main/")]  # in half precision: more exact
        wanted = main or [piece for piece in pieces if piece.name.startswith("model/")]
        rows = run.vocab_size if theirs.padded else theirs.rows
        if mesh.world.is_first:
            show(f"loading {theirs.folder} ({len(theirs.tensors)} tensors)")
        fill_from(theirs.tensors, wanted, specs_of(theirs.model, rows), str(folder), mesh.world.is_first)
        return folder, theirs

    folder, theirs = together(mesh, read, f"reading the weights of {folder}")
    run.optimizer.after_load()
    dtype = str(theirs.dtype)[6:]
    notes = [f"weights of {theirs.what} in {dtype}; step, optimizer and data begin afresh"]
    if theirs.vocab_size is None and run.vocab_size == theirs.rows:
        notes.append(f"{UNKNOWN_VOCABULARY}; give the tokenizer, or --vocab-size")
    if config.checkpoint.load is not None and Path(config.checkpoint.load) == folder and config.checkpoint.save:
        notes.append(
            "a restart with this --load begins afresh again; to continue, give --load "
            f"{config.checkpoint.save} --pretrained-checkpoint {folder}"
        )
    return theirs.folder, notes
