"""The plan of a run before it starts: batch sizes, steps, layers, memory, bubble, groups.

It is a pure function of the configuration, the number of ranks and the vocabulary, computed once per start. The
preflight checks create it, the start and a dry run print it, and training/setup.py builds the run from it. Expensive
parts are computed when they are first needed.

Stages are built without memory (on the meta device) and laid out by optim/buffer.py, so the bytes of weights, gradients
and optimizer are those of the run. The FLOPs and bytes of a stage are sums over its layers, from the cost of each kind
(planning/layer_kinds.py). Activations are the bytes that the schedule has in flight. planning/memory.py adds temporary
tensors. Memory of CUDA and NCCL is not counted.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import nn

from megalite.config.option_parsers import parse_batch_schedule
from megalite.config.options import Config, padded_vocab_size
from megalite.config.pipeline_layout import explicit_stage_layers
from megalite.config.registry import REGISTRIES
from megalite.models.gpt import Block, RecomputeConfig, Stage
from megalite.models.specs import model_specs
from megalite.nn.parameter import ParamFactory, params_with_specs
from megalite.parallel.mesh import Mesh, MeshSizes, abstract_mesh
from megalite.parallel.spec import MESH_VIEWS, ParamSpec
from megalite.pipeline.schedule import (
    Action,
    ActionCosts,
    ActionMemory,
    ShardingPolicy,
    SplitBackward,
    StagePlacement,
    build_schedule,
    microbatch_groups,
    peak_in_flight,
)
from megalite.pipeline.simulate import Simulation, simulate
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
from megalite.planning.partition import candidate_splits, choose_split, even_split, layer_ranges

MAX_SIMULATED_ACTIONS = 200_000  # simulated in all to balance the stages: about a second
SIMULATED_GROUPS = 3  # groups of micro-batches that are simulated to compare splits; later groups are like the last
MIN_REPORTED_ACTIONS = 10_000  # simulated at least for the figures, because waiting gradients may take long to settle


@dataclass(frozen=True)
class RunPlan:
    """`world`: number of ranks, a multiple of tp x cp x pp. `vocab_size`: without padding."""

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
        return any(self.config.model.moe_layers)

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
    def mesh_sizes(self) -> MeshSizes:
        """The sizes that parallel/mesh.py makes a mesh of."""
        p = self.config.parallel
        instances = p.num_distributed_optimizer_instances if p.effective_zero_stage else None
        extra = dict(dp_outermost=p.use_tp_pp_dp_mapping, dp_cp_tp=self.config.optim.needs_full_tensors)
        mesh_sizes = MeshSizes(tp=self.tp, pp=self.pp, cp=self.cp, num_optimizer_instances=instances, **extra)
        return mesh_sizes | MeshSizes(ep=self.ep, etp=self.etp) if self.has_experts else mesh_sizes

    @property
    def sharding_policy(self) -> ShardingPolicy:
        return sharding_policy(self.config.parallel, self.vpp)

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
        t = self.config.train
        method, num_layers = t.recompute_method or "uniform", t.recompute_num_layers or 1
        return RecomputeConfig(t.recompute_granularity, method, num_layers, t.recompute_modules)

    @property
    def batch_size(self) -> int:
        return self.config.train.batch_size(self.dp)

    @property
    def eval_batch_size(self) -> int:
        return self.config.train.eval_batch_size(self.dp)

    @cached_property
    def batch_sizes(self) -> BatchSizeSchedule:
        """Raises ValueError if a ramp does not lead to the global batch size."""
        t = self.config.train
        if t.step_batch_size_schedule is not None:
            num_steps = parse_batch_schedule(t.step_batch_size_schedule, self.config.model.seq_length)
            return BatchSizeSchedule(num_steps, keep_last_batch=True)
        if t.rampup_batch_size is None:
            return BatchSizeSchedule.constant(self.batch_size)
        start, increment, total_samples = t.rampup_batch_size
        return BatchSizeSchedule.ramp(self.batch_size, start, increment, total_samples)

    @cached_property
    def num_steps(self) -> int:
        """The number of steps. Raises ValueError if it is 0, and as `batch_sizes` does."""
        t, mesh_sizes = self.config.train, self.batch_sizes
        if not (num_steps := t.train_iters or mesh_sizes.num_steps_for(t.train_samples or 0)):
            raise ValueError(f"train_samples={t.train_samples} is below one batch of {mesh_sizes.at(0)}; give more")
        return num_steps

    @cached_property
    def total_samples(self) -> int:
        return self.batch_sizes.samples_after(self.num_steps)

    @property
    def num_microbatches(self) -> int:
        """Micro-batches of a step, once its batch has its final size."""
        return self.batch_sizes.final // (self.config.train.micro_batch_size * self.dp)

    @cached_property
    def layer_ranges(self) -> list[range]:
        """The layers of every stage: given by the options, or balanced by simulated time and memory."""
        if self.fixed_split:
            return layer_ranges(self.fixed_split)
        num_layers, num_stages = self.config.model.num_layers, self.placement.num_stages
        backward = self._split_backward_for(even_split(num_layers, num_stages))
        num_actions = sum(map(len, self.actions(backward, SIMULATED_GROUPS)[1]))
        max_simulated = max(1, MAX_SIMULATED_ACTIONS // num_actions)

        def min_time(split: Sequence[int]) -> float:
            return self.num_microbatches * self._busiest_rank_time(self.stage_costs.flops_of_stages(split))

        return layer_ranges(choose_split(self.candidate_splits, min_time, self._time_and_memory, max_simulated))

    @property
    def candidate_splits(self) -> Sequence[tuple[int, ...]]:
        """The splits of the layers that the run chooses from."""
        return candidate_splits(self.placement.num_stages, self.stage_costs.flops)

    @property
    def fixed_split(self) -> Sequence[int]:
        """The layers of every stage if there is no choice: given by the options, or at most one each; else empty."""
        num_layers, num_stages = self.config.model.num_layers, self.placement.num_stages
        even = even_split(num_layers, num_stages) if num_layers <= num_stages or num_stages == 1 else ()
        return even if self._given_split is None else self._given_split

    @cached_property
    def layers_per_stage(self) -> list[int]:
        """The number of layers of every stage."""
        return [len(layers) for layers in self.layer_ranges]

    @cached_property
    def _given_split(self) -> list[int] | None:
        return explicit_stage_layers(self.config.model.num_layers, self.config.parallel)

    @property
    def vpp(self) -> int:
        """The number of stages of each pipeline rank."""
        if self._given_split is not None:
            return len(self._given_split) // self.pp
        return self.config.parallel.num_virtual_stages_per_pipeline_rank or 1

    @property
    def placement(self) -> StagePlacement:
        return StagePlacement(self.pp, self.vpp)

    @cached_property
    def stage_costs(self) -> StageCosts:
        m, t, recompute = self.config.model, self.config.train, self.recompute
        split_backward, places = self.splits_backward, single_document_sharding(m, self.cp)
        setting = LayerSetting(
            self.tp,
            t.micro_batch_size,
            self.dtype,
            split_backward,
            recompute.selective_modules,
            places,
            self.ep,
            self.etp,
        )
        return cached_stage_costs(
            m,
            recompute,
            setting,
            self.vocab_size,
            self.padded_vocab,
            t.z_loss_coeff,
            t.cpu_offloading_num_layers,
            t.min_offloaded_tensor_size,
        )

    @property
    def p2p_bytes(self) -> int:
        """Bytes of x_sBD, which is also the size of a message."""
        return self.tokens_per_microbatch * self.config.model.hidden_size * self.dtype.itemsize // self.tp

    @property
    def tokens_per_microbatch(self) -> int:
        """Tokens of a micro-batch on a rank of cp."""
        return self.config.model.seq_length // self.cp * self.config.train.micro_batch_size

    def build_stages(self, mesh: Mesh, dtype: torch.dtype, meta: bool = False, deferred: bool = False) -> list[Stage]:
        """The chunks of the model on this rank; `meta`, `deferred`: as a Maker has it."""
        make = ParamFactory(mesh, dtype, self.config.train.seed, meta, deferred)
        return [self.build_stage(make, self.layer_ranges, s) for s in self.placement.stages_of_rank(mesh.pp.rank)]

    def build_stage(self, make: ParamFactory, layer_ranges: Sequence[range], number: int) -> Stage:
        actions = dict(vocab_size=self.vocab_size, padded_vocab_size=self.padded_vocab)
        extra: dict[str, Any] = dict(recompute=self.recompute, z_loss=self.config.train.z_loss_coeff)
        return Stage(make, self.config.model, layer_ranges, number, **actions, **extra)

    @cached_property
    def costs_of_stages(self) -> tuple[ActionCosts, ...]:
        return self.stage_costs.flops_of_stages(self.layers_per_stage)

    @cached_property
    def memory_of_stages(self) -> tuple[ActionMemory, ...]:
        return self.stage_costs.memory_of_stages(self.layers_per_stage)

    @cached_property
    def model_states(self) -> list[ModelStateBytes]:
        """The holding of every pipeline rank, built once for ranks with equal layers and the same end of the model."""
        kinds = []
        for rank in range(self.pp):
            layer_ranges = (self.layer_ranges[stage] for stage in self.placement.stages_of_rank(rank))
            kinds.append(
                (rank == 0, rank == self.pp - 1, *(self.numel_by_layer[n.start : n.stop] for n in layer_ranges))
            )
        built = {kind: self._model_state(kinds.index(kind)) for kind in dict.fromkeys(kinds)}
        return [built[kind] for kind in kinds]

    @property
    def fullest_rank(self) -> int:
        """The pipeline rank with the most bytes of weights, gradients and optimizer."""
        return max(range(self.pp), key=lambda r: self.model_states[r].total)

    @cached_property
    def params_by_view(self) -> Counter[str]:
        """The number of parameters of the whole model by their home, each counted once, without padding."""
        specs = model_specs(self.config.model, self.vocab_size, padded_vocab_size=self.padded_vocab).values()
        return sum((Counter({spec.mesh_view: math.prod(spec.stored_shape)}) for spec in specs), Counter())

    @property
    def num_parameters(self) -> int:
        return self.params_by_view.total()

    @property
    def num_active_parameters(self) -> int:
        """Of these, how many a token goes through."""
        m = self.config.model
        return self.params_by_view["dense"] + self.params_by_view["expert"] * m.moe_router_topk // (m.num_experts or 1)

    @property
    def splits_backward(self) -> bool:
        return self.config.parallel.split_backward and self.pp > 1

    @cached_property
    def split_backward(self) -> SplitBackward | None:
        """How backward is split, if it is."""
        return self._split_backward_for(self.layers_per_stage)

    def _split_backward_for(self, layers_per_stage: Sequence[int]) -> SplitBackward | None:
        if not self.splits_backward:
            return None
        costs = self.stage_costs.flops_of_stages(layers_per_stage)
        memory_limit = self.config.parallel.zero_bubble_max_pending_backward
        if memory_limit is not None:
            return SplitBackward(costs, memory_limit=memory_limit)
        return SplitBackward(costs, self.stage_costs.without_offload.memory_of_stages(layers_per_stage))

    @cached_property
    def peak_in_flight(self) -> list[int]:
        """The most forwards of a chunk that wait for their backward, for every pipeline rank."""
        return [round(peak) for peak in self.peak_alive(None, self.split_backward, self.reported_groups)]

    @cached_property
    def activation_bytes(self) -> list[int]:
        """The most bytes that the forwards in flight keep on the device, for every pipeline rank."""
        return [
            round(peak) for peak in self.peak_alive(self.memory_of_stages, self.split_backward, self.reported_groups)
        ]

    @cached_property
    def bubble(self) -> float:
        """The share of the time for which ranks are idle, by FLOPs."""
        times = sum(map(sum, self.costs_of_stages))
        idle = 1.0 - self.num_microbatches * times / (
            self.pp * self.simulate_step(self.costs_of_stages, self.split_backward, self.reported_groups)[0]
        )
        return max(0.0, idle)  # rounding: not -0.0%

    def simulate_step(
        self,
        costs_of_stages: Sequence[ActionCosts],
        split_backward: SplitBackward | None,
        num_groups: int,
        **extra: Any,
    ) -> tuple[float, Simulation]:
        """Return the time of a step in units of the costs, and the simulation of it or of its first groups.

        `extra` are arguments of simulate().
        """
        num_simulated, actions = self.actions(split_backward, num_groups)
        simulation = simulate(actions, costs_of_stages, **extra)
        if num_simulated == self.num_microbatches:
            return simulation.end, simulation
        time_per_microbatch = self._busiest_rank_time(costs_of_stages)
        if (
            extra or self.config.parallel.pipeline_schedule != "1f1b"
        ):  # a message, or F and B of different ranks, may be
            num_fewer, actions = self.actions(split_backward, num_groups - 1)  # the slowest
            time_per_microbatch = max(
                time_per_microbatch,
                (simulation.end - simulate(actions, costs_of_stages, **extra).end) / (num_simulated - num_fewer),
            )
        return simulation.end + (self.num_microbatches - num_simulated) * time_per_microbatch, simulation

    def _busiest_rank_time(self, costs_of_stages: Sequence[ActionCosts]) -> float:
        """The time of the busiest rank for one micro-batch."""
        return max(sum(sum(costs_of_stages[s]) for s in self.placement.stages_of_rank(rank)) for rank in range(self.pp))

    def _time_and_memory(self, layers_per_stage: Sequence[int]) -> tuple[float, float]:
        """(time of a step, bytes of the fullest rank: layers, embedding, head and activations in flight)."""
        backward = self._split_backward_for(layers_per_stage)
        alive = self.peak_alive(self.stage_costs.memory_of_stages(layers_per_stage), backward)
        memory_of_ranks = [
            self.module_state_bytes.on_rank(np.array(layers_per_stage), rank, self.placement) + alive[rank]
            for rank in range(self.pp)
        ]
        return self.simulate_step(self.stage_costs.flops_of_stages(layers_per_stage), backward, SIMULATED_GROUPS)[
            0
        ], max(memory_of_ranks)

    @property
    def rank0_groups(self) -> dict[str, tuple[int, ...]]:
        """The groups of rank 0, by axis."""
        mesh = self.mesh_at(0)
        return {name: mesh.axis(name).ranks for name in ("tp", "cp", "dp", "pp")}

    def mesh_at(self, rank: int) -> Mesh:
        """The mesh of the first rank of a pipeline position, without groups."""
        first = abstract_mesh(self.world, 0, **self.mesh_sizes)
        return abstract_mesh(self.world, first.pp.ranks[rank], **self.mesh_sizes) if rank else first

    def bytes_per_element(self, matrix: bool = True) -> tuple[int, int, int]:
        """Of a matrix, as most are, or not of one."""
        return bytes_per_element(self.dtype, state_dtypes_of(self.config.optim, matrix))

    def _model_state(self, rank: int) -> ModelStateBytes:
        mesh = self.mesh_at(rank)
        return ModelStateBytes.from_modules(
            self.build_stages(mesh, self.dtype, meta=True), mesh, self.bytes_per_element, self.config
        )

    @cached_property
    def numel_by_layer(self) -> tuple[tuple[int, ...], ...]:
        """The number of elements of each layer's parameters on a rank, by home in the order of HOMES."""
        make = ParamFactory(self.mesh_at(0), self.dtype, 0, meta=True)

        def of(kind: LayerKind) -> tuple[int, ...]:
            specs = list(params_with_specs(Block(make, kind, 0)))
            return tuple(sum(p.numel() for spec, p in specs if spec.mesh_view == view) for view in MESH_VIEWS)

        return tuple(self.stage_costs.per_layer(of))

    @cached_property
    def module_state_bytes(self) -> ModuleStateBytes:
        """Without the layout's padding, which `holdings` has."""
        make = ParamFactory(self.mesh_at(0), self.dtype, 0, meta=True)
        first, last = (self.build_stage(make, [range(0), range(0)], number) for number in (0, 1))
        shares = ShardCounts.from_config(self.config.parallel, make.mesh)

        def each(spec: ParamSpec) -> float:
            weight, gradient, state = self.bytes_per_element(spec.is_matrix)
            weight *= not (self.config.parallel.param_cpu_offload and spec.is_2d)
            return shares[spec.mesh_view].bytes_of(weight, gradient, state * (1 - self.config.optim.offload_fraction))

        def of(module: nn.Module | None) -> float:
            return sum(each(spec) * p.numel() for spec, p in params_with_specs(module)) if module else 0.0

        bytes_of_layers = PrefixSums([[n] for n in self.stage_costs.per_layer(lambda kind: of(Block(make, kind, 0)))])
        return ModuleStateBytes(bytes_of_layers, of(first.embedding), of(last.head))

    @property
    def group_size(self) -> int:
        """The number of micro-batches of the first group."""
        p = self.config.parallel
        return microbatch_groups(self.num_microbatches, self.pp, p.microbatch_group_size_per_virtual_pipeline_stage)[0]

    @property
    def reported_groups(self) -> int:
        """The number of groups of micro-batches that the figures describe: all of a short step."""
        return max(SIMULATED_GROUPS, MIN_REPORTED_ACTIONS // (3 * self.placement.num_stages * self.group_size))

    def actions(
        self, split_backward: SplitBackward | None, num_groups: int
    ) -> tuple[int, tuple[tuple[Action, ...], ...]]:
        """Return the micro-batches of a step or of its first `num_groups` groups, and each rank's actions for them."""
        p, m, group = self.config.parallel, self.num_microbatches, self.group_size
        size = p.microbatch_group_size_per_virtual_pipeline_stage
        if m > num_groups * group:
            m, size = num_groups * group, group
        return m, build_schedule(p.pipeline_schedule, self.pp, m, self.vpp, size, split_backward)

    def peak_alive(
        self,
        memory_of_stages: Sequence[ActionMemory] | None,
        split_backward: SplitBackward | None,
        num_groups: int = SIMULATED_GROUPS,
    ) -> list[float]:
        """Return the peak in flight on every pipeline rank.

        Each forward counts `memory_of_stages` of its stage, or 1.
        """
        num_simulated, actions = self.actions(split_backward, num_groups)
        peaks = [peak_in_flight(row, memory_of_stages) for row in actions]
        if num_simulated == self.num_microbatches:
            return peaks
        # each further group adds as much as one group without a split adds, because what waits is limited
        (run_2, two), (run_3, three) = self.actions(None, SIMULATED_GROUPS - 1), self.actions(None, SIMULATED_GROUPS)
        extra = (self.num_microbatches - num_simulated) / (run_3 - run_2)
        grown = (
            peak_in_flight(b, memory_of_stages) - peak_in_flight(a, memory_of_stages)
            for a, b in zip(two, three, strict=True)
        )
        return [most + each * extra for most, each in zip(peaks, grown, strict=True)]


def make_run_plan(config: Config, world: int, vocab_size: int) -> RunPlan:
    """Make it. Raises ValueError, `name=value breaks rule; remedy`, for all that config/validation cannot check."""
    plan = RunPlan(config, world, vocab_size)
    _ = plan.num_steps, plan.layer_ranges, state_dtypes_of(config.optim, matrix=False)  # these raise
    if (name := config.parallel.pipeline_schedule) in REGISTRIES[
        "pipeline_schedule"
    ].added:  # others are proven by tests
        by, unit = config.parallel.microbatch_group_size_per_virtual_pipeline_stage, plan.num_microbatches
        for m in {unit * size // plan.batch_sizes.final for _, size in plan.batch_sizes.milestones}:
            build_schedule(name, plan.pp, m, plan.vpp, by, SplitBackward() if config.parallel.split_backward else None)
    return plan
