"""Races in a trace: two uses of the same bytes, one of them a write, that nothing puts in order.

A vector clock per stream, per communicator (ProcessGroupNCCL has a stream for each) and for the host: how many things
of each other one are over before what comes next (C. Fidge and F. Mattern, 1988; which uses of a byte must be kept to
find the first race: Flanagan and Freund, "FastTrack", PLDI 2009). What puts things in order:

    Launch        after all of its stream, and after all that the host has waited for before it issued this
    Record, Wait  torch's streams are non-blocking: none is ordered with another, or with the default one, but by events
    Comm          after what the current stream has, on the communicator's own stream; only CommWait orders what follows
    HostAccess    after all that the host has waited for, and before all that it issues later
    Alloc, Free   a block that is given out again may still be in use: by then all uses elsewhere must be over on its
                  stream or for the host
NCCL's tensors are not kept alive here, which is right under every torch. Of pinned memory the allocator waits by
itself. The host is one agent: a wait that another thread happens to make up for is missed.
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
    """Half-open ranges of whole numbers and what is known of each: split where a question begins or ends, joined when one
    value is put over many. A range is made when it is first asked for. `make`: the value of a range that nothing is known
    of; `clone`: of a half, where one is split.

    >>> marks = Intervals(list, list.copy)
    >>> for value in marks.within(0, 8): value.append("a")
    >>> for value in marks.within(4, 12): value.append("b")
    >>> marks.fill(6, 10, ["c"]); marks.all()
    [['a'], ['a', 'b'], ['c'], ['b']]
    """

    def __init__(self, make: Callable[[], T], clone: Callable[[T], T]):
        self._make, self._clone = make, clone
        self._starts: list[int] = []  # of ranges that do not overlap, in order
        self._stops: list[int] = []
        self._values: list[T] = []

    def all(self) -> list[T]:
        return self._values

    def within(self, start: int, stop: int) -> Iterator[T]:
        """The values of start..stop, whose ranges end there."""
        if start >= stop:
            return iter(())
        if len(self._starts) == 1 and self._starts[0] == start and self._stops[0] == stop:  # most memory, always
            return iter(self._values)
        first, last = self._cut(start, stop)
        at, position = first, start
        while position < stop:
            if at == last or self._starts[at] > position:  # a hole
                end = stop if at == last else self._starts[at]
                self._insert(at, position, end, self._make())
                last += 1
            position = self._stops[at]
            at += 1
        return iter(self._values[first:last])

    def fill(self, start: int, stop: int, value: T) -> None:
        """One value for all of start..stop."""
        if start >= stop:
            return
        if len(self._starts) == 1 and self._starts[0] == start and self._stops[0] == stop:
            self._values[0] = value
            return
        first, last = self._cut(start, stop)
        self._starts[first:last], self._stops[first:last], self._values[first:last] = [start], [stop], [value]

    def _cut(self, start: int, stop: int) -> tuple[int, int]:
        """Which ranges lie in start..stop, after those across its ends were split."""
        for place in (start, stop):
            at = bisect_right(self._starts, place) - 1
            if at >= 0 and self._starts[at] < place < self._stops[at]:
                self._insert(at + 1, place, self._stops[at], self._clone(self._values[at]))
                self._stops[at] = place
        return bisect_left(self._starts, start), bisect_left(self._starts, stop)

    def _insert(self, at: int, start: int, stop: int, value: T) -> None:
        self._starts.insert(at, start)
        self._stops.insert(at, stop)
        self._values.insert(at, value)


class Use(NamedTuple):  # there are many: a frozen dataclass takes three times as long to make
    """One thing that touches memory: fact number `at` of the trace, the `number`-th of its agent."""

    agent: int
    number: int
    at: int


@dataclass
class Cell:
    """What is known of some bytes: the last write, and the last read of each agent since."""

    write: Use | None = None
    reads: dict[int, Use] = field(default_factory=dict)

    def copy(self) -> "Cell":
        return Cell(self.write, dict(self.reads))


@dataclass(frozen=True)
class Race:
    """`late` is not put behind `early`. Facts of the trace; `mark`: where the run was; `times`: of the same two lines."""

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
        return f"{where}{self.kind}: {tell(self.early)}, then {tell(self.late)}, nothing between them ({bytes_}{times})"


def tell(fact: Fact) -> str:
    match fact:
        case Launch(stream=stream, name=name, where=at):
            return f"{name} on stream {stream}" + (f" ({at})" if at else "")
        case Comm(comm=comm, kind=kind, where=at):
            return f"{kind} of {comm}" + (f" ({at})" if at else "")
        case HostAccess(name=name, where=at):
            return f"the host's {name}" + (f" ({at})" if at else "")
        case Alloc(stream=stream):
            return f"a block is given out on stream {stream}"
        case Free():
            return "its last reference went"
    return str(fact)


def _merge(into: Clock, other: Clock) -> None:
    into.extend([0] * (len(other) - len(into)))
    for agent, number in enumerate(other):
        if number > into[agent]:
            into[agent] = number


def _over(use: Use, clock: Clock) -> bool:
    return use.agent < len(clock) and clock[use.agent] >= use.number


@dataclass
class _Block:
    alloc: Alloc | None
    cells: Intervals[Cell]
    freed: int | None = None


class _Reader:
    def __init__(self, trace: Sequence[Fact]):
        self.trace = trace
        self.agents: dict[Stream | None, int] = {None: HOST}  # None: the host
        self.clocks: list[Clock] = [[0]]  # by agent: what is over before its next thing; its own number included
        self.host_of: list[int] = [0]  # the host's waits that an agent's clock has already
        self.host_waits = 0
        self.events: dict[int, Clock] = {}
        self.comms: dict[int, Clock] = {}
        self.blocks: dict[int, _Block] = {}
        # freed on a stream before these uses of it were over there
        self.idle: dict[Stream, list[tuple[Use, Span]]] = {}
        self.found: dict[tuple[str, str, str], Race] = {}
        self.mark = ""

    def read(self) -> list[Race]:
        for at, fact in enumerate(self.trace):
            self._note(at, fact)
        return list(self.found.values())

    def _agent(self, stream: Stream | None) -> int:
        """With all that the host knows: what it issues from here on comes after that."""
        agent = self.agents.get(stream)
        if agent is None:
            agent = self.agents[stream] = len(self.clocks)
            self.clocks.append([])
            self.host_of.append(-1)
        if self.host_of[agent] != self.host_waits:
            _merge(self.clocks[agent], self.clocks[HOST])
            self.host_of[agent] = self.host_waits
        return agent

    def _next(self, agent: int) -> int:
        clock = self.clocks[agent]
        clock.extend([0] * (agent + 1 - len(clock)))
        clock[agent] += 1
        return clock[agent]

    def _host_knows(self, clock: Clock) -> None:
        _merge(self.clocks[HOST], clock)
        self.host_waits = self.host_of[HOST] = self.host_waits + 1

    def _note(self, at: int, fact: Fact) -> None:
        match fact:  # what there is most of first
            case Launch():
                self._touch(at, self._agent(fact.stream), fact.reads, fact.writes)
            case Alloc():
                self._alloc(at, fact)
            case Free():
                self._free(at, fact)
            case Comm():
                agent = self._agent(fact.stream)
                _merge(self.clocks[agent], self.clocks[self._agent(fact.after)])
                self._touch(at, agent, fact.reads, _written(fact))
                self.comms[fact.number] = list(self.clocks[agent])
            case CommWait():
                _merge(self.clocks[self._agent(fact.stream)], self.comms[fact.number])
            case CommDone():
                self._host_knows(self.comms[fact.number])
            case Record():
                self.events[fact.event] = list(self.clocks[self._agent(fact.stream)])
            case Wait() if fact.event in self.events:  # CUDA: one that was never recorded waits for nothing
                _merge(self.clocks[self._agent(fact.stream)], self.events[fact.event])
            case HostWait(event=None, stream=None):
                for clock in self.clocks[1:]:
                    self._host_knows(clock)
            case HostWait(event=None):
                self._host_knows(self.clocks[self._agent(fact.stream)])
            case HostWait(event=int(event)) if event in self.events:
                self._host_knows(self.events[event])
            case HostAccess():
                self._touch(at, HOST, fact.reads, fact.writes)
                self._host_knows([])
            case Mark():
                self.mark = fact.name

    def _block(self, memory: int) -> _Block:
        """Of memory that was there before the trace began, too."""
        found = self.blocks.get(memory)
        if found is None:
            found = self.blocks[memory] = _Block(None, Intervals(Cell, Cell.copy))
        return found

    def _alloc(self, at: int, fact: Alloc) -> None:
        block = self.blocks[fact.memory] = _Block(fact, Intervals(Cell, Cell.copy))
        if fact.side == "card":
            agent = self._agent(fact.stream)
            clock = self.clocks[agent]
            for use, span in self.idle.pop(fact.stream, []):
                if not _over(use, clock):
                    self._race("freed in use", span, use, at)
            if agent < len(clock) and clock[agent]:
                for cell in block.cells.within(0, fact.size):
                    cell.write = Use(agent, clock[agent], at)

    def _touch(self, at: int, agent: int, reads: Sequence[Span], writes: Sequence[Span]) -> None:
        use, clock = Use(agent, self._next(agent), at), self.clocks[agent]
        for span in reads:
            for cell in self._cells(at, span):
                if cell.write is not None and not _over(cell.write, clock):
                    self._race("use before ready", span, cell.write, at)
                cell.reads[agent] = use
        for span in writes:
            for cell in self._cells(at, span):
                if cell.write is not None and not _over(cell.write, clock):
                    kind = "two writes" if isinstance(self.trace[cell.write.at], Launch | Comm) else "use before ready"
                    self._race(kind, span, cell.write, at)
                for read in cell.reads.values():
                    if not _over(read, clock):
                        self._race("write before the reads are done", span, read, at)
            self._block(span.memory).cells.fill(span.start, span.stop, Cell(use))

    def _cells(self, at: int, span: Span) -> Iterator[Cell]:
        block = self._block(span.memory)
        if block.freed is not None:
            self._race("used after free", span, Use(HOST, 0, block.freed), at)
        return block.cells.within(span.start, span.stop)

    def _free(self, at: int, fact: Free) -> None:
        block = self.blocks.get(fact.memory)
        if block is None:
            return
        block.freed = at
        alloc = block.alloc or Alloc(fact.memory, "card", 0)
        clock = list(self.clocks[HOST])
        if alloc.side == "card":
            _merge(clock, self.clocks[self._agent(alloc.stream)])
        uses = (use for cell in block.cells.all() for use in (cell.write, *cell.reads.values()) if use is not None)
        in_use = [(use, Span(fact.memory, 0, alloc.size)) for use in uses if not _over(use, clock)]
        if alloc.side == "card":
            self.idle.setdefault(alloc.stream, []).extend(in_use)
        elif alloc.side == "host":  # of pinned memory the allocator waits by itself
            for use, span in in_use:
                self._race("freed in use", span, use, at)

    def _race(self, kind: str, span: Span, early: Use, at: int) -> None:
        first, second = self.trace[early.at], self.trace[at]
        key = kind, tell(first), tell(second)
        times = self.found[key].times + 1 if key in self.found else 1
        known = self.found.get(key) or Race(kind, span, first, second, self.mark)
        self.found[key] = Race(known.kind, known.span, known.early, known.late, known.mark, times)


def _written(fact: Comm) -> Sequence[Span]:
    """An all-gather in place leaves its own part as it is."""
    if "gather" not in fact.kind:
        return fact.writes
    parts = list(fact.writes)
    for sent in fact.reads:
        parts = [rest for part in parts for rest in (_without(part, sent) if part.meets(sent) else [part])]
    return parts


def _without(part: Span, hole: Span) -> list[Span]:
    ends = [(part.start, hole.start), (hole.stop, part.stop)]
    return [Span(part.memory, start, stop) for start, stop in ends if start < stop]


def races(trace: Sequence[Fact]) -> list[Race]:
    """In the order in which they were found; one of each pair of lines. A race is found if there is any; of bytes that
    have one already, later ones may be hidden behind it."""
    return _Reader(trace).read()
