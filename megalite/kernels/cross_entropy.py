"""Cross entropy over a slice of the vocabulary, in two halves: before and after the reduction in nn/loss.py.

    loss = lse - logit[label] + z lse^2,  lse = max + log(sum exp(logit - max))
    dlogit = (softmax (1 + 2 z lse) - onehot(label)) * dloss

z is the coefficient of the z-loss, which keeps lse near 0 (arXiv:2204.02311, sec. 5); with 0 there is none. Columns
from `num_valid` on are padding: they get no probability and no gradient. The gradient overwrites the logits. Arithmetic
is in fp32 (fp64 for fp64). The torch implementation processes a few rows at a time, so that everything except the
logits stays in the cache.

With `softcap`, the logits of these equations are cap tanh(logit / cap) (kernels/softcap.py), and the gradient is
multiplied by the slope of the cap. Each rank caps its slice of the vocabulary alone.

Bytes per row of v logits of e bytes, in Triton: v e for the first half, 2 v e for the second.

The head's matmul and the loss loop over chunks of tokens (nn/loss.py), so only the logits of one chunk are allocated,
never the logits of a micro-batch. With dl = dlogit of a chunk, dx = dl W and dW = dl^T x, summed over chunks in fp32,
are computed in forward while the chunk's logits exist: 6 N D v FLOPs, as with stored logits. Forward saves dx, which
takes the place of x. If forward has the gradient of the loss, dl is multiplied by it before it is rounded, and dW is
added to main_grad at once. Otherwise dW [v, D] is saved too, in fp32, and backward multiplies both. Rejected: saving x
and the lse, and recomputing the logits in backward, 8 N D v FLOPs, which limits the head to 3/4 of the matmul rate.
Each chunk of c tokens reads and writes dW once (8 D v bytes for 6 D v c FLOPs), so chunks are as large as CHUNK_BYTES
allows.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megalite.kernels.dispatch import accum_dtype, ceil_div, kernel, size_for_device, use_triton
from megalite.kernels.softcap import soft_cap, soft_cap_with_slope, tanh

if TYPE_CHECKING:
    import triton.language as tl

# columns and warps per iteration of a program, which loops over one row: 16 logits per thread, two 16-byte loads in
# bf16
BLOCK_N, NUM_WARPS = 4096, 8

# bytes of the fp32 workspace: about a CPU's second-level cache; on a GPU, enough to occupy it
BLOCK_BYTES = {"cpu": 2 << 20, "cuda": 128 << 20}
# bytes of one chunk's logits. CPU: measured (docs/experiments.md). CUDA: 2048 tokens with 128k bf16 logits each; then
# the traffic of dW takes a tenth of the matmuls' time (8 D v bytes at 4 TB/s, 6 D v c FLOPs at 700 TFLOP/s).
CHUNK_BYTES = {"cpu": 32 << 20, "cuda": 512 << 20}
MIN_CHUNK_TOKENS = 128  # matmuls of smaller chunks are slow
MIN_PROB = 1e-30  # min probability of a label whose logarithm is used; far above the range in which fp32 loses digits


def chunk_tokens(tokens: int, columns: int, dtype: torch.dtype, device: torch.device) -> int:
    """Return the tokens per chunk: chunks of almost equal size whose logits [chunk, columns] take up to CHUNK_BYTES.

    A chunk may exceed CHUNK_BYTES if that is less than MIN_CHUNK_TOKENS.
    """
    max_tokens = size_for_device(CHUNK_BYTES, device) // max(1, columns * dtype.itemsize)
    chunks = ceil_div(tokens, max(MIN_CHUNK_TOKENS, max_tokens))
    return ceil_div(tokens, max(1, chunks))


def _row_blocks(logits_Nv: Tensor, num_valid: int, in_place: bool) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """Yield (rows, their valid logits, workspace of the same shape) for blocks of rows.

    With `in_place`, the workspace is the logits themselves if they have the accumulation dtype.
    """
    block_rows = max(1, size_for_device(BLOCK_BYTES, logits_Nv.device) // (4 * max(1, num_valid)))
    dtype = accum_dtype(logits_Nv)
    buffer = None
    if not in_place or logits_Nv.dtype != dtype:
        buffer = torch.empty(min(block_rows, logits_Nv.shape[0]), num_valid, dtype=dtype, device=logits_Nv.device)
    for start in range(0, logits_Nv.shape[0], block_rows):
        rows = slice(start, min(start + block_rows, logits_Nv.shape[0]))
        block = logits_Nv[rows, :num_valid]
        yield rows, block, block if buffer is None else buffer[: block.shape[0]]


def _label_columns(labels_N: Tensor, vocab_start: int, num_valid: int) -> tuple[Tensor, Tensor]:
    """Return the column of each label, [N, 1], or 0 if it is in another slice, and whether it is, [N]."""
    local_N = labels_N - vocab_start
    other_shard_N = (local_N < 0) | (local_N >= num_valid)
    return local_N.masked_fill(other_shard_N, 0)[:, None], other_shard_N


def _cap_block(block: Tensor, softcap: float | None) -> tuple[Tensor, Tensor | None]:
    """Return a block of capped logits and the slope of the cap; without one, the logits themselves and None."""
    return (block, None) if softcap is None else soft_cap_with_slope(block, softcap)


def shard_stats_reference(
    logits_Nv: Tensor, labels_N: Tensor, vocab_start: int, num_valid: int, softcap: float | None = None
) -> Tensor:
    """Compute `shard_stats` in torch."""
    dtype = accum_dtype(logits_Nv)
    stats_2N = torch.zeros(2, logits_Nv.shape[0], dtype=dtype, device=logits_Nv.device)
    if num_valid == 0:
        stats_2N[0] = float("-inf")
        return stats_2N
    for rows, block, workspace in _row_blocks(logits_Nv, num_valid, in_place=False):
        block, _ = _cap_block(block, softcap)
        max_n = block.amax(1).to(dtype)
        stats_2N[0, rows] = torch.sub(block, max_n[:, None], out=workspace).exp_().sum(1).log_().add_(max_n)
    column_N1, other_shard_N = _label_columns(labels_N, vocab_start, num_valid)
    target_N = logits_Nv.gather(1, column_N1)[:, 0].to(dtype)
    stats_2N[1] = soft_cap(target_N, softcap).masked_fill_(other_shard_N, 0.0)
    return stats_2N


def _lse_grad(lse_N: Tensor, dloss_N: Tensor, z_loss: float) -> Tensor:
    """Return the gradient of lse, which is the factor of the softmax in dlogit."""
    return torch.addcmul(dloss_N, dloss_N, lse_N, value=2 * z_loss) if z_loss else dloss_N


def shard_grad_reference_(
    logits_Nv: Tensor,
    lse_N: Tensor,
    labels_N: Tensor,
    vocab_start: int,
    dloss_N: Tensor,
    num_valid: int,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    """Compute `shard_grad_` in torch."""
    logits_Nv[:, num_valid:] = 0
    if num_valid == 0:
        return logits_Nv
    dloss_N1 = dloss_N.to(lse_N.dtype)[:, None]
    dlse_N1 = _lse_grad(lse_N[:, None], dloss_N1, z_loss)
    column_N1, other_shard_N = _label_columns(labels_N, vocab_start, num_valid)
    neg_dloss_N1 = dloss_N1.masked_fill(other_shard_N[:, None], 0.0).neg_()
    for rows, block, workspace in _row_blocks(logits_Nv, num_valid, in_place=True):
        capped, slope = _cap_block(block, softcap)
        torch.sub(capped, lse_N[rows, None], out=workspace).exp_().mul_(dlse_N1[rows])
        # before rounding: p - 1 of a confident token has no digits left in bf16
        workspace.scatter_add_(1, column_N1[rows], neg_dloss_N1[rows])
        if slope is not None:
            workspace.mul_(slope)
        if workspace is not block:
            block.copy_(workspace)
    return logits_Nv


@kernel
def _stats(
    logits_ptr, labels_ptr, out_ptr, stride_lm, M, vocab_start, num_valid, BLOCK_N: tl.constexpr, SOFTCAP: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride_lm
    IS_FP32: tl.constexpr = logits_ptr.dtype.element_ty == tl.float32
    m_i = tl.full((), float("-inf"), dtype=out_ptr.dtype.element_ty)
    l_i = tl.full((), 0.0, dtype=out_ptr.dtype.element_ty)
    for start_n in range(0, num_valid, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        x = tl.load(logits_ptr + offs_n, mask=offs_n < num_valid, other=float("-inf")).to(out_ptr.dtype.element_ty)
        if SOFTCAP > 0.0:
            x = tl.where(offs_n < num_valid, SOFTCAP * tanh(x * (1.0 / SOFTCAP), IS_FP32), float("-inf"))
        m_new = tl.maximum(m_i, tl.max(x, 0))
        base = tl.where(m_new == float("-inf"), 0.0, m_new)  # all logits so far are -inf, and -inf - -inf is NaN
        p = tl.exp2(x * 1.4426950408889634 - base * 1.4426950408889634)
        l_i = l_i * tl.exp2((m_i - base) * 1.4426950408889634) + tl.sum(p, 0)
        m_i = m_new
    tl.store(out_ptr + row, m_i + tl.log(l_i))
    local = tl.load(labels_ptr + row) - vocab_start
    target = tl.load(logits_ptr + local, mask=(local >= 0) & (local < num_valid), other=0.0)
    if SOFTCAP > 0.0:
        target = SOFTCAP * tanh(target.to(out_ptr.dtype.element_ty) * (1.0 / SOFTCAP), IS_FP32)
    tl.store(out_ptr + M + row, target.to(out_ptr.dtype.element_ty))


@kernel
def _grad(
    logits_ptr, labels_ptr, lse_ptr, dlse_ptr, dloss_ptr, stride_lm, N, vocab_start, num_valid,
    BLOCK_N: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits_ptr += row * stride_lm
    local = tl.load(labels_ptr + row) - vocab_start
    local = tl.where(local < num_valid, local, -1)  # not a padding column
    IS_FP32: tl.constexpr = logits_ptr.dtype.element_ty == tl.float32
    lse, dlse, dloss = tl.load(lse_ptr + row), tl.load(dlse_ptr + row), tl.load(dloss_ptr + row)
    for start_n in range(0, N, BLOCK_N):
        offs_n = start_n + tl.arange(0, BLOCK_N)
        x = tl.load(logits_ptr + offs_n, mask=offs_n < num_valid, other=float("-inf")).to(lse_ptr.dtype.element_ty)
        t = x
        if SOFTCAP > 0.0:
            t = tanh(x * (1.0 / SOFTCAP), IS_FP32)
            x = SOFTCAP * t
        # before rounding: p - 1 of a confident token has no digits left in bf16
        dx = dlse * tl.exp2((x - lse) * 1.4426950408889634) - tl.where(offs_n == local, dloss, 0.0)
        if SOFTCAP > 0.0:
            dx = dx * (1.0 - t * t)  # 0 in padding, where t is -1
        tl.store(logits_ptr + offs_n, dx.to(logits_ptr.dtype.element_ty), mask=offs_n < N)


def shard_stats(
    logits_Nv: Tensor, labels_N: Tensor, vocab_start: int, num_valid: int, softcap: float | None = None
) -> Tensor:
    """Return [2, N]: log(sum exp(logit)) over this slice's columns, and the label's logit or 0 if another slice has it.

    A slice without valid columns gives -inf and 0.

    Args:
        logits_Nv: this slice's logits; rows may be strided.
        labels_N: global token ids.
        vocab_start: the global token id of column 0.
        num_valid: columns before the padding.
        softcap: the bound of the logits (softcap.py); None: no bound.
    """
    if not use_triton(logits_Nv):
        return shard_stats_reference(logits_Nv, labels_N, vocab_start, num_valid, softcap)
    rows = logits_Nv.shape[0]
    out_2N = torch.empty(2, rows, dtype=accum_dtype(logits_Nv), device=logits_Nv.device)
    args = (logits_Nv, labels_N.contiguous(), out_2N, logits_Nv.stride(0), rows, vocab_start, num_valid)
    _stats[(rows,)](*args, BLOCK_N, softcap or 0.0, num_warps=NUM_WARPS)
    return out_2N


def shard_grad_(
    logits_Nv: Tensor,
    lse_N: Tensor,
    labels_N: Tensor,
    vocab_start: int,
    dloss_N: Tensor,
    num_valid: int,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    """Overwrite the logits with their gradient and return them.

    Args:
        logits_Nv: this slice's logits; rows may be strided.
        lse_N: the log-sum-exp over the full vocabulary.
        labels_N: global token ids.
        vocab_start: the global token id of column 0.
        dloss_N: the gradient of each token's loss.
        num_valid: columns before the padding.
        z_loss: the coefficient of the z-loss.
        softcap: the bound of the logits; None: no bound.
    """
    if not use_triton(logits_Nv):
        return shard_grad_reference_(logits_Nv, lse_N, labels_N, vocab_start, dloss_N, num_valid, z_loss, softcap)
    rows, columns = logits_Nv.shape
    lse_N, dloss_N = lse_N.contiguous(), dloss_N.to(lse_N.dtype).contiguous()
    per_row = (labels_N.contiguous(), lse_N, _lse_grad(lse_N, dloss_N, z_loss), dloss_N)
    args = (logits_Nv, *per_row, logits_Nv.stride(0), columns, vocab_start, num_valid)
    _grad[(rows,)](*args, BLOCK_N, softcap or 0.0, num_warps=NUM_WARPS)
    return logits_Nv


def stats_and_grad_(
    logits_NV: Tensor,
    labels_N: Tensor,
    dloss_N: Tensor,
    num_valid: int,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> Tensor:
    """Return `shard_stats` of the full vocabulary, and overwrite the logits with their gradient (`shard_grad_`).

    The torch implementation computes one exponential per logit instead of two, because exponentials take most of the
    time on a CPU. For half precision it uses torch.softmax, whose exponential is twice as fast and accurate to the last
    digits of fp32.
    """
    if use_triton(logits_NV):
        stats_2N = shard_stats(logits_NV, labels_N, 0, num_valid, softcap)
        shard_grad_(logits_NV, stats_2N[0], labels_N, 0, dloss_N, num_valid, z_loss, softcap)
        return stats_2N
    dtype = accum_dtype(logits_NV)
    logits_NV[:, num_valid:] = 0
    stats_2N = torch.empty(2, logits_NV.shape[0], dtype=dtype, device=logits_NV.device)
    stats_2N[1] = soft_cap(logits_NV.gather(1, labels_N[:, None])[:, 0].to(dtype), softcap)
    dloss_N1 = dloss_N.to(dtype)[:, None]
    half = logits_NV.dtype != dtype
    for rows, block, workspace in _row_blocks(logits_NV, num_valid, in_place=True):
        if half:
            per_row = (labels_N[rows, None], dloss_N1[rows], stats_2N[:, rows])
            _softmax_and_grad_(block, workspace, *per_row, z_loss, softcap)
            continue
        capped, slope = _cap_block(block, softcap)
        max_n = capped.amax(1).to(dtype)
        sum_n = torch.sub(capped, max_n[:, None], out=workspace).exp_().sum(1)
        lse_n = torch.add(max_n, sum_n.log(), out=stats_2N[0, rows])
        dlse_n1 = _lse_grad(lse_n[:, None], dloss_N1[rows], z_loss)
        workspace.mul_(dlse_n1 / sum_n[:, None]).scatter_add_(1, labels_N[rows, None], -dloss_N1[rows])
        if slope is not None:
            workspace.mul_(slope)
    return stats_2N


def _softmax_and_grad_(
    logits_nV: Tensor,
    workspace_nV: Tensor,
    labels_n1: Tensor,
    dloss_n1: Tensor,
    stats_2n: Tensor,
    z_loss: float,
    softcap: float | None,
) -> None:
    """Compute `stats_and_grad_` of a block in half precision; stats_2n[1] already has the labels' capped logits."""
    capped_nV, slope_nV = _cap_block(logits_nV, softcap)
    p_nV = torch.softmax(workspace_nV.copy_(capped_nV), 1)
    p_n = p_nV.gather(1, labels_n1)[:, 0]
    torch.sub(stats_2n[1], p_n.log(), out=stats_2n[0])
    small_n = p_n < MIN_PROB
    if small_n.is_cuda or small_n.any():  # p has lost digits or is zero; on a GPU, testing would synchronize
        torch.where(small_n, workspace_nV.logsumexp(1), stats_2n[0], out=stats_2n[0])
    p_nV.mul_(_lse_grad(stats_2n[0][:, None], dloss_n1, z_loss)).scatter_add_(1, labels_n1, -dloss_n1)
    if slope_nV is not None:
        p_nV.mul_(slope_nV)
    logits_nV.copy_(p_nV)
