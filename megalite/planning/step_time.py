"""The duration of a training step, by simulation of the schedule that the runtime runs (megalite/pipeline/).

    pipeline    the actions of pipeline/schedule.py, with the durations of planning/stage_time.py. A message takes the
                time of its link, and a rank's messages in one direction follow each other. Of a long step only the
                first groups of micro-batches are simulated, as planning/run_plan.py does for its bubble
    weights     gathered over dp bucket by bucket while the first forwards run; a forward waits for its stage's buckets
    gradients   reduced bucket by bucket from the last backward of a chunk on (optim/zero/sync.py); the time that does
                not overlap with the rank's other work is added
    update      the gradient norm, the all-reduce over all ranks, and the optimizer's step

One rank of each pipeline position is simulated, because all others at that position do the same.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from megalite.optim.zero.layout import DEFAULT_BUCKET_SIZE
from megalite.parallel.spec import MESH_VIEWS, SHARD_AXES
from megalite.pipeline.schedule import ActionCosts, Op
from megalite.pipeline.simulate import Durations, Simulation
from megalite.planning.cluster import Cluster, DeviceProfile, default_profile
from megalite.planning.comm_time import CommGroup, CommTimes
from megalite.planning.layer_kinds import flops_per_token
from megalite.planning.run_plan import RunPlan
from megalite.planning.stage_time import CP_WAIT, TOTAL, TP_WAIT, F, TimeModel
from megalite.planning.step_schedule import SIMULATED_GROUPS


@dataclass(frozen=True)
class StepTime:
    """The predicted duration of a step.

    Attributes:
        seconds: The duration.
        parts: Seconds of compute, bubble, optimizer and exposed tp, cp, pp and dp, as means over the ranks. Their sum
            is `seconds`.
        mfu: The MFU per device by `flops_per_token`, as the trainer logs it.
        tokens_per_s: The tokens per second of the cluster.
        fixed_s: Seconds of `optimizer` that even the smallest step takes.
        muon_s: Seconds of `optimizer` for Newton-Schulz and its exchanges.
    """

    seconds: float
    parts: dict[str, float]
    mfu: float
    tokens_per_s: float
    fixed_s: float
    muon_s: float = 0.0


@dataclass(frozen=True)
class SyncCounts:
    """The number of reductions of a chunk's gradients and of gathers of its weights, per micro-batch.

    Attributes:
        reductions: Reductions of the gradients.
        forward_gathers: Gathers of the weights for forward.
        backward_gathers: Gathers of the weights for backward, which does not read those of embedding and head.
    """

    reductions: float
    forward_gathers: float
    backward_gathers: float


def sync_counts(plan: RunPlan) -> SyncCounts:
    """Return the counts of pipeline/schedule.py: add_sharding_actions, without the shorter passes at a step's ends."""
    parallel = plan.config.parallel
    num_microbatches = plan.shape.num_microbatches
    if plan.shape.vpp == 1:
        pass_size = 1  # micro-batches of a pass
    elif parallel.pipeline_schedule == "breadth-first":
        pass_size = num_microbatches
    else:
        pass_size = plan.shape.group_size
    per_pass = 1 / pass_size
    if parallel.effective_zero_stage < 3:
        return SyncCounts(per_pass, forward_gathers=0.0, backward_gathers=0.0)
    if not plan.shape.sharding_policy.unshard_by_chunk:
        return SyncCounts(per_pass, forward_gathers=1.0, backward_gathers=1.0)
    if plan.shape.vpp == 1:
        return SyncCounts(per_pass, forward_gathers=1 / num_microbatches, backward_gathers=0.0)
    return SyncCounts(per_pass, forward_gathers=per_pass, backward_gathers=per_pass)


