"""A checkpoint for Megatron-LM, one file per (tp, pp) rank (rank_files.py), under the names of Megatron core.

The vocabulary is padded to a multiple of 128 x tp, as there. With a tied embedding and pp > 1 the last stage holds a
copy of it. torch writes a file at once, so the weights of one rank are in memory, not of all.
"""

from __future__ import annotations

import os
import shutil
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.format.manifest import CheckpointError
from megalite.config.options import ModelConfig
from megalite.interop.convert import Ours
from megalite.interop.megatron.args import write_args
from megalite.interop.megatron.rank_files import FILES, TRACKER
from megalite.interop.rules import entries, join, specs_of, trimmed
from megalite.models.families import MEGATRON, MEGATRON_FUSED
from megalite.parallel.spec import Box


def write_megatron(
    directory: Path,
    ours: Ours,
    model: ModelConfig,
    vocab_size: int,
    *,
    tokenizer: Mapping[str, Any],
    tp: int = 1,
    pp: int = 1,
    fused: bool = True,
) -> Path:
    """A `release` of Megatron-LM for tp x pp ranks, in memory one rank at a time. Raises CheckpointError.

    tokenizer: its options, which Megatron-LM compares with its own.
    fused: names of Transformer Engine's layers (Megatron-LM's default), in which norms are part of the matmul after.
    """
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise CheckpointError(f"to_megatron={str(directory)!r} is not empty; give a new directory")
    padded = -(-vocab_size // (128 * tp)) * 128 * tp
    if model.num_layers % pp or model.groups % tp or model.ffn_size % tp or model.num_attention_heads % tp:
        raise CheckpointError(f"layers, groups or heads do not split evenly over tp={tp}, pp={pp}; choose others")
    part = directory.with_name(f".{directory.name}.part")
    dtype = str(ours.dtype_of_name("embedding.word"))[6:]
    sizes = dict(vocab_size=vocab_size, padded_vocab_size=padded)
    args = write_args(model, **sizes, tokenizer=tokenizer, tp=tp, pp=pp, dtype=dtype)
    try:
        shutil.rmtree(part, ignore_errors=True)
        for t in range(tp):
            for p in range(pp):
                folder = part / "release" / (f"mp_rank_{t:02d}" + (f"_{p:03d}" if pp > 1 else ""))
                folder.mkdir(parents=True)
                weights = _rank_weights(ours, model, padded, vocab_size, (tp, t), (pp, p), fused)
                state = {"args": args, "checkpoint_version": 3.0, "iteration": 0, "model": weights}
                torch.save(state, folder / FILES[0])
        (part / TRACKER).write_text("release\n", encoding="utf-8")
        if directory.exists():
            directory.rmdir()
        os.replace(part, directory)
    except OSError as error:
        raise CheckpointError(f"to_megatron={str(directory)!r}: cannot be written ({error})") from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return directory / "release"


def _rank_weights(
    ours: Ours, model: ModelConfig, padded: int, vocab_size: int, tp: tuple[int, int], pp: tuple[int, int], fused: bool
) -> OrderedDict[str, Tensor]:
    """The weights of rank tp[1] of tp[0], pp[1] of pp[0], under Megatron core's names."""
    per_stage = model.num_layers // pp[0]
    layers = range(pp[1] * per_stage, (pp[1] + 1) * per_stage)
    first, last = pp[1] == 0, pp[1] == pp[0] - 1
    tied_copy = last and not first and not model.untie_embeddings_and_output_weights
    weights: OrderedDict[str, Tensor] = OrderedDict()
    for entry in entries(MEGATRON, specs_of(model, padded), model.groups, layers, tp=tp[0], rank=tp[1]):
        name = entry.theirs
        if name.startswith("decoder.layers."):
            for there, plain in MEGATRON_FUSED if fused else ():
                name = name.replace(plain, there)
        elif name.startswith("embedding.") and not first:
            if not (tied_copy and name == "embedding.word_embeddings.weight"):
                continue
            name = "output_layer.weight"
        elif not name.startswith("embedding.") and not last:
            continue
        weights[name] = join(entry, lambda part, box: _padded(ours, part, box, vocab_size))
    return weights


def _padded(ours: Ours, name: str, box: Box, vocab_size: int) -> Tensor:
    """Our rectangle, with zeros where their vocabulary is padded."""
    kept = trimmed(name, box, vocab_size)
    if kept == box:
        return ours.read(name, box)
    values = torch.zeros(box.shape, dtype=ours.dtype_of_name(name))
    if kept is not None:
        values[: kept.shape[0]] = ours.read(name, kept)
    return values
