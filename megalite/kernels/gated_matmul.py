"""Matmuls of experts (grouped_matmul.py) with the activation and the probability of each assignment in the epilogue.

    up      u_M2F = x[rows] w[e]^T (+ bias),  a_MF = p act(u)
    down    da_MF = dy[rows] w[e],  du_M2F and dp_M from u and p da,  a_MF recomputed for the next matmul's gradient

With Triton and SwiGLU, each is one kernel: up does not read u after writing it, and down neither writes nor reads da.
Bytes in addition to the operands of the matmul, for M rows in bf16: up writes 6 M F; down reads 4 M F and writes 6 M F.
Unfused, with the products by p in fp32, they move 22 M F and 58 M F. Each tile of down writes its part of dp, and the
parts are summed in a fixed order. Other activations, the CPU and fp64 use separate operations: the matmul, the
activation, and the product with p.
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

EPILOGUE_BLOCK_N = 32  # columns of a tile whose gradients are computed at once
# by `matmul_unit`; BLOCK_N counts columns of a
UP_TILES, DOWN_TILES = load_table(__file__, "tiles")["gated_matmul"].values()


def up_unfused(
    x_RD: Tensor, w_EGD: Tensor, offsets: Tensor, rows_M: Tensor, p_M: Tensor, activation: Activation,
    bias_EG: Tensor | None = None, matmul: Callable[..., Tensor] = grouped_matmul,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Compute `up_matmul` with separate operations: the matmul, the activation, and the product with p."""
    u_MG = matmul(x_RD, w_EGD, offsets, rows_M)
    if bias_EG is not None:
        u_MG += bias_EG[expert_of_rows(offsets, len(u_MG))]
    return u_MG, (activation.forward(u_MG) * p_M[:, None]).to(u_MG.dtype)


