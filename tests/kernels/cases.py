"""The shared harness of the Triton kernels: one table of operations, and the error of each against its definition.

`measure` runs an operation and its torch twin in one dtype, and the twin in fp64, forward and backward, in Triton's
interpreter or on a GPU. Memory that the operation allocates is filled with NaN between guards, which reveals elements
that no program wrote, and reads and writes out of bounds. In fp32 a second run with zeros instead of NaN must agree.
"""

import functools
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megalite.config.rope_spec import RopeScaling, RopeSpec
from megalite.kernels import gated_matmul as gated
from megalite.kernels import grouped_matmul as grouped
from megalite.kernels import permute
from megalite.kernels.activation import Activation, get_activation
from megalite.kernels.activations.geglu import geglu_backward_reference, geglu_forward_reference
from megalite.kernels.activations.swiglu import swiglu_backward_reference, swiglu_forward_reference
from megalite.kernels.attention import Documents, attention, attention_reference
from megalite.kernels.bias_gelu import bias_gelu_backward_reference, bias_gelu_forward_reference
from megalite.kernels.blocked_attention import AttentionDropout
from megalite.kernels.cross_entropy import shard_grad_, shard_grad_reference_, shard_stats, shard_stats_reference
from megalite.kernels.delta_rule import Recurrence, RecurrenceInputs, delta_rule, delta_rule_reference
from megalite.kernels.dropout import dropout, dropout_reference, keep_mask
from megalite.kernels.gated_norm import gated_norm, gated_norm_reference
from megalite.kernels.norms import add_norm, norm, norm_reference
from megalite.kernels.rope import _Rope, apply_rope, rope_tables, rotate_reference
from megalite.kernels.short_conv import short_conv, short_conv_torch

Make = Callable[[], list[Tensor]]
LAYOUTS = ("contiguous", "gapped", "transposed")
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Op:
    """An operation and its twin, which take the tensors of a case and return one tensor or several.

    Floating-point inputs are cast and get gradients; the others (labels, sample ids) are passed unchanged.
    """

    run: Callable[..., Any]
    twin: Callable[..., Any]
    cases: tuple[Make, ...]
    fp32_units: int = 4  # permitted error of any fp32 result, in units in the last place of the largest value
    half_units: int = 1  # the same in half precision
    gpu_units: int = 4  # minimum for fp32 on a GPU, where a third-party kernel may compute it
    gpu_floor: float = 0.0  # permitted fp32 error on a GPU where the true result is 0
    cancels: float = 0.0  # fp32 terms of this many times the output gradient may cancel in a result


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def normals(*shapes: tuple[int, ...]) -> Make:
    """Return a case of normal inputs of these shapes."""
    return lambda: [normal(*shape, seed=i) for i, shape in enumerate(shapes)]


class _Activated(torch.autograd.Function):
    """An activation in y = a * v, as in nn/linear.py; the `a` that backward returns is then the gradient of v."""

    @staticmethod
    def forward(ctx: Any, pair: tuple[Callable[..., Any], ...], u: Tensor, v: Tensor, *bias: Tensor) -> Tensor:
        ctx.pair = pair
        ctx.save_for_backward(u, v, *bias)
        return pair[0](u, *bias) * v

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        u, v, *bias = ctx.saved_tensors
        a, du, *dbias = ctx.pair[1](u, dy * v, *bias)
        return None, du, dy * a, *dbias


