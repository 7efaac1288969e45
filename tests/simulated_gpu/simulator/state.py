"""What the simulated machine is, and what its cards have been told: the memory of the stand-in for torch.cuda. Figures
are read from the trace and kept nowhere else. The trace may only grow."""

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
OURS = tuple(f"{ROOT}/{name}" for name in ("megalite/", "tools/", "examples/", "pretrain_gpt.py", "tests/"))
MACHINERY = f"{ROOT}/tests/simulated_gpu/"  # but for the tests in it
BLOCK, SEGMENT = 512, 2 << 20  # bytes: the caching allocator's unit, and what it takes from the card at least
CONTEXT = 512 << 20  # bytes of a card that CUDA itself takes; a guess, so that free + allocated is not the total


class Unlisted(AssertionError):
    """Something of torch.cuda was asked for that the stand-in does not know. No AttributeError: nobody may ask and go on."""


class Listed:
    """An object of the stand-in: what it does not have is an error that names it."""

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        raise unlisted(f"{type(self).__name__}.{name}")


def unlisted(what: str) -> Unlisted:
    error = Unlisted(
        f"torch.cuda: {what} is asked for at {caller()} and the stand-in has no such thing: list it in tests/simulated_gpu, "
        "where tests/simulated_gpu/simulator/test_cuda.py holds it against torch's own"
    )
    if _machines:
        _machines[-1].unlisted.append(error)
    return error


@functools.cache
def is_ours(file: str) -> bool:
    """A file of the program or of a test; not of what simulates."""
    return file.startswith(OURS) and not (file.startswith(MACHINERY) and "/test_" not in file)


def caller(above: str = "") -> str:
    """file:line of the innermost frame of the repository that is not in the folder `above`; "" where there is none."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        file = frame.f_code.co_filename
        if is_ours(file) and not (above and file.startswith(f"{ROOT}/{above}/")):
            return f"{file[len(str(ROOT)) + 1 :]}:{frame.f_lineno}"
        frame = frame.f_back
    return ""


@dataclass
class Figures:
    """Bytes of the caching allocator; `reserved` is what it keeps of the card."""

    allocated: int = 0
    max_allocated: int = 0
    reserved: int = 0
    max_reserved: int = 0
    blocks: int = 0

    def add(self, size: int) -> None:
        self.allocated += size
        self.blocks += (size > 0) - (size < 0)  # a tensor without elements has no block
        self.reserved = max(self.reserved, _up(self.allocated, SEGMENT))
        self.max_allocated = max(self.max_allocated, self.allocated)
        self.max_reserved = max(self.max_reserved, self.reserved)

    def give_back(self) -> None:
        self.reserved = _up(self.allocated, SEGMENT)

    def reset_peaks(self) -> None:
        self.max_allocated, self.max_reserved = self.allocated, self.reserved


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit


class _Here(threading.local):
    """Of a thread: its card, and its current stream on each card (absent: the default one)."""

    def __init__(self) -> None:
        self.device = 0
        self.streams: dict[int, object] = {}


@dataclass
class Machine:
    """`cards` of one kind, one of which this process uses. `home`: the one that holds what the trace allocates."""

    trace: list[Fact]
    cards: int
    memory: int
    capability: tuple[int, int] = (9, 0)
    name: str = "NVIDIA H100 80GB HBM3"
    multiprocessors: int = 132
    unlisted: list[Unlisted] = field(default_factory=list)
    initialized: bool = False
    home: int = 0
    history: int | None = None  # entries that the memory history keeps
    runtime_calls: list[str] = field(default_factory=list)
    here: _Here = field(default_factory=_Here)
    figures: Figures = field(default_factory=Figures)
    numbers: "dict[str, itertools.count[int]]" = field(default_factory=lambda: defaultdict(lambda: itertools.count(1)))
    _seen: int = 0
    _sizes: dict[int, int] = field(default_factory=dict)
    _recorded: dict[int, tuple[Stream, int]] = field(default_factory=dict)  # event -> stream, place in the trace
    _reached: dict[Stream | None, int] = field(default_factory=dict)  # None: the whole card
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def read(self) -> Figures:
        """The trace from where it was read last."""
        with self._lock:
            while self._seen < len(self.trace):
                self._note(self.trace[self._seen])
                self._seen += 1
        return self.figures

    def _note(self, fact: Fact) -> None:
        match fact:
            case Alloc(memory=memory, side="card", size=size):
                self._sizes[memory] = _up(size, BLOCK)
                self.figures.add(self._sizes[memory])
            case Free(memory=memory) if memory in self._sizes:
                self.figures.add(-self._sizes.pop(memory))
            case Record(event=event, stream=stream):
                self._recorded[event] = stream, self._seen
            case HostWait(event=None, stream=stream):
                self._reached[stream] = self._seen
            case HostWait(event=event) if event in self._recorded:
                stream, place = self._recorded[event]
                self._reached[stream] = max(place, self._reached.get(stream, 0))

    def current_stream(self) -> Stream:
        """Of this thread, on its card."""
        return getattr(self.here.streams.get(self.here.device), "number", DEFAULT)

    def waited_for(self, event: int) -> bool:
        """Whether the host knows that an event has been reached."""
        self.read()
        stream, place = self._recorded[event]
        return place <= max(self._reached.get(stream, -1), self._reached.get(None, -1))


_machines: list[Machine] = []


def machine() -> Machine:
    """The one that is installed; every use of it is one of CUDA's that needs a card."""
    if not _machines:
        raise AssertionError("a part of the stand-in for torch.cuda outlived it: nothing is installed")
    found = _machines[-1]
    if not found.cards:
        raise RuntimeError("No CUDA GPUs are available")
    found.initialized = True
    return found
