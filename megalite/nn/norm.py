"""LayerNorm and RMSNorm over the last dim, by name; and RMSNorm of channels that are split over tp.

Weights are replicated over tp, and each tp rank sees other positions (or other heads). So each has a summand of their
gradient: they are `partial`, and the optimizer's buffer sums them over tp once per step. Those of split channels are
split, too.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from megalite.kernels.dispatch import stat_dtype
from megalite.kernels.norms import add_norm, norm
from megalite.nn.parameter import Maker
from megalite.parallel.comm import start_all_gather
from megalite.parallel.mesh import Axis
from megalite.parallel.spec import Constant, ParamSpec


def normalise(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, one_plus: bool) -> Tensor:
    """RMSNorm if there is no bias, otherwise LayerNorm."""
    return norm(x, weight + 1 if one_plus else weight, bias, eps)


def add_and_normalise(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, one_plus: bool
) -> tuple[Tensor, Tensor]:
    """h = x + residual and the norm of h."""
    return add_norm(x, residual, weight + 1 if one_plus else weight, bias, eps)


class Norm(nn.Module):
    """`kind` is "LayerNorm" or "RMSNorm"; `one_plus` stores the weight as its difference from 1. `shards`: of the
    weight (ParamSpec)."""

    def __init__(
        self,
        make: Maker,
        name: str,
        size: int,
        kind: str,
        eps: float,
        one_plus: bool = False,
        decay: bool = False,
        shards: tuple[tuple[int, str], ...] = (),
    ):
        super().__init__()
        self.eps, self.one_plus = eps, one_plus
        self.normalise, self.add_and_normalise = normalise, add_and_normalise  # or compiled (models/compiled.py)
        offset = 1.0 if one_plus else 0.0
        init = Constant(1.0 - offset)
        spec = partial(ParamSpec, shape=(size,), shards=shards, partial=() if shards else ("tp",), decay=decay)
        self.weight = make(spec(f"{name}.weight", init=init, offset=offset))
        self.bias = None
        if kind == "LayerNorm":
            self.bias = make(spec(f"{name}.bias", init=Constant(0.0)))

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """The norm of x; with a residual, their sum and the norm of the sum."""
        if residual is None:
            return self.normalise(x, self.weight, self.bias, self.eps, self.one_plus)
        return self.add_and_normalise(x, residual, self.weight, self.bias, self.eps, self.one_plus)


def _means_over(tp: Axis, products: Sequence[Tensor]) -> Sequence[Tensor]:
    """The mean [..., 1] of each product [..., c] over its channels on all ranks; all travel together."""
    own = torch.stack([product.mean(-1, keepdim=True) for product in products])
    return start_all_gather(own[None], tp).wait().mean(0).unbind(0)


class _SplitRMSNorm(Function):
    """The equations of kernels/norms.py. Where ranks have copies of a channel, as many of each, the means are the same,
    and every copy gets a summand of the channel's gradient."""

    @staticmethod
    def forward(ctx: Any, tp: Axis, eps: float, q: Tensor, k: Tensor, wq: Tensor, wk: Tensor) -> tuple[Tensor, ...]:
        wide = [x.to(stat_dtype(x)) for x in (q, k)]
        means = _means_over(tp, [x.square() for x in wide])
        rs = [torch.rsqrt(mean + eps) for mean in means]
        ctx.tp = tp
        ctx.save_for_backward(q, k, wq, wk, *rs)
        return tuple((x * r * w).to(q.dtype) for x, r, w in zip(wide, rs, (wq, wk), strict=True))

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        xs, ws, rs = (ctx.saved_tensors[i : i + 2] for i in (0, 2, 4))
        xhats = [x.to(r.dtype) * r for x, r in zip(xs, rs, strict=True)]
        products = [dy.to(xhat.dtype) * xhat for dy, xhat in zip(dys, xhats, strict=True)]
        means = _means_over(ctx.tp, [product * w for product, w in zip(products, ws, strict=True)])
        dxs = [
            (dy * r * w - xhat * (r * mean)).to(dy.dtype)
            for dy, r, w, xhat, mean in zip(dys, rs, ws, xhats, means, strict=True)
        ]
        return None, None, *dxs, *(p.flatten(0, -2).sum(0).to(w.dtype) for p, w in zip(products, ws, strict=True))


def norm_split(q: Tensor, k: Tensor, q_norm: Norm, k_norm: Norm, own: slice, tp: Axis) -> tuple[Tensor, Tensor]:
    """RMSNorm of q and of k [..., c], of whose channels every rank has c. `own`: where these are in k's weight."""
    if tp.size == 1:
        return q_norm(q), k_norm(k)  # type: ignore[return-value]
    weights = [w + 1 if q_norm.one_plus else w for w in (q_norm.weight, k_norm.weight[own])]
    return _SplitRMSNorm.apply(tp, q_norm.eps, q, k, *weights)  # type: ignore[return-value]
