"""Matmuls of experts: group e has rows offsets[e] to offsets[e + 1] of M, and a separate weight.

    y_MF[m] = x[rows[m]] w[e(m)]^T              rows are read by index, so that no copy of them, [M, D], is needed
    dx_MD   = the same for dy and w.transpose(1, 2), a view
    dW_EFD[e] (+)= dy[group]^T x[group]         added to main_grad, in fp32 (fp64 for fp64)

Groups may be empty. Rows of M that are in no group (from offsets[E] on) give zeros and do not affect gradients. FLOPs:
2 M F D each. Bytes in bf16: 2 (M D + E F D + M F) forward, 2 M (F + D) + 8 E F D for gradients.

With Triton the host never reads the offsets. The forward kernel is persistent: it has up to one program per
multiprocessor, and program p processes the tiles p, p + num_programs, ... A program finds the group of a tile in the
cumulative number of tiles per group, which it computes from the offsets. The tiles of a weight gradient do not depend
on the offsets: each has one program, which loops over the rows of the group, so that no two programs add to the same
element. On a CPU, and in fp64, torch multiplies one group after the other, for which the host reads the offsets.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megalite.common.tables import load_table
from megalite.kernels.dispatch import (
    as_2d,
    ceil_div,
    kernel,
    matmul_unit,
    num_sms,
    power_of_two,
    upcast_for_interpreter,
    use_triton,
)
from megalite.kernels.flash_blocks import dot
from megalite.kernels.matmul import mm_
from megalite.kernels.weight_grad import accumulate_weight_grad_

if TYPE_CHECKING:
    import triton.language as tl

FORWARD, WEIGHT_GRAD = load_table(__file__, "tiles")["grouped_matmul"].values()  # by `matmul_unit`
GROUP_M = 8  # rows of tiles that are processed column by column, so that the operands they share stay in the cache


def _expert_slices(offsets: Tensor, M: int) -> Iterator[tuple[int, slice]]:
    """Yield (e, its rows of M).

    Offsets on the meta device have no values. Then all rows belong to the first group, which costs the same.
    """
    bounds = [0, M] if offsets.is_meta else offsets.tolist()
    for e, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        yield e, slice(start, end)


def _select_rows(x_RD: Tensor, rows: Tensor | None, rows_of_expert: slice) -> Tensor:
    return x_RD[rows_of_expert] if rows is None else x_RD.index_select(0, rows[rows_of_expert])


def grouped_matmul_reference(x_RD: Tensor, w_EFD: Tensor, offsets: Tensor, rows: Tensor | None = None) -> Tensor:
    """Compute `grouped_matmul` in torch."""
    M = len(x_RD if rows is None else rows)
    end = 0
    y_MF = x_RD.new_empty(M, w_EFD.shape[1])
    for e, rows_of_expert in _expert_slices(offsets, M):
        if rows_of_expert.start < rows_of_expert.stop:
            mm_(y_MF[rows_of_expert], _select_rows(x_RD, rows, rows_of_expert), w_EFD[e].T)
        end = rows_of_expert.stop
    if end < M:
        y_MF[end:] = 0
    return y_MF


def grouped_weight_grad_reference_(
    grad_EFD: Tensor, dy_MF: Tensor, x_RD: Tensor, offsets: Tensor, rows: Tensor | None = None, *,
    dy_rows: Tensor | None = None, overwrite: bool,
) -> None:  # fmt: skip
    """Compute `grouped_weight_grad_` in torch."""
    M = len(x_RD if rows is None else rows)
    for e, rows_of_expert in _expert_slices(offsets, M):
        if rows_of_expert.start < rows_of_expert.stop:
            accumulate_weight_grad_(
                grad_EFD[e],
                _select_rows(dy_MF, dy_rows, rows_of_expert),
                _select_rows(x_RD, rows, rows_of_expert),
                overwrite=overwrite,
            )
        elif overwrite:
            grad_EFD[e] = 0


@kernel
def cumulative_tiles(OFFSETS, M, E, across, GROUPS: tl.constexpr, ROWS: tl.constexpr):
    """Return the cumulative number of tiles of the groups; group E has the rows that are in no group."""
    group = tl.arange(0, GROUPS)
    starts = tl.load(OFFSETS + group, mask=group <= E, other=M).to(tl.int32)
    ends = tl.load(OFFSETS + group + 1, mask=group < E, other=M).to(tl.int32)
    return tl.cumsum((ends - starts + ROWS - 1) // ROWS, 0) * across


@kernel
def locate_tile(
    OFFSETS, INDEX, tiles, tile, M, E, across, INDEXED: tl.constexpr, ROWS: tl.constexpr, GROUP_M: tl.constexpr
):
    """Return the group of a tile, the end of the group, the tile's rows of M and of x, and its column of tiles."""
    e = tl.sum((tiles <= tile).to(tl.int32), 0)
    start = tl.load(OFFSETS + e).to(tl.int32)
    end = tl.load(OFFSETS + e + 1, mask=e < E, other=M).to(tl.int32)
    tiles_before = tl.max(tl.where(tiles <= tile, tiles, 0), 0)
    i, j = _swizzle(tile - tiles_before, (end - start + ROWS - 1) // ROWS, across, GROUP_M)  # type: ignore
    rows = start + i * ROWS + tl.arange(0, ROWS)
    return e, end, rows, _source_rows(INDEX, rows, end, INDEXED), j


@kernel
def _swizzle(tile, down, across, GROUP_M: tl.constexpr):
    """Return the row and column of a tile in a grid of down x across tiles, ordered in bands of GROUP_M rows."""
    first = tile // (GROUP_M * across) * GROUP_M
    within = tile % (GROUP_M * across)
    height = tl.minimum(down - first, GROUP_M)
    return first + within % height, within // height


@kernel
def _source_rows(INDEX, offs, end, INDEXED: tl.constexpr):
    """Return the rows to read for these rows of M; row 0 for rows from `end` on."""
    if INDEXED:
        return tl.load(INDEX + offs, mask=offs < end, other=0).to(tl.int64)
    return tl.where(offs < end, offs, 0).to(tl.int64)


@kernel
def dot_rows(
    x, w, column_mask, depth, wd,
    EVEN: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Return x w^T in fp32, for rows that start at the pointers x and w; `column_mask` masks the rows of w."""
    offs_k = tl.arange(0, DEPTH)[None, :]
    x, w, acc = x[:, None] + offs_k, w[:, None] + offs_k * wd, tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for k in range(0, depth, DEPTH):
        if EVEN:
            acc += dot(tl.load(x), tl.trans(tl.load(w)), WIDE)
        else:
            k_mask = offs_k < depth - k
            w_tile = tl.load(w, mask=k_mask & column_mask[:, None], other=0.0)
            acc += dot(tl.load(x, mask=k_mask, other=0.0), tl.trans(w_tile), WIDE)
        x += DEPTH
        w += DEPTH * wd
    return acc


def matmul_shape(x: Tensor, w: Tensor, y: Tensor, *_: Any) -> tuple[float, ...]:
    """Return (rows, columns, depth, groups) of a launch (dispatch.py: Kernel)."""
    return len(y), w.shape[1], x.shape[1], len(w)


@kernel(matmul_shape=matmul_shape, do_not_specialize=["M"])
def _forward(
    X, W, Y, OFFSETS, INDEX, M, E, F, D, xs, we, wf, wd,
    INDEXED: tl.constexpr, WIDE: tl.constexpr, GROUPS: tl.constexpr, EVEN: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """Multiply all tiles of the groups. EVEN: COLUMNS divides F, and DEPTH divides D."""
    across = tl.cdiv(F, COLUMNS)
    tiles = cumulative_tiles(OFFSETS, M, E, across, GROUPS, ROWS)
    for tile in range(tl.program_id(0), tl.max(tiles, 0), tl.num_programs(0)):  # type: ignore
        e, end, rows, read, j = locate_tile(OFFSETS, INDEX, tiles, tile, M, E, across, INDEXED, ROWS, GROUP_M)
        columns = j * COLUMNS + tl.arange(0, COLUMNS)
        w = W + e.to(tl.int64) * we + columns.to(tl.int64) * wf
        y = dot_rows(X + read * xs, w, columns < F, D * (e < E), wd, EVEN, WIDE, ROWS, COLUMNS, DEPTH)
        mask = (rows < end)[:, None] & (columns < F)[None, :]
        tl.store(Y + rows.to(tl.int64)[:, None] * F + columns[None, :], y.to(Y.dtype.element_ty), mask=mask)


def _wgrad_matmul_shape(grad: Tensor, dy: Tensor, x: Tensor, offsets: Tensor, M: int, *_: Any) -> tuple[float, ...]:
    """Return the shape of a launch: all gradients below each other; a group has M / E rows on average."""
    E, F, D = grad.shape
    return E * F, D, M / E


@kernel(matmul_shape=_wgrad_matmul_shape, do_not_specialize=["M"])
def _weight_grad(
    GRAD, DY, X, OFFSETS, M, DY_INDEX, X_INDEX, F, D, ys, xs, ge, gf, gd,
    DY_INDEXED: tl.constexpr, X_INDEXED: tl.constexpr, OVERWRITE: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    down, across = tl.cdiv(F, ROWS), tl.cdiv(D, COLUMNS)
    e = tl.program_id(0) // (down * across)
    i, j = _swizzle(tl.program_id(0) % (down * across), down, across, GROUP_M)
    start, end = tl.load(OFFSETS + e).to(tl.int32), tl.load(OFFSETS + e + 1).to(tl.int32)
    if OVERWRITE | (start < end):
        offs_m, offs_n = i * ROWS + tl.arange(0, ROWS), j * COLUMNS + tl.arange(0, COLUMNS)
        acc = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for first in range(start, end, DEPTH):
            offs = first + tl.arange(0, DEPTH)
            dy = DY + _source_rows(DY_INDEX, offs, end, DY_INDEXED)[:, None] * ys + offs_m[None, :]
            x = X + _source_rows(X_INDEX, offs, end, X_INDEXED)[:, None] * xs + offs_n[None, :]
            dy = tl.load(dy, mask=(offs < end)[:, None] & (offs_m < F)[None, :], other=0.0)
            x = tl.load(x, mask=(offs < end)[:, None] & (offs_n < D)[None, :], other=0.0)
            acc += dot(tl.trans(dy), x, WIDE)
        grad_ptrs = GRAD + e.to(tl.int64) * ge + offs_m.to(tl.int64)[:, None] * gf + offs_n.to(tl.int64)[None, :] * gd
        mask = (offs_m < F)[:, None] & (offs_n < D)[None, :]
        if not OVERWRITE:
            acc += tl.load(grad_ptrs, mask=mask, other=0.0)
        tl.store(grad_ptrs, acc, mask=mask)


def uses_triton(x: Tensor, *others: Tensor) -> bool:
    """Return whether to run the Triton kernels for these inputs, which do not support fp64."""
    return x.dtype != torch.float64 and all(use_triton(t) for t in (x, *others))


def launch_tiled(
    kernel: Any, tile: Sequence[int], x_RD: Tensor, w: Tensor, F: int, others: tuple[Tensor, ...], offsets: Tensor,
    rows: Tensor | None, constants: tuple[Any, ...],
) -> None:  # fmt: skip
    """Launch a persistent kernel over the tiles of an output with F columns.

    Args:
        kernel: the kernel.
        tile: (block_m, block_n, block_k, warps, stages).
        x_RD: the input.
        w: the weights, whose last dimension is D.
        F: columns of the output.
        others: the kernel's tensors after x and w; the first one has M rows.
        offsets: the offsets of the groups.
        rows: the rows of x, or None.
        constants: the kernel's first constexpr arguments; all such kernels share the rest.
    """
    E, _, D = w.shape
    M = len(others[0])
    block_m, block_n, block_k, warps, stages = tile
    programs = min(num_sms(x_RD.device), (ceil_div(M, block_m) + E) * ceil_div(F, block_n))
    index = offsets if rows is None else rows.contiguous()
    is_even = not (F % block_n or D % block_k)
    sizes = (M, E, F, D, x_RD.stride(0), *w.stride())
    constexprs = (*constants, upcast_for_interpreter(x_RD), power_of_two(E + 1), is_even)
    constexprs += (block_m, block_n, block_k, GROUP_M)
    kernel[(programs,)](x_RD, w, *others, offsets, index, *sizes, *constexprs, num_warps=warps, num_stages=stages)


def grouped_matmul(x_RD: Tensor, w_EFD: Tensor, offsets: Tensor, rows: Tensor | None = None) -> Tensor:
    """Return y_MF, the product of the rows of each group with the group's weight. Not differentiable.

    Args:
        x_RD: the input.
        w_EFD: the weights, with the dtype of the input and any strides.
        offsets: int32 or int64 [E + 1], the first row of each group, from 0.
        rows: int64 [M], the row of x for each row of M; None: M = R.
    """
    if not uses_triton(x_RD, w_EFD):
        return grouped_matmul_reference(x_RD, w_EFD, offsets, rows)
    x_RD = as_2d(x_RD)
    F = w_EFD.shape[1]
    y_MF = x_RD.new_empty(len(x_RD if rows is None else rows), F)
    launch_tiled(_forward, FORWARD[matmul_unit(x_RD)], x_RD, w_EFD, F, (y_MF,), offsets, rows, (rows is not None,))
    return y_MF


def grouped_weight_grad_(
    grad_EFD: Tensor, dy_MF: Tensor, x_RD: Tensor, offsets: Tensor, rows: Tensor | None = None, *,
    dy_rows: Tensor | None = None, overwrite: bool,
) -> None:  # fmt: skip
    """Add dy[group]^T x[group] to grad[e] for every group e.

    Args:
        grad_EFD: fp32 (fp64 for fp64), with any strides.
        dy_MF: the gradient of the output.
        x_RD: the input.
        offsets: int32 or int64 [E + 1], the first row of each group, from 0.
        rows: int64 [M], the row of x for each row of M; None: M = R.
        dy_rows: int64 [M], the row of dy for each row of M, or None.
        overwrite: overwrite the gradients instead, with zeros for empty groups.
    """
    if not uses_triton(x_RD, dy_MF):
        return grouped_weight_grad_reference_(
            grad_EFD, dy_MF, x_RD, offsets, rows, dy_rows=dy_rows, overwrite=overwrite
        )
    E, F, D = grad_EFD.shape
    M = len(x_RD if rows is None else rows)
    dy_MF = as_2d(dy_MF)
    x_RD = as_2d(x_RD)
    block_m, block_n, block_k, warps, stages = WEIGHT_GRAD[matmul_unit(x_RD)]
    dy_index = offsets if dy_rows is None else dy_rows.contiguous()
    x_index = offsets if rows is None else rows.contiguous()
    sizes = (F, D, dy_MF.stride(0), x_RD.stride(0), *grad_EFD.stride())
    constexprs = (dy_rows is not None, rows is not None, overwrite, upcast_for_interpreter(x_RD))
    constexprs += (block_m, block_n, block_k, GROUP_M)
    _weight_grad[(E * ceil_div(F, block_m) * ceil_div(D, block_n),)](
        grad_EFD, dy_MF, x_RD, offsets, M, dy_index, x_index, *sizes, *constexprs, num_warps=warps, num_stages=stages
    )
