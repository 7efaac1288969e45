"""A simulated GPU: inside `with simulated() as gpu:` the program runs as if on a GPU.

Tensors are ordinary CPU tensors, so that autograd runs; their simulated location is recorded by storage (memory.py). A
dispatch mode sees every ATen operation in every thread that starts inside (operations.py); Triton kernels are
interpreted; the Python interfaces of tensors and torch.cuda are replaced (tensors.py, cuda.py). gpu.trace contains what
CUDA would do: a Launch for each operation that runs a kernel; a HostWait and a HostRead for each wait for a value or a
size, and for each copy from or to memory that is not pinned. Host and GPU tensors in one operation are Mixed, except
0-dim host tensors where CUDA accepts them.
"""

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes

from megalite.checkpoint.manager.saver import CheckpointSaver
from megalite.optim.zero.storage import observe_allocations
from megalite.pipeline.cuda_graph import CudaGraphPipeline
from megalite.pipeline.runtime import Pipeline
from megalite.training import evaluation, setup
from megalite.training import train_step as step
from megalite.training.logging.step_log import StepLog
from megalite.training.monitoring import replica_monitor
from simulated_gpu.simulator import cuda, operations, tensors
from simulated_gpu.simulator.memory import Memory, Side
from simulated_gpu.simulator.state import caller
from simulated_gpu.simulator.tape import Dispatch
from simulated_gpu.simulator.trace import Fact, HostAccess, HostRead, HostWait, Launch, Mark, Mixed, Span, Stream


