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
from megalite.optim.buffer import lay_out_chunks
from megalite.optim.exchange import Matrix, homes_of, matrices_of
from megalite.optim.flat_storage import main_dtype
from megalite.optim.host_memory import pinned_bytes
from megalite.optim.host_store import host_parts, moved
from megalite.optim.layout import Layout
from megalite.optim.muon import bytes_at_once
from megalite.optim.rule import rules_of
from megalite.parallel.mesh import Mesh
from megalite.parallel.spec import OWNERS
from megalite.pipeline.schedule import Placement, Sharing
from megalite.plan.kinds import Sums
from megalite.plan.meta import META, Meta


class Shares(NamedTuple):
    """How many ranks share out weights, gradients, and what the optimizer keeps."""

    weights: int
    gradients: int
    optimizer: int

    @classmethod
    def of(cls, p: ParallelConfig, mesh: Mesh) -> "Mapping[str, Shares]":
        """By home."""
        found = {}
        for home, axes in OWNERS.items():
            n, copies = (mesh.axis(name).size for name in axes)
            outer = copies if p.outer_dp_sharding_strategy == "optim" and n > 1 else 1
            shares = cls.at(p.shared_out, n)
            found[home] = shares._replace(optimizer=shares.optimizer * outer)
        return found

    @classmethod
    def at(cls, stage: int, n: int) -> "Shares":
        """Of n ranks, at a ZeRO stage."""
        return cls(n if stage > 2 else 1, n if stage > 1 else 1, n if stage else 1)

    def bytes_of(self, weight: int, gradient: int, optimizer: float) -> float:
        """Bytes on a rank of an element that is shared out, of which all ranks together have these."""
        return weight / self.weights + gradient / self.gradients + optimizer / self.optimizer


