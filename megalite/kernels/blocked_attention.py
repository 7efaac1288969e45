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

from megalite.kernels.dispatch import stat_dtype, upcasts
from megalite.kernels.dropout import keep_mask

QUERIES = 256  # of a block: fewer waste less on the diagonal, more make larger matrix products
IN_WINDOW = (64, 128)  # the same in a window, whose border is on both sides: as many as its keys within these bounds
BLOCK_BYTES = 4 << 20  # of one block's scores


class Drop(NamedTuple):
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
        rows, columns = (torch.arange(some.start, some.stop, device=head_mQ.device) for some in (queries, keys))
        return keep_mask(self.key, self.p, samples, numbers, rows.unsqueeze(-1), columns)


class Scoring(NamedTuple):
    """Which keys a query sees, and what its scores become.

    scale             of q k^T
    window            how many keys a query sees, itself included; None: all before it
    drop              dropout of attention weights; None: there is none
    q_first, k_first  the positions of row 0 of q and of k
    """

    scale: float
    window: int | None = None
    drop: Drop | None = None
    q_first: int = 0
    k_first: int = 0


def supports(q: Tensor) -> bool:
    """Whether this form is the fastest one without a window."""
    return q.device.type == "cpu" and q.dtype in (torch.bfloat16, torch.float16)


def in_range(*tensors: Tensor) -> tuple[Tensor, ...]:
    """In fp32 those that are fp16, as scores may exceed 65504, and those that this CPU multiplies in fp32 anyhow."""
    return tuple(x.float() if x.dtype == torch.float16 or upcasts(x) else x for x in tensors)


