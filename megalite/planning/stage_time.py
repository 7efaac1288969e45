"""The durations of forward, backward and weight gradients of every stage on one rank, with its waits for tp, cp and ep.

The cost of each kind of layer (planning/layer_cost.py) runs through two queues, one of computation and one of
communication:

    matmuls      FLOPs / (peak x fraction), longer if the result has too few tiles, or rows and columns are no multiples
                 of 128. Weight gradients also take the bytes of the sums that they are added to. In a grouped matmul,
                 the last tile of each group is half empty, and the time is at least that of reading all matrices
    attention    stated FLOPs / (peak x fraction x S / (S + half)); 1.25 times as many FLOPs in backward, which
                 recomputes the scores
    memory       bytes / bandwidth of all other kernels and operations
    tp, cp, ep   a collective starts where the cost says so, after the previous one has ended. The time that the rank
                 waits for it is exposed, and while it overlaps with computation it slows that down a little

A layer takes at least the time that the host needs to launch it, unless a CUDA graph does. A calibrated profile has
measured times instead.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from megalite.parallel.mesh import Mesh
from megalite.planning.cluster import Cluster, DeviceProfile
from megalite.planning.comm_time import CommGroup, CommTimes
from megalite.planning.layer_cost import (
    LAYER_AXES,
    AttentionKernel,
    CommStart,
    CommWait,
    LayerCost,
    Matmul,
    MemoryOp,
    TraceEvent,
)
from megalite.planning.layer_kinds import LayerKind, PrefixSums, layers_cost
from megalite.planning.run_plan import RunPlan

TILE = 128  # rows and columns of a matmul's tile
SCORE_RECOMPUTE = 1.25  # factor of backward's stated FLOPs, because it recomputes the scores
SCORE_BYTES = (13, 21)  # moved in forward and backward per stored 16-bit score, with one byte for the dropout mask

# Times of a layer or stage are arrays [3, 3] in seconds. Rows are all of the time, and the parts of it that wait for tp
# (with ep) and for cp. Columns are the phases.
TOTAL, TP_WAIT, CP_WAIT = range(3)
F, B, W = range(3)


def calibration_key(plan: RunPlan, kind: LayerKind | None = None) -> str:
    """Return what calibrated times depend on: a kind of layer, by default the first one's, and its surroundings."""
    shape = plan.shape
    batch = [plan.config.train.micro_batch_size, shape.tp, shape.cp]
    if shape.has_experts:
        batch += [shape.ep, shape.etp]
    recompute = dataclasses.astuple(shape.recompute)
    kind = kind or plan.balance.stage_costs.kinds[0]
    return f"{kind} {shape.padded_vocab} {tuple(batch)} {shape.dtype} {recompute}"


