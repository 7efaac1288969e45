"""Sum of squares of a flat gradient, or of each row: sum_i g_i^2 as fp64 scalars, the same in every run.

Two stages and no atomics: each program sums the squares of its blocks in fp32, lane by lane, and leaves one number;
those are added in fp64. A lane adds a few hundred terms, so the error is about 1e-7; one long fp32 sum is wrong by
1e-3 at 12 M elements. NaN and inf stay. Bytes: 4 per element, read once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megalite.kernels.dispatch import accum_dtype, ceil_div, kernel, num_sms, use_triton

if TYPE_CHECKING:
    import triton.language as tl

# elements and warps per program and turn, programs per multiprocessor: four 16-byte loads per thread in flight, and all
# programs resident
ELEMENTS, WARPS, PROGRAMS = 4096, 8, 8
REFERENCE_ROW = 64  # elements that torch's form sums in their own precision


def sums_of_squares_reference(x_RN: Tensor) -> Tensor:
    """Short pieces in their own precision, their sum in fp64: error 1e-9; all in fp64 is 20 times slower on a CPU."""
    pieces = x_RN.shape[1] // REFERENCE_ROW
    whole = x_RN[:, : pieces * REFERENCE_ROW].unflatten(1, (pieces, REFERENCE_ROW))
    norms = torch.linalg.vector_norm(whole, dim=2)
    return norms.double().square().sum(1) + x_RN[:, pieces * REFERENCE_ROW :].double().square().sum(1)


@kernel
def _sum_of_squares_kernel(X, OUT, n, ELEMENTS: tl.constexpr):
    total = tl.zeros((ELEMENTS,), dtype=OUT.dtype.element_ty)
    x_row = X + tl.program_id(1).to(tl.int64) * n
    first = tl.program_id(0).to(tl.int64) * ELEMENTS
    while first < n:
        at = first + tl.arange(0, ELEMENTS)
        x = tl.load(x_row + at, mask=at < n, other=0.0).to(OUT.dtype.element_ty)
        total += x * x
        first += tl.num_programs(0) * ELEMENTS
    tl.store(OUT + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), tl.sum(total, 0))


def sums_of_squares(x_RN: Tensor) -> Tensor:
    """[rows, n] contiguous -> fp64 [rows] on the same device; no wait for it."""
    if not use_triton(x_RN):
        return sums_of_squares_reference(x_RN)
    rows, n = x_RN.shape
    programs = min(ceil_div(n, ELEMENTS), ceil_div(PROGRAMS * num_sms(x_RN.device), rows))
    partial = torch.empty(rows, programs, dtype=accum_dtype(x_RN), device=x_RN.device)
    _sum_of_squares_kernel[(programs, rows)](x_RN, partial, n, ELEMENTS, num_warps=WARPS)
    return partial.double().sum(1)


def sum_of_squares(flat: Tensor) -> Tensor:
    """[n] contiguous -> fp64 scalar on the same device; no wait for it."""
    return sums_of_squares(flat.unsqueeze(0)).squeeze(0)
