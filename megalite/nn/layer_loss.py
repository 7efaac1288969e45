"""A loss of a layer that is trained in addition to the loss of the head; plugins' mixers use it."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from megalite.config.options import ConfigError
from megalite.nn.micro_batch import ForwardContext


class _LayerLoss(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, loss: Tensor, coefficient: float, name: str, layer: int, forward_ctx: ForwardContext
    ) -> Tensor:
        ctx.save_for_backward(loss)
        ctx.coefficient = coefficient
        ctx.name, ctx.layer, ctx.forward_ctx = name, layer, forward_ctx
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (loss,) = ctx.saved_tensors
        forward_ctx: ForwardContext = ctx.forward_ctx
        assert forward_ctx.loss_grad is not None
        if forward_ctx.loss_sums is not None:
            forward_ctx.loss_sums.add_layer_loss(ctx.name, ctx.layer, loss)
        weight = ctx.coefficient * forward_ctx.loss_grad * forward_ctx.token_weight
        return dx, (torch.ones_like(loss) * weight).to(loss.dtype), None, None, None, None


def train_on_layer_loss(
    x: Tensor, loss: Tensor, coefficient: float, name: str, layer: int, ctx: ForwardContext
) -> Tensor:
    """Return x; its backward also trains on `coefficient * loss`, as a mean over tokens, and adds `loss` to the sums.

    Without backward (evaluation, generation) there is no loss.

    Args:
        x: A value that the layer's output depends on.
        loss: The sum of the loss over this rank's tokens that are not padding, a scalar in fp32 or fp64.
        coefficient: The weight of the loss in training; the log shows the loss without it.
        name: One of the names that the mixer declares (`losses`).
        layer: The number of the layer.
        ctx: The context of the forward.

    Raises:
        ConfigError: if the loss is not such a scalar, or its name is not declared.
    """
    if ctx.loss_grad is None:
        return x
    if not isinstance(loss, Tensor) or loss.dim() or loss.dtype not in (torch.float32, torch.float64):
        value = f"{list(loss.shape)} of {loss.dtype}" if isinstance(loss, Tensor) else repr(loss)
        remedy = "give values.sum(dtype=accum_dtype(values)), of megalite.kernels.dispatch"
        raise ConfigError([f"{name} of layer {layer} is {value}, not a scalar in fp32 or fp64; {remedy}"])
    if ctx.loss_sums is not None and (name, layer) not in ctx.loss_sums.layer_losses:
        raise ConfigError([f"{name} of layer {layer} is not declared; give the mixer's class losses = ({name!r},)"])
    return _LayerLoss.apply(x, loss, coefficient, name, layer, ctx)  # type: ignore[return-value]
