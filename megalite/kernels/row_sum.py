"""The second stage of a weight gradient: dw_D = sum over p of partial_PD, one order of addition whatever the timing.

The first stage (in norms, bias_gelu) leaves one row of sums per program. Atomic additions into one row
would save 8 P D bytes and give another rounding in every run.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megalite.kernels.dispatch import ceil_div, kernel

if TYPE_CHECKING:
    import triton.language as tl

ROWS, COLUMNS, WARPS = 32, 64, 4  # few columns, so that a hidden size of 4096 makes 64 programs


@kernel
def _sum_rows_kernel(P, OUT, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    at = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    total = tl.zeros((ROWS, COLUMNS), dtype=P.dtype.element_ty)
    for first in range(0, rows, ROWS):
        row = first + tl.arange(0, ROWS)
        inside = (row < rows)[:, None] & (at < columns)[None, :]
        total += tl.load(P + row[:, None] * columns + at[None, :], mask=inside, other=0.0)
    tl.store(OUT + at, tl.sum(total, 0).to(OUT.dtype.element_ty), mask=at < columns)


def sum_rows(partial_PD: Tensor, dtype: torch.dtype) -> Tensor:
    """[P, D] contiguous, fp32 or fp64 -> [D] in `dtype`. Reads and writes P D + D elements."""
    rows, columns = partial_PD.shape
    out = torch.empty(columns, dtype=dtype, device=partial_PD.device)
    _sum_rows_kernel[(ceil_div(columns, COLUMNS),)](partial_PD, out, rows, columns, ROWS, COLUMNS, num_warps=WARPS)
    return out
