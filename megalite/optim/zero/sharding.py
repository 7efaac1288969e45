"""The sharding of buckets: over which ranks weights are gathered, and gradients summed and sharded, and in which dtype.

Buckets and the optimizer read it from here; none of them looks at the mesh or at other properties of a bucket.

                     full gradient                  shard of the gradient               weight
    sharded          reduce-scatter (dp_shard)      all-reduce (dp_replicate,           all-gather (dp_shard)
                                                    partial_grad_axes)
    sharded twice    reduce-scatter (dp_shard)      reduce-scatter (dp_replicate),      all-gather (dp_replicate,
                                                    all-reduce (partial_grad_axes)      then dp_shard)
    not sharded      all-reduce (dp_replicate)      all-reduce (partial_grad_axes)

"Sharded twice" is for replicas on distant nodes (ZeRO++'s secondary partition, arXiv:2306.10209, sec. 3.2): weights are
sharded within a set of ranks, and the optimizer state over all sets.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from megalite.config.options import ParallelConfig
from megalite.optim.zero.layout import BucketKey, BucketLayout, BufferLayout
from megalite.parallel.mesh import Axis, Mesh
from megalite.parallel.spec import SHARD_AXES


@dataclass(frozen=True)
class BucketSharding:
    """The sharding and reduction of all buckets with one key, seen from one rank.

    Attributes:
        shard_axis: ranks that shard a bucket; size 1 without the distributed optimizer, where each rank owns all of it.
        replicate_axis: ranks with the same shard.
        outer_shard_axis: if its size is not 1, these ranks of `replicate_axis` split each shard again, and each of them
            owns a part.
        sum_axes: axes over which the owned part of the gradient is all-reduced, in this order, after the full gradient
            was reduced over `shard_axis`, or over `replicate_axis` if it is not sharded.
        tied_axis: the first and the last pipeline rank, over which the gradients of tied parameters are summed last;
            None for other parameters.
        reduce_dtype: dtype of the full gradient in its reduction; None: its own.
        num_owners: number of ranks that own each element.
        axis_names: names of `shard_axis` and `replicate_axis` in the mesh. Their own names may differ: axes over the
            same ranks share one object.
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
        """True if ranks have different shards of a bucket."""
        return self.shard_axis.size > 1

    def can_reshard(self, bucket: BucketLayout) -> bool:
        """Return True if the full tensor of `bucket` can be freed: a unit uses it as a whole, and ranks have shards."""
        return bool(bucket.key.unit) and self.is_sharded

    def shard_range(self, bucket: BucketLayout) -> range:
        """Return the elements of `bucket` in this rank's shard."""
        return bucket.shard_range(self.shard_axis.size, self.shard_axis.rank)

    def owned_range(self, bucket: BucketLayout) -> range:
        """Return the part of its shard that this rank owns: it updates these elements and has their optimizer state."""
        shard_range = self.shard_range(bucket)
        size = len(shard_range) // self.outer_shard_axis.size
        return shard_range[self.outer_shard_axis.rank * size : (self.outer_shard_axis.rank + 1) * size]

    def on_rank_at(self, coordinates: Mapping[str, int]) -> "BucketSharding":
        """Return the sharding seen from the rank of the same pipeline stage with these coordinates."""
        shard_rank, replicate_rank = (coordinates[name] for name in self.axis_names)
        outer_shard_axis = self.outer_shard_axis
        if outer_shard_axis.size > 1:
            outer_shard_axis = replace(outer_shard_axis, rank=replicate_rank)
        return replace(self, shard_axis=replace(self.shard_axis, rank=shard_rank), outer_shard_axis=outer_shard_axis)


def half_reduce_dtype(parallel: ParallelConfig) -> torch.dtype | None:
    """Return the half precision in which the options reduce gradients of weights in it; None: in no half precision."""
    if parallel.grad_reduce_in_fp16:
        return torch.float16
    return torch.bfloat16 if parallel.grad_reduce_in_bf16 else None


def reduce_dtype(weight_dtype: torch.dtype, half_dtype: torch.dtype | None) -> torch.dtype | None:
    """Return the dtype in which full gradients of weights are reduced over the data axis; None: their own.

    This is `half_dtype` for weights of that dtype; gradients of fp32 weights in a bf16 or fp16 model keep fp32.
    """
    return half_dtype if weight_dtype == half_dtype else None


def bucket_shardings(
    layout: BufferLayout, mesh: Mesh, half_dtype: torch.dtype | None = None, shard_over_replicas: bool = False
) -> Mapping[BucketKey, BucketSharding]:
    """Return the sharding for every key in `layout`.

    Args:
        layout: the buckets.
        mesh: the mesh.
        half_dtype: reduce full gradients of weights of this dtype in it (`reduce_dtype`).
        shard_over_replicas: split the shards again over replicas.
    """
    shardings = {}
    for key in {bucket.key for bucket in layout.buckets}:
        axis_names = SHARD_AXES[key.mesh_view]
        shard_axis, replicate_axis = map(mesh.axis, axis_names)
        outer_shard_axis = replicate_axis if shard_over_replicas and shard_axis.size > 1 else Axis("dp_replicate")
        sum_axes = [mesh.axis(name) for name in key.partial_grad_axes]
        if shard_axis.size > 1 and outer_shard_axis.size == 1:
            sum_axes.insert(0, replicate_axis)
        shardings[key] = BucketSharding(
            shard_axis,
            replicate_axis,
            outer_shard_axis,
            sum_axes=tuple(sum_axes),
            tied_axis=mesh.tied_embedding if key.tied else None,
            reduce_dtype=reduce_dtype(key.dtype, half_dtype),
            num_owners=key.replicas * replicate_axis.size // outer_shard_axis.size,
            axis_names=axis_names,
        )
    return shardings
