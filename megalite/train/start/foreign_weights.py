"""A run that begins with the weights of another program.

--load, or --pretrained-checkpoint while --load holds no checkpoint of megalite's, may name a Hugging Face directory
(config.json and safetensors files) or checkpoints of Megatron-LM (format torch_dist or torch). Each rank reads its part
of the weights; everything else begins afresh.
"""

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
from megalite.config.run_options import TOKENIZERS
from megalite.data.errors import DataError
from megalite.data.tokenizers.hugging_face_files import tokenizer_beside
from megalite.data.tokenizers.tokenizer_types import build_tokenizer
from megalite.interop.convert import Foreign, fill_from
from megalite.interop.hugging_face.model_files import open_model
from megalite.interop.megatron import rank_files as megatron
from megalite.interop.megatron.rank_files import true_vocab_size
from megalite.interop.megatron.torch_dist import open_checkpoint
from megalite.models.specs import stored_specs
from megalite.parallel.comm import first_says
from megalite.train.setup import SetupError
from megalite.train.sources import TOKENIZER, open_tokenizer
from megalite.train.start.resume import options_that_differ, with_checkpoint_args, with_model
from megalite.train.start.upcycling import BEGUN, of_dense, read_as, remedies, upcycles
from megalite.train.state import Run

UNKNOWN_VOCABULARY = "the checkpoint does not hold its true vocabulary size: rows of padding count as tokens"


@dataclass(frozen=True)
class Weights:
    """An opened model of another program. `rows`: of its embedding; `vocab_size`: how many of them are tokens, if
    known; `padded`: others may be padding; `tokenizer`: the options of its tokenizer."""

    folder: Path
    what: str
    model: ModelConfig
    rows: int
    vocab_size: int | None
    padded: bool
    dtype: torch.dtype
    tokenizer: dict[str, Any]
    tensors: Sequence[Foreign]


def open_weights(config: Config, folder: Path) -> Weights:
    """Of Megatron-LM's checkpoints that of --ckpt-step, or the one that it would load. Raises CheckpointError."""
    c = config.checkpoint
    step = c.ckpt_step if c.load is not None and Path(c.load) == folder else None
    release = None if (folder / "config.json").is_file() else megatron.find(folder, step)
    if release is None:
        model = open_model(folder, config.model.seq_length or None)
        rows = model.vocab_size
        tokenizer = usable(tokenizer_beside(folder), rows)
        return Weights(folder, model.family, model.model, rows, rows, False, model.dtype, tokenizer, model.tensors)
    theirs = open_checkpoint(release, lambda line: None)
    rows = theirs.padded_vocab_size
    tokenizer = usable(tokenizer_named_in(theirs.args), rows)
    vocab_size = true_vocab_size(theirs.args, rows, build_tokenizer(**tokenizer).vocab_size if tokenizer else None)
    what = f"Megatron-LM's {release.name}"
    return Weights(release, what, theirs.model, rows, vocab_size, True, theirs.dtype, tokenizer, theirs.tensors)


def named_by(config: Config) -> Path | None:
    """The other program's directory that --load or --pretrained-checkpoint names, even if the run does not use it."""
    for name in (config.checkpoint.load, config.checkpoint.pretrained_checkpoint):
        if name is None or storage.steps_in(folder := Path(name)):
            continue
        if (folder / "config.json").is_file() or is_megatron(folder) or megatron.holds(folder):
            return folder
    return None


def source_of(config: Config) -> Path | None:
    """The other program's directory that the run begins with; None where it begins with its own checkpoint, or none."""
    c, folder = config.checkpoint, named_by(config)
    if folder is None or (c.load is not None and storage.steps_in(c.load)):
        return None
    missing = c.load is not None and folder != Path(c.load)
    return None if missing and c.exit_on_missing_checkpoint else folder


