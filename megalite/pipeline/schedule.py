"""Pipeline schedules as data: each rank's list of actions, messages included. Pure.

1F1B for pp 3, 4 micro-batches (rows are ranks; arXiv:2104.04473, fig. 4 draws the same):

    0 | F0.0 F0.1 F0.2 B0.0 F0.3 B0.1 B0.2 B0.3
    1 | F1.0 F1.1 B1.0 F1.2 B1.1 F1.3 B1.2 B1.3
    2 | F2.0 B2.0 F2.1 B2.1 F2.2 B2.2 F2.3 B2.3

Stage s of pp * vpp lives on rank s % pp as its chunk s // pp. With vpp > 1 micro-batches pass through the chunks group
by group (`group_sizes`). Any number of them works, also fewer than pp and not a multiple of it. A new schedule is one
more generator of compute lists.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from types import MappingProxyType


class Op(StrEnum):
    F = "F"
    B = "B"
    SEND_F = "SF"
    RECV_F = "RF"
    SEND_B = "SB"
    RECV_B = "RB"


@dataclass(frozen=True, order=True)
class Action:
    """Prints as F0.3: operation, stage, micro-batch. RECV_F and SEND_B are the input side of `stage`, SEND_F and
    RECV_B its output side: SF0.3 on one rank meets RF1.3 on the next, SB1.3 meets RB0.3."""

    op: Op
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.op.value}{self.stage}.{self.microbatch}"


def group_sizes(num_microbatches: int, pp: int, size: int | None = None) -> list[int]:
    """How many micro-batches run through one chunk before the next chunk has its turn: `size` (default pp) each, the
    largest group first. A remainder is a group of its own if it has pp or more, else the others take it, evenly.

    A group below pp would make the first stage wait for its micro-batches to come back from the last one. With none,
    the bubble is (pp - 1) / (vpp m + pp - 1) for every m >= pp. torch.distributed.pipelining sizes its rounds alike.

    >>> group_sizes(8, 4), group_sizes(11, 4), group_sizes(3, 4), group_sizes(5, 2, 3)
    ([4, 4], [6, 5], [3], [3, 2])
    """
    full, rest = divmod(num_microbatches, size or pp)
    if rest >= pp and full:
        return [size or pp] * full + [rest]
    each, more = divmod(num_microbatches, max(1, full))
    return [each + (i < more) for i in range(max(1, full))]


def _order(rank: int, pp: int, groups: Sequence[int], vpp: int, op: Op) -> list[Action]:
    """All F (or B) of one rank: a group of micro-batches runs through all chunks before the next group."""
    chunks = range(vpp) if op is Op.F else range(vpp - 1, -1, -1)
    stops = list(itertools.accumulate(groups))
    return [
        Action(op, chunk * pp + rank, i)
        for stop, size in zip(stops, groups, strict=True)
        for chunk in chunks
        for i in range(stop - size, stop)
    ]


def gpipe(rank: int, pp: int, groups: Sequence[int], vpp: int = 1) -> list[Action]:
    """All forwards, then all backwards (arXiv:1811.06965)."""
    return [*_order(rank, pp, groups, vpp, Op.F), *_order(rank, pp, groups, vpp, Op.B)]


def one_f_one_b(rank: int, pp: int, groups: Sequence[int], vpp: int = 1) -> list[Action]:
    """1F1B (arXiv:2006.09503, PipeDream-flush), interleaved over chunks when vpp > 1 (arXiv:2104.04473, sec. 2.2)."""
    forwards = _order(rank, pp, groups, vpp, Op.F)
    backwards = _order(rank, pp, groups, vpp, Op.B)
    warm_up = pp - rank - 1 if vpp == 1 else (pp - rank - 1) * 2 + (vpp - 1) * groups[0]
    actions = forwards[:warm_up]
    for pair in zip(forwards[warm_up:], backwards, strict=False):
        actions += pair
    return actions + backwards[max(0, len(forwards) - warm_up) :]


def forward_only(rank: int, pp: int, groups: Sequence[int], vpp: int = 1) -> list[Action]:
    """Evaluation."""
    return _order(rank, pp, groups, vpp, Op.F)


SCHEDULES: Mapping[str, Callable[[int, int, Sequence[int], int], list[Action]]] = MappingProxyType(
    {"1f1b": one_f_one_b, "gpipe": gpipe, "forward": forward_only}
)


def with_messages(compute: list[list[Action]]) -> list[list[Action]]:
    """Insert each send and its receive into the rows of compute actions of all ranks.

    The rows are run once in simulated time (a backward lasts two forwards); when an action finishes, its send goes to
    the end of the producer's row and the receive to the end of the consumer's row as they are at that moment. So the
    result is a projection of one sequential execution in which each message is one event for both ends. Whatever the
    real speeds, the oldest event of that execution which has not happened has all its predecessors behind it on both
    ranks, so it can happen: no deadlock, even when a send blocks until its receive is posted.
    """
    pp = len(compute)
    last = max(a.stage for row in compute for a in row)
    rows: list[list[Action]] = [[] for _ in compute]
    position, idle = [0] * pp, [True] * pp
    have: set[tuple[Op, int, int]] = set()
    done: set[Action] = set()
    events: list[tuple[int, int, Action]] = []

    def start(rank: int, now: int) -> None:
        if not idle[rank] or position[rank] == len(compute[rank]):
            return
        action = compute[rank][position[rank]]
        edge = action.stage == (0 if action.op is Op.F else last)
        ran = action.op is Op.F or Action(Op.F, action.stage, action.microbatch) in done
        if ran and (edge or (action.op, action.stage, action.microbatch) in have):
            rows[rank].append(action)
            position[rank] += 1
            idle[rank] = False
            heapq.heappush(events, (now + (1 if action.op is Op.F else 2), rank, action))

    def finish(rank: int, action: Action) -> None:
        idle[rank] = True
        done.add(action)
        forward = action.op is Op.F
        target = action.stage + (1 if forward else -1)
        if not 0 <= target <= last:
            return
        have.add((action.op, target, action.microbatch))
        if target % pp != rank:
            rows[rank].append(Action(Op.SEND_F if forward else Op.SEND_B, action.stage, action.microbatch))
            rows[target % pp].append(Action(Op.RECV_F if forward else Op.RECV_B, target, action.microbatch))

    for rank in range(pp):
        start(rank, 0)
    while events:
        now = events[0][0]
        while events and events[0][0] == now:  # all messages of this moment first, so that receives come early
            _, rank, action = heapq.heappop(events)
            finish(rank, action)
        for rank in range(pp):
            start(rank, now)
    if any(position[r] < len(compute[r]) for r in range(pp)):
        stuck = [str(compute[r][position[r]]) for r in range(pp) if position[r] < len(compute[r])]
        raise ValueError(f"these actions wait for each other: {', '.join(stuck)}")
    return rows


@functools.lru_cache(maxsize=16)  # a second at pp 16, 256 micro-batches, 6 chunks: not to be spent on every step
def plan(
    name: str, pp: int, num_microbatches: int, vpp: int = 1, group_size: int | None = None
) -> tuple[tuple[Action, ...], ...]:
    """The rows of all ranks, messages included, of the schedule called `name` (a key of SCHEDULES)."""
    if num_microbatches < 1:
        raise ValueError(f"num_microbatches={num_microbatches} is not positive; a step needs at least 1")
    groups = group_sizes(num_microbatches, pp, group_size)
    rows = with_messages([SCHEDULES[name](rank, pp, groups, vpp) for rank in range(pp)])
    return tuple(tuple(row) for row in rows)
