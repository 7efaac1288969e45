"""The cost of a part of the model on one rank, recorded while the part runs once on the meta device; no formulas.

A cost is a trace of events in the order of the rank's work, and the bytes that it takes. There are three phases: F is
the forward, B the backward to the input with everything that is recomputed, and W the weight gradients, unless backward
computes them at once, in B. The part runs with the Triton kernels of a GPU, whatever device the plan is made on.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from megalite.kernels.dispatch import Kernel
from megalite.nn.parameter import main_param_dtype, name_in_unit, spec_of
from megalite.nn.storage_identity import storage_id
from megalite.nn.wgrad_store import WeightGradStore
from megalite.parallel.cpu.shared_memory import CollectiveBackend
from megalite.parallel.mesh import Mesh, abstract_mesh
from megalite.parallel.spec import ParamSpec
from megalite.planning.meta_mode import META, MetaMode, OpTraits, cache_key

M = TypeVar("M", bound=nn.Module)
LAYER_AXES = ("tp", "cp", "ep", "etp", "ep_etp")  # the axes of collectives of layers, embedding and head


@dataclass(frozen=True)
class Matmul:
    """A product [rows, depth] @ [depth, columns], or one product for each group of the rows.

    Attributes:
        phase: "F", "B" or "W".
        weight: The name of the parameter among the operands or results; "" if there is none.
        rows: The number of rows of the result.
        columns: The number of columns of the result.
        depth: The size of the summed dimension.
        is_weight_grad: The result is added to a parameter's main gradient.
        groups: The number of groups that the rows are divided into, each with a matrix of its own.
        itemsize: The bytes of an element of the operands; of the smaller element if these differ.
        epilogue_bytes: The bytes that the kernel's epilogue moves in addition to operands and result.
    """

    phase: str
    weight: str
    rows: float
    columns: float
    depth: float
    is_weight_grad: bool
    groups: float
    itemsize: int
    epilogue_bytes: int = 0

    @property
    def flops(self) -> float:
        return 2 * self.rows * self.columns * self.depth


@dataclass(frozen=True)
class AttentionKernel:
    """A launch of an attention kernel with the FLOPs that the kernel states (Kernel.flops)."""

    phase: str
    kernel: str
    flops: float


@dataclass(frozen=True)
class MemoryOp:
    """Any other kernel or operation. Each of its tensors is read or written once, `num_bytes` in all."""

    phase: str
    name: str
    num_bytes: int


@dataclass(frozen=True)
class CommStart:
    """The start of a collective.

    Attributes:
        phase: "F", "B" or "W".
        axis: The mesh axis.
        op: "all-gather", "reduce-scatter" or "all-to-all".
        num_bytes: The bytes of the full tensor; of a rank's larger tensor if it is an all-to-all.
        comm_id: Identifies the collective in its CommWait.
    """

    phase: str
    axis: str
    op: str
    num_bytes: int
    comm_id: int


@dataclass(frozen=True)
class CommWait:
    """The point at which the rank waits for a collective."""

    phase: str
    comm_id: int


TraceEvent = Matmul | AttentionKernel | MemoryOp | CommStart | CommWait


@dataclass(frozen=True)
class LayerCost:
    """The work and the memory of a micro-batch on one rank.

    Attributes:
        trace: The work.
        saved_bytes: Bytes that are saved from F to B.
        wgrad_bytes: Bytes that a split backward keeps from B to W.
        peaks: For each phase its peak bytes above those that were there when it started, in sections. A section starts
            when the first gradient of a matrix is added, and has the matrix's name in its unit as its key; the section
            before any gradient has the key "".
        offloaded_bytes: Bytes among `saved_bytes` that are only on the host, from the end of the next block's F to the
            start of its B (nn/activation_offload.py).
        host_bytes: All offloaded bytes, including those that something else keeps on the device as well.
    """

    trace: tuple[TraceEvent, ...]
    saved_bytes: int
    wgrad_bytes: int
    peaks: Mapping[str, Mapping[str, int]]
    offloaded_bytes: int = 0
    host_bytes: int = 0

    @cached_property
    def peak_bytes(self) -> Mapping[str, int]:
        """The peak bytes of each phase."""
        return {phase: max(peaks.values()) for phase, peaks in self.peaks.items()}

    @cached_property
    def flops(self) -> tuple[float, float, float]:
        """The FLOPs of F, B and W. Weight gradients count in W, whenever they are computed."""
        flops = {"F": 0.0, "B": 0.0, "W": 0.0}
        for event in self.trace:
            if isinstance(event, Matmul):
                phase = "W" if event.is_weight_grad and event.phase == "B" else event.phase
                flops[phase] += event.flops
            elif isinstance(event, AttentionKernel):
                flops[event.phase] += event.flops
        return flops["F"], flops["B"], flops["W"]

    def of_phase(self, phase: str) -> list[TraceEvent]:
        return [event for event in self.trace if event.phase == phase]

    def num_launches(self, phases: str) -> int:
        """Return the number of operations, kernels and collectives that the host starts in these phases."""
        return sum(event.phase in phases and not isinstance(event, CommWait) for event in self.trace)


@dataclass(frozen=True)
class _Recording:
    """A run of a repeatable function that can be replayed.

    Attributes:
        events: The events.
        peak_bytes: The peak of live bytes above those at the start.
        results: What the function returned, with a call that allocates it in place of each tensor.
    """

    events: tuple[TraceEvent, ...]
    peak_bytes: int
    results: Any


MAX_RECORDINGS = 4096
# function, phase and arguments -> the recording; None: runs with these arguments cannot be replayed
_recordings: dict[Any, _Recording | None] = {}


def _map_leaves(fn: Callable[[Any], Any], value: Any) -> Any:
    """Return nested tuples and dataclasses with fn(x) for every other value x; a dataclass becomes a tuple."""
    if dataclasses.is_dataclass(value):
        return tuple(_map_leaves(fn, getattr(value, field.name)) for field in dataclasses.fields(value))
    if isinstance(value, tuple):
        leaves = [_map_leaves(fn, x) for x in value]
        return type(value)(*leaves) if hasattr(value, "_fields") else tuple(leaves)
    return fn(value)


def _unique_bytes(values: Iterable[Any]) -> int:
    """Return the bytes of the tensors among `values`, where equal views of a storage count once."""
    tensors = [x for x in values if isinstance(x, Tensor)]
    return sum({(storage_id(x), x.storage_offset(), x.shape): x.nbytes for x in tensors}.values())


class _RecordedComm:
    """A collective that has been recorded and moves nothing."""

    def __init__(self, recorder: "CostRecorder", comm_id: int | None):
        self.recorder = recorder
        self.comm_id = comm_id

    def wait(self) -> None:
        if self.comm_id is not None and self.recorder.phase:
            self.recorder.trace.append(CommWait(self.recorder.phase, self.comm_id))


class _RecordingBackend(CollectiveBackend):
    """A backend of one axis that moves nothing and records the collectives over LAYER_AXES."""

    def __init__(self, recorder: "CostRecorder", axis: str):
        self.recorder = recorder
        self.group = self
        self.axis = axis
        self.records = axis in LAYER_AXES

    def _start(self, op: str, full: Tensor) -> _RecordedComm:
        recorder = self.recorder
        comm_id = len(recorder.trace)
        if self.records and recorder.phase:
            recorder.trace.append(CommStart(recorder.phase, self.axis, op, full.nbytes, comm_id))
        return _RecordedComm(recorder, comm_id if self.records else None)

    def start_all_gather(self, out: Tensor, x: Tensor) -> _RecordedComm:
        return self._start("all-gather", out)

    def start_reduce_scatter(self, out: Tensor, x: Tensor) -> _RecordedComm:
        return self._start("reduce-scatter", x)

    def start_all_to_all(
        self, out: Tensor, x: Tensor, output_splits: list[int], input_splits: list[int]
    ) -> _RecordedComm:
        return self._start("all-to-all", max(out, x, key=len))


class _FakeMainGrad:
    """The main gradient of a parameter, which is always allocated."""

    def __init__(self, p: nn.Parameter, on_grad: Callable[[], None]):
        self.grad = torch.empty(p.shape, dtype=main_param_dtype(p.dtype), device=META)
        self.on_grad = on_grad

    def accumulator(self) -> tuple[Tensor, bool]:
        self.on_grad()
        return self.grad, False

    def mark_ready(self) -> None:
        pass

    def add_autograd_gradient(self, p: nn.Parameter) -> None:
        """Drop a gradient that autograd has accumulated, if any; a run would add it to this one."""
        if p.grad is not None:
            self.on_grad()
            p.grad = None


class CostRecorder(MetaMode):
    """A mode that records the work and the memory of what runs in it.

    Attributes:
        phase: The phase that is recorded; "" for none.
        trace: The events so far.
        peaks: The peaks of the phases so far, as LayerCost has them.
    """

    def __init__(self) -> None:
        super().__init__("cuda")
        self.trace: list[TraceEvent] = []
        self.phase = ""
        self.peaks: dict[str, dict[str, int]] = {}
        self._phase_start = 0  # live bytes when the phase started
        self._params: dict[int, tuple[str, bool]] = {}  # storage -> name of the parameter, is its main gradient

    def mesh(self, tp: int, cp: int = 1, ep: int = 1, etp: int = 1, *, cp_rank: int = 0) -> Mesh:
        """Return a mesh whose collectives are recorded, of rank `cp_rank` of cp and rank 0 of tp.

        It is the smallest stage with these sizes: the run's dp, which a layer does not depend on, may be larger.
        """
        world = math.lcm(tp * cp, ep * etp)
        mesh = abstract_mesh(world, cp_rank * tp, partial(_RecordingBackend, self), tp=tp, cp=cp, ep=ep, etp=etp)
        return replace(mesh, device=META)

    def exclude_params(self, module: M) -> M:
        """Leave the bytes of the parameters and of their main gradients out of the cost, and return the module."""
        for p in module.parameters():
            main_grad = _FakeMainGrad(p, partial(self.on_grad, spec_of(p), getattr(p, "unit", "")))
            p.main_grad = main_grad  # type: ignore[attr-defined]
            p.register_post_accumulate_grad_hook(main_grad.add_autograd_gradient)
            name = spec_of(p).name.rsplit(".", 1)[-1]
            self._params[storage_id(p)] = (name, False)
            self._params[storage_id(main_grad.grad)] = (name, True)
        return module

    def should_count(self, storage: int) -> bool:
        return storage not in self._params

    def on_launch(self, kernel: Kernel, args: tuple[Any, ...]) -> None:
        if not self.phase:
            return
        name = kernel.fn.__module__.rsplit(".", 1)[-1] + kernel.fn.__name__
        if kernel.matmul_shape is not None:
            epilogue_bytes = 0
            if kernel.epilogue_tensors is not None:
                epilogue_bytes = _unique_bytes(kernel.epilogue_tensors(*args))
            rows, columns, depth, *groups = kernel.matmul_shape(*args)
            tensors = [x for x in args if isinstance(x, Tensor)]
            self._record_matmul(tensors, rows, columns, depth, groups[0] if groups else 1, epilogue_bytes)
        elif kernel.flops is not None:
            self.trace.append(AttentionKernel(self.phase, name, kernel.flops(*args)))
        else:
            self.trace.append(MemoryOp(self.phase, name, _unique_bytes(args)))

    def num_events(self) -> int:
        return len(self.trace)

    def on_repeat(self, first_event: int, times: int) -> None:
        self.trace += self.trace[first_event:] * times

    def run_repeatable(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """Run a repeatable function (kernels/dispatch.py), or replay an earlier run with arguments of the same shapes.

        A replay adds the same events to the trace and the same bytes to the peak. A run is only replayed if that is
        all it does: it has no collectives, and its results are all that it leaves allocated.
        """
        tensors: list[Tensor] = []

        def key_of(x: Any) -> Any:
            if isinstance(x, Tensor):
                tensors.append(x)
            return cache_key(x)

        try:
            key = fn, self.phase, torch.is_grad_enabled(), _map_leaves(key_of, args)
            storages = [storage_id(x) for x in tensors]
            # arguments that share a storage count once in the bytes of an operation
            key = *key, tuple((storages.index(storage_id(x)), x.storage_offset()) for x in tensors)
            recording = _recordings.get(key)
        except TypeError:
            return fn(*args)
        if not self.phase or any(storage not in self._storages for storage in storages):
            return fn(*args)  # the run might count the bytes of an argument, or a gradient of a parameter
        if recording is None:
            if key in _recordings:
                return fn(*args)
            return self._record(fn, args, key)
        self.trace += recording.events
        self.peak = max(self.peak, self.live + recording.peak_bytes)
        return _map_leaves(lambda x: x() if isinstance(x, partial) else x, recording.results)

    def _record(self, fn: Callable[..., Any], args: tuple[Any, ...], key: Any) -> Any:
        """Return the results of a repeatable function, and keep a recording of its run, or None if it is incomplete."""
        first_event = len(self.trace)
        num_sections = len(self.peaks[self.phase])
        live, peak = self.live, self.peak
        self.peak = live
        results = fn(*args)
        peak_bytes = self.peak - live
        self.peak = max(self.peak, peak)
        assert num_sections == len(self.peaks[self.phase]), f"{fn.__name__} is not repeatable: it adds weight gradients"
        events = tuple(self.trace[first_event:])
        tensors: list[Tensor] = []

        def allocation(x: Any) -> Any:
            """Return a call that allocates x, or a value that is no tensor itself."""
            if not isinstance(x, Tensor):
                return x
            tensors.append(x)
            return partial(torch.empty_strided, x.shape, x.stride(), dtype=x.dtype, device=META)

        allocations = _map_leaves(allocation, results)
        has_own_storages = len({storage_id(x) for x in tensors}) == len(tensors)
        is_complete = (
            has_own_storages
            and all(x.nbytes == x.untyped_storage().nbytes() for x in tensors)
            and self.live - live == sum(x.nbytes for x in tensors)
            and not any(isinstance(event, CommStart | CommWait) for event in events)
        )
        if len(_recordings) >= MAX_RECORDINGS:
            _recordings.clear()
        _recordings[key] = _Recording(events, peak_bytes, allocations) if is_complete else None
        return results

    def on_op(self, traits: OpTraits, args: tuple[Any, ...], kwargs: dict[str, Any], results: tuple[Any, ...]) -> None:
        if not self.phase or traits.moves_no_bytes:
            return
        index = traits.matmul_index
        if index is not None:
            a, b = args[index : index + 2]
            batch_size = a.shape[0] if a.dim() > 2 else 1
            # the products of a batch fill the device together, like one with all of their rows
            self._record_matmul([a, b, results[0]], a.shape[-2] * batch_size, b.shape[-1], a.shape[-1], groups=1)
            return
        values = [*args, *kwargs.values(), *results]
        for arg in args:
            if isinstance(arg, list | tuple):
                values += arg
        self.trace.append(MemoryOp(self.phase, traits.name, _unique_bytes(values)))

    def _record_matmul(
        self, tensors: list[Tensor], rows: float, columns: float, depth: float, groups: float, epilogue_bytes: int = 0
    ) -> None:
        """Record a matmul. Its tensors are the operands and the result, or the main gradient that it is added to."""
        params = [self._params[key] for key in map(storage_id, tensors) if key in self._params]
        event = Matmul(
            self.phase,
            weight=params[0][0] if params else "",
            rows=rows,
            columns=columns,
            depth=depth,
            is_weight_grad=any(is_main_grad for _, is_main_grad in params),
            groups=groups,
            itemsize=min(x.element_size() for x in tensors),  # a main gradient has larger elements than the operands
            epilogue_bytes=epilogue_bytes,
        )
        self.trace.append(event)

    def run_phase(self, phase: str, run: Callable[[], Any]) -> Any:
        """Record a phase, and return the result of `run`."""
        self._phase_start = self.live
        self.phase = phase
        self.peak = self.live
        self.peaks[phase] = {"": 0}
        result = run()
        self._close_peak()
        self.phase = ""
        return result

    def _close_peak(self) -> None:
        """Set the peak of the current section."""
        peaks = self.peaks[self.phase]
        section = next(reversed(peaks))
        peaks[section] = self.peak - self._phase_start

    def on_grad(self, spec: ParamSpec, unit: str) -> None:
        """Start a section of the peaks if this is the first gradient of a matrix of the unit in the phase."""
        name = name_in_unit(spec, unit)
        if self.phase and spec.is_2d and name not in self.peaks[self.phase]:
            self._close_peak()
            self.peaks[self.phase][name] = 0
            self.peak = self.live

    def measure(
        self,
        forward: Callable[..., Tensor],
        inputs: list[Tensor],
        make_dy: Callable[[Tensor], Tensor],
        wgrad_store: WeightGradStore | None = None,
    ) -> LayerCost:
        """Return the cost of F, of B, and with a split backward of W.

        Args:
            forward: The forward.
            inputs: Its arguments. The list is emptied, so that no other reference keeps them allocated.
            make_dy: Returns the gradient of the result.
            wgrad_store: The store of the weight gradients if backward is split.
        """
        args = [x.requires_grad_() for x in inputs]
        inputs.clear()
        y = self.run_phase("F", lambda: forward(*args))
        edges = [get_gradient_edge(y)]
        dys = [make_dy(y)]
        del y
        saved_bytes = self.live - dys[0].nbytes
        self.run_phase("B", lambda: torch.autograd.backward([edges.pop()], [dys.pop()]))
        while args:
            args.pop().grad = None  # a loop variable would keep the last one allocated
        wgrad_bytes = 0
        if wgrad_store is not None:
            wgrad_bytes = self.live
            self.run_phase("W", wgrad_store.compute_all)
        return LayerCost(tuple(self.trace), saved_bytes, wgrad_bytes, self.peaks)
