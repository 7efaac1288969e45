"""Sums of squares of a flat gradient, or of each row: sum_i g_i^2 as fp64 scalars, deterministic.

The sum has two stages and no atomics: each program sums the squares of its blocks in fp32, per lane, and writes one
number; the second stage adds these numbers in fp64. A lane adds a few hundred terms, so the error is about 1e-7; a
single fp32 sum would have an error of 1e-3 at 12 M elements. NaN and inf propagate. Bytes: 4 per element, read once.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megalite.kernels.dispatch import accum_dtype, ceil_div, kernel, num_sms, use_triton

if TYPE_CHECKING:
    import triton.language as tl

# elements and warps per program and iteration, programs per multiprocessor: four 16-byte loads per thread in flight,
# and all programs resident
BLOCK_SIZE, NUM_WARPS, PROGRAMS_PER_SM = 4096, 8, 8
REFERENCE_ROW = 64  # elements that the torch implementation sums in the gradient's dtype


def sums_of_squares_reference(x_RN: Tensor) -> Tensor:
    """Compute `sums_of_squares` in torch.

    It sums short segments in the gradient's dtype, and the segments in fp64. The error is 1e-9. Summing everything in
    fp64 is 20 times slower on a CPU.
    """
    segments = x_RN.shape[1] // REFERENCE_ROW
    end = segments * REFERENCE_ROW
    norms = torch.linalg.vector_norm(x_RN[:, :end].unflatten(1, (segments, REFERENCE_ROW)), dim=2)
    return norms.double().square().sum(1) + x_RN[:, end:].double().square().sum(1)


@kernel
def _sum_of_squares_kernel(x_ptr, out_ptr, N, BLOCK_SIZE: tl.constexpr):
    acc = tl.zeros((BLOCK_SIZE,), dtype=out_ptr.dtype.element_ty)
    x_row_ptr = x_ptr + tl.program_id(1).to(tl.int64) * N
    start = tl.program_id(0).to(tl.int64) * BLOCK_SIZE
    while start < N:
        offs = start + tl.arange(0, BLOCK_SIZE)
        x = tl.load(x_row_ptr + offs, mask=offs < N, other=0.0).to(out_ptr.dtype.element_ty)
        acc += x * x
        start += tl.num_programs(0) * BLOCK_SIZE
    tl.store(out_ptr + tl.program_id(1) * tl.num_programs(0) + tl.program_id(0), tl.sum(acc, 0))


def sums_of_squares(x_RN: Tensor) -> Tensor:
    """Return the sum of squares of each row of x, contiguous [rows, n], as fp64 [rows] on the same device.

    It does not synchronize with the device.
    """
    if not use_triton(x_RN):
        return sums_of_squares_reference(x_RN)
    rows, n = x_RN.shape
    programs = min(ceil_div(n, BLOCK_SIZE), ceil_div(PROGRAMS_PER_SM * num_sms(x_RN.device), rows))
    partial = torch.empty(rows, programs, dtype=accum_dtype(x_RN), device=x_RN.device)
    _sum_of_squares_kernel[(programs, rows)](x_RN, partial, n, BLOCK_SIZE, num_warps=NUM_WARPS)
    return partial.double().sum(1)


def sum_of_squares(flat: Tensor) -> Tensor:
    """Return the sum of squares of a contiguous tensor [n] as an fp64 scalar on the same device.

    It does not synchronize with the device.
    """
    return sums_of_squares(flat.unsqueeze(0)).squeeze(0)
