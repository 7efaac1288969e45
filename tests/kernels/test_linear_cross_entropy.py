"""Head and loss in chunks against the definition in fp64: gradients, padding, masks, memory, ranks."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks
from torch import Tensor

from megalite.kernels import cross_entropy
from megalite.kernels.cross_entropy import chunk_tokens
from megalite.nn.loss import linear_cross_entropy
from megalite.parallel.mesh import Mesh, build_mesh

TP = Mesh.single_process().tp
SCALE = 0.37
Result = tuple[Tensor, Tensor, Tensor]


def inputs(s: int, b: int, d: int, padded: int, vocab: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(s + 10 * d)
    x, w = (torch.randn(shape, generator=g, dtype=torch.float64).to(dtype) for shape in ((s, b, d), (padded, d)))
    labels = torch.randint(0, vocab, (s, b), generator=g)
    labels.view(-1)[:2] = torch.tensor([vocab - 1, 0])[: labels.numel()]
    mask = (torch.rand((s, b), generator=g) < 0.7).float()
    return x, w, labels, mask


def grads_of(losses: tuple[Tensor, Tensor], trained: Tensor, x: Tensor, w: Tensor) -> Result:
    """Return loss and z-loss, and the gradients of `trained`."""
    trained.backward(torch.full_like(trained, SCALE))
    assert x.grad is not None and w.grad is not None
    return torch.stack(losses).detach(), x.grad, w.grad


def definition(
    x: Tensor,
    w: Tensor,
    labels: Tensor,
    mask: Tensor | None,
    vocab: int,
    z_loss: float = 0.0,
    softcap: float | None = None,
) -> Result:
    """Compute loss and gradients from full logits."""
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    count = torch.ones(labels.shape) if mask is None else mask
    logits = (x @ w.T)[..., :vocab].flatten(0, 1).to(torch.promote_types(x.dtype, torch.float32))
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    loss = (torch.nn.functional.cross_entropy(logits, labels.flatten(), reduction="none") * count.flatten()).sum()
    z_sum = z_loss * (logits.logsumexp(1).square() * count.flatten()).sum()
    return grads_of((loss, z_sum), loss + z_sum, x, w)


def in_chunks(x: Tensor, w: Tensor, labels: Tensor, mask: Tensor | None, vocab: int, **options: Any) -> Result:
    x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
    losses = linear_cross_entropy(x, w, labels, mask, TP, vocab, **options)
    return grads_of(losses, losses[0], x, w)


def set_small_chunks(monkeypatch: pytest.MonkeyPatch, tokens: int, rows: int, columns: int) -> None:
    """Set chunks of about `tokens`, and blocks of `rows` inside them."""
    monkeypatch.setattr(cross_entropy, "MIN_CHUNK_TOKENS", tokens)
    monkeypatch.setattr(cross_entropy, "CHUNK_BYTES", {"cpu": 1})
    monkeypatch.setattr(cross_entropy, "BLOCK_BYTES", {"cpu": 4 * rows * columns})


@pytest.mark.parametrize("sizes", [(7, 3, 5, 16, 11), (4, 1, 8, 8, 8), (1, 1, 3, 5, 2), (33, 2, 6, 64, 61)])
@pytest.mark.parametrize("masked", [True, False])
@pytest.mark.parametrize("tokens", [5, 1000])
@pytest.mark.parametrize(("z_loss", "promised"), [(0.0, None), (0.03, None), (0.0, SCALE), (0.03, SCALE)])
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_linear_cross_entropy_equals_the_definition(
    sizes: Any, masked: bool, tokens: int, z_loss: float, promised: Any, softcap: float | None, monkeypatch
) -> None:
    s, b, d, padded, vocab = sizes
    set_small_chunks(monkeypatch, tokens, 2, vocab)
    x, w, labels, mask = inputs(s, b, d, padded, vocab, torch.float64)
    optional_mask = mask if masked else None
    actual = in_chunks(x, w, labels, optional_mask, vocab, z_loss=z_loss, softcap=softcap, loss_grad=promised)
    expected = definition(x, w, labels, optional_mask, vocab, z_loss, softcap)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    assert not actual[2][vocab:].any()
    with torch.no_grad():
        losses = linear_cross_entropy(x, w, labels, optional_mask, TP, vocab, z_loss=z_loss, softcap=softcap)
    torch.testing.assert_close(torch.stack(losses), expected[0], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("promised", [None, SCALE])
@pytest.mark.parametrize("z_loss", [0.0, 0.03])
@pytest.mark.parametrize("softcap", [None, 4.0])
def test_linear_cross_entropy_error_is_at_most_twice_plain_torch(
    dtype: torch.dtype, promised: float | None, z_loss: float, softcap: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    s, b, d, padded, vocab = 37, 2, 24, 128, 121
    set_small_chunks(monkeypatch, 20, 3, vocab)
    x, w, labels, mask = inputs(s, b, d, padded, vocab, dtype)
    exact = definition(x.double(), w.double(), labels, mask, vocab, z_loss, softcap)
    chunked = in_chunks(x, w, labels, mask, vocab, z_loss=z_loss, softcap=softcap, loss_grad=promised)
    plain = definition(x, w, labels, mask, vocab, z_loss, softcap)
    for actual, reference, expected in zip(chunked, plain, exact, strict=True):
        assert actual.dtype == reference.dtype
        floor = torch.finfo(actual.dtype).eps * expected.abs().max()
        assert (actual.double() - expected).abs().max() <= 2 * max((reference.double() - expected).abs().max(), floor)


def test_linear_cross_entropy_with_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    set_small_chunks(monkeypatch, 5, 2, 11)
    x, w, labels, mask = inputs(6, 4, 5, 16, 11, torch.float64)
    strided = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in (x, w, labels, mask)]
    actual, expected = in_chunks(*strided, 11), definition(x, w, labels, mask, 11)
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_linear_cross_entropy_writes_every_element(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fill uninitialized memory with NaN, which must not appear in the results."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    torch.use_deterministic_algorithms(True)
    try:
        set_small_chunks(monkeypatch, 5, 2, 11)
        assert torch.empty(3).isnan().all()
        x, w, labels, mask = inputs(7, 3, 5, 16, 11, torch.bfloat16)
        assert all(t.isfinite().all() for t in in_chunks(x, w, labels, mask, 11))
    finally:
        torch.use_deterministic_algorithms(False)


def test_linear_cross_entropy_refuses_a_second_backward() -> None:
    x, w, labels, _ = inputs(4, 1, 8, 8, 8, torch.float32)
    x.requires_grad_()
    w.requires_grad_()
    loss, _ = linear_cross_entropy(x, w, labels, None, TP, 8)
    loss.backward(retain_graph=True)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@given(st.integers(1, 10**5), st.integers(1, 2 * 10**5), st.sampled_from([torch.bfloat16, torch.float32]))
def test_chunks_are_even_and_bounded(tokens: int, columns: int, dtype: torch.dtype) -> None:
    size = chunk_tokens(tokens, columns, dtype, torch.device("cpu"))
    bound = max(cross_entropy.MIN_CHUNK_TOKENS, cross_entropy.CHUNK_BYTES["cpu"] // (columns * dtype.itemsize))
    assert 1 <= size <= min(tokens, bound)
    count = -(-tokens // size)
    assert count == -(-tokens // bound) and tokens > (count - 1) * size


def test_full_logits_are_never_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """No saved tensor and no result of an operation has tokens x vocabulary elements."""
    s, b, d, vocab = 64, 4, 8, 512
    set_small_chunks(monkeypatch, 32, 4, vocab)
    largest = 0

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for t in out if isinstance(out, tuple) else (out,):
                if isinstance(t, Tensor):
                    largest = max(largest, t.untyped_storage().nbytes() // 4)
            return out

    x, w, labels, mask = inputs(s, b, d, vocab, vocab, torch.float32)
    with Sizes():
        in_chunks(x, w, labels, mask, vocab)
    assert largest == 32 * vocab < s * b * vocab


def test_the_z_loss_is_trained_through_the_loss() -> None:
    x, w, labels, _ = inputs(4, 1, 8, 8, 8, torch.float32)
    loss, z_loss = linear_cross_entropy(x.requires_grad_(), w, labels, None, TP, 8, z_loss=0.1)
    assert loss.requires_grad and not z_loss.requires_grad and z_loss > 0


def _on_ranks(tp: int, sizes: tuple[int, ...], z_loss: float, softcap: float | None) -> Result:
    s, b, d, padded, vocab = sizes
    mesh = build_mesh(tp=tp, pp=1, device=torch.device("cpu"))
    cross_entropy.MIN_CHUNK_TOKENS, cross_entropy.CHUNK_BYTES = 5, {"cpu": 1}
    x, w, labels, mask = inputs(s, b, d, padded, vocab, torch.float64)
    x, w = (t.chunk(tp)[mesh.tp.rank].clone().requires_grad_() for t in (x, w))
    options: dict[str, Any] = dict(z_loss=z_loss, softcap=softcap)
    losses = linear_cross_entropy(x, w, labels, mask, mesh.tp, vocab, **options)
    result = grads_of(losses, losses[0], x, w)
    with torch.no_grad():
        second = linear_cross_entropy(x, w, labels, mask, mesh.tp, vocab, **options)
    assert torch.equal(torch.stack(second), result[0])
    return result


@pytest.mark.parametrize(
    "tp,padded,vocab,z_loss,softcap",
    [(2, 16, 11, 0.0, None), (2, 16, 7, 0.03, None), (4, 32, 15, 0.03, None), (2, 16, 11, 0.03, 1.5)],
)
def test_vocabulary_over_ranks(tp: int, padded: int, vocab: int, z_loss: float, softcap: float | None) -> None:
    """Equal the definition on several ranks, even if the last ones have only padding."""
    sizes = (8, 3, 5, padded, vocab)
    expected = definition(*inputs(*sizes, torch.float64), vocab, z_loss, softcap)
    parts = run_ranks(tp, _on_ranks, tp, sizes, z_loss, softcap)
    assert all(torch.equal(loss, parts[0][0]) for loss, _, _ in parts)
    actual = parts[0][0], *(torch.cat([part[i] for part in parts]) for i in (1, 2))
    torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


def test_impossible_label_has_its_exact_loss_in_half_precision() -> None:
    """If the label's probability underflows, the loss must not be computed from its logarithm."""
    logits = torch.tensor([[0.0, 3.0, -100.0], [200.0, 1.0, 0.5], [1.0, 1.0, 1.0]], dtype=torch.bfloat16)
    labels, expected = torch.tensor([2, 1, 0]), logits.double().logsumexp(1)
    gradient = logits.double().softmax(1) - torch.nn.functional.one_hot(labels, 3)
    stats = cross_entropy.stats_and_grad_(logits, labels, torch.ones(3), 3)
    torch.testing.assert_close(stats[0].double(), expected, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(logits.double(), gradient, rtol=0, atol=4e-3)
