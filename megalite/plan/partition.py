"""Which layers each pipeline stage holds. Pure."""

from __future__ import annotations

import bisect
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence

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


def splits(num_stages: int, costs: Sequence[int]) -> Sequence[Split]:
    """Those that may be fast, of layers with these costs: of two stages or more the first and the last, which has the
    head and so needs no layer, are free, the others alike. The embedding is a look-up and costs no time; but it and
    what is in flight on early stages take memory, so the first may have few layers."""
    alike = len(set(costs)) == 1
    return _splits(num_stages, (1,) * len(costs) if alike else tuple(costs))


@functools.lru_cache(maxsize=256)
def _splits(num_stages: int, costs: tuple[int, ...]) -> tuple[Split, ...]:
    num_layers, others = len(costs), num_stages - 1
    sums = None if len(set(costs)) == 1 else [0, *itertools.accumulate(costs)]
    found = []
    for last in range(-(-num_layers // num_stages) + 2):
        rest = num_layers - last
        for first in range(1, -(-rest // others) + 2) if others > 1 else [rest]:
            if first >= 1 and rest - first >= others - 1:
                middle = () if others == 1 else evenly(rest - first, others - 1)
                if sums and middle:
                    middle = levelled(sums, first, rest, others - 1)
                found.append((first, *middle, last))
    return tuple(found)


def levelled(sums: Sequence[int], start: int, stop: int, stages: int) -> Split:
    """The layers from start to stop in `stages` parts, each with one at least, of which the costliest costs as little
    as can be; later parts take more. `sums`: what the layers before each one cost."""
    least, most = 0, sums[stop] - sums[start]
    while least < most:
        middle = (least + most) // 2
        least, most = (least, middle) if _within(sums, start, stop, stages, middle) else (middle + 1, most)
    parts = _within(sums, start, stop, stages, most)
    assert parts is not None, "there are fewer layers than stages"
    return parts


def _within(sums: Sequence[int], start: int, stop: int, stages: int, most: int) -> Split | None:
    """Parts that cost no more than `most`, from behind; None where there are none."""
    parts, end = [], stop
    for left in range(stages - 1, -1, -1):
        begin = max(bisect.bisect_left(sums, sums[end] - most, start, end), start + left)
        if begin >= end or (left == 0 and begin > start):
            return None
        parts.append(end - begin)
        end = begin
    return tuple(parts[::-1])


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
