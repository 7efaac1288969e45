"""Seconds of a training step, by simulation of the schedule that the runtime runs (megalite/pipeline/).

    pipeline    the actions of pipeline/schedule.py with the durations of planning/stage_time.py; a message takes its
                link's time, and a rank's messages in one direction follow each other. Only the first groups of
                micro-batches of a long step are simulated, as planning/run_plan.py does for its bubble
    weights     gathered over dp bucket by bucket while the first forwards run; no forward before its stage's buckets
    gradients   reduced bucket by bucket from the last backward of a chunk on (optim/grad_reduce.py); the time that is
                not hidden behind the rank's other work is added
    update      norm, the one agreement of all ranks, the optimizer's step

It looks at one rank of each pipeline position, because all others there do the same.
"""

import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from megalite.optim.buffer import DEFAULT_BUCKET_SIZE
from megalite.parallel.spec import MESH_VIEWS, SHARD_AXES
from megalite.pipeline.schedule import ActionCosts, Op
from megalite.pipeline.simulate import Simulation
from megalite.planning.cluster import Cluster, DeviceProfile, default_profile
from megalite.planning.comm_time import CommGroup, CommTimes
from megalite.planning.layer_kinds import flops_per_token
from megalite.planning.run_plan import SIMULATED_GROUPS, RunPlan
from megalite.planning.stage_time import TOTAL, F, TimeModel


class StepTime(NamedTuple):
    """parts      seconds, means over ranks, that sum to `seconds`: compute, bubble, optimizer, exposed tp, cp, pp, dp
    mfu           MFU per device by model_flops, causal, as the trainer logs it
    tokens_per_s  tokens/s of the whole cluster
    fixed         seconds of `optimizer` that even the smallest step takes
    matrices      seconds of `optimizer` that Newton-Schulz takes, and the exchange for it
    """

    seconds: float
    parts: dict[str, float]
    mfu: float
    tokens_per_s: float
    fixed_s: float
    muon_s: float = 0.0


class SyncCounts(NamedTuple):
    """How often, for each micro-batch, the gradients of a chunk are reduced, and its weights gathered for forward and
    for backward, where they come and go. Backward does not read the weights of the model's ends."""

    reductions: float
    forward_gathers: float
    backward_gathers: float


def sync_counts(plan: RunPlan) -> SyncCounts:
    """What pipeline/schedule.py: with_sharing comes to, without the shorter runs of a step's begin and end."""
    p, m = plan.config.parallel, plan.num_microbatches
    run = 1 if plan.vpp == 1 else m if p.pipeline_schedule == "breadth-first" else plan.group_size
    if p.effective_zero_stage < 3:
        return SyncCounts(1 / run, 0.0, 0.0)
    if not plan.sharding_policy.unshard_by_chunk:
        return SyncCounts(1 / run, 1.0, 1.0)
    return SyncCounts(1 / run, 1 / m, 0.0) if plan.vpp == 1 else SyncCounts(1 / run, 1 / run, 1 / run)


def predict_step(plan: RunPlan, cluster: Cluster, profile: DeviceProfile | None = None) -> StepTime:
    """Predict a step. Raises ValueError if cluster and arrangement differ in size, or the dtype has no peak."""
    if cluster.world != plan.world:
        raise ValueError(f"the cluster has {cluster.world} devices, the arrangement {plan.world} ranks; give as many")
    step = _StepModel(plan, cluster, profile or default_profile(cluster.device.name))
    parts = step.parts()
    seconds = sum(parts.values())
    tokens = plan.batch_sizes.final * plan.config.model.seq_length
    flops = flops_per_token(plan.config.model, plan.padded_vocab) * tokens
    mfu, fixed_parts = flops / (seconds * plan.world * step.peak_flops), (step.profile.step_s, step.muon_s)
    return StepTime(seconds, parts, mfu, tokens / seconds, *fixed_parts)


