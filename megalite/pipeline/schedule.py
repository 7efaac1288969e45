"""Pipeline schedules as data: each rank's list of actions, messages included. All functions are pure.

1F1B for pp 3 and 4 micro-batches, one line per rank (the same as in arXiv:2104.04473, fig. 4):

    0 | F0.0 F0.1 F0.2 B0.0 F0.3 B0.1 B0.2 B0.3
    1 | F1.0 F1.1 B1.0 F1.2 B1.1 F1.3 B1.2 B1.3
    2 | F2.0 B2.0 F2.1 B2.1 F2.2 B2.2 F2.3 B2.3

With vpp > 1, micro-batches pass through a rank's chunks group by group (`microbatch_groups`). The number of
micro-batches may be smaller than pp, and need not be a multiple of it. A new schedule is one more function that returns
the order of F and B on a rank. It needs no variant with a split backward, since W is inserted into any order of F and B
(`SplitBackward`).
"""

import contextlib
import functools
import heapq
import itertools
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from megalite.config.registry import REGISTRIES


class Op(StrEnum):
    """The operation of an action.

    F and B are the forward and the backward of one stage for one micro-batch. On a rank that has W, B computes only the
    gradient of the input, and W the gradients of the weights, for which no other rank waits. SEND and RECV are messages
    between stages. UNSHARD, RESHARD and REDUCE_GRAD unshard and reshard the weights of a stage that are sharded over
    dp, and reduce its gradients.
    """

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


COMPUTE_OPS = (Op.F, Op.B, Op.W)

ActionCosts = tuple[float, float, float]  # time of F, B and W of one stage; a backward that is not split takes B + W
ActionMemory = tuple[float, float]  # memory saved by one forward: from F to B, and with a split backward from B to W
EQUAL_COSTS: ActionCosts = (1, 1, 1)
UNIT_MEMORY: ActionMemory = (1, 1)


@dataclass(frozen=True)
class StagePlacement:
    """The placement of stages on pipeline ranks: stage s is chunk s // pp of the `vpp` chunks of rank s % pp."""

    pp: int
    vpp: int = 1

    @property
    def num_stages(self) -> int:
        """The number of stages of all ranks."""
        return self.pp * self.vpp

    def rank(self, stage: int) -> int:
        """Return the pipeline rank of a stage."""
        return stage % self.pp

    def chunk(self, stage: int) -> int:
        """Return the index of a stage among the stages of its rank."""
        return stage // self.pp

    def stages_of_rank(self, rank: int) -> range:
        """Return the stages of a rank, by chunk."""
        return range(rank, self.num_stages, self.pp)


@dataclass(frozen=True)
class SplitBackward:
    """Options of a backward that is split into B and W.

    A rank keeps its order of F and B. A W runs whenever the next F or B cannot run yet, or would exceed the memory
    limit: the newest W, whose operands are still in the cache, or the oldest if no F or B is left. arXiv:2401.10241
    constructs such a schedule by hand: 1F1B with W inserted is its ZB-H1.

    Attributes:
        costs: times of F, B and W on every stage; None: 1 each.
        memory: memory of one forward on every stage; None: 1 until its W has run.
        memory_limit: memory that a rank may use; None: the peak of any rank without the split. If no W is pending that
            could free memory, the next action runs even if it exceeds the limit.
    """

    costs: tuple[ActionCosts, ...] | None = None
    memory: tuple[ActionMemory, ...] | None = None
    memory_limit: float | None = None


class Action(NamedTuple):
    """An action of a rank, printed as F0.3: operation, stage, micro-batch.

    RECV_F and SEND_B are messages on the input side of `stage`, SEND_F and RECV_B on its output side: SF0.3 on one rank
    matches RF1.3 on the next, and SB1.3 matches RB0.3.
    """

    op: Op
    stage: int
    microbatch: int

    def __str__(self) -> str:
        return f"{self.op.value}{self.stage}.{self.microbatch}"


