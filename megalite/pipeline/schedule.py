"""Pipeline schedules as data: each rank's list of actions, messages included. Pure.

1F1B for pp 3, 4 micro-batches (rows are ranks; arXiv:2104.04473, fig. 4 draws the same):

    0 | F0.0 F0.1 F0.2 B0.0 F0.3 B0.1 B0.2 B0.3
    1 | F1.0 F1.1 B1.0 F1.2 B1.1 F1.3 B1.2 B1.3
    2 | F2.0 B2.0 F2.1 B2.1 F2.2 B2.2 F2.3 B2.3

With vpp > 1 micro-batches pass through a rank's chunks group by group (`group_sizes`). Any number of them works, also
fewer than pp and not a multiple of it. A new schedule is one more generator of compute lists; its twin with a split
backward needs nothing, since any order of F and B is filled (`Split`).
"""

import functools
import heapq
import itertools
from collections import Counter, deque
from collections.abc import Sequence
from enum import StrEnum
from typing import NamedTuple

from megalite.config.registry import KINDS


class Op(StrEnum):
    """B is the whole backward, or, in a row that has W, the part that gives the gradient of the input: W is the rest,
    the gradients of the weights, for which nobody waits. Of what is shared out over dp: GATHER the weights of a stage,
    FREE them, REDUCE its gradients."""

    F = "F"
    B = "B"
    W = "W"
    SEND_F = "SF"
    RECV_F = "RF"
    SEND_B = "SB"
    RECV_B = "RB"
    GATHER = "G"
    FREE = "X"
    REDUCE = "R"


Cost = tuple[float, float, float]  # of F, B and W of one stage; a backward that is not split takes B + W
Held = tuple[float, float]  # of one forward: from F to B, and, where backward is split, from B to W
EQUAL: Cost = (1, 1, 1)
ONE: Held = (1, 1)


class Placement(NamedTuple):
    """Which rank of pp holds which stage, known here alone: stage s is on rank s % pp as its chunk s // pp of `vpp`."""

    pp: int
    vpp: int = 1

    @property
    def num_stages(self) -> int:
        return self.pp * self.vpp

    def rank(self, stage: int) -> int:
        return stage % self.pp

    def chunk(self, stage: int) -> int:
        return stage // self.pp

    def stages(self, rank: int) -> range:
        """Of a rank, by chunk."""
        return range(rank, self.num_stages, self.pp)


class Split(NamedTuple):
    """Backward in two halves. A rank keeps its order of F and B; whenever the next of them cannot run yet, and when it
    would make the rank hold more than it may, a W runs: the newest, whose operands are still in a cache, and when no F
    or B is left the oldest (arXiv:2401.10241 writes such a schedule by hand: 1F1B, filled, is its ZB-H1).

    costs  of every stage; None: F, B and W take equally long, everywhere
    held   memory of a forward on every stage; None: 1 until its W has run
    most   what a rank may hold; None: as much as the fullest rank holds without the split. Where nothing waits that
           could make room, the order goes on
    """

    costs: tuple[Cost, ...] | None = None
    held: tuple[Held, ...] | None = None
    most: float | None = None


class Action(NamedTuple):
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


def _order(rank: int, place: Placement, groups: Sequence[int], op: Op) -> list[Action]:
    """All F (or B) of one rank: a group of micro-batches runs through all chunks before the next group."""
    stages = place.stages(rank) if op is Op.F else place.stages(rank)[::-1]
    runs = [range(stop - size, stop) for stop, size in zip(itertools.accumulate(groups), groups, strict=True)]
    return [Action(op, stage, i) for run in runs for stage in stages for i in run]


def gpipe(rank: int, place: Placement, groups: Sequence[int]) -> list[Action]:
    """All forwards, then all backwards (arXiv:1811.06965)."""
    return [*_order(rank, place, groups, Op.F), *_order(rank, place, groups, Op.B)]


def breadth_first(rank: int, place: Placement, groups: Sequence[int]) -> list[Action]:
    """GPipe in which all micro-batches run through a chunk before the next one (arXiv:2211.05953): a chunk's gradients
    are complete, and can be reduced, while other chunks have all their backwards to go."""
    return gpipe(rank, place, [sum(groups)])


def one_f_one_b(rank: int, place: Placement, groups: Sequence[int]) -> list[Action]:
    """1F1B (arXiv:2006.09503, PipeDream-flush), interleaved over chunks when vpp > 1 (arXiv:2104.04473, sec. 2.2)."""
    forwards = _order(rank, place, groups, Op.F)
    backwards = _order(rank, place, groups, Op.B)
    behind = place.pp - rank - 1
    warm_up = behind if place.vpp == 1 else behind * 2 + (place.vpp - 1) * groups[0]
    actions = forwards[:warm_up]
    for pair in zip(forwards[warm_up:], backwards, strict=False):
        actions += pair
    return actions + backwards[max(0, len(forwards) - warm_up) :]


EVALUATION = "forward"  # the schedule of one, which has no backwards


