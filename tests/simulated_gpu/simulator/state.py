"""The state of the simulated machine and its GPUs, for the substitute for torch.cuda.

Memory statistics are computed from the trace, which may only grow, and are stored nowhere else.
"""

import functools
import itertools
import sys
import threading
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from simulated_gpu.simulator.trace import DEFAULT, Alloc, Fact, Free, HostWait, Record, Stream

ROOT = Path(__file__).resolve().parents[3]
PROGRAM_PATHS = tuple(f"{ROOT}/{name}" for name in ("megalite/", "tools/", "examples/", "pretrain_gpt.py", "tests/"))
SIMULATOR_DIR = f"{ROOT}/tests/simulated_gpu/"  # except for the tests in it
BLOCK, SEGMENT = 512, 2 << 20  # bytes: the caching allocator's unit, and the least that it takes from the GPU
CONTEXT = 512 << 20  # bytes of a GPU that CUDA itself takes; a guess, so that free + allocated is not the total


class Unlisted(AssertionError):
    """A use of something in torch.cuda that the substitute lacks. No AttributeError, which callers may swallow."""


class Listed:
    """An object of the substitute: reading an attribute that it lacks raises an error that names it."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        raise unlisted(f"{type(self).__name__}.{name}")


def unlisted(name: str) -> Unlisted:
    error = Unlisted(
        f"torch.cuda: {name} is asked for at {caller()} and the substitute has no such thing: list it in "
        "tests/simulated_gpu, where tests/simulated_gpu/simulator/test_cuda.py compares it with torch's own"
    )
    if _machines:
        _machines[-1].unlisted.append(error)
    return error


@functools.cache
def is_program_file(file: str) -> bool:
    """Return whether a file belongs to the program or to a test, and not to the simulator."""
    return file.startswith(PROGRAM_PATHS) and not (file.startswith(SIMULATOR_DIR) and "/test_" not in file)


def caller(skipped_dir: str = "") -> str:
    """Return file:line of the innermost frame of the repository outside the directory `skipped_dir`, or ""."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if is_program_file(file) and not (skipped_dir and file.startswith(f"{ROOT}/{skipped_dir}/")):
            return f"{file[len(str(ROOT)) + 1 :]}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


@dataclass
class MemoryUsage:
    """The bytes of the caching allocator; `reserved` is what it holds of the GPU's memory."""

    allocated: int = 0
    max_allocated: int = 0
    reserved: int = 0
    max_reserved: int = 0
    blocks: int = 0

    def add(self, size: int) -> None:
        self.allocated += size
        self.blocks += (size > 0) - (size < 0)  # a tensor without elements has no block
        self.reserved = max(self.reserved, _round_up(self.allocated, SEGMENT))
        self.max_allocated = max(self.max_allocated, self.allocated)
        self.max_reserved = max(self.max_reserved, self.reserved)

    def release_cached(self) -> None:
        self.reserved = _round_up(self.allocated, SEGMENT)

    def reset_peaks(self) -> None:
        self.max_allocated, self.max_reserved = self.allocated, self.reserved


def _round_up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


class _ThreadState(threading.local):
    """The current GPU of a thread, and its current stream on each GPU (absent: the default one)."""

    def __init__(self) -> None:
        self.device = 0
        self.streams: dict[int, object] = {}


@dataclass
class Machine:
    """A machine with `num_gpus` equal GPUs; this process uses `traced_gpu`, which holds what the trace allocates."""

    trace: list[Fact]
    num_gpus: int
    memory: int
    capability: tuple[int, int] = (9, 0)
    name: str = "NVIDIA H100 80GB HBM3"
    multiprocessors: int = 132
    unlisted: list[Unlisted] = field(default_factory=list)
    initialized: bool = False
    traced_gpu: int = 0
    history: int | None = None  # maximum number of entries in the memory history
    runtime_calls: list[str] = field(default_factory=list)
    thread_state: _ThreadState = field(default_factory=_ThreadState)
    memory_usage: MemoryUsage = field(default_factory=MemoryUsage)
    numbers: "dict[str, itertools.count[int]]" = field(default_factory=lambda: defaultdict(lambda: itertools.count(1)))
    _num_read: int = 0
    _sizes: dict[int, int] = field(default_factory=dict)
    _recorded: dict[int, tuple[Stream, int]] = field(default_factory=dict)  # event -> stream, place in the trace
    _waited: dict[Stream | None, int] = field(default_factory=dict)  # None: the whole GPU
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def read_trace(self) -> MemoryUsage:
        """Read what was added to the trace since the last call, and return the memory usage."""
        with self._lock:
            while self._num_read < len(self.trace):
                self._apply(self.trace[self._num_read])
                self._num_read += 1
        return self.memory_usage

    def _apply(self, fact: Fact) -> None:
        match fact:
            case Alloc(memory=memory, side="gpu", size=size):
                self._sizes[memory] = _round_up(size, BLOCK)
                self.memory_usage.add(self._sizes[memory])
            case Free(memory=memory) if memory in self._sizes:
                self.memory_usage.add(-self._sizes.pop(memory))
            case Record(event=event, stream=stream):
                self._recorded[event] = stream, self._num_read
            case HostWait(event=None, stream=stream):
                self._waited[stream] = self._num_read
            case HostWait(event=event) if event in self._recorded:
                stream, place = self._recorded[event]
                self._waited[stream] = max(place, self._waited.get(stream, 0))

    def current_stream(self) -> Stream:
        """Return the current stream of this thread on its GPU."""
        return getattr(self.thread_state.streams.get(self.thread_state.device), "number", DEFAULT)

    def waited_for(self, event: int) -> bool:
        """Return whether the host has waited for an event, so that it knows it is done."""
        self.read_trace()
        stream, place = self._recorded[event]
        return place <= max(self._waited.get(stream, -1), self._waited.get(None, -1))


_machines: list[Machine] = []


def machine() -> Machine:
    """Return the installed machine. Each use stands for a CUDA call that needs a GPU."""
    if not _machines:
        raise AssertionError("an object of the substitute for torch.cuda outlived it: nothing is installed")
    current = _machines[-1]
    if not current.num_gpus:
        raise RuntimeError("No CUDA GPUs are available")
    current.initialized = True
    return current
