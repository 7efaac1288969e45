"""Triton kernels of a linear recurrence from chunk to chunk: states, outputs and their gradients.

The formulas and letters are those of kernels/delta_rule.py, with x = u - w S for the values that a chunk adds, and with
the terms of kernels/recurrence_terms.py. One program has some of the V channels of one head.

    scan            x, and the state S before each chunk, chunk after chunk
    outputs         o = q_in S + scores x                                       of each chunk separately
    scan_backward   dx = scores^T do + k_out dS', dS = q_in^T do + decay dS' - w^T dx, with the chunks in reverse;
                    stores dS' of each chunk
    score_grads     du = T^T dx,  dscores = do x^T,  dL = -du x^T               of each chunk separately
    key_grads       dq_in = do S^T,  dk_out = x dS'^T,  dw = -du S^T,  ddecay = sum over V of S dS'

The last two follow from [u | w] = T [b v | b in k]: the gradients of its right side are T^T dx and -T^T dx S^T, and
that of L is -T^T dx (u - w S)^T. States are in fp32. Scans of groups whose first states are known are independent.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from megalite.kernels.dispatch import kernel
from megalite.kernels.recurrence_terms import dot3, load_rows, load_transposed, load_vector, store_rows

if TYPE_CHECKING:
    import triton.language as tl


@kernel
def _load_factor(factor_ptr, rows, S, stride, HAS_FACTORS: tl.constexpr):
    """Return the factors of a chunk's keys or queries, [C]; ones if they are part of them."""
    if HAS_FACTORS:
        return load_vector(factor_ptr, rows, S, stride)
    return (rows * 0 + 1).to(tl.float32)


@kernel
def _load_decay(decay_ptr, chunk, offs_k, K, HAS_FACTORS: tl.constexpr):
    """Return the decay of the state over a chunk, as a column [K, 1]; that of a head is the same for all channels."""
    if HAS_FACTORS:
        return tl.load(decay_ptr + chunk + offs_k * 0)[:, None]
    return tl.load(decay_ptr + chunk * K + offs_k, mask=offs_k < K, other=0.0)[:, None]


@kernel
def _store_state(state_ptr, state, offs_k, offs_v, K: tl.constexpr, V: tl.constexpr):
    """Store a tile of a state [K, V]."""
    mask = (offs_k < K)[:, None] & (offs_v < V)[None, :]
    tl.store(state_ptr + offs_k[:, None] * V + offs_v[None, :], state, mask=mask)


@kernel
def _load_state(state_ptr, offs_k, offs_v, K: tl.constexpr, V: tl.constexpr):
    """Return a tile of a state [K, V], with zeros outside."""
    mask = (offs_k < K)[:, None] & (offs_v < V)[None, :]
    return tl.load(state_ptr + offs_k[:, None] * V + offs_v[None, :], mask=mask, other=0.0)


def _scan_shape(k: Tensor, factor: Tensor, w: Tensor, u: Tensor, *args: Any) -> tuple[float, ...]:
    """Return (rows, columns, depth, groups): k_out^T x of each chunk, with a correction also w S."""
    S, B, H, V = u.shape
    x, states = args[0], args[3]
    num_products = 1 if x is u else 2
    return S * B * H, V, num_products * k.shape[3], states.shape[0] * B * H


