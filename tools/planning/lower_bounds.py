"""Lower bounds of a layout's step time and memory, over all distributions of its layers that a run may choose.

Both are computed for all distributions at once, as arrays [splits, stages], and the smallest value is the bound. They
leave out padding, messages, collectives of dp and the optimizer's update.

    time    a rank waits until the first forward has reached it, processes all micro-batches, and then the last backward
            still has to reach the first stage; and every micro-batch passes all stages
    memory  weights, gradients and optimizer state of the rank's layers, the activations that its schedule has in flight
            at its peak, and one unsharded unit
"""

import functools
import math
from collections import Counter
from collections.abc import Mapping

import numpy as np

from megalite.models.gpt import Block
from megalite.nn.parameter import params_with_specs
from megalite.parallel.spec import MESH_VIEWS, SHARD_AXES
from megalite.pipeline.schedule import (
    UNIT_MEMORY,
    Op,
    ShardingPolicy,
    StagePlacement,
    add_sharding_actions,
    compute_actions,
    memory_change,
    microbatch_groups,
)
from megalite.planning.layer_cost import CostRecorder
from megalite.planning.layer_kinds import LayerKind, StageCosts
from megalite.planning.model_state import MinModelState
from megalite.planning.partition import candidate_splits
from megalite.planning.run_plan import RunPlan
from megalite.planning.stage_time import TOTAL, TimeModel

SIMULATED_GROUPS = 3  # groups of micro-batches; with 1F1B, memory does not grow after them


def all_splits(plan: RunPlan) -> np.ndarray:
    """Return the layers of every stage, in all distributions that the run chooses from, as [splits, stages]."""
    fixed_split = plan.balance.fixed_split
    if len(fixed_split):
        return np.array([fixed_split])
    return _splits_array(plan.balance.stage_costs, plan.shape.placement.num_stages)


@functools.lru_cache(maxsize=4096)
def _splits_array(costs: StageCosts, num_stages: int) -> np.ndarray:
    return np.array(candidate_splits(num_stages, costs.flops))


def min_step_time(plan: RunPlan, times: TimeModel) -> float:
    """Return a lower bound of the seconds of a step."""
    shape = plan.shape
    counts, pp, num_microbatches = all_splits(plan), shape.pp, shape.num_microbatches
    stops = counts.cumsum(1)
    layer_times = times.layer_times.between(stops - counts, stops)[..., TOTAL, :]
    f, b, w = np.moveaxis(layer_times, -1, 0)  # seconds of one micro-batch, each [splits, stages]
    for stage, end_times in ((0, times.embedding[TOTAL]), (-1, times.head[TOTAL])):
        for stage_times, seconds in zip((f, b, w), end_times, strict=True):
            stage_times[:, stage] += seconds
    backward = b if shape.splits_backward else b + w
    one_microbatch = f.sum(1) + backward.sum(1) + (num_microbatches - 1) * f.max(1)
    fill = np.cumsum(f[:, :pp], 1) - f[:, :pp]
    drain = np.cumsum(backward[:, :pp], 1) - backward[:, :pp]

    def rank_seconds(stage_times: np.ndarray) -> np.ndarray:
        """Return the seconds of all micro-batches in all chunks of each rank."""
        return num_microbatches * stage_times.reshape(len(stage_times), shape.vpp, pp).sum(1)

    work = rank_seconds(f + b + w)
    ends = work + drain
    if shape.splits_backward:  # weight gradients may run while other ranks drain
        ends = np.maximum(work, work - rank_seconds(w) + drain)
    return float(np.maximum(one_microbatch, (fill + ends).max(1)).min())


