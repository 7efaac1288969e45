"""The process in which kernels are interpreted, shared by all tests of kernels."""

import multiprocessing
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from cases import emulate_gpu


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Callable[..., Any]]:
    """Return a caller of module-level functions in the process in which kernels are interpreted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        patch.setenv("MEGALITE_KERNELS", "triton")
        pool = multiprocessing.get_context("spawn").Pool(1, emulate_gpu)
    with pool:
        yield lambda fn, *args: pool.apply(fn, args)
