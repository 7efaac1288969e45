"""Seconds of a training step, by simulation of the schedule that the runtime runs (megalite/pipeline/).

    pipeline    the rows of megalite/pipeline/schedule.py with the durations of megalite/plan/cost.py; a message takes
                its link's time, and a rank's messages in one direction follow each other. Of a long step only the first
                groups of micro-batches are simulated, as megalite/plan/arrangement.py does for its bubble
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
from megalite.parallel.spec import HOMES, OWNERS
from megalite.pipeline.schedule import Cost, Op
from megalite.pipeline.simulate import Simulation
from megalite.plan.arrangement import LONG, Arrangement
from megalite.plan.cluster import Cluster, Profile, default_profile
from megalite.plan.cost import ALL, Costs, F
from megalite.plan.kinds import model_flops
from megalite.plan.links import Group, Links


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
    fixed: float
    matrices: float = 0.0


class Exchanges(NamedTuple):
    """How often, for each micro-batch, the gradients of a chunk are reduced, and its weights gathered for forward and
    for backward, where they come and go. Backward does not read the weights of the model's ends."""

    reduced: float
    forward: float
    backward: float


def exchanges(made: Arrangement) -> Exchanges:
    """What pipeline/schedule.py: with_sharing comes to, without the shorter runs of a step's begin and end."""
    p, m = made.config.parallel, made.microbatches
    run = 1 if made.chunks == 1 else m if p.pipeline_schedule == "breadth-first" else made.group_size
    if p.shared_out < 3:
        return Exchanges(1 / run, 0.0, 0.0)
    if not made.sharing.by_chunk:
        return Exchanges(1 / run, 1.0, 1.0)
    return Exchanges(1 / run, 1 / m, 0.0) if made.chunks == 1 else Exchanges(1 / run, 1 / run, 1 / run)


def step_time(made: Arrangement, cluster: Cluster, profile: Profile | None = None) -> StepTime:
    """Predict a step. Raises ValueError if cluster and arrangement differ in size, or the dtype has no peak."""
    if cluster.world != made.world:
        raise ValueError(f"the cluster has {cluster.world} devices, the arrangement {made.world} ranks; give as many")
    step = _Step(made, cluster, profile or default_profile(cluster.device.name))
    parts = step.parts()
    seconds = sum(parts.values())
    tokens = made.batch_sizes.final * made.config.model.seq_length
    flops = model_flops(made.config.model, made.padded_vocab) * tokens
    mfu, own = flops / (seconds * made.world * step.peak), (step.profile.step_s, step.whole_matrices_s)
    return StepTime(seconds, parts, mfu, tokens / seconds, *own)


