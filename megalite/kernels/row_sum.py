"""The second stage of a weight gradient: dw_D = sum over p of partial_PD, in a fixed order of additions.

The first stage (in norms, bias_gelu) writes one row of partial sums per program. Atomic additions to a single row would
save 8 P D bytes, but their rounding would differ in every run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megalite.kernels.dispatch import ceil_div, kernel

if TYPE_CHECKING:
    import triton.language as tl

BLOCK_M, BLOCK_N, NUM_WARPS = 32, 64, 4  # few columns, so that a hidden size of 4096 has 64 programs


@kernel
def _sum_rows_kernel(partial_ptr, out_ptr, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    offs_n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=partial_ptr.dtype.element_ty)
    for start_m in range(0, M, BLOCK_M):
        offs_m = start_m + tl.arange(0, BLOCK_M)
        mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
        acc += tl.load(partial_ptr + offs_m[:, None] * N + offs_n[None, :], mask=mask, other=0.0)
    tl.store(out_ptr + offs_n, tl.sum(acc, 0).to(out_ptr.dtype.element_ty), mask=offs_n < N)


def sum_rows(partial_PD: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sums over rows, [D] in `dtype`, of [P, D] contiguous in fp32 or fp64.

    Reads P D elements and writes D.
    """
    rows, columns = partial_PD.shape
    out = torch.empty(columns, dtype=dtype, device=partial_PD.device)
    _sum_rows_kernel[(ceil_div(columns, BLOCK_N),)](
        partial_PD, out, rows, columns, BLOCK_M, BLOCK_N, num_warps=NUM_WARPS
    )
    return out
