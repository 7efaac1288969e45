"""Which layers each pipeline stage holds. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator

Split = tuple[int, ...]  # layers of every stage
TOLERANCE = 0.01  # of the time, given for less memory
MORE_MEMORY = 0.25  # of the leanest split's fullest rank, at most, taken for less time: what fitted shall fit


def evenly(num_layers: int, num_stages: int) -> Split:
    """Of unequal stages the later one takes the layer."""
    each, more = divmod(num_layers, num_stages)
    return tuple(each + (s >= num_stages - more) for s in range(num_stages))


def ranges(split: Iterable[int]) -> list[range]:
    """The layers themselves.

    >>> ranges((2, 0, 1))
    [range(0, 2), range(2, 2), range(2, 3)]
    """
    stops = list(itertools.accumulate(split))
    return [range(start, stop) for start, stop in zip([0, *stops], stops, strict=False)]


def splits(num_layers: int, num_stages: int) -> Iterator[Split]:
    """Those that may be fast: of two stages or more the first and the last, which has the head and so needs no layer,
    are free, the others alike. The embedding is a look-up and costs no time; but it and what is in flight on early
    stages take memory, so the first may have few layers."""
    for last in range(-(-num_layers // num_stages) + 2):
        rest, others = num_layers - last, num_stages - 1
        for first in range(1, -(-rest // others) + 2) if others > 1 else [rest]:
            if first >= 1 and rest - first >= others - 1:
                yield (first, *(evenly(rest - first, others - 1) if others > 1 else ()), last)


def fastest(
    found: Iterable[Split],
    bound: Callable[[Split], float],
    rate: Callable[[Split], tuple[float, float]],
    most: int,
) -> Split:
    """Of those within TOLERANCE of the fastest, as far as MORE_MEMORY goes, the one whose fullest rank holds the least.

    bound  a time that no schedule of the split is below
    rate   its time, and what its fullest rank holds. Asked of `most` splits at most, those with the lowest bound
    """
    rated: list[tuple[float, float, Split]] = []
    fast: list[tuple[float, float, Split]] = []
    for below, _, split in sorted((bound(split), i, split) for i, split in enumerate(found))[:most]:
        if fast and below > (1 + TOLERANCE) * min(time for _, time, _ in fast):
            break
        time, held = rate(split)
        rated.append((held, time, split))
        least = min(rated)[0]
        lean = [one for one in rated if one[0] <= (1 + MORE_MEMORY) * least]
        best = min(time for _, time, _ in lean)
        fast = [one for one in lean if one[1] <= (1 + TOLERANCE) * best]
    return min(fast)[-1]
