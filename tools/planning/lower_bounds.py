"""Seconds and bytes that no balance of the stages which a run may choose is below.

Both are computed of all splits of the layers that there are to choose from at once, as arrays [splits, stages]; the
least counts. They are bounds, not estimates: no padding, no messages, no collectives of dp, no optimizer.

    time    a rank idles until the first forward has come down to it, then works through all micro-batches, and its last
            backward has yet to go up; and every micro-batch goes through all stages
    memory  weights, gradients and optimizer of its layers, what its schedule has in flight at most, and a whole unit
"""

import functools
import itertools
import math
from collections.abc import Mapping

import numpy as np

from megalite.models.gpt import Block
from megalite.nn.parameter import params_with_specs
from megalite.parallel.spec import MESH_VIEWS, SHARD_AXES
from megalite.pipeline.schedule import (
    UNIT_MEMORY,
    Op,
    StagePlacement,
    compute_actions,
    memory_change,
    microbatch_groups,
)
from megalite.planning.layer_cost import CostRecorder
from megalite.planning.layer_kinds import LayerKind, StageCosts
from megalite.planning.model_state import ModuleStateBytes
from megalite.planning.run_plan import RunPlan
from megalite.planning.stage_time import TOTAL, TimeModel
from megalite.planning.step_time import sync_counts

GROUPS = 3  # of micro-batches; with 1F1B what is held does not grow after them


def possible(made: RunPlan) -> np.ndarray:
    """[splits, stages]: layers of every stage, of all splits that the run chooses from."""
    return np.array([given]) if len(given := made.fixed_split) else _table(tuple(made.candidate_splits))


@functools.lru_cache(maxsize=256)
def _table(splits: tuple[tuple[int, ...], ...]) -> np.ndarray:
    return np.array(splits)


def least_time(made: RunPlan, costs: TimeModel) -> float:
    """Seconds of a step."""
    counts, pp, m = possible(made), made.pp, made.num_microbatches
    stops = counts.cumsum(1)
    f, b, w = np.moveaxis(
        costs.layer_times.between(stops - counts, stops)[..., TOTAL, :], -1, 0
    )  # each [splits, stages], of one
    for stage, end in ((0, costs.embedding[TOTAL]), (-1, costs.head[TOTAL])):
        for part, seconds in zip((f, b, w), end, strict=True):
            part[:, stage] += seconds
    back = b if made.splits_backward else b + w
    most = f.sum(1) + back.sum(1) + (m - 1) * f.max(1)
    of_rank = lambda x: m * x.reshape(len(x), made.vpp, pp).sum(1)  # noqa: E731
    fill, drain = (np.cumsum(x[:, :pp], 1) - x[:, :pp] for x in (f, back))
    work = of_rank(f + b + w)
    # W may run while others drain
    ends = np.maximum(work, work - of_rank(w) + drain) if made.splits_backward else work + drain
    return float(np.maximum(most, (fill + ends).max(1)).min())


def least_exchange(made: RunPlan, costs: TimeModel, parameters: Mapping[str, int]) -> float:
    """Seconds that the mean rank exchanges over dp at ZeRO stages 2 and 3. `parameters`: of the model, by home."""
    m, p = made.config.model, made.config.parallel
    ends = {"dense": (1 + m.untie_embeddings_and_output_weights) * made.vocab_size * m.hidden_size}
    weight, gradient, _ = made.bytes_per_element()
    often, sent, seconds = sync_counts(made), 2 if p.grad_reduce_in_bf16 else gradient, 0.0
    for home, n in parameters.items():
        group = costs.group(costs.mesh.axis(SHARD_AXES[home][0]).ranks)
        backward = often.backward_gathers * (n - ends.get(home, 0))
        once = often.reductions * sent * n + weight * (often.forward_gathers * n + backward)
        split = math.prod(costs.mesh.axis(axis).size for axis in MESH_VIEWS[home][1])
        seconds += costs.links.all_gather(once / split / made.pp, group)
    return made.num_microbatches * seconds


