"""Causal attention in Triton that never stores scores (arXiv:2205.14135, arXiv:2307.08691): forward and backward.

    s = scale q k^T;  p = exp(s - lse);  o = p v;   for every query i its keys are low(i) <= j <= i
    delta = sum(do o);  dp = do v^T;  ds = p (dp - delta) scale;   dq = ds k;  dk = ds^T q;  dv = p^T do

Positions are absolute: row 0 of q is at `q_start`, row 0 of k at `k_start`, and either may be a part of the sequence.
low(i) is the first position of i's document or of its sliding window, whichever is later. It never decreases with i, so
a program loops over one range of blocks, and skips blocks that are fully masked. Inside the kernels positions count
from `k_start` (`shift` is q_start - k_start, `first_key` is low). A query that sees no key has o = 0 and lse = -inf.
q_SBHK, k_TBGK, v_TBGK may be strided (unit stride along K); o and gradients are contiguous. Sums are in fp32; p and ds
are rounded to the dtype of the inputs before their matmuls. Values may have V channels if keys have K; a tile has the
next power of two of each.

A sink only changes lse, whose sum starts with it: dsink = -sum(exp(sink - lse) delta).

Dropout multiplies by D = keep / (1 - p); its mask is redrawn in each kernel and never stored: o = (p D) v,
dv = (p D)^T do, dp = D (do v^T). The other equations do not change.

dq and (dk, dv) have separate kernels, which compute the scores twice: 7 matmuls instead of 5. A single kernel would
need atomic additions to dq, whose rounding would differ in every run. The program of a block of keys loops over all
query heads of its group. Saved: q, k, v, o and the log-sum-exp. FLOPs of all scores: forward 2 S^2 B H (K + V),
backward 2 S^2 B H (4 K + 3 V); half of them are masked.
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

LOG2_E = 1 / math.log(2)  # GPUs have an instruction for exp2 but not for exp, so scores are in base 2
# Max channels per head. In fp32 the multiply-adds of wider heads spill registers in every tile.
MAX_HEAD_DIM = {torch.bfloat16: 256, torch.float16: 256, torch.float32: 128}
# by `tile_key`
FORWARD_TILES, BACKWARD_Q_TILES, BACKWARD_KV_TILES = load_table(__file__, "tiles")["flash_attention"].values()
MAX_GRID_Y = 65535  # programs along the second dimension of a CUDA grid


def is_supported(q_SBHK: Tensor, v_TBGK: Tensor) -> bool:
    """Return whether the kernels support this dtype, head width and number of heads."""
    _, batch, heads, _ = q_SBHK.shape
    return max_head_dim(q_SBHK, v_TBGK) <= MAX_HEAD_DIM.get(q_SBHK.dtype, 0) and batch * heads <= MAX_GRID_Y


def max_head_dim(q: Tensor, v: Tensor) -> int:
    return max(q.shape[-1], v.shape[-1])


def flops(*args: Any) -> float:
    """Return the FLOPs of a launch, from its arguments: two matmuls over the (query, key) pairs that are not masked.

    S positions have S^2 / 2 pairs, or S W - W^2 / 2 with a window of W; the pairs of positions before the first query
    are subtracted, and document boundaries are ignored. Each of the two backward kernels counts the same, without the
    scores, which are recomputed.
    """
    S, B, H, K = args[0].shape
    V = args[2].shape[-1]
    scalars = [x for x in args if not isinstance(x, Tensor)]
    shift = scalars[2]
    window = scalars[8]

    def num_pairs(positions: int) -> float:
        visible = min(positions, window)
        return visible * (positions - visible / 2)

    return 2.0 * B * H * (K + V) * (num_pairs(max(0, S + shift)) - num_pairs(max(0, shift)))


def tile_key(q: Tensor, v: Tensor) -> str:
    """Return the key of the tables of tiles: the unit that multiplies, followed by " wide" for wide heads."""
    limit = 64 if q.dtype == torch.float32 else 128
    unit = matmul_unit(q)
    return f"{unit} wide" if max_head_dim(q, v) > limit else unit


def padded_head_dim(channels: int) -> int:
    """Return the number of channels of a tile for heads of `channels`."""
    return max(64, power_of_two(channels))


@kernel
def _forward_block(
    acc, l_i, m_i, q, K, V, IDS, start, offs_m, first_key, keys, shift, k_first, scale, key, b, head, ks, vs,
    WIDE: tl.constexpr, HEAD: tl.constexpr, WIDTH: tl.constexpr, VALUE: tl.constexpr, V_WIDTH: tl.constexpr,
    THRESHOLD: tl.constexpr, COLUMNS: tl.constexpr, IS_FULL: tl.constexpr,
):  # fmt: skip
    offs_n = start + tl.arange(0, COLUMNS)
    k = load_tile(K, offs_n, ks, keys, HEAD, WIDTH, IS_FULL)
    s = dot(q, tl.trans(k), WIDE)
    if IS_FULL:
        m_new = tl.maximum(m_i, tl.max(s, 1) * scale)
        base = m_new
    else:
        last_key = tl.minimum(offs_m + shift, keys - 1)
        visible = (first_key[:, None] <= offs_n[None, :]) & (offs_n[None, :] <= last_key[:, None])
        s = tl.where(visible, s, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(s, 1) * scale)
        base = tl.where(m_new == float("-inf"), 0.0, m_new)  # no visible key so far
    p = tl.exp2(s * scale - base[:, None])
    alpha = tl.exp2(m_i - base)
    l_i = l_i * alpha + tl.sum(p, 1)
    if THRESHOLD > 0:
        pos_q, pos_k = (offs_m + shift + k_first)[:, None], (offs_n + k_first)[None, :]
        p = tl.where(dropout_keep(IDS, key, b, head, pos_q, pos_k, THRESHOLD), p, 0.0)
    v = load_tile(V, offs_n, vs, keys, VALUE, V_WIDTH, IS_FULL)
    return acc * alpha[:, None] + dot(p.to(v.dtype), v, WIDE), l_i, m_new


@kernel(flops=flops, do_not_specialize=["key", "head_offset", "shift", "k_first"])
def _forward(
    Q, K, V, OUT, LSE, FIRST, IDS, SINK,
    length, keys, shift, k_first, batch, heads, group, scale, window, key, head_offset,
    qs, qb, qh, ks, kb, kh, vs, vb, vh,
    DOCUMENTS: tl.constexpr, WIDE: tl.constexpr, HEAD: tl.constexpr, WIDTH: tl.constexpr,
    VALUE: tl.constexpr, V_WIDTH: tl.constexpr, THRESHOLD: tl.constexpr, RAISE: tl.constexpr,
    SUNK: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest rows first, to balance the last wave
    b, h = tl.program_id(1) // heads, tl.program_id(1) % heads
    offs_m = block * ROWS + tl.arange(0, ROWS)
    K += b.to(tl.int64) * kb + (h // group) * kh
    V += b.to(tl.int64) * vb + (h // group) * vh
    q = load_tile(Q + b.to(tl.int64) * qb + h * qh, offs_m, qs, length, HEAD, WIDTH, False)
    first_key = first_visible_key(FIRST, offs_m, b, length, keys, shift, k_first, window, DOCUMENTS)
    m_i = tl.full((ROWS,), float("-inf"), dtype=tl.float32)
    l_i = tl.zeros((ROWS,), dtype=tl.float32)
    if SUNK:
        m_i = tl.zeros((ROWS,), dtype=tl.float32) + tl.load(SINK + h).to(tl.float32) * 1.4426950408889634
        l_i += 1.0
    acc = tl.zeros((ROWS, V_WIDTH), dtype=tl.float32)
    key_end = (block + 1) * ROWS + shift
    lo, full_lo, full_hi, hi = key_block_bounds(
        first_key, offs_m, length, keys, tl.min(first_key, 0), key_end, ROWS, COLUMNS
    )
    for start in range(full_lo, full_hi, COLUMNS):
        acc, l_i, m_i = _forward_block(
            acc, l_i, m_i, q, K, V, IDS, start, offs_m, first_key, keys, shift, k_first, scale, key, b,
            head_offset + h, ks, vs, WIDE, HEAD, WIDTH, VALUE, V_WIDTH, THRESHOLD, COLUMNS, True,
        )  # fmt: skip
    for i in range(0, num_masked_blocks(lo, full_lo, full_hi, hi, COLUMNS)):
        start = nth_masked_block(i, lo, full_lo, full_hi, COLUMNS)
        acc, l_i, m_i = _forward_block(
            acc, l_i, m_i, q, K, V, IDS, start, offs_m, first_key, keys, shift, k_first, scale, key, b,
            head_offset + h, ks, vs, WIDE, HEAD, WIDTH, VALUE, V_WIDTH, THRESHOLD, COLUMNS, False,
        )  # fmt: skip
    l_i = tl.where(l_i == 0.0, 1.0, l_i)
    row_offs = (offs_m.to(tl.int64) * batch + b) * heads + h
    channels = tl.arange(0, V_WIDTH)
    mask = (offs_m < length)[:, None] & (channels < VALUE)[None, :]
    acc = (acc * (RAISE / l_i)[:, None]).to(OUT.dtype.element_ty)
    tl.store(OUT + row_offs[:, None] * VALUE + channels[None, :], acc, mask=mask)
    tl.store(LSE + tl.program_id(1).to(tl.int64) * length + offs_m, m_i + tl.log2(l_i), mask=offs_m < length)


@kernel
def _backward_q_block(
    dq, q, do, K, V, IDS, lse, delta, start, offs_m, first_key, keys, shift, k_first, scale, key, b, head, ks, vs,
    WIDE: tl.constexpr, HEAD: tl.constexpr, WIDTH: tl.constexpr, VALUE: tl.constexpr, V_WIDTH: tl.constexpr,
    THRESHOLD: tl.constexpr, RAISE: tl.constexpr, COLUMNS: tl.constexpr, IS_FULL: tl.constexpr,
):  # fmt: skip
    offs_n = start + tl.arange(0, COLUMNS)
    k = load_tile(K, offs_n, ks, keys, HEAD, WIDTH, IS_FULL)
    v = load_tile(V, offs_n, vs, keys, VALUE, V_WIDTH, IS_FULL)
    p = tl.exp2(dot(q, tl.trans(k), WIDE) * scale - lse[:, None])
    if not IS_FULL:
        last_key = tl.minimum(offs_m + shift, keys - 1)
        p = tl.where((first_key[:, None] <= offs_n[None, :]) & (offs_n[None, :] <= last_key[:, None]), p, 0.0)
    dp = dot(do, tl.trans(v), WIDE)
    if THRESHOLD > 0:
        pos_q, pos_k = (offs_m + shift + k_first)[:, None], (offs_n + k_first)[None, :]
        dp = tl.where(dropout_keep(IDS, key, b, head, pos_q, pos_k, THRESHOLD), dp * RAISE, 0.0)
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
    offs_m = block * ROWS + tl.arange(0, ROWS)
    K += b.to(tl.int64) * kb + (h // group) * kh
    V += b.to(tl.int64) * vb + (h // group) * vh
    head = b.to(tl.int64) * heads + h
    head_offs = head * VALUE  # o and do are contiguous [S, B, H, V]
    q = load_tile(Q + b.to(tl.int64) * qb + h * qh, offs_m, qs, length, HEAD, WIDTH, False)
    do = load_tile(DO + head_offs, offs_m, batch * heads * VALUE, length, VALUE, V_WIDTH, False)
    o = load_tile(OUT + head_offs, offs_m, batch * heads * VALUE, length, VALUE, V_WIDTH, False)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    row_offs = tl.program_id(1).to(tl.int64) * length + offs_m
    tl.store(DELTA + row_offs, delta, mask=offs_m < length)  # read by _backward_kv
    lse = tl.load(LSE + row_offs, mask=offs_m < length, other=float("inf"))
    first_key = first_visible_key(FIRST, offs_m, b, length, keys, shift, k_first, window, DOCUMENTS)
    dq = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
    key_end = (block + 1) * ROWS + shift
    lo, full_lo, full_hi, hi = key_block_bounds(
        first_key, offs_m, length, keys, tl.min(first_key, 0), key_end, ROWS, COLUMNS
    )
    for start in range(full_lo, full_hi, COLUMNS):
        dq = _backward_q_block(
            dq, q, do, K, V, IDS, lse, delta, start, offs_m, first_key, keys, shift, k_first, scale, key, b,
            head_offset + h, ks, vs, WIDE, HEAD, WIDTH, VALUE, V_WIDTH, THRESHOLD, RAISE, COLUMNS, True,
        )  # fmt: skip
    for i in range(0, num_masked_blocks(lo, full_lo, full_hi, hi, COLUMNS)):
        start = nth_masked_block(i, lo, full_lo, full_hi, COLUMNS)
        dq = _backward_q_block(
            dq, q, do, K, V, IDS, lse, delta, start, offs_m, first_key, keys, shift, k_first, scale, key, b,
            head_offset + h, ks, vs, WIDE, HEAD, WIDTH, VALUE, V_WIDTH, THRESHOLD, RAISE, COLUMNS, False,
        )  # fmt: skip
    dq = dq * (scale * 0.6931471805599453)  # ln 2
    channels = tl.arange(0, WIDTH)
    mask = (offs_m < length)[:, None] & (channels < HEAD)[None, :]
    offs = head * HEAD + offs_m.to(tl.int64)[:, None] * (batch * heads * HEAD) + channels[None, :]
    tl.store(DQ + offs, dq.to(DQ.dtype.element_ty), mask=mask)


@kernel
def _backward_kv_block(
    dk, dv, k, v, Q, DO, LSE, DELTA, FIRST, IDS, start, offs_n, length, keys, shift, k_first, window,
    scale, key, b, head, qs, dos,
    DOCUMENTS: tl.constexpr, WIDE: tl.constexpr, HEAD: tl.constexpr, WIDTH: tl.constexpr,
    VALUE: tl.constexpr, V_WIDTH: tl.constexpr, THRESHOLD: tl.constexpr, RAISE: tl.constexpr,
    ROWS: tl.constexpr, IS_FULL: tl.constexpr,
):  # fmt: skip
    """Add one block of queries to dk and dv.

    Scores have keys along rows and queries along columns, so that the products that follow need no transposition.
    """
    offs_m = start + tl.arange(0, ROWS)
    q = load_tile(Q, offs_m, qs, length, HEAD, WIDTH, IS_FULL)
    do = load_tile(DO, offs_m, dos, length, VALUE, V_WIDTH, IS_FULL)
    if IS_FULL:
        lse, delta = tl.load(LSE + offs_m), tl.load(DELTA + offs_m)
    else:
        lse = tl.load(LSE + offs_m, mask=offs_m < length, other=float("inf"))
        delta = tl.load(DELTA + offs_m, mask=offs_m < length, other=0.0)
    p = tl.exp2(dot(k, tl.trans(q), WIDE) * scale - lse[None, :])
    if not IS_FULL:
        first_key = first_visible_key(FIRST, offs_m, b, length, keys, shift, k_first, window, DOCUMENTS)
        p = tl.where((first_key[None, :] <= offs_n[:, None]) & (offs_n[:, None] <= (offs_m + shift)[None, :]), p, 0.0)
    dp = dot(v, tl.trans(do), WIDE)
    p_dropped = p
    if THRESHOLD > 0:
        pos_q, pos_k = (offs_m + shift + k_first)[None, :], (offs_n + k_first)[:, None]
        keep = dropout_keep(IDS, key, b, head, pos_q, pos_k, THRESHOLD)
        p_dropped, dp = tl.where(keep, p * RAISE, 0.0), tl.where(keep, dp * RAISE, 0.0)
    dv += dot(p_dropped.to(do.dtype), do, WIDE)
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
    offs_n = first + tl.arange(0, COLUMNS)
    k = load_tile(K + b.to(tl.int64) * kb + g * kh, offs_n, ks, keys, HEAD, WIDTH, False)
    v = load_tile(V + b.to(tl.int64) * vb + g * vh, offs_n, vs, keys, VALUE, V_WIDTH, False)
    last = tl.minimum(first + COLUMNS, keys) - 1
    hi = tl.minimum(last + window - shift, length)  # after the last query that sees any key of this block
    full_hi = tl.minimum(first + window - shift, length)  # after the last query that sees all of its keys
    if DOCUMENTS:
        hi = tl.minimum(hi, tl.load(END + b * keys + last).to(tl.int32))
        full_hi = tl.minimum(full_hi, tl.load(END + b * keys + first).to(tl.int32))
    lo = tl.maximum(first - shift, 0) // ROWS * ROWS
    full_hi = tl.maximum(tl.maximum(full_hi, 0) // ROWS * ROWS, lo)
    full_lo = tl.minimum((tl.maximum(last - shift, 0) + ROWS - 1) // ROWS * ROWS, full_hi)
    dk = tl.zeros((COLUMNS, WIDTH), dtype=tl.float32)
    dv = tl.zeros((COLUMNS, V_WIDTH), dtype=tl.float32)
    for i in range(0, group):
        h = g * group + i
        do_off, lse_off = (b.to(tl.int64) * heads + h) * VALUE, (b * heads + h).to(tl.int64) * length
        for start in range(full_lo, full_hi, ROWS):
            dk, dv = _backward_kv_block(
                dk, dv, k, v, Q + b.to(tl.int64) * qb + h * qh, DO + do_off, LSE + lse_off, DELTA + lse_off, FIRST, IDS,
                start, offs_n, length, keys, shift, k_first, window, scale, key, b, head_offset + h,
                qs, batch * heads * VALUE, DOCUMENTS, WIDE, HEAD, WIDTH, VALUE, V_WIDTH, THRESHOLD, RAISE, ROWS, True,
            )  # fmt: skip
        for n in range(0, num_masked_blocks(lo, full_lo, full_hi, hi, ROWS)):
            start = nth_masked_block(n, lo, full_lo, full_hi, ROWS)
            dk, dv = _backward_kv_block(
                dk, dv, k, v, Q + b.to(tl.int64) * qb + h * qh, DO + do_off, LSE + lse_off, DELTA + lse_off, FIRST, IDS,
                start, offs_n, length, keys, shift, k_first, window, scale, key, b, head_offset + h,
                qs, batch * heads * VALUE, DOCUMENTS, WIDE, HEAD, WIDTH, VALUE, V_WIDTH, THRESHOLD, RAISE, ROWS, False,
            )  # fmt: skip
    dk = dk * (scale * 0.6931471805599453)  # ln 2
    channels, v_channels = tl.arange(0, WIDTH), tl.arange(0, V_WIDTH)
    row_offs_n, mask = ((offs_n.to(tl.int64) * batch + b) * groups + g)[:, None], (offs_n < keys)[:, None]
    k_offs, v_offs = row_offs_n * HEAD + channels[None, :], row_offs_n * VALUE + v_channels[None, :]
    tl.store(DK + k_offs, dk.to(DK.dtype.element_ty), mask=mask & (channels < HEAD)[None, :])
    tl.store(DV + v_offs, dv.to(DV.dtype.element_ty), mask=mask & (v_channels < VALUE)[None, :])


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
        S, B, H, K = q.shape
        T, _, G, V = v.shape
        k_first = params.k_start
        o = q.new_empty(S, B, H, V)
        lse = q.new_empty(B, H, S, dtype=torch.float32)
        # A kernel ignores the pointers of absent inputs; any tensor may take their place.
        first = lse if first_BS is None else first_BS.contiguous()
        dropout_p, key, ids, head_offset = params.drop or AttentionDropout(0.0, 0, lse)
        ids = ids.contiguous()
        strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3])
        shift = params.q_start - k_first
        # without a window, one that reaches back to key 0
        window = max(1, S + shift) if params.window is None else params.window
        ctx.launch_args = (
            S,
            T,
            shift,
            k_first,
            B,
            H,
            H // G,
            params.scale * LOG2_E,
            window,
            as_int32(key),
            head_offset,
            *strides,
        )
        ctx.constexprs = (
            first_BS is not None,
            upcast_for_interpreter(q),
            K,
            padded_head_dim(K),
            V,
            padded_head_dim(V),
            int(dropout_p * 2**32),
            1.0 / (1.0 - dropout_p),
        )
        rows, columns, warps, stages = FORWARD_TILES[tile_key(q, v)]
        has_sink = sink_H is not None
        sink = lse if sink_H is None else sink_H.contiguous()
        _forward[(ceil_div(S, rows), B * H)](
            *(q, k, v, o, lse, first, ids, sink, *ctx.launch_args, *ctx.constexprs, has_sink, rows, columns),
            num_warps=warps,
            num_stages=stages,
        )
        ctx.save_for_backward(q, k, v, o, lse, first, ids, sink_H)
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, o, lse, first, ids, sink_H = ctx.saved_tensors
        S, T, _, k_first, B, H = ctx.launch_args[:6]
        do = do.contiguous()
        dq, dk, dv, delta = (x.new_empty(x.shape) for x in (q, k, v, lse))
        rows, columns, warps, stages = BACKWARD_Q_TILES[tile_key(q, v)]
        _backward_q[(ceil_div(S, rows), B * H)](
            *(q, k, v, o, do, lse, delta, dq, first, ids, *ctx.launch_args, *ctx.constexprs, rows, columns),
            num_warps=warps,
            num_stages=stages,
        )
        end = first
        if ctx.constexprs[0]:  # has documents; the number of queries whose document starts at or before key j
            keys = torch.arange(k_first, k_first + T, dtype=first.dtype, device=first.device).expand(B, T).contiguous()
            end = torch.searchsorted(first, keys, right=True)
        rows, columns, warps, stages = BACKWARD_KV_TILES[tile_key(q, v)]
        _backward_kv[(ceil_div(T, columns), B * k.shape[2])](
            *(q, k, v, do, lse, delta, dk, dv, first, end, ids, *ctx.launch_args, *ctx.constexprs, rows, columns),
            num_warps=warps,
            num_stages=stages,
        )
        dsink_H = None
        if sink_H is not None:
            p_sink = torch.exp2(sink_H.float().unsqueeze(-1) * LOG2_E - lse)
            dsink_H = -(p_sink * delta).sum((0, 2)).to(sink_H.dtype)
        return dq, dk, dv, dsink_H, None, None


def flash_attention(
    q_SBHK: Tensor, k_TBGK: Tensor, v_TBGK: Tensor, *, sink_H: Tensor | None = None, first_BS: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:  # fmt: skip
    """Return o_SBHK, causal attention of the queries to the keys and values.

    Args:
        q_SBHK: the queries.
        k_TBGK: the keys. Heads have up to 256 channels in bf16 and fp16, 128 in fp32.
        v_TBGK: the values, with the same limits; their width may differ from the keys'.
        sink_H: a logit without a value per head (kernels/attention.py); None: no sink.
        first_BS: int64, the first position of the document of each query; None: one document per sample.
        **kwargs: the fields of AttentionParams.

    Raises:
        ValueError: if keys and values differ in a dimension other than the last.
    """
    if v_TBGK.shape[:-1] != k_TBGK.shape[:-1]:
        shapes = f"v has shape {(*v_TBGK.shape,)}, k has shape {(*k_TBGK.shape,)}"
        raise ValueError(f"{shapes}; they must agree in all dims but the last")
    params = AttentionParams(**kwargs)
    return _Attention.apply(q_SBHK, k_TBGK, v_TBGK, sink_H, first_BS, params)  # type: ignore[return-value]
