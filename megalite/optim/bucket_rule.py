"""What is done with the buckets of a kind: how they are shared out, over which ranks gradients are summed and in which
dtype, whether weights are gathered. Storage, reduction, gathering and the optimizer read it here; none of them asks the
mesh, or what else a kind is.

                      gradient, whole           what is kept of it               weight
    shared out        reduce-scatter (shard)    all-reduce (replica, partial)    all-gather (shard)
    and once more     reduce-scatter (shard)    reduce-scatter (replica)         all-gather (replica, then shard)
                                                all-reduce (partial)
    not shared out    all-reduce (replica)      all-reduce (partial)

"Once more" is for replicas far apart (ZeRO++'s secondary partition, arXiv:2306.10209, sec. 3.2): weights stay shared
out within a set of ranks, and what the optimizer keeps is shared out over all of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from megalite.optim.layout import Bucket, Kind, Layout
from megalite.parallel.mesh import Axis, Mesh
from megalite.parallel.spec import OWNERS


@dataclass(frozen=True)
class BucketRule:
    """Of one kind, on one rank.

    shard    shares a bucket out; of size 1 where each rank owns all of it, without the distributed optimizer
    replica  ranks that hold the same
    outer    shares out once more, over `replica`, what these hold: to each rank what it owns; or of size 1
    sums     what is owned is summed over these, in this order, after the whole was over `shard` or else `replica`
    ends     and at last, where the parameter is tied, over the pipeline's ends
    moved_as the dtype of the whole gradient on its way; None: its own
    copies   ranks that own each element
    owners   what the mesh calls `shard` and `replica`, which may have the names of other axes with the same ranks
    """

    shard: Axis
    replica: Axis
    outer: Axis
    sums: tuple[Axis, ...]
    ends: Axis | None
    moved_as: torch.dtype | None
    copies: int
    owners: tuple[str, str]

    @property
    def is_shared_out(self) -> bool:
        return self.shard.size > 1

    def held(self, bucket: Bucket) -> range:
        """The elements of `bucket` that are this rank's part of those that share it out."""
        return bucket.shard(self.shard.size, self.shard.rank)

    def owned(self, bucket: Bucket) -> range:
        """Of these the elements that this rank owns: that it keeps the optimizer's states of, and updates."""
        held = self.held(bucket)
        size = len(held) // self.outer.size
        return held[self.outer.rank * size : (self.outer.rank + 1) * size]

    def seen_from(self, position: Mapping[str, int]) -> "BucketRule":
        """The rule of the rank of the stage that is at `position`."""
        shard, replica = (position[name] for name in self.owners)
        outer = replace(self.outer, rank=replica) if self.outer.size > 1 else self.outer
        return replace(self, shard=replace(self.shard, rank=shard), outer=outer)


def rules_for(
    layout: Layout, mesh: Mesh, reduce_in_bf16: bool = False, once_more: bool = False
) -> Mapping[Kind, BucketRule]:
    """Of every kind that `layout` has. `once_more`: what is shared out is so over replicas, too."""
    rules = {}
    for kind in {bucket.kind for bucket in layout.buckets}:
        shard, replica = map(mesh.axis, OWNERS[kind.home])
        outer = replica if once_more and shard.size > 1 else Axis("replica")
        rules[kind] = BucketRule(
            shard,
            replica,
            outer,
            sums=(*[replica] * (shard.size > 1 and outer.size == 1), *map(mesh.axis, kind.partial)),
            ends=mesh.ends if kind.tied else None,
            moved_as=torch.bfloat16 if reduce_in_bf16 else None,
            copies=kind.replicas * replica.size // outer.size,
            owners=OWNERS[kind.home],
        )
    return rules
