"""A stand-in for torch.cuda on a machine without a card: what is listed here is there, anything else is an error.

    with installed(trace, cards=2):         torch.cuda is the stand-in; streams, events, waits go into the trace

torch's own code and triton's may see the rest of the real module. test_cuda.py compares every function's parameters.
Tensors are device.py's business, which writes Alloc and Free, of which the figures of memory here are counted.
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
from simulated_gpu.simulator.state import Figures, Listed, Machine, machine, unlisted
from simulated_gpu.simulator.streams import index_of
from simulated_gpu.simulator.trace import Fact, Stream

REAL = torch.cuda
TORCHES = ("torch", "triton")  # whose own code may see what is not listed
SNAPSHOT = b"a snapshot of the stand-in\n"


def current_stream_id() -> Stream:
    """Of this thread: where what it launches now goes to."""
    return machine().current_stream()


def is_available() -> bool:
    return device_count() > 0


def device_count() -> int:
    return state._machines[-1].cards if state._machines else 0


def is_initialized() -> bool:
    return bool(state._machines) and state._machines[-1].initialized


def init() -> None:
    machine()


def current_device() -> int:
    return machine().here.device


def set_device(device: Any) -> None:
    if REAL._utils._get_device_index(device) >= 0:
        _exchange_device(index_of(device))


def _exchange_device(device: int) -> int:
    """torch.cuda.device, torch's own context, is made of these two. A negative number changes nothing."""
    if device < 0:
        return -1
    found = machine()
    before, found.here.device = found.here.device, index_of(device)
    if threading.current_thread() is threading.main_thread():
        found.home = found.here.device
    return before


class Properties(Listed):
    """What is asked of a card, under the names of torch's _CudaDeviceProperties."""

    def __init__(self, of: Machine):
        self.name, self.total_memory, (self.major, self.minor) = of.name, of.memory, of.capability
        self.multi_processor_count = of.multiprocessors
        self.uuid = "00000000-0000-0000-0000-000000000000"


def get_device_properties(device: Any = None) -> Properties:
    index = REAL._utils._get_device_index(device, optional=True)
    if not 0 <= index < machine().cards:
        raise AssertionError("Invalid device id")
    return Properties(machine())


def get_device_name(device: Any = None) -> str:
    return get_device_properties(device).name


def get_device_capability(device: Any = None) -> tuple[int, int]:
    found = get_device_properties(device)
    return found.major, found.minor


def _figures(device: Any) -> Figures:
    found = machine()
    return found.read() if index_of(device) == found.home else Figures()


class Stats(dict[str, int]):
    def __missing__(self, key: str) -> int:
        raise unlisted(f"memory_stats()[{key!r}]")


def memory_stats(device: Any = None) -> dict[str, Any]:
    f, stats = _figures(device), Stats({})
    stats |= {"allocated_bytes.all.current": f.allocated, "allocated_bytes.all.peak": f.max_allocated}
    stats |= {"reserved_bytes.all.current": f.reserved, "reserved_bytes.all.peak": f.max_reserved}
    stats["allocation.all.current"] = f.blocks
    return stats


def _figure(name: str) -> Callable[..., int]:
    return lambda device=None: getattr(_figures(device), name)


def reset_peak_memory_stats(device: Any = None) -> None:
    _figures(device).reset_peaks()


def mem_get_info(device: Any = None) -> tuple[int, int]:
    total = machine().memory
    return total - _figures(device).reserved - state.CONTEXT, total


def empty_cache() -> None:
    if is_initialized():
        machine().read().give_back()


class Runtime(Listed):
    """cudart(), of which the profiler's switch is used. `calls`: in their order."""

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
    """torch.manual_seed calls it."""


def _record_memory_history(
    enabled: str | None = "all", context: str | None = "all", stacks: str = "all", max_entries: int = sys.maxsize
) -> None:
    machine().history = None if enabled is None else max_entries


