"""Every Triton kernel against its torch twin: fp64 to 1e-10, and in other dtypes at most twice the twin's own error.

On a CPU the kernels run in Triton's interpreter, in one separate process per test session.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from cases import DTYPES, LAYOUTS, OPS, measure, results

from megalite.kernels.cross_entropy import BLOCK_N, shard_stats, shard_stats_reference

ROWS = [(name, i, dtype) for name, op in OPS.items() for i in range(len(op.cases)) for dtype in DTYPES]
# with each commit without fp16, which rounds like bf16, unless a kernel has changed
RARELY = pytest.mark.nightly(guards=("megalite/kernels",))
OFTEN = [pytest.param(*row, marks=RARELY if row[2] == "float16" else ()) for row in ROWS]
Call = Callable[..., Any]


def layout_of(name: str, case: int, dtype: str) -> str:
    """Return a layout, such that each operation has every layout in some case of every dtype."""
    return LAYOUTS[(case + list(DTYPES).index(dtype)) % len(LAYOUTS)]


def check(call: Call, name: str, case: int, dtype: str, layout: str, *device: str) -> None:
    for row in call(measure, name, case, dtype, layout, *device):
        assert row.error <= row.bound, f"{row.name} {layout}: {row.error:.3g} > {row.bound:.3g} ({row})"


@pytest.mark.parametrize("name,case,dtype", OFTEN)
def test_triton_kernel_equals_its_reference(interpreter: Call, name: str, case: int, dtype: str) -> None:
    for layout in LAYOUTS if dtype == "float64" else (layout_of(name, case, dtype),):
        check(interpreter, name, case, dtype, layout)


def stats_of_infinite_logits(dtype: str, device: str) -> list[torch.Tensor]:
    """Return the statistics of rows with only -inf in the first or the last block of columns, and of one with NaN."""
    logits = torch.randn(3, 2 * BLOCK_N + 100, generator=torch.Generator().manual_seed(0)).to(getattr(torch, dtype))
    logits[0, : BLOCK_N + 5] = logits[1, BLOCK_N:] = -torch.inf
    logits[2, 7] = torch.nan
    labels, valid = torch.tensor([2 * BLOCK_N, 3, 4]), 2 * BLOCK_N + 50
    args = (logits.to(device), labels.to(device), 0, valid)
    return [shard_stats(*args).cpu(), shard_stats_reference(*args).cpu()]


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
def test_minus_infinity_logits_have_no_probability(interpreter: Call, dtype: str) -> None:
    actual, expected = interpreter(stats_of_infinite_logits, dtype, "cpu")
    assert expected[0, :2].isfinite().all() and expected[0, 2].isnan()
    torch.testing.assert_close(actual, expected, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("name", [name for name in OPS if "norm" in name or "bias" in name])
def test_weight_grads_are_deterministic(name: str) -> None:
    inputs = [x.to("cuda", torch.bfloat16) for x in OPS[name].cases[-1]()]
    first, *others = (results(OPS[name].run, inputs, "contiguous") for _ in range(5))
    for other in others:
        assert all(torch.equal(first[key], other[key]) for key in first)


@pytest.mark.gpu
@pytest.mark.parametrize("name,case,dtype", ROWS)
def test_triton_kernel_equals_its_reference_on_a_gpu(name: str, case: int, dtype: str) -> None:
    for layout in LAYOUTS:
        check(lambda fn, *args: fn(*args), name, case, dtype, layout, "cuda")