class _Step(Costs):
    def parts(self) -> dict[str, float]:
        made, stages = self.made, [times.tolist() for times in self.stages]
        each = made.microbatches / made.pp
        busy, tp, cp = (each * sum(sum(seconds) for seconds in of_stages) for of_stages in zip(*stages, strict=True))
        costs: list[Cost] = [(f, b, w) for (f, b, w), *_ in stages]
        slowed = [self._slowed(number, cost) for number, cost in enumerate(costs)]
        groups = LONG if made.split is None else made.told  # what waits of a split backward may take long to settle
        alone, simulation = made.run(costs, made.split, groups)
        sent, more = alone, {}
        if made.pp > 1:
            more = {"delay": self.delay}
            sent, simulation = made.run(costs, made.split, groups, **more)
        with_gathers, begin = sent, self.gathers()
        if begin or slowed != costs:
            slow, simulation = made.run(slowed, made.split, groups, begin=begin, **more)
            with_gathers = max(sent, slow)
        norm, update = self.update_s()
        shown = with_gathers - sent + self.reduces(simulation) + self.late_gathers_s
        hidden = max(0.0, self.exchanged_s - shown)
        agreement = self.links.all_reduce(64, self.group(range(made.world)))  # a few numbers
        dp = shown + self.profile.contention * hidden + agreement + self.tied_s
        parts = {"compute": busy - tp - cp, "bubble": alone - busy, "tp": tp, "cp": cp, "pp": sent - alone, "dp": dp}
        return parts | {"optimizer": norm + update + self.profile.step_s}

    def delay(self, source: int, target: int) -> float:
        """Seconds of a message between two pipeline ranks: this tp rank's part of the hidden states."""
        ranks = self.mesh.pp.ranks
        return Links.of(self.cluster, self.profile.message).message(self.made.edge, ranks[source], ranks[target])

    def _chunk_bytes(self, rank: int, size: int, ends: bool = True) -> list[np.ndarray]:
        """Bytes of the weights or gradients, of `size` bytes each, by home, of each chunk of a pipeline rank, in order.
        Those of the layers are in their chunk, the rest of the rank's, with `ends`, in its first (the embedding) or, on
        the last rank, its last (the head)."""
        made, held, of_layers = self.made, self.made.holdings[rank], np.array(self.made.elements)
        whole = size * np.array([held.elements[home] for home in HOMES])  # with the layout's padding
        stages = (made.stages[stage] for stage in made.placement.stages(rank))
        chunks = [of_layers[layers.start : layers.stop].sum(0) * (whole.sum() / held.local) for layers in stages]
        chunks[-1 if rank == made.pp - 1 else 0] += np.maximum(0.0, whole - sum(chunks)) * ends
        return chunks

    def _slowed(self, stage: int, cost: Cost) -> Cost:
        """F, B and W of a stage whose gradients are reduced, and weights gathered, during them: with what an exchange
        takes longer than what hides it, or, not overlapped, all of it. A run's micro-batches share its exchange."""
        made, p = self.made, self.made.config.parallel
        rank, chunk = made.placement.rank(stage), made.placement.chunk(stage)
        if not made.sharing.every_run or self._alone:
            return cost
        units, often = max(1, len(made.stages[stage])), exchanges(made)
        size, share = self._gradient
        n = self._chunk_bytes(rank, size)[chunk]
        reduce = share * self._collective(n, size, gather=False, buckets=units, of_step=False) * often.reduced
        size = made.dtype.itemsize
        gathers = [
            times * self._collective(self._chunk_bytes(rank, size, ends)[chunk], size, gather=True, buckets=units)
            for times, ends in ((often.forward, True), (often.backward, False))
        ]
        (forward, backward, later), (first, second) = cost, gathers
        hidden = second * p.overlap_param_gather + reduce * p.overlap_grad_reduce
        shown = max(0.0, hidden - (backward if made.split else backward + later))
        shown += second * (not p.overlap_param_gather)
        shown += reduce * (not p.overlap_grad_reduce)
        return forward + max(0.0, first - forward * p.overlap_param_gather), backward + shown, later

    def _buckets(self, num_bytes: Any, size: int) -> int:
        limit = self.made.config.parallel.ddp_bucket_size
        return max(1, math.floor(np.sum(num_bytes) / size / (DEFAULT_BUCKET_SIZE if limit is None else limit)))

    @cached_property
    def _groups(self) -> list[tuple[Group, Group]]:
        """Of each home the ranks that shard the optimizer's state, and the ranks that have copies of a shard."""
        axes = ((self.mesh.axis(name).ranks for name in OWNERS[home]) for home in HOMES)
        return [(self.group(shard), self.group(copies)) for shard, copies in axes]

    @property
    def _alone(self) -> bool:
        return all(shard.size == 1 for shard, _ in self._groups)

    def gathers(self) -> Mapping[int, float]:
        """Stage -> time at which its first forward may start, so that none of its layers waits for its bucket. Empty if
        gathers are waited for at once, or there is nothing to gather."""
        made = self.made
        if self._alone or not made.config.parallel.overlap_param_gather or made.config.parallel.shared_out > 2:
            return {}
        begin: dict[int, float] = {}
        for rank in range(made.pp):
            now = 0.0
            for stage, n in zip(made.placement.stages(rank), self._chunk_bytes(rank, made.dtype.itemsize), strict=True):
                buckets = self._buckets(n, made.dtype.itemsize)
                one = self._collective(n, made.dtype.itemsize, gather=True, buckets=buckets) / buckets
                forward = float(self.stages[stage][ALL, F]) / buckets
                begin[stage] = max(now + (k + 1) * one - k * forward for k in (0, buckets - 1))
                now += buckets * one
        return begin

    @property
    def late_gathers_s(self) -> float:
        """Seconds of gathers that nothing hides."""
        made, size = self.made, self.made.dtype.itemsize
        if made.config.parallel.overlap_param_gather or made.config.parallel.shared_out > 2:
            return 0.0
        return max(
            sum(self._collective(n, size, gather=True) for n in self._chunk_bytes(rank, size))
            for rank in range(made.pp)
        )

    def _collective(
        self, sizes: np.ndarray, size: int, gather: bool, buckets: int | None = None, of_step: bool = True
    ) -> float:
        """Seconds of a chunk's gathers, or reductions, one bucket after another: bytes by home in elements of `size`.
        `of_step`: with what replicas sum once in a step."""
        links, seconds = self.links, 0.0
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

    def reduces(self, simulation: Simulation) -> float:
        """Seconds by which reductions end after the pipeline, if a chunk's buckets fill evenly in its last backward."""
        made, (size, share) = self.made, self._gradient
        last: dict[int, tuple[float, float]] = {}  # stage -> begin and end of the computation of its last gradients
        ops = (Op.W,) if made.split else (Op.B,)
        for span in simulation.spans:
            if span.action.op in ops:
                last[span.action.stage] = max(last.get(span.action.stage, (0.0, 0.0)), (span.start, span.end))
        worst = 0.0
        for rank in range(made.pp):
            chunks = zip(made.placement.stages(rank), self._chunk_bytes(rank, size), strict=True)
            done = 0.0
            for stage, n in sorted(chunks, key=lambda item: last[item[0]]):
                start, end = last[stage]
                if not made.config.parallel.overlap_grad_reduce:
                    start = end = simulation.end
                if made.sharing.every_run:
                    done = max(done, end) + self._behind_last_run(stage, n, size) * share
                    continue
                whole, buckets = self._collective(n, size, gather=False) * share, self._buckets(n, size)
                first, one = start + (end - start) / buckets, whole / buckets
                done = max(done + whole, first + whole, end + one)
            worst = max(worst, done - simulation.end)
        return worst

    def _behind_last_run(self, stage: int, n: np.ndarray, size: int) -> float:
        """Seconds of what is left of a stage's reduction when its last backward ends, which `_slowed` has made as long
        as the rest: the last unit's, and what replicas sum once in a step."""
        units = max(1, len(self.made.stages[stage]))
        run = self._collective(n, size, gather=False, buckets=units, of_step=False)
        last = self._collective(n / units, size, gather=False, buckets=1, of_step=False)
        replicas = self._collective(n, size, gather=False, buckets=units) - run
        return replicas + last * self.made.config.parallel.overlap_grad_reduce

    @property
    def exchanged_s(self) -> float:
        """Seconds of all that the busiest rank exchanges over dp in a step, hidden or not."""
        made, (size, share) = self.made, self._gradient
        often, weight, m = exchanges(made), made.dtype.itemsize, made.microbatches
        runs = m * often.reduced if made.sharing.every_run else 1

        def of(rank: int) -> float:
            weights, layers = (np.sum(self._chunk_bytes(rank, weight, ends), 0) for ends in (True, False))
            n = np.sum(self._chunk_bytes(rank, size), 0)
            times = ((m * often.forward, weights), (m * often.backward, layers))
            if made.config.parallel.shared_out < 3:
                times = ((1, weights),)
            gathered = sum(often * self._collective(held, weight, gather=True) for often, held in times)
            reduced = self._collective(n, size, gather=False)
            return gathered + share * (reduced + (runs - 1) * self._collective(n, size, gather=False, of_step=False))

        return max(map(of, range(made.pp)))

    @property
    def _gradient(self) -> tuple[int, float]:
        """Bytes of an element of the gradients' sums, and the share of them that is sent."""
        size = self.made.bytes_of_element()[1]
        return size, 0.5 if self.made.config.parallel.grad_reduce_in_bf16 and size == 4 else 1.0

    @property
    def tied_s(self) -> float:
        """Seconds of the sum over both ends of the pipeline of a rank's part of a tied embedding's gradient."""
        made, m = self.made, self.made.config.model
        if made.pp == 1 or m.untie_embeddings_and_output_weights:
            return 0.0
        n = made.padded_vocab * m.hidden_size / made.tp * self._gradient[0] / self._groups[0][0].size
        return self.links.all_reduce(n, self.group(self.mesh.ends.ranks))
