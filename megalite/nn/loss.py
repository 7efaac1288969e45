"""Vocabulary-parallel cross entropy: the sum of -log softmax(x W^T)[label] over the tokens that count.

Each tp rank has the logits of its part of the vocabulary. Two small collectives per micro-batch: the maximum, then
(sum of exponentials, the label's logit) stacked in one (arXiv:1909.08053, sec. 3). Columns at or beyond the true
vocabulary are padding: they take no probability. Saved for backward: the logits in their own dtype and one
log-sum-exp per token; the gradient is written over the logits.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from megalite.kernels.cross_entropy import shard_grad_, shard_max, shard_sums
from megalite.parallel.comm import all_reduce_
from megalite.parallel.mesh import Axis


class _CrossEntropy(Function):
    @staticmethod
    def forward(ctx: Any, logits_Nv: Tensor, labels_N: Tensor, tp: Axis, vocab_size: int) -> Tensor:
        first = tp.rank * logits_Nv.shape[1]
        valid = max(0, min(logits_Nv.shape[1], vocab_size - first))
        max_N = all_reduce_(shard_max(logits_Nv, valid), tp, dist.ReduceOp.MAX)
        sums_2N = all_reduce_(torch.stack(shard_sums(logits_Nv, max_N, labels_N, first, valid)), tp)
        lse_N = sums_2N[0].log() + max_N
        ctx.first, ctx.valid = first, valid
        ctx.save_for_backward(logits_Nv, lse_N, labels_N)
        return lse_N - sums_2N[1]

    @staticmethod
    def backward(ctx: Any, dloss_N: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        logits_Nv, lse_N, labels_N = ctx.saved_tensors
        return shard_grad_(logits_Nv, lse_N, labels_N, ctx.first, dloss_N, ctx.valid), None, None, None


def cross_entropy(logits_SBv: Tensor, labels_SB: Tensor, tp: Axis, vocab_size: int) -> Tensor:
    """Loss per token, loss_SB in nats, fp32 (fp64 for fp64 logits). The logits must not be used afterwards."""
    loss_N = _CrossEntropy.apply(logits_SBv.flatten(0, 1), labels_SB.flatten(), tp, vocab_size)
    return loss_N.view_as(labels_SB)  # type: ignore[union-attr]
