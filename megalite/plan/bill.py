"""Reads the costs of a part of the model on a rank off one run of that part on the meta device. It has no formulas.

    matmul    rows, columns, depth of a product       scores   FLOPs that an attention kernel states (Kernel.flops)
    stream    bytes of an operation or a launch: each of its tensors is read or written once
    begin     a collective over tp or cp, its bytes   wait     a wait for the collective with this number

These events are in the order of the rank's work, in three phases: F, the forward; B, the backward to the input with all
that is computed again; W, the weights' gradients, unless backward computes them at once, in B. Bytes are `saved` from F
to B, `waiting` from B to W, and the `moment` of each phase: its peak above the bytes that were there when it began. The
run uses the Triton kernels of a card, whatever device the plan is made on.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
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
from megalite.plan.meta import MATMULS, META, Meta, aten, storage_of

M = TypeVar("M", bound=nn.Module)
# operations that move nothing
FREE = {aten._unsafe_view, aten.empty, aten.new_empty, aten.empty_like, aten.empty_strided, aten.new_empty_strided}
FREE |= {aten.detach, aten.lift_fresh}


class Event(NamedTuple):
    """figures: (rows, columns, depth, whether it adds to a gradient's sum) of a matmul, (bytes) of a stream, (FLOPs)
    of scores, (bytes, number) of a collective, (number) of a wait."""

    phase: str
    what: str
    name: str
    figures: tuple[float, ...]


@dataclass(frozen=True)
class Bill:
    """Bytes and FLOPs of a micro-batch on one rank. `moment`: by phase. `away`: bytes of `saved` that lie on the host,
    from the end of the next block's F to the begin of its B (nn/activation_offload.py); `sent`: all that lie there, of
    which something else may keep some on the device."""

    trace: tuple[Event, ...]
    saved: int
    waiting: int
    moment: Mapping[str, int]
    away: int = 0
    sent: int = 0

    @cached_property
    def flops(self) -> tuple[float, float, float]:
        """FLOPs of F, B and W. Gradients of weights count in W, whenever they are computed."""
        sums = {"F": 0.0, "B": 0.0, "W": 0.0}
        for phase, what, _, figures in self.trace:
            if what == "matmul":
                rows, columns, depth, sinks = figures
                sums["W" if sinks and phase == "B" else phase] += 2 * rows * columns * depth
            elif what == "scores":
                sums[phase] += figures[0]
        return sums["F"], sums["B"], sums["W"]

    def of(self, phase: str) -> list[Event]:
        return [event for event in self.trace if event.phase == phase]

    def launches(self, phases: str) -> int:
        """How many operations, kernels and collectives the host starts in these phases."""
        return sum(event.phase in phases and event.what in ("matmul", "stream", "begin") for event in self.trace)


class _Begun:
    """A collective that has begun."""

    def __init__(self, recorder: "Recorder", number: int):
        self.recorder, self.number = recorder, number

    def wait(self, *_: Any) -> None:
        self.recorder.add("wait", "", self.number)


class _Counted(Transport):
    """Moves nothing and records each collective. `axis`: "" or the axis and a space, before its name."""

    def __init__(self, recorder: "Recorder", axis: str = ""):
        self.recorder, self.group, self.axis = recorder, self, axis

    def _begin(self, name: str, x: Tensor) -> _Begun:
        number = len(self.recorder.trace)
        self.recorder.add("begin", self.axis + name, x.nbytes, number)
        return _Begun(self.recorder, number)

    def start_all_gather(self, out: Tensor, x: Tensor) -> _Begun:
        return self._begin("all-gather", out)

    def start_reduce_scatter(self, out: Tensor, x: Tensor) -> _Begun:
        return self._begin("reduce-scatter", x)

    def start_all_to_all(self, out: Tensor, x: Tensor, got: list[int], given: list[int]) -> _Begun:
        return self._begin("all-to-all", max(out, x, key=len))


class _Sink:
    """The sum of a parameter's gradients, which is always in memory."""

    def __init__(self, p: nn.Parameter):
        self.grad = torch.empty(p.shape, dtype=main_dtype(p.dtype), device=META)

    def open(self) -> tuple[Tensor, bool]:
        return self.grad, False

    def landed(self) -> None:
        pass


class Recorder(Meta):
    def __init__(self) -> None:
        super().__init__("cuda")
        self.trace: list[Event] = []
        self.phase = ""
        self.moment: dict[str, int] = {}
        self._names: dict[int, tuple[str, bool]] = {}  # storage -> parameter's name, whether it is the gradients' sum

    def mesh(self, tp: int, cp: int = 1, cp_rank: int = 0) -> Mesh:
        """The mesh of a first rank of `tp`, whose collectives are recorded."""

        def axis(name: str, size: int, rank: int, before: str) -> Axis:
            return Axis(name, size, rank, _Counted(self, before), tuple(range(size))) if size > 1 else Axis(name)

        return Mesh(tp=axis("tp", tp, 0, ""), cp=axis("cp", cp, cp_rank, "cp "), device=META)

    def own(self, module: M) -> M:
        """Leave out the bytes of the parameters and of the sums of their gradients."""
        for p in module.parameters():
            p.sink = _Sink(p)  # type: ignore[attr-defined]
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
        names = [self._names.get(storage_of(x), ("", False)) for x in (a, b, results[0])]
        depth = a.shape[-1] * (a.shape[0] if a.dim() > 2 else 1)
        name = next((name for name, _ in names if name), "")
        self.add("matmul", name, a.shape[-2], b.shape[-1], depth, names[2][1])

    def _stream(self, name: str, values: Any) -> None:
        tensors = [x for x in values if isinstance(x, Tensor)]
        places = {(storage_of(x), x.storage_offset(), x.shape): x.nbytes for x in tensors}
        self.add("stream", name, sum(places.values()))

    def time(self, phase: str, act: Callable[[], Any]) -> Any:
        start, self.phase, self.peak = self.live, phase, self.live
        result = act()
        self.phase, self.moment[phase] = "", self.peak - start
        return result

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
        return Bill(tuple(self.trace), saved, waiting, dict(self.moment))