def min_dp_time(plan: RunPlan, times: TimeModel, params_by_view: Mapping[str, int]) -> float:
    """Return a lower bound of the mean seconds that a rank spends in collectives over dp at ZeRO stages 2 and 3.

    Args:
        params_by_view: The number of the model's parameters, by mesh view.
    """
    shape = plan.shape
    model, parallel = plan.config.model, plan.config.parallel
    num_end_weights = 2 if model.untie_embeddings_and_output_weights else 1  # backward does not gather these
    end_params = {"dense": num_end_weights * shape.vocab_size * model.hidden_size}
    weight_bytes, grad_bytes, _ = shape.bytes_per_element()
    reduced_bytes = 2 if parallel.grad_reduce_in_bf16 or parallel.grad_reduce_in_fp16 else grad_bytes
    num_reductions, num_unshards = _min_sharding_actions(plan)
    seconds = 0.0
    for view, params in params_by_view.items():
        group = times.group(times.mesh.axis(SHARD_AXES[view][0]).ranks)
        ends = end_params.get(view, 0)
        if parallel.effective_zero_stage < 3:
            gathered = params
        elif shape.sharding_policy.unshard_by_chunk:
            gathered = num_unshards * (params - ends) + ends
        else:
            gathered = shape.num_microbatches * (2 * params - ends)
        num_bytes = num_reductions * reduced_bytes * params + weight_bytes * gathered
        model_shards = math.prod(times.mesh.axis(axis).size for axis in MESH_VIEWS[view][1])
        seconds += times.comm_times.all_gather(num_bytes / model_shards / shape.pp, group)
    return seconds


def _min_sharding_actions(plan: RunPlan) -> tuple[int, int]:
    """Return lower bounds of the REDUCE_GRAD and the UNSHARD of a stage in a step, counted in the schedule's actions.

    Each group of micro-batches after the first ones adds as many as the last and smallest group.
    """
    shape, parallel = plan.shape, plan.config.parallel
    group_size = parallel.microbatch_group_size_per_virtual_pipeline_stage
    groups = microbatch_groups(shape.num_microbatches, shape.pp, group_size)
    schedule = parallel.pipeline_schedule, shape.pp, shape.vpp
    first = _count_sharding_actions(*schedule, (*groups[: SIMULATED_GROUPS - 1],), shape.sharding_policy)
    if len(groups) < SIMULATED_GROUPS:
        num_reductions, num_unshards = first
    else:
        one_more = (*groups[: SIMULATED_GROUPS - 1], groups[-1])
        more = _count_sharding_actions(*schedule, one_more, shape.sharding_policy)
        num_groups = len(groups) - SIMULATED_GROUPS + 1
        num_reductions, num_unshards = (a + num_groups * (b - a) for a, b in zip(first, more, strict=True))
    if shape.splits_backward and shape.vpp > 1:
        num_reductions = 1  # the order of the deferred weight gradients is not known here
    return num_reductions, num_unshards


@functools.cache
def _count_sharding_actions(
    schedule: str, pp: int, vpp: int, groups: tuple[int, ...], policy: ShardingPolicy
) -> tuple[int, int]:
    """Return the smallest numbers of REDUCE_GRAD and UNSHARD of any stage."""
    placement = StagePlacement(pp, vpp)
    counts = Counter[tuple[Op, int]]()
    for rank in range(pp):
        actions = add_sharding_actions(tuple(compute_actions(schedule, rank, placement, groups)), policy)
        counts.update((action.op, action.stage) for action in actions)
    stages = range(placement.num_stages)
    num_reductions, num_unshards = (min(counts[op, stage] for stage in stages) for op in (Op.REDUCE_GRAD, Op.UNSHARD))
    return num_reductions, num_unshards


