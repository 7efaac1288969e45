"""Linear recurrences with a matrix as their state: gated delta rule, Kimi delta attention, Mamba-2.

    S_t = a_t S_{t-1} + k_t b_t (v_t - (a_t S_{t-1})^T k_t)^T      S [K, V], a_t = exp(g_t) of a head or of each channel
    o_t = S_t^T q_t                                                   without b_t: S_t = a_t S_{t-1} + k_t v_t^T

A decay per head is the gated delta rule (arXiv:2412.06464), one per key channel is Kimi delta attention
(arXiv:2510.26692), and one per head without the correction is Mamba-2 (arXiv:2405.21060). `delta_rule_reference` is
the definition. S starts at 0 with each document.

Chunks of C tokens (arXiv:2406.06484), with the state S before the chunk, i and j in it:

    D_ij  = exp(sum of g over j < l <= i) if j <= i are of one document, else 0
    L_ij  = b_i (k_i . k_j) D_ij  for j < i              in_i  = exp(sum of g up to i) if the state is of i's document
    [u | w] = (I + L)^-1 [b v | b in k]                  out_j = D_Cj
    o     = (in q) S + (q k^T D) (u - w S)
    S'    = in_C S + (out k)^T (u - w S)                 so S' = A S + U, an affine map of S

Documents are masks inside the chunks, so any lengths take ceil(T / C) chunks. Every sum of g is a sum over the tokens
between j and i of the same document, never a difference of two sums: small decays are not lost beside large ones,
neither in D nor in the gradient of g, and another document's numbers change no bit of a result.

Inputs are sequence first. G key heads serve H value heads, H a multiple of G. Saved for backward are the inputs, and
the state at the start of every group of GROUP_CHUNKS chunks: H K V / (C GROUP_CHUNKS) elements per token. Backward
recomputes one group at a time. All sums are in fp32 (fp64 for fp64 inputs), in a fixed order.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from megalite.kernels.dispatch import accum_dtype, representatives

HEAD_DECAY_CHUNK = 64
CHANNEL_DECAY_CHUNK = 16  # D_ij has K elements
GROUP_CHUNKS = 8
L2_NORM_EPS = 1e-6  # that of Qwen3-Next and flash-linear-attention


class RecurrenceInputs(NamedTuple):
    """The inputs of S tokens: q_SBGK, k_SBGK, v_SBHV, log_decay [S, B, H] or [S, B, H, K], beta_SBH or None."""

    q: Tensor
    k: Tensor
    v: Tensor
    log_decay: Tensor
    beta: Tensor | None

    def tokens(self, span: slice) -> "RecurrenceInputs":
        """Return the inputs of some tokens."""
        return RecurrenceInputs(*(None if x is None else x[span] for x in self))  # type: ignore[arg-type]

    @property
    def state_shape(self) -> tuple[int, int, int, int]:
        """[B, H, K, V]."""
        return self.v.shape[1], self.v.shape[2], self.k.shape[3], self.v.shape[3]

    @property
    def is_channel_decay(self) -> bool:
        return self.log_decay.dim() == 4


@dataclass(frozen=True)
class Recurrence:
    """The properties of a recurrence, and the documents of its tokens.

    scale         factor of q
    normalize_qk  divide each q and k by sqrt(|x|^2 + 1e-6) first
    documents_BS  a number for each token that differs between documents, like a document's first position; None: each
                  sample is one document
    previous_B    that number of the token before the first one, to whose document the initial state belongs; None:
                  there is no initial state, or it belongs to the document of the first token
    chunk_size    tokens of a chunk; None: 64, or 16 with a decay for each channel
    """

    scale: float = 1.0
    normalize_qk: bool = False
    documents_BS: Tensor | None = None
    previous_B: Tensor | None = None
    chunk_size: int | None = None

    def tokens(self, span: slice) -> "Recurrence":
        """Return the same for some tokens, whose first is `span.start`."""
        if self.documents_BS is None:
            return self
        previous_B = self.previous_B if span.start == 0 else self.documents_BS[:, span.start - 1]
        return replace(self, documents_BS=self.documents_BS[:, span], previous_B=previous_B)

    def chunk_size_of(self, inputs: RecurrenceInputs) -> int:
        """Return the number of tokens of a chunk."""
        default = CHANNEL_DECAY_CHUNK if inputs.is_channel_decay else HEAD_DECAY_CHUNK
        return max(1, min(self.chunk_size or default, len(inputs.v)))

    def groups(self, inputs: RecurrenceInputs) -> list[slice]:
        """Return the tokens of each group of chunks."""
        size = GROUP_CHUNKS * self.chunk_size_of(inputs)
        length = len(inputs.v)
        return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def l2_normalize(x: Tensor) -> Tensor:
    """Return x / sqrt(|x|^2 + 1e-6) along the last dim."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + L2_NORM_EPS)


