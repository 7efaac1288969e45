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

Shared keys (q_pe_SBHR, k_pe_TBR) add q_pe k_pe^T to the product q k^T of every head: the rotary part of latent
attention, which neither widens the tiles of q and k to the next power of two nor is copied to all heads. A program
writes dk_pe of its head in fp32, and the sum over heads follows in a fixed order. PE_DIM is R, or 0: then the compiled
code has nothing of them.

Soft-capping (softcap.py) replaces s by cap t with t = tanh(s / cap), and ds by ds (1 - t^2). SOFTCAP is the cap in base
2, or 0: then the compiled code has nothing of it.

A sink only changes lse, whose sum starts with it: dsink = -sum(exp(sink - lse) delta).

Dropout multiplies by D = keep / (1 - p); its mask is redrawn in each kernel and never stored: o = (p D) v,
dv = (p D)^T do, dp = D (do v^T). The other equations do not change.

dq and (dk, dv) have separate kernels, which compute the scores twice: 7 matmuls instead of 5. A single kernel would
need atomic additions to dq, whose rounding would differ in every run. The program of a block of keys loops over all
query heads of its group. Saved: q, k, v, o and the log-sum-exp. FLOPs of all scores: forward 2 S^2 B H (K + R + V),
backward 2 S^2 B H (4 (K + R) + 3 V); half of them are masked.
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
    cap_scores,
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
# Max channels of shared keys, and of heads beside them: wider ones would spill registers in every tile. A matmul on
# tensor cores has a depth of at least MIN_BLOCK_PE.
MAX_PE_DIM = 64
MAX_HEAD_DIM_WITH_PE = 128
MIN_BLOCK_PE = 16
MAX_GRID_Y = 65535  # programs along the second dimension of a CUDA grid


def is_supported(q_SBHK: Tensor, v_TBGK: Tensor, pe_dim: int = 0) -> bool:
    """Return whether the kernels support this dtype, widths of heads and of shared keys, and number of heads."""
    _, batch, heads, _ = q_SBHK.shape
    head_dim = max_head_dim(q_SBHK, v_TBGK)
    if pe_dim and (pe_dim > MAX_PE_DIM or head_dim > MAX_HEAD_DIM_WITH_PE):
        return False
    return head_dim <= MAX_HEAD_DIM.get(q_SBHK.dtype, 0) and batch * heads <= MAX_GRID_Y


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
    R = args[3].shape[-1] if args[3].dim() == 4 else 0  # lse [B, H, S] takes the place of an absent q_pe_SBHR

    def num_pairs(positions: int) -> float:
        visible = min(positions, window)
        return visible * (positions - visible / 2)

    return 2.0 * B * H * (K + R + V) * (num_pairs(max(0, S + shift)) - num_pairs(max(0, shift)))


def tile_key(q: Tensor, v: Tensor, pe_dim: int = 0) -> str:
    """Return the key of the tables of tiles.

    It is the unit that multiplies, followed by " wide" for wide heads and by " pe" if there are shared keys.
    """
    limit = 64 if q.dtype == torch.float32 else 128
    key = matmul_unit(q)
    if max_head_dim(q, v) > limit:
        key += " wide"
    return f"{key} pe" if pe_dim else key


def padded_head_dim(channels: int) -> int:
    """Return the number of channels of a tile for heads of `channels`."""
    return max(64, power_of_two(channels))


@kernel
def _forward_block(
    acc, l_i, m_i, q, q_pe, k_ptr, v_ptr, k_pe_ptr, sample_ids_ptr, start_n, offs_m, first_key, seqlen_k, shift,
    k_start, scale, dropout_key, off_b, head, stride_kn, stride_vn, stride_kpn,
    UPCAST: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, V_HEAD_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr, PE_DIM: tl.constexpr, BLOCK_PE: tl.constexpr, THRESHOLD: tl.constexpr,
    SOFTCAP: tl.constexpr, BLOCK_N: tl.constexpr, IS_FULL: tl.constexpr,
):  # fmt: skip
    offs_n = start_n + tl.arange(0, BLOCK_N)
    k = load_tile(k_ptr, offs_n, stride_kn, seqlen_k, HEAD_DIM, BLOCK_D, IS_FULL)
    s = dot(q, tl.trans(k), UPCAST)
    if PE_DIM > 0:
        k_pe = load_tile(k_pe_ptr, offs_n, stride_kpn, seqlen_k, PE_DIM, BLOCK_PE, IS_FULL)
        s += dot(q_pe, tl.trans(k_pe), UPCAST)
    if SOFTCAP > 0.0:
        s = cap_scores(s, scale, SOFTCAP, q.dtype == tl.float32)
        scale = SOFTCAP
    if IS_FULL:
        m_new = tl.maximum(m_i, tl.max(s, 1) * scale)
        base = m_new
    else:
        last_key = tl.minimum(offs_m + shift, seqlen_k - 1)
        visible = (first_key[:, None] <= offs_n[None, :]) & (offs_n[None, :] <= last_key[:, None])
        s = tl.where(visible, s, float("-inf"))
        m_new = tl.maximum(m_i, tl.max(s, 1) * scale)
        base = tl.where(m_new == float("-inf"), 0.0, m_new)  # no visible key so far
    p = tl.exp2(s * scale - base[:, None])
    alpha = tl.exp2(m_i - base)
    l_i = l_i * alpha + tl.sum(p, 1)
    if THRESHOLD > 0:
        pos_q, pos_k = (offs_m + shift + k_start)[:, None], (offs_n + k_start)[None, :]
        p = tl.where(dropout_keep(sample_ids_ptr, dropout_key, off_b, head, pos_q, pos_k, THRESHOLD), p, 0.0)
    v = load_tile(v_ptr, offs_n, stride_vn, seqlen_k, V_HEAD_DIM, BLOCK_DV, IS_FULL)
    return acc * alpha[:, None] + dot(p.to(v.dtype), v, UPCAST), l_i, m_new


