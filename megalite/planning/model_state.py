"""Bytes of weights, gradients and optimizer, per element and per rank, and what an update of whole matrices takes."""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from megalite.config.options import Config, OptimConfig
from megalite.config.run_options import ParallelConfig
from megalite.kernels.newton_schulz import coefficients, newton_schulz, newton_schulz_flops
from megalite.optim.buffer import chunk_layout
from megalite.optim.flat_buffers import main_param_dtype
from megalite.optim.host_memory import pinned_bytes
from megalite.optim.layout import BufferLayout
from megalite.optim.matrix_exchange import MatrixShape, assign_owners, matrix_shapes
from megalite.optim.muon import peak_bytes
from megalite.optim.optimizer_offload import allocation_sizes, offloaded_buckets
from megalite.optim.update_rule import build_rules
from megalite.parallel.mesh import Mesh
from megalite.parallel.spec import SHARD_AXES
from megalite.pipeline.schedule import ShardingPolicy, StagePlacement
from megalite.planning.layer_kinds import PrefixSums
from megalite.planning.meta_mode import META, MetaMode


class ShardCounts(NamedTuple):
    """How many ranks share out weights, gradients, and what the optimizer keeps."""

    weights: int
    gradients: int
    optimizer: int

    @classmethod
    def from_config(cls, p: ParallelConfig, mesh: Mesh) -> "Mapping[str, ShardCounts]":
        """By home."""
        found = {}
        for home, axes in SHARD_AXES.items():
            n, copies = (mesh.axis(name).size for name in axes)
            outer = copies if p.outer_dp_sharding_strategy == "optim" and n > 1 else 1
            shares = cls.for_zero_stage(p.effective_zero_stage, n)
            found[home] = shares._replace(optimizer=shares.optimizer * outer)
        return found

    @classmethod
    def for_zero_stage(cls, stage: int, n: int) -> "ShardCounts":
        """Of n ranks, at a ZeRO stage."""
        return cls(n if stage > 2 else 1, n if stage > 1 else 1, n if stage else 1)

    def bytes_of(self, weight: int, gradient: int, optimizer: float) -> float:
        """Bytes on a rank of an element that is shared out, of which all ranks together have these."""
        return weight / self.weights + gradient / self.gradients + optimizer / self.optimizer


