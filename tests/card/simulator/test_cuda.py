"""The stand-in for torch.cuda: nothing that torch would not take, nothing that is not listed, and CUDA's own rules."""

import inspect
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from card.simulator import cuda, graphs, streams
from card.simulator.state import Machine, Unlisted
from card.simulator.trace import HostWait
from megalite.parallel.clock import Clock

CLASSES = (streams.Stream, streams.Event, graphs.CUDAGraph, graphs.graph, cuda.StreamContext, cuda.device)
OWN = {"Stream": {"number"}, "Event": {"number", "recorded", "enable_timing"}, "CUDAGraph": {"operations"}}
HELD = torch.zeros(1)
# of torch's base classes, which a CPU build has no members of
IN_C = {"device_index", "device", "stream_id", "priority"}


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


@pytest.mark.parametrize("name", [n for n, entry in cuda.LISTED.items() if inspect.isfunction(entry)])
def test_a_listed_function_takes_what_torch_takes(name: str) -> None:
    real = getattr(cuda.REAL, name)
    if inspect.isbuiltin(real):  # torch's own affair, in C on a CUDA build: no signature to be had
        assert name.startswith("_") and callable(real)
    else:
        assert differences(inspect.signature(cuda.LISTED[name]), inspect.signature(real)) == []


@pytest.mark.parametrize("name", cuda.LISTED_MEMORY)
def test_a_listed_function_of_memory_takes_what_torch_takes(name: str) -> None:
    assert (
        differences(inspect.signature(cuda.LISTED_MEMORY[name]), inspect.signature(getattr(cuda.REAL.memory, name)))
        == []
    )


@pytest.mark.parametrize("ours", CLASSES, ids=lambda c: c.__name__)
def test_a_listed_class_has_the_methods_that_torch_has(ours: type) -> None:
    name = ours.__name__
    real = getattr(cuda.REAL, name)
    assert differences(inspect.signature(ours), inspect.signature(real)) == []
    for method in vars(ours):
        if method.startswith("_") and method not in ("__enter__", "__exit__", "__eq__", "__hash__"):
            continue
        if method in OWN.get(name, ()):
            continue
        if method in IN_C and not torch._C._has_cuda:
            continue
        theirs = getattr(real, method)
        if inspect.isfunction(vars(ours)[method]) and inspect.isfunction(theirs) and not method.startswith("__"):
            assert differences(inspect.signature(getattr(ours, method)), inspect.signature(theirs)) == [], method


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


def captured(work: Callable[[], object], mode: str = "thread_local") -> graphs.CUDAGraph:
    made = graphs.CUDAGraph()
    with torch.cuda.graph(made, torch.cuda.graph_pool_handle(), torch.cuda.Stream(), capture_error_mode=mode):
        work()
    return made


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
