"""Cross entropy over a slice of the vocabulary, as halves around the one reduction of nn/loss.py.

    loss = lse - logit[label] + z lse^2,  lse = max + log(sum exp(logit - max))
    dlogit = (softmax (1 + 2 z lse) - onehot(label)) * dloss

z is the coefficient of the z-loss, which keeps lse near 0 (arXiv:2204.02311, sec. 5); 0: none. Columns from `valid` on
are padding: no probability, no gradient. The gradient is written over the logits. Arithmetic in fp32 (fp64 for fp64);
torch's form takes a few rows at a time, so that all but the logits stays in cache.

Bytes per row of v logits of e bytes, in Triton: v e for the first half, 2 v e for the second.

The head's matmul and the loss go through chunks of tokens (nn/loss.py): the logits of one chunk exist, those of a
micro-batch never. With dl = dlogit of a chunk, dx = dl W and dW = dl^T x, summed over chunks in fp32, are computed in
forward, while the logits are there: 6 N D v FLOPs, as with stored logits. Kept until backward: dx, which takes the
place of x. Where forward knows the gradient of the loss, dl is multiplied by it before it is rounded and dW is added to
the gradient buffer at once; else dW [v, D] is kept too, in fp32, and backward multiplies both. Rejected: keep x and the
lse and compute the logits again in backward, 8 N D v, which bounds the head at 3/4 of the matmul rate. Each chunk reads
and writes dW once (8 D v bytes against 6 D v c FLOPs), so a chunk is as large as its bytes allow.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megalite.kernels.dispatch import accum_dtype, kernel, size_for_device, use_triton

if TYPE_CHECKING:
    import triton.language as tl

# columns and warps per turn of a program, which walks along one row: 16 logits per thread, two 16-byte loads in bf16
COLUMNS, WARPS = 4096, 8

# bytes of fp32 working space: about a CPU's second-level cache; on a GPU enough to fill it
BLOCK_BYTES = {"cpu": 2 << 20, "cuda": 128 << 20}
# bytes of one chunk's logits. CPU: measured, docs/experiments.md; CUDA: 2048 tokens of 128k bf16 logits, at which
# dW's traffic is a tenth of the matmuls' time (8 D v bytes at 4 TB/s, 6 D v c FLOPs at 700 TFLOP/s)
CHUNK_BYTES = {"cpu": 32 << 20, "cuda": 512 << 20}
MIN_CHUNK_TOKENS = 128  # of a chunk; below, matmuls are slow
MIN_PROB = 1e-30  # a label's probability from which its logarithm is taken: far from where fp32 loses digits


def chunk_tokens(tokens: int, columns: int, dtype: torch.dtype, device: torch.device) -> int:
    """Tokens per chunk: chunks of nearly one size whose logits [chunk, columns] take about CHUNK_BYTES at most."""
    most = size_for_device(CHUNK_BYTES, device) // max(1, columns * dtype.itemsize)
    chunks = -(-tokens // max(MIN_CHUNK_TOKENS, most))
    return -(-tokens // max(1, chunks))


def _row_blocks(logits_Nv: Tensor, num_valid: int, work: bool) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """(rows, their valid logits, working space of that shape or the logits themselves if those have its dtype)."""
    block_rows = max(1, size_for_device(BLOCK_BYTES, logits_Nv.device) // (4 * max(1, num_valid)))
    dtype = accum_dtype(logits_Nv)
    buffer = None
    if not work or logits_Nv.dtype != dtype:
        buffer = torch.empty(min(block_rows, logits_Nv.shape[0]), num_valid, dtype=dtype, device=logits_Nv.device)
    for start in range(0, logits_Nv.shape[0], block_rows):
        rows = slice(start, min(start + block_rows, logits_Nv.shape[0]))
        block = logits_Nv[rows, :num_valid]
        yield rows, block, block if buffer is None else buffer[: block.shape[0]]


def _label_columns(labels_N: Tensor, vocab_start: int, num_valid: int) -> tuple[Tensor, Tensor]:
    """(column of each label as [N, 1], 0 if another slice has it; whether another has it, [N])."""
    local_N = labels_N - vocab_start
    other_shard_N = (local_N < 0) | (local_N >= num_valid)
    return local_N.masked_fill(other_shard_N, 0)[:, None], other_shard_N


def shard_stats_reference(logits_Nv: Tensor, labels_N: Tensor, vocab_start: int, num_valid: int) -> Tensor:
    dtype, n = accum_dtype(logits_Nv), logits_Nv.shape[0]
    stats_2N = torch.zeros(2, n, dtype=dtype, device=logits_Nv.device)
    if num_valid == 0:
        stats_2N[0] = float("-inf")
        return stats_2N
    for rows, block, work in _row_blocks(logits_Nv, num_valid, work=False):
        max_n = block.amax(1).to(dtype)
        stats_2N[0, rows] = torch.sub(block, max_n[:, None], out=work).exp_().sum(1).log_().add_(max_n)
    column_N1, other_shard_N = _label_columns(labels_N, vocab_start, num_valid)
    stats_2N[1] = logits_Nv.gather(1, column_N1)[:, 0].to(dtype).masked_fill_(other_shard_N, 0.0)
    return stats_2N


def _lse_grad(lse_N: Tensor, dloss_N: Tensor, z_loss: float) -> Tensor:
    """The gradient of lse, which multiplies the softmax."""
    return torch.addcmul(dloss_N, dloss_N, lse_N, value=2 * z_loss) if z_loss else dloss_N


def shard_grad_reference_(
    logits_Nv: Tensor,
    lse_N: Tensor,
    labels_N: Tensor,
    vocab_start: int,
    dloss_N: Tensor,
    num_valid: int,
    z_loss: float = 0.0,
) -> Tensor:
    logits_Nv[:, num_valid:] = 0
    if num_valid == 0:
        return logits_Nv
    dloss_N1 = dloss_N.to(lse_N.dtype)[:, None]
    dlse_N1 = _lse_grad(lse_N[:, None], dloss_N1, z_loss)
    column_N1, other_shard_N = _label_columns(labels_N, vocab_start, num_valid)
    neg_dloss_N1 = dloss_N1.masked_fill(other_shard_N[:, None], 0.0).neg_()
    for rows, block, work in _row_blocks(logits_Nv, num_valid, work=True):
        torch.sub(block, lse_N[rows, None], out=work).exp_().mul_(dlse_N1[rows])
        # before rounding: p - 1 of a confident token has no digits left in bf16
        work.scatter_add_(1, column_N1[rows], neg_dloss_N1[rows])
        if work is not block:
            block.copy_(work)
    return logits_Nv


@kernel
def _stats(L, LABELS, OUT, stride, rows, vocab_start, num_valid, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    L += row * stride
    largest = tl.full((), float("-inf"), dtype=OUT.dtype.element_ty)
    total = tl.full((), 0.0, dtype=OUT.dtype.element_ty)
    for start in range(0, num_valid, COLUMNS):
        at = start + tl.arange(0, COLUMNS)
        x = tl.load(L + at, mask=at < num_valid, other=float("-inf")).to(OUT.dtype.element_ty)
        now = tl.maximum(largest, tl.max(x, 0))
        base = tl.where(now == float("-inf"), 0.0, now)  # nothing but -inf so far: -inf - -inf is NaN
        turned = tl.exp2(x * 1.4426950408889634 - base * 1.4426950408889634)
        total = total * tl.exp2((largest - base) * 1.4426950408889634) + tl.sum(turned, 0)
        largest = now
    tl.store(OUT + row, largest + tl.log(total))
    local = tl.load(LABELS + row) - vocab_start
    target = tl.load(L + local, mask=(local >= 0) & (local < num_valid), other=0.0)
    tl.store(OUT + rows + row, target.to(OUT.dtype.element_ty))


@kernel
def _grad(L, LABELS, LSE, DLSE, DLOSS, stride, columns, vocab_start, num_valid, COLUMNS: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    L += row * stride
    local = tl.load(LABELS + row) - vocab_start
    local = tl.where(local < num_valid, local, -1)  # padding has no label
    lse, dlse, dloss = tl.load(LSE + row), tl.load(DLSE + row), tl.load(DLOSS + row)
    for start in range(0, columns, COLUMNS):
        at = start + tl.arange(0, COLUMNS)
        x = tl.load(L + at, mask=at < num_valid, other=float("-inf")).to(LSE.dtype.element_ty)
        # before rounding: p - 1 of a confident token has no digits left in bf16
        dx = dlse * tl.exp2((x - lse) * 1.4426950408889634) - tl.where(at == local, dloss, 0.0)
        tl.store(L + at, dx.to(L.dtype.element_ty), mask=at < columns)


def shard_stats(logits_Nv: Tensor, labels_N: Tensor, vocab_start: int, num_valid: int) -> Tensor:
    """[2, N]: log(sum exp(logit)) over this slice's columns, and the label's logit or 0 if another slice has it.

    A slice with no valid column gives -inf and 0. `first`: the global number of column 0. Rows may be strided.
    """
    if not use_triton(logits_Nv):
        return shard_stats_reference(logits_Nv, labels_N, vocab_start, num_valid)
    rows = logits_Nv.shape[0]
    out_2N = torch.empty(2, rows, dtype=accum_dtype(logits_Nv), device=logits_Nv.device)
    stride = logits_Nv.stride(0)
    _stats[(rows,)](
        logits_Nv, labels_N.contiguous(), out_2N, stride, rows, vocab_start, num_valid, COLUMNS, num_warps=WARPS
    )
    return out_2N


def shard_grad_(
    logits_Nv: Tensor,
    lse_N: Tensor,
    labels_N: Tensor,
    vocab_start: int,
    dloss_N: Tensor,
    num_valid: int,
    z_loss: float = 0.0,
) -> Tensor:
    """Overwrite the logits by their gradient and return them. lse_N: over the whole vocabulary."""
    if not use_triton(logits_Nv):
        return shard_grad_reference_(logits_Nv, lse_N, labels_N, vocab_start, dloss_N, num_valid, z_loss)
    rows, columns = logits_Nv.shape
    lse_N, dloss_N = lse_N.contiguous(), dloss_N.to(lse_N.dtype).contiguous()
    given = (labels_N.contiguous(), lse_N, _lse_grad(lse_N, dloss_N, z_loss), dloss_N)
    _grad[(rows,)](logits_Nv, *given, logits_Nv.stride(0), columns, vocab_start, num_valid, COLUMNS, num_warps=WARPS)
    return logits_Nv


def stats_and_grad_(
    logits_NV: Tensor, labels_N: Tensor, dloss_N: Tensor, num_valid: int, z_loss: float = 0.0
) -> Tensor:
    """`shard_stats` where this slice is the whole vocabulary, and the logits overwritten by their gradient.

    In torch one exponential per logit instead of two, which take most of a CPU's time; for half precision inside
    torch's softmax, whose own is twice as fast and exact to fp32's last digits.
    """
    if use_triton(logits_NV):
        stats_2N = shard_stats(logits_NV, labels_N, 0, num_valid)
        shard_grad_(logits_NV, stats_2N[0], labels_N, 0, dloss_N, num_valid, z_loss)
        return stats_2N
    dtype = accum_dtype(logits_NV)
    logits_NV[:, num_valid:] = 0
    stats_2N = torch.empty(2, logits_NV.shape[0], dtype=dtype, device=logits_NV.device)
    stats_2N[1] = logits_NV.gather(1, labels_N[:, None])[:, 0]
    dloss_N1 = dloss_N.to(dtype)[:, None]
    half = logits_NV.dtype != dtype
    for rows, block, work in _row_blocks(logits_NV, num_valid, work=True):
        if half:
            _softmax_and_grad_(block, work, labels_N[rows, None], dloss_N1[rows], stats_2N[:, rows], z_loss)
            continue
        max_n = block.amax(1).to(dtype)
        sum_n = torch.sub(block, max_n[:, None], out=work).exp_().sum(1)
        lse_n = torch.add(max_n, sum_n.log(), out=stats_2N[0, rows])
        dlse_n1 = _lse_grad(lse_n[:, None], dloss_N1[rows], z_loss)
        work.mul_(dlse_n1 / sum_n[:, None]).scatter_add_(1, labels_N[rows, None], -dloss_N1[rows])
    return stats_2N


def _softmax_and_grad_(
    logits_nV: Tensor, work_nV: Tensor, labels_n1: Tensor, dloss_n1: Tensor, stats_2n: Tensor, z_loss: float
) -> None:
    """`stats_and_grad_` of a block in half precision; stats_2n[1] is known."""
    p_nV = torch.softmax(work_nV.copy_(logits_nV), 1)
    p_n = p_nV.gather(1, labels_n1)[:, 0]
    torch.sub(stats_2n[1], p_n.log(), out=stats_2n[0])
    small_n = p_n < MIN_PROB
    if small_n.is_cuda or small_n.any():  # p has lost digits, or is zero; to ask a card is to wait for it
        torch.where(small_n, work_nV.logsumexp(1), stats_2n[0], out=stats_2n[0])
    p_nV.mul_(_lse_grad(stats_2n[0][:, None], dloss_n1, z_loss)).scatter_add_(1, labels_n1, -dloss_n1)
    logits_nV.copy_(p_nV)