def delta_rule_reference(
    inputs: RecurrenceInputs, recurrence: Recurrence, state_BHKV: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute the recurrence by its definition, token by token; arguments and results are those of `delta_rule`."""
    dtype = accum_dtype(inputs.v)
    q, k, v, g = (x.to(dtype) for x in inputs[:4])
    beta = None if inputs.beta is None else inputs.beta.to(dtype)
    if recurrence.normalize_qk:
        q, k = l2_normalize(q), l2_normalize(k)
    q, k = (x.repeat_interleave(v.shape[2] // x.shape[2], 2) for x in (q * recurrence.scale, k))
    state = v.new_zeros(inputs.state_shape) if state_BHKV is None else state_BHKV.to(dtype)
    outputs = []
    documents = recurrence.documents_BS
    for t in range(len(v)):
        if documents is not None:
            previous = recurrence.previous_B if t == 0 else documents[:, t - 1]
            if previous is not None:
                state = state.where((documents[:, t] == previous).view(-1, 1, 1, 1), 0.0)
        decay = g[t].exp()
        state = state * (decay.unsqueeze(-1) if inputs.is_channel_decay else decay[..., None, None])
        value = v[t]
        if beta is not None:
            value = beta[t].unsqueeze(-1) * (value - torch.einsum("bhkv,bhk->bhv", state, k[t]))
        state = state + k[t].unsqueeze(-1) * value.unsqueeze(-2)
        outputs.append(torch.einsum("bhkv,bhk->bhv", state, q[t]))
    return torch.stack(outputs).to(inputs.v.dtype), state


class _Chunks(NamedTuple):
    """The terms of N chunks that do not depend on the state, [N, B, G, H / G, ...] (see the top of the file)."""

    q_in: Tensor  # [C, K]
    scores: Tensor  # [C, C]
    u: Tensor  # [C, V]
    w: Tensor | None  # [C, K]; None without a correction
    k_out: Tensor  # [C, K]
    decay: Tensor  # in_C, [1, 1] or [K, 1]


def _to_chunks(x_SBHK: Tensor, size: int, groups: int, dtype: torch.dtype) -> Tensor:
    """Return x [S, B, H, K] as [N, B, G, H / G, C, K], padded with zeros."""
    S, B = x_SBHK.shape[:2]
    num_chunks = -(-S // size)
    x = F.pad(x_SBHK.to(dtype), (0, 0, 0, 0, 0, 0, 0, num_chunks * size - S))
    return x.view(num_chunks, size, B, groups, -1, x.shape[-1]).permute(0, 2, 3, 4, 1, 5).contiguous()


def _from_chunks(x: Tensor, length: int) -> Tensor:
    """Return x [N, B, G, H / G, C, V] as [S, B, H, V]."""
    return x.permute(0, 4, 1, 2, 3, 5).flatten(3, 4).flatten(0, 1)[:length]


def _chunk_documents(recurrence: Recurrence, length: int, size: int) -> tuple[Tensor, Tensor] | None:
    """Return the documents of the tokens of each chunk, [N, B, C], and of the token before it, [N, B]."""
    documents_BS = recurrence.documents_BS
    if documents_BS is None:
        return None
    padding = -length % size
    if padding:  # belongs to the last document, whose state it passes on
        documents_BS = torch.cat([documents_BS, documents_BS[:, -1:].expand(-1, padding)], 1)
    documents = documents_BS.unflatten(1, (-1, size)).transpose(0, 1)
    first = documents[0, :, 0] if recurrence.previous_B is None else recurrence.previous_B
    return documents, torch.cat([first[None], documents[:-1, :, -1]])


def _prepare(inputs: RecurrenceInputs, recurrence: Recurrence) -> _Chunks:
    """Return the terms of all chunks."""
    dtype = accum_dtype(inputs.v)
    size, G = recurrence.chunk_size_of(inputs), inputs.k.shape[2]
    q, k = (_to_chunks(x, size, G, dtype) for x in (inputs.q, inputs.k))
    v = _to_chunks(inputs.v, size, G, dtype)
    if recurrence.normalize_qk:
        q, k = l2_normalize(q), l2_normalize(k)
    q = q * recurrence.scale
    g = inputs.log_decay if inputs.is_channel_decay else inputs.log_decay.unsqueeze(-1)
    g = _to_chunks(g, size, G, dtype)  # [..., C, 1 or K]
    is_causal = torch.ones(size, size, dtype=torch.bool, device=v.device).tril()
    is_earlier = is_causal.tril(-1)
    sums_up_to = is_causal.to(dtype)  # a product with it sums over the tokens up to each one
    documents = _chunk_documents(recurrence, len(inputs.v), size)
    decay_in = g
    if documents is not None:
        of_token, before = documents
        same = (of_token[..., :, None] == of_token[..., None, :])[:, :, None, None]
        is_causal, is_earlier = is_causal & same, is_earlier & same
        continues = (of_token == before[..., None])[:, :, None, None, :, None]
        decay_in = g.where(continues, 0.0)
    decay_in = (sums_up_to @ decay_in).exp()
    if documents is not None:
        decay_in = decay_in.where(continues, 0.0)
    k_scores = None
    if inputs.is_channel_decay:
        # [..., i, j, K]: the sum of g over j < l <= i is that over l <= i of the tokens after j
        sums = sums_up_to @ g.unsqueeze(-2).where(is_earlier.unsqueeze(-1), 0.0).flatten(-2)
        decays = sums.unflatten(-1, (size, -1)).exp().where(is_causal.unsqueeze(-1), 0.0)
        decayed_k = decays * k.unsqueeze(-3)
        scores, k_scores = (decayed_k @ torch.stack([q, k], -1)).unbind(-1)
        k_out = k * decays[..., -1, :, :]
    else:
        decays = (sums_up_to @ g.where(is_earlier, 0.0)).exp().where(is_causal, 0.0)
        scores = (q @ k.mT) * decays
        k_out = k * decays[..., -1, :].unsqueeze(-1)
    decay = decay_in[..., -1, :].unsqueeze(-1)
    if inputs.beta is None:
        return _Chunks(q * decay_in, scores, v, None, k_out, decay)
    beta = _to_chunks(inputs.beta.unsqueeze(-1), size, G, dtype)
    values = torch.cat([beta * v, beta * decay_in * k], -1)
    if k_scores is None:
        k_scores = (k @ k.mT) * decays
    # the diagonal of ones and what is above it are not read
    solved = torch.linalg.solve_triangular(beta * k_scores, values, upper=False, unitriangular=True)
    u, w = solved.split([v.shape[-1], k.shape[-1]], -1)
    return _Chunks(q * decay_in, scores, u, w, k_out, decay)


def _each_chunk(chunks: _Chunks) -> Iterator[_Chunks]:
    parts = (x.unbind(0) if x is not None else [None] * len(chunks.u) for x in chunks)
    return (_Chunks(*chunk) for chunk in zip(*parts, strict=True))


def _scan(chunks: _Chunks, state: Tensor) -> tuple[Tensor, Tensor]:
    """Return the outputs [N, B, G, H / G, C, V], and the state [B, G, H / G, K, V] after the last chunk."""
    outputs = []
    for chunk in _each_chunk(chunks):
        values = chunk.u if chunk.w is None else chunk.u - chunk.w @ state
        outputs.append(chunk.q_in @ state + chunk.scores @ values)
        state = chunk.decay * state + chunk.k_out.mT @ values
    return torch.stack(outputs), state


def _run_group(inputs: RecurrenceInputs, recurrence: Recurrence, state_BHKV: Tensor) -> tuple[Tensor, Tensor]:
    """Return o_SBHV and the state after a group of chunks, as autograd records it."""
    state = state_BHKV.unflatten(1, (inputs.k.shape[2], -1))
    outputs, state = _scan(_prepare(inputs, recurrence), state)
    return _from_chunks(outputs, len(inputs.v)), state.flatten(1, 2)


def _group_length(group: tuple[int, slice]) -> int:
    """Return the number of tokens of a numbered group."""
    _, span = group
    return span.stop - span.start


@torch.no_grad()
def recurrence_forward(
    inputs: RecurrenceInputs, recurrence: Recurrence, state_BHKV: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return o_SBHV, the state after the last token, and the states before each group, [groups, B, H, K, V]."""
    dtype = accum_dtype(inputs.v)
    groups = recurrence.groups(inputs)
    states = inputs.v.new_zeros(len(groups), *inputs.state_shape, dtype=dtype)
    state = states[0].clone() if state_BHKV is None else state_BHKV.to(dtype)
    o_SBHV = torch.empty_like(inputs.v, memory_format=torch.contiguous_format)
    for n, span in representatives([*enumerate(groups)], _group_length):
        states[n] = state
        o_SBHV[span], state = _run_group(inputs.tokens(span), recurrence.tokens(span), state)
    return o_SBHV, state, states


def recurrence_backward(
    inputs: RecurrenceInputs, recurrence: Recurrence, states: Tensor, do_SBHV: Tensor, dstate_BHKV: Tensor
) -> tuple[RecurrenceInputs, Tensor]:
    """Return the gradients of the inputs and of the initial state.

    Args:
        inputs: The inputs.
        recurrence: The recurrence.
        states: The states before each group, from `recurrence_forward`.
        do_SBHV: The gradient of o.
        dstate_BHKV: The gradient of the state after the last token.
    """
    grads = RecurrenceInputs(*(None if x is None else torch.empty_like(x) for x in inputs))  # type: ignore[arg-type]
    dstate = dstate_BHKV.to(states.dtype)
    groups = [*enumerate(recurrence.groups(inputs))]
    for n, span in representatives(groups[::-1], _group_length):
        with torch.enable_grad():
            group = RecurrenceInputs(
                *(None if x is None else x.detach().requires_grad_() for x in inputs.tokens(span))  # type: ignore[arg-type]
            )
            state = states[n].detach().requires_grad_()
            o, last = _run_group(group, recurrence.tokens(span), state)
        leaves = [x for x in group if x is not None]
        *group_grads, dstate = torch.autograd.grad([o, last], [*leaves, state], [do_SBHV[span].to(o.dtype), dstate])
        for grad, group_grad in zip((x for x in grads if x is not None), group_grads, strict=True):
            grad[span] = group_grad
    return grads, dstate


class _DeltaRule(Function):
    @staticmethod
    def forward(
        ctx: Any, recurrence: Recurrence, state: Tensor | None, *inputs: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        ctx.recurrence = recurrence
        ctx.has_state = state is not None
        o_SBHV, last, states = recurrence_forward(RecurrenceInputs(*inputs), recurrence, state)  # type: ignore[arg-type]
        ctx.save_for_backward(states, *inputs)
        return o_SBHV, last

    @staticmethod
    def backward(ctx: Any, do_SBHV: Tensor, dstate: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        states, *inputs = ctx.saved_tensors
        grads, dstate = recurrence_backward(RecurrenceInputs(*inputs), ctx.recurrence, states, do_SBHV, dstate)
        return None, dstate if ctx.has_state else None, *grads


def delta_rule(
    inputs: RecurrenceInputs, recurrence: Recurrence, state_BHKV: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return o_SBHV in the dtype of v, and the state after the last token, in fp32 or fp64.

    Args:
        inputs: The inputs of S tokens.
        recurrence: The recurrence, and the documents of the tokens.
        state_BHKV: The state before the first token; None: zeros.
    """
    return _DeltaRule.apply(recurrence, state_BHKV, *inputs)  # type: ignore[return-value]


def map_columns(inputs: RecurrenceInputs) -> int:
    """Return the number of columns that A has in a map [A | U]: K, or 1 if it is diagonal."""
    return 1 if inputs.beta is None else inputs.k.shape[3]


def apply_map(A: Tensor, U: Tensor, state: Tensor) -> Tensor:
    """Return A S + U; one column is the diagonal of A."""
    return (A * state if A.shape[-1] == 1 else A @ state) + U


@torch.no_grad()
def recurrence_map(inputs: RecurrenceInputs, recurrence: Recurrence) -> Tensor:
    """Return the map [A | U] from the state before the tokens to that after them: S' = A S + U.

    Its shape is [B, H, K, K + V]. Without a correction A is diagonal, and the map is [diagonal | U], [B, H, K, 1 + V].
    """
    B, H, K, V = inputs.state_shape
    dtype = accum_dtype(inputs.v)
    columns = map_columns(inputs)
    state = inputs.v.new_zeros(B, H, K, columns + V, dtype=dtype)
    state[..., :columns] = 1.0 if columns == 1 else torch.eye(K, dtype=dtype, device=state.device)
    state = state.unflatten(1, (inputs.k.shape[2], -1))
    groups = [*enumerate(recurrence.groups(inputs))]
    for _, span in representatives(groups, _group_length):
        for chunk in _each_chunk(_prepare(inputs.tokens(span), recurrence.tokens(span))):
            # A starts as the identity and has no values of its own
            values = F.pad(chunk.u, (columns, 0))
            if chunk.w is not None:
                values = values - chunk.w @ state
            state = chunk.decay * state + chunk.k_out.mT @ values
    return state.flatten(1, 2)


@torch.no_grad()
def recurrence_state_grad(inputs: RecurrenceInputs, recurrence: Recurrence, do_SBHV: Tensor) -> Tensor:
    """Return the gradient [B, H, K, V] of the state before the tokens that comes from the outputs of these tokens."""
    dtype, G = accum_dtype(inputs.v), inputs.k.shape[2]
    dstate = inputs.v.new_zeros(inputs.state_shape, dtype=dtype).unflatten(1, (G, -1))
    groups = [*enumerate(recurrence.groups(inputs))]
    for _, span in representatives(groups[::-1], _group_length):
        group = inputs.tokens(span)
        chunks = _prepare(group, recurrence.tokens(span))
        do_chunks = _to_chunks(do_SBHV[span], recurrence.chunk_size_of(group), G, dtype)
        for chunk, do in reversed(list(zip(_each_chunk(chunks), do_chunks, strict=True))):
            dvalues = chunk.scores.mT @ do + chunk.k_out @ dstate
            dstate = chunk.q_in.mT @ do + chunk.decay * dstate
            if chunk.w is not None:
                dstate = dstate - chunk.w.mT @ dvalues
    return dstate.flatten(1, 2)
