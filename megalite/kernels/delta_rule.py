"""Linear recurrences with a matrix as their state: gated delta rule, Kimi delta attention, Mamba-2.

    S_t = a_t S_{t-1} + k_t b_t (v_t - (a_t S_{t-1})^T k_t)^T      S [K, V], a_t = exp(g_t) of a head or of each channel
    o_t = S_t^T q_t                                                   without b_t: S_t = a_t S_{t-1} + k_t v_t^T

A decay per head is the gated delta rule (arXiv:2412.06464), one per key channel is Kimi delta attention
(arXiv:2510.26692), and one per head without the correction is Mamba-2 (arXiv:2405.21060). `delta_rule_reference` is
the definition. S starts at 0 with each document.

Chunks of C tokens (arXiv:2406.06484), with the state S before the chunk, i and j in it:

    D_ij  = exp(sum of g over j < l <= i) if j <= i are of one document, else 0
    L_ij  = (k_i . k_j) b_j D_ij  for j < i              in_i  = exp(sum of g up to i) if the state is of i's document
    P_ij  = (q_i . k_j) b_j D_ij  for j <= i             out_j = b_j D_Cj
    [u | w] = (I + L)^-1 [v | in k]                      without a correction: u = v, w = 0, b = 1
    o     = (in q) S + P (u - w S)
    S'    = in_C S + (out k)^T (u - w S)                 so S' = A S + U, an affine map of S

b is a factor of columns, so that the rows q_i of P and k_i of L have the same factors, also in backward
(decayed_scores.py). Documents are masks inside the chunks, so any lengths take ceil(T / C) chunks, and another
document's numbers change no bit of a result.

Inputs are sequence first. G key heads serve H value heads, H a multiple of G. Saved for backward are the inputs, and
the state at the start of every group of 512 tokens: H K V / 512 elements per token. Backward recomputes one group at a
time. All sums are in fp32 (fp64 for fp64 inputs), in a fixed order. The Triton form is in kernels/delta_rule_triton.py;
kernels/delta_rule_fla.py calls the kernels of another package.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from megalite.kernels import delta_rule_fla, delta_rule_triton
from megalite.kernels.decayed_scores import ChannelDecays, ChunkTokens, HeadDecays
from megalite.kernels.dispatch import accum_dtype, repeatable, representatives
from megalite.kernels.recurrence_inputs import L2_NORM_EPS, Recurrence, RecurrenceInputs

INVERSE_BLOCK = 16


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


class _Group(NamedTuple):
    """A group of chunks: its number, its tokens, and the recurrence and inputs of these."""

    number: int
    tokens: slice
    recurrence: Recurrence
    inputs: RecurrenceInputs


def _groups(inputs: RecurrenceInputs, recurrence: Recurrence, *, reverse: bool = False) -> Iterator[_Group]:
    """Yield the groups of chunks in the order of the tokens, or in reverse; a planned run has `representatives`."""
    groups = list(enumerate(recurrence.groups(inputs)))
    if reverse:
        groups.reverse()
    for number, span in representatives(groups, lambda group: group[1].stop - group[1].start):
        yield _Group(number, span, recurrence.tokens(span), inputs.tokens(span))


def _chunked_view(x: Tensor, size: int, key_heads: int) -> Tensor:
    """Return x [S, B, H, F] of complete chunks as [N, B, G, R, C, F]: a view."""
    return x.unflatten(0, (-1, size)).unflatten(3, (key_heads, -1)).permute(0, 2, 3, 4, 1, 5)


def _copy_to_chunks(chunks: Tensor, x: Tensor) -> None:
    """Copy x [S, B, H, F] to chunks [N, B, G, R, C, F], with zeros after the last token."""
    size, length = chunks.shape[4], len(x)
    rest = length % size
    if length > rest:
        chunks[: length // size].copy_(_chunked_view(x[: length - rest], size, chunks.shape[2]))
    if rest:
        chunks[-1:, ..., :rest, :].copy_(_chunked_view(x[length - rest :], rest, chunks.shape[2]))
        chunks[-1:, ..., rest:, :].zero_()


def _copy_from_chunks(x: Tensor, chunks: Tensor) -> None:
    """Copy chunks [N, B, G, R, C, F] to x [S, B, H, F], without those of padding."""
    size, length = chunks.shape[4], len(x)
    rest = length % size
    if length > rest:
        _chunked_view(x[: length - rest], size, chunks.shape[2]).copy_(chunks[: length // size])
    if rest:
        _chunked_view(x[length - rest :], rest, chunks.shape[2]).copy_(chunks[-1:, ..., :rest, :])


def _to_chunks(x: Tensor, size: int, key_heads: int, dtype: torch.dtype) -> Tensor:
    """Return x [S, B, H, F] as [N, B, G, R, C, F], with zeros after the last token."""
    S, B, H, channels = x.shape
    shape = -(-S // size), B, key_heads, H // key_heads, size, channels
    chunks = torch.empty(shape, dtype=dtype, device=x.device)
    _copy_to_chunks(chunks, x)
    return chunks


def _chunk_documents(recurrence: Recurrence, length: int, size: int) -> tuple[Tensor | None, Tensor | None]:
    """Return which tokens of a chunk are of one document, and which of the state's (ChunkTokens)."""
    documents_BS = recurrence.documents_BS
    if documents_BS is None:
        return None, None
    padding = -length % size
    if padding:  # belongs to the last document, whose state it passes on
        documents_BS = torch.cat([documents_BS, documents_BS[:, -1:].expand(-1, padding)], 1)
    documents = documents_BS.unflatten(1, (-1, size)).transpose(0, 1)[:, :, None, None]
    first = documents[0, ..., 0] if recurrence.previous_B is None else recurrence.previous_B[:, None, None]
    document_before = torch.cat([first[None], documents[:-1, ..., -1]]).unsqueeze(-1)
    return documents.unsqueeze(-1) == documents.unsqueeze(-2), documents == document_before


