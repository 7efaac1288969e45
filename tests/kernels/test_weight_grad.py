"""Accumulated weight gradients: values against fp64, one rounding, strided inputs, blocks of any size."""

import pytest
import torch
from cases import normal

from megalite.kernels import weight_grad
from megalite.kernels.weight_grad import accumulate_embedding_grad_, accumulate_weight_grad_

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]


def existing_grad(*shape: int, overwrite: bool, dtype: torch.dtype) -> torch.Tensor:
    """Return a gradient to add to, or NaN if it must be overwritten without being read."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return torch.full(shape, torch.nan, dtype=wide) if overwrite else normal(*shape, seed=9).to(wide)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("overwrite", [True, False])
@pytest.mark.parametrize("transposed", [True, False])
@pytest.mark.parametrize("block_bytes", [1, 100, 2 << 20])
def test_weight_grad_outer_product(
    dtype: torch.dtype, overwrite: bool, transposed: bool, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weight_grad, "BLOCK_BYTES", block_bytes)
    n, f, d = 7, 13, 5
    dy, x = (normal(n, size, seed=size).to(dtype) for size in (f, d))
    if transposed:
        dy, x = (t.T.contiguous().T for t in (dy, x))
    grad = existing_grad(f, d, overwrite=overwrite, dtype=dtype)
    product = dy.double().T @ x.double()
    expected = product if overwrite else product + grad.double()
    accumulate_weight_grad_(grad, dy, x, overwrite=overwrite)
    eps = torch.finfo(dtype).eps  # the product's only rounding; sums of 7 terms are within a few of fp32's
    torch.testing.assert_close(grad.double(), expected, rtol=0, atol=float(eps * product.abs().max() * 4))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_weight_grad_needs_no_extra_gpu_memory(dtype: torch.dtype) -> None:
    n, f, d = 512, 4096, 2048
    dy, x = (normal(n, size, seed=size).to("cuda", dtype) for size in (f, d))
    grad = torch.full((f, d), torch.nan, device="cuda")
    accumulate_weight_grad_(grad, dy, x, overwrite=True)  # also lets cuBLAS allocate its workspace
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    accumulate_weight_grad_(grad, dy, x, overwrite=False)
    assert torch.cuda.max_memory_allocated() - before < f * d  # bytes
    expected = 2 * (dy.double().T @ x.double())
    # inputs of half precision are exact and their sums are fp32's: far below one rounding of a product in bf16
    torch.testing.assert_close(grad.double(), expected, rtol=0, atol=float(expected.abs().max()) * 1e-5)


@pytest.mark.gpu
def test_weight_grad_is_deterministic_on_a_gpu() -> None:
    n, v, d = 20_000, 7, 64
    index = torch.randint(v, (n,), generator=torch.Generator().manual_seed(0)).cuda()
    dx = normal(n, d, seed=1).to("cuda", torch.bfloat16)
    sums = []
    for _ in range(3):
        grad = torch.full((v, d), torch.nan, device="cuda")
        accumulate_embedding_grad_(grad, index, dx, overwrite=True)
        accumulate_embedding_grad_(grad, index, dx, overwrite=False)
        sums.append(grad)
    assert torch.equal(sums[0], sums[1]) and torch.equal(sums[0], sums[2])
    expected = 2 * torch.zeros(v, d, dtype=torch.float64, device="cuda").index_add_(0, index, dx.double())
    torch.testing.assert_close(sums[0].double(), expected, rtol=1e-4, atol=1e-2)
