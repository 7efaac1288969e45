"""A race detector for traces: two uses of the same bytes, one of them a write, that nothing orders.

Each stream, each communicator (ProcessGroupNCCL has a stream for each) and the host has a vector clock: how many
operations of each other agent are done before its next one (C. Fidge and F. Mattern, 1988; Flanagan and Freund,
"FastTrack", PLDI 2009, show which uses of a byte must be stored to find the first race). These rules order operations:

    Launch        after all earlier work of its stream, and after all that the host had waited for when it issued this
    Record, Wait  torch's streams are non-blocking: only events order them, also with the default stream
    Comm          on the communicator's own stream, after the work of the current one; only CommWait orders what follows
    HostAccess    after all that the host has waited for, and before all that it issues later
    Alloc, Free   a block that is reused may still be in use: by then all uses elsewhere must be done on its stream or
                  for the host
NCCL's tensors are not kept alive here, which is correct for every version of torch. The allocator itself waits before
it reuses pinned memory. The host is one agent: a missing wait that another thread happens to replace is not detected.
"""

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from simulated_gpu.simulator.trace import (
    Alloc,
    Comm,
    CommDone,
    CommWait,
    Fact,
    Free,
    HostAccess,
    HostWait,
    Launch,
    Mark,
    Record,
    Span,
    Stream,
    Wait,
)

T = TypeVar("T")
Clock = list[int]  # one number per agent, by its index; agents that came later are absent and count 0
HOST = 0


class Intervals(Generic[T]):
    """A map from half-open ranges of integers to values.

    A query splits the ranges at its ends and creates missing ones; filling replaces many ranges by one. `make` returns
    the value of a new range, `clone` the value of the second half of a range that is split.

    >>> marks = Intervals(list, list.copy)
    >>> for value in marks.within(0, 8): value.append("a")
    >>> for value in marks.within(4, 12): value.append("b")
    >>> marks.fill(6, 10, ["c"]); marks.all()
    [['a'], ['a', 'b'], ['c'], ['b']]
    """

    def __init__(self, make: Callable[[], T], clone: Callable[[T], T]):
        self._make, self._clone = make, clone
        self._starts: list[int] = []  # starts of ranges that do not overlap, in order
        self._stops: list[int] = []
        self._values: list[T] = []

    def all(self) -> list[T]:
        return self._values

    def within(self, start: int, stop: int) -> Iterator[T]:
        """Return the values of the ranges in start..stop, split at both ends."""
        if start >= stop:
            return iter(())
        if (
            len(self._starts) == 1 and self._starts[0] == start and self._stops[0] == stop
        ):  # true for most memory, always
            return iter(self._values)
        first, last = self._cut(start, stop)
        index, position = first, start
        while position < stop:
            if index == last or self._starts[index] > position:  # a hole
                end = stop if index == last else self._starts[index]
                self._insert(index, position, end, self._make())
                last += 1
            position = self._stops[index]
            index += 1
        return iter(self._values[first:last])

    def fill(self, start: int, stop: int, value: T) -> None:
        """Set one value for all of start..stop."""
        if start >= stop:
            return
        if len(self._starts) == 1 and self._starts[0] == start and self._stops[0] == stop:
            self._values[0] = value
            return
        first, last = self._cut(start, stop)
        self._starts[first:last], self._stops[first:last], self._values[first:last] = [start], [stop], [value]

    def _cut(self, start: int, stop: int) -> tuple[int, int]:
        """Split the ranges at both ends of start..stop, and return the indices of those in it, half-open."""
        for position in (start, stop):
            index = bisect_right(self._starts, position) - 1
            if index >= 0 and self._starts[index] < position < self._stops[index]:
                self._insert(index + 1, position, self._stops[index], self._clone(self._values[index]))
                self._stops[index] = position
        return bisect_left(self._starts, start), bisect_left(self._starts, stop)

    def _insert(self, index: int, start: int, stop: int, value: T) -> None:
        self._starts.insert(index, start)
        self._stops.insert(index, stop)
        self._values.insert(index, value)


class Use(NamedTuple):  # there are many, and creating a frozen dataclass takes three times as long
    """One use of memory: the fact at `index` of the trace, the `number`-th of its agent."""

    agent: int
    number: int
    index: int


@dataclass
class Cell:
    """The uses of a range of bytes: the last write, and the last read of each agent since."""

    write: Use | None = None
    reads: dict[int, Use] = field(default_factory=dict)

    def copy(self) -> "Cell":
        return Cell(self.write, dict(self.reads))


