"""CUDA graphs of the substitute for torch.cuda.

A capture records on a tape (tape.py) and refuses what CUDA refuses: a wait of the host, a query of an event, a wait
for work recorded outside, a second capture, the default stream, and an end while a joined stream has not been waited
for. A capture in which something was refused cannot be ended. The recorded work is in the trace once, launched on the
stream of the capture; CUDA would run it at replays only.
"""

import threading
from dataclasses import dataclass, field
from typing import Any

import torch

from simulated_gpu.simulator.state import Listed, caller, machine
from simulated_gpu.simulator.tape import Tape
from simulated_gpu.simulator.trace import DEFAULT, HostRead, HostWait, Stream


@dataclass
class Capture:
    stream: Stream
    mode: str
    thread: int
    tape: Tape = field(default_factory=Tape)
    broken: str = ""
    events: dict[int, Stream] = field(default_factory=dict)  # event recorded in the capture -> its stream
    unjoined: set[Stream] = field(default_factory=set)

    @property
    def streams(self) -> set[Stream]:
        return {self.stream, *self.unjoined, *self.events.values()}

    def fail(self, text: str) -> RuntimeError:
        self.broken = text
        return RuntimeError(f"CUDA error: {text} (at {caller()})")

    def concerns(self, thread: int) -> bool:
        return self.mode == "global" or (self.mode == "thread_local" and thread == self.thread)


_captures: list[Capture] = []  # at most one


def refuse(what: str) -> None:
    """Raise if this thread is being captured, in which case `what` is not permitted."""
    for capture in _captures:
        if capture.concerns(threading.get_ident()):
            raise capture.fail(f"operation not permitted when stream is capturing: {what}")


def on_record(stream: Stream, event: int) -> None:
    for capture in _captures:
        if stream in capture.streams:
            capture.events[event] = stream
        else:
            capture.events.pop(event, None)


def on_wait(stream: Stream, event: int) -> None:
    for capture in _captures:
        origin = capture.events.get(event)
        if stream in capture.streams and origin is None:
            raise capture.fail("dependency created on uncaptured work in another stream")
        if origin is not None and stream == capture.stream:
            capture.unjoined.discard(origin)
        elif origin is not None:
            capture.unjoined.add(stream)


def is_current_stream_capturing() -> bool:
    return any(machine().current_stream() in capture.streams for capture in _captures)


def graph_pool_handle() -> tuple[int, int]:
    return 0, next(machine().numbers["pool"])


class CUDAGraph(Listed):
    """A CUDA graph; `operations` is the number of operations in a replay."""

    def __init__(self) -> None:
        self._tape: Tape | None = None

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        current = machine()
        stream = current.current_stream()
        if stream == DEFAULT:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
        if _captures:
            raise _captures[0].fail("operation not permitted when stream is capturing: a second capture")
        capture = Capture(stream, capture_error_mode, threading.get_ident())
        num_checked = len(current.trace)

        def check_facts() -> None:
            nonlocal num_checked
            for fact in current.trace[num_checked:] if capture.concerns(threading.get_ident()) else ():
                if isinstance(fact, HostWait | HostRead):
                    raise capture.fail(f"operation not permitted when stream is capturing: {fact}")
            num_checked = len(current.trace)

        capture.tape = Tape(after_each=check_facts)
        _captures.append(capture)
        capture.tape.__enter__()

    def capture_end(self) -> None:
        capture = _captures.pop()
        capture.tape.__exit__(None, None, None)
        capture.tape.restore()
        if capture.broken:
            raise RuntimeError("CUDA error: operation failed due to a previous error during capture")
        if capture.unjoined:
            raise RuntimeError("CUDA error: capturing stream has unjoined work")
        self._tape = capture.tape

    def replay(self) -> None:
        refuse("a replay")
        if self._tape is None:
            raise RuntimeError("Called CUDAGraph::replay without a preceding successful capture.")
        self._tape.replay()

    @property
    def operations(self) -> int:
        return 0 if self._tape is None else len(self._tape.calls)


class graph:  # noqa: N801 (torch's name)
    """The context manager torch.cuda.graph: it synchronizes the GPU and empties the cache before a capture."""

    def __init__(
        self, cuda_graph: CUDAGraph, pool: Any = None, stream: Any = None, capture_error_mode: str = "global"
    ) -> None:
        stream = torch.cuda.Stream() if stream is None else stream
        self.cuda_graph, self.pool, self.capture_error_mode = cuda_graph, pool, capture_error_mode
        self.stream_ctx = torch.cuda.stream(stream)

    def __enter__(self) -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        self.stream_ctx.__enter__()
        self.cuda_graph.capture_begin(self.pool, self.capture_error_mode)

    def __exit__(self, *args: object) -> None:
        self.cuda_graph.capture_end()
        self.stream_ctx.__exit__(*args)
