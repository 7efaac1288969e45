"""A substitute for torch.cuda on a machine without a GPU: it has what is listed here, and anything else is an error.

    with installed(trace, num_gpus=2):      torch.cuda is the substitute; streams, events, waits go into the trace

The code of torch and triton may use the rest of the real module. test_cuda.py compares all parameters of functions.
device.py handles tensors; the memory statistics here are computed from the Alloc and Free facts that it writes.
"""

import contextlib
import sys
import threading
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.cuda.memory

from simulated_gpu.simulator import graphs, state, streams
from simulated_gpu.simulator.state import Listed, Machine, MemoryUsage, machine, unlisted
from simulated_gpu.simulator.streams import index_of
from simulated_gpu.simulator.trace import Fact, Stream

REAL = torch.cuda
TORCHES = ("torch", "triton")  # their code may use what is not listed
SNAPSHOT = b"a snapshot of the substitute\n"


def current_stream_id() -> Stream:
    """Return the current stream of this thread."""
    return machine().current_stream()


def is_available() -> bool:
    return device_count() > 0


def device_count() -> int:
    return state._machines[-1].num_gpus if state._machines else 0


def is_initialized() -> bool:
    return bool(state._machines) and state._machines[-1].initialized


def init() -> None:
    machine()


def current_device() -> int:
    return machine().thread_state.device


def set_device(device: Any) -> None:
    if REAL._utils._get_device_index(device) >= 0:
        _exchange_device(index_of(device))


def _exchange_device(device: int) -> int:
    """Set the current GPU and return the previous one; torch.cuda.device uses this. A negative index has no effect."""
    if device < 0:
        return -1
    current = machine()
    before, current.thread_state.device = current.thread_state.device, index_of(device)
    if threading.current_thread() is threading.main_thread():
        current.traced_gpu = current.thread_state.device
    return before


class Properties(Listed):
    """The properties of a GPU, with the names of torch's _CudaDeviceProperties."""

    def __init__(self, spec: Machine):
        self.name, self.total_memory, (self.major, self.minor) = spec.name, spec.memory, spec.capability
        self.multi_processor_count = spec.multiprocessors
        self.uuid = "00000000-0000-0000-0000-000000000000"


def get_device_properties(device: Any = None) -> Properties:
    index = REAL._utils._get_device_index(device, optional=True)
    if not 0 <= index < machine().num_gpus:
        raise AssertionError("Invalid device id")
    return Properties(machine())


def get_device_name(device: Any = None) -> str:
    return get_device_properties(device).name


def get_device_capability(device: Any = None) -> tuple[int, int]:
    properties = get_device_properties(device)
    return properties.major, properties.minor


def _memory_usage(device: Any) -> MemoryUsage:
    current = machine()
    return current.read_trace() if index_of(device) == current.traced_gpu else MemoryUsage()


class Stats(dict[str, int]):
    def __missing__(self, key: str) -> int:
        raise unlisted(f"memory_stats()[{key!r}]")


def memory_stats(device: Any = None) -> dict[str, Any]:
    usage, stats = _memory_usage(device), Stats({})
    stats |= {"allocated_bytes.all.current": usage.allocated, "allocated_bytes.all.peak": usage.max_allocated}
    stats |= {"reserved_bytes.all.current": usage.reserved, "reserved_bytes.all.peak": usage.max_reserved}
    stats["allocation.all.current"] = usage.blocks
    return stats


def _memory_reader(name: str) -> Callable[..., int]:
    return lambda device=None: getattr(_memory_usage(device), name)


def reset_peak_memory_stats(device: Any = None) -> None:
    _memory_usage(device).reset_peaks()


def mem_get_info(device: Any = None) -> tuple[int, int]:
    total = machine().memory
    return total - _memory_usage(device).reserved - state.CONTEXT, total


def empty_cache() -> None:
    if is_initialized():
        machine().read_trace().release_cached()


class Runtime(Listed):
    """The result of cudart(), which records calls of the profiler's switch in `calls`."""

    def __init__(self, calls: list[str]):
        self.calls = calls

    def cudaProfilerStart(self) -> int:  # noqa: N802 (CUDA's name)
        self.calls.append("cudaProfilerStart")
        return 0

    def cudaProfilerStop(self) -> int:  # noqa: N802
        self.calls.append("cudaProfilerStop")
        return 0


def cudart() -> Runtime:
    return Runtime(machine().runtime_calls)


def _is_in_bad_fork() -> bool:
    return False


