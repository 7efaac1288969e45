"""Matmuls of experts: group e owns the rows offsets[e] to offsets[e + 1] of M, and has a weight of its own.

    y_MF[m] = x[rows[m]] w[e(m)]^T              rows are read by index, so that no copy of them, [M, D], is made
    dx_MD   = the same of dy and w.transpose(1, 2), a view
    dW_EFD[e] (+)= dy[group]^T x[group]         added where gradients are kept, in fp32 (fp64 for fp64)

Groups may be empty. Rows of M that no group owns (from offsets[E] on) give zeros and take no part in gradients. FLOPs:
2 M F D each. Bytes in bf16: 2 (M D + E F D + M F) forward, 2 M (F + D) + 8 E F D for gradients.

The host never reads the offsets. Forward has as many programs as a card runs at once, and each takes every so many-th
tile; which group a tile is of follows from the running sum of tiles per group, which a program holds. Tiles of a
gradient are known without the offsets: one program each, whose loop is over the rows of the group, so that nothing is
added by two. fp64, and all on a CPU, are torch's: one group after the other, for which the host reads the offsets.
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

FORWARD, WEIGHT_GRAD = load_table(__file__, "tiles")["grouped_matmul"].values()  # by what multiplies
GROUP_M = 8  # rows of tiles that are done column by column: what they share stays in the cache


def _expert_slices(offsets: Tensor, M: int) -> Iterator[tuple[int, slice]]:
    """(e, its rows of M). The meta device has no offsets: there all rows are the first group's, which costs as much."""
    bounds = [0, M] if offsets.is_meta else offsets.tolist()
    for e, (start, end) in enumerate(zip(bounds, bounds[1:], strict=False)):
        yield e, slice(start, end)


def _select_rows(x_RD: Tensor, rows: Tensor | None, rows_of_expert: slice) -> Tensor:
    return x_RD[rows_of_expert] if rows is None else x_RD.index_select(0, rows[rows_of_expert])


