"""Vocabulary-parallel head and cross entropy: the sum of -log softmax(x W^T)[label] over the tokens that count.

    x_sBD --gather--> x_ND | per chunk of tokens: logits_nv -> stats --gather--> dlogits_nv -> dx_nD, dW_vD += |
                           | dx_SBD --reduce-scatter--> dx_sBD

Each tp rank has the logits of its part of the vocabulary, one chunk at a time (kernels/linear_cross_entropy.py). One
small collective per chunk: (log-sum-exp of the part, the label's logit), from which each rank computes the whole
log-sum-exp; arXiv:1909.08053, sec. 3, takes a maximum and then sums. Columns at or beyond the true vocabulary are
padding: they take no probability. Gradients are computed in forward, so x is gathered once and not again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from megalite.kernels.cross_entropy import loss_and_grad_, shard_grad_, shard_stats
from megalite.kernels.dispatch import stat_dtype
from megalite.kernels.linear_cross_entropy import add_outer_, chunk_tokens
from megalite.parallel.comm import start_all_gather, start_reduce_scatter
from megalite.parallel.mesh import Axis


def _chunk_loss_(
    logits_nv: Tensor, labels_n: Tensor, count_n: Tensor, tp: Axis, vocab_size: int, grads: bool
) -> Tensor:
    """loss_n of a chunk; with `grads`, its logits become their gradients."""
    first = tp.rank * logits_nv.shape[1]
    valid = max(0, min(logits_nv.shape[1], vocab_size - first))
    if grads and tp.size == 1:
        return loss_and_grad_(logits_nv, labels_n, count_n, valid)
    stats_1_2n = shard_stats(logits_nv, labels_n, first, valid).unsqueeze(0)
    stats_r2n = start_all_gather(stats_1_2n, tp).wait()
    lse_n = stats_r2n[:, 0].logsumexp(0)
    if grads:
        shard_grad_(logits_nv, lse_n, labels_n, first, count_n, valid)
    return lse_n - stats_r2n[:, 1].sum(0)


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
        grads: bool,
    ) -> Tensor:
        x_SBD = start_all_gather(x_sBD, tp).wait()
        x_ND, labels_N = x_SBD.flatten(0, 1), labels_SB.flatten()
        n, v = x_ND.shape[0], weight_vD.shape[0]
        dtype = stat_dtype(x_ND)
        loss_N = torch.empty(n, dtype=dtype, device=x_ND.device)
        count_N = torch.ones_like(loss_N) if mask_SB is None else mask_SB.flatten().to(dtype)
        size = chunk_tokens(n, v, x_ND.dtype, x_ND.device)
        space_nv = x_ND.new_empty(size, v)  # one for all chunks: fresh pages are dear on a CPU
        if grads:
            dx_SBD, dw_vD = x_SBD.new_empty(x_SBD.shape), torch.empty_like(weight_vD, dtype=dtype)
            dx_ND = dx_SBD.view_as(x_ND)
        scattering = None
        for start in range(0, n, size):
            here = slice(start, min(start + size, n))
            x_nD = x_ND[here]
            logits_nv = torch.mm(x_nD, weight_vD.T, out=space_nv[: x_nD.shape[0]])
            loss_N[here] = _chunk_loss_(logits_nv, labels_N[here], count_N[here], tp, vocab_size, grads)
            if grads:
                torch.mm(logits_nv, weight_vD, out=dx_ND[here])
                if here.stop == n:  # the sum over tp hides behind the last matmul
                    scattering = start_reduce_scatter(dx_SBD, tp)
                add_outer_(dw_vD, logits_nv, x_nD, begin=start == 0)
        if scattering is not None:
            ctx.save_for_backward(scattering.wait(), dw_vD)
            ctx.dtype = weight_vD.dtype
        return (loss_N * count_N).sum()

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        dx_sBD, dw_vD = ctx.saved_tensors
        # in place: a second backward is refused by autograd, which sees that saved tensors have changed
        dw_vD = dw_vD.mul_(dloss) if dw_vD.dtype == ctx.dtype else torch.mul(dw_vD, dloss).to(ctx.dtype)
        return dx_sBD.mul_(dloss), dw_vD, None, None, None, None, None


def linear_cross_entropy(
    x_sBD: Tensor, weight_vD: Tensor, labels_SB: Tensor, mask_SB: Tensor | None, tp: Axis, vocab_size: int
) -> Tensor:
    """Sum over the tokens of mask * loss, in nats: a scalar in fp32 (fp64 for fp64), the same on every tp rank.

    x_sBD: this rank's positions; weight_vD: its rows of the head; labels_SB and mask_SB: all positions, mask None: all
    count. Without grad mode nothing but the loss is computed. The gradients are ready after forward; one backward.
    """
    args = (labels_SB, mask_SB, tp, vocab_size, torch.is_grad_enabled())
    return _LinearCrossEntropy.apply(x_sBD, weight_vD, *args)  # type: ignore[return-value]
