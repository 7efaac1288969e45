"""The stand-in for torch.cuda: nothing that torch would not take, nothing that is not listed, and CUDA's own rules."""

import contextlib
import inspect
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from card.simulator import cuda, graphs, streams
from card.simulator.state import Machine, Unlisted
from card.simulator.trace import Alloc, Fact, Free, HostWait, Record, RecordStream, Wait
from megalite.parallel.clock import Clock

CLASSES = (streams.Stream, streams.Event, graphs.CUDAGraph, graphs.graph, cuda.StreamContext, cuda.device)
OWN = {"Stream": {"number"}, "Event": {"number", "recorded", "enable_timing"}, "CUDAGraph": {"operations"}}
HELD = torch.zeros(1)
IN_C = {
    "device_index",
    "device",
    "stream_id",
    "priority",
}  # of torch's base classes, which a CPU build has no members of


@pytest.fixture
def card() -> Iterator[Machine]:
    with cuda.installed([], cards=2) as found:
        yield found


def differences(ours: inspect.Signature, real: inspect.Signature) -> list[str]:
    """What ours takes and the real one does not, or takes as something else."""
    found, theirs = [], list(real.parameters.values())
    for place, mine in enumerate(ours.parameters.values()):
        other = real.parameters.get(mine.name)
        if other is None:
            found.append(f"{mine.name} is unknown to torch")
        elif mine.kind is mine.POSITIONAL_OR_KEYWORD and (place >= len(theirs) or theirs[place].name != mine.name):
            found.append(f"{mine.name} stands in another place")
        elif (mine.kind, mine.default) != (other.kind, other.default):
            found.append(f"{mine} is {other} of torch")
    for other in theirs:
        optional = other.default is not other.empty or other.kind in (other.VAR_KEYWORD, other.VAR_POSITIONAL)
        if other.name not in ours.parameters and not optional:
            found.append(f"torch also wants {other.name}")
    return found


def signature(of: Any) -> inspect.Signature:
    """Of a class what makes one of it; torch's classes over C have __new__."""
    return inspect.signature(of)


@pytest.mark.parametrize("name", [n for n, entry in cuda.LISTED.items() if inspect.isfunction(entry)])
def test_a_listed_function_takes_what_torch_takes(name: str) -> None:
    real = getattr(cuda.REAL, name)
    if inspect.isbuiltin(real):  # torch's own affair, in C on a CUDA build: no signature to be had
        assert name.startswith("_") and callable(real)
    else:
        assert differences(signature(cuda.LISTED[name]), signature(real)) == []


@pytest.mark.parametrize("name", cuda.LISTED_MEMORY)
def test_a_listed_function_of_memory_takes_what_torch_takes(name: str) -> None:
    assert differences(signature(cuda.LISTED_MEMORY[name]), signature(getattr(cuda.REAL.memory, name))) == []


@pytest.mark.parametrize("ours", CLASSES, ids=lambda c: c.__name__)
def test_a_listed_class_has_the_methods_that_torch_has(ours: type) -> None:
    name = ours.__name__
    real = getattr(cuda.REAL, name)
    assert differences(signature(ours), signature(real)) == []
    for method in vars(ours):
        if method.startswith("_") and method not in ("__enter__", "__exit__", "__eq__", "__hash__"):
            continue
        if method in OWN.get(name, ()):
            continue
        if method in IN_C and not torch._C._has_cuda:
            continue
        theirs = getattr(real, method)
        if inspect.isfunction(vars(ours)[method]) and inspect.isfunction(theirs) and not method.startswith("__"):
            assert differences(signature(getattr(ours, method)), signature(theirs)) == [], method


def test_keys_and_fields_are_those_that_torch_reads() -> None:
    """Of the statistics what torch's own summary reads; its docstring calls one of them otherwise."""
    text = inspect.getsource(cuda.REAL.memory.memory_summary)
    with cuda.installed([]):
        for key in torch.cuda.memory_stats():
            kind, pool, what = key.split(".")
            assert f'("{kind}", ' in text and f'("{pool}", ' in text and f'"{what}"]' in text, key
        fields = [field for field in vars(torch.cuda.get_device_properties(0)) if not field.startswith("_")]
    if torch._C._has_cuda:
        assert set(fields) <= set(dir(torch._C._CudaDeviceProperties))
        assert {"cudaProfilerStart", "cudaProfilerStop"} <= set(dir(torch._C._cudart))


