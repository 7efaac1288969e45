"""The memory of weights and gradients, one flat tensor each, of which parameters are views; what of it a rank owns."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megalite.optim.layout import Bucket, Layout, Slot
from megalite.parallel.mesh import Mesh


def main_dtype(weights: torch.dtype) -> torch.dtype:
    """What gradients, main weights and states are kept in."""
    return torch.float64 if weights == torch.float64 else torch.float32


class FlatStorage:
    """Of `parameters`, the entries of `layout`. Each bucket is shared out over the mesh's shard axis of its home."""

    def __init__(self, parameters: Sequence[nn.Parameter], layout: Layout, mesh: Mesh):
        self.parameters, self.layout, self.mesh = parameters, layout, mesh
        dtypes, device = {p.dtype for p in parameters}, parameters[0].device
        if len(dtypes) != 1:
            raise ValueError(f"parameters have dtypes {sorted(map(str, dtypes))}, a buffer has one: build them alike")
        dtype = dtypes.pop()
        self.weights = torch.zeros(layout.size, dtype=dtype, device=device)
        for bucket in layout.buckets:
            for slot in bucket.slots:
                p = parameters[slot.entry]
                view = self.view(self.weights, slot)
                view.copy_(p.data)
                p.data = view
        # the old weights are gone by now
        self.grads = torch.zeros(layout.size, dtype=main_dtype(dtype), device=device)

    def view(self, flat: Tensor, slot: Slot) -> Tensor:
        """The part of `flat` that is a parameter's, in its shape."""
        return flat[slot.start : slot.stop].view_as(self.parameters[slot.entry])

    def owned_range(self, bucket: Bucket) -> range:
        shard, _ = self.mesh.owners(bucket.kind.home)
        return bucket.shard(shard.size, shard.rank)

    def owned_grad(self, bucket: Bucket) -> Tensor:
        owned = self.owned_range(bucket)
        return self.grads[owned.start : owned.stop]

    def owned_weight(self, bucket: Bucket) -> Tensor:
        owned = self.owned_range(bucket)
        return self.weights[owned.start : owned.stop]