def predict_step(plan: RunPlan, cluster: Cluster, profile: DeviceProfile | None = None) -> StepTime:
    """Predict the duration of a step.

    Args:
        plan: The plan of the run.
        cluster: The cluster.
        profile: The profile of the device; None for the default one.

    Raises:
        ValueError: Cluster and plan differ in size, or the dtype has no known peak.
    """
    if cluster.world != plan.shape.world:
        raise ValueError(f"the cluster has {cluster.world} devices, the plan {plan.shape.world} ranks; give as many")
    model = _StepModel(plan, cluster, profile or default_profile(cluster.device.name))
    parts = model.parts()
    seconds = sum(parts.values())
    tokens = plan.shape.batch_sizes.final * plan.config.model.seq_length
    flops = flops_per_token(plan.config.model, plan.shape.padded_vocab) * tokens
    return StepTime(
        seconds,
        parts,
        mfu=flops / (seconds * plan.shape.world * model.peak_flops),
        tokens_per_s=tokens / seconds,
        fixed_s=model.profile.step_s,
        muon_s=model.muon_s,
    )


class _StepModel(TimeModel):
    """The times of the parts of a step.

    Bytes of weights and gradients are arrays over MESH_VIEWS.
    """

    def parts(self) -> dict[str, float]:
        """Return the seconds of the parts of a step."""
        plan = self.plan
        microbatches_per_rank = plan.shape.num_microbatches / plan.shape.pp  # for means over the ranks
        busy, tp, cp = (
            microbatches_per_rank * sum(sum(times[row].tolist()) for times in self.stage_times)
            for row in (TOTAL, TP_WAIT, CP_WAIT)
        )
        costs: list[ActionCosts] = [tuple(times[TOTAL].tolist()) for times in self.stage_times]
        # deferred weight gradients may take long to settle
        num_groups = SIMULATED_GROUPS if plan.balance.split_backward is None else plan.balance.schedule.reported_groups
        delay = self.message_s if plan.shape.pp > 1 else None
        costs_with_sync = [self._with_exposed_sync(stage, cost) for stage, cost in enumerate(costs)]
        ready_times = self.gather_ready_times()
        durations = [Durations(costs), Durations(costs, delay)]
        if ready_times or costs_with_sync != costs:
            durations.append(Durations(costs_with_sync, delay, ready_times))
        simulated = plan.balance.schedule.simulate(durations, num_groups)
        without_comm, with_p2p, with_gathers = (seconds for seconds, _ in (*simulated, simulated[-1])[:3])
        with_gathers = max(with_p2p, with_gathers)
        _, simulation = simulated[-1]
        norm_s, update_s = self.update_s()
        exposed = with_gathers - with_p2p + self.exposed_reduce_s(simulation) + self.exposed_gathers_s
        hidden = max(0.0, self.total_dp_comm_s - exposed)
        # the ranks agree on a few numbers
        agreement_s = self.comm_times.all_reduce(64, self.group(range(plan.shape.world)))
        return {
            "compute": busy - tp - cp,
            "bubble": without_comm - busy,
            "tp": tp,
            "cp": cp,
            "pp": with_p2p - without_comm,
            "dp": exposed + self.profile.contention * hidden + agreement_s + self.tied_grad_s,
            "optimizer": norm_s + update_s + self.profile.step_s,
        }

    def message_s(self, source: int, target: int) -> float:
        """Return the time of a message between two pipeline ranks: this tp rank's shard of the hidden states."""
        ranks = self.mesh.pp.ranks
        times = CommTimes.with_measured(self.cluster, self.profile.message)
        return times.p2p(self.plan.shape.p2p_bytes, ranks[source], ranks[target])

    @cached_property
    def _weight_itemsize(self) -> int:
        return self.plan.shape.dtype.itemsize

    @cached_property
    def _grad_itemsize(self) -> int:
        """The bytes of an element of the gradient sums."""
        return self.plan.shape.bytes_per_element()[1]

    @cached_property
    def _reduced_fraction(self) -> float:
        """The fraction of the gradients' bytes that is sent: half of them if fp32 is reduced in bf16."""
        in_bf16 = self.plan.config.parallel.grad_reduce_in_bf16 and self._grad_itemsize == 4
        return 0.5 if in_bf16 else 1.0

    @cached_property
    def _groups(self) -> list[tuple[CommGroup, CommGroup]]:
        """For each mesh view, the ranks that shard the optimizer state, and the ranks with replicas of a shard."""
        groups = []
        for view in MESH_VIEWS:
            shard_axis, replicate_axis = (self.mesh.axis(name) for name in SHARD_AXES[view])
            groups.append((self.group(shard_axis.ranks), self.group(replicate_axis.ranks)))
        return groups

    @property
    def _no_dp(self) -> bool:
        return all(shard_group.size == 1 for shard_group, _ in self._groups)

    @property
    def _gathers_once(self) -> bool:
        """The weights are gathered once per step, and not for each pass."""
        return self.plan.config.parallel.effective_zero_stage < 3

    def _chunk_bytes(self, rank: int, itemsize: int, with_ends: bool = True) -> list[np.ndarray]:
        """Return the bytes of the weights or gradients of each chunk of a pipeline rank.

        Layers are in their chunk. Embedding, head and padding are the rest of the rank's bytes, in its first chunk or,
        on the last rank, in its last chunk.

        Args:
            rank: The pipeline rank.
            itemsize: The bytes of an element.
            with_ends: Include embedding, head and padding.
        """
        plan = self.plan
        model_state = plan.model_states.by_rank[rank]
        numel_by_layer = np.array(plan.model_states.numel_by_layer)
        total = itemsize * np.array([model_state.padded_numel[view] for view in MESH_VIEWS])
        chunks = []
        for stage in plan.shape.placement.stages_of_rank(rank):
            layers = plan.balance.layer_ranges[stage]
            chunks.append(numel_by_layer[layers.start : layers.stop].sum(0) * (total.sum() / model_state.local_numel))
        if with_ends:
            chunk_of_ends = -1 if rank == plan.shape.pp - 1 else 0
            chunks[chunk_of_ends] += np.maximum(0.0, total - sum(chunks))
        return chunks

    def _num_buckets(self, num_bytes: float | np.ndarray, itemsize: int) -> int:
        bucket_size = self.plan.config.parallel.ddp_bucket_size
        if bucket_size is None:
            bucket_size = DEFAULT_BUCKET_SIZE
        return max(1, math.floor(np.sum(num_bytes) / itemsize / bucket_size))

    def _gather_s(self, num_bytes: np.ndarray, num_buckets: int | None = None) -> float:
        """Return the time of gathering weights, one bucket after another."""
        seconds = 0.0
        for view_bytes, (shard_group, _) in zip(num_bytes, self._groups, strict=True):
            if view_bytes:
                n = num_buckets or self._num_buckets(view_bytes, self._weight_itemsize)
                seconds += n * self.comm_times.all_gather(view_bytes / n, shard_group)
        return seconds

    def _reduce_s(self, num_bytes: np.ndarray, num_buckets: int | None = None, with_replicas: bool = True) -> float:
        """Return the time of reducing gradients, one bucket after another, if all of their bytes are sent.

        `with_replicas` includes the all-reduce over replicas, which takes place once per step.
        """
        seconds = 0.0
        for view_bytes, (shard_group, replicate_group) in zip(num_bytes, self._groups, strict=True):
            if not view_bytes:
                continue
            n = num_buckets or self._num_buckets(view_bytes, self._grad_itemsize)
            if shard_group.size == 1:
                seconds += n * self.comm_times.all_reduce(view_bytes / n, replicate_group)
                continue
            seconds += n * self.comm_times.reduce_scatter(view_bytes / n, shard_group)
            if with_replicas:
                seconds += self.comm_times.all_reduce(view_bytes / shard_group.size, replicate_group)
        return seconds

    def _with_exposed_sync(self, stage: int, cost: ActionCosts) -> ActionCosts:
        """Return F, B and W of a stage with the exposed time of reductions and gathers during them (ZeRO-2 and 3).

        A collective is exposed for the time that it takes longer than the computation that it overlaps with; without
        overlap, for all of its time. The micro-batches of a pass share its collectives.
        """
        plan, parallel = self.plan, self.plan.config.parallel
        if not plan.shape.sharding_policy.reduce_every_pass or self._no_dp:
            return cost
        rank, chunk = plan.shape.placement.rank(stage), plan.shape.placement.chunk(stage)
        num_units = max(1, len(plan.balance.layer_ranges[stage]))
        counts = sync_counts(plan)
        weight_bytes = self._chunk_bytes(rank, self._weight_itemsize)[chunk]
        layer_weight_bytes = self._chunk_bytes(rank, self._weight_itemsize, with_ends=False)[chunk]
        grad_bytes = self._chunk_bytes(rank, self._grad_itemsize)[chunk]
        forward_gather_s = counts.forward_gathers * self._gather_s(weight_bytes, num_units)
        backward_gather_s = counts.backward_gathers * self._gather_s(layer_weight_bytes, num_units)
        reduce_s = self._reduced_fraction * self._reduce_s(grad_bytes, num_units, with_replicas=False)
        reduce_s *= counts.reductions
        f, b, w = cost
        forward_exposed = forward_gather_s
        backward_exposed = 0.0
        backward_overlapped = 0.0
        if parallel.overlap_param_gather:
            forward_exposed = max(0.0, forward_gather_s - f)
            backward_overlapped += backward_gather_s
        else:
            backward_exposed += backward_gather_s
        if parallel.overlap_grad_reduce:
            backward_overlapped += reduce_s
        else:
            backward_exposed += reduce_s
        backward_exposed += max(0.0, backward_overlapped - (b + w if plan.balance.split_backward is None else b))
        return f + forward_exposed, b + backward_exposed, w

    def gather_ready_times(self) -> Mapping[int, float]:
        """Return stage -> time at which its first forward may start so that no layer of it waits for its bucket.

        The result is empty if gathers do not overlap with forwards, or if there is nothing to gather.
        """
        plan = self.plan
        if self._no_dp or not plan.config.parallel.overlap_param_gather or not self._gathers_once:
            return {}
        ready_times: dict[int, float] = {}
        for rank in range(plan.shape.pp):
            now = 0.0
            stages = plan.shape.placement.stages_of_rank(rank)
            for stage, num_bytes in zip(stages, self._chunk_bytes(rank, self._weight_itemsize), strict=True):
                num_buckets = self._num_buckets(num_bytes, self._weight_itemsize)
                bucket_s = self._gather_s(num_bytes, num_buckets) / num_buckets
                forward_s = float(self.stage_times[stage][TOTAL, F]) / num_buckets  # of the layers of a bucket
                ready_times[stage] = max(now + (k + 1) * bucket_s - k * forward_s for k in (0, num_buckets - 1))
                now += num_buckets * bucket_s
        return ready_times

    @property
    def exposed_gathers_s(self) -> float:
        """The time of gathers that do not overlap with anything, once per step."""
        if self.plan.config.parallel.overlap_param_gather or not self._gathers_once:
            return 0.0
        return max(
            sum(self._gather_s(num_bytes) for num_bytes in self._chunk_bytes(rank, self._weight_itemsize))
            for rank in range(self.plan.shape.pp)
        )

    def exposed_reduce_s(self, simulation: Simulation) -> float:
        """Return the time from the end of the pipeline to the end of the reductions.

        It assumes that a chunk's buckets become ready at equal intervals during its last backward.
        """
        plan = self.plan
        grad_op = Op.B if plan.balance.split_backward is None else Op.W
        last_grads: dict[int, tuple[float, float]] = {}  # stage -> start and end of the computation of its last ones
        for span in simulation.spans:
            if span.action.op is grad_op:
                stage = span.action.stage
                last_grads[stage] = max(last_grads.get(stage, (0.0, 0.0)), (span.start, span.end))
        exposed = 0.0
        for rank in range(plan.shape.pp):
            stages = plan.shape.placement.stages_of_rank(rank)
            bytes_of_stage = dict(zip(stages, self._chunk_bytes(rank, self._grad_itemsize), strict=True))
            done = 0.0
            for stage in sorted(stages, key=lambda stage: last_grads[stage]):
                start, end = last_grads[stage]
                if not plan.config.parallel.overlap_grad_reduce:
                    start = end = simulation.end
                num_bytes = bytes_of_stage[stage]
                if plan.shape.sharding_policy.reduce_every_pass:
                    done = max(done, end) + self._after_last_pass(stage, num_bytes) * self._reduced_fraction
                    continue
                reduce_s = self._reduce_s(num_bytes) * self._reduced_fraction
                num_buckets = self._num_buckets(num_bytes, self._grad_itemsize)
                first_ready = start + (end - start) / num_buckets
                done = max(done + reduce_s, first_ready + reduce_s, end + reduce_s / num_buckets)
            exposed = max(exposed, done - simulation.end)
        return exposed

    def _after_last_pass(self, stage: int, num_bytes: np.ndarray) -> float:
        """Return the time of what is left of a stage's reductions when its last backward ends.

        This is the last unit's reduction, and the all-reduce over replicas. The durations of `_with_exposed_sync`
        include the rest.
        """
        num_units = max(1, len(self.plan.balance.layer_ranges[stage]))
        sharded_s = self._reduce_s(num_bytes, num_units, with_replicas=False)
        remaining_s = self._reduce_s(num_bytes, num_units) - sharded_s
        if self.plan.config.parallel.overlap_grad_reduce:
            remaining_s += self._reduce_s(num_bytes / num_units, num_buckets=1, with_replicas=False)
        return remaining_s

    @property
    def total_dp_comm_s(self) -> float:
        """The time of all collectives over dp in a step on the busiest rank, exposed or not."""
        plan = self.plan
        counts = sync_counts(plan)
        num_microbatches = plan.shape.num_microbatches
        num_passes = num_microbatches * counts.reductions if plan.shape.sharding_policy.reduce_every_pass else 1

        def rank_s(rank: int) -> float:
            weight_bytes = np.sum(self._chunk_bytes(rank, self._weight_itemsize), 0)
            layer_weight_bytes = np.sum(self._chunk_bytes(rank, self._weight_itemsize, with_ends=False), 0)
            grad_bytes = np.sum(self._chunk_bytes(rank, self._grad_itemsize), 0)
            if self._gathers_once:
                gather_s = self._gather_s(weight_bytes)
            else:
                gather_s = num_microbatches * counts.forward_gathers * self._gather_s(weight_bytes)
                gather_s += num_microbatches * counts.backward_gathers * self._gather_s(layer_weight_bytes)
            reduce_s = self._reduce_s(grad_bytes)
            reduce_s += (num_passes - 1) * self._reduce_s(grad_bytes, with_replicas=False)
            return gather_s + self._reduced_fraction * reduce_s

        return max(map(rank_s, range(plan.shape.pp)))

    @property
    def tied_grad_s(self) -> float:
        """The time of summing a rank's shard of a tied embedding's gradient over both ends of the pipeline."""
        plan, model = self.plan, self.plan.config.model
        if plan.shape.pp == 1 or model.untie_embeddings_and_output_weights:
            return 0.0
        dense_shard_group, _ = self._groups[0]
        numel = plan.shape.padded_vocab * model.hidden_size / plan.shape.tp
        num_bytes = numel * self._grad_itemsize / dense_shard_group.size
        return self.comm_times.all_reduce(num_bytes, self.group(self.mesh.tied_embedding.ranks))
