"""Simulated steps with collectives over dp equal a simulation of events, which shares no code with pipeline/simulate.

Here, every rank is a process that runs its actions unit by unit, and waits for messages and collectives. Links and
channels serve one after another. Durations are integers, so times are equal exactly.
"""

import heapq
import itertools
from collections import defaultdict
from collections.abc import Generator, Sequence
from dataclasses import replace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.pipeline.param_sync_time import StageSync, SyncUnit
from megalite.pipeline.schedule import Action, Op, ShardingPolicy, SplitBackward, add_sharding_actions, build_schedule
from megalite.pipeline.simulate import simulate

MODES = ("replicated", "ZeRO-2", "ZeRO-3 by unit", "ZeRO-3 by chunk")
Process = Generator["Event | int", None, None]  # yields what it waits for: an event, or some time


class Event:
    """Something that happens once, for which processes wait."""

    def __init__(self) -> None:
        self.has_happened = False
        self.waiting: list[Process] = []


class World:
    """The clock, and the processes that wait for a time."""

    def __init__(self) -> None:
        self.now = 0
        self.agenda: list[tuple[int, int, Process | Event]] = []
        self.order = itertools.count()

    def at(self, time: int, what: "Process | Event") -> None:
        heapq.heappush(self.agenda, (time, next(self.order), what))

    def run(self) -> None:
        while self.agenda:
            self.now, _, what = heapq.heappop(self.agenda)
            if isinstance(what, Event):
                what.has_happened = True
                for process in what.waiting:
                    self.resume(process)
            else:
                self.resume(what)

    def resume(self, process: Process) -> None:
        for waits_for in process:
            if isinstance(waits_for, int):
                self.at(self.now + waits_for, process)
                return
            if not waits_for.has_happened:
                waits_for.waiting.append(process)
                return


class Server:
    """A link or a channel, which serves its jobs one after another."""

    def __init__(self, world: World):
        self.world = world
        self.free_at = 0
        self.busy = 0

    def start(self, duration: int, done: Event | None = None) -> Event:
        done = done or Event()
        self.free_at = max(self.free_at, self.world.now) + duration
        self.busy += duration
        self.world.at(self.free_at, done)
        return done


class Rank:
    """A pipeline rank."""

    def __init__(self, world: World, syncs: Sequence[StageSync], actions: Sequence[Action], pp: int, delay: int):
        self.world, self.syncs, self.actions, self.pp, self.delay = world, syncs, actions, pp, delay
        self.channel = Server(world)
        self.links = {Op.SEND_F: Server(world), Op.SEND_B: Server(world)}
        self.last_reduction: Event | None = None
        self.gathers: dict[int, dict[int, Event]] = {}  # stage -> unit -> its gather, until the next F or B
        self.times: dict[Action, tuple[int, int]] = {}
        self.end = 0

    def run(self, arrivals: dict[tuple[Op, int, int], Event]) -> Process:
        reducing = {(action.stage, action.microbatch) for action in self.actions if action.op is Op.REDUCE_GRAD}
        grad_op = Op.W if any(action.op is Op.W for action in self.actions) else Op.B
        last_stage = len(self.syncs) - 1
        for action in self.actions:
            op, stage, microbatch = action
            sync = self.syncs[stage]
            if op is Op.UNSHARD:
                yield from self.unshard(stage, sync)
            elif op in (Op.F, Op.B, Op.W):
                if self.pp > 1 and (op, stage) not in ((Op.F, 0), (Op.B, last_stage)) and op is not Op.W:
                    yield arrivals[action]
                start = self.world.now
                reduces = op is grad_op and (stage, microbatch) in reducing
                yield from self.compute(action, sync, reduces)
                self.times[action] = start, self.world.now
            elif op in (Op.SEND_F, Op.SEND_B):
                message = (Op.F, stage + 1, microbatch) if op is Op.SEND_F else (Op.B, stage - 1, microbatch)
                self.links[op].start(self.delay, arrivals[message])
        finish = sum(
            sync.finish_s for stage, sync in enumerate(self.syncs) if stage % self.pp == self.actions[0].stage % self.pp
        )
        self.end = max(self.world.now, self.channel.free_at) + int(finish)

    def unshard(self, stage: int, sync: StageSync) -> Process:
        if sync.gathers_by_unit:
            return
        skips_ends = sync.reshards_weights
        units = [i for i, unit in enumerate(sync.units) if unit.gather_s and not (skips_ends and unit.is_end)]
        if not sync.overlaps_gather and not sync.reshards_weights:
            for i in units:
                yield self.channel.start(int(sync.units[i].gather_s))
            return
        self.gathers[stage] = {i: self.channel.start(int(sync.units[i].gather_s)) for i in units}

    def compute(self, action: Action, sync: StageSync, reduces: bool) -> Process:
        op, stage, _ = action
        is_first = op is not Op.W and stage in self.gathers
        ahead = self.gathers.pop(stage) if is_first else {}
        order = range(len(sync.units)) if op is Op.F else range(len(sync.units) - 1, -1, -1)
        prefetched: dict[int, Event] = {}
        if op is Op.B and ahead:
            yield ahead[max(ahead)]
        for position, i in enumerate(order):
            unit = sync.units[i]
            if sync.gathers_by_unit and op is not Op.W and not (op is Op.B and unit.is_end):
                if i in prefetched:
                    yield prefetched[i]
                elif unit.gather_s:
                    yield self.channel.start(int(unit.gather_s))
                if sync.overlaps_gather and position + 1 < len(order):
                    following = order[position + 1]
                    other = sync.units[following]
                    if other.gather_s and not (op is Op.B and other.is_end):
                        prefetched[following] = self.channel.start(int(other.gather_s))
            elif op is Op.F and i in ahead:
                yield ahead[i]
            elif op is Op.F and is_first and unit.gather_s and sync.reshards_weights and unit.is_end:
                yield self.channel.start(int(unit.gather_s))
            f, b, w = (int(cost) for cost in unit.costs)
            yield {Op.F: f, Op.B: b if sync.splits_backward else b + w, Op.W: w}[op]
            if reduces and unit.reduce_s:
                if sync.reshards_grads and self.last_reduction is not None:
                    yield self.last_reduction
                self.last_reduction = self.channel.start(int(unit.reduce_s))
                if not sync.overlaps_reduce:
                    yield self.last_reduction


