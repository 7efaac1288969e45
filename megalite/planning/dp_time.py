"""The times of a step's collectives over dp: gathers of weights, reductions of gradients, by the units of each stage.

With ZeRO-2 and 3, a unit is the embedding, a layer, a depth of multi-token prediction or the head, whose buckets have
the sizes of the run. Otherwise it is a bucket of --ddp-bucket-size elements, and the buckets of a stage are taken as
equal. pipeline/param_sync_time.py says when the collectives start and what waits for them.
"""

import itertools
import math
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from megalite.optim.zero.layout import DEFAULT_BUCKET_SIZE
from megalite.parallel.spec import MESH_VIEWS, SHARD_AXES
from megalite.pipeline.param_sync_time import StageSync, SyncUnit
from megalite.planning.comm_time import CommGroup
from megalite.planning.model_state import UnitBucket
from megalite.planning.run_plan import RunPlan
from megalite.planning.stage_time import TOTAL, TimeModel


class _UnitUse(NamedTuple):
    """A use of weights in a forward: the units that have them, and the seconds of F, B and W, an array."""

    names: tuple[str, ...]
    cost: np.ndarray
    is_end: bool = False


def _by_view(bucket: UnitBucket, value: int) -> np.ndarray:
    """Return an array over MESH_VIEWS with the value of a bucket."""
    return np.array([value if view == bucket.mesh_view else 0 for view in MESH_VIEWS])