def microbatch_groups(num_microbatches: int, pp: int, size: int | None = None) -> list[int]:
    """Return the sizes of the groups of micro-batches that run through one chunk before the next chunk starts.

    Groups have `size` (default pp) micro-batches. A remainder of pp or more is a separate, last group; a smaller one is
    distributed evenly over the groups; the first groups are the largest.

    A group smaller than pp would make the first stage wait until its micro-batches return from the last stage. Without
    such a group, the bubble is (pp - 1) / (vpp m + pp - 1) for every m >= pp. torch.distributed.pipelining computes the
    size of its rounds in the same way.

    >>> microbatch_groups(8, 4), microbatch_groups(11, 4), microbatch_groups(3, 4), microbatch_groups(5, 2, 3)
    ([4, 4], [6, 5], [3], [3, 2])
    """
    size = size or pp
    num_full, remainder = divmod(num_microbatches, size)
    if remainder >= pp and num_full:
        return [size] * num_full + [remainder]
    num_groups = max(1, num_full)
    min_size, num_larger = divmod(num_microbatches, num_groups)
    return [min_size + 1 if i < num_larger else min_size for i in range(num_groups)]


def _in_group_order(rank: int, placement: StagePlacement, groups: Sequence[int], op: Op) -> list[Action]:
    """Return all F (or B) of one rank: a group of micro-batches runs through all chunks before the next group."""
    stages = placement.stages_of_rank(rank)
    if op is Op.B:
        stages = stages[::-1]
    ranges = [range(stop - size, stop) for stop, size in zip(itertools.accumulate(groups), groups, strict=True)]
    return [Action(op, stage, i) for microbatches in ranges for stage in stages for i in microbatches]


def gpipe(rank: int, placement: StagePlacement, groups: Sequence[int]) -> list[Action]:
    """Return GPipe: all forwards, then all backwards (arXiv:1811.06965)."""
    return [*_in_group_order(rank, placement, groups, Op.F), *_in_group_order(rank, placement, groups, Op.B)]


def breadth_first(rank: int, placement: StagePlacement, groups: Sequence[int]) -> list[Action]:
    """Return GPipe in which all micro-batches run through a chunk before the next chunk starts (arXiv:2211.05953).

    The gradients of a chunk are complete and can be reduced before the backwards of the other chunks run.
    """
    return gpipe(rank, placement, [sum(groups)])


def one_f_one_b(rank: int, placement: StagePlacement, groups: Sequence[int]) -> list[Action]:
    """Return 1F1B (arXiv:2006.09503, PipeDream-flush), interleaved if vpp > 1 (arXiv:2104.04473, sec. 2.2)."""
    forwards = _in_group_order(rank, placement, groups, Op.F)
    backwards = _in_group_order(rank, placement, groups, Op.B)
    num_warmup = placement.pp - rank - 1
    if placement.vpp > 1:
        num_warmup = num_warmup * 2 + (placement.vpp - 1) * groups[0]
    actions = forwards[:num_warmup]
    for pair in zip(forwards[num_warmup:], backwards, strict=False):
        actions += pair
    return actions + backwards[max(0, len(forwards) - num_warmup) :]


FORWARD_ONLY = "forward"  # the schedule of an evaluation


def compute_actions(name: str, rank: int, placement: StagePlacement, groups: Sequence[int]) -> list[Action]:
    """Return F and B of one rank, in order, in the schedule `name`: a value of pipeline_schedule, or FORWARD_ONLY.

    Raises ValueError if a plugin's schedule does not have each F and B of the rank's stages exactly once.
    """
    if name == FORWARD_ONLY:
        return _in_group_order(rank, placement, groups, Op.F)
    schedule = REGISTRIES["pipeline_schedule"].get(name)
    actions: list[Action] = [*(schedule(rank, placement, groups) or ())]
    if name in REGISTRIES["pipeline_schedule"].plugin_components:
        counts = Counter(actions)
        expected = Counter(a for op in (Op.F, Op.B) for a in _in_group_order(rank, placement, groups, op))
        if wrong := [*(expected - counts), *(counts - expected)]:
            text = f"pipeline_schedule={name!r}: rank {rank} of {placement.pp} has {wrong[0]} {counts[wrong[0]]} times"
            raise ValueError(f"{text}, not {expected[wrong[0]]}; each F and B of its stages must appear exactly once")
    return actions


def peak_in_flight(actions: Sequence[Action], memory: Sequence[ActionMemory] | None = None) -> float:
    """Return the peak memory on one rank of forwards whose backward (with a split: whose W) has not run yet.

    `memory` is the memory of a forward on every stage; None: 1, so that the result is a number of forwards.
    """
    split = any(action.op is Op.W for action in actions)
    stages = {action.stage for action in actions}
    changes = {stage: _memory_changes(memory[stage] if memory else UNIT_MEMORY, split) for stage in stages}
    return max(itertools.accumulate(changes[stage][op] for op, stage, _ in actions if op in COMPUTE_OPS))


