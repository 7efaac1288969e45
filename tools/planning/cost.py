"""Seconds of forward, backward and weight gradients of every stage on one rank, and how much of them tp waits.

Of a layer, N tokens of a micro-batch, with the names of docs/shapes.md and the FLOPs of megalite/models/flops.py:

    matmuls      FLOPs / (peak x share), more where the result has too few tiles, or rows and columns are no multiples
                 of 128; of weights also the bytes of the sums that they are added to
    attention    FLOPs of the causal half / (peak x share S / (S + half)); backward 2.5 times as many as forward
    elementwise  bytes / memory: norms, residuals, rotation, activation, what is read and written once each
    tp           forward: all-gather and reduce-scatter around attention and around the MLP, all waited for. Backward:
                 the all-gathers of dy are waited for, the gather of x hides behind dx = dy W, the reduce-scatter of dx
                 behind dW (megalite/nn/linear.py); with a split backward nothing hides the latter

and never less than the host takes to launch it all, unless a CUDA graph does. A calibrated profile knows the layer.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from functools import cached_property

from megalite.models.flops import head_flops, layer_parts
from megalite.parallel.mesh import Mesh, plan_mesh
from megalite.train.arrangement import Arrangement
from tools.planning.cluster import Cluster
from tools.planning.links import Group, Links
from tools.planning.profile import Profile

FORWARD_KERNELS, BACKWARD_KERNELS = 22, 44  # that a layer launches, with what autograd adds; collectives: 4 each
SCORE_BYTES = (13, 21)  # per score in 16 bits that is kept in memory, forward and backward; dropout's mask is a byte


@dataclass(frozen=True)
class Seconds:
    """Of F, B and W on one rank: all of it, and what of that is waiting for tp."""

    all: tuple[float, float, float] = (0.0, 0.0, 0.0)
    tp: tuple[float, float, float] = (0.0, 0.0, 0.0)

    def __add__(self, other: Seconds) -> Seconds:
        return self.combine(1, other, 1)

    def combine(self, a: float, other: Seconds, b: float) -> Seconds:
        mix = lambda x, y: tuple(a * i + b * j for i, j in zip(x, y, strict=True))  # noqa: E731
        return Seconds(mix(self.all, other.all), mix(self.tp, other.tp))

    def times(self, n: float) -> Seconds:
        return self.combine(n, Seconds(), 0)


def shape_of(made: Arrangement) -> str:
    """What a layer's time depends on: arrangements of one shape share what was calibrated."""
    m = made.config.model
    widths = (m.hidden_size, m.ffn_size, m.num_attention_heads, m.groups, m.head_size, made.padded_vocab)
    batch = (m.seq_length, made.config.train.micro_batch_size, made.tp)
    return f"{widths} {m.activation} {m.normalization} {batch} {made.dtype} {made.recompute} {m.windows[0]}"


