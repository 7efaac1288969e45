"""Simulation of a pipeline schedule: when each action runs, and how long ranks are idle. All functions are pure.

The bubble is the idle fraction of the ranks' time. For 1F1B with equal stages it is (pp - 1) / (vpp m + pp - 1). With a
split backward, vpp 1 and m >= pp it is (pp - 1) / (3 m + pp - 1), the same as for ZB-H1 (arXiv:2401.10241, table 1).

>>> from math import isclose
>>> from megalite.pipeline.schedule import SplitBackward, build_schedule
>>> isclose(simulate(build_schedule("1f1b", 4, 8)).bubble, 3 / (8 + 3))
True
>>> isclose(simulate(build_schedule("1f1b", 4, 8, split=SplitBackward())).bubble, 3 / (3 * 8 + 3))
True
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from megalite.pipeline.param_sync_time import CHANNEL, NEVER, REDUCED, START, StageSync, action_map
from megalite.pipeline.schedule import COMPUTE_OPS, EQUAL_COSTS, Action, ActionCosts, Op, StagePlacement

SENDS = {Op.SEND_F: (Op.F, 1), Op.SEND_B: (Op.B, -1)}  # (operation that gets the message, stages to its receiver)
AFTER = {Op.B: Op.F, Op.W: Op.B}  # the operation of the same stage and micro-batch that has to run before
NODE_OPS = (*COMPUTE_OPS, Op.UNSHARD)  # operations with a start and an end
NONE = -1  # index of an action or message that does not exist, whose end is 0


class Span(NamedTuple):
    """When a rank runs an action, in units of the costs."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """The start and end of every compute action, in units of the costs.

    Attributes:
        actions: the compute actions of all ranks.
        starts, ends: [actions].
        placement: the placement of the stages.
        end: the end of the last action, and with Durations.sync of the last collective.
        channel_s: with Durations.sync, the time of all collectives over dp of each rank.
    """

    actions: Sequence[Action]
    starts: np.ndarray
    ends: np.ndarray
    placement: StagePlacement
    end: float
    channel_s: Sequence[float] = ()

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """The compute actions of all ranks; those of one rank are in order."""
        times = zip(self.actions, self.starts.tolist(), self.ends.tolist(), strict=True)
        return tuple(Span(self.placement.rank(action.stage), action, start, end) for action, start, end in times)

    @property
    def bubble(self) -> float:
        """The idle fraction of the time of all ranks."""
        busy = sum((self.ends - self.starts).tolist())
        return 1.0 - busy / (self.placement.pp * self.end)


@dataclass(frozen=True)
class Durations:
    """The durations of actions and messages.

    Attributes:
        costs: times of F, B and W on every stage, as in schedule.SplitBackward; None: 1 each.
        delay: time of a message from one rank to another; None: no time. The messages of a rank in one direction are
            transferred one after another; they don't delay its compute actions.
        sync: the collectives over dp of every stage, with the same costs; None: none. Then UNSHARD and REDUCE_GRAD
            take no time. A rank's collectives follow each other, as its messages do.
    """

    costs: Sequence[ActionCosts] | None = None
    delay: Callable[[int, int], float] | None = None
    sync: Sequence[StageSync] | None = None


def simulate(
    actions_by_rank: Sequence[Sequence[Action]],
    costs: Sequence[ActionCosts] | None = None,
    *,
    delay: Callable[[int, int], float] | None = None,
    sync: Sequence[StageSync] | None = None,
) -> Simulation:
    """Run each action as soon as its rank is free and its input has arrived.

    Args:
        actions_by_rank: a schedule with messages (schedule.build_schedule).
        costs, delay, sync: see Durations.

    Raises:
        ValueError: a message or an input of an action never arrives.
    """
    return simulate_all(actions_by_rank, [Durations(costs, delay, sync)])[0]


def simulate_all(actions_by_rank: Sequence[Sequence[Action]], durations: Sequence[Durations]) -> Sequence[Simulation]:
    """Return what `simulate` returns for each of the durations, whose waits are the same."""
    return _Dependencies(actions_by_rank).run(durations)


class _Dependencies:
    """The waits of a schedule's actions and messages for each other, which do not depend on any duration.

    An action waits for the previous action of its rank, and for the message with its input. A message waits for the
    last action before it on its rank, and for the rank's previous message in the same direction. UNSHARD is an action
    that computes nothing, and the next F or B of its stage waits for it. The level of an action or message is the
    length of the longest chain of waits that leads to it. Those of one level do not wait for each other, so `run`
    computes their times together.

    Attributes:
        actions: the compute actions and UNSHARD of all ranks; those of one rank are in order.
        reduced: the indices of the actions that are followed by REDUCE_GRAD.
        placement: the placement of the stages.
    """

    def __init__(self, actions_by_rank: Sequence[Sequence[Action]]):
        """Find the waits.

        Raises:
            ValueError: a message or an input of an action never arrives.
        """
        num_ranks = len(actions_by_rank)
        last_stage = max(action.stage for actions in actions_by_rank for action in actions)
        self.placement = placement = StagePlacement(num_ranks, -(-(last_stage + 1) // num_ranks))
        self.actions: list[Action] = []
        self.reduced: list[int] = []
        waits: list[tuple[int, int, int, int]] = []  # (level, previous action, message, UNSHARD) of each action
        message_waits: list[tuple[int, int, int]] = []  # (level, action, previous message) of each message
        links: list[int] = []  # rank x number of ranks + target rank, of each message
        done = set[Action]()
        # (operation, stage, micro-batch) -> message with its input. The first F and the last B wait for no input.
        inputs: dict[tuple[Op, int, int], int] = {}
        stages_without_input = {(Op.F, 0), (Op.B, last_stage), *((Op.W, stage) for stage in range(last_stage + 1))}
        unshards: dict[int, int] = {}  # stage -> UNSHARD that no action has waited for
        position = [0] * num_ranks  # index of the next action
        last_action = [NONE] * num_ranks
        last_compute = [NONE] * num_ranks
        last_message = {op: [NONE] * num_ranks for op in SENDS}
        progressed = True
        while progressed:
            progressed = False
            for rank, actions in enumerate(actions_by_rank):
                while position[rank] < len(actions):
                    op, stage, microbatch = action = actions[position[rank]]
                    if op in COMPUTE_OPS:
                        if op is not Op.F and (AFTER[op], stage, microbatch) not in done:
                            break
                        message = NONE if (op, stage) in stages_without_input else inputs.get(action)
                        if message is None:
                            break
                        level = 1
                        if (previous := last_action[rank]) != NONE:
                            level += waits[previous][0]
                        if message != NONE and message_waits[message][0] >= level:
                            level = 1 + message_waits[message][0]
                        unshard = NONE if op is Op.W else unshards.pop(stage, NONE)
                        last_action[rank] = last_compute[rank] = len(self.actions)
                        waits.append((level, previous, message, unshard))
                        self.actions.append(action)
                        done.add(action)
                        if num_ranks == 1 and op is not Op.W:  # the next stage is on the same rank
                            inputs[op, stage + (1 if op is Op.F else -1), microbatch] = len(links)
                            message_waits.append((level, last_action[rank], NONE))
                            links.append(0)
                    elif op in SENDS:
                        input_op, step = SENDS[op]
                        level = 1
                        if last_action[rank] != NONE:
                            level = waits[last_action[rank]][0]
                        if (previous := last_message[op][rank]) != NONE and message_waits[previous][0] >= level:
                            level = 1 + message_waits[previous][0]
                        inputs[input_op, stage + step, microbatch] = last_message[op][rank] = len(links)
                        message_waits.append((level, last_action[rank], previous))
                        links.append(rank * num_ranks + placement.rank(stage + step))
                    elif op is Op.UNSHARD:
                        previous = last_action[rank]
                        level = 1 if previous == NONE else 1 + waits[previous][0]
                        last_action[rank] = unshards[stage] = len(self.actions)
                        waits.append((level, previous, NONE, NONE))
                        self.actions.append(action)
                    elif op is Op.REDUCE_GRAD:
                        self.reduced.append(last_compute[rank])
                    position[rank] += 1
                    progressed = True
        stuck = [str(actions[i]) for actions, i in zip(actions_by_rank, position, strict=True) if i < len(actions)]
        if stuck:
            raise ValueError(f"never runs: {', '.join(stuck)}")
        self._last_actions = np.array(last_action)
        self._sort_by_level(np.array(waits), np.array(message_waits, dtype=np.int64).reshape(-1, 3), np.array(links))

    def _sort_by_level(self, waits: np.ndarray, message_waits: np.ndarray, links: np.ndarray) -> None:
        """Renumber actions and messages in the order of their levels, so that each level is a slice."""
        order, message_order = (np.argsort(rows[:, 0], kind="stable") for rows in (waits, message_waits))
        # the new number of each; NONE stays the last index
        number, message_number = (np.append(np.argsort(rows), NONE) for rows in (order, message_order))
        levels, previous, inputs, unshards = waits[order].T
        message_levels, after, previous_message = message_waits[message_order].T
        self._number = number[:-1]
        self._previous, self._inputs, self._unshards = number[previous], message_number[inputs], number[unshards]
        self._after, self._previous_message = number[after], message_number[previous_message]
        self._links = links[message_order]
        all_levels = np.arange(1, levels[-1] + 2)
        stops, message_stops = (np.searchsorted(rows, all_levels).tolist() for rows in (levels, message_levels))
        self._levels = list(zip(stops, stops[1:], message_stops, message_stops[1:], strict=False))
        self._stages = np.array([action.stage for action in self.actions])[order]
        self._ops = np.array([NODE_OPS.index(action.op) for action in self.actions])[order]
        self._reduces = np.isin(order, self.reduced)
        self._is_split = any(action.op is Op.W for action in self.actions)

    def run(self, durations: Sequence[Durations]) -> list[Simulation]:
        """Return the simulation of each of the durations."""
        costs, delays = (
            np.stack(rows, axis=-1) for rows in zip(*(self._values_of(duration) for duration in durations), strict=True)
        )
        has_sync = any(duration.sync is not None for duration in durations)
        maps, channel_s = self._sync_values(durations, costs) if has_sync else (None, None)
        num_actions = len(costs)
        starts = np.zeros_like(costs)
        # the end of each action, and the state of its rank's channel after it; the last one belongs to NONE
        states = np.zeros((num_actions + 1, 3, len(durations)))
        ends = states[:, START]
        arrivals = np.zeros((len(delays) + 1, len(durations)))
        for start, stop, first_message, last_message in self._levels:
            level = slice(start, stop)
            previous = self._previous[level]
            starts[level] = np.maximum(ends[previous], arrivals[self._inputs[level]])
            if maps is None:
                ends[level] = starts[level] + costs[level]
            else:
                unsharded = states[self._unshards[level], CHANNEL]
                inputs = np.stack(
                    [starts[level], states[previous, CHANNEL], states[previous, REDUCED], unsharded], axis=1
                )
                states[level] = (maps[level] + inputs[:, None]).max(axis=2)
            level = slice(first_message, last_message)
            sent = np.maximum(ends[self._after[level]], arrivals[self._previous_message[level]])
            arrivals[level] = sent + delays[level]
        rank_ends = states[self._number[self._last_actions]].max(axis=1)
        is_compute = np.array([action.op in COMPUTE_OPS for action in self.actions])
        numbers = self._number[is_compute]
        actions = [action for action in self.actions if action.op in COMPUTE_OPS]
        return [
            Simulation(
                actions,
                starts[numbers, i],
                ends[numbers, i],
                self.placement,
                float((rank_ends[:, i] + finish_s).max()),
                () if channel_s is None else tuple((channel_s[:, i] + finish_s).tolist()),
            )
            for i, finish_s in enumerate(map(self._finish_s, durations))
        ]

    def _finish_s(self, durations: Durations) -> np.ndarray:
        """Return the time of the collectives after the last action of each rank."""
        finish_s = np.zeros(self.placement.pp)
        for stage, sync in enumerate(durations.sync or ()):
            finish_s[self.placement.rank(stage)] += sync.finish_s
        return finish_s

    def _sync_values(self, durations: Sequence[Durations], costs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the maps [actions, 3, 4, durations], and the time of the collectives [ranks, durations]."""
        is_unsharded = self._unshards != NONE
        keys, indices = np.unique(
            np.stack([self._stages, self._ops, is_unsharded, self._reduces]), axis=1, return_inverse=True
        )
        indices = indices.reshape(-1)
        maps = np.full((len(costs), 3, 4, len(durations)), NEVER)
        channel_s = np.zeros((self.placement.pp, len(durations)))
        for i, duration in enumerate(durations):
            if duration.sync is None:
                maps[:, START, START, i] = costs[:, i]
                continue
            maps_of_keys, seconds_of_keys = [], []
            for stage, op, after_unshard, reduces in keys.T.tolist():
                arguments = NODE_OPS[op], bool(after_unshard), bool(reduces)
                maps_of_keys.append(action_map(duration.sync[stage], *arguments))
                seconds_of_keys.append(duration.sync[stage].channel_s(*arguments))
            maps[..., i] = np.array(maps_of_keys)[indices]
            np.add.at(channel_s[:, i], self._stages % self.placement.pp, np.array(seconds_of_keys)[indices])
        return maps, channel_s

    def _values_of(self, durations: Durations) -> tuple[np.ndarray, np.ndarray]:
        """Return the times of actions and of messages, in the order of levels."""
        num_stages = 1 + max(action.stage for action in self.actions)
        costs = durations.costs or [EQUAL_COSTS] * num_stages
        costs_of_ops = [(f, b if self._is_split else b + w, w, 0.0) for f, b, w in costs]
        delays = np.zeros(len(self._links))
        if durations.delay is not None:
            links, indices = np.unique(self._links, return_inverse=True)
            num_ranks = self.placement.pp
            delays = np.array([durations.delay(*divmod(link, num_ranks)) for link in links.tolist()])[indices]
        return np.array(costs_of_ops, dtype=np.float64)[self._stages, self._ops], delays
