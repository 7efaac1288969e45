"""Attention of some queries to some keys at any positions, forward and backward.

Query i sees keys low(i) <= j <= i. The results of the parts of a sequence, each with the keys that it sees, equal that
of the full sequence.
"""

import contextlib
import functools
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from cases import attention_definition
from hypothesis import given, settings
from hypothesis import strategies as st
from pairwise import nightly_except
from torch import Tensor

from megalite.kernels import blocked_attention as module
from megalite.kernels import dispatch
from megalite.kernels.attention import Documents, attention, attention_reference
from megalite.kernels.blocked_attention import AttentionDropout, blocked_attention
from megalite.kernels.cached_attention import cached_attention
from megalite.kernels.flash_attention import flash_attention

B, G, PER_GROUP, K = 2, 2, 2, 8
SCALE = K**-0.5
Call = Callable[..., Any]


def _tensors(
    queries: int, keys: int, has_sink: bool = False, value: int = K, pe: int = 0, dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    """Return q, k, v of `value` channels, the gradient of o, and optionally shared keys of `pe` channels and a sink."""
    generator = torch.Generator().manual_seed(queries * 101 + keys)
    H = G * PER_GROUP
    shapes = {"q": (queries, B, H, K), "k": (keys, B, G, K), "v": (keys, B, G, value), "do": (queries, B, H, value)}
    if pe:
        shapes |= {"q_pe_SBHR": (queries, B, H, pe), "k_pe_TBR": (keys, B, pe)}
    tensors = {
        name: torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype) for name, shape in shapes.items()
    }
    if has_sink:
        tensors["sink_H"] = torch.linspace(-1, 2, H, dtype=dtype)
    return tensors


def _drop(p: float) -> AttentionDropout | None:
    return AttentionDropout(p, 12345, torch.tensor([7, 9]), head_offset=3) if p else None


def _results(run: Call, tensors: dict[str, Tensor], **options: Any) -> dict[str, Tensor]:
    """Return o, and the gradient of each tensor by its name."""
    leaves = {name: x.detach().requires_grad_() for name, x in tensors.items() if name != "do"}
    more = {name: x for name, x in leaves.items() if name not in ("q", "k", "v")}
    o = run(leaves["q"], leaves["k"], leaves["v"], scale=SCALE, **more, **options)
    grads = torch.autograd.grad(o, [*leaves.values()], tensors["do"])
    return {"o": o.detach()} | dict(zip(leaves, grads, strict=True))


def _close(actual: dict[str, Tensor], expected: dict[str, Tensor], bound: float) -> None:
    assert actual.keys() == expected.keys()
    for name, b in expected.items():
        torch.testing.assert_close(
            actual[name].double(), b.double(), rtol=bound, atol=bound, msg=lambda text, n=name: f"{n}: {text}"
        )


# queries, keys, first positions, window, dropout probability, has documents, has a sink, widths of values and of
# shared keys
TRITON = [
    (40, 40, 0, 0, None, 0.0, False, True, K, 0),
    (40, 70, 30, 0, None, 0.3, True, False, 5, 3),  # a chunk of queries and all keys up to its end
    (33, 20, 64, 7, None, 0.0, True, False, K, 0),  # keys far before the queries
    (20, 33, 7, 20, None, 0.3, False, True, 70, 0),  # some queries before all keys
    (5, 9, 0, 40, None, 0.0, False, False, K, 16),  # all queries before all keys
    (70, 20, 0, 40, None, 0.0, False, False, K, 0),  # only the last blocks of queries see keys
    (70, 35, 20, 0, 25, 0.0, False, True, K, 5),  # a window that ends within the keys
    (35, 70, 40, 3, 9, 0.3, True, True, 5, 3),
    (17, 6, 90, 10, 8, 0.0, False, False, K, 0),  # a window that starts after all keys
]


