"""Which layers each pipeline stage holds. Pure."""

from __future__ import annotations


def partition(num_layers: int, num_stages: int, *, head_cost: float = 0.0) -> list[range]:
    """Contiguous ranges of layers per stage that minimise the cost of the dearest stage; a layer costs 1.

    The last stage also pays `head_cost`, in layers, and only then may it be left without a layer. The embedding is a
    look-up and costs nothing. Among the best splits the one with the smallest sum of squared costs is taken, so that
    the rest is even too; then the one whose early stages hold the least, since they keep activations of the most
    micro-batches.

    >>> [len(layers) for layers in partition(32, 8, head_cost=2.5)]
    [4, 4, 4, 4, 4, 5, 5, 2]
    """
    extra = [0.0] * num_stages
    extra[-1] += head_cost
    fewest = [0 if extra[s] > 0 and num_stages > 1 else 1 for s in range(num_stages)]
    if num_layers < sum(fewest) or num_layers < 1:
        raise ValueError(f"num_layers={num_layers} leaves a stage of {num_stages} empty; use fewer stages")
    # best[n] = (worst stage, sum of squares, counts) for the stages so far with n layers placed
    best: dict[int, tuple[float, float, tuple[int, ...]]] = {0: (0.0, 0.0, ())}
    for s in range(num_stages):
        after: dict[int, tuple[float, float, tuple[int, ...]]] = {}
        for placed, (worst, squares, counts) in best.items():
            for n in range(fewest[s], num_layers - placed + 1):
                cost = n + extra[s]
                candidate = (round(max(worst, cost), 9), round(squares + cost * cost, 9), (*counts, n))
                if placed + n not in after or candidate < after[placed + n]:
                    after[placed + n] = candidate
        best = after
    ranges, start = [], 0
    for n in best[num_layers][2]:
        ranges.append(range(start, start + n))
        start += n
    return ranges
