"""Reads the costs of a part of the model on a rank off one run of that part on the meta device. It has no formulas.

    matmul    rows, columns, depth of a product       scores   FLOPs that an attention kernel states (Kernel.flops)
    stream    bytes of an operation or a launch: each of its tensors is read or written once
    beside    bytes that the launch of the matmul before it moves beside operands and result (Kernel.epilogue_tensors)
    begin     a collective of the layer, its bytes    wait     a wait for the collective with this number

These events are in the order of the rank's work, in three phases: F, the forward; B, the backward to the input with all
that is computed again; W, the weights' gradients, unless backward computes them at once, in B. Bytes are `saved` from F
to B, `waiting` from B to W, and the `moment` of each phase: its peak above the bytes that were there when it began, and
in `parts`, which begin where the first gradient of dense matrices, or of experts, lands. The run uses Triton kernels
of a card, whatever device the plan is made on.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property, partial
from types import SimpleNamespace
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from megalite.kernels.dispatch import Kernel
from megalite.nn.parameter import spec_of
from megalite.nn.wgrad_store import WeightGradStore
from megalite.optim.flat_buffers import main_param_dtype
from megalite.parallel.cpu.shared_memory import CollectiveBackend
from megalite.parallel.mesh import Axis, Mesh
from megalite.parallel.spec import ParamSpec
from megalite.planning.meta_mode import MATMULS, META, MetaMode, aten, storage_id

M = TypeVar("M", bound=nn.Module)
# operations that move nothing
NO_COST_OPS = {
    aten._unsafe_view,
    aten.empty,
    aten.new_empty,
    aten.empty_like,
    aten.empty_strided,
    aten.new_empty_strided,
}
NO_COST_OPS |= {aten.detach, aten.lift_fresh}


class TraceEvent(NamedTuple):
    """figures: (rows, columns, depth, whether it adds to a gradient's sum, groups that share out the rows, each with a
    matrix of its own, bytes of an operand's element) of a matmul, (bytes) of a stream, (FLOPs) of scores, (bytes,
    number) of a collective, (number) of a wait."""

    phase: str
    kind: str
    name: str
    values: tuple[float, ...]


@dataclass(frozen=True)
class LayerCost:
    """Bytes and FLOPs of a micro-batch on one rank. `parts`: of each phase, in order, the home of what lands, "" until
    something does, and the peak until the next. `away`: bytes of `saved` that lie on the host, from the end of the next
    block's F to the begin of its B (nn/activation_offload.py); `sent`: all that lie there, of which something else may
    keep some on the device."""

    trace: tuple[TraceEvent, ...]
    saved_bytes: int
    wgrad_bytes: int
    peaks: Mapping[str, Mapping[str, int]]
    offloaded_bytes: int = 0
    host_bytes: int = 0

    @cached_property
    def peak_bytes(self) -> Mapping[str, int]:
        return {phase: max(peaks.values()) for phase, peaks in self.peaks.items()}

    @cached_property
    def flops(self) -> tuple[float, float, float]:
        """FLOPs of F, B and W. Gradients of weights count in W, whenever they are computed."""
        sums = {"F": 0.0, "B": 0.0, "W": 0.0}
        for phase, kind, _, values in self.trace:
            if kind == "matmul":
                rows, columns, depth, sinks, *_ = values
                sums["W" if sinks and phase == "B" else phase] += 2 * rows * columns * depth
            elif kind == "scores":
                sums[phase] += values[0]
        return sums["F"], sums["B"], sums["W"]

    def of_phase(self, phase: str) -> list[TraceEvent]:
        return [event for event in self.trace if event.phase == phase]

    def num_launches(self, phases: str) -> int:
        """How many operations, kernels and collectives the host starts in these phases."""
        return sum(event.phase in phases and event.kind in ("matmul", "stream", "begin") for event in self.trace)


def _unique_bytes(values: Any) -> int:
    """Of the tensors among them, each once."""
    tensors = [x for x in values if isinstance(x, Tensor)]
    return sum({(storage_id(x), x.storage_offset(), x.shape): x.nbytes for x in tensors}.values())


class _RecordingBackend(CollectiveBackend):
    """Moves nothing and records each collective. `axis`: "" or the axis and a space, before its name."""

    def __init__(self, recorder: "CostRecorder", axis: str = ""):
        self.recorder, self.group, self.axis = recorder, self, axis

    def _record_start(self, name: str, x: Tensor) -> Any:
        number = len(self.recorder.trace)
        self.recorder.record("begin", self.axis + name, x.nbytes, number)
        return SimpleNamespace(wait=partial(self.recorder.record, "wait", "", number))

    def start_all_gather(self, out: Tensor, x: Tensor) -> Any:
        return self._record_start("all-gather", out)

    def start_reduce_scatter(self, out: Tensor, x: Tensor) -> Any:
        return self._record_start("reduce-scatter", x)

    def start_all_to_all(self, out: Tensor, x: Tensor, output_splits: list[int], input_splits: list[int]) -> Any:
        return self._record_start("all-to-all", max(out, x, key=len))


class _FakeMainGrad:
    """The sum of a parameter's gradients, which is always in memory."""

    def __init__(self, p: nn.Parameter, on_grad: Callable[[ParamSpec], None]):
        self.grad = torch.empty(p.shape, dtype=main_param_dtype(p.dtype), device=META)
        self.on_grad = partial(on_grad, spec_of(p))

    def accumulator(self) -> tuple[Tensor, bool]:
        self.on_grad()
        return self.grad, False

    def mark_ready(self) -> None:
        pass


