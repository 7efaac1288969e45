"""The order in which the sources of a blend give samples: within one sample of the weights at every prefix.

After n samples, source k has given floor(w_k n) or ceil(w_k n) of them, exactly, for every n. Its j-th sample may
come when w_k n > j and must have come when w_k n >= j + 1; among the sources that may, the one that must soonest is
next (earliest deadline first: with these windows it never misses one; Still, 1979, "quota methods").

Weights are exact fractions, so the order repeats: 0.3 and 0.7 after 10 samples. One period is computed, as far as it is
needed. A period longer than PERIOD samples (weights that are token counts) is cut there and repeated; the counts are
then exact up to n = PERIOD, and off by less than 1 + n/PERIOD beyond.
"""

import heapq
import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalite.data.errors import DataError

PERIOD = 1_000_000  # weights with up to six decimals are exact


class BlendOrder:
    """`at(i)` -> which source gives sample i of the blend, and which of its samples that is."""

    def __init__(self, weights: Sequence[float | int]):
        if not weights:
            raise DataError("a blend needs at least one source")
        for weight in weights:
            if not (math.isfinite(weight) and weight > 0):
                raise DataError(f"blend weight {weight} is not a number > 0; drop the source instead")
        exact = [Fraction(str(weight)) for weight in weights]  # 0.1 means 1/10
        total = sum(exact)
        shares = [weight / total for weight in exact]
        self.denominator = math.lcm(*(share.denominator for share in shares))
        self.numerators = [share.numerator * (self.denominator // share.denominator) for share in shares]
        self.period = min(self.denominator, PERIOD)
        self._source = np.empty(0, np.int32)
        self._rank = np.empty(0, np.int32)  # how many times the source appears earlier in the period
        self._counts = [0] * len(weights)  # up to the end of the computed part
        self._ready: list[tuple[int, int]] = []  # (deadline, source) of sources that may go
        self._waiting = [(1, k) for k in range(len(weights))]  # (prefix length from which the source may go, source)

    def at(self, index: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(source, sample number within it) for each blend sample in `index`."""
        index = np.asarray(index, np.int64)
        periods, within = np.divmod(index, self.period)
        self._extend(self.period if periods.any() else int(within.max(initial=-1)) + 1)
        source = self._source[within].astype(np.int64)  # beyond a period all of it is known, and so its counts
        return source, self._rank[within] + periods * np.asarray(self._counts, np.int64)[source]

    def counts(self, samples: int) -> list[int]:
        """How many of the first `samples` samples each source gives."""
        periods, within = divmod(samples, self.period)
        self._extend(self.period if periods else within)
        counts = np.bincount(self._source[:within], minlength=len(self._counts))
        return (counts + periods * np.asarray(self._counts, np.int64)).tolist()

    def _extend(self, length: int) -> None:
        if length <= (done := len(self._source)):
            return
        length = min(self.period, max(length, 2 * done, 4096))
        sources, ranks = [], []
        counts, ready, waiting = self._counts, self._ready, self._waiting
        for n in range(done + 1, length + 1):  # prefix length after this choice
            while waiting and waiting[0][0] <= n:
                _, k = heapq.heappop(waiting)
                deadline = -(-(counts[k] + 1) * self.denominator // self.numerators[k])
                heapq.heappush(ready, (deadline, k))
            _, k = heapq.heappop(ready)
            sources.append(k)
            ranks.append(counts[k])
            counts[k] += 1
            heapq.heappush(waiting, (counts[k] * self.denominator // self.numerators[k] + 1, k))
        self._source = np.concatenate([self._source, np.array(sources, np.int32)])
        self._rank = np.concatenate([self._rank, np.array(ranks, np.int32)])
