"""Column- and row-parallel matmuls with their collectives inside, for sequence-parallel activations.

    column_parallel_linear   x_sBD --all-gather--> x_SBD @ W^T -> y_SBf          weights [f, D], f split over tp
    row_parallel_linear      a(u_SBf) @ W^T -> y_SBD --reduce-scatter--> y_sBD   weight [D, f], a: optional activation

Only the shard x_sBD is saved (arXiv:2205.05198, sec. 4.2.2). It is gathered again in backward, behind the matmul for
dx, and the reduce-scatter of dx hides behind the matmuls for dW:

    before   | gather x ||  dx = dy W  || scatter dx || dW = dy^T x |
    after    | gather x ............  |  scatter dx ..............  |
             | dx = dy W              |  dW += dy^T x               |

dW is added to the weight's main gradient in its bucket, if it has one, and autograd never sees it. With a
WeightGradStore it is computed, and x gathered for it, when the pipeline requests it (nn/wgrad_store.py).
The activation before a row-parallel matmul is recomputed in backward from u, so its result is never stored. If a kernel
also adds the bias, u + bias is not stored either.
Rejected: a differentiable gather before the matmul. It saves the full x_SBD, 2*s*b*h*(tp-1)/tp more bytes per matmul.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from megalite.kernels.activation import Activation
from megalite.kernels.dispatch import use_triton
from megalite.kernels.matmul import matmul, mm_
from megalite.nn.parameter import MainGrad, main_grad_of
from megalite.nn.wgrad_store import WeightGradStore, accumulate_weight_grad
from megalite.parallel.comm import start_all_gather, start_reduce_scatter
from megalite.parallel.mesh import Axis

LOCAL = Axis("tp")  # of one rank, for matmuls whose input is not gathered


def _flatten_tokens(x: Tensor) -> Tensor:
    """Return x [..., D] as [N, D]."""
    return x.reshape(-1, x.shape[-1])


def _weight_grad(weight: Tensor, main_grad: MainGrad | None, dy: Tensor, x_ND: Tensor) -> Tensor | None:
    """Add dW = dy^T x to the main gradient; without one, return it for autograd."""
    if main_grad is None:
        return matmul(_flatten_tokens(dy).T, x_ND).view_as(weight)
    accumulate_weight_grad(main_grad, dy, x_ND)
    return None


def _channel_parts(x: Tensor, weights: Sequence[Tensor]) -> list[Tensor]:
    """Return the part of the channels of x that each weight multiplies, in order, and the rest."""
    widths = [w.shape[-1] for w in weights]
    return list(x.split([*widths, x.shape[-1] - sum(widths)], -1))


class _ColumnParallelLinear(Function):
    @staticmethod
    def forward(
        ctx: Any, x_sBD: Tensor, tp: Axis, wgrad_store: WeightGradStore | None, split_channels: bool, *weights: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.tp = tp
        ctx.wgrad_store = wgrad_store
        ctx.split_channels = split_channels
        # read here and not in backward, because recompute saves other tensors than the parameters
        ctx.main_grads = [main_grad_of(w) for w in weights]
        ctx.save_for_backward(x_sBD, *weights)
        x_SBD = start_all_gather(x_sBD, tp).wait()
        if not split_channels:
            return tuple(matmul(x_SBD, _flatten_tokens(w).T) for w in weights)
        *parts, rest = _channel_parts(x_SBD, weights)
        outputs = [matmul(part, _flatten_tokens(w).T) for part, w in zip(parts, weights, strict=True)]
        return *outputs, rest.clone(memory_format=torch.contiguous_format)  # does not keep the other channels

    @staticmethod
    def backward(ctx: Any, *dys: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x_sBD, *weights = ctx.saved_tensors
        wgrad_store: WeightGradStore | None = None if None in ctx.main_grads else ctx.wgrad_store
        pending_x = start_all_gather(x_sBD, ctx.tp) if weights and wgrad_store is None else None
        if ctx.split_channels:
            dys, drest = dys[:-1], dys[-1]
            dparts = [matmul(dy, _flatten_tokens(w)) for dy, w in zip(dys, weights, strict=True)]
            dx_SBD = torch.cat([*dparts, drest], -1)
        else:
            dx_ND = matmul(_flatten_tokens(dys[0]), _flatten_tokens(weights[0]))
            for dy, w in zip(dys[1:], weights[1:], strict=True):
                mm_(dx_ND, _flatten_tokens(dy), _flatten_tokens(w), add=True)
            dx_SBD = dx_ND.view(*dys[0].shape[:-1], -1)
        pending_dx = start_reduce_scatter(dx_SBD, ctx.tp)
        dws: list[Tensor | None] = [None] * len(weights)
        if pending_x is not None:
            x_SBD = pending_x.wait()
            parts = _channel_parts(x_SBD, weights)[:-1] if ctx.split_channels else [x_SBD] * len(weights)
            inputs_ND = map(_flatten_tokens, parts)
            dws = [_weight_grad(*args) for args in zip(weights, ctx.main_grads, dys, inputs_ND, strict=True)]
        elif weights and wgrad_store is not None:
            widths = [w.shape[-1] for w in weights] if ctx.split_channels else None
            wgrad_store.put(x_sBD, ctx.tp, zip(ctx.main_grads, dys, strict=True), widths=widths)
        return pending_dx.wait(), None, None, None, *dws


class _RowParallelLinear(Function):
    @staticmethod
    def forward(
        ctx: Any, u_SBf: Tensor, weight: Tensor, tp: Axis, activation: Activation | None, bias: Tensor | None,
        wgrad_store: WeightGradStore | None,
    ) -> Tensor:  # fmt: skip
        ctx.tp = tp
        ctx.activation = activation
        ctx.wgrad_store = wgrad_store
        ctx.main_grad = main_grad_of(weight)
        bias_args = () if bias is None else (bias,)
        ctx.save_for_backward(u_SBf, weight, *bias_args)
        a_SBf = u_SBf if activation is None else activation.forward(u_SBf, *bias_args)
        return start_reduce_scatter(matmul(a_SBf, weight.T), tp).wait()

    @staticmethod
    def backward(ctx: Any, dy_sBD: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        u_SBf, weight, *bias_args = ctx.saved_tensors
        dy_SBD = start_all_gather(dy_sBD, ctx.tp).wait()
        a_SBf = u_SBf
        du_SBf = matmul(dy_SBD, weight)
        dbias = []
        if ctx.activation is not None:
            a_SBf, du_SBf, *dbias = ctx.activation.backward(u_SBf, du_SBf, *bias_args)
        dweight = None
        if ctx.wgrad_store is not None and ctx.main_grad is not None:
            ctx.wgrad_store.put(a_SBf, None, [(ctx.main_grad, dy_SBD)])
        else:
            dweight = _weight_grad(weight, ctx.main_grad, dy_SBD, _flatten_tokens(a_SBf))
        return du_SBf, dweight, None, None, dbias[0] if dbias else None, None


def column_parallel_linear(
    x_sBD: Tensor, weights: Sequence[Tensor], tp: Axis, wgrad_store: WeightGradStore | None = None
) -> tuple[Tensor, ...]:
    """All-gather x, and multiply it by each weight [..., D], whose leading dims are flattened.

    Returns [S, B, rows] for each weight. Collective over tp.
    """
    return _ColumnParallelLinear.apply(x_sBD, tp, wgrad_store, False, *weights)  # type: ignore[return-value]


def column_parallel_linear_of_parts(
    x_sBC: Tensor, weights: Sequence[Tensor], tp: Axis, wgrad_store: WeightGradStore | None = None
) -> tuple[Tensor, ...]:
    """All-gather x, and multiply each weight [rows, c] by its own channels of x, which follow in order of the weights.

    Returns [S, B, rows] for each weight, and the channels after the last one. One reduce-scatter of all channels sums
    the gradient, also that of the channels without a weight. Collective over tp.
    """
    return _ColumnParallelLinear.apply(x_sBC, tp, wgrad_store, True, *weights)  # type: ignore[return-value]


def replicated_linear(x_sBD: Tensor, weight: Tensor, wgrad_store: WeightGradStore | None = None) -> Tensor:
    """Multiply this rank's positions by a weight [rows, D] that all tp ranks have, without a collective.

    Each tp rank computes the gradient of its own positions (ParamSpec.partial_grad_axes).
    """
    return column_parallel_linear(x_sBD, [weight], Axis("tp"), wgrad_store)[0]


def row_parallel_linear(
    u_SBf: Tensor, weight_Df: Tensor, tp: Axis, activation: Activation | None = None, bias: Tensor | None = None,
    wgrad_store: WeightGradStore | None = None,
) -> Tensor:  # fmt: skip
    """Add `bias` [f], apply `activation`, multiply, and reduce-scatter along the sequence. Collective over tp."""
    if bias is not None and not (activation is not None and activation.takes_bias and use_triton(u_SBf)):
        u_SBf = add_bias(u_SBf, bias)
        bias = None
    return _RowParallelLinear.apply(u_SBf, weight_Df, tp, activation, bias, wgrad_store)  # type: ignore[return-value]


def add_bias(x: Tensor, bias: Tensor | None) -> Tensor:
    """Add a bias to the last dim; a bias of several dims is flattened like its weight."""
    return x if bias is None else x + torch.flatten(bias)
