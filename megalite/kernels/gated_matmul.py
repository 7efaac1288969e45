"""Matmuls of experts (grouped_matmul.py) with the activation, and the probability of each choice, in their epilogue.

    up      u_M2F = x[rows] w[e]^T (+ bias),  a_MF = p act(u)
    down    da_MF = dy[rows] w[e],  du_M2F and dp_M from u and p da,  a_MF again for the gradient of the matmul after it

Where the activation is SwiGLU and the kernels are Triton's, each is one kernel: up does not read u again, and down
neither writes nor reads da. Bytes beside operands of the matmul, for M rows in bf16: up writes 6 M F; down reads 4 M F
and writes 6. Apart, with the products by p in fp32, it is 22 and 58 M F. Each tile of down leaves its part of dp, which
are summed in one order. All other activations, a CPU and fp64 take the matmul, then the activation, then the product.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megalite.common.tables import load_table
from megalite.kernels.activation import Activation
from megalite.kernels.activations.swiglu import swiglu_grad_tile, swiglu_tile
from megalite.kernels.dispatch import accum_dtype, as_2d, ceil_div, kernel, matmul_unit
from megalite.kernels.grouped_matmul import (
    cumulative_tiles,
    dot_rows,
    grouped_matmul,
    launch_tiled,
    locate_tile,
    matmul_shape,
    uses_triton,
)
from megalite.kernels.permute import expert_of_rows

if TYPE_CHECKING:
    import triton.language as tl

EPILOGUE_COLUMNS = 32  # columns of a tile whose gradients are computed at once
UP_TILES, DOWN_TILES = load_table(__file__, "tiles")[
    "gated_matmul"
].values()  # by what multiplies; columns are those of a


def up_unfused(
    x_RD: Tensor, w_EGD: Tensor, offsets: Tensor, rows_M: Tensor, p_M: Tensor, activation: Activation,
    bias_EG: Tensor | None = None, matmul: Callable[..., Tensor] = grouped_matmul,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`up_matmul` as the matmul, then the activation, then the product."""
    u_MG = matmul(x_RD, w_EGD, offsets, rows_M)
    if bias_EG is not None:
        u_MG += bias_EG[expert_of_rows(offsets, len(u_MG))]
    return u_MG, (activation.forward(u_MG) * p_M[:, None]).to(u_MG.dtype)


