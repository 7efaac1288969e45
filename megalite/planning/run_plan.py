"""The plan of a run before it starts: batch sizes, steps, layers, memory, bubble, groups.

It is a pure function of the configuration, the number of ranks and the vocabulary, computed once per start. The
preflight checks create it, the start and a dry run print it, and training/setup.py builds the run from it. Expensive
parts are computed when they are first needed.

Stages are built on the meta device, without memory, and laid out by optim/buffer.py, so the bytes of weights, gradients
and optimizer are those of the run. The FLOPs and bytes of a stage are sums over its layers, from the cost of each kind
(planning/layer_kinds.py). Activations are the bytes that the schedule has in flight. planning/memory.py adds temporary
tensors. Memory of CUDA and NCCL is not counted.
"""

import functools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import nn

from megalite.config.layer_spec import LayerSpec
from megalite.config.option_parsers import parse_batch_schedule
from megalite.config.options import Config, ModelConfig, padded_vocab_size
from megalite.config.pipeline_layout import explicit_stage_layers
from megalite.config.registry import REGISTRIES
from megalite.models.gpt import Block, RecomputeConfig, Stage
from megalite.models.specs import model_specs
from megalite.nn.parameter import ParamFactory, params_with_specs
from megalite.parallel.mesh import Mesh, MeshSizes, abstract_mesh, rank_order
from megalite.parallel.spec import MESH_VIEWS, ParamSpec
from megalite.pipeline.schedule import (
    Action,
    ActionCosts,
    ActionMemory,
    ShardingPolicy,
    SplitBackward,
    StagePlacement,
    build_schedule,
    build_split_schedule,
    microbatch_groups,
    peak_in_flight,
)
from megalite.pipeline.simulate import Durations, Simulation, simulate_all
from megalite.planning.batch_size import BatchSizeSchedule
from megalite.planning.layer_kinds import (
    LayerKind,
    LayerSetting,
    PrefixSums,
    StageCosts,
    cached_stage_costs,
    single_document_sharding,
)
from megalite.planning.model_state import (
    ModelStateBytes,
    ModuleStateBytes,
    ShardCounts,
    bytes_per_element,
    sharding_policy,
    state_dtypes_of,
)
from megalite.planning.partition import LayerSplit, candidate_splits, choose_split, even_split, layer_ranges

MAX_SIMULATED_ACTIONS = 200_000  # in all simulations that balance the stages: about a second
SPLITS_PER_SIMULATION = 32  # splits with the same schedule that are simulated at once
SIMULATED_GROUPS = 3  # groups of micro-batches in simulations that compare splits; later groups are like the last
MIN_REPORTED_ACTIONS = 10_000  # in simulations for reports, because deferred weight gradients may take long to settle


