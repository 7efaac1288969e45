"""Soft-capping (Gemma 2, arXiv:2408.00118, section 2): c = cap tanh(x / cap), so that |c| < cap.

    dx = dc (1 - (c / cap)^2)

Attention caps its scores, between the scale and the mask (kernels/attention.py), and the head its logits
(kernels/cross_entropy.py). Both apply it in fp32 (fp64 for fp64) to scores and logits that they never store in that
dtype, so backward computes tanh again.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megalite.kernels.dispatch import accum_dtype, kernel

if TYPE_CHECKING:
    import triton.language as tl


def soft_cap(x: Tensor, cap: float | None) -> Tensor:
    """Return cap tanh(x / cap) in the dtype of x; x itself if `cap` is None."""
    if cap is None:
        return x
    return (torch.tanh(x.to(accum_dtype(x)) / cap) * cap).to(x.dtype)


def soft_cap_with_slope(x: Tensor, cap: float) -> tuple[Tensor, Tensor]:
    """Return cap tanh(x / cap) and its derivative, both in the accumulation dtype."""
    t = x.to(accum_dtype(x), copy=True).div_(cap).tanh_()
    slope = torch.addcmul(t.new_ones(()), t, t, value=-1)
    return t.mul_(cap), slope


@kernel
def tanh(x, EXACT_NEAR_0: tl.constexpr):
    """Return tanh(x) = sign(x) (1 - e) / (1 + e) with e = exp(-2 |x|), also for infinite x.

    On a GPU, exp2 and rsqrt take one instruction each, and a division takes 8. The absolute error of 1 - e, half a unit
    in the last place of 1, is large relative to a small x, but not to the rounding of an x from half precision.
    EXACT_NEAR_0, for fp32: replace it there by a polynomial, a minimax fit of (tanh(x) / x - 1) / x^2 with a relative
    error of 1.4e-8 in tanh(x).
    """
    e = tl.exp2(tl.abs(x) * -2.8853900817779268)  # 2 log2(e)
    root = tl.rsqrt(1.0 + e)
    t = (1.0 - e) * (root * root)
    t = tl.where(x < 0.0, -t, t)
    if EXACT_NEAR_0:
        square = x * x
        q = ((0.0172569789 * square - 0.0530529432) * square + 0.1332598776) * square - 0.3333314955
        t = tl.where(square < 0.25, x + x * (square * q), t)
    return t
