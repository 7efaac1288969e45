"""Whether the ranks of a run, each with its own queues, can all come to their end. Pure: reads traces (trace.py).

    disorder(traces)            what is wrong, in words; [] where all ranks fit together

Do the ranks of each communicator issue the same operations (`unequal`)? And, since operations that match can still wait
for each other crosswise, does a run of all cards together come to an end (`stuck`)? Asked of the strictest card there
could be: an item of its queues begins when all before it are done, its host waits for each operation to be done (as a
card's allocator does when memory runs out, and NCCL when it connects ranks), and making a communicator, at its first
operation, is a meeting of the hosts of all its ranks. Each rule of any other card is one of these. So a rank has one
operation at a time, which is done when it has begun on all its ranks; a send and its receive are two such. Nothing in
that run is a choice: what can begin once can begin ever after, so one simulation is a proof.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from card.simulator.communicator import describe
from card.simulator.trace import Comm, Fact

Traces = Mapping[int, Sequence[Fact]]
MESSAGES = ("send", "recv")


def disorder(traces: Traces) -> list[str]:
    """Everything that is wrong on cards; [] where nothing is."""
    return unequal(traces) or stuck(traces)


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


def stuck(traces: Traces) -> list[str]:
    """One line for each rank that cannot end; [] where all do."""
    rows = {rank: [(fact, key) for fact, key in _numbered(rank, facts)] for rank, facts in traces.items()}
    met, begun, place = defaultdict[str, set[int]](set), defaultdict[object, set[int]](set), dict.fromkeys(rows, 0)

    def step(rank: int) -> bool:
        """Whether anything is new."""
        if place[rank] == len(rows[rank]):
            return False
        fact, key = rows[rank][place[rank]]
        news = rank not in met[fact.comm]
        met[fact.comm].add(rank)
        if met[fact.comm].issuperset(fact.ranks):
            news |= rank not in begun[key]
            begun[key].add(rank)
            if _meets(rank, fact) <= begun[key]:
                place[rank], news = place[rank] + 1, True
        return news

    moved = True
    while moved:
        moved = False
        for rank in rows:
            while step(rank):
                moved = True
    told = []
    for rank, at in place.items():
        if at < len(rows[rank]):
            fact, key = rows[rank][at]
            missing = {*fact.ranks} - met[fact.comm] or _meets(rank, fact) - begun[key]
            told.append(f"rank {rank} waits for ranks {missing} at {describe(fact)} on {fact.comm} ({fact.where})")
    return told


def _numbered(rank: int, facts: Sequence[Fact]) -> Iterable[tuple[Comm, object]]:
    """Operations, each with what is equal on all ranks that it meets: of collectives the communicator, of messages who
    sends to whom, and the place in their order."""
    counts = defaultdict[object, int](int)
    for fact in facts:
        if type(fact) is Comm:
            ends = {"send": (rank, fact.peer), "recv": (fact.peer, rank)}.get(fact.kind)
            counts[fact.comm, ends] += 1
            yield fact, (fact.comm, ends, counts[fact.comm, ends])


def _meets(rank: int, fact: Comm) -> set[int | None]:
    return {rank, fact.peer} if fact.kind in MESSAGES else {*fact.ranks}


def eager(traces: Traces) -> dict[int, list[Fact]]:
    """The same run in groups with a device_id: messages of a group queue with its collectives."""

    def moved(fact: Fact) -> Fact:
        if type(fact) is not Comm or fact.kind not in MESSAGES:
            return fact
        return replace(fact, comm=fact.comm.rpartition(" ")[0])

    return {rank: [moved(fact) for fact in facts] for rank, facts in traces.items()}
