"""The stand-in for torch.cuda: nothing that torch would not take, nothing that is not listed, and CUDA's own rules."""

import inspect
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any

import pytest
import torch

from megalite.parallel.phase_timer import PhaseTimer
from simulated_gpu.simulator import cuda, graphs, streams
from simulated_gpu.simulator.state import Machine, Unlisted
from simulated_gpu.simulator.trace import HostWait

CLASSES = (streams.Stream, streams.Event, graphs.CUDAGraph, graphs.graph)
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


FUNCTIONS = [(cuda.REAL, name, ours) for name, ours in cuda.LISTED.items() if inspect.isfunction(ours)]
FUNCTIONS += [(cuda.REAL.memory, name, ours) for name, ours in cuda.LISTED_MEMORY.items()]


@pytest.mark.parametrize(("module", "name", "ours"), FUNCTIONS, ids=lambda x: x if isinstance(x, str) else "")
def test_listed_functions_have_torchs_signatures(module: Any, name: str, ours: Any) -> None:
    real = getattr(module, name)
    if inspect.isbuiltin(real):  # torch's own affair, in C on a CUDA build: no signature to be had
        assert name.startswith("_") and callable(real)
    else:
        assert differences(inspect.signature(ours), inspect.signature(real)) == []


@pytest.mark.parametrize("ours", CLASSES, ids=lambda c: c.__name__)
def test_listed_classes_have_torchs_methods(ours: type) -> None:
    name = ours.__name__
    real = getattr(cuda.REAL, name)
    assert differences(inspect.signature(ours), inspect.signature(real)) == []
    own = OWN.get(name, set()) | (set() if torch._C._has_cuda else IN_C)
    for method, entry in vars(ours).items():
        if method not in own and (not method.startswith("_") or method in ("__enter__", "__exit__")):
            theirs = getattr(real, method)
            if inspect.isfunction(entry) and inspect.isfunction(theirs) and not method.startswith("__"):
                assert differences(inspect.signature(entry), inspect.signature(theirs)) == [], method


def test_keys_and_fields_equal_torchs() -> None:
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


@pytest.mark.parametrize(
    ("ask", "named"),
    [
        (lambda: torch.cuda.get_sync_debug_mode(), r"get_sync_debug_mode is asked for at .*test_cuda.py:\d+"),
        (lambda: torch.cuda.memory._snapshot(), r"memory._snapshot"),
        (lambda: torch.cuda.Stream().priority_range(), r"Stream.priority_range"),
        (lambda: torch.cuda.memory_stats()["num_ooms"], r"memory_stats\(\)\['num_ooms'\]"),
        (lambda: torch.cuda.get_device_properties(0).warp_size, r"Properties.warp_size"),
    ],
)
def test_unlisted_attribute_is_named_with_its_location(ask: Callable[[], object], named: str) -> None:
    with pytest.raises(Unlisted, match=named), cuda.installed([]):
        ask()
    assert torch.cuda is cuda.REAL


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
def test_capture_refuses_like_cuda(card: Machine, work: Callable[[], object], says: str) -> None:
    with pytest.raises(RuntimeError) as raised:
        captured(work)
    assert any(says in str(error) for error in (raised.value, raised.value.__context__)), raised.value
    assert captured(lambda: HELD.add_(1)).operations == 1  # the next one is fine


@pytest.mark.parametrize(("mode", "broken"), [("thread_local", False), ("global", True)])
def test_other_threads_may_synchronize_unless_capture_is_global(card: Machine, mode: str, broken: bool) -> None:
    """What the loader's thread does while a micro-batch is recorded."""

    def work() -> None:
        with ThreadPoolExecutor() as pool:
            assert (pool.submit(torch.cuda.synchronize).exception() is not None) is broken

    with pytest.raises(RuntimeError, match="previous error") if broken else nullcontext():
        captured(work, mode)


def test_phase_timer_does_not_synchronize() -> None:
    trace: list[Any] = []
    with cuda.installed(trace):
        clock, card = PhaseTimer(), torch.device("cuda", 0)
        for waits in (False, True):
            clock.start_step(card)
            with clock.span("forward"):
                time.sleep(0.01)
            clock.end_step()
            if waits:
                torch.cuda.synchronize()
            else:
                assert clock.phase_seconds() == {}  # it is not there yet: nobody waits
        spent = clock.phase_seconds()
    assert set(spent) == {"other", "forward"} and spent["forward"] >= 0.01
    assert sum(isinstance(fact, HostWait) for fact in trace) == 1
