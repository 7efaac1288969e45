"""The shared harness of the Triton kernels: one table of operations, and how far each is from its definition.

`measure` runs an operation and its torch twin in one dtype and the twin in fp64, forward and backward; in Triton's
interpreter, and on a card where there is one. What the operation allocates is NaN between guards, so an element that no
program wrote, a write and a read beyond the end are seen; in fp32 a second run with zeros in place of NaN must agree.
"""

import functools
import math
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from megalite.kernels import gated_matmul as gated
from megalite.kernels import grouped_matmul as grouped
from megalite.kernels import permute as route
from megalite.kernels.activation import Activation, get_activation
from megalite.kernels.activations.swiglu import swiglu_backward_reference, swiglu_forward_reference
from megalite.kernels.attention import Documents, attention, attention_reference
from megalite.kernels.bias_gelu import bias_gelu_backward_reference, bias_gelu_forward_reference
from megalite.kernels.blocked_attention import AttentionDropout
from megalite.kernels.cross_entropy import shard_grad_, shard_grad_reference_, shard_stats, shard_stats_reference
from megalite.kernels.dropout import dropout, dropout_reference, keep_mask
from megalite.kernels.norms import add_norm, norm, norm_reference
from megalite.kernels.rope import RopeScaling, _Rope, apply_rope, rope_tables, rotate_reference

Make = Callable[[], list[Tensor]]
LAYOUTS = ("contiguous", "gapped", "transposed")
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


@dataclass(frozen=True)
class Op:
    """`run` and `twin` take the tensors of a case and return one tensor or several. Of the inputs, those in floating
    point are cast and get gradients; the others (labels, sample numbers) are passed as they are."""

    run: Callable[..., Any]
    twin: Callable[..., Any]
    cases: tuple[Make, ...]
    fp32_units: int = 4  # of the last place of the largest value, which any fp32 result may be away
    half_units: int = 1  # the same in half precision
    card_units: int = 4  # at least these in fp32 on a card, where another's kernel may compute it
    card_floor: float = 0.0  # how far a card may be off in fp32 where the true result is 0
    cancels: float = 0.0  # in fp32 terms this many times the gradient from above may cancel in a result


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def normals(*shapes: tuple[int, ...]) -> Make:
    """One case: normal inputs of these shapes."""
    return lambda: [normal(*shape, seed=i) for i, shape in enumerate(shapes)]


class _Activated(torch.autograd.Function):
    """An activation as nn/linear.py uses it, y = a * v: backward's own `a` is then the gradient of v."""

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


def activated(forward: Callable[..., Tensor], backward: Callable[..., Any]) -> Callable[..., Any]:
    return lambda u, v, *bias: _Activated.apply((forward, backward), u, v, *bias)


def gelu_twin(tanh: bool) -> Callable[..., Any]:
    pair = (bias_gelu_forward_reference, bias_gelu_backward_reference)
    return activated(*(functools.partial(fn, tanh=tanh) for fn in pair))


def activation_run(name: str) -> Callable[..., Any]:
    return activated(get_activation(name).forward, get_activation(name).backward)


def beyond(run: Callable[..., Any]) -> Callable[..., Any]:
    """Of inputs of which many are clamped."""
    return lambda u, v: run(8 * u, v)


def apply_rope_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return _Rope.apply(x, cos, sin, rotate_reference)  # type: ignore[return-value]


def roped(fn: Callable[..., Tensor], scaling: RopeScaling | None = None, part: float = 1.0) -> Callable[..., Tensor]:
    """The tables that models/gpt.py makes, for the first `part` of a head's channels; with `positions_SB`, per sample."""

    def run(x_SBHK: Tensor, positions_SB: Tensor | None = None) -> Tensor:
        wide = torch.float64 if x_SBHK.dtype == torch.float64 else torch.float32
        rotary = int(x_SBHK.shape[-1] * part)
        tables = rope_tables(x_SBHK.shape[0], rotary, 1e4, scaling, device=x_SBHK.device, dtype=wide)
        if positions_SB is not None:
            tables = (tables[0][positions_SB], tables[1][positions_SB])
        return fn(x_SBHK, *tables)

    return run


