"""The layers of every pipeline stage, balanced by simulated time and memory, and what follows from them.

The FLOPs and bytes of a stage are sums over its layers, from the cost of each kind (planning/layer_kinds.py).
Activations are the bytes that the schedule has in flight.
"""

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from torch import nn

from megalite.config.layer_spec import LayerSpec
from megalite.models.gpt import Block, Stage
from megalite.nn.parameter import ParamFactory, params_with_specs
from megalite.parallel.mesh import Mesh
from megalite.parallel.spec import ParamSpec
from megalite.pipeline.schedule import ActionCosts, ActionMemory, SplitBackward
from megalite.pipeline.simulate import Durations
from megalite.planning.layer_kinds import (
    LayerSetting,
    PrefixSums,
    StageCosts,
    cached_stage_costs,
    single_document_sharding,
)
from megalite.planning.model_state import MinModelState, ShardCounts
from megalite.planning.partition import LayerSplit, candidate_splits, choose_split, even_split, layer_ranges
from megalite.planning.run_shape import RunShape
from megalite.planning.step_schedule import SIMULATED_GROUPS, StepSchedule

MAX_SIMULATED_ACTIONS = 200_000  # in all simulations that balance the stages: about a second
SPLITS_PER_SIMULATION = 32  # splits with the same schedule that are simulated at once


