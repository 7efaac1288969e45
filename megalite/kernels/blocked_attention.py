"""Causal attention by blocks of queries whose scores stay in the cache: on a CPU in half precision, in a window, and
with dropout.

    per block of queries i:   s = scale q_i k^T (keys up to the block's end);  p = softmax(s);  o_i = p v
    backward                  the same s and p again;  dv += p^T do_i;  ds = p (do_i v^T - sum(p do_i v^T));
                              dq_i = scale ds k;  dk += scale ds^T q_i

Plain matrix products and softmaxes, which torch hands to a CPU's bf16 units; its own fused attention there does not use
them and takes up to twice the time (docs/experiments.md). Saved are q, k and v alone. Softmax, and the sums over
blocks, are in fp32 (fp64 for fp64). Scores are rounded to the input's dtype, as explicit attention in half precision
does and fused attention does not: the rms error of o is 1.7 times that of torch's SDPA where scores have a standard
deviation of 1, and 5 times at 4. Rejected: a second product, for scores relative to their row's maximum, 1.3 times at
any size for 1.4 times the time; --attention-kernel torch is more exact and takes no more than that.

The work per query block grows with its end, so half of the scores' square is never computed but for the blocks on the
diagonal. With a window a block's keys begin where its first query's do: S (W + rows) scores, where torch's fused
attention would take a mask of S x S and compute them all. The mask of dropout is drawn for a block, and in backward
again: p D in place of p for o and dv, dp D in place of dp, D = keep / (1 - p). Positions are absolute: q and k may be
parts of the sequence, as in kernels/flash_attention.py. A sink is one column more of the softmax alone; as a softmax's
gradients sum to 0, its own is what those of the keys miss.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from megalite.kernels.dispatch import accum_dtype, upcasts
from megalite.kernels.dropout import keep_mask

BLOCK_QUERIES = 256  # of a block: fewer waste less on the diagonal, more make larger matrix products
WINDOW_BLOCK_QUERIES = (
    64,
    128,
)  # the same in a window, whose border is on both sides: as many as its keys within these bounds
BLOCK_BYTES = 4 << 20  # of one block's scores


class AttentionDropout(NamedTuple):
    """Dropout of attention weights and its coordinates. sample_ids_B: global sample numbers. head_offset: the global
    number of head 0."""

    p: float
    key: int
    sample_ids_B: Tensor
    head_offset: int = 0

    def mask(self, heads: tuple[Tensor, Tensor], queries: range, keys: range) -> Tensor:
        """The mask of some groups of heads: [m, Q, queries, keys]. `heads`: the sample of each group, [m, 1, 1, 1], and
        the numbers of its heads, [m, Q, 1, 1]."""
        sample_mQ, head_mQ = heads
        samples, numbers = self.sample_ids_B[sample_mQ], head_mQ + self.head_offset
        rows, columns = (
            torch.arange(group_slice.start, group_slice.stop, device=head_mQ.device) for group_slice in (queries, keys)
        )
        return keep_mask(self.key, self.p, samples, numbers, rows.unsqueeze(-1), columns)


class AttentionParams(NamedTuple):
    """Which keys a query sees, and what its scores become.

    scale             of q k^T
    window            how many keys a query sees, itself included; None: all before it
    drop              dropout of attention weights; None: there is none
    q_first, k_first  the positions of row 0 of q and of k
    """

    scale: float
    window: int | None = None
    drop: AttentionDropout | None = None
    q_start: int = 0
    k_start: int = 0


def is_fastest(q: Tensor) -> bool:
    """Whether this form is the fastest one without a window."""
    return q.device.type == "cpu" and q.dtype in (torch.bfloat16, torch.float16)


def fp16_to_fp32(*tensors: Tensor) -> tuple[Tensor, ...]:
    """In fp32 those that are fp16, as scores may exceed 65504, and those that this CPU multiplies in fp32 anyhow."""
    return tuple(x.float() if x.dtype == torch.float16 or upcasts(x) else x for x in tensors)


def _group_heads(x_SBHK: Tensor, groups: int) -> Tensor:
    """x_MQSK, M = B * G, Q = H / G (docs/shapes.md): a view, unless the heads of samples lie apart."""
    s, b, h, k = x_SBHK.shape
    return x_SBHK.reshape(s, b * groups, h // groups, k).permute(1, 2, 0, 3)


class _AttentionBlocks:
    """The blocks of one call, and their probabilities."""

    def __init__(self, q_MQSK: Tensor, keys: int, sink_H: Tensor | None, batch: int, params: AttentionParams):
        self.q, self.keys, self.scale, self.drop, self.sink_H = q_MQSK, keys, params.scale, params.drop, sink_H
        self.positions, self.q_offset = (
            (params.q_start, params.k_start),
            params.q_start - params.k_start,
        )  # of queries against keys
        n, per_group, self.length, _ = q_MQSK.shape
        self.keep_prob = (
            1.0 if params.drop is None else 1.0 - params.drop.p
        )  # by which is divided what was dropped from
        groups, first = torch.arange(n, device=q_MQSK.device).view(-1, 1, 1, 1), n // batch
        within = torch.arange(per_group, device=q_MQSK.device).view(-1, 1, 1)
        self.samples, self.heads = groups // first, groups % first * per_group + within
        whole = max(self.keys, self.length + self.q_offset)
        self.window = min(params.window or whole, whole)
        fewest, most = WINDOW_BLOCK_QUERIES if self.window < whole else (BLOCK_QUERIES, BLOCK_QUERIES)
        self.rows = min(self.length, most, max(fewest, self.window))
        columns = max(1, min(self.keys, self.rows + self.window))
        self.groups = min(n, max(1, BLOCK_BYTES // (per_group * self.rows * columns * q_MQSK.element_size())))
        hidden = q_MQSK.new_full((self.rows, self.rows), float("-inf"))
        self.causal_mask, self.window_mask = hidden.triu(1), hidden.tril(-1)
        self.zero = q_MQSK.new_zeros(())

    def __iter__(self) -> Iterator[tuple[slice, slice, slice]]:
        """Groups, queries, and the keys that some of these see: an empty slice at 0 where there are none."""
        for first in range(0, self.q.shape[0], self.groups):
            for start in range(0, self.length, self.rows):
                stop = min(start + self.rows, self.length)
                begin, end = max(0, start + self.q_offset - self.window + 1), min(stop + self.q_offset, self.keys)
                keys = slice(begin, end) if begin < end else slice(0, 0)
                yield slice(first, first + self.groups), slice(start, stop), keys

    def queries(self, x_MQSK: Tensor, groups: slice, query_slice: slice) -> Tensor:
        """The block's rows, those of all heads of a group below each other: [m, Q * rows, K]."""
        return x_MQSK[groups, :, query_slice].flatten(1, 2)

    def scaled_matmul(self, a: Tensor, b: Tensor, scale: float) -> Tensor:
        return torch.baddbmm(self.zero, a, b, beta=0, alpha=scale)

    def apply_dropout_(self, group_slice: slice, query_slice: slice, keys: slice, *weights: Tensor) -> None:
        """Zero dropped elements; the caller divides the others by `kept`."""
        if self.drop is not None:
            parts = zip((query_slice, keys), self.positions, strict=True)
            rows, columns = (range(part.start + at, part.stop + at) for part, at in parts)
            mask = self.drop.mask((self.samples[group_slice], self.heads[group_slice]), rows, columns).flatten(1, 2)
            for x in weights:
                x.mul_(mask)

    def scores(self, q: Tensor, k: Tensor, query_slice: slice, keys: slice) -> Tensor:
        """[m, Q * rows, keys] of these keys, -inf where hidden."""
        scores = self.scaled_matmul(q, k.mT, self.scale)
        rows, width = query_slice.stop - query_slice.start, keys.stop - keys.start
        by_row = scores.unflatten(1, (-1, rows))
        own = (
            query_slice.start + self.q_offset - keys.start
        )  # the column of the first query's position; < 0: before the keys
        first = max(0, -own)
        by_row[..., own + first :].add_(self.causal_mask[:rows, first : max(first, width - own)])
        # query r of the block does not see the r keys that follow its first query's first one; some lie before key 0
        missing = keys.start - (query_slice.start + self.q_offset - self.window + 1)
        if missing < rows - 1:
            group_slice = min(rows - missing, width)
            by_row[..., :group_slice].add_(self.window_mask[:rows, missing : missing + group_slice])
        return scores

    def probabilities(self, scores: Tensor, groups: slice, query_slice: slice) -> Tensor:
        """Softmax of the scores; 0 for queries that see no key."""
        if self.sink_H is None:
            p = torch.softmax(scores, -1)
        else:
            sink = self.sink_H.to(scores.dtype)[self.heads[groups]].expand(
                -1, -1, query_slice.stop - query_slice.start, 1
            )
            p = torch.softmax(torch.cat([scores, sink.flatten(1, 2)], -1), -1)[..., :-1]
        if (
            query_slice.start + self.q_offset < 0 or query_slice.stop + self.q_offset - self.window >= self.keys
        ):  # there are such
            last = torch.arange(query_slice.start, query_slice.stop, device=p.device) + self.q_offset
            sees_no_key = (last < 0) | (last - self.window + 1 >= self.keys)
            p.unflatten(1, (-1, len(last))).masked_fill_(sees_no_key.unsqueeze(-1), 0.0)
        return p


