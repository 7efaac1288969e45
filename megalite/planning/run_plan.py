"""The plan of a run before it starts: its shape, the layers of its stages, and its model states.

It is a pure function of the configuration, the number of ranks and the vocabulary, computed once per start. The
preflight checks create it, the start and a dry run print it, and training/setup.py builds the run from it. Expensive
parts are computed when they are first needed.

    shape           planning/run_shape.py: sizes of the mesh, batches, steps
    balance         planning/stage_balance.py: layers of the stages, their costs, schedule, bubble and activations
    model_states    bytes of weights, gradients and optimizer state on every pipeline rank

planning/memory.py adds temporary tensors. Memory of CUDA and NCCL is not counted.
"""

import functools
import math
from collections import Counter
from dataclasses import dataclass, field, replace
from functools import cached_property

from megalite.config.options import Config, ModelConfig
from megalite.config.registry import REGISTRIES
from megalite.models.gpt import Block
from megalite.models.specs import model_specs
from megalite.nn.parameter import ParamFactory, params_with_specs
from megalite.parallel.spec import MESH_VIEWS
from megalite.pipeline.schedule import SplitBackward, build_schedule
from megalite.planning.layer_kinds import LayerKind
from megalite.planning.model_state import ModelStateBytes, state_dtypes_of
from megalite.planning.run_shape import RunShape
from megalite.planning.stage_balance import StageBalance


@dataclass(frozen=True)
class ModelStates:
    """The parameters of a run, and the model state of every pipeline rank.

    Stages are built on the meta device, without memory, and laid out by the package optim, so the bytes of weights,
    gradients and optimizer are those of the run.
    """

    shape: RunShape
    balance: StageBalance

    @cached_property
    def by_rank(self) -> list[ModelStateBytes]:
        """The model state of every pipeline rank, computed once for ranks with equal layers and the same ends."""
        keys = []
        for rank in range(self.shape.pp):
            ranges = [self.balance.layer_ranges[stage] for stage in self.shape.placement.stages_of_rank(rank)]
            numels = [self.numel_by_layer[layers.start : layers.stop] for layers in ranges]
            keys.append((rank == 0, rank == self.shape.pp - 1, *numels))
        states = {key: self._state_of(keys.index(key)) for key in dict.fromkeys(keys)}
        return [states[key] for key in keys]

    def _state_of(self, rank: int) -> ModelStateBytes:
        """Return the model state of a rank, which does not depend on micro-batches and on what backward recomputes."""
        config = self.shape.config
        train = replace(
            config.train,
            micro_batch_size=1,
            recompute_granularity=None,
            recompute_method=None,
            recompute_num_layers=None,
            recompute_modules=(),
        )
        config = replace(config, train=train, parallel=replace(config.parallel, split_backward=False))
        ranges = tuple(self.balance.layer_ranges)
        return _model_state(_StateRequest(config, self.shape.world, self.shape.vocab_size, ranges, rank, self))

    @property
    def fullest_rank(self) -> int:
        """The pipeline rank with the most bytes of weights, gradients and optimizer."""
        return max(range(self.shape.pp), key=lambda rank: self.by_rank[rank].total)

    @property
    def fullest(self) -> ModelStateBytes:
        """The model state of `fullest_rank`."""
        return self.by_rank[self.fullest_rank]

    @cached_property
    def numel_by_layer(self) -> tuple[tuple[int, ...], ...]:
        """The number of elements of each layer's parameters on a rank, for each of MESH_VIEWS."""
        make_param = ParamFactory(self.shape.mesh_at(0), self.shape.dtype, 0, meta=True)

        def numel_by_view(kind: LayerKind) -> tuple[int, ...]:
            params = list(params_with_specs(Block(make_param, kind.model, 0, kind.spec)))
            return tuple(sum(p.numel() for spec, p in params if spec.mesh_view == view) for view in MESH_VIEWS)

        return tuple(self.balance.stage_costs.per_layer(numel_by_view))

    @cached_property
    def params_by_view(self) -> Counter[str]:
        """The number of parameters of the entire model by mesh view, each counted once, without padding."""
        return _params_by_view(self.shape.config.model, self.shape.vocab_size, self.shape.padded_vocab)

    @property
    def num_parameters(self) -> int:
        return self.params_by_view.total()

    @property
    def num_active_parameters(self) -> int:
        """The number of parameters that a token uses."""
        model = self.shape.config.model
        active_experts = self.params_by_view["expert"] * model.moe_router_topk // (model.num_experts or 1)
        return self.params_by_view["dense"] + active_experts


@dataclass(frozen=True)
class _StateRequest:
    """The properties that determine the model state of a pipeline rank, and `states`, which computes it."""

    config: Config
    world: int
    vocab_size: int
    layer_ranges: tuple[range, ...]
    rank: int
    states: ModelStates = field(compare=False)


@functools.lru_cache(maxsize=256)  # plans of a search that differ in other options share it
def _model_state(request: _StateRequest) -> ModelStateBytes:
    states, mesh = request.states, request.states.shape.mesh_at(request.rank)
    chunks = states.balance.build_stages(mesh, states.shape.dtype, meta=True)
    return ModelStateBytes.from_modules(chunks, mesh, states.shape.bytes_per_element, states.shape.config)


@functools.lru_cache(maxsize=64)
def _params_by_view(model: ModelConfig, vocab_size: int, padded_vocab: int) -> Counter[str]:
    counts = Counter[str]()
    for spec in model_specs(model, vocab_size, padded_vocab_size=padded_vocab).values():
        counts[spec.mesh_view] += math.prod(spec.stored_shape)
    return counts


@dataclass(frozen=True)
class RunPlan:
    """The plan of a run of this shape."""

    shape: RunShape

    @property
    def config(self) -> Config:
        return self.shape.config

    @cached_property
    def balance(self) -> StageBalance:
        return StageBalance(self.shape)

    @cached_property
    def model_states(self) -> ModelStates:
        return ModelStates(self.shape, self.balance)


def make_run_plan(config: Config, world: int, vocab_size: int) -> RunPlan:
    """Return the plan of a run.

    Raises:
        ValueError: The run is not possible for a reason that config/validation cannot check, as `name=value breaks
            rule; remedy`.
    """
    shape = RunShape(config, world, vocab_size)
    plan = RunPlan(shape)
    _ = shape.num_steps, plan.balance.layer_ranges, state_dtypes_of(config.optim, matrix=False)  # these raise
    schedule = config.parallel.pipeline_schedule
    if schedule in REGISTRIES["pipeline_schedule"].plugin_components:  # tests prove the other schedules
        group_size = config.parallel.microbatch_group_size_per_virtual_pipeline_stage
        split_backward = SplitBackward() if config.parallel.split_backward else None
        sizes = shape.batch_sizes
        all_num_microbatches = {shape.num_microbatches * size // sizes.final for _, size in sizes.milestones}
        for num_microbatches in all_num_microbatches:
            build_schedule(schedule, shape.pp, num_microbatches, shape.vpp, group_size, split_backward)
    return plan
