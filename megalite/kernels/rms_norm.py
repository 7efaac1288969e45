"""RMSNorm over the last dim (arXiv:1910.07467).

    y = x * r * w,  r = 1 / sqrt(mean(x^2) + eps)
    dx = r * (dy * w - xhat * mean(dy * w * xhat)),  xhat = x * r;   dw = sum over rows of dy * xhat

Statistics in fp32 (fp64 for fp64 input). Saved: x, w and r (one number per row).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


def stat_dtype(x: Tensor) -> torch.dtype:
    """The dtype in which reductions over `x` are taken."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


class _RMSNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x32 = x.to(stat_dtype(x))
        r = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, r)
        return (x32 * r * weight).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, r = ctx.saved_tensors
        xhat = x.to(r.dtype) * r
        dy32 = dy.to(r.dtype)
        dw = (dy32 * xhat).flatten(0, -2).sum(0).to(weight.dtype)
        g = dy32 * weight
        dx = (g - xhat * (g * xhat).mean(-1, keepdim=True)) * r
        return dx.to(x.dtype), dw, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last dim of x [..., D] by its root mean square; weight [D]."""
    return _RMSNorm.apply(x, weight, eps)  # type: ignore[return-value]
