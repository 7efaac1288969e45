"""The process whose kernels are interpreted, one for all tests of kernels."""

import multiprocessing
import os
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from cases import in_interpreter


@pytest.fixture(scope="session")
def interpreter() -> Iterator[Callable[..., Any]]:
    """Call a module-level function in the process whose kernels are interpreted."""
    before = {name: os.environ.get(name) for name in ("TRITON_INTERPRET", "MEGALITE_KERNELS")}
    os.environ.update(TRITON_INTERPRET="1", MEGALITE_KERNELS="triton")
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=in_interpreter, args=(there,), daemon=True)
    process.start()
    there.close()
    for name, value in before.items():
        os.environ.pop(name) if value is None else os.environ.update({name: value})

    def call(fn: Callable[..., Any], *args: Any) -> Any:
        here.send((fn, args))
        ran, result = here.recv()
        assert ran, result
        return result

    yield call
    process.kill()
    process.join()
