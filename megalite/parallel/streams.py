"""Streams of a card and the order between them: the only place that names torch.cuda's. On a CPU all of it is nothing,
since work is done where it is called: a stream is None there, and so is an event.

What one stream gets runs in order; what two get is ordered by events alone. The current stream is a thread's own
affair, but the default one is the same in all threads, so a thread that is to hold up nobody works `beside` it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

Stream = torch.cuda.Stream
Event = torch.cuda.Event
Mark = torch.cuda.Event | float


def new_stream(device: torch.device) -> Stream | None:
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # pyright: ignore[reportArgumentType]


def reached(device: torch.device) -> Event | None:
    """What the current stream has so far."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    return event


def mark(device: torch.device) -> Mark:
    """This moment of the current stream; on a CPU seconds."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record(torch.cuda.current_stream(device))
    return event


def seconds_between(begin: Mark, end: Mark) -> float | None:
    """Of two marks of one device; None while the card is not there yet."""
    if isinstance(begin, float) and isinstance(end, float):
        return end - begin
    assert isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event)
    return begin.elapsed_time(end) / 1000 if end.query() else None


def wait_for(event: Event | None) -> None:
    """What the current stream gets from here on comes after `event`; the host goes on."""
    if event is not None:
        event.wait()


@contextlib.contextmanager
def on_stream(stream: Stream | None) -> Iterator[None]:
    """Here work goes to `stream`, after what the current one has so far and before what it gets next.

    The default stream cannot be recorded, and autograd runs a parameter's node on the stream where it was made: so both
    the gradient buffer and the steps that are to be recorded belong inside.
    """
    if stream is None:
        yield
        return
    outside = torch.cuda.current_stream(stream.device)
    stream.wait_stream(outside)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        outside.wait_stream(stream)


@contextlib.contextmanager
def beside(stream: Stream | None, after: Event | None) -> Iterator[None]:
    """Here work goes to `stream`, after `after`; nobody waits for it but by an event that is `reached` inside."""
    if stream is None:
        yield
        return
    with torch.cuda.stream(stream):
        wait_for(after)
        yield


def synchronize(device: torch.device) -> None:
    """The host waits for all that the device has."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class CudaGraph:
    """Work of a card that can be repeated; recorded on the current stream, which must not be the default one."""

    def __init__(self, pool: Any):
        self._graph, self._pool = torch.cuda.CUDAGraph(), pool
        self.replay = self._graph.replay

    def record(self, work: Callable[[], None]) -> None:
        stream = torch.cuda.current_stream()
        # thread_local: meanwhile the loader's thread may pin memory
        with torch.cuda.graph(self._graph, self._pool, stream, capture_error_mode="thread_local"):
            work()


def cuda_graphs() -> Callable[[], CudaGraph]:
    """Makes graphs that share their memory: they are replayed one after the other."""
    pool = torch.cuda.graph_pool_handle()
    return lambda: CudaGraph(pool)