def _memory_changes(memory: ActionMemory, split: bool) -> dict[Op, float]:
    """Return the memory that F, B and W of a stage allocate."""
    return {op: memory_change(op, memory, split) for op in COMPUTE_OPS}


def memory_change(op: Op, memory: ActionMemory, split: bool) -> float:
    """Return the memory that an action allocates; negative if it frees memory."""
    until_b, until_w = memory
    if op is Op.F:
        return until_b
    if op is Op.B:
        return (until_w if split else 0) - until_b
    if op is Op.W:
        return -until_w
    return 0


@dataclass(frozen=True)
class ShardingPolicy:
    """The points at which gradients are reduced and weights unsharded, if they are sharded over dp.

    Attributes:
        reduce_every_pass: reduce the gradients of a stage after each pass of backwards, so that full gradients exist
            only during a pass (ZeRO-2); otherwise once per step.
        unshard_by_chunk: full weights of a stage exist only during its passes (ZeRO-3).
    """

    reduce_every_pass: bool = False
    unshard_by_chunk: bool = False


@functools.lru_cache(maxsize=16)  # every step calls it with the same arguments
def add_sharding_actions(actions: tuple[Action, ...], policy: ShardingPolicy) -> tuple[Action, ...]:
    """Insert UNSHARD, RESHARD and REDUCE_GRAD into one rank's actions.

    The existing order does not change, and all data-parallel ranks have the same actions. So they start the same
    collectives in the same order, and no rank waits for anything new.

    A pass is a sequence of forwards (or backwards) of one stage that no forward (backward) of another stage interrupts.

    Gradient passes consist of W if the backward is split, else of B. If the rank has a single stage, each of these
    actions is a pass. REDUCE_GRAD follows the last action of a gradient pass.

    Weights are unsharded one compute action before a pass, which overlaps with it, and resharded after the pass. Passes
    of one stage with at most one compute action between them are merged.
    """
    inserted: dict[int, list[Action]] = {}  # index in `actions` -> what is inserted before it, in order

    def insert(index: int, op: Op, target: Action, first: bool = False) -> None:
        """Insert `op` for the stage and micro-batch of `target` before `index`: as the first action there, or last."""
        new_actions = inserted.setdefault(index, [])
        new_actions.insert(0 if first else len(new_actions), Action(op, target.stage, target.microbatch))

    grad_op = Op.W if any(action.op is Op.W for action in actions) else Op.B
    grad_passes = _passes(actions, grad_op)
    if len({actions[grad_pass.start].stage for grad_pass in grad_passes}) == 1:
        grad_passes = [range(i, i + 1) for i, action in enumerate(actions) if action.op is grad_op]
    last_stops = {actions[grad_pass.stop - 1].stage: grad_pass.stop for grad_pass in grad_passes}
    for grad_pass in grad_passes:
        last_action = actions[grad_pass.stop - 1]
        if policy.reduce_every_pass or last_stops[last_action.stage] == grad_pass.stop:
            insert(grad_pass.stop, Op.REDUCE_GRAD, last_action)
    if policy.unshard_by_chunk:
        compute_indices = [i for i, action in enumerate(actions) if action.op in (Op.F, Op.B)]
        chunk_passes = [*_passes(actions, Op.F), *_passes(actions, Op.B)]
        for chunk_pass in _merge_adjacent_passes(actions, chunk_passes):
            insert(chunk_pass.stop, Op.RESHARD, actions[chunk_pass.stop - 1], first=True)
            earlier = [i for i in compute_indices if i < chunk_pass.start]
            insert(earlier[-1] if earlier else 0, Op.UNSHARD, actions[chunk_pass.start])
    return tuple(a for i in range(len(actions) + 1) for a in (*inserted.get(i, ()), *actions[i : i + 1]))


def _passes(actions: Sequence[Action], op: Op) -> list[range]:
    """Return the passes of `op` as half-open index ranges.

    A pass is consecutive `op` actions of one stage, with actions of any other kind between them.
    """
    indices = [i for i, action in enumerate(actions) if action.op is op]
    groups = (list(group) for _, group in itertools.groupby(indices, lambda i: actions[i].stage))
    return [range(group[0], group[-1] + 1) for group in groups]