@kernel(matmul_shape=_scan_shape, do_not_specialize=["S"])
def scan(
    k_ptr, k_factor_ptr, w_ptr, u_ptr, x_ptr, decay_ptr, initial_ptr, states_ptr, final_ptr, S, H, heads_per_key,
    chunks_per_group, stride_ks, stride_kb, stride_kh, stride_us, stride_ub, stride_uh, stride_ws,
    K: tl.constexpr, V: tl.constexpr, HAS_CORRECTION: tl.constexpr, HAS_FACTORS: tl.constexpr,
    HAS_FINAL: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Compute the states [chunks, B, H, K, V] before each chunk of a group, from its first one in initial_ptr.

    u is [S, B, H, V] with strides, x without; without a correction, x is u and is not written. The state is in one or
    two tiles of BLOCK_K channels, so that the operands of a product fit into registers.
    """
    head = tl.program_id(1)
    off_b, off_h = (head // H).to(tl.int64), head % H
    num_heads = tl.num_programs(1)
    offs_c, offs_k = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_K)
    offs_v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    k_ptr += off_b * stride_kb + (off_h // heads_per_key) * stride_kh
    u_ptr += off_b * stride_ub + off_h * stride_uh
    head_offs = off_b * H + off_h
    w_ptr += head_offs * K
    initial_ptr += (tl.program_id(2) * num_heads + head_offs) * K * V
    state = _load_state(initial_ptr, offs_k, offs_v, K, V)
    if K > BLOCK_K:
        state_1 = _load_state(initial_ptr, offs_k + BLOCK_K, offs_v, K, V)
    first = tl.program_id(2) * chunks_per_group
    last = tl.minimum(first + chunks_per_group, tl.cdiv(S, BLOCK_C))
    for chunk in range(first, last):
        chunk_head = chunk * num_heads + head_offs
        rows = chunk * BLOCK_C + offs_c
        x = load_rows(u_ptr, rows, offs_v, S, stride_us, V)
        k_factor = _load_factor(k_factor_ptr + head_offs, rows, S, num_heads, HAS_FACTORS)[None, :]
        _store_state(states_ptr + chunk_head * K * V, state, offs_k, offs_v, K, V)
        if HAS_CORRECTION:
            x -= dot3(load_rows(w_ptr, rows, offs_k, S, stride_ws, K), state)
        if K > BLOCK_K:
            _store_state(states_ptr + chunk_head * K * V, state_1, offs_k + BLOCK_K, offs_v, K, V)
            if HAS_CORRECTION:
                x -= dot3(load_rows(w_ptr, rows, offs_k + BLOCK_K, S, stride_ws, K), state_1)
        if HAS_CORRECTION:
            store_rows(x_ptr + head_offs * V, x, rows, offs_v, S, num_heads * V, V)
        k_out = load_transposed(k_ptr, offs_k, rows, S, stride_ks, K) * k_factor
        state = state * _load_decay(decay_ptr, chunk_head, offs_k, K, HAS_FACTORS) + dot3(k_out, x)
        if K > BLOCK_K:
            k_out = load_transposed(k_ptr, offs_k + BLOCK_K, rows, S, stride_ks, K) * k_factor
            decay = _load_decay(decay_ptr, chunk_head, offs_k + BLOCK_K, K, HAS_FACTORS)
            state_1 = state_1 * decay + dot3(k_out, x)
    if HAS_FINAL:
        _store_state(final_ptr + head_offs * K * V, state, offs_k, offs_v, K, V)
        if K > BLOCK_K:
            _store_state(final_ptr + head_offs * K * V, state_1, offs_k + BLOCK_K, offs_v, K, V)


def _outputs_shape(q: Tensor, factor: Tensor, scores: Tensor, x: Tensor, *_: Any) -> tuple[float, ...]:
    """Return (rows, columns, depth, groups): q_in S and scores x of each chunk."""
    S, B, H, V = x.shape
    return S * B * H, V, q.shape[3] + scores.shape[-1], scores.shape[0] * B * H


@kernel(matmul_shape=_outputs_shape, do_not_specialize=["S"])
def outputs(
    q_ptr, q_factor_ptr, scores_ptr, x_ptr, states_ptr, o_ptr, S, H, heads_per_key,
    stride_qs, stride_qb, stride_qh, stride_xs, stride_xb, stride_xh, stride_os,
    K: tl.constexpr, V: tl.constexpr, HAS_FACTORS: tl.constexpr,
    BLOCK_J: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Compute o [S, B, H, V] of a chunk."""
    head = tl.program_id(1)
    off_b, off_h = (head // H).to(tl.int64), head % H
    offs_c = tl.arange(0, BLOCK_C)
    offs_v = tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    rows = tl.program_id(0) * BLOCK_C + offs_c
    tile = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + head  # type: ignore[operator]
    q_ptr += off_b * stride_qb + (off_h // heads_per_key) * stride_qh
    head_offs = off_b * H + off_h
    factor = _load_factor(q_factor_ptr + head_offs, rows, S, tl.num_programs(1), HAS_FACTORS)
    o = tl.zeros((BLOCK_C, BLOCK_V), dtype=tl.float32)
    for start_k in range(0, K, BLOCK_K):
        offs_k = start_k + tl.arange(0, BLOCK_K)
        q_in = load_rows(q_ptr, rows, offs_k, S, stride_qs, K) * factor[:, None]
        o += dot3(q_in, load_rows(states_ptr + tile * K * V, offs_k, offs_v, K, V, V))
    x_ptr += off_b * stride_xb + off_h * stride_xh
    for start_j in range(0, BLOCK_C, BLOCK_J):
        offs_j = start_j + tl.arange(0, BLOCK_J)
        scores = tl.load(scores_ptr + tile * BLOCK_C * BLOCK_C + offs_c[:, None] * BLOCK_C + offs_j[None, :])
        o += dot3(scores, load_rows(x_ptr, tl.program_id(0) * BLOCK_C + offs_j, offs_v, S, stride_xs, V))
    store_rows(o_ptr + head_offs * V, o, rows, offs_v, S, stride_os, V)


def _scan_backward_shape(q: Tensor, q_factor: Tensor, k: Tensor, *args: Any) -> tuple[float, ...]:
    """Return (rows, columns, depth, groups): the products of dx and of dS of each chunk."""
    w, scores, do = args[1:4]
    S, B, H, V = do.shape
    num_products = 2 if w is scores else 3
    return S * B * H, V, num_products * k.shape[3] + scores.shape[-1], scores.shape[0] * B * H


@kernel(matmul_shape=_scan_backward_shape, do_not_specialize=["S"])
def scan_backward(
    q_ptr, q_factor_ptr, k_ptr, k_factor_ptr, w_ptr, scores_ptr, do_ptr, decay_ptr, dfinal_ptr, dx_ptr, dstates_ptr,
    dinitial_ptr, S, H, heads_per_key, stride_qs, stride_qb, stride_qh, stride_ks, stride_kb, stride_kh,
    stride_dos, stride_dob, stride_doh, stride_dxs, stride_ws,
    K: tl.constexpr, V: tl.constexpr, HAS_CORRECTION: tl.constexpr, HAS_FACTORS: tl.constexpr,
    BLOCK_J: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Compute dx [S, B, H, V], the gradients of the states after each chunk, and that of the first state."""
    head = tl.program_id(1)
    off_b, off_h = (head // H).to(tl.int64), head % H
    num_heads = tl.num_programs(1)
    offs_c, offs_k = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_K)
    offs_v = tl.program_id(0) * BLOCK_V + tl.arange(0, BLOCK_V)
    off_g = off_h // heads_per_key
    q_ptr += off_b * stride_qb + off_g * stride_qh
    k_ptr += off_b * stride_kb + off_g * stride_kh
    do_ptr += off_b * stride_dob + off_h * stride_doh
    head_offs = off_b * H + off_h
    w_ptr += head_offs * K
    dstate = _load_state(dfinal_ptr + head_offs * K * V, offs_k, offs_v, K, V)
    if K > BLOCK_K:
        dstate_1 = _load_state(dfinal_ptr + head_offs * K * V, offs_k + BLOCK_K, offs_v, K, V)
    num_chunks = tl.cdiv(S, BLOCK_C)
    for i in range(0, num_chunks):
        chunk = num_chunks - 1 - i
        chunk_head = chunk * num_heads + head_offs
        rows = chunk * BLOCK_C + offs_c
        k_factor = _load_factor(k_factor_ptr + head_offs, rows, S, num_heads, HAS_FACTORS)[:, None]
        _store_state(dstates_ptr + chunk_head * K * V, dstate, offs_k, offs_v, K, V)
        dx = dot3(load_rows(k_ptr, rows, offs_k, S, stride_ks, K) * k_factor, dstate)
        dstate *= _load_decay(decay_ptr, chunk_head, offs_k, K, HAS_FACTORS)
        if K > BLOCK_K:
            _store_state(dstates_ptr + chunk_head * K * V, dstate_1, offs_k + BLOCK_K, offs_v, K, V)
            dx += dot3(load_rows(k_ptr, rows, offs_k + BLOCK_K, S, stride_ks, K) * k_factor, dstate_1)
            dstate_1 *= _load_decay(decay_ptr, chunk_head, offs_k + BLOCK_K, K, HAS_FACTORS)
        for start_j in range(0, BLOCK_C, BLOCK_J):
            offs_j = start_j + tl.arange(0, BLOCK_J)
            rows_j = chunk * BLOCK_C + offs_j
            do = load_rows(do_ptr, rows_j, offs_v, S, stride_dos, V)
            scores_ptrs = scores_ptr + chunk_head * BLOCK_C * BLOCK_C + offs_j[None, :] * BLOCK_C + offs_c[:, None]
            dx += dot3(tl.load(scores_ptrs), do)
            q_factor = _load_factor(q_factor_ptr + head_offs, rows_j, S, num_heads, HAS_FACTORS)[None, :]
            dstate += dot3(load_transposed(q_ptr, offs_k, rows_j, S, stride_qs, K) * q_factor, do)
            if K > BLOCK_K:
                q_in = load_transposed(q_ptr, offs_k + BLOCK_K, rows_j, S, stride_qs, K) * q_factor
                dstate_1 += dot3(q_in, do)
        store_rows(dx_ptr + head_offs * V, dx, rows, offs_v, S, stride_dxs, V)
        if HAS_CORRECTION:
            dstate -= dot3(load_transposed(w_ptr, offs_k, rows, S, stride_ws, K), dx)
            if K > BLOCK_K:
                dstate_1 -= dot3(load_transposed(w_ptr, offs_k + BLOCK_K, rows, S, stride_ws, K), dx)
    _store_state(dinitial_ptr + head_offs * K * V, dstate, offs_k, offs_v, K, V)
    if K > BLOCK_K:
        _store_state(dinitial_ptr + head_offs * K * V, dstate_1, offs_k + BLOCK_K, offs_v, K, V)


def _score_grads_shape(do: Tensor, x: Tensor, *args: Any) -> tuple[float, ...]:
    """Return (rows, columns, depth, groups): dscores of each chunk, with a correction also dL and du."""
    dscores, dL = args[3:5]
    S, B, H, V = do.shape
    num_products = 1 if dL is dscores else 3
    return S * B * H, dscores.shape[-1], num_products * V, dscores.shape[0] * B * H


@kernel(matmul_shape=_score_grads_shape, do_not_specialize=["S"])
def score_grads(
    do_ptr, x_ptr, dx_ptr, inverse_ptr, du_ptr, dscores_ptr, dL_ptr, S, H,
    stride_dos, stride_dob, stride_doh, stride_xs, stride_xb, stride_xh, stride_dxs,
    V: tl.constexpr, HAS_CORRECTION: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_C: tl.constexpr,
    BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Compute dscores and, with a correction, dL and du of a chunk. Elements that a mask excludes are not masked."""
    head = tl.program_id(1)
    off_b, off_h = (head // H).to(tl.int64), head % H
    offs_c = tl.arange(0, BLOCK_C)
    rows = tl.program_id(0) * BLOCK_C + offs_c
    tile = (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + head) * BLOCK_C * BLOCK_C  # type: ignore[operator]
    do_ptr += off_b * stride_dob + off_h * stride_doh
    x_ptr += off_b * stride_xb + off_h * stride_xh
    head_offs = (off_b * H + off_h) * V
    dscores = tl.zeros((BLOCK_C, BLOCK_C), dtype=tl.float32)
    if HAS_CORRECTION:
        dL = tl.zeros((BLOCK_C, BLOCK_C), dtype=tl.float32)
    for start_v in range(0, V, BLOCK_V):
        offs_v = start_v + tl.arange(0, BLOCK_V)
        do = load_rows(do_ptr, rows, offs_v, S, stride_dos, V)
        x_transposed = load_transposed(x_ptr, offs_v, rows, S, stride_xs, V)
        dscores += dot3(do, x_transposed)
        if HAS_CORRECTION:
            du = tl.zeros((BLOCK_C, BLOCK_V), dtype=tl.float32)
            for start_j in range(0, BLOCK_C, BLOCK_J):
                offs_j = start_j + tl.arange(0, BLOCK_J)
                inverse_transposed = tl.load(inverse_ptr + tile + offs_j[None, :] * BLOCK_C + offs_c[:, None])
                rows_j = tl.program_id(0) * BLOCK_C + offs_j
                du += dot3(inverse_transposed, load_rows(dx_ptr + head_offs, rows_j, offs_v, S, stride_dxs, V))
            store_rows(du_ptr + head_offs, du, rows, offs_v, S, stride_dxs, V)
            dL -= dot3(du, x_transposed)
    tile_offs = tile + offs_c[:, None] * BLOCK_C + offs_c[None, :]
    tl.store(dscores_ptr + tile_offs, dscores)
    if HAS_CORRECTION:
        tl.store(dL_ptr + tile_offs, dL)


def _key_grads_shape(do: Tensor, x: Tensor, du: Tensor, states: Tensor, *args: Any) -> tuple[float, ...]:
    """Return (rows, columns, depth, groups): dq_in and dk_out of each chunk, with a correction also dw."""
    S, B, H, V = do.shape
    dq_in, _, dw = args[1:4]
    num_products = 2 if dw is dq_in else 3
    return S * B * H, states.shape[3], num_products * V, states.shape[0] * B * H


@kernel(matmul_shape=_key_grads_shape, do_not_specialize=["S"])
def key_grads(
    do_ptr, x_ptr, du_ptr, states_ptr, dstates_ptr, dq_in_ptr, dk_out_ptr, dw_ptr, ddecay_ptr, S, H,
    stride_dos, stride_dob, stride_doh, stride_xs, stride_xb, stride_xh, stride_dus, stride_ws,
    K: tl.constexpr, V: tl.constexpr, HAS_CORRECTION: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Compute dq_in, dk_out and dw [S, B, H, K] of a chunk, and ddecay [chunks, B, H, K], for some of K channels."""
    head = tl.program_id(1)
    off_b, off_h = (head // H).to(tl.int64), head % H
    rows = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    offs_k = tl.program_id(2) * BLOCK_K + tl.arange(0, BLOCK_K)
    tile = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + head  # type: ignore[operator]
    do_ptr += off_b * stride_dob + off_h * stride_doh
    x_ptr += off_b * stride_xb + off_h * stride_xh
    head_offs = off_b * H + off_h
    dq_in = tl.zeros((BLOCK_C, BLOCK_K), dtype=tl.float32)
    dk_out = tl.zeros((BLOCK_C, BLOCK_K), dtype=tl.float32)
    ddecay = tl.zeros((BLOCK_K,), dtype=tl.float32)
    if HAS_CORRECTION:
        dw = tl.zeros((BLOCK_C, BLOCK_K), dtype=tl.float32)
    for start_v in range(0, V, BLOCK_V):
        offs_v = start_v + tl.arange(0, BLOCK_V)
        state = load_transposed(states_ptr + tile * K * V, offs_v, offs_k, K, V, V)
        dstate = load_transposed(dstates_ptr + tile * K * V, offs_v, offs_k, K, V, V)
        dq_in += dot3(load_rows(do_ptr, rows, offs_v, S, stride_dos, V), state)
        dk_out += dot3(load_rows(x_ptr, rows, offs_v, S, stride_xs, V), dstate)
        ddecay += tl.sum(state * dstate, 0)
        if HAS_CORRECTION:
            dw -= dot3(load_rows(du_ptr + head_offs * V, rows, offs_v, S, stride_dus, V), state)
    store_rows(dq_in_ptr + head_offs * K, dq_in, rows, offs_k, S, stride_ws, K)
    store_rows(dk_out_ptr + head_offs * K, dk_out, rows, offs_k, S, stride_ws, K)
    tl.store(ddecay_ptr + tile * K + offs_k, ddecay, mask=offs_k < K)
    if HAS_CORRECTION:
        store_rows(dw_ptr + head_offs * K, dw, rows, offs_k, S, stride_ws, K)


@kernel
def normalize_backward(
    x_ptr, dx_heads_ptr, dx_ptr, S, G, heads_per_key, stride_xs, stride_xb, stride_xh, stride_dx,
    K: tl.constexpr, NORMALIZE: tl.constexpr, EPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute dx [S, B, G, K] from the gradients [S, B, H, K] of normalized heads; H / G heads share one of x."""
    off_b, off_g = (tl.program_id(1) // G).to(tl.int64), tl.program_id(1) % G
    batch_size = tl.num_programs(1) // G
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_k = tl.arange(0, BLOCK_K)
    stride_heads = batch_size * G * heads_per_key * K
    dx = tl.zeros((BLOCK_M, BLOCK_K), dtype=tl.float32)
    for i in range(0, heads_per_key):
        head_offs = (off_b * G + off_g) * heads_per_key + i
        dx += load_rows(dx_heads_ptr + head_offs * K, rows, offs_k, S, stride_heads, K)
    if NORMALIZE:
        x = load_rows(x_ptr + off_b * stride_xb + off_g * stride_xh, rows, offs_k, S, stride_xs, K)
        norm = tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) + EPS)
        x *= norm
        dx = norm * (dx - x * tl.sum(dx * x, 1, keep_dims=True))
    store_rows(dx_ptr + (off_b * G + off_g) * K, dx, rows, offs_k, S, stride_dx, K)
