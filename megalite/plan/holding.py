"""Bytes of weights, gradients and optimizer, per element and per rank."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch

from megalite.optim.flat_storage import main_dtype
from megalite.pipeline.schedule import Placement
from megalite.plan.sums import Sums


@dataclass(frozen=True)
class Holding:
    """The bytes that each rank of one pipeline position always holds."""

    local: int  # elements of this rank's shares of the parameters
    weights: int
    gradients: int
    optimizer: int

    @property
    def state(self) -> int:
        return self.weights + self.gradients + self.optimizer


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


def element_bytes(dtype: torch.dtype, states: Sequence[str]) -> tuple[int, int, int]:
    """Bytes of an element's weight, gradient, and optimizer state on the rank that updates it. `states`: the dtypes of
    the optimizer's states."""
    wide = main_dtype(dtype).itemsize
    main = 0 if wide == dtype.itemsize else wide
    return dtype.itemsize, wide, main + sum(2 if state == "bf16" else 4 for state in states)