def least_memory(made: RunPlan, modules: ModuleStateBytes) -> float:
    """Bytes of the fullest rank. A split backward holds as much as the schedule without it, or more."""
    counts, pp, place = possible(made), made.pp, made.placement
    m, last, edge = made.config.model, made.placement.num_stages - 1, made.p2p_bytes
    if pp == 1 and not m.untie_embeddings_and_output_weights:
        modules = modules._replace(head=0.0)  # its weights are the embedding's
    held, (weights, gradients, head_unit) = made.stage_costs.saved_bytes(counts), _whole(made)
    moment, last_part = made.stage_costs.min_peaks
    moment = weights + max(moment, last_part + gradients)
    most = np.zeros(len(counts))
    for rank in {0, min(1, pp - 1), pp - 1}:
        stages = list(place.stages_of_rank(rank))
        whole = modules.on_rank(counts, rank, place)
        alive = held[:, stages] @ _in_flight(made, rank, None)
        head = made.stage_costs.head.saved_bytes if rank == pp - 1 else 0.0
        most = np.maximum(most, whole + alive + np.where(counts[:, stages].any(1), moment - head, 0.0))
        if rank == pp - 1:
            alive = held[:, stages] @ _in_flight(made, rank, last)
            more = edge + head_unit + made.stage_costs.head.peak_bytes["F"] - made.stage_costs.head.saved_bytes
            most = np.maximum(most, whole + alive + more)
    return float(most.min())


def _whole(made: RunPlan) -> tuple[float, float, float]:
    """Bytes of weights and of gradients that are whole in backward of the smallest block, and of both in the head's,
    where they come and go. A split backward has the gradients later."""
    weight, gradient, _ = made.bytes_per_element()
    weight, mesh = weight * (made.config.parallel.effective_zero_stage > 2), made.mesh_at(0)
    come = tuple(
        made.sharding_policy.reduce_every_pass and mesh.axis(SHARD_AXES[home][0]).size > 1 for home in MESH_VIEWS
    )
    own = made.config.model.untie_embeddings_and_output_weights or made.pp > 1
    head = made.padded_vocab // made.tp * made.config.model.hidden_size * (weight + gradient) * own
    least = _least_matrices(made.stage_costs, come)
    return least * weight, least * gradient * (not made.splits_backward), come[0] * head


@functools.lru_cache(maxsize=256)
def _least_matrices(layers: StageCosts, come: tuple[bool, ...]) -> int:
    """Elements of the matrices of the smallest block on a rank, of those homes that come and go."""
    make, homes = layers.setting.param_factory(CostRecorder()), [*itertools.compress(MESH_VIEWS, come)]

    def of(kind: LayerKind) -> int:
        specs = params_with_specs(Block(make, kind, 0)) if homes else []
        return sum(p.numel() for spec, p in specs if spec.is_2d and spec.mesh_view in homes)

    return min(layers.per_layer(of))


def _in_flight(made: RunPlan, rank: int, stage: int | None) -> np.ndarray:
    p = made.config.parallel
    groups = microbatch_groups(made.num_microbatches, made.pp, p.microbatch_group_size_per_virtual_pipeline_stage)[
        :GROUPS
    ]
    return _most_alive(p.pipeline_schedule, made.pp, made.vpp, tuple(groups), rank, stage)


@functools.cache
def _most_alive(
    schedule: str, pp: int, chunks: int, groups: tuple[int, ...], rank: int, stage: int | None
) -> np.ndarray:
    """Forwards of each chunk that wait for their backward when most of them do; just after a forward of `stage`, if
    one is given."""
    row = compute_actions(schedule, rank, place := StagePlacement(pp, chunks), groups)
    more = np.zeros((len(row), chunks))
    for i, action in enumerate(row):
        more[i, place.chunk(action.stage)] = memory_change(action.op, UNIT_MEMORY, split=False)
    alive = more.cumsum(0)
    counts = [action.op is Op.F and stage in (None, action.stage) for action in row]
    return alive[np.where(counts, alive.sum(1), -1).argmax()]
