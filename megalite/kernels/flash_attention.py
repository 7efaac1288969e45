"""Causal attention in Triton that never stores scores (arXiv:2205.14135, arXiv:2307.08691): forward and backward.

    s = scale q k^T;  p = exp(s - lse);  o = p v;   for every query i its keys are low(i) <= j <= i
    delta = sum(do o);  dp = do v^T;  ds = p (dp - delta) scale;   dq = ds k;  dk = ds^T q;  dv = p^T do

Positions are absolute: row 0 of q is at `q_first`, row 0 of k at `k_first`, and either may be a part of the sequence.
low(i) is the first position of i's document, and not before the sliding window. It never decreases, so a program visits
one range of blocks, and only scores that the mask leaves are computed. Inside the kernels positions count from
`k_first`. A query that sees no key has o = 0 and lse = -inf. q_SBHK, k_TBGK, v_TBGK may be strided (unit stride along
K); o and gradients are contiguous. Sums in fp32, products of p and ds in the dtype of the inputs. Values may have V
channels where keys have K; a tile has the next power of two of each.

A sink is in lse alone, which begins with it: dsink = -sum(exp(sink - lse) delta).

Dropout, D = keep / (1 - p), whose mask is drawn where it is needed and never stored: o = (p D) v, dv = (p D)^T do,
dp = D (do v^T); all else stays.

dq and (dk, dv) have a kernel each, which computes the scores twice, 7 instead of 5 matmuls; one kernel would need
atomic additions to dq and give another rounding in every run. A key's program walks over all query heads of its group.
Saved: q, k, v, o and the log-sum-exp. FLOPs of all scores: forward 2 S^2 B H (K + V), backward 2 S^2 B H (4 K + 3 V);
half of it is masked.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Function

from megalite.common.tables import load_table
from megalite.kernels.blocked_attention import AttentionDropout, AttentionParams
from megalite.kernels.dispatch import ceil_div, kernel, matmul_unit, power_of_two, upcast_for_interpreter
from megalite.kernels.dropout import as_int32
from megalite.kernels.flash_blocks import (
    dot,
    dropout_keep,
    first_visible_key,
    key_block_bounds,
    load_tile,
    nth_masked_block,
    num_masked_blocks,
)

if TYPE_CHECKING:
    import triton.language as tl

LOG2_E = 1 / math.log(2)  # exp2 is an instruction, exp is not: scores are in units of log 2
# Channels of a head. In fp32 the multiply-adds of wider ones spill in every tile.
MAX_HEAD_DIM = {torch.bfloat16: 256, torch.float16: 256, torch.float32: 128}
# by `unit`
FORWARD_TILES, BACKWARD_Q_TILES, BACKWARD_KV_TILES = load_table(__file__, "tiles")["flash_attention"].values()
MAX_GRID_Y = 65535  # along the second dimension of a CUDA grid


def is_supported(q_SBHK: Tensor, v_TBGK: Tensor) -> bool:
    _, batch, heads, _ = q_SBHK.shape
    return max_head_dim(q_SBHK, v_TBGK) <= MAX_HEAD_DIM.get(q_SBHK.dtype, 0) and batch * heads <= MAX_GRID_Y


def max_head_dim(q: Tensor, v: Tensor) -> int:
    return max(q.shape[-1], v.shape[-1])


def flops(*args: Any) -> float:
    """FLOPs of a launch, from its arguments: two matmuls over the pairs of query and key that the mask leaves, S^2 / 2
    of S positions, or S W - W^2 / 2 in a window of W, less those of the queries before the first; borders of documents
    are not counted. Backward has as many in each of its two kernels, without the scores, which are computed again."""
    (S, B, H, K), V, given = args[0].shape, args[2].shape[-1], [x for x in args if not isinstance(x, Tensor)]
    shift, window_or_all = given[2], given[8]
    ends = (min(n, window_or_all) * (n - min(n, window_or_all) / 2) for n in (max(0, S + shift), max(0, shift)))
    return 2.0 * B * H * (K + V) * (next(ends) - next(ends))


def tile_key(q: Tensor, v: Tensor) -> str:
    """What multiplies, and whether heads are wide for it."""
    return matmul_unit(q) + " wide" * (max_head_dim(q, v) > (64 if q.dtype == torch.float32 else 128))


def padded_head_dim(channels: int) -> int:
    """As many as a tile has."""
    return max(64, power_of_two(channels))


@kernel
def _forward_block(
    o, total, largest, q, K, V, IDS, start, rows, low, keys, shift, k_first, scale, key, b, head, ks, vs,
    WIDE: tl.constexpr, HEAD: tl.constexpr, WIDTH: tl.constexpr, VALUE: tl.constexpr, V_WIDTH: tl.constexpr,
    THRESHOLD: tl.constexpr, COLUMNS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    columns = start + tl.arange(0, COLUMNS)
    k = load_tile(K, columns, ks, keys, HEAD, WIDTH, WHOLE)
    s = dot(q, tl.trans(k), WIDE)
    if WHOLE:
        now = tl.maximum(largest, tl.max(s, 1) * scale)
        base = now
    else:
        high = tl.minimum(rows + shift, keys - 1)
        window_or_all = (low[:, None] <= columns[None, :]) & (columns[None, :] <= high[:, None])
        s = tl.where(window_or_all, s, float("-inf"))
        now = tl.maximum(largest, tl.max(s, 1) * scale)
        base = tl.where(now == float("-inf"), 0.0, now)  # no key yet
    p = tl.exp2(s * scale - base[:, None])
    again = tl.exp2(largest - base)
    total = total * again + tl.sum(p, 1)
    if THRESHOLD > 0:
        at_q, at_k = (rows + shift + k_first)[:, None], (columns + k_first)[None, :]
        p = tl.where(dropout_keep(IDS, key, b, head, at_q, at_k, THRESHOLD), p, 0.0)
    v = load_tile(V, columns, vs, keys, VALUE, V_WIDTH, WHOLE)
    return o * again[:, None] + dot(p.to(v.dtype), v, WIDE), total, now


@kernel(flops=flops, do_not_specialize=["key", "head_offset", "shift", "k_first"])
def _forward(
    Q, K, V, OUT, LSE, FIRST, IDS, SINK,
    length, keys, shift, k_first, batch, heads, group, scale, window, key, head_offset,
    qs, qb, qh, ks, kb, kh, vs, vb, vh,
    DOCUMENTS: tl.constexpr, WIDE: tl.constexpr, HEAD: tl.constexpr, WIDTH: tl.constexpr,
    VALUE: tl.constexpr, V_WIDTH: tl.constexpr, THRESHOLD: tl.constexpr, RAISE: tl.constexpr,
    SUNK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest rows first, so that none is left over at the end
    b, h = tl.program_id(1) // heads, tl.program_id(1) % heads
    rows = block * ROWS + tl.arange(0, ROWS)
    K += b.to(tl.int64) * kb + (h // group) * kh
    V += b.to(tl.int64) * vb + (h // group) * vh
    q = load_tile(Q + b.to(tl.int64) * qb + h * qh, rows, qs, length, HEAD, WIDTH, False)
    low = first_visible_key(FIRST, rows, b, length, keys, shift, k_first, window, DOCUMENTS)
    largest = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    total = tl.zeros((ROWS,), dtype=tl.float32)
    if SUNK:
        largest = tl.zeros((ROWS,), dtype=tl.float32) + tl.load(SINK + h).to(tl.float32) * 1.4426950408889634
        total += 1.0
    o = tl.zeros((ROWS, V_WIDTH), dtype=tl.float32)
    last = (block + 1) * ROWS + shift
    begin, whole, whole_end, end = key_block_bounds(low, rows, length, keys, tl.min(low, 0), last, ROWS, COLUMNS)
    for start in range(whole, whole_end, COLUMNS):
        o, total, largest = _forward_block(
            o, total, largest, q, K, V, IDS, start, rows, low, keys, shift, k_first, scale, key, b,
            head_offset + h, ks, vs, WIDE, HEAD, WIDTH, VALUE, V_WIDTH, THRESHOLD, COLUMNS, True,
        )  # fmt: skip
    for i in range(0, num_masked_blocks(begin, whole, whole_end, end, COLUMNS)):
        start = nth_masked_block(i, begin, whole, whole_end, COLUMNS)
        o, total, largest = _forward_block(
            o, total, largest, q, K, V, IDS, start, rows, low, keys, shift, k_first, scale, key, b,
            head_offset + h, ks, vs, WIDE, HEAD, WIDTH, VALUE, V_WIDTH, THRESHOLD, COLUMNS, False,
        )  # fmt: skip
    total = tl.where(total == 0.0, 1.0, total)
    at = (rows.to(tl.int64) * batch + b) * heads + h
    channels = tl.arange(0, V_WIDTH)
    inside = (rows < length)[:, None] & (channels < VALUE)[None, :]
    o = (o * (RAISE / total)[:, None]).to(OUT.dtype.element_ty)
    tl.store(OUT + at[:, None] * VALUE + channels[None, :], o, mask=inside)
    tl.store(LSE + tl.program_id(1).to(tl.int64) * length + rows, largest + tl.log2(total), mask=rows < length)


@kernel
def _backward_q_block(
    dq, q, do, K, V, IDS, lse, delta, start, rows, low, keys, shift, k_first, scale, key, b, head, ks, vs,
    WIDE: tl.constexpr, HEAD: tl.constexpr, WIDTH: tl.constexpr, VALUE: tl.constexpr, V_WIDTH: tl.constexpr,
    THRESHOLD: tl.constexpr, RAISE: tl.constexpr, COLUMNS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    columns = start + tl.arange(0, COLUMNS)
    k = load_tile(K, columns, ks, keys, HEAD, WIDTH, WHOLE)
    v = load_tile(V, columns, vs, keys, VALUE, V_WIDTH, WHOLE)
    p = tl.exp2(dot(q, tl.trans(k), WIDE) * scale - lse[:, None])
    if not WHOLE:
        high = tl.minimum(rows + shift, keys - 1)
        p = tl.where((low[:, None] <= columns[None, :]) & (columns[None, :] <= high[:, None]), p, 0.0)
    dp = dot(do, tl.trans(v), WIDE)
    if THRESHOLD > 0:
        at_q, at_k = (rows + shift + k_first)[:, None], (columns + k_first)[None, :]
        dp = tl.where(dropout_keep(IDS, key, b, head, at_q, at_k, THRESHOLD), dp * RAISE, 0.0)
    return dq + dot((p * (dp - delta[:, None])).to(k.dtype), k, WIDE)


@kernel(flops=flops, do_not_specialize=["key", "head_offset", "shift", "k_first"])
def _backward_q(
    Q, K, V, OUT, DO, LSE, DELTA, DQ, FIRST, IDS,
    length, keys, shift, k_first, batch, heads, group, scale, window, key, head_offset,
    qs, qb, qh, ks, kb, kh, vs, vb, vh,
    DOCUMENTS: tl.constexpr, WIDE: tl.constexpr, HEAD: tl.constexpr, WIDTH: tl.constexpr,
    VALUE: tl.constexpr, V_WIDTH: tl.constexpr, THRESHOLD: tl.constexpr, RAISE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    block = tl.num_programs(0) - 1 - tl.program_id(0)
    b, h = tl.program_id(1) // heads, tl.program_id(1) % heads
    rows = block * ROWS + tl.arange(0, ROWS)
    K += b.to(tl.int64) * kb + (h // group) * kh
    V += b.to(tl.int64) * vb + (h // group) * vh
    head = b.to(tl.int64) * heads + h
    own = head * VALUE  # o and do are contiguous [S, B, H, V]
    q = load_tile(Q + b.to(tl.int64) * qb + h * qh, rows, qs, length, HEAD, WIDTH, False)
    do = load_tile(DO + own, rows, batch * heads * VALUE, length, VALUE, V_WIDTH, False)
    o = load_tile(OUT + own, rows, batch * heads * VALUE, length, VALUE, V_WIDTH, False)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    line = tl.program_id(1).to(tl.int64) * length + rows
    tl.store(DELTA + line, delta, mask=rows < length)  # for the other kernel
    lse = tl.load(LSE + line, mask=rows < length, other=float("inf"))
    low = first_visible_key(FIRST, rows, b, length, keys, shift, k_first, window, DOCUMENTS)
    dq = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
    last = (block + 1) * ROWS + shift
    begin, whole, whole_end, end = key_block_bounds(low, rows, length, keys, tl.min(low, 0), last, ROWS, COLUMNS)
    for start in range(whole, whole_end, COLUMNS):
        dq = _backward_q_block(
            dq, q, do, K, V, IDS, lse, delta, start, rows, low, keys, shift, k_first, scale, key, b,
            head_offset + h, ks, vs, WIDE, HEAD, WIDTH, VALUE, V_WIDTH, THRESHOLD, RAISE, COLUMNS, True,
        )  # fmt: skip
    for i in range(0, num_masked_blocks(begin, whole, whole_end, end, COLUMNS)):
        start = nth_masked_block(i, begin, whole, whole_end, COLUMNS)
        dq = _backward_q_block(
            dq, q, do, K, V, IDS, lse, delta, start, rows, low, keys, shift, k_first, scale, key, b,
            head_offset + h, ks, vs, WIDE, HEAD, WIDTH, VALUE, V_WIDTH, THRESHOLD, RAISE, COLUMNS, False,
        )  # fmt: skip
    dq = dq * (scale * 0.6931471805599453)  # ln 2
    channels = tl.arange(0, WIDTH)
    inside = (rows < length)[:, None] & (channels < HEAD)[None, :]
    at = head * HEAD + rows.to(tl.int64)[:, None] * (batch * heads * HEAD) + channels[None, :]
    tl.store(DQ + at, dq.to(DQ.dtype.element_ty), mask=inside)


@kernel
def _backward_kv_block(
    dk, dv, k, v, Q, DO, LSE, DELTA, FIRST, IDS, start, columns, length, keys, shift, k_first, window,
    scale, key, b, head, qs, dos,
    DOCUMENTS: tl.constexpr, WIDE: tl.constexpr, HEAD: tl.constexpr, WIDTH: tl.constexpr,
    VALUE: tl.constexpr, V_WIDTH: tl.constexpr, THRESHOLD: tl.constexpr, RAISE: tl.constexpr,
    ROWS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """Keys down, queries across, so that the next products need no transposition."""
    rows = start + tl.arange(0, ROWS)
    q = load_tile(Q, rows, qs, length, HEAD, WIDTH, WHOLE)
    do = load_tile(DO, rows, dos, length, VALUE, V_WIDTH, WHOLE)
    if WHOLE:
        lse, delta = tl.load(LSE + rows), tl.load(DELTA + rows)
    else:
        lse = tl.load(LSE + rows, mask=rows < length, other=float("inf"))
        delta = tl.load(DELTA + rows, mask=rows < length, other=0.0)
    p = tl.exp2(dot(k, tl.trans(q), WIDE) * scale - lse[None, :])
    if not WHOLE:
        low = first_visible_key(FIRST, rows, b, length, keys, shift, k_first, window, DOCUMENTS)
        p = tl.where((low[None, :] <= columns[:, None]) & (columns[:, None] <= (rows + shift)[None, :]), p, 0.0)
    dp = dot(v, tl.trans(do), WIDE)
    kept = p
    if THRESHOLD > 0:
        at_q, at_k = (rows + shift + k_first)[None, :], (columns + k_first)[:, None]
        keep = dropout_keep(IDS, key, b, head, at_q, at_k, THRESHOLD)
        kept, dp = tl.where(keep, p * RAISE, 0.0), tl.where(keep, dp * RAISE, 0.0)
    dv += dot(kept.to(do.dtype), do, WIDE)
    dk += dot((p * (dp - delta[None, :])).to(q.dtype), q, WIDE)
    return dk, dv


@kernel(flops=flops, do_not_specialize=["key", "head_offset", "shift", "k_first"])
def _backward_kv(
    Q, K, V, DO, LSE, DELTA, DK, DV, FIRST, END, IDS,
    length, keys, shift, k_first, batch, heads, group, scale, window, key, head_offset,
    qs, qb, qh, ks, kb, kh, vs, vb, vh,
    DOCUMENTS: tl.constexpr, WIDE: tl.constexpr, HEAD: tl.constexpr, WIDTH: tl.constexpr,
    VALUE: tl.constexpr, V_WIDTH: tl.constexpr, THRESHOLD: tl.constexpr, RAISE: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    groups = heads // group
    b, g = tl.program_id(1) // groups, tl.program_id(1) % groups
    first = tl.program_id(0) * COLUMNS
    columns = first + tl.arange(0, COLUMNS)
    k = load_tile(K + b.to(tl.int64) * kb + g * kh, columns, ks, keys, HEAD, WIDTH, False)
    v = load_tile(V + b.to(tl.int64) * vb + g * vh, columns, vs, keys, VALUE, V_WIDTH, False)
    last = tl.minimum(first + COLUMNS, keys) - 1
    end = tl.minimum(last + window - shift, length)  # after the last query that sees some key of this block
    whole_end = tl.minimum(first + window - shift, length)  # after the last that sees them all
    if DOCUMENTS:
        end = tl.minimum(end, tl.load(END + b * keys + last).to(tl.int32))
        whole_end = tl.minimum(whole_end, tl.load(END + b * keys + first).to(tl.int32))
    begin = tl.maximum(first - shift, 0) // ROWS * ROWS
    whole_end = tl.maximum(tl.maximum(whole_end, 0) // ROWS * ROWS, begin)
    whole = tl.minimum((tl.maximum(last - shift, 0) + ROWS - 1) // ROWS * ROWS, whole_end)
    dk = tl.zeros((COLUMNS, WIDTH), dtype=tl.float32)
    dv = tl.zeros((COLUMNS, V_WIDTH), dtype=tl.float32)
    for i in range(0, group):
        h = g * group + i
        own, line = (b.to(tl.int64) * heads + h) * VALUE, (b * heads + h).to(tl.int64) * length
        for start in range(whole, whole_end, ROWS):
            dk, dv = _backward_kv_block(
                dk, dv, k, v, Q + b.to(tl.int64) * qb + h * qh, DO + own, LSE + line, DELTA + line, FIRST, IDS,
                start, columns, length, keys, shift, k_first, window, scale, key, b, head_offset + h,
                qs, batch * heads * VALUE, DOCUMENTS, WIDE, HEAD, WIDTH, VALUE, V_WIDTH, THRESHOLD, RAISE, ROWS, True,
            )  # fmt: skip
        for n in range(0, num_masked_blocks(begin, whole, whole_end, end, ROWS)):
            start = nth_masked_block(n, begin, whole, whole_end, ROWS)
            dk, dv = _backward_kv_block(
                dk, dv, k, v, Q + b.to(tl.int64) * qb + h * qh, DO + own, LSE + line, DELTA + line, FIRST, IDS,
                start, columns, length, keys, shift, k_first, window, scale, key, b, head_offset + h,
                qs, batch * heads * VALUE, DOCUMENTS, WIDE, HEAD, WIDTH, VALUE, V_WIDTH, THRESHOLD, RAISE, ROWS, False,
            )  # fmt: skip
    dk = dk * (scale * 0.6931471805599453)  # ln 2
    channels, v_channels = tl.arange(0, WIDTH), tl.arange(0, V_WIDTH)
    row, inside = ((columns.to(tl.int64) * batch + b) * groups + g)[:, None], (columns < keys)[:, None]
    k_at, v_at = row * HEAD + channels[None, :], row * VALUE + v_channels[None, :]
    tl.store(DK + k_at, dk.to(DK.dtype.element_ty), mask=inside & (channels < HEAD)[None, :])
    tl.store(DV + v_at, dv.to(DV.dtype.element_ty), mask=inside & (v_channels < VALUE)[None, :])


class _Attention(Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        sink_H: Tensor | None,
        first_BS: Tensor | None,
        params: AttentionParams,
    ) -> Tensor:
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        (S, B, H, K), (T, _, G, V), k_first = q.shape, v.shape, params.k_start
        o, lse = q.new_empty(S, B, H, V), q.new_empty(B, H, S, dtype=torch.float32)
        first = lse if first_BS is None else first_BS.contiguous()
        dropout_p, key, ids, head_offset = params.drop or AttentionDropout(0.0, 0, lse)
        ids = ids.contiguous()
        strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
        shift = params.q_start - k_first
        window_or_all = (
            max(1, S + shift) if params.window is None else params.window
        )  # None: as if it reached back to key 0
        ctx.given = (
            S,
            T,
            shift,
            k_first,
            B,
            H,
            H // G,
            params.scale * LOG2_E,
            window_or_all,
            as_int32(key),
            head_offset,
            *strides,
        )
        ctx.kind = (first_BS is not None, upcast_for_interpreter(q), K, padded_head_dim(K), V, padded_head_dim(V))
        ctx.kind += (int(dropout_p * 2**32), 1.0 / (1.0 - dropout_p))
        rows, columns, warps, stages = FORWARD_TILES[tile_key(q, v)]
        sink, sunk = (lse, False) if sink_H is None else (sink_H.contiguous(), True)
        _forward[(ceil_div(S, rows), B * H)](
            *(q, k, v, o, lse, first, ids, sink, *ctx.given, *ctx.kind, sunk, rows, columns),
            num_warps=warps,
            num_stages=stages,
        )
        ctx.save_for_backward(q, k, v, o, lse, first, ids, sink_H)
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, o, lse, first, ids, sink_H = ctx.saved_tensors
        S, T, _, k_first, B, H = ctx.given[:6]
        do = do.contiguous()
        dq, dk, dv, delta = (x.new_empty(x.shape) for x in (q, k, v, lse))
        rows, columns, warps, stages = BACKWARD_Q_TILES[tile_key(q, v)]
        _backward_q[(ceil_div(S, rows), B * H)](
            *(q, k, v, o, do, lse, delta, dq, first, ids, *ctx.given, *ctx.kind, rows, columns),
            num_warps=warps,
            num_stages=stages,
        )
        end = first
        if ctx.kind[0]:  # how many queries have a first key not after j: where the document of key j ends
            keys = torch.arange(k_first, k_first + T, dtype=first.dtype, device=first.device).expand(B, T).contiguous()
            end = torch.searchsorted(first, keys, right=True)
        rows, columns, warps, stages = BACKWARD_KV_TILES[tile_key(q, v)]
        _backward_kv[(ceil_div(T, columns), B * k.shape[2])](
            *(q, k, v, do, lse, delta, dk, dv, first, end, ids, *ctx.given, *ctx.kind, rows, columns),
            num_warps=warps,
            num_stages=stages,
        )
        dsink_H = None
        if sink_H is not None:
            share = torch.exp2(sink_H.float().unsqueeze(-1) * LOG2_E - lse)
            dsink_H = -(share * delta).sum((0, 2)).to(sink_H.dtype)
        return dq, dk, dv, dsink_H, None, None


def flash_attention(
    q_SBHK: Tensor, k_TBGK: Tensor, v_TBGK: Tensor, *, sink_H: Tensor | None = None, first_BS: Tensor | None = None,
    **how: Any,
) -> Tensor:  # fmt: skip
    """o_SBHK. `how`: the fields of Scoring. sink_H: kernels/attention.py. first_BS: int64, of each query the first
    position of its document. Head sizes, of queries and keys and of values, up to 256 in bf16 and fp16, 128 in fp32."""
    if v_TBGK.shape[:-1] != k_TBGK.shape[:-1]:
        raise ValueError(f"values {(*v_TBGK.shape,)} are not of the keys {(*k_TBGK.shape,)}; each key has one")
    return _Attention.apply(q_SBHK, k_TBGK, v_TBGK, sink_H, first_BS, AttentionParams(**how))  # type: ignore[return-value]
