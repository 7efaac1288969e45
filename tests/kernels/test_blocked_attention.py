"""Attention by blocks of queries against its definition: any number of blocks, ragged ends, groups, strided inputs,
windows."""

import functools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from megalite.kernels import blocked_attention as module
from megalite.kernels.attention import attention, attention_reference
from megalite.kernels.blocked_attention import blocked_attention


def inputs(s: int, b: int, g: int, per_group: int, k: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """q, k, v and the gradient of o; k and v are slices of one tensor, as the layer has them."""
    generator = torch.Generator().manual_seed(s * 31 + k)
    q, do = (torch.randn(s, b, g * per_group, k, generator=generator, dtype=torch.float64) for _ in range(2))
    kv = torch.randn(s, b, 2, g, k, generator=generator, dtype=torch.float64).to(dtype)
    return [q.to(dtype).requires_grad_(), kv[:, :, 0].requires_grad_(), kv[:, :, 1].requires_grad_(), do.to(dtype)]


def results(fn: object, q: Tensor, k: Tensor, v: Tensor, do: Tensor) -> list[Tensor]:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    o = fn(*leaves, scale=q.shape[-1] ** -0.5)  # type: ignore[operator]
    o.backward(do)
    return [o.detach(), *(x.grad for x in leaves)]  # type: ignore[list-item]


@settings(max_examples=60)
@given(
    s=st.integers(1, 40),
    b=st.integers(1, 3),
    g=st.integers(1, 3),
    per_group=st.integers(1, 3),
    k=st.sampled_from([1, 4, 7]),
    queries=st.sampled_from([1, 3, 8, 64]),
    limit=st.sampled_from([1, 2000, 1 << 20]),
    window=st.none() | st.integers(1, 45),
)
def test_equals_the_definition(
    s: int, b: int, g: int, per_group: int, k: int, queries: int, limit: int, window: int | None
) -> None:
    given_ = inputs(s, b, g, per_group, k)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "QUERIES", queries)
        patch.setattr(module, "IN_WINDOW", (min(queries, 7), queries))
        patch.setattr(module, "BLOCK_BYTES", limit)
        got = results(functools.partial(blocked_attention, window=window), *given_)
    for a, want in zip(got, results(functools.partial(attention_reference, window=window), *given_), strict=True):
        torch.testing.assert_close(a, want, rtol=1e-12, atol=1e-12)


def test_work_in_a_window_grows_with_the_length_and_not_with_its_square() -> None:
    """Counted: elements of scores that the blocks make."""

    def scores(length: int, window: int | None) -> int:
        q, k = torch.empty(1, 1, length, 4), torch.empty(1, length, 4)
        blocks = module._Blocks(q, k, 1, 1.0, window, None)
        return sum((here.stop - here.start) * (keys.stop - keys.start) for _, here, keys in blocks)

    assert scores(8192, 512) < 8192 * (512 + 128) and scores(8192, 16) < 8192 * (16 + 64)
    assert scores(8192, None) == scores(8192, 8192) == scores(8192, 10**9) > 8192**2 / 2


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(600, 1, 2, 1, 64), (300, 2, 1, 3, 32)])
def test_half_precision_is_at_most_twice_as_far_off_as_the_definition(
    shape: tuple[int, int, int, int, int], dtype: torch.dtype
) -> None:
    given_ = inputs(*shape, dtype=dtype)
    true = results(attention_reference, *(x.double() for x in given_))
    twin, got = (results(fn, *given_) for fn in (attention_reference, attention))
    assert attention(*given_[:3], scale=1.0).grad_fn.__class__.__name__ == "_BlockedAttentionBackward"
    for a, plain, want in zip(got, twin, true, strict=True):
        assert a.dtype == dtype and not a.isnan().any()
        assert (a - want).square().mean() <= 4 * (plain - want).square().mean()
        assert (a - want).abs().max() <= 2 * (plain - want).abs().max()


def test_saves_its_inputs_and_nothing_else() -> None:
    q, k, v, _ = inputs(300, 2, 2, 2, 16, torch.bfloat16)
    saved: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda x: saved.append(x) or x, lambda x: x):
        blocked_attention(q, k, v, scale=0.25)
    assert [x.data_ptr() for x in saved] == [x.data_ptr() for x in (q, k, v)]
