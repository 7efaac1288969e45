"""Triton kernels of a chunk of a linear recurrence: its terms that do not depend on the state, and their gradients.

The formulas and letters are those of kernels/delta_rule.py. One program has a chunk of C tokens of one head. It writes

    scores   q k^T D, [C, C]                       u, w     (I + L)^-1 [b v | b in k], [C, V] and [C, K]
    q_in     in q, as q and a factor per token     k_out    out k, in the same way      decay    in_C

With a decay for each channel, q_in and k_out are stored as [C, K] instead. The inverse T of I + L is computed by blocks
of 16 tokens: those on the diagonal by forward substitution, those below by products of blocks. No power of L is formed:
with equal keys its entries grow like binomials, and their sum cancels.

Sums of the decay between two tokens are cumulative sums over a tile in which the tokens of other documents and those up
to the first of the two are zeros. No product is transposed: a transposed operand is read from memory as such, or its
tile is computed again with rows and columns exchanged.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor

from megalite.kernels.dispatch import kernel

if TYPE_CHECKING:
    import triton.language as tl


@kernel
def dot3(a, b):
    """Return a b in fp32, on tensor cores as three products of TF32: to about 22 bits."""
    return tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="tf32x3")


@kernel
def load_rows(x_ptr, rows, offs_d, S, stride_xs, D):
    """Return the tile [rows, offs_d] of x [S, D] in fp32, with zeros outside."""
    mask = (rows < S)[:, None] & (offs_d < D)[None, :]
    return tl.load(x_ptr + rows.to(tl.int64)[:, None] * stride_xs + offs_d[None, :], mask=mask, other=0.0).to(
        tl.float32
    )


@kernel
def load_transposed(x_ptr, offs_d, rows, S, stride_xs, D):
    """Return the tile [offs_d, rows] of the transpose of x [S, D] in fp32, with zeros outside."""
    mask = (offs_d < D)[:, None] & (rows < S)[None, :]
    return tl.load(x_ptr + rows.to(tl.int64)[None, :] * stride_xs + offs_d[:, None], mask=mask, other=0.0).to(
        tl.float32
    )


@kernel
def store_rows(x_ptr, x, rows, offs_d, S, stride_xs, D):
    """Store a tile [rows, offs_d] of x [S, D]."""
    mask = (rows < S)[:, None] & (offs_d < D)[None, :]
    tl.store(x_ptr + rows.to(tl.int64)[:, None] * stride_xs + offs_d[None, :], x.to(x_ptr.dtype.element_ty), mask=mask)


@kernel
def load_vector(x_ptr, rows, S, stride_xs):
    """Return x of these rows in fp32, with zeros outside."""
    return tl.load(x_ptr + rows.to(tl.int64) * stride_xs, mask=rows < S, other=0.0).to(tl.float32)


@kernel
def _load_documents(documents_ptr, previous_ptr, rows, start, S, HAS_DOCUMENTS: tl.constexpr):
    """Return the documents of a chunk's tokens, with the last one for padding, and that of the state before it."""
    if HAS_DOCUMENTS:
        documents = tl.load(documents_ptr + tl.minimum(rows, S - 1)).to(tl.int64)
        before = tl.load(documents_ptr + tl.maximum(start, 1) - 1).to(tl.int64)
        return documents, tl.where(start > 0, before, tl.load(previous_ptr).to(tl.int64))
    return (rows * 0).to(tl.int64), (start * 0).to(tl.int64)


@kernel
def _last(x, offs_c, BLOCK_C: tl.constexpr):
    """Return the last element of a vector [C]."""
    return tl.sum(tl.where(offs_c == BLOCK_C - 1, x, 0.0), 0)


@kernel
def _token_decays(g, documents, offs_c):
    """Return D [C, C] of a chunk, given the log decays [C] of a head."""
    same = documents[:, None] == documents[None, :]
    is_after = offs_c[:, None] > offs_c[None, :]  # the row's token is after the column's
    sums = tl.cumsum(tl.where(is_after & same, g[:, None], 0.0), 0)
    return tl.where((offs_c[:, None] >= offs_c[None, :]) & same, tl.exp(sums), 0.0)


@kernel
def _decays_to_the_end(g, documents, offs_c, BLOCK_C: tl.constexpr):
    """Return the last row of D, [C]."""
    is_last = documents == tl.sum(tl.where(offs_c == BLOCK_C - 1, documents, 0), 0)
    is_later = (offs_c[None, :] > offs_c[:, None]) & is_last[None, :]
    return tl.where(is_last, tl.exp(tl.sum(tl.where(is_later, g[None, :], 0.0), 1)), 0.0)


@kernel
def _state_decays(g, continues):
    """Return in [C] of a head, or in [C, K] of its channels."""
    return tl.where(continues, tl.exp(tl.cumsum(tl.where(continues, g, 0.0), 0)), 0.0)


@kernel
def _inverse_norm(x, NORMALIZE: tl.constexpr, EPS: tl.constexpr):
    """Return the factor that normalizes a head, given its sum of squares."""
    if NORMALIZE:
        return tl.rsqrt(x + EPS)
    return x * 0.0 + 1.0


