"""The detector of races against every path through a small program, and on what a trainer does, step by step by hand."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from work import calls

from card.simulator.clocks import races
from card.simulator.trace import (
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
    RecordStream,
    Span,
    Wait,
)


def comm(number: int, after: int | str = 0, reads: Sequence[Span] = (), writes: Sequence[Span] = (), name: str = "dp",
         kind: str = "all_reduce") -> Comm:  # fmt: skip
    return Comm(name, (0, 1), kind, "float32", 4, None, number, after, tuple(reads), tuple(writes))


# ---- against every path


def paths(trace: Sequence[Fact]) -> set[tuple[int, int]]:
    """Pairs (early, late) of facts that race, by what can be reached from what: cubic, and nothing is clever."""
    before: list[set[int]] = [set() for _ in trace]  # of each fact: all that is over before it
    host: int | None = None
    last: dict[object, int] = {}  # of a stream: its newest fact
    newest: dict[object, int] = {}  # of a stream: its newest work
    events, comms, gone = {}, {}, dict[int, int]()
    uses: dict[int, list[tuple[int, Span, bool]]] = {}
    allocs, marked, found = dict[int, tuple[Alloc, int | None]](), dict[int, list[object]](), set()

    def after(at: int, *others: int | None) -> None:
        for other in others:
            if other is not None:
                before[at] |= before[other] | {other}

    for at, fact in enumerate(trace):
        match fact:
            case Launch():
                after(at, host, last.get(fact.stream))
                last[fact.stream] = newest[fact.stream] = at
            case Comm():
                after(at, host, last.get(fact.stream), last.get(fact.after))
                last[fact.stream] = newest[fact.stream] = comms[fact.number] = at
            case Record():
                after(at, host, last.get(fact.stream))
                events[fact.event] = at
            case Wait():
                after(at, host, last.get(fact.stream), events.get(fact.event))
                last[fact.stream] = at
            case CommWait():
                after(at, host, last.get(fact.stream), comms[fact.number])
                last[fact.stream] = at
            case CommDone():
                after(at, host, comms[fact.number])
                host = at
            case HostWait(event=None, stream=None):
                after(at, host, *last.values())
                host = at
            case HostWait():
                after(at, host, events.get(fact.event) if fact.event is not None else last.get(fact.stream))
                host = at
            case HostAccess():
                after(at, host)
                host = at
            case Alloc():
                allocs[fact.memory] = fact, newest.get(fact.stream)
                after(at, host, last.get(fact.stream))
                for memory, free in gone.items() if fact.side == "card" else ():
                    if allocs[memory][0].side == "card" and allocs[memory][0].stream == fact.stream:
                        over = before[free] | before[at]
                        found |= {(use, at) for use, _, _ in uses.get(memory, []) if use < free and use not in over}
            case RecordStream():
                marked.setdefault(fact.memory, []).append(fact.stream)
            case Free():
                after(at, host, *(last.get(stream) for stream in marked.get(fact.memory, [])))
                gone[fact.memory] = at
                if allocs[fact.memory][0].side == "host":
                    found |= {(use, at) for use, _, _ in uses.get(fact.memory, []) if use not in before[at]}
        for spans, writes in ((getattr(fact, "reads", ()), False), (getattr(fact, "writes", ()), True)):
            for span in spans:
                given_out = allocs[span.memory][1] if allocs[span.memory][0].side == "card" else None
                if given_out is not None and given_out != at and given_out not in before[at]:
                    found.add((given_out, at))
                if span.memory in gone:
                    found.add((gone[span.memory], at))
                for use, other, wrote in uses.get(span.memory, []):
                    if use != at and span.meets(other) and (wrote or writes) and use not in before[at]:
                        found.add((use, at))
                uses.setdefault(span.memory, []).append((at, span, writes))
    return found


STREAMS = st.sampled_from([0, 1, 2])
SPANS = st.builds(
    lambda memory, start, size: Span(memory, start, start + size),
    st.sampled_from([10, 11]),
    st.integers(0, 5),
    st.integers(1, 4),
)
SOME = st.lists(SPANS, max_size=2).map(tuple)
HOST_SPANS = st.builds(
    lambda memory, start, size: Span(memory, start, start + size),
    st.sampled_from([12, 13]),
    st.integers(0, 3),
    st.integers(1, 3),
)
HOST_SOME = st.lists(HOST_SPANS, max_size=1).map(tuple)


@st.composite
def programs(draw: st.DrawFn) -> list[Fact]:
    work = [Launch(0, "begin", writes=(Span(10, 0, 4),))] if draw(st.booleans()) else []
    allocs = [Alloc(10, "card", 10, draw(STREAMS)), Alloc(11, "card", 10, draw(STREAMS)), Alloc(12, "pinned", 6)]
    allocs.append(Alloc(13, "host", 6))
    trace: list[Fact] = [allocs[0], *work, *allocs[1:]]
    done, freed = 0, False
    for i in range(draw(st.integers(2, 22))):
        kind = draw(st.sampled_from("LLLLCcRRWWWHEASDGFMN"))
        if kind == "L":
            reads, writes = draw(SOME) + draw(HOST_SOME), draw(SOME)
            trace.append(Launch(draw(STREAMS), f"kernel {i}", reads, writes))
        elif kind == "C":
            done += 1
            trace.append(replace(comm(done, draw(STREAMS), draw(SOME), draw(SOME)), where=f"line {i}"))
        elif kind == "R":
            trace.append(Record(draw(st.sampled_from([1, 2])), draw(STREAMS)))
        elif kind == "W":
            trace.append(Wait(draw(STREAMS), draw(st.sampled_from([1, 2]))))
        elif kind == "H":
            trace.append(HostWait(stream=draw(STREAMS)))
        elif kind == "E":
            trace.append(HostWait(event=draw(st.sampled_from([1, 2]))))
        elif kind == "A":
            trace.append(HostAccess(f"access {i}", draw(HOST_SOME), draw(HOST_SOME)))
        elif kind == "S":
            trace.append(HostWait())
        elif kind in "cDG" and done:
            number = draw(st.integers(1, done))
            trace.append(CommDone(number) if kind == "D" else CommWait(number, draw(STREAMS)))
        elif kind == "M":
            trace.append(RecordStream(10, draw(STREAMS)))
        elif kind == "F" and not freed:
            freed = True
            trace.append(Free(draw(st.sampled_from([10, 13]))))
        elif kind == "N":
            trace.append(Alloc(20 + i, "card", 10, draw(STREAMS)))
    return trace


@settings(max_examples=300)
@given(programs())
def test_a_race_is_found_where_no_path_leads_from_one_use_to_the_other(trace: list[Fact]) -> None:
    true, found = paths(trace), races(trace)
    assert bool(found) == bool(true)
    names = {(str(trace[early]), str(trace[late])) for early, late in true}
    for race in found:
        if isinstance(race.early, Alloc):  # stands for the newest work of its stream
            assert any(str(race.late) == late for _, late in names)
        else:
            assert (str(race.early), str(race.late)) in names


# ---- what a trainer does: each wait is needed

WEIGHTS, OWN, REST = Span(1, 0, 800), Span(1, 0, 400), Span(1, 400, 800)
GRADS, X, Y, PINNED = Span(2, 0, 800), Span(3, 0, 64), Span(4, 0, 64), Span(5, 0, 800)
ALLOCS: tuple[Fact, ...] = (Alloc(1, "card", 800), Alloc(2, "card", 800), Alloc(3, "card", 64), Alloc(4, "card", 64))
NEXT = Alloc(9, "card", 64)
UPDATE = Launch(0, "update", (GRADS,), (OWN,))

SITUATIONS: dict[str, tuple[Fact, ...]] = {
    "weights are gathered behind the forward": (
        *ALLOCS, UPDATE, comm(1, 0, [OWN], [WEIGHTS], kind="all_gather"), Launch(0, "embed", (), (X,)),
        CommWait(1, 0), Launch(0, "matmul", (WEIGHTS, X), (Y,)), Launch(0, "update", (GRADS,), (WEIGHTS,)),
    ),
    "gradients are reduced behind the backward": (
        *ALLOCS, Launch(0, "dW", (X,), (GRADS,)), comm(1, 0, [GRADS], [GRADS]), Launch(0, "dx", (X,), (Y,)),
        CommWait(1, 0), Launch(0, "norm", (GRADS,), (Y,)),
    ),
    "a block is let go of after its reduction": (
        *ALLOCS, Launch(0, "round", (), (X,)), comm(1, 0, [X], [X]), CommWait(1, 0), Free(3), NEXT,
    ),
    "what was received is used, and let go of": (
        *ALLOCS, comm(1, 0, [], [X], "pp 0-1", "recv"), CommWait(1, 0), Launch(0, "forward", (X,), (Y,)), Free(3), NEXT,
    ),
    "what was sent is kept until it is gone": (
        *ALLOCS, Launch(0, "forward", (), (Y,)), comm(1, 0, [Y], [], "pp 0-1", "send"), CommDone(1), Free(4), NEXT,
    ),
    "a save in the background copies on its own stream": (
        *ALLOCS, Alloc(5, "pinned", 800), UPDATE, Record(1, 0), Wait(7, 1),
        Launch(7, "copy to the host", (WEIGHTS,), (PINNED,)), Record(2, 7), Launch(0, "forward", (WEIGHTS, X), (Y,)),
        Wait(0, 2), replace(UPDATE, name="next update"), HostWait(event=2), HostAccess("write to the file", (PINNED,)),
    ),
    "the pinned copy is filled again": (
        Alloc(5, "pinned", 800), *ALLOCS, Launch(7, "copy to the host", (), (PINNED,)), Record(1, 7),
        HostWait(event=1), HostAccess("write to the file", (PINNED,)), Launch(8, "copy to the host", (), (PINNED,)),
    ),
    "a batch is made in the memory of the one before": (
        Alloc(5, "pinned", 800), *ALLOCS, HostAccess("fill", writes=(PINNED,)), Launch(0, "copy", (PINNED,), (X,)),
        HostWait(stream=0), HostAccess("fill again", writes=(PINNED,)),
    ),
    "steps on a stream of their own": (
        *ALLOCS, Launch(0, "copy of the batch", (), (X,)), Record(1, 0), Wait(7, 1), Launch(7, "replay", (X,), (GRADS,)),
        Record(2, 7), Wait(0, 2), Launch(0, "update", (GRADS,), (WEIGHTS,)), Free(3), NEXT,
    ),
    "a block of one stream that another one used last": (
        *ALLOCS, Launch(0, "fill", (), (X,)), Record(1, 0), Wait(7, 1), Launch(7, "use", (X,), ()), RecordStream(3, 7), Free(3), NEXT,
    ),
    "a block that another stream gets first": (
        Launch(0, "its last owner"), Alloc(3, "card", 64), Record(1, 0), Wait(7, 1), Launch(7, "fill", (), (X,)),
    ),
}  # fmt: skip
ORDER = (Wait, CommWait, CommDone, HostWait, RecordStream)
PLANTED = [(name, at) for name, facts in SITUATIONS.items() for at, fact in enumerate(facts) if isinstance(fact, ORDER)]


@pytest.mark.parametrize("name", SITUATIONS)
def test_what_is_in_order_is_no_race(name: str) -> None:
    assert races(SITUATIONS[name]) == []


@pytest.mark.parametrize(("name", "at"), PLANTED)
def test_without_any_one_wait_there_is_a_race(name: str, at: int) -> None:
    facts = SITUATIONS[name]
    assert races([*facts[:at], *facts[at + 1 :]]), facts[at]


def test_a_race_is_told_in_words() -> None:
    gather = replace(comm(1, 0, [OWN], [WEIGHTS], kind="all_gather"), where="optim/param_gather.py:56")
    matmul = Launch(0, "matmul", (WEIGHTS,), (Y,), "nn/linear.py:55")
    [race] = races([*ALLOCS, Mark("step 3"), gather, matmul, Mark(""), matmul])
    assert str(race) == (
        "step 3: use before ready: all_gather of dp (optim/param_gather.py:56), then matmul on stream 0 "
        "(nn/linear.py:55), nothing between them (bytes 0..800 of block 1, 2 times)"
    )


def test_neighbours_in_one_allocation_do_not_meet() -> None:
    assert races([*ALLOCS, comm(1, 0, [OWN], [OWN]), Launch(0, "other bucket", (), (REST,))]) == []
    assert races([*ALLOCS, comm(1, 0, [OWN], [OWN]), Launch(0, "one byte of it", (Span(1, 399, 500),))]) != []


def test_what_an_all_gather_sends_in_place_stays_as_it_is() -> None:
    """The copy of a save reads what is owned while the gather is under way; the rest is not there yet."""
    for where, expected in ((OWN, 0), (REST, 1)):
        gather = comm(1, 0, [OWN], [WEIGHTS], kind="all_gather")
        assert len(races([*ALLOCS, gather, Launch(7, "copy to the host", (where,))])) == expected


def test_a_block_that_is_gone_is_not_used() -> None:
    [race] = races([*ALLOCS, Free(3), Launch(0, "matmul", (X,))])
    assert race.kind == "used after free"


def test_an_event_that_is_recorded_again_means_the_newer_point() -> None:
    early = [*ALLOCS, Record(1, 0), Launch(0, "fill", (), (X,))]
    assert races([*early, Wait(7, 1), Launch(7, "use", (X,))]) != []
    assert races([*early, Record(1, 0), Wait(7, 1), Launch(7, "use", (X,))]) == []


def long_run(steps: int, buckets: int = 40, layers: int = 200) -> list[Fact]:
    """Steps of a trainer: parameters are slices of one flat storage, reduced and gathered by buckets."""
    weights, grads, size = 1, 2, 64
    trace: list[Fact] = [Alloc(1, "card", layers * size), Alloc(2, "card", layers * size)]
    memory, number, per = 10, 0, layers // buckets
    for step in range(steps):
        waits = [number - buckets + b + 1 for b in range(buckets)] if step else []
        for layer in range(layers):
            if waits and layer % per == 0:
                trace.append(CommWait(waits[layer // per], 0))
            span = Span(weights, layer * size, (layer + 1) * size)
            trace += [Alloc(memory, "card", 64), Launch(0, "forward", (span,), (Span(memory, 0, 64),))]
            memory += 1
        for layer in reversed(range(layers)):
            mine = memory - layers + layer
            span = Span(grads, layer * size, (layer + 1) * size)
            trace += [Launch(0, "backward", (Span(mine, 0, 64),), (span,)), Free(mine)]
            if layer % per == 0:
                number += 1
                bucket = Span(grads, layer * size, (layer + per) * size)
                trace.append(comm(number, 0, [bucket], [bucket]))
        trace += [CommWait(n, 0) for n in range(number - buckets + 1, number + 1)]
        trace.append(Launch(0, "update", (Span(grads, 0, layers * size),), (Span(weights, 0, layers * size),)))
        for b in range(buckets):
            number += 1
            bucket = Span(weights, b * per * size, (b + 1) * per * size)
            trace.append(comm(number, 0, [bucket], [bucket], kind="broadcast"))
    return trace


def test_a_long_trace_takes_linear_work() -> None:
    short, whole = long_run(5), long_run(50)
    assert len(whole) > 45_000
    first, tenfold = (calls(lambda trace=trace: races(trace)) for trace in (short, whole))
    assert tenfold < 11 * first, (first, tenfold)
    assert races(whole) == []
    missing = next(at for at in range(len(short) - 1, 0, -1) if isinstance(short[at], CommWait))
    assert len(races([*short[:missing], *short[missing + 1 :]])) == 1
