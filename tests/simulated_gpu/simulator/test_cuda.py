"""The substitute for torch.cuda: torch's own signatures, nothing that is not listed, and CUDA's rules."""

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
TENSOR = torch.zeros(1)
# members of torch's base classes, which a CPU build lacks
IN_C = {"device_index", "device", "stream_id", "priority"}


@pytest.fixture
def machine() -> Iterator[Machine]:
    with cuda.installed([], num_gpus=2) as machine:
        yield machine


def differences(substitute: inspect.Signature, real: inspect.Signature) -> list[str]:
    """Return the parameters of the substitute that torch's function lacks or defines differently."""
    problems, real_parameters = [], list(real.parameters.values())
    for index, parameter in enumerate(substitute.parameters.values()):
        counterpart = real.parameters.get(parameter.name)
        if counterpart is None:
            problems.append(f"{parameter.name} is unknown to torch")
        elif parameter.kind is parameter.POSITIONAL_OR_KEYWORD and (
            index >= len(real_parameters) or real_parameters[index].name != parameter.name
        ):
            problems.append(f"{parameter.name} has another position")
        elif (parameter.kind, parameter.default) != (counterpart.kind, counterpart.default):
            problems.append(f"{parameter} is {counterpart} of torch")
    for counterpart in real_parameters:
        optional = counterpart.default is not counterpart.empty or counterpart.kind in (
            counterpart.VAR_KEYWORD,
            counterpart.VAR_POSITIONAL,
        )
        if counterpart.name not in substitute.parameters and not optional:
            problems.append(f"torch also wants {counterpart.name}")
    return problems


FUNCTIONS = [(cuda.REAL, name, entry) for name, entry in cuda.LISTED.items() if inspect.isfunction(entry)]
FUNCTIONS += [(cuda.REAL.memory, name, entry) for name, entry in cuda.LISTED_MEMORY.items()]


@pytest.mark.parametrize(("module", "name", "substitute"), FUNCTIONS, ids=lambda x: x if isinstance(x, str) else "")
def test_listed_functions_have_torchs_signatures(module: Any, name: str, substitute: Any) -> None:
    real = getattr(module, name)
    if inspect.isbuiltin(real):  # internal to torch, and written in C in a CUDA build: it has no signature
        assert name.startswith("_") and callable(real)
    else:
        assert differences(inspect.signature(substitute), inspect.signature(real)) == []


@pytest.mark.parametrize("substitute", CLASSES, ids=lambda c: c.__name__)
def test_listed_classes_have_torchs_methods(substitute: type) -> None:
    name = substitute.__name__
    real = getattr(cuda.REAL, name)
    assert differences(inspect.signature(substitute), inspect.signature(real)) == []
    own = OWN.get(name, set()) | (set() if torch._C._has_cuda else IN_C)
    for method, entry in vars(substitute).items():
        if method not in own and (not method.startswith("_") or method in ("__enter__", "__exit__")):
            real_entry = getattr(real, method)
            if inspect.isfunction(entry) and inspect.isfunction(real_entry) and not method.startswith("__"):
                assert differences(inspect.signature(entry), inspect.signature(real_entry)) == [], method


def test_keys_and_fields_equal_torchs() -> None:
    """Compare the statistics with those that torch's summary reads; its docstring names one of them differently."""
    text = inspect.getsource(cuda.REAL.memory.memory_summary)
    with cuda.installed([]):
        for key in torch.cuda.memory_stats():
            kind, pool, statistic = key.split(".")
            assert f'("{kind}", ' in text and f'("{pool}", ' in text and f'"{statistic}"]' in text, key
        fields = [field for field in vars(torch.cuda.get_device_properties(0)) if not field.startswith("_")]
    if torch._C._has_cuda:
        assert set(fields) <= set(dir(torch._C._CudaDeviceProperties))
        assert {"cudaProfilerStart", "cudaProfilerStop"} <= set(dir(torch._C._cudart))


@pytest.mark.parametrize(
    ("ask", "text"),
    [
        (lambda: torch.cuda.get_sync_debug_mode(), r"get_sync_debug_mode is asked for at .*test_cuda.py:\d+"),
        (lambda: torch.cuda.memory._snapshot(), r"memory._snapshot"),
        (lambda: torch.cuda.Stream().priority_range(), r"Stream.priority_range"),
        (lambda: torch.cuda.memory_stats()["num_ooms"], r"memory_stats\(\)\['num_ooms'\]"),
        (lambda: torch.cuda.get_device_properties(0).warp_size, r"Properties.warp_size"),
    ],
)
def test_unlisted_attribute_is_named_with_its_location(ask: Callable[[], object], text: str) -> None:
    with pytest.raises(Unlisted, match=text), cuda.installed([]):
        ask()
    assert torch.cuda is cuda.REAL


def capture(work: Callable[[], object], mode: str = "thread_local") -> graphs.CUDAGraph:
    graph = graphs.CUDAGraph()
    with torch.cuda.graph(graph, torch.cuda.graph_pool_handle(), torch.cuda.Stream(), capture_error_mode=mode):
        work()
    return graph


def other_stream_unjoined() -> None:
    torch.cuda.Stream().wait_stream(torch.cuda.current_stream())


@pytest.mark.parametrize(
    ("work", "text"),
    [
        (lambda: torch.cuda.synchronize(), "not permitted when stream is capturing: a wait of the host"),
        (lambda: torch.cuda.current_stream().synchronize(), "not permitted when stream is capturing"),
        (lambda: torch.cuda.Event().query(), "Event.query"),
        (lambda: torch.cuda.current_stream().wait_stream(torch.cuda.default_stream()), "uncaptured work"),
        (lambda: capture(lambda: None), "not permitted when stream is capturing"),
        (other_stream_unjoined, "unjoined work"),
    ],
)
def test_capture_refuses_like_cuda(machine: Machine, work: Callable[[], object], text: str) -> None:
    with pytest.raises(RuntimeError) as raised:
        capture(work)
    assert any(text in str(error) for error in (raised.value, raised.value.__context__)), raised.value
    assert capture(lambda: TENSOR.add_(1)).operations == 1  # the next capture works


@pytest.mark.parametrize(("mode", "broken"), [("thread_local", False), ("global", True)])
def test_other_threads_may_synchronize_unless_capture_is_global(machine: Machine, mode: str, broken: bool) -> None:
    """The data loader's thread does this while a micro-batch is recorded."""

    def work() -> None:
        with ThreadPoolExecutor() as pool:
            assert (pool.submit(torch.cuda.synchronize).exception() is not None) is broken

    with pytest.raises(RuntimeError, match="previous error") if broken else nullcontext():
        capture(work, mode)


def test_phase_timer_does_not_synchronize() -> None:
    trace: list[Any] = []
    with cuda.installed(trace):
        timer, device = PhaseTimer(), torch.device("cuda", 0)
        for waits in (False, True):
            timer.start_step(device)
            with timer.span("forward"):
                time.sleep(0.01)
            timer.end_step()
            if waits:
                torch.cuda.synchronize()
            else:
                assert timer.phase_seconds() == {}  # not available yet, and nothing waits for it
        spent = timer.phase_seconds()
    assert set(spent) == {"other", "forward"} and spent["forward"] >= 0.01
    assert sum(isinstance(fact, HostWait) for fact in trace) == 1
