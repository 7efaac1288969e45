"""RMSNorm of the output of a recurrence, times SiLU of its gate (arXiv:2412.06464, section 3.3).

    y = o r w silu(z),   r = 1 / sqrt(mean(o^2) + eps)

Only o, z and w are saved. Statistics and products are in fp32 (fp64 for fp64 inputs).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from megalite.kernels.dispatch import accum_dtype


class _GatedNorm(Function):
    @staticmethod
    def forward(ctx: Any, o: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.eps = eps
        ctx.save_for_backward(o, z, weight)
        dtype = accum_dtype(o)
        o32 = o.to(dtype)
        rstd = torch.rsqrt(o32.square().mean(-1, keepdim=True) + eps)
        return (o32 * rstd * weight.to(dtype) * F.silu(z.to(dtype))).to(o.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        o, z, weight = ctx.saved_tensors
        dtype = accum_dtype(o)
        o32, z32, w, dy32 = (x.to(dtype) for x in (o, z, weight, dy))
        rstd = torch.rsqrt(o32.square().mean(-1, keepdim=True) + ctx.eps)
        xhat = o32 * rstd
        sigmoid = z32.sigmoid()
        dz = dy32 * xhat * w * sigmoid * (1 + z32 * (1 - sigmoid))
        dnorm = dy32 * z32 * sigmoid
        dw = (dnorm * xhat).flatten(0, -2).sum(0)
        dxhat = dnorm * w
        do = rstd * (dxhat - xhat * (dxhat * xhat).mean(-1, keepdim=True))
        return do.to(o.dtype), dz.to(z.dtype), dw.to(weight.dtype), None


def gated_norm(o: Tensor, z: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Return rmsnorm(o) weight silu(z) over the last dim of o and z [..., V], in the dtype of o."""
    return _GatedNorm.apply(o, z, weight, eps)  # type: ignore[return-value]