def _first(queries: int, q_start: int) -> Tensor:
    """Return the starts of documents, whose lengths differ between samples; the first start before the queries."""
    i = torch.arange(q_start, q_start + queries)
    return torch.stack([i // 11 * 11, i // 17 * 17])


def _options(case: tuple[Any, ...]) -> dict[str, Any]:
    queries, _, q_start, k_start, window, p, documents, *_ = case
    first = _first(queries, q_start) if documents else None
    return dict(window=window, drop=_drop(p), q_start=q_start, k_start=k_start, document_start_BS=first)


def in_triton(case: tuple[Any, ...], softcap: float | None) -> dict[str, Tensor]:
    tensors = _tensors(*case[:2], *case[-3:], dtype=torch.float32)
    return _results(flash_attention, tensors, **_options(case), softcap=softcap)


CAPPED = [(case, 0.8) for case in TRITON]
IN_TRITON = [(case, None) for case in TRITON] + CAPPED
OFTEN = [row for row in IN_TRITON if row not in (IN_TRITON[0], *CAPPED[1:-2])]


@pytest.mark.parametrize("row", nightly_except(IN_TRITON, OFTEN, str, guards=("megalite/kernels",)))
def test_attention_kernels_at_any_positions(interpreter: Call, row: tuple[tuple[Any, ...], float | None]) -> None:
    case, softcap = row
    tensors = _tensors(*case[:2], *case[-3:])
    expected = _results(attention_definition, tensors, **_options(case), softcap=softcap)
    _close(interpreter(in_triton, case, softcap), expected, 2e-5)


FORCED_BACKENDS = ("auto", "torch", "blocked")  # with dropout, torch computes explicit scores


def _documents(length: int, lengths: Sequence[int]) -> Documents:
    """Return documents that repeat these lengths; the second sample has them in reverse."""
    spans: list[tuple[int, int, int]] = []
    for row, row_lengths in enumerate((lengths, lengths[::-1])):
        start, sizes = 0, itertools.cycle(row_lengths)
        while start < length:
            spans.append((row, start, min(length, start + next(sizes))))
            start = spans[-1][2]
    first = [[start for b, start, end in spans if b == row for _ in range(start, end)] for row in range(B)]
    return Documents(tuple(spans), torch.tensor(first))


def _part_of(documents: Documents | None, start: int, end: int) -> Documents | None:
    return (
        None if documents is None else documents._replace(document_start_BS=documents.document_start_BS[:, start:end])
    )


@contextlib.contextmanager
def _force_backend(name: str) -> Iterator[None]:
    dispatch.set_kernel_options("auto", name)
    try:
        yield
    finally:
        dispatch.set_kernel_options("auto", "auto")


positions = st.tuples(st.integers(1, 40), st.integers(1, 40), st.integers(0, 60), st.integers(0, 60))
lengths = st.none() | st.lists(st.sampled_from([1, 2, 7, 11, 23]), min_size=1, max_size=5)
# window, dropout probability, document lengths, forced backend, queries per block
option_strategy = st.tuples(
    *(st.none() | st.integers(1, 70), st.sampled_from([0.0, 0.3]), lengths),
    *(st.sampled_from(FORCED_BACKENDS), st.sampled_from([1, 3, 8, 64])),
)
Options = tuple[int | None, float, list[int] | None, str, int]


@settings(max_examples=300)
@given(
    *(positions, option_strategy, st.booleans(), st.tuples(st.sampled_from([K, 5]), st.sampled_from([0, 3]))),
    st.none() | st.sampled_from([0.2, 3.0, 1e3]),
)
def test_attention_accepts_queries_and_keys_at_any_positions(
    position_values: tuple[int, int, int, int],
    option_values: Options,
    has_sink: bool,
    widths: tuple[int, int],
    softcap: float | None,
) -> None:
    (queries, keys, q_start, k_start), (window, p, document_lengths, backend, rows) = position_values, option_values
    documents = document_lengths and _part_of(
        _documents(max(q_start + queries, k_start + keys), document_lengths), q_start, q_start + queries
    )
    options = dict(window=window, drop=_drop(p), q_start=q_start, k_start=k_start, softcap=softcap)
    tensors = _tensors(queries, keys, has_sink, *widths)
    with _force_backend(backend), pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BLOCK_QUERIES", rows)
        patch.setattr(module, "WINDOW_BLOCK_QUERIES", (min(rows, 7), rows))
        actual = _results(attention, tensors, documents=documents or None, **options)
    document_start_BS = documents.document_start_BS if documents else None
    _close(actual, _results(attention_definition, tensors, document_start_BS=document_start_BS, **options), 1e-12)


@pytest.mark.parametrize("window", [None, 5, 200])
def test_attention_flops_of_parts_sum_to_the_whole(window: int | None) -> None:
    """Count the FLOPs of the launches that a plan sees."""

    class FlopCounter:
        device_type, flops = "cuda", 0.0

        def on_launch(self, kernel: dispatch.Kernel, args: tuple[Any, ...]) -> None:
            assert kernel.flops is not None
            self.flops += kernel.flops(*args)

    def flops_of_parts(*cuts: int, value: int = 64, pe: int = 0) -> float:
        q = torch.empty(cuts[-1], 2, 4, 64, device="meta", dtype=torch.bfloat16)
        v, q_pe, k_pe = q[..., :value], q[..., :pe], q[:, :, 0, :pe]
        with dispatch.observe_launches(counter := FlopCounter()):
            for a, b in itertools.pairwise(cuts):
                shared = dict(q_pe_SBHR=q_pe[a:b], k_pe_TBR=k_pe[:b]) if pe else {}
                attention(q[a:b], q[:b], v[:b], scale=1.0, window=window, q_start=a, **shared)
        return counter.flops

    assert flops_of_parts(0, 7, 8, 100) == flops_of_parts(0, 100) > 0
    assert flops_of_parts(0, 100, value=16) == flops_of_parts(0, 100) * (64 + 16) / (64 + 64)
    assert flops_of_parts(0, 100, pe=32) == flops_of_parts(0, 100) * (64 + 32 + 64) / (64 + 64)


def test_windowed_attention_work_is_linear_in_length() -> None:
    """Count the elements of scores in the blocks."""

    def scores(length: int, window: int | None) -> int:
        blocks = module._AttentionBlocks(
            torch.empty(1, 1, length, 4), length, None, 1, module.AttentionParams(1.0, window)
        )
        return sum((queries.stop - queries.start) * (keys.stop - keys.start) for _, queries, keys in blocks)

    assert scores(8192, 512) < 8192 * (512 + 128) and scores(8192, 16) < 8192 * (16 + 64)
    assert scores(8192, None) == scores(8192, 8192) == scores(8192, 10**9) > 8192**2 / 2


def test_attention_saves_only_its_inputs() -> None:
    tensors = _tensors(300, 300, pe=4, dtype=torch.bfloat16)
    q, k, v, q_pe, k_pe = (x.requires_grad_() for name, x in tensors.items() if name != "do")
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        blocked_attention(q, k, v, scale=0.25, q_pe_SBHR=q_pe, k_pe_TBR=k_pe)
    assert [x.data_ptr() for x in saved] == [x.data_ptr() for x in (q, k, v, q_pe, k_pe)]


# ---- Megatron-LM, which stores scores in the dtype of q and k, needs --apply-query-key-layer-scaling and
# --attention-softmax-in-fp32 for these properties; here no score has to fit into fp16
S, H, WIDTH = 24, 2, 64
WINDOW = 9
CAP = 30.0
LARGEST = torch.finfo(torch.float16).max


def inputs(size: float, dtype: torch.dtype) -> list[Tensor]:
    """Return q, k, v with every score near size^2 sqrt(WIDTH); the scores of one query differ by a few units."""
    generator = torch.Generator().manual_seed(0)
    common = size * torch.randn(WIDTH, generator=generator).sign()
    q, k, v = (torch.randn(S, B, H, WIDTH, generator=generator) for _ in range(3))
    return [x.to(dtype) for x in (common + q, common + k * min(1.0, 20 / size), v)]


def hidden(path: str = "plain") -> Tensor:
    future = torch.ones(S, S).triu(1).bool()
    return future | torch.ones(S, S).tril(-WINDOW).bool() if path == "window" else future


def definition(*qkv: Tensor, path: str = "plain") -> Tensor:
    options = dict(window=WINDOW if path == "window" else None, softcap=CAP if path.startswith("capped") else None)
    return attention_definition(*qkv, scale=1 / math.sqrt(WIDTH), **options)


def generation(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
    return cached_attention(q, k, v, torch.arange(S).unsqueeze(1).expand(S, B), **options)


PATHS: dict[str, Callable[..., Tensor]] = {
    "plain": attention,
    "window": functools.partial(attention, window=WINDOW),
    "dropout": functools.partial(attention, drop=AttentionDropout(1e-12, 3, torch.arange(B))),
    "explicit": attention_reference,
    "generation": generation,
    "capped": functools.partial(attention, softcap=CAP),
    "capped, explicit": functools.partial(attention_reference, softcap=CAP),
    "capped, generation": functools.partial(generation, softcap=CAP),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_attention_scores_above_the_fp16_maximum(dtype: torch.dtype, path: str) -> None:
    leaves = [x.requires_grad_() for x in inputs(180.0, dtype)]
    doubles = [x.detach().double() for x in leaves]
    assert float((doubles[0][-1, 0, 0] @ doubles[1][-1, 0, 0]) / math.sqrt(WIDTH)) > 2 * LARGEST
    o = PATHS[path](*leaves, scale=1 / math.sqrt(WIDTH))
    o.float().square().sum().backward()
    assert all(x.isfinite().all() for x in (o, *(x.grad for x in leaves)) if x is not None)
    if dtype != torch.bfloat16 or path == "generation":  # a score of 260,000 is known to 0.016 in fp32, to 1000 in bf16
        torch.testing.assert_close(o.double(), definition(*doubles, path=path), rtol=0, atol=0.1)


@pytest.mark.parametrize("options", [{"sink_H": torch.full((H,), -1e4)}, {"softcap": 1e9}], ids=["sink", "cap"])
def test_generation_scores_above_the_fp16_maximum_on_a_gpu(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Multiply in fp16, as a GPU does. The sink has no weight, and the cap is far above the scores."""
    monkeypatch.setattr("megalite.kernels.cached_attention.upcasts", lambda x: False)
    q, k, v = inputs(180.0, torch.float16)
    o = generation(q, k, v, scale=1 / math.sqrt(WIDTH), **options)
    expected = definition(q.double(), k.double(), v.double())
    torch.testing.assert_close(o.double(), expected, rtol=0, atol=0.1)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_attention_rounding_equals_a_softmax_in_fp32(dtype: torch.dtype, path: str) -> None:
    """Compare with scores up to 40, as in training, in half precision, a softmax in fp32 and weights in half."""
    q, k, v = inputs(2.0, dtype)
    expected = definition(q.double(), k.double(), v.double(), path=path)
    scores = torch.matmul(q.permute(1, 2, 0, 3), k.permute(1, 2, 3, 0)).float() / math.sqrt(WIDTH)
    if path.startswith("capped"):
        scores = CAP * torch.tanh(scores / CAP)
    weights = scores.masked_fill(hidden(path), -math.inf).softmax(-1).to(dtype)
    softmax_result = (weights @ v.permute(1, 2, 0, 3)).permute(2, 0, 1, 3)
    actual = PATHS[path](q, k, v, scale=1 / math.sqrt(WIDTH))
    assert (actual - expected).square().mean() <= 1.5 * (softmax_result - expected).square().mean()
