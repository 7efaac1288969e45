"""The checker of order between ranks: each rule by hand, random programs against a slow twin, and every schedule."""

import itertools
import random

import pytest

from card.simulator.queues import STRICTEST, Model, Traces, all_end, disorder, eager, hangs, told, unequal
from card.simulator.trace import Comm, CommWait, Fact, HostRead, HostWait, Launch, Record, Stream, Wait
from megalite.pipeline.schedule import Action, Op, plan

ONE, MANY = Model("one"), Model("many")


class Program:
    """What ranks do together, written as one sequence of events: each rank's trace is what concerns it."""

    def __init__(self, ranks: int):
        self.traces: dict[int, list[Fact]] = {rank: [] for rank in range(ranks)}
        self._numbers = itertools.count()

    def collective(
        self, comm: str, *ranks: int, count: int = 4, after: Stream = 0, wait: bool = True
    ) -> dict[int, int]:
        """The number of the operation on each rank."""
        return {rank: self.share(rank, comm, *ranks, count=count, after=after, wait=wait) for rank in ranks}

    def share(self, rank: int, comm: str, *ranks: int, count: int = 4, after: Stream = 0, wait: bool = True) -> int:
        """One rank's part of a collective."""
        number = next(self._numbers)
        fact = Comm(comm, ranks, "all_reduce", "float32", count, None, number, after, op="SUM", where="x.py:1")
        self.traces[rank].append(fact)
        if wait:
            self.wait(rank, number, after)
        return number

    def message(
        self, source: int, target: int, comm: str = "pp", after: Stream = 0, first: str = "send"
    ) -> dict[int, int]:
        return {
            source: self.half(source, "send", target, comm, after=after),
            target: self.half(target, "recv", source, comm, after=after),
        }

    def half(self, rank: int, kind: str, peer: int, comm: str = "pp", count: int = 4, after: Stream = 0) -> int:
        pair, number = tuple(sorted((rank, peer))), next(self._numbers)
        name = f"{comm} {pair[0]}-{pair[1]}"
        self.traces[rank].append(Comm(name, pair, kind, "float32", count, peer, number, after, where="x.py:2"))
        return number

    def wait(self, rank: int, number: int, stream: Stream = 0) -> None:
        self.traces[rank].append(CommWait(number, stream))

    def launch(self, rank: int, name: str = "matmul", stream: Stream = 0) -> None:
        self.traces[rank].append(Launch(stream, name))


def test_ranks_that_do_the_same_are_in_order() -> None:
    program = Program(3)
    program.collective("world", 0, 1, 2)
    numbers = program.message(0, 1)
    program.launch(0)
    program.wait(1, numbers[1])
    program.collective("world", 0, 1, 2, wait=False)
    assert disorder(program.traces) == [] == hangs(program.traces, STRICTEST)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (
            dict(kind="broadcast", op=""),
            "rank 0 does all_reduce(SUM) of 4 float32 (x.py:1), rank 1 does broadcast of 4",
        ),
        (dict(dtype="bfloat16"), "rank 1 does all_reduce(SUM) of 4 bfloat16"),
        (dict(count=5), "rank 1 does all_reduce(SUM) of 5 float32"),
        (dict(op="MAX"), "rank 1 does all_reduce(MAX) of 4 float32"),
        (dict(peer=1), "rank 1 does all_reduce(SUM) of 4 float32 root 1"),
    ],
)
def test_an_operation_that_differs_on_one_rank_is_named(change: dict[str, object], words: str) -> None:
    program = Program(2)
    program.collective("tp", 0, 1)
    program.collective("tp", 0, 1)
    comm = program.traces[1][2]
    assert isinstance(comm, Comm)
    program.traces[1][2] = Comm(**{**comm.__dict__, **change})
    [text] = disorder(program.traces)
    assert text.startswith("tp, operation 1: ") and words in text