def with_source(config: Config) -> Config:
    """`config` completed from the checkpoint or the other program's directory: the model with --use-checkpoint-args,
    of the directory also vocabulary and tokenizer. Raises SetupError with all contradictions at once."""
    folder, c = named_by(config), config.checkpoint
    if c.save is not None and not is_url(c.save) and megatron.holds(Path(c.save)):
        raise SetupError(f"save={c.save!r} holds checkpoints of Megatron-LM, which are kept; give another directory")
    if folder is None:
        return with_checkpoint_args(config)
    try:
        theirs = open_weights(config, folder)
    except CheckpointError as error:
        raise SetupError(str(error)) from None
    problems: list[str] = []
    if source_of(config) is None:
        config = with_checkpoint_args(config)
    else:
        if c.ckpt_step is not None and not theirs.padded:
            problems.append(f"ckpt_step={c.ckpt_step}, but {folder} has no steps; drop --ckpt-step")
        model = read_as(config, theirs.model, str(folder))
        if c.use_checkpoint_args:
            config = with_model(config, theirs.model, str(folder))
        else:
            remedy = "; correct it, or give --use-checkpoint-args and drop the model's options"
            lines = options_that_differ(model, theirs.model, str(theirs.folder))
            own, other = config.model.positions, theirs.model.positions
            if theirs.model.position_embedding_type == "learned_absolute" and own != other:
                lines.append(f"max_position_embeddings: {own} here, {other} in {theirs.folder}")
            problems += [line + remedy for line in lines] + remedies(model, theirs.model)
    tokenizer, of_tokenizer = _tokenizer(config.data, theirs)
    if problems or of_tokenizer:
        raise SetupError("\n".join([*problems, *of_tokenizer]))
    return replace(config, data=replace(config.data, **tokenizer))


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
    """The data options of the tokenizer that Megatron-LM's args name; {} for a type that megalite does not have."""
    if getattr(args, "tokenizer_type", None) not in TOKENIZERS:
        return {}
    return {name: value for name in TOKENIZER if (value := getattr(args, name, None)) is not None}


def usable(options: Mapping[str, Any], rows: int) -> dict[str, Any]:
    """`options` of a tokenizer if it opens here and has at most `rows` tokens, else {}."""
    try:
        return dict(options) if options and build_tokenizer(**options).vocab_size <= rows else {}
    except DataError:
        return {}


def start(run: Run, config: Config) -> tuple[Path, list[str]] | None:
    """Fill the weights from the other program's directory: (it, notes); None where the run does not begin with one;
    collective. Raises CheckpointError on all ranks."""
    folder, mesh = source_of(config), run.mesh
    if not first_says(folder is not None, mesh):  # the first rank decides, as others may see a new checkpoint late
        return None

    def read() -> tuple[Path, Weights]:
        if folder is None:
            raise CheckpointError("it does not exist here, but rank 0 sees it: share it, or copy it to all nodes")
        theirs = open_weights(config, folder)
        pieces = [entry.piece for entry in run.optimizer.pieces()]
        main = [piece for piece in pieces if piece.name.startswith("optimizer.main/")]  # exact where weights are not
        wanted = main or [piece for piece in pieces if piece.name.startswith("model/")]
        wanted += [piece for piece, _ in run.balance.pieces()]
        wanted = of_dense(wanted) if upcycles(config) else wanted
        rows = run.vocab_size if theirs.padded else theirs.rows
        if mesh.world.is_first:
            show(f"loading {theirs.folder} ({len(theirs.tensors)} tensors)")
        fill_from(theirs.tensors, wanted, stored_specs(theirs.model, rows), str(folder), mesh.world.is_first)
        return folder, theirs

    folder, theirs = together(mesh, read, f"reading the weights of {folder}")
    run.optimizer.after_load()
    dtype = str(theirs.dtype)[6:]
    notes = [f"weights of {theirs.what} in {dtype}; step, optimizer and data begin afresh"]
    notes += [BEGUN] * upcycles(config)
    if theirs.vocab_size is None and run.vocab_size == theirs.rows:
        notes.append(f"{UNKNOWN_VOCABULARY}; give the tokenizer, or --vocab-size")
    if config.checkpoint.load is not None and Path(config.checkpoint.load) == folder and config.checkpoint.save:
        again = "a restart with this --load begins afresh again; to continue, give --load"
        notes.append(f"{again} {config.checkpoint.save} --pretrained-checkpoint {folder}")
    return theirs.folder, notes
