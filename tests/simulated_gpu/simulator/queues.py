"""A proof that the ranks of a run, each with its own queues, can all finish. It only reads traces (trace.py).

    stuck(traces)            one line for each rank that cannot finish; [] if all do

Ranks of a communicator may issue operations that do not match, and matching operations may still wait for each other
in a cycle. The check assumes the strictest GPU possible: an item of a queue starts when all before it are done, the
host waits for each operation (as the allocator does when memory runs out, and NCCL when it connects ranks), and
creating a communicator, at its first operation, synchronizes the hosts of all its ranks. A real GPU waits for a subset
of these. So a rank has one operation at a time, which is done when it has started on all its ranks; a send and its
receive are two such operations. Nothing in that run is a choice: what can start once can always start later, so one
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
    """Return one line for each rank that cannot finish; [] if all do."""
    rows = {rank: [(fact, key) for fact, key in _numbered(rank, facts)] for rank, facts in traces.items()}
    joined, started, positions = (
        defaultdict[str, set[int]](set),
        defaultdict[object, set[int]](set),
        dict.fromkeys(rows, 0),
    )

    def step(rank: int) -> bool:
        """Advance one rank as far as it can go now, and return whether anything changed."""
        if positions[rank] == len(rows[rank]):
            return False
        fact, key = rows[rank][positions[rank]]
        progressed = rank not in joined[fact.comm]
        joined[fact.comm].add(rank)
        if joined[fact.comm].issuperset(fact.ranks):
            progressed |= rank not in started[key]
            started[key].add(rank)
            if _participants(rank, fact) <= started[key]:
                positions[rank], progressed = positions[rank] + 1, True
        return progressed

    any_progressed = True
    while any_progressed:
        any_progressed = False
        for rank in rows:
            while step(rank):
                any_progressed = True
    lines = []
    for rank, position in positions.items():
        if position < len(rows[rank]):
            fact, key = rows[rank][position]
            missing = {*fact.ranks} - joined[fact.comm] or _participants(rank, fact) - started[key]
            lines.append(f"rank {rank} waits for ranks {missing} at {describe(fact)} on {fact.comm} ({fact.where})")
    return lines


def _numbered(rank: int, facts: Sequence[Fact]) -> Iterable[tuple[Comm, object]]:
    """Yield the operations, each with a key that is equal on all its ranks.

    The key of a collective is its communicator and description; that of a message its ends and size. Both contain the
    position in their order.
    """
    counts = defaultdict[object, int](int)
    for fact in facts:
        if type(fact) is Comm:
            ends = {"send": (rank, fact.peer), "recv": (fact.peer, rank)}.get(fact.kind)
            counts[fact.comm, ends] += 1
            what = (fact.count, fact.dtype) if ends else describe(fact)
            yield fact, (fact.comm, ends, what, counts[fact.comm, ends])


def _participants(rank: int, fact: Comm) -> set[int | None]:
    return {rank, fact.peer} if fact.kind in MESSAGES else {*fact.ranks}


def eager(traces: Traces) -> dict[int, list[Fact]]:
    """Return the run as it is with groups that have a device_id: messages queue with the group's collectives."""

    def on_group_stream(fact: Fact) -> Fact:
        if type(fact) is not Comm or fact.kind not in MESSAGES:
            return fact
        return replace(fact, comm=fact.comm.rpartition(" ")[0])

    return {rank: [on_group_stream(fact) for fact in facts] for rank, facts in traces.items()}
