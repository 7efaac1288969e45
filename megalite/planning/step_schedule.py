"""The actions of a step, and the simulation of them or of their first groups of micro-batches.

A long step repeats its groups of micro-batches, so only the first groups are simulated, and the time and memory of the
others follow from the last one. The number of simulated actions does not grow with the batch.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from megalite.pipeline.schedule import (
    Action,
    ActionCosts,
    ActionMemory,
    Op,
    SplitBackward,
    add_sharding_actions,
    build_schedule,
    build_split_schedule,
    peak_in_flight,
)
from megalite.pipeline.simulate import Durations, Simulation, simulate_all
from megalite.planning.run_shape import RunShape

SIMULATED_GROUPS = 3  # groups of micro-batches in simulations that compare splits; later groups are like the last
MIN_REPORTED_ACTIONS = 10_000  # in simulations for reports, because deferred weight gradients may take long to settle


@dataclass(frozen=True)
class SimulatedStep:
    """A simulated step.

    Attributes:
        seconds: Its time, in the unit of the costs.
        channel_s: The time of all collectives over dp of the rank with the most.
        simulation: The simulation of the step, or of its first groups of micro-batches.
    """

    seconds: float
    channel_s: float
    simulation: Simulation


@dataclass(frozen=True)
class StepSchedule:
    """The schedule of a step of a run.

    Attributes:
        shape: The shape of the run.
        split_backward: The options of a split backward; None if backward is not split.
    """

    shape: RunShape
    split_backward: SplitBackward | None

    @property
    def actions_per_microbatch(self) -> int:
        """The number of actions of all ranks for one micro-batch: F, B and W, and both ends of each message."""
        num_stages = self.shape.placement.num_stages
        num_messages = 2 * (num_stages - 1) if self.shape.pp > 1 else 0
        return (3 if self.shape.splits_backward else 2) * num_stages + 2 * num_messages

    @property
    def reported_groups(self) -> int:
        """The number of groups of micro-batches to simulate for reports; more than a short step has."""
        actions_per_group = 3 * self.shape.placement.num_stages * self.shape.group_size
        return max(SIMULATED_GROUPS, MIN_REPORTED_ACTIONS // actions_per_group)

    def microbatches_of_groups(self, num_groups: int) -> tuple[int, int | None]:
        """Return the micro-batches of a step or of its first `num_groups` groups, and the group size; None: pp."""
        shape = self.shape
        if shape.num_microbatches > num_groups * shape.group_size:
            return num_groups * shape.group_size, shape.group_size
        return shape.num_microbatches, shape.config.parallel.microbatch_group_size_per_virtual_pipeline_stage

    def actions(self, num_groups: int | None = None) -> tuple[int, tuple[tuple[Action, ...], ...]]:
        """Return the micro-batches of a step or of its first groups, and each rank's actions for them.

        Args:
            num_groups: The number of groups of micro-batches at most; None: `reported_groups`.
        """
        shape = self.shape
        num_microbatches, group_size = self.microbatches_of_groups(num_groups or self.reported_groups)
        name = shape.config.parallel.pipeline_schedule
        actions_by_rank = build_schedule(name, shape.pp, num_microbatches, shape.vpp, group_size, self.split_backward)
        return num_microbatches, actions_by_rank

    def actions_with_sync(self, num_groups: int) -> tuple[int, tuple[tuple[Action, ...], ...]]:
        """Return `actions` with UNSHARD, RESHARD and REDUCE_GRAD, as the runtime inserts them.

        Weights that stay unsharded are gathered once per step, which the runtime starts after the update. This is an
        UNSHARD here, too.
        """
        num_microbatches, actions_by_rank = self.actions(num_groups)
        policy = self.shape.sharding_policy
        actions_by_rank = tuple(add_sharding_actions(actions, policy) for actions in actions_by_rank)
        if not policy.unshard_by_chunk:
            actions_by_rank = tuple((*_unshard_all(actions), *actions) for actions in actions_by_rank)
        return num_microbatches, actions_by_rank

    def simulate(self, durations: Sequence[Durations], num_groups: int) -> list[SimulatedStep]:
        """Return a step with each of the durations.

        Args:
            durations: The durations, with the costs of F, B and W of every stage; times have the unit of the costs.
            num_groups: The number of groups of micro-batches to simulate at most.
        """
        has_sync = any(duration.sync is not None for duration in durations)
        actions_of = self.actions_with_sync if has_sync else self.actions
        num_simulated, actions_by_rank = actions_of(num_groups)
        simulations = simulate_all(actions_by_rank, durations)
        is_bound = [self._is_bound_by_busiest_rank(duration) for duration in durations]
        fewer: list[tuple[int, Simulation] | None] = [None] * len(durations)
        if num_simulated < self.shape.num_microbatches and not all(is_bound):
            num_fewer, fewer_actions = actions_of(num_groups - 1)
            for i, simulation in enumerate(simulate_all(fewer_actions, durations)):
                fewer[i] = None if is_bound[i] else (num_fewer, simulation)
        return [
            self._simulated_step(*simulated, num_simulated)
            for simulated in zip(durations, simulations, fewer, strict=True)
        ]

    def _simulated_step(
        self, durations: Durations, simulation: Simulation, fewer: tuple[int, Simulation] | None, num_simulated: int
    ) -> SimulatedStep:
        """Return a step from a simulation of its first groups of micro-batches, and one of a group less."""
        shorter = None
        channel_s = max(simulation.channel_s, default=0.0)
        if fewer is not None:
            num_fewer, shorter_simulation = fewer
            shorter = num_fewer, shorter_simulation.end
            groups_left = (self.shape.num_microbatches - num_simulated) / (num_simulated - num_fewer)
            channel_s += groups_left * (channel_s - max(shorter_simulation.channel_s, default=0.0))
        seconds = self._step_time(durations.costs or (), num_simulated, simulation.end, shorter)
        return SimulatedStep(seconds, channel_s, simulation)

    def simulate_own_costs(
        self, memory_of_stages: Sequence[ActionMemory], num_groups: int
    ) -> tuple[float, list[float]]:
        """Return the time of a step by the costs of `split_backward`, and the peak memory of every pipeline rank.

        It takes half of the time of `simulate`, which counts where many splits are compared: each has a schedule of
        its own.
        """
        split_backward = self.split_backward
        assert split_backward is not None and split_backward.costs is not None
        num_simulated, actions_by_rank, end = self._split_schedule(split_backward, num_groups)
        shorter = None
        if num_simulated < self.shape.num_microbatches and not self._is_bound_by_busiest_rank(Durations()):
            num_fewer, _, shorter_end = self._split_schedule(split_backward, num_groups - 1)
            shorter = num_fewer, shorter_end
        time = self._step_time(split_backward.costs, num_simulated, end, shorter)
        return time, self._peak_memory(memory_of_stages, num_simulated, actions_by_rank)

    def _split_schedule(self, split_backward: SplitBackward, num_groups: int) -> tuple[int, list[list[Action]], float]:
        """Return the micro-batches of the first groups, their actions without messages, and the end of the last one."""
        shape = self.shape
        num_microbatches, group_size = self.microbatches_of_groups(num_groups)
        name = shape.config.parallel.pipeline_schedule
        actions_by_rank, end = build_split_schedule(
            name, shape.pp, num_microbatches, shape.vpp, group_size, split_backward
        )
        return num_microbatches, actions_by_rank, end

    def _step_time(
        self,
        costs_of_stages: Sequence[ActionCosts],
        num_simulated: int,
        end: float,
        shorter: tuple[int, float] | None = None,
    ) -> float:
        """Return the time of a step from a simulation of its first micro-batches.

        Args:
            costs_of_stages: The costs of F, B and W of every stage.
            num_simulated: The number of simulated micro-batches.
            end: The end of their last action.
            shorter: The number of micro-batches and the end of a simulation of one group less, whose difference is the
                time of a group; None if that is the time of the busiest rank.
        """
        if num_simulated == self.shape.num_microbatches:
            return end
        microbatch_time = self.busiest_rank_time(costs_of_stages)
        if shorter is not None:
            num_fewer, shorter_end = shorter
            microbatch_time = max(microbatch_time, (end - shorter_end) / (num_simulated - num_fewer))
        return end + (self.shape.num_microbatches - num_simulated) * microbatch_time

    def _is_bound_by_busiest_rank(self, durations: Durations) -> bool:
        """Return True if every further micro-batch takes the time of the busiest rank.

        Otherwise the slowest part may be messages, or F and B of different ranks.
        """
        is_1f1b = self.shape.config.parallel.pipeline_schedule == "1f1b"
        return is_1f1b and durations.delay is None and durations.sync is None

    def busiest_rank_time(self, costs_of_stages: Sequence[ActionCosts]) -> float:
        """Return the time of the busiest rank for one micro-batch."""
        placement = self.shape.placement
        return max(
            sum(sum(costs_of_stages[stage]) for stage in placement.stages_of_rank(rank)) for rank in range(placement.pp)
        )

    def peak_memory(
        self, memory_of_stages: Sequence[ActionMemory] | None, num_groups: int | None = None
    ) -> list[float]:
        """Return the peak memory in flight on every pipeline rank.

        Args:
            memory_of_stages: The memory of a forward on every stage; None for 1, which counts forwards.
            num_groups: The number of groups of micro-batches to simulate at most; None: `reported_groups`.
        """
        return self._peak_memory(memory_of_stages, *self.actions(num_groups))

    def _peak_memory(
        self,
        memory_of_stages: Sequence[ActionMemory] | None,
        num_simulated: int,
        actions_by_rank: Sequence[Sequence[Action]],
    ) -> list[float]:
        """Return the peak memory in flight of a step from the actions of its first micro-batches."""
        peaks = [peak_in_flight(actions, memory_of_stages) for actions in actions_by_rank]
        if num_simulated == self.shape.num_microbatches:
            return peaks
        # each further group adds as much as it would without a split backward, since deferred gradients are limited
        unsplit = StepSchedule(self.shape, None)
        num_fewer, fewer_groups = unsplit.actions(SIMULATED_GROUPS - 1)
        num_more, more_groups = unsplit.actions(SIMULATED_GROUPS)
        further_groups = (self.shape.num_microbatches - num_simulated) / (num_more - num_fewer)
        for rank, (fewer, more) in enumerate(zip(fewer_groups, more_groups, strict=True)):
            growth = peak_in_flight(more, memory_of_stages) - peak_in_flight(fewer, memory_of_stages)
            peaks[rank] += growth * further_groups
        return peaks


def _unshard_all(actions: Sequence[Action]) -> list[Action]:
    """Return an UNSHARD for each stage of a rank, in the order of forward."""
    return [Action(Op.UNSHARD, stage, 0) for stage in sorted({action.stage for action in actions})]
