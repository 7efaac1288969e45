"""Experts that begin as copies of a dense model's feed-forward blocks (--moe-use-upcycling, arXiv:2212.05055)."""

from collections.abc import Iterable
from dataclasses import fields, replace

from megalite.config.options import Config, ModelConfig
from megalite.parallel.spec import Box, TensorShard
from megalite.training.setup import SetupError

OF_EXPERTS = [f.name for f in fields(ModelConfig) if f.name.startswith(("num_experts", "moe_"))]
BEGUN = "each expert begins as a copy of its layer's dense feed-forward block, and routers are drawn"


def upcycles(config: Config) -> bool:
    return config.checkpoint.moe_use_upcycling and bool(config.model.num_experts)


def model_to_read(config: Config, saved: ModelConfig, where: str) -> ModelConfig:
    """The model as which the weights of `saved` are read to begin with: that of `config`, with upcycling without its
    experts. Raises SetupError where there are experts to begin with."""
    if not upcycles(config):
        return config.model
    if saved.num_experts:
        raise SetupError(f"moe_use_upcycling, but {where} has num_experts={saved.num_experts}; drop the flag")
    return replace(config.model, **{name: getattr(saved, name) for name in OF_EXPERTS})


def upcycling_hint(model: ModelConfig, saved: ModelConfig) -> list[str]:
    """How a `model` of experts could begin with a `saved` one that is dense."""
    line = "to make experts of a dense model, give --moe-use-upcycling, and --finetune with --load"
    return [line] if model.num_experts and not saved.num_experts else []


def dense_shards(pieces: Iterable[TensorShard]) -> list[TensorShard]:
    """What a model of experts reads from a dense one: of a tensor of experts [E, ...] a piece for each expert, which
    all are of the same dense tensor; of routers nothing; all else as it is."""
    found = []
    for piece in pieces:
        box, span = Box(piece.box.start[1:], piece.box.stop[1:]), piece.span
        if (name := piece.name.replace(".experts.", ".")) == piece.name:
            found += [piece] if ".router" not in name else []
            continue
        for first in range(span.start - span.start % box.numel, span.stop, box.numel):  # of an expert, in the span
            part = range(max(span.start - first, 0), min(span.stop - first, box.numel))
            data = piece.data[first + part.start - span.start :][: len(part)]
            found.append(TensorShard(name, piece.shape[1:], box, part, data))
    return found