@dataclass(frozen=True)
class Race:
    """Two facts of the trace without any order from `early` to `late`.

    `mark` is the part of the run, `times` the number of races of the same two lines.
    """

    kind: str  # "use before ready", "write before the reads are done", "two writes", "freed in use", "used after free"
    span: Span
    early: Fact
    late: Fact
    mark: str = ""
    times: int = 1

    def __str__(self) -> str:
        where = f"{self.mark}: " if self.mark else ""
        times = f", {self.times} times" if self.times > 1 else ""
        bytes_ = f"bytes {self.span.start}..{self.span.stop} of block {self.span.memory}"
        facts = f"{describe(self.early)}, then {describe(self.late)}"
        return f"{where}{self.kind}: {facts}, nothing between them ({bytes_}{times})"


def describe(fact: Fact) -> str:
    match fact:
        case Launch(stream=stream, name=name, where=location):
            return f"{name} on stream {stream}" + (f" ({location})" if location else "")
        case Comm(comm=comm, kind=kind, where=location):
            return f"{kind} of {comm}" + (f" ({location})" if location else "")
        case HostAccess(name=name, where=location):
            return f"the host's {name}" + (f" ({location})" if location else "")
        case Alloc(stream=stream):
            return f"a block is allocated on stream {stream}"
        case Free():
            return "its last reference is released"
    return str(fact)


def _merge(into: Clock, other: Clock) -> None:
    into.extend([0] * (len(other) - len(into)))
    for agent, number in enumerate(other):
        if number > into[agent]:
            into[agent] = number


def _is_over(use: Use, clock: Clock) -> bool:
    return use.agent < len(clock) and clock[use.agent] >= use.number


@dataclass
class _Block:
    alloc: Alloc | None
    cells: Intervals[Cell]
    freed: int | None = None