def activation_fn(forward: Callable[..., Tensor], backward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda u, v, *bias: _Activated.apply((forward, backward), u, v, *bias)


def gelu_twin(tanh: bool) -> Callable[..., Any]:
    pair = (bias_gelu_forward_reference, bias_gelu_backward_reference)
    return activation_fn(*(functools.partial(fn, tanh=tanh) for fn in pair))


def activation_run(name: str) -> Callable[..., Any]:
    return activation_fn(get_activation(name).forward, get_activation(name).backward)


def scaled_inputs(run: Callable[..., Any]) -> Callable[..., Any]:
    """Scale the inputs so that many are clamped."""
    return lambda u, v: run(8 * u, v)


def apply_rope_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return _Rope.apply(x, cos, sin, rotate_reference)  # type: ignore[return-value]


def rope_fn(
    fn: Callable[..., Tensor], scaling: RopeScaling | None = None, fraction: float = 1.0
) -> Callable[..., Tensor]:
    """Return `fn` with the tables of models/gpt.py, for the first `fraction` of a head's channels, also per sample."""

    def run(x_SBHK: Tensor, positions_SB: Tensor | None = None) -> Tensor:
        wide_dtype = torch.float64 if x_SBHK.dtype == torch.float64 else torch.float32
        rotary = int(x_SBHK.shape[-1] * fraction)
        tables = rope_tables(x_SBHK.shape[0], RopeSpec(rotary, 1e4, scaling=scaling), x_SBHK.device, wide_dtype)
        if positions_SB is not None:
            tables = (tables[0][positions_SB], tables[1][positions_SB])
        return fn(x_SBHK, *tables)

    return run


def inputs_with_positions(x_SBHK: tuple[int, ...]) -> Make:
    S, B = x_SBHK[:2]
    return lambda: [normal(*x_SBHK), torch.randint(S, (S, B), generator=torch.Generator().manual_seed(1))]


def inputs_with_sample_ids(*shapes: tuple[int, ...]) -> Make:
    """Return a case of normal inputs [s, B, D] and B sample ids, some of them above 32 bits."""
    return lambda: [*normals(*shapes)(), torch.arange(shapes[0][1]) * 2**31 + 5]


def two_ranges(x_sBD: Tensor) -> Tensor:
    """Return the positions of a rank with context parallelism."""
    s = x_sBD.shape[0]
    return torch.arange(s, device=x_sBD.device) + torch.where(torch.arange(s, device=x_sBD.device) < s // 2, 3, 2**33)


class _Sliced(torch.autograd.Function):
    """Cross entropy with z-loss of logits_NV in two slices, as on two tp ranks; `halves` are stats and gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        halves: tuple[Callable[..., Tensor], ...],
        logits: Tensor,
        labels: Tensor,
        vocab: int,
        z_loss: float,
        softcap: float | None,
    ) -> Tensor:
        cut = logits.shape[1] * 2 // 3
        ctx.halves = halves
        ctx.parts = (logits[:, :cut], 0, min(cut, vocab)), (logits[:, cut:], cut, max(0, vocab - cut))
        stats = torch.stack([halves[0](part, labels, first, valid, softcap) for part, first, valid in ctx.parts])
        ctx.lse, ctx.labels, ctx.z_loss, ctx.softcap = stats[:, 0].logsumexp(0), labels, z_loss, softcap
        return ctx.lse - stats[:, 1].sum(0) + z_loss * ctx.lse.square()

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        grads = [
            ctx.halves[1](part.clone(), ctx.lse, ctx.labels, first, dloss, valid, ctx.z_loss, ctx.softcap)
            for part, first, valid in ctx.parts
        ]
        return None, torch.cat(grads, 1), None, None, None, None


def sliced_cross_entropy(
    *halves: Callable[..., Tensor], padding: int, z_loss: float = 0.0, softcap: float | None = None
) -> Callable[..., Tensor]:
    return lambda logits, labels: _Sliced.apply(halves, logits, labels, logits.shape[1] - padding, z_loss, softcap)


def logits_and_labels(rows: int, columns: int, vocab: int) -> Make:
    def make() -> list[Tensor]:
        g = torch.Generator().manual_seed(1)
        return [3 * normal(rows, columns), torch.randint(vocab, (rows,), generator=g)]

    return make


def attention_fn(
    fn: Callable[..., Tensor], window: int | None = None, dropout_p: float = 0.0, softcap: float | None = None
) -> Callable[..., Tensor]:
    """Return `fn` as a function of q, k, v and, optionally, the starts of documents, a sink and shared keys."""

    def run(q: Tensor, k: Tensor, v: Tensor, *extra: Tensor) -> Tensor:
        document_start_BS = next((x for x in extra if not x.dtype.is_floating_point), None)
        by_dim = {x.dim(): x for x in extra if x.dtype.is_floating_point}
        sink_H = by_dim.get(1)
        shared = dict(q_pe_SBHR=by_dim[4], k_pe_TBR=by_dim[3]) if 4 in by_dim else {}
        documents = None if document_start_BS is None else Documents(spans_of(document_start_BS), document_start_BS)
        drop = None
        if dropout_p:
            ids_B = torch.arange(q.shape[1], device=q.device) * 1_000_003 + 2**33
            drop = AttentionDropout(dropout_p, KEY, ids_B, head_offset=3)
        options = dict(window=window, documents=documents, drop=drop, sink_H=sink_H, softcap=softcap, **shared)
        return fn(q, k, v, scale=q.shape[-1] ** -0.5, **options)

    return run


def attention_definition(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None = None,
    document_start_BS: Tensor | None = None, drop: AttentionDropout | None = None, sink_H: Tensor | None = None,
    q_start: int = 0, k_start: int = 0, softcap: float | None = None, q_pe_SBHR: Tensor | None = None,
    k_pe_TBR: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Compute attention of queries from position `q_start` to keys from `k_start`, with scores in memory.

    It shares nothing with the tested code except the dropout mask.
    """
    i = torch.arange(q_start, q_start + q.shape[0]).view(1, 1, -1, 1)
    j = torch.arange(k_start, k_start + k.shape[0]).view(1, 1, 1, -1)
    low = torch.zeros_like(i) if window is None else (i - window + 1).clamp(min=0)
    if document_start_BS is not None:
        low = torch.maximum(low, document_start_BS[:, None, :, None])
    visible = (low <= j) & (j <= i)
    q_k_v = [x.permute(1, 2, 0, 3).repeat_interleave(q.shape[2] // x.shape[2], 1) for x in (q, k, v)]
    scores = q_k_v[0] @ q_k_v[1].mT * scale
    if q_pe_SBHR is not None and k_pe_TBR is not None:
        scores = scores + torch.einsum("ibhr,jbr->bhij", q_pe_SBHR, k_pe_TBR) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~visible, -math.inf)
    has_visible = visible.any(-1, keepdim=True).expand(*scores.shape[:-1], 1)
    max_score = torch.where(has_visible, scores.amax(-1, keepdim=True), 0.0)
    exp_scores = torch.where(visible, (scores - max_score).exp(), 0.0)
    sink = 0.0 if sink_H is None else (sink_H.view(-1, 1, 1) - max_score).exp()
    p = exp_scores / torch.where(has_visible, exp_scores.sum(-1, keepdim=True) + sink, 1.0)
    if drop is not None:
        heads = torch.arange(q.shape[2]).view(-1, 1, 1) + drop.head_offset
        p = p * keep_mask(drop.key, drop.p, drop.sample_ids_B.view(-1, 1, 1, 1), heads, i, j) / (1 - drop.p)
    return (p @ q_k_v[2]).permute(2, 0, 1, 3)


def spans_of(document_start_BS: Tensor) -> tuple[tuple[int, int, int], ...]:
    rows = [sorted(set(row)) for row in document_start_BS.tolist()]
    ends = [[*row[1:], document_start_BS.shape[1]] for row in rows]
    return tuple((b, *span) for b in range(len(rows)) for span in zip(rows[b], ends[b], strict=True))


def attention_inputs(
    S: int, B: int, H: int, G: int, K: int, document: int | None = None, sink: bool = False, value: int | None = None,
    pe: int = 0,
) -> Make:  # fmt: skip
    """Return a case of q, k and v, whose width is `value` or K, and optionally documents, a sink and shared keys.

    Documents have about `document` tokens, and differ between samples.
    """

    def make() -> list[Tensor]:
        inputs = normals((S, B, H, K), (S, B, G, K), (S, B, G, value or K))()
        if document is not None:
            starts = torch.arange(S)[None] + torch.arange(B)[:, None] * (document // 2)
            shifted_starts = starts // document * document - torch.arange(B)[:, None] * (document // 2)
            inputs.append(shifted_starts.clamp(min=0))
        if pe:
            inputs += normals((S, B, H, pe), (S, B, pe))()
        return inputs + [normal(H, seed=3)] * sink

    return make


def recurrence_fn(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return `fn` as a function of q, k, v, the log decay's logits, a state, and optionally beta's logits and documents.

    q and k are normalized if there is a beta. The documents start with one for the state.
    """

    def run(q: Tensor, k: Tensor, v: Tensor, g: Tensor, state: Tensor, *extra: Tensor) -> Any:
        beta = next((x.sigmoid() for x in extra if x.dtype.is_floating_point), None)
        documents_BT = next((x for x in extra if not x.dtype.is_floating_point), None)
        recurrence = Recurrence(0.3, normalize_qk=beta is not None)
        if documents_BT is not None:
            recurrence = replace(recurrence, documents_BS=documents_BT[:, 1:], previous_B=documents_BT[:, 0])
        return fn(RecurrenceInputs(q, k, v, -g.sigmoid(), beta), recurrence, state)

    return run


def recurrence_inputs(
    kind: str, S: int, B: int, G: int, H: int, K: int, V: int, documents: tuple[int, ...] | None = None
) -> Make:
    """Return a case of a gated delta net, KDA or Mamba-2; documents of these lengths follow each other."""

    def make() -> list[Tensor]:
        decays = (S, B, H, K) if kind == "kda" else (S, B, H)
        inputs = normals((S, B, G, K), (S, B, G, K), (S, B, H, V), decays, (B, H, K, V))()
        if kind != "mamba2":
            inputs.append(normal(S, B, H, seed=5))
        if documents is not None:
            numbers = torch.arange(len(documents)).repeat_interleave(torch.tensor(documents))
            inputs.append(torch.stack([numbers, numbers.flip(0)])[:B, : S + 1].contiguous())
        return inputs

    return make


def recurrence_op(*cases: Make) -> Op:
    # the definition adds a token at a time, and on a GPU the kernels multiply in three products of TF32
    return Op(recurrence_fn(delta_rule), recurrence_fn(delta_rule_reference), cases, fp32_units=16, gpu_units=84)


def short_conv_fn(fn: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return `fn` as a function of x, the weight and, optionally, documents, earlier tokens and a bias."""

    def run(x_SBC: Tensor, weight_CW: Tensor, *extra: Tensor) -> Tensor:
        documents_BS = next((x for x in extra if not x.dtype.is_floating_point), None)
        by_dim = {x.dim(): x for x in extra if x.dtype.is_floating_point}
        return fn(x_SBC, weight_CW, documents_BS, by_dim.get(3), by_dim.get(1))

    return run


def short_conv_inputs(
    S: int, B: int, C: int, W: int, document: int | None = None, earlier: bool = False, bias: bool = False
) -> Make:
    """Return a case of x and the weight, and optionally documents of about `document` tokens, earlier tokens, a bias.

    With earlier tokens, the first document may start at one of them.
    """

    def make() -> list[Tensor]:
        inputs = normals((S, B, C), (C, W))()
        if earlier:
            inputs.append(normal(W - 1, B, C, seed=2))
        if bias:
            inputs.append(normal(C, seed=3))
        if document is not None:
            positions = torch.arange(S + (W - 1 if earlier else 0)) + torch.arange(B)[:, None]
            inputs.append(positions // document)
        return inputs

    return make


def gated_norm_op(*cases: Make, **options: bool) -> Op:
    """Return the norm of o by a gate z; the weight has the shape of the last dim or the last two."""
    return Op(
        lambda o, z, w: gated_norm(o, z, w, 1e-5, **options),
        lambda o, z, w: gated_norm_reference(o, z, w, 1e-5, **options),
        cases,
    )


class _Grouped(torch.autograd.Function):
    """A matmul of experts, differentiated by the tested functions; `pair` is the matmul and the weight gradient.

    The weight gradient is computed twice, first into uninitialized memory and then added to that, with and without an
    index.
    """

    @staticmethod
    def forward(ctx: Any, pair: tuple[Callable[..., Any], ...], x: Tensor, w: Tensor, *index: Tensor) -> Tensor:
        ctx.pair = pair
        ctx.save_for_backward(x, w, *index)
        return pair[0](x, w, *index)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        x, w, offsets, *rows = ctx.saved_tensors
        dx = ctx.pair[0](dy, w.transpose(1, 2), offsets)
        if rows:
            dx = x.new_zeros(x.shape, dtype=torch.float64).index_add_(0, rows[0], dx.double()).to(x.dtype)
        wide_dtype = torch.float64 if x.dtype == torch.float64 else torch.float32
        dw = torch.empty(len(w), *w.shape[:0:-1], dtype=wide_dtype, device=w.device).transpose(1, 2)
        ctx.pair[1](dw, dy, x, offsets, *rows, overwrite=True)
        reversed_rows = torch.arange(len(dy), device=dy.device).flip(0)
        ctx.pair[1](dw, dy.flip(0), x, offsets, *rows, dy_rows=reversed_rows, overwrite=False)
        return None, dx, (dw / 2).to(w.dtype), *(None for _ in ctx.saved_tensors[2:])


def grouped_matmul_fn(fn: Callable[..., Tensor], grad_fn: Callable[..., None]) -> Callable[..., Tensor]:
    return lambda *args: _Grouped.apply((fn, grad_fn), *args)


def grouped_inputs(sizes: tuple[int, ...], F: int, D: int, rows: int | None = None, num_unassigned: int = 0) -> Make:
    """Return a case of x, w, offsets and, with `rows` of x, an index into them; some rows belong to no group."""

    def make() -> list[Tensor]:
        M = sum(sizes) + num_unassigned
        offsets = torch.tensor([0, *sizes], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        inputs = [normal(rows or M, D), normal(len(sizes), F, D, seed=1), offsets]
        return inputs + ([torch.randint(rows, (M,), generator=torch.Generator().manual_seed(2))] if rows else [])

    return make


class _Gated(torch.autograd.Function):
    """Experts from rows of x to a sum for each row, by `pair`, up and down of kernels/gated_matmul.py.

    The other operations are references. The outputs of up are results, too.
    """

    @staticmethod
    def forward(ctx: Any, pair: tuple[Callable[..., Any], ...], activation: Activation, *args: Tensor) -> Any:
        ctx.pair, ctx.activation = pair, activation
        x, w, down, p_M, offsets, rows, *bias = args
        u, a = pair[0](x, w, offsets, rows, p_M, activation, *bias)
        ctx.save_for_backward(u, *args)
        y_MD = grouped.grouped_matmul_reference(a.double(), down.double(), offsets)
        return u, a, x.new_zeros(x.shape, dtype=torch.float64).index_add_(0, rows, y_MD)

    @staticmethod
    def backward(ctx: Any, _: Tensor, __: Tensor, dy: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        u, x, w, down, p_M, offsets, rows, *bias = ctx.saved_tensors
        dy = with_layout(dy.to(x.dtype), "gapped")
        a, du, dp = ctx.pair[1](dy, down, offsets, rows, u, p_M, ctx.activation)
        dw, ddown = (t.new_empty(t.shape, dtype=torch.float64) for t in (w, down))
        weight_grad = grouped.grouped_weight_grad_reference_
        weight_grad(dw, du.double(), x.double(), offsets, rows, overwrite=True)
        weight_grad(ddown, dy.double(), a.double(), offsets, dy_rows=rows, overwrite=True)
        dx_MD = grouped.grouped_matmul_reference(du, w.transpose(1, 2), offsets)
        dx = x.new_zeros(x.shape, dtype=torch.float64).index_add_(0, rows, dx_MD.double())
        dbias = [t.new_zeros(t.shape) for t in bias]
        grads = (g.to(t.dtype) for g, t in zip((dx, dw, ddown, dp), (x, w, down, p_M), strict=True))
        return None, None, *grads, None, None, *dbias


def gated_matmul_op(name: str, *cases: Make) -> Op:
    activation, options = get_activation(name), {"matmul": grouped.grouped_matmul_reference}
    clamped = name.startswith("clamped")
    reference_fns = (
        functools.partial(f, clamped=clamped) for f in (swiglu_forward_reference, swiglu_backward_reference)
    )
    twin, unfused = (
        Activation(*reference_fns, width=2),
        tuple(functools.partial(f, **options) for f in (gated.up_unfused, gated.down_unfused)),
    )
    fused = (gated.up_matmul, gated.down_gradients)
    return Op(
        lambda *args: _Gated.apply(fused, activation, *args), lambda *args: _Gated.apply(unfused, twin, *args), cases
    )


def gated_inputs(
    sizes: tuple[int, ...], F: int, D: int, rows: int, num_unassigned: int = 0, bias: bool = False
) -> Make:
    """Return a case of x, w, down, probabilities, offsets, an index into `rows` rows, and optionally a bias.

    The bias moves some columns well beyond the clamping limits: close to a limit, the last bit decides whether there is
    a gradient.
    """

    def make() -> list[Tensor]:
        M, E = sum(sizes) + num_unassigned, len(sizes)
        offsets = torch.tensor([0, *sizes], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        inputs = [normal(rows, D), normal(E, 2 * F, D, seed=1), normal(E, D, F, seed=2), normal(M, seed=3).sigmoid()]
        inputs += [offsets, torch.randint(rows, (M,), generator=torch.Generator().manual_seed(4))]
        if bias:
            inputs[1] *= D**-0.5
            inputs.append(20 * normal(E, 2 * F, seed=5).round().clamp(-1, 1))
        return inputs

    return make


class _Combined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, fn: Callable[..., Tensor], y: Tensor, slots: Tensor) -> Tensor:
        ctx.slots, ctx.shape = slots, y.shape
        return fn(y, slots)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        dy, is_assigned = dout.new_zeros(ctx.shape), ctx.slots >= 0
        dout_NKD = dout.repeat_interleave(ctx.slots.shape[1], 0).view(*ctx.slots.shape, -1)
        dy[ctx.slots[is_assigned]] = dout_NKD[is_assigned]
        return None, dy, None


def combine_inputs(N: int, K: int, D: int, num_dropped: int) -> Make:
    """Return a case of rows and the slots of N K assignments, except those that are dropped."""

    def make() -> list[Tensor]:
        slots = torch.randperm(N * K, generator=torch.Generator().manual_seed(3))
        return [normal(N * K - num_dropped, D), slots.where(slots < N * K - num_dropped, -1).view(N, K)]

    return make


SWIGLU = (swiglu_forward_reference, swiglu_backward_reference)
KEY = 0xC0FFEE01  # above 2^31: the key's sign must not matter
WIDTHS = ((1, 1), (3, 8), (2, 5, 7), (37, 100), (5, 1, 1025))  # odd, ragged, several rows per program, several programs
HEADS = ((1, 1, 1, 2), (5, 2, 3, 8), (3, 2, 5, 96), (9, 1, 2, 20))  # [S, B, H, K]
FEEDS = ((1, 1), (4, 3, 7), (7, 2, 100), (3, 2, 2050))  # the last one more than one program wide
STREAMS = ((1, 1, 1), (3, 2, 7), (2, 3, 1100))  # [s, B, D]


def norm_op(with_residual: bool, bias: bool, **tolerances: Any) -> Op:
    """Return the operation of a norm, optionally after a residual add."""

    def twin(*args: Any) -> Any:
        if not with_residual:
            return norm_reference(*args)
        h = args[0] + args[1]
        return h, norm_reference(h, *args[2:])

    no_bias, fn = [] if bias else [None], add_norm if with_residual else norm
    cases = tuple(normals(*[s] * (1 + with_residual), *[s[-1:]] * (1 + bias)) for s in WIDTHS)
    return Op(lambda *args: fn(*args, *no_bias, 1e-5), lambda *args: twin(*args, *no_bias, 1e-5), cases, **tolerances)


def attention_op(*cases: Make, half_units: int = 1, gpu_units: int = 4, **options: Any) -> Op:
    """Return an attention operation. In fp32, dp - delta has the rounding error of dp, which exceeds the gradient."""
    tolerances = dict(fp32_units=16, half_units=half_units, gpu_units=gpu_units)
    return Op(attention_fn(attention, **options), attention_fn(attention_reference, **options), cases, **tolerances)


def cross_entropy_op(*cases: Make, **options: Any) -> Op:
    """Return a cross entropy operation. In fp32, p - 1 cancels where the label is likely."""
    halves = (shard_stats, shard_grad_), (shard_stats_reference, shard_grad_reference_)
    return Op(*(sliced_cross_entropy(*pair, **options) for pair in halves), cases, cancels=1.0)


OPS: dict[str, Op] = {
    "rms_norm": norm_op(with_residual=False, bias=False),
    "add_rms_norm": norm_op(with_residual=True, bias=False),
    # with one column: dy w - dy w, one of them fused into a sum, times 1 / sqrt(eps) = 316
    "layer_norm": norm_op(with_residual=False, bias=True, gpu_floor=4e-5),
    "add_layer_norm": norm_op(with_residual=True, bias=True),
    "gated_norm, SiLU": gated_norm_op(
        normals((1, 1, 1, 1), (1, 1, 1, 1), (1,)),
        normals((7, 2, 3, 20), (7, 2, 3, 20), (20,)),
        normals((37, 1, 4, 128), (37, 1, 4, 128), (128,)),
    ),
    "gated_norm, sigmoid": gated_norm_op(normals((13, 2, 3, 70), (13, 2, 3, 70), (70,)), sigmoid_gate=True),
    "gated_norm, gate first": gated_norm_op(
        normals((5, 2, 3, 7), (5, 2, 3, 7), (3, 7)),
        normals((11, 2, 2, 130), (11, 2, 2, 130), (2, 130)),
        normals((7, 1, 2, 64), (7, 1, 2, 64), (64,)),
        gate_first=True,
    ),
    "gated delta net": recurrence_op(
        recurrence_inputs("gdn", 1, 1, 1, 1, 1, 1),
        recurrence_inputs("gdn", 7, 2, 1, 2, 5, 6),
        recurrence_inputs("gdn", 67, 1, 1, 1, 70, 20),
    ),
    "gated delta net by document": recurrence_op(recurrence_inputs("gdn", 71, 2, 1, 1, 16, 17, (2, 1, 13, 40, 16))),
    "Mamba-2": recurrence_op(
        recurrence_inputs("mamba2", 2, 1, 1, 2, 3, 4), recurrence_inputs("mamba2", 67, 1, 1, 1, 70, 40)
    ),
    "Mamba-2 by document": recurrence_op(recurrence_inputs("mamba2", 71, 2, 1, 2, 8, 20, (1, 2, 13, 40, 16))),
    "Kimi delta attention": recurrence_op(
        recurrence_inputs("kda", 2, 1, 1, 1, 3, 2), recurrence_inputs("kda", 19, 1, 1, 1, 70, 18)
    ),
    "Kimi delta attention by document": recurrence_op(recurrence_inputs("kda", 23, 2, 1, 1, 5, 8, (1, 2, 13, 8))),
    "short_conv": Op(
        short_conv_fn(short_conv),
        short_conv_fn(short_conv_torch),
        (
            *(short_conv_inputs(1, 1, 1, 1), short_conv_inputs(2, 2, 3, 4), short_conv_inputs(37, 2, 37, 4, bias=True)),
            *(short_conv_inputs(19, 1, 130, 3), short_conv_inputs(7, 2, 5, 6, bias=True)),
        ),
    ),
    "short_conv by document": Op(
        short_conv_fn(short_conv),
        short_conv_fn(short_conv_torch),
        (
            *(short_conv_inputs(23, 2, 40, 4, 7), short_conv_inputs(9, 2, 5, 4, 1)),
            short_conv_inputs(19, 2, 132, 4, 11, bias=True),
        ),
    ),
    "short_conv after earlier tokens": Op(
        short_conv_fn(short_conv),
        short_conv_fn(short_conv_torch),
        (
            *(short_conv_inputs(1, 2, 5, 4, earlier=True), short_conv_inputs(2, 1, 3, 4, 3, True, True)),
            *(short_conv_inputs(19, 2, 33, 4, 5, True), short_conv_inputs(5, 2, 8, 1, 2, bias=True)),
        ),
    ),
    "rope": Op(rope_fn(apply_rope), rope_fn(apply_rope_reference), tuple(normals(s) for s in HEADS)),
    "rope partial, Llama-3": Op(
        rope_fn(apply_rope, RopeScaling(), 0.25),
        rope_fn(apply_rope_reference, RopeScaling(), 0.25),
        tuple(normals(s) for s in HEADS if s[-1] >= 8),
    ),
    "rope by sample": Op(
        rope_fn(apply_rope), rope_fn(apply_rope_reference), tuple(inputs_with_positions(s) for s in HEADS)
    ),
    "swiglu": Op(
        activation_run("swiglu"), activation_fn(*SWIGLU), tuple(normals((*s[:-1], 2 * s[-1]), s) for s in FEEDS)
    ),
    "clamped_swiglu": Op(
        scaled_inputs(activation_run("clamped_swiglu")),
        scaled_inputs(activation_fn(*(functools.partial(fn, clamped=True) for fn in SWIGLU))),
        tuple(normals((*s[:-1], 2 * s[-1]), s) for s in FEEDS),
    ),
    "geglu": Op(
        activation_run("geglu"),
        activation_fn(geglu_forward_reference, geglu_backward_reference),
        tuple(normals((*s[:-1], 2 * s[-1]), s) for s in FEEDS),
    ),
    "gelu": Op(activation_run("gelu"), gelu_twin(True), tuple(normals(s, s) for s in FEEDS)),
    "gelu_erf": Op(activation_run("gelu_erf"), gelu_twin(False), tuple(normals(s, s) for s in FEEDS)),
    "bias_gelu": Op(activation_run("gelu"), gelu_twin(True), tuple(normals(s, s, s[-1:]) for s in FEEDS)),
    "bias_gelu_erf": Op(activation_run("gelu_erf"), gelu_twin(False), tuple(normals(s, s, s[-1:]) for s in FEEDS)),
    "attention": attention_op(
        *(
            attention_inputs(2, 1, 1, 1, 4),
            attention_inputs(37, 2, 4, 2, 20),
            attention_inputs(150, 1, 2, 1, 96),
            attention_inputs(261, 1, 1, 1, 128),
        ),
        gpu_units=64,  # torch's own kernel needs 32 on an H100 for two positions
    ),
    "attention in a window": attention_op(
        attention_inputs(290, 1, 2, 2, 64), attention_inputs(9, 2, 3, 1, 8), window=50
    ),
    "attention by document": attention_op(attention_inputs(300, 2, 2, 1, 64, 80), attention_inputs(20, 3, 2, 2, 16, 3)),
    "attention by document in a window": attention_op(attention_inputs(300, 2, 1, 1, 64, 130), window=70),
    "attention with a sink": attention_op(
        attention_inputs(9, 2, 3, 1, 8, sink=True), attention_inputs(150, 1, 4, 2, 64, 40, sink=True)
    ),
    # in half precision, delta uses the rounded o; the twin is exact where only one key is visible
    "attention, values of another width": attention_op(
        *(
            attention_inputs(150, 1, 1, 1, 192, value=128),
            attention_inputs(70, 2, 2, 1, 20, 30, True, 72),
            attention_inputs(40, 1, 2, 2, 96, value=8),
        ),
        half_units=3,
    ),
    "attention with shared keys": attention_op(
        *(
            attention_inputs(150, 1, 2, 2, 128, pe=64),
            attention_inputs(70, 2, 2, 1, 20, 30, value=72, pe=6),
            attention_inputs(40, 1, 2, 2, 192, value=256, pe=64),
        ),
        half_units=3,
    ),
    "attention with shared keys, a cap, a sink and dropout, by document in a window": attention_op(
        attention_inputs(200, 2, 2, 2, 64, 90, sink=True, pe=16), half_units=3, window=70, dropout_p=0.25, softcap=2.0
    ),
    "attention, wide heads": attention_op(
        attention_inputs(150, 1, 2, 1, 256), attention_inputs(90, 2, 1, 1, 200, 40), window=130
    ),
    "attention with capped scores": attention_op(
        attention_inputs(37, 2, 4, 2, 20), attention_inputs(150, 1, 2, 1, 128, value=96), softcap=1.5
    ),
    "attention with capped scores, a sink and dropout, by document in a window": attention_op(
        attention_inputs(200, 2, 2, 1, 64, 90, sink=True), half_units=3, window=70, dropout_p=0.25, softcap=2.0
    ),
    "attention with dropout": attention_op(
        *(attention_inputs(2, 1, 1, 1, 4), attention_inputs(150, 2, 4, 2, 24), attention_inputs(261, 1, 1, 1, 128)),
        half_units=3,
        dropout_p=0.25,
    ),
    "attention with dropout, by document in a window": attention_op(
        *(attention_inputs(200, 2, 2, 1, 64, 90), attention_inputs(90, 2, 2, 1, 160, 50, value=100)),
        half_units=3,
        window=70,
        dropout_p=0.7,
    ),
    "cross_entropy": cross_entropy_op(
        logits_and_labels(1, 2, 2), logits_and_labels(5, 37, 37), logits_and_labels(3, 9001, 9001), padding=0
    ),
    "cross_entropy with padding": cross_entropy_op(
        logits_and_labels(4, 8, 2), logits_and_labels(2, 100, 94), padding=6
    ),
    "cross_entropy with z-loss": cross_entropy_op(
        *(logits_and_labels(4, 8, 2), logits_and_labels(5, 100, 94), logits_and_labels(2, 9001, 8995)),
        padding=6,
        z_loss=0.05,
    ),
    "cross_entropy with capped logits": cross_entropy_op(
        *(logits_and_labels(4, 8, 2), logits_and_labels(5, 100, 94), logits_and_labels(2, 9001, 8995)),
        padding=6,
        z_loss=0.05,
        softcap=4.0,
    ),
    "dropout": Op(
        lambda x, ids: dropout(x, 0.25, KEY, ids, two_ranges(x)),
        lambda x, ids: dropout(x, 0.25, KEY, ids, two_ranges(x), torch.zeros_like(x), impl=dropout_reference),
        tuple(inputs_with_sample_ids(s) for s in STREAMS),
    ),
    "dropout_add": Op(
        lambda x, a, ids: dropout(x, 0.1, KEY, ids, 2**20, a),
        lambda x, a, ids: dropout(x, 0.1, KEY, ids, 2**20, a, impl=dropout_reference),
        tuple(inputs_with_sample_ids(s, s) for s in STREAMS),
    ),
    "grouped_matmul": Op(
        grouped_matmul_fn(grouped.grouped_matmul, grouped.grouped_weight_grad_),
        grouped_matmul_fn(grouped.grouped_matmul_reference, grouped.grouped_weight_grad_reference_),
        (
            *(
                grouped_inputs((1,), 1, 1),
                grouped_inputs((3,), 5, 7, rows=2),
                grouped_inputs((0, 5, 0, 70, 0), 37, 70, num_unassigned=3),
            ),
            *(
                grouped_inputs((130, 0, 1), 256, 64, rows=20, num_unassigned=70),
                grouped_inputs((0, 530, 2), 70, 8),
                grouped_inputs((0, 0), 4, 4, num_unassigned=9),
            ),
        ),
    ),
    "gated_matmul": gated_matmul_op(
        *("swiglu", gated_inputs((1,), 1, 1, 1), gated_inputs((0, 5, 0, 70, 0), 37, 70, 9, num_unassigned=3)),
        *(gated_inputs((130, 0, 1), 256, 64, 20, num_unassigned=70), gated_inputs((0, 0), 4, 4, 2, num_unassigned=9)),
    ),
    "gated_matmul with limits and a bias": gated_matmul_op(
        *("clamped_swiglu", gated_inputs((3,), 5, 7, 2, bias=True), gated_inputs((0, 5, 140, 0), 70, 40, 9, bias=True))
    ),
    "combine": Op(
        lambda y, slots: _Combined.apply(permute.unpermute, y, slots),
        lambda y, slots: _Combined.apply(permute.unpermute_reference, y, slots),
        (combine_inputs(1, 1, 1, 0), combine_inputs(7, 3, 100, 5), combine_inputs(3, 2, 1050, 0)),
    ),
}


@dataclass(frozen=True)
class Result:
    """The maximum errors of an operation and its twin against fp64 for one tensor, and the maximum true value."""

    name: str
    error: float
    twin_error: float
    scale: float
    dtype: str
    fp32_units: int
    half_units: int
    floor: float = 0.0

    @property
    def bound(self) -> float:
        """The bound of the error: twice the twin's own, or twice one rounding of the result if the twin is exact.

        In fp32, where kernel and twin differ only in order, it is at least `fp32_units` in the last place.
        """
        eps = torch.finfo(DTYPES[self.dtype]).eps
        if self.dtype == "float64":
            return 1e-10 * max(self.scale, 1.0)
        units = self.fp32_units if self.dtype == "float32" else self.half_units
        return max(2 * max(self.twin_error, units / 2 * eps * self.scale), self.floor)


class Guarded(TorchDispatchMode):
    """A mode that fills tensors from `empty` with `fill` (-77 for integers), between guards that `check` compares."""

    WIDTH = 64

    def __init__(self, fill: float) -> None:
        super().__init__()
        self.fill = fill
        self.flats: list[tuple[Tensor, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__ if hasattr(func, "overloadpacket") else ""
        if not name.startswith(("empty", "new_empty")) or out.numel() == 0:
            return out
        flat = torch.full((out.numel() + 2 * self.WIDTH,), poison(out.dtype), dtype=out.dtype, device=out.device)
        if flat.is_floating_point():
            flat[self.WIDTH : -self.WIDTH] = self.fill
        self.flats.append((flat, out.numel()))
        return flat[self.WIDTH : -self.WIDTH].as_strided(out.shape, out.stride(), self.WIDTH)

    def check(self) -> None:
        for flat, n in self.flats:
            for guard in (flat[: self.WIDTH], flat[self.WIDTH + n :]):
                is_intact = guard.isnan().all() if guard.is_floating_point() else (guard == poison(guard.dtype)).all()
                assert bool(is_intact), f"a kernel wrote outside of a tensor of {n} elements"


def poison(dtype: torch.dtype) -> float:
    return float("nan") if dtype.is_floating_point else -77


def with_layout(x: Tensor, layout: str) -> Tensor:
    """Return `x` with other strides, its values between NaNs (-77 for integers)."""
    if layout == "transposed" and x.dim() > 2:  # [b, a, ...] in memory
        base = with_layout(x.transpose(0, 1), "contiguous")
        return base.transpose(0, 1)
    gap = 3 if layout == "gapped" and x.dim() > 1 else 0
    width = x.shape[-1] + gap
    flat = torch.full((x.numel() // x.shape[-1] * width + 128,), poison(x.dtype), dtype=x.dtype, device=x.device)
    view = flat[64:-64].view(*x.shape[:-1], width)[..., : x.shape[-1]]
    view.copy_(x)
    return view


def results(
    fn: Callable[..., Any], inputs: list[Tensor], layout: str | None = None, seed: int = 90
) -> dict[str, Tensor]:
    """Return outputs and gradients of `fn` for fixed output gradients, which have the layout of the inputs."""
    leaves = [x.detach().clone().requires_grad_() if x.is_floating_point() else x for x in inputs]
    args = leaves if layout is None else [leaf_with_layout(x, layout) for x in leaves]
    result = fn(*args)
    outputs = list(result) if isinstance(result, tuple) else [result]
    grad_outputs = [normal(*y.shape, seed=seed + i).to(y.device, y.dtype) for i, y in enumerate(outputs)]
    if layout is not None:
        grad_outputs = [with_layout(dy, layout) for dy in grad_outputs]
    grad_inputs = [x for x in leaves if x.is_floating_point()]
    grads = torch.autograd.grad(outputs, grad_inputs, grad_outputs)
    tensors = {f"output {i}": y.detach() for i, y in enumerate(outputs)}
    return tensors | {f"gradient {i}": g for i, g in enumerate(grads)}


class _WithLayout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: str) -> Tensor:
        return with_layout(x, layout)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return dx, None


def leaf_with_layout(x: Tensor, layout: str) -> Tensor:
    if not x.is_floating_point():
        return with_layout(x, "contiguous")
    return _WithLayout.apply(x, layout)  # type: ignore[return-value]


@contextmanager
def guarded(fill: float = math.nan) -> Iterator[None]:
    with Guarded(fill) as mode:
        yield
    mode.check()


def measure(name: str, case: int, dtype: str, layout: str, device: str = "cpu") -> list[Result]:
    """Run one case in this process; the dispatcher must select Triton on `device`."""
    from megalite.kernels.dispatch import runs_triton

    assert runs_triton(device), "the dispatcher does not select Triton here, so this would compare torch with torch"
    op = OPS[name]
    exact = [x.to(device) for x in op.cases[case]()]
    inputs = [x.to(DTYPES[dtype]) if x.is_floating_point() else x for x in exact]
    # the true result is computed from the rounded inputs
    rounded = [x.double() if x.is_floating_point() else x for x in inputs]

    def run_in(fill: float) -> list[dict[str, Tensor]]:
        with guarded(fill):
            return [results(op.run, inputs, layout), results(op.twin, inputs, None)]

    actual, twin = run_in(math.nan)
    if dtype == "float32" and device == "cpu":  # in one dtype only, because it doubles the time
        for with_nan, with_zeros in zip((actual, twin), run_in(0.0), strict=True):
            assert all(torch.equal(with_nan[key], with_zeros[key]) for key in actual), "read before it was written"
    expected = results(op.twin, rounded, None)
    max_grad_output = normal(*expected["output 0"].shape, seed=90).abs().max().item()
    rows = []
    for key, true in expected.items():
        assert actual[key].dtype == twin[key].dtype and actual[key].shape == true.shape, key
        error, twin_error = (
            (x[key].double() - true).abs().nan_to_num(float("inf")).max().item() for x in (actual, twin)
        )
        units = op.fp32_units if device == "cpu" else max(op.fp32_units, op.gpu_units)
        floor = 0.0 if device == "cpu" or dtype != "float32" else op.gpu_floor
        scale = true.abs().max().item()
        if dtype == "float32":
            scale = max(scale, op.cancels * max_grad_output)
        rows.append(Result(key, error, twin_error, scale, dtype, units, op.half_units, floor))
    return rows


def emulate_gpu() -> None:
    """Make Triton's interpreter round and load like a GPU.

    The interpreter (3.9) truncates fp32 to bf16, which doubles the error of every result; a GPU rounds to nearest, ties
    to even. The interpreter loads zeros where the mask is off and `other` is missing; on a GPU the value is undefined,
    so here it is NaN.
    """
    assert os.environ["TRITON_INTERPRET"] == "1"
    torch.set_num_threads(1)
    import numpy as np
    import triton.language as tl
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def convert_to_nearest(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source, target) != (tl.float32, tl.bfloat16):
            return convert(data, source, target, mode)
        bits = np.ascontiguousarray(data).view(np.uint32)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return np.where(np.isnan(data), 0x7FC0, nearest).astype(np.uint16)

    interpreter._convert_float = convert_to_nearest
    semantic: Any = TritonSemantic
    load = semantic.load

    def load_undefined(self: Any, pointers: Any, mask: Any, other: Any, *options: Any) -> Any:
        if mask is not None and other is None:
            is_floating = pointers.dtype.scalar.element_ty.is_floating()
            other = self.to_tensor(math.nan if is_floating else -77)
        return load(self, pointers, mask, other, *options)

    semantic.load = load_undefined