class SimulatedGpu:
    """The simulated GPU of a rank and its trace; `device` is the current device of this rank."""

    def __init__(self, trace: list[Fact], index: int = 0):
        self.trace, self.device = trace, torch.device("cuda", index)
        self.memory = Memory(self.write, cuda.current_stream_id)
        self.running = True  # False: later facts are not recorded
        self._local = threading.local()

    def write(self, fact: Fact) -> None:
        if self.running:
            self.trace.append(fact)

    # the interface for simulated_gpu/simulator/nccl.py

    def stream(self) -> Stream:
        return cuda.current_stream_id()

    def span(self, x: Tensor) -> Span:
        return self.memory.span(x) or Span(0, 0, 0)  # a tensor without elements

    def on_gpu(self, x: Tensor) -> bool:
        return self.memory.on_gpu(x)

    @property
    def reads(self) -> list[HostRead]:
        return [fact for fact in self.trace if isinstance(fact, HostRead)]

    @property
    def mixed(self) -> list[Mixed]:
        return [fact for fact in self.trace if isinstance(fact, Mixed)]

    # marks and phases

    @contextlib.contextmanager
    def mark(self, name: str) -> Iterator[None]:
        marks = self._local.__dict__.setdefault("marks", [])
        marks.append(name)
        self.write(Mark(name))
        try:
            yield
        finally:
            marks.pop()
            self.write(Mark(""))

    def phase(self) -> str:
        if torch._C._current_graph_task_id() != -1:  # autograd is running, which includes recomputed forwards
            return "backward"
        marks = self._local.__dict__.get("marks", [])
        return next((name for name in reversed(marks) if name in ("forward", "backward")), "")

    # recording

    def launch(self, name: str, reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()) -> None:
        """Record a kernel on the current stream."""
        spans = self.memory.spans
        self.write(Launch(cuda.current_stream_id(), name, spans([*reads]), spans([*writes]), caller()))

    def host_waits(self, kind: str, name: str, reads: tuple[Span, ...] = (), writes: tuple[Span, ...] = ()) -> None:
        """Record that the host waits for the current stream and then accesses host memory, if that is known."""
        where = caller()
        self.write(HostWait(stream=cuda.current_stream_id(), where=where))
        if reads or writes:
            self.write(HostAccess(name, reads, writes, where))
        self.write(HostRead(kind, where, self.phase()))

    def record_mixed(self, what: str) -> None:
        self.write(Mixed(what, caller()))

    def host_access(self, name: str, reads: list[Tensor], writes: list[Tensor]) -> None:
        """Record an access by the host to memory that is the source or target of copies."""
        read, written = self.memory.spans(reads), self.memory.spans(writes)
        if (read or written) and not self.is_paused:
            self.write(HostAccess(name, read, written, caller()))

    # the interface for the replaced functions of torch

    @contextlib.contextmanager
    def new_tensors_on(self, side: Side | None) -> Iterator[None]:
        """Place the tensors that operations create on `side`; None means the side of their inputs."""
        previous, self._local.side = self._local.__dict__.get("side"), side
        try:
            yield
        finally:
            self._local.side = previous

    @property
    def requested_side(self) -> Side | None:
        return self._local.__dict__.get("side")

    @contextlib.contextmanager
    def pause_simulation(self) -> Iterator[None]:
        """Simulate nothing in this thread: the code inside is not the program's."""
        previous, self._local.is_paused = self.is_paused, True
        try:
            with _disable_current_modes():
                yield
        finally:
            self._local.is_paused = previous

    @property
    def is_paused(self) -> bool:
        return self._local.__dict__.get("is_paused", False)

    # operations

    def operate(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        traits = operations.traits_of(func)
        device = kwargs.get("device")
        read, written = operations.split(traits, args, kwargs)
        if traits.skip or (device is not None and device.type == "meta") or any(x.is_meta for x in read + written):
            return func(*args, **kwargs)
        side = self.requested_side
        if device is not None and device.type == "cuda":
            side, kwargs = "gpu", {**kwargs, "device": torch.device("cpu")}
        if kwargs.get("pin_memory"):
            side, kwargs = "pinned", {**kwargs, "pin_memory": False}
        if traits.name in ("copy_", "_to_copy"):
            return self._copy(func, traits.name, args, kwargs, side)
        common_side = self._common_side(traits, args, read + written)
        return self._run(func, traits, args, kwargs, (read, written), side or common_side)

    def _run(
        self, func: OpOverload, traits: operations.Traits, args: tuple[Any, ...], kwargs: dict[str, Any],
        accesses: tuple[list[Tensor], list[Tensor]], side: Side,
    ) -> Any:  # fmt: skip
        result = operations.run(func, args, kwargs)
        read, written = accesses
        outputs = operations.tensors_in(result)
        if side != "host":
            for x in outputs:
                self.memory.place(x, side)
        if side == "gpu":
            if traits.launches:
                written_storages = {x.untyped_storage()._cdata for x in written}
                new = [x for x in outputs if x.untyped_storage()._cdata not in written_storages]
                self.launch(traits.name, read, [*written, *new])
            if traits.name == "_local_scalar_dense":
                self.launch("copy to the host", read)
                self.host_waits("item", "item")
            elif operations.waits(traits, args, kwargs) and not self._fills(traits, args):
                self.host_waits(traits.name, traits.name)
        elif traits.launches or traits.name == "_local_scalar_dense":
            self.host_access(traits.name, read, written)
        return result

    def _common_side(self, traits: operations.Traits, args: tuple[Any, ...], inputs: list[Tensor]) -> Side:
        """Return the side of the result, and record inputs that may not be mixed."""
        sides = [self.memory.side(x) for x in inputs]
        if "gpu" not in sides:
            return "host" if "host" in sides or "pinned" in sides else "unplaced"
        for x, side in zip(inputs, sides, strict=True):
            if side == "unplaced":
                self.memory.place(x, "gpu")
        on_host = [x for x, side in zip(inputs, sides, strict=True) if side in ("host", "pinned")]
        if traits.name in operations.INDEXING and sides[0] == "gpu":
            indices = operations.tensors_in(args[1]) + [x for x in inputs if x.dim() == 0]
            rest = [x for x in on_host if not any(x is index for index in indices)]
            if len(rest) < len(on_host) and not self._fills(traits, args):
                self.host_waits("an index on the host", traits.name)
            on_host = rest
        if on_host and (not traits.host_scalar or any(x.dim() for x in on_host)):
            shapes = ", ".join(f"{side} {tuple(x.shape)}" for x, side in zip(inputs, sides, strict=True))
            self.record_mixed(f"{traits.name}({shapes})")
        return "gpu"

    def _fills(self, traits: operations.Traits, args: tuple[Any, ...]) -> bool:
        return operations.fills(traits, args) and not self.memory.on_gpu(args[2])

    def _copy(
        self, func: OpOverload, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], side: Side | None
    ) -> Any:
        """Run `copy_(target, source, non_blocking)`, or `_to_copy(source)` to `side` or its present side."""
        source: Tensor = args[-1] if name == "_to_copy" else args[1]
        source_side = self.memory.side(source)
        wait = not (kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))
        if name == "copy_":
            result_side = self.memory.side(args[0])
            if result_side == "unplaced":
                result_side = self.memory.place(args[0], source_side).side if source_side == "gpu" else result_side
        else:
            result_side = side or source_side
            if result_side == "host" and source_side == "gpu" and not wait:
                result_side = "pinned"  # as torch does
        result = func(*args, **kwargs)
        if name == "_to_copy" and result_side != "host":
            self.memory.place(result, result_side)
        self.record_copy(source, result, source_side, result_side, wait)
        return result

    def record_copy(self, source: Tensor, result: Tensor, source_side: Side, result_side: Side, wait: bool) -> None:
        """Record a copy of `source` to `result`."""
        if source_side != "gpu" and result_side != "gpu":
            self.host_access("copy", [source], [result])
            return
        if source_side == result_side or "unplaced" in (source_side, result_side):
            self.launch("copy", [source], [result])
            return
        host_tensor = result if source_side == "gpu" else source
        host_side = self.memory.place(host_tensor, "host").side  # its accesses are recorded from now on
        if not wait and host_side != "pinned":
            self.record_mixed(
                f"copy of {source_side} to {result_side}, non_blocking, and the host's memory is not pinned"
            )
        self.launch("copy to the host" if source_side == "gpu" else "copy to the GPU", [source], [result])
        if wait and source_side == "gpu":
            self.host_waits("copy to the host", "copy to the host", writes=self.memory.spans([result]))
        elif wait:
            self.host_waits("copy to the GPU", "copy to the GPU", reads=self.memory.spans([source]))