def manual_seed_all(seed: int) -> None:
    """Do nothing; torch.manual_seed calls it."""


def _record_memory_history(
    enabled: str | None = "all", context: str | None = "all", stacks: str = "all", max_entries: int = sys.maxsize
) -> None:
    machine().history = None if enabled is None else max_entries


def _dump_snapshot(filename: str = "dump_snapshot.pickle") -> None:
    if machine().history is None:
        raise AssertionError(
            "a snapshot without a history: torch would write one of the allocated memory, without stacks"
        )
    Path(filename).write_bytes(SNAPSHOT)


class Module(types.ModuleType):
    """The substitute for `torch.cuda` or a submodule: its names are `listed`; only torch sees others of `real`."""

    def __init__(self, real: types.ModuleType, listed: dict[str, Any]):
        super().__init__(real.__name__, "the substitute of tests/simulated_gpu/simulator/cuda.py")
        self.__dict__.update({name: real.__dict__.get(name) for name in ("__path__", "__spec__", "__file__")})
        self.__dict__.update(listed, _real=real)

    def __getattr__(self, name: str) -> Any:
        caller_module = sys._getframe(1).f_globals.get("__name__", "")
        if name.startswith("__") or caller_module.partition(".")[0] in TORCHES or caller_module.startswith("importlib"):
            return getattr(self.__dict__["_real"], name)
        raise unlisted(f"{self.__name__.removeprefix('torch.cuda').lstrip('.')}.{name}".lstrip("."))


MODULE_ENTRIES = (is_available, device_count, is_initialized, init, current_device, set_device, _exchange_device)
MODULE_ENTRIES += (_is_in_bad_fork, manual_seed_all, cudart, empty_cache)
MODULE_ENTRIES += (get_device_properties, get_device_name, get_device_capability, mem_get_info, memory_stats)
MODULE_ENTRIES += (reset_peak_memory_stats,)
MODULE_ENTRIES += (streams.Stream, streams.Event, streams.current_stream, streams.default_stream, streams.set_stream)
MODULE_ENTRIES += (streams.synchronize, graphs.CUDAGraph, graphs.graph, graphs.graph_pool_handle)
MODULE_ENTRIES += (graphs.is_current_stream_capturing,)
MEMORY_ENTRIES = (_record_memory_history, _dump_snapshot)
LISTED: dict[str, Any] = {entry.__name__: entry for entry in MODULE_ENTRIES}
LISTED |= {
    f"{prefix}memory_{kind}": _memory_reader(f"{prefix}{kind}")
    for kind in ("allocated", "reserved")
    for prefix in ("", "max_")
}
LISTED["_maybe_exchange_device"] = _exchange_device
TORCH_ENTRIES = (
    REAL.device,
    REAL.stream,
    REAL.StreamContext,
    REAL.OutOfMemoryError,
)  # torch's own, built on what is listed
LISTED_MEMORY: dict[str, Any] = {entry.__name__: entry for entry in MEMORY_ENTRIES}


@contextlib.contextmanager
def installed(trace: list[Fact], num_gpus: int = 1, memory: int = 80 << 30) -> Iterator[Machine]:
    """Replace torch.cuda by the substitute for all threads, with `memory` bytes on each GPU.

    At the end, raise the first use of an unlisted attribute again, in case a caller has swallowed it.
    """
    if state._machines:
        raise AssertionError("the substitute for torch.cuda is installed already")
    simulated_machine = Machine(trace, num_gpus, memory)
    memory_module = Module(REAL.memory, LISTED_MEMORY)
    module = Module(REAL, {**{entry.__name__: entry for entry in TORCH_ENTRIES}, **LISTED, "memory": memory_module})
    before = {name: sys.modules[name] for name in ("torch.cuda", "torch.cuda.memory")}
    state._machines.append(simulated_machine)
    sys.modules.update({"torch.cuda": module, "torch.cuda.memory": memory_module})
    torch.cuda = module  # type: ignore[assignment]
    stream = types.SimpleNamespace(is_capturing=graphs.is_current_stream_capturing)
    try:
        # Adam in a CUDA build of torch calls it without torch.cuda
        with mock.patch.object(torch.accelerator, "current_stream", lambda: stream):
            yield simulated_machine
    finally:
        torch.cuda = before["torch.cuda"]  # type: ignore[assignment]
        sys.modules.update(before)
        state._machines.remove(simulated_machine)
        graphs._captures.clear()
    if simulated_machine.unlisted:
        raise simulated_machine.unlisted[0]
