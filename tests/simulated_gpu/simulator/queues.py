"""Whether the ranks of a run, each with its own queues, can all come to their end. Pure: reads traces (trace.py).

    stuck(traces)            who cannot end, in words; [] where all do

Ranks of a communicator that do different things meet nowhere; and operations that match can still wait for each other
crosswise. Asked of the strictest card there could be: an item of its queues begins when all before it are done, its
host waits for each operation to be done (as a card's allocator does when memory runs out, and NCCL when it connects
ranks), and making a communicator, at its first operation, is a meeting of the hosts of all its ranks. Each rule of any
other card is one of these. So a rank has one operation at a time, which is done when it has begun on all its ranks; a
send and its receive are two such. Nothing in that run is a choice: what can begin once can begin ever after, so one
simulation is a proof.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from simulated_gpu.simulator.communicator import describe
from simulated_gpu.simulator.trace import Comm, Fact

Traces = Mapping[int, Sequence[Fact]]
MESSAGES = ("send", "recv")


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
    """Operations, each with what is equal on all ranks that it meets: of collectives the communicator and all that they
    are, of messages who sends how much to whom, and the place in their order."""
    counts = defaultdict[object, int](int)
    for fact in facts:
        if type(fact) is Comm:
            ends = {"send": (rank, fact.peer), "recv": (fact.peer, rank)}.get(fact.kind)
            counts[fact.comm, ends] += 1
            what = (fact.count, fact.dtype) if ends else describe(fact)
            yield fact, (fact.comm, ends, what, counts[fact.comm, ends])


def _meets(rank: int, fact: Comm) -> set[int | None]:
    return {rank, fact.peer} if fact.kind in MESSAGES else {*fact.ranks}


def eager(traces: Traces) -> dict[int, list[Fact]]:
    """The same run in groups with a device_id: messages of a group queue with its collectives."""

    def moved(fact: Fact) -> Fact:
        if type(fact) is not Comm or fact.kind not in MESSAGES:
            return fact
        return replace(fact, comm=fact.comm.rpartition(" ")[0])

    return {rank: [moved(fact) for fact in facts] for rank, facts in traces.items()}