def _by_group(x_SBHK: Tensor, groups: int) -> Tensor:
    """x_MQSK, M = B * G, Q = H / G (docs/shapes.md): a view, unless the heads of samples lie apart."""
    s, b, h, k = x_SBHK.shape
    return x_SBHK.reshape(s, b * groups, h // groups, k).permute(1, 2, 0, 3)


class _Blocks:
    """The blocks of one call, and their probabilities."""

    def __init__(self, q_MQSK: Tensor, keys: int, sink_H: Tensor | None, batch: int, how: Scoring):
        self.q, self.keys, self.scale, self.drop, self.sink_H = q_MQSK, keys, how.scale, how.drop, sink_H
        self.places, self.shift = (how.q_first, how.k_first), how.q_first - how.k_first  # of queries against keys
        n, per_group, self.length, _ = q_MQSK.shape
        self.kept = 1.0 if how.drop is None else 1.0 - how.drop.p  # by which is divided what was dropped from
        groups, first = torch.arange(n, device=q_MQSK.device).view(-1, 1, 1, 1), n // batch
        within = torch.arange(per_group, device=q_MQSK.device).view(-1, 1, 1)
        self.samples, self.heads = groups // first, groups % first * per_group + within
        whole = max(self.keys, self.length + self.shift)
        self.window = min(how.window or whole, whole)
        fewest, most = IN_WINDOW if self.window < whole else (QUERIES, QUERIES)
        self.rows = min(self.length, most, max(fewest, self.window))
        columns = max(1, min(self.keys, self.rows + self.window))
        self.groups = min(n, max(1, BLOCK_BYTES // (per_group * self.rows * columns * q_MQSK.element_size())))
        hidden = q_MQSK.new_full((self.rows, self.rows), float("-inf"))
        self.later, self.earlier = hidden.triu(1), hidden.tril(-1)
        self.nothing = q_MQSK.new_zeros(())

    def __iter__(self) -> Iterator[tuple[slice, slice, slice]]:
        """Groups, queries, and the keys that some of these see: an empty slice at 0 where there are none."""
        for first in range(0, self.q.shape[0], self.groups):
            for start in range(0, self.length, self.rows):
                stop = min(start + self.rows, self.length)
                begin, end = max(0, start + self.shift - self.window + 1), min(stop + self.shift, self.keys)
                keys = slice(begin, end) if begin < end else slice(0, 0)
                yield slice(first, first + self.groups), slice(start, stop), keys

    def queries(self, x_MQSK: Tensor, groups: slice, here: slice) -> Tensor:
        """The block's rows, those of all heads of a group below each other: [m, Q * rows, K]."""
        return x_MQSK[groups, :, here].flatten(1, 2)

    def scaled(self, a: Tensor, b: Tensor, scale: float) -> Tensor:
        return torch.baddbmm(self.nothing, a, b, beta=0, alpha=scale)

    def dropped_(self, some: slice, here: slice, keys: slice, *weights: Tensor) -> None:
        """Zero dropped elements; the caller divides the others by `kept`."""
        if self.drop is not None:
            parts = zip((here, keys), self.places, strict=True)
            rows, columns = (range(part.start + at, part.stop + at) for part, at in parts)
            mask = self.drop.mask((self.samples[some], self.heads[some]), rows, columns).flatten(1, 2)
            for x in weights:
                x.mul_(mask)

    def scores(self, q: Tensor, k: Tensor, here: slice, keys: slice) -> Tensor:
        """[m, Q * rows, keys] of these keys, -inf where hidden."""
        scores = self.scaled(q, k.mT, self.scale)
        rows, width = here.stop - here.start, keys.stop - keys.start
        by_row = scores.unflatten(1, (-1, rows))
        own = here.start + self.shift - keys.start  # the column of the first query's position; < 0: before the keys
        first = max(0, -own)
        by_row[..., own + first :].add_(self.later[:rows, first : max(first, width - own)])
        # query r of the block does not see the r keys that follow its first query's first one; some lie before key 0
        missing = keys.start - (here.start + self.shift - self.window + 1)
        if missing < rows - 1:
            some = min(rows - missing, width)
            by_row[..., :some].add_(self.earlier[:rows, missing : missing + some])
        return scores

    def probabilities(self, scores: Tensor, groups: slice, here: slice) -> Tensor:
        """Softmax of the scores; 0 for queries that see no key."""
        if self.sink_H is None:
            p = torch.softmax(scores, -1)
        else:
            sink = self.sink_H.to(scores.dtype)[self.heads[groups]].expand(-1, -1, here.stop - here.start, 1)
            p = torch.softmax(torch.cat([scores, sink.flatten(1, 2)], -1), -1)[..., :-1]
        if here.start + self.shift < 0 or here.stop + self.shift - self.window >= self.keys:  # there are such
            last = torch.arange(here.start, here.stop, device=p.device) + self.shift
            blind = (last < 0) | (last - self.window + 1 >= self.keys)
            p.unflatten(1, (-1, len(last))).masked_fill_(blind.unsqueeze(-1), 0.0)
        return p


class _BlockedAttention(Function):
    @staticmethod
    def forward(
        ctx: Any, q_SBHK: Tensor, k_TBGK: Tensor, v_TBGK: Tensor, sink_H: Tensor | None, how: Scoring
    ) -> Tensor:
        ctx.save_for_backward(q_SBHK, k_TBGK, v_TBGK, sink_H)
        ctx.how = how
        groups, dtype = k_TBGK.shape[2], q_SBHK.dtype
        q_SBHK, k_TBGK, v_TBGK = in_range(q_SBHK, k_TBGK, v_TBGK)
        q_MQSK = _by_group(q_SBHK, groups)
        k_MTK, v_MTK = (_by_group(x, groups)[:, 0].contiguous() for x in (k_TBGK, v_TBGK))
        o_SBHK = q_SBHK.new_empty(*q_SBHK.shape[:3], v_MTK.shape[-1])
        o_MQSK = _by_group(o_SBHK, groups)
        blocks = _Blocks(q_MQSK, k_MTK.shape[1], sink_H, q_SBHK.shape[1], how)
        for some, here, keys in blocks:
            scores = blocks.scores(blocks.queries(q_MQSK, some, here), k_MTK[some, keys], here, keys)
            p = blocks.probabilities(scores, some, here)
            blocks.dropped_(some, here, keys, p)
            target, v = o_MQSK[some, :, here], v_MTK[some, keys]
            o = p @ v if how.drop is None else blocks.scaled(p, v, 1 / blocks.kept)
            target.copy_(o.view(target.shape))
        return o_SBHK.to(dtype)

    @staticmethod
    def backward(ctx: Any, do_SBHK: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q_SBHK, k_TBGK, v_TBGK, sink_H = ctx.saved_tensors
        dtype = q_SBHK.dtype
        q_SBHK, k_TBGK, v_TBGK, do_SBHK = in_range(q_SBHK, k_TBGK, v_TBGK, do_SBHK)
        groups, batch = k_TBGK.shape[2], q_SBHK.shape[1]
        q_MQSK, do_MQSK = _by_group(q_SBHK, groups), _by_group(do_SBHK, groups)
        k_MTK, v_MTK = (_by_group(x, groups)[:, 0].contiguous() for x in (k_TBGK, v_TBGK))
        dq_SBHK, dk_TBGK, dv_TBGK = (x.new_empty(x.shape, dtype=dtype) for x in (q_SBHK, k_TBGK, v_TBGK))
        dq_MQSK = _by_group(dq_SBHK, groups)
        dk_MTK, dv_MTK = (torch.zeros_like(x, dtype=stat_dtype(x)) for x in (k_MTK, v_MTK))
        dsink_MQ = None if sink_H is None else dk_MTK.new_zeros(q_MQSK.shape[:2])
        blocks = _Blocks(q_MQSK, k_MTK.shape[1], sink_H, batch, ctx.how)
        scale = blocks.scale / blocks.kept  # the gradient of a softmax is linear in that of p
        for some, here, keys in blocks:
            q, do = (blocks.queries(x, some, here) for x in (q_MQSK, do_MQSK))
            k = k_MTK[some, keys].contiguous()  # once for both products
            p = blocks.probabilities(blocks.scores(q, k, here, keys), some, here)
            dp, kept = do @ v_MTK[some, keys].mT, p
            if blocks.drop is not None:
                kept = p.clone()
                blocks.dropped_(some, here, keys, kept, dp)
            dv_MTK[some, keys].add_(kept.mT @ do)
            ds = torch.ops.aten._softmax_backward_data(dp, p, -1, p.dtype)
            if dsink_MQ is not None:
                dsink_MQ[some].sub_(ds.unflatten(1, (dsink_MQ.shape[1], -1)).sum((-2, -1), dtype=dsink_MQ.dtype))
            target = dq_MQSK[some, :, here]
            target.copy_(blocks.scaled(ds, k, scale).view(target.shape))
            dk_MTK[some, keys].add_(blocks.scaled(ds.mT, q, scale))
        if blocks.drop is not None:
            dv_MTK.div_(blocks.kept)
        for grad, sums in ((dk_TBGK, dk_MTK), (dv_TBGK, dv_MTK)):
            _by_group(grad, groups)[:, 0].copy_(sums)
        dsink_H = None
        if sink_H is not None and dsink_MQ is not None:
            dsink_H = (dsink_MQ / blocks.kept).view(batch, -1).sum(0).to(sink_H.dtype)
        return dq_SBHK, dk_TBGK, dv_TBGK, dsink_H, None


def blocked_attention(
    q_SBHK: Tensor, k_TBGK: Tensor, v_TBGK: Tensor, *, sink_H: Tensor | None = None, **how: Any
) -> Tensor:
    """softmax(scale * q k^T + causal) v: o_SBHK; H a multiple of G. `how`: the fields of Scoring. sink_H:
    kernels/attention.py. In any floating dtype, on any device, and with values of any width, whatever `supports`
    advises."""
    return _BlockedAttention.apply(q_SBHK, k_TBGK, v_TBGK, sink_H, Scoring(**how))  # type: ignore[return-value]
