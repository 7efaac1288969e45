"""LayerNorm and RMSNorm over the last dim, and RMSNorm of channels that are split over tp.

Weights are replicated over tp, and each tp rank sees other positions (or other heads). Each rank therefore has a
partial gradient, which the optimizer's buffer sums over tp once per step (`partial_grad_axes`). Weights of split
channels are split too.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from megalite.config.options import ModelConfig
from megalite.kernels.dispatch import accum_dtype
from megalite.kernels.norms import add_norm, norm
from megalite.nn.parameter import ParamFactory, shapes
from megalite.parallel.comm import start_all_gather
from megalite.parallel.mesh import Axis
from megalite.parallel.spec import Constant, ParamSpec


def normalize(
    x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, zero_centered: bool
) -> Tensor | tuple[Tensor, Tensor]:
    """Return RMSNorm(x) without a bias, else LayerNorm(x); with a residual, x + residual and the norm of the sum."""
    weight = weight + 1 if zero_centered else weight
    return norm(x, weight, bias, eps) if residual is None else add_norm(x, residual, weight, bias, eps)


class Norm(nn.Module):
    """The model's LayerNorm or RMSNorm over `size` channels; `decay`: its weight has weight decay.

    With `zero_centered`, the weight is stored as its difference from 1. `eps`: default: `norm_epsilon` of the model.
    """

    def __init__(
        self,
        make_param: ParamFactory,
        name: str,
        size: int,
        model: ModelConfig,
        *,
        decay: bool = False,
        eps: float | None = None,
    ):
        super().__init__()
        self.eps = model.norm_epsilon if eps is None else eps
        self.zero_centered = zero_centered = model.apply_layernorm_1p
        self.normalize: Callable[..., Any] = normalize  # or compiled (models/torch_compile.py)
        spec = partial(ParamSpec, shape=(size,), partial_grad_axes=("tp",), weight_decay=decay)
        self.weight = make_param(
            spec(f"{name}.weight", init=Constant(1.0 - zero_centered), stored_offset=float(zero_centered))
        )
        self.bias = make_param(spec(f"{name}.bias", init=Constant(0.0))) if model.normalization == "LayerNorm" else None

    def extra_repr(self) -> str:
        return shapes(self)

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """Return the norm of x; with a residual, x + residual and the norm of the sum."""
        return self.normalize(x, residual, self.weight, self.bias, self.eps, self.zero_centered)


def _all_gather_means(tp: Axis, products: Sequence[Tensor]) -> Sequence[Tensor]:
    """Return the mean [..., 1] of each product [..., c] over the channels of all ranks, with one all-gather."""
    means = torch.stack([product.mean(-1, keepdim=True) for product in products])
    return start_all_gather(means[None], tp).wait().mean(0).unbind(0)


class _TensorParallelRMSNorm(Function):
    """RMSNorm of channels that are split over tp, with the equations of kernels/norms.py.

    If ranks have copies of the channels (equally many of each), the means are the same, and every copy gets a partial
    gradient.
    """

    @staticmethod
    def forward(ctx: Any, tp: Axis, eps: float, q: Tensor, k: Tensor, wq: Tensor, wk: Tensor) -> tuple[Tensor, ...]:
        xs = [x.to(accum_dtype(x)) for x in (q, k)]
        means = _all_gather_means(tp, [x.square() for x in xs])
        rs = [torch.rsqrt(mean + eps) for mean in means]
        ctx.tp = tp
        ctx.save_for_backward(q, k, wq, wk, *rs)
        return tuple((x * r * w).to(q.dtype) for x, r, w in zip(xs, rs, (wq, wk), strict=True))

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        saved = ctx.saved_tensors  # read once: recomputation frees saved tensors when they are read
        xs, ws, rs = saved[:2], saved[2:4], saved[4:]
        xhats = [x.to(r.dtype) * r for x, r in zip(xs, rs, strict=True)]
        products = [dy.to(xhat.dtype) * xhat for dy, xhat in zip(dys, xhats, strict=True)]
        means = _all_gather_means(ctx.tp, [product * w for product, w in zip(products, ws, strict=True)])
        rows = zip(dys, xhats, rs, ws, means, strict=True)
        dxs = [(dy * r * w - xhat * (r * mean)).to(dy.dtype) for dy, xhat, r, w, mean in rows]
        return None, None, *dxs, *(p.flatten(0, -2).sum(0).to(w.dtype) for p, w in zip(products, ws, strict=True))


class QKNormAllHeads(nn.Module):
    """RMSNorm of a token's queries over all heads, and of its keys over all groups.

    `widths` are the channels of q and k over all tp ranks. Unless `kv_sharded`, every rank has the keys of its group
    only, and a replicated weight. Both weights belong to this module, because a module waits for the all-gather of its
    own weights when it is called (optim/zero/sync.py).
    """

    def __init__(
        self,
        make_param: ParamFactory,
        name: str,
        widths: tuple[int, int],
        kv_sharded: bool,
        model: ModelConfig,
        *,
        decay: bool,
    ):
        super().__init__()
        self.tp = make_param.mesh.tp
        self.eps = model.norm_epsilon if model.qk_norm_eps is None else model.qk_norm_eps
        self.zero_centered = zero_centered = model.apply_layernorm_1p
        self.normalize: Callable[..., Any] = normalize  # or compiled (models/torch_compile.py)
        spec = partial(
            ParamSpec, init=Constant(1.0 - zero_centered), weight_decay=decay, stored_offset=float(zero_centered)
        )
        shards, partial_grad_axes = (((0, "tp"),), ()) if kv_sharded else ((), ("tp",))
        self.q = make_param(spec(f"{name}.q_norm.weight", widths[:1], shards=((0, "tp"),)))
        self.k = make_param(
            spec(f"{name}.k_norm.weight", widths[1:], shards=shards, partial_grad_axes=partial_grad_axes)
        )

    def extra_repr(self) -> str:
        return shapes(self)

    def forward(self, q: Tensor, k: Tensor, kv_rows: slice) -> tuple[Tensor, ...]:
        """Return the norms of this rank's q [..., h*K] and k [..., g*K]; `kv_rows` are the rows of the weight for k."""
        ws = [w + 1 if self.zero_centered else w for w in (self.q, self.k[kv_rows])]
        if self.tp.size > 1:
            return _TensorParallelRMSNorm.apply(self.tp, self.eps, q, k, *ws)  # type: ignore[return-value]
        return tuple(self.normalize(x, None, w, None, self.eps, False) for x, w in zip((q, k), ws, strict=True))
