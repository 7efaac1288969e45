"""Attention of a few new positions to a cache of keys and values: o = softmax(scale q k^T + seen) v.

Layout: q_SBHK new queries, k_TBGK and v_TBGK the whole cache, positions_SB the place of each query in it; a query sees
the places up to its own (of them the last `window`), and other places may hold any finite values. The queries that
share a key/value head are the rows of one product, so that no head is repeated. Bytes read: the cache once, which
bounds the speed.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.kernels.dispatch import upcasts


def cached_attention(
    q_SBHK: Tensor,
    k_TBGK: Tensor,
    v_TBGK: Tensor,
    positions_SB: Tensor,
    *,
    scale: float,
    window: int | None = None,
    sink_H: Tensor | None = None,
) -> Tensor:
    """o_SBHK; H is a multiple of G. `window`: how many keys a query sees, its own included. sink_H: attention.py."""
    (S, B, H, K), dtype = q_SBHK.shape, q_SBHK.dtype
    G = k_TBGK.shape[2]
    if upcasts(q_SBHK):
        q_SBHK, k_TBGK, v_TBGK = q_SBHK.float(), k_TBGK.float(), v_TBGK.float()
    k, v = (x.permute(1, 2, 0, 3) for x in (k_TBGK, v_TBGK))
    q = q_SBHK.unflatten(2, (G, H // G)).permute(1, 2, 3, 0, 4).reshape(B, G, H // G * S, K)  # rows are (head, query)
    positions_T, positions_BS1 = torch.arange(k.shape[2], device=q_SBHK.device), positions_SB.T.unsqueeze(-1)
    seen_BST = positions_T <= positions_BS1
    if window is not None:
        seen_BST &= positions_T > positions_BS1 - window
    visible = seen_BST.repeat(1, H // G, 1).unsqueeze(1)
    if sink_H is None:
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=visible, scale=scale)
    else:
        wide = torch.promote_types(q.dtype, torch.float32)
        sink = sink_H.to(wide).view(G, -1, 1).expand(B, -1, -1, S).reshape(B, G, -1, 1)
        scores = ((q @ k.mT).to(wide) * scale).masked_fill(~visible, float("-inf"))
        o = torch.cat([scores, sink], -1).softmax(-1)[..., :-1].to(v.dtype) @ v
    return o.unflatten(2, (H // G, S)).permute(3, 0, 1, 2, 4).flatten(2, 3).to(dtype)
