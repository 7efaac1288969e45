"""Properties for any input: accumulation of row gradients, stochastic rounding.

They are separate from the other tests of these kernels, which also run on GPU machines without hypothesis.
"""

import torch
from cases import normal
from hypothesis import given, settings
from hypothesis import strategies as st
from test_weight_grad import DTYPES, existing_grad

from megalite.kernels.adamw import stochastic_round
from megalite.kernels.weight_grad import accumulate_embedding_grad_


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30), st.sampled_from(DTYPES), st.booleans())
def test_row_kernels_accept_any_rows(index: list[int], dtype: torch.dtype, overwrite: bool) -> None:
    dx = normal(len(index), 3, seed=1).to(dtype)
    grad = existing_grad(6, 3, overwrite=overwrite, dtype=dtype)
    expected = torch.zeros(6, 3, dtype=torch.float64) if overwrite else grad.double()
    for i, row in zip(index, dx, strict=True):
        expected[i] += row.double()
    accumulate_embedding_grad_(grad, torch.tensor(index), dx, overwrite=overwrite)
    torch.testing.assert_close(grad.double(), expected, rtol=0, atol=1e-12 if dtype == torch.float64 else 1e-5)


@given(st.floats(-(2.0**100), 2.0**100, width=32), st.integers(0, 2**16 - 1))
@settings(max_examples=200)
def test_stochastic_rounding_goes_to_a_neighbor(x: float, bits: int) -> None:
    exact = torch.tensor([x])
    rounded = stochastic_round(exact, torch.tensor([bits])).double()
    low = (exact.view(torch.int32) & ~0xFFFF).view(torch.float32).double()
    high = ((exact.view(torch.int32) & ~0xFFFF) + 0x10000).view(torch.float32).double()
    assert rounded in (low, high) and (exact.double() != low or rounded == low)
