"""The checker of order between ranks: each rule by hand."""

import itertools
from dataclasses import replace

import pytest

from simulated_gpu.simulator.communicator import describe
from simulated_gpu.simulator.queues import eager, stuck
from simulated_gpu.simulator.trace import Comm


class Program:
    """What ranks do together, written as one sequence of events: each rank's trace is what concerns it."""

    def __init__(self, ranks: int):
        self.traces: dict[int, list[Comm]] = {rank: [] for rank in range(ranks)}
        self._numbers = itertools.count()

    def share(self, rank: int, comm: str, *ranks: int, count: int = 4) -> None:
        """One rank's part of a collective."""
        number = next(self._numbers)
        fact = Comm(comm, ranks, "all_reduce", "float32", count, None, number, 0, op="SUM", where="x.py:1")
        self.traces[rank].append(fact)

    def collective(self, comm: str, *ranks: int, count: int = 4) -> None:
        for rank in ranks:
            self.share(rank, comm, *ranks, count=count)

    def half(self, rank: int, kind: str, peer: int, comm: str = "pp", count: int = 4) -> None:
        low, high = sorted((rank, peer))
        number, name = next(self._numbers), f"{comm} {low}-{high}"
        self.traces[rank].append(Comm(name, (low, high), kind, "float32", count, peer, number, 0, where="x.py:2"))

    def message(self, source: int, target: int) -> None:
        self.half(source, "send", target), self.half(target, "recv", source)


def test_equal_ranks_finish() -> None:
    program = Program(3)
    program.collective("world", 0, 1, 2)
    program.message(0, 1), program.message(1, 0)
    program.collective("world", 0, 1, 2)
    assert stuck(program.traces) == [] == stuck(eager(program.traces))


def test_missing_operation_is_named() -> None:
    program = Program(2)
    program.collective("dp", 0, 1)
    program.collective("dp", 0, 1, count=7)
    last, first = program.traces[1].pop(), program.traces[0]
    want = "rank 0 waits for ranks {1} at all_reduce(SUM) of 7 float32 on dp (x.py:1)"
    assert stuck(program.traces) == [want]
    for change in (dict(kind="broadcast", op=""), dict(dtype="bfloat16")):
        other = replace(last, **change)  # type: ignore[arg-type]
        mine, theirs = stuck({0: first, 1: [*program.traces[1], other]})
        assert mine == want and theirs.startswith("rank 1 waits for ranks {0} at " + describe(other))
    assert stuck({0: first[:1]})[0].startswith("rank 0 waits for ranks {1}")  # there is no trace of it


@pytest.mark.parametrize("ways", [(("send", 4), ("send", 4)), (("send", 4), ("recv", 9)), (("send", 4),)], ids=str)
def test_unmatched_messages_are_named(ways: tuple[tuple[str, int], ...]) -> None:
    program = Program(2)
    for rank, (kind, count) in enumerate(ways):
        program.half(rank, kind, 1 - rank, count=count)
    texts = stuck(program.traces)
    assert texts[0] == "rank 0 waits for ranks {1} at send of 4 float32 to 1 on pp 0-1 (x.py:2)"
    assert len(texts) == len(ways)


def test_crossed_communicators_deadlock() -> None:
    """Both match; but on each rank the second of the two comes after the first."""
    program = Program(2)
    for comm in ("world", "tp"):  # so both are made
        program.collective(comm, 0, 1)
    for rank, order in ((0, ("tp", "world")), (1, ("world", "tp"))):
        for comm in order:
            program.share(rank, comm, 0, 1, count=8)
    first, second = stuck(program.traces)
    assert first == "rank 0 waits for ranks {1} at all_reduce(SUM) of 8 float32 on tp (x.py:1)"
    assert second == "rank 1 waits for ranks {0} at all_reduce(SUM) of 8 float32 on world (x.py:1)"


def test_receive_before_send_deadlocks() -> None:
    program = Program(2)
    program.half(0, "recv", 1, "answers"), program.half(0, "send", 1, "questions")
    program.half(1, "recv", 0, "questions"), program.half(1, "send", 0, "answers")
    assert stuck(program.traces)[0].startswith("rank 0 waits for ranks {1} at recv of 4 float32 from 1 on")


def test_communicators_created_in_different_orders_deadlock() -> None:
    program = Program(3)
    program.half(0, "send", 1), program.half(0, "send", 2)
    program.half(1, "send", 2), program.half(1, "recv", 0)
    program.half(2, "recv", 0), program.half(2, "recv", 1)
    assert stuck(program.traces)[0] == "rank 0 waits for ranks {1} at send of 4 float32 to 1 on pp 0-1 (x.py:2)"
