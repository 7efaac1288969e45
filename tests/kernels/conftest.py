"""The process whose kernels are interpreted, one for all tests of kernels."""

import multiprocessing
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from cases import behave_as_a_card


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Callable[..., Any]]:
    """Call a module-level function in the process whose kernels are interpreted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setenv("MEGALITE_KERNELS", "triton")
        pool = multiprocessing.get_context("spawn").Pool(1, behave_as_a_card)
    with pool:
        yield lambda fn, *args: pool.apply(fn, args)
