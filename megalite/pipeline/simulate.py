"""Run a plan in simulated time: when each action happens, how much idles, how much is alive. Pure.

    bubble       idle share of the ranks' time; 1F1B with equal stages: (pp - 1) / (vpp m + pp - 1)
    in flight    forwards whose backward has not run yet: activations held; 1F1B: min(m, pp - rank)

>>> from megalite.pipeline.schedule import plan
>>> result = simulate(plan("1f1b", 4, 8))
>>> result.bubble == 3 / (8 + 3), [in_flight(row) for row in plan("1f1b", 4, 8)]
(True, [4, 3, 2, 1])
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megalite.pipeline.schedule import Action, Op


@dataclass(frozen=True)
class Span:
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


def simulate(
    rows: Sequence[Sequence[Action]], forward: float = 1.0, backward: float = 2.0, costs: Sequence[float] | None = None
) -> Simulation:
    """Each action as soon as its rank is free and its input has arrived; messages take no time. `costs`: how much
    dearer each stage is than 1.

    Raises ValueError when a message or an input never comes.
    """
    clock, position = [0.0] * len(rows), [0] * len(rows)
    sent: dict[Action, float] = {}
    done: dict[Action, float] = {}
    spans: list[Span] = []
    last = max(a.stage for row in rows for a in row)

    def ready(action: Action) -> float | None:
        """When `action` may start; None: not yet known."""
        op, stage, m = action.op, action.stage, action.microbatch
        if op in (Op.SEND_F, Op.SEND_B, Op.RECV_F, Op.RECV_B):
            return 0.0  # posted, not waited for
        if op is Op.B and Action(Op.F, stage, m) not in done:
            return None
        before = stage - 1 if op is Op.F else stage + 1
        if not 0 <= before <= last:
            return 0.0
        if Action(op, before, m) in done and before % len(rows) == stage % len(rows):
            return done[Action(op, before, m)]
        return sent.get(Action(Op.SEND_F if op is Op.F else Op.SEND_B, before, m))

    moved = True
    while moved:
        moved = False
        for rank, row in enumerate(rows):
            while position[rank] < len(row) and (at := ready(row[position[rank]])) is not None:
                action = row[position[rank]]
                if action.op in (Op.F, Op.B):
                    start = max(clock[rank], at)
                    took = (forward if action.op is Op.F else backward) * (
                        1.0 if costs is None else costs[action.stage]
                    )
                    clock[rank] = done[action] = start + took
                    spans.append(Span(rank, action, start, clock[rank]))
                elif action.op in (Op.SEND_F, Op.SEND_B):
                    sent[action] = clock[rank]
                position[rank] += 1
                moved = True
    stuck = [str(row[p]) for row, p in zip(rows, position, strict=True) if p < len(row)]
    if stuck:
        raise ValueError(f"never runs: {', '.join(stuck)}")
    return Simulation(tuple(spans), len(rows))


def in_flight(row: Sequence[Action], sizes: Mapping[int, int] | None = None) -> int:
    """The most forwards of one rank that wait for their backward at once; each counts `sizes` of its stage, or 1."""
    alive = most = 0
    for action in row:
        alive += ((action.op is Op.F) - (action.op is Op.B)) * (1 if sizes is None else sizes[action.stage])
        most = max(most, alive)
    return most


def draw(rows: Sequence[Sequence[Action]]) -> str:
    """The compute actions on a time grid: one column per forward, two per backward; digits are micro-batches.

    Forwards of chunk 0, 1, .. are  3 , 3', 3'' ; backwards are in brackets.
    """
    pp = len(rows)
    simulation = simulate(rows)
    width = 1 + max(len(_label(s.action, pp)) for s in simulation.spans)
    lines = []
    for rank in range(pp):
        cells = [" " * width] * round(simulation.end)
        for span in simulation.spans:
            if span.rank == rank:
                length = round(span.end - span.start)
                text = _label(span.action, pp).center(width * length, " " if length == 1 else "-")
                at = round(span.start)
                cells[at : at + length] = [text[i * width : (i + 1) * width] for i in range(length)]
        lines.append(f"{rank} |" + "".join(cells).rstrip())
    return "\n".join(lines)


def _label(action: Action, pp: int) -> str:
    text = f"{action.microbatch}{chr(39) * (action.stage // pp)}"
    return text if action.op is Op.F else f"[{text}]"
