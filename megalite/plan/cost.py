"""Seconds of forward, backward and weight gradients of every stage on one rank, and its waits for tp, cp and ep.

The bill of each kind of layer (plan/bill.py) goes through two queues, of computation and of communication:

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
from megalite.plan.arrangement import Arrangement
from megalite.plan.bill import Bill, Event
from megalite.plan.cluster import Cluster, Profile
from megalite.plan.kinds import Kind, Sums, layers_bill
from megalite.plan.links import Group, Links

SCORES_AGAIN = 1.25  # times backward's stated FLOPs, because it computes the scores again
SCORE_BYTES = (13, 21)  # moved in forward and backward per 16-bit score that is kept; dropout's mask is one byte of it


def shape_of(made: Arrangement, kind: Kind | None = None) -> str:
    """What calibrated times are of: a kind of layer, the first one's unless another is given, and its surroundings."""
    batch = made.config.train.micro_batch_size, made.tp, made.cp, *[made.ep, made.etp][: 2 * made.has_experts]
    recompute = dataclasses.astuple(made.recompute)
    return f"{kind or made.layers.kinds[0]} {made.padded_vocab} {batch} {made.dtype} {recompute}"


ALL, OF_TP, OF_CP = range(3)  # rows of seconds: all of the time, and what of it waits for tp (and experts) and for cp
F, B, W = range(3)  # their columns