def simulate_events(actions_by_rank: Sequence[Sequence[Action]], syncs: Sequence[StageSync], delay: int) -> list[Rank]:
    world = World()
    ranks = [Rank(world, syncs, actions, len(actions_by_rank), delay) for actions in actions_by_rank]
    arrivals: dict[tuple[Op, int, int], Event] = defaultdict(Event)
    for rank in ranks:
        world.at(0, rank.run(arrivals))
    world.run()
    return ranks


def draw_sync(
    data: st.DataObject, mode: str, splits_backward: bool, stage: int, last_stage: int, **flags: Any
) -> StageSync:
    def draw(low: int, high: int) -> float:
        return float(data.draw(st.integers(low, high)))

    num_units = data.draw(st.integers(1, 4))
    units = [
        SyncUnit(
            (draw(0, 9), draw(0, 9), draw(0, 9)),
            draw(0, 9),
            draw(0, 9),
            mode != "replicated" and ((i == 0 and stage == 0) or (i == num_units - 1 and stage == last_stage)),
        )
        for i in range(num_units)
    ]
    return StageSync(
        tuple(units),
        splits_backward=splits_backward,
        gathers_by_unit=mode == "ZeRO-3 by unit",
        reshards_weights=mode.startswith("ZeRO-3"),
        reshards_grads=mode != "replicated",
        finish_s=draw(0, 9),
        **flags,
    )


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_collectives_over_dp_equal_a_simulation_of_events(data: st.DataObject) -> None:
    pp, vpp = data.draw(st.sampled_from([(1, 1), (2, 1), (3, 1), (2, 2), (2, 3), (3, 2)]))
    num_microbatches = data.draw(st.integers(1, 6))
    mode = data.draw(st.sampled_from(MODES))
    is_split = pp > 1 and data.draw(st.booleans())
    name = data.draw(st.sampled_from(["1f1b", "gpipe", "breadth-first"]))
    rows = build_schedule(name, pp, num_microbatches, vpp, split=SplitBackward() if is_split else None)
    policy = ShardingPolicy(mode != "replicated", mode == "ZeRO-3 by chunk")
    rows = tuple(add_sharding_actions(row, policy) for row in rows)
    if not policy.unshard_by_chunk:
        rows = tuple(
            (*(Action(Op.UNSHARD, stage, 0) for stage in range(rank, pp * vpp, pp)), *row)
            for rank, row in enumerate(rows)
        )
    flags = dict(overlaps_gather=data.draw(st.booleans()), overlaps_reduce=data.draw(st.booleans()))
    num_stages = pp * vpp
    syncs = [draw_sync(data, mode, is_split, stage, num_stages - 1, **flags) for stage in range(num_stages)]
    costs = [tuple(map(sum, zip(*(unit.costs for unit in sync.units), strict=True))) for sync in syncs]
    delay = data.draw(st.integers(0, 9))
    result = simulate(rows, costs, delay=lambda source, target: float(delay), sync=syncs)
    ranks = simulate_events(rows, syncs, delay)
    expected = {action: times for rank in ranks for action, times in rank.times.items()}
    assert {span.action: (span.start, span.end) for span in result.spans} == expected
    assert result.end == max(rank.end for rank in ranks)
    busy = [rank.channel.busy for rank in ranks]
    finish = [sum(sync.finish_s for sync in syncs[rank::pp]) for rank in range(pp)]
    assert list(result.channel_s) == [a + b for a, b in zip(busy, finish, strict=True)]


def test_free_collectives_change_nothing() -> None:
    rows = tuple(add_sharding_actions(row, ShardingPolicy(True, True)) for row in build_schedule("1f1b", 2, 6, 2))
    unit = SyncUnit((1.0, 2.0, 3.0), 0.0, 0.0)
    syncs = [StageSync((unit, unit), reshards_weights=True, reshards_grads=True)] * 4
    plain = simulate(rows, [(2.0, 4.0, 6.0)] * 4)
    assert simulate(rows, [(2.0, 4.0, 6.0)] * 4, sync=syncs).spans == plain.spans
    slow = [replace(sync, units=(unit._replace(reduce_s=1.0),) * 2) for sync in syncs]
    assert simulate(rows, [(2.0, 4.0, 6.0)] * 4, sync=slow).end > plain.end
