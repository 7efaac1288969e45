"""What holds for any input: rows added where they are kept, rounding at random. Apart from the tests beside which they
belong, because those also run on a card, where hypothesis need not be installed."""

import torch
from cases import normal
from hypothesis import given, settings
from hypothesis import strategies as st
from test_weight_grad import DTYPES, kept

from megalite.kernels.adamw import stochastic_round
from megalite.kernels.weight_grad import accumulate_embedding_grad_


@given(st.lists(st.integers(0, 5), min_size=1, max_size=30), st.sampled_from(DTYPES), st.booleans())
def test_row_kernels_accept_any_rows(index: list[int], dtype: torch.dtype, begin: bool) -> None:
    dx = normal(len(index), 3, seed=1).to(dtype)
    grad = kept(6, 3, begin=begin, dtype=dtype)
    want = torch.zeros(6, 3, dtype=torch.float64) if begin else grad.double()
    for i, row in zip(index, dx, strict=True):
        want[i] += row.double()
    accumulate_embedding_grad_(grad, torch.tensor(index), dx, overwrite=begin)
    torch.testing.assert_close(grad.double(), want, rtol=0, atol=1e-12 if dtype == torch.float64 else 1e-5)


@given(st.floats(-(2.0**100), 2.0**100, width=32), st.integers(0, 2**16 - 1))
@settings(max_examples=200)
def test_stochastic_rounding_goes_to_a_neighbor(x: float, bits: int) -> None:
    exact = torch.tensor([x])
    got = stochastic_round(exact, torch.tensor([bits])).double()
    low = (exact.view(torch.int32) & ~0xFFFF).view(torch.float32).double()
    high = ((exact.view(torch.int32) & ~0xFFFF) + 0x10000).view(torch.float32).double()
    assert got in (low, high) and (exact.double() != low or got == low)
