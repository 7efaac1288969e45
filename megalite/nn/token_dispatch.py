"""Sends tokens to the ranks that have their experts, and brings the sums of their outputs back.

    ids_NK, probs_NK, x_ND --pack--> [S, D | probs K | ids K] --all-to-all--> x_RD, probs_RK, ids_RK
    y_RD --all-to-all--> y_SD --sum of each token's rows--> y_ND

The peers are ep x etp ranks that have all experts together. A token goes once to each that has one of its experts,
however many of them it has; where an expert's width is split, to all that have a part of it, whose parts of the output
are summed as those of its other experts are. Rows, probabilities and ids travel together, as bits in the dtype of x.
ids_RK are those of the receiver's experts, from 0, and -1 for other ranks' experts.

Before rows travel, ranks tell each other how many there will be: the only numbers of a layer that the host reads. On
the meta device, where nothing can be read, a plan stands on `balanced_routing`.
Bytes to other ranks, of a layer and micro-batch: 4 S' D e with the S' rows that do not stay, forward and backward.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from megalite.kernels.permute import inverse_permutation, sort_by_expert, unpermute
from megalite.parallel.comm import Pending, start_all_gather, start_all_to_all
from megalite.parallel.mesh import Axis


class DispatchSplits(NamedTuple):
    """given, got: rows to and from each peer."""

    ep_etp: Axis
    input_splits: list[int]
    output_splits: list[int]

    def start_all_to_all(self, rows: Tensor, combine: bool) -> Pending:
        """Start to bring rows [S, ..] to the peers, or `back` [R, ..] from them; the result is flat."""
        input_splits, output_splits = (
            [n * rows.shape[1] for n in each] for each in (self.input_splits, self.output_splits)
        )
        return start_all_to_all(
            rows.reshape(-1),
            output_splits if combine else input_splits,
            input_splits if combine else output_splits,
            self.ep_etp,
        )


class DispatchedTokens(NamedTuple):
    """Rows under way. token_S: the token of each row that was sent; slots_NP: the row of each token and peer, -1 where
    there is none. The graph saves these two alone, as tensors, so that nothing else stays where they are recomputed."""

    splits: DispatchSplits
    pending: Pending
    num_assignments: int
    token_S: Tensor
    slots_NP: Tensor

    def receive(self, x_sBD: Tensor, probs_NK: Tensor) -> tuple[Tensor, Tensor, Tensor, int]:
        """x_RD, probs_RK, ids_RK of tokens with experts here, and how many choices. `x`, `probs`: what was sent."""
        return *_ReceiveTokens.apply(x_sBD, probs_NK, self), self.num_assignments  # type: ignore[misc, return-value]


def balanced_routing(tokens: int, experts: int, topk: int, ep: int) -> tuple[int, int]:
    """(rows, choices) that a rank's tokens mean for each peer, were all sets of `topk` experts as likely.

    >>> balanced_routing(4096, 8, 2, 8), balanced_routing(4096, 128, 8, 8), balanced_routing(4096, 4, 4, 2)
    ((1024, 1024), (2727, 4096), (4096, 8192))
    """
    none = math.comb(experts - experts // ep, topk) / math.comb(experts, topk)
    return round(tokens * (1 - none)), round(tokens * topk / ep)


def _pack(x_RD: Tensor, *more: Tensor) -> Tensor:
    """[R, W]: x and the bits of `more`, in the dtype of x."""
    return torch.cat([x_RD, *(each.view(x_RD.dtype) for each in more)], 1)


def _unpack(flat: Tensor, width: int, dtype: torch.dtype, K: int, parts: int) -> tuple[Tensor, ...]:
    """x [R, width] of rows that were packed, a view, and the `parts` [R, K] of `dtype` behind it."""
    rows = flat.view(-1, width + parts * K * dtype.itemsize // flat.dtype.itemsize)
    more = rows[:, width:].contiguous().view(dtype)
    return rows[:, :width], *(part.contiguous() for part in more.split(K, 1))


@torch.no_grad()
def start_dispatch(
    x_sBD: Tensor, probs_NK: Tensor, ids_NK: Tensor, num_local_experts: int, etp: int, ep_etp: Axis
) -> DispatchedTokens:
    """Start to send each token to its peers, of which every `etp` have the same `local` experts."""
    P, device = ep_etp.size, ids_NK.device
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
    input_splits, output_splits = table[ep_etp.rank][0], [rows[ep_etp.rank] for rows, _ in table]
    order_S = order_S[: sum(input_splits)]
    token_S = order_S // P
    ids_SK = ids_NK[token_S] - num_local_experts * ep_rank_P[order_S % P, None]
    ids_SK = torch.where((ids_SK >= 0) & (ids_SK < num_local_experts), ids_SK, -1).to(probs_NK.dtype)
    packed = _pack(x_sBD.flatten(0, 1)[token_S], probs_NK[token_S], ids_SK)
    slots_NP = inverse_permutation(order_S, offsets, len(ids_NK), P)
    num_assignments = sum(of_rank[ep_etp.rank] for _, of_rank in table)
    splits = DispatchSplits(ep_etp, input_splits, output_splits)
    return DispatchedTokens(splits, splits.start_all_to_all(packed, combine=False), num_assignments, token_S, slots_NP)


class _ReceiveTokens(Function):
    @staticmethod
    def forward(ctx: Any, x_sBD: Tensor, probs_NK: Tensor, sent: DispatchedTokens) -> tuple[Tensor, ...]:
        ctx.splits, ctx.shape = sent.splits, x_sBD.shape
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
    """The outputs of rows, summed over the peers of each token, in the order of the ranks: y_ND."""
    return _CombineTokens.apply(y_RD, sent)  # type: ignore[return-value]