def _flatten_heads(x: Tensor) -> Tensor:
    """Return x [N, B, G, R, ...] as [N, B H, ...]."""
    return x.flatten(1, 3)


def _diagonal_blocks(x: Tensor, size: int) -> Tensor:
    """Return the blocks on the diagonal of x [..., C, C], [..., C / size, size, size]: a view."""
    return x.unflatten(-1, (-1, size)).unflatten(-3, (-1, size)).diagonal(dim1=-4, dim2=-2).movedim(-1, -3)


def _unit_lower_inverse(x: Tensor) -> Tensor:
    """Return (I + L)^-1, where L [..., C, C] is x below its diagonal; C is a power of two.

    [[P, 0], [E, Q]]^-1 = [[P^-1, 0], [-Q^-1 E P^-1, Q^-1]]. Larger blocks than INVERSE_BLOCK are matmuls, since solving
    for 64 right sides at once takes a CPU twice as long.
    """
    C = x.shape[-1]
    size = min(C, INVERSE_BLOCK)
    inverse = torch.zeros(x.shape, dtype=x.dtype, device=x.device)
    blocks = _diagonal_blocks(x, size)
    identity = torch.eye(size, dtype=x.dtype, device=x.device).expand_as(blocks)
    # the diagonal of ones and what is above it are not read
    solution = torch.linalg.solve_triangular(blocks, identity, upper=False, unitriangular=True)
    _diagonal_blocks(inverse, size).copy_(solution)
    while size < C:
        blocks, inverses = (_diagonal_blocks(matrix, 2 * size) for matrix in (x, inverse))
        product = inverses[..., size:, size:] @ blocks[..., size:, :size] @ inverses[..., :size, :size]
        torch.neg(product, out=inverses[..., size:, :size])
        size *= 2
    return inverse


def _add_decayed(terms: Sequence[Tensor], decays: Tensor) -> None:
    """Add to each term, in place, the terms before it times the decays after them, up to its own.

    Without a correction, a group's sums start at zero, and the state before the group is added to each of them. Where
    decays are near 1, a state is much larger than these sums, and would round each of them: the errors after 16,384
    tokens are 5e-7 of the largest element, and were 2.3e-6 with sums that start at the state.
    """
    for n in range(1, len(terms)):
        terms[n].addcmul_(terms[n - 1], decays[n])


