"""Bytes that a kernel moves, counted element by element while Triton's interpreter runs it: of each tensor of a launch
how many bytes were asked for, and how many of them are different ones. What is asked for twice comes from the cache at
best."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from megalite.kernels import dispatch


@dataclass
class Traffic:
    """Of one tensor of one launch, in bytes: asked for, and different ones."""

    kernel: str
    tensor: str
    asked: int = 0
    once: int = 0


@dataclass
class _Launch:
    kernel: str
    tensors: dict[str, tuple[int, int]]  # first byte and the one after the last
    loads: list[tuple[np.ndarray, int]] = field(default_factory=list)  # addresses, bytes of each
    stores: list[tuple[np.ndarray, int]] = field(default_factory=list)

    def traffic(self) -> list[Traffic]:
        found = {name: Traffic(self.kernel, name) for name in self.tensors}
        for noted in (self.loads, self.stores):
            for width in {width for _, width in noted}:
                at = np.concatenate([addresses for addresses, w in noted if w == width])
                left = np.ones(len(at), dtype=bool)
                for name, (first, end) in self.tensors.items():
                    here = left & (at >= first) & (at < end)  # the first of several names of one tensor has it
                    left &= ~here
                    found[name].asked += int(here.sum()) * width
                    found[name].once += len(np.unique(at[here])) * width
                assert not left.any(), f"{self.kernel}: {int(left.sum())} accesses outside of its tensors"
        return [one for one in found.values() if one.asked]


def extent(x: Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


@contextmanager
def watched(launches: list[_Launch]) -> Iterator[None]:
    """Launches within are noted; Triton must be the interpreter."""
    from triton.runtime.interpreter import InterpreterBuilder

    plain = dispatch.Kernel.__getitem__
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def launch(self: dispatch.Kernel, grid: Any) -> Callable[..., None]:
        def run(*args: Any, **options: Any) -> None:
            names = self.fn.__code__.co_varnames
            tensors = {name: extent(x) for name, x in zip(names, args, strict=False) if isinstance(x, Tensor)}
            launches.append(_Launch(f"{self.fn.__module__.rsplit('.', 1)[-1]}{self.fn.__name__}", tensors))
            plain(self, grid)(*args, **options)

        return run

    def noted(pointers: Any, mask: Any) -> tuple[np.ndarray, int]:
        at, here = np.broadcast_arrays(pointers.data, mask.data)
        return at[here].astype(np.int64).ravel(), pointers.get_element_ty().primitive_bitwidth // 8

    def loads(self: Any, pointers: Any, mask: Any, *more: Any) -> Any:
        launches[-1].loads.append(noted(pointers, mask))
        return load(self, pointers, mask, *more)

    def stores(self: Any, pointers: Any, value: Any, mask: Any, *more: Any) -> Any:
        launches[-1].stores.append(noted(pointers, mask))
        return store(self, pointers, value, mask, *more)

    masked = {"create_masked_load": loads, "create_masked_store": stores}
    with mock.patch.object(dispatch.Kernel, "__getitem__", launch), mock.patch.multiple(InterpreterBuilder, **masked):
        yield


def observe(run: Callable[[], Any]) -> list[list[Traffic]]:
    """One list per launch, in order."""
    launches: list[_Launch] = []
    with watched(launches):
        run()
    return [launch.traffic() for launch in launches]


def of_case(name: str, size: dict[str, int]) -> list[list[Traffic]]:
    """A case of tools/bench/kernels.py by name, at these sizes in bf16."""
    return observe(prepared(name, size)[1]())


def prepared(name: str, size: dict[str, int]) -> tuple[Any, Callable[[], Callable[[], Any]]]:
    """The case's sizes, and what makes its inputs and a call of the work."""
    from tools.bench.kernel_case import ProblemSizes, select_peers
    from tools.bench.kernel_cases import CASES

    (case,) = [case for case in CASES if case.name == name]
    sizes = ProblemSizes(dtype=torch.bfloat16, device=torch.device("cpu"), **size)
    ((_, prepare),) = select_peers(case, sizes, ["megalite"])
    return (case, sizes), prepare
