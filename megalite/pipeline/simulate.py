"""Run a plan in simulated time: when each action happens, how much idles, how much is alive. Pure.

Its bubble is the idle share of the ranks' time. 1F1B with equal stages: (pp - 1) / (vpp m + pp - 1), and, with its
backward split and m >= pp, (pp - 1) / (3 m + pp - 1) at vpp 1, which is ZB-H1's (arXiv:2401.10241, table 1).

>>> from megalite.pipeline.schedule import Split, plan
>>> [simulate(plan("1f1b", 4, 8, split=split)).bubble for split in (None, Split())] == [3 / (8 + 3), 3 / (3 * 8 + 3)]
True
"""

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

from megalite.pipeline.schedule import EQUAL_COSTS, Action, ActionCosts, Op, StagePlacement

COMPUTE_OPS = (Op.F, Op.B, Op.W)
SENDS = {Op.SEND_F: (Op.F, 1), Op.SEND_B: (Op.B, -1)}  # whose input it is, how many stages on


class Span(NamedTuple):
    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """`starts` and `ends` of the compute actions, in the order in which they ran; in units of the costs given."""

    starts: Sequence[float]
    ends: Mapping[Action, float]
    place: StagePlacement

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """The compute actions of all ranks, each rank's in order."""
        times = zip(self.starts, self.ends.items(), strict=True)
        return tuple(Span(self.place.rank(action.stage), action, start, end) for start, (action, end) in times)

    @cached_property
    def end(self) -> float:
        return max(self.ends.values())

    @property
    def bubble(self) -> float:
        busy = sum(end - start for start, end in zip(self.starts, self.ends.values(), strict=True))
        return 1.0 - busy / (self.place.pp * self.end)


def simulate(
    rows: Sequence[Sequence[Action]],
    costs: Sequence[ActionCosts] | None = None,
    *,
    delay: Callable[[int, int], float] = lambda source, target: 0.0,
    earliest_start: Mapping[int, float] = MappingProxyType({}),
) -> Simulation:
    """Each action as soon as its rank is free and its input has arrived.

    costs  of every stage, as in schedule.Split
    delay  of a message from one rank to another; a rank's in one direction go one after another, behind its work
    begin  stage -> when its first forward may start at the earliest

    Raises ValueError when a message or an input never comes.
    """
    delay = functools.cache(delay)
    clock, position = [0.0] * len(rows), [0] * len(rows)
    channel_free_at = {
        op: [0.0] * len(rows) for op in SENDS
    }  # when the last message of a rank's in one direction is through
    ops, stages, microbatches = (set(field) for field in zip(*itertools.chain.from_iterable(rows), strict=True))
    last, split = max(stages), Op.W in ops
    place = StagePlacement(len(rows), -(-(last + 1) // len(rows)))
    durations = [{Op.F: f, Op.B: b if split else b + w, Op.W: w} for f, b, w in costs or [EQUAL_COSTS] * (last + 1)]
    # when the hidden states that F needs, and the gradients that B needs, have come; a row more at each end, for what
    # leaves the pipeline, and there the first F and the last B wait for nobody
    arrivals: dict[Op, list[list[float | None]]]
    arrivals = {op: [[None] * (1 + max(microbatches)) for _ in range(last + 3)] for op in (Op.F, Op.B)}
    arrivals[Op.F][0] = arrivals[Op.B][last] = [0.0] * (1 + max(microbatches))
    earliest = [earliest_start.get(stage, 0.0) for stage in range(last + 1)]
    starts: list[float] = []
    ends: dict[Action, float] = {}
    progressed = True
    while progressed:
        progressed = False
        for rank, row in enumerate(rows):
            while position[rank] < len(row):
                op, stage, m = action = row[position[rank]]
                if op in COMPUTE_OPS:
                    if op is not Op.F and (Op.F if op is Op.B else Op.B, stage, m) not in ends:
                        break
                    if (at := 0.0 if op is Op.W else arrivals[op][stage][m]) is None:
                        break
                    start = max(clock[rank], at, earliest[stage])
                    clock[rank] = ends[action] = start + durations[stage][op]
                    starts.append(start)
                    if place.pp == 1 and op is not Op.W:  # without a message
                        arrivals[op][stage + (1 if op is Op.F else -1)][m] = clock[rank]
                elif op in SENDS:
                    input_op, step = SENDS[op]
                    sent = max(clock[rank], channel_free_at[op][rank]) + delay(rank, place.rank(stage + step))
                    arrivals[input_op][stage + step][m] = channel_free_at[op][rank] = sent
                position[rank] += 1
                progressed = True
    stuck = [str(row[p]) for row, p in zip(rows, position, strict=True) if p < len(row)]
    if stuck:
        raise ValueError(f"never runs: {', '.join(stuck)}")
    return Simulation(starts, ends, place)
