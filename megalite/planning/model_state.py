"""Bytes of weights, gradients and optimizer state of a rank.

    ModelStateBytes   exact: laid out in buckets as the run does, for a given split of the layers over stages
    MinModelState     a lower bound for any split: sums over layers, for the balance of stages and the search
    ShardCounts       the rule by ZeRO stage, for a number of parameters alone

tests/planning/test_model_state.py proves that the first equals what buffers and optimizer allocate, and that the second
is not above it.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import nn

from megalite.config.options import Config
from megalite.config.run_options import OptimConfig, ParallelConfig
from megalite.nn.parameter import main_param_dtype, name_in_unit
from megalite.optim.host_memory import pinned_bytes
from megalite.optim.optimizer_offload import allocation_sizes, offloaded_buckets
from megalite.optim.update_rule import build_rules
from megalite.optim.zero.layout import chunk_layout
from megalite.optim.zero.sharding import half_reduce_dtype, reduce_dtype
from megalite.parallel.mesh import Mesh
from megalite.parallel.spec import SHARD_AXES
from megalite.pipeline.schedule import ShardingPolicy, StagePlacement
from megalite.planning.layer_kinds import PrefixSums
from megalite.planning.muon_cost import MuonCost, muon_cost


@dataclass(frozen=True)
class ShardCounts:
    """The numbers of ranks over which weights, gradients, and the optimizer state are sharded."""

    weights: int = 1
    gradients: int = 1
    optimizer: int = 1

    @classmethod
    def from_config(cls, parallel: ParallelConfig, mesh: Mesh) -> "dict[str, ShardCounts]":
        """Return the counts for each mesh view."""
        counts = {}
        for view, (shard_axis, replicate_axis) in SHARD_AXES.items():
            num_shards = mesh.axis(shard_axis).size
            count = cls.for_zero_stage(parallel.effective_zero_stage, num_shards)
            if parallel.outer_dp_sharding_strategy == "optim" and num_shards > 1:
                count = replace(count, optimizer=count.optimizer * mesh.axis(replicate_axis).size)
            counts[view] = count
        return counts

    @classmethod
    def for_zero_stage(cls, stage: int, num_ranks: int) -> "ShardCounts":
        """Return the counts at a ZeRO stage on `num_ranks` ranks."""
        return cls(
            weights=num_ranks if stage >= 3 else 1,
            gradients=num_ranks if stage >= 2 else 1,
            optimizer=num_ranks if stage >= 1 else 1,
        )

    def bytes_of(self, weight: int, gradient: int, optimizer: float) -> float:
        """Return the bytes of an element per rank, given the bytes of its unsharded weight, gradient and state."""
        return weight / self.weights + gradient / self.gradients + optimizer / self.optimizer


@dataclass(frozen=True)
class UnitBucket:
    """A bucket of a unit whose weights or gradients are unsharded and resharded.

    Attributes:
        params: The names of its parameters in the unit.
        numel: Elements of the full bucket.
        weight_bytes: Bytes of the full weights.
        mesh_view: The mesh view of its parameters.
        reduce_itemsize: Bytes of an element of its gradients in their reduction over dp.
    """

    params: frozenset[str]
    numel: int
    weight_bytes: int
    mesh_view: str
    reduce_itemsize: int


@dataclass(frozen=True)
class ModelStateBytes:
    """The model state that each rank of a pipeline position always has allocated.

    Attributes:
        local_numel: Elements of the parameters on this rank, without ZeRO.
        padded_numel: Elements of all buckets with their padding, by mesh view.
        reduce_bytes: Bytes of the gradients of all buckets in their reduction over dp, by mesh view.
        owned_numel: Elements of the buckets that this rank's optimizer updates if its state is sharded.
        weights: Bytes of the weights; weights that are not sharded are full.
        gradients: Bytes of the gradients; gradients that are not sharded are full.
        optimizer: Bytes of main weights and optimizer state.
        weight_update_bytes: Bytes of the weights that this rank's optimizer updates if its state is sharded.
        unit_buckets: The buckets that are unsharded and resharded, by unit of the model, in the order of their
            reduction.
        muon: The cost of an update by Muon; None for another optimizer.
        host_bytes: Bytes of host memory for offloaded state.
        disk_bytes: Bytes on disk for offloaded state.
    """

    local_numel: int
    padded_numel: Mapping[str, int]
    reduce_bytes: Mapping[str, int]
    owned_numel: int
    weights: int
    gradients: int
    optimizer: int
    weight_update_bytes: int
    unit_buckets: Mapping[str, tuple[UnitBucket, ...]]
    muon: MuonCost | None = None
    host_bytes: int = 0
    disk_bytes: int = 0

    @classmethod
    def from_modules(
        cls,
        chunks: Sequence[nn.Module],
        mesh: Mesh,
        bytes_per_element: Callable[[bool, torch.dtype], tuple[int, int, int]],
        config: Config,
    ) -> "ModelStateBytes":
        """Return the model state of a rank.

        Args:
            chunks: The chunks of the model on the rank, on the meta device.
            mesh: The mesh of the rank.
            bytes_per_element: Returns the bytes of an element's weight, gradient and optimizer state; its arguments
                are whether the element is in a matrix, and the dtype of its weight.
            config: The configuration of the run.
        """
        optim, parallel = config.optim, config.parallel
        _, layout = chunk_layout(
            chunks,
            mesh,
            parallel.ddp_bucket_size,
            by_unit=parallel.effective_zero_stage > 1,
            **optim.separate_buckets(config.model.width_mult),
        )
        counts_by_view = ShardCounts.from_config(parallel, mesh)
        num_offloaded = len(offloaded_buckets(layout, optim.offload_fraction))
        weights = 0
        gradients = 0
        optimizer = 0
        owned_numel = 0
        weight_update_bytes = 0
        padded_numel = dict.fromkeys(counts_by_view, 0)
        reduce_bytes = dict.fromkeys(counts_by_view, 0)
        unit_buckets: dict[str, tuple[UnitBucket, ...]] = {}
        host_weight_sizes: list[int] = []
        for bucket in layout.buckets:
            view = bucket.key.mesh_view
            counts = counts_by_view[view] if bucket.key.unit else ShardCounts()
            weight_bytes, grad_bytes, state_bytes = bytes_per_element(bucket.key.is_matrix, bucket.key.dtype)
            local_weight_bytes = bucket.size // counts.weights * weight_bytes
            if parallel.param_cpu_offload and counts.weights > 1:
                host_weight_sizes.append(local_weight_bytes)
            else:
                weights += local_weight_bytes
            gradients += bucket.size // counts.gradients * grad_bytes
            if bucket.index >= num_offloaded:
                optimizer += bucket.size // counts_by_view[view].optimizer * state_bytes
            bucket_owned_numel = bucket.size // mesh.axis(SHARD_AXES[view][0]).size
            owned_numel += bucket_owned_numel
            weight_update_bytes += bucket_owned_numel * weight_bytes
            padded_numel[view] += bucket.size
            rounded_dtype = reduce_dtype(bucket.key.dtype, half_reduce_dtype(parallel))
            reduce_itemsize = grad_bytes if rounded_dtype is None else rounded_dtype.itemsize
            reduce_bytes[view] += bucket.size * reduce_itemsize
            if counts.gradients > 1:
                unit = bucket.key.unit
                params = frozenset(name_in_unit(layout.entries[slot.entry].spec, unit) for slot in bucket.slots)
                unit_bucket = UnitBucket(params, bucket.size, bucket.size * weight_bytes, view, reduce_itemsize)
                unit_buckets[unit] = (*unit_buckets.get(unit, ()), unit_bucket)

        # offloaded state always has main weights of its own, which are as wide as a gradient
        main_dtype = main_param_dtype(layout.buckets[0].key.dtype)
        _, grad_bytes, state_bytes = bytes_per_element(False, main_dtype)
        host_state_bytes = state_bytes + grad_bytes
        host_sizes = allocation_sizes(
            [
                bucket.size // counts_by_view[bucket.key.mesh_view].optimizer
                for bucket in layout.buckets[:num_offloaded]
            ],
            host_state_bytes,
            grad_bytes,
        )
        num_on_disk = num_offloaded if optim.optimizer_offload_dir else 0
        return cls(
            local_numel=sum(entry.numel for entry in layout.entries),
            padded_numel=padded_numel,
            reduce_bytes=reduce_bytes,
            owned_numel=owned_numel,
            weights=weights,
            gradients=gradients,
            optimizer=optimizer,
            weight_update_bytes=weight_update_bytes,
            unit_buckets=unit_buckets,
            muon=muon_cost(layout, mesh, optim, {view: counts.optimizer for view, counts in counts_by_view.items()}),
            host_bytes=pinned_bytes(host_sizes[num_on_disk:]) + pinned_bytes(host_weight_sizes),
            disk_bytes=sum(host_sizes[:num_on_disk]),
        )

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer


@dataclass(frozen=True)
class MinModelState:
    """A lower bound of the model state of a rank, in bytes on the device.

    It has no padding, shards every parameter, and counts no optimizer state if a part of it is offloaded, because the
    buckets decide how much of it stays on the device.

    Attributes:
        layers: The bytes of the layers.
        embedding: The bytes of the embedding.
        head: The bytes of what follows the layers: final norm, depths of multi-token prediction and head.
        is_tied: The head uses the embedding's weights if both are on one rank.
    """

    layers: PrefixSums
    embedding: float
    head: float
    is_tied: bool

    def on_rank(self, splits: np.ndarray, rank: int, placement: StagePlacement) -> Any:
        """Return the bytes [...] of a pipeline rank for `splits` [..., stages] of the layers."""
        stops = splits.cumsum(-1)
        starts = stops - splits
        stages = list(placement.stages_of_rank(rank))
        num_bytes = self.layers.between(starts[..., stages], stops[..., stages])[..., 0].sum(-1)
        if rank == 0:
            num_bytes = num_bytes + self.embedding
        if rank == placement.pp - 1 and not (self.is_tied and placement.pp == 1):
            num_bytes = num_bytes + self.head
        return num_bytes


def state_dtypes_of(optim: OptimConfig, matrix: bool) -> tuple[torch.dtype | None, ...]:
    """Return the dtypes of the optimizer's states of a parameter, None for the gradient's dtype."""
    rule, matrix_rule = build_rules(optim)
    if matrix and matrix_rule is not None:
        rule = matrix_rule
    return tuple(rule.state_dtypes.values())


def bytes_per_element(dtype: torch.dtype, state_dtypes: Sequence[torch.dtype | None]) -> tuple[int, int, int]:
    """Return the bytes of an element's weight, gradient, and optimizer state on the rank that updates it.

    Args:
        dtype: The dtype of the weights.
        state_dtypes: The dtypes of the optimizer's states, None for the gradient's dtype.
    """
    main_dtype = main_param_dtype(dtype)
    main_weight_bytes = 0 if main_dtype == dtype else main_dtype.itemsize
    state_bytes = sum((state_dtype or main_dtype).itemsize for state_dtype in state_dtypes)
    return dtype.itemsize, main_dtype.itemsize, main_weight_bytes + state_bytes


def sharding_policy(parallel: ParallelConfig, num_chunks: int) -> ShardingPolicy:
    """Return how often a rank with `num_chunks` chunks unshards its weights and reduces its gradients.

    A pass of forwards, a pass of backwards, and the next pass of each may be unsharded at the same time. With fewer
    chunks than these four, entire chunks would mean that all weights are unsharded.
    """
    is_auto = parallel.reshard_after_forward == "auto"
    by_chunk = parallel.reshard_after_forward == "chunk" or (is_auto and num_chunks >= 4)
    return ShardingPolicy(
        reduce_every_pass=parallel.effective_zero_stage > 1,
        unshard_by_chunk=by_chunk and parallel.effective_zero_stage > 2,
    )
