"""The optimizer update and the gradient norm, on a CPU and in Triton's interpreter.

optim/test_distributed_optimizer.py compares the CPU form with torch's AdamW and its norm.
"""

import math
from typing import Any

import pytest
import torch
from cases import guarded, with_layout
from torch import Tensor

from megalite.kernels.adamw import (
    REFERENCE_BLOCK_SIZE,
    adamw_,
    adamw_reference_,
    random_bits,
    rounding_seed,
    stochastic_round,
)
from megalite.kernels.dispatch import runs_triton
from megalite.kernels.grad_norm import sum_of_squares, sums_of_squares

ARGS: dict[str, Any] = dict(lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1, step=3, grad_scale=0.5)
MOMENTS = [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.bfloat16)]
SIZES = [1, 1000, 2049]


def tensors(n: int, moments: tuple[torch.dtype, torch.dtype], dtype: torch.dtype = torch.float32) -> list[Tensor]:
    g = torch.Generator().manual_seed(n)
    w, grad, m, v = (torch.randn(n, generator=g, dtype=torch.float64) for _ in range(4))
    return [w.to(dtype), (grad * 0.1).to(dtype), (m * 0.1).to(moments[0]), (v.square() * 0.01).to(moments[1])]


def test_stochastic_rounding_is_unbiased() -> None:
    all_bits = torch.arange(2**16)
    for x in (1.0 + 2**-9, -3.3, 1e-20):
        rounded = stochastic_round(torch.full((2**16,), x), all_bits).double()
        assert rounded.mean().item() == pytest.approx(torch.tensor(x).double().item(), rel=1e-7)
        assert rounded.unique().numel() == 2


@pytest.mark.parametrize("moments", MOMENTS[1:])
def test_update_is_independent_of_block_size(moments: tuple[torch.dtype, torch.dtype], monkeypatch: Any) -> None:
    """Every element has its own random bits, independent of its position in a block."""
    in_blocks, reference = (tensors(999, moments) for _ in range(2))
    adamw_(*reference, **ARGS)
    monkeypatch.setitem(REFERENCE_BLOCK_SIZE, "cpu", 100)
    adamw_(*in_blocks, **ARGS)
    torch.testing.assert_close(in_blocks[0], reference[0], rtol=1e-6, atol=1e-6)
    for blocked, unblocked in zip(in_blocks[2:], reference[2:], strict=True):
        assert blocked.dtype == unblocked.dtype
        torch.testing.assert_close(blocked.float(), unblocked.float(), rtol=2**-7, atol=1e-6)
        assert (blocked != unblocked).double().mean() < (0.005 if blocked.dtype == torch.bfloat16 else 1)


def test_random_bits_are_uniform_and_independent() -> None:
    """Each bit is set in half of the cases, even for inputs that differ only in the last bits of one value."""
    ones = torch.ones(4, 1 << 16)
    for which in range(4):
        values = ones.clone()
        values[which] = (values[which].view(torch.int32) + torch.arange(1 << 16, dtype=torch.int32)).view(torch.float32)
        bits = random_bits(rounding_seed(7), *values)
        is_set = torch.stack([(bits >> n) & 1 for n in range(32)]).double()
        assert (is_set.mean(1) - 0.5).abs().max() < 0.01  # 5 standard deviations
        correlation = (is_set - 0.5) @ (is_set - 0.5).T / is_set.shape[1] * 4 - torch.eye(32)
        assert correlation.abs().max() < 0.025
        other = random_bits(rounding_seed(8), *values)
        assert (bits == other).double().mean() < 1e-3


