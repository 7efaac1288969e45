"""Which layers each pipeline stage holds. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Sequence


def partition(
    num_layers: int,
    num_stages: int,
    *,
    head_cost: float = 0.0,
    layer: Sequence[float] = (),
    held: Sequence[float] = (),
) -> list[range]:
    """Contiguous ranges of layers per stage that minimise the cost of the most expensive stage; a layer costs 1.

    The last stage also pays `head_cost`, in layers, and only then may it be left without a layer. The embedding is a
    look-up and costs nothing. Of the splits that are equally fast it is the one whose fullest stage holds the least:
    `layer`: memory of a layer on each stage, `held`: of all else there. Without them layers alone count, so that the
    stages are even. Of equal stages the later one takes the layer.

    >>> [len(layers) for layers in partition(32, 8, head_cost=2.5)]
    [4, 4, 4, 4, 4, 5, 5, 2]
    >>> [len(layers) for layers in partition(32, 8, head_cost=2.5, layer=[4, 4, 4, 4, 3, 3, 3, 3], held=[9] + [0] * 7)]
    [2, 4, 4, 5, 5, 5, 5, 2]
    """
    others, fewest = num_stages - 1, 0 if head_cost > 0 and num_stages > 1 else 1
    if num_layers < max(1, others + fewest):
        raise ValueError(f"num_layers={num_layers} leaves a stage of {num_stages} empty; use fewer stages")
    if others == 0:
        return [range(num_layers)]
    lasts = range(fewest, num_layers - others + 1)
    slowest = min(max(-((last - num_layers) // others), last + head_cost) for last in lasts) + 1e-9
    most = [int(slowest)] * others + [int(slowest - head_cost)]
    counts, layer = [1] * others + [fewest], layer or [1.0] * num_stages
    memory = [(held[s] if held else 0.0) + n * layer[s] for s, n in enumerate(counts)]
    for _ in range(num_layers - sum(counts)):
        s = min((s for s in range(num_stages) if counts[s] < most[s]), key=lambda s: (memory[s] + layer[s], -s))
        counts[s], memory[s] = counts[s] + 1, memory[s] + layer[s]
    stops = list(itertools.accumulate(counts))
    return [range(start, stop) for start, stop in zip([0, *stops], stops, strict=False)]
