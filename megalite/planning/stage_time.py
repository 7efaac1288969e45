"""Seconds of forward, backward and weight gradients of every stage on one rank, and its waits for tp, cp and ep.

The bill of each kind of layer (planning/layer_cost.py) goes through two queues, of computation and of communication:

    matmuls      FLOPs / (peak x share), more if the result has too few tiles, or rows and columns are no multiples of
                 128; gradients of weights also take the bytes of the sums that they are added to; of experts the last
                 tile of each is half empty, and less than their matrices take to be read they never take
    attention    stated FLOPs / (peak x share S / (S + half)); 1.25 times as many in backward, which computes the scores
                 again
    streams      bytes / memory: all that any other kernel or operation reads and writes, once each
    tp, cp, ep   a collective begins when the bill says so and the one before has ended; the time that the rank waits
                 for it shows, and while it runs behind computation it slows that down a little

A layer takes at least what the host needs to launch it, unless a CUDA graph does. A calibrated profile measured it.
"""

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from megalite.parallel.mesh import Mesh
from megalite.planning.cluster import Cluster, DeviceProfile
from megalite.planning.comm_time import CommGroup, CommTimes
from megalite.planning.layer_cost import LayerCost, TraceEvent
from megalite.planning.layer_kinds import LayerKind, PrefixSums, layers_cost
from megalite.planning.run_plan import RunPlan

SCORE_RECOMPUTE = 1.25  # times backward's stated FLOPs, because it computes the scores again
SCORE_BYTES = (13, 21)  # moved in forward and backward per 16-bit score that is kept; dropout's mask is one byte of it


def calibration_key(plan: RunPlan, kind: LayerKind | None = None) -> str:
    """What calibrated times are of: a kind of layer, the first one's unless another is given, and its surroundings."""
    batch = plan.config.train.micro_batch_size, plan.tp, plan.cp, *[plan.ep, plan.etp][: 2 * plan.has_experts]
    recompute = dataclasses.astuple(plan.recompute)
    return f"{kind or plan.stage_costs.kinds[0]} {plan.padded_vocab} {batch} {plan.dtype} {recompute}"


TOTAL, TP_WAIT, CP_WAIT = range(
    3
)  # rows of seconds: all of the time, and what of it waits for tp (and experts) and for cp
F, B, W = range(3)  # their columns