@dataclass(frozen=True)
class ModelStateBytes:
    """The bytes that each rank of a pipeline position always holds. `matrices`: of an update of whole ones."""

    local_numel: int  # elements of this rank's shares of the parameters
    padded_numel: Mapping[str, int]  # of all buckets, with their padding, by home
    owned_numel: int  # of these what is left where ranks share out the optimizer's state
    weights: int
    gradients: int
    optimizer: int
    unit_numel: Mapping[
        str, Mapping[str, int]
    ]  # elements of what comes and goes by unit of the model, in order by home
    muon: "MuonCost | None" = None
    host_bytes: int = 0  # beside the device's
    disk_bytes: int = 0

    @classmethod
    def from_modules(
        cls, chunks: Sequence[nn.Module], mesh: Mesh, element: Callable[[bool], tuple[int, int, int]], config: Config
    ) -> "ModelStateBytes":
        """What stays of weights and gradients is whole. `element`: its bytes, of a matrix or not."""
        o, p, shares = config.optim, config.parallel, ShardCounts.from_config(config.parallel, mesh)
        _, layout = chunk_layout(
            chunks, mesh, p.ddp_bucket_size, by_unit=p.effective_zero_stage > 1, **o.separate_buckets
        )
        unit_numel, padded_numel, held = dict[str, dict[str, int]](), dict.fromkeys(shares, 0), list[int]()
        weights = gradients = owned_numel = 0
        for bucket in layout.buckets:
            by = shares[bucket.key.mesh_view] if (unit := bucket.key.unit) else ShardCounts(1, 1, 1)
            part, on_host = bucket.size // by.weights, p.param_cpu_offload and by.weights > 1
            padded_numel[bucket.key.mesh_view] += bucket.size
            held += [part] * on_host
            weights += part * (not on_host)
            gradients += bucket.size // by.gradients
            owned_numel += bucket.size // mesh.axis(SHARD_AXES[bucket.key.mesh_view][0]).size
            if by.gradients > 1:
                unit_numel.setdefault(unit, {})[bucket.key.mesh_view] = bucket.size
        (weight, gradient, total), offloaded = element(False), offloaded_buckets(layout, o.offload_fraction)
        total += gradient * (weight == gradient)  # of the host, which always has main weights of its own
        kept = [b.size // shares[b.key.mesh_view].optimizer for b in layout.buckets]
        host_sizes = allocation_sizes(kept[: len(offloaded)], total, gradient)
        on_disk = len(offloaded) if o.optimizer_offload_dir else 0
        stay = zip(kept[len(offloaded) :], layout.buckets[len(offloaded) :], strict=True)
        return cls(
            local_numel=sum(e.numel for e in layout.entries),
            padded_numel=padded_numel,
            owned_numel=owned_numel,
            weights=weights * weight,
            gradients=gradients * gradient,
            optimizer=sum(n * element(b.key.is_matrix)[2] for n, b in stay),
            unit_numel=unit_numel,
            muon=muon_cost(layout, mesh, o, shares),
            host_bytes=pinned_bytes(host_sizes[on_disk:]) + pinned_bytes([n * weight for n in held]),
            disk_bytes=sum(host_sizes[:on_disk]),
        )

    @property
    def total(self) -> int:
        return self.weights + self.gradients + self.optimizer


@dataclass(frozen=True)
class MuonCost:
    """A step of Muon: `flops` of Newton-Schulz on a stage's busiest rank, bytes `moved` by each, most `at_once`."""

    flops: int
    bytes_moved: float
    peak_bytes: int

    def __str__(self) -> str:
        flops = f"{self.flops / 1e12:.3g} TFLOP of Newton-Schulz on the rank with most"
        return flops + f", {self.bytes_moved / 2**30:.3g} GiB to their homes and back" * (self.bytes_moved > 0)


def muon_cost(layout: BufferLayout, mesh: Mesh, o: OptimConfig, shares: Mapping[str, ShardCounts]) -> MuonCost | None:
    """As optim/matrix_exchange.py has it."""
    muon, ranks = matrix_shapes(layout) if o.is_muon else [], mesh.dp_cp_tp.size
    if not muon:
        return None
    loads, size = [0] * ranks, 2 if o.muon_fp32_matmul_prec == "medium" else 4
    for one, home in zip(muon, assign_owners(muon, ranks), strict=True):
        loads[home] += newton_schulz_flops(one.rows, one.columns, o.muon_num_ns_steps)
    owned_numel = sum(e.numel / shares[e.spec.mesh_view].optimizer for e in layout.entries if e.spec.is_matrix)
    shard_numel = sum(one.numel for one in muon) / ranks
    bytes_moved = size * (shard_numel + owned_numel) * (ranks > 1)  # of copies one is sent, and all come back
    return MuonCost(
        max(loads), bytes_moved, peak_bytes(muon, ranks, owned_numel / shard_numel, size, _newton_schulz_bytes)
    )


@functools.lru_cache(maxsize=4096)
def _newton_schulz_bytes(count: int, one: MatrixShape, size: int) -> int:
    """Bytes that so many matrices take while they are."""
    with MetaMode() as seen:
        whole = torch.empty(count, *one, dtype=torch.bfloat16 if size == 2 else torch.float32, device=META)
        newton_schulz(whole, coefficients("simple", 2))
    return seen.peak


class ModuleStateBytes(NamedTuple):
    """Bytes of weights, gradients and optimizer together on a rank, for layers, embedding and head."""

    layers: PrefixSums
    embedding: float
    head: float

    def on_rank(self, splits: np.ndarray, rank: int, place: StagePlacement) -> Any:
        """The bytes [...] of a pipeline rank, with `splits` [..., stages] of the layers."""
        stops, own = splits.cumsum(-1), list(place.stages_of_rank(rank))
        layers = self.layers.between((stops - splits)[..., own], stops[..., own])[..., 0].sum(-1)
        return layers + self.embedding * (rank == 0) + self.head * (rank == place.pp - 1)


def state_dtypes_of(o: OptimConfig, matrix: bool) -> tuple[torch.dtype | None, ...]:
    """dtypes of what the optimizer keeps of a parameter, as its rule says."""
    rule, of_matrices = build_rules(o)
    return tuple(((of_matrices if matrix else None) or rule).state_dtypes.values())


def bytes_per_element(dtype: torch.dtype, states: Sequence[torch.dtype | None]) -> tuple[int, int, int]:
    """Bytes of an element's weight, gradient, and optimizer state on the rank that updates it. `states`: the dtypes of
    the optimizer's states, None as the gradient's."""
    wide = main_param_dtype(dtype)
    main = 0 if wide == dtype else wide.itemsize
    return dtype.itemsize, wide.itemsize, main + sum((total or wide).itemsize for total in states)


def sharding_policy(p: ParallelConfig, chunks: int) -> ShardingPolicy:
    """How often what dp shares out meets, on ranks with so many chunks. A run of forwards, one of backwards and the
    next of both may be whole at once: with fewer chunks than that, all weights would be."""
    by_chunk = p.reshard_after_forward == "chunk" or (p.reshard_after_forward == "auto" and chunks >= 4)
    return ShardingPolicy(
        reduce_every_pass=p.effective_zero_stage > 1, unshard_by_chunk=by_chunk and p.effective_zero_stage > 2
    )
