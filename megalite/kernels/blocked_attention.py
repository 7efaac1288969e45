"""Causal attention by blocks of queries whose scores fit in the cache.

It serves half precision on a CPU, windows, and dropout.

    per block of queries i:   s = scale q_i k^T (keys up to the block's end);  p = softmax(s);  o_i = p v
    backward                  recompute s and p;  dv += p^T do_i;  ds = p (do_i v^T - sum(p do_i v^T));
                              dq_i = scale ds k;  dk += scale ds^T q_i

It consists of plain matrix products and softmaxes, for which torch uses a CPU's bf16 units; torch's fused attention on
the CPU does not use them and takes up to twice the time (docs/experiments.md). Only q, k and v are saved. Softmax, and
the sums over blocks, are in fp32 (fp64 for fp64). Scores are rounded to the input's dtype, as in explicit attention in
half precision and unlike in fused attention: the rms error of o is 1.7 times the error of torch's SDPA if scores have a
standard deviation of 1, and 5 times at 4. Rejected: a second product, for scores relative to the maximum of their row,
which gives 1.3 times the error at any size for 1.4 times the time; --attention-kernel torch is more exact and takes no
more time than that.

The work per query block grows with its end, so half of the score matrix is never computed, except in the blocks on the
diagonal. With a window, the keys of a block start at the first key of its first query: S (W + rows) scores, while
torch's fused attention would need a mask of S x S and compute all scores. The dropout mask is drawn per block, and
redrawn in backward: p D replaces p for o and dv, and dp D replaces dp, with D = keep / (1 - p). Positions are absolute:
q and k may be parts of the sequence, as in kernels/flash_attention.py. A sink is an additional column of the softmax
only. The gradients of a softmax's inputs sum to 0, so the sink's gradient is minus the sum of the keys' gradients.
Capped scores are in fp32: they are rounded only before the cap. Keys that all heads share are joined to those of each
head, which are copied here anyway.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd import Function

from megalite.kernels.dispatch import accum_dtype, upcasts
from megalite.kernels.dropout import keep_mask
from megalite.kernels.softcap import soft_cap_with_slope

# queries per block: fewer waste less work on the diagonal, more give larger matrix products
BLOCK_QUERIES = 256
# (min, max) queries per block with a window, which has masked scores on both sides: as many as a window has keys,
# within these bounds
WINDOW_BLOCK_QUERIES = (64, 128)
BLOCK_BYTES = 4 << 20  # bytes of one block's scores


class AttentionDropout(NamedTuple):
    """Dropout of attention weights, and the coordinates of its mask.

    p             the probability that a weight is dropped
    key           the key of the hash (kernels/dropout.py)
    sample_ids_B  global sample numbers
    head_offset   the global number of head 0
    """

    p: float
    key: int
    sample_ids_B: Tensor
    head_offset: int = 0

    def mask(self, heads: tuple[Tensor, Tensor], queries: range, keys: range) -> Tensor:
        """Return the mask of several groups of heads, [m, Q, queries, keys]; True where a weight is kept.

        Args:
            heads: the sample of each group, [m, 1, 1, 1], and the numbers of its heads, [m, Q, 1, 1].
            queries: positions of the queries.
            keys: positions of the keys.
        """
        sample_mQ, head_mQ = heads
        sample_ids = self.sample_ids_B[sample_mQ]
        head_ids = head_mQ + self.head_offset
        rows = torch.arange(queries.start, queries.stop, device=head_mQ.device)
        columns = torch.arange(keys.start, keys.stop, device=head_mQ.device)
        return keep_mask(self.key, self.p, sample_ids, head_ids, rows.unsqueeze(-1), columns)


class AttentionParams(NamedTuple):
    """The parameters that determine which keys a query sees and how its scores are computed.

    scale    the factor of q k^T
    window   the number of keys that a query sees, including the one at its own position; None: all up to its position
    drop     dropout of attention weights; None: no dropout
    q_start  the position of row 0 of q
    k_start  the position of row 0 of k
    softcap  the bound of the scores, cap tanh(scale q k^T / cap) (kernels/softcap.py); None: no bound
    """

    scale: float
    window: int | None = None
    drop: AttentionDropout | None = None
    q_start: int = 0
    k_start: int = 0
    softcap: float | None = None


def is_fastest(q: Tensor) -> bool:
    """Return whether blocked attention is the fastest implementation without a window."""
    return q.device.type == "cpu" and q.dtype in (torch.bfloat16, torch.float16)


def fp16_to_fp32(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Return the tensors, converted to fp32 if they are fp16 or if this CPU multiplies their dtype in fp32 anyway.

    Scores in fp16 could exceed its maximum, 65504.
    """
    return tuple(x.float() if x.dtype == torch.float16 or upcasts(x) else x for x in tensors)


