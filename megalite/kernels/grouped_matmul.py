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

from megalite.config.tables import table_beside
from megalite.kernels.dispatch import as_rows, ceil_div, kernel, power_of_two, processors, unit_of, use_triton, widened
from megalite.kernels.flash_blocks import dot
from megalite.kernels.matmul import mm_
from megalite.kernels.weight_grad import accumulate_outer_

if TYPE_CHECKING:
    import triton.language as tl

FORWARD, WEIGHT_GRAD = table_beside(__file__, "tiles")["grouped_matmul"].values()  # by what multiplies
BAND = 8  # rows of tiles that are done column by column: what they share stays in the cache


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
            mm_(y_MF[of], _rows_of(x_RD, rows, of), w_EFD[e].T)
        end = of.stop
    if end < M:
        y_MF[end:] = 0
    return y_MF


def grouped_weight_grad_reference_(
    grad_EFD: Tensor, dy_MF: Tensor, x_RD: Tensor, offsets: Tensor, rows: Tensor | None = None, *,
    dy_rows: Tensor | None = None, begin: bool,
) -> None:  # fmt: skip
    M = len(x_RD if rows is None else rows)
    for e, of in _groups(offsets, M):
        if of.start < of.stop:
            accumulate_outer_(grad_EFD[e], _rows_of(dy_MF, dy_rows, of), _rows_of(x_RD, rows, of), begin=begin)
        elif begin:
            grad_EFD[e] = 0