def test_an_operation_that_one_rank_leaves_out_is_named() -> None:
    program = Program(2)
    program.collective("dp", 0, 1)
    program.collective("dp", 0, 1, count=7)
    del program.traces[1][2:]
    want = "dp: rank 1 ends after 1 operations; then rank 0 does all_reduce(SUM) of 7 float32 (x.py:1)"
    assert disorder(program.traces) == [want]
    assert disorder({0: program.traces[0]}) == ["dp: there is no trace of rank [1]"]


def test_messages_that_do_not_meet_are_named() -> None:
    both = Program(2)
    both.half(0, "send", 1), both.half(1, "send", 0)
    assert "rank 0 does send of 4 float32 to 1 (x.py:2), rank 1 does send of 4 float32 to 0" in disorder(both.traces)[0]
    sizes = Program(2)
    sizes.half(0, "send", 1), sizes.half(1, "recv", 0, count=9)
    assert "rank 1 does recv of 9 float32 from 0" in disorder(sizes.traces)[0]
    alone = Program(2)
    alone.half(0, "send", 1)
    assert "rank 1 ends after 0 messages; then rank 0 does send" in disorder(alone.traces)[0]


def test_two_communicators_crosswise_hang() -> None:
    """Both match; but on each rank the second of the two comes after the first."""
    program = Program(2)
    for comm in ("world", "tp"):  # so both are made
        program.collective(comm, 0, 1, wait=False)
    for rank, order in ((0, ("tp", "world")), (1, ("world", "tp"))):
        for comm in order:
            program.share(rank, comm, 0, 1, count=8)
    assert unequal(program.traces) == []
    first, second = disorder(program.traces)
    assert first.startswith("on any card: rank 0 waits on its card for") and second.startswith("on any card: rank 1")
    assert "all_reduce(SUM) of 8 float32 on tp (x.py:1), which has begun here and not on rank [1]" in first
    assert "all_reduce(SUM) of 8 float32 on world (x.py:1), which has begun here and not on rank [0]" in second


def test_one_hardware_queue_hangs_where_many_do_not() -> None:
    """Rank 0 has something on a side stream wait for the answer to a message that it sends behind that wait."""
    program = Program(2)
    for a, b in ((0, 1), (1, 0)):
        program.message(a, b, comm=f"made{a}")
    answer = program.half(0, "recv", 1, "answers")
    program.wait(0, answer, stream="side")
    program.half(0, "send", 1, "questions")
    question = program.half(1, "recv", 0, "questions")
    program.wait(1, question)
    program.half(1, "send", 0, "answers")
    free = {rank: list(trace) for rank, trace in program.traces.items()}
    assert hangs(free, Model("many", "free")) == []
    [first, second] = hangs(free, Model("one", "free"))
    assert "rank 0 waits on its card for stream side, which waits for recv of 4 float32 from 1" in first
    assert "rank 1" in second and "questions 0-1" in second


def test_hosts_that_make_communicators_in_different_orders_hang() -> None:
    program = Program(3)
    program.half(0, "send", 1), program.half(0, "send", 2)
    program.half(1, "send", 2), program.half(1, "recv", 0)
    program.half(2, "recv", 0), program.half(2, "recv", 1)
    assert unequal(program.traces) == [] == hangs(program.traces, Model("many", "free"))
    texts = disorder(program.traces)
    assert "rank 0 waits on its host for rank [1] to come to send of 4 float32 to 1 on pp 0-1 (x.py:2)" in texts[0]


def test_a_host_that_waits_issues_nothing() -> None:
    for stop in (HostWait(stream=0), HostWait(), HostRead("item", "x.py:3")):
        program = Program(2)
        program.message(0, 1), program.message(1, 0, "back")
        receive = program.half(0, "recv", 1)
        program.wait(0, receive)
        assert disorder(program.traces)  # the send is still to come
        program.traces[0].append(stop)
        program.half(0, "send", 1, "back")
        answer = program.half(1, "recv", 0, "back")
        program.wait(1, answer)
        program.half(1, "send", 0)
        assert unequal(program.traces) == [] and disorder(program.traces)