@dataclass(frozen=True)
class Costs:
    """Of the stages of `made`, on a rank of the first tp group."""

    made: Arrangement
    cluster: Cluster
    profile: Profile

    @cached_property
    def links(self) -> Links:
        measured = self.profile.collective
        return Links(dataclasses.replace(self.cluster, inside=measured) if measured else self.cluster)

    @cached_property
    def peak(self) -> float:
        return self.cluster.device.peak_tflops(self.made.dtype) * 1e12

    @cached_property
    def mesh(self) -> Mesh:
        """Of rank 0."""
        return plan_mesh(self.made.world, 0, **self.made.sizes)

    @property
    def split(self) -> bool:
        return self.made.splits_backward

    @cached_property
    def tp_group(self) -> Group:
        return Group.of(range(self.made.tp), self.cluster.per_node)  # tp is innermost

    @property
    def gather_s(self) -> float:
        """One all-gather, or reduce-scatter, of a micro-batch's hidden states over tp."""
        n = self.made.tokens * self.made.config.model.hidden_size * self.made.dtype.itemsize
        return self.links.all_gather(n, self.tp_group)

    def memory_s(self, num_bytes: float) -> float:
        return num_bytes / (self.cluster.device.memory_bytes_per_s * self.profile.memory)

    def matmul_s(self, rows: float, columns: float, depth: float) -> float:
        """[rows, depth] @ [depth, columns]."""
        up = lambda n: math.ceil(n / 128)  # noqa: E731
        tiles = up(rows) * up(columns)
        padded = 1.0
        if self.profile.tiles:
            padded = tiles * 128**2 / (rows * columns) * max(1.0, self.profile.tiles / tiles)
        flops = 2.0 * rows * columns * depth * padded
        return flops / (self.peak * self.profile.matmul) + self.profile.kernel_s

    def elementwise_s(self, per_token: float, kernels: int) -> float:
        """`per_token`: elements that are read and written."""
        return self.memory_s(per_token * self.made.tokens * self.made.dtype.itemsize) + kernels * self.profile.kernel_s

    def attention_s(self) -> tuple[float, float]:
        """Of one layer: forward, backward."""
        made, m, of = self.made, self.made.config.model, self.profile
        scores = layer_parts(m, m.seq_length)[2] * made.tokens / made.tp
        if not of.fused:
            elements = made.tokens * m.seq_length * m.num_attention_heads / made.tp
            twice = (
                2 * scores,
                4 * scores,
            )  # the whole square; backward's scores are recomputed by the caller, if at all
            times = zip(twice, SCORE_BYTES, strict=True)
            forward, backward = (f / (self.peak * of.attention[0]) + self.memory_s(b * elements) for f, b in times)
            return forward, backward
        halves, shares = of.attention_half, of.attention
        full = [share * m.seq_length / (m.seq_length + half) for share, half in zip(shares, halves, strict=True)]
        return scores / (self.peak * full[0]), 2.5 * scores / (self.peak * full[1])

    @cached_property
    def matmuls(self) -> dict[str, tuple[float, float]]:
        """Name -> (columns, depth) of a layer's weights on this rank."""
        m, tp = self.made.config.model, self.made.tp
        q, kv = m.num_attention_heads * m.head_size / tp, max(m.groups / tp, 1) * m.head_size
        wide = 2 if m.activation == "swiglu" else 1
        D, F = m.hidden_size, m.ffn_size / tp
        return {"q": (q, D), "kv": (2 * kv, D), "out": (D, q), "up": (wide * F, D), "down": (D, F)}

    def _weight_grad_s(self, columns: float, depth: float) -> float:
        return self.matmul_s(columns, depth, self.made.tokens) + self.memory_s(8 * columns * depth * self.profile.sums)

    @cached_property
    def layer(self) -> Seconds:
        name = "layer, split" if self.split else "layer"
        if (known := self._calibrated(name)) is not None:
            return known
        forward, backward, weights, again = self._layer_compute()
        wait_f, wait_b, wait_w = self._layer_tp()
        host = self.profile.dispatch_s if self.made.config.train.cuda_graph_impl == "none" else 0.0
        kernels = 4 * (self.made.tp > 1)
        forward = max(forward, host * (FORWARD_KERNELS + kernels) - wait_f)
        both = backward + weights
        slow = max(1.0, (host * (BACKWARD_KERNELS + kernels) - wait_b - wait_w) / both)
        granularity, _, _, modules = self.made.recompute
        mlp_again = granularity == "selective" and "mlp" in modules
        wait_b += wait_f / 2 * mlp_again  # its gather and scatter
        tp = (wait_f, wait_b, wait_w)
        return Seconds((forward + wait_f, backward * slow + again + wait_b, weights * slow + wait_w), tp)

    def _layer_compute(self) -> tuple[float, float, float, float]:
        """Forward, backward to the input, weight gradients, and what a selective recompute does again."""
        made, m = self.made, self.made.config.model
        tokens, tp = made.tokens, made.tp
        forward = {name: self.matmul_s(tokens, c, d) for name, (c, d) in self.matmuls.items()}
        backward = sum(self.matmul_s(tokens, d, c) for c, d in self.matmuls.values())
        weights = sum(self._weight_grad_s(c, d) for c, d in self.matmuls.values())
        scores_f, scores_b = self.attention_s()
        D, F = m.hidden_size / tp, m.ffn_size / tp
        qk = (m.num_attention_heads + m.groups) * m.head_size / tp * (any(m.rotary) + m.qk_layernorm)
        wide = 2 if m.activation == "swiglu" else 1
        biases = (2 * D + qk) * m.add_bias_linear
        dropout = 2 * D * (m.hidden_dropout > 0)
        act = self.elementwise_s((wide + 1) * F, 1)
        rest_f = self.elementwise_s(9 * D + 2 * qk + biases + dropout, 6) + act
        rest_b = self.elementwise_s(12 * D + 2 * qk + biases + dropout + (2 * wide + 2) * F, 8)
        granularity, _, _, modules = made.recompute
        again = 0.0
        if granularity == "selective":
            again = scores_f * ("core_attn" in modules) + (forward["up"] + forward["down"] + act) * ("mlp" in modules)
        return sum(forward.values()) + scores_f + rest_f, backward + scores_b + rest_b, weights, again

    def _layer_tp(self) -> tuple[float, float, float]:
        """What a layer's F, B and W wait for tp."""
        one, slows = self.gather_s, self.profile.contention
        if not one:
            return 0.0, 0.0, 0.0
        hidden = 0.0
        inputs = [[self.matmuls[name] for name in names] for names in (("q", "kv"), ("up",))]
        dx = [sum(self.matmul_s(self.made.tokens, d, c) for c, d in some) for some in inputs]
        dw = [sum(self._weight_grad_s(c, d) for c, d in some) for some in inputs]
        for before in dx if not self.split else ():
            hidden += max(0.0, one - before) + slows * min(one, before)
        if self.split:  # W gathers the next x behind this one's matmul
            return 4 * one, 4 * one, sum(max(0.0, one - t) + slows * min(one, t) for t in dw)
        return 4 * one, 2 * one + hidden + sum(max(0.0, one - t) + slows * min(one, t) for t in dw), 0.0

    @cached_property
    def embedding(self) -> Seconds:
        if (known := self._calibrated("embedding")) is not None:
            return known
        D, one = self.made.config.model.hidden_size, self.gather_s
        time = self.elementwise_s(3 * D, 3)
        return Seconds((time + one, 2 * time + one, 0.0), (one, one, 0.0))

    @cached_property
    def head(self) -> Seconds:
        """Final norm, output projection and loss, whose gradients are computed in forward."""
        if (known := self._calibrated("head")) is not None:
            return known
        made, m = self.made, self.made.config.model
        flops = 3 * head_flops(m, made.padded_vocab) * made.tokens / made.tp
        norm, one = self.elementwise_s(3 * m.hidden_size / made.tp, 1), self.gather_s
        time = flops / (self.peak * self.profile.head) + norm
        return Seconds((time + 2 * one, 2 * norm, 0.0), (2 * one, 0.0, 0.0))

    def _calibrated(self, name: str) -> Seconds | None:
        if self.profile.shape != shape_of(self.made) or name not in self.profile.blocks:
            return None
        return Seconds(self.profile.blocks[name])

    def block(self, layers: int) -> Seconds:
        """So many layers on one stage, with what is recomputed."""
        granularity, method, n, _ = self.made.recompute
        time = self.layer.times(layers)
        if granularity == "full" and not self._knows_recompute:
            again = min(n, layers) if method == "block" else layers
            time += Seconds((0.0, self.layer.all[0] * again, 0.0), (0.0, self.layer.tp[0] * again, 0.0))
        return time

    def stages(self) -> list[Seconds]:
        """Of one micro-batch."""
        found = list(map(self.block, self.made.counts))
        found[0] += self.embedding
        found[-1] += self.head
        return found

    @property
    def _knows_recompute(self) -> bool:
        return self._calibrated("layer, split" if self.split else "layer") is not None

    def update_s(self) -> tuple[float, float]:
        """Seconds of the rank that has most to do: the norm of the gradients, and the optimizer's step."""
        made = self.made
        held, shard = made.holdings[made.worst], self.mesh.shard.size
        gradients = held.gradients / shard
        moved = gradients + 2 * held.optimizer + held.weights / shard
        if (known := self._calibrated("update")) is not None:  # seconds per byte: update, norm
            return gradients * known.all[1], moved * known.all[0]
        return self.memory_s(gradients), self.memory_s(moved)
