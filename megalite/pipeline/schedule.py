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

from megalite.config.registry import REGISTRIES


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
    UNSHARD = "G"
    RESHARD = "X"
    REDUCE_GRAD = "R"


ActionCosts = tuple[float, float, float]  # of F, B and W of one stage; a backward that is not split takes B + W
ActionMemory = tuple[float, float]  # of one forward: from F to B, and, where backward is split, from B to W
EQUAL_COSTS: ActionCosts = (1, 1, 1)
UNIT_MEMORY: ActionMemory = (1, 1)


class StagePlacement(NamedTuple):
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

    def stages_of_rank(self, rank: int) -> range:
        """Of a rank, by chunk."""
        return range(rank, self.num_stages, self.pp)


class SplitBackward(NamedTuple):
    """Backward in two halves. A rank keeps its order of F and B; whenever the next of them cannot run yet, and when it
    would make the rank hold more than it may, a W runs: the newest, whose operands are still in a cache, and when no F
    or B is left the oldest (arXiv:2401.10241 writes such a schedule by hand: 1F1B, filled, is its ZB-H1).

    costs  of every stage; None: F, B and W take equally long, everywhere
    held   memory of a forward on every stage; None: 1 until its W has run
    most   what a rank may hold; None: as much as the fullest rank holds without the split. Where nothing waits that
           could make room, the order goes on
    """

    costs: tuple[ActionCosts, ...] | None = None
    memory: tuple[ActionMemory, ...] | None = None
    memory_limit: float | None = None


class Action(NamedTuple):
    """Prints as F0.3: operation, stage, micro-batch. RECV_F and SEND_B are the input side of `stage`, SEND_F and
    RECV_B its output side: SF0.3 on one rank meets RF1.3 on the next, SB1.3 meets RB0.3."""

    op: Op
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.op.value}{self.stage}.{self.microbatch}"


def microbatch_groups(num_microbatches: int, pp: int, size: int | None = None) -> list[int]:
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


def _in_group_order(rank: int, placement: StagePlacement, groups: Sequence[int], op: Op) -> list[Action]:
    """All F (or B) of one rank: a group of micro-batches runs through all chunks before the next group."""
    stages = placement.stages_of_rank(rank) if op is Op.F else placement.stages_of_rank(rank)[::-1]
    runs = [range(stop - size, stop) for stop, size in zip(itertools.accumulate(groups), groups, strict=True)]
    return [Action(op, stage, i) for run in runs for stage in stages for i in run]


def gpipe(rank: int, placement: StagePlacement, groups: Sequence[int]) -> list[Action]:
    """All forwards, then all backwards (arXiv:1811.06965)."""
    return [*_in_group_order(rank, placement, groups, Op.F), *_in_group_order(rank, placement, groups, Op.B)]


def breadth_first(rank: int, placement: StagePlacement, groups: Sequence[int]) -> list[Action]:
    """GPipe in which all micro-batches run through a chunk before the next one (arXiv:2211.05953): a chunk's gradients
    are complete, and can be reduced, while other chunks have all their backwards to go."""
    return gpipe(rank, placement, [sum(groups)])


def one_f_one_b(rank: int, placement: StagePlacement, groups: Sequence[int]) -> list[Action]:
    """1F1B (arXiv:2006.09503, PipeDream-flush), interleaved over chunks when vpp > 1 (arXiv:2104.04473, sec. 2.2)."""
    forwards = _in_group_order(rank, placement, groups, Op.F)
    backwards = _in_group_order(rank, placement, groups, Op.B)
    behind = placement.pp - rank - 1
    warm_up = behind if placement.vpp == 1 else behind * 2 + (placement.vpp - 1) * groups[0]
    actions = forwards[:warm_up]
    for pair in zip(forwards[warm_up:], backwards, strict=False):
        actions += pair
    return actions + backwards[max(0, len(forwards) - warm_up) :]


FORWARD_ONLY = "forward"  # the schedule of one, which has no backwards


def compute_actions(name: str, rank: int, placement: StagePlacement, groups: Sequence[int]) -> list[Action]:
    """What a rank computes, and in which order, in the schedule `name`, an option or EVALUATION. Raises ValueError
    where a plugin's has not each F and B of its rank's stages once."""
    if name == FORWARD_ONLY:
        return _in_group_order(rank, placement, groups, Op.F)
    row: list[Action] = [*(REGISTRIES["pipeline_schedule"].get(name)(rank, placement, groups) or ())]
    if name in REGISTRIES["pipeline_schedule"].added:
        there, due = (
            Counter(row),
            Counter(a for op in (Op.F, Op.B) for a in _in_group_order(rank, placement, groups, op)),
        )
        if wrong := [*(due - there), *(there - due)]:
            text = f"pipeline_schedule={name!r}: rank {rank} of {placement.pp} has {wrong[0]} {there[wrong[0]]} times"
            raise ValueError(f"{text}, not {due[wrong[0]]}; each F and B of its stages has to come once")
    return row


