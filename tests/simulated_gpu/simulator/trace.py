"""The trace of one rank on its simulated GPU: a list of facts in the order in which the host issued them.

device.py, cuda.py and nccl.py write it; the detectors (clocks.py, queues.py) read nothing else. The host is one agent.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Stream = int | str  # a stream number of torch.cuda (0: the default stream), or a communicator's name (NCCL's stream)
DEFAULT: Stream = 0


@dataclass(frozen=True)
class Span:
    """Bytes start..stop of one allocation; a strided view spans its first to its last byte."""

    memory: int
    start: int
    stop: int

    def overlaps(self, other: "Span") -> bool:
        return self.memory == other.memory and self.start < other.stop and other.start < self.stop


class Fact:
    """The base class of everything that a trace records."""


@dataclass(frozen=True)
class Alloc(Fact):
    """An allocation. "host" memory is pageable; a GPU block may be reused by the caching allocator on `stream`."""

    memory: int
    side: Literal["gpu", "pinned", "host"]
    size: int
    stream: Stream = DEFAULT


@dataclass(frozen=True)
class Free(Fact):
    """The release of the last reference: the block may be reused at once."""

    memory: int


@dataclass(frozen=True)
class Launch(Fact):
    """Work submitted to a stream, including copies between host and GPU; the host does not wait for it."""

    stream: Stream
    name: str
    reads: tuple[Span, ...] = ()
    writes: tuple[Span, ...] = ()
    where: str = ""  # file:line of the caller, in the package where there is such a frame


@dataclass(frozen=True)
class Record(Fact):
    """An event recorded after the work of `stream` so far. Recording it again replaces the earlier point."""

    event: int
    stream: Stream


@dataclass(frozen=True)
class Wait(Fact):
    """A wait of `stream`: its later work runs after `event` (as last recorded)."""

    stream: Stream
    event: int


@dataclass(frozen=True)
class HostWait(Fact):
    """A wait of the host for an event, for a stream, or (both None) for the whole GPU."""

    event: int | None = None
    stream: Stream | None = None
    where: str = ""


@dataclass(frozen=True)
class HostAccess(Fact):
    """A read or write of host memory by the host. Reading GPU memory is a Launch, a HostWait, then a HostAccess."""

    name: str
    reads: tuple[Span, ...] = ()
    writes: tuple[Span, ...] = ()
    where: str = ""


@dataclass(frozen=True)
class HostRead(Fact):
    """A value that the host waited for and read from the GPU: `.item()`, `.cpu()`, `bool()`, `nonzero`, ..."""

    kind: str
    where: str
    phase: str = ""  # the phase of the step: "forward", "backward", ""


@dataclass(frozen=True)
class Comm(Fact):
    """One operation of a communicator, on its own stream: it starts after the work of stream `after` so far.

    comm    name of the communicator, equal on all its ranks; point to point has one per pair of ranks
    kind    all_reduce, all_gather, reduce_scatter, broadcast, barrier, send, recv, all_to_all, ...
    peer    the other rank (global) of send and recv, the root of a broadcast
    number  number of this operation on this rank, for CommWait
    """

    comm: str
    ranks: tuple[int, ...]
    kind: str
    dtype: str
    count: int
    peer: int | None
    number: int
    after: Stream
    reads: tuple[Span, ...] = ()
    writes: tuple[Span, ...] = ()
    op: str = ""  # the reduction
    where: str = ""

    @property
    def stream(self) -> Stream:
        return self.comm


@dataclass(frozen=True)
class CommWait(Fact):
    """`Work.wait()`: later work of `stream` runs after the operation; the host continues."""

    number: int
    stream: Stream


@dataclass(frozen=True)
class CommDone(Fact):
    """`Work.is_completed()` returned True: the host knows that the operation is done. False is not recorded."""

    number: int


@dataclass(frozen=True)
class Mixed(Fact):
    """An operation that mixes host and GPU tensors, or an unpinned copy called non_blocking."""

    what: str
    where: str


@dataclass(frozen=True)
class Mark(Fact):
    """The start of a part of the run: "step 3", "forward", "backward", "save", ...; "" ends the last one."""

    name: str


# ---- where the host waited for its GPU, read from a trace


@dataclass(frozen=True)
class WaitAt:
    """A wait of the host, with the open marks in `within`.

    `kind` is that of its HostRead, or "synchronize" if the program requested only the wait.
    """

    kind: str
    where: str
    phase: str
    within: tuple[str, ...]

    def __str__(self) -> str:
        """Omit the line, so that tables of expected waits stay valid when a line moves."""
        return f"{self.kind} {self.where.rpartition(':')[0]}"


def waits_of(trace: Sequence[Fact]) -> list[WaitAt]:
    """Return the waits of the host, in order."""
    waits: list[WaitAt] = []
    marks: list[str] = []
    for fact in trace:
        match fact:
            case Mark(name=""):
                marks.pop()
            case Mark(name=name):
                marks.append(name)
            case HostWait(where=where):
                waits.append(WaitAt("synchronize", where, "", tuple(marks)))
            case HostRead(kind=kind, where=where, phase=phase):
                last = max(i for i, wait in enumerate(waits) if wait.where == where)  # other threads wait, too
                waits[last] = WaitAt(kind, where, phase, waits[last].within)
            case _:
                pass
    return waits


def count_marks(trace: Sequence[Fact], name: str) -> int:
    """Return how often the program entered the mark `name`."""
    return sum(isinstance(fact, Mark) and fact.name == name for fact in trace)