@kernel
def tiles_of(OFFSETS, M, E, across, GROUPS: tl.constexpr, ROWS: tl.constexpr):
    """The number of tiles of the groups up to each; group E has the rows of none."""
    group = tl.arange(0, GROUPS)
    starts = tl.load(OFFSETS + group, mask=group <= E, other=M).to(tl.int32)
    ends = tl.load(OFFSETS + group + 1, mask=group < E, other=M).to(tl.int32)
    return tl.cumsum((ends - starts + ROWS - 1) // ROWS, 0) * across


@kernel
def tile_at(OFFSETS, INDEX, tiles, tile, M, E, across, INDEXED: tl.constexpr, ROWS: tl.constexpr, BAND: tl.constexpr):
    """Of a tile its group, that group's end, its own rows, which of x these are, and its column of tiles."""
    e = tl.sum((tiles <= tile).to(tl.int32), 0)
    start = tl.load(OFFSETS + e).to(tl.int32)
    end = tl.load(OFFSETS + e + 1, mask=e < E, other=M).to(tl.int32)
    before = tl.max(tl.where(tiles <= tile, tiles, 0), 0)
    i, j = _place(tile - before, (end - start + ROWS - 1) // ROWS, across, BAND)  # type: ignore
    rows = start + i * ROWS + tl.arange(0, ROWS)
    return e, end, rows, _read(INDEX, rows, end, INDEXED), j


@kernel
def _place(tile, down, across, BAND: tl.constexpr):
    """Row and column of a tile among down x across, in bands of rows."""
    first = tile // (BAND * across) * BAND
    within = tile % (BAND * across)
    height = tl.minimum(down - first, BAND)
    return first + within % height, within // height


@kernel
def _read(INDEX, at, end, INDEXED: tl.constexpr):
    """The rows to read for these of M; row 0 for those from `end` on."""
    if INDEXED:
        return tl.load(INDEX + at, mask=at < end, other=0).to(tl.int64)
    return tl.where(at < end, at, 0).to(tl.int64)


@kernel
def product(
    x, w, there, depth, wd,
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
            w_tile = tl.load(w, mask=some & there[:, None], other=0.0)
            y += dot(tl.load(x, mask=some, other=0.0), tl.trans(w_tile), WIDE)
        x += DEPTH
        w += DEPTH * wd
    return y


def product_of(x: Tensor, w: Tensor, y: Tensor, *_: Any) -> tuple[float, ...]:
    return len(y), w.shape[1], x.shape[1], len(w)


@kernel(product=product_of, do_not_specialize=["M"])
def _forward(
    X, W, Y, OFFSETS, INDEX, M, E, F, D, xs, we, wf, wd,
    INDEXED: tl.constexpr, WIDE: tl.constexpr, GROUPS: tl.constexpr, WHOLE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    """WHOLE: tiles divide the columns, and turns the depth."""
    across = tl.cdiv(F, COLUMNS)
    tiles = tiles_of(OFFSETS, M, E, across, GROUPS, ROWS)
    for tile in range(tl.program_id(0), tl.max(tiles, 0), tl.num_programs(0)):  # type: ignore
        e, end, rows, read, j = tile_at(OFFSETS, INDEX, tiles, tile, M, E, across, INDEXED, ROWS, BAND)
        columns = j * COLUMNS + tl.arange(0, COLUMNS)
        w = W + e.to(tl.int64) * we + columns.to(tl.int64) * wf
        y = product(X + read * xs, w, columns < F, D * (e < E), wd, WHOLE, WIDE, ROWS, COLUMNS, DEPTH)
        inside = (rows < end)[:, None] & (columns < F)[None, :]
        tl.store(Y + rows.to(tl.int64)[:, None] * F + columns[None, :], y.to(Y.dtype.element_ty), mask=inside)


def _gradients_product(grad: Tensor, dy: Tensor, x: Tensor, offsets: Tensor, M: int, *_: Any) -> tuple[float, ...]:
    """All gradients below each other; a group has M / E rows."""
    E, F, D = grad.shape
    return E * F, D, M / E


@kernel(product=_gradients_product, do_not_specialize=["M"])
def _weight_grad(
    GRAD, DY, X, OFFSETS, M, DY_INDEX, X_INDEX, F, D, ys, xs, ge, gf, gd,
    DY_INDEXED: tl.constexpr, X_INDEXED: tl.constexpr, BEGIN: tl.constexpr, WIDE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    down, across = tl.cdiv(F, ROWS), tl.cdiv(D, COLUMNS)
    e = tl.program_id(0) // (down * across)
    i, j = _place(tl.program_id(0) % (down * across), down, across, BAND)
    start, end = tl.load(OFFSETS + e).to(tl.int32), tl.load(OFFSETS + e + 1).to(tl.int32)
    if BEGIN | (start < end):
        rows, columns = i * ROWS + tl.arange(0, ROWS), j * COLUMNS + tl.arange(0, COLUMNS)
        total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
        for first in range(start, end, DEPTH):
            at = first + tl.arange(0, DEPTH)
            dy = DY + _read(DY_INDEX, at, end, DY_INDEXED)[:, None] * ys + rows[None, :]
            x = X + _read(X_INDEX, at, end, X_INDEXED)[:, None] * xs + columns[None, :]
            dy = tl.load(dy, mask=(at < end)[:, None] & (rows < F)[None, :], other=0.0)
            x = tl.load(x, mask=(at < end)[:, None] & (columns < D)[None, :], other=0.0)
            total += dot(tl.trans(dy), x, WIDE)
        to = GRAD + e.to(tl.int64) * ge + rows.to(tl.int64)[:, None] * gf + columns.to(tl.int64)[None, :] * gd
        inside = (rows < F)[:, None] & (columns < D)[None, :]
        if not BEGIN:
            total += tl.load(to, mask=inside, other=0.0)
        tl.store(to, total, mask=inside)


def by_triton(x: Tensor, *others: Tensor) -> bool:
    return x.dtype != torch.float64 and all(use_triton(t) for t in (x, *others))


def launch(
    which: Any, tile: Sequence[int], x_RD: Tensor, w: Tensor, F: int, others: tuple[Tensor, ...], offsets: Tensor,
    rows: Tensor | None, constants: tuple[Any, ...],
) -> None:  # fmt: skip
    """A kernel whose programs share the tiles of F columns; the first of `others` has M rows. `constants`: its own."""
    (E, _, D), M, (high, wide, deep, warps, stages) = w.shape, len(others[0]), tile
    programs = min(processors(x_RD.device), (ceil_div(M, high) + E) * ceil_div(F, wide))
    index = offsets if rows is None else rows.contiguous()
    which[(programs,)](
        *(x_RD, w, *others, offsets, index, M, E, F, D, x_RD.stride(0), *w.stride(), *constants),
        *(widened(x_RD), power_of_two(E + 1), not (F % wide or D % deep), high, wide, deep, BAND),
        num_warps=warps,
        num_stages=stages,
    )


def grouped_matmul(x_RD: Tensor, w_EFD: Tensor, offsets: Tensor, rows: Tensor | None = None) -> Tensor:
    """y_MF of x and w in one dtype. `w_EFD`: any strides. offsets: int32 or int64 [E + 1], from 0; rows: int64 [M],
    the row of x for each of M; without it M = R. Not differentiable."""
    if not by_triton(x_RD, w_EFD):
        return grouped_matmul_reference(x_RD, w_EFD, offsets, rows)
    x_RD, F = as_rows(x_RD), w_EFD.shape[1]
    y_MF = x_RD.new_empty(len(x_RD if rows is None else rows), F)
    launch(_forward, FORWARD[unit_of(x_RD)], x_RD, w_EFD, F, (y_MF,), offsets, rows, (rows is not None,))
    return y_MF


def grouped_weight_grad_(
    grad_EFD: Tensor, dy_MF: Tensor, x_RD: Tensor, offsets: Tensor, rows: Tensor | None = None, *,
    dy_rows: Tensor | None = None, begin: bool,
) -> None:  # fmt: skip
    """grad[e] += dy[group]^T x[group], or that alone to begin with, which zeroes those of empty groups. `grad_EFD`:
    fp32 (fp64 for fp64), any strides; rows, dy_rows: int64 [M], the rows of x and of dy for each of M."""
    if not by_triton(x_RD, dy_MF):
        return grouped_weight_grad_reference_(grad_EFD, dy_MF, x_RD, offsets, rows, dy_rows=dy_rows, begin=begin)
    (E, F, D), M = grad_EFD.shape, len(x_RD if rows is None else rows)
    dy_MF, x_RD = as_rows(dy_MF), as_rows(x_RD)
    high, wide, deep, warps, stages = WEIGHT_GRAD[unit_of(x_RD)]
    _weight_grad[(E * ceil_div(F, high) * ceil_div(D, wide),)](
        *(grad_EFD, dy_MF, x_RD, offsets, M, *(offsets if i is None else i.contiguous() for i in (dy_rows, rows))),
        *(F, D, dy_MF.stride(0), x_RD.stride(0), *grad_EFD.stride(), dy_rows is not None, rows is not None, begin),
        *(widened(x_RD), high, wide, deep, BAND),
        num_warps=warps,
        num_stages=stages,
    )