class _RaceDetector:
    def __init__(self, trace: Sequence[Fact]):
        self.trace = trace
        self.agents: dict[Stream | None, int] = {None: HOST}  # None: the host
        self.clocks: list[Clock] = [[0]]  # by agent: what is done before its next operation, including its own
        self.merged_host_waits: list[int] = [0]  # the host's waits that are already merged into an agent's clock
        self.host_waits = 0
        self.events: dict[int, Clock] = {}
        self.comms: dict[int, Clock] = {}
        self.blocks: dict[int, _Block] = {}
        # by stream: uses of freed blocks that were not done there by then
        self.idle: dict[Stream, list[tuple[Use, Span]]] = {}
        self.races_by_key: dict[tuple[str, str, str], Race] = {}
        self.mark = ""

    def read(self) -> list[Race]:
        for index, fact in enumerate(self.trace):
            self._apply(index, fact)
        return list(self.races_by_key.values())

    def _agent(self, stream: Stream | None) -> int:
        """Return the index of an agent, whose later work comes after all that the host has waited for."""
        agent = self.agents.get(stream)
        if agent is None:
            agent = self.agents[stream] = len(self.clocks)
            self.clocks.append([])
            self.merged_host_waits.append(-1)
        if self.merged_host_waits[agent] != self.host_waits:
            _merge(self.clocks[agent], self.clocks[HOST])
            self.merged_host_waits[agent] = self.host_waits
        return agent

    def _next(self, agent: int) -> int:
        clock = self.clocks[agent]
        clock.extend([0] * (agent + 1 - len(clock)))
        clock[agent] += 1
        return clock[agent]

    def _host_waited_for(self, clock: Clock) -> None:
        _merge(self.clocks[HOST], clock)
        self.host_waits = self.merged_host_waits[HOST] = self.host_waits + 1

    def _apply(self, index: int, fact: Fact) -> None:
        match fact:  # the most frequent first
            case Launch():
                self._touch(index, self._agent(fact.stream), fact.reads, fact.writes)
            case Alloc():
                self._alloc(index, fact)
            case Free():
                self._free(index, fact)
            case Comm():
                agent = self._agent(fact.stream)
                _merge(self.clocks[agent], self.clocks[self._agent(fact.after)])
                self._touch(index, agent, fact.reads, _written(fact))
                self.comms[fact.number] = list(self.clocks[agent])
            case CommWait():
                _merge(self.clocks[self._agent(fact.stream)], self.comms[fact.number])
            case CommDone():
                self._host_waited_for(self.comms[fact.number])
            case Record():
                self.events[fact.event] = list(self.clocks[self._agent(fact.stream)])
            case Wait() if fact.event in self.events:  # CUDA: an event that was never recorded makes no stream wait
                _merge(self.clocks[self._agent(fact.stream)], self.events[fact.event])
            case HostWait(event=None, stream=None):
                for clock in self.clocks[1:]:
                    self._host_waited_for(clock)
            case HostWait(event=None):
                self._host_waited_for(self.clocks[self._agent(fact.stream)])
            case HostWait(event=int(event)) if event in self.events:
                self._host_waited_for(self.events[event])
            case HostAccess():
                self._touch(index, HOST, fact.reads, fact.writes)
                self._host_waited_for([])
            case Mark():
                self.mark = fact.name

    def _block(self, memory: int) -> _Block:
        """Return the block of an allocation, which may be older than the trace."""
        block = self.blocks.get(memory)
        if block is None:
            block = self.blocks[memory] = _Block(None, Intervals(Cell, Cell.copy))
        return block

    def _alloc(self, index: int, fact: Alloc) -> None:
        block = self.blocks[fact.memory] = _Block(fact, Intervals(Cell, Cell.copy))
        if fact.side == "gpu":
            agent = self._agent(fact.stream)
            clock = self.clocks[agent]
            for use, span in self.idle.pop(fact.stream, []):
                if not _is_over(use, clock):
                    self._race("freed in use", span, use, index)
            if agent < len(clock) and clock[agent]:
                for cell in block.cells.within(0, fact.size):
                    cell.write = Use(agent, clock[agent], index)

    def _touch(self, index: int, agent: int, reads: Sequence[Span], writes: Sequence[Span]) -> None:
        use, clock = Use(agent, self._next(agent), index), self.clocks[agent]
        for span in reads:
            for cell in self._cells(index, span):
                if cell.write is not None and not _is_over(cell.write, clock):
                    self._race("use before ready", span, cell.write, index)
                cell.reads[agent] = use
        for span in writes:
            for cell in self._cells(index, span):
                if cell.write is not None and not _is_over(cell.write, clock):
                    kind = (
                        "two writes" if isinstance(self.trace[cell.write.index], Launch | Comm) else "use before ready"
                    )
                    self._race(kind, span, cell.write, index)
                for read in cell.reads.values():
                    if not _is_over(read, clock):
                        self._race("write before the reads are done", span, read, index)
            self._block(span.memory).cells.fill(span.start, span.stop, Cell(use))

    def _cells(self, index: int, span: Span) -> Iterator[Cell]:
        block = self._block(span.memory)
        if block.freed is not None:
            self._race("used after free", span, Use(HOST, 0, block.freed), index)
        return block.cells.within(span.start, span.stop)

    def _free(self, index: int, fact: Free) -> None:
        block = self.blocks.get(fact.memory)
        if block is None:
            return
        block.freed = index
        alloc = block.alloc or Alloc(fact.memory, "gpu", 0)
        clock = list(self.clocks[HOST])
        if alloc.side == "gpu":
            _merge(clock, self.clocks[self._agent(alloc.stream)])
        uses = (use for cell in block.cells.all() for use in (cell.write, *cell.reads.values()) if use is not None)
        in_use = [(use, Span(fact.memory, 0, alloc.size)) for use in uses if not _is_over(use, clock)]
        if alloc.side == "gpu":
            self.idle.setdefault(alloc.stream, []).extend(in_use)
        elif alloc.side == "host":  # the allocator itself waits before it reuses pinned memory
            for use, span in in_use:
                self._race("freed in use", span, use, index)

    def _race(self, kind: str, span: Span, early: Use, index: int) -> None:
        first, second = self.trace[early.index], self.trace[index]
        key = kind, describe(first), describe(second)
        times = self.races_by_key[key].times + 1 if key in self.races_by_key else 1
        known = self.races_by_key.get(key) or Race(kind, span, first, second, self.mark)
        self.races_by_key[key] = Race(known.kind, known.span, known.early, known.late, known.mark, times)


def _written(fact: Comm) -> Sequence[Span]:
    """Return the bytes that a collective changes: an all-gather in place does not change its own part."""
    if "gather" not in fact.kind:
        return fact.writes
    parts = list(fact.writes)
    for sent in fact.reads:
        parts = [rest for part in parts for rest in (_without(part, sent) if part.overlaps(sent) else [part])]
    return parts


def _without(part: Span, removed: Span) -> list[Span]:
    ends = [(part.start, removed.start), (removed.stop, part.stop)]
    return [Span(part.memory, start, stop) for start, stop in ends if start < stop]


def races(trace: Sequence[Fact]) -> list[Race]:
    """Return the races in a trace in order, one for each pair of lines.

    If there is a race, at least one is reported; it may hide later races of the same bytes.
    """
    return _RaceDetector(trace).read()