def test_a_difference_of_every_kind_is_seen() -> None:
    def real(a: int, b: int = 1, *, c: int = 2) -> None: ...
    def more(a: int, d: int = 1) -> None: ...
    def turned(b: int = 1, a: int = 0) -> None: ...
    def fewer(b: int = 1) -> None: ...
    def other(a: int, b: int = 2) -> None: ...
    def keyword(a: int, b: int = 1, c: int = 2) -> None: ...
    def fine(a: int) -> None: ...

    wrong = [len(differences(signature(f), signature(real))) for f in (more, turned, fewer, other, keyword, fine)]
    assert wrong == [1, 2, 2, 1, 1, 0]


def test_what_is_not_listed_is_named_with_its_place() -> None:
    with pytest.raises(Unlisted, match=r"get_sync_debug_mode is asked for at .*test_cuda.py:\d+"), cuda.installed([]):
        torch.cuda.get_sync_debug_mode()
    with pytest.raises(Unlisted, match=r"memory._snapshot"), cuda.installed([]):
        torch.cuda.memory._snapshot()
    with pytest.raises(Unlisted, match=r"Stream.priority_range"), cuda.installed([]):
        torch.cuda.Stream().priority_range()
    with pytest.raises(Unlisted, match=r"memory_stats\(\)\['num_ooms'\]"), cuda.installed([]):
        torch.cuda.memory_stats()["num_ooms"]
    with pytest.raises(Unlisted, match=r"Properties.warp_size"), cuda.installed([]):
        torch.cuda.get_device_properties(0).warp_size  # noqa: B018
    assert torch.cuda is cuda.REAL and "record_stream" not in vars(torch.Tensor)


def test_swallowing_it_does_not_help() -> None:
    with pytest.raises(Unlisted, match="nvtx"), cuda.installed([]):
        assert getattr(torch.cuda, "is_initialized", None) is not None
        with contextlib.suppress(Exception):
            torch.cuda.nvtx.range_push("step")


def test_torchs_own_code_sees_the_rest(card: Machine) -> None:
    torch.manual_seed(5)
    assert card.seed == 5 and torch.get_device_module("cuda") is torch.cuda
    assert torch.cuda.is_available() and torch.accelerator is not None
    eval("getattr(torch.cuda, 'amp')", {"torch": torch, "__name__": "torch.somewhere"})  # noqa: S307


def test_a_card_that_is_not_there(card: Machine) -> None:
    assert torch.cuda.device_count() == 2
    for ask in (torch.cuda.set_device, torch.cuda.Stream, torch.cuda.memory_allocated, torch.cuda.current_stream):
        with pytest.raises(RuntimeError, match="invalid device ordinal"):
            ask(2)  # type: ignore[operator]
    with pytest.raises(AssertionError, match="Invalid device id"):
        torch.cuda.get_device_properties(2)
    with pytest.raises(ValueError, match="specified index"):
        torch.cuda.set_device("cuda")
    with pytest.raises(ValueError, match="Expected a cuda device"):
        torch.cuda.get_device_name(torch.device("cpu"))


def test_without_a_card_nothing_is_there() -> None:
    with cuda.installed([], cards=0):
        assert not torch.cuda.is_available() and torch.cuda.device_count() == 0
        torch.cuda.empty_cache()
        with pytest.raises(RuntimeError, match="No CUDA GPUs"):
            torch.cuda.current_device()


def test_a_thread_begins_on_the_first_card_and_its_default_stream(card: Machine) -> None:
    torch.cuda.set_device(1)
    torch.cuda.set_stream(torch.cuda.Stream(1))
    seen: list[Any] = []

    def look() -> None:
        seen.extend((torch.cuda.current_device(), torch.cuda.current_stream().stream_id))
        with torch.cuda.device(torch.device("cuda", 1)):
            seen.append(torch.cuda.current_device())
        seen.append(torch.cuda.current_device())

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert seen == [0, 0, 1, 0]
    assert (torch.cuda.current_device(), cuda.current_stream_id()) == (1, 1)


def test_streams_nest_and_leave_the_other_cards_alone(card: Machine) -> None:
    here, there = torch.cuda.Stream(), torch.cuda.Stream("cuda:1")
    assert here != there and here.device == torch.device("cuda", 0)
    with torch.cuda.stream(here):
        with torch.cuda.stream(there):
            assert torch.cuda.current_device() == 1 and cuda.current_stream_id() == there.stream_id
        assert torch.cuda.current_device() == 0 and torch.cuda.current_stream() == here
        with torch.cuda.stream(None):
            assert torch.cuda.current_stream() == here
    assert torch.cuda.current_stream() == torch.cuda.default_stream() != here
    assert torch.cuda.current_stream(1) == torch.cuda.default_stream(1)