@dataclass(frozen=True)
class Holding:
    """The bytes that each rank of a pipeline position always holds. `matrices`: of an update of whole ones."""

    local: int  # elements of this rank's shares of the parameters
    elements: Mapping[str, int]  # of all buckets, with their padding, by home
    owned: int  # of these what is left where ranks share out the optimizer's state
    weights: int
    gradients: int
    optimizer: int
    units: Mapping[str, Mapping[str, int]]  # elements of what comes and goes by unit of the model, in order by home
    matrices: "WholeMatrices | None" = None
    host: int = 0  # beside the device's
    disk: int = 0

    @classmethod
    def of(
        cls, chunks: Sequence[nn.Module], mesh: Mesh, element: Callable[[bool], tuple[int, int, int]], config: Config
    ) -> "Holding":
        """What stays of weights and gradients is whole. `element`: its bytes, of a matrix or not."""
        o, p, shares = config.optim, config.parallel, Shares.of(config.parallel, mesh)
        _, layout = lay_out_chunks(chunks, mesh, p.ddp_bucket_size, by_unit=p.shared_out > 1, **o.apart)
        units, elements, held = dict[str, dict[str, int]](), dict.fromkeys(shares, 0), list[int]()
        weights = gradients = owned = 0
        for bucket in layout.buckets:
            by = shares[bucket.kind.home] if (unit := bucket.kind.unit) else Shares(1, 1, 1)
            part, on_host = bucket.size // by.weights, p.param_cpu_offload and by.weights > 1
            elements[bucket.kind.home] += bucket.size
            held += [part] * on_host
            weights += part * (not on_host)
            gradients += bucket.size // by.gradients
            owned += bucket.size // mesh.axis(OWNERS[bucket.kind.home][0]).size
            if by.gradients > 1:
                units.setdefault(unit, {})[bucket.kind.home] = bucket.size
        (weight, gradient, state), away = element(False), moved(layout, o.offloaded)
        state += gradient * (weight == gradient)  # of the host, which always has main weights of its own
        kept = [b.size // shares[b.kind.home].optimizer for b in layout.buckets]
        lent = host_parts(kept[: len(away)], state, gradient)
        on_disk = len(away) if o.optimizer_offload_folder else 0
        stay = zip(kept[len(away) :], layout.buckets[len(away) :], strict=True)
        return cls(
            local=sum(e.numel for e in layout.entries),
            elements=elements,
            owned=owned,
            weights=weights * weight,
            gradients=gradients * gradient,
            optimizer=sum(n * element(b.kind.matrix)[2] for n, b in stay),
            units=units,
            matrices=whole_matrices(layout, mesh, o, shares),
            host=pinned_bytes(lent[on_disk:]) + pinned_bytes([n * weight for n in held]),
            disk=sum(lent[:on_disk]),
        )

    @property
    def state(self) -> int:
        return self.weights + self.gradients + self.optimizer


@dataclass(frozen=True)
class WholeMatrices:
    """A step of Muon: `flops` of Newton-Schulz on a stage's busiest rank, bytes `moved` by each, most `at_once`."""

    flops: int
    moved: float
    at_once: int

    def __str__(self) -> str:
        flops = f"{self.flops / 1e12:.3g} TFLOP of Newton-Schulz on the rank with most"
        return flops + f", {self.moved / 2**30:.3g} GiB to their homes and back" * (self.moved > 0)


def whole_matrices(layout: Layout, mesh: Mesh, o: OptimConfig, shares: Mapping[str, Shares]) -> WholeMatrices | None:
    """As optim/exchange.py has it."""
    matrices, ranks = matrices_of(layout) if o.is_muon else [], mesh.stage.size
    if not matrices:
        return None
    loads, size = [0] * ranks, 2 if o.muon_fp32_matmul_prec == "medium" else 4
    for one, home in zip(matrices, homes_of(matrices, ranks), strict=True):
        loads[home] += newton_schulz_flops(one.rows, one.columns, o.muon_num_ns_steps)
    owned = sum(e.numel / shares[e.spec.home].optimizer for e in layout.entries if e.spec.is_matrix)
    once = sum(one.numel for one in matrices) / ranks
    moved = size * (once + owned) * (ranks > 1)  # of copies one is sent, and all come back
    return WholeMatrices(max(loads), moved, bytes_at_once(matrices, ranks, owned / once, size, _orthogonalised))


@functools.lru_cache(maxsize=4096)
def _orthogonalised(count: int, one: Matrix, size: int) -> int:
    """Bytes that so many matrices take while they are."""
    with Meta() as seen:
        whole = torch.empty(count, *one, dtype=torch.bfloat16 if size == 2 else torch.float32, device=META)
        newton_schulz(whole, coefficients("simple", 2))
    return seen.peak


class ModuleBytes(NamedTuple):
    """Bytes of weights, gradients and optimizer together on a rank, for layers, embedding and head."""

    layers: Sums
    embedding: float
    head: float

    def of(self, splits: np.ndarray, rank: int, place: Placement) -> Any:
        """The bytes [...] of a pipeline rank, with `splits` [..., stages] of the layers."""
        stops, own = splits.cumsum(-1), list(place.stages(rank))
        layers = self.layers.of((stops - splits)[..., own], stops[..., own])[..., 0].sum(-1)
        return layers + self.embedding * (rank == 0) + self.head * (rank == place.pp - 1)


def kept_of(o: OptimConfig, matrix: bool) -> tuple[torch.dtype | None, ...]:
    """dtypes of what the optimizer keeps of a parameter, as its rule says."""
    rule, of_matrices = rules_of(o)
    return tuple(((of_matrices if matrix else None) or rule).states.values())


def element_bytes(dtype: torch.dtype, states: Sequence[torch.dtype | None]) -> tuple[int, int, int]:
    """Bytes of an element's weight, gradient, and optimizer state on the rank that updates it. `states`: the dtypes of
    the optimizer's states, None as the gradient's."""
    wide = main_dtype(dtype)
    main = 0 if wide == dtype else wide.itemsize
    return dtype.itemsize, wide.itemsize, main + sum((state or wide).itemsize for state in states)


def sharing(p: ParallelConfig, chunks: int) -> Sharing:
    """How often what dp shares out meets, on ranks with so many chunks. A run of forwards, one of backwards and the
    next of both may be whole at once: with fewer chunks than that, all weights would be."""
    by_chunk = p.zero_hold == "chunk" or (p.zero_hold == "auto" and chunks >= 4)
    return Sharing(every_run=p.shared_out > 1, by_chunk=by_chunk and p.shared_out > 2)