def down_unfused(
    dy_RD: Tensor, w_EDF: Tensor, offsets: Tensor, rows_M: Tensor, u_MG: Tensor, p_M: Tensor, activation: Activation,
    matmul: Callable[..., Tensor] = grouped_matmul,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """`down_gradients` likewise."""
    da_MF, p_M1 = matmul(dy_RD, w_EDF.transpose(1, 2), offsets, rows_M), p_M[:, None]
    a_MF, du_MG = activation.backward(u_MG, (da_MF * p_M1).to(u_MG.dtype))
    return (a_MF * p_M1).to(u_MG.dtype), du_MG, (da_MF.to(accum_dtype(u_MG)) * a_MF).sum(-1)


@kernel
def _halves(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """The first half of its columns, and the others; a thread keeps what it has."""
    return tl.split(tl.permute(tl.reshape(x, (ROWS, 2, COLUMNS // 2)), (0, 2, 1)))


@kernel(matmul_shape=matmul_shape, epilogue_tensors=lambda x, w, u, a, *_: (a,), do_not_specialize=["M"])
def _up(
    X, W, U, A, BIAS, P, OFFSETS, INDEX, M, E, F, D, xs, we, wf, wd,
    LIMIT: tl.constexpr, ALPHA: tl.constexpr, BIASED: tl.constexpr, WIDE: tl.constexpr, GROUPS: tl.constexpr,
    WHOLE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    across, half = tl.cdiv(F, COLUMNS), tl.arange(0, 2 * COLUMNS)
    tiles = cumulative_tiles(OFFSETS, M, E, across, GROUPS, ROWS)
    for tile in range(tl.program_id(0), tl.max(tiles, 0), tl.num_programs(0)):  # type: ignore
        e, end, rows, read, j = locate_tile(OFFSETS, INDEX, tiles, tile, M, E, across, True, ROWS, BAND)
        columns = j * COLUMNS + tl.arange(0, COLUMNS)
        column_mask = j * COLUMNS + half % COLUMNS < F
        both = j * COLUMNS + half % COLUMNS + half // COLUMNS * F  # of gate, and of up
        w = W + e.to(tl.int64) * we + both.to(tl.int64) * wf
        u = dot_rows(X + read * xs, w, column_mask, D * (e < E), wd, WHOLE, WIDE, ROWS, 2 * COLUMNS, DEPTH)
        if BIASED:
            u += tl.load(BIAS + e * 2 * F + both, mask=column_mask & (both < 2 * F * (e < E)), other=0.0)[None, :]
        gate, up = _halves(u.to(A.dtype.element_ty), ROWS, 2 * COLUMNS)
        inside, to = (rows < end)[:, None] & (columns < F)[None, :], rows.to(tl.int64)[:, None]
        at = to * 2 * F + columns[None, :]
        tl.store(U + at, gate, mask=inside)
        tl.store(U + at + F, up, mask=inside)
        a = swiglu_tile(gate.to(tl.float32), up.to(tl.float32), LIMIT, ALPHA)  # of what backward will read
        a *= tl.load(P + rows, mask=rows < end, other=0.0)[:, None]
        tl.store(A + to * F + columns[None, :], a.to(A.dtype.element_ty), mask=inside)


@kernel
def _swiglu_epilogue(
    da, U, A, DU, p, rows, end, first, F,
    LIMIT: tl.constexpr, ALPHA: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, EPILOGUE_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Turn these columns of da into a and du, and return their part of dp. A part of them at a time, or the registers
    would not hold all that belongs to them."""
    if COLUMNS > EPILOGUE_COLUMNS:
        left, right = _halves(da, ROWS, COLUMNS)
        dp = _swiglu_epilogue(
            left, U, A, DU, p, rows, end, first, F, LIMIT, ALPHA, ROWS, COLUMNS // 2, EPILOGUE_COLUMNS
        )
        first += COLUMNS // 2
        return dp + _swiglu_epilogue(
            right, U, A, DU, p, rows, end, first, F, LIMIT, ALPHA, ROWS, COLUMNS // 2, EPILOGUE_COLUMNS
        )
    columns = first + tl.arange(0, COLUMNS)
    inside, to = (rows < end)[:, None] & (columns < F)[None, :], rows.to(tl.int64)[:, None]
    at = to * 2 * F + columns[None, :]
    gate, up = (tl.load(U + at, mask=inside, other=0.0), tl.load(U + at + F, mask=inside, other=0.0))
    a, dgate, dup = swiglu_grad_tile(gate.to(tl.float32), up.to(tl.float32), p[:, None] * da, LIMIT, ALPHA)
    tl.store(A + to * F + columns[None, :], (p[:, None] * a).to(A.dtype.element_ty), mask=inside)
    tl.store(DU + at, dgate.to(A.dtype.element_ty), mask=inside)
    tl.store(DU + at + F, dup.to(A.dtype.element_ty), mask=inside)
    return tl.sum(da * a, 1)


@kernel(matmul_shape=matmul_shape, epilogue_tensors=lambda dy, w, u, a, du, *_: (u, a, du), do_not_specialize=["M"])
def _down(
    DY, W, U, A, DU, DP, P, OFFSETS, INDEX, M, E, F, D, ys, we, wf, wd,
    LIMIT: tl.constexpr, ALPHA: tl.constexpr, EPILOGUE_COLUMNS: tl.constexpr, WIDE: tl.constexpr, GROUPS: tl.constexpr,
    WHOLE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, DEPTH: tl.constexpr, BAND: tl.constexpr,
):  # fmt: skip
    across = tl.cdiv(F, COLUMNS)
    tiles = cumulative_tiles(OFFSETS, M, E, across, GROUPS, ROWS)
    for tile in range(tl.program_id(0), tl.max(tiles, 0), tl.num_programs(0)):  # type: ignore
        e, end, rows, read, j = locate_tile(OFFSETS, INDEX, tiles, tile, M, E, across, True, ROWS, BAND)
        columns = j * COLUMNS + tl.arange(0, COLUMNS)
        w = W + e.to(tl.int64) * we + columns.to(tl.int64) * wf
        da = dot_rows(DY + read * ys, w, columns < F, D * (e < E), wd, WHOLE, WIDE, ROWS, COLUMNS, DEPTH)
        p = tl.load(P + rows, mask=rows < end, other=0.0)
        dp = _swiglu_epilogue(da, U, A, DU, p, rows, end, j * COLUMNS, F, LIMIT, ALPHA, ROWS, COLUMNS, EPILOGUE_COLUMNS)
        tl.store(DP + rows.to(tl.int64) * across + j, dp, mask=rows < end)


def up_matmul(
    x_RD: Tensor, w_EGD: Tensor, offsets: Tensor, rows_M: Tensor, p_M: Tensor, activation: Activation,
    bias_EG: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """u_MG, before the activation (G is 2 F where it is gated), and a_MF = p act(u). Not differentiable."""
    rows_args = offsets, rows_M
    if activation.swiglu_constants is None or not uses_triton(x_RD, w_EGD):
        return up_unfused(x_RD, w_EGD, *rows_args, p_M, activation, bias_EG)
    (_, G, _), x_RD = w_EGD.shape, as_2d(x_RD)
    u_MG, a_MF = (x_RD.new_empty(len(rows_M), width) for width in (G, G // 2))
    p_M = p_M.to(accum_dtype(x_RD)).contiguous()  # a router may compute in fp64
    outputs = u_MG, a_MF, p_M if bias_EG is None else bias_EG.contiguous(), p_M
    constants = *activation.swiglu_constants, bias_EG is not None
    launch_tiled(_up, UP_TILES[matmul_unit(x_RD)], x_RD, w_EGD, G // 2, outputs, *rows_args, constants)
    return u_MG, a_MF


def down_gradients(
    dy_RD: Tensor, w_EDF: Tensor, offsets: Tensor, rows_M: Tensor, u_MG: Tensor, p_M: Tensor, activation: Activation
) -> tuple[Tensor, Tensor, Tensor]:
    """a_MF = p act(u) again, du_MG and dp_M of y_MD = a w^T, whose gradient is dy[rows]. dp in fp32 (fp64 for fp64)."""
    rows_args = offsets, rows_M
    if activation.swiglu_constants is None or not uses_triton(dy_RD, w_EDF, u_MG):
        return down_unfused(dy_RD, w_EDF, *rows_args, u_MG, p_M, activation)
    w_EFD, dy_RD, u_MG, tile = w_EDF.transpose(1, 2), as_2d(dy_RD), u_MG.contiguous(), DOWN_TILES[matmul_unit(dy_RD)]
    M, F, p_M = len(rows_M), w_EFD.shape[1], p_M.to(accum_dtype(dy_RD)).contiguous()
    a_MF, du_MG, parts_MT = dy_RD.new_empty(M, F), torch.empty_like(u_MG), p_M.new_empty(M, ceil_div(F, tile[1]))
    outputs = u_MG, a_MF, du_MG, parts_MT, p_M
    launch_tiled(_down, tile, dy_RD, w_EFD, F, outputs, *rows_args, (*activation.swiglu_constants, EPILOGUE_COLUMNS))
    return a_MF, du_MG, parts_MT.sum(-1)
