"""Full tensors, assembled from the shards that ranks own."""

from collections.abc import Iterable

import torch
from torch import Tensor

from megalite.optim.distributed_optimizer import DistributedOptimizer
from megalite.parallel.spec import Box

# name, shape, box, span and data of a TensorShard (parallel/spec.py)
OwnedShard = tuple[str, tuple[int, ...], Box, range, Tensor]


def box_view(full: Tensor, box: Box) -> Tensor:
    return full[tuple(map(slice, box.start, box.stop))]


def owned_shards(optimizer: DistributedOptimizer, prefix: str = "") -> list[OwnedShard]:
    """Return copies in fp64 of the shards that this rank owns, of tensors whose names start with `prefix`."""
    shards = (shard for shard in optimizer.checkpoint_shards() if shard.is_owner)
    return [(s.name, s.shape, s.box, s.span, s.data.double().clone()) for s in shards if s.name.startswith(prefix)]


def assemble(shards: Iterable[OwnedShard]) -> dict[str, Tensor]:
    """Return the full tensors by name, and check that every element is owned once."""
    boxes: dict[tuple[str, tuple[int, ...], Box], Tensor] = {}
    tensors: dict[str, Tensor] = {}
    for name, shape, box, span, values in shards:
        flat = boxes.setdefault((name, shape, box), torch.full((box.numel,), torch.nan, dtype=values.dtype))
        assert flat[span.start : span.stop].isnan().all(), f"{name} {box} {span} is owned twice"
        flat[span.start : span.stop] = values
    for (name, shape, box), flat in boxes.items():
        full = tensors.setdefault(name, torch.full(shape, torch.nan, dtype=flat.dtype))
        box_view(full, box).copy_(flat.view(box.shape))
    for name, full in tensors.items():
        assert not full.isnan().any(), f"{name}: some elements are owned by nobody"
    return tensors
