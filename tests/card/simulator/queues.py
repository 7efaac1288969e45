"""Whether the ranks of a run, each with its own queues, can all come to their end. Pure: reads traces (card/simulator/trace.py).

    disorder(traces)            what is wrong, in words; [] where all ranks fit together
    hangs(traces, model)        what waits for what, if all ranks run on cards of that model

Two questions. Do the ranks of each communicator issue the same operations (`unequal`)? And, since operations that match can
still wait for each other crosswise through other queues, does a run of all cards together come to an end? Nothing in
that run is a choice: what can begin once can begin ever after. So whatever order the events are tried in, the same ones
happen, and one simulation is a proof.

    host        issues its facts in order. It stops at a HostWait, and where a communicator is used for the first time:
                making one is a meeting of the hosts of all its ranks (of a pair: of both)
    item        what the host gave to the card. Begins when the item before it on its stream is done, and, for Comm,
                what its stream was told to wait for (`after`); a Wait is an item, too
    Comm        done when it has begun on all its ranks; a send and its receive are two such. Having begun it holds up
                nobody but those behind it on its own stream

In a group that was given a device_id messages queue on its only communicator: `eager` makes such a run of another.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from card.simulator.communicator import describe
from card.simulator.trace import DEFAULT, Comm, CommWait, Fact, HostRead, HostWait, Launch, Record, Stream, Wait

Traces = Mapping[int, Sequence[Fact]]
MESSAGES = ("send", "recv")


@dataclass(frozen=True)
class Model:
    """How a card takes what it is given.

    queue   "one"     a single hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1): items begin in the order of issue
            "many"    a queue for each stream
            "serial"  an item begins when all before it are done: no card is so slow
    host    "meets"   waits for the others where a communicator is made, at its first operation
            "free"    never: communicators were made with their groups (`eager`)
            "waits"   for each operation to be done. So it may wait for its card anywhere: what a card's allocator does
                      when memory runs out, and NCCL when it connects ranks for an algorithm used for the first time
    """

    queue: Literal["one", "many", "serial"] = "one"
    host: Literal["meets", "free", "waits"] = "meets"


STRICTEST = Model("serial", "waits")  # each rule of the others is one of its rules: who passes it passes all


def disorder(traces: Traces) -> list[str]:
    """Everything that is wrong on cards; [] where nothing is."""
    found = unequal(traces)
    if found or not hangs(traces, STRICTEST):
        return found
    stuck = hangs(traces, Model("one"))  # where many queues hang one does, too
    when = "with one hardware queue" if stuck and not hangs(traces, Model("many")) else "on any card"
    return [f"{when}: {text}" for text in stuck]


# ---- the same operations on all ranks


def unequal(traces: Traces) -> list[str]:
    """The first difference on each communicator."""
    found = []
    operations = {rank: [f for f in facts if isinstance(f, Comm)] for rank, facts in traces.items()}
    for name, ranks in sorted(_communicators(operations).items()):
        absent = [r for r in ranks if r not in traces]
        if absent:
            found.append(f"{name}: there is no trace of rank {absent}")
            continue
        mine = {r: [f for f in operations[r] if f.comm == name] for r in ranks}
        rows = {r: [f for f in facts if f.kind not in MESSAGES] for r, facts in mine.items()}
        found += [text for r in ranks[1:] for text in _unequal_rows(name, (ranks[0], rows[ranks[0]]), (r, rows[r]))]
        for i, a in enumerate(ranks):
            for b in ranks[i + 1 :]:
                found += _unequal_messages(name, (a, _with(mine[a], b)), (b, _with(mine[b], a)))
    return found


def _communicators(operations: Mapping[int, Sequence[Comm]]) -> dict[str, tuple[int, ...]]:
    return {f.comm: f.ranks for facts in operations.values() for f in facts}


def _with(facts: Iterable[Comm], peer: int) -> list[Comm]:
    return [f for f in facts if f.kind in MESSAGES and f.peer == peer]


def _unequal_rows(name: str, first: tuple[int, list[Comm]], other: tuple[int, list[Comm]]) -> list[str]:
    for i, (a, b) in enumerate(zip(first[1], other[1], strict=False)):
        if describe(a) != describe(b):
            return [f"{name}, operation {i}: {_does(first[0], a)}, {_does(other[0], b)}"]
    return _unequal_lengths(name, "operation", first, other)


def _unequal_messages(name: str, first: tuple[int, list[Comm]], other: tuple[int, list[Comm]]) -> list[str]:
    for i, (a, b) in enumerate(zip(first[1], other[1], strict=False)):
        if {a.kind, b.kind} != set(MESSAGES) or (a.dtype, a.count) != (b.dtype, b.count):
            return [f"{name}, message {i}: {_does(first[0], a)}, {_does(other[0], b)}"]
    return _unequal_lengths(name, "message", first, other)


def _unequal_lengths(name: str, what: str, *rows: tuple[int, list[Comm]]) -> list[str]:
    (short, few), (long, many) = sorted(rows, key=lambda row: len(row[1]))
    if len(few) == len(many):
        return []
    return [f"{name}: rank {short} ends after {len(few)} {what}s; then {_does(long, many[len(few)])}"]


def _does(rank: int, fact: Comm) -> str:
    return f"rank {rank} does {describe(fact)} ({fact.where})"


# ---- all cards together


@dataclass
class Item:
    rank: int
    stream: Stream
    text: str
    after: "tuple[Item, ...]" = ()
    key: object = None  # of a Comm: equal on all ranks that it meets
    meets: frozenset[int] = frozenset()
    begun: bool = False
    done: bool = False


def hangs(traces: Traces, model: Model = Model()) -> list[str]:
    """One line for each rank that cannot end; [] where all do."""
    if model == STRICTEST and all_end(traces):
        return []
    return told(traces, model)


def told(traces: Traces, model: Model) -> list[str]:
    """As `hangs`, with everything that is told of a card, item by item."""
    run = _Run(traces, model)
    run.go()
    return run.report()


def all_end(traces: Traces) -> bool:
    """Whether nothing hangs under STRICTEST. There a host waits for each operation, so whatever else it issues finds all
    before it done, begins and is done at once: only operations count, of which each rank has one at a time."""
    rows = {rank: iter([fact for fact in facts if type(fact) is Comm]) for rank, facts in traces.items()}
    met: dict[str, set[int]] = {}
    begun: dict[object, set[int]] = {}
    counts: dict[object, int] = {}
    before: dict[str, list[tuple[int, Comm, object]]] = {}  # a communicator -> what waits for its ranks to come to it
    within: dict[object, list[tuple[int, Comm]]] = {}  # an operation -> what has begun and waits for the others
    ready, ended = list(rows), 0
    while ready:
        rank = ready.pop()
        fact = next(rows[rank], None)
        if fact is None:
            ended += 1
            continue
        order = _order(rank, fact)
        number = counts[rank, order] = counts.get((rank, order), -1) + 1
        met.setdefault(fact.comm, set()).add(rank)
        come = [*before.pop(fact.comm, ()), (rank, fact, (order, number))]
        if early := [item for item in come if not met[fact.comm].issuperset(item[1].ranks)]:
            before[fact.comm] = early
        for one, own, key in come if not early else [item for item in come if item not in early]:
            begun.setdefault(key, set()).add(one)
            waiting = [*within.pop(key, ()), (one, own)]
            ready += [r for r, f in waiting if _meets(r, f) <= begun[key]]
            if left := [(r, f) for r, f in waiting if not _meets(r, f) <= begun[key]]:
                within[key] = left
    return ended == len(rows)


def _order(rank: int, fact: Comm) -> object:
    """In what an operation has its place: of collectives the communicator, of messages those from one rank to another."""
    if fact.kind not in MESSAGES:
        return fact.comm
    return (fact.comm, rank, fact.peer) if fact.kind == "send" else (fact.comm, fact.peer, rank)


def _meets(rank: int, fact: Comm) -> set[int | None]:
    return {rank, fact.peer} if fact.kind in MESSAGES else {*fact.ranks}


class _Run:
    """Hosts and cards of all ranks.

    begun   an operation -> ranks on which it has begun
    met     a communicator -> ranks whose host has come to it
    """

    def __init__(self, traces: Traces, model: Model):
        self.model = model
        self.begun: dict[object, set[int]] = {}
        self.met: dict[str, set[int]] = {}
        self.ranks = [_Rank(rank, list(facts), self) for rank, facts in sorted(traces.items())]

    def go(self) -> None:
        moved = True
        while moved:
            moved = False
            for rank in self.ranks:
                while rank.step_host() or rank.step_card():
                    moved = True

    def report(self) -> list[str]:
        return [f"rank {rank.rank} {rank.why()}" for rank in self.ranks if not rank.ended()]


@dataclass
class _Rank:
    rank: int
    facts: list[Fact]
    run: _Run
    place: int = 0
    waits: Item | None = None  # what the host waits for, on its own card
    queues: dict[Stream, list[Item]] = field(default_factory=dict)  # what has not begun, in order
    open: list[Item] = field(default_factory=list)  # begun, not done
    last: dict[Stream, Item] = field(default_factory=dict)
    events: dict[int, Item] = field(default_factory=dict)
    works: dict[int, Item] = field(default_factory=dict)
    counts: dict[object, int] = field(default_factory=dict)
    coming: tuple[Comm, Item] | None = None  # an operation at which the host has come, and may have to meet others

    def ended(self) -> bool:
        return self.place == len(self.facts) and not self.open and not any(self.queues.values())

    def step_host(self) -> bool:
        """Issue one fact; False where the host has to wait or has come to its end."""
        if self.place == len(self.facts) or (self.waits is not None and not self.waits.done):
            return False
        self.waits = None
        fact = self.facts[self.place]
        if isinstance(fact, Comm):
            if self.coming is None:
                self.coming = (fact, self._operation(fact))
            if self._missing():
                return False
            self.works[fact.number] = item = self.coming[1]
            self._issue(item)
            self.coming, self.waits = None, item if self.run.model.host == "waits" else None
        elif isinstance(fact, Launch):
            self._issue(Item(self.rank, fact.stream, f"{fact.name} ({fact.where})"))
        elif isinstance(fact, Record) and fact.stream in self.last:
            self.events[fact.event] = self.last[fact.stream]
        elif isinstance(fact, Record):
            self.events.pop(fact.event, None)
        elif isinstance(fact, Wait | CommWait):
            of = self.events.get(fact.event) if isinstance(fact, Wait) else self.works[fact.number]
            if of is not None:
                self._issue(Item(self.rank, fact.stream, f"stream {fact.stream}", (of,)))
        elif isinstance(fact, HostWait | HostRead):
            self.waits = self._awaited(fact)
        self.place += 1
        return True

    def _operation(self, fact: Comm) -> Item:
        order = _order(self.rank, fact)
        number = self.counts[order] = self.counts.get(order, -1) + 1
        meets = frozenset(_meets(self.rank, fact))
        before = self.last.get(fact.after)
        item = Item(self.rank, fact.comm, f"{describe(fact)} on {fact.comm} ({fact.where})")
        item.after, item.key, item.meets = (before,) if before else (), (order, number), meets  # type: ignore[assignment]
        self.run.met.setdefault(fact.comm, set()).add(self.rank)
        return item

    def _missing(self) -> list[int]:
        """Ranks whose host must come before this one goes on."""
        assert self.coming is not None
        fact = self.coming[0]
        return [] if self.run.model.host == "free" else sorted(set(fact.ranks) - self.run.met[fact.comm])

    def _issue(self, item: Item) -> None:
        before = self.last.get(item.stream)
        if before is not None and not before.done:
            item.after += (before,)
        self.last[item.stream] = item
        shared = self.run.model.queue != "many"
        self.queues.setdefault(DEFAULT if shared else item.stream, []).append(item)

    def _awaited(self, fact: HostWait | HostRead) -> Item | None:
        if isinstance(fact, HostRead):
            return self.last.get(DEFAULT)
        if fact.event is not None:
            return self.events.get(fact.event)
        if fact.stream is not None:
            return self.last.get(fact.stream)
        everything = tuple(item for item in self.last.values() if not item.done)
        return Item(self.rank, "host", "its whole card", everything) if everything else None

    def step_card(self) -> bool:
        """Begin and end what can."""
        moved = False
        for queue in self.queues.values():
            while queue and self._can_begin(queue[0]):
                item = queue.pop(0)
                item.begun = moved = True
                if item.key is None:
                    item.done = True
                else:
                    self.run.begun.setdefault(item.key, set()).add(self.rank)
                    self.open.append(item)
        for item in [item for item in self.open if item.meets <= self.run.begun[item.key]]:
            item.done = moved = True
            self.open.remove(item)
        if self.waits is not None and self.waits.stream == "host" and all(item.done for item in self.waits.after):
            self.waits.done = True
        return moved

    def _can_begin(self, item: Item) -> bool:
        return all(before.done for before in item.after) and not (self.run.model.queue == "serial" and self.open)

    # ---- in words

    def why(self) -> str:
        if self.coming is not None:
            return f"waits on its host for rank {self._missing()} to come to {self.coming[1].text}"
        if self.waits is not None and not self.waits.done:
            return f"waits on its host for {self._chain(self.waits)}"
        heads = [queue[0] for queue in self.queues.values() if queue] or self.open
        return f"waits on its card for {self._chain(heads[0])}"

    def _chain(self, item: Item) -> str:
        """Down to what is open, or to what holds the queue."""
        text = item.text
        for _ in range(20):
            if item.begun:
                lacks = sorted(item.meets - self.run.begun.get(item.key, set()))
                return f"{text}, which has begun here and not on rank {lacks}"
            nearer, how = [before for before in item.after if not before.done], "which waits for"
            if not nearer:
                nearer, how = self._ahead(item), "held up by"
            if not nearer:
                return text
            item = nearer[0]
            text += f", {how} {item.text}"
        return text

    def _ahead(self, item: Item) -> list[Item]:
        """What holds the queue that `item` is in."""
        queue = next((queue for queue in self.queues.values() if item in queue), [item])
        return [queue[0]] if queue[0] is not item else [other for other in self.open if other is not item]


def eager(traces: Traces) -> dict[int, list[Fact]]:
    """The same run in groups with a device_id: messages of a group queue with its collectives. For hosts that are free."""

    def moved(fact: Fact) -> Fact:
        if type(fact) is not Comm or fact.kind not in MESSAGES:
            return fact
        return replace(fact, comm=fact.comm.rpartition(" ")[0])

    return {rank: [moved(fact) for fact in facts] for rank, facts in traces.items()}
