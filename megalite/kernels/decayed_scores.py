"""Products of the tokens of a chunk with decays between them: the terms of linear recurrences (delta_rule.py).

    scores_ij = sum over channels of x_i k_j b_j D_ij for j <= i,    D_ij = exp(sum of g over j < l <= i)

The rows x_i are a query, and with a correction also a key. g is a number of a head (HeadDecays) or of each key channel
(ChannelDecays). D_ij is 0 between documents. Every sum of g is a sum over the tokens between j and i, never a
difference of two sums, in both directions: small decays are not lost beside large ones.

Letters: N chunks of C tokens, G key heads, each for R value heads, P rows of a token (2, or 1 without a correction), K
channels. The backwards are written out, because autograd's would save and copy every intermediate result.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class ChunkTokens(NamedTuple):
    """The tokens of N chunks.

    qk                  queries and keys, [N, B, G, 1, C, 2, K]
    log_decay           g, [N, B, G, R, C] or [N, B, G, R, C, K]
    beta                b, [N, B, G, R, C]; None: there is no correction
    is_same_document    whether tokens i and j are of one document, [N, B, 1, 1, C, C]; None: all are
    in_state_document   whether a token is of the document of the state before the chunk, [N, B, 1, 1, C]
    """

    qk: Tensor
    log_decay: Tensor
    beta: Tensor | None
    is_same_document: Tensor | None
    in_state_document: Tensor | None

    @property
    def rows(self) -> Tensor:
        """The rows of the scores, [N, B, G, 1, C, P, K]."""
        return self.qk[..., :1, :] if self.beta is None else self.qk

    @property
    def k(self) -> Tensor:
        """[N, B, G, 1, C, K]."""
        return self.qk[..., 1, :]


class TokenGrads(NamedTuple):
    """The gradients of the tensors of the same names in ChunkTokens."""

    qk: Tensor
    log_decay: Tensor
    beta: Tensor | None


def _sum_of_dim(x: Tensor, dim: int) -> Tensor:
    """Return the sum over a dim, which is kept; x itself if there is nothing to add."""
    return x if x.shape[dim] == 1 else x.sum(dim, keepdim=True)


def _join_grads(drows: Tensor, dk: Tensor) -> Tensor:
    """Return the gradient of queries and keys; `drows` may be overwritten."""
    if drows.shape[-2] == 1:
        return torch.stack([drows.squeeze(-2), dk], -2)
    drows[..., 1, :] += dk
    return drows


class HeadDecays:
    """The terms of chunks whose decays are numbers of heads.

    scores    [N, B, G, R, C, P, C]
    rows_in   the rows times the decays from the chunk's start, [N, B, G, R, C, P, K]
    k_out     the keys times b and the decays to the chunk's end, [N, B, G, R, C, K]
    decay     the decay of the state, [N, B, G, R, 1, 1]
    """

    def __init__(self, tokens: ChunkTokens):
        self.tokens = tokens
        g, beta, size = tokens.log_decay, tokens.beta, tokens.log_decay.shape[-1]
        self.lower = torch.ones(size, size, dtype=g.dtype, device=g.device).tril_()
        self.earlier = self.lower.tril(-1)
        # [i, l] @ [l, j]: g_l if l <= i, and 1 if j < l
        self.decays = ((g.unsqueeze(-2) * self.lower) @ self.earlier).exp_().tril_()
        self.decay_in = (g @ self.lower.mT).exp_()
        if tokens.is_same_document is not None and tokens.in_state_document is not None:
            self.decays.mul_(tokens.is_same_document)
            self.decay_in.mul_(tokens.in_state_document)
        self.weights = self.decays if beta is None else self.decays * beta.unsqueeze(-2)
        self.products = (tokens.rows.flatten(-3, -2) @ tokens.k.mT).unflatten(-2, (size, -1))
        self.scores = self.products * self.weights.unsqueeze(-2)
        self.rows_in = tokens.rows * self.decay_in[..., None, None]
        self.k_out = tokens.k * self.weights[..., -1, :].unsqueeze(-1)
        self.decay = self.decay_in[..., -1, None, None]

    def backward(self, dscores: Tensor, drows_in: Tensor, dk_out: Tensor, ddecay: Tensor) -> TokenGrads:
        """Return the gradients, given those of the terms, which are overwritten.

        `dscores` may have any numbers above the diagonal, and must have zeros on the diagonal of keys with keys.
        """
        rows, k, beta, size = self.tokens.rows, self.tokens.k, self.tokens.beta, self.lower.shape[0]
        # the gradient of b D times D, which is that of b before it is summed, and that of log D before it is times b
        dweights = dscores[..., 0, :] * self.products[..., 0, :]
        if beta is not None:
            dweights.addcmul_(dscores[..., 1, :], self.products[..., 1, :])
        dweights[..., -1, :] += (dk_out * k).sum(-1)
        dweights *= self.decays
        dbeta = None
        if beta is not None:
            dbeta = dweights.sum(-2)
            dweights *= beta.unsqueeze(-2)
        dlog_decay_in = ((drows_in * rows).sum(-1) * self.decay_in.unsqueeze(-1)).sum(-1)
        dlog_decay_in[..., -1] += (ddecay * self.decay)[..., 0, 0]
        # the sums of g end at token i, and start after token j or with the chunk
        dsums = (dweights @ self.earlier.mT).add_(dlog_decay_in.unsqueeze(-1))
        dg = dsums.tril_().sum(-2)
        dproducts = _sum_of_dim(dscores.mul_(self.weights.unsqueeze(-2)), 3).flatten(-3, -2)
        drows = (dproducts @ k).unflatten(-2, (size, -1))
        drows += _sum_of_dim(drows_in.mul_(self.decay_in[..., None, None]), 3)
        dk = dproducts.mT @ rows.flatten(-3, -2)
        dk += _sum_of_dim(dk_out.mul_(self.weights[..., -1, :].unsqueeze(-1)), 3)
        return TokenGrads(_join_grads(drows, dk), dg, dbeta)


def _halves(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the left and the right half of each block of 2 `size` tokens of x [N, B, G, R, C, ...]: views."""
    left, right = x.unflatten(4, (-1, 2, size)).unbind(5)
    return left, right