def compute_row(name: str, rank: int, place: Placement, groups: Sequence[int]) -> list[Action]:
    """What a rank computes, and in which order, in the schedule `name`, an option or EVALUATION. Raises ValueError
    where a plugin's has not each F and B of its rank's stages once."""
    if name == EVALUATION:
        return _order(rank, place, groups, Op.F)
    row: list[Action] = [*(KINDS["pipeline_schedule"].find(name)(rank, place, groups) or ())]
    if name in KINDS["pipeline_schedule"].added:
        there, due = Counter(row), Counter(a for op in (Op.F, Op.B) for a in _order(rank, place, groups, op))
        if wrong := [*(due - there), *(there - due)]:
            text = f"pipeline_schedule={name!r}: rank {rank} of {place.pp} has {wrong[0]} {there[wrong[0]]} times"
            raise ValueError(f"{text}, not {due[wrong[0]]}; each F and B of its stages has to come once")
    return row


def in_flight(row: Sequence[Action], held: Sequence[Held] | None = None) -> float:
    """The most that one rank holds at once of forwards whose backward, or its W, has not run; by default each is 1."""
    split = any(a.op is Op.W for a in row)
    return max(itertools.accumulate(held_more(a.op, held[a.stage] if held else ONE, split) for a in row))


def held_more(op: Op, held: Held, split: bool) -> float:
    """What a rank holds after an action, less what it held before."""
    saved, waits = held
    return {Op.F: saved, Op.B: (waits if split else 0) - saved, Op.W: -waits}.get(op, 0)


class Sharing(NamedTuple):
    """How often what is shared out over dp meets.

    every_run   gradients are reduced at the end of each run of a stage's backwards, so that they are whole during it
                alone (ZeRO-2); else once in a step
    by_chunk    weights are whole during the runs of a stage alone (ZeRO-3)
    """

    every_run: bool = False
    by_chunk: bool = False


@functools.lru_cache(maxsize=16)  # each step asks for the same
def with_sharing(row: tuple[Action, ...], sharing: Sharing) -> tuple[Action, ...]:
    """Insert GATHER, FREE and REDUCE into a rank's row. All ranks of dp have the same row, so they begin the same
    collectives in the same order; the row's order stays what it was, so it waits for nothing new.

    A run of backwards: what gives gradients of weights (W where there is one, else B) of one stage, up to that of
    another; where the rank has one stage alone, each is a run. Its REDUCE stands behind its last action. A run of
    weights: forwards of one stage, up to the forward of another, and the same of backwards; runs of one stage with at
    most one action between are one. GATHER stands one action before the run, which hides it.
    """
    inserted: dict[int, list[Action]] = {}  # by where in the row they stand

    def insert(at: int, op: Op, like: Action, last: bool = True) -> None:
        inserted.setdefault(at, []).insert(len(inserted.get(at, [])) if last else 0, Action(op, *like[1:]))

    grads = Op.W if any(a.op is Op.W for a in row) else Op.B
    runs = _runs(row, grads)
    if len({row[run.start].stage for run in runs}) == 1:
        runs = [range(i, i + 1) for i, a in enumerate(row) if a.op is grads]
    ends = {row[run.stop - 1].stage: run.stop for run in runs}
    for run in runs:
        if sharing.every_run or ends[row[run.stop - 1].stage] == run.stop:
            insert(run.stop, Op.REDUCE, row[run.stop - 1])
    if sharing.by_chunk:
        computes = [i for i, a in enumerate(row) if a.op in (Op.F, Op.B)]
        for run in _touching(row, [*_runs(row, Op.F), *_runs(row, Op.B)]):
            insert(run.stop, Op.FREE, row[run.stop - 1], last=False)
            before = [i for i in computes if i < run.start]
            insert(before[-1] if before else 0, Op.GATHER, row[run.start])
    return tuple(a for i in range(len(row) + 1) for a in (*inserted.get(i, ()), *row[i : i + 1]))


def _runs(row: Sequence[Action], op: Op) -> list[range]:
    """Of actions `op` of one stage, with what is between them but one of another; from the first to behind the last."""
    own = [i for i, action in enumerate(row) if action.op is op]
    runs = (list(run) for _, run in itertools.groupby(own, lambda i: row[i].stage))
    return [range(run[0], run[-1] + 1) for run in runs]


def _touching(row: Sequence[Action], runs: list[range]) -> list[range]:
    """Runs of one stage that overlap, or follow each other with one action between, as one."""
    joined: dict[int, list[range]] = {}
    for run in sorted(runs, key=lambda run: run.start):
        mine = joined.setdefault(row[run.start].stage, [])
        if mine and sum(a.op in (Op.F, Op.B) for a in row[mine[-1].stop : run.start]) <= 1:
            mine[-1] = range(mine[-1].start, max(mine[-1].stop, run.stop))
        else:
            mine.append(run)
    return [run for stage in joined.values() for run in stage]


