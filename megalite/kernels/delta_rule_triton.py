"""The Triton form of kernels/delta_rule.py: the same functions, launched as kernels over spans of tokens.

A span is several groups of chunks, so that one launch has enough programs, and about SPAN_TOKENS tokens of all samples,
which bounds the memory for what is between the launches. Backward recomputes the states of chunks from those that
forward saved before each group, all groups at once.

Products are computed in fp32, as three products of TF32 on tensor cores (about 22 bits), whatever the precision of the
inputs, and no sum depends on the order in which programs run. fp64 and chunks of another size than the default have the
torch form.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.common.tables import load_table
from megalite.kernels import dispatch, recurrence_scan, recurrence_terms
from megalite.kernels.dispatch import ceil_div, power_of_two, representatives, unit_stride, use_triton
from megalite.kernels.recurrence_inputs import L2_NORM_EPS, Recurrence, RecurrenceInputs

# by kernel: BLOCK_K, BLOCK_V (0: all channels), num_warps, num_stages
HEAD_TILES, HEAD_TILES_WGMMA, CHANNEL_TILES = load_table(__file__, "tiles")["recurrence"].values()
# tokens of a chunk; those of a group of chunks are a multiple of them
HEAD_DECAY_CHUNK = 64
CHANNEL_DECAY_CHUNK = 16  # the decays between two tokens have K elements
SPAN_TOKENS = 4096
MAX_KEY_DIM, MAX_VALUE_DIM = 128, 256  # a state is in one or two tiles of 64 keys
BLOCK_J = 32  # tokens of a chunk that a product with [C, C] sums at a time
MIN_BLOCK = 16  # of a product on tensor cores
MAX_GRID_Y = 65535  # programs along the second dimension of a CUDA grid


def supports_heads(key_dim: int, value_dim: int, dtype: torch.dtype) -> bool:
    """Return whether heads with these channels have Triton kernels."""
    return key_dim <= MAX_KEY_DIM and value_dim <= MAX_VALUE_DIM and dtype != torch.float64


def supports(inputs: RecurrenceInputs, recurrence: Recurrence) -> bool:
    """Return whether these inputs have Triton kernels, and run them."""
    B, H, K, V = inputs.state_shape
    if recurrence.chunk_size is not None or B * H > MAX_GRID_Y:
        return False
    return all(x is None or (supports_heads(K, V, x.dtype) and use_triton(x)) for x in inputs)


class _Tile(NamedTuple):
    block_k: int
    block_v: int
    block_j: int  # depth of a product with [C, C]
    options: dict[str, int]


class _Span(NamedTuple):
    """Some tokens with their documents, and what all launches for them need."""

    inputs: RecurrenceInputs  # with unit strides along the channels
    documents: Tensor  # [B, S]; any tensor if a sample is one document
    previous: Tensor  # [B]
    has_documents: bool
    scale: float
    normalize: bool
    chunk_size: int
    group_chunks: int

    @property
    def num_chunks(self) -> int:
        return ceil_div(len(self.inputs.v), self.chunk_size)

    @property
    def has_correction(self) -> bool:
        return self.inputs.beta is not None

    def tile(self, kernel: str) -> _Tile:
        """Return the tile of a kernel."""
        tables = [CHANNEL_TILES if self.inputs.is_channel_decay else HEAD_TILES]
        if dispatch.sm_major(self.inputs.v.device) == 9 and not self.inputs.is_channel_decay:
            tables.insert(0, HEAD_TILES_WGMMA)
        block_k, block_v, num_warps, num_stages = next(table[kernel] for table in tables if kernel in table)
        max_k, max_v = (max(MIN_BLOCK, power_of_two(n)) for n in (self.inputs.k.shape[3], self.inputs.v.shape[3]))
        return _Tile(
            max_k if block_k == 0 else min(block_k, max_k),
            max_v if block_v == 0 else min(block_v, max_v),
            min(BLOCK_J, self.chunk_size),
            {"num_warps": num_warps, "num_stages": num_stages},
        )

    def empty(self, *shape: int) -> Tensor:
        """Return a new fp32 tensor."""
        return torch.empty(shape, dtype=torch.float32, device=self.inputs.v.device)

    def per_token(self, channels: int) -> Tensor:
        """Return a new tensor [S, B, H, channels]."""
        return self.empty(*self.inputs.v.shape[:3], channels)

    def per_chunk(self, *shape: int) -> Tensor:
        """Return a new tensor [chunks, B, H, ...]."""
        return self.empty(self.num_chunks, *self.inputs.v.shape[1:3], *shape)


def _make_span(inputs: RecurrenceInputs, recurrence: Recurrence, span: slice) -> _Span:
    chunk_size = CHANNEL_DECAY_CHUNK if inputs.is_channel_decay else HEAD_DECAY_CHUNK
    group_chunks = ceil_div(recurrence.groups(inputs)[0].stop, chunk_size)
    recurrence = recurrence.tokens(span)
    part = inputs.tokens(span)
    q, k, v = (unit_stride(x) for x in part[:3])
    log_decay = unit_stride(part.log_decay) if part.is_channel_decay else part.log_decay
    part = part._replace(q=q, k=k, v=v, log_decay=log_decay)
    documents = previous = v
    has_documents = recurrence.documents_BS is not None
    if recurrence.documents_BS is not None:
        documents = unit_stride(recurrence.documents_BS)
        first = documents[:, 0] if recurrence.previous_B is None else recurrence.previous_B
        previous = first.contiguous()
    scale, normalize = recurrence.scale, recurrence.normalize_qk
    return _Span(part, documents, previous, has_documents, scale, normalize, chunk_size, group_chunks)


def _spans(inputs: RecurrenceInputs, recurrence: Recurrence) -> list[tuple[slice, slice]]:
    """Return (groups, their tokens) of each span."""
    groups = recurrence.groups(inputs)
    group_size = groups[0].stop
    per_span = max(1, SPAN_TOKENS // (group_size * inputs.v.shape[1]))
    spans = []
    for first in range(0, len(groups), per_span):
        numbers = slice(first, min(first + per_span, len(groups)))
        spans.append((numbers, slice(groups[first].start, groups[numbers.stop - 1].stop)))
    return spans


def _span_length(span: tuple[slice, slice]) -> int:
    return span[1].stop - span[1].start


class _Terms(NamedTuple):
    """The terms of all chunks of a span (kernels/recurrence_terms.py).

    q_in and k_out are q and k with a factor for each token and head, or, with a decay for each channel, complete.
    Without a correction u is v, and there is no inverse and no w; other tensors take their place.
    """

    scores: Tensor  # [chunks, B, H, C, C], like the inverse
    inverse: Tensor
    u: Tensor  # [S, B, H, V]
    w: Tensor  # [S, B, H, K]
    q_in: Tensor
    q_factor: Tensor  # [S, B, H]
    k_out: Tensor
    k_factor: Tensor
    decay: Tensor  # [chunks, B, H] or [chunks, B, H, K]


def _gate_strides(span: _Span) -> tuple[int, ...]:
    """Return the strides of the log decay, of beta and of the documents."""
    beta = span.inputs.beta
    beta_strides = (0, 0, 0) if beta is None else beta.stride()
    return (*span.inputs.log_decay.stride()[:3], *beta_strides, span.documents.stride(0))


def _compute_terms(span: _Span) -> _Terms:
    q, k, v, g, beta = span.inputs
    H, K, C = v.shape[2], k.shape[3], span.chunk_size
    is_channel_decay = span.inputs.is_channel_decay
    scores = span.per_chunk(C, C)
    L = span.per_chunk(C, C) if span.has_correction else scores
    tokens = (*v.shape[:3], K) if is_channel_decay else v.shape[:3]
    q_factor, k_factor = span.empty(*tokens), span.empty(*tokens)
    w_factor = span.empty(*tokens) if span.has_correction else k_factor  # of k, in (I + L)^-1 of it
    if is_channel_decay:
        name, kernel, decay = "channel_terms", recurrence_terms.channel_terms, span.per_chunk(K)
    else:
        name, kernel, decay = "head_terms", recurrence_terms.head_terms, span.per_chunk()
    tile = span.tile(name)
    tensors = (q, k, g, v if beta is None else beta, span.documents, scores, L, q_factor, k_factor, w_factor, decay)
    strides = (*q.stride()[:3], *k.stride()[:3], *_gate_strides(span))
    constexprs = (K, span.has_documents, span.has_correction, span.normalize, L2_NORM_EPS, C, tile.block_k)
    kernel[(span.num_chunks, v.shape[1] * H)](
        *tensors, span.previous, len(v), H, H // k.shape[2], span.scale, *strides, *constexprs, **tile.options
    )
    inverse, u, w = L, v, L
    if beta is not None:
        inverse = torch.empty_like(L)
        recurrence_terms.invert[(L.numel() // C**2,)](L, inverse, C, num_warps=1)
        u = _apply_inverse(span, inverse, v, beta)
        w = (
            _apply_inverse(span, inverse, w_factor, None)
            if is_channel_decay
            else _apply_inverse(span, inverse, k, w_factor)
        )
    if is_channel_decay:
        return _Terms(scores, inverse, u, w, q_factor, q_factor, k_factor, k_factor, decay)
    return _Terms(scores, inverse, u, w, q, q_factor, k, k_factor, decay)


def _apply_inverse(span: _Span, inverse: Tensor, x: Tensor, factor: Tensor | None) -> Tensor:
    """Return the product of each chunk's inverse and x times a factor [S, B, H], [S, B, H, D] in fp32."""
    S, B, H = span.inputs.v.shape[:3]
    D = x.shape[3]
    y = span.per_token(D)
    tile = span.tile("apply_inverse")
    strides = (*x.stride()[:3], *((0, 0, 0) if factor is None else factor.stride()))
    recurrence_terms.apply_inverse[(span.num_chunks, B * H, ceil_div(D, tile.block_v))](
        inverse, x, x if factor is None else factor, y, S, H, H // x.shape[2], *strides,
        D, factor is not None, span.chunk_size, tile.block_j, tile.block_v, **tile.options,
    )  # fmt: skip
    return y


