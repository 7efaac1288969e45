"""Full tensors, assembled from the shards that ranks own."""

from collections.abc import Iterable

import torch
from torch import Tensor

from megalite.optim.distributed_optimizer import DistributedOptimizer
from megalite.parallel.spec import Box

Owned = tuple[str, tuple[int, ...], Box, range, Tensor]  # as parallel/spec.py: Piece


def part_of(whole: Tensor, box: Box) -> Tensor:
    return whole[tuple(map(slice, box.start, box.stop))]


def owned(optimizer: DistributedOptimizer, prefix: str = "") -> list[Owned]:
    """Return copies in fp64 of the shards that this rank owns, of tensors whose names start with `prefix`."""
    pieces = (piece for piece in optimizer.checkpoint_shards() if piece.is_owner)
    return [(p.name, p.shape, p.box, p.span, p.data.double().clone()) for p in pieces if p.name.startswith(prefix)]


def whole_of(pieces: Iterable[Owned]) -> dict[str, Tensor]:
    """Return the full tensors by name, and check that every element is owned once."""
    boxes: dict[tuple[str, tuple[int, ...], Box], Tensor] = {}
    tensors: dict[str, Tensor] = {}
    for name, shape, box, span, values in pieces:
        flat = boxes.setdefault((name, shape, box), torch.full((box.numel,), torch.nan, dtype=values.dtype))
        assert flat[span.start : span.stop].isnan().all(), f"{name} {box} {span} is owned twice"
        flat[span.start : span.stop] = values
    for (name, shape, box), flat in boxes.items():
        whole = tensors.setdefault(name, torch.full(shape, torch.nan, dtype=flat.dtype))
        part_of(whole, box).copy_(flat.view(box.shape))
    for name, whole in tensors.items():
        assert not whole.isnan().any(), f"{name}: some elements are owned by nobody"
    return tensors
