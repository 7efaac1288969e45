"""Bytes of weights, gradients and optimizer: of an element, and of a rank; what an update of whole matrices takes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from megalite.config.options import OptimConfig
from megalite.kernels.newton_schulz import newton_schulz_flops
from megalite.optim.exchange import homes_of, matrices_of
from megalite.optim.flat_storage import main_dtype
from megalite.optim.layout import Layout
from megalite.parallel.mesh import Mesh
from megalite.pipeline.schedule import Placement
from megalite.plan.sums import Sums


@dataclass(frozen=True)
class Holding:
    """What each rank of one pipeline position holds all the time, in bytes. `matrices`: of its update, where matrices
    are updated as such."""

    local: int  # elements of this rank's shares of the parameters
    weights: int
    gradients: int
    optimizer: int
    matrices: WholeMatrices | None = None

    @property
    def state(self) -> int:
        return self.weights + self.gradients + self.optimizer


@dataclass(frozen=True)
class WholeMatrices:
    """Of a step of Muon: `flops` of Newton-Schulz on the rank of a stage that has most, bytes `moved` by each."""

    flops: int
    moved: float

    def __str__(self) -> str:
        flops = f"{self.flops / 1e12:.3g} TFLOP of Newton-Schulz on the rank with most"
        return flops + f", {self.moved / 2**30:.3g} GiB to their homes and back" * (self.moved > 0)


def whole_matrices(layout: Layout, mesh: Mesh, o: OptimConfig) -> WholeMatrices | None:
    """As optim/exchange.py has it."""
    if not o.is_muon:
        return None
    matrices, ranks = matrices_of(layout), mesh.stage.size
    loads, size = [0] * ranks, 2 if o.muon_fp32_matmul_prec == "medium" else 4
    for one, home in zip(matrices, homes_of(matrices, ranks), strict=True):
        loads[home] += newton_schulz_flops(one.rows, one.columns, o.muon_num_ns_steps)
    owned = sum(e.numel for e in layout.entries if e.spec.is_matrix) / mesh.shard.size
    moved = sum(one.numel for one in matrices) / ranks + owned  # of copies one is sent, and all come back
    return WholeMatrices(max(loads), size * moved * (ranks > 1))


class ModuleBytes(NamedTuple):
    """Of weights, gradients and optimizer on a rank: of the layers, the embedding and the head."""

    layers: Sums
    embedding: float
    head: float

    def of(self, splits: np.ndarray, rank: int, place: Placement) -> Any:
        """Of a pipeline rank, with `splits` [..., stages] of the layers."""
        stops, mine = splits.cumsum(-1), list(place.stages(rank))
        layers = self.layers.of((stops - splits)[..., mine], stops[..., mine])[..., 0].sum(-1)
        return layers + self.embedding * (rank == 0) + self.head * (rank == place.pp - 1)


def kept_of(o: OptimConfig, matrix: bool) -> tuple[str, ...]:
    """dtypes of what the optimizer keeps of a parameter."""
    if o.optimizer in ("sgd", "lars") or (o.is_muon and matrix):
        return ("fp32",)
    return o.exp_avg_dtype, o.exp_avg_sq_dtype


def element_bytes(dtype: torch.dtype, states: Sequence[str]) -> tuple[int, int, int]:
    """Of an element: weight, gradient, and what the optimizer keeps of it on the rank that updates it. `states`: the
    dtypes of its states."""
    wide = main_dtype(dtype).itemsize
    main = 0 if wide == dtype.itemsize else wide
    return dtype.itemsize, wide, main + sum(2 if state == "bf16" else 4 for state in states)
