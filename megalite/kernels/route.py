"""Brings the rows of tokens to their experts, and back: a sort, and a sum per token.

    order_M, offsets = sort_by_expert(ids_NK, E)     m -> n K + k, by expert, then by token; offsets[e]: group e begins
    y_MD = ...                                       rows m of the experts, which read token order[m] // K
    out_ND[n] = sum over k of y[slots[n, k]]         in the order of k, in fp32 at least, whatever the timing

Nothing here waits for a card: M is N K, and choices that are left out come last, after offsets[E].
"""

from __future__ import annotations

import torch
from torch import Tensor

from megalite.kernels.dispatch import stat_dtype


def sort_by_expert(ids_NK: Tensor, E: int) -> tuple[Tensor, Tensor]:
    """(order_M int64, offsets int32 [E + 1]) of experts 0 to E - 1. M = N K; choices with an id of -1 or E are left
    out: they come last, from offsets[E] on."""
    ids = torch.where(ids_NK < 0, E, ids_NK).flatten()
    ids, order_M = ids.sort(stable=True)
    first = torch.arange(E + 1, dtype=ids.dtype, device=ids.device)
    return order_M, torch.searchsorted(ids, first, out_int32=True)


def slots_of(order_M: Tensor, offsets: Tensor, N: int, K: int) -> Tensor:
    """slots_NK int64: where each choice is in M, -1 for those that are left out. `order_M` may end at offsets[E]."""
    place_M = torch.arange(len(order_M), device=order_M.device)
    place_M = torch.where(place_M < offsets[-1], place_M, -1)
    return place_M.new_full((N * K,), -1).scatter_(0, order_M, place_M).view(N, K)


def combine_reference(y_MD: Tensor, slots_NK: Tensor, weight_NK: Tensor | None = None) -> Tensor:
    sums_ND = y_MD.new_zeros(len(slots_NK), y_MD.shape[1], dtype=stat_dtype(y_MD))
    for k in range(slots_NK.shape[1] if len(y_MD) else 0):
        slots_N1 = slots_NK[:, k : k + 1]
        rows_ND = y_MD.index_select(0, slots_N1[:, 0].clamp_min(0)).masked_fill_(slots_N1 < 0, 0)
        if weight_NK is None:
            sums_ND.add_(rows_ND)
        else:
            sums_ND.addcmul_(rows_ND.to(sums_ND.dtype), weight_NK[:, k : k + 1].to(sums_ND.dtype))
    return sums_ND.to(y_MD.dtype)


def combine(y_MD: Tensor, slots_NK: Tensor, weight_NK: Tensor | None = None) -> Tensor:
    """out_ND[n] = sum over k of (weight[n, k]) y[slots[n, k]] in the dtype of y; a slot of -1 adds nothing. Sums in
    fp32 (fp64 for fp64) in the order of k. Not differentiable: its gradient is the row of each token, which
    grouped_matmul and grouped_weight_grad_ read by index."""
    return combine_reference(y_MD, slots_NK, weight_NK)
