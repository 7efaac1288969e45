"""Dispatch of tokens to the ranks that have their experts, and the combine of their outputs.

    ids_NK, probs_NK, x_ND --pack--> [S, D | probs K | ids K] --all-to-all--> x_RD, probs_RK, ids_RK
    y_RD --all-to-all--> y_SD --sum of each token's rows--> y_ND

The peers are the ep x etp ranks that have all experts together. A token is sent once to each peer that has at least one
of its experts. If the width of experts is split, it is sent to all peers that have a part, whose partial outputs are
summed like the outputs of different experts. Rows, probabilities and ids are sent together, as bits in the dtype of x.
ids_RK number the receiver's experts from 0; -1 is an expert of another rank.

Before rows are sent, ranks exchange the numbers of rows: the only values of a layer that the host reads. On the meta
device, where nothing can be read, `balanced_routing` is assumed.
Bytes to other ranks per layer and micro-batch: 4 S' D e for the S' rows that leave the rank, forward and backward.
"""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from megalite.kernels.permute import inverse_permutation, sort_by_expert, unpermute
from megalite.parallel.comm import Pending, start_all_gather, start_all_to_all
from megalite.parallel.mesh import Axis


@dataclass(frozen=True)
class DispatchSplits:
    """The numbers of rows sent to and received from each peer."""

    ep_etp: Axis
    input_splits: list[int]
    output_splits: list[int]

    def start_all_to_all(self, rows: Tensor, combine: bool) -> Pending:
        """Start sending rows [S, ...] to the peers, or, with `combine`, rows [R, ...] back. The result is flat."""
        width = rows.shape[1]
        sent = [n * width for n in self.input_splits]
        received = [n * width for n in self.output_splits]
        if combine:
            sent, received = received, sent
        return start_all_to_all(rows.reshape(-1), sent, received, self.ep_etp)