def positioned(x_SBHK: tuple[int, ...]) -> Make:
    S, B = x_SBHK[:2]
    return lambda: [normal(*x_SBHK), torch.randint(S, (S, B), generator=torch.Generator().manual_seed(1))]


def numbered(*shapes: tuple[int, ...]) -> Make:
    """Normal inputs [s, B, D] and B sample numbers, some of them beyond 32 bits."""
    return lambda: [*normals(*shapes)(), torch.arange(shapes[0][1]) * 2**31 + 5]


def two_ranges(x_sBD: Tensor) -> Tensor:
    """Positions as a rank of context parallelism has them."""
    s = x_sBD.shape[0]
    return torch.arange(s, device=x_sBD.device) + torch.where(torch.arange(s, device=x_sBD.device) < s // 2, 3, 2**33)


class _Sliced(torch.autograd.Function):
    """Cross entropy of logits_NV in two slices, as two tp ranks have them, with a z-loss; `halves`: stats, gradient."""

    @staticmethod
    def forward(
        ctx: Any, halves: tuple[Callable[..., Tensor], ...], logits: Tensor, labels: Tensor, vocab: int, z_loss: float
    ) -> Tensor:
        cut = logits.shape[1] * 2 // 3
        ctx.halves = halves
        ctx.parts = (logits[:, :cut], 0, min(cut, vocab)), (logits[:, cut:], cut, max(0, vocab - cut))
        stats = torch.stack([halves[0](part, labels, first, valid) for part, first, valid in ctx.parts])
        ctx.lse, ctx.labels, ctx.z_loss = stats[:, 0].logsumexp(0), labels, z_loss
        return ctx.lse - stats[:, 1].sum(0) + z_loss * ctx.lse.square()

    @staticmethod
    def backward(ctx: Any, dloss: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        grads = [
            ctx.halves[1](part.clone(), ctx.lse, ctx.labels, first, dloss, valid, ctx.z_loss)
            for part, first, valid in ctx.parts
        ]
        return None, torch.cat(grads, 1), None, None, None


def sliced(*halves: Callable[..., Tensor], padding: int, z_loss: float = 0.0) -> Callable[..., Tensor]:
    return lambda logits, labels: _Sliced.apply(halves, logits, labels, logits.shape[1] - padding, z_loss)


def labelled(rows: int, columns: int, vocab: int) -> Make:
    def make() -> list[Tensor]:
        g = torch.Generator().manual_seed(1)
        return [3 * normal(rows, columns), torch.randint(vocab, (rows,), generator=g)]

    return make


def attended(fn: Callable[..., Tensor], window: int | None = None, dropout_p: float = 0.0) -> Callable[..., Tensor]:
    """`fn` on q, k, v and, where given, the starts of documents and a sink."""

    def run(q: Tensor, k: Tensor, v: Tensor, *more: Tensor) -> Tensor:
        document_start_BS = next((x for x in more if not x.dtype.is_floating_point), None)
        sink_H = next((x for x in more if x.dtype.is_floating_point), None)
        documents = None if document_start_BS is None else Documents(spans_of(document_start_BS), document_start_BS)
        drop = None
        if dropout_p:
            ids_B = torch.arange(q.shape[1], device=q.device) * 1_000_003 + 2**33
            drop = AttentionDropout(dropout_p, KEY, ids_B, head_offset=3)
        return fn(q, k, v, scale=q.shape[-1] ** -0.5, window=window, documents=documents, drop=drop, sink_H=sink_H)

    return run


def attention_definition(
    q: Tensor, k: Tensor, v: Tensor, *, scale: float, window: int | None = None,
    document_start_BS: Tensor | None = None, drop: AttentionDropout | None = None, sink_H: Tensor | None = None,
    q_start: int = 0, k_start: int = 0,
) -> Tensor:  # fmt: skip
    """Of queries from position `q_start` on and keys from `k_start` on, with scores in memory: nothing here is shared with
    what is tested but the dropout mask."""
    i = torch.arange(q_start, q_start + q.shape[0]).view(1, 1, -1, 1)
    j = torch.arange(k_start, k_start + k.shape[0]).view(1, 1, 1, -1)
    low = torch.zeros_like(i) if window is None else (i - window + 1).clamp(min=0)
    if document_start_BS is not None:
        low = torch.maximum(low, document_start_BS[:, None, :, None])
    seen = (low <= j) & (j <= i)
    every = [x.permute(1, 2, 0, 3).repeat_interleave(q.shape[2] // x.shape[2], 1) for x in (q, k, v)]
    scores = (every[0] @ every[1].mT * scale).masked_fill(~seen, -math.inf)
    some = seen.any(-1, keepdim=True).expand(*scores.shape[:-1], 1)
    largest = torch.where(some, scores.amax(-1, keepdim=True), 0.0)
    e = torch.where(seen, (scores - largest).exp(), 0.0)
    more = 0.0 if sink_H is None else (sink_H.view(-1, 1, 1) - largest).exp()
    p = e / torch.where(some, e.sum(-1, keepdim=True) + more, 1.0)
    if drop is not None:
        heads = torch.arange(q.shape[2]).view(-1, 1, 1) + drop.head_offset
        p = p * keep_mask(drop.key, drop.p, drop.sample_ids_B.view(-1, 1, 1, 1), heads, i, j) / (1 - drop.p)
    return (p @ every[2]).permute(2, 0, 1, 3)


def spans_of(document_start_BS: Tensor) -> tuple[tuple[int, int, int], ...]:
    rows = [sorted(set(row)) for row in document_start_BS.tolist()]
    ends = [[*row[1:], document_start_BS.shape[1]] for row in rows]
    return tuple((b, *span) for b in range(len(rows)) for span in zip(rows[b], ends[b], strict=True))


def heads(
    S: int, B: int, H: int, G: int, K: int, document: int | None = None, sunk: bool = False, value: int | None = None
) -> Make:
    """q, k, v, the latter of `value` channels, or K; with `document`, documents of about that length, different in each
    sample; with `sunk` a sink."""

    def make() -> list[Tensor]:
        given = normals((S, B, H, K), (S, B, G, K), (S, B, G, value or K))()
        if document is not None:
            starts = torch.arange(S)[None] + torch.arange(B)[:, None] * (document // 2)
            shifted_starts = starts // document * document - torch.arange(B)[:, None] * (document // 2)
            given.append(shifted_starts.clamp(min=0))
        return given + [normal(H, seed=3)] * sunk

    return make


class _Grouped(torch.autograd.Function):
    """A matmul of experts, differentiated by the functions that are tested: the gradient of the weights twice, into
    what was never written and into that, by index and not. `pair`: the matmul, the gradient."""

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
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        dw = torch.empty(len(w), *w.shape[:0:-1], dtype=wide, device=w.device).transpose(1, 2)
        ctx.pair[1](dw, dy, x, offsets, *rows, overwrite=True)
        backwards = torch.arange(len(dy), device=dy.device).flip(0)
        ctx.pair[1](dw, dy.flip(0), x, offsets, *rows, dy_rows=backwards, overwrite=False)
        return None, dx, (dw / 2).to(w.dtype), *(None for _ in ctx.saved_tensors[2:])


def grouping(fn: Callable[..., Tensor], grad_fn: Callable[..., None]) -> Callable[..., Tensor]:
    return lambda *given: _Grouped.apply((fn, grad_fn), *given)


def groups(sizes: tuple[int, ...], F: int, D: int, rows: int | None = None, none: int = 0) -> Make:
    """x, w, offsets of groups of these sizes, and with `rows` of x what to read of them; `none` rows are of no group."""

    def make() -> list[Tensor]:
        M, offsets = sum(sizes) + none, torch.tensor([0, *sizes], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        given = [normal(rows or M, D), normal(len(sizes), F, D, seed=1), offsets]
        return given + ([torch.randint(rows, (M,), generator=torch.Generator().manual_seed(2))] if rows else [])

    return make


class _Gated(torch.autograd.Function):
    """Experts from rows of x to sums for each row, by `pair`, up and down of kernels/gated_matmul.py; the rest is plain.
    What up returns is a result, too."""

    @staticmethod
    def forward(ctx: Any, pair: tuple[Callable[..., Any], ...], activation: Activation, *given: Tensor) -> Any:
        ctx.pair, ctx.activation = pair, activation
        x, w, down, p_M, offsets, rows, *bias = given
        u, a = pair[0](x, w, offsets, rows, p_M, activation, *bias)
        ctx.save_for_backward(u, *given)
        y_MD = grouped.grouped_matmul_reference(a.double(), down.double(), offsets)
        return u, a, x.new_zeros(x.shape, dtype=torch.float64).index_add_(0, rows, y_MD)

    @staticmethod
    def backward(ctx: Any, _: Tensor, __: Tensor, dy: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        u, x, w, down, p_M, offsets, rows, *bias = ctx.saved_tensors
        dy = laid_out(dy.to(x.dtype), "gapped")
        a, du, dp = ctx.pair[1](dy, down, offsets, rows, u, p_M, ctx.activation)
        dw, ddown = (t.new_empty(t.shape, dtype=torch.float64) for t in (w, down))
        plain = grouped.grouped_weight_grad_reference_
        plain(dw, du.double(), x.double(), offsets, rows, overwrite=True)
        plain(ddown, dy.double(), a.double(), offsets, dy_rows=rows, overwrite=True)
        dx_MD = grouped.grouped_matmul_reference(du, w.transpose(1, 2), offsets)
        dx = x.new_zeros(x.shape, dtype=torch.float64).index_add_(0, rows, dx_MD.double())
        dbias = [t.new_zeros(t.shape) for t in bias]
        grads = (g.to(t.dtype) for g, t in zip((dx, dw, ddown, dp), (x, w, down, p_M), strict=True))
        return None, None, *grads, None, None, *dbias


def gating(name: str, *cases: Make) -> Op:
    activation, plain = get_activation(name), {"matmul": grouped.grouped_matmul_reference}
    clamped = name.startswith("clamped")
    forms = (functools.partial(f, clamped=clamped) for f in (swiglu_forward_reference, swiglu_backward_reference))
    twin, apart = (
        Activation(*forms, width=2),
        tuple(functools.partial(f, **plain) for f in (gated.up_unfused, gated.down_unfused)),
    )
    fused = (gated.up_matmul, gated.down_gradients)
    return Op(
        lambda *given: _Gated.apply(fused, activation, *given), lambda *given: _Gated.apply(apart, twin, *given), cases
    )


def choices(sizes: tuple[int, ...], F: int, D: int, rows: int, none: int = 0, bias: bool = False) -> Make:
    """x, w, down, probabilities, offsets of groups of these sizes, what to read of `rows` rows, and a bias, which takes
    some columns well beyond the limits: near one, the gradient is there or not by the last bit."""

    def make() -> list[Tensor]:
        M, E = sum(sizes) + none, len(sizes)
        offsets = torch.tensor([0, *sizes], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        given = [normal(rows, D), normal(E, 2 * F, D, seed=1), normal(E, D, F, seed=2), normal(M, seed=3).sigmoid()]
        given += [offsets, torch.randint(rows, (M,), generator=torch.Generator().manual_seed(4))]
        if bias:
            given[1] *= D**-0.5
            given.append(20 * normal(E, 2 * F, seed=5).round().clamp(-1, 1))
        return given

    return make


class _Combined(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, fn: Callable[..., Tensor], y: Tensor, slots: Tensor) -> Tensor:
        ctx.slots, ctx.shape = slots, y.shape
        return fn(y, slots)

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        dy, here = dout.new_zeros(ctx.shape), ctx.slots >= 0
        dy[ctx.slots[here]] = dout.repeat_interleave(ctx.slots.shape[1], 0).view(*ctx.slots.shape, -1)[here]
        return None, dy, None


def chosen(N: int, K: int, D: int, left_out: int) -> Make:
    """Rows, and a place for each of N K choices but some."""

    def make() -> list[Tensor]:
        places = torch.randperm(N * K, generator=torch.Generator().manual_seed(3))
        return [normal(N * K - left_out, D), places.where(places < N * K - left_out, -1).view(N, K)]

    return make


SWIGLU = (swiglu_forward_reference, swiglu_backward_reference)
KEY = 0xC0FFEE01  # above 2^31: the key's sign must not matter
WIDTHS = ((1, 1), (3, 8), (2, 5, 7), (37, 100), (5, 1, 1025))  # odd, ragged, several rows per program, several programs
HEADS = ((1, 1, 1, 2), (5, 2, 3, 8), (3, 2, 5, 96), (9, 1, 2, 20))  # [S, B, H, K]
FEEDS = ((1, 1), (4, 3, 7), (7, 2, 100), (3, 2, 2050))  # the last one more than one program wide
STREAMS = ((1, 1, 1), (3, 2, 7), (2, 3, 1100))  # [s, B, D]


def normalising(added: bool, bias: bool, **more: Any) -> Op:
    """`added`: after a residual add."""

    def twin(*given: Any) -> Any:
        if not added:
            return norm_reference(*given)
        h = given[0] + given[1]
        return h, norm_reference(h, *given[2:])

    no_bias, fn = [] if bias else [None], add_norm if added else norm
    cases = tuple(normals(*[s] * (1 + added), *[s[-1:]] * (1 + bias)) for s in WIDTHS)
    return Op(lambda *given: fn(*given, *no_bias, 1e-5), lambda *given: twin(*given, *no_bias, 1e-5), cases, **more)


def attending(*cases: Make, half_units: int = 1, card_units: int = 4, **how: Any) -> Op:
    """In fp32 dp - delta is rounded as dp is, and that is larger than the gradient."""
    more = dict(fp32_units=16, half_units=half_units, card_units=card_units)
    return Op(attended(attention, **how), attended(attention_reference, **how), cases, **more)


def entropy(*cases: Make, **how: Any) -> Op:
    """In fp32 p - 1 cancels where the label is likely."""
    halves = (shard_stats, shard_grad_), (shard_stats_reference, shard_grad_reference_)
    return Op(*(sliced(*pair, **how) for pair in halves), cases, cancels=1.0)


OPS: dict[str, Op] = {
    "rms_norm": normalising(added=False, bias=False),
    "add_rms_norm": normalising(added=True, bias=False),
    # of one column: dy w - dy w, one of them fused into a sum, times 1 / sqrt(eps) = 316
    "layer_norm": normalising(added=False, bias=True, card_floor=4e-5),
    "add_layer_norm": normalising(added=True, bias=True),
    "rope": Op(roped(apply_rope), roped(apply_rope_reference), tuple(normals(s) for s in HEADS)),
    "rope partial, Llama-3": Op(
        roped(apply_rope, RopeScaling(), 0.25),
        roped(apply_rope_reference, RopeScaling(), 0.25),
        tuple(normals(s) for s in HEADS if s[-1] >= 8),
    ),
    "rope by sample": Op(roped(apply_rope), roped(apply_rope_reference), tuple(positioned(s) for s in HEADS)),
    "swiglu": Op(activation_run("swiglu"), activated(*SWIGLU), tuple(normals((*s[:-1], 2 * s[-1]), s) for s in FEEDS)),
    "clamped_swiglu": Op(
        beyond(activation_run("clamped_swiglu")),
        beyond(activated(*(functools.partial(fn, clamped=True) for fn in SWIGLU))),
        tuple(normals((*s[:-1], 2 * s[-1]), s) for s in FEEDS),
    ),
    "gelu": Op(activation_run("gelu"), gelu_twin(True), tuple(normals(s, s) for s in FEEDS)),
    "gelu_erf": Op(activation_run("gelu_erf"), gelu_twin(False), tuple(normals(s, s) for s in FEEDS)),
    "bias_gelu": Op(activation_run("gelu"), gelu_twin(True), tuple(normals(s, s, s[-1:]) for s in FEEDS)),
    "bias_gelu_erf": Op(activation_run("gelu_erf"), gelu_twin(False), tuple(normals(s, s, s[-1:]) for s in FEEDS)),
    "attention": attending(
        *(heads(2, 1, 1, 1, 4), heads(37, 2, 4, 2, 20), heads(150, 1, 2, 1, 96), heads(261, 1, 1, 1, 128)),
        card_units=64,  # torch's own kernel, on an H100 and two positions: 32
    ),
    "attention in a window": attending(heads(290, 1, 2, 2, 64), heads(9, 2, 3, 1, 8), window=50),
    "attention by document": attending(heads(300, 2, 2, 1, 64, 80), heads(20, 3, 2, 2, 16, 3)),
    "attention by document in a window": attending(heads(300, 2, 1, 1, 64, 130), window=70),
    "attention with a sink": attending(heads(9, 2, 3, 1, 8, sunk=True), heads(150, 1, 4, 2, 64, 40, sunk=True)),
    # in half precision delta takes o as it was rounded; the twin is exact where one key is left
    "attention, values of another width": attending(
        *(heads(150, 1, 1, 1, 192, value=128), heads(70, 2, 2, 1, 20, 30, True, 72), heads(40, 1, 2, 2, 96, value=8)),
        half_units=3,
    ),
    "attention, wide heads": attending(heads(150, 1, 2, 1, 256), heads(90, 2, 1, 1, 200, 40), window=130),
    "attention with dropout": attending(
        *(heads(2, 1, 1, 1, 4), heads(150, 2, 4, 2, 24), heads(261, 1, 1, 1, 128)), half_units=3, dropout_p=0.25
    ),
    "attention with dropout, by document in a window": attending(
        *(heads(200, 2, 2, 1, 64, 90), heads(90, 2, 2, 1, 160, 50, value=100)), half_units=3, window=70, dropout_p=0.7
    ),
    "cross_entropy": entropy(labelled(1, 2, 2), labelled(5, 37, 37), labelled(3, 9001, 9001), padding=0),
    "cross_entropy with padding": entropy(labelled(4, 8, 2), labelled(2, 100, 94), padding=6),
    "cross_entropy with z-loss": entropy(
        *(labelled(4, 8, 2), labelled(5, 100, 94), labelled(2, 9001, 8995)), padding=6, z_loss=0.05
    ),
    "dropout": Op(
        lambda x, ids: dropout(x, 0.25, KEY, ids, two_ranges(x)),
        lambda x, ids: dropout(x, 0.25, KEY, ids, two_ranges(x), torch.zeros_like(x), impl=dropout_reference),
        tuple(numbered(s) for s in STREAMS),
    ),
    "dropout_add": Op(
        lambda x, a, ids: dropout(x, 0.1, KEY, ids, 2**20, a),
        lambda x, a, ids: dropout(x, 0.1, KEY, ids, 2**20, a, impl=dropout_reference),
        tuple(numbered(s, s) for s in STREAMS),
    ),
    "grouped_matmul": Op(
        grouping(grouped.grouped_matmul, grouped.grouped_weight_grad_),
        grouping(grouped.grouped_matmul_reference, grouped.grouped_weight_grad_reference_),
        (
            *(groups((1,), 1, 1), groups((3,), 5, 7, rows=2), groups((0, 5, 0, 70, 0), 37, 70, none=3)),
            *(groups((130, 0, 1), 256, 64, rows=20, none=70), groups((0, 530, 2), 70, 8), groups((0, 0), 4, 4, none=9)),
        ),
    ),
    "gated_matmul": gating(
        *("swiglu", choices((1,), 1, 1, 1), choices((0, 5, 0, 70, 0), 37, 70, 9, none=3)),
        *(choices((130, 0, 1), 256, 64, 20, none=70), choices((0, 0), 4, 4, 2, none=9)),
    ),
    "gated_matmul with limits and a bias": gating(
        *("clamped_swiglu", choices((3,), 5, 7, 2, bias=True), choices((0, 5, 140, 0), 70, 40, 9, bias=True))
    ),
    "combine": Op(
        lambda y, slots: _Combined.apply(route.unpermute, y, slots),
        lambda y, slots: _Combined.apply(route.unpermute_reference, y, slots),
        (chosen(1, 1, 1, 0), chosen(7, 3, 100, 5), chosen(3, 2, 1050, 0)),
    ),
}


@dataclass(frozen=True)
class Result:
    """Of one tensor: the largest error of the operation and of its twin against fp64, and the largest true value."""

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
        """Twice the twin's own error, or twice one rounding of the result where the twin happens to be exact. In fp32,
        where kernel and twin compute alike but in another order, at least `fp32_units` in the last place."""
        eps = torch.finfo(DTYPES[self.dtype]).eps
        if self.dtype == "float64":
            return 1e-10 * max(self.scale, 1.0)
        units = self.fp32_units if self.dtype == "float32" else self.half_units
        return max(2 * max(self.twin_error, units / 2 * eps * self.scale), self.floor)


class Guarded(TorchDispatchMode):
    """Tensors made by `empty` are full of `fresh` (-77 for integers) and lie between guards that `check` looks at."""

    WIDTH = 64

    def __init__(self, fresh: float) -> None:
        super().__init__()
        self.fresh = fresh
        self.flats: list[tuple[Tensor, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__ if hasattr(func, "overloadpacket") else ""
        if not name.startswith(("empty", "new_empty")) or out.numel() == 0:
            return out
        flat = torch.full((out.numel() + 2 * self.WIDTH,), poison(out.dtype), dtype=out.dtype, device=out.device)
        if flat.is_floating_point():
            flat[self.WIDTH : -self.WIDTH] = self.fresh
        self.flats.append((flat, out.numel()))
        return flat[self.WIDTH : -self.WIDTH].as_strided(out.shape, out.stride(), self.WIDTH)

    def check(self) -> None:
        for flat, n in self.flats:
            for guard in (flat[: self.WIDTH], flat[self.WIDTH + n :]):
                same = guard.isnan().all() if guard.is_floating_point() else (guard == poison(guard.dtype)).all()
                assert bool(same), f"a kernel wrote outside of a tensor of {n} elements"


def poison(dtype: torch.dtype) -> float:
    return float("nan") if dtype.is_floating_point else -77


def laid_out(x: Tensor, layout: str) -> Tensor:
    """`x` with other strides, its values between NaNs (-77 for integers)."""
    if layout == "transposed" and x.dim() > 2:  # [b, a, ...] in memory
        base = laid_out(x.transpose(0, 1), "contiguous")
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
    """Outputs and gradients of `fn` with a fixed gradient from above, laid out as the inputs are."""
    leaves = [x.detach().clone().requires_grad_() if x.is_floating_point() else x for x in inputs]
    given = leaves if layout is None else [laid_out_leaf(x, layout) for x in leaves]
    made = fn(*given)
    outputs = list(made) if isinstance(made, tuple) else [made]
    above = [normal(*y.shape, seed=seed + i).to(y.device, y.dtype) for i, y in enumerate(outputs)]
    if layout is not None:
        above = [laid_out(dy, layout) for dy in above]
    wanted = [x for x in leaves if x.is_floating_point()]
    grads = torch.autograd.grad(outputs, wanted, above)
    named = {f"output {i}": y.detach() for i, y in enumerate(outputs)}
    return named | {f"gradient {i}": g for i, g in enumerate(grads)}


class _LaidOut(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, layout: str) -> Tensor:
        return laid_out(x, layout)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return dx, None


def laid_out_leaf(x: Tensor, layout: str) -> Tensor:
    if not x.is_floating_point():
        return laid_out(x, "contiguous")
    return _LaidOut.apply(x, layout)  # type: ignore[return-value]


@contextmanager
def guarded(fresh: float = math.nan) -> Iterator[None]:
    with Guarded(fresh) as mode:
        yield
    mode.check()


def measure(name: str, case: int, dtype: str, layout: str, device: str = "cpu") -> list[Result]:
    """Run one case here, in this process; Triton must be what the dispatcher takes on `device`."""
    from megalite.kernels.dispatch import runs_triton

    assert runs_triton(device), "the dispatcher does not take Triton here, so this would compare torch with torch"
    op = OPS[name]
    exact = [x.to(device) for x in op.cases[case]()]
    inputs = [x.to(DTYPES[dtype]) if x.is_floating_point() else x for x in exact]
    same = [x.double() if x.is_floating_point() else x for x in inputs]  # the true result is that of rounded inputs

    def run_in(fresh: float) -> list[dict[str, Tensor]]:
        with guarded(fresh):
            return [results(op.run, inputs, layout), results(op.twin, inputs, None)]

    got, twin = run_in(math.nan)
    if dtype == "float32" and device == "cpu":  # in one dtype, as it takes as long again
        for filled, zeroed in zip((got, twin), run_in(0.0), strict=True):
            assert all(torch.equal(filled[key], zeroed[key]) for key in got), "read before it was written"
    want = results(op.twin, same, None)
    largest_above = normal(*want["output 0"].shape, seed=90).abs().max().item()
    rows = []
    for key, true in want.items():
        assert got[key].dtype == twin[key].dtype and got[key].shape == true.shape, key
        error, twin_error = ((x[key].double() - true).abs().nan_to_num(float("inf")).max().item() for x in (got, twin))
        units = op.fp32_units if device == "cpu" else max(op.fp32_units, op.card_units)
        floor = 0.0 if device == "cpu" or dtype != "float32" else op.card_floor
        scale = true.abs().max().item()
        if dtype == "float32":
            scale = max(scale, op.cancels * largest_above)
        rows.append(Result(key, error, twin_error, scale, dtype, units, op.half_units, floor))
    return rows


def behave_as_a_card() -> None:
    """Triton's interpreter cuts fp32 off to bf16 (3.9), which doubles the error of every result; a card rounds to the
    nearest, ties to even. It loads zeros where the mask is off and no `other` is given; a card leaves any value there,
    so here it is NaN."""
    assert os.environ["TRITON_INTERPRET"] == "1"
    torch.set_num_threads(1)
    import numpy as np
    import triton.language as tl
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    convert = interpreter._convert_float

    def rounded(data: Any, source: Any, target: Any, mode: Any) -> Any:
        if (source, target) != (tl.float32, tl.bfloat16):
            return convert(data, source, target, mode)
        bits = np.ascontiguousarray(data).view(np.uint32)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        return np.where(np.isnan(data), 0x7FC0, nearest).astype(np.uint16)

    interpreter._convert_float = rounded
    semantic: Any = TritonSemantic
    load = semantic.load

    def undefined(self: Any, pointers: Any, mask: Any, other: Any, *options: Any) -> Any:
        if mask is not None and other is None:
            floating = pointers.dtype.scalar.element_ty.is_floating()
            other = self.to_tensor(math.nan if floating else -77)
        return load(self, pointers, mask, other, *options)

    semantic.load = undefined
