"""The vocabulary-parallel head and cross entropy, in chunks of tokens.

The results are the sums of -log softmax(x W^T)[label] and of the z-loss z * lse^2 over the tokens that count
(kernels/cross_entropy.py). Logits may be capped.

    x_sBD --gather--> x_ND | per chunk of tokens: logits_nv -> stats --gather--> dlogits_nv -> dx_nD, dW_vD += |
                           | dx_SBD --reduce-scatter--> dx_sBD

Each tp rank has the logits of its part of the vocabulary, one chunk at a time. One small collective per chunk exchanges
(log-sum-exp of the part, the label's logit), from which each rank computes the full log-sum-exp; arXiv:1909.08053,
sec. 3, needs a maximum and then sums. Columns beyond the true vocabulary are padding without probability. Gradients are
computed in forward, so x is gathered only once.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from megalite.kernels.cross_entropy import chunk_tokens, shard_grad_, shard_stats, stats_and_grad_
from megalite.kernels.dispatch import accum_dtype
from megalite.kernels.matmul import mm_
from megalite.kernels.weight_grad import accumulate_weight_grad_
from megalite.nn.parameter import main_grad_of
from megalite.parallel.comm import start_all_gather, start_reduce_scatter
from megalite.parallel.mesh import Axis


def _gather_tokens(x_sBD: Tensor, tp: Axis) -> Tensor:
    """Return x_SBD, the positions of all tp ranks."""
    return start_all_gather(x_sBD, tp).wait()


def _chunk_stats_(
    logits_nv: Tensor,
    labels_n: Tensor,
    dloss_n: Tensor | None,
    tp: Axis,
    vocab_size: int,
    z_loss: float,
    softcap: float | None,
) -> tuple[Tensor, Tensor]:
    """Return lse_n and the labels' logits of a chunk; with `dloss_n`, the logits are replaced by their gradients."""
    first = tp.shard_start(logits_nv.shape[1])
    valid = max(0, min(logits_nv.shape[1], vocab_size - first))
    if dloss_n is not None and tp.size == 1:
        lse_n, target_n = stats_and_grad_(logits_nv, labels_n, dloss_n, valid, z_loss, softcap)
        return lse_n, target_n
    stats_1_2n = shard_stats(logits_nv, labels_n, first, valid, softcap).unsqueeze(0)
    stats_r2n = start_all_gather(stats_1_2n, tp).wait()
    lse_n = stats_r2n[:, 0].logsumexp(0)
    if dloss_n is not None:
        shard_grad_(logits_nv, lse_n, labels_n, first, dloss_n, valid, z_loss, softcap)
    return lse_n, stats_r2n[:, 1].sum(0)


def _assert_on_device(condition: Tensor, text: str) -> None:
    """Raise RuntimeError unless all elements are true; on CUDA only when the device computes it."""
    if condition.device.type != "cpu":
        torch._assert_async(condition.all(), text)  # pyright: ignore[reportPrivateImportUsage]
    elif not condition.all():
        raise RuntimeError(text)