def test_what_streams_and_events_write(card: Machine) -> None:
    stream, event, never = torch.cuda.Stream(), torch.cuda.Event(), torch.cuda.Event()
    stream.wait_event(never)
    never.synchronize()
    assert card.trace == [] and never.query()
    event.record()
    stream.wait_event(event)
    torch.cuda.current_stream().wait_stream(stream)
    event.synchronize()
    stream.synchronize()
    torch.cuda.synchronize(torch.device("cuda", 1))
    held = torch.zeros(4)
    card.memory_of = lambda tensor: 77
    held.record_stream(stream)
    waits = [fact for fact in card.trace if isinstance(fact, HostWait)]
    assert all(":" in fact.where and "test_cuda.py" in fact.where for fact in waits)
    assert [(fact.event, fact.stream) for fact in waits] == [(event.number, None), (None, 1), (None, None)]
    rest = [fact for fact in card.trace if not isinstance(fact, HostWait)]
    third = event.number + 2
    assert rest == [Record(1, 0), Wait(1, 1), Record(third, 1), Wait(0, third), RecordStream(77, 1)]


def test_time_is_told_of_events_that_were_waited_for(card: Machine) -> None:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    with pytest.raises(ValueError, match="recorded before"):
        start.elapsed_time(stop)
    stop.record()
    assert not stop.query()
    with pytest.raises(RuntimeError, match="completed before"):
        start.elapsed_time(stop)
    torch.cuda.synchronize()
    assert stop.query() and 0 <= start.elapsed_time(stop) < 1000
    stop.record()
    assert not stop.query()  # the newer point
    with pytest.raises(ValueError, match="enable_timing"):
        torch.cuda.Event().elapsed_time(stop)


def test_figures_are_counted_from_the_trace() -> None:
    mib = 1 << 20
    trace: list[Fact] = [
        Alloc(1, "card", 3 * mib),
        Alloc(2, "host", 9 * mib),
        Alloc(3, "card", 100),
        Alloc(5, "card", 0),
        Free(5),
        Free(1),
    ]
    with cuda.installed(trace, memory=1 << 30):
        assert torch.cuda.memory_allocated() == 512
        assert torch.cuda.max_memory_allocated(torch.device("cuda", 0)) == 3 * mib + 512
        assert torch.cuda.memory_reserved() == torch.cuda.max_memory_reserved() == 4 * mib
        stats = torch.cuda.memory_stats()
        assert (stats["allocated_bytes.all.peak"], stats["allocation.all.current"]) == (3 * mib + 512, 1)
        torch.cuda.empty_cache()
        assert torch.cuda.memory_reserved() == 2 * mib < torch.cuda.max_memory_reserved()
        free, total = torch.cuda.mem_get_info()
        assert total == 1 << 30 and 0 < free < total - 2 * mib
        torch.cuda.reset_peak_memory_stats()
        assert torch.cuda.max_memory_allocated() == 512 and torch.cuda.max_memory_reserved() == 2 * mib
        trace.append(Alloc(4, "card", 5 * mib))
        assert torch.cuda.max_memory_allocated() == torch.cuda.memory_allocated() == 5 * mib + 512


def test_another_cards_figures_are_its_own(card: Machine) -> None:
    torch.cuda.set_device(1)
    card.trace.append(Alloc(1, "card", 1024))
    assert [torch.cuda.max_memory_allocated(i) for i in (0, 1)] == [0, 1024]


def captured(work: Callable[[], object], mode: str = "thread_local") -> graphs.CUDAGraph:
    made = graphs.CUDAGraph()
    with torch.cuda.graph(made, torch.cuda.graph_pool_handle(), torch.cuda.Stream(), capture_error_mode=mode):
        work()
    return made


def test_a_graph_does_at_replays_what_was_recorded(card: Machine) -> None:
    x, total = torch.tensor([1.0, 2.0]), torch.zeros(2)
    made: list[torch.Tensor] = []

    def work() -> None:
        assert torch.cuda.is_current_stream_capturing()
        made.append(x * 2)
        made[0].add_(1)
        total.add_(made[0])

    graph = captured(work)
    assert total.tolist() == [0, 0] and not torch.cuda.is_current_stream_capturing()
    graph.replay()
    x.fill_(5)
    graph.replay()
    assert made[0].tolist() == [11, 11] and total.tolist() == [14, 16]
    with pytest.raises(RuntimeError, match="without a preceding successful capture"):
        torch.cuda.CUDAGraph().replay()


