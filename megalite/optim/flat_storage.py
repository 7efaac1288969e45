"""The memory of weights or of gradients: a flat tensor for each bucket, so that each can come and go by itself."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from megalite.optim.bucket_rule import BucketRule
from megalite.optim.layout import Bucket, Kind, Layout, Part, Slot


def main_dtype(weights: torch.dtype) -> torch.dtype:
    """What gradients, main weights and states are kept in."""
    return torch.float64 if weights == torch.float64 else torch.float32


class FlatStorage:
    """Zeros for the entries of `layout`, whose kinds have `rules`; or, where they are given, the values of
    `parameters`, which become views of it."""

    def __init__(
        self,
        layout: Layout,
        rules: Mapping[Kind, BucketRule],
        dtype: torch.dtype,
        device: torch.device,
        parameters: Sequence[nn.Parameter] = (),
    ):
        self.layout, self.rules, self.dtype = layout, rules, dtype
        self.flats: list[Tensor] = []  # of the buckets, in order
        for bucket in layout.buckets:  # one by one: what a parameter had is let go of before the next
            self.flats.append(torch.zeros(bucket.size, dtype=dtype, device=device))
            for p, slot in ((parameters[slot.entry], slot) for slot in bucket.slots if parameters):
                view = self.part(slot).view_as(p)
                view.copy_(p.data)
                p.data = view

    @property
    def nbytes(self) -> int:
        return sum(flat.nbytes for flat in self.flats)

    def whole(self, bucket: Bucket) -> Tensor:
        """All elements of the bucket, padding included."""
        return self.flats[bucket.number]

    def owned(self, bucket: Bucket) -> Tensor:
        """Those that this rank owns."""
        owned = self.rules[bucket.kind].owned(bucket)
        return self.whole(bucket)[owned.start : owned.stop]

    def part(self, slot: Slot) -> Tensor:
        """All elements of a parameter, flat."""
        return self.flats[slot.bucket][slot.start : slot.stop]

    def owned_part(self, bucket: Bucket, slot: Slot) -> Part:
        """Of a parameter what this rank owns: which of its elements, and where in `owned`."""
        return self.rules[bucket.kind].owned_part(bucket, slot)