class _LinearCrossEntropy(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_sBD: Tensor,
        weight_vD: Tensor,
        labels_SB: Tensor,
        mask_SB: Tensor | None,
        tp: Axis,
        vocab_size: int,
        z_loss: float,
        softcap: float | None,
        loss_grad: float | Tensor | None,
        loss_weight: float,
        needs_grad: bool,
    ) -> tuple[Tensor, Tensor]:
        x_SBD = _gather_tokens(x_sBD, tp)
        x_ND, labels_N = x_SBD.flatten(0, 1), labels_SB.flatten()
        n, v = x_ND.shape[0], weight_vD.shape[0]
        dtype = accum_dtype(x_ND)
        loss_N, lse_N = torch.empty(2, n, dtype=dtype, device=x_ND.device)
        weight_N = torch.ones_like(loss_N) if mask_SB is None else mask_SB.flatten().to(dtype)
        if loss_weight != 1:
            weight_N = weight_N * loss_weight
        size = chunk_tokens(n, v, x_ND.dtype, x_ND.device)
        logits_buffer_nv = x_ND.new_empty(size, v)  # shared by all chunks, because new pages cost time on a CPU
        dloss_N = None
        pending_dx = None
        main_grad = None
        if needs_grad:
            dloss_N = weight_N if loss_grad is None else weight_N * loss_grad
            dx_SBD = x_SBD.new_empty(x_SBD.shape)
            dx_ND = dx_SBD.view_as(x_ND)
            main_grad = None if loss_grad is None else main_grad_of(weight_vD)
            if main_grad is None:
                dw_vD = torch.empty_like(weight_vD, dtype=dtype)
                overwrite = True
            else:
                dw_vD, overwrite = main_grad.accumulator()
        for start in range(0, n, size):
            chunk = slice(start, min(start + size, n))
            x_nD = x_ND[chunk]
            logits_nv = mm_(logits_buffer_nv[: x_nD.shape[0]], x_nD, weight_vD.T)
            dloss_n = None if dloss_N is None else dloss_N[chunk]
            args = (logits_nv, labels_N[chunk], dloss_n, tp, vocab_size, z_loss, softcap)
            lse_N[chunk], target_n = _chunk_stats_(*args)
            torch.sub(lse_N[chunk], target_n, out=loss_N[chunk])
            if needs_grad:
                mm_(dx_ND[chunk], logits_nv, weight_vD)
                if chunk.stop == n:  # the sum over tp hides behind the last matmul
                    pending_dx = start_reduce_scatter(dx_SBD, tp)
                accumulate_weight_grad_(dw_vD, logits_nv, x_nD, overwrite=overwrite and start == 0)
        if pending_dx is not None:
            ctx.save_for_backward(pending_dx.wait(), None if main_grad is not None else dw_vD)
            ctx.dtype = weight_vD.dtype
            ctx.loss_grad = loss_grad
            ctx.was_used = False
        loss = (loss_N * weight_N).sum()
        z_sum = z_loss * (lse_N.square_() * weight_N).sum() if z_loss else torch.zeros_like(loss)
        ctx.mark_non_differentiable(z_sum)
        return loss, z_sum

    @staticmethod
    def backward(ctx: Any, dloss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        dx_sBD, dw_vD = ctx.saved_tensors
        no_grads = (None,) * 9
        if ctx.loss_grad is not None:
            if ctx.was_used:
                raise RuntimeError("linear_cross_entropy: a second backward, but the first one has used the gradients")
            ctx.was_used = True
            loss_grad = ctx.loss_grad
            on_device = isinstance(loss_grad, Tensor)  # reading its value would synchronize
            expected = loss_grad.to(dloss.dtype) if on_device else dloss.new_full((), loss_grad)
            shown = "loss_grad" if on_device else f"loss_grad={loss_grad}"
            text = f"the gradient of the loss is not {shown}; pass the value that backward will get"
            _assert_on_device(dloss == expected, text)
            return dx_sBD, None if dw_vD is None else dw_vD.to(ctx.dtype), *no_grads
        # in place, so that autograd refuses a second backward: saved tensors have changed
        dw_vD = dw_vD.mul_(dloss) if dw_vD.dtype == ctx.dtype else torch.mul(dw_vD, dloss).to(ctx.dtype)
        return dx_sBD.mul_(dloss), dw_vD, *no_grads


def linear_cross_entropy(
    x_sBD: Tensor,
    weight_vD: Tensor,
    labels_SB: Tensor,
    mask_SB: Tensor | None,
    tp: Axis,
    vocab_size: int,
    *,
    z_loss: float = 0.0,
    softcap: float | None = None,
    loss_grad: float | Tensor | None = None,
    loss_weight: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Return the sums over tokens of mask * loss and of mask * z-loss in nats, the same on every tp rank.

    They are scalars in fp32 (fp64 for fp64). Backward from the first computes the gradients of their sum; the second is
    for the log. Without grad mode only the values are computed. Gradients are computed in forward, for one backward.
    Collective over tp.

    Args:
        x_sBD: this rank's positions.
        weight_vD: this rank's rows of the head.
        labels_SB: labels of all positions.
        mask_SB: 1 where a token counts; None: all tokens count.
        tp: the tensor-parallel axis.
        vocab_size: the vocabulary without padding.
        z_loss: coefficient of the z-loss.
        softcap: the bound of the logits, cap tanh(x W^T / cap) (kernels/softcap.py); None: no bound.
        loss_grad: the gradient that the result will get in backward, if it is known: a number, or a scalar on the
            device that keeps its value until then. dW is then added to the weight's main gradient (nn/parameter.py), if
            it has one, in forward. Backward must follow in the same step, and forward must not be repeated (recompute).
        loss_weight: a factor of both results and of the gradients.

    Raises:
        RuntimeError: in backward, if it gets another gradient than `loss_grad`, or is called a second time.
    """
    args = (labels_SB, mask_SB, tp, vocab_size, z_loss, softcap, loss_grad, loss_weight, torch.is_grad_enabled())
    return _LinearCrossEntropy.apply(x_sBD, weight_vD, *args)  # type: ignore[return-value]


@torch.no_grad()
def token_losses(
    x_sBD: Tensor, weight_vD: Tensor, labels_SB: Tensor, tp: Axis, vocab_size: int, *, softcap: float | None = None
) -> Tensor:
    """Return the loss of each label, loss_SB in nats, in fp32 (fp64 for fp64); the same on every tp rank.

    There is no backward. The arguments are those of `linear_cross_entropy`. Collective over tp.
    """
    x_ND, labels_N = _gather_tokens(x_sBD, tp).flatten(0, 1), labels_SB.flatten()
    n = x_ND.shape[0]
    loss_N = torch.empty(n, dtype=accum_dtype(x_ND), device=x_ND.device)
    size = chunk_tokens(n, weight_vD.shape[0], x_ND.dtype, x_ND.device)
    logits_buffer_nv = x_ND.new_empty(size, weight_vD.shape[0])
    for start in range(0, n, size):
        chunk = slice(start, min(start + size, n))
        x_nD = x_ND[chunk]
        logits_nv = mm_(logits_buffer_nv[: x_nD.shape[0]], x_nD, weight_vD.T)
        lse_n, target_n = _chunk_stats_(logits_nv, labels_N[chunk], None, tp, vocab_size, 0.0, softcap)
        torch.sub(lse_n, target_n, out=loss_N[chunk])
    return loss_N.view_as(labels_SB)