class _Operations(Dispatch):
    """The dispatch mode of one thread."""

    def __init__(self, gpu: SimulatedGpu):
        super().__init__()
        self.gpu = gpu

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.gpu.running:  # a thread that outlived the simulation
            return func(*args, **(kwargs or {}))
        return self.gpu.operate(func, args, kwargs or {})


def _in_threads(gpu: SimulatedGpu) -> Callable[[threading.Thread], None]:
    run = threading.Thread.run

    def run_on_gpu(self: threading.Thread) -> None:
        if not gpu.running:
            return run(self)
        with _Operations(gpu):
            return run(self)

    return run_on_gpu


def _clear_dynamo_cache() -> None:
    """Clear Dynamo's table of torch functions, which it builds once: it must not contain the replacements."""
    if (rules := sys.modules.get("torch._dynamo.trace_rules")) is not None:
        rules.clear_lru_cache()


@contextlib.contextmanager
def simulated(index: int = 0, num_gpus: int = 8) -> Iterator[SimulatedGpu]:
    """Simulate GPU `index` of `num_gpus` for the code inside and the threads that it starts."""
    gpu = SimulatedGpu([], index)
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, gpu, "running", False)
        stack.callback(_clear_dynamo_cache)
        stack.enter_context(cuda.installed(gpu.trace, num_gpus))
        torch.cuda.set_device(index)
        stack.enter_context(tensors.replace_torch_functions(gpu))
        stack.enter_context(_set_marks(gpu))
        stack.enter_context(tensors.record_kernels(gpu))
        stack.enter_context(mock.patch.object(threading.Thread, "run", _in_threads(gpu)))
        stack.enter_context(_Operations(gpu))
        stack.enter_context(observe_allocations(gpu.memory))
        yield gpu


# (owner, attribute) of a function, name of its mark
MARKS = (
    (Pipeline, "_forward", "forward"),
    (Pipeline, "_backward", "backward"),
    (Pipeline, "step", "forward-backward"),
    (CudaGraphPipeline, "step", "forward-backward"),
    (step, "train_step", "step"),
    (step, "_reduce_step_sums", "agree"),
    (step, "_update", "update"),
    (evaluation, "evaluation_losses", "evaluation"),
    (StepLog, "_log", "log"),
    (replica_monitor, "check_replicas", "replica check"),
    (CheckpointSaver, "save", "save"),
    (setup, "build_run", "build"),
)


@contextlib.contextmanager
def _set_marks(gpu: Any) -> Iterator[None]:
    def marked(original: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            with gpu.mark(name):
                return original(*args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        for owner, attribute, name in MARKS:
            stack.enter_context(mock.patch.object(owner, attribute, marked(getattr(owner, attribute), name)))
        yield
