"""Matrix products of any float dtype: torch's, or in fp32 if the CPU has no instructions for half precision.

    fp32, fp64, a GPU, a CPU with bf16 (fp16) instructions    a @ b
    half precision on another CPU (dispatch.py: upcasts)      round(fp32(a) @ fp32(b)), a block at a time

Products of two bf16 or fp16 numbers are exact in fp32, and sums are in fp32 either way, so both forms round once and
differ only in the order of the sums. The block sizes bound the memory of fp32 copies, which are not saved for backward
or for the next call. Measurements: docs/performance.md.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from megalite.kernels.dispatch import upcasts

BLOCK_K = 2048  # max elements of a sum per block: more would leave too few columns in a block of the right operand
# Bytes of blocks in fp32. The blocks of the left operand and the result are large, so that the right operand is rarely
# converted; blocks of the right operand fit in a CPU's second-level cache.
LEFT_BYTES = 64 << 20
RIGHT_BYTES = 2 << 20


def blocks(n: int, width: int, limit: int) -> Iterator[slice]:
    """Yield ranges of n rows (or columns) of `width` elements each.

    A range takes at most `limit` bytes in fp32, but has at least one row.
    """
    step = max(1, limit // (4 * max(1, width)))
    for start in range(0, n, step):
        yield slice(start, min(start + step, n))


def mm_(out_MN: Tensor, a_MK: Tensor, b_KN: Tensor, *, add: bool = False) -> Tensor:
    """Compute out = a b, or out += a b, rounded once. Not differentiable.

    All tensors have the same dtype, and any strides.
    """
    M, K = a_MK.shape
    N = b_KN.shape[1]
    if not upcasts(a_MK, min(M, N)):
        if add:
            return out_MN.addmm_(a_MK, b_KN)
        return torch.mm(a_MK, b_KN, out=out_MN)
    for rows in blocks(M, max(N, min(K, BLOCK_K)), LEFT_BYTES):
        out_mN = out_MN[rows]
        a_mK = a_MK[rows]
        if K <= BLOCK_K:
            _by_columns(out_mN, a_mK, b_KN, add=add)
            continue
        acc_mN = out_mN.float() if add else torch.zeros(out_mN.shape, dtype=torch.float32)
        for depth in blocks(K, 1, 4 * BLOCK_K):
            _by_columns(acc_mN, a_mK[:, depth], b_KN[depth], add=True)
        out_mN.copy_(acc_mN)
    return out_MN


def _by_columns(out_mN: Tensor, a_mK: Tensor, b_KN: Tensor, *, add: bool) -> None:
    """Compute `mm_` for one block of rows, in fp32, one block of columns at a time."""
    a = a_mK.float()
    for columns in blocks(b_KN.shape[1], len(b_KN), RIGHT_BYTES):
        b = b_KN[:, columns].float()
        out_mn = out_mN[:, columns]
        if not add:
            out_mn.copy_(a @ b)
        elif out_mn.dtype == torch.float32:
            out_mn.addmm_(a, b)
        else:
            out_mn.copy_(torch.addmm(out_mn.float(), a, b))


def matmul(a: Tensor, b_KN: Tensor) -> Tensor:
    """Return a b for a [..., K], in the dtype of the operands. Not differentiable."""
    if not upcasts(a):
        return a @ b_KN
    out = a.new_empty(*a.shape[:-1], b_KN.shape[1])
    mm_(out.view(-1, out.shape[-1]), a.reshape(-1, a.shape[-1]), b_KN)
    return out
