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

from megalite.optim.layout import Bucket, BucketKey, BufferLayout
from megalite.parallel.mesh import Axis, Mesh
from megalite.parallel.spec import SHARD_AXES


@dataclass(frozen=True)
class BucketSharding:
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

    shard_axis: Axis
    replicate_axis: Axis
    outer_shard_axis: Axis
    sum_axes: tuple[Axis, ...]
    tied_axis: Axis | None
    reduce_dtype: torch.dtype | None
    num_owners: int
    axis_names: tuple[str, str]

    @property
    def is_sharded(self) -> bool:
        return self.shard_axis.size > 1

    def shard_range(self, bucket: Bucket) -> range:
        """The elements of `bucket` that are this rank's part of those that share it out."""
        return bucket.shard_range(self.shard_axis.size, self.shard_axis.rank)

    def owned_range(self, bucket: Bucket) -> range:
        """Of these the elements that this rank owns: that it keeps the optimizer's states of, and updates."""
        shard_range = self.shard_range(bucket)
        size = len(shard_range) // self.outer_shard_axis.size
        return shard_range[self.outer_shard_axis.rank * size : (self.outer_shard_axis.rank + 1) * size]

    def on_rank_at(self, position: Mapping[str, int]) -> "BucketSharding":
        """The rule of the rank of the stage that is at `position`."""
        shard_rank, replicate_rank = (position[name] for name in self.axis_names)
        outer = self.outer_shard_axis
        return replace(
            self,
            shard_axis=replace(self.shard_axis, rank=shard_rank),
            outer_shard_axis=replace(outer, rank=replicate_rank) if outer.size > 1 else outer,
        )


def bucket_shardings(
    layout: BufferLayout, mesh: Mesh, reduce_in_bf16: bool = False, shard_over_replicas: bool = False
) -> Mapping[BucketKey, BucketSharding]:
    """Of every kind that `layout` has. `once_more`: what is shared out is so over replicas, too."""
    rules = {}
    for kind in {bucket.key for bucket in layout.buckets}:
        shard_axis, replicate_axis = map(mesh.axis, SHARD_AXES[kind.mesh_view])
        outer_shard_axis = replicate_axis if shard_over_replicas and shard_axis.size > 1 else Axis("dp_replicate")
        rules[kind] = BucketSharding(
            shard_axis,
            replicate_axis,
            outer_shard_axis,
            sum_axes=(
                *[replicate_axis] * (shard_axis.size > 1 and outer_shard_axis.size == 1),
                *map(mesh.axis, kind.partial_grad_axes),
            ),
            tied_axis=mesh.tied_embedding if kind.tied else None,
            reduce_dtype=torch.bfloat16 if reduce_in_bf16 else None,
            num_owners=kind.replicas * replicate_axis.size // outer_shard_axis.size,
            axis_names=SHARD_AXES[kind.mesh_view],
        )
    return rules
