"""Gradients added where they are kept: values against fp64, one rounding, strided inputs, blocks that do not divide."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.kernels import weight_grad
from megalite.kernels.weight_grad import accumulate_outer_, accumulate_rows_

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def normal(*shape: int, seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def kept(*shape: int, begin: bool, dtype: torch.dtype) -> torch.Tensor:
    """A sum so far, or what must not be read."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return torch.full(shape, torch.nan, dtype=wide) if begin else normal(*shape, seed=9, dtype=wide)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("begin", [True, False])
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("block_bytes", [1, 100, 2 << 20])
def test_outer_product(
    dtype: torch.dtype, begin: bool, transposed: bool, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_grad, "BLOCK_BYTES", block_bytes)
    n, f, d = 7, 13, 5
    dy, x = (normal(n, size, seed=size, dtype=dtype) for size in (f, d))
    if transposed:
        dy, x = (t.T.contiguous().T for t in (dy, x))
    grad = kept(f, d, begin=begin, dtype=dtype)
    product = dy.double().T @ x.double()
    want = product if begin else product + grad.double()
    accumulate_outer_(grad, dy, x, begin=begin)
    eps = torch.finfo(dtype).eps  # the product's only rounding; sums of 7 terms are within a few of fp32's
    torch.testing.assert_close(grad.double(), want, rtol=0, atol=float(eps * product.abs().max() * 4))


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30), st.sampled_from(DTYPES), st.booleans())
@settings(deadline=None)
def test_rows(index: list[int], dtype: torch.dtype, begin: bool) -> None:
    dx = normal(len(index), 3, seed=1, dtype=dtype)
    grad = kept(6, 3, begin=begin, dtype=dtype)
    want = torch.zeros(6, 3, dtype=torch.float64) if begin else grad.double()
    for i, row in zip(index, dx, strict=True):
        want[i] += row.double()
    accumulate_rows_(grad, torch.tensor(index), dx, begin=begin)
    torch.testing.assert_close(grad.double(), want, rtol=0, atol=1e-12 if dtype == torch.float64 else 1e-5)
