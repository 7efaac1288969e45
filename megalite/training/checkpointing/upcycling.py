"""Upcycling: experts that start as copies of a dense model's MLPs (--moe-use-upcycling, arXiv:2212.05055)."""

from collections.abc import Iterable
from dataclasses import fields, replace

from megalite.config.options import Config, ModelConfig
from megalite.parallel.spec import Box, TensorShard
from megalite.training.setup import SetupError

EXPERT_OPTIONS = [f.name for f in fields(ModelConfig) if f.name.startswith(("num_experts", "moe_"))]
UPCYCLING_NOTE = "each expert starts as a copy of its layer's dense feed-forward block, and routers are drawn"


def upcycles(config: Config) -> bool:
    """Return True if the run initializes experts from a dense model."""
    return config.checkpoint.moe_use_upcycling and bool(config.model.num_experts)


def model_to_read(config: Config, saved: ModelConfig, source: str) -> ModelConfig:
    """Return the model to read the weights of `saved` as: the configured one, without experts if it is upcycled.

    Args:
        source: The name of `saved` in an error message.

    Raises:
        SetupError: if `saved` has experts, but the run upcycles.
    """
    if not upcycles(config):
        return config.model
    if saved.num_experts:
        raise SetupError(f"moe_use_upcycling, but {source} has num_experts={saved.num_experts}; drop the flag")
    dense = replace(config.model, **{name: getattr(saved, name) for name in EXPERT_OPTIONS})
    pattern = dense.hybrid_layer_pattern
    return dense if pattern is None else replace(dense, hybrid_layer_pattern=pattern.replace("E", "-"))


def upcycling_hint(model: ModelConfig, saved: ModelConfig) -> list[str]:
    """Return a line about upcycling if `model` has experts and `saved` is dense, else []."""
    hint = "to make experts of a dense model, give --moe-use-upcycling, and --finetune with --load"
    return [hint] if model.num_experts and not saved.num_experts else []


def dense_shards(shards: Iterable[TensorShard]) -> list[TensorShard]:
    """Return the shards to read from a dense model, for `shards` of a model with experts.

    A shard of an expert tensor [E, ...] becomes a shard per expert, all of the same dense tensor. Routers are left out,
    and all other shards remain unchanged.
    """
    dense = []
    for shard in shards:
        name = shard.name.replace(".experts.", ".")
        if name == shard.name:
            if ".router" not in name:
                dense.append(shard)
            continue
        expert_box = Box(shard.box.start[1:], shard.box.stop[1:])
        numel, span = expert_box.numel, shard.span
        for expert_start in range(span.start - span.start % numel, span.stop, numel):
            expert_span = range(max(span.start - expert_start, 0), min(span.stop - expert_start, numel))
            offset = expert_start + expert_span.start - span.start
            data = shard.data[offset:][: len(expert_span)]
            dense.append(TensorShard(name, shard.shape[1:], expert_box, expert_span, data))
    return dense