def _merge_adjacent_passes(actions: Sequence[Action], passes: list[range]) -> list[range]:
    """Merge passes of one stage that overlap or have at most one compute action between them."""
    merged: dict[int, list[range]] = {}  # by stage
    for chunk_pass in sorted(passes, key=lambda chunk_pass: chunk_pass.start):
        passes_of_stage = merged.setdefault(actions[chunk_pass.start].stage, [])
        if passes_of_stage:
            previous = passes_of_stage[-1]
            if sum(a.op in (Op.F, Op.B) for a in actions[previous.stop : chunk_pass.start]) <= 1:
                passes_of_stage[-1] = range(previous.start, max(previous.stop, chunk_pass.stop))
                continue
        passes_of_stage.append(chunk_pass)
    return [chunk_pass for passes_of_stage in merged.values() for chunk_pass in passes_of_stage]


class _ScheduleBuilder:
    """A simulation of all ranks that turns lists of F and B into schedules with W, and with messages if asked for.

    Attributes:
        actions_by_rank: the actions that have started; complete after `run`.
        now: the time; after `run` that at which the last action has ended.
        queued: the F and B of each rank that have not started.
    """

    def __init__(
        self,
        compute: Sequence[Sequence[Action]],
        placement: StagePlacement,
        split: SplitBackward | None,
        with_messages: bool = True,
    ):
        self.placement = placement
        self.split = split
        self.with_messages = with_messages
        costs = split.costs if split and split.costs else (EQUAL_COSTS,) * placement.num_stages
        memory = split.memory if split and split.memory else (UNIT_MEMORY,) * placement.num_stages
        # by stage and operation
        self.durations = [{Op.F: f, Op.B: b if split else b + w, Op.W: w} for f, b, w in costs]
        self.memory_changes = [_memory_changes(memory_of_stage, split is not None) for memory_of_stage in memory]
        if split and split.memory_limit is not None:
            self.memory_limit = split.memory_limit
        else:
            self.memory_limit = max(peak_in_flight(actions, memory) for actions in compute)
        self.now = 0.0
        self.actions_by_rank: list[list[Action]] = [[] for _ in compute]
        self.queued = [deque(actions) for actions in compute]
        self.memory_in_use = [0.0] * len(compute)
        self.pending_w: list[deque[Action]] = [deque() for _ in compute]  # W that may run, oldest first
        self.idle = [True] * len(compute)
        self.available: set[tuple[Op, int, int]] = set()  # inputs that have arrived: (op, stage, micro-batch)
        self.done: set[Action] = set()
        self.events: list[tuple[float, int, Action]] = []  # a heap of (end, rank, action)

    def run(self) -> None:
        """Simulate until no action can start. Raises ValueError if actions are left, which wait for each other."""
        changed_ranks = {*range(len(self.actions_by_rank))}  # ranks that may be able to start an action
        while True:
            for rank in sorted(changed_ranks):
                self._start(rank)
            if not self.events:
                break
            self.now = self.events[0][0]
            changed_ranks.clear()
            # all messages of this time before any action starts, so that receives are posted early
            while self.events and self.events[0][0] == self.now:
                _, rank, action = heapq.heappop(self.events)
                changed_ranks.update(self._finish(rank, action))
        if stuck := [str(queued[0]) for queued in self.queued if queued]:
            raise ValueError(f"these actions wait for each other: {', '.join(stuck)}")

    def _start(self, rank: int) -> None:
        """Start the next action of an idle rank, or a W if that cannot run."""
        if not self.idle[rank]:
            return
        if self.queued[rank] and self._can_run(rank, self.queued[rank][0]):
            action = self.queued[rank].popleft()
        elif self.pending_w[rank]:
            action = self.pending_w[rank].pop() if self.queued[rank] else self.pending_w[rank].popleft()
        else:
            return
        op, stage, _ = action
        self.memory_in_use[rank] += self.memory_changes[stage][op]
        self.actions_by_rank[rank].append(action)
        self.idle[rank] = False
        heapq.heappush(self.events, (self.now + self.durations[stage][op], rank, action))

    def _can_run(self, rank: int, action: Action) -> bool:
        """Return True if the inputs of F or B have arrived and no pending W has to free memory first."""
        op, stage, microbatch = action
        if self.pending_w[rank] and self.memory_in_use[rank] + self.memory_changes[stage][op] > self.memory_limit:
            return False
        if op is Op.B and (Op.F, stage, microbatch) not in self.done:
            return False
        has_no_input = stage == (0 if op is Op.F else self.placement.num_stages - 1)
        return has_no_input or action in self.available

    def _finish(self, rank: int, action: Action) -> tuple[int, ...]:
        """Finish an action: add its send and receive. Return the ranks that it may enable to start an action."""
        op, stage, microbatch = action
        self.idle[rank] = True
        self.done.add(action)
        if op is Op.B and self.split:
            self.pending_w[rank].append(Action(Op.W, stage, microbatch))
        target = stage + (1 if op is Op.F else -1)
        if op is Op.W or not 0 <= target < self.placement.num_stages:
            return (rank,)
        self.available.add((op, target, microbatch))
        peer = self.placement.rank(target)
        if peer != rank and self.with_messages:
            self.actions_by_rank[rank].append(Action(Op.SEND_F if op is Op.F else Op.SEND_B, stage, microbatch))
            self.actions_by_rank[peer].append(Action(Op.RECV_F if op is Op.F else Op.RECV_B, target, microbatch))
        return rank, peer