@dataclass(frozen=True)
class RunPlan:
    """The plan of a run.

    Attributes:
        config: The configuration.
        world: The number of ranks, a multiple of tp x cp x pp.
        vocab_size: The vocabulary without padding.
    """

    config: Config
    world: int
    vocab_size: int

    @property
    def tp(self) -> int:
        return self.config.parallel.tensor_model_parallel_size

    @property
    def cp(self) -> int:
        return self.config.parallel.context_parallel_size

    @property
    def pp(self) -> int:
        return self.config.parallel.pipeline_model_parallel_size

    @cached_property
    def has_experts(self) -> bool:
        return self.config.model.has_experts

    @property
    def ep(self) -> int:
        return self.config.parallel.expert_model_parallel_size if self.has_experts else 1

    @property
    def etp(self) -> int:
        return self.config.parallel.expert_tensor_parallel_size if self.has_experts else 1

    @property
    def dp(self) -> int:
        return self.world // self.config.parallel.model_parallel_size

    @property
    def vpp(self) -> int:
        """The number of stages of each pipeline rank."""
        if self._given_split is not None:
            return len(self._given_split) // self.pp
        return self.config.parallel.num_virtual_stages_per_pipeline_rank or 1

    @property
    def placement(self) -> StagePlacement:
        return StagePlacement(self.pp, self.vpp)

    @property
    def mesh_sizes(self) -> MeshSizes:
        parallel = self.config.parallel
        has_optimizer_instances = parallel.effective_zero_stage > 0
        sizes = MeshSizes(
            tp=self.tp,
            pp=self.pp,
            cp=self.cp,
            num_optimizer_instances=parallel.num_distributed_optimizer_instances if has_optimizer_instances else None,
            dp_outermost=parallel.use_tp_pp_dp_mapping,
            dp_cp_tp=self.config.optim.needs_full_tensors,
        )
        if self.has_experts:
            sizes["ep"] = self.ep
            sizes["etp"] = self.etp
        return sizes

    def mesh_at(self, rank: int) -> Mesh:
        """Return the mesh, without groups, of the first rank of a pipeline rank. Plans of equal sizes share it."""
        return _planned_mesh(self.world, rank, tuple(self.mesh_sizes.items()))

    @property
    def rank0_groups(self) -> dict[str, tuple[int, ...]]:
        """The groups of rank 0, by axis."""
        mesh = self.mesh_at(0)
        return {name: mesh.axis(name).ranks for name in ("tp", "cp", "dp", "pp")}

    @property
    def padded_vocab(self) -> int:
        return padded_vocab_size(self.vocab_size, self.config.model.make_vocab_size_divisible_by, self.tp)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the weights."""
        if self.config.precision.bf16:
            return torch.bfloat16
        return torch.float16 if self.config.precision.fp16 else torch.float32

    @cached_property
    def recompute(self) -> RecomputeConfig:
        train = self.config.train
        return RecomputeConfig(
            train.recompute_granularity,
            train.recompute_method or "uniform",
            train.recompute_num_layers or 1,
            train.recompute_modules,
        )

    @property
    def sharding_policy(self) -> ShardingPolicy:
        return sharding_policy(self.config.parallel, self.vpp)

    # ---- batches and steps

    @property
    def batch_size(self) -> int:
        return self.config.train.batch_size(self.dp)

    @property
    def eval_batch_size(self) -> int:
        return self.config.train.eval_batch_size(self.dp)

    @cached_property
    def batch_sizes(self) -> BatchSizeSchedule:
        """The batch size of every step. Raises ValueError if a ramp does not lead to the global batch size."""
        train = self.config.train
        if train.step_batch_size_schedule is not None:
            milestones = parse_batch_schedule(train.step_batch_size_schedule, self.config.model.seq_length)
            return BatchSizeSchedule(milestones, keep_last_batch=True)
        if train.rampup_batch_size is None:
            return BatchSizeSchedule.constant(self.batch_size)
        start, increment, samples = train.rampup_batch_size
        return BatchSizeSchedule.ramp(self.batch_size, start, increment, samples)

    @cached_property
    def num_steps(self) -> int:
        """The number of steps. Raises ValueError if it is 0, and in the same cases as `batch_sizes`."""
        train = self.config.train
        num_steps = train.train_iters or self.batch_sizes.num_steps_for(train.train_samples or 0)
        if not num_steps:
            first_batch = self.batch_sizes.at(0)
            raise ValueError(f"train_samples={train.train_samples} is below one batch of {first_batch}; give more")
        return num_steps

    @cached_property
    def total_samples(self) -> int:
        return self.batch_sizes.samples_after(self.num_steps)

    @property
    def num_microbatches(self) -> int:
        """The number of micro-batches of a step whose batch has the final size."""
        return self.batch_sizes.final // (self.config.train.micro_batch_size * self.dp)

    @property
    def tokens_per_microbatch(self) -> int:
        """The tokens of a micro-batch on a cp rank."""
        return self.config.model.seq_length // self.cp * self.config.train.micro_batch_size

    @property
    def p2p_bytes(self) -> int:
        """The bytes of a message between stages, and of x_sBD."""
        return self.tokens_per_microbatch * self.config.model.hidden_size * self.dtype.itemsize // self.tp

    # ---- layers of the stages

    @cached_property
    def layer_ranges(self) -> list[range]:
        """The layers of every stage: given by the options, or balanced by simulated time and memory."""
        if self.fixed_split:
            return layer_ranges(self.fixed_split)
        num_microbatches, _ = self._microbatches_of_groups(SIMULATED_GROUPS)
        num_actions = num_microbatches * self._actions_per_microbatch
        max_simulated = max(1, MAX_SIMULATED_ACTIONS // num_actions)

        @functools.cache
        def min_time(split: LayerSplit) -> float:
            return self.num_microbatches * self._busiest_rank_time(self.stage_costs.flops_of_stages(split))

        times: dict[LayerSplit, float] = {}
        ordered = sorted(self.candidate_splits, key=min_time)

        def time_and_memory(split: LayerSplit) -> tuple[float, float]:
            if self.splits_backward:
                return self._time_and_memory_of_split_backward(split)
            if split not in times:
                start = ordered.index(split)
                times.update(self._times_of(ordered[start : start + SPLITS_PER_SIMULATION]))
            memory_of_stages = self.stage_costs.memory_of_stages(split)
            return times[split], self._memory_of(split, self.peak_alive(memory_of_stages, None))

        return layer_ranges(choose_split(self.candidate_splits, min_time, time_and_memory, max_simulated))

    @property
    def candidate_splits(self) -> Sequence[tuple[int, ...]]:
        """The splits of the layers that the run chooses from."""
        return candidate_splits(self.placement.num_stages, self.stage_costs.flops)

    @property
    def fixed_split(self) -> Sequence[int]:
        """The layers of every stage if there is no choice: given by the options, or at most one each; otherwise ()."""
        if self._given_split is not None:
            return self._given_split
        num_layers, num_stages = self.config.model.num_layers, self.placement.num_stages
        if num_layers <= num_stages or num_stages == 1:
            return even_split(num_layers, num_stages)
        return ()

    @cached_property
    def layers_per_stage(self) -> list[int]:
        """The number of layers of every stage."""
        return [len(layers) for layers in self.layer_ranges]

    @cached_property
    def _given_split(self) -> list[int] | None:
        return explicit_stage_layers(self.config.model, self.config.parallel)

    def _times_of(self, splits: Sequence[LayerSplit]) -> dict[LayerSplit, float]:
        """Return the time of a step with each split, if backward is not split, so that all have the same schedule."""
        durations = [Durations(self.stage_costs.flops_of_stages(split)) for split in splits]
        step_times = self.simulate_step(durations, None, SIMULATED_GROUPS)
        return {split: time for split, (time, _) in zip(splits, step_times, strict=True)}

    def _time_and_memory_of_split_backward(self, split: LayerSplit) -> tuple[float, float]:
        """Return (time of a step, bytes of the fullest rank) with a split, whose schedule depends on it."""
        split_backward = self._split_backward_for(split)
        assert split_backward is not None and split_backward.costs is not None

        def schedule(num_groups: int) -> tuple[int, list[list[Action]], float]:
            num_microbatches, group_size = self._microbatches_of_groups(num_groups)
            name = self.config.parallel.pipeline_schedule
            return num_microbatches, *build_split_schedule(
                name, self.pp, num_microbatches, self.vpp, group_size, split_backward
            )

        num_simulated, actions_by_rank, end = schedule(SIMULATED_GROUPS)
        shorter = None
        if num_simulated < self.num_microbatches and not self._is_bound_by_busiest_rank(Durations()):
            num_fewer, _, shorter_end = schedule(SIMULATED_GROUPS - 1)
            shorter = num_fewer, shorter_end
        time = self._step_time(split_backward.costs, num_simulated, end, shorter)
        activations = self._peak_alive(self.stage_costs.memory_of_stages(split), num_simulated, actions_by_rank)
        return time, self._memory_of(split, activations)

    def _memory_of(self, split: LayerSplit, activations: Sequence[float]) -> float:
        """Return the bytes of the fullest rank: layers, embedding, head and `activations` in flight."""
        layers_per_stage = np.array(split)
        return max(
            self.module_state_bytes.on_rank(layers_per_stage, rank, self.placement) + activations[rank]
            for rank in range(self.pp)
        )

    # ---- costs of the stages

    @cached_property
    def stage_costs(self) -> StageCosts:
        model, train = self.config.model, self.config.train
        setting = LayerSetting(
            tp=self.tp,
            micro_batch=train.micro_batch_size,
            dtype=self.dtype,
            split_backward=self.splits_backward,
            recompute_modules=self.recompute.selective_modules,
            cp_sharding=single_document_sharding(model, self.cp),
            ep=self.ep,
            etp=self.etp,
        )
        return cached_stage_costs(
            model,
            self.recompute,
            setting,
            self.vocab_size,
            self.padded_vocab,
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

    # ---- model and model state

    def build_stages(self, mesh: Mesh, dtype: torch.dtype, meta: bool = False, deferred: bool = False) -> list[Stage]:
        """Return the chunks of the model on this rank. For `meta` and `deferred` see ParamFactory."""
        make_param = ParamFactory(mesh, dtype, self.config.train.seed, meta, deferred)
        stages = self.placement.stages_of_rank(mesh.pp.rank)
        return [self.build_stage(make_param, self.layer_ranges, index) for index in stages]

    def build_stage(
        self,
        make_param: ParamFactory,
        layer_ranges: Sequence[range],
        stage_index: int,
        layers: Sequence[LayerSpec] | None = None,
    ) -> Stage:
        """Return a stage of the model, or of one that consists of `layers`."""
        return Stage(
            make_param,
            self.config.model,
            layer_ranges,
            stage_index,
            vocab_size=self.vocab_size,
            padded_vocab_size=self.padded_vocab,
            recompute=self.recompute,
            z_loss=self.config.train.z_loss_coeff,
            layers=layers,
        )

    def bytes_per_element(self, matrix: bool = True, dtype: torch.dtype | None = None) -> tuple[int, int, int]:
        """Return the bytes of the weight, gradient and optimizer state of an element, in a matrix or elsewhere.

        `dtype` is the dtype of the weight; None: that of the model.
        """
        return bytes_per_element(dtype or self.dtype, state_dtypes_of(self.config.optim, matrix))

    @cached_property
    def model_states(self) -> list[ModelStateBytes]:
        """The model state of every pipeline rank, computed once for ranks with equal layers and the same ends."""
        keys = []
        for rank in range(self.pp):
            ranges = [self.layer_ranges[stage] for stage in self.placement.stages_of_rank(rank)]
            numels = [self.numel_by_layer[layers.start : layers.stop] for layers in ranges]
            keys.append((rank == 0, rank == self.pp - 1, *numels))
        states = {key: self._model_state(keys.index(key)) for key in dict.fromkeys(keys)}
        return [states[key] for key in keys]

    def _model_state(self, rank: int) -> ModelStateBytes:
        mesh = self.mesh_at(rank)
        chunks = self.build_stages(mesh, self.dtype, meta=True)
        return ModelStateBytes.from_modules(chunks, mesh, self.bytes_per_element, self.config)

    @property
    def fullest_rank(self) -> int:
        """The pipeline rank with the most bytes of weights, gradients and optimizer."""
        return max(range(self.pp), key=lambda rank: self.model_states[rank].total)

    @cached_property
    def module_state_bytes(self) -> ModuleStateBytes:
        """The model state of each layer and of the ends; `model_states` also has the padding of the buckets."""
        parallel, optim = self.config.parallel, self.config.optim
        make_param = ParamFactory(self.mesh_at(0), self.dtype, 0, meta=True)
        first, last = (self.build_stage(make_param, [range(0), range(0)], index) for index in (0, 1))
        shard_counts = ShardCounts.from_config(parallel, make_param.mesh)

        def element_bytes(spec: ParamSpec) -> float:
            weight, gradient, state = self.bytes_per_element(spec.is_matrix, make_param.dtype_of(spec))
            if parallel.param_cpu_offload and spec.is_2d:
                weight = 0
            return shard_counts[spec.mesh_view].bytes_of(weight, gradient, state * (1 - optim.offload_fraction))

        def bytes_of(module: nn.Module | None) -> float:
            if module is None:
                return 0.0
            return sum(element_bytes(spec) * p.numel() for spec, p in params_with_specs(module))

        layers = self.stage_costs.per_layer(lambda kind: [bytes_of(Block(make_param, kind.model, 0, kind.spec))])
        return ModuleStateBytes(PrefixSums(layers), bytes_of(first.embedding), bytes_of(last.head))

    @cached_property
    def numel_by_layer(self) -> tuple[tuple[int, ...], ...]:
        """The number of elements of each layer's parameters on a rank, for each of MESH_VIEWS."""
        make_param = ParamFactory(self.mesh_at(0), self.dtype, 0, meta=True)

        def numel_by_view(kind: LayerKind) -> tuple[int, ...]:
            params = list(params_with_specs(Block(make_param, kind.model, 0, kind.spec)))
            return tuple(sum(p.numel() for spec, p in params if spec.mesh_view == view) for view in MESH_VIEWS)

        return tuple(self.stage_costs.per_layer(numel_by_view))

    @cached_property
    def params_by_view(self) -> Counter[str]:
        """The number of parameters of the entire model by mesh view, each counted once, without padding."""
        return _params_by_view(self.config.model, self.vocab_size, self.padded_vocab)

    @property
    def num_parameters(self) -> int:
        return self.params_by_view.total()

    @property
    def num_active_parameters(self) -> int:
        """The number of parameters that a token uses."""
        model = self.config.model
        active_experts = self.params_by_view["expert"] * model.moe_router_topk // (model.num_experts or 1)
        return self.params_by_view["dense"] + active_experts

    # ---- schedule

    @property
    def splits_backward(self) -> bool:
        return self.config.parallel.split_backward and self.pp > 1

    @cached_property
    def split_backward(self) -> SplitBackward | None:
        """The options of a split backward; None if backward is not split."""
        return self._split_backward_for(self.layers_per_stage)

    def _split_backward_for(self, layers_per_stage: Sequence[int]) -> SplitBackward | None:
        if not self.splits_backward:
            return None
        costs = self.stage_costs.flops_of_stages(layers_per_stage)
        memory_limit = self.config.parallel.zero_bubble_max_pending_backward
        if memory_limit is not None:
            return SplitBackward(costs, memory_limit=memory_limit)
        return SplitBackward(costs, self.stage_costs.without_offload.memory_of_stages(layers_per_stage))

    @property
    def group_size(self) -> int:
        """The number of micro-batches of the first group."""
        size = self.config.parallel.microbatch_group_size_per_virtual_pipeline_stage
        return microbatch_groups(self.num_microbatches, self.pp, size)[0]

    @property
    def _actions_per_microbatch(self) -> int:
        """The number of actions of all ranks for one micro-batch: F, B and W, and both ends of each message."""
        num_stages = self.placement.num_stages
        num_messages = 2 * (num_stages - 1) if self.pp > 1 else 0
        return (3 if self.splits_backward else 2) * num_stages + 2 * num_messages

    @property
    def reported_groups(self) -> int:
        """The number of groups of micro-batches to simulate for reports; more than a short step has."""
        actions_per_group = 3 * self.placement.num_stages * self.group_size
        return max(SIMULATED_GROUPS, MIN_REPORTED_ACTIONS // actions_per_group)

    def actions(
        self, split_backward: SplitBackward | None, num_groups: int
    ) -> tuple[int, tuple[tuple[Action, ...], ...]]:
        """Return the micro-batches of a step or of its first `num_groups` groups, and each rank's actions for them."""
        num_microbatches, group_size = self._microbatches_of_groups(num_groups)
        actions_by_rank = build_schedule(
            self.config.parallel.pipeline_schedule, self.pp, num_microbatches, self.vpp, group_size, split_backward
        )
        return num_microbatches, actions_by_rank

    def _microbatches_of_groups(self, num_groups: int) -> tuple[int, int | None]:
        """Return the micro-batches of a step or of its first `num_groups` groups, and the group size; None: pp."""
        if self.num_microbatches > num_groups * self.group_size:
            return num_groups * self.group_size, self.group_size
        return self.num_microbatches, self.config.parallel.microbatch_group_size_per_virtual_pipeline_stage

    def simulate_step(
        self, durations: Sequence[Durations], split_backward: SplitBackward | None, num_groups: int
    ) -> list[tuple[float, Simulation]]:
        """Return the time of a step for each of the durations, and the simulation of it or of its first groups.

        Args:
            durations: The durations, with the costs of F, B and W of every stage; times have the unit of the costs.
            split_backward: The options of a split backward.
            num_groups: The number of groups of micro-batches to simulate at most.
        """
        num_simulated, actions_by_rank = self.actions(split_backward, num_groups)
        simulations = simulate_all(actions_by_rank, durations)
        shorter: list[tuple[int, float] | None] = [None] * len(durations)
        is_bound = [self._is_bound_by_busiest_rank(duration) for duration in durations]
        if num_simulated < self.num_microbatches and not all(is_bound):
            num_fewer, fewer_actions = self.actions(split_backward, num_groups - 1)
            for i, simulation in enumerate(simulate_all(fewer_actions, durations)):
                shorter[i] = None if is_bound[i] else (num_fewer, simulation.end)
        return [
            (self._step_time(duration.costs or (), num_simulated, simulation.end, fewer), simulation)
            for duration, simulation, fewer in zip(durations, simulations, shorter, strict=True)
        ]

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
        if num_simulated == self.num_microbatches:
            return end
        microbatch_time = self._busiest_rank_time(costs_of_stages)
        if shorter is not None:
            num_fewer, shorter_end = shorter
            microbatch_time = max(microbatch_time, (end - shorter_end) / (num_simulated - num_fewer))
        return end + (self.num_microbatches - num_simulated) * microbatch_time

    def _is_bound_by_busiest_rank(self, durations: Durations) -> bool:
        """Return True if every further micro-batch takes the time of the busiest rank.

        Otherwise the slowest part may be messages, or F and B of different ranks.
        """
        is_1f1b = self.config.parallel.pipeline_schedule == "1f1b"
        return is_1f1b and durations.delay is None and durations.earliest_start is None

    def _busiest_rank_time(self, costs_of_stages: Sequence[ActionCosts]) -> float:
        """Return the time of the busiest rank for one micro-batch."""
        return max(
            sum(sum(costs_of_stages[stage]) for stage in self.placement.stages_of_rank(rank)) for rank in range(self.pp)
        )

    @cached_property
    def bubble(self) -> float:
        """The fraction of the time for which ranks are idle, by FLOPs."""
        busy = self.num_microbatches * sum(map(sum, self.costs_of_stages))
        durations = Durations(self.costs_of_stages)
        ((step_time, _),) = self.simulate_step([durations], self.split_backward, self.reported_groups)
        return max(0.0, 1.0 - busy / (self.pp * step_time))  # rounding could give -0.0 %

    @cached_property
    def peak_in_flight(self) -> list[int]:
        """The peak number of forwards in flight, which wait for their backward, on every pipeline rank."""
        return [round(peak) for peak in self.peak_alive(None, self.split_backward, self.reported_groups)]

    @cached_property
    def activation_bytes(self) -> list[int]:
        """The peak bytes on the device that forwards in flight have saved, on every pipeline rank."""
        peaks = self.peak_alive(self.memory_of_stages, self.split_backward, self.reported_groups)
        return [round(peak) for peak in peaks]

    def peak_alive(
        self,
        memory_of_stages: Sequence[ActionMemory] | None,
        split_backward: SplitBackward | None,
        num_groups: int = SIMULATED_GROUPS,
    ) -> list[float]:
        """Return the peak memory in flight on every pipeline rank.

        Args:
            memory_of_stages: The memory of a forward on every stage; None for 1, which counts forwards.
            split_backward: The options of a split backward.
            num_groups: The number of groups of micro-batches to simulate at most.
        """
        return self._peak_alive(memory_of_stages, *self.actions(split_backward, num_groups))

    def _peak_alive(
        self,
        memory_of_stages: Sequence[ActionMemory] | None,
        num_simulated: int,
        actions_by_rank: Sequence[Sequence[Action]],
    ) -> list[float]:
        """Return the peak memory in flight of a step from the actions of its first micro-batches."""
        peaks = [peak_in_flight(actions, memory_of_stages) for actions in actions_by_rank]
        if num_simulated == self.num_microbatches:
            return peaks
        # each further group adds as much as it would without a split backward, since deferred gradients are limited
        num_fewer, fewer_groups = self.actions(None, SIMULATED_GROUPS - 1)
        num_more, more_groups = self.actions(None, SIMULATED_GROUPS)
        further_groups = (self.num_microbatches - num_simulated) / (num_more - num_fewer)
        for rank, (fewer, more) in enumerate(zip(fewer_groups, more_groups, strict=True)):
            growth = peak_in_flight(more, memory_of_stages) - peak_in_flight(fewer, memory_of_stages)
            peaks[rank] += growth * further_groups
        return peaks


@functools.lru_cache(maxsize=64)
def _params_by_view(model: ModelConfig, vocab_size: int, padded_vocab: int) -> Counter[str]:
    counts = Counter[str]()
    for spec in model_specs(model, vocab_size, padded_vocab_size=padded_vocab).values():
        counts[spec.mesh_view] += math.prod(spec.stored_shape)
    return counts


@functools.lru_cache(maxsize=1024)  # the thousands of plans of a search have few distinct meshes
def _planned_mesh(world: int, pp_rank: int, sizes: tuple[tuple[str, Any], ...]) -> Mesh:
    mesh_sizes = MeshSizes(**dict(sizes))
    first_rank = rank_order(world, mesh_sizes).ranks(pp_rank, 0)
    return abstract_mesh(world, first_rank, **mesh_sizes)


def make_run_plan(config: Config, world: int, vocab_size: int) -> RunPlan:
    """Return the plan of a run.

    Raises:
        ValueError: The run is not possible for a reason that config/validation cannot check, as `name=value breaks
            rule; remedy`.
    """
    plan = RunPlan(config, world, vocab_size)
    _ = plan.num_steps, plan.layer_ranges, state_dtypes_of(config.optim, matrix=False)  # these raise
    schedule = config.parallel.pipeline_schedule
    if (
        schedule in REGISTRIES["pipeline_schedule"].plugin_components
    ):  # tests prove the schedules that are not a plugin's
        group_size = config.parallel.microbatch_group_size_per_virtual_pipeline_stage
        split_backward = SplitBackward() if config.parallel.split_backward else None
        batch_sizes = plan.batch_sizes
        all_num_microbatches = {plan.num_microbatches * size // batch_sizes.final for _, size in batch_sizes.milestones}
        for num_microbatches in all_num_microbatches:
            build_schedule(schedule, plan.pp, num_microbatches, plan.vpp, group_size, split_backward)
    return plan
