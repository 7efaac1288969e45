"""Matrix products of any float dtype: torch's, or in fp32 where a CPU has no instructions for half precision.

    fp32, fp64, a GPU, a CPU with bf16 (fp16) instructions    a @ b
    half precision on another CPU (dispatch.py: upcasts)      round(fp32(a) @ fp32(b)), a block at a time

Products of two bf16 or fp16 numbers are exact in fp32, and sums are in fp32 either way, so both forms round once and
differ in the order of the sums alone. Blocks bound the memory in fp32, and nothing of it is kept, for backward or for
the next call. Measured: docs/performance.md.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from megalite.kernels.dispatch import upcasts

DEPTH = 2048  # elements of a sum at a time: more would leave too few columns in a block of the right operand
# bytes of blocks in fp32. Of the left operand and the result: large, so that the right one is converted seldom; of the
# right one: a CPU's second-level cache
LEFT_BYTES, RIGHT_BYTES = 64 << 20, 2 << 20


def blocks(n: int, width: int, limit: int) -> Iterator[slice]:
    """Ranges of n rows, or columns, of `width` elements: `limit` bytes in fp32 at most, but one at least in each."""
    step = max(1, limit // (4 * max(1, width)))
    for start in range(0, n, step):
        yield slice(start, min(start + step, n))


def mm_(out_MN: Tensor, a_MK: Tensor, b_KN: Tensor, *, add: bool = False) -> Tensor:
    """out = a b, or out += a b, rounded once; all in one dtype, with any strides. Not differentiable."""
    (M, K), N = a_MK.shape, b_KN.shape[1]
    if not upcasts(a_MK, min(M, N)):
        if add:
            return out_MN.addmm_(a_MK, b_KN)
        return torch.mm(a_MK, b_KN, out=out_MN)
    for rows in blocks(M, max(N, min(K, DEPTH)), LEFT_BYTES):
        out, a_mK = out_MN[rows], a_MK[rows]
        if K <= DEPTH:
            _by_columns(out, a_mK, b_KN, add=add)
            continue
        total = out.float() if add else torch.zeros(out.shape, dtype=torch.float32)
        for depth in blocks(K, 1, 4 * DEPTH):
            _by_columns(total, a_mK[:, depth], b_KN[depth], add=True)
        out.copy_(total)
    return out_MN


def _by_columns(out_mN: Tensor, a_mK: Tensor, b_KN: Tensor, *, add: bool) -> None:
    a = a_mK.float()
    for columns in blocks(b_KN.shape[1], len(b_KN), RIGHT_BYTES):
        b, out = b_KN[:, columns].float(), out_mN[:, columns]
        if not add:
            out.copy_(a @ b)
        elif out.dtype == torch.float32:
            out.addmm_(a, b)
        else:
            out.copy_(torch.addmm(out.float(), a, b))


def matmul(a: Tensor, b_KN: Tensor) -> Tensor:
    """a b of a [..., K], in their dtype. Not differentiable."""
    if not upcasts(a):
        return a @ b_KN
    out = a.new_empty(*a.shape[:-1], b_KN.shape[1])
    mm_(out.view(-1, out.shape[-1]), a.reshape(-1, a.shape[-1]), b_KN)
    return out
