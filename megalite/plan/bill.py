"""Reads the costs of a part of the model on a rank off one run of that part on the meta device. It has no formulas.

    matmul    rows, columns, depth of a product       scores   FLOPs that an attention kernel states (Kernel.flops)
    stream    bytes of an operation or a launch: each of its tensors is read or written once
    beside    bytes that the launch of the matmul before it moves beside operands and result (Kernel.beside)
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
from megalite.nn.later import Later
from megalite.nn.parameter import spec_of
from megalite.optim.flat_storage import main_dtype
from megalite.parallel.mesh import Axis, Mesh
from megalite.parallel.shared_memory import Transport
from megalite.parallel.spec import ParamSpec
from megalite.plan.meta import MATMULS, META, Meta, aten, storage_of

M = TypeVar("M", bound=nn.Module)
# operations that move nothing
FREE = {aten._unsafe_view, aten.empty, aten.new_empty, aten.empty_like, aten.empty_strided, aten.new_empty_strided}
FREE |= {aten.detach, aten.lift_fresh}


class Event(NamedTuple):
    """figures: (rows, columns, depth, whether it adds to a gradient's sum, groups that share out the rows, each with a
    matrix of its own, bytes of an operand's element) of a matmul, (bytes) of a stream, (FLOPs) of scores, (bytes,
    number) of a collective, (number) of a wait."""

    phase: str
    what: str
    name: str
    figures: tuple[float, ...]


@dataclass(frozen=True)
class Bill:
    """Bytes and FLOPs of a micro-batch on one rank. `parts`: of each phase, in order, the home of what lands, "" until
    something does, and the peak until the next. `away`: bytes of `saved` that lie on the host, from the end of the next
    block's F to the begin of its B (nn/activation_offload.py); `sent`: all that lie there, of which something else may
    keep some on the device."""

    trace: tuple[Event, ...]
    saved: int
    waiting: int
    parts: Mapping[str, Mapping[str, int]]
    away: int = 0
    sent: int = 0

    @cached_property
    def moment(self) -> Mapping[str, int]:
        return {phase: max(parts.values()) for phase, parts in self.parts.items()}

    @cached_property
    def flops(self) -> tuple[float, float, float]:
        """FLOPs of F, B and W. Gradients of weights count in W, whenever they are computed."""
        sums = {"F": 0.0, "B": 0.0, "W": 0.0}
        for phase, what, _, figures in self.trace:
            if what == "matmul":
                rows, columns, depth, sinks, *_ = figures
                sums["W" if sinks and phase == "B" else phase] += 2 * rows * columns * depth
            elif what == "scores":
                sums[phase] += figures[0]
        return sums["F"], sums["B"], sums["W"]

    def of(self, phase: str) -> list[Event]:
        return [event for event in self.trace if event.phase == phase]

    def launches(self, phases: str) -> int:
        """How many operations, kernels and collectives the host starts in these phases."""
        return sum(event.phase in phases and event.what in ("matmul", "stream", "begin") for event in self.trace)


def _bytes_of(values: Any) -> int:
    """Of the tensors among them, each once."""
    tensors = [x for x in values if isinstance(x, Tensor)]
    return sum({(storage_of(x), x.storage_offset(), x.shape): x.nbytes for x in tensors}.values())


class _Counted(Transport):
    """Moves nothing and records each collective. `axis`: "" or the axis and a space, before its name."""

    def __init__(self, recorder: "Recorder", axis: str = ""):
        self.recorder, self.group, self.axis = recorder, self, axis

    def _begin(self, name: str, x: Tensor) -> Any:
        number = len(self.recorder.trace)
        self.recorder.add("begin", self.axis + name, x.nbytes, number)
        return SimpleNamespace(wait=partial(self.recorder.add, "wait", "", number))

    def start_all_gather(self, out: Tensor, x: Tensor) -> Any:
        return self._begin("all-gather", out)

    def start_reduce_scatter(self, out: Tensor, x: Tensor) -> Any:
        return self._begin("reduce-scatter", x)

    def start_all_to_all(self, out: Tensor, x: Tensor, got: list[int], given: list[int]) -> Any:
        return self._begin("all-to-all", max(out, x, key=len))


class _Sink:
    """The sum of a parameter's gradients, which is always in memory."""

    def __init__(self, p: nn.Parameter, lands: Callable[[ParamSpec], None]):
        self.grad, self.lands = torch.empty(p.shape, dtype=main_dtype(p.dtype), device=META), partial(lands, spec_of(p))

    def open(self) -> tuple[Tensor, bool]:
        self.lands()
        return self.grad, False

    def landed(self) -> None:
        pass


