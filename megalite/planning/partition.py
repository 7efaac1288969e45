"""Distributes the layers over the pipeline stages. Pure."""

import bisect
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence

LayerSplit = tuple[int, ...]  # number of layers of every stage
TIME_SLACK = 0.01  # share of the time that may be given up for less memory
MEMORY_SLACK = 0.25  # share of the leanest split's fullest rank that may be added for less time, so that it still fits


def even_split(num_layers: int, num_stages: int) -> LayerSplit:
    """As many layers for every stage; if some must have one more, the last ones have."""
    each, remainder = divmod(num_layers, num_stages)
    return tuple(each + (s >= num_stages - remainder) for s in range(num_stages))


def layer_ranges(split: Iterable[int]) -> list[range]:
    """The layers themselves.

    >>> layer_ranges((2, 0, 1))
    [range(0, 2), range(2, 2), range(2, 3)]
    """
    stops = list(itertools.accumulate(split))
    return [range(start, stop) for start, stop in zip([0, *stops], stops, strict=False)]


def candidate_splits(num_stages: int, costs: Sequence[int]) -> Sequence[LayerSplit]:
    """The splits that may be fast, for layers with these costs and at least two stages: any number of layers on the
    first and the last stage, the others balanced. The last stage has the head, so it needs no layer. The embedding
    costs no time, but it and the activations in flight on early stages take memory: the first may have few layers."""
    alike = len(set(costs)) == 1
    return _splits(num_stages, (1,) * len(costs) if alike else tuple(costs))


@functools.lru_cache(maxsize=256)
def _splits(num_stages: int, costs: tuple[int, ...]) -> tuple[LayerSplit, ...]:
    num_layers, others = len(costs), num_stages - 1
    sums = None if len(set(costs)) == 1 else [0, *itertools.accumulate(costs)]
    candidates = []
    for last in range(-(-num_layers // num_stages) + 2):
        rest = num_layers - last
        for first in range(1, -(-rest // others) + 2) if others > 1 else [rest]:
            if first >= 1 and rest - first >= others - 1:
                middle = ()
                if others > 1:
                    middle = (
                        balanced_split(sums, first, rest, others - 1) if sums else even_split(rest - first, others - 1)
                    )
                candidates.append((first, *middle, last))
    return tuple(candidates)


def balanced_split(sums: Sequence[int], start: int, stop: int, stages: int) -> LayerSplit:
    """Split the layers from start to stop into `stages` parts of at least one layer each, so that the cost of the
    costliest part is minimal; later parts take more. `sums`: the cost of all layers before each one."""
    least, most = 0, sums[stop] - sums[start]
    while least < most:
        middle = (least + most) // 2
        least, most = (least, middle) if _split_within(sums, start, stop, stages, middle) else (middle + 1, most)
    parts = _split_within(sums, start, stop, stages, most)
    assert parts is not None, "there are fewer layers than stages"
    return parts


def _split_within(sums: Sequence[int], start: int, stop: int, stages: int, most: int) -> LayerSplit | None:
    """Parts that cost at most `most`, filled from the end; None if there are none."""
    parts, end = [], stop
    for left in range(stages - 1, -1, -1):
        begin = max(bisect.bisect_left(sums, sums[end] - most, start, end), start + left)
        if begin >= end or (left == 0 and begin > start):
            return None
        parts.append(end - begin)
        end = begin
    return tuple(parts[::-1])


def choose_split(
    choices: Iterable[LayerSplit],
    bound: Callable[[LayerSplit], float],
    rate: Callable[[LayerSplit], tuple[float, float]],
    most: int,
) -> LayerSplit:
    """The split whose fullest rank holds the least, of those within TOLERANCE of the fastest that MORE_MEMORY allows.

    bound  a lower bound of the split's time
    rate   its time, and the bytes of its fullest rank; called for at most `most` splits, those with the lowest bound
    """
    evaluated: list[tuple[float, float, LayerSplit]] = []
    fast: list[tuple[float, float, LayerSplit]] = []
    for lowest, _, split in sorted((bound(split), i, split) for i, split in enumerate(choices))[:most]:
        if fast and lowest > (1 + TIME_SLACK) * min(time for _, time, _ in fast):
            break
        time, held = rate(split)
        evaluated.append((held, time, split))
        least = min(evaluated)[0]
        within_memory = [rating for rating in evaluated if rating[0] <= (1 + MEMORY_SLACK) * least]
        best = min(time for _, time, _ in within_memory)
        fast = [rating for rating in within_memory if rating[1] <= (1 + TIME_SLACK) * best]
    return min(fast)[-1]
