"""A run that begins with the weights of a Hugging Face directory, or ends with one.

--load (or, while --load holds no checkpoint, --pretrained-checkpoint) may name a directory with config.json and
safetensors files: each rank reads its part of the weights, and everything else begins afresh. --export-hf writes such
a directory after the last step: the ranks write their parts side by side, as for every checkpoint, and the first puts
tensor after tensor together from them, so that no process ever holds the model.
"""

from __future__ import annotations

import json
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from megalite.checkpoint import hugging_face, storage, writer
from megalite.checkpoint import manifest as manifests
from megalite.checkpoint.convert import Ours
from megalite.checkpoint.foreign_load import fill_from
from megalite.checkpoint.hugging_face import HuggingFaceModel, open_model
from megalite.checkpoint.hugging_face_config import choose_family
from megalite.checkpoint.manifest import CheckpointError
from megalite.checkpoint.name_map import specs_of
from megalite.checkpoint.whole import Source
from megalite.config import Config, DataConfig
from megalite.data.hugging_face_files import tokenizer_beside
from megalite.data.indexed import DataError
from megalite.data.tokenizer import SENTENCEPIECE, build_tokenizer
from megalite.parallel.comm import broadcast_
from megalite.train.checkpoints import options_that_differ, pieces_to_save, with_checkpoint_args, with_model
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
    if data.tokenizer_type == "NullTokenizer":
        given = None if given is None else given + 1
    elif data.tokenizer_type is not None and given is None:
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
    run does not begin with one. Raises CheckpointError."""
    folder = source_of(config)
    if folder is None:
        return None
    theirs = open_model(folder, config.model.seq_length)
    pieces = [entry.piece for entry in run.optimizer.pieces()]
    main = [piece for piece in pieces if piece.name.startswith("optimizer.main/")]  # in half precision: more exact
    chosen = main or [piece for piece in pieces if piece.name.startswith("model/")]
    fill_from(theirs.tensors, chosen, specs_of(theirs.model, theirs.vocab_size), theirs.vocab_size, str(folder))
    run.optimizer.after_load()
    dtype = str(theirs.dtype)[6:]
    notes = [f"weights of {theirs.family} in {dtype}; step, optimizer and data begin afresh"]
    if config.checkpoint.load is not None and Path(config.checkpoint.load) == folder and config.checkpoint.save:
        notes.append(
            "a restart with this --load begins afresh again; to go on, give --load "
            f"{config.checkpoint.save} --pretrained-checkpoint {folder}"
        )
    return folder, notes


def like_of(data: DataConfig) -> Path | None:
    """The model directory that the run's tokenizer is from: an export takes its other files, and token ids, from
    there. None for a tokenizer file under a name of its own, whose neighbours may be anything."""
    name = data.tokenizer_model or data.vocab_file
    if name is None:
        return None
    path = Path(name)
    return path if path.is_dir() else path.parent if path.name in hugging_face.COMPANIONS else None


def tokenizer_files(data: DataConfig, eod: int | None) -> dict[str, Path | str]:
    """What an export holds besides the model, by name: the tokenizer as transformers finds it."""
    files = hugging_face.companions(like_of(data))
    if data.tokenizer_model is not None and Path(data.tokenizer_model).is_file():
        name = {"HuggingFaceTokenizer": "tokenizer.json"}.get(data.tokenizer_type or "", "tokenizer.model")
        if data.tokenizer_type in ("HuggingFaceTokenizer", *SENTENCEPIECE):
            files[name] = Path(data.tokenizer_model)
    if data.vocab_file is not None and data.merge_file is not None:
        files |= {"vocab.json": Path(data.vocab_file), "merges.txt": Path(data.merge_file)}
    source = files.get("tokenizer.json")
    if isinstance(source, Path) and "tokenizer_config.json" not in files:  # without it transformers would guess
        added = hugging_face.read_json(source).get("added_tokens") or []
        ends = [one.get("content") for one in added if isinstance(one, dict) and one.get("id") == eod]
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": ends[0] if ends else None}
        files["tokenizer_config.json"] = json.dumps(settings) + "\n"
    return files


def family_in(folder: Path | None) -> str | None:
    """model_type of a model directory; None where `folder` is none."""
    if folder is None or not (folder / "config.json").is_file():
        return None
    family = hugging_face.read_json(folder / "config.json").get("model_type")
    return family if isinstance(family, str) else None


def export_family(config: Config) -> str:
    """The family to export as: that of the directory begun with, where it can express the model. Raises
    CheckpointError."""
    return choose_family(config.model, None, family_in(named_by(config)) or family_in(like_of(config.data)))


def check_export(config: Config) -> None:
    """Raises SetupError where --export-hf cannot be done: no family has this model, something is there already, or
    nothing can be written there."""
    if config.checkpoint.export_hf is None:
        return
    target = Path(config.checkpoint.export_hf)
    try:
        export_family(config)
    except CheckpointError as error:
        raise SetupError(f"export_hf={str(target)!r}: {error}") from None
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise SetupError(f"export_hf={str(target)!r} is not empty; give a new directory")
    above = next(folder for folder in target.absolute().parents if folder.exists())
    if not above.is_dir() or not os.access(above, os.W_OK | os.X_OK):
        raise SetupError(f"export_hf={str(target)!r}: nothing can be written in {above}; give another directory")


def export(run: Run, config: Config, eod: int | None) -> str | None:
    """Write what --export-hf asks for: a line about it, on the first rank; collective until the weights are in files.

    They are those of the checkpoint that --save has just made, or else of one beside the new directory that holds
    weights only and is deleted afterwards. Raises CheckpointError.
    """
    c, mesh = config.checkpoint, run.mesh
    if c.export_hf is None:
        return None
    family, target = export_family(config), Path(c.export_hf)
    folder = None if c.save is None else storage.folder_of(c.save, run.state.step)
    there = torch.tensor(int(folder is not None and (folder / "COMPLETE").is_file()), device=mesh.device)
    temporary = target.with_name(f".{target.name}.weights")
    if folder is None or not int(broadcast_(there, mesh.world)):
        folder = writer.save(temporary, run.state.step, pieces_to_save(run, optimizer=False), {}, mesh)
    if not mesh.world.is_first:
        return None
    tokens = {"eos_token_id": eod, **hugging_face.token_ids(like_of(config.data) or named_by(config))}
    try:
        own = config.data.tokenizer_type is not None
        files = tokenizer_files(config.data, eod) if own else hugging_face.companions(named_by(config))
        ours = Ours(Source(folder, manifests.load(folder)), config.model.apply_layernorm_1p)
        made = hugging_face.write_model(target, ours, config.model, family, run.vocab_size, tokens=tokens, files=files)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return f"exported to {target}: {family}, {len(made.tensors)} tensors, vocabulary {run.vocab_size}"