def down_unfused(
    dy_RD: Tensor, w_EDF: Tensor, offsets: Tensor, rows_M: Tensor, u_MG: Tensor, p_M: Tensor, activation: Activation,
    matmul: Callable[..., Tensor] = grouped_matmul,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Compute `down_gradients` with separate operations."""
    da_MF = matmul(dy_RD, w_EDF.transpose(1, 2), offsets, rows_M)
    p_M1 = p_M[:, None]
    a_MF, du_MG = activation.backward(u_MG, (da_MF * p_M1).to(u_MG.dtype))
    return (a_MF * p_M1).to(u_MG.dtype), du_MG, (da_MF.to(accum_dtype(u_MG)) * a_MF).sum(-1)


@kernel
def _halves(x, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Return the first and the second half of the columns; no elements move between threads."""
    return tl.split(tl.permute(tl.reshape(x, (BLOCK_M, 2, BLOCK_N // 2)), (0, 2, 1)))


@kernel(matmul_shape=matmul_shape, epilogue_tensors=lambda x, w, u, a, *_: (a,), do_not_specialize=["M"])
def _up(
    x_ptr, w_ptr, u_ptr, a_ptr, bias_ptr, p_ptr, offsets_ptr, index_ptr,
    M, E, N, K, stride_xm, stride_we, stride_wn, stride_wk,
    LIMIT: tl.constexpr, ALPHA: tl.constexpr, HAS_BIAS: tl.constexpr, UPCAST: tl.constexpr, BLOCK_E: tl.constexpr,
    EVEN_NK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_SIZE_M: tl.constexpr,
):  # fmt: skip
    """Compute all tiles of a [M, N], N = F, and the tiles of gate and up that they need; K is D."""
    num_pid_n = tl.cdiv(N, BLOCK_N)
    offs_2n = tl.arange(0, 2 * BLOCK_N)
    tiles = cumulative_tiles(offsets_ptr, M, E, num_pid_n, BLOCK_E, BLOCK_M)
    for tile_id in range(tl.program_id(0), tl.max(tiles, 0), tl.num_programs(0)):  # type: ignore
        e, group_end, offs_m, x_rows, pid_n = locate_tile(
            offsets_ptr, index_ptr, tiles, tile_id, M, E, num_pid_n, True, BLOCK_M, GROUP_SIZE_M
        )
        offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
        n_mask = pid_n * BLOCK_N + offs_2n % BLOCK_N < N
        offs_gu = pid_n * BLOCK_N + offs_2n % BLOCK_N + offs_2n // BLOCK_N * N  # columns of gate, then of up
        w_ptrs = w_ptr + e.to(tl.int64) * stride_we + offs_gu.to(tl.int64) * stride_wn
        x_ptrs = x_ptr + x_rows * stride_xm
        u = dot_rows(x_ptrs, w_ptrs, n_mask, K * (e < E), stride_wk, EVEN_NK, UPCAST, BLOCK_M, 2 * BLOCK_N, BLOCK_K)
        if HAS_BIAS:
            u += tl.load(bias_ptr + e * 2 * N + offs_gu, mask=n_mask & (offs_gu < 2 * N * (e < E)), other=0.0)[None, :]
        gate, up = _halves(u.to(a_ptr.dtype.element_ty), BLOCK_M, 2 * BLOCK_N)
        mask = (offs_m < group_end)[:, None] & (offs_n < N)[None, :]
        row_offs = offs_m.to(tl.int64)[:, None]
        u_offs = row_offs * 2 * N + offs_n[None, :]
        tl.store(u_ptr + u_offs, gate, mask=mask)
        tl.store(u_ptr + u_offs + N, up, mask=mask)
        a = swiglu_tile(gate.to(tl.float32), up.to(tl.float32), LIMIT, ALPHA)  # of the rounded u, which backward reads
        a *= tl.load(p_ptr + offs_m, mask=offs_m < group_end, other=0.0)[:, None]
        tl.store(a_ptr + row_offs * N + offs_n[None, :], a.to(a_ptr.dtype.element_ty), mask=mask)


@kernel
def _swiglu_epilogue(
    da, u_ptr, a_ptr, du_ptr, p, offs_m, group_end, start_n, N,
    LIMIT: tl.constexpr, ALPHA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    EPILOGUE_BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute a and du from these columns of da, and return their part of dp.

    The columns are split recursively into parts of EPILOGUE_BLOCK_N, to limit the registers in use.
    """
    if BLOCK_N > EPILOGUE_BLOCK_N:
        left, right = _halves(da, BLOCK_M, BLOCK_N)
        dp = _swiglu_epilogue(
            left, u_ptr, a_ptr, du_ptr, p, offs_m, group_end, start_n, N,
            LIMIT, ALPHA, BLOCK_M, BLOCK_N // 2, EPILOGUE_BLOCK_N,
        )  # fmt: skip
        start_n += BLOCK_N // 2
        return dp + _swiglu_epilogue(
            right, u_ptr, a_ptr, du_ptr, p, offs_m, group_end, start_n, N,
            LIMIT, ALPHA, BLOCK_M, BLOCK_N // 2, EPILOGUE_BLOCK_N,
        )  # fmt: skip
    offs_n = start_n + tl.arange(0, BLOCK_N)
    mask = (offs_m < group_end)[:, None] & (offs_n < N)[None, :]
    row_offs = offs_m.to(tl.int64)[:, None]
    u_offs = row_offs * 2 * N + offs_n[None, :]
    gate = tl.load(u_ptr + u_offs, mask=mask, other=0.0)
    up = tl.load(u_ptr + u_offs + N, mask=mask, other=0.0)
    a, dgate, dup = swiglu_grad_tile(gate.to(tl.float32), up.to(tl.float32), p[:, None] * da, LIMIT, ALPHA)
    tl.store(a_ptr + row_offs * N + offs_n[None, :], (p[:, None] * a).to(a_ptr.dtype.element_ty), mask=mask)
    tl.store(du_ptr + u_offs, dgate.to(a_ptr.dtype.element_ty), mask=mask)
    tl.store(du_ptr + u_offs + N, dup.to(a_ptr.dtype.element_ty), mask=mask)
    return tl.sum(da * a, 1)


@kernel(matmul_shape=matmul_shape, epilogue_tensors=lambda dy, w, u, a, du, *_: (u, a, du), do_not_specialize=["M"])
def _down(
    dy_ptr, w_ptr, u_ptr, a_ptr, du_ptr, dp_ptr, p_ptr, offsets_ptr, index_ptr,
    M, E, N, K, stride_dym, stride_we, stride_wn, stride_wk,
    LIMIT: tl.constexpr, ALPHA: tl.constexpr, EPILOGUE_BLOCK_N: tl.constexpr, UPCAST: tl.constexpr,
    BLOCK_E: tl.constexpr, EVEN_NK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP_SIZE_M: tl.constexpr,
):  # fmt: skip
    """Compute all tiles of da [M, N], N = F, and from them a, du and dp; K is D."""
    num_pid_n = tl.cdiv(N, BLOCK_N)
    tiles = cumulative_tiles(offsets_ptr, M, E, num_pid_n, BLOCK_E, BLOCK_M)
    for tile_id in range(tl.program_id(0), tl.max(tiles, 0), tl.num_programs(0)):  # type: ignore
        e, group_end, offs_m, x_rows, pid_n = locate_tile(
            offsets_ptr, index_ptr, tiles, tile_id, M, E, num_pid_n, True, BLOCK_M, GROUP_SIZE_M
        )
        offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
        w_ptrs = w_ptr + e.to(tl.int64) * stride_we + offs_n.to(tl.int64) * stride_wn
        dy_ptrs = dy_ptr + x_rows * stride_dym
        da = dot_rows(dy_ptrs, w_ptrs, offs_n < N, K * (e < E), stride_wk, EVEN_NK, UPCAST, BLOCK_M, BLOCK_N, BLOCK_K)
        p = tl.load(p_ptr + offs_m, mask=offs_m < group_end, other=0.0)
        dp = _swiglu_epilogue(
            da, u_ptr, a_ptr, du_ptr, p, offs_m, group_end, pid_n * BLOCK_N, N,
            LIMIT, ALPHA, BLOCK_M, BLOCK_N, EPILOGUE_BLOCK_N,
        )  # fmt: skip
        tl.store(dp_ptr + offs_m.to(tl.int64) * num_pid_n + pid_n, dp, mask=offs_m < group_end)


def up_matmul(
    x_RD: Tensor, w_EGD: Tensor, offsets: Tensor, rows_M: Tensor, p_M: Tensor, activation: Activation,
    bias_EG: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Return u_MG, the input of the activation, and a_MF = p act(u). Not differentiable.

    Args:
        x_RD: the tokens.
        w_EGD: the weights; G is 2 F for gated activations, otherwise F.
        offsets: int32 or int64 [E + 1], the first row of each expert.
        rows_M: int64, the row of x for each row of M.
        p_M: the probability of each row.
        activation: the activation.
        bias_EG: the bias of each expert, or None.
    """
    if activation.swiglu_constants is None or not uses_triton(x_RD, w_EGD):
        return up_unfused(x_RD, w_EGD, offsets, rows_M, p_M, activation, bias_EG)
    x_RD = as_2d(x_RD)
    G = w_EGD.shape[1]
    u_MG = x_RD.new_empty(len(rows_M), G)
    a_MF = x_RD.new_empty(len(rows_M), G // 2)
    p_M = p_M.to(accum_dtype(x_RD)).contiguous()  # a router may compute in fp64
    bias = p_M if bias_EG is None else bias_EG.contiguous()
    tensors = (u_MG, a_MF, bias, p_M)
    constants = (*activation.swiglu_constants, bias_EG is not None)
    launch_tiled(_up, UP_TILES[matmul_unit(x_RD)], x_RD, w_EGD, G // 2, tensors, offsets, rows_M, constants)
    return u_MG, a_MF


def down_gradients(
    dy_RD: Tensor, w_EDF: Tensor, offsets: Tensor, rows_M: Tensor, u_MG: Tensor, p_M: Tensor, activation: Activation
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a_MF = p act(u), recomputed, and the gradients du_MG and dp_M of y_MD = a w^T.

    The gradient of y is dy[rows]. dp is in fp32 (fp64 for fp64). For the arguments see `up_matmul`.
    """
    if activation.swiglu_constants is None or not uses_triton(dy_RD, w_EDF, u_MG):
        return down_unfused(dy_RD, w_EDF, offsets, rows_M, u_MG, p_M, activation)
    dy_RD = as_2d(dy_RD)
    w_EFD = w_EDF.transpose(1, 2)
    u_MG = u_MG.contiguous()
    p_M = p_M.to(accum_dtype(dy_RD)).contiguous()
    tile = DOWN_TILES[matmul_unit(dy_RD)]
    M = len(rows_M)
    F = w_EFD.shape[1]
    a_MF = dy_RD.new_empty(M, F)
    du_MG = torch.empty_like(u_MG)
    dp_MT = p_M.new_empty(M, ceil_div(F, tile[1]))  # the part of each tile
    tensors = (u_MG, a_MF, du_MG, dp_MT, p_M)
    constants = (*activation.swiglu_constants, EPILOGUE_BLOCK_N)
    launch_tiled(_down, tile, dy_RD, w_EFD, F, tensors, offsets, rows_M, constants)
    return a_MF, du_MG, dp_MT.sum(-1)