@dataclass(frozen=True)
class TimeModel:
    """The costs of the stages of `made`, on a rank of the first tp group, as seconds [3, 3]: rows by columns above."""

    plan: RunPlan
    cluster: Cluster
    profile: DeviceProfile

    @cached_property
    def links(self) -> CommTimes:
        return CommTimes.with_measured(self.cluster, self.profile.collective)

    @cached_property
    def peak(self) -> float:
        return self._peak_of(self.plan.dtype.itemsize)

    def _peak_of(self, size: float) -> float:
        """FLOP/s with elements of `size` bytes, which a router has larger than all else."""
        alike = size == self.plan.dtype.itemsize
        return self.cluster.device.peak_tflops(self.plan.dtype if alike else torch.float32) * 1e12

    @cached_property
    def mesh(self) -> Mesh:
        """The mesh of rank 0."""
        return self.plan.mesh_at(0)

    def group(self, ranks: Sequence[int]) -> CommGroup:
        return CommGroup.from_ranks(ranks, self.cluster.devices_per_node)

    def memory_s(self, num_bytes: float) -> float:
        return num_bytes / (self.cluster.device.memory_bytes_per_s * self.profile.memory)

    def matmul_s(self, rows: float, columns: float, depth: float, groups: float = 1, size: float = 0) -> float:
        """[rows, depth] @ [depth, columns], or such a product for each group of the rows; elements of `size` bytes."""
        up = lambda n: math.ceil(n / 128)  # noqa: E731
        tiles, padded = (up(rows) if groups == 1 else rows / 128 + groups / 2) * up(columns), 1.0
        if self.profile.tiles:
            padded = tiles * 128**2 / (rows * columns) * max(1.0, self.profile.tiles / tiles)
        flops = 2.0 * rows * columns * depth * padded
        least = self.memory_s(groups * columns * depth * size) if groups > 1 else 0.0
        peak = self.peak if groups > 1 or not size else self._peak_of(size)
        return max(flops / (peak * self.profile.matmul), least) + self.profile.kernel_s

    def attention_s(self, kernel: str, flops: float) -> float:
        """The time of one launch of an attention kernel."""
        profile, S = self.profile, self.plan.config.model.seq_length
        forward = kernel.endswith("_forward")
        if not profile.fused:  # computes all S x S scores, and writes and reads them
            elements = self.plan.tokens_per_microbatch * S * self.plan.config.model.num_attention_heads / self.plan.tp
            moved = SCORE_BYTES[0] if forward else SCORE_BYTES[1] / 2  # backward has two kernels
            return 2 * flops / (self.peak * profile.attention[0]) + self.memory_s(moved * elements)
        share, half = profile.attention[not forward], profile.attention_half[not forward]
        return flops * (1.0 if forward else SCORE_RECOMPUTE) / (self.peak * share * S / (S + half))

    def _time_of(self, bill: LayerCost, head: bool = False) -> np.ndarray:
        """The time of a bill. `head`: matmuls and loss together, at the profile's rate for both."""
        return np.transpose([self._run_queues(bill.of_phase(phase), head) for phase in "FBW"])

    def _run_queues(self, events: Sequence[TraceEvent], head: bool) -> tuple[float, float, float]:
        """(seconds, seconds of these that wait for tp, and for cp) of one rank that does `events` in order."""
        now, comm_free_at, comm_wait = 0.0, 0.0, [0.0, 0.0]
        begun: dict[float, tuple[float, float, float, bool]] = {}  # number -> end, duration, begin, whether over cp
        scored = {event.name for event in events if event.kind == "scores"}
        for _, what, name, figures in events:
            if what == "matmul":
                rows, columns, depth, sinks, *more = figures
                if head:
                    now += 2.0 * rows * columns * depth / (self.peak * self.profile.head)
                else:
                    sums = self.memory_s(8 * rows * columns * self.profile.sums) * sinks
                    now += self.matmul_s(rows, columns, depth, *more) + sums
            elif what == "scores":
                now += self.attention_s(name, figures[0])
            elif what == "stream" and name not in scored and not (head and name.startswith("cross_entropy")):
                now += self.memory_s(figures[0]) + self.profile.kernel_s
            elif what == "beside":
                now += self.memory_s(figures[0])
            elif what == "begin":
                axis, _, op = name.rpartition(" ")
                of = self.links.all_to_all if op == "all-to-all" else self.links.all_gather
                takes = of(figures[0], self.group(self.mesh.axis(axis or "tp").ranks))
                comm_free_at = max(now, comm_free_at) + takes
                begun[figures[1]] = comm_free_at, takes, now, name.startswith("cp ")
            elif what == "wait":
                end, takes, since, over_cp = begun.pop(figures[0])
                exposed = max(0.0, end - now) + self.profile.contention * min(takes, now - since)
                now += exposed
                comm_wait[over_cp] += exposed
        return now, comm_wait[0], comm_wait[1]

    def layer_time(self, kind: LayerKind, whole: bool = False) -> np.ndarray:
        """The time of a layer; `whole`: all of it is recomputed."""
        if (measured := self._calibrated("layer, split" if self.plan.splits_backward else "layer", kind)) is not None:
            return measured  # recomputation is part of it
        bill = layers_cost((kind,), self.plan.stage_costs.setting, whole)
        time = self._time_of(bill)
        if not (host := self.profile.dispatch_s) or self.plan.config.train.cuda_graph_impl != "none":
            return time
        f, b, w = time[TOTAL]
        late = max(0.0, host * bill.num_launches("BW") - (b + w))
        b, w = b + late * b / (b + w), w + late * w / (b + w)
        return np.array([(max(f, host * bill.num_launches("F")), b, w), time[TP_WAIT], time[CP_WAIT]])

    @cached_property
    def layer_times(self) -> PrefixSums:
        return self.plan.stage_costs.prefix_sums(self.layer_time)

    @cached_property
    def stage_times(self) -> list[np.ndarray]:
        """The time of each stage for one micro-batch."""
        times = [
            self.layer_times.between(layer_times.start, layer_times.stop) for layer_times in self.plan.layer_ranges
        ]
        times[0] += self.embedding
        times[-1] += self.head
        return times

    def _calibrated(self, name: str, *kinds: LayerKind) -> np.ndarray | None:
        """The ends of a model are those of all its kinds."""
        known = any(
            self.profile.shape == calibration_key(self.plan, kind) for kind in kinds or set(self.plan.stage_costs.kinds)
        )
        blocks = self.profile.blocks
        return np.array([blocks[name], (0.0,) * 3, (0.0,) * 3]) if known and name in blocks else None

    @cached_property
    def embedding(self) -> np.ndarray:
        measured = self._calibrated("embedding")
        return self._time_of(self.plan.stage_costs.embedding) if measured is None else measured

    @cached_property
    def head(self) -> np.ndarray:
        """Final norm, output projection and loss, whose gradients are computed in forward."""
        measured = self._calibrated("head")
        return self._time_of(self.plan.stage_costs.head, head=True) if measured is None else measured

    def update_s(self) -> tuple[float, float]:
        """Seconds of the gradient norm and of the optimizer's step, on the rank with the most to do."""
        plan = self.plan
        held, (weight, gradient, _) = plan.model_states[plan.fullest_rank], plan.bytes_per_element()
        gradients = held.owned_numel * gradient
        moved = gradients + 2 * held.optimizer + held.owned_numel * weight
        if (measured := self._calibrated("update")) is not None:  # seconds per byte: update, norm
            return gradients * float(measured[TOTAL, B]), moved * float(measured[TOTAL, F]) + self.muon_s
        return self.memory_s(gradients), self.memory_s(moved) + self.muon_s

    @cached_property
    def muon_s(self) -> float:
        """Of Newton-Schulz and its exchange on the rank that has most to do; nothing of it is taken for hidden."""
        found = [held.muon for held in self.plan.model_states if held.muon is not None]
        if not found:
            return 0.0
        most, stage = max(found, key=lambda one: one.flops), self.group(self.mesh.dp_cp_tp.ranks)
        medium = self.plan.config.optim.muon_fp32_matmul_prec == "medium"
        peak = self.cluster.device.peak_tflops(torch.bfloat16 if medium else torch.float32) * 1e12
        return most.flops / (peak * self.profile.matmul) + self.links.all_to_all(most.bytes_moved, stage)
