"""Causal attention by blocks of queries whose scores stay in the cache: on a CPU in half precision, and in a window.

    per block of queries i:   s = scale q_i k^T (keys up to the block's end);  p = softmax(s);  o_i = p v
    backward                  the same s and p again;  dv += p^T do_i;  ds = p (do_i v^T - sum(p do_i v^T));
                              dq_i = scale ds k;  dk += scale ds^T q_i

Plain matrix products and softmaxes, which torch hands to a CPU's bf16 units; its own fused attention there does not use
them and takes up to twice the time (docs/performance.md). Saved are q, k and v alone. Softmax, and the sums over
blocks, are in fp32 (fp64 for fp64). Scores are rounded to the input's dtype, as explicit attention in half precision
does and fused attention does not: the rms error of o is 1.7 times that of torch's SDPA where scores have a standard
deviation of 1, and 5 times at 4. Rejected: a second product, for scores relative to their row's maximum, 1.3 times at
any size for 1.4 times the time; MEGALITE_ATTENTION=torch is more exact and takes no more than that.

The work per query block grows with its end, so half of the scores' square is never computed but for the blocks on the
diagonal. With a window a block's keys begin where its first query's do: S (W + rows) scores, where torch's fused
attention would take a mask of S x S and compute them all.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from megalite.kernels.dispatch import stat_dtype

QUERIES = 256  # of a block: fewer waste less on the diagonal, more make larger matrix products
IN_WINDOW = (64, 128)  # the same in a window, whose border is on both sides: as many as its keys within these bounds
BLOCK_BYTES = 4 << 20  # of one block's scores


def supports(q: Tensor) -> bool:
    """Where it is the fastest without a window."""
    return q.device.type == "cpu" and q.dtype in (torch.bfloat16, torch.float16)


def _by_group(x_SBHK: Tensor, groups: int) -> Tensor:
    """[B * G, H / G, S, K]"""
    s, b, h, k = x_SBHK.shape
    return x_SBHK.reshape(s, b, groups, h // groups, k).permute(1, 2, 3, 0, 4).reshape(b * groups, h // groups, s, k)


def _by_position(x_NPSK: Tensor, batch: int) -> Tensor:
    """The inverse: [S, B, H, K], a view."""
    n, p, s, k = x_NPSK.shape
    return x_NPSK.view(batch, n // batch * p, s, k).permute(2, 0, 1, 3)


class _Blocks:
    """The blocks of one call, and their probabilities."""

    def __init__(self, q_NPSK: Tensor, k_NSK: Tensor, scale: float, window: int | None):
        self.q, self.k, self.scale = q_NPSK, k_NSK, scale
        n, per_group, self.length, _ = q_NPSK.shape
        self.window = min(window or self.length, self.length)
        fewest, most = IN_WINDOW if self.window < self.length else (QUERIES, QUERIES)
        self.rows = min(self.length, most, max(fewest, self.window))
        columns = min(self.length, self.rows + self.window)
        self.groups = min(n, max(1, BLOCK_BYTES // (per_group * self.rows * columns * q_NPSK.element_size())))
        hidden = q_NPSK.new_full((self.rows, self.rows), float("-inf"))
        self.later, self.earlier = hidden.triu(1), hidden.tril(-1)
        self.nothing = q_NPSK.new_zeros(())

    def __iter__(self) -> Iterator[tuple[slice, slice, slice]]:
        """Which groups, which queries, and the keys that some of these see."""
        for first in range(0, self.q.shape[0], self.groups):
            for start in range(0, self.length, self.rows):
                stop = min(start + self.rows, self.length)
                yield (
                    slice(first, first + self.groups),
                    slice(start, stop),
                    slice(max(0, start - self.window + 1), stop),
                )

    def queries(self, x_NPSK: Tensor, groups: slice, here: slice) -> Tensor:
        """The block's rows, those of all heads of a group below each other: [n, P * rows, K]."""
        return x_NPSK[groups, :, here].flatten(1, 2)

    def scaled(self, a: Tensor, b: Tensor) -> Tensor:
        return torch.baddbmm(self.nothing, a, b, beta=0, alpha=self.scale)

    def probabilities(self, q: Tensor, groups: slice, here: slice, keys: slice) -> Tensor:
        scores = self.scaled(q, self.k[groups, keys].mT)
        rows = here.stop - here.start
        by_row = scores.unflatten(1, (-1, rows))
        by_row[..., here.start - keys.start :].add_(self.later[:rows, :rows])
        # query r of the block does not see the r keys that follow its first query's first one; some lie before key 0
        missing = keys.start - (here.start - self.window + 1)
        if missing < rows - 1:
            by_row[..., : rows - missing].add_(self.earlier[:rows, missing:rows])
        return torch.softmax(scores, -1)


