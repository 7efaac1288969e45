"""What is done with the buckets of a kind: how they are shared out, over which ranks gradients are summed and in which
dtype, whether weights are gathered. Storage, reduction, gathering and the optimizer read it here; none of them asks the
mesh, or what else a kind is.

                      gradient, whole           gradient, owned                  weight
    shared out        reduce-scatter (shard)    all-reduce (replica, partial)    all-gather (shard)
    not shared out    all-reduce (replica)      all-reduce (partial)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from megalite.optim.layout import Bucket, Kind, Layout, Part, Slot
from megalite.parallel.mesh import Axis, Mesh
from megalite.parallel.spec import OWNERS


@dataclass(frozen=True)
class BucketRule:
    """Of one kind, on one rank.

    shard    shares a bucket out; of size 1 where each rank owns all of it, without the distributed optimizer
    replica  ranks that own the same
    sums     what is owned is summed over these, in this order, after the whole was over `shard` or else `replica`
    ends     and at last, where the parameter is tied, over the pipeline's ends
    moved_as the dtype of the whole gradient on its way; None: its own
    copies   ranks that own each element
    owners   what the mesh calls `shard` and `replica`, which may have the names of other axes with the same ranks
    """

    shard: Axis
    replica: Axis
    sums: tuple[Axis, ...]
    ends: Axis | None
    moved_as: torch.dtype | None
    copies: int
    owners: tuple[str, str]

    @property
    def is_shared_out(self) -> bool:
        return self.shard.size > 1

    @property
    def is_summed(self) -> bool:
        """Over data: other ranks have summands of the whole gradient."""
        return self.shard.size > 1 or self.replica.size > 1

    def owned(self, bucket: Bucket) -> range:
        """The elements of `bucket` that this rank owns."""
        return bucket.shard(self.shard.size, self.shard.rank)

    def seen_from(self, position: Mapping[str, int]) -> BucketRule:
        """The rule of the rank of the stage that is at `position`."""
        return replace(self, shard=replace(self.shard, rank=position[self.owners[0]]))

    def owned_part(self, bucket: Bucket, slot: Slot) -> Part:
        """Of the parameter in `slot` what this rank owns, maybe nothing."""
        owned = self.owned(bucket)
        first, last = max(slot.start, owned.start), min(slot.stop, owned.stop)
        return Part(range(first - slot.start, max(first, last) - slot.start), first - owned.start)


def rules_for(layout: Layout, mesh: Mesh, reduce_in_bf16: bool = False) -> Mapping[Kind, BucketRule]:
    """Of every kind that `layout` has."""
    return {kind: _rule(kind, mesh, reduce_in_bf16) for kind in {bucket.kind for bucket in layout.buckets}}


def _rule(kind: Kind, mesh: Mesh, reduce_in_bf16: bool) -> BucketRule:
    shard, replica = mesh.owners(kind.home)
    return BucketRule(
        shard,
        replica,
        sums=(*[replica] * (shard.size > 1), *map(mesh.axis, kind.partial)),
        ends=mesh.ends if kind.tied else None,
        moved_as=torch.bfloat16 if reduce_in_bf16 else None,
        copies=kind.replicas * replica.size,
        owners=OWNERS[kind.home],
    )
