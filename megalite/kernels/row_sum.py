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

ROWS, COLUMNS, WARPS = 32, 64, 4  # few columns, so that a hidden size of 4096 has 64 programs


@kernel
def _sum_rows_kernel(P, OUT, rows, columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    offs = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    acc = tl.zeros((ROWS, COLUMNS), dtype=P.dtype.element_ty)
    for first in range(0, rows, ROWS):
        row = first + tl.arange(0, ROWS)
        mask = (row < rows)[:, None] & (offs < columns)[None, :]
        acc += tl.load(P + row[:, None] * columns + offs[None, :], mask=mask, other=0.0)
    tl.store(OUT + offs, tl.sum(acc, 0).to(OUT.dtype.element_ty), mask=offs < columns)


def sum_rows(partial_PD: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the sums over rows, [D] in `dtype`, of [P, D] contiguous in fp32 or fp64.

    Reads P D elements and writes D.
    """
    rows, columns = partial_PD.shape
    out = torch.empty(columns, dtype=dtype, device=partial_PD.device)
    _sum_rows_kernel[(ceil_div(columns, COLUMNS),)](partial_PD, out, rows, columns, ROWS, COLUMNS, num_warps=WARPS)
    return out
