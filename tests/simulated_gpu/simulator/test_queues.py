"""The deadlock detector: each of its rules on a small example."""

import itertools
from dataclasses import replace

import pytest

from simulated_gpu.simulator.communicator import describe
from simulated_gpu.simulator.queues import eager, stuck
from simulated_gpu.simulator.trace import Comm


class Program:
    """A program of several ranks, written as one sequence of operations that is split into a trace per rank."""

    def __init__(self, ranks: int):
        self.traces: dict[int, list[Comm]] = {rank: [] for rank in range(ranks)}
        self._numbers = itertools.count()

    def issue_collective(self, rank: int, comm: str, *ranks: int, count: int = 4) -> None:
        """Issue a collective on one rank."""
        number = next(self._numbers)
        fact = Comm(comm, ranks, "all_reduce", "float32", count, None, number, 0, op="SUM", where="x.py:1")
        self.traces[rank].append(fact)

    def collective(self, comm: str, *ranks: int, count: int = 4) -> None:
        for rank in ranks:
            self.issue_collective(rank, comm, *ranks, count=count)

    def issue_message(self, rank: int, kind: str, peer: int, comm: str = "pp", count: int = 4) -> None:
        low, high = sorted((rank, peer))
        number, name = next(self._numbers), f"{comm} {low}-{high}"
        self.traces[rank].append(Comm(name, (low, high), kind, "float32", count, peer, number, 0, where="x.py:2"))

    def message(self, source: int, target: int) -> None:
        self.issue_message(source, "send", target), self.issue_message(target, "recv", source)


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
    expected = "rank 0 waits for ranks {1} at all_reduce(SUM) of 7 float32 on dp (x.py:1)"
    assert stuck(program.traces) == [expected]
    for change in (dict(kind="broadcast", op=""), dict(dtype="bfloat16")):
        other = replace(last, **change)  # type: ignore[arg-type]
        unchanged_line, changed_line = stuck({0: first, 1: [*program.traces[1], other]})
        assert unchanged_line == expected and changed_line.startswith(
            "rank 1 waits for ranks {0} at " + describe(other)
        )
    assert stuck({0: first[:1]})[0].startswith("rank 0 waits for ranks {1}")  # rank 1 has no trace


@pytest.mark.parametrize("ways", [(("send", 4), ("send", 4)), (("send", 4), ("recv", 9)), (("send", 4),)], ids=str)
def test_unmatched_messages_are_named(ways: tuple[tuple[str, int], ...]) -> None:
    program = Program(2)
    for rank, (kind, count) in enumerate(ways):
        program.issue_message(rank, kind, 1 - rank, count=count)
    texts = stuck(program.traces)
    assert texts[0] == "rank 0 waits for ranks {1} at send of 4 float32 to 1 on pp 0-1 (x.py:2)"
    assert len(texts) == len(ways)


def test_crossed_communicators_deadlock() -> None:
    """Both collectives match, but the ranks issue them in opposite orders."""
    program = Program(2)
    for comm in ("world", "tp"):  # this creates both communicators
        program.collective(comm, 0, 1)
    for rank, order in ((0, ("tp", "world")), (1, ("world", "tp"))):
        for comm in order:
            program.issue_collective(rank, comm, 0, 1, count=8)
    first, second = stuck(program.traces)
    assert first == "rank 0 waits for ranks {1} at all_reduce(SUM) of 8 float32 on tp (x.py:1)"
    assert second == "rank 1 waits for ranks {0} at all_reduce(SUM) of 8 float32 on world (x.py:1)"


def test_receive_before_send_deadlocks() -> None:
    program = Program(2)
    program.issue_message(0, "recv", 1, "answers"), program.issue_message(0, "send", 1, "questions")
    program.issue_message(1, "recv", 0, "questions"), program.issue_message(1, "send", 0, "answers")
    assert stuck(program.traces)[0].startswith("rank 0 waits for ranks {1} at recv of 4 float32 from 1 on")


def test_communicators_created_in_different_orders_deadlock() -> None:
    program = Program(3)
    program.issue_message(0, "send", 1), program.issue_message(0, "send", 2)
    program.issue_message(1, "send", 2), program.issue_message(1, "recv", 0)
    program.issue_message(2, "recv", 0), program.issue_message(2, "recv", 1)
    assert stuck(program.traces)[0] == "rank 0 waits for ranks {1} at send of 4 float32 to 1 on pp 0-1 (x.py:2)"
