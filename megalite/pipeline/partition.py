"""Which layers each pipeline stage holds. Pure."""

from __future__ import annotations

import itertools


def partition(num_layers: int, num_stages: int, *, head_cost: float = 0.0) -> list[range]:
    """Contiguous ranges of layers per stage that minimise the cost of the dearest stage; a layer costs 1.

    The last stage also pays `head_cost`, in layers, and only then may it be left without a layer. The embedding is a
    look-up and costs nothing. Among the best splits the one with the smallest sum of squared costs is taken, so that
    the rest is even too; then the one whose early stages hold the least, since they keep activations of the most
    micro-batches.

    >>> [len(layers) for layers in partition(32, 8, head_cost=2.5)]
    [4, 4, 4, 4, 4, 5, 5, 2]
    """
    others, fewest = num_stages - 1, 0 if head_cost > 0 and num_stages > 1 else 1
    if num_layers < max(1, others + fewest):
        raise ValueError(f"num_layers={num_layers} leaves a stage of {num_stages} empty; use fewer stages")
    if others == 0:
        return [range(num_layers)]

    def cost(last: int) -> tuple[float, float, int]:
        """Of the others as even as they can be: worst stage, sum of squares, layers of the others."""
        each, more = divmod(num_layers - last, others)
        squares = (others - more) * each**2 + more * (each + 1) ** 2 + (last + head_cost) ** 2
        return round(max(each + (more > 0), last + head_cost), 9), round(squares, 9), -last

    last = min(range(fewest, num_layers - others + 1), key=cost)
    each, more = divmod(num_layers - last, others)
    stops = list(itertools.accumulate([each] * (others - more) + [each + 1] * more + [last]))
    return [range(start, stop) for start, stop in zip([0, *stops], stops, strict=False)]