class _BlockedAttention(Function):
    @staticmethod
    def forward(ctx: Any, q_SBHK: Tensor, k_SBGK: Tensor, v_SBGK: Tensor, scale: float, window: int | None) -> Tensor:
        ctx.save_for_backward(q_SBHK, k_SBGK, v_SBGK)
        ctx.given = (scale, window)
        groups = k_SBGK.shape[2]
        q_NPSK = _by_group(q_SBHK, groups)
        k_NSK, v_NSK = (_by_group(x, groups)[:, 0] for x in (k_SBGK, v_SBGK))
        o_NPSK = torch.empty_like(q_NPSK)
        blocks = _Blocks(q_NPSK, k_NSK, scale, window)
        for some, here, keys in blocks:
            p = blocks.probabilities(blocks.queries(q_NPSK, some, here), some, here, keys)
            target = o_NPSK[some, :, here]
            target.copy_((p @ v_NSK[some, keys]).view(target.shape))
        return _by_position(o_NPSK, q_SBHK.shape[1])

    @staticmethod
    def backward(ctx: Any, do_SBHK: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q_SBHK, k_SBGK, v_SBGK = ctx.saved_tensors
        groups, batch = k_SBGK.shape[2], q_SBHK.shape[1]
        q_NPSK, do_NPSK = _by_group(q_SBHK, groups), _by_group(do_SBHK, groups)
        k_NSK, v_NSK = (_by_group(x, groups)[:, 0] for x in (k_SBGK, v_SBGK))
        dq_NPSK = torch.empty_like(q_NPSK)
        dk_NSK, dv_NSK = (torch.zeros_like(x, dtype=stat_dtype(x)) for x in (k_NSK, v_NSK))
        blocks = _Blocks(q_NPSK, k_NSK, *ctx.given)
        for some, here, keys in blocks:
            q, do = (blocks.queries(x, some, here) for x in (q_NPSK, do_NPSK))
            p = blocks.probabilities(q, some, here, keys)
            dv_NSK[some, keys].add_(p.mT @ do)
            ds = torch.ops.aten._softmax_backward_data(do @ v_NSK[some, keys].mT, p, -1, p.dtype)
            target = dq_NPSK[some, :, here]
            target.copy_(blocks.scaled(ds, k_NSK[some, keys]).view(target.shape))
            dk_NSK[some, keys].add_(blocks.scaled(ds.mT, q))
        dk, dv = (_by_position(x.to(p.dtype).unsqueeze(1), batch) for x in (dk_NSK, dv_NSK))
        return _by_position(dq_NPSK, batch), dk, dv, None, None


def blocked_attention(
    q_SBHK: Tensor, k_SBGK: Tensor, v_SBGK: Tensor, *, scale: float, window: int | None = None
) -> Tensor:
    """softmax(scale * q k^T + causal) v: o_SBHK; H a multiple of G. `window`: how many keys a query sees, itself
    included. In any floating dtype and on any device, whatever `supports` advises."""
    return _BlockedAttention.apply(q_SBHK, k_SBGK, v_SBGK, scale, window)  # type: ignore[return-value]
