"""Ranks of one axis as threads of this process: any number of them in milliseconds, for code that needs only an axis."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from megalite.parallel.cpu.shared_memory import CollectiveBackend
from megalite.parallel.mesh import Axis

TIMEOUT_S = 60.0


class _Completed:
    def wait(self) -> None:
        """Return: a collective of threads is complete when it has been called."""


class _ThreadBackend(CollectiveBackend):
    """Collectives between threads: each publishes its arguments in a list that all share."""

    group: Any = "threads"

    def __init__(self, rank: int, published: list[Any], barrier: threading.Barrier):
        self.rank = rank
        self.published = published
        self.barrier = barrier

    def _exchange(self, own: Any, read: Callable[[list[Any]], None]) -> _Completed:
        self.published[self.rank] = own
        self.barrier.wait(TIMEOUT_S)
        read(self.published)
        self.barrier.wait(TIMEOUT_S)
        return _Completed()

    def start_all_gather(self, out: Tensor, x: Tensor) -> Any:
        def read(published: list[Any]) -> None:
            for part, other in zip(out.chunk(len(published)), published, strict=True):
                part.copy_(other)

        return self._exchange(x, read)

    def start_reduce_scatter(self, out: Tensor, x: Tensor) -> Any:
        def read(published: list[Any]) -> None:
            out.copy_(torch.stack([other.chunk(len(published))[self.rank] for other in published]).sum(0))

        return self._exchange(x.clone(), read)

    def start_all_to_all(self, out: Tensor, x: Tensor, output_splits: list[int], input_splits: list[int]) -> Any:
        def read(published: list[Any]) -> None:
            received = [parts[self.rank] for parts in published]
            assert [len(part) for part in received] == output_splits
            for part, other in zip(out.split(output_splits), received, strict=True):
                part.copy_(other)

        return self._exchange(x.split(input_splits), read)


def run_threads(size: int, fn: Callable[[Axis], Any], name: str = "cp") -> list[Any]:
    """Call `fn(axis)` on `size` ranks of an axis, and return the results in rank order."""
    published: list[Any] = [None] * size
    barrier = threading.Barrier(size)

    def run(rank: int) -> Any:
        backend = _ThreadBackend(rank, published, barrier) if size > 1 else None
        try:
            return fn(Axis(name, size, rank, backend, tuple(range(size))))
        except BaseException:
            barrier.abort()  # so that no other rank waits for this one
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(run, rank) for rank in range(size)]
    errors = [error for future in futures if (error := future.exception()) is not None]
    for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
        raise error
    return [future.result() for future in futures]