class _Chunks:
    """The terms of N chunks of a group that do not depend on the state (see the top of the file).

    Heads of all samples are one dim: q_in [N, B H, C, K], scores [N, B H, C, C], u [N, B H, C, V], w [N, B H, C, K],
    k_out [N, B H, C, K], decay [N, B H, K, 1], or one number of a head. `inverse` and `w` are
    None without a correction.
    """

    def __init__(self, group: _Group):
        inputs, recurrence = group.inputs, group.recurrence
        self.dtype = dtype = accum_dtype(inputs.v)
        self.size = size = recurrence.chunk_size_of(inputs)
        S, B, G, K = inputs.k.shape
        num_chunks = -(-S // size)
        qk = torch.empty(num_chunks, B, G, 1, size, 2, K, dtype=dtype, device=inputs.v.device)
        _copy_to_chunks(qk[..., 0, :], inputs.q)
        _copy_to_chunks(qk[..., 1, :], inputs.k)
        self.rnorm = None
        if recurrence.normalize_qk:
            self.rnorm = torch.rsqrt(qk.square().sum(-1, keepdim=True) + L2_NORM_EPS)
            qk *= self.rnorm
        log_decay = inputs.log_decay if inputs.is_channel_decay else inputs.log_decay.unsqueeze(-1)
        g = _to_chunks(log_decay, size, G, dtype)
        beta = None
        if inputs.beta is not None:
            beta = _to_chunks(inputs.beta.unsqueeze(-1), size, G, dtype).squeeze(-1)
        documents = _chunk_documents(recurrence, S, size)
        if inputs.is_channel_decay:
            self.decays = ChannelDecays(ChunkTokens(qk, g, beta, *documents))
        else:
            self.decays = HeadDecays(ChunkTokens(qk, g.squeeze(-1), beta, *documents))
        self.v = _to_chunks(inputs.v, size, G, dtype)
        rows_in, scores = _flatten_heads(self.decays.rows_in), _flatten_heads(self.decays.scores)
        self.q_in, self.scores = rows_in[..., 0, :], scores[..., 0, :]
        self.k_out, self.decay = _flatten_heads(self.decays.k_out), _flatten_heads(self.decays.decay)
        self.u, self.w, self.inverse = _flatten_heads(self.v), None, None
        if beta is not None:
            self.inverse = _unit_lower_inverse(scores[..., 1, :])
            self.u, self.w = self.inverse @ self.u, self.inverse @ rows_in[..., 1, :]

    def scan(self, values: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Return u - w S of each chunk, and the states [1 + N, B H, K, F] before and after each.

        Args:
            values: u, or any other right side [N, B H, C, F]; overwritten.
            state: The state before the first chunk, [B H, K, F].
        """
        states = values.new_empty(1 + len(values), *state.shape)
        states[0] = state
        if self.w is None:
            torch.matmul(self.k_out.mT, values, out=states[1:])
            _add_decayed(states[1:].unbind(), self.decay)
            states[1:].addcmul_(self.decay.cumprod(0), state)
            return values, states
        for n, k_out in enumerate(self.k_out):
            values[n].baddbmm_(self.w[n], states[n], alpha=-1)
            torch.mul(states[n], self.decay[n], out=states[n + 1])
            states[n + 1].baddbmm_(k_out.mT, values[n])
        return values, states

    def scan_backward(self, do: Tensor, dstate: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients of u - w S of each chunk, and of the states before and after each, [1 + N, B H, K, V].

        Args:
            do: The gradient of the outputs, [N, B H, C, V].
            dstate: That of the state after the last chunk, [B H, K, V].
        """
        dvalues = self.scores.mT @ do
        dstates = do.new_empty(1 + len(do), *dstate.shape)
        torch.matmul(self.q_in.mT, do, out=dstates[:-1])
        dstates[-1] = dstate
        if self.w is None:
            decay = self.decay.flip(0)
            _add_decayed(dstates[:-1].unbind()[::-1], decay)
            dstates[:-1].addcmul_(decay.cumprod(0).flip(0), dstate)
            dvalues.flatten(0, 1).baddbmm_(self.k_out.flatten(0, 1), dstates[1:].flatten(0, 1))
            return dvalues, dstates
        for n in reversed(range(len(do))):
            dvalues[n].baddbmm_(self.k_out[n], dstates[n + 1])
            dstates[n].addcmul_(dstates[n + 1], self.decay[n])
            dstates[n].baddbmm_(self.w[n].mT, dvalues[n], alpha=-1)
        return dvalues, dstates

    def to_heads(self, x: Tensor) -> Tensor:
        """Return x [N, B H, ...] as [N, B, G, R, ...]."""
        return x.unflatten(1, self.v.shape[1:4])

    def qk_grad(self, dqk: Tensor) -> Tensor:
        """Return the gradient of queries and keys before they are normalized; `dqk` is overwritten."""
        if self.rnorm is None:
            return dqk
        qk = self.decays.tokens.qk
        return dqk.addcmul_(qk, (dqk * qk).sum(-1, keepdim=True), value=-1).mul_(self.rnorm)


def _output_grads(chunks: _Chunks, group: _Group, do_SBHV: Tensor) -> Tensor:
    """Return the gradients of the sums that are scaled to the outputs, [N, B H, C, P, V]; only row 0 is set."""
    drows = chunks.v.new_empty(*chunks.v.shape[:5], chunks.decays.tokens.rows.shape[-2], chunks.v.shape[-1])
    do = drows[..., 0, :]
    _copy_to_chunks(do, do_SBHV[group.tokens])
    do *= group.recurrence.scale
    return _flatten_heads(drows)


@repeatable
@torch.no_grad()
def recurrence_forward(
    inputs: RecurrenceInputs, recurrence: Recurrence, state_BHKV: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return o_SBHV, the state after the last token, and the states before each group, [groups, B, H, K, V]."""
    if delta_rule_triton.supports(inputs, recurrence):
        return delta_rule_triton.forward(inputs, recurrence, state_BHKV)
    dtype = accum_dtype(inputs.v)
    num_groups = len(recurrence.groups(inputs))
    group_states = inputs.v.new_zeros(num_groups, *inputs.state_shape, dtype=dtype)
    state = group_states[0].clone() if state_BHKV is None else state_BHKV.to(dtype)
    o_SBHV = torch.empty_like(inputs.v, memory_format=torch.contiguous_format)
    for group in _groups(inputs, recurrence):
        group_states[group.number] = state
        chunks = _Chunks(group)
        values, states = chunks.scan(chunks.u, state.flatten(0, 1))
        o = chunks.q_in @ states[:-1]
        scale = recurrence.scale
        o.flatten(0, 1).baddbmm_(chunks.scores.flatten(0, 1), values.flatten(0, 1), beta=scale, alpha=scale)
        _copy_from_chunks(o_SBHV[group.tokens], chunks.to_heads(o))
        state = states[-1].view(inputs.state_shape)
    return o_SBHV, state, group_states


@repeatable
@torch.no_grad()
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
    if delta_rule_triton.supports(inputs, recurrence):
        return delta_rule_triton.backward(inputs, recurrence, states, do_SBHV, dstate_BHKV)
    grads = RecurrenceInputs(*(None if x is None else torch.empty_like(x) for x in inputs))  # type: ignore[arg-type]
    dstate = dstate_BHKV.to(states.dtype).flatten(0, 1)
    for group in _groups(inputs, recurrence, reverse=True):
        dstate = _group_backward(group, states[group.number], do_SBHV, dstate, grads.tokens(group.tokens))
    return grads, dstate.view(inputs.state_shape)


def _group_backward(
    group: _Group, state_BHKV: Tensor, do_SBHV: Tensor, dstate: Tensor, grads: RecurrenceInputs
) -> Tensor:
    """Write the gradients of a group's inputs, and return that of the state before it, [B H, K, V]."""
    chunks = _Chunks(group)
    values, states = chunks.scan(chunks.u, state_BHKV.flatten(0, 1))
    drows = _output_grads(chunks, group, do_SBHV)
    dvalues, dstates = chunks.scan_backward(drows[..., 0, :], dstate)
    dk_out = values @ dstates[1:].mT
    ddecay = (dstates[1:] * states[:-1]).sum(-1, keepdim=True)
    if not group.inputs.is_channel_decay:
        ddecay = ddecay.sum(-2, keepdim=True)
    dv = dvalues
    if chunks.inverse is not None:
        # (I + L) values = v - (in k) S, and L and in k are rows of scores and rows_in like those of queries
        dv = chunks.inverse.mT @ dvalues
        torch.neg(dv, out=drows[..., 1, :])
    _copy_from_chunks(grads.v, chunks.to_heads(dv))
    drows = drows.flatten(-3, -2)
    dscores = (drows @ values.mT).unflatten(-2, (chunks.size, -1))
    if chunks.inverse is not None:
        dscores[..., 1, :].diagonal(dim1=-2, dim2=-1).zero_()
    drows_in = (drows @ states[:-1].mT).unflatten(-2, (chunks.size, -1))
    dqk, dlog_decay, dbeta = chunks.decays.backward(*map(chunks.to_heads, (dscores, drows_in, dk_out, ddecay)))
    dqk = chunks.qk_grad(dqk)
    _copy_from_chunks(grads.q, dqk[..., 0, :])
    _copy_from_chunks(grads.k, dqk[..., 1, :])
    if group.inputs.is_channel_decay:
        _copy_from_chunks(grads.log_decay, dlog_decay)
    else:
        _copy_from_chunks(grads.log_decay.unsqueeze(-1), dlog_decay.unsqueeze(-1))
    if grads.beta is not None and dbeta is not None:
        _copy_from_chunks(grads.beta.unsqueeze(-1), dbeta.unsqueeze(-1))
    return dstates[0]


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
    if delta_rule_fla.supports(inputs):
        return delta_rule_fla.delta_rule(inputs, recurrence, state_BHKV)
    return _DeltaRule.apply(recurrence, state_BHKV, *inputs)  # type: ignore[return-value]


def map_columns(inputs: RecurrenceInputs) -> int:
    """Return the number of columns that A has in a map [A | U]: K, or 1 if it is diagonal."""
    return 1 if inputs.beta is None else inputs.k.shape[3]


def apply_map(A: Tensor, U: Tensor, state: Tensor) -> Tensor:
    """Return A S + U; one column is the diagonal of A."""
    return (A * state if A.shape[-1] == 1 else A @ state) + U


@repeatable
@torch.no_grad()
def recurrence_map(inputs: RecurrenceInputs, recurrence: Recurrence) -> Tensor:
    """Return the map [A | U] from the state before the tokens to that after them: S' = A S + U.

    Its shape is [B, H, K, K + V]. Without a correction A is diagonal, and the map is [diagonal | U], [B, H, K, 1 + V].
    """
    if delta_rule_triton.supports(inputs, recurrence):
        return delta_rule_triton.state_map(inputs, recurrence)
    B, H, K, V = inputs.state_shape
    dtype = accum_dtype(inputs.v)
    columns = map_columns(inputs)
    state = inputs.v.new_zeros(B * H, K, columns + V, dtype=dtype)
    state[..., :columns] = 1.0 if columns == 1 else torch.eye(K, dtype=dtype, device=state.device)
    for group in _groups(inputs, recurrence):
        chunks = _Chunks(group)
        # A starts as the identity and has no values of its own
        _, states = chunks.scan(F.pad(chunks.u, (columns, 0)), state)
        state = states[-1]
    return state.unflatten(0, (B, H))


@repeatable
@torch.no_grad()
def recurrence_state_grad(inputs: RecurrenceInputs, recurrence: Recurrence, do_SBHV: Tensor) -> Tensor:
    """Return the gradient [B, H, K, V] of the state before the tokens that comes from the outputs of these tokens."""
    if delta_rule_triton.supports(inputs, recurrence):
        return delta_rule_triton.state_grad(inputs, recurrence, do_SBHV)
    B, H, K, V = inputs.state_shape
    dstate = inputs.v.new_zeros(B * H, K, V, dtype=accum_dtype(inputs.v))
    for group in _groups(inputs, recurrence, reverse=True):
        chunks = _Chunks(group)
        _, dstates = chunks.scan_backward(_output_grads(chunks, group, do_SBHV)[..., 0, :], dstate)
        dstate = dstates[0]
    return dstate.unflatten(0, (B, H))
