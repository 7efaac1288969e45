"""The bytes that a kernel moves, counted for each element while Triton's interpreter runs it.

For each tensor of a launch it counts the requested bytes, and how many of them are distinct. Bytes that are requested
again come from the cache at best.
"""

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
    """The requested and the distinct bytes of one tensor of a launch."""

    kernel: str
    tensor: str
    requested: int = 0
    distinct: int = 0


@dataclass
class _Launch:
    kernel: str
    tensors: dict[str, tuple[int, int]]  # first byte, and one past the last
    loads: list[tuple[np.ndarray, int]] = field(default_factory=list)  # addresses, bytes of each
    stores: list[tuple[np.ndarray, int]] = field(default_factory=list)

    def traffic(self) -> list[Traffic]:
        traffic_by_tensor = {name: Traffic(self.kernel, name) for name in self.tensors}
        for accesses in (self.loads, self.stores):
            for width in {width for _, width in accesses}:
                all_addresses = np.concatenate([addresses for addresses, w in accesses if w == width])
                unassigned = np.ones(len(all_addresses), dtype=bool)
                for name, (first, end) in self.tensors.items():
                    in_tensor = (
                        unassigned & (all_addresses >= first) & (all_addresses < end)
                    )  # the first of several names of a tensor gets it
                    unassigned &= ~in_tensor
                    traffic_by_tensor[name].requested += int(in_tensor.sum()) * width
                    traffic_by_tensor[name].distinct += len(np.unique(all_addresses[in_tensor])) * width
                assert not unassigned.any(), f"{self.kernel}: {int(unassigned.sum())} accesses outside of its tensors"
        return [traffic for traffic in traffic_by_tensor.values() if traffic.requested]


def extent(x: Tensor) -> tuple[int, int]:
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + (last + 1) * x.element_size()


@contextmanager
def record_accesses(launches: list[_Launch]) -> Iterator[None]:
    """Record the launches inside, with their accesses; Triton must run in its interpreter."""
    from triton.runtime.interpreter import InterpreterBuilder

    original = dispatch.Kernel.__getitem__
    load, store = InterpreterBuilder.create_masked_load, InterpreterBuilder.create_masked_store

    def launch(self: dispatch.Kernel, grid: Any) -> Callable[..., None]:
        def run(*args: Any, **options: Any) -> None:
            names = self.fn.__code__.co_varnames
            tensors = {name: extent(x) for name, x in zip(names, args, strict=False) if isinstance(x, Tensor)}
            launches.append(_Launch(f"{self.fn.__module__.rsplit('.', 1)[-1]}{self.fn.__name__}", tensors))
            original(self, grid)(*args, **options)

        return run

    def active_addresses(pointers: Any, mask: Any) -> tuple[np.ndarray, int]:
        addresses, active = np.broadcast_arrays(pointers.data, mask.data)
        return addresses[active].astype(np.int64).ravel(), pointers.get_element_ty().primitive_bitwidth // 8

    def record_load(self: Any, pointers: Any, mask: Any, *options: Any) -> Any:
        launches[-1].loads.append(active_addresses(pointers, mask))
        return load(self, pointers, mask, *options)

    def record_store(self: Any, pointers: Any, value: Any, mask: Any, *options: Any) -> Any:
        launches[-1].stores.append(active_addresses(pointers, mask))
        return store(self, pointers, value, mask, *options)

    recorders = {"create_masked_load": record_load, "create_masked_store": record_store}
    with (
        mock.patch.object(dispatch.Kernel, "__getitem__", launch),
        mock.patch.multiple(InterpreterBuilder, **recorders),
    ):
        yield


def observe(run: Callable[[], Any]) -> list[list[Traffic]]:
    """Return the traffic of each launch, in order."""
    launches: list[_Launch] = []
    with record_accesses(launches):
        run()
    return [launch.traffic() for launch in launches]


def case_traffic(name: str, size: dict[str, int]) -> list[list[Traffic]]:
    """Return the traffic of a case of tools/bench/kernels.py at these sizes in bf16."""
    return observe(prepare_case(name, size)[1]())


def prepare_case(name: str, size: dict[str, int]) -> tuple[Any, Callable[[], Callable[[], Any]]]:
    """Return a case with its sizes, and a function that creates the inputs and returns a call of the work."""
    from tools.bench.kernel_case import select_peers
    from tools.bench.kernel_cases import TINY_SIZES, list_cases

    values = {field: [size.get(field, default[0])] for field, default in TINY_SIZES.items()}
    cases = list_cases(values, torch.bfloat16, torch.device("cpu"))
    ((case, sizes),) = [(case, sizes) for case, sizes in cases if case.name == name]
    ((_, prepare),) = select_peers(case, sizes, ["megalite"])
    return (case, sizes), prepare