def test_streams_wait_for_events_as_recorded_last() -> None:
    program = Program(2)
    program.message(0, 1), program.message(1, 0, "back")
    program.traces[0].append(Record(7, 0))
    receive = program.half(0, "recv", 1)
    program.wait(0, receive)
    program.traces[0].append(Wait(1, 7))  # not for the message
    program.half(0, "send", 1, "back", after=1)
    answer = program.half(1, "recv", 0, "back")
    program.wait(1, answer)
    program.half(1, "send", 0)
    assert hangs(program.traces, MANY) == []
    program.traces[0].insert(-2, Record(7, 0))
    assert hangs(program.traces, MANY)


# ---- random programs


def _slow(traces: Traces, one: bool) -> bool:
    """Whether a run hangs: what has happened, from the rules alone, each tried again and again until nothing more does."""
    device = Launch | Wait | CommWait | Comm
    happened: set[tuple[str, int, int]] = set()

    def last_of(rank: int, stream: Stream, before: int) -> int | None:
        places = [j for j, f in enumerate(traces[rank][:before]) if isinstance(f, device) and f.stream == stream]
        return places[-1] if places else None

    def is_done(rank: int, place: int | None) -> bool:
        return place is None or ("done", rank, place) in happened

    def awaited(rank: int, i: int) -> int | None:
        fact, row = traces[rank][i], traces[rank]
        if isinstance(fact, CommWait):
            return next(j for j, f in enumerate(row) if isinstance(f, Comm) and f.number == fact.number)
        if isinstance(fact, Wait):
            records = [j for j, f in enumerate(row[:i]) if isinstance(f, Record) and f.event == fact.event]
            return last_of(rank, row[records[-1]].stream, records[-1]) if records else None  # type: ignore[union-attr]
        assert isinstance(fact, HostWait)
        return last_of(rank, fact.stream, i) if fact.stream is not None else None

    def first_of(rank: int, comm: str) -> int:
        return next((j for j, f in enumerate(traces[rank]) if isinstance(f, Comm) and f.comm == comm), -1)

    def come(rank: int, i: int) -> bool:
        """The host has come to fact i."""
        return all(("issued", rank, j) in happened for j in range(i)) and all(
            is_done(rank, awaited(rank, j)) for j in range(i) if isinstance(traces[rank][j], HostWait)
        )

    def twin(rank: int, i: int) -> list[tuple[int, int]]:
        fact = traces[rank][i]
        assert isinstance(fact, Comm)
        alike = [j for j, f in enumerate(traces[rank]) if isinstance(f, Comm) and _same_order(f, fact)]
        twins = []
        for other in fact.ranks if fact.peer is None else (fact.peer,):
            theirs = [j for j, f in enumerate(traces[other]) if isinstance(f, Comm) and _meets(rank, fact, other, f)]
            number = alike.index(i)
            twins.append((other, theirs[number] if number < len(theirs) else -1))
        return twins

    def may(what: str, rank: int, i: int) -> bool:
        fact = traces[rank][i]
        if what == "issued":
            made = not isinstance(fact, Comm) or first_of(rank, fact.comm) != i
            return come(rank, i) and (made or all(_come_first(r, fact.comm) for r in fact.ranks))  # type: ignore[union-attr]
        if not isinstance(fact, device):
            return False
        if what == "done":
            begun = ("begun", rank, i) in happened
            return begun and (not isinstance(fact, Comm) or all(("begun", r, j) in happened for r, j in twin(rank, i)))
        ahead = [
            j for j, f in enumerate(traces[rank][:i]) if isinstance(f, device) and (one or f.stream == fact.stream)
        ]
        needs = [last_of(rank, fact.stream, i)]
        if isinstance(fact, Comm):
            needs.append(last_of(rank, fact.after, i))
        if isinstance(fact, Wait | CommWait):
            needs.append(awaited(rank, i))
        issued = ("issued", rank, i) in happened
        return issued and all(("begun", rank, j) in happened for j in ahead) and all(is_done(rank, j) for j in needs)

    def _come_first(rank: int, comm: str) -> bool:
        return first_of(rank, comm) >= 0 and come(rank, first_of(rank, comm))

    every = [(w, r, i) for r in traces for i in range(len(traces[r])) for w in ("issued", "begun", "done")]
    while new := [key for key in every if key not in happened and may(*key)]:
        happened.update(new)
    issued = all(("issued", r, i) in happened for r in traces for i in range(len(traces[r])))
    return not issued or any(
        ("done", r, i) not in happened for r in traces for i, f in enumerate(traces[r]) if isinstance(f, device)
    )