def peak_in_flight(row: Sequence[Action], memory: Sequence[ActionMemory] | None = None) -> float:
    """The most that one rank holds at once of forwards whose backward, or its W, has not run; by default each is 1."""
    split = any(a.op is Op.W for a in row)
    return max(
        itertools.accumulate(memory_change(a.op, memory[a.stage] if memory else UNIT_MEMORY, split) for a in row)
    )


def memory_change(op: Op, memory: ActionMemory, split: bool) -> float:
    """What a rank holds after an action, less what it held before."""
    saved, waits = memory
    return {Op.F: saved, Op.B: (waits if split else 0) - saved, Op.W: -waits}.get(op, 0)


class ShardingPolicy(NamedTuple):
    """How often what is shared out over dp meets.

    every_run   gradients are reduced at the end of each run of a stage's backwards, so that they are whole during it
                alone (ZeRO-2); else once in a step
    by_chunk    weights are whole during the runs of a stage alone (ZeRO-3)
    """

    reduce_every_pass: bool = False
    unshard_by_chunk: bool = False


@functools.lru_cache(maxsize=16)  # each step asks for the same
def add_sharding_actions(row: tuple[Action, ...], sharing: ShardingPolicy) -> tuple[Action, ...]:
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
    runs = _passes(row, grads)
    if len({row[run.start].stage for run in runs}) == 1:
        runs = [range(i, i + 1) for i, a in enumerate(row) if a.op is grads]
    ends = {row[run.stop - 1].stage: run.stop for run in runs}
    for run in runs:
        if sharing.reduce_every_pass or ends[row[run.stop - 1].stage] == run.stop:
            insert(run.stop, Op.REDUCE_GRAD, row[run.stop - 1])
    if sharing.unshard_by_chunk:
        computes = [i for i, a in enumerate(row) if a.op in (Op.F, Op.B)]
        for run in _merge_adjacent_passes(row, [*_passes(row, Op.F), *_passes(row, Op.B)]):
            insert(run.stop, Op.RESHARD, row[run.stop - 1], last=False)
            before = [i for i in computes if i < run.start]
            insert(before[-1] if before else 0, Op.UNSHARD, row[run.start])
    return tuple(a for i in range(len(row) + 1) for a in (*inserted.get(i, ()), *row[i : i + 1]))


def _passes(row: Sequence[Action], op: Op) -> list[range]:
    """Of actions `op` of one stage, with what is between them but one of another; from the first to behind the last."""
    own = [i for i, action in enumerate(row) if action.op is op]
    runs = (list(run) for _, run in itertools.groupby(own, lambda i: row[i].stage))
    return [range(run[0], run[-1] + 1) for run in runs]


def _merge_adjacent_passes(row: Sequence[Action], runs: list[range]) -> list[range]:
    """Runs of one stage that overlap, or follow each other with one action between, as one."""
    joined: dict[int, list[range]] = {}
    for run in sorted(runs, key=lambda run: run.start):
        passes_of_stage = joined.setdefault(row[run.start].stage, [])
        if passes_of_stage and sum(a.op in (Op.F, Op.B) for a in row[passes_of_stage[-1].stop : run.start]) <= 1:
            passes_of_stage[-1] = range(passes_of_stage[-1].start, max(passes_of_stage[-1].stop, run.stop))
        else:
            passes_of_stage.append(run)
    return [run for stage in joined.values() for run in stage]


