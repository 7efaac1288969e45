"""Causal attention with grouped key/value heads: softmax(scale * q k^T + causal) v.

Layout in and out is sequence first: q_SBHK, k_SBGK, v_SBGK -> o_SBHK, H a multiple of G. Without dropout torch's
fused attention runs (flash on CPU and CUDA): saved are q, k, v, o and one log-sum-exp per row, never the S x S
scores. With dropout the scores are explicit, because the mask must depend on coordinates (sample, head, query, key)
and not on a generator's state.

Where several documents share a sequence, each is attended to by itself: variable-length attention, whose work is the
sum of the squared lengths and which never makes a mask of S x S.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.kernels.dropout import keep_mask


@dataclass(frozen=True)
class Documents:
    """Where documents lie in the samples of a micro-batch.

    spans     (sample, first position, end), by sample and position; they tile every sample
    first_BS  for every position the first one of its document
    """

    spans: tuple[tuple[int, int, int], ...]
    first_BS: Tensor


def attention(
    q_SBHK: Tensor,
    k_SBGK: Tensor,
    v_SBGK: Tensor,
    *,
    scale: float,
    dropout_p: float = 0.0,
    dropout_key: int | None = None,
    sample_ids_B: Tensor | None = None,
    head_offset: int = 0,
    documents: Documents | None = None,
) -> Tensor:
    """`head_offset`: the global number of head 0, a coordinate of dropout like sample_ids_B and dropout_key.
    `documents` None: one per sample."""
    if documents is not None and dropout_p == 0.0:
        return _by_document(q_SBHK, k_SBGK, v_SBGK, documents, scale)
    q, k, v = (x.permute(1, 2, 0, 3) for x in (q_SBHK, k_SBGK, v_SBGK))
    if dropout_p == 0.0:
        grouped = q.shape[1] != k.shape[1]
        if grouped and q.is_cuda and q.dtype == torch.float32:  # no fused kernel there takes groups in fp32
            k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
            grouped = False
        o = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=grouped)
        return o.permute(2, 0, 1, 3)
    assert dropout_key is not None and sample_ids_B is not None
    repeat = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(repeat, 1), v.repeat_interleave(repeat, 1)
    length = torch.arange(q.shape[2], device=q.device)
    heads = torch.arange(head_offset, head_offset + q.shape[1], device=q.device)
    scores = (q @ k.transpose(-1, -2)).to(torch.promote_types(q.dtype, torch.float32)) * scale
    hidden = length[None, :] > length[:, None]
    if documents is not None:
        hidden = hidden | (length < documents.first_BS.unsqueeze(-1)).unsqueeze(1)
    scores = scores.masked_fill(hidden, float("-inf"))
    keep = keep_mask(
        dropout_key, dropout_p, sample_ids_B.view(-1, 1, 1, 1), heads.view(-1, 1, 1), length.view(-1, 1), length
    )
    weights = (scores.softmax(-1) * keep / (1 - dropout_p)).to(q.dtype)
    return (weights @ v).permute(2, 0, 1, 3)


def _by_document(q_SBHK: Tensor, k_SBGK: Tensor, v_SBGK: Tensor, documents: Documents, scale: float) -> Tensor:
    rows: list[list[Tensor]] = [[] for _ in range(q_SBHK.shape[1])]
    for row, start, end in documents.spans:
        part = (x[start:end, row : row + 1] for x in (q_SBHK, k_SBGK, v_SBGK))
        rows[row].append(attention(*part, scale=scale))
    return torch.cat([torch.cat(row) for row in rows], dim=1)