def update_errors(n: int, which: int, device: str) -> dict[str, tuple[float, float]]:
    """Return (error, bound) of weights and moments; the bound is derived from the error of torch in fp32."""
    assert runs_triton(device)
    moments = MOMENTS[which]
    actual, reference = ([with_layout(x.to(device), "contiguous") for x in tensors(n, moments)] for _ in range(2))
    copy = with_layout(torch.empty(n, dtype=torch.bfloat16, device=device), "contiguous")
    copy.fill_(float("nan"))
    with guarded():
        adamw_(*actual, **ARGS, model_param=copy)
    adamw_reference_(*reference, **ARGS)
    exact = [x.double() for x in tensors(n, moments)]
    adamw_reference_(*exact, **ARGS)
    assert torch.equal(copy, actual[0].bfloat16())
    rows = {}
    for name, i in (("weight", 0), ("exp_avg", 2), ("exp_avg_sq", 3)):
        expected, scale = exact[i].to(device), exact[i].abs().max().item()
        error, twin = ((x[i].double() - expected).abs().nan_to_num(math.inf).max().item() for x in (actual, reference))
        # a GPU's division and square root are off by one or two units, where a quotient is large
        rows[name] = (error, (2 if device == "cpu" else 3) * max(twin, torch.finfo(actual[i].dtype).eps / 2 * scale))
    if torch.bfloat16 in moments:  # with the same random bits, almost every element has the same rounding
        equal_fraction = (actual[3] == reference[3]).double().mean().item()
        rows["rounded otherwise"] = (1 - equal_fraction, 0.01 if n > 100 else 0.0)
    return rows


def check(rows: dict[str, tuple[float, float]]) -> None:
    for name, (error, bound) in rows.items():
        assert error <= bound, f"{name}: {error:.3g} > {bound:.3g}"


def norm_error(n: int, dtype: str, device: str, triton: bool = True) -> float:
    assert runs_triton(device) == triton
    x = with_layout(tensors(n, MOMENTS[0], getattr(torch, dtype))[0].to(device), "contiguous")
    with guarded():
        actual = sum_of_squares(x)
    assert actual.dtype == torch.float64 and actual.shape == () and torch.equal(actual, sum_of_squares(x))
    for bad in (math.nan, math.inf):
        y = x.clone()
        y[n // 2] = bad
        assert not torch.isfinite(sum_of_squares(y))
    expected = x.double().square().sum()
    return float((actual - expected).abs() / expected)


@pytest.mark.parametrize(("rows", "n"), [(1, 70), (5, 4099), (3, 12345)])
def test_row_sums_are_separate(interpreter: Any, rows: int, n: int) -> None:
    """One launch sums all rows, and the sum of a single row equals that of the flat tensor bit by bit."""
    x = torch.randn(rows, n, generator=torch.Generator().manual_seed(n)) * torch.arange(1, rows + 1)[:, None]
    torch.testing.assert_close(sums_of_squares(x), x.double().square().sum(1), rtol=1e-6, atol=0)
    assert sums_of_squares(x[:1]).item() == sum_of_squares(x[0]).item()


@pytest.mark.parametrize("which", range(len(MOMENTS)))
@pytest.mark.parametrize("n", SIZES)
def test_triton_adamw_equals_torch(interpreter: Any, n: int, which: int) -> None:
    check(interpreter(update_errors, n, which, "cpu"))


@pytest.mark.parametrize("n,dtype", [(1, "float32"), (70001, "float32"), (5000, "float64"), (5000, "bfloat16")])
def test_triton_grad_norm(interpreter: Any, n: int, dtype: str) -> None:
    assert interpreter(norm_error, n, dtype, "cpu") <= (1e-14 if dtype == "float64" else 3e-7)
    assert norm_error(30 * n, dtype, "cpu", False) <= (1e-4 if dtype == "bfloat16" else 1e-8)


@pytest.mark.gpu
@pytest.mark.parametrize("n", [*SIZES, 3_000_001])
def test_triton_update_on_a_gpu(n: int) -> None:
    for which in range(len(MOMENTS)):
        check(update_errors(n, which, "cuda"))
    for dtype in ("float32", "float64", "bfloat16"):
        assert norm_error(n, dtype, "cuda") <= (1e-14 if dtype == "float64" else 3e-7)
