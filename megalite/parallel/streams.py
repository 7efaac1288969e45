"""CUDA streams, events and graphs. No other module uses those of torch.cuda.

On a CPU, work runs synchronously: a stream and an event are None, and these functions do nothing.

Work on one stream runs in order; work on two streams is ordered only by events. Each thread has its own current stream,
but all threads share the default stream, so a thread that must not delay the others works on a side stream
(`on_side_stream`).
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
    """Return a new stream of the device, or None on a CPU."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # pyright: ignore[reportArgumentType]


def record_event(device: torch.device, timed: bool = False) -> Event | None:
    """Record an event after all work that is on the current stream so far; `timed` adds a timestamp. None on a CPU."""
    if device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=timed)
    event.record(torch.cuda.current_stream(device))
    return event


def record_timestamp(device: torch.device) -> Timestamp:
    """Return a timestamp of the current stream: a timed event, or on a CPU the time in seconds."""
    return record_event(device, timed=True) or time.perf_counter()


def elapsed_seconds(start: Timestamp, end: Timestamp) -> float | None:
    """Return the seconds between two timestamps of one device, or None if the GPU has not reached `end` yet."""
    if isinstance(start, float) and isinstance(end, float):
        return end - start
    assert isinstance(start, torch.cuda.Event) and isinstance(end, torch.cuda.Event)
    return start.elapsed_time(end) / 1000 if end.query() else None


def wait_event(event: Event | None) -> None:
    """Make later work on the current stream wait for `event`. The host does not wait."""
    if event is not None:
        event.wait()


@contextlib.contextmanager
def on_stream(stream: Stream | None) -> Iterator[None]:
    """Run the work inside on `stream`, after all earlier and before all later work of the current stream.

    The default stream cannot be captured, and autograd runs a parameter's node on the stream where it was created. So
    both creating the gradient buffer and the steps to be captured belong inside.
    """
    if stream is None:
        yield
        return
    outer_stream = torch.cuda.current_stream(stream.device)
    stream.wait_stream(outer_stream)
    try:
        with torch.cuda.stream(stream):
            yield
    finally:
        outer_stream.wait_stream(stream)


@contextlib.contextmanager
def on_side_stream(stream: Stream | None, after: Event | None) -> Iterator[None]:
    """Run the work inside on `stream`, after the event `after`.

    Other streams wait for it with an event that `record_event` returns inside of the context.
    """
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
    """A CUDA graph: captured work that can be replayed. It must not be captured on the default stream."""

    def __init__(self, pool: Any):
        """Create an empty graph whose memory comes from `pool` (torch.cuda.graph_pool_handle)."""
        self._graph = torch.cuda.CUDAGraph()
        self._pool = pool
        self.replay = self._graph.replay

    def capture(self, work: Callable[[], None]) -> None:
        """Capture the kernels of `work` without running them; `replay` runs them with the tensors' current values."""
        stream = torch.cuda.current_stream()
        # thread_local: the data loader's thread may pin memory at the same time
        with torch.cuda.graph(self._graph, self._pool, stream, capture_error_mode="thread_local"):
            work()


def cuda_graph_factory() -> Callable[[], CudaGraph]:
    """Return a factory of graphs that share one memory pool, which they may because they are replayed one at a time."""
    pool = torch.cuda.graph_pool_handle()
    return lambda: CudaGraph(pool)
