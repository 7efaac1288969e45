"""The streams of a card and the order between them. No other module names torch.cuda's. A CPU does work where it is
called, so there a stream and an event are None, and these functions do nothing.

Work on one stream runs in order; work on two streams is ordered only by events. Each thread has its own current stream,
but the default one is shared by all threads, so a thread that must not delay the others works `beside` it.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

Stream = torch.cuda.Stream
Event = torch.cuda.Event
Timestamp = torch.cuda.Event | float


def new_stream(device: torch.device) -> Stream | None:
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # pyright: ignore[reportArgumentType]


def record_event(device: torch.device, timed: bool = False) -> Event | None:
    """An event that follows all work that the current stream has so far. `timed`: with a time stamp."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=timed)
    event.record(torch.cuda.current_stream(device))
    return event


def record_timestamp(device: torch.device) -> Timestamp:
    """A time stamp in the current stream; on a CPU the time in seconds."""
    return record_event(device, timed=True) or time.perf_counter()


def elapsed_seconds(begin: Timestamp, end: Timestamp) -> float | None:
    """Seconds between two marks of one device; None while the card has not reached the second."""
    if isinstance(begin, float) and isinstance(end, float):
        return end - begin
    assert isinstance(begin, torch.cuda.Event) and isinstance(end, torch.cuda.Event)
    return begin.elapsed_time(end) / 1000 if end.query() else None


def wait_event(event: Event | None) -> None:
    """Order later work of the current stream after `event`; the host does not wait."""
    if event is not None:
        event.wait()


@contextlib.contextmanager
def on_stream(stream: Stream | None) -> Iterator[None]:
    """Send the work inside to `stream`, after all earlier and before all later work of the current stream.

    The default stream cannot be recorded, and autograd runs a parameter's node on the stream where it was made. So both
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
def on_side_stream(stream: Stream | None, after: Event | None) -> Iterator[None]:
    """Send the work inside to `stream`, after the event `after`. Others wait for it by an event `reached` inside."""
    if stream is None:
        yield
        return
    with torch.cuda.stream(stream):
        wait_event(after)
        yield


def synchronize(device: torch.device) -> None:
    """Make the host wait for all work of the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class CudaGraph:
    """Recorded work of a card that can be replayed. The stream that records it must not be the default one."""

    def __init__(self, pool: Any):
        self._graph, self._pool = torch.cuda.CUDAGraph(), pool
        self.replay = self._graph.replay

    def capture(self, work: Callable[[], None]) -> None:
        """Note what `work` would do, without doing it; `replay` does it, on what the same tensors hold now."""
        stream = torch.cuda.current_stream()
        # thread_local: the loader's thread may pin memory at the same time
        with torch.cuda.graph(self._graph, self._pool, stream, capture_error_mode="thread_local"):
            work()


def cuda_graph_factory() -> Callable[[], CudaGraph]:
    """A factory of graphs that share their memory, because they are replayed one after the other."""
    pool = torch.cuda.graph_pool_handle()
    return lambda: CudaGraph(pool)