def _group_heads(x_SBHK: Tensor, groups: int) -> Tensor:
    """Return x_MQSK with M = B * G and Q = H / G (docs/shapes.md); a view unless the strides do not allow it."""
    s, b, h, k = x_SBHK.shape
    return x_SBHK.reshape(s, b * groups, h // groups, k).permute(1, 2, 0, 3)


class _AttentionBlocks:
    """The blocks of one call, and the computation of their scores and probabilities."""

    def __init__(self, q_MQSK: Tensor, keys: int, sink_H: Tensor | None, batch: int, params: AttentionParams):
        self.q = q_MQSK
        self.keys = keys
        self.scale = params.scale
        self.softcap = params.softcap
        self.drop = params.drop
        self.sink_H = sink_H
        self.positions = (params.q_start, params.k_start)
        self.q_offset = params.q_start - params.k_start  # position of row 0 of q, counted from row 0 of k
        num_groups, heads_per_group, self.length, _ = q_MQSK.shape
        self.keep_prob = 1.0 if params.drop is None else 1.0 - params.drop.p
        groups_per_sample = num_groups // batch
        groups = torch.arange(num_groups, device=q_MQSK.device).view(-1, 1, 1, 1)
        head_in_group = torch.arange(heads_per_group, device=q_MQSK.device).view(-1, 1, 1)
        self.samples = groups // groups_per_sample
        self.heads = groups % groups_per_sample * heads_per_group + head_in_group
        full_length = max(self.keys, self.length + self.q_offset)
        self.window = min(params.window or full_length, full_length)
        if self.window < full_length:
            min_rows, max_rows = WINDOW_BLOCK_QUERIES
        else:
            min_rows = max_rows = BLOCK_QUERIES
        self.rows = min(self.length, max_rows, max(min_rows, self.window))
        columns = max(1, min(self.keys, self.rows + self.window))
        group_bytes = heads_per_group * self.rows * columns * q_MQSK.element_size()
        self.groups = min(num_groups, max(1, BLOCK_BYTES // group_bytes))
        masked = q_MQSK.new_full((self.rows, self.rows), float("-inf"))
        self.causal_mask = masked.triu(1)
        self.window_mask = masked.tril(-1)
        self.zero = q_MQSK.new_zeros(())

    def __iter__(self) -> Iterator[tuple[slice, slice, slice]]:
        """Yield (groups, queries, keys that at least one of the queries sees), an empty slice at 0 for no keys."""
        for group_start in range(0, self.q.shape[0], self.groups):
            for start in range(0, self.length, self.rows):
                stop = min(start + self.rows, self.length)
                key_start = max(0, start + self.q_offset - self.window + 1)
                key_end = min(stop + self.q_offset, self.keys)
                keys = slice(key_start, key_end) if key_start < key_end else slice(0, 0)
                yield slice(group_start, group_start + self.groups), slice(start, stop), keys

    def queries(self, x_MQSK: Tensor, groups: slice, query_slice: slice) -> Tensor:
        """Return the rows of the block, with the heads of a group below each other: [m, Q * rows, K]."""
        return x_MQSK[groups, :, query_slice].flatten(1, 2)

    def scaled_matmul(self, a: Tensor, b: Tensor, scale: float) -> Tensor:
        return torch.baddbmm(self.zero, a, b, beta=0, alpha=scale)

    def apply_dropout_(self, group_slice: slice, query_slice: slice, keys: slice, *weights: Tensor) -> None:
        """Zero the dropped elements; the caller divides the others by `keep_prob`."""
        if self.drop is not None:
            q_start, k_start = self.positions
            rows = range(query_slice.start + q_start, query_slice.stop + q_start)
            columns = range(keys.start + k_start, keys.stop + k_start)
            mask = self.drop.mask((self.samples[group_slice], self.heads[group_slice]), rows, columns).flatten(1, 2)
            for x in weights:
                x.mul_(mask)

    def scores(self, q: Tensor, k: Tensor, query_slice: slice, keys: slice) -> tuple[Tensor, Tensor | None]:
        """Return the scores for these keys, [m, Q * rows, keys], with -inf where masked, and the slope of their cap."""
        scores, slope = self.scaled_matmul(q, k.mT, self.scale), None
        if self.softcap is not None:
            scores, slope = soft_cap_with_slope(scores, self.softcap)
        rows = query_slice.stop - query_slice.start
        width = keys.stop - keys.start
        scores_by_head = scores.unflatten(1, (-1, rows))
        # the column at the position of the first query; below 0 if that is before the keys
        diagonal = query_slice.start + self.q_offset - keys.start
        first = max(0, -diagonal)
        scores_by_head[..., diagonal + first :].add_(self.causal_mask[:rows, first : max(first, width - diagonal)])
        # Query r of the block does not see the first r keys of the window of query 0, which starts `missing` keys
        # before the first key here.
        missing = keys.start - (query_slice.start + self.q_offset - self.window + 1)
        if missing < rows - 1:
            masked_columns = min(rows - missing, width)
            scores_by_head[..., :masked_columns].add_(self.window_mask[:rows, missing : missing + masked_columns])
        return scores, slope

    def probabilities(self, scores: Tensor, groups: slice, query_slice: slice) -> Tensor:
        """Return the softmax of the scores in the dtype of q; 0 for queries that see no key."""
        if self.sink_H is None:
            p = torch.softmax(scores, -1).to(self.q.dtype)
        else:
            rows = query_slice.stop - query_slice.start
            sink = self.sink_H.to(scores.dtype)[self.heads[groups]].expand(-1, -1, rows, 1)
            p = torch.softmax(torch.cat([scores, sink.flatten(1, 2)], -1), -1)[..., :-1].to(self.q.dtype)
        starts_before_keys = query_slice.start + self.q_offset < 0
        ends_after_keys = query_slice.stop + self.q_offset - self.window >= self.keys
        if starts_before_keys or ends_after_keys:  # some queries see no key
            last = torch.arange(query_slice.start, query_slice.stop, device=p.device) + self.q_offset
            sees_no_key = (last < 0) | (last - self.window + 1 >= self.keys)
            p.unflatten(1, (-1, len(last))).masked_fill_(sees_no_key.unsqueeze(-1), 0.0)
        return p


def join_shared_keys(
    q_SBHK: Tensor, k_TBGK: Tensor, q_pe_SBHR: Tensor | None, k_pe_TBR: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return queries and keys of K + R channels, whose last R are those that meet the keys that all heads share."""
    if q_pe_SBHR is None or k_pe_TBR is None:
        return q_SBHK, k_TBGK
    k_pe_TBGR = k_pe_TBR.unsqueeze(2).expand(*k_TBGK.shape[:3], -1)
    return torch.cat([q_SBHK, q_pe_SBHR], -1), torch.cat([k_TBGK, k_pe_TBGR], -1)


class _BlockedAttention(Function):
    @staticmethod
    def forward(
        ctx: Any, q_SBHK: Tensor, k_TBGK: Tensor, v_TBGK: Tensor, q_pe_SBHR: Tensor | None, k_pe_TBR: Tensor | None,
        sink_H: Tensor | None, params: AttentionParams,
    ) -> Tensor:  # fmt: skip
        ctx.save_for_backward(q_SBHK, k_TBGK, v_TBGK, q_pe_SBHR, k_pe_TBR, sink_H)
        ctx.params = params
        q_SBHK, k_TBGK = join_shared_keys(q_SBHK, k_TBGK, q_pe_SBHR, k_pe_TBR)
        groups = k_TBGK.shape[2]
        dtype = q_SBHK.dtype
        q_SBHK, k_TBGK, v_TBGK = fp16_to_fp32(q_SBHK, k_TBGK, v_TBGK)
        q_MQSK = _group_heads(q_SBHK, groups)
        k_MTK, v_MTK = (_group_heads(x, groups)[:, 0].contiguous() for x in (k_TBGK, v_TBGK))
        o_SBHK = q_SBHK.new_empty(*q_SBHK.shape[:3], v_MTK.shape[-1])
        o_MQSK = _group_heads(o_SBHK, groups)
        blocks = _AttentionBlocks(q_MQSK, k_MTK.shape[1], sink_H, q_SBHK.shape[1], params)
        for group_slice, query_slice, keys in blocks:
            q = blocks.queries(q_MQSK, group_slice, query_slice)
            scores, _ = blocks.scores(q, k_MTK[group_slice, keys], query_slice, keys)
            p = blocks.probabilities(scores, group_slice, query_slice)
            blocks.apply_dropout_(group_slice, query_slice, keys, p)
            v = v_MTK[group_slice, keys]
            o = p @ v if params.drop is None else blocks.scaled_matmul(p, v, 1 / blocks.keep_prob)
            o_block = o_MQSK[group_slice, :, query_slice]
            o_block.copy_(o.view(o_block.shape))
        return o_SBHK.to(dtype)

    @staticmethod
    def backward(ctx: Any, do_SBHK: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q_SBHK, k_TBGK, v_TBGK, q_pe_SBHR, k_pe_TBR, sink_H = ctx.saved_tensors
        K = q_SBHK.shape[-1]
        q_SBHK, k_TBGK = join_shared_keys(q_SBHK, k_TBGK, q_pe_SBHR, k_pe_TBR)
        dtype = q_SBHK.dtype
        q_SBHK, k_TBGK, v_TBGK, do_SBHK = fp16_to_fp32(q_SBHK, k_TBGK, v_TBGK, do_SBHK)
        groups = k_TBGK.shape[2]
        batch = q_SBHK.shape[1]
        q_MQSK, do_MQSK = _group_heads(q_SBHK, groups), _group_heads(do_SBHK, groups)
        k_MTK, v_MTK = (_group_heads(x, groups)[:, 0].contiguous() for x in (k_TBGK, v_TBGK))
        dq_SBHK, dk_TBGK, dv_TBGK = (x.new_empty(x.shape, dtype=dtype) for x in (q_SBHK, k_TBGK, v_TBGK))
        dq_MQSK = _group_heads(dq_SBHK, groups)
        dk_MTK, dv_MTK = (torch.zeros_like(x, dtype=accum_dtype(x)) for x in (k_MTK, v_MTK))
        dsink_MQ = None if sink_H is None else dk_MTK.new_zeros(q_MQSK.shape[:2])
        blocks = _AttentionBlocks(q_MQSK, k_MTK.shape[1], sink_H, batch, ctx.params)
        scale = blocks.scale / blocks.keep_prob  # the division by keep_prob may follow, as ds is linear in dp
        for group_slice, query_slice, keys in blocks:
            q, do = (blocks.queries(x, group_slice, query_slice) for x in (q_MQSK, do_MQSK))
            k = k_MTK[group_slice, keys].contiguous()  # for both products
            scores, slope = blocks.scores(q, k, query_slice, keys)
            p = blocks.probabilities(scores, group_slice, query_slice)
            dp = do @ v_MTK[group_slice, keys].mT
            p_dropped = p
            if blocks.drop is not None:
                p_dropped = p.clone()
                blocks.apply_dropout_(group_slice, query_slice, keys, p_dropped, dp)
            dv_MTK[group_slice, keys].add_(p_dropped.mT @ do)
            ds = torch.ops.aten._softmax_backward_data(dp, p, -1, p.dtype)
            if dsink_MQ is not None:
                dsink_MQ[group_slice].sub_(ds.unflatten(1, (dsink_MQ.shape[1], -1)).sum((-2, -1), dtype=dsink_MQ.dtype))
            if slope is not None:
                ds.mul_(slope)
            dq_block = dq_MQSK[group_slice, :, query_slice]
            dq_block.copy_(blocks.scaled_matmul(ds, k, scale).view(dq_block.shape))
            dk_MTK[group_slice, keys].add_(blocks.scaled_matmul(ds.mT, q, scale))
        if blocks.drop is not None:
            dv_MTK.div_(blocks.keep_prob)
        for grad, sums in ((dk_TBGK, dk_MTK), (dv_TBGK, dv_MTK)):
            _group_heads(grad, groups)[:, 0].copy_(sums)
        dsink_H = None
        if sink_H is not None and dsink_MQ is not None:
            dsink_H = (dsink_MQ / blocks.keep_prob).view(batch, -1).sum(0).to(sink_H.dtype)
        if q_pe_SBHR is None:
            return dq_SBHK, dk_TBGK, dv_TBGK, None, None, dsink_H, None
        dk_pe_TBR = dk_MTK[..., K:].unflatten(0, (batch, groups)).sum(1).transpose(0, 1).to(dtype)
        return dq_SBHK[..., :K], dk_TBGK[..., :K], dv_TBGK, dq_SBHK[..., K:], dk_pe_TBR, dsink_H, None


def blocked_attention(
    q_SBHK: Tensor, k_TBGK: Tensor, v_TBGK: Tensor, *, q_pe_SBHR: Tensor | None = None, k_pe_TBR: Tensor | None = None,
    sink_H: Tensor | None = None, **kwargs: Any,
) -> Tensor:  # fmt: skip
    """Return o_SBHK = softmax(scale * q k^T + causal) v, with H a multiple of G.

    It supports every floating-point dtype and device, and values of any width, also if `is_fastest` is False.

    Args:
        q_SBHK: the queries.
        k_TBGK: the keys.
        v_TBGK: the values.
        q_pe_SBHR: the channels of the queries that meet the keys in `k_pe_TBR`; None: none.
        k_pe_TBR: the keys that all heads share.
        sink_H: a logit without a value per head (kernels/attention.py); None: no sink.
        **kwargs: the fields of AttentionParams.
    """
    params = AttentionParams(**kwargs)
    return _BlockedAttention.apply(q_SBHK, k_TBGK, v_TBGK, q_pe_SBHR, k_pe_TBR, sink_H, params)  # type: ignore[return-value]