@dataclass(frozen=True)
class TimeModel:
    """The times of the stages of a plan, on a rank of the first tp group."""

    plan: RunPlan
    cluster: Cluster
    profile: DeviceProfile

    @cached_property
    def comm_times(self) -> CommTimes:
        return CommTimes.with_measured(self.cluster, self.profile.collective)

    @cached_property
    def peak_flops(self) -> float:
        """The peak rate for the dtype of the weights, in FLOP/s."""
        return self.cluster.device.peak_tflops(self.plan.shape.dtype) * 1e12

    def _peak_flops_of(self, itemsize: float) -> float:
        """Return the peak rate for elements of `itemsize` bytes. Routers compute in fp32."""
        if itemsize == self.plan.shape.dtype.itemsize:
            return self.peak_flops
        return self.cluster.device.peak_tflops(torch.float32) * 1e12

    @cached_property
    def mesh(self) -> Mesh:
        """The mesh of rank 0."""
        return self.plan.shape.mesh_at(0)

    def group(self, ranks: Sequence[int]) -> CommGroup:
        return CommGroup.from_ranks(ranks, self.cluster.devices_per_node)

    @cached_property
    def layer_groups(self) -> Mapping[str, CommGroup]:
        """The groups of LAYER_AXES."""
        return {axis: self.group(self.mesh.axis(axis).ranks) for axis in LAYER_AXES}

    def memory_s(self, num_bytes: float) -> float:
        """Return the time of reading or writing `num_bytes`."""
        return num_bytes / (self.cluster.device.memory_bytes_per_s * self.profile.memory)

    def matmul_s(self, rows: float, columns: float, depth: float, groups: float = 1, itemsize: float = 0) -> float:
        """Return the time of [rows, depth] @ [depth, columns], or of such a product for each group of the rows.

        Args:
            rows: The number of rows of the result.
            columns: The number of columns of the result.
            depth: The size of the summed dimension.
            groups: The number of groups of the rows.
            itemsize: The bytes of an element of the operands; 0 for those of the weights.
        """
        padding = 1.0  # factor of the work
        if self.profile.tiles:
            # on average the last tile of each group of rows is half empty
            tile_rows = math.ceil(rows / TILE) if groups == 1 else rows / TILE + groups / 2
            tiles = tile_rows * math.ceil(columns / TILE)
            padding = tiles * TILE**2 / (rows * columns) * max(1.0, self.profile.tiles / tiles)
        flops = 2.0 * rows * columns * depth * padding
        if groups > 1:
            compute_s = flops / (self.peak_flops * self.profile.matmul)
            read_s = self.memory_s(groups * columns * depth * itemsize)
            return max(compute_s, read_s) + self.profile.kernel_s
        peak_flops = self._peak_flops_of(itemsize) if itemsize else self.peak_flops
        return flops / (peak_flops * self.profile.matmul) + self.profile.kernel_s

    def attention_s(self, kernel: str, flops: float) -> float:
        """Return the time of one launch of an attention kernel."""
        profile = self.profile
        S = self.plan.config.model.seq_length
        is_forward = kernel.endswith("_forward")
        if not profile.fused:  # computes all S x S scores, and writes and reads them
            num_heads = self.plan.config.model.num_attention_heads
            num_scores = self.plan.shape.tokens_per_microbatch * S * num_heads / self.plan.shape.tp
            bytes_per_score = SCORE_BYTES[0] if is_forward else SCORE_BYTES[1] / 2  # backward has two kernels
            return 2 * flops / (self.peak_flops * profile.attention[0]) + self.memory_s(bytes_per_score * num_scores)
        direction = 0 if is_forward else 1
        fraction = profile.attention[direction]
        half = profile.attention_half[direction]
        recompute = 1.0 if is_forward else SCORE_RECOMPUTE
        return flops * recompute / (self.peak_flops * fraction * S / (S + half))

    def _time_of(self, cost: LayerCost, is_head: bool = False) -> np.ndarray:
        """Return the time of a cost. The matmuls and the loss of the head are timed together, at the profile's rate."""
        return np.transpose([self._run_queues(cost.of_phase(phase), is_head) for phase in "FBW"])

    def _run_queues(self, events: Sequence[TraceEvent], is_head: bool) -> tuple[float, float, float]:
        """Run the events in order, and return (all seconds, seconds of waits for tp and ep, of waits for cp)."""
        now = 0.0
        comm_free_at = 0.0
        tp_wait = 0.0
        cp_wait = 0.0
        # id of a collective -> its end, its duration, the time of its CommStart, its axis
        in_flight: dict[int, tuple[float, float, float, str]] = {}
        durations: dict[int, float] = {}  # of events that happen repeatedly, as in recurrent layers, by their id
        for event in events:
            seconds = durations.get(id(event))
            if seconds is not None:
                now += seconds
                continue
            match event:
                case Matmul():
                    seconds = self._matmul_event_s(event, is_head)
                    now += seconds
                    if event.epilogue_bytes:
                        now += self.memory_s(event.epilogue_bytes)
                    else:
                        durations[id(event)] = seconds
                case AttentionKernel():
                    now += self.attention_s(event.kernel, event.flops)
                case MemoryOp():
                    if not (is_head and event.name.startswith("cross_entropy")):
                        durations[id(event)] = self.memory_s(event.num_bytes) + self.profile.kernel_s
                        now += durations[id(event)]
                case CommStart():
                    group = self.layer_groups[event.axis]
                    if event.op == "all-to-all":
                        duration = self.comm_times.all_to_all(event.num_bytes, group)
                    else:
                        duration = self.comm_times.all_gather(event.num_bytes, group)
                    comm_free_at = max(now, comm_free_at) + duration
                    in_flight[event.comm_id] = (comm_free_at, duration, now, event.axis)
                case CommWait():
                    end, duration, started_at, axis = in_flight.pop(event.comm_id)
                    overlap = min(duration, now - started_at)
                    exposed = max(0.0, end - now) + self.profile.contention * overlap
                    now += exposed
                    if axis == "cp":
                        cp_wait += exposed
                    else:
                        tp_wait += exposed
        return now, tp_wait, cp_wait

    def _matmul_event_s(self, matmul: Matmul, is_head: bool) -> float:
        if is_head:
            return matmul.flops / (self.peak_flops * self.profile.head)
        seconds = self.matmul_s(matmul.rows, matmul.columns, matmul.depth, matmul.groups, matmul.itemsize)
        if matmul.is_weight_grad:  # reads and writes the fp32 sum
            seconds += self.memory_s(8 * matmul.rows * matmul.columns * self.profile.sums)
        return seconds

    def layer_time(self, kind: LayerKind, full_recompute: bool = False) -> np.ndarray:
        """Return the time of a layer for one micro-batch."""
        block = "layer, split" if self.plan.shape.splits_backward else "layer"
        calibrated = self._calibrated(block, [kind])
        if calibrated is not None:
            return calibrated  # includes recomputation
        cost = layers_cost((kind,), self.plan.balance.stage_costs.setting, full_recompute)
        time = self._time_of(cost)
        dispatch_s = self.profile.dispatch_s
        if not dispatch_s or self.plan.config.train.cuda_graph_impl != "none":
            return time
        f, b, w = time[TOTAL]
        f = max(f, dispatch_s * cost.num_launches("F"))
        late = max(0.0, dispatch_s * cost.num_launches("BW") - (b + w))
        late_b = late * b / (b + w)
        late_w = late * w / (b + w)
        return np.array([(f, b + late_b, w + late_w), time[TP_WAIT], time[CP_WAIT]])

    @cached_property
    def layer_times(self) -> PrefixSums:
        return self.plan.balance.stage_costs.prefix_sums(self.layer_time)

    @cached_property
    def stage_times(self) -> list[np.ndarray]:
        """The time of each stage for one micro-batch."""
        times = [self.layer_times.between(layers.start, layers.stop) for layers in self.plan.balance.layer_ranges]
        times[0] += self.embedding
        times[-1] += self.head
        for depth_times in self.mtp_layers:
            times[-1] += self.embedding + depth_times
        return times

    @cached_property
    def mtp_layers(self) -> list[np.ndarray]:
        """The time of each depth of multi-token prediction, without its embedding."""
        return [self._time_of(cost) for cost in self.plan.balance.stage_costs.mtp_layers]

    def _calibrated(self, block: str, kinds: Sequence[LayerKind]) -> np.ndarray | None:
        """Return the calibrated time of a part of a stage; None unless it was measured with one of these kinds."""
        if block not in self.profile.blocks:
            return None
        if all(self.profile.shape != calibration_key(self.plan, kind) for kind in kinds):
            return None
        return np.array([self.profile.blocks[block], (0.0, 0.0, 0.0), (0.0, 0.0, 0.0)])

    def _calibrated_once(self, block: str) -> np.ndarray | None:
        """Return the calibrated time of a part that is the same for all kinds of layers."""
        return self._calibrated(block, self.plan.balance.stage_costs.distinct_kinds)

    @cached_property
    def embedding(self) -> np.ndarray:
        calibrated = self._calibrated_once("embedding")
        return self._time_of(self.plan.balance.stage_costs.embedding) if calibrated is None else calibrated

    @cached_property
    def head(self) -> np.ndarray:
        """The time of the final norm, the output projection and the loss, whose gradients are computed in forward."""
        calibrated = self._calibrated_once("head")
        if calibrated is not None:
            return calibrated * (1 + self.plan.config.model.num_mtp_depths)
        return self._time_of(self.plan.balance.stage_costs.head, is_head=True)

    def update_s(self) -> tuple[float, float]:
        """Return the seconds of the gradient norm and of the optimizer's step, on the rank with the most to do."""
        model_state = self.plan.model_states.fullest
        owned_grad_bytes = model_state.owned_numel * self.plan.shape.bytes_per_element()[1]
        update_bytes = owned_grad_bytes + 2 * model_state.optimizer + model_state.weight_update_bytes
        calibrated = self._calibrated_once("update")
        if calibrated is None:
            return self.memory_s(owned_grad_bytes), self.memory_s(update_bytes) + self.muon_s
        update_s_per_byte = float(calibrated[TOTAL, 0])
        norm_s_per_byte = float(calibrated[TOTAL, 1])
        return owned_grad_bytes * norm_s_per_byte, update_bytes * update_s_per_byte + self.muon_s

    @cached_property
    def muon_s(self) -> float:
        """The time of Newton-Schulz and its exchanges on the rank with the most of it, as if nothing overlapped."""
        costs = [model_state.muon for model_state in self.plan.model_states.by_rank if model_state.muon is not None]
        if not costs:
            return 0.0
        cost = max(costs, key=lambda cost: cost.flops)
        in_bf16 = self.plan.config.optim.muon_fp32_matmul_prec == "medium"
        peak_flops = self.cluster.device.peak_tflops(torch.bfloat16 if in_bf16 else torch.float32) * 1e12
        exchange_s = self.comm_times.all_to_all(cost.bytes_moved, self.group(self.mesh.dp_cp_tp.ranks))
        return cost.flops / (peak_flops * self.profile.matmul) + exchange_s
