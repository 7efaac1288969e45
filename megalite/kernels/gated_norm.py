"""RMSNorm of the output of a recurrence, times a function of its gate.

    gated delta net        y = o r w silu(z),  r = 1 / sqrt(mean(o^2) + eps)           (arXiv:2412.06464, section 3.3)
    Kimi delta attention   y = o r w sigmoid(z)                                        (arXiv:2510.26692)
    Mamba-2                y = n r w,  n = o silu(z),  r = 1 / sqrt(mean(n^2) + eps)   (arXiv:2405.21060, section 7.1)

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
    def forward(
        ctx: Any, o: Tensor, z: Tensor, weight: Tensor, eps: float, gate_first: bool, sigmoid_gate: bool
    ) -> Tensor:
        ctx.eps, ctx.gate_first, ctx.sigmoid_gate = eps, gate_first, sigmoid_gate
        ctx.save_for_backward(o, z, weight)
        dtype = accum_dtype(o)
        gate = z.to(dtype).sigmoid() if sigmoid_gate else F.silu(z.to(dtype))
        x = o.to(dtype) * gate if gate_first else o.to(dtype)
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.to(dtype)
        return (y if gate_first else y * gate).to(o.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        o, z, weight = ctx.saved_tensors
        dtype = accum_dtype(o)
        o32, z32, w, dy32 = (x.to(dtype) for x in (o, z, weight, dy))
        sigmoid = z32.sigmoid()
        gate = sigmoid if ctx.sigmoid_gate else z32 * sigmoid
        x = o32 * gate if ctx.gate_first else o32
        rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + ctx.eps)
        xhat = x * rstd
        dnorm = dy32 if ctx.gate_first else dy32 * gate
        dw = (dnorm * xhat).flatten(0, -weight.dim() - 1).sum(0)
        dxhat = dnorm * w
        dx = rstd * (dxhat - xhat * (dxhat * xhat).mean(-1, keepdim=True))
        if ctx.gate_first:
            do, dgate = dx * gate, dx * o32
        else:
            do, dgate = dx, dy32 * xhat * w
        slope = 1 - sigmoid if ctx.sigmoid_gate else 1 + z32 * (1 - sigmoid)
        dz = dgate * sigmoid * slope
        return do.to(o.dtype), dz.to(z.dtype), dw.to(weight.dtype), None, None, None


def gated_norm(
    o: Tensor, z: Tensor, weight: Tensor, eps: float, *, gate_first: bool = False, sigmoid_gate: bool = False
) -> Tensor:
    """Return rmsnorm(o) weight silu(z), or with `gate_first` rmsnorm(o silu(z)) weight, in the dtype of o.

    Args:
        o: The output of a recurrence, [..., V]. The norm is over V.
        z: The gate, of the same shape.
        weight: The weight, of the shape of one or several of the last dims of o, less than all.
        eps: The number that is added to the mean of squares.
        gate_first: Multiply by the gate before the norm.
        sigmoid_gate: The gate is sigmoid(z) instead of silu(z).
    """
    return _GatedNorm.apply(o, z, weight, eps, gate_first, sigmoid_gate)  # type: ignore[return-value]