class _ScheduleBuilder:
    """Compute lists run once in simulated time; `rows` grow to what with_messages returns."""

    def __init__(self, compute: Sequence[Sequence[Action]], placement: StagePlacement, split: SplitBackward | None):
        self.place, self.split = placement, split
        self.costs = split.costs if split and split.costs else (EQUAL_COSTS,) * placement.num_stages
        self.rows: list[list[Action]] = [[] for _ in compute]
        self.queued = [deque(row) for row in compute]
        self.memory = split.memory if split and split.memory else (UNIT_MEMORY,) * placement.num_stages
        memory_limit = split.memory_limit if split else None
        self.most = max(peak_in_flight(row, self.memory) for row in compute) if memory_limit is None else memory_limit
        self.memory_in_use = [0.0] * len(compute)
        self.pending_w: list[deque[Action]] = [deque() for _ in compute]  # W that may run, oldest first
        self.idle = [True] * len(compute)
        self.available: set[tuple[Op, int, int]] = set()  # inputs that have come
        self.done: set[Action] = set()
        self.events: list[tuple[float, int, Action]] = []

    def run(self) -> None:
        now, ready_ranks = 0.0, {*range(len(self.rows))}  # ranks for which something has changed
        while True:
            for rank in sorted(ready_ranks):
                self._start(rank, now)
            if not self.events:
                return
            now, ready_ranks = self.events[0][0], set()
            while self.events and self.events[0][0] == now:  # all messages of this moment, so that receives come early
                _, rank, action = heapq.heappop(self.events)
                ready_ranks |= self._finish(rank, action)

    def _start(self, rank: int, now: float) -> None:
        """Let an idle rank begin what is next, or a W."""
        if not self.idle[rank]:
            return
        if self.queued[rank] and self._can_run(rank, self.queued[rank][0]):
            action = self.queued[rank].popleft()
        elif self.pending_w[rank]:
            action = self.pending_w[rank].pop() if self.queued[rank] else self.pending_w[rank].popleft()
        else:
            return
        f, b, w = self.costs[action.stage]
        cost = f if action.op is Op.F else w if action.op is Op.W else b if self.split else b + w
        self.memory_in_use[rank] += self._memory_change(action)
        self.rows[rank].append(action)
        self.idle[rank] = False
        heapq.heappush(self.events, (now + cost, rank, action))

    def _can_run(self, rank: int, action: Action) -> bool:
        op, stage, m = action.op, action.stage, action.microbatch
        if self.pending_w[rank] and self.memory_in_use[rank] + self._memory_change(action) > self.most:
            return False
        is_pipeline_end = stage == (0 if op is Op.F else self.place.num_stages - 1)
        return (op is Op.F or Action(Op.F, stage, m) in self.done) and (
            is_pipeline_end or (op, stage, m) in self.available
        )

    def _memory_change(self, action: Action) -> float:
        return memory_change(action.op, self.memory[action.stage], self.split is not None)

    def _finish(self, rank: int, action: Action) -> set[int]:
        """The ranks that hear of it."""
        op, stage, m = action.op, action.stage, action.microbatch
        self.idle[rank] = True
        self.done.add(action)
        if op is Op.B and self.split:
            self.pending_w[rank].append(Action(Op.W, stage, m))
        target = stage + (1 if op is Op.F else -1)
        if op is Op.W or not 0 <= target < self.place.num_stages:
            return {rank}
        self.available.add((op, target, m))
        if (peer := self.place.rank(target)) != rank:
            self.rows[rank].append(Action(Op.SEND_F if op is Op.F else Op.SEND_B, stage, m))
            self.rows[peer].append(Action(Op.RECV_F if op is Op.F else Op.RECV_B, target, m))
        return {rank, peer}


def add_send_recv(
    compute: Sequence[Sequence[Action]], placement: StagePlacement, split: SplitBackward | None = None
) -> list[list[Action]]:
    """Insert each send and its receive into the rows of compute actions of all ranks, and with a `split` each W.

    The rows are run once in simulated time; when an action finishes, its send goes to the end of the producer's row
    and the receive to the end of the consumer's row as they are at that moment. So the result is a projection of one
    sequential execution in which each message is one event for both ends. Whatever the real speeds, the oldest event of
    that execution which has not happened has all its predecessors behind it on both ranks, so it can happen: no
    deadlock, even when a send blocks until its receive is posted.
    """
    execution = _ScheduleBuilder(compute, placement, split)
    execution.run()
    if stuck := [str(queued[0]) for queued in execution.queued if queued]:
        raise ValueError(f"these actions wait for each other: {', '.join(stuck)}")
    return execution.rows


@functools.lru_cache(maxsize=16)  # a second at pp 16, 256 micro-batches, 6 chunks: not to be spent on every step
def build_schedule(
    name: str,
    pp: int,
    num_microbatches: int,
    vpp: int = 1,
    group_size: int | None = None,
    split: SplitBackward | None = None,
) -> tuple[tuple[Action, ...], ...]:
    """The rows of all ranks, messages included, of the schedule called `name`. Raises ValueError where they cannot run
    to their end."""
    if num_microbatches < 1:
        raise ValueError(f"num_microbatches={num_microbatches} is not positive; a step needs at least 1")
    groups, placement = microbatch_groups(num_microbatches, pp, group_size), StagePlacement(pp, vpp)
    computed = [compute_actions(name, rank, placement, groups) for rank in range(pp)]
    try:
        return tuple(tuple(row) for row in add_send_recv(computed, placement, split))
    except ValueError as error:
        raise ValueError(f"pipeline_schedule={name!r} would hang: {error}; put each behind what it needs") from None
