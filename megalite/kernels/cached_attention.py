"""Attention of a few new positions to a cache of keys and values: o = softmax(scale q k^T + mask) v.

The inputs are the new queries q_SBHK, the full cache k_TBGK and v_TBGK, and positions_SB, the position of each query in
the cache. A query sees the positions up to its own (with a window, only the last `window` of them); the other positions
of the cache may have any finite values. The queries that share a key/value head are the rows of one matrix product, so
that no head is repeated. The cache is read once, which bounds the speed.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.kernels.blocked_attention import fp16_to_fp32
from megalite.kernels.dispatch import upcasts
from megalite.kernels.softcap import soft_cap


def cached_attention(
    q_SBHK: Tensor,
    k_TBGK: Tensor,
    v_TBGK: Tensor,
    positions_SB: Tensor,
    *,
    scale: float,
    window: int | None = None,
    sink_H: Tensor | None = None,
    softcap: float | None = None,
) -> Tensor:
    """Return o_SBHK, attention of the queries to the cache; H is a multiple of G.

    Args:
        q_SBHK: the queries.
        k_TBGK: the keys of the cache.
        v_TBGK: the values of the cache.
        positions_SB: the position of each query in the cache.
        scale: the factor of q k^T.
        window: the number of keys that a query sees, including the one at its own position; None: all up to it.
        sink_H: a logit without a value per head (attention.py); None: no sink.
        softcap: the bound of the scores (softcap.py); None: no bound.
    """
    S, B, H, K = q_SBHK.shape
    dtype = q_SBHK.dtype
    G = k_TBGK.shape[2]
    if upcasts(q_SBHK):
        q_SBHK, k_TBGK, v_TBGK = q_SBHK.float(), k_TBGK.float(), v_TBGK.float()
    k, v = (x.permute(1, 2, 0, 3) for x in (k_TBGK, v_TBGK))
    q = q_SBHK.unflatten(2, (G, H // G)).permute(1, 2, 3, 0, 4).reshape(B, G, H // G * S, K)  # rows are (head, query)
    positions_T = torch.arange(k.shape[2], device=q_SBHK.device)
    positions_BS1 = positions_SB.T.unsqueeze(-1)
    visible_BST = positions_T <= positions_BS1
    if window is not None:
        visible_BST &= positions_T > positions_BS1 - window
    visible = visible_BST.repeat(1, H // G, 1).unsqueeze(1)
    if sink_H is None and softcap is None:
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale)
    else:
        q, k = fp16_to_fp32(q, k)
        score_dtype = torch.promote_types(q.dtype, torch.float32)
        scores = soft_cap((q @ k.mT).to(score_dtype) * scale, softcap).masked_fill(~visible, float("-inf"))
        if sink_H is not None:
            sink = sink_H.to(score_dtype).view(G, -1, 1).expand(B, -1, -1, S).reshape(B, G, -1, 1)
            scores = torch.cat([scores, sink], -1)
        o = scores.softmax(-1)[..., : k.shape[2]].to(v.dtype) @ v
    return o.unflatten(2, (H // G, S)).permute(3, 0, 1, 2, 4).flatten(2, 3).to(dtype)