def _heads_per_key(span: _Span) -> int:
    """Return the heads that share a head of q_in and k_out: complete ones are not shared."""
    return 1 if span.inputs.is_channel_decay else span.inputs.v.shape[2] // span.inputs.k.shape[2]


def _scan(span: _Span, terms: _Terms, first_states: Tensor, final: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return x [S, B, H, V] and the states before each chunk, [chunks, B, H, K, V].

    Args:
        span: The tokens.
        terms: Their terms.
        first_states: The states before the first chunk of each group, [groups, B, H, K, V]; one for all chunks if
            there is a `final`.
        final: Is overwritten with the state after the last chunk, if any.
    """
    B, H, V = terms.u.shape[1:]
    K, C = span.inputs.k.shape[3], span.chunk_size
    x = span.per_token(V) if span.has_correction else terms.u
    states = span.per_chunk(K, V)
    tile = span.tile("scan")
    chunks_per_group = span.num_chunks if final is not None else span.group_chunks
    tensors = (terms.k_out, terms.k_factor, terms.w, terms.u, x, terms.decay, first_states, states)
    strides = (*terms.k_out.stride()[:3], *terms.u.stride()[:3], terms.w.stride(0))
    constexprs = (K, V, span.has_correction, not span.inputs.is_channel_decay, final is not None, C)
    recurrence_scan.scan[(ceil_div(V, tile.block_v), B * H, len(first_states))](
        *tensors, states if final is None else final, len(x), H, _heads_per_key(span), chunks_per_group, *strides,
        *constexprs, tile.block_k, tile.block_v, **tile.options,
    )  # fmt: skip
    return x, states


def _scan_backward(span: _Span, terms: _Terms, do: Tensor, dstate: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return dx [S, B, H, V], the gradients of the states after each chunk, and that of the state before the span."""
    B, H, V = do.shape[1:]
    K, C = span.inputs.k.shape[3], span.chunk_size
    dx, dstates, dinitial = span.per_token(V), span.per_chunk(K, V), torch.empty_like(dstate)
    tile = span.tile("scan_backward")
    tensors = (terms.q_in, terms.q_factor, terms.k_out, terms.k_factor, terms.w, terms.scores, do, terms.decay)
    strides = (*terms.q_in.stride()[:3], *terms.k_out.stride()[:3], *do.stride()[:3], dx.stride(0), terms.w.stride(0))
    constexprs = (
        K,
        V,
        span.has_correction,
        not span.inputs.is_channel_decay,
        tile.block_j,
        C,
        tile.block_k,
        tile.block_v,
    )
    recurrence_scan.scan_backward[(ceil_div(V, tile.block_v), B * H)](
        *tensors, dstate, dx, dstates, dinitial, len(do), H, _heads_per_key(span), *strides, *constexprs, **tile.options
    )
    return dx, dstates, dinitial


def _compute_outputs(span: _Span, terms: _Terms, x: Tensor, states: Tensor, o_SBHV: Tensor) -> None:
    """Overwrite o, which is contiguous."""
    B, H, V = x.shape[1:]
    K, C = span.inputs.k.shape[3], span.chunk_size
    tile = span.tile("outputs")
    strides = (*terms.q_in.stride()[:3], *x.stride()[:3], o_SBHV.stride(0))
    constexprs = (K, V, not span.inputs.is_channel_decay, tile.block_j, C, tile.block_k, tile.block_v)
    recurrence_scan.outputs[(span.num_chunks, B * H, ceil_div(V, tile.block_v))](
        terms.q_in, terms.q_factor, terms.scores, x, states, o_SBHV, len(x), H, _heads_per_key(span), *strides,
        *constexprs, **tile.options,
    )  # fmt: skip


def _input_grads(
    span: _Span, terms: _Terms, x: Tensor, states: Tensor, do: Tensor, dx: Tensor, dstates: Tensor,
    grads: RecurrenceInputs,
) -> None:  # fmt: skip
    """Overwrite the gradients of the inputs, which are contiguous."""
    q, k, v, g, beta = span.inputs
    B, H, V = v.shape[1:]
    G, K, C = k.shape[2], k.shape[3], span.chunk_size
    grid = (span.num_chunks, B * H)
    dscores = span.per_chunk(C, C)
    # u is read no more, and without a correction there is none
    dL, du = (span.per_chunk(C, C), terms.u) if span.has_correction else (dscores, dx)
    tile = span.tile("score_grads")
    do_and_x_strides = (*do.stride()[:3], *x.stride()[:3])
    recurrence_scan.score_grads[grid](
        do, x, dx, terms.inverse, du, dscores, dL, len(v), H, *do_and_x_strides, dx.stride(0),
        V, span.has_correction, tile.block_j, C, tile.block_v, **tile.options,
    )  # fmt: skip
    dq_in, dk_out = span.per_token(K), span.per_token(K)
    dw = span.per_token(K) if span.has_correction else dq_in
    ddecay = span.per_chunk(K)
    tile = span.tile("key_grads")
    recurrence_scan.key_grads[(*grid, ceil_div(K, tile.block_k))](
        do, x, du, states, dstates, dq_in, dk_out, dw, ddecay, len(v), H, *do_and_x_strides, du.stride(0),
        dw.stride(0), K, V, span.has_correction, C, tile.block_k, tile.block_v, **tile.options,
    )  # fmt: skip
    dq, dk = span.per_token(K), span.per_token(K)
    beta_or_any, dbeta = (v, dq) if beta is None or grads.beta is None else (beta, grads.beta)
    key_strides = (*q.stride()[:3], *k.stride()[:3])
    head_sizes = (len(v), H, H // G, span.scale)
    flags = (span.has_documents, span.has_correction, span.normalize, L2_NORM_EPS)
    if span.inputs.is_channel_decay:
        name, kernel, parts = "channel_terms_backward", recurrence_terms.channel_terms_backward, ()
        dqk, dkk = dscores, dL
    else:
        name, kernel = "head_terms_backward", recurrence_terms.head_terms_backward
        dqk, dkk = terms.scores, terms.inverse  # which are read no more
        parts = span.empty(*v.shape[:3]), span.empty(*v.shape[:3])  # of the gradients of g and of beta
        tile = span.tile("head_decay_grads")
        recurrence_terms.head_decay_grads[grid](
            q, k, g, beta_or_any, span.documents, dscores, dL, dqk, dkk, *parts, span.previous, *head_sizes,
            *key_strides, *_gate_strides(span), K, *flags, C, tile.block_k, **tile.options,
        )  # fmt: skip
    tile = span.tile(name)
    tensors = (q, k, v, g, beta_or_any, span.documents, dqk, dkk, du, dw, dq_in, dk_out, ddecay, span.previous, *parts)
    strides = (*key_strides, *v.stride()[:3], *_gate_strides(span), du.stride(0), dw.stride(0))
    strides += (grads.v.stride(0), grads.log_decay.stride(0), dbeta.stride(0))
    block_j = () if span.inputs.is_channel_decay else (tile.block_j,)
    kernel[grid](
        *tensors, dq, dk, grads.v, grads.log_decay, dbeta, *head_sizes, *strides,
        K, V, *flags, *block_j, C, tile.block_k, tile.block_v, **tile.options,
    )  # fmt: skip
    if beta is None:
        grads.v.copy_(dx)
    tile = span.tile("normalize_backward")
    block_m = tile.block_v  # rows of a program
    for x_SBGK, dheads, dx_SBGK in ((q, dq, grads.q), (k, dk, grads.k)):
        recurrence_scan.normalize_backward[(ceil_div(len(v), block_m), B * G)](
            x_SBGK, dheads, dx_SBGK, len(v), G, H // G, *x_SBGK.stride()[:3], dx_SBGK.stride(0),
            K, span.normalize, L2_NORM_EPS, block_m, tile.block_k, **tile.options,
        )  # fmt: skip


def forward(
    inputs: RecurrenceInputs, recurrence: Recurrence, state_BHKV: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute `recurrence_forward`."""
    spans = _spans(inputs, recurrence)
    device = inputs.v.device
    states = torch.empty((spans[-1][0].stop, *inputs.state_shape), dtype=torch.float32, device=device)
    if state_BHKV is None:
        state = torch.zeros(inputs.state_shape, dtype=torch.float32, device=device)
    else:
        state = state_BHKV.to(torch.float32).contiguous()
    o_SBHV = torch.empty(inputs.v.shape, dtype=inputs.v.dtype, device=device)
    for groups, tokens in representatives(spans, _span_length):
        span = _make_span(inputs, recurrence, tokens)
        terms = _compute_terms(span)
        last = torch.empty_like(state)
        x, chunk_states = _scan(span, terms, state[None], last)
        states[groups] = chunk_states[:: span.group_chunks]
        _compute_outputs(span, terms, x, chunk_states, o_SBHV[tokens])
        state = last
    return o_SBHV, state, states


def backward(
    inputs: RecurrenceInputs, recurrence: Recurrence, states: Tensor, do_SBHV: Tensor, dstate_BHKV: Tensor
) -> tuple[RecurrenceInputs, Tensor]:
    """Compute `recurrence_backward`."""
    new = (None if x is None else torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in inputs)
    grads = RecurrenceInputs(*new)  # type: ignore[arg-type]
    dstate = dstate_BHKV.to(torch.float32).contiguous()
    for groups, tokens in representatives(_spans(inputs, recurrence)[::-1], _span_length):
        span = _make_span(inputs, recurrence, tokens)
        do = unit_stride(do_SBHV[tokens])
        terms = _compute_terms(span)
        x, chunk_states = _scan(span, terms, states[groups], None)
        dx, dstates, dstate = _scan_backward(span, terms, do, dstate)
        _input_grads(span, terms, x, chunk_states, do, dx, dstates, grads.tokens(tokens))
    return grads, dstate


def state_map(inputs: RecurrenceInputs, recurrence: Recurrence) -> Tensor:
    """Compute `recurrence_map`: a scan of [A | U], in which A starts as the identity and has no values of its own."""
    B, H, K, V = inputs.state_shape
    columns = K if inputs.beta is not None else 1
    state = torch.zeros(B, H, K, columns + V, dtype=torch.float32, device=inputs.v.device)
    state[..., :columns] = 1.0 if columns == 1 else torch.eye(K, device=state.device)
    for _, tokens in representatives(_spans(inputs, recurrence), _span_length):
        span = _make_span(inputs, recurrence, tokens)
        terms = _compute_terms(span)
        last = torch.empty_like(state)
        _scan(span, terms._replace(u=F.pad(terms.u, (columns, 0))), state[None], last)
        state = last
    return state


def state_grad(inputs: RecurrenceInputs, recurrence: Recurrence, do_SBHV: Tensor) -> Tensor:
    """Compute `recurrence_state_grad`."""
    dstate = torch.zeros(inputs.state_shape, dtype=torch.float32, device=inputs.v.device)
    for _, tokens in representatives(_spans(inputs, recurrence)[::-1], _span_length):
        span = _make_span(inputs, recurrence, tokens)
        _, _, dstate = _scan_backward(span, _compute_terms(span), unit_stride(do_SBHV[tokens]), dstate)
    return dstate