@kernel
def _row_norms(
    x_ptr, rows, S, stride_xs, K, NORMALIZE: tl.constexpr, EPS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Return the factors that normalize rows of x [S, K]."""
    squares = tl.zeros((BLOCK_M,), dtype=tl.float32)
    if NORMALIZE:
        for start_k in range(0, K, BLOCK_K):
            x = load_rows(x_ptr, rows, start_k + tl.arange(0, BLOCK_K), S, stride_xs, K)
            squares += tl.sum(x * x, 1)
    return _inverse_norm(squares, NORMALIZE, EPS)


@kernel
def _block_inverse(L_ptr, first, offs, BLOCK_C: tl.constexpr):
    """Return the inverse of a block of I + L on the diagonal, from row `first`, by forward substitution."""
    rows, columns = offs[:, None], offs[None, :]
    L = tl.load(L_ptr + (first + rows) * BLOCK_C + first + columns)
    inverse = tl.where(rows == columns, 1.0, 0.0)
    for i in range(1, 16):
        coefficients = tl.sum(tl.where(rows == i, L, 0.0), 0)
        sums = tl.sum(tl.expand_dims(coefficients, 1) * inverse, 0, keep_dims=True)
        inverse = tl.where(rows == i, tl.where(columns == i, 1.0, 0.0) - sums, inverse)
    return inverse


@kernel
def _below(L_ptr, row, column, offs, BLOCK_C: tl.constexpr):
    """Return the block of L in a row and a column of blocks."""
    return tl.load(L_ptr + (row * 16 + offs[:, None]) * BLOCK_C + column * 16 + offs[None, :])


@kernel
def _store_block(inverse_ptr, row, column, block, offs, BLOCK_C: tl.constexpr):
    """Store a block of an inverse."""
    tl.store(inverse_ptr + (row * 16 + offs[:, None]) * BLOCK_C + column * 16 + offs[None, :], block)


@kernel
def invert(L_ptr, inverse_ptr, BLOCK_C: tl.constexpr):
    """Compute the inverses T [.., C, C] of I + L, for C of 16 or 64, by blocks of 16."""
    offs = tl.arange(0, 16)
    L_ptr += tl.program_id(0).to(tl.int64) * BLOCK_C * BLOCK_C
    inverse_ptr += tl.program_id(0).to(tl.int64) * BLOCK_C * BLOCK_C
    T00 = _block_inverse(L_ptr, 0, offs, BLOCK_C)
    _store_block(inverse_ptr, 0, 0, T00, offs, BLOCK_C)
    if BLOCK_C == 64:
        T11 = _block_inverse(L_ptr, 16, offs, BLOCK_C)
        T22 = _block_inverse(L_ptr, 32, offs, BLOCK_C)
        T33 = _block_inverse(L_ptr, 48, offs, BLOCK_C)
        T10 = -dot3(T11, dot3(_below(L_ptr, 1, 0, offs, BLOCK_C), T00))
        L21, L32 = _below(L_ptr, 2, 1, offs, BLOCK_C), _below(L_ptr, 3, 2, offs, BLOCK_C)
        T21 = -dot3(T22, dot3(L21, T11))
        T32 = -dot3(T33, dot3(L32, T22))
        T20 = -dot3(T22, dot3(_below(L_ptr, 2, 0, offs, BLOCK_C), T00) + dot3(L21, T10))
        L31 = _below(L_ptr, 3, 1, offs, BLOCK_C)
        T31 = -dot3(T33, dot3(L31, T11) + dot3(L32, T21))
        T30 = -dot3(T33, dot3(_below(L_ptr, 3, 0, offs, BLOCK_C), T00) + dot3(L31, T10) + dot3(L32, T20))
        zeros = tl.zeros((16, 16), dtype=tl.float32)
        for row in tl.static_range(4):  # type: ignore[attr-defined]
            for column in tl.static_range(row + 1, 4):  # type: ignore[attr-defined]
                _store_block(inverse_ptr, row, column, zeros, offs, BLOCK_C)
        _store_block(inverse_ptr, 1, 0, T10, offs, BLOCK_C)
        _store_block(inverse_ptr, 1, 1, T11, offs, BLOCK_C)
        _store_block(inverse_ptr, 2, 0, T20, offs, BLOCK_C)
        _store_block(inverse_ptr, 2, 1, T21, offs, BLOCK_C)
        _store_block(inverse_ptr, 2, 2, T22, offs, BLOCK_C)
        _store_block(inverse_ptr, 3, 0, T30, offs, BLOCK_C)
        _store_block(inverse_ptr, 3, 1, T31, offs, BLOCK_C)
        _store_block(inverse_ptr, 3, 2, T32, offs, BLOCK_C)
        _store_block(inverse_ptr, 3, 3, T33, offs, BLOCK_C)


def _apply_shape(inverse: Tensor, x: Tensor, factor: Tensor, y: Tensor, *_: Any) -> tuple[float, ...]:
    """Return (rows, columns, depth, groups): T x of each chunk."""
    S, B, H, D = y.shape
    return S * B * H, D, inverse.shape[-1], inverse.shape[0] * B * H


@kernel(matmul_shape=_apply_shape, do_not_specialize=["S"])
def apply_inverse(
    inverse_ptr, x_ptr, factor_ptr, y_ptr, S, H, heads_per_key, stride_xs, stride_xb, stride_xh,
    stride_fs, stride_fb, stride_fh,
    D: tl.constexpr, HAS_FACTORS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Compute y [S, B, H, D] = T (f x) of a chunk: u with f = b and x = v, w with f = b in and x = k, or f = 1."""
    head = tl.program_id(1)
    off_b, off_h = (head // H).to(tl.int64), head % H
    start = tl.program_id(0) * BLOCK_C
    offs_c = tl.arange(0, BLOCK_C)
    offs_d = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    tile = (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + head) * BLOCK_C * BLOCK_C  # type: ignore[operator]
    x_ptr += off_b * stride_xb + (off_h // heads_per_key) * stride_xh
    factor_ptr += off_b * stride_fb + off_h * stride_fh
    y = tl.zeros((BLOCK_C, BLOCK_D), dtype=tl.float32)
    for start_j in range(0, BLOCK_C, BLOCK_J):
        offs_j = start_j + tl.arange(0, BLOCK_J)
        inverse = tl.load(inverse_ptr + tile + offs_c[:, None] * BLOCK_C + offs_j[None, :])
        x = load_rows(x_ptr, start + offs_j, offs_d, S, stride_xs, D)
        if HAS_FACTORS:
            x *= load_vector(factor_ptr, start + offs_j, S, stride_fs)[:, None]
        y += dot3(inverse, x)
    y_ptr += (off_b * H + off_h) * D
    store_rows(y_ptr, y, start + offs_c, offs_d, S, tl.num_programs(1) * D, D)


def _terms_shape(
    q: Tensor, k: Tensor, g: Tensor, beta: Tensor, documents: Tensor, scores: Tensor, L: Tensor, *_: Any
) -> tuple[float, ...]:
    """Return (rows, columns, depth, groups): q k^T of each chunk, with a correction also k k^T."""
    S, B, H = g.shape[:3]
    num_products = 1 if L is scores else 2
    return S * B * H, scores.shape[-1], num_products * k.shape[3], scores.shape[0] * B * H


@kernel(matmul_shape=_terms_shape, do_not_specialize=["S"])
def head_terms(
    q_ptr, k_ptr, g_ptr, beta_ptr, documents_ptr, scores_ptr, L_ptr, q_factor_ptr, k_factor_ptr, w_factor_ptr,
    decay_ptr, previous_ptr, S, H, heads_per_key, scale,
    stride_qs, stride_qb, stride_qh, stride_ks, stride_kb, stride_kh, stride_gs, stride_gb, stride_gh,
    stride_betas, stride_betab, stride_betah, stride_db,
    K: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, HAS_CORRECTION: tl.constexpr, NORMALIZE: tl.constexpr,
    EPS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute the terms of a chunk with a decay for each head; scores and L are [chunks, B H, C, C]."""
    start = tl.program_id(0) * BLOCK_C
    head = tl.program_id(1)
    off_b, off_h = (head // H).to(tl.int64), head % H
    off_g = off_h // heads_per_key
    offs_c = tl.arange(0, BLOCK_C)
    rows = start + offs_c
    q_ptr += off_b * stride_qb + off_g * stride_qh
    k_ptr += off_b * stride_kb + off_g * stride_kh
    g = load_vector(g_ptr + off_b * stride_gb + off_h * stride_gh, rows, S, stride_gs)
    documents, before = _load_documents(
        documents_ptr + off_b * stride_db, previous_ptr + off_b, rows, start, S, HAS_DOCUMENTS
    )
    qk = tl.zeros((BLOCK_C, BLOCK_C), dtype=tl.float32)
    kk = tl.zeros((BLOCK_C, BLOCK_C), dtype=tl.float32)
    q_squares = tl.zeros((BLOCK_C,), dtype=tl.float32)
    k_squares = tl.zeros((BLOCK_C,), dtype=tl.float32)
    for start_k in range(0, K, BLOCK_K):
        offs_k = start_k + tl.arange(0, BLOCK_K)
        q = load_rows(q_ptr, rows, offs_k, S, stride_qs, K)
        k = load_rows(k_ptr, rows, offs_k, S, stride_ks, K)
        k_columns = load_transposed(k_ptr, offs_k, rows, S, stride_ks, K)
        qk += dot3(q, k_columns)
        if HAS_CORRECTION:
            kk += dot3(k, k_columns)
        q_squares += tl.sum(q * q, 1)
        k_squares += tl.sum(k * k, 1)
    q_norm = _inverse_norm(q_squares, NORMALIZE, EPS) * scale
    k_norm = _inverse_norm(k_squares, NORMALIZE, EPS)
    decays = _token_decays(g, documents, offs_c)
    decay_in = _state_decays(g, documents == before)
    decay_out = _decays_to_the_end(g, documents, offs_c, BLOCK_C)
    tile = (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + head) * BLOCK_C * BLOCK_C  # type: ignore[operator]
    tile_offs = tile + offs_c[:, None] * BLOCK_C + offs_c[None, :]
    tl.store(scores_ptr + tile_offs, qk * decays * q_norm[:, None] * k_norm[None, :])
    row_offs = (rows.to(tl.int64) * (tl.num_programs(1) // H) + off_b) * H + off_h  # of [S, B, H]
    tl.store(q_factor_ptr + row_offs, decay_in * q_norm, mask=rows < S)
    tl.store(k_factor_ptr + row_offs, decay_out * k_norm, mask=rows < S)
    tl.store(decay_ptr + tl.program_id(0) * tl.num_programs(1) + head, _last(decay_in, offs_c, BLOCK_C))
    if HAS_CORRECTION:
        beta = load_vector(beta_ptr + off_b * stride_betab + off_h * stride_betah, rows, S, stride_betas)
        is_earlier = offs_c[:, None] > offs_c[None, :]
        L = tl.where(is_earlier, kk * decays * (beta * k_norm)[:, None] * k_norm[None, :], 0.0)
        tl.store(L_ptr + tile_offs, L)
        tl.store(w_factor_ptr + row_offs, beta * decay_in * k_norm, mask=rows < S)


@kernel(matmul_shape=_terms_shape, do_not_specialize=["S"])
def head_decay_grads(
    q_ptr, k_ptr, g_ptr, beta_ptr, documents_ptr, dscores_ptr, dL_ptr, dqk_ptr, dkk_ptr, dg_ptr, dbeta_ptr,
    previous_ptr, S, H, heads_per_key, scale, stride_qs, stride_qb, stride_qh, stride_ks, stride_kb, stride_kh,
    stride_gs, stride_gb, stride_gh, stride_betas, stride_betab, stride_betah, stride_db,
    K: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, HAS_CORRECTION: tl.constexpr, NORMALIZE: tl.constexpr,
    EPS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a chunk's q k^T and k k^T, before normalization, given those of the scores and of L.

    dg and dbeta are [S, B, H] in fp32, the parts of these gradients that come from the scores and from L.
    """
    start = tl.program_id(0) * BLOCK_C
    head = tl.program_id(1)
    off_b, off_h = (head // H).to(tl.int64), head % H
    off_g = off_h // heads_per_key
    offs_c = tl.arange(0, BLOCK_C)
    rows = start + offs_c
    q_ptr += off_b * stride_qb + off_g * stride_qh
    k_ptr += off_b * stride_kb + off_g * stride_kh
    g = load_vector(g_ptr + off_b * stride_gb + off_h * stride_gh, rows, S, stride_gs)
    documents, _ = _load_documents(
        documents_ptr + off_b * stride_db, previous_ptr + off_b, rows, start, S, HAS_DOCUMENTS
    )
    qk = tl.zeros((BLOCK_C, BLOCK_C), dtype=tl.float32)
    kk = tl.zeros((BLOCK_C, BLOCK_C), dtype=tl.float32)
    q_squares = tl.zeros((BLOCK_C,), dtype=tl.float32)
    k_squares = tl.zeros((BLOCK_C,), dtype=tl.float32)
    for start_k in range(0, K, BLOCK_K):
        offs_k = start_k + tl.arange(0, BLOCK_K)
        q = load_rows(q_ptr, rows, offs_k, S, stride_qs, K)
        k = load_rows(k_ptr, rows, offs_k, S, stride_ks, K)
        k_columns = load_transposed(k_ptr, offs_k, rows, S, stride_ks, K)
        qk += dot3(q, k_columns)
        if HAS_CORRECTION:
            kk += dot3(k, k_columns)
        q_squares += tl.sum(q * q, 1)
        k_squares += tl.sum(k * k, 1)
    q_norm = _inverse_norm(q_squares, NORMALIZE, EPS)
    k_norm = _inverse_norm(k_squares, NORMALIZE, EPS)
    decays = _token_decays(g, documents, offs_c)
    tile = (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + head) * BLOCK_C * BLOCK_C  # type: ignore[operator]
    tile_offs = tile + offs_c[:, None] * BLOCK_C + offs_c[None, :]
    row_offs = (rows.to(tl.int64) * (tl.num_programs(1) // H) + off_b) * H + off_h  # of [S, B, H]
    is_after = offs_c[:, None] > offs_c[None, :]
    dqk = tl.load(dscores_ptr + tile_offs) * decays * (q_norm * scale)[:, None] * k_norm[None, :]
    tl.store(dqk_ptr + tile_offs, dqk)
    ddecays = dqk * qk  # times the decays
    if HAS_CORRECTION:
        beta = load_vector(beta_ptr + off_b * stride_betab + off_h * stride_betah, rows, S, stride_betas)
        dkk = tl.where(is_after, tl.load(dL_ptr + tile_offs) * decays * k_norm[:, None] * k_norm[None, :], 0.0)
        tl.store(dkk_ptr + tile_offs, dkk * beta[:, None])
        dbeta = dkk * kk
        tl.store(dbeta_ptr + row_offs, tl.sum(dbeta, 1), mask=rows < S)
        ddecays += dbeta * beta[:, None]
    # g of token l is a term of the decays from each earlier token j to each token i from l on
    later_sums = tl.cumsum(ddecays, 0, reverse=True)
    tl.store(dg_ptr + row_offs, tl.sum(tl.where(is_after, later_sums, 0.0), 1), mask=rows < S)


def _terms_backward_shape(q: Tensor, k: Tensor, v: Tensor, *args: Any) -> tuple[float, ...]:
    """Return (rows, columns, depth, groups): products with dqk and its transpose, with a correction also with dkk."""
    dqk, dkk = args[3:5]
    S, B, H = v.shape[:3]
    num_products = 2 if dkk is dqk else 3
    return S * B * H, k.shape[3], num_products * dqk.shape[-1], dqk.shape[0] * B * H


@kernel(matmul_shape=_terms_backward_shape, do_not_specialize=["S"])
def head_terms_backward(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, documents_ptr, dqk_ptr, dkk_ptr, du_ptr, dw_ptr, dq_in_ptr, dk_out_ptr,
    ddecay_ptr, previous_ptr, dg_part_ptr, dbeta_part_ptr, dq_ptr, dk_ptr, dv_ptr, dg_ptr, dbeta_ptr,
    S, H, heads_per_key, scale,
    stride_qs, stride_qb, stride_qh, stride_ks, stride_kb, stride_kh, stride_vs, stride_vb, stride_vh,
    stride_gs, stride_gb, stride_gh, stride_betas, stride_betab, stride_betah, stride_db, stride_us, stride_ws,
    stride_dvs, stride_dgs, stride_dbetas,
    K: tl.constexpr, V: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, HAS_CORRECTION: tl.constexpr,
    NORMALIZE: tl.constexpr, EPS: tl.constexpr, BLOCK_J: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a chunk's inputs with a decay for each head; dq and dk are those of normalized heads.

    du and dw are the gradients of [b v | b in k]. dq, dk, dq_in, dk_out and dw are [S, B, H, K] in fp32.
    """
    start = tl.program_id(0) * BLOCK_C
    head = tl.program_id(1)
    off_b, off_h = (head // H).to(tl.int64), head % H
    off_g = off_h // heads_per_key
    head_offs = off_b * H + off_h
    offs_c = tl.arange(0, BLOCK_C)
    rows = start + offs_c
    q_ptr += off_b * stride_qb + off_g * stride_qh
    k_ptr += off_b * stride_kb + off_g * stride_kh
    dqk_ptr += (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + head) * BLOCK_C * BLOCK_C  # type: ignore[operator]
    dkk_ptr += (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + head) * BLOCK_C * BLOCK_C  # type: ignore[operator]
    ddecay_ptr += (tl.program_id(0).to(tl.int64) * tl.num_programs(1) + head) * K  # type: ignore[operator]
    g = load_vector(g_ptr + off_b * stride_gb + off_h * stride_gh, rows, S, stride_gs)
    documents, before = _load_documents(
        documents_ptr + off_b * stride_db, previous_ptr + off_b, rows, start, S, HAS_DOCUMENTS
    )
    continues = documents == before
    decay_in = _state_decays(g, continues)
    decay_out = _decays_to_the_end(g, documents, offs_c, BLOCK_C)
    beta = g * 0.0
    dbeta = g * 0.0
    if HAS_CORRECTION:
        beta = load_vector(beta_ptr + off_b * stride_betab + off_h * stride_betah, rows, S, stride_betas)
        dbeta += load_vector(dbeta_part_ptr + head_offs, rows, S, tl.num_programs(1))
    ddecay_in = tl.zeros((BLOCK_C,), dtype=tl.float32)
    ddecay_out = tl.zeros((BLOCK_C,), dtype=tl.float32)
    ddecay = tl.zeros((BLOCK_K,), dtype=tl.float32)
    q_norm = _row_norms(q_ptr, rows, S, stride_qs, K, NORMALIZE, EPS, BLOCK_C, BLOCK_K)
    k_norm = _row_norms(k_ptr, rows, S, stride_ks, K, NORMALIZE, EPS, BLOCK_C, BLOCK_K)
    for start_k in range(0, K, BLOCK_K):
        offs_k = start_k + tl.arange(0, BLOCK_K)
        dq_in = load_rows(dq_in_ptr + head_offs * K, rows, offs_k, S, stride_ws, K) * scale
        q = load_rows(q_ptr, rows, offs_k, S, stride_qs, K) * tl.expand_dims(q_norm, 1)
        ddecay_in += tl.sum(dq_in * q, 1)
        dk_out = load_rows(dk_out_ptr + head_offs * K, rows, offs_k, S, stride_ws, K)
        k = load_rows(k_ptr, rows, offs_k, S, stride_ks, K) * tl.expand_dims(k_norm, 1)
        ddecay_out += tl.sum(dk_out * k, 1)
        ddecay += tl.load(ddecay_ptr + offs_k, mask=offs_k < K, other=0.0)
        dq = tl.zeros((BLOCK_C, BLOCK_K), dtype=tl.float32)  # times the factors that normalize
        dk = tl.zeros((BLOCK_C, BLOCK_K), dtype=tl.float32)
        for start_j in range(0, BLOCK_C, BLOCK_J):
            offs_j = start_j + tl.arange(0, BLOCK_J)
            block_offs = offs_c[:, None] * BLOCK_C + offs_j[None, :]
            block_offs_transposed = offs_j[None, :] * BLOCK_C + offs_c[:, None]
            k_j = load_rows(k_ptr, start + offs_j, offs_k, S, stride_ks, K)
            dq += dot3(tl.load(dqk_ptr + block_offs), k_j)
            if HAS_CORRECTION:
                dk += dot3(tl.load(dkk_ptr + block_offs) + tl.load(dkk_ptr + block_offs_transposed), k_j)
            q_j = load_rows(q_ptr, start + offs_j, offs_k, S, stride_qs, K)
            dk += dot3(tl.load(dqk_ptr + block_offs_transposed), q_j)
        dq = dq / tl.expand_dims(q_norm, 1) + dq_in * decay_in[:, None]
        dk = dk / tl.expand_dims(k_norm, 1) + dk_out * decay_out[:, None]
        if HAS_CORRECTION:
            dw = load_rows(dw_ptr + head_offs * K, rows, offs_k, S, stride_ws, K)
            dk += dw * (beta * decay_in)[:, None]
            dw_k = tl.sum(dw * k, 1)
            dbeta += dw_k * decay_in
            ddecay_in += dw_k * beta
        store_rows(dq_ptr + head_offs * K, dq, rows, offs_k, S, stride_ws, K)
        store_rows(dk_ptr + head_offs * K, dk, rows, offs_k, S, stride_ws, K)
    if HAS_CORRECTION:
        for start_v in range(0, V, BLOCK_V):
            offs_v = start_v + tl.arange(0, BLOCK_V)
            du = load_rows(du_ptr + head_offs * V, rows, offs_v, S, stride_us, V)
            v = load_rows(v_ptr + off_b * stride_vb + off_h * stride_vh, rows, offs_v, S, stride_vs, V)
            dbeta += tl.sum(du * v, 1)
            store_rows(dv_ptr + head_offs * V, du * beta[:, None], rows, offs_v, S, stride_dvs, V)
        tl.store(
            dbeta_ptr + rows.to(tl.int64) * stride_dbetas + head_offs, dbeta.to(dbeta_ptr.dtype.element_ty), rows < S
        )
    dg = load_vector(dg_part_ptr + head_offs, rows, S, tl.num_programs(1))
    is_after = offs_c[:, None] > offs_c[None, :]
    dg += tl.sum(tl.where(is_after, (ddecay_out * decay_out)[None, :], 0.0), 1)
    # the state's decay over the chunk is that of the last token
    ddecay_in += tl.where(offs_c == BLOCK_C - 1, tl.sum(ddecay, 0), 0.0)
    dg_in = tl.sum(tl.where(offs_c[:, None] <= offs_c[None, :], (ddecay_in * decay_in)[None, :], 0.0), 1)
    dg += tl.where(continues, dg_in, 0.0)
    tl.store(dg_ptr + rows.to(tl.int64) * stride_dgs + head_offs, dg.to(dg_ptr.dtype.element_ty), rows < S)


@kernel
def _channel_decays(g, offs_c, is_same, j):
    """Return D of the token j of a chunk, [C, K]: the decay between it and each later token of its document."""
    sums = tl.cumsum(tl.where((is_same & (offs_c > j))[:, None], g, 0.0), 0)
    return tl.where((is_same & (offs_c >= j))[:, None], tl.exp(sums), 0.0)


@kernel
def _document_of(documents, offs_c, j):
    """Return the document of the token j of a chunk."""
    return tl.sum(tl.where(offs_c == j, documents, 0), 0)


@kernel
def _load_head_row(x_ptr, row, offs_k, S, stride_xs, K, NORMALIZE: tl.constexpr, EPS: tl.constexpr):
    """Return one row of x [S, K], normalized."""
    mask = (offs_k < K) & (row + offs_k * 0 < S)
    x = tl.load(x_ptr + row.to(tl.int64) * stride_xs + offs_k, mask=mask, other=0.0).to(tl.float32)
    return x * _inverse_norm(tl.sum(x * x, 0), NORMALIZE, EPS)


@kernel(do_not_specialize=["S"])
def channel_terms(
    q_ptr, k_ptr, g_ptr, beta_ptr, documents_ptr, scores_ptr, L_ptr, q_in_ptr, k_out_ptr, k_in_ptr, decay_ptr,
    previous_ptr, S, H, heads_per_key, scale,
    stride_qs, stride_qb, stride_qh, stride_ks, stride_kb, stride_kh, stride_gs, stride_gb, stride_gh,
    stride_betas, stride_betab, stride_betah, stride_db,
    K: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, HAS_CORRECTION: tl.constexpr, NORMALIZE: tl.constexpr,
    EPS: tl.constexpr, BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Compute the terms of a chunk with a decay for each channel; scores and L are [chunks, B H, C, C].

    A head has its K channels in one tile.
    """
    start = tl.program_id(0) * BLOCK_C
    head = tl.program_id(1)
    off_b, off_h = (head // H).to(tl.int64), head % H
    off_g = off_h // heads_per_key
    offs_c, offs_k = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_K)
    rows = start + offs_c
    k_ptr += off_b * stride_kb + off_g * stride_kh
    head_offs = off_b * H + off_h
    q = load_rows(q_ptr + off_b * stride_qb + off_g * stride_qh, rows, offs_k, S, stride_qs, K)
    q *= _inverse_norm(tl.sum(q * q, 1, keep_dims=True), NORMALIZE, EPS) * scale
    k = load_rows(k_ptr, rows, offs_k, S, stride_ks, K)
    k *= _inverse_norm(tl.sum(k * k, 1, keep_dims=True), NORMALIZE, EPS)
    g = load_rows(g_ptr + off_b * stride_gb + off_h * stride_gh, rows, offs_k, S, stride_gs, K)
    documents, before = _load_documents(
        documents_ptr + off_b * stride_db, previous_ptr + off_b, rows, start, S, HAS_DOCUMENTS
    )
    scores = tl.zeros((BLOCK_C, BLOCK_C), dtype=tl.float32)
    kk = tl.zeros((BLOCK_C, BLOCK_C), dtype=tl.float32)
    for j in range(0, BLOCK_C):
        decays = _channel_decays(g, offs_c, documents == _document_of(documents, offs_c, j), j)
        k_j = _load_head_row(k_ptr, start + j, offs_k, S, stride_ks, K, NORMALIZE, EPS)
        decayed_k = decays * k_j[None, :]
        is_j = offs_c[None, :] == j
        scores = tl.where(is_j, tl.sum(q * decayed_k, 1, keep_dims=True), scores)
        kk = tl.where(is_j, tl.sum(k * decayed_k, 1, keep_dims=True), kk)
        k_out = tl.sum(tl.where((offs_c == BLOCK_C - 1)[:, None], decayed_k, 0.0), 0)
        k_out_offs = ((start + j).to(tl.int64) * (tl.num_programs(1) // H) + off_b) * H + off_h
        tl.store(k_out_ptr + k_out_offs * K + offs_k, k_out, mask=(offs_k < K) & (start + j + offs_k * 0 < S))
    decay_in = _state_decays(g, (documents == before)[:, None])
    stride_heads = tl.num_programs(1) * K
    store_rows(q_in_ptr + head_offs * K, q * decay_in, rows, offs_k, S, stride_heads, K)
    tile = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + head  # type: ignore[operator]
    decay = tl.sum(tl.where((offs_c == BLOCK_C - 1)[:, None], decay_in, 0.0), 0)
    tl.store(decay_ptr + tile * K + offs_k, decay, mask=offs_k < K)
    tile_offs = tile * BLOCK_C * BLOCK_C + offs_c[:, None] * BLOCK_C + offs_c[None, :]
    tl.store(scores_ptr + tile_offs, scores)
    if HAS_CORRECTION:
        beta = load_vector(beta_ptr + off_b * stride_betab + off_h * stride_betah, rows, S, stride_betas)
        L = tl.where(offs_c[:, None] > offs_c[None, :], kk * beta[:, None], 0.0)
        tl.store(L_ptr + tile_offs, L)
        store_rows(k_in_ptr + head_offs * K, k * decay_in * beta[:, None], rows, offs_k, S, stride_heads, K)


@kernel(do_not_specialize=["S"])
def channel_terms_backward(
    q_ptr, k_ptr, v_ptr, g_ptr, beta_ptr, documents_ptr, dscores_ptr, dL_ptr, du_ptr, dw_ptr, dq_in_ptr, dk_out_ptr,
    ddecay_ptr, previous_ptr, dq_ptr, dk_ptr, dv_ptr, dg_ptr, dbeta_ptr, S, H, heads_per_key, scale,
    stride_qs, stride_qb, stride_qh, stride_ks, stride_kb, stride_kh, stride_vs, stride_vb, stride_vh,
    stride_gs, stride_gb, stride_gh, stride_betas, stride_betab, stride_betah, stride_db, stride_us, stride_ws,
    stride_dvs, stride_dgs, stride_dbetas,
    K: tl.constexpr, V: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, HAS_CORRECTION: tl.constexpr,
    NORMALIZE: tl.constexpr, EPS: tl.constexpr,
    BLOCK_C: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of a chunk's inputs with a decay for each channel, as `head_terms_backward`."""
    start = tl.program_id(0) * BLOCK_C
    head = tl.program_id(1)
    off_b, off_h = (head // H).to(tl.int64), head % H
    off_g = off_h // heads_per_key
    offs_c, offs_k = tl.arange(0, BLOCK_C), tl.arange(0, BLOCK_K)
    rows = start + offs_c
    k_ptr += off_b * stride_kb + off_g * stride_kh
    head_offs = off_b * H + off_h
    q = load_rows(q_ptr + off_b * stride_qb + off_g * stride_qh, rows, offs_k, S, stride_qs, K)
    q *= _inverse_norm(tl.sum(q * q, 1, keep_dims=True), NORMALIZE, EPS)
    k = load_rows(k_ptr, rows, offs_k, S, stride_ks, K)
    k *= _inverse_norm(tl.sum(k * k, 1, keep_dims=True), NORMALIZE, EPS)
    g = load_rows(g_ptr + off_b * stride_gb + off_h * stride_gh, rows, offs_k, S, stride_gs, K)
    documents, before = _load_documents(
        documents_ptr + off_b * stride_db, previous_ptr + off_b, rows, start, S, HAS_DOCUMENTS
    )
    tile = tl.program_id(0).to(tl.int64) * tl.num_programs(1) + head  # type: ignore[operator]
    # gradients with respect to q_in, k_out and the decay of the state
    continues = (documents == before)[:, None]
    decay_in = _state_decays(g, continues)
    dq_in = load_rows(dq_in_ptr + head_offs * K, rows, offs_k, S, stride_ws, K) * scale
    dq = dq_in * decay_in
    dk = tl.zeros((BLOCK_C, BLOCK_K), dtype=tl.float32)
    ddecay_in = dq_in * q
    ddecay = tl.load(ddecay_ptr + tile * K + offs_k, mask=offs_k < K, other=0.0)
    ddecay_in += tl.where((offs_c == BLOCK_C - 1)[:, None], ddecay[None, :], 0.0)
    beta = tl.zeros((BLOCK_C,), dtype=tl.float32)
    dbeta = tl.zeros((BLOCK_C,), dtype=tl.float32)
    if HAS_CORRECTION:
        beta = load_vector(beta_ptr + off_b * stride_betab + off_h * stride_betah, rows, S, stride_betas)
        dw = load_rows(dw_ptr + head_offs * K, rows, offs_k, S, stride_ws, K)
        dk += dw * decay_in * beta[:, None]
        dbeta += tl.sum(dw * k * decay_in, 1)
        ddecay_in += dw * k * beta[:, None]
    dg = tl.where(continues, tl.cumsum(ddecay_in * decay_in, 0, reverse=True), 0.0)
    # gradients with respect to the scores, L, and k_out
    for j in range(0, BLOCK_C):
        decays = _channel_decays(g, offs_c, documents == _document_of(documents, offs_c, j), j)
        k_j = _load_head_row(k_ptr, start + j, offs_k, S, stride_ks, K, NORMALIZE, EPS)
        column = tile * BLOCK_C * BLOCK_C + offs_c * BLOCK_C + j
        dscores_j = tl.load(dscores_ptr + column) * scale
        decayed_k = decays * k_j[None, :]
        dq += dscores_j[:, None] * decayed_k
        dk_j = dscores_j[:, None] * q  # times the decays
        if HAS_CORRECTION:
            dL_j = tl.where(offs_c > j, tl.load(dL_ptr + column), 0.0)
            dbeta += tl.sum(dL_j[:, None] * k * decayed_k, 1)
            dkk_j = (dL_j * beta)[:, None]
            dk += dkk_j * decayed_k
            dk_j += dkk_j * k
        dk_out_ptrs = dk_out_ptr + head_offs * K + (start + j).to(tl.int64) * stride_ws + offs_k
        dk_out = tl.load(dk_out_ptrs, mask=(offs_k < K) & (start + j + offs_k * 0 < S), other=0.0)
        dk_j += tl.where((offs_c == BLOCK_C - 1)[:, None], dk_out[None, :], 0.0)
        dk_j *= decays
        dk += tl.where((offs_c == j)[:, None], tl.sum(dk_j, 0, keep_dims=True), 0.0)
        # g of token l is a term of the decays from token j to each token i from l on
        later_sums = tl.cumsum(dk_j * k_j[None, :], 0, reverse=True)
        dg += tl.where((offs_c > j)[:, None], later_sums, 0.0)
    store_rows(dq_ptr + head_offs * K, dq, rows, offs_k, S, stride_ws, K)
    store_rows(dk_ptr + head_offs * K, dk, rows, offs_k, S, stride_ws, K)
    store_rows(dg_ptr + head_offs * K, dg, rows, offs_k, S, stride_dgs, K)
    if HAS_CORRECTION:
        for start_v in range(0, V, BLOCK_V):
            offs_v = start_v + tl.arange(0, BLOCK_V)
            du = load_rows(du_ptr + head_offs * V, rows, offs_v, S, stride_us, V)
            v = load_rows(v_ptr + off_b * stride_vb + off_h * stride_vh, rows, offs_v, S, stride_vs, V)
            dbeta += tl.sum(du * v, 1)
            store_rows(dv_ptr + head_offs * V, du * beta[:, None], rows, offs_v, S, stride_dvs, V)
        tl.store(
            dbeta_ptr + rows.to(tl.int64) * stride_dbetas + head_offs, dbeta.to(dbeta_ptr.dtype.element_ty), rows < S
        )
