"""A computed shuffle is a bijection, depends on its key, and is close to uniform."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.data.samples.permutation import fold, permute

GOLDEN_8 = [0, 4, 2, 5, 6, 3, 1, 7]
GOLDEN_LARGE = [647831989802, 633655622351, 930786388621]


@settings(max_examples=80)
@given(n=st.one_of(st.integers(0, 300), st.integers(300, 40_000)), key=st.integers(0, 2**64 - 1))
def test_is_a_bijection_whose_parts_can_be_computed_alone(n: int, key: int) -> None:
    shuffled = permute(np.arange(n), n, key)
    assert np.array_equal(np.sort(shuffled), np.arange(n))
    assert np.array_equal(permute(np.arange(n // 3, n), n, key), shuffled[n // 3 :])


@pytest.mark.parametrize("n", [3, 1_000_000, 1_000_001, 1_002_000, 1_002_001])
def test_is_a_bijection_around_squares(n: int) -> None:
    assert np.array_equal(np.bincount(permute(np.arange(n), n, 11)), np.ones(n))


def test_bits_never_change() -> None:
    """Resume over versions needs the same order: these numbers are part of the format."""
    assert permute(np.arange(8), 8, fold(1234, "train")).tolist() == GOLDEN_8
    assert permute(np.array([0, 1, 10**12 - 1]), 10**12, 99).tolist() == GOLDEN_LARGE


@pytest.mark.parametrize("n", [3, 4])
def test_all_orders_of_few_are_equally_likely(n: int) -> None:
    keys = 2400
    orders = Counter(tuple(permute(np.arange(n), n, fold("uniform", k)).tolist()) for k in range(keys))
    cells = 6 if n == 3 else 24
    expected = keys / cells
    chi_square = sum((count - expected) ** 2 / expected for count in orders.values()) + (cells - len(orders)) * expected
    assert chi_square < 2.5 * (cells - 1)  # mean of the distribution: cells - 1


def test_neighbours_are_scattered() -> None:
    n = 200_000
    shuffled = permute(np.arange(n), n, 3).astype(np.float64)
    assert abs(np.corrcoef(shuffled[:-1], shuffled[1:])[0, 1]) < 0.02
    assert abs(np.corrcoef(shuffled, np.arange(n))[0, 1]) < 0.02


def test_index_outside_is_refused() -> None:
    for bad in (-1, 10):
        with pytest.raises(IndexError, match="outside 0..9"):
            permute(np.array([bad]), 10, 0)