def _right_to_left(scores: Tensor, size: int) -> Tensor:
    """Return the scores of right with left halves of the blocks, [N, B, G, R, blocks, size, P, size]: a view."""
    blocks = scores.unflatten(6, (-1, 2, size))[..., 0, :].unflatten(4, (-1, 2, size))[:, :, :, :, :, 1]
    return blocks.diagonal(dim1=4, dim2=7).movedim(-1, 4)


class _Level(NamedTuple):
    """The factors of D between the left and the right halves of blocks, and the decayed rows and keys."""

    size: int
    to_right: Tensor
    from_left: Tensor
    rows: Tensor
    k: Tensor


class ChannelDecays:
    """The terms of chunks whose decays are numbers of key channels; C is a power of two.

    A chunk is halved until one token is left. If j is in the left half of a block and i in its right half, then D_ij is
    the decay from j to the end of the left half times that from there to i. Both are at most 1, so nothing overflows,
    and the scores of a level are a matmul. Attributes are those of HeadDecays, with `decay` [N, B, G, R, K, 1].
    """

    def __init__(self, tokens: ChunkTokens):
        self.tokens = tokens
        rows, size = tokens.rows, tokens.log_decay.shape[-2]
        beta = tokens.beta
        prefix = tokens.log_decay.exp()  # the decay from the start of a token's block, at first a token, to it
        suffix = torch.ones_like(prefix)  # the decay from a token to the end of its block
        self.k = (tokens.k if beta is None else tokens.k * beta.unsqueeze(-1)).expand_as(prefix)
        self.scores = torch.zeros(*prefix.shape[:5], rows.shape[-2], size, dtype=prefix.dtype, device=prefix.device)
        self.scores[..., 0, :].diagonal(dim1=-2, dim2=-1).copy_((rows[..., 0, :] * self.k).sum(-1))
        self.levels: list[_Level] = []
        half = 1
        while half < size:
            to_right, from_left = _halves(prefix, half)[1].clone(), _halves(suffix, half)[0].clone()
            decayed_rows = _halves(rows, half)[1] * to_right.unsqueeze(-2)
            decayed_k = _halves(self.k, half)[0] * from_left
            products = decayed_rows.flatten(-3, -2) @ decayed_k.mT
            _right_to_left(self.scores, half).copy_(products.unflatten(-2, (half, -1)))
            self.levels.append(_Level(half, to_right, from_left, decayed_rows, decayed_k))
            left, right = _halves(prefix, half)
            right.mul_(left[..., -1:, :])
            _halves(suffix, half)[0].mul_(to_right[..., -1:, :])
            half *= 2
        if tokens.is_same_document is not None and tokens.in_state_document is not None:
            self.scores.mul_(tokens.is_same_document.unsqueeze(-2))
            prefix.mul_(tokens.in_state_document.unsqueeze(-1))
            suffix.mul_(tokens.is_same_document[..., -1, :].unsqueeze(-1))
        self.decay_in, self.decay_out = prefix, suffix
        self.rows_in = rows * self.decay_in.unsqueeze(-2)
        self.k_out = self.k * self.decay_out
        self.decay = self.decay_in[..., -1, :].unsqueeze(-1)

    def backward(self, dscores: Tensor, drows_in: Tensor, dk_out: Tensor, ddecay: Tensor) -> TokenGrads:
        """Return the gradients, as HeadDecays.backward does."""
        beta = self.tokens.beta
        if self.tokens.is_same_document is not None:
            dscores.mul_(self.tokens.is_same_document.unsqueeze(-2))
        dlog_prefix = _sum_of_dim(drows_in * self.rows_in, -2).squeeze(-2)
        dlog_prefix[..., -1, :] += (ddecay * self.decay).squeeze(-1)
        dlog_suffix = dk_out * self.k_out
        drows, dk = drows_in.mul_(self.decay_in.unsqueeze(-2)), dk_out.mul_(self.decay_out)
        ddiagonal = dscores[..., 0, :].diagonal(dim1=-2, dim2=-1).unsqueeze(-1)
        drows[..., 0, :].addcmul_(ddiagonal, self.k)
        dk.addcmul_(ddiagonal, self.tokens.rows[..., 0, :])
        while self.levels:
            level = self.levels.pop()
            dprefix_left, dprefix_right = _halves(dlog_prefix, level.size)
            dsuffix_left, _ = _halves(dlog_suffix, level.size)
            # the decay of the whole other half was a factor
            dprefix_left[..., -1, :] += dprefix_right.sum(-2)
            dprefix_right[..., -1, :] += dsuffix_left.sum(-2)
            dproducts = _right_to_left(dscores, level.size).flatten(-3, -2)
            ddecayed_rows = (dproducts @ level.k).view_as(level.rows)
            ddecayed_k = dproducts.mT @ level.rows.flatten(-3, -2)
            for row in range(level.rows.shape[-2]):
                dprefix_right.addcmul_(ddecayed_rows[..., row, :], level.rows[..., row, :])
            dsuffix_left.addcmul_(ddecayed_k, level.k)
            _halves(drows, level.size)[1].addcmul_(ddecayed_rows, level.to_right.unsqueeze(-2))
            _halves(dk, level.size)[0].addcmul_(ddecayed_k, level.from_left)
        dbeta = None
        if beta is not None:
            dbeta = (dk * self.tokens.k).sum(-1)
            dk.mul_(beta.unsqueeze(-1))
        return TokenGrads(_join_grads(_sum_of_dim(drows, 3), _sum_of_dim(dk, 3)), dlog_prefix, dbeta)
