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

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import NamedTuple

from megalite.pipeline.schedule import EQUAL_COSTS, Action, ActionCosts, Op, StagePlacement

COMPUTE_OPS = (Op.F, Op.B, Op.W)
SENDS = {Op.SEND_F: (Op.F, 1), Op.SEND_B: (Op.B, -1)}  # (operation that gets the message, stages to its receiver)


class Span(NamedTuple):
    """When a rank runs an action, in units of the costs."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class Simulation:
    """The start and end of every compute action, in the order of the simulation and in units of the costs."""

    starts: Sequence[float]
    ends: Mapping[Action, float]
    placement: StagePlacement

    @cached_property
    def spans(self) -> tuple[Span, ...]:
        """The compute actions of all ranks; those of one rank are in order."""
        times = zip(self.starts, self.ends.items(), strict=True)
        return tuple(Span(self.placement.rank(action.stage), action, start, end) for start, (action, end) in times)

    @cached_property
    def end(self) -> float:
        """The end of the last action."""
        return max(self.ends.values())

    @property
    def bubble(self) -> float:
        """The idle fraction of the time of all ranks."""
        busy = sum(end - start for start, end in zip(self.starts, self.ends.values(), strict=True))
        return 1.0 - busy / (self.placement.pp * self.end)


def simulate(
    actions_by_rank: Sequence[Sequence[Action]],
    costs: Sequence[ActionCosts] | None = None,
    *,
    delay: Callable[[int, int], float] = lambda source, target: 0.0,
    earliest_start: Mapping[int, float] = MappingProxyType({}),
) -> Simulation:
    """Run each action as soon as its rank is free and its input has arrived.

    Args:
        actions_by_rank: a schedule with messages (schedule.build_schedule).
        costs: times of F, B and W on every stage, as in schedule.SplitBackward; None: 1 each.
        delay: time of a message from one rank to another. The messages of a rank in one direction are transferred one
            after another; they don't delay its compute actions.
        earliest_start: stage -> earliest time at which its actions may start (default 0).

    Raises:
        ValueError: a message or an input of an action never arrives.
    """
    delay = functools.cache(delay)
    num_ranks = len(actions_by_rank)
    clock = [0.0] * num_ranks
    position = [0] * num_ranks  # index of the next action
    channel_free_at = {op: [0.0] * num_ranks for op in SENDS}  # end of a rank's last message in one direction
    ops, stages, microbatches = (
        set(field) for field in zip(*itertools.chain.from_iterable(actions_by_rank), strict=True)
    )
    last = max(stages)
    split = Op.W in ops
    placement = StagePlacement(num_ranks, -(-(last + 1) // num_ranks))
    durations = [{Op.F: f, Op.B: b if split else b + w, Op.W: w} for f, b, w in costs or [EQUAL_COSTS] * (last + 1)]
    # [operation][stage][micro-batch]: when the activations for F and the gradients for B arrive. The first F and the
    # last B wait for no input. Stages last + 1 and, as index -1, last + 2 take the output of the last F and first B.
    arrivals: dict[Op, list[list[float | None]]]
    arrivals = {op: [[None] * (1 + max(microbatches)) for _ in range(last + 3)] for op in (Op.F, Op.B)}
    arrivals[Op.F][0] = arrivals[Op.B][last] = [0.0] * (1 + max(microbatches))
    earliest = [earliest_start.get(stage, 0.0) for stage in range(last + 1)]
    starts: list[float] = []
    ends: dict[Action, float] = {}
    progressed = True
    while progressed:
        progressed = False
        for rank, actions in enumerate(actions_by_rank):
            while position[rank] < len(actions):
                op, stage, microbatch = action = actions[position[rank]]
                if op in COMPUTE_OPS:
                    if op is not Op.F and (Op.F if op is Op.B else Op.B, stage, microbatch) not in ends:
                        break
                    arrival = 0.0 if op is Op.W else arrivals[op][stage][microbatch]
                    if arrival is None:
                        break
                    start = max(clock[rank], arrival, earliest[stage])
                    clock[rank] = ends[action] = start + durations[stage][op]
                    starts.append(start)
                    if placement.pp == 1 and op is not Op.W:  # the next stage is on the same rank: there is no message
                        arrivals[op][stage + (1 if op is Op.F else -1)][microbatch] = clock[rank]
                elif op in SENDS:
                    input_op, step = SENDS[op]
                    arrival = max(clock[rank], channel_free_at[op][rank]) + delay(rank, placement.rank(stage + step))
                    arrivals[input_op][stage + step][microbatch] = channel_free_at[op][rank] = arrival
                position[rank] += 1
                progressed = True
    stuck = [str(actions[i]) for actions, i in zip(actions_by_rank, position, strict=True) if i < len(actions)]
    if stuck:
        raise ValueError(f"never runs: {', '.join(stuck)}")
    return Simulation(starts, ends, placement)