def _same_order(a: Comm, b: Comm) -> bool:
    return (a.comm, a.peer) == (b.comm, b.peer) and (a.kind == b.kind or a.peer is None)


def _meets(rank: int, fact: Comm, other: int, theirs: Comm) -> bool:
    if fact.peer is None:
        return theirs.comm == fact.comm and theirs.peer is None
    return theirs.comm == fact.comm and theirs.peer == rank and {fact.kind, theirs.kind} == {"send", "recv"}


def _random_program(chance: random.Random) -> dict[int, list[Fact]]:
    """A sequence of events that happen one after another, hence in order, seen from each rank."""
    size = chance.randint(2, 4)
    program, open_works = Program(size), []
    groups = [tuple(sorted(chance.sample(range(size), chance.randint(2, size)))) for _ in range(2)]
    for _ in range(chance.randint(3, 12)):
        what, stream = chance.random(), chance.choice((0, 0, 1))
        if what < 0.4:
            which = chance.randrange(2)
            numbers = program.collective(f"group{which}", *groups[which], after=stream, wait=False)
            open_works += [(rank, number, stream) for rank, number in numbers.items()]
        elif what < 0.75:
            a, b = chance.sample(range(size), 2)
            numbers = program.message(a, b, chance.choice(("pp", "back")), stream)
            open_works += [(rank, number, stream) for rank, number in numbers.items()]
        elif what < 0.85:
            a = chance.randrange(size)
            program.traces[a] += [Record(stream, stream), Wait(1 - stream, stream)]
        elif what < 0.9:
            program.traces[chance.randrange(size)].append(HostWait(stream=stream))
        else:
            program.launch(chance.randrange(size), stream=stream)
        for work in chance.sample(open_works, len(open_works) // 2):
            program.wait(*work)
            open_works.remove(work)
    return program.traces


def _swapped(chance: random.Random, traces: dict[int, list[Fact]]) -> dict[int, list[Fact]] | None:
    """Two facts of one rank change places; None where that is no program."""
    rank = chance.choice([r for r in traces if len(traces[r]) > 1] or [0])
    row = list(traces[rank])
    if len(row) < 2:
        return None
    i, j = sorted(chance.sample(range(len(row)), 2))
    row[i], row[j] = row[j], row[i]
    numbers = {f.number: at for at, f in enumerate(row) if isinstance(f, Comm)}
    if any(isinstance(f, CommWait) and numbers[f.number] > at for at, f in enumerate(row)):
        return None
    return {**traces, rank: row}


def test_random_programs_are_in_order_and_their_swaps_are_found_whenever_a_run_hangs() -> None:
    chance = random.Random(1)
    counts = {"hangs": 0, "unequal": 0, "harmless": 0}
    for _ in range(300):
        traces = _random_program(chance)
        assert disorder(traces) == [] == hangs(traces, STRICTEST)
        other = _swapped(chance, traces)
        if other is None:
            continue
        for each in (traces, other, eager(other)):
            assert all_end(each) == (told(each, STRICTEST) == []), each
        slow = [_slow(other, one=one) for one in (False, True)]
        assert slow == [bool(hangs(other, model)) for model in (MANY, ONE)], other
        assert (any(slow) or bool(unequal(other))) == bool(disorder(other))
        counts["hangs" if any(slow) else "unequal" if unequal(other) else "harmless"] += 1
    assert min(counts["hangs"], counts["harmless"]) > 10, counts


# ---- schedules


def _trace(row: tuple[Action, ...], rank: int, pp: int, last: int) -> list[Fact]:
    """As the executor does it: post and go on, wait where a value is used, and for what was sent at the end."""
    facts: list[Fact] = []
    coming: dict[tuple[Op, int, int], int] = {}
    sent: list[int] = []
    for number, action in enumerate(row):
        if action.op in (Op.F, Op.B):
            receives = Op.RECV_F if action.op is Op.F else Op.RECV_B
            if (work := coming.pop((receives, action.stage, action.microbatch), None)) is not None:
                facts.append(CommWait(work, 0))
            facts.append(Launch(0, str(action)))
            continue
        forward, sends = action.op in (Op.SEND_F, Op.RECV_F), action.op in (Op.SEND_F, Op.SEND_B)
        peer = (rank + (1 if action.op in (Op.SEND_F, Op.RECV_B) else -1)) % pp
        pair = tuple(sorted((rank, peer)))
        name = f"{'pp' if forward else 'back'} {pair[0]}-{pair[1]}"
        kind = "send" if sends else "recv"
        facts.append(Comm(name, pair, kind, "float32", action.microbatch + 1, peer, number, 0, where=str(action)))
        if sends:
            sent.append(number)
        else:
            coming[action.op, action.stage, action.microbatch] = number
    return facts + [CommWait(number, 0) for number in sent]


def _planned(name: str, pp: int, count: int, vpp: int, group: int | None) -> dict[int, list[Fact]]:
    rows = plan.__wrapped__(name, pp, count, vpp, group)
    return {rank: _trace(row, rank, pp, pp * vpp - 1) for rank, row in enumerate(rows)}


def _check_schedule(name: str, pp: int, count: int, vpp: int, group: int | None) -> None:
    traces = _planned(name, pp, count, vpp, group)
    assert unequal(traces) == [], (name, pp, count, vpp, group)
    assert hangs(traces, STRICTEST) == [], (name, pp, count, vpp, group)
    assert hangs(eager(traces), STRICTEST) == [], (name, pp, count, vpp, group)


SCHEDULES = ("1f1b", "gpipe", "forward")


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_schedule_hangs_a_few(name: str) -> None:
    for pp, count, vpp in itertools.product((2, 3, 4), (1, 4, 7), (1, 2)):
        for group in (None, count):
            _check_schedule(name, pp, count, vpp, group)


@pytest.mark.everything
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", SCHEDULES)
def test_no_schedule_hangs(name: str) -> None:
    for pp, count, vpp in itertools.product(range(2, 9), range(1, 21), range(1, 5)):
        for group in {None, count} if vpp > 1 else (None,):  # all of a chunk first: breadth first
            _check_schedule(name, pp, count, vpp, group)


def test_messages_swapped_in_a_schedule_are_found() -> None:
    """Any two neighbours in a row that are messages on one communicator, in different directions; and a message that
    comes before what its rank has to wait for first."""
    found = []
    traces = _planned("1f1b", 2, 4, 2, None)
    for rank, row in traces.items():
        for i, (a, b) in enumerate(itertools.pairwise(row)):
            if isinstance(a, Comm) and isinstance(b, Comm) and a.comm == b.comm and a.kind != b.kind:
                swapped = {**traces, rank: [*row[:i], b, a, *row[i + 2 :]]}
                found.append(disorder(swapped))
    assert found and all(found)
    assert all("rank 0 does" in texts[0] and "rank 1 does" in texts[0] for texts in found)