class Recorder(Meta):
    def __init__(self) -> None:
        super().__init__("cuda")
        self.trace: list[Event] = []
        self.phase = ""
        self.parts: dict[str, dict[str, int]] = {}
        self.start = 0
        self._names: dict[int, tuple[str, bool]] = {}  # storage -> parameter's name, whether it is the gradients' sum

    def mesh(self, tp: int, cp: int = 1, ep: int = 1, etp: int = 1, *, cp_rank: int = 0) -> Mesh:
        """The mesh of a first rank of axes of these sizes but for cp, whose collectives are recorded."""

        def axis(name: str, size: int, rank: int, before: str) -> Axis:
            return Axis(name, size, rank, _Counted(self, before), tuple(range(size))) if size > 1 else Axis(name)

        experts = [axis(name, size, 0, f"{name} ") for name, size in (("ep", ep), ("etp", etp), ("experts", ep * etp))]
        ours = axis("tp", tp, 0, ""), axis("cp", cp, cp_rank, "cp ")
        return Mesh(tp=ours[0], cp=ours[1], ep=experts[0], etp=experts[1], experts=experts[2], device=META)

    def own(self, module: M) -> M:
        """Leave out the bytes of the parameters and of the sums of their gradients."""
        for p in module.parameters():
            p.sink = _Sink(p, self.lands)  # type: ignore[attr-defined]
            p.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
            name = spec_of(p).name.rsplit(".", 1)[-1]
            self._names[storage_of(p)] = name, False
            self._names[storage_of(p.sink.grad)] = name, True  # type: ignore[attr-defined]
        return module

    def counts(self, storage: int) -> bool:
        return storage not in self._names

    def add(self, what: str, name: str, *figures: float) -> None:
        if self.phase:
            self.trace.append(Event(self.phase, what, name, figures))

    def launched(self, kernel: Kernel, args: tuple[Any, ...]) -> None:
        name = kernel.fn.__module__.rsplit(".", 1)[-1] + kernel.fn.__name__
        if kernel.product is not None:
            rows, columns, depth, *groups = kernel.product(*args)
            self._matmul([x for x in args if isinstance(x, Tensor)], rows, columns, depth, *groups or [1])
            if kernel.beside is not None:
                self.add("beside", name, _bytes_of(kernel.beside(*args)))
            return
        self._stream(name, args)
        if kernel.flops is not None:
            self.add("scores", name, kernel.flops(*args))

    def done(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any], results: tuple[Any, ...]) -> None:
        packet = op._overloadpacket
        if not self.phase or op.is_view or packet in FREE:
            return
        if packet not in MATMULS:
            lists = (x for x in args if isinstance(x, list | tuple))
            self._stream(packet.__name__, [*args, *(x for some in lists for x in some), *kwargs.values(), *results])
            return
        a, b = args[MATMULS[packet] :][:2]
        depth = a.shape[-1] * (a.shape[0] if a.dim() > 2 else 1)
        self._matmul([a, b, results[0]], a.shape[-2], b.shape[-1], depth, 1)

    def _matmul(self, tensors: list[Tensor], rows: float, columns: float, depth: float, groups: float) -> None:
        """With the name of the parameter among them, and whether the sum of its gradients is. The operand with the
        smallest elements is no sum."""
        known = [self._names[at] for x in tensors if (at := storage_of(x)) in self._names]
        sinks, size = any(is_sum for _, is_sum in known), min(x.element_size() for x in tensors)
        self.add("matmul", known[0][0] if known else "", rows, columns, depth, sinks, groups, size)

    def _stream(self, name: str, values: Any) -> None:
        self.add("stream", name, _bytes_of(values))

    def time(self, phase: str, act: Callable[[], Any]) -> Any:
        self.start, self.phase, self.peak, self.parts[phase] = self.live, phase, self.live, {"": 0}
        result = act()
        self._part_ends()
        self.phase = ""
        return result

    def _part_ends(self) -> dict[str, int]:
        parts = self.parts[self.phase]
        parts[next(reversed(parts))] = self.peak - self.start
        return parts

    def lands(self, spec: ParamSpec) -> None:
        if self.phase and spec.is_2d and spec.home not in self.parts[self.phase]:
            self._part_ends()[spec.home] = 0
            self.peak = self.live

    def read(self, forward: Callable[..., Tensor], given: list[Tensor], dy_of: Any, later: Later | None = None) -> Bill:
        """The bill of F, B, and W if backward is split. given: the inputs of `forward`; the list is emptied, so that
        nothing else holds them. dy_of: makes the gradient of the result."""
        inputs = [x.requires_grad_() for x in given]
        given.clear()
        y = self.time("F", lambda: forward(*inputs))
        edges, dys = [get_gradient_edge(y)], [dy_of(y)]
        del y
        saved, waiting = self.live - dys[0].nbytes, 0
        self.time("B", lambda: torch.autograd.backward([edges.pop()], [dys.pop()]))
        while inputs:  # without a name that would keep the last one
            inputs.pop().grad = None
        if later is not None:
            waiting = self.live
            self.time("W", later.run)
        return Bill(tuple(self.trace), saved, waiting, self.parts)