@dataclass(frozen=True)
class Costs:
    """The costs of the stages of `made`, on a rank of the first tp group, as seconds [3, 3]: rows by columns above."""

    made: Arrangement
    cluster: Cluster
    profile: Profile

    @cached_property
    def links(self) -> Links:
        return Links.of(self.cluster, self.profile.collective)

    @cached_property
    def peak(self) -> float:
        return self._peak_of(self.made.dtype.itemsize)

    def _peak_of(self, size: float) -> float:
        """FLOP/s with elements of `size` bytes, which a router has larger than all else."""
        alike = size == self.made.dtype.itemsize
        return self.cluster.device.peak_tflops(self.made.dtype if alike else torch.float32) * 1e12

    @cached_property
    def mesh(self) -> Mesh:
        """The mesh of rank 0."""
        return self.made.mesh_of(0)

    def group(self, ranks: Sequence[int]) -> Group:
        return Group.of(ranks, self.cluster.per_node)

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

    def scores_s(self, kernel: str, flops: float) -> float:
        """The time of one launch of an attention kernel."""
        profile, S = self.profile, self.made.config.model.seq_length
        forward = kernel.endswith("_forward")
        if not profile.fused:  # computes all S x S scores, and writes and reads them
            elements = self.made.tokens * S * self.made.config.model.num_attention_heads / self.made.tp
            moved = SCORE_BYTES[0] if forward else SCORE_BYTES[1] / 2  # backward has two kernels
            return 2 * flops / (self.peak * profile.attention[0]) + self.memory_s(moved * elements)
        share, half = profile.attention[not forward], profile.attention_half[not forward]
        return flops * (1.0 if forward else SCORES_AGAIN) / (self.peak * share * S / (S + half))

    def _priced(self, bill: Bill, head: bool = False) -> np.ndarray:
        """The time of a bill. `head`: matmuls and loss together, at the profile's rate for both."""
        return np.transpose([self._queued(bill.of(phase), head) for phase in "FBW"])

    def _queued(self, events: Sequence[Event], head: bool) -> tuple[float, float, float]:
        """(seconds, seconds of these that wait for tp, and for cp) of one rank that does `events` in order."""
        now, free, waited = 0.0, 0.0, [0.0, 0.0]
        begun: dict[float, tuple[float, float, float, bool]] = {}  # number -> end, duration, begin, whether over cp
        scored = {event.name for event in events if event.what == "scores"}
        for _, what, name, figures in events:
            if what == "matmul":
                rows, columns, depth, sinks, *more = figures
                if head:
                    now += 2.0 * rows * columns * depth / (self.peak * self.profile.head)
                else:
                    sums = self.memory_s(8 * rows * columns * self.profile.sums) * sinks
                    now += self.matmul_s(rows, columns, depth, *more) + sums
            elif what == "scores":
                now += self.scores_s(name, figures[0])
            elif what == "stream" and name not in scored and not (head and name.startswith("cross_entropy")):
                now += self.memory_s(figures[0]) + self.profile.kernel_s
            elif what == "beside":
                now += self.memory_s(figures[0])
            elif what == "begin":
                axis, _, op = name.rpartition(" ")
                of = self.links.all_to_all if op == "all-to-all" else self.links.all_gather
                takes = of(figures[0], self.group(self.mesh.axis(axis or "tp").ranks))
                free = max(now, free) + takes
                begun[figures[1]] = free, takes, now, name.startswith("cp ")
            elif what == "wait":
                end, takes, since, over_cp = begun.pop(figures[0])
                shown = max(0.0, end - now) + self.profile.contention * min(takes, now - since)
                now += shown
                waited[over_cp] += shown
        return now, waited[0], waited[1]

    def layer(self, kind: Kind, whole: bool = False) -> np.ndarray:
        """The time of a layer; `whole`: all of it is recomputed."""
        if (measured := self._calibrated("layer, split" if self.made.splits_backward else "layer", kind)) is not None:
            return measured  # recomputation is part of it
        bill = layers_bill((kind,), self.made.layers.setting, whole)
        time = self._priced(bill)
        if not (host := self.profile.dispatch_s) or self.made.config.train.cuda_graph_impl != "none":
            return time
        f, b, w = time[ALL]
        late = max(0.0, host * bill.launches("BW") - (b + w))
        b, w = b + late * b / (b + w), w + late * w / (b + w)
        return np.array([(max(f, host * bill.launches("F")), b, w), time[OF_TP], time[OF_CP]])

    @cached_property
    def layers(self) -> Sums:
        return self.made.layers.sums(self.layer)

    @cached_property
    def stages(self) -> list[np.ndarray]:
        """The time of each stage for one micro-batch."""
        times = [self.layers.of(layers.start, layers.stop) for layers in self.made.stages]
        times[0] += self.embedding
        times[-1] += self.head
        return times

    def _calibrated(self, name: str, *kinds: Kind) -> np.ndarray | None:
        """The ends of a model are those of all its kinds."""
        known = any(self.profile.shape == shape_of(self.made, kind) for kind in kinds or set(self.made.layers.kinds))
        blocks = self.profile.blocks
        return np.array([blocks[name], (0.0,) * 3, (0.0,) * 3]) if known and name in blocks else None

    @cached_property
    def embedding(self) -> np.ndarray:
        measured = self._calibrated("embedding")
        return self._priced(self.made.layers.embedding) if measured is None else measured

    @cached_property
    def head(self) -> np.ndarray:
        """Final norm, output projection and loss, whose gradients are computed in forward."""
        measured = self._calibrated("head")
        return self._priced(self.made.layers.head, head=True) if measured is None else measured

    def update_s(self) -> tuple[float, float]:
        """Seconds of the gradient norm and of the optimizer's step, on the rank with the most to do."""
        made = self.made
        held, (weight, gradient, _) = made.holdings[made.worst], made.bytes_of_element()
        gradients = held.owned * gradient
        moved = gradients + 2 * held.optimizer + held.owned * weight
        if (measured := self._calibrated("update")) is not None:  # seconds per byte: update, norm
            return gradients * float(measured[ALL, B]), moved * float(measured[ALL, F]) + self.whole_matrices_s
        return self.memory_s(gradients), self.memory_s(moved) + self.whole_matrices_s

    @cached_property
    def whole_matrices_s(self) -> float:
        """Of Newton-Schulz and its exchange on the rank that has most to do; nothing of it is taken for hidden."""
        found = [held.matrices for held in self.made.holdings if held.matrices is not None]
        if not found:
            return 0.0
        most, stage = max(found, key=lambda one: one.flops), self.group(self.mesh.stage.ranks)
        medium = self.made.config.optim.muon_fp32_matmul_prec == "medium"
        peak = self.cluster.device.peak_tflops(torch.bfloat16 if medium else torch.float32) * 1e12
        return most.flops / (peak * self.profile.matmul) + self.links.all_to_all(most.moved, stage)
