"""A loss that arises inside a model and is no output of it: a router's balance, a penalty on logits.

It needs no way to the end of the pipeline, and no scale that is set from outside: what the model's loss will be
multiplied by is known in forward, on every stage (Batch.loss_weight), so the one inside gets the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


class _Attach(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, value: Tensor, weight: float | Tensor) -> Tensor:
        ctx.weight, ctx.value = weight, value.detach()
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        return dx, torch.ones_like(ctx.value) * ctx.weight, None


def attach(x: Tensor, value: Tensor, weight: float | Tensor) -> Tensor:
    """x as it is. In backward, `value` (a loss, any shape: its elements are summands) gets the gradient `weight`, as
    if weight * value.sum() were part of the loss; each backward that passes x counts it once, whatever dx is."""
    return _Attach.apply(x, value, weight)  # type: ignore[return-value]