@dataclass(frozen=True)
class StageBalance:
    """The layers of every stage of a run, and the costs, the schedule and the bubble of these stages."""

    shape: RunShape

    # ---- layers of the stages

    @cached_property
    def layer_ranges(self) -> list[range]:
        """The layers of every stage: given by the options, or balanced by simulated time and memory."""
        if self.fixed_split:
            return layer_ranges(self.fixed_split)
        schedule = StepSchedule(self.shape, None)
        num_microbatches, _ = schedule.microbatches_of_groups(SIMULATED_GROUPS)
        max_simulated = max(1, MAX_SIMULATED_ACTIONS // (num_microbatches * schedule.actions_per_microbatch))

        @functools.cache
        def min_time(split: LayerSplit) -> float:
            costs = self.stage_costs.flops_of_stages(split)
            return self.shape.num_microbatches * schedule.busiest_rank_time(costs)

        times: dict[LayerSplit, float] = {}
        ordered = sorted(self.candidate_splits, key=min_time)

        def time_and_memory(split: LayerSplit) -> tuple[float, float]:
            memory_of_stages = self.stage_costs.memory_of_stages(split)
            if self.shape.splits_backward:  # the schedule depends on the split
                own_schedule = StepSchedule(self.shape, self._split_backward_for(split))
                time, activations = own_schedule.simulate_own_costs(memory_of_stages, SIMULATED_GROUPS)
                return time, self._memory_of(split, activations)
            if split not in times:
                start = ordered.index(split)
                times.update(self._times_of(ordered[start : start + SPLITS_PER_SIMULATION], schedule))
            return times[split], self._memory_of(split, schedule.peak_memory(memory_of_stages, SIMULATED_GROUPS))

        return layer_ranges(choose_split(self.candidate_splits, min_time, time_and_memory, max_simulated))

    @property
    def candidate_splits(self) -> Sequence[LayerSplit]:
        """The splits of the layers that the run chooses from."""
        return candidate_splits(self.shape.placement.num_stages, self.stage_costs.flops)

    @property
    def fixed_split(self) -> Sequence[int]:
        """The layers of every stage if there is no choice: given by the options, or at most one each; otherwise ()."""
        if self.shape.given_split is not None:
            return self.shape.given_split
        num_layers, num_stages = self.shape.config.model.num_layers, self.shape.placement.num_stages
        if num_layers <= num_stages or num_stages == 1:
            return even_split(num_layers, num_stages)
        return ()

    @cached_property
    def layers_per_stage(self) -> list[int]:
        """The number of layers of every stage."""
        return [len(layers) for layers in self.layer_ranges]

    def _times_of(self, splits: Sequence[LayerSplit], schedule: StepSchedule) -> dict[LayerSplit, float]:
        """Return the time of a step with each split. All splits have the same schedule."""
        durations = [Durations(self.stage_costs.flops_of_stages(split)) for split in splits]
        steps = schedule.simulate(durations, SIMULATED_GROUPS)
        return {split: step.seconds for split, step in zip(splits, steps, strict=True)}

    def _memory_of(self, split: LayerSplit, activations: Sequence[float]) -> float:
        """Return the bytes of the fullest rank: layers, embedding, head and `activations` in flight."""
        layers_per_stage, placement = np.array(split), self.shape.placement
        return max(
            self.min_model_state.on_rank(layers_per_stage, rank, placement) + activations[rank]
            for rank in range(self.shape.pp)
        )

    # ---- modules of the stages

    def build_stages(self, mesh: Mesh, dtype: torch.dtype, meta: bool = False, deferred: bool = False) -> list[Stage]:
        """Return the chunks of the model on the rank of `mesh`. For `meta` and `deferred` see ParamFactory."""
        make_param = ParamFactory(mesh, dtype, self.shape.config.train.seed, meta, deferred)
        stages = self.shape.placement.stages_of_rank(mesh.pp.rank)
        return [self.build_stage(make_param, self.layer_ranges, index) for index in stages]

    def build_stage(
        self,
        make_param: ParamFactory,
        layer_ranges: Sequence[range],
        stage_index: int,
        layers: Sequence[LayerSpec] | None = None,
    ) -> Stage:
        """Return a stage of the model, or of one that consists of `layers`, with any ranges of the layers."""
        shape = self.shape
        return Stage(
            make_param,
            shape.config.model,
            layer_ranges,
            stage_index,
            vocab_size=shape.vocab_size,
            padded_vocab_size=shape.padded_vocab,
            recompute=shape.recompute,
            z_loss=shape.config.train.z_loss_coeff,
            layers=layers,
        )

    # ---- costs of the stages

    @cached_property
    def stage_costs(self) -> StageCosts:
        shape, model, train = self.shape, self.shape.config.model, self.shape.config.train
        setting = LayerSetting(
            tp=shape.tp,
            micro_batch=train.micro_batch_size,
            dtype=shape.dtype,
            split_backward=shape.splits_backward,
            recompute_modules=shape.recompute.selective_modules,
            cp_sharding=single_document_sharding(model, shape.cp),
            ep=shape.ep,
            etp=shape.etp,
        )
        return cached_stage_costs(
            model,
            shape.recompute,
            setting,
            shape.vocab_size,
            shape.padded_vocab,
            train.z_loss_coeff,
            train.cpu_offloading_num_layers,
            train.min_offloaded_tensor_size,
        )

    @cached_property
    def costs_of_stages(self) -> tuple[ActionCosts, ...]:
        return self.stage_costs.flops_of_stages(self.layers_per_stage)

    @cached_property
    def memory_of_stages(self) -> tuple[ActionMemory, ...]:
        return self.stage_costs.memory_of_stages(self.layers_per_stage)

    @cached_property
    def min_model_state(self) -> MinModelState:
        """A lower bound of the model state of a rank, for any split of the layers."""
        shape, parallel, optim = self.shape, self.shape.config.parallel, self.shape.config.optim
        make_param = ParamFactory(shape.mesh_at(0), shape.dtype, 0, meta=True)
        first, last = (self.build_stage(make_param, [range(0), range(0)], index) for index in (0, 1))
        shard_counts = ShardCounts.from_config(parallel, make_param.mesh)

        def element_bytes(spec: ParamSpec) -> float:
            weight, gradient, state = shape.bytes_per_element(spec.is_matrix, make_param.dtype_of(spec))
            if parallel.param_cpu_offload and spec.is_2d:
                weight = 0
            if optim.offload_fraction:
                state = 0
            return shard_counts[spec.mesh_view].bytes_of(weight, gradient, state)

        def bytes_of(module: nn.Module | None) -> float:
            if module is None:
                return 0.0
            return sum(element_bytes(spec) * p.numel() for spec, p in params_with_specs(module))

        layers = self.stage_costs.per_layer(lambda kind: [bytes_of(Block(make_param, kind.model, 0, kind.spec))])
        is_tied = not shape.config.model.untie_embeddings_and_output_weights
        end = nn.ModuleList(filter(None, (last.final_norm, last.mtp_layers, last.head)))
        if shape.pp > 1 and last.mtp_embedding is not None:
            end.append(last.mtp_embedding)  # a copy of the first stage's
        return MinModelState(PrefixSums(layers), bytes_of(first.embedding), bytes_of(end), is_tied)

    # ---- schedule of the stages

    @cached_property
    def split_backward(self) -> SplitBackward | None:
        """The options of a split backward; None if backward is not split."""
        return self._split_backward_for(self.layers_per_stage)

    def _split_backward_for(self, layers_per_stage: Sequence[int]) -> SplitBackward | None:
        if not self.shape.splits_backward:
            return None
        costs = self.stage_costs.flops_of_stages(layers_per_stage)
        memory_limit = self.shape.config.parallel.zero_bubble_max_pending_backward
        if memory_limit is not None:
            return SplitBackward(costs, memory_limit=memory_limit)
        return SplitBackward(costs, self.stage_costs.without_offload.memory_of_stages(layers_per_stage))

    @cached_property
    def schedule(self) -> StepSchedule:
        """The schedule of a step with these stages."""
        return StepSchedule(self.shape, self.split_backward)

    @cached_property
    def bubble(self) -> float:
        """The fraction of the time for which ranks are idle, by FLOPs."""
        busy = self.shape.num_microbatches * sum(map(sum, self.costs_of_stages))
        (step,) = self.schedule.simulate([Durations(self.costs_of_stages)], self.schedule.reported_groups)
        return max(0.0, 1.0 - busy / (self.shape.pp * step.seconds))  # rounding could give -0.0 %

    @cached_property
    def peak_in_flight(self) -> list[int]:
        """The peak number of forwards in flight, which wait for their backward, on every pipeline rank."""
        return [round(peak) for peak in self.schedule.peak_memory(None)]

    @cached_property
    def activation_bytes(self) -> list[int]:
        """The peak bytes on the device that forwards in flight have saved, on every pipeline rank."""
        return [round(peak) for peak in self.schedule.peak_memory(self.memory_of_stages)]
