"""The checker of order between ranks: each rule by hand."""

import itertools
from dataclasses import replace

import pytest

from card.simulator.queues import Traces, disorder, eager, stuck, unequal
from card.simulator.trace import Comm


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


def test_ranks_that_do_the_same_are_in_order() -> None:
    program = Program(3)
    program.collective("world", 0, 1, 2)
    program.message(0, 1), program.message(1, 0)
    program.collective("world", 0, 1, 2)
    assert disorder(program.traces) == [] == stuck(eager(program.traces))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (dict(kind="broadcast", op=""), "all_reduce(SUM) of 4 float32 (x.py:1), rank 1 does broadcast of 4"),
        (dict(dtype="bfloat16"), "rank 1 does all_reduce(SUM) of 4 bfloat16"),
    ],
)
def test_an_operation_that_differs_on_one_rank_is_named(change: dict[str, object], words: str) -> None:
    program = Program(2)
    program.collective("tp", 0, 1)
    program.collective("tp", 0, 1)
    program.traces[1][1] = replace(program.traces[1][1], **change)  # type: ignore[arg-type]
    [text] = disorder(program.traces)
    assert text.startswith("tp, operation 1: rank 0 does ") and words in text


def test_an_operation_that_one_rank_leaves_out_is_named() -> None:
    program = Program(2)
    program.collective("dp", 0, 1)
    program.collective("dp", 0, 1, count=7)
    del program.traces[1][1:]
    want = "dp: rank 1 ends after 1 operations; then rank 0 does all_reduce(SUM) of 7 float32 (x.py:1)"
    assert disorder(program.traces) == [want]
    assert disorder({0: program.traces[0]}) == ["dp: there is no trace of rank [1]"]


def test_messages_that_do_not_meet_are_named() -> None:
    both, sizes, alone = Program(2), Program(2), Program(2)
    both.half(0, "send", 1), both.half(1, "send", 0)
    assert "rank 0 does send of 4 float32 to 1 (x.py:2), rank 1 does send of 4 float32 to 0" in disorder(both.traces)[0]
    sizes.half(0, "send", 1), sizes.half(1, "recv", 0, count=9)
    assert "rank 1 does recv of 9 float32 from 0" in disorder(sizes.traces)[0]
    alone.half(0, "send", 1)
    assert "rank 1 ends after 0 messages; then rank 0 does send" in disorder(alone.traces)[0]


def _equal_and_stuck(traces: Traces) -> list[str]:
    assert unequal(traces) == []
    return disorder(traces)


def test_two_communicators_crosswise_hang() -> None:
    """Both match; but on each rank the second of the two comes after the first."""
    program = Program(2)
    for comm in ("world", "tp"):  # so both are made
        program.collective(comm, 0, 1)
    for rank, order in ((0, ("tp", "world")), (1, ("world", "tp"))):
        for comm in order:
            program.share(rank, comm, 0, 1, count=8)
    first, second = _equal_and_stuck(program.traces)
    assert first == "rank 0 waits for ranks {1} at all_reduce(SUM) of 8 float32 on tp (x.py:1)"
    assert second == "rank 1 waits for ranks {0} at all_reduce(SUM) of 8 float32 on world (x.py:1)"


def test_answers_before_questions_hang() -> None:
    program = Program(2)
    program.half(0, "recv", 1, "answers"), program.half(0, "send", 1, "questions")
    program.half(1, "recv", 0, "questions"), program.half(1, "send", 0, "answers")
    assert _equal_and_stuck(program.traces)[0].startswith("rank 0 waits for ranks {1} at recv of 4 float32 from 1 on")


def test_hosts_that_make_communicators_in_different_orders_hang() -> None:
    program = Program(3)
    program.half(0, "send", 1), program.half(0, "send", 2)
    program.half(1, "send", 2), program.half(1, "recv", 0)
    program.half(2, "recv", 0), program.half(2, "recv", 1)
    texts = _equal_and_stuck(program.traces)
    assert texts[0] == "rank 0 waits for ranks {1} at send of 4 float32 to 1 on pp 0-1 (x.py:2)"
