"""The race detector on small traces: the sequences of a trainer, without and with one wait removed."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from simulated_gpu.simulator.clocks import races
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
    Wait,
)


def comm(number: int, after: int | str = 0, reads: Sequence[Span] = (), writes: Sequence[Span] = (), name: str = "dp",
         kind: str = "all_reduce") -> Comm:  # fmt: skip
    return Comm(name, (0, 1), kind, "float32", 4, None, number, after, tuple(reads), tuple(writes))


# ---- sequences of a trainer in which each wait is needed

WEIGHTS, OWN, REST = Span(1, 0, 800), Span(1, 0, 400), Span(1, 400, 800)
GRADS, X, Y, PINNED = Span(2, 0, 800), Span(3, 0, 64), Span(4, 0, 64), Span(5, 0, 800)
ALLOCS: tuple[Fact, ...] = (Alloc(1, "gpu", 800), Alloc(2, "gpu", 800), Alloc(3, "gpu", 64), Alloc(4, "gpu", 64))
NEXT = Alloc(9, "gpu", 64)

SITUATIONS: dict[str, tuple[Fact, ...]] = {
    "a block is let go of after its reduction": (
        *ALLOCS, Launch(0, "round", (), (X,)), comm(1, 0, [X], [X]), CommWait(1, 0), Free(3), NEXT,
    ),
    "what was received is used, and let go of": (
        *ALLOCS, comm(1, 0, [], [X], "pp 0-1", "recv"), CommWait(1, 0), Launch(0, "forward", (X,), (Y,)), Free(3), NEXT,
    ),
    "what was sent is kept until it is gone": (
        *ALLOCS, Launch(0, "forward", (), (Y,)), comm(1, 0, [Y], [], "pp 0-1", "send"), CommDone(1), Free(4), NEXT,
    ),
    "the pinned copy is filled again": (
        Alloc(5, "pinned", 800), *ALLOCS, Launch(7, "copy to the host", (), (PINNED,)), Record(1, 7),
        HostWait(event=1), HostAccess("write to the file", (PINNED,)), Launch(8, "copy to the host", (), (PINNED,)),
    ),
    "a batch is made in the memory of the one before": (
        Alloc(5, "pinned", 800), *ALLOCS, HostAccess("fill", writes=(PINNED,)), Launch(0, "copy", (PINNED,), (X,)),
        HostWait(stream=0), HostAccess("fill again", writes=(PINNED,)),
    ),
    "a block of one stream that another one used last": (
        *ALLOCS, Launch(0, "fill", (), (X,)), Record(1, 0), Wait(7, 1), Launch(7, "use", (X,), ()), Record(2, 7), Wait(0, 2), Free(3), NEXT,
    ),
    "a block that another stream gets first": (
        Launch(0, "its last owner"), Alloc(3, "gpu", 64), Record(1, 0), Wait(7, 1), Launch(7, "fill", (), (X,)),
    ),
}  # fmt: skip
ORDER = (Wait, CommWait, CommDone, HostWait)
REMOVALS = [(name, i) for name, facts in SITUATIONS.items() for i, fact in enumerate(facts) if isinstance(fact, ORDER)]


@pytest.mark.parametrize("name", SITUATIONS)
def test_ordered_accesses_do_not_race(name: str) -> None:
    assert races(SITUATIONS[name]) == []


@pytest.mark.parametrize(("name", "index"), REMOVALS)
def test_removing_one_wait_gives_a_race(name: str, index: int) -> None:
    facts = SITUATIONS[name]
    assert races([*facts[:index], *facts[index + 1 :]]), facts[index]


def test_race_message() -> None:
    gather = replace(comm(1, 0, [OWN], [WEIGHTS], kind="all_gather"), where="optim/zero/param_bucket.py:56")
    matmul = Launch(0, "matmul", (WEIGHTS,), (Y,), "nn/linear.py:55")
    [race] = races([*ALLOCS, Mark("step 3"), gather, matmul, Mark(""), matmul])
    assert str(race) == (
        "step 3: use before ready: all_gather of dp (optim/zero/param_bucket.py:56), then matmul on stream 0 "
        "(nn/linear.py:55), nothing between them (bytes 0..800 of block 1, 2 times)"
    )


def test_adjacent_blocks_do_not_race() -> None:
    assert races([*ALLOCS, comm(1, 0, [OWN], [OWN]), Launch(0, "other bucket", (), (REST,))]) == []
    assert races([*ALLOCS, comm(1, 0, [OWN], [OWN]), Launch(0, "one byte of it", (Span(1, 399, 500),))]) != []


def test_in_place_all_gather_input_is_read() -> None:
    """The copy for a checkpoint may read the owned part during the gather; the rest is not complete yet."""
    for span, expected in ((OWN, 0), (REST, 1)):
        gather = comm(1, 0, [OWN], [WEIGHTS], kind="all_gather")
        assert len(races([*ALLOCS, gather, Launch(7, "copy to the host", (span,))])) == expected


def test_use_after_free_is_detected() -> None:
    [race] = races([*ALLOCS, Free(3), Launch(0, "matmul", (X,))])
    assert race.kind == "used after free"


def test_rerecorded_event_means_the_newer_point() -> None:
    early = [*ALLOCS, Record(1, 0), Launch(0, "fill", (), (X,))]
    assert races([*early, Wait(7, 1), Launch(7, "use", (X,))]) != []
    assert races([*early, Record(1, 0), Wait(7, 1), Launch(7, "use", (X,))]) == []
