"""Run a plan in simulated time: when each action happens, how much idles, how much is alive. Pure.

Its bubble is the idle share of the ranks' time. 1F1B with equal stages: (pp - 1) / (vpp m + pp - 1), and, with its
backward split and m >= pp, (pp - 1) / (3 m + pp - 1) at vpp 1, which is ZB-H1's (arXiv:2401.10241, table 1).

>>> from megalite.pipeline.schedule import Split, plan
>>> [simulate(plan("1f1b", 4, 8, split=split)).bubble for split in (None, Split())] == [3 / (8 + 3), 3 / (3 * 8 + 3)]
True
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypedDict, Unpack

from megalite.pipeline.schedule import EQUAL, Action, Cost, Op, Placement

WORK = (Op.F, Op.B, Op.W)


class Span(NamedTuple):
    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """`spans` of the compute actions, in order of each rank; times in units of the costs given."""

    spans: tuple[Span, ...]
    ranks: int

    @property
    def end(self) -> float:
        return max(s.end for s in self.spans)

    @property
    def bubble(self) -> float:
        busy = sum(s.end - s.start for s in self.spans)
        return 1.0 - busy / (self.ranks * self.end)


class Simulated(TypedDict, total=False):
    """delay  of a message from one rank to another, by default none; a rank's messages in one direction go one after
           another, behind its work
    begin  stage -> when its first forward may start at the earliest
    """

    delay: Callable[[int, int], float]
    begin: Mapping[int, float]


def simulate(
    rows: Sequence[Sequence[Action]], costs: Sequence[Cost] | None = None, **more: Unpack[Simulated]
) -> Simulation:
    """Each action as soon as its rank is free and its input has arrived. `costs` of every stage, as in schedule.Split.

    Raises ValueError when a message or an input never comes.
    """
    delay, begin = more.get("delay", lambda source, target: 0.0), more.get("begin", {})
    clock, position = [0.0] * len(rows), [0] * len(rows)
    free: dict[tuple[Op, int], float] = {}  # when the last message of a rank's in one direction is through
    sent: dict[Action, float] = {}
    done: dict[Action, float] = {}
    spans: list[Span] = []
    last = max(a.stage for row in rows for a in row)
    place = Placement(len(rows), -(-(last + 1) // len(rows)))
    split = any(a.op is Op.W for row in rows for a in row)
    takes = [{Op.F: f, Op.B: b if split else b + w, Op.W: w} for f, b, w in costs or [EQUAL] * (last + 1)]

    def ready(action: Action) -> float | None:
        """When `action` may start; None: not yet known."""
        op, stage, m = action.op, action.stage, action.microbatch
        if op not in WORK:
            return 0.0  # posted, not waited for
        if op is not Op.F and Action(Op.F if op is Op.B else Op.B, stage, m) not in done:
            return None
        before = stage - 1 if op is Op.F else stage + 1
        if op is Op.W or not 0 <= before <= last:
            return 0.0
        if place.rank(before) == place.rank(stage):
            return done.get(Action(op, before, m))
        return sent.get(Action(Op.SEND_F if op is Op.F else Op.SEND_B, before, m))

    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while position[rank] < len(row) and (at := ready(row[position[rank]])) is not None:
                action = row[position[rank]]
                if action.op in WORK:
                    start = max(clock[rank], at, begin.get(action.stage, 0.0))
                    clock[rank] = done[action] = start + takes[action.stage][action.op]
                    spans.append(Span(rank, action, start, clock[rank]))
                elif action.op in (Op.SEND_F, Op.SEND_B):
                    to = place.rank(action.stage + (1 if action.op is Op.SEND_F else -1))
                    gone = max(clock[rank], free.get((action.op, rank), 0.0)) + delay(rank, to)
                    sent[action] = free[action.op, rank] = gone
                position[rank] += 1
                moved = True
    stuck = [str(row[p]) for row, p in zip(rows, position, strict=True) if p < len(row)]
    if stuck:
        raise ValueError(f"never runs: {', '.join(stuck)}")
    return Simulation(tuple(spans), len(rows))
