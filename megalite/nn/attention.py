"""Tensor-parallel self-attention: heads split over tp, grouped key/value heads, rotary positions, q/k norm.

    x_sBD --gather--> q_SBhK, k_SBgK, v_SBgK -> rope -> softmax(q k^T / sqrt(K)) v -> o_SBhK @ W --scatter--> y_sBD

q [H*K, D] and kv [2, G*K, D] are two parameters. With G >= tp both are split over tp. With G < tp, kv is replicated,
each rank computes only the group that its query heads use, and the replicas' gradients are summed over tp with those of
the norms. A fused qkv tensor could not be described by one box in that case.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from torch import Tensor, nn

from megalite.kernels.attention import Documents, attention
from megalite.kernels.blocked_attention import Drop
from megalite.kernels.dropout import fold
from megalite.kernels.rope import apply_rope, pairs_to_halves
from megalite.nn.context import ByHeads, Gathered
from megalite.nn.embedding import SITE_ATTENTION
from megalite.nn.later import Later
from megalite.nn.linear import add_bias, gather_linear, linear_scatter
from megalite.nn.norm import HeadNorms, Norm
from megalite.nn.parameter import Maker
from megalite.nn.places import Places
from megalite.nn.recompute import recompute
from megalite.parallel.spec import Constant, Normal, ParamSpec


@dataclass(frozen=True)
class Coordinates:
    """The facts of a micro-batch, besides x, that attention and dropout need.

    rope          cos and sin, [S, K / 2] or [S, B, K / 2]; None: no rotary positions
    sample_ids_B  global sample numbers; step: the training step. Both are coordinates of dropout
    documents     the documents that attention is limited to (kernels/attention.py); None: each sample is one
    later         where weight gradients wait (nn/later.py)
    places        how the samples are cut over cp; None: they are whole
    places_S      the position in its sample of each of the rank's S tokens; None: 0 .. S - 1
    again         the layers are computed again in backward, as a whole
    loss_weight   the gradient that the loss will get in backward; None: unknown
    """

    rope: tuple[Tensor, Tensor] | None
    sample_ids_B: Tensor
    step: int
    documents: Documents | None = None
    later: Later | None = None
    places: Places | None = None
    places_S: Tensor | None = None
    again: bool = False
    loss_weight: float | Tensor | None = None


def rotate(q_SBhK: Tensor, k_SBgK: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    return apply_rope(q_SBhK, cos, sin), apply_rope(k_SBgK, cos, sin)


@dataclass(frozen=True)
class AttentionShape:
    """Sizes and kind of one layer's attention.

    heads, groups  query heads H and groups G of keys and values, each of `head_size` K channels
    std, out_std   standard deviations of the initial weights; `out_std`: of the output projection
    bias           whether all projections have a bias; `qkv_bias`: all but the output projection
    qk_norm        kind, eps, one_plus and decay (nn/norm.py) of a norm on each head of q and k; None: no norm.
                   `over_heads`: RMSNorm on all heads of a token at once
    window         how many keys a query sees, its own included; None: all keys up to its own
    softmax_type   vanilla; learnable: one more logit per head, a sink, in the softmax's sum; off-by-one: a sink of 0
    rotary         whether q and k are rotated by position; `interleaved`: neighbouring channels are a pair
    exchange       over cp: allgather or a2a (nn/context.py)
    """

    hidden_size: int
    heads: int
    groups: int
    head_size: int
    std: float
    out_std: float
    bias: bool
    qkv_bias: bool
    qk_norm: tuple[str, float, bool, bool] | None
    over_heads: bool
    window: int | None
    softmax_type: str
    rotary: bool
    interleaved: bool
    dropout_p: float
    exchange: str = "allgather"


class Attention(nn.Module):
    """`again`: whether scores and softmax are computed again in backward."""

    def __init__(self, make: Maker, name: str, shape: AttentionShape, layer: int, again: bool):
        super().__init__()
        tp = make.mesh.tp
        self.cp, self.tp, self.shape, self.layer = make.mesh.cp, tp, shape, layer
        self.seed, self.again = make.seed, again
        self.rotate = rotate  # or compiled (models/compiled.py)
        self.attend: Callable[..., Tensor] = attention  # or one with a cache of keys and values (generate/)
        D, H, G, K, std = shape.hidden_size, shape.heads, shape.groups, shape.head_size, shape.std
        self.replicated = tp.size > G
        self.group = tp.rank * G // tp.size  # this rank's only group if they are replicated
        kv_shards, summed = ((), ("tp",)) if self.replicated else (((1, "tp"),), ())
        zero = Constant(0.0)
        self.q = make(ParamSpec(f"{name}.q", (H * K, D), shards=((0, "tp"),), init=Normal(std)))
        kv = partial(ParamSpec, shards=kv_shards, partial=summed, stacked=True)
        self.kv = make(kv(f"{name}.kv", (2, G * K, D), init=Normal(std)))
        self.q_bias = self.kv_bias = self.out_bias = None
        if shape.bias or shape.qkv_bias:
            self.q_bias = make(ParamSpec(f"{name}.q_bias", (H * K,), shards=((0, "tp"),), init=zero, decay=False))
            self.kv_bias = make(kv(f"{name}.kv_bias", (2, G * K), init=zero, decay=False))
        self.q_norm = self.k_norm = self.head_norms = None
        if shape.qk_norm is not None and shape.over_heads:
            self.head_norms = HeadNorms(make, name, (H * K, G * K), not self.replicated, *shape.qk_norm[1:])
        elif shape.qk_norm is not None:
            self.q_norm = Norm(make, f"{name}.q_norm", K, *shape.qk_norm)
            self.k_norm = Norm(make, f"{name}.k_norm", K, *shape.qk_norm)
        self.sink = None
        if shape.softmax_type == "learnable":
            self.sink = make(ParamSpec(f"{name}.sink", (H,), shards=((0, "tp"),), init=Normal(std), decay=False))
        self.out = make(ParamSpec(f"{name}.out", (D, H * K), shards=((1, "tp"),), init=Normal(shape.out_std)))
        if shape.bias:
            self.out_bias = make(ParamSpec(f"{name}.out_bias", (D,), partial=("tp",), init=zero, decay=False))

    def forward(self, x_sBD: Tensor, where: Coordinates) -> Tensor:
        K = self.shape.head_size
        kv, kv_bias, rows = self.kv, self.kv_bias, slice(None)
        if self.replicated:
            rows = slice(self.group * K, (self.group + 1) * K)
            kv = kv[:, rows]
            kv_bias = None if kv_bias is None else kv_bias[:, rows]
        q, kv_out = gather_linear(x_sBD, [self.q, kv], self.tp, where.later)
        q_SBhK = add_bias(q, self.q_bias).unflatten(-1, (-1, K))
        k_SBgK, v_SBgK = add_bias(kv_out, kv_bias).unflatten(-1, (2, -1, K)).unbind(-3)
        if self.head_norms is not None:
            normed = self.head_norms(q_SBhK.flatten(-2), k_SBgK.flatten(-2), rows)
            q_SBhK, k_SBgK = (x.unflatten(-1, (-1, K)) for x in normed)
        elif self.q_norm is not None and self.k_norm is not None:
            q_SBhK, k_SBgK = self.q_norm(q_SBhK), self.k_norm(k_SBgK)
        if where.rope is not None and self.shape.rotary:
            if self.shape.interleaved:
                size = 2 * where.rope[0].shape[-1]
                q_SBhK, k_SBgK = pairs_to_halves(q_SBhK, size), pairs_to_halves(k_SBgK, size)
            q_SBhK, k_SBgK = self.rotate(q_SBhK, k_SBgK, *where.rope)
        drop = None
        if self.shape.dropout_p and self.training:
            key = fold(self.seed, where.step, self.layer, SITE_ATTENTION)
            drop = Drop(self.shape.dropout_p, key, where.sample_ids_B, self.tp.start_of(q_SBhK.shape[2]))
        scale, window, sink = 1.0 / math.sqrt(K), self.shape.window, self.sink
        if self.shape.softmax_type == "off-by-one":
            sink = q_SBhK.new_zeros(q_SBhK.shape[2])
        how = dict(scale=scale, drop=drop, documents=where.documents, window=window, sink_H=sink)
        core = partial(self._attend_across(where), **how)
        qkv = (q_SBhK, k_SBgK, v_SBgK)
        o_SBhK = recompute(core, *qkv) if self.again and self.training else core(*qkv)
        y_sBD = linear_scatter(o_SBhK.flatten(-2), self.out, self.tp, later=where.later)
        return add_bias(y_sBD, self.out_bias)

    def _attend_across(self, where: Coordinates) -> Callable[..., Tensor]:
        """`attend` of the whole samples, of which a rank of cp has a part."""
        if where.places is None:
            return self.attend
        way = ByHeads if self.shape.exchange == "a2a" else Gathered
        return way(self.attend, self.cp, where.places, where.again or (self.again and self.training))
