"""Brings the rows of tokens to their experts, and back: a sort, and a sum per token.

    order_M, offsets = sort_by_expert(ids_NK, E)     m -> n K + k, by expert, then by token; offsets[e]: group e begins
    y_MD = ...                                       row m of expert e(m), which reads token order[m] // K
    out_ND[n] = sum over k of y[slots[n, k]]         in the order of k, in fp32 at least, whatever the timing

Nothing here waits for a card: M is N K, and the choices that are left out come last, from offsets[E] on; who knows that
number may cut the order there. Neither way needs rows that are copied: the matmuls of experts (grouped_matmul.py) read
a token's by index, in backward too. Bytes of the sum in bf16: 2 M D read, 2 N D written.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from megalite.kernels.dispatch import TileConfig, as_2d, ceil_div, fit_tile, kernel, use_triton

if TYPE_CHECKING:
    import triton.language as tl

BLOCK = TileConfig(1, 1024, 4)  # 8 elements per thread: of each choice one 16-byte load, all of them in flight


def sort_by_expert(ids_NK: Tensor, E: int) -> tuple[Tensor, Tensor]:
    """(order_M int64, offsets int32 [E + 1]) of experts 0 to E - 1. M = N K; choices with an id of -1 or E are left
    out: they come last, from offsets[E] on."""
    ids = ids_NK.to(torch.int16, copy=True).flatten()  # a card sorts 16 bits in a quarter of the turns of 64
    ids, order_M = ids.masked_fill_(ids < 0, E).sort(stable=True)
    first = torch.arange(E + 1, dtype=ids.dtype, device=ids.device)
    return order_M, torch.searchsorted(ids, first, out_int32=True)


def expert_of_rows(offsets: Tensor, M: int) -> Tensor:
    """The expert of each of the first M rows, all of which have one."""
    return torch.searchsorted(offsets[1:], torch.arange(M, dtype=offsets.dtype, device=offsets.device), right=True)


def inverse_permutation(order_M: Tensor, offsets: Tensor, N: int, K: int) -> Tensor:
    """slots_NK int64: where each choice is in M, -1 for those that are left out. `order_M` may end at offsets[E]."""
    place_M = torch.arange(len(order_M), device=order_M.device)
    place_M.masked_fill_(place_M >= offsets[-1], -1)
    return place_M.new_full((N * K,), -1).scatter_(0, order_M, place_M).view(N, K)


def unpermute_reference(y_MD: Tensor, slots_NK: Tensor) -> Tensor:
    if y_MD.is_meta or not len(y_MD):
        return y_MD.new_zeros(len(slots_NK), y_MD.shape[1])
    is_local_NK = (slots_NK >= 0).to(y_MD.dtype)
    return F.embedding_bag(slots_NK.clamp_min(0), y_MD.contiguous(), mode="sum", per_sample_weights=is_local_NK)


@kernel
def _combine(
    Y, SLOTS, OUT, tokens, columns, stride, CHOICES: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):  # fmt: skip
    wide = tl.float64 if Y.dtype.element_ty == tl.float64 else tl.float32
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    total = tl.zeros((ROWS, COLUMNS), dtype=wide)
    for k in tl.static_range(CHOICES):  # type: ignore
        slot = tl.load(SLOTS + token * CHOICES + k, mask=token < tokens, other=-1)
        total += tl.load(Y + slot * stride + at, mask=(slot >= 0) & (at < columns), other=0.0).to(wide)
    tl.store(OUT + token * columns + at, total.to(OUT.dtype.element_ty), mask=(token < tokens) & (at < columns))


def unpermute(y_MD: Tensor, slots_NK: Tensor) -> Tensor:
    """out_ND[n] = sum over k of y[slots[n, k]] in the dtype of y; a slot of -1 adds nothing. Not differentiable: its
    gradient of a row is that of the row's token, which the matmuls read by index."""
    if not use_triton(y_MD):  # nor if it has no rows
        return unpermute_reference(y_MD, slots_NK)
    (N, K), D, y_MD = slots_NK.shape, y_MD.shape[1], as_2d(y_MD)
    out_ND, block = torch.empty(N, D, dtype=y_MD.dtype, device=y_MD.device), fit_tile(BLOCK, D)
    _combine[(ceil_div(N, block.rows), ceil_div(D, block.columns))](
        *(y_MD, slots_NK.contiguous(), out_ND, N, D, y_MD.stride(0), K, block.rows, block.columns),
        num_warps=block.warps,
    )
    return out_ND
