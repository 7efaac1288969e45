"""Which documents are of a split, and which order an epoch has: pure functions of lengths and keys.

    epoch e    the documents in the order of a shuffle of (seed, e), laid end to end: T tokens

Only the two epochs in use exist, at 12 bytes per document (`Epoch`). No table of samples is kept: where sample j begins
is arithmetic (token_line.py), and a binary search in `starts` finds the document there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalite.config.pattern import read_split
from megalite.data.errors import DataError
from megalite.data.samples.permutation import permutation


@dataclass(frozen=True)
class Epoch:
    """One pass over the documents: order [D] of document numbers, starts [D + 1] in tokens of the epoch."""

    order: NDArray[Any]
    starts: NDArray[np.int64]


def split_parts(split: str) -> list[tuple[float, float] | None]:
    """Training, validation and test: consecutive parts of 1 in proportion to three numbers; None for 0.

    >>> split_parts("3, 1")
    [(0.0, 0.75), (0.75, 1.0), None]
    """
    try:
        parts = read_split(split)
    except ValueError as error:
        raise DataError(f"split={split!r} {error}") from None
    borders = [sum(parts[:k]) / sum(parts) for k in range(4)]
    return [(a, b) if a < b else None for a, b in zip(borders, borders[1:], strict=False)]


def build_epoch(lengths: NDArray[Any], key: int) -> Epoch:
    """Shuffle the documents of `lengths` (numbered from 0) by `key`."""
    n, a = len(lengths), 0
    order = np.empty(n, np.int32 if n < 1 << 31 else np.int64)
    starts = np.zeros(n + 1, np.int64)
    for part in permutation(n, key):
        b = a + len(part)
        order[a:b] = part
        ends = starts[a + 1 : b + 1]
        ends[:] = np.take(lengths, part)
        ends[0] += starts[a]
        np.cumsum(ends, out=ends)
        a = b
    return Epoch(order, starts)