def min_memory(plan: RunPlan, min_state: MinModelState) -> float:
    """Return a lower bound of the bytes of the fullest rank.

    A split backward holds at least as much as the schedule without it.
    """
    counts, pp, placement = all_splits(plan), plan.shape.pp, plan.shape.placement
    last_stage = placement.num_stages - 1
    saved = plan.balance.stage_costs.saved_bytes(counts)
    weights, gradients, head_unit = _unsharded_bytes(plan)
    layer_peak, last_part = plan.balance.stage_costs.min_peaks
    backward_peak = weights + max(layer_peak, last_part + gradients)
    head_cost = plan.balance.stage_costs.head
    peaks = np.zeros(len(counts))
    for rank in {0, min(1, pp - 1), pp - 1}:
        stages = list(placement.stages_of_rank(rank))
        is_last = rank == pp - 1
        state = min_state.on_rank(counts, rank, placement)
        in_flight = saved[:, stages] @ _in_flight(plan, rank, None)
        head_saved = head_cost.saved_bytes if is_last else 0.0
        has_layers = counts[:, stages].any(1)
        peaks = np.maximum(peaks, state + in_flight + np.where(has_layers, backward_peak - head_saved, 0.0))
        if is_last:
            in_flight = saved[:, stages] @ _in_flight(plan, rank, last_stage)
            head_peak = plan.shape.p2p_bytes + head_unit + head_cost.peak_bytes["F"] - head_cost.saved_bytes
            peaks = np.maximum(peaks, state + in_flight + head_peak)
    return float(peaks.min())


def _unsharded_bytes(plan: RunPlan) -> tuple[float, float, float]:
    """Return the bytes that are unsharded in backward: weights and gradients of the smallest block, both of the head.

    All are 0 for parameters that are always allocated. A split backward has the block's gradients later.
    """
    shape = plan.shape
    mesh = shape.mesh_at(0)
    weight_bytes, grad_bytes, _ = shape.bytes_per_element()
    if plan.config.parallel.effective_zero_stage < 3:
        weight_bytes = 0
    resharded_views = [
        view
        for view in MESH_VIEWS
        if shape.sharding_policy.reduce_every_pass and mesh.axis(SHARD_AXES[view][0]).size > 1
    ]
    numel = _min_matrix_numel(plan.balance.stage_costs, tuple(resharded_views))
    head_has_weights = plan.config.model.untie_embeddings_and_output_weights or shape.pp > 1
    head = 0
    if head_has_weights and "dense" in resharded_views:
        head = shape.padded_vocab // shape.tp * plan.config.model.hidden_size * (weight_bytes + grad_bytes)
    return numel * weight_bytes, 0 if shape.splits_backward else numel * grad_bytes, head


@functools.lru_cache(maxsize=256)
def _min_matrix_numel(costs: StageCosts, views: tuple[str, ...]) -> int:
    """Return the elements of a rank's matrices in the smallest block, of parameters in these mesh views."""
    make_param = costs.setting.param_factory(CostRecorder())

    def matrix_numel(kind: LayerKind) -> int:
        if not views:
            return 0
        params = params_with_specs(Block(make_param, kind.model, 0, kind.spec))
        return sum(param.numel() for spec, param in params if spec.is_2d and spec.mesh_view in views)

    return min(costs.per_layer(matrix_numel))


def _in_flight(plan: RunPlan, rank: int, stage: int | None) -> np.ndarray:
    shape = plan.shape
    parallel = plan.config.parallel
    group_size = parallel.microbatch_group_size_per_virtual_pipeline_stage
    groups = microbatch_groups(shape.num_microbatches, shape.pp, group_size)[:SIMULATED_GROUPS]
    return _peak_in_flight(parallel.pipeline_schedule, shape.pp, shape.vpp, tuple(groups), rank, stage)


@functools.cache
def _peak_in_flight(
    schedule: str, pp: int, chunks: int, groups: tuple[int, ...], rank: int, stage: int | None
) -> np.ndarray:
    """Return the forwards of each chunk that wait for their backward when their sum is largest.

    Args:
        stage: Only consider the times just after a forward of this stage; None: after any forward.
    """
    placement = StagePlacement(pp, chunks)
    actions = compute_actions(schedule, rank, placement, groups)
    changes = np.zeros((len(actions), chunks))
    for i, action in enumerate(actions):
        changes[i, placement.chunk(action.stage)] = memory_change(action.op, UNIT_MEMORY, split=False)
    in_flight = changes.cumsum(0)
    is_considered = [action.op is Op.F and stage in (None, action.stage) for action in actions]
    return in_flight[np.where(is_considered, in_flight.sum(1), -1).argmax()]
