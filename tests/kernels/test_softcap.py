"""Soft-capping: the tanh of the kernels, and its torch form."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor

from megalite.kernels.dispatch import kernel
from megalite.kernels.softcap import soft_cap, soft_cap_with_slope, tanh

if TYPE_CHECKING:
    import triton.language as tl


@kernel
def _tanh(x_ptr, y_ptr, n_elements, EXACT_NEAR_0: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    offs = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offs < n_elements
    x = tl.load(x_ptr + offs, mask=mask, other=0.0)
    tl.store(y_ptr + offs, tanh(x, EXACT_NEAR_0), mask=mask)


def _in_triton(x: Tensor, exact_near_0: bool) -> Tensor:
    y = torch.empty_like(x)
    _tanh[(1,)](x, y, len(x), exact_near_0, 1 << (len(x) - 1).bit_length())
    return y


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tanh_is_accurate_at_every_magnitude(interpreter: Callable[..., Tensor], dtype: torch.dtype) -> None:
    magnitudes = torch.cat([torch.logspace(-30, 2, 3000, dtype=dtype), torch.linspace(0.2, 0.8, 1000, dtype=dtype)])
    edges = torch.tensor([0.0, 0.5, 1e30, math.inf], dtype=dtype)
    x = torch.cat([magnitudes, -magnitudes, edges, -edges])
    expected = torch.tanh(x.double())
    eps = torch.finfo(dtype).eps
    assert (interpreter(_in_triton, x, False).double() - expected).abs().max() <= 2 * eps
    if dtype == torch.float32:
        relative = (interpreter(_in_triton, x, True).double() / expected.where(expected != 0, 1.0) - 1).abs()
        assert relative[expected != 0].max() <= 3 * eps


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_soft_cap_bounds_and_keeps_the_dtype(dtype: torch.dtype) -> None:
    x = torch.tensor([-1e4, -3.0, -1e-3, 0.0, 0.5, 8.0, 1e4], dtype=dtype)
    expected = 4 * torch.tanh(x.double() / 4)
    capped = soft_cap(x, 4.0)
    assert capped.dtype == dtype and capped.abs().max() <= 4 and soft_cap(x, None) is x
    torch.testing.assert_close(capped, expected.to(dtype))
    _, slope = soft_cap_with_slope(x, 4.0)
    torch.testing.assert_close(slope.double(), 1 - (expected / 4).square(), rtol=0, atol=1e-6)
