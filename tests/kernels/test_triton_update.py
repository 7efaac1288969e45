"""The update of the weights and the gradient norm: the form for a CPU and Triton's interpreter. That the first is torch's
AdamW, and its norm the gradient's: optim/test_distributed_optimizer.py."""

import math
from typing import Any

import pytest
import torch
from cases import guarded, laid_out
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
    every = torch.arange(2**16)
    for x in (1.0 + 2**-9, -3.3, 1e-20):
        rounded = stochastic_round(torch.full((2**16,), x), every).double()
        assert rounded.mean().item() == pytest.approx(torch.tensor(x).double().item(), rel=1e-7)
        assert rounded.unique().numel() == 2


@pytest.mark.parametrize("moments", MOMENTS[1:])
def test_update_is_independent_of_block_size(moments: tuple[torch.dtype, torch.dtype], monkeypatch: Any) -> None:
    """Also where a block ends: every element has its own random bits, wherever it lies."""
    blocks, plain = (tensors(999, moments) for _ in range(2))
    adamw_(*plain, **ARGS)
    monkeypatch.setitem(REFERENCE_BLOCK_SIZE, "cpu", 100)
    adamw_(*blocks, **ARGS)
    torch.testing.assert_close(blocks[0], plain[0], rtol=1e-6, atol=1e-6)
    for ours, theirs in zip(blocks[2:], plain[2:], strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours.float(), theirs.float(), rtol=2**-7, atol=1e-6)
        assert (ours != theirs).double().mean() < (0.005 if ours.dtype == torch.bfloat16 else 1)


def test_random_bits_are_uniform_and_independent() -> None:
    """Each bit is set in half of the cases, also among neighbors that differ in one value's last bits only."""
    one = torch.ones(4, 1 << 16)
    for which in range(4):
        values = one.clone()
        values[which] = (values[which].view(torch.int32) + torch.arange(1 << 16, dtype=torch.int32)).view(torch.float32)
        bits = random_bits(rounding_seed(7), *values)
        set_ = torch.stack([(bits >> n) & 1 for n in range(32)]).double()
        assert (set_.mean(1) - 0.5).abs().max() < 0.01  # 5 standard deviations
        together = (set_ - 0.5) @ (set_ - 0.5).T / set_.shape[1] * 4 - torch.eye(32)
        assert together.abs().max() < 0.025
        other = random_bits(rounding_seed(8), *values)
        assert (bits == other).double().mean() < 1e-3


def update_errors(n: int, which: int, device: str) -> dict[str, tuple[float, float]]:
    """Of weights and moments: how far Triton is from fp64, and how far torch's form in fp32 is."""
    assert runs_triton(device)
    moments = MOMENTS[which]
    got, plain = ([laid_out(x.to(device), "contiguous") for x in tensors(n, moments)] for _ in range(2))
    copy = laid_out(torch.empty(n, dtype=torch.bfloat16, device=device), "contiguous")
    copy.fill_(float("nan"))
    with guarded():
        adamw_(*got, **ARGS, model_param=copy)
    adamw_reference_(*plain, **ARGS)
    exact = [x.double() for x in tensors(n, moments)]
    adamw_reference_(*exact, **ARGS)
    assert torch.equal(copy, got[0].bfloat16())
    rows = {}
    for name, i in (("weight", 0), ("exp_avg", 2), ("exp_avg_sq", 3)):
        want, scale = exact[i].to(device), exact[i].abs().max().item()
        error, twin = ((x[i].double() - want).abs().nan_to_num(math.inf).max().item() for x in (got, plain))
        # a card's division and square root are off by a unit or two, where a quotient is large
        rows[name] = (error, (2 if device == "cpu" else 3) * max(twin, torch.finfo(got[i].dtype).eps / 2 * scale))
    if torch.bfloat16 in moments:  # the same random bits: nearly every element is rounded the same way
        same = (got[3] == plain[3]).double().mean().item()
        rows["rounded otherwise"] = (1 - same, 0.01 if n > 100 else 0.0)
    return rows


def check(rows: dict[str, tuple[float, float]]) -> None:
    for name, (error, bound) in rows.items():
        assert error <= bound, f"{name}: {error:.3g} > {bound:.3g}"


def norm_error(n: int, dtype: str, device: str, triton: bool = True) -> float:
    assert runs_triton(device) == triton
    x = laid_out(tensors(n, MOMENTS[0], getattr(torch, dtype))[0].to(device), "contiguous")
    with guarded():
        got = sum_of_squares(x)
    assert got.dtype == torch.float64 and got.shape == () and torch.equal(got, sum_of_squares(x))
    for bad in (math.nan, math.inf):
        y = x.clone()
        y[n // 2] = bad
        assert not torch.isfinite(sum_of_squares(y))
    want = x.double().square().sum()
    return float((got - want).abs() / want)


@pytest.mark.parametrize(("rows", "n"), [(1, 70), (5, 4099), (3, 12345)])
def test_row_sums_are_separate(interpreter: Any, rows: int, n: int) -> None:
    """A launch for all of them; and the sum of the only row is that of the flat tensor, to the bit."""
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