def grouped_matmul_reference(x_RD: Tensor, w_EFD: Tensor, offsets: Tensor, rows: Tensor | None = None) -> Tensor:
    M, end = len(x_RD if rows is None else rows), 0
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
    """The number of tiles of the groups up to each; group E has the rows of none."""
    group = tl.arange(0, GROUPS)
    starts = tl.load(OFFSETS + group, mask=group <= E, other=M).to(tl.int32)
    ends = tl.load(OFFSETS + group + 1, mask=group < E, other=M).to(tl.int32)
    return tl.cumsum((ends - starts + ROWS - 1) // ROWS, 0) * across


@kernel
def locate_tile(
    OFFSETS, INDEX, tiles, tile, M, E, across, INDEXED: tl.constexpr, ROWS: tl.constexpr, GROUP_M: tl.constexpr
):
    """Of a tile its group, that group's end, its own rows, which of x these are, and its column of tiles."""
    e = tl.sum((tiles <= tile).to(tl.int32), 0)
    start = tl.load(OFFSETS + e).to(tl.int32)
    end = tl.load(OFFSETS + e + 1, mask=e < E, other=M).to(tl.int32)
    before = tl.max(tl.where(tiles <= tile, tiles, 0), 0)
    i, j = _swizzle(tile - before, (end - start + ROWS - 1) // ROWS, across, GROUP_M)  # type: ignore
    rows = start + i * ROWS + tl.arange(0, ROWS)
    return e, end, rows, _source_rows(INDEX, rows, end, INDEXED), j


@kernel
def _swizzle(tile, down, across, GROUP_M: tl.constexpr):
    """Row and column of a tile among down x across, in bands of rows."""
    first = tile // (GROUP_M * across) * GROUP_M
    within = tile % (GROUP_M * across)
    height = tl.minimum(down - first, GROUP_M)
    return first + within % height, within // height


@kernel
def _source_rows(INDEX, at, end, INDEXED: tl.constexpr):
    """The rows to read for these of M; row 0 for those from `end` on."""
    if INDEXED:
        return tl.load(INDEX + at, mask=at < end, other=0).to(tl.int64)
    return tl.where(at < end, at, 0).to(tl.int64)


@kernel
def dot_rows(
    x, w, column_mask, depth, wd,
    WHOLE: tl.constexpr, WIDE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """x w^T of rows that begin at x and at w, in fp32; of w those that are `there`."""
    inner = tl.arange(0, DEPTH)[None, :]
    x, w, y = x[:, None] + inner, w[:, None] + inner * wd, tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for k in range(0, depth, DEPTH):
        if WHOLE:
            y += dot(tl.load(x), tl.trans(tl.load(w)), WIDE)
        else:
            some = inner < depth - k
            w_tile = tl.load(w, mask=some & column_mask[:, None], other=0.0)
            y += dot(tl.load(x, mask=some, other=0.0), tl.trans(w_tile), WIDE)
        x += DEPTH
        w += DEPTH * wd
    return y


def matmul_shape(x: Tensor, w: Tensor, y: Tensor, *_: Any) -> tuple[float, ...]:
    return len(y), w.shape[1], x.shape[1], len(w)


@kernel(matmul_shape=matmul_shape, do_not_specialize=["M"])
def _forward(
    X, W, Y, OFFSETS, INDEX, M, E, F, D, xs, we, wf, wd,
    INDEXED: tl.constexpr, WIDE: tl.constexpr, GROUPS: tl.constexpr, WHOLE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """WHOLE: tiles divide the columns, and turns the depth."""
    across = tl.cdiv(F, COLUMNS)
    tiles = cumulative_tiles(OFFSETS, M, E, across, GROUPS, ROWS)
    for tile in range(tl.program_id(0), tl.max(tiles, 0), tl.num_programs(0)):  # type: ignore
        e, end, rows, read, j = locate_tile(OFFSETS, INDEX, tiles, tile, M, E, across, INDEXED, ROWS, GROUP_M)
        columns = j * COLUMNS + tl.arange(0, COLUMNS)
        w = W + e.to(tl.int64) * we + columns.to(tl.int64) * wf
        y = dot_rows(X + read * xs, w, columns < F, D * (e < E), wd, WHOLE, WIDE, ROWS, COLUMNS, DEPTH)
        inside = (rows < end)[:, None] & (columns < F)[None, :]
        tl.store(Y + rows.to(tl.int64)[:, None] * F + columns[None, :], y.to(Y.dtype.element_ty), mask=inside)


def _wgrad_matmul_shape(grad: Tensor, dy: Tensor, x: Tensor, offsets: Tensor, M: int, *_: Any) -> tuple[float, ...]:
    """All gradients below each other; a group has M / E rows."""
    E, F, D = grad.shape
    return E * F, D, M / E


@kernel(matmul_shape=_wgrad_matmul_shape, do_not_specialize=["M"])
def _weight_grad(
    GRAD, DY, X, OFFSETS, M, DY_INDEX, X_INDEX, F, D, ys, xs, ge, gf, gd,
    DY_INDEXED: tl.constexpr, X_INDEXED: tl.constexpr, BEGIN: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    down, across = tl.cdiv(F, ROWS), tl.cdiv(D, COLUMNS)
    e = tl.program_id(0) // (down * across)
    i, j = _swizzle(tl.program_id(0) % (down * across), down, across, GROUP_M)
    start, end = tl.load(OFFSETS + e).to(tl.int32), tl.load(OFFSETS + e + 1).to(tl.int32)
    if BEGIN | (start < end):
        rows, columns = i * ROWS + tl.arange(0, ROWS), j * COLUMNS + tl.arange(0, COLUMNS)
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for first in range(start, end, DEPTH):
            at = first + tl.arange(0, DEPTH)
            dy = DY + _source_rows(DY_INDEX, at, end, DY_INDEXED)[:, None] * ys + rows[None, :]
            x = X + _source_rows(X_INDEX, at, end, X_INDEXED)[:, None] * xs + columns[None, :]
            dy = tl.load(dy, mask=(at < end)[:, None] & (rows < F)[None, :], other=0.0)
            x = tl.load(x, mask=(at < end)[:, None] & (columns < D)[None, :], other=0.0)
            total += dot(tl.trans(dy), x, WIDE)
        to = GRAD + e.to(tl.int64) * ge + rows.to(tl.int64)[:, None] * gf + columns.to(tl.int64)[None, :] * gd
        inside = (rows < F)[:, None] & (columns < D)[None, :]
        if not BEGIN:
            total += tl.load(to, mask=inside, other=0.0)
        tl.store(to, total, mask=inside)


def uses_triton(x: Tensor, *others: Tensor) -> bool:
    return x.dtype != torch.float64 and all(use_triton(t) for t in (x, *others))


def launch_tiled(
    kernel: Any, tile: Sequence[int], x_RD: Tensor, w: Tensor, F: int, others: tuple[Tensor, ...], offsets: Tensor,
    rows: Tensor | None, constants: tuple[Any, ...],
) -> None:  # fmt: skip
    """A kernel whose programs share the tiles of F columns; the first of `others` has M rows. `constants`: its own."""
    (E, _, D), M, (block_m, block_n, block_k, warps, stages) = w.shape, len(others[0]), tile
    programs = min(num_sms(x_RD.device), (ceil_div(M, block_m) + E) * ceil_div(F, block_n))
    index = offsets if rows is None else rows.contiguous()
    kernel[(programs,)](
        *(x_RD, w, *others, offsets, index, M, E, F, D, x_RD.stride(0), *w.stride(), *constants),
        *(
            upcast_for_interpreter(x_RD),
            power_of_two(E + 1),
            not (F % block_n or D % block_k),
            block_m,
            block_n,
            block_k,
            GROUP_M,
        ),
        num_warps=warps,
        num_stages=stages,
    )


def grouped_matmul(x_RD: Tensor, w_EFD: Tensor, offsets: Tensor, rows: Tensor | None = None) -> Tensor:
    """y_MF of x and w in one dtype. `w_EFD`: any strides. offsets: int32 or int64 [E + 1], from 0; rows: int64 [M],
    the row of x for each of M; without it M = R. Not differentiable."""
    if not uses_triton(x_RD, w_EFD):
        return grouped_matmul_reference(x_RD, w_EFD, offsets, rows)
    x_RD, F = as_2d(x_RD), w_EFD.shape[1]
    y_MF = x_RD.new_empty(len(x_RD if rows is None else rows), F)
    launch_tiled(_forward, FORWARD[matmul_unit(x_RD)], x_RD, w_EFD, F, (y_MF,), offsets, rows, (rows is not None,))
    return y_MF


def grouped_weight_grad_(
    grad_EFD: Tensor, dy_MF: Tensor, x_RD: Tensor, offsets: Tensor, rows: Tensor | None = None, *,
    dy_rows: Tensor | None = None, overwrite: bool,
) -> None:  # fmt: skip
    """grad[e] += dy[group]^T x[group], or that alone to begin with, which zeroes those of empty groups. `grad_EFD`:
    fp32 (fp64 for fp64), any strides; rows, dy_rows: int64 [M], the rows of x and of dy for each of M."""
    if not uses_triton(x_RD, dy_MF):
        return grouped_weight_grad_reference_(
            grad_EFD, dy_MF, x_RD, offsets, rows, dy_rows=dy_rows, overwrite=overwrite
        )
    (E, F, D), M = grad_EFD.shape, len(x_RD if rows is None else rows)
    dy_MF, x_RD = as_2d(dy_MF), as_2d(x_RD)
    block_m, block_n, block_k, warps, stages = WEIGHT_GRAD[matmul_unit(x_RD)]
    _weight_grad[(E * ceil_div(F, block_m) * ceil_div(D, block_n),)](
        *(grad_EFD, dy_MF, x_RD, offsets, M, *(offsets if i is None else i.contiguous() for i in (dy_rows, rows))),
        *(F, D, dy_MF.stride(0), x_RD.stride(0), *grad_EFD.stride(), dy_rows is not None, rows is not None, overwrite),
        *(upcast_for_interpreter(x_RD), block_m, block_n, block_k, GROUP_M),
        num_warps=warps,
        num_stages=stages,
    )