class _StepModel(TimeModel):
    def parts(self) -> dict[str, float]:
        plan, stages = self.plan, [times.tolist() for times in self.stage_times]
        each = plan.num_microbatches / plan.pp
        busy, tp, cp = (each * sum(sum(seconds) for seconds in of_stages) for of_stages in zip(*stages, strict=True))
        costs: list[ActionCosts] = [(f, b, w) for (f, b, w), *_ in stages]
        slowed = [self._with_exposed_sync(number, cost) for number, cost in enumerate(costs)]
        groups = (
            SIMULATED_GROUPS if plan.split_backward is None else plan.reported_groups
        )  # what waits of a split backward may take long to settle
        without_comm, simulation = plan.simulate_step(costs, plan.split_backward, groups)
        with_p2p, more = without_comm, {}
        if plan.pp > 1:
            more = {"delay": self.delay}
            with_p2p, simulation = plan.simulate_step(costs, plan.split_backward, groups, **more)
        with_gathers, begin = with_p2p, self.gather_ready_times()
        if begin or slowed != costs:
            slow, simulation = plan.simulate_step(slowed, plan.split_backward, groups, earliest_start=begin, **more)
            with_gathers = max(with_p2p, slow)
        norm, update = self.update_s()
        exposed = with_gathers - with_p2p + self.exposed_reduce_s(simulation) + self.exposed_gathers_s
        hidden = max(0.0, self.total_dp_comm_s - exposed)
        agreement = self.comm_times.all_reduce(64, self.group(range(plan.world)))  # a few numbers
        dp = exposed + self.profile.contention * hidden + agreement + self.tied_grad_s
        parts = {
            "compute": busy - tp - cp,
            "bubble": without_comm - busy,
            "tp": tp,
            "cp": cp,
            "pp": with_p2p - without_comm,
            "dp": dp,
        }
        return parts | {"optimizer": norm + update + self.profile.step_s}

    def delay(self, source: int, target: int) -> float:
        """Seconds of a message between two pipeline ranks: this tp rank's part of the hidden states."""
        ranks = self.mesh.pp.ranks
        return CommTimes.with_measured(self.cluster, self.profile.message).p2p(
            self.plan.p2p_bytes, ranks[source], ranks[target]
        )

    def _chunk_bytes(self, rank: int, size: int, ends: bool = True) -> list[np.ndarray]:
        """Bytes of the weights or gradients, of `size` bytes each, by home, of each chunk of a pipeline rank, in order.
        Those of the layers are in their chunk, the rest of the rank's, with `ends`, in its first (the embedding) or, on
        the last rank, its last (the head)."""
        plan, held, of_layers = self.plan, self.plan.model_states[rank], np.array(self.plan.numel_by_layer)
        whole = size * np.array([held.padded_numel[home] for home in MESH_VIEWS])  # with the layout's padding
        stages = (plan.layer_ranges[stage] for stage in plan.placement.stages_of_rank(rank))
        chunks = [of_layers[layers.start : layers.stop].sum(0) * (whole.sum() / held.local_numel) for layers in stages]
        chunks[-1 if rank == plan.pp - 1 else 0] += np.maximum(0.0, whole - sum(chunks)) * ends
        return chunks

    def _with_exposed_sync(self, stage: int, cost: ActionCosts) -> ActionCosts:
        """F, B and W of a stage whose gradients are reduced, and weights gathered, during them: with what an exchange
        takes longer than what hides it, or, not overlapped, all of it. A run's micro-batches share its exchange."""
        plan, p = self.plan, self.plan.config.parallel
        rank, chunk = plan.placement.rank(stage), plan.placement.chunk(stage)
        if not plan.sharding_policy.reduce_every_pass or self._no_dp:
            return cost
        units, counts = max(1, len(plan.layer_ranges[stage])), sync_counts(plan)
        size, share = self._grad_bytes
        n = self._chunk_bytes(rank, size)[chunk]
        reduce = share * self._collective(n, size, gather=False, buckets=units, of_step=False) * counts.reductions
        size = plan.dtype.itemsize
        gather_ready_times = [
            times * self._collective(self._chunk_bytes(rank, size, ends)[chunk], size, gather=True, buckets=units)
            for times, ends in ((counts.forward_gathers, True), (counts.backward_gathers, False))
        ]
        (forward_gathers, backward_gathers, later), (first, second) = cost, gather_ready_times
        hidden = second * p.overlap_param_gather + reduce * p.overlap_grad_reduce
        exposed = max(0.0, hidden - (backward_gathers if plan.split_backward else backward_gathers + later))
        exposed += second * (not p.overlap_param_gather)
        exposed += reduce * (not p.overlap_grad_reduce)
        return (
            forward_gathers + max(0.0, first - forward_gathers * p.overlap_param_gather),
            backward_gathers + exposed,
            later,
        )

    def _buckets(self, num_bytes: Any, size: int) -> int:
        limit = self.plan.config.parallel.ddp_bucket_size
        return max(1, math.floor(np.sum(num_bytes) / size / (DEFAULT_BUCKET_SIZE if limit is None else limit)))

    @cached_property
    def _groups(self) -> list[tuple[CommGroup, CommGroup]]:
        """Of each home the ranks that shard the optimizer's state, and the ranks that have copies of a shard."""
        axes = ((self.mesh.axis(name).ranks for name in SHARD_AXES[home]) for home in MESH_VIEWS)
        return [(self.group(shard), self.group(copies)) for shard, copies in axes]

    @property
    def _no_dp(self) -> bool:
        return all(shard.size == 1 for shard, _ in self._groups)

    def gather_ready_times(self) -> Mapping[int, float]:
        """Stage -> time at which its first forward may start, so that none of its layers waits for its bucket. Empty if
        gathers are waited for at once, or there is nothing to gather."""
        plan = self.plan
        if (
            self._no_dp
            or not plan.config.parallel.overlap_param_gather
            or plan.config.parallel.effective_zero_stage > 2
        ):
            return {}
        begin: dict[int, float] = {}
        for rank in range(plan.pp):
            now = 0.0
            for stage, n in zip(
                plan.placement.stages_of_rank(rank), self._chunk_bytes(rank, plan.dtype.itemsize), strict=True
            ):
                buckets = self._buckets(n, plan.dtype.itemsize)
                one = self._collective(n, plan.dtype.itemsize, gather=True, buckets=buckets) / buckets
                forward_gathers = float(self.stage_times[stage][TOTAL, F]) / buckets
                begin[stage] = max(now + (k + 1) * one - k * forward_gathers for k in (0, buckets - 1))
                now += buckets * one
        return begin

    @property
    def exposed_gathers_s(self) -> float:
        """Seconds of gathers that nothing hides."""
        plan, size = self.plan, self.plan.dtype.itemsize
        if plan.config.parallel.overlap_param_gather or plan.config.parallel.effective_zero_stage > 2:
            return 0.0
        return max(
            sum(self._collective(n, size, gather=True) for n in self._chunk_bytes(rank, size))
            for rank in range(plan.pp)
        )

    def _collective(
        self, sizes: np.ndarray, size: int, gather: bool, buckets: int | None = None, of_step: bool = True
    ) -> float:
        """Seconds of a chunk's gathers, or reductions, one bucket after another: bytes by home in elements of `size`.
        `of_step`: with what replicas sum once in a step."""
        links, seconds = self.comm_times, 0.0
        for n, (shard, replica) in zip(sizes, self._groups, strict=True):
            if not n:
                continue
            times = buckets or self._buckets(n, size)
            if shard.size == 1 and not gather:
                seconds += times * links.all_reduce(n / times, replica)
            else:  # a reduce-scatter takes as long as a gather
                seconds += times * links.all_gather(n / times, shard)
                seconds += links.all_reduce(n / shard.size, replica) * (of_step and not gather)
        return seconds

    def exposed_reduce_s(self, simulation: Simulation) -> float:
        """Seconds by which reductions end after the pipeline, if a chunk's buckets fill evenly in its last backward."""
        plan, (size, share) = self.plan, self._grad_bytes
        last: dict[int, tuple[float, float]] = {}  # stage -> begin and end of the computation of its last gradients
        ops = (Op.W,) if plan.split_backward else (Op.B,)
        for span in simulation.spans:
            if span.action.op in ops:
                last[span.action.stage] = max(last.get(span.action.stage, (0.0, 0.0)), (span.start, span.end))
        worst = 0.0
        for rank in range(plan.pp):
            chunks = zip(plan.placement.stages_of_rank(rank), self._chunk_bytes(rank, size), strict=True)
            done = 0.0
            for stage, n in sorted(chunks, key=lambda item: last[item[0]]):
                start, end = last[stage]
                if not plan.config.parallel.overlap_grad_reduce:
                    start = end = simulation.end
                if plan.sharding_policy.reduce_every_pass:
                    done = max(done, end) + self._after_last_pass(stage, n, size) * share
                    continue
                whole, buckets = self._collective(n, size, gather=False) * share, self._buckets(n, size)
                first, one = start + (end - start) / buckets, whole / buckets
                done = max(done + whole, first + whole, end + one)
            worst = max(worst, done - simulation.end)
        return worst

    def _after_last_pass(self, stage: int, n: np.ndarray, size: int) -> float:
        """Seconds of what is left of a stage's reduction when its last backward ends, which `_slowed` has made as long
        as the rest: the last unit's, and what replicas sum once in a step."""
        units = max(1, len(self.plan.layer_ranges[stage]))
        run = self._collective(n, size, gather=False, buckets=units, of_step=False)
        last = self._collective(n / units, size, gather=False, buckets=1, of_step=False)
        replicas = self._collective(n, size, gather=False, buckets=units) - run
        return replicas + last * self.plan.config.parallel.overlap_grad_reduce

    @property
    def total_dp_comm_s(self) -> float:
        """Seconds of all that the busiest rank exchanges over dp in a step, hidden or not."""
        plan, (size, share) = self.plan, self._grad_bytes
        counts, weight, m = sync_counts(plan), plan.dtype.itemsize, plan.num_microbatches
        runs = m * counts.reductions if plan.sharding_policy.reduce_every_pass else 1

        def of(rank: int) -> float:
            weights, layers = (np.sum(self._chunk_bytes(rank, weight, ends), 0) for ends in (True, False))
            n = np.sum(self._chunk_bytes(rank, size), 0)
            times = ((m * counts.forward_gathers, weights), (m * counts.backward_gathers, layers))
            if plan.config.parallel.effective_zero_stage < 3:
                times = ((1, weights),)
            gathered = sum(counts * self._collective(held, weight, gather=True) for counts, held in times)
            reductions = self._collective(n, size, gather=False)
            return gathered + share * (reductions + (runs - 1) * self._collective(n, size, gather=False, of_step=False))

        return max(map(of, range(plan.pp)))

    @property
    def _grad_bytes(self) -> tuple[int, float]:
        """Bytes of an element of the gradients' sums, and the share of them that is sent."""
        size = self.plan.bytes_per_element()[1]
        return size, 0.5 if self.plan.config.parallel.grad_reduce_in_bf16 and size == 4 else 1.0

    @property
    def tied_grad_s(self) -> float:
        """Seconds of the sum over both ends of the pipeline of a rank's part of a tied embedding's gradient."""
        plan, m = self.plan, self.plan.config.model
        if plan.pp == 1 or m.untie_embeddings_and_output_weights:
            return 0.0
        n = plan.padded_vocab * m.hidden_size / plan.tp * self._grad_bytes[0] / self._groups[0][0].size
        return self.comm_times.all_reduce(n, self.group(self.mesh.tied_embedding.ranks))