@dataclass(frozen=True)
class DispatchedTokens:
    """Rows that are being sent.

    token_S   the token of each row that was sent
    slots_NP  the row of each token for each peer; -1: none

    Autograd saves only these two tensors, so that recomputation can free everything else.
    """

    splits: DispatchSplits
    pending: Pending
    num_assignments: int
    token_S: Tensor
    slots_NP: Tensor

    def receive(self, x_sBD: Tensor, probs_NK: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
        """Return x_RD, probs_RK, ids_RK of the tokens with experts on this rank, and the number of assignments.

        `x_sBD` and `probs_NK` are the tensors that were sent.
        """
        x_RD, probs_RK, ids_RK = _ReceiveTokens.apply(x_sBD, probs_NK, self)  # type: ignore[misc]
        return x_RD, probs_RK, ids_RK, self.num_assignments


def balanced_routing(tokens: int, experts: int, topk: int, ep: int) -> tuple[int, int]:
    """Return (rows, assignments) that a rank's tokens give each peer if all sets of `topk` experts are equally likely.

    >>> balanced_routing(4096, 8, 2, 8), balanced_routing(4096, 128, 8, 8), balanced_routing(4096, 4, 4, 2)
    ((1024, 1024), (2734, 4096), (4096, 8192))
    """
    no_expert = math.comb(experts - experts // ep, topk) / math.comb(experts, topk)
    return round(tokens * (1 - no_expert)), round(tokens * topk / ep)


def _pack(x_RD: Tensor, *more: Tensor) -> Tensor:
    """Return x and the bits of `more` in the dtype of x, [R, W]."""
    return torch.cat([x_RD, *(x.view(x_RD.dtype) for x in more)], 1)


def _unpack(flat: Tensor, width: int, dtype: torch.dtype, K: int, parts: int) -> tuple[Tensor, ...]:
    """Return a view of x [R, width] of packed rows, and the `parts` tensors [R, K] of `dtype` after it."""
    rows = flat.view(-1, width + parts * K * dtype.itemsize // flat.dtype.itemsize)
    more = rows[:, width:].contiguous().view(dtype)
    return rows[:, :width], *(part.contiguous() for part in more.split(K, 1))


@torch.no_grad()
def start_dispatch(
    x_sBD: Tensor, probs_NK: Tensor, ids_NK: Tensor, num_local_experts: int, etp: int, ep_etp: Axis
) -> DispatchedTokens:
    """Start sending each token to its peers; `etp` consecutive peers share `num_local_experts` experts."""
    P = ep_etp.size
    device = ids_NK.device
    ep_rank_P = torch.arange(P, device=device) // etp
    is_local_NKP = (ids_NK // num_local_experts)[..., None] == ep_rank_P
    peer_NP = torch.where(is_local_NKP.any(1), torch.arange(P, device=device), -1)
    order_S, offsets = sort_by_expert(peer_NP, P)
    send_counts = torch.stack([offsets.diff().long(), is_local_NKP.sum((0, 1))])
    gathered = start_all_gather(send_counts[None], ep_etp).wait()
    if gathered.is_meta:
        ep = P // etp
        table = [[[n] * P for n in balanced_routing(len(ids_NK), num_local_experts * ep, ids_NK.shape[1], ep)]] * P
    else:
        table = gathered.tolist()
    input_splits = table[ep_etp.rank][0]
    output_splits = [rows[ep_etp.rank] for rows, _ in table]
    order_S = order_S[: sum(input_splits)]
    token_S = order_S // P
    ids_SK = ids_NK[token_S] - num_local_experts * ep_rank_P[order_S % P, None]
    ids_SK = torch.where((ids_SK >= 0) & (ids_SK < num_local_experts), ids_SK, -1).to(probs_NK.dtype)
    packed = _pack(x_sBD.flatten(0, 1)[token_S], probs_NK[token_S], ids_SK)
    slots_NP = inverse_permutation(order_S, offsets, len(ids_NK), P)
    num_assignments = sum(assignments[ep_etp.rank] for _, assignments in table)
    splits = DispatchSplits(ep_etp, input_splits, output_splits)
    return DispatchedTokens(splits, splits.start_all_to_all(packed, combine=False), num_assignments, token_S, slots_NP)


class _ReceiveTokens(Function):
    @staticmethod
    def forward(ctx: Any, x_sBD: Tensor, probs_NK: Tensor, sent: DispatchedTokens) -> tuple[Tensor, ...]:
        ctx.splits = sent.splits
        ctx.shape = x_sBD.shape
        ctx.save_for_backward(sent.slots_NP)
        x_RD, probs_RK, ids = _unpack(sent.pending.wait(), x_sBD.shape[-1], probs_NK.dtype, probs_NK.shape[1], 2)
        ids_RK = ids.long()
        ctx.mark_non_differentiable(ids_RK)
        return x_RD, probs_RK, ids_RK

    @staticmethod
    def backward(ctx: Any, dx_RD: Tensor, dprobs_RK: Tensor, _: Any) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        (slots_NP,) = ctx.saved_tensors
        flat = ctx.splits.start_all_to_all(_pack(dx_RD, dprobs_RK), combine=True).wait()
        dx_SD, dprobs_SK = _unpack(flat, dx_RD.shape[1], dprobs_RK.dtype, dprobs_RK.shape[1], 1)
        return unpermute(dx_SD, slots_NP).view(ctx.shape), unpermute(dprobs_SK, slots_NP), None


class _CombineTokens(Function):
    @staticmethod
    def forward(ctx: Any, y_RD: Tensor, sent: DispatchedTokens) -> Tensor:
        ctx.splits = sent.splits
        ctx.save_for_backward(sent.token_S)
        return unpermute(sent.splits.start_all_to_all(y_RD, combine=True).wait().view(-1, y_RD.shape[1]), sent.slots_NP)

    @staticmethod
    def backward(ctx: Any, dy_ND: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        (token_S,) = ctx.saved_tensors
        return ctx.splits.start_all_to_all(dy_ND[token_S], combine=False).wait().view(-1, dy_ND.shape[1]), None


def combine_tokens(y_RD: Tensor, sent: DispatchedTokens) -> Tensor:
    """Return y_ND, the outputs of rows summed over the peers of each token, in the order of the ranks."""
    return _CombineTokens.apply(y_RD, sent)  # type: ignore[return-value]
