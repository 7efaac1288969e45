"""AdamW with decoupled decay (arXiv:1711.05101), in place on flat tensors; equals torch.optim.AdamW.

g = scale * grad;  m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
w = w (1 - lr wd);  w -= lr / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^t) + eps)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


@torch.no_grad()
def adamw_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
    grad_scale: float = 1.0,
) -> None:
    """One update; all tensors have one shape and dtype. `grad` is scaled in place. `step` counts from 1."""
    b1, b2 = betas
    if grad_scale != 1.0:
        grad.mul_(grad_scale)
    if weight_decay:
        param.mul_(1 - lr * weight_decay)
    exp_avg.lerp_(grad, 1 - b1)
    exp_avg_sq.mul_(b2).addcmul_(grad, grad, value=1 - b2)
    denominator = exp_avg_sq.sqrt().div_(math.sqrt(1 - b2**step)).add_(eps)
    param.addcdiv_(exp_avg, denominator, value=-lr / (1 - b1**step))
