"""Sums of figures over the layers of a stage, which may differ."""

from collections.abc import Sequence
from typing import Any

import numpy as np


class Sums:
    """Sums over any range of layers by prefix sums, in O(1), also for arrays of ranges. Sums of integers are exact.

    rows           [layers, figures]
    again, first   rows that count instead for the `first` layers of each stage
    """

    def __init__(self, rows: Sequence[Sequence[float]], again: Sequence[Sequence[float]] | None = None, first: int = 0):
        self.each, self.first = np.array(rows), first
        self._plain, self._again = _prefix(rows), None if again is None else _prefix(again)

    def of(self, starts: Any, stops: Any) -> np.ndarray:
        """Sums [..., figures] over the layers from start to stop, which are numbers or arrays."""
        if self._again is None:
            return self._plain[stops] - self._plain[starts]
        middles = np.minimum(np.asarray(starts) + self.first, stops)
        return self._again[middles] - self._again[starts] + self._plain[stops] - self._plain[middles]


def _prefix(rows: Sequence[Sequence[float]]) -> np.ndarray:
    table = np.array(rows)
    return np.concatenate([np.zeros_like(table[:1]), table.cumsum(0)])