def _dump_snapshot(filename: str = "dump_snapshot.pickle") -> None:
    if machine().history is None:
        raise AssertionError(
            "a snapshot without a history: torch would write one of the memory that is held, without stacks"
        )
    Path(filename).write_bytes(SNAPSHOT)


class Module(types.ModuleType):
    """`torch.cuda` or a module below it: its names are `listed`; of the `real` one only torch itself sees more."""

    def __init__(self, real: types.ModuleType, listed: dict[str, Any]):
        super().__init__(real.__name__, "the stand-in of tests/simulated_gpu/simulator/cuda.py")
        self.__dict__.update({name: real.__dict__.get(name) for name in ("__path__", "__spec__", "__file__")})
        self.__dict__.update(listed, _real=real)

    def __getattr__(self, name: str) -> Any:
        asks = sys._getframe(1).f_globals.get("__name__", "")
        if name.startswith("__") or asks.partition(".")[0] in TORCHES or asks.startswith("importlib"):
            return getattr(self.__dict__["_real"], name)
        raise unlisted(f"{self.__name__.removeprefix('torch.cuda').lstrip('.')}.{name}".lstrip("."))


OF_MODULE = (is_available, device_count, is_initialized, init, current_device, set_device, _exchange_device)
OF_MODULE += (_is_in_bad_fork, manual_seed_all, cudart, empty_cache)
OF_MODULE += (get_device_properties, get_device_name, get_device_capability, mem_get_info, memory_stats)
OF_MODULE += (reset_peak_memory_stats,)
OF_MODULE += (streams.Stream, streams.Event, streams.current_stream, streams.default_stream, streams.set_stream)
OF_MODULE += (streams.synchronize, graphs.CUDAGraph, graphs.graph, graphs.graph_pool_handle)
OF_MODULE += (graphs.is_current_stream_capturing,)
OF_MEMORY = (_record_memory_history, _dump_snapshot)
LISTED: dict[str, Any] = {entry.__name__: entry for entry in OF_MODULE}
LISTED |= {f"{most}memory_{of}": _figure(f"{most}{of}") for of in ("allocated", "reserved") for most in ("", "max_")}
LISTED["_maybe_exchange_device"] = _exchange_device
OF_TORCH = (REAL.device, REAL.stream, REAL.StreamContext, REAL.OutOfMemoryError)  # which are made of what is listed
LISTED_MEMORY: dict[str, Any] = {entry.__name__: entry for entry in OF_MEMORY}


@contextlib.contextmanager
def installed(trace: list[Fact], cards: int = 1, memory: int = 80 << 30) -> Iterator[Machine]:
    """Inside, torch.cuda is the stand-in, for all threads. Raises what was asked for and is not listed once more at the
    end, if somebody has swallowed it. `memory`: bytes of each card."""
    if state._machines:
        raise AssertionError("the stand-in for torch.cuda is installed already")
    found = Machine(trace, cards, memory)
    of_memory = Module(REAL.memory, LISTED_MEMORY)
    module = Module(REAL, {**{own.__name__: own for own in OF_TORCH}, **LISTED, "memory": of_memory})
    before = {part: sys.modules[part] for part in ("torch.cuda", "torch.cuda.memory")}
    state._machines.append(found)
    sys.modules.update({"torch.cuda": module, "torch.cuda.memory": of_memory})
    torch.cuda = module  # type: ignore[assignment]
    current = types.SimpleNamespace(is_capturing=graphs.is_current_stream_capturing)
    try:
        # Adam of a torch that is built for CUDA asks it, past torch.cuda
        with mock.patch.object(torch.accelerator, "current_stream", lambda: current):
            yield found
    finally:
        torch.cuda = before["torch.cuda"]  # type: ignore[assignment]
        sys.modules.update(before)
        state._machines.remove(found)
        graphs._captures.clear()
    if found.unlisted:
        raise found.unlisted[0]