def other_stream_unjoined() -> None:
    torch.cuda.Stream().wait_stream(torch.cuda.current_stream())


@pytest.mark.parametrize(
    ("work", "says"),
    [
        (lambda: torch.cuda.synchronize(), "not permitted when stream is capturing: a wait of the host"),
        (lambda: torch.cuda.current_stream().synchronize(), "not permitted when stream is capturing"),
        (lambda: torch.cuda.Event().query(), "Event.query"),
        (lambda: torch.cuda.current_stream().wait_stream(torch.cuda.default_stream()), "uncaptured work"),
        (lambda: captured(lambda: None), "not permitted when stream is capturing"),
        (other_stream_unjoined, "unjoined work"),
    ],
)
def test_a_capture_refuses_what_cuda_refuses(card: Machine, work: Callable[[], object], says: str) -> None:
    with pytest.raises(RuntimeError) as raised:
        captured(work)
    errors: list[str] = []
    error: BaseException | None = raised.value
    while error is not None:
        errors.append(str(error))
        error = error.__context__
    assert any(says in text for text in errors), errors
    assert captured(lambda: HELD.add_(1)).operations == 1  # the next one is fine


def test_a_host_read_on_the_card_breaks_a_capture(card: Machine) -> None:
    """The simulated device writes the fact; here by hand."""

    def read() -> None:
        card.trace.append(HostWait(where="by hand"))
        torch.zeros(1)

    with pytest.raises(RuntimeError, match="previous error during capture") as raised:
        captured(read)
    assert "by hand" in str(raised.value.__context__)


def test_a_capture_needs_a_stream_of_its_own(card: Machine) -> None:
    with pytest.raises(RuntimeError, match="non-default stream"):
        torch.cuda.CUDAGraph().capture_begin()


def test_a_stream_may_join_a_capture_and_leave_it(card: Machine) -> None:
    def work() -> None:
        side, main = torch.cuda.Stream(), torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            assert torch.cuda.is_current_stream_capturing()
            HELD.add_(1)
        main.wait_stream(side)

    assert captured(work).operations == 1


@pytest.mark.parametrize(("mode", "broken"), [("thread_local", False), ("global", True)])
def test_other_threads_may_wait_unless_the_capture_is_global(card: Machine, mode: str, broken: bool) -> None:
    """What the loader's thread does while a micro-batch is recorded."""

    def work() -> None:
        errors: list[BaseException] = []

        def wait() -> None:
            try:
                torch.cuda.synchronize()
            except RuntimeError as error:
                errors.append(error)

        thread = threading.Thread(target=wait)
        thread.start()
        thread.join()
        assert bool(errors) is broken

    if broken:
        with pytest.raises(RuntimeError, match="previous error"):
            captured(work, mode)
    else:
        captured(work, mode)


def test_the_memory_history_and_the_profilers_switch(card: Machine, tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="without a history"):
        torch.cuda.memory._dump_snapshot(str(tmp_path / "a"))
    torch.cuda.memory._record_memory_history(max_entries=7)
    torch.cuda.memory._dump_snapshot(str(tmp_path / "a"))
    assert card.history == 7 and (tmp_path / "a").read_bytes() == cuda.SNAPSHOT
    torch.cuda.cudart().cudaProfilerStart()
    torch.cuda.cudart().cudaProfilerStop()
    assert card.runtime_calls == ["cudaProfilerStart", "cudaProfilerStop"]


def test_the_clock_asks_a_card_for_times_without_waiting_for_it() -> None:
    trace: list[Any] = []
    with cuda.installed(trace):
        clock, card = Clock(), torch.device("cuda", 0)
        for waits in (False, True):
            clock.begin(card)
            with clock.span("forward"):
                time.sleep(0.01)
            clock.end()
            if waits:
                torch.cuda.synchronize()
            else:
                assert clock.read() == {}  # it is not there yet: nobody waits
        spent = clock.read()
    assert set(spent) == {"other", "forward"} and spent["forward"] >= 0.01
    assert sum(isinstance(fact, HostWait) for fact in trace) == 1
