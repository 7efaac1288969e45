"""Matmuls of experts: group e owns the rows offsets[e] to offsets[e + 1] of M, and has a weight of its own.

    y_MF[m] = x[rows[m]] w[e(m)]^T              rows are read by index, so that no copy of them, [M, D], is made
    dx_MD   = the same of dy and w.transpose(1, 2), a view
    dW_EFD[e] (+)= dy[group]^T x[group]         added where gradients are kept, in fp32 (fp64 for fp64)

Groups may be empty. Rows of M that no group owns (from offsets[E] on) give zeros and take no part in gradients.
On a CPU torch multiplies one group after the other.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megalite.kernels.weight_grad import accumulate_outer_


def _groups(offsets: Tensor, M: int) -> Iterator[tuple[int, slice]]:
    """(e, its rows of M). The meta device has no offsets: there all rows are the first group's, which costs as much."""
    bounds = [0, M] if offsets.is_meta else offsets.tolist()
    for e, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        yield e, slice(start, end)


def _rows_of(x_RD: Tensor, rows: Tensor | None, of: slice) -> Tensor:
    return x_RD[of] if rows is None else x_RD.index_select(0, rows[of])


def grouped_matmul_reference(x_RD: Tensor, w_EFD: Tensor, offsets: Tensor, rows: Tensor | None = None) -> Tensor:
    M, end = len(x_RD if rows is None else rows), 0
    y_MF = x_RD.new_empty(M, w_EFD.shape[1])
    for e, of in _groups(offsets, M):
        if of.start < of.stop:
            torch.mm(_rows_of(x_RD, rows, of), w_EFD[e].T, out=y_MF[of])
        end = of.stop
    if end < M:
        y_MF[end:] = 0
    return y_MF


def grouped_weight_grad_reference_(
    grad_EFD: Tensor,
    dy_MF: Tensor,
    x_RD: Tensor,
    offsets: Tensor,
    rows: Tensor | None = None,
    *,
    dy_rows: Tensor | None = None,
    begin: bool,
) -> None:
    M = len(x_RD if rows is None else rows)
    for e, of in _groups(offsets, M):
        if of.start < of.stop:
            accumulate_outer_(grad_EFD[e], _rows_of(dy_MF, dy_rows, of), _rows_of(x_RD, rows, of), begin=begin)
        elif begin:
            grad_EFD[e] = 0


def grouped_matmul(x_RD: Tensor, w_EFD: Tensor, offsets: Tensor, rows: Tensor | None = None) -> Tensor:
    """y_MF of x and w in one dtype. `w_EFD`: any strides. offsets: int32 or int64 [E + 1], from 0; rows: int64 [M],
    the row of x for each of M; without it M = R. Not differentiable."""
    return grouped_matmul_reference(x_RD, w_EFD, offsets, rows)


def grouped_weight_grad_(
    grad_EFD: Tensor,
    dy_MF: Tensor,
    x_RD: Tensor,
    offsets: Tensor,
    rows: Tensor | None = None,
    *,
    dy_rows: Tensor | None = None,
    begin: bool,
) -> None:
    """grad[e] += dy[group]^T x[group], or that alone to begin with, which zeroes those of empty groups. `grad_EFD`:
    fp32 (fp64 for fp64), any strides; rows, dy_rows: int64 [M], the rows of x and of dy for each of M."""
    grouped_weight_grad_reference_(grad_EFD, dy_MF, x_RD, offsets, rows, dy_rows=dy_rows, begin=begin)