def add_send_recv(
    compute: Sequence[Sequence[Action]], placement: StagePlacement, split: SplitBackward | None = None
) -> list[list[Action]]:
    """Insert each send and its receive, and with `split` each W, into the F and B of all ranks.

    The actions are run once in simulated time. When an action finishes, its send is appended to the producer's list and
    the receive to the consumer's list as they are at that time. So the result is a projection of one sequential
    execution in which each message is one event at both ends. Whatever the real speeds are, consider the oldest event
    of that execution that has not happened: on both ranks all its predecessors have happened, so it can happen. There
    is no deadlock, even if a send blocks until its receive is posted.

    Raises ValueError if actions of `compute` wait for each other.
    """
    builder = _ScheduleBuilder(compute, placement, split)
    builder.run()
    return builder.actions_by_rank


@functools.lru_cache(maxsize=16)  # takes a second at pp 16, 256 micro-batches, 6 chunks: too slow for every step
def build_schedule(
    name: str,
    pp: int,
    num_microbatches: int,
    vpp: int = 1,
    group_size: int | None = None,
    split: SplitBackward | None = None,
) -> tuple[tuple[Action, ...], ...]:
    """Return the actions of all ranks, messages included, of the schedule `name`.

    Args:
        name: a value of pipeline_schedule, or FORWARD_ONLY.
        pp: number of pipeline ranks.
        num_microbatches: micro-batches of a step.
        vpp: chunks per rank.
        group_size: micro-batches per group (`microbatch_groups`); None: pp.
        split: how to split the backward; None: not at all.

    Raises:
        ValueError: num_microbatches is not positive, or the schedule would deadlock.
    """
    compute = _forwards_and_backwards(name, pp, num_microbatches, vpp, group_size)
    with _name_in_errors(name):
        return tuple(tuple(actions) for actions in add_send_recv(compute, StagePlacement(pp, vpp), split))


def build_split_schedule(
    name: str, pp: int, num_microbatches: int, vpp: int, group_size: int | None, split: SplitBackward
) -> tuple[list[list[Action]], float]:
    """Return `build_schedule` without messages, and the time at which its last action ends, by the costs of `split`.

    It takes half of the time, which counts where many distributions of layers are compared: each has its own W.
    """
    compute = _forwards_and_backwards(name, pp, num_microbatches, vpp, group_size)
    builder = _ScheduleBuilder(compute, StagePlacement(pp, vpp), split, with_messages=False)
    with _name_in_errors(name):
        builder.run()
    return builder.actions_by_rank, builder.now


def _forwards_and_backwards(
    name: str, pp: int, num_microbatches: int, vpp: int, group_size: int | None
) -> list[list[Action]]:
    if num_microbatches < 1:
        raise ValueError(f"num_microbatches={num_microbatches} is not positive; a step needs at least 1")
    groups = microbatch_groups(num_microbatches, pp, group_size)
    return [compute_actions(name, rank, StagePlacement(pp, vpp), groups) for rank in range(pp)]


@contextlib.contextmanager
def _name_in_errors(name: str) -> Iterator[None]:
    try:
        yield
    except ValueError as error:
        raise ValueError(f"pipeline_schedule={name!r} would hang: {error}; put each after what it depends on") from None