class _BlockedAttention(Function):
    @staticmethod
    def forward(
        ctx: Any, q_SBHK: Tensor, k_TBGK: Tensor, v_TBGK: Tensor, sink_H: Tensor | None, params: AttentionParams
    ) -> Tensor:
        ctx.save_for_backward(q_SBHK, k_TBGK, v_TBGK, sink_H)
        ctx.how = params
        groups, dtype = k_TBGK.shape[2], q_SBHK.dtype
        q_SBHK, k_TBGK, v_TBGK = fp16_to_fp32(q_SBHK, k_TBGK, v_TBGK)
        q_MQSK = _group_heads(q_SBHK, groups)
        k_MTK, v_MTK = (_group_heads(x, groups)[:, 0].contiguous() for x in (k_TBGK, v_TBGK))
        o_SBHK = q_SBHK.new_empty(*q_SBHK.shape[:3], v_MTK.shape[-1])
        o_MQSK = _group_heads(o_SBHK, groups)
        blocks = _AttentionBlocks(q_MQSK, k_MTK.shape[1], sink_H, q_SBHK.shape[1], params)
        for group_slice, query_slice, keys in blocks:
            scores = blocks.scores(
                blocks.queries(q_MQSK, group_slice, query_slice), k_MTK[group_slice, keys], query_slice, keys
            )
            p = blocks.probabilities(scores, group_slice, query_slice)
            blocks.apply_dropout_(group_slice, query_slice, keys, p)
            target, v = o_MQSK[group_slice, :, query_slice], v_MTK[group_slice, keys]
            o = p @ v if params.drop is None else blocks.scaled_matmul(p, v, 1 / blocks.keep_prob)
            target.copy_(o.view(target.shape))
        return o_SBHK.to(dtype)

    @staticmethod
    def backward(ctx: Any, do_SBHK: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q_SBHK, k_TBGK, v_TBGK, sink_H = ctx.saved_tensors
        dtype = q_SBHK.dtype
        q_SBHK, k_TBGK, v_TBGK, do_SBHK = fp16_to_fp32(q_SBHK, k_TBGK, v_TBGK, do_SBHK)
        groups, batch = k_TBGK.shape[2], q_SBHK.shape[1]
        q_MQSK, do_MQSK = _group_heads(q_SBHK, groups), _group_heads(do_SBHK, groups)
        k_MTK, v_MTK = (_group_heads(x, groups)[:, 0].contiguous() for x in (k_TBGK, v_TBGK))
        dq_SBHK, dk_TBGK, dv_TBGK = (x.new_empty(x.shape, dtype=dtype) for x in (q_SBHK, k_TBGK, v_TBGK))
        dq_MQSK = _group_heads(dq_SBHK, groups)
        dk_MTK, dv_MTK = (torch.zeros_like(x, dtype=accum_dtype(x)) for x in (k_MTK, v_MTK))
        dsink_MQ = None if sink_H is None else dk_MTK.new_zeros(q_MQSK.shape[:2])
        blocks = _AttentionBlocks(q_MQSK, k_MTK.shape[1], sink_H, batch, ctx.how)
        scale = blocks.scale / blocks.keep_prob  # the gradient of a softmax is linear in that of p
        for group_slice, query_slice, keys in blocks:
            q, do = (blocks.queries(x, group_slice, query_slice) for x in (q_MQSK, do_MQSK))
            k = k_MTK[group_slice, keys].contiguous()  # once for both products
            p = blocks.probabilities(blocks.scores(q, k, query_slice, keys), group_slice, query_slice)
            dp, keep_prob = do @ v_MTK[group_slice, keys].mT, p
            if blocks.drop is not None:
                keep_prob = p.clone()
                blocks.apply_dropout_(group_slice, query_slice, keys, keep_prob, dp)
            dv_MTK[group_slice, keys].add_(keep_prob.mT @ do)
            ds = torch.ops.aten._softmax_backward_data(dp, p, -1, p.dtype)
            if dsink_MQ is not None:
                dsink_MQ[group_slice].sub_(ds.unflatten(1, (dsink_MQ.shape[1], -1)).sum((-2, -1), dtype=dsink_MQ.dtype))
            target = dq_MQSK[group_slice, :, query_slice]
            target.copy_(blocks.scaled_matmul(ds, k, scale).view(target.shape))
            dk_MTK[group_slice, keys].add_(blocks.scaled_matmul(ds.mT, q, scale))
        if blocks.drop is not None:
            dv_MTK.div_(blocks.keep_prob)
        for grad, sums in ((dk_TBGK, dk_MTK), (dv_TBGK, dv_MTK)):
            _group_heads(grad, groups)[:, 0].copy_(sums)
        dsink_H = None
        if sink_H is not None and dsink_MQ is not None:
            dsink_H = (dsink_MQ / blocks.keep_prob).view(batch, -1).sum(0).to(sink_H.dtype)
        return dq_SBHK, dk_TBGK, dv_TBGK, dsink_H, None


def blocked_attention(
    q_SBHK: Tensor, k_TBGK: Tensor, v_TBGK: Tensor, *, sink_H: Tensor | None = None, **how: Any
) -> Tensor:
    """softmax(scale * q k^T + causal) v: o_SBHK; H a multiple of G. `how`: the fields of Scoring. sink_H:
    kernels/attention.py. In any floating dtype, on any device, and with values of any width, whatever `supports`
    advises."""
    return _BlockedAttention.apply(q_SBHK, k_TBGK, v_TBGK, sink_H, AttentionParams(**how))  # type: ignore[return-value]
