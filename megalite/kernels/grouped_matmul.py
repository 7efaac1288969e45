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
GROUP_SIZE_M = 8  # rows of tiles that are processed column by column, so that the operands they share stay in the cache


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
def cumulative_tiles(offsets_ptr, M, E, num_pid_n, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr):
    """Return the cumulative number of tiles of the groups; group E has the rows that are in no group."""
    group = tl.arange(0, BLOCK_E)
    starts = tl.load(offsets_ptr + group, mask=group <= E, other=M).to(tl.int32)
    ends = tl.load(offsets_ptr + group + 1, mask=group < E, other=M).to(tl.int32)
    return tl.cumsum((ends - starts + BLOCK_M - 1) // BLOCK_M, 0) * num_pid_n


@kernel
def locate_tile(
    offsets_ptr, index_ptr, tiles, tile_id, M, E, num_pid_n,
    HAS_INDEX: tl.constexpr, BLOCK_M: tl.constexpr, GROUP_SIZE_M: tl.constexpr,
):  # fmt: skip
    """Return the group of a tile, the end of the group, the tile's rows of M and of x, and its column of tiles."""
    e = tl.sum((tiles <= tile_id).to(tl.int32), 0)
    group_start = tl.load(offsets_ptr + e).to(tl.int32)
    group_end = tl.load(offsets_ptr + e + 1, mask=e < E, other=M).to(tl.int32)
    tiles_before = tl.max(tl.where(tiles <= tile_id, tiles, 0), 0)
    num_pid_m = (group_end - group_start + BLOCK_M - 1) // BLOCK_M
    pid_m, pid_n = _swizzle(tile_id - tiles_before, num_pid_m, num_pid_n, GROUP_SIZE_M)  # type: ignore
    offs_m = group_start + pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    return e, group_end, offs_m, _source_rows(index_ptr, offs_m, group_end, HAS_INDEX), pid_n


@kernel
def _swizzle(tile_id, num_pid_m, num_pid_n, GROUP_SIZE_M: tl.constexpr):
    """Return the row and column of a tile in a grid of num_pid_m x num_pid_n, ordered in bands of GROUP_SIZE_M rows."""
    first_pid_m = tile_id // (GROUP_SIZE_M * num_pid_n) * GROUP_SIZE_M
    pid_in_group = tile_id % (GROUP_SIZE_M * num_pid_n)
    group_size_m = tl.minimum(num_pid_m - first_pid_m, GROUP_SIZE_M)
    return first_pid_m + pid_in_group % group_size_m, pid_in_group // group_size_m


@kernel
def _source_rows(index_ptr, offs_m, group_end, HAS_INDEX: tl.constexpr):
    """Return the rows to read for these rows of M; row 0 for rows from `group_end` on."""
    if HAS_INDEX:
        return tl.load(index_ptr + offs_m, mask=offs_m < group_end, other=0).to(tl.int64)
    return tl.where(offs_m < group_end, offs_m, 0).to(tl.int64)


@kernel
def dot_rows(
    x_ptrs, w_ptrs, n_mask, K, stride_wk,
    EVEN_NK: tl.constexpr, UPCAST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return x w^T in fp32, for rows that start at x_ptrs and w_ptrs; `n_mask` masks the rows of w."""
    offs_k = tl.arange(0, BLOCK_K)[None, :]
    x_ptrs = x_ptrs[:, None] + offs_k
    w_ptrs = w_ptrs[:, None] + offs_k * stride_wk
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for k in range(0, K, BLOCK_K):
        if EVEN_NK:
            acc += dot(tl.load(x_ptrs), tl.trans(tl.load(w_ptrs)), UPCAST)
        else:
            k_mask = offs_k < K - k
            w_tile = tl.load(w_ptrs, mask=k_mask & n_mask[:, None], other=0.0)
            acc += dot(tl.load(x_ptrs, mask=k_mask, other=0.0), tl.trans(w_tile), UPCAST)
        x_ptrs += BLOCK_K
        w_ptrs += BLOCK_K * stride_wk
    return acc


def matmul_shape(x: Tensor, w: Tensor, y: Tensor, *_: Any) -> tuple[float, ...]:
    """Return (rows, columns, depth, groups) of a launch (dispatch.py: Kernel)."""
    return len(y), w.shape[1], x.shape[1], len(w)


@kernel(matmul_shape=matmul_shape, do_not_specialize=["M"])
def _forward(
    x_ptr, w_ptr, y_ptr, offsets_ptr, index_ptr, M, E, N, K, stride_xm, stride_we, stride_wn, stride_wk,
    HAS_INDEX: tl.constexpr, UPCAST: tl.constexpr, BLOCK_E: tl.constexpr, EVEN_NK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_SIZE_M: tl.constexpr,
):  # fmt: skip
    """Compute all tiles of y [M, N], N = F; K is D. EVEN_NK: BLOCK_N divides N, and BLOCK_K divides K."""
    num_pid_n = tl.cdiv(N, BLOCK_N)
    tiles = cumulative_tiles(offsets_ptr, M, E, num_pid_n, BLOCK_E, BLOCK_M)
    for tile_id in range(tl.program_id(0), tl.max(tiles, 0), tl.num_programs(0)):  # type: ignore
        e, group_end, offs_m, x_rows, pid_n = locate_tile(
            offsets_ptr, index_ptr, tiles, tile_id, M, E, num_pid_n, HAS_INDEX, BLOCK_M, GROUP_SIZE_M
        )
        offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
        w_ptrs = w_ptr + e.to(tl.int64) * stride_we + offs_n.to(tl.int64) * stride_wn
        x_ptrs = x_ptr + x_rows * stride_xm
        y = dot_rows(x_ptrs, w_ptrs, offs_n < N, K * (e < E), stride_wk, EVEN_NK, UPCAST, BLOCK_M, BLOCK_N, BLOCK_K)
        mask = (offs_m < group_end)[:, None] & (offs_n < N)[None, :]
        tl.store(y_ptr + offs_m.to(tl.int64)[:, None] * N + offs_n[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


def _wgrad_matmul_shape(grad: Tensor, dy: Tensor, x: Tensor, offsets: Tensor, M: int, *_: Any) -> tuple[float, ...]:
    """Return the shape of a launch: all gradients below each other; a group has M / E rows on average."""
    E, F, D = grad.shape
    return E * F, D, M / E


@kernel(matmul_shape=_wgrad_matmul_shape, do_not_specialize=["K"])
def _weight_grad(
    grad_ptr, dy_ptr, x_ptr, offsets_ptr, K, dy_index_ptr, x_index_ptr, M, N,
    stride_dyk, stride_xk, stride_ge, stride_gm, stride_gn,
    HAS_DY_INDEX: tl.constexpr, HAS_X_INDEX: tl.constexpr, OVERWRITE: tl.constexpr, UPCAST: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_SIZE_M: tl.constexpr,
):  # fmt: skip
    """Compute one tile of a group's gradient [M, N] = [F, D]; K is the number of rows of all groups."""
    num_pid_m = tl.cdiv(M, BLOCK_M)
    num_pid_n = tl.cdiv(N, BLOCK_N)
    e = tl.program_id(0) // (num_pid_m * num_pid_n)
    pid_m, pid_n = _swizzle(tl.program_id(0) % (num_pid_m * num_pid_n), num_pid_m, num_pid_n, GROUP_SIZE_M)
    group_start = tl.load(offsets_ptr + e).to(tl.int32)
    group_end = tl.load(offsets_ptr + e + 1).to(tl.int32)
    if OVERWRITE | (group_start < group_end):
        offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
        offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for start_k in range(group_start, group_end, BLOCK_K):
            offs_k = start_k + tl.arange(0, BLOCK_K)
            dy_rows = _source_rows(dy_index_ptr, offs_k, group_end, HAS_DY_INDEX)
            dy_ptrs = dy_ptr + dy_rows[:, None] * stride_dyk + offs_m[None, :]
            x_rows = _source_rows(x_index_ptr, offs_k, group_end, HAS_X_INDEX)
            x_ptrs = x_ptr + x_rows[:, None] * stride_xk + offs_n[None, :]
            dy = tl.load(dy_ptrs, mask=(offs_k < group_end)[:, None] & (offs_m < M)[None, :], other=0.0)
            x = tl.load(x_ptrs, mask=(offs_k < group_end)[:, None] & (offs_n < N)[None, :], other=0.0)
            acc += dot(tl.trans(dy), x, UPCAST)
        grad_rows = grad_ptr + e.to(tl.int64) * stride_ge + offs_m.to(tl.int64)[:, None] * stride_gm
        grad_ptrs = grad_rows + offs_n.to(tl.int64)[None, :] * stride_gn
        mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
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
        tile: (block_m, block_n, block_k, num_warps, num_stages).
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
    block_m, block_n, block_k, num_warps, num_stages = tile
    programs = min(num_sms(x_RD.device), (ceil_div(M, block_m) + E) * ceil_div(F, block_n))
    index = offsets if rows is None else rows.contiguous()
    is_even_nk = not (F % block_n or D % block_k)
    sizes = (M, E, F, D, x_RD.stride(0), *w.stride())
    constexprs = (*constants, upcast_for_interpreter(x_RD), power_of_two(E + 1), is_even_nk)
    constexprs += (block_m, block_n, block_k, GROUP_SIZE_M)
    kernel[(programs,)](
        x_RD, w, *others, offsets, index, *sizes, *constexprs, num_warps=num_warps, num_stages=num_stages
    )


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
    block_m, block_n, block_k, num_warps, num_stages = WEIGHT_GRAD[matmul_unit(x_RD)]
    dy_index = offsets if dy_rows is None else dy_rows.contiguous()
    x_index = offsets if rows is None else rows.contiguous()
    sizes = (F, D, dy_MF.stride(0), x_RD.stride(0), *grad_EFD.stride())
    constexprs = (dy_rows is not None, rows is not None, overwrite, upcast_for_interpreter(x_RD))
    constexprs += (block_m, block_n, block_k, GROUP_SIZE_M)
    _weight_grad[(E * ceil_div(F, block_m) * ceil_div(D, block_n),)](
        grad_EFD,
        dy_MF,
        x_RD,
        offsets,
        M,
        dy_index,
        x_index,
        *sizes,
        *constexprs,
        num_warps=num_warps,
        num_stages=num_stages,
    )