@kernel(flops=flops, do_not_specialize=["dropout_key", "head_offset", "shift", "k_start"])
def _forward(
    q_ptr, k_ptr, v_ptr, q_pe_ptr, k_pe_ptr, o_ptr, lse_ptr, doc_start_ptr, sample_ids_ptr, sink_ptr,
    seqlen_q, seqlen_k, shift, k_start, batch_size, num_heads, group_size, scale, window, dropout_key, head_offset,
    stride_qm, stride_qb, stride_qh, stride_kn, stride_kb, stride_kh, stride_vn, stride_vb, stride_vh,
    stride_qpm, stride_qpb, stride_qph, stride_kpn, stride_kpb,
    HAS_DOCUMENTS: tl.constexpr, UPCAST: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    V_HEAD_DIM: tl.constexpr, BLOCK_DV: tl.constexpr, PE_DIM: tl.constexpr, BLOCK_PE: tl.constexpr,
    THRESHOLD: tl.constexpr, DROPOUT_SCALE: tl.constexpr, SOFTCAP: tl.constexpr, HAS_SINK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    pid_m = tl.num_programs(0) - 1 - tl.program_id(0)  # the longest rows first, to balance the last wave
    off_b, off_h = tl.program_id(1) // num_heads, tl.program_id(1) % num_heads
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    k_ptr += off_b.to(tl.int64) * stride_kb + (off_h // group_size) * stride_kh
    v_ptr += off_b.to(tl.int64) * stride_vb + (off_h // group_size) * stride_vh
    q_head_ptr = q_ptr + off_b.to(tl.int64) * stride_qb + off_h * stride_qh
    q = load_tile(q_head_ptr, offs_m, stride_qm, seqlen_q, HEAD_DIM, BLOCK_D, False)
    q_pe = q
    if PE_DIM > 0:
        k_pe_ptr += off_b.to(tl.int64) * stride_kpb
        q_pe_head_ptr = q_pe_ptr + off_b.to(tl.int64) * stride_qpb + off_h * stride_qph
        q_pe = load_tile(q_pe_head_ptr, offs_m, stride_qpm, seqlen_q, PE_DIM, BLOCK_PE, False)
    first_key = first_visible_key(
        doc_start_ptr, offs_m, off_b, seqlen_q, seqlen_k, shift, k_start, window, HAS_DOCUMENTS
    )
    m_i = tl.full((BLOCK_M,), float("-inf"), dtype=tl.float32)
    l_i = tl.zeros((BLOCK_M,), dtype=tl.float32)
    if HAS_SINK:
        m_i = tl.zeros((BLOCK_M,), dtype=tl.float32) + tl.load(sink_ptr + off_h).to(tl.float32) * 1.4426950408889634
        l_i += 1.0
    acc = tl.zeros((BLOCK_M, BLOCK_DV), dtype=tl.float32)
    key_end = (pid_m + 1) * BLOCK_M + shift
    lo, full_lo, full_hi, hi = key_block_bounds(
        first_key, offs_m, seqlen_q, seqlen_k, tl.min(first_key, 0), key_end, BLOCK_M, BLOCK_N
    )
    for start_n in range(full_lo, full_hi, BLOCK_N):
        acc, l_i, m_i = _forward_block(
            acc, l_i, m_i, q, q_pe, k_ptr, v_ptr, k_pe_ptr, sample_ids_ptr, start_n, offs_m, first_key, seqlen_k, shift,
            k_start, scale, dropout_key, off_b, head_offset + off_h, stride_kn, stride_vn, stride_kpn, UPCAST, HEAD_DIM,
            BLOCK_D, V_HEAD_DIM, BLOCK_DV, PE_DIM, BLOCK_PE, THRESHOLD, SOFTCAP, BLOCK_N, True,
        )  # fmt: skip
    for i in range(0, num_masked_blocks(lo, full_lo, full_hi, hi, BLOCK_N)):
        start_n = nth_masked_block(i, lo, full_lo, full_hi, BLOCK_N)
        acc, l_i, m_i = _forward_block(
            acc, l_i, m_i, q, q_pe, k_ptr, v_ptr, k_pe_ptr, sample_ids_ptr, start_n, offs_m, first_key, seqlen_k, shift,
            k_start, scale, dropout_key, off_b, head_offset + off_h, stride_kn, stride_vn, stride_kpn, UPCAST, HEAD_DIM,
            BLOCK_D, V_HEAD_DIM, BLOCK_DV, PE_DIM, BLOCK_PE, THRESHOLD, SOFTCAP, BLOCK_N, False,
        )  # fmt: skip
    l_i = tl.where(l_i == 0.0, 1.0, l_i)
    row_offs = (offs_m.to(tl.int64) * batch_size + off_b) * num_heads + off_h
    offs_dv = tl.arange(0, BLOCK_DV)
    mask = (offs_m < seqlen_q)[:, None] & (offs_dv < V_HEAD_DIM)[None, :]
    acc = (acc * (DROPOUT_SCALE / l_i)[:, None]).to(o_ptr.dtype.element_ty)
    tl.store(o_ptr + row_offs[:, None] * V_HEAD_DIM + offs_dv[None, :], acc, mask=mask)
    tl.store(lse_ptr + tl.program_id(1).to(tl.int64) * seqlen_q + offs_m, m_i + tl.log2(l_i), mask=offs_m < seqlen_q)


@kernel
def _backward_q_block(
    dq, dq_pe, q, q_pe, do, k_ptr, v_ptr, k_pe_ptr, sample_ids_ptr, lse, delta, start_n, offs_m, first_key, seqlen_k,
    shift, k_start, scale, dropout_key, off_b, head, stride_kn, stride_vn, stride_kpn,
    UPCAST: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr, V_HEAD_DIM: tl.constexpr,
    BLOCK_DV: tl.constexpr, PE_DIM: tl.constexpr, BLOCK_PE: tl.constexpr, THRESHOLD: tl.constexpr,
    DROPOUT_SCALE: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK_N: tl.constexpr, IS_FULL: tl.constexpr,
):  # fmt: skip
    offs_n = start_n + tl.arange(0, BLOCK_N)
    k = load_tile(k_ptr, offs_n, stride_kn, seqlen_k, HEAD_DIM, BLOCK_D, IS_FULL)
    v = load_tile(v_ptr, offs_n, stride_vn, seqlen_k, V_HEAD_DIM, BLOCK_DV, IS_FULL)
    s = dot(q, tl.trans(k), UPCAST)
    k_pe = k
    if PE_DIM > 0:
        k_pe = load_tile(k_pe_ptr, offs_n, stride_kpn, seqlen_k, PE_DIM, BLOCK_PE, IS_FULL)
        s += dot(q_pe, tl.trans(k_pe), UPCAST)
    if SOFTCAP > 0.0:
        s = cap_scores(s, scale, SOFTCAP, q.dtype == tl.float32)
        scale = SOFTCAP
    p = tl.exp2(s * scale - lse[:, None])
    if not IS_FULL:
        last_key = tl.minimum(offs_m + shift, seqlen_k - 1)
        p = tl.where((first_key[:, None] <= offs_n[None, :]) & (offs_n[None, :] <= last_key[:, None]), p, 0.0)
    if SOFTCAP > 0.0:
        p = p * (1.0 - s * s)  # p is used only in ds
    dp = dot(do, tl.trans(v), UPCAST)
    if THRESHOLD > 0:
        pos_q, pos_k = (offs_m + shift + k_start)[:, None], (offs_n + k_start)[None, :]
        keep = dropout_keep(sample_ids_ptr, dropout_key, off_b, head, pos_q, pos_k, THRESHOLD)
        dp = tl.where(keep, dp * DROPOUT_SCALE, 0.0)
    ds = (p * (dp - delta[:, None])).to(k.dtype)
    if PE_DIM > 0:
        dq_pe += dot(ds, k_pe, UPCAST)
    return dq + dot(ds, k, UPCAST), dq_pe


@kernel(flops=flops, do_not_specialize=["dropout_key", "head_offset", "shift", "k_start"])
def _backward_q(
    q_ptr, k_ptr, v_ptr, q_pe_ptr, k_pe_ptr, o_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr, dq_pe_ptr, doc_start_ptr,
    sample_ids_ptr,
    seqlen_q, seqlen_k, shift, k_start, batch_size, num_heads, group_size, scale, window, dropout_key, head_offset,
    stride_qm, stride_qb, stride_qh, stride_kn, stride_kb, stride_kh, stride_vn, stride_vb, stride_vh,
    stride_qpm, stride_qpb, stride_qph, stride_kpn, stride_kpb,
    HAS_DOCUMENTS: tl.constexpr, UPCAST: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    V_HEAD_DIM: tl.constexpr, BLOCK_DV: tl.constexpr, PE_DIM: tl.constexpr, BLOCK_PE: tl.constexpr,
    THRESHOLD: tl.constexpr, DROPOUT_SCALE: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    pid_m = tl.num_programs(0) - 1 - tl.program_id(0)
    off_b, off_h = tl.program_id(1) // num_heads, tl.program_id(1) % num_heads
    offs_m = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    k_ptr += off_b.to(tl.int64) * stride_kb + (off_h // group_size) * stride_kh
    v_ptr += off_b.to(tl.int64) * stride_vb + (off_h // group_size) * stride_vh
    head = off_b.to(tl.int64) * num_heads + off_h
    head_offs = head * V_HEAD_DIM  # o and do are contiguous [S, B, H, V]
    q_head_ptr = q_ptr + off_b.to(tl.int64) * stride_qb + off_h * stride_qh
    q = load_tile(q_head_ptr, offs_m, stride_qm, seqlen_q, HEAD_DIM, BLOCK_D, False)
    q_pe = q
    if PE_DIM > 0:
        k_pe_ptr += off_b.to(tl.int64) * stride_kpb
        q_pe_head_ptr = q_pe_ptr + off_b.to(tl.int64) * stride_qpb + off_h * stride_qph
        q_pe = load_tile(q_pe_head_ptr, offs_m, stride_qpm, seqlen_q, PE_DIM, BLOCK_PE, False)
    stride_om = batch_size * num_heads * V_HEAD_DIM
    do = load_tile(do_ptr + head_offs, offs_m, stride_om, seqlen_q, V_HEAD_DIM, BLOCK_DV, False)
    o = load_tile(o_ptr + head_offs, offs_m, stride_om, seqlen_q, V_HEAD_DIM, BLOCK_DV, False)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    row_offs = tl.program_id(1).to(tl.int64) * seqlen_q + offs_m
    tl.store(delta_ptr + row_offs, delta, mask=offs_m < seqlen_q)  # read by _backward_kv
    lse = tl.load(lse_ptr + row_offs, mask=offs_m < seqlen_q, other=float("inf"))
    first_key = first_visible_key(
        doc_start_ptr, offs_m, off_b, seqlen_q, seqlen_k, shift, k_start, window, HAS_DOCUMENTS
    )
    dq = tl.zeros((BLOCK_M, BLOCK_D), dtype=tl.float32)
    dq_pe = tl.zeros((BLOCK_M, BLOCK_PE), dtype=tl.float32)
    key_end = (pid_m + 1) * BLOCK_M + shift
    lo, full_lo, full_hi, hi = key_block_bounds(
        first_key, offs_m, seqlen_q, seqlen_k, tl.min(first_key, 0), key_end, BLOCK_M, BLOCK_N
    )
    for start_n in range(full_lo, full_hi, BLOCK_N):
        dq, dq_pe = _backward_q_block(
            dq, dq_pe, q, q_pe, do, k_ptr, v_ptr, k_pe_ptr, sample_ids_ptr, lse, delta, start_n, offs_m, first_key,
            seqlen_k, shift, k_start, scale, dropout_key, off_b, head_offset + off_h, stride_kn, stride_vn, stride_kpn,
            UPCAST, HEAD_DIM, BLOCK_D, V_HEAD_DIM, BLOCK_DV, PE_DIM, BLOCK_PE, THRESHOLD, DROPOUT_SCALE, SOFTCAP,
            BLOCK_N, True,
        )  # fmt: skip
    for i in range(0, num_masked_blocks(lo, full_lo, full_hi, hi, BLOCK_N)):
        start_n = nth_masked_block(i, lo, full_lo, full_hi, BLOCK_N)
        dq, dq_pe = _backward_q_block(
            dq, dq_pe, q, q_pe, do, k_ptr, v_ptr, k_pe_ptr, sample_ids_ptr, lse, delta, start_n, offs_m, first_key,
            seqlen_k, shift, k_start, scale, dropout_key, off_b, head_offset + off_h, stride_kn, stride_vn, stride_kpn,
            UPCAST, HEAD_DIM, BLOCK_D, V_HEAD_DIM, BLOCK_DV, PE_DIM, BLOCK_PE, THRESHOLD, DROPOUT_SCALE, SOFTCAP,
            BLOCK_N, False,
        )  # fmt: skip
    dq = dq * (scale * 0.6931471805599453)  # ln 2
    offs_d = tl.arange(0, BLOCK_D)
    mask = (offs_m < seqlen_q)[:, None] & (offs_d < HEAD_DIM)[None, :]
    offs = head * HEAD_DIM + offs_m.to(tl.int64)[:, None] * (batch_size * num_heads * HEAD_DIM) + offs_d[None, :]
    tl.store(dq_ptr + offs, dq.to(dq_ptr.dtype.element_ty), mask=mask)
    if PE_DIM > 0:
        dq_pe = dq_pe * (scale * 0.6931471805599453)
        offs_pe = tl.arange(0, BLOCK_PE)
        mask = (offs_m < seqlen_q)[:, None] & (offs_pe < PE_DIM)[None, :]
        offs = head * PE_DIM + offs_m.to(tl.int64)[:, None] * (batch_size * num_heads * PE_DIM) + offs_pe[None, :]
        tl.store(dq_pe_ptr + offs, dq_pe.to(dq_pe_ptr.dtype.element_ty), mask=mask)


@kernel
def _backward_kv_block(
    dk, dv, dk_pe, k, v, k_pe, q_ptr, q_pe_ptr, do_ptr, lse_ptr, delta_ptr, doc_start_ptr, sample_ids_ptr, start_m,
    offs_n, seqlen_q, seqlen_k, shift, k_start, window, scale, dropout_key, off_b, head, stride_qm, stride_qpm,
    stride_dom,
    HAS_DOCUMENTS: tl.constexpr, UPCAST: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    V_HEAD_DIM: tl.constexpr, BLOCK_DV: tl.constexpr, PE_DIM: tl.constexpr, BLOCK_PE: tl.constexpr,
    THRESHOLD: tl.constexpr, DROPOUT_SCALE: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK_M: tl.constexpr,
    IS_FULL: tl.constexpr,
):  # fmt: skip
    """Add one block of queries to dk, dv and dk_pe.

    Scores have keys along rows and queries along columns, so that the products that follow need no transposition.
    """
    offs_m = start_m + tl.arange(0, BLOCK_M)
    q = load_tile(q_ptr, offs_m, stride_qm, seqlen_q, HEAD_DIM, BLOCK_D, IS_FULL)
    do = load_tile(do_ptr, offs_m, stride_dom, seqlen_q, V_HEAD_DIM, BLOCK_DV, IS_FULL)
    if IS_FULL:
        lse, delta = tl.load(lse_ptr + offs_m), tl.load(delta_ptr + offs_m)
    else:
        lse = tl.load(lse_ptr + offs_m, mask=offs_m < seqlen_q, other=float("inf"))
        delta = tl.load(delta_ptr + offs_m, mask=offs_m < seqlen_q, other=0.0)
    s = dot(k, tl.trans(q), UPCAST)
    q_pe = q
    if PE_DIM > 0:
        q_pe = load_tile(q_pe_ptr, offs_m, stride_qpm, seqlen_q, PE_DIM, BLOCK_PE, IS_FULL)
        s += dot(k_pe, tl.trans(q_pe), UPCAST)
    if SOFTCAP > 0.0:
        s = cap_scores(s, scale, SOFTCAP, q.dtype == tl.float32)
        scale = SOFTCAP
    p = tl.exp2(s * scale - lse[None, :])
    if not IS_FULL:
        first_key = first_visible_key(
            doc_start_ptr, offs_m, off_b, seqlen_q, seqlen_k, shift, k_start, window, HAS_DOCUMENTS
        )
        p = tl.where((first_key[None, :] <= offs_n[:, None]) & (offs_n[:, None] <= (offs_m + shift)[None, :]), p, 0.0)
    p_slope = p
    if SOFTCAP > 0.0:
        p_slope = p * (1.0 - s * s)
    dp = dot(v, tl.trans(do), UPCAST)
    p_dropped = p
    if THRESHOLD > 0:
        pos_q, pos_k = (offs_m + shift + k_start)[None, :], (offs_n + k_start)[:, None]
        keep = dropout_keep(sample_ids_ptr, dropout_key, off_b, head, pos_q, pos_k, THRESHOLD)
        p_dropped, dp = tl.where(keep, p * DROPOUT_SCALE, 0.0), tl.where(keep, dp * DROPOUT_SCALE, 0.0)
    dv += dot(p_dropped.to(do.dtype), do, UPCAST)
    ds = (p_slope * (dp - delta[None, :])).to(q.dtype)
    dk += dot(ds, q, UPCAST)
    if PE_DIM > 0:
        dk_pe += dot(ds, q_pe, UPCAST)
    return dk, dv, dk_pe


@kernel(flops=flops, do_not_specialize=["dropout_key", "head_offset", "shift", "k_start"])
def _backward_kv(
    q_ptr, k_ptr, v_ptr, q_pe_ptr, k_pe_ptr, do_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, dk_pe_ptr, doc_start_ptr,
    doc_end_ptr, sample_ids_ptr,
    seqlen_q, seqlen_k, shift, k_start, batch_size, num_heads, group_size, scale, window, dropout_key, head_offset,
    stride_qm, stride_qb, stride_qh, stride_kn, stride_kb, stride_kh, stride_vn, stride_vb, stride_vh,
    stride_qpm, stride_qpb, stride_qph, stride_kpn, stride_kpb,
    HAS_DOCUMENTS: tl.constexpr, UPCAST: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr,
    V_HEAD_DIM: tl.constexpr, BLOCK_DV: tl.constexpr, PE_DIM: tl.constexpr, BLOCK_PE: tl.constexpr,
    THRESHOLD: tl.constexpr, DROPOUT_SCALE: tl.constexpr, SOFTCAP: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    num_kv_heads = num_heads // group_size
    off_b, off_g = tl.program_id(1) // num_kv_heads, tl.program_id(1) % num_kv_heads
    first_n = tl.program_id(0) * BLOCK_N
    offs_n = first_n + tl.arange(0, BLOCK_N)
    k_head_ptr = k_ptr + off_b.to(tl.int64) * stride_kb + off_g * stride_kh
    k = load_tile(k_head_ptr, offs_n, stride_kn, seqlen_k, HEAD_DIM, BLOCK_D, False)
    v_head_ptr = v_ptr + off_b.to(tl.int64) * stride_vb + off_g * stride_vh
    v = load_tile(v_head_ptr, offs_n, stride_vn, seqlen_k, V_HEAD_DIM, BLOCK_DV, False)
    k_pe = k
    if PE_DIM > 0:
        k_pe_sample_ptr = k_pe_ptr + off_b.to(tl.int64) * stride_kpb
        k_pe = load_tile(k_pe_sample_ptr, offs_n, stride_kpn, seqlen_k, PE_DIM, BLOCK_PE, False)
    last_n = tl.minimum(first_n + BLOCK_N, seqlen_k) - 1
    hi = tl.minimum(last_n + window - shift, seqlen_q)  # after the last query that sees any key of this block
    full_hi = tl.minimum(first_n + window - shift, seqlen_q)  # after the last query that sees all of its keys
    if HAS_DOCUMENTS:
        hi = tl.minimum(hi, tl.load(doc_end_ptr + off_b * seqlen_k + last_n).to(tl.int32))
        full_hi = tl.minimum(full_hi, tl.load(doc_end_ptr + off_b * seqlen_k + first_n).to(tl.int32))
    lo = tl.maximum(first_n - shift, 0) // BLOCK_M * BLOCK_M
    full_hi = tl.maximum(tl.maximum(full_hi, 0) // BLOCK_M * BLOCK_M, lo)
    full_lo = tl.minimum((tl.maximum(last_n - shift, 0) + BLOCK_M - 1) // BLOCK_M * BLOCK_M, full_hi)
    dk = tl.zeros((BLOCK_N, BLOCK_D), dtype=tl.float32)
    dv = tl.zeros((BLOCK_N, BLOCK_DV), dtype=tl.float32)
    dk_pe = tl.zeros((BLOCK_N, BLOCK_PE), dtype=tl.float32)
    for i in range(0, group_size):
        off_h = off_g * group_size + i
        do_off = (off_b.to(tl.int64) * num_heads + off_h) * V_HEAD_DIM
        lse_off = (off_b * num_heads + off_h).to(tl.int64) * seqlen_q
        for start_m in range(full_lo, full_hi, BLOCK_M):
            dk, dv, dk_pe = _backward_kv_block(
                dk, dv, dk_pe, k, v, k_pe, q_ptr + off_b.to(tl.int64) * stride_qb + off_h * stride_qh,
                q_pe_ptr + off_b.to(tl.int64) * stride_qpb + off_h * stride_qph, do_ptr + do_off, lse_ptr + lse_off,
                delta_ptr + lse_off, doc_start_ptr, sample_ids_ptr, start_m, offs_n, seqlen_q, seqlen_k, shift,
                k_start, window, scale, dropout_key, off_b, head_offset + off_h, stride_qm, stride_qpm,
                batch_size * num_heads * V_HEAD_DIM, HAS_DOCUMENTS, UPCAST, HEAD_DIM, BLOCK_D, V_HEAD_DIM, BLOCK_DV,
                PE_DIM, BLOCK_PE, THRESHOLD, DROPOUT_SCALE, SOFTCAP, BLOCK_M, True,
            )  # fmt: skip
        for j in range(0, num_masked_blocks(lo, full_lo, full_hi, hi, BLOCK_M)):
            start_m = nth_masked_block(j, lo, full_lo, full_hi, BLOCK_M)
            dk, dv, dk_pe = _backward_kv_block(
                dk, dv, dk_pe, k, v, k_pe, q_ptr + off_b.to(tl.int64) * stride_qb + off_h * stride_qh,
                q_pe_ptr + off_b.to(tl.int64) * stride_qpb + off_h * stride_qph, do_ptr + do_off, lse_ptr + lse_off,
                delta_ptr + lse_off, doc_start_ptr, sample_ids_ptr, start_m, offs_n, seqlen_q, seqlen_k, shift,
                k_start, window, scale, dropout_key, off_b, head_offset + off_h, stride_qm, stride_qpm,
                batch_size * num_heads * V_HEAD_DIM, HAS_DOCUMENTS, UPCAST, HEAD_DIM, BLOCK_D, V_HEAD_DIM, BLOCK_DV,
                PE_DIM, BLOCK_PE, THRESHOLD, DROPOUT_SCALE, SOFTCAP, BLOCK_M, False,
            )  # fmt: skip
    dk = dk * (scale * 0.6931471805599453)  # ln 2
    offs_d, offs_dv = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    row_offs_n, mask = (
        ((offs_n.to(tl.int64) * batch_size + off_b) * num_kv_heads + off_g)[:, None],
        (offs_n < seqlen_k)[:, None],
    )
    k_offs, v_offs = row_offs_n * HEAD_DIM + offs_d[None, :], row_offs_n * V_HEAD_DIM + offs_dv[None, :]
    tl.store(dk_ptr + k_offs, dk.to(dk_ptr.dtype.element_ty), mask=mask & (offs_d < HEAD_DIM)[None, :])
    tl.store(dv_ptr + v_offs, dv.to(dv_ptr.dtype.element_ty), mask=mask & (offs_dv < V_HEAD_DIM)[None, :])
    if PE_DIM > 0:
        dk_pe = dk_pe * (scale * 0.6931471805599453)
        offs_pe = tl.arange(0, BLOCK_PE)
        pe_offs = row_offs_n * PE_DIM + offs_pe[None, :]
        tl.store(dk_pe_ptr + pe_offs, dk_pe, mask=mask & (offs_pe < PE_DIM)[None, :])


class _Attention(Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_pe: Tensor | None,
        k_pe: Tensor | None,
        sink_H: Tensor | None,
        document_start_BS: Tensor | None,
        params: AttentionParams,
    ) -> Tensor:
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        q_pe, k_pe = (x if x is None or x.stride(-1) == 1 else x.contiguous() for x in (q_pe, k_pe))
        S, B, H, K = q.shape
        T, _, G, V = v.shape
        R = 0 if q_pe is None else q_pe.shape[-1]
        k_start = params.k_start
        o = q.new_empty(S, B, H, V)
        lse = q.new_empty(B, H, S, dtype=torch.float32)
        # A kernel ignores the pointers of absent inputs; any tensor may take their place.
        document_start = lse if document_start_BS is None else document_start_BS.contiguous()
        dropout_p, key, sample_ids, head_offset = params.drop or AttentionDropout(0.0, 0, lse)
        sample_ids = sample_ids.contiguous()
        pe_strides = (0,) * 5 if q_pe is None or k_pe is None else (*q_pe.stride()[:3], *k_pe.stride()[:2])
        strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *pe_strides)
        shift = params.q_start - k_start
        # without a window, one that reaches back to key 0
        window = max(1, S + shift) if params.window is None else params.window
        ctx.launch_args = (
            S,
            T,
            shift,
            k_start,
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
            document_start_BS is not None,
            upcast_for_interpreter(q),
            K,
            padded_head_dim(K),
            V,
            padded_head_dim(V),
            R,
            max(MIN_BLOCK_PE, power_of_two(R)),
            int(dropout_p * 2**32),
            1.0 / (1.0 - dropout_p),
            0.0 if params.softcap is None else params.softcap * LOG2_E,
        )
        ctx.tile_key = tile_key(q, v, R)
        block_m, block_n, num_warps, num_stages = FORWARD_TILES[ctx.tile_key]
        has_sink = sink_H is not None
        sink = lse if sink_H is None else sink_H.contiguous()
        pe = (lse, lse) if q_pe is None or k_pe is None else (q_pe, k_pe)
        tensors = (q, k, v, *pe, o, lse, document_start, sample_ids, sink)
        constexprs = (*ctx.constexprs, has_sink, block_m, block_n)
        _forward[(ceil_div(S, block_m), B * H)](
            *tensors, *ctx.launch_args, *constexprs, num_warps=num_warps, num_stages=num_stages
        )
        ctx.save_for_backward(q, k, v, q_pe, k_pe, o, lse, document_start, sample_ids, sink_H)
        return o

    @staticmethod
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        q, k, v, q_pe, k_pe, o, lse, document_start, sample_ids, sink_H = ctx.saved_tensors
        S, T, _, k_start, B, H = ctx.launch_args[:6]
        do = do.contiguous()
        dq, dk, dv, delta = (x.new_empty(x.shape) for x in (q, k, v, lse))
        pe, dq_pe, dk_pe_heads = (lse, lse), lse, lse
        if q_pe is not None:
            pe = (q_pe, k_pe)
            dq_pe = q_pe.new_empty(q_pe.shape)
            # one summand per head of k, which are then added in a fixed order
            dk_pe_heads = k_pe.new_empty(T, B, k.shape[2], k_pe.shape[-1], dtype=torch.float32)
        block_m, block_n, num_warps, num_stages = BACKWARD_Q_TILES[ctx.tile_key]
        tensors = (q, k, v, *pe, o, do, lse, delta, dq, dq_pe, document_start, sample_ids)
        constexprs = (*ctx.constexprs, block_m, block_n)
        _backward_q[(ceil_div(S, block_m), B * H)](
            *tensors, *ctx.launch_args, *constexprs, num_warps=num_warps, num_stages=num_stages
        )
        document_end = document_start
        if ctx.constexprs[0]:  # has documents; the number of queries whose document starts at or before key j
            keys = torch.arange(k_start, k_start + T, dtype=document_start.dtype, device=q.device)
            keys = keys.expand(B, T).contiguous()
            document_end = torch.searchsorted(document_start, keys, right=True)
        block_m, block_n, num_warps, num_stages = BACKWARD_KV_TILES[ctx.tile_key]
        tensors = (q, k, v, *pe, do, lse, delta, dk, dv, dk_pe_heads, document_start, document_end, sample_ids)
        constexprs = (*ctx.constexprs, block_m, block_n)
        _backward_kv[(ceil_div(T, block_n), B * k.shape[2])](
            *tensors, *ctx.launch_args, *constexprs, num_warps=num_warps, num_stages=num_stages
        )
        dsink_H = None
        if sink_H is not None:
            p_sink = torch.exp2(sink_H.float().unsqueeze(-1) * LOG2_E - lse)
            dsink_H = -(p_sink * delta).sum((0, 2)).to(sink_H.dtype)
        if q_pe is None:
            return dq, dk, dv, None, None, dsink_H, None, None
        return dq, dk, dv, dq_pe, dk_pe_heads.sum(2).to(k_pe.dtype), dsink_H, None, None


def flash_attention(
    q_SBHK: Tensor, k_TBGK: Tensor, v_TBGK: Tensor, *, q_pe_SBHR: Tensor | None = None, k_pe_TBR: Tensor | None = None,
    sink_H: Tensor | None = None, document_start_BS: Tensor | None = None, **kwargs: Any,
) -> Tensor:  # fmt: skip
    """Return o_SBHK, causal attention of the queries to the keys and values.

    Args:
        q_SBHK: the queries.
        k_TBGK: the keys. Heads have up to 256 channels in bf16 and fp16, 128 in fp32.
        v_TBGK: the values, with the same limits; their width may differ from the keys'.
        q_pe_SBHR: more channels of the queries, up to MAX_PE_DIM, which meet the keys in `k_pe_TBR`; None: none.
        k_pe_TBR: the keys that all heads share.
        sink_H: a logit without a value per head (kernels/attention.py); None: no sink.
        document_start_BS: int64, the first position of the document of each query; None: one document per sample.
        **kwargs: the fields of AttentionParams.

    Raises:
        ValueError: if keys and values differ in a dimension other than the last.
    """
    if v_TBGK.shape[:-1] != k_TBGK.shape[:-1]:
        shapes = f"v has shape {(*v_TBGK.shape,)}, k has shape {(*k_TBGK.shape,)}"
        raise ValueError(f"{shapes}; they must agree in all dims but the last")
    params = AttentionParams(**kwargs)
    return _Attention.apply(q_SBHK, k_TBGK, v_TBGK, q_pe_SBHR, k_pe_TBR, sink_H, document_start_BS, params)  # type: ignore[return-value]
