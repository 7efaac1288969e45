"""Which layers each pipeline stage holds. Pure."""

from __future__ import annotations

import re

LONGEST_LAYOUT = 100_000  # characters, once repeats are written out


def partition(num_layers: int, num_stages: int, *, head_cost: float = 0.0) -> list[range]:
    """Contiguous ranges of layers per stage that minimise the cost of the dearest stage; a layer costs 1.

    The last stage also pays `head_cost`, in layers, and only then may it be left without a layer. The embedding is a
    look-up and costs nothing. Among the best splits the one with the smallest sum of squared costs is taken, so that
    the rest is even too.

    >>> partition(8, 4), partition(7, 4, head_cost=1.0)
    ([range(0, 2), range(2, 4), range(4, 6), range(6, 8)], [range(0, 2), range(2, 4), range(4, 6), range(6, 7)])
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
                candidate = (round(max(worst, cost), 9), round(squares + cost * cost, 9), (*counts, -n))
                if placed + n not in after or candidate < after[placed + n]:
                    after[placed + n] = candidate
        best = after
    ranges, start = [], 0
    for n in best[num_layers][2]:
        ranges.append(range(start, start - n))
        start -= n
    return ranges


def parse_layout(text: str, num_layers: int, pp: int) -> list[range]:
    """Megatron-LM's layout string: stages separated by |, E embedding, t layer, L loss, x*n and (..)*n repeat, commas
    are ignored. Stages are in order of the model; their number is a multiple of pp.

    >>> parse_layout("Et|(tt|)*2t,L", 6, 4)
    [range(0, 1), range(1, 3), range(3, 5), range(5, 6)]
    """
    flat = text.replace(",", "").replace(" ", "")
    while (match := re.search(r"\(([^()]*)\)\*(\d+)|([EtL|])\*(\d+)", flat)) is not None:
        unit, times = (match[1], match[2]) if match[1] is not None else (match[3], match[4])
        if len(flat) + len(unit) * int(times[:9]) > LONGEST_LAYOUT:
            raise ValueError(
                f"pipeline_model_parallel_layout={text!r} repeats too much; write num_layers={num_layers} t"
            )
        flat = flat[: match.start()] + unit * int(times) + flat[match.end() :]
    where = f"pipeline_model_parallel_layout={text!r}"
    if not re.fullmatch(r"[EtL|]+", flat):
        raise ValueError(f"{where} has more than E, t, L, |, ( )*n; write it as in 'Et|(tt|)*2tL'")
    stages = flat.split("|")
    if not stages[0].startswith("E") or not stages[-1].endswith("L") or flat.count("E") != 1 or flat.count("L") != 1:
        raise ValueError(f"{where} must begin with the one E and end with the one L")
    if flat.count("t") != num_layers:
        raise ValueError(f"{where} holds {flat.count('t')} layers, num_layers={num_layers}; make them equal")
    if len(stages) > 1 and pp == 1:
        raise ValueError(
            f"{where} has {len(stages)} stages, but pipeline_model_parallel_size is 1; drop it or raise that"
        )
    if any(stage == "" for stage in stages):
        raise ValueError(f"{where} has a stage with nothing in it; give each a layer, E or L")
    if len(stages) % pp:
        raise ValueError(f"{where} has {len(stages)} stages, no multiple of pipeline_model_parallel_size={pp}")
    ranges, start = [], 0
    for stage in stages:
        ranges.append(range(start, start + stage.count("t")))
        start += stage.count("t")
    return ranges