class CostRecorder(MetaMode):
    def __init__(self) -> None:
        super().__init__("cuda")
        self.trace: list[TraceEvent] = []
        self.phase = ""
        self.peaks: dict[str, dict[str, int]] = {}
        self.start = 0
        self._names: dict[int, tuple[str, bool]] = {}  # storage -> parameter's name, whether it is the gradients' sum

    def mesh(self, tp: int, cp: int = 1, ep: int = 1, etp: int = 1, *, cp_rank: int = 0) -> Mesh:
        """The mesh of a first rank of axes of these sizes but for cp, whose collectives are recorded."""

        def axis(name: str, size: int, rank: int, before: str) -> Axis:
            return (
                Axis(name, size, rank, _RecordingBackend(self, before), tuple(range(size))) if size > 1 else Axis(name)
            )

        experts = [axis(name, size, 0, f"{name} ") for name, size in (("ep", ep), ("etp", etp), ("ep_etp", ep * etp))]
        ours = axis("tp", tp, 0, ""), axis("cp", cp, cp_rank, "cp ")
        return Mesh(tp=ours[0], cp=ours[1], ep=experts[0], etp=experts[1], ep_etp=experts[2], device=META)

    def exclude_params(self, module: M) -> M:
        """Leave out the bytes of the parameters and of the sums of their gradients."""
        for p in module.parameters():
            p.sink = _FakeMainGrad(p, self.on_grad)  # type: ignore[attr-defined]
            p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
            name = spec_of(p).name.rsplit(".", 1)[-1]
            self._names[storage_id(p)] = name, False
            self._names[storage_id(p.sink.grad)] = name, True  # type: ignore[attr-defined]
        return module

    def should_count(self, storage: int) -> bool:
        return storage not in self._names

    def record(self, kind: str, name: str, *figures: float) -> None:
        if self.phase:
            self.trace.append(TraceEvent(self.phase, kind, name, figures))

    def on_launch(self, kernel: Kernel, args: tuple[Any, ...]) -> None:
        name = kernel.fn.__module__.rsplit(".", 1)[-1] + kernel.fn.__name__
        if kernel.matmul_shape is not None:
            rows, columns, depth, *groups = kernel.matmul_shape(*args)
            self._record_matmul([x for x in args if isinstance(x, Tensor)], rows, columns, depth, *groups or [1])
            if kernel.epilogue_tensors is not None:
                self.record("beside", name, _unique_bytes(kernel.epilogue_tensors(*args)))
            return
        self._record_memory_op(name, args)
        if kernel.flops is not None:
            self.record("scores", name, kernel.flops(*args))

    def on_op(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: tuple[Any, ...]) -> None:
        packet = op._overloadpacket
        if not self.phase or op.is_view or packet in NO_COST_OPS:
            return
        if packet not in MATMULS:
            lists = (x for x in args if isinstance(x, list | tuple))
            self._record_memory_op(
                packet.__name__, [*args, *(x for some in lists for x in some), *kwargs.values(), *results]
            )
            return
        a, b = args[MATMULS[packet] :][:2]
        depth = a.shape[-1] * (a.shape[0] if a.dim() > 2 else 1)
        self._record_matmul([a, b, results[0]], a.shape[-2], b.shape[-1], depth, 1)

    def _record_matmul(self, tensors: list[Tensor], rows: float, columns: float, depth: float, groups: float) -> None:
        """With the name of the parameter among them, and whether the sum of its gradients is. The operand with the
        smallest elements is no sum."""
        known = [self._names[at] for x in tensors if (at := storage_id(x)) in self._names]
        sinks, size = any(is_sum for _, is_sum in known), min(x.element_size() for x in tensors)
        self.record("matmul", known[0][0] if known else "", rows, columns, depth, sinks, groups, size)

    def _record_memory_op(self, name: str, values: Any) -> None:
        self.record("stream", name, _unique_bytes(values))

    def run_phase(self, phase: str, act: Callable[[], Any]) -> Any:
        self.start, self.phase, self.peak, self.peaks[phase] = self.live, phase, self.live, {"": 0}
        result = act()
        self._close_peak()
        self.phase = ""
        return result

    def _close_peak(self) -> dict[str, int]:
        peaks = self.peaks[self.phase]
        peaks[next(reversed(peaks))] = self.peak - self.start
        return peaks

    def on_grad(self, spec: ParamSpec) -> None:
        if self.phase and spec.is_2d and spec.mesh_view not in self.peaks[self.phase]:
            self._close_peak()[spec.mesh_view] = 0
            self.peak = self.live

    def measure(
        self,
        forward: Callable[..., Tensor],
        given: list[Tensor],
        dy_of: Any,
        wgrad_store: WeightGradStore | None = None,
    ) -> LayerCost:
        """The bill of F, B, and W if backward is split. given: the inputs of `forward`; the list is emptied, so that
        nothing else holds them. dy_of: makes the gradient of the result."""
        inputs = [x.requires_grad_() for x in given]
        given.clear()
        y = self.run_phase("F", lambda: forward(*inputs))
        edges, dys = [get_gradient_edge(y)], [dy_of(y)]
        del y
        saved_bytes, wgrad_bytes = self.live - dys[0].nbytes, 0
        self.run_phase("B", lambda: torch.autograd.backward([edges.pop()], [dys.pop()]))
        while inputs:  # without a name that would keep the last one
            inputs.pop().grad = None
        if wgrad_store is not None:
            wgrad_bytes = self.live
            self.run_phase("W", wgrad_store.compute_all)
        return LayerCost(tuple(self.trace), saved_bytes, wgrad_bytes, self.peaks)
