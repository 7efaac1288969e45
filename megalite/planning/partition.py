"""Pure functions that distribute the layers over the pipeline stages."""

import bisect
import functools
import itertools
from collections.abc import Callable, Iterable, Sequence

LayerSplit = tuple[int, ...]  # number of layers of every stage
TIME_SLACK = 0.01  # fraction of the time that may be given up for less memory
MEMORY_SLACK = 0.25  # fraction of the smallest peak memory of all splits that may be added for less time


def even_split(num_layers: int, num_stages: int) -> LayerSplit:
    """Give every stage the same number of layers; with a remainder the last stages have one more."""
    layers_each, remainder = divmod(num_layers, num_stages)
    return tuple(layers_each + (stage >= num_stages - remainder) for stage in range(num_stages))


def layer_ranges(split: Iterable[int]) -> list[range]:
    """Return the layers of every stage as index ranges.

    >>> layer_ranges((2, 0, 1))
    [range(0, 2), range(2, 2), range(2, 3)]
    """
    stops = list(itertools.accumulate(split))
    return [range(start, stop) for start, stop in zip([0, *stops], stops, strict=False)]


def candidate_splits(num_stages: int, costs: Sequence[int]) -> Sequence[LayerSplit]:
    """Return the splits that may be fast, for layers with these costs and at least two stages.

    They have any plausible number of layers on the first and the last stage, with the other stages balanced. The last
    stage has the head, so it needs no layer. The embedding takes no time, but it and the activations in flight on early
    stages take memory, so the first stage may have few layers.
    """
    if len(set(costs)) == 1:
        return _candidate_splits(num_stages, (1,) * len(costs))  # share the cached result
    return _candidate_splits(num_stages, tuple(costs))


@functools.lru_cache(maxsize=256)
def _candidate_splits(num_stages: int, costs: tuple[int, ...]) -> tuple[LayerSplit, ...]:
    num_layers = len(costs)
    num_later = num_stages - 1  # stages after the first
    num_middle = num_stages - 2
    cost_sums = None if len(set(costs)) == 1 else [0, *itertools.accumulate(costs)]
    candidates = []
    for last in range(-(-num_layers // num_stages) + 2):
        rest = num_layers - last
        first_counts = range(1, -(-rest // num_later) + 2) if num_middle else [rest]
        for first in first_counts:
            if first < 1 or rest - first < num_middle:
                continue
            middle: LayerSplit = ()
            if num_middle and cost_sums is not None:
                middle = balanced_split(cost_sums, first, rest, num_middle)
            elif num_middle:
                middle = even_split(rest - first, num_middle)
            candidates.append((first, *middle, last))
    return tuple(candidates)


def balanced_split(cost_sums: Sequence[int], start: int, stop: int, num_stages: int) -> LayerSplit:
    """Split layers `start` to `stop` over `num_stages` stages so that the cost of the most expensive one is minimal.

    Every stage gets at least one layer. Among equally good splits, later stages get more layers. `cost_sums[i]` is the
    cost of all layers before layer i.
    """
    low = 0
    high = cost_sums[stop] - cost_sums[start]
    while low < high:
        limit = (low + high) // 2
        if _split_within(cost_sums, start, stop, num_stages, limit):
            high = limit
        else:
            low = limit + 1
    split = _split_within(cost_sums, start, stop, num_stages, high)
    assert split is not None, "there are fewer layers than stages"
    return split


def _split_within(cost_sums: Sequence[int], start: int, stop: int, num_stages: int, limit: int) -> LayerSplit | None:
    """Return a split with at most `limit` of cost per stage, filled from the end; None if there is none."""
    counts = []
    end = stop
    for stages_before in range(num_stages - 1, -1, -1):
        first = bisect.bisect_left(cost_sums, cost_sums[end] - limit, start, end)
        first = max(first, start + stages_before)
        if first >= end or (stages_before == 0 and first > start):
            return None
        counts.append(end - first)
        end = first
    return tuple(counts[::-1])


def choose_split(
    candidates: Iterable[LayerSplit],
    min_time: Callable[[LayerSplit], float],
    evaluate: Callable[[LayerSplit], tuple[float, float]],
    max_evaluated: int,
) -> LayerSplit:
    """Return the split with the least peak memory among those that are about as fast as the fastest.

    About as fast means within TIME_SLACK. Splits that need more than the least peak memory plus MEMORY_SLACK are left
    out first, because they may not fit.

    Args:
        candidates: The splits to choose from.
        min_time: Returns a lower bound of a split's time.
        evaluate: Returns a split's time and the bytes of its fullest rank.
        max_evaluated: The number of splits to evaluate at most, in the order of their lower bounds.
    """
    evaluated: list[tuple[float, float, LayerSplit]] = []  # (bytes, time, split)
    fast: list[tuple[float, float, LayerSplit]] = []
    ordered = sorted((min_time(split), i, split) for i, split in enumerate(candidates))
    for lower_bound, _, split in ordered[:max_evaluated]:
        if fast and lower_bound > (1 + TIME_SLACK) * min(time for _, time, _ in fast):
            break
        time, num_bytes = evaluate(split)
        evaluated.append((num_bytes, time, split))
        min_bytes = min(evaluated)[0]
        within_memory = [rating for rating in evaluated if rating[0] <= (1 + MEMORY_SLACK) * min_bytes]
        best_time = min(time for _, time, _ in within_memory)
        fast = [rating for rating in within_memory if rating[1] <= (1 + TIME_SLACK) * best_time]
    return min(fast)[-1]
