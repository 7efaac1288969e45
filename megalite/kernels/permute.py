"""The permutation of tokens for the experts and back: a sort by expert, and a sum per token.

    order_M, offsets = sort_by_expert(ids_NK, E)     m -> n K + k, by expert, then by token; offsets[e]: first m of e
    y_MD = ...                                       row m of expert e(m), which reads token order[m] // K
    out_ND[n] = sum over k of y[slots[n, k]]         in the order of k, in fp32 or higher precision

Nothing here synchronizes with the GPU: M is N K, and dropped assignments come last, from offsets[E] on. A caller that
has this number on the host may truncate the order there. No rows are copied in either direction: the matmuls of experts
(grouped_matmul.py) read a token's row by index, also in backward. Bytes of the sum in bf16: 2 M D read, 2 N D written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from megalite.kernels.dispatch import TileConfig, as_2d, ceil_div, fit_tile, kernel, use_triton

if TYPE_CHECKING:
    import triton.language as tl

TILE = TileConfig(1, 1024, 4)  # 8 elements per thread: one 16-byte load per assignment, all in flight


def sort_by_expert(ids_NK: Tensor, E: int) -> tuple[Tensor, Tensor]:
    """Return (order_M int64, offsets int32 [E + 1]) for experts 0 to E - 1, with M = N K.

    Assignments with an id of -1 or E are dropped: they come last, from offsets[E] on.
    """
    ids = ids_NK.to(torch.int16, copy=True).flatten()  # a GPU sorts 16 bits in a quarter of the passes for 64
    ids, order_M = ids.masked_fill_(ids < 0, E).sort(stable=True)
    first = torch.arange(E + 1, dtype=ids.dtype, device=ids.device)
    return order_M, torch.searchsorted(ids, first, out_int32=True)


def expert_of_rows(offsets: Tensor, M: int) -> Tensor:
    """Return the expert of each of the first M rows; dropped assignments must not be among them."""
    return torch.searchsorted(offsets[1:], torch.arange(M, dtype=offsets.dtype, device=offsets.device), right=True)


def inverse_permutation(order_M: Tensor, offsets: Tensor, N: int, K: int) -> Tensor:
    """Return slots_NK int64: the row in M of each assignment, or -1 if it is dropped.

    `order_M` may end at offsets[E].
    """
    slot_M = torch.arange(len(order_M), device=order_M.device)
    slot_M.masked_fill_(slot_M >= offsets[-1], -1)
    return slot_M.new_full((N * K,), -1).scatter_(0, order_M, slot_M).view(N, K)


def unpermute_reference(y_MD: Tensor, slots_NK: Tensor) -> Tensor:
    """Compute `unpermute` in torch."""
    if y_MD.is_meta or not len(y_MD):
        return y_MD.new_zeros(len(slots_NK), y_MD.shape[1])
    is_local_NK = (slots_NK >= 0).to(y_MD.dtype)
    return F.embedding_bag(slots_NK.clamp_min(0), y_MD.contiguous(), mode="sum", per_sample_weights=is_local_NK)


@kernel
def _combine(
    y_ptr, slots_ptr, out_ptr, M, N, stride_ym, TOP_K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    compute_dtype = tl.float64 if y_ptr.dtype.element_ty == tl.float64 else tl.float32
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=compute_dtype)
    for k in tl.static_range(TOP_K):  # type: ignore
        slot = tl.load(slots_ptr + offs_m * TOP_K + k, mask=offs_m < M, other=-1)
        acc += tl.load(y_ptr + slot * stride_ym + offs_n, mask=(slot >= 0) & (offs_n < N), other=0.0).to(compute_dtype)
    tl.store(out_ptr + offs_m * N + offs_n, acc.to(out_ptr.dtype.element_ty), mask=(offs_m < M) & (offs_n < N))


def unpermute(y_MD: Tensor, slots_NK: Tensor) -> Tensor:
    """Return out_ND[n] = sum over k of y[slots[n, k]] in the dtype of y; a slot of -1 adds nothing.

    Not differentiable: the gradient of a row is the gradient of its token, which the matmuls read by index.
    """
    if not use_triton(y_MD):  # also if y has no rows
        return unpermute_reference(y_MD, slots_NK)
    N, K = slots_NK.shape
    D = y_MD.shape[1]
    y_MD = as_2d(y_MD)
    out_ND = torch.empty(N, D, dtype=y_MD.dtype, device=y_MD.device)
    tile = fit_tile(TILE, D)
    grid = (ceil_div(N, tile.block_m), ceil_div(D, tile.block_n))
    sizes = (N, D, y_MD.stride(0))
    constexprs = (K, tile.block_m, tile.block_n)
    _combine[grid](y_MD, slots_NK.contiguous(), out_ND, *sizes, *constexprs, num_warps=tile.num_warps)
    return out_ND