class _Execution:
    """Compute lists run once in simulated time; `rows` grow to what with_messages returns."""

    def __init__(self, compute: Sequence[Sequence[Action]], place: Placement, split: Split | None):
        self.place, self.split = place, split
        self.costs = split.costs if split and split.costs else (EQUAL,) * place.num_stages
        self.rows: list[list[Action]] = [[] for _ in compute]
        self.ahead = [deque(row) for row in compute]
        self.held = split.held if split and split.held else (ONE,) * place.num_stages
        most = split.most if split else None
        self.most = max(in_flight(row, self.held) for row in compute) if most is None else most
        self.alive = [0.0] * len(compute)
        self.undone: list[deque[Action]] = [deque() for _ in compute]  # W that may run, oldest first
        self.idle = [True] * len(compute)
        self.have: set[tuple[Op, int, int]] = set()  # inputs that have come
        self.done: set[Action] = set()
        self.events: list[tuple[float, int, Action]] = []

    def run(self) -> None:
        now, heard = 0.0, {*range(len(self.rows))}  # ranks for which something has changed
        while True:
            for rank in sorted(heard):
                self._start(rank, now)
            if not self.events:
                return
            now, heard = self.events[0][0], set()
            while self.events and self.events[0][0] == now:  # all messages of this moment, so that receives come early
                _, rank, action = heapq.heappop(self.events)
                heard |= self._finish(rank, action)

    def _start(self, rank: int, now: float) -> None:
        """Let an idle rank begin what is next, or a W."""
        if not self.idle[rank]:
            return
        if self.ahead[rank] and self._can_run(rank, self.ahead[rank][0]):
            action = self.ahead[rank].popleft()
        elif self.undone[rank]:
            action = self.undone[rank].pop() if self.ahead[rank] else self.undone[rank].popleft()
        else:
            return
        f, b, w = self.costs[action.stage]
        cost = f if action.op is Op.F else w if action.op is Op.W else b if self.split else b + w
        self.alive[rank] += self._more(action)
        self.rows[rank].append(action)
        self.idle[rank] = False
        heapq.heappush(self.events, (now + cost, rank, action))

    def _can_run(self, rank: int, action: Action) -> bool:
        op, stage, m = action.op, action.stage, action.microbatch
        if self.undone[rank] and self.alive[rank] + self._more(action) > self.most:
            return False
        edge = stage == (0 if op is Op.F else self.place.num_stages - 1)
        return (op is Op.F or Action(Op.F, stage, m) in self.done) and (edge or (op, stage, m) in self.have)

    def _more(self, action: Action) -> float:
        return held_more(action.op, self.held[action.stage], self.split is not None)

    def _finish(self, rank: int, action: Action) -> set[int]:
        """The ranks that hear of it."""
        op, stage, m = action.op, action.stage, action.microbatch
        self.idle[rank] = True
        self.done.add(action)
        if op is Op.B and self.split:
            self.undone[rank].append(Action(Op.W, stage, m))
        target = stage + (1 if op is Op.F else -1)
        if op is Op.W or not 0 <= target < self.place.num_stages:
            return {rank}
        self.have.add((op, target, m))
        if (peer := self.place.rank(target)) != rank:
            self.rows[rank].append(Action(Op.SEND_F if op is Op.F else Op.SEND_B, stage, m))
            self.rows[peer].append(Action(Op.RECV_F if op is Op.F else Op.RECV_B, target, m))
        return {rank, peer}


def with_messages(
    compute: Sequence[Sequence[Action]], place: Placement, split: Split | None = None
) -> list[list[Action]]:
    """Insert each send and its receive into the rows of compute actions of all ranks, and with a `split` each W.

    The rows are run once in simulated time; when an action finishes, its send goes to the end of the producer's row
    and the receive to the end of the consumer's row as they are at that moment. So the result is a projection of one
    sequential execution in which each message is one event for both ends. Whatever the real speeds, the oldest event of
    that execution which has not happened has all its predecessors behind it on both ranks, so it can happen: no
    deadlock, even when a send blocks until its receive is posted.
    """
    execution = _Execution(compute, place, split)
    execution.run()
    if stuck := [str(ahead[0]) for ahead in execution.ahead if ahead]:
        raise ValueError(f"these actions wait for each other: {', '.join(stuck)}")
    return execution.rows


@functools.lru_cache(maxsize=16)  # a second at pp 16, 256 micro-batches, 6 chunks: not to be spent on every step
def plan(
    name: str, pp: int, num_microbatches: int, vpp: int = 1, group_size: int | None = None, split: Split | None = None
) -> tuple[tuple[Action, ...], ...]:
    """The rows of all ranks, messages included, of the schedule called `name`. Raises ValueError where they cannot run
    to their end."""
    if num_microbatches < 1:
        raise ValueError(f"num_microbatches={num_microbatches} is not positive; a step needs at least 1")
    groups, place = group_sizes(num_microbatches, pp, group_size), Placement(pp, vpp)
    computed = [compute_row(name, rank, place, groups) for rank in range(pp)]
    try:
        return tuple(tuple(row) for row in with_messages(computed, place, split))
    except ValueError as error:
        raise ValueError(f"pipeline_schedule={name!r} would hang: {error}; put each behind what it needs") from None
