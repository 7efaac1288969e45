"""What one rank did on its simulated card, as a list of facts in the order in which the host issued them. device.py,
cuda.py and nccl.py write it; the detectors (clocks.py, queues.py) read it and nothing else. The host is one agent."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Stream = int | str  # a number of torch.cuda's (0: the default stream), or the name of a communicator: NCCL's own stream
DEFAULT: Stream = 0


@dataclass(frozen=True)
class Span:
    """Bytes start..stop of one allocation; of a strided view from its first to its last byte."""

    memory: int
    start: int
    stop: int

    def meets(self, other: "Span") -> bool:
        return self.memory == other.memory and self.start < other.stop and other.start < self.stop


class Fact:
    """Any of these."""


@dataclass(frozen=True)
class Alloc(Fact):
    """`side`: "host" is pageable. `stream`: on which the caching allocator may give a card's block out again."""

    memory: int
    side: Literal["card", "pinned", "host"]
    size: int
    stream: Stream = DEFAULT


@dataclass(frozen=True)
class Free(Fact):
    """The last reference is gone: the block may be handed out again at once."""

    memory: int


@dataclass(frozen=True)
class Launch(Fact):
    """Work given to a stream; the host does not wait for it. A copy between host and card is one, too."""

    stream: Stream
    name: str
    reads: tuple[Span, ...] = ()
    writes: tuple[Span, ...] = ()
    where: str = ""  # file:line of the caller, in the package where there is such a frame


@dataclass(frozen=True)
class Record(Fact):
    """An event notes what `stream` has so far. An event that is recorded again means the newer point."""

    event: int
    stream: Stream


@dataclass(frozen=True)
class Wait(Fact):
    """What `stream` gets from here on comes after `event` (as recorded last)."""

    stream: Stream
    event: int


@dataclass(frozen=True)
class HostWait(Fact):
    """The host waits for an event, or for a stream, or (both None) for the whole card."""

    event: int | None = None
    stream: Stream | None = None
    where: str = ""


@dataclass(frozen=True)
class HostAccess(Fact):
    """The host itself reads or writes memory of its own; what it reads of the card is a Launch, a HostWait, this."""

    name: str
    reads: tuple[Span, ...] = ()
    writes: tuple[Span, ...] = ()
    where: str = ""


@dataclass(frozen=True)
class HostRead(Fact):
    """A value came back from the card and the host waited for it: `.item()`, `.cpu()`, `bool()`, `nonzero`, ..."""

    kind: str
    where: str
    phase: str = ""  # what the trainer was doing: "forward", "backward", ""


@dataclass(frozen=True)
class Comm(Fact):
    """One operation of a communicator, on its own stream: it begins after what `after` has so far.

    comm    its ranks' name for it, equal on all of them; point to point has one per pair of ranks
    kind    all_reduce, all_gather, reduce_scatter, broadcast, barrier, send, recv, all_to_all, ...
    peer    the other rank (global) of send and recv, the root of a broadcast
    number  of this operation on this rank, for CommWait
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
    op: str = ""  # of a reduction
    where: str = ""

    @property
    def stream(self) -> Stream:
        return self.comm


@dataclass(frozen=True)
class CommWait(Fact):
    """`Work.wait()`: what `stream` gets from here on comes after the operation; the host goes on."""

    number: int
    stream: Stream


@dataclass(frozen=True)
class CommDone(Fact):
    """`Work.is_completed()` said yes: the host knows that the operation is over. No fact where it said no."""

    number: int


@dataclass(frozen=True)
class Mixed(Fact):
    """An operation on tensors of host and card together, or an unpinned copy called non_blocking."""

    what: str
    where: str


@dataclass(frozen=True)
class Mark(Fact):
    """Where the run is: "step 3", "forward", "backward", "evaluation", "save", ...; "" ends the last one."""

    name: str


# ---- where the host waited for its card, read from a trace


@dataclass(frozen=True)
class WaitAt:
    """`kind`: of the HostRead, or "synchronize" where the program asked for nothing but the wait. `within`: the marks."""

    kind: str
    where: str
    phase: str
    within: tuple[str, ...]

    def __str__(self) -> str:
        """Without the line: what a table of them is compared with stays true when a line moves."""
        return f"{self.kind} {self.where.rpartition(':')[0]}"


def waits_of(trace: Sequence[Fact]) -> list[WaitAt]:
    found: list[WaitAt] = []
    marks: list[str] = []
    for fact in trace:
        match fact:
            case Mark(name=""):
                marks.pop()
            case Mark(name=name):
                marks.append(name)
            case HostWait(where=where):
                found.append(WaitAt("synchronize", where, "", tuple(marks)))
            case HostRead(kind=kind, where=where, phase=phase):
                last = max(i for i, wait in enumerate(found) if wait.where == where)  # other threads wait, too
                found[last] = WaitAt(kind, where, phase, found[last].within)
            case _:
                pass
    return found


def times(trace: Sequence[Fact], name: str) -> int:
    """How often the program was in `name`."""
    return sum(isinstance(fact, Mark) and fact.name == name for fact in trace)