@dataclass(frozen=True)
class DpTimes:
    """The times of the collectives over dp of a plan.

    Numbers of elements, and of their bytes, are arrays over MESH_VIEWS.
    """

    times: TimeModel

    @property
    def plan(self) -> RunPlan:
        return self.times.plan

    @cached_property
    def _groups(self) -> list[tuple[CommGroup, CommGroup]]:
        """For each mesh view, the ranks that shard the optimizer state, and the ranks with replicas of a shard."""
        groups = []
        for view in MESH_VIEWS:
            shard_axis, replicate_axis = (self.times.mesh.axis(name) for name in SHARD_AXES[view])
            groups.append((self.times.group(shard_axis.ranks), self.times.group(replicate_axis.ranks)))
        return groups

    @cached_property
    def _grad_itemsize(self) -> int:
        """The bytes of an element of the gradient sums."""
        return self.plan.shape.bytes_per_element()[1]

    @cached_property
    def _is_resharded(self) -> bool:
        """Gradients, and with ZeRO-3 also weights, are freed unit by unit."""
        is_sharded = any(shard_group.size > 1 for shard_group, _ in self._groups)
        return self.plan.shape.sharding_policy.reduce_every_pass and is_sharded

    @property
    def _reshards_weights(self) -> bool:
        return self._is_resharded and self.plan.config.parallel.effective_zero_stage > 2

    @cached_property
    def stage_syncs(self) -> tuple[StageSync, ...] | None:
        """The collectives of every stage; None without data parallelism."""
        if all(shard_group.size == replicate_group.size == 1 for shard_group, replicate_group in self._groups):
            return None
        return tuple(self._stage_sync(stage) for stage in range(self.plan.shape.placement.num_stages))

    def _stage_sync(self, stage: int) -> StageSync:
        parallel, shape = self.plan.config.parallel, self.plan.shape
        units, finish_s = self._model_units(stage) if self._is_resharded else self._buckets(stage)
        if not (parallel.overlap_grad_reduce or self._is_resharded):
            finish_s += sum(unit.reduce_s for unit in units)
            units = [unit._replace(reduce_s=0.0) for unit in units]
        return StageSync(
            units=tuple(units),
            splits_backward=shape.splits_backward,
            gathers_by_unit=self._reshards_weights and not shape.sharding_policy.unshard_by_chunk,
            reshards_weights=self._reshards_weights,
            reshards_grads=self._is_resharded,
            overlaps_gather=parallel.overlap_param_gather,
            overlaps_reduce=parallel.overlap_grad_reduce,
            finish_s=finish_s,
        )

    def _model_units(self, stage: int) -> tuple[list[SyncUnit], float]:
        """Return the units of a stage in order of use, and the time of its collectives at the end of the step."""
        plan, times, model = self.plan, self.times, self.plan.config.model
        unit_buckets = plan.model_states.by_rank[plan.shape.placement.rank(stage)].unit_buckets
        layers = plan.balance.layer_ranges[stage]
        stops = np.arange(layers.start, layers.stop + 1)
        # differences of sums, because a sum also has the parts that several layers share
        costs = np.diff(times.layer_times.between(np.full_like(stops, layers.start), stops)[:, TOTAL], axis=0)
        uses = [
            _UnitUse((model.layers[index].unit_name(model.layer_numbers[index]),), cost)
            for index, cost in zip(layers, costs, strict=True)
        ]
        if stage == 0:
            uses.insert(0, _UnitUse(("embedding",), times.embedding[TOTAL], is_end=True))
        if stage == plan.shape.placement.num_stages - 1:
            if model.num_mtp_depths:
                uses.append(_UnitUse(("embedding",), model.num_mtp_depths * times.embedding[TOTAL], is_end=True))
            for depth, depth_times in enumerate(times.mtp_layers):
                numbers = model.mtp_layer_numbers[min(depth, len(model.mtp_layer_numbers) - 1)]
                names = [spec.unit_name(number) for number, spec in zip(numbers, model.mtp_layers, strict=True)]
                uses.append(_UnitUse(tuple(dict.fromkeys(names)), depth_times[TOTAL]))
            head_unit = "head" if "head" in unit_buckets else "embedding"  # it may share the embedding's weight
            uses.append(_UnitUse((head_unit,), times.head[TOTAL], is_end=True))

        units = []
        used: set[str] = set()
        finish_s = 0.0
        for use in uses:
            # a weight that is used again is gathered again if it was resharded; its gradient is reduced once, which is
            # counted at the first use: there the backward ends
            is_first = used.isdisjoint(use.names)
            used.update(use.names)
            gather_s = reduce_s = 0.0
            for bucket in itertools.chain.from_iterable(unit_buckets.get(name, ()) for name in use.names):
                if is_first or self._reshards_weights:
                    gather_s += self._gather_s(_by_view(bucket, bucket.weight_bytes))
                if is_first:
                    reduce_s += self._reduce_s(_by_view(bucket, bucket.numel * bucket.reduce_itemsize))
                    finish_s += self._replicas_s(_by_view(bucket, bucket.numel))
            f, b, w = use.cost.tolist()
            units.append(SyncUnit((f, b, w), gather_s, reduce_s, use.is_end))
        return units, finish_s

    def _buckets(self, stage: int) -> tuple[list[SyncUnit], float]:
        """Return the buckets of a stage, and the time of its collectives at the end of the step."""
        numel = self._stage_numel(stage)
        bucket_size = self.plan.config.parallel.ddp_bucket_size or DEFAULT_BUCKET_SIZE
        num_buckets = max(1, math.floor(numel.max() / bucket_size))
        f, b, w = (self.times.stage_times[stage][TOTAL] / num_buckets).tolist()
        bucket_numel = numel / num_buckets
        reduce_s = self._reduce_s(bucket_numel * self._mean_reduce_itemsizes(stage))
        bucket = SyncUnit((f, b, w), self._gather_s(bucket_numel * self.plan.shape.dtype.itemsize), reduce_s)
        return [bucket] * num_buckets, num_buckets * self._replicas_s(bucket_numel)

    def _stage_numel(self, stage: int) -> np.ndarray:
        """Return the number of elements of a stage. Padding is in the first stage of a rank, or in the model's last.

        That stage has the embedding or the head, if the rank has it.
        """
        plan, placement = self.plan, self.plan.shape.placement
        rank = placement.rank(stage)
        stages = placement.stages_of_rank(rank)
        numel_by_layer = np.array(plan.model_states.numel_by_layer)
        numels = {}
        for other in stages:
            layers = plan.balance.layer_ranges[other]
            numels[other] = numel_by_layer[layers.start : layers.stop].sum(0)
        padded_numel = np.array([plan.model_states.by_rank[rank].padded_numel[view] for view in MESH_VIEWS])
        stage_of_ends = stages[-1] if rank == placement.pp - 1 else stages[0]
        if stage == stage_of_ends:
            return numels[stage] + np.maximum(0, padded_numel - sum(numels.values()))
        return numels[stage]

    def _mean_reduce_itemsizes(self, stage: int) -> np.ndarray:
        """Return the bytes of an element in a reduction over dp, the mean of the buckets on the rank of a stage.

        With --grad-reduce-in-bf16, buckets of weights that stay in fp32 are still reduced in fp32.
        """
        model_state = self.plan.model_states.by_rank[self.plan.shape.placement.rank(stage)]
        return np.array([model_state.reduce_bytes[v] / max(1, model_state.padded_numel[v]) for v in MESH_VIEWS])

    def _gather_s(self, num_bytes_by_view: np.ndarray) -> float:
        """Return the time of gathering the weights of a bucket."""
        seconds = 0.0
        for num_bytes, (shard_group, _) in zip(num_bytes_by_view.tolist(), self._groups, strict=True):
            if num_bytes and shard_group.size > 1:
                seconds += self.times.comm_times.all_gather(num_bytes, shard_group)
        return seconds

    def _reduce_s(self, num_bytes_by_view: np.ndarray) -> float:
        """Return the time of reducing the gradients of a bucket over the ranks that shard them, or all replicas."""
        comm_times = self.times.comm_times
        seconds = 0.0
        for num_bytes, (shard_group, replicate_group) in zip(num_bytes_by_view.tolist(), self._groups, strict=True):
            if num_bytes and shard_group.size > 1:
                seconds += comm_times.reduce_scatter(num_bytes, shard_group)
            elif num_bytes and replicate_group.size > 1:
                seconds += comm_times.all_reduce(num_bytes, replicate_group)
        return seconds

    def _replicas_s(self, numel: np.ndarray) -> float:
        """Return the time of summing a bucket's shards over their replicas, once at the end of a step."""
        seconds = 0.0
        for view_numel, (shard_group, replicate_group) in zip(numel.tolist(), self._groups, strict=True):
            if view_numel and shard_group.size > 1 and replicate_group.size > 1:
                num_bytes = view_numel * self._grad_itemsize / shard_group.size
                seconds += self.times.comm_times.all_reduce(num_bytes, replicate_group)
        return seconds

    @property
    def tied_grad_s(self) -> float:
        """The time of summing a rank's shard of a tied embedding's gradient over both ends of the pipeline."""
        plan, model = self.plan, self.plan.config.model
        if plan.shape.pp == 1 or model.untie_embeddings_and_output_weights:
            return 0.0
        dense_shard_group, _ = self._groups[0]
        numel = plan.shape.padded_vocab * model.hidden_size / plan.shape.tp
        num_bytes = numel * self._grad_itemsize / dense_shard_group.size
        return self.times.comm_times.all_reduce(num_bytes, self.times.group(self.times.mesh.tied_embedding.ranks))
