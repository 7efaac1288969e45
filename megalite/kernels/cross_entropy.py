"""Cross entropy over a slice of the vocabulary, as halves around the two reductions of nn/loss.py.

    loss = lse - logit[label],  lse = max + log(sum exp(logit - max));   dlogit = (softmax - onehot(label)) * dloss

Columns from `valid` on are padding: no probability, no gradient. Arithmetic in fp32 (fp64 for fp64).
"""

from __future__ import annotations

import torch
from torch import Tensor

from megalite.kernels.rms_norm import stat_dtype


def shard_max(logits_Nv: Tensor, valid: int) -> Tensor:
    """Largest logit of each row, max_N; -inf where this slice has no valid column."""
    if valid == 0:
        return torch.full(logits_Nv.shape[:1], float("-inf"), dtype=stat_dtype(logits_Nv), device=logits_Nv.device)
    return logits_Nv[:, :valid].amax(1).to(stat_dtype(logits_Nv))


def shard_sums(logits_Nv: Tensor, max_N: Tensor, labels_N: Tensor, first: int, valid: int) -> tuple[Tensor, Tensor]:
    """(sum of exp(logit - max), the label's logit or 0 if another slice has it), each [N]."""
    sums_N = torch.sub(logits_Nv[:, :valid], max_N[:, None]).exp_().sum(1)
    local_N = labels_N - first
    elsewhere_N = (local_N < 0) | (local_N >= valid)
    index_N1 = local_N.masked_fill(elsewhere_N, 0)[:, None]
    target_N = logits_Nv.gather(1, index_N1)[:, 0].to(max_N.dtype).masked_fill(elsewhere_N, 0.0)
    return sums_N, target_N


def shard_grad_(logits_Nv: Tensor, lse_N: Tensor, labels_N: Tensor, first: int, dloss_N: Tensor, valid: int) -> Tensor:
    """Overwrite the logits by their gradient and return them."""
    dloss_N1 = dloss_N.to(lse_N.dtype)[:, None]
    if valid:
        grad_Nv = torch.sub(logits_Nv[:, :valid], lse_N[:, None]).exp_().mul_(dloss_N1)
        local_N = labels_N - first
        elsewhere_N = (local_N < 0) | (local_N >= valid)
        index_N1 = local_N.masked_fill(elsewhere_N, 0)[:, None]
        # before rounding: p - 1 of a confident token has no digits left in bf16
        grad_Nv.scatter_add_(1, index_N1, dloss_N1.masked_fill(elsewhere_N[:, None], 0.0).neg())
        logits_Nv[:, :valid] = grad_Nv
    logits_Nv[:, valid:] = 0
    return logits_Nv
