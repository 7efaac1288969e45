"""A card that is simulated: `with simulated() as card:` the program believes that it computes on one.

Tensors are ordinary ones on the CPU, so that autograd runs; where they would lie is noted by storage (memory.py). A
dispatch mode sees every ATen operation in every thread that begins here (operations.py); kernels in Triton are
interpreted; what Python asks of tensors and torch.cuda is replaced (tensors.py, cuda.py). What it did is
in card.trace, as on CUDA: a Launch for each operation that runs a kernel; a HostWait and a HostRead for what waits for
a value or a size, and for a copy from or to memory that is not pinned. Host and card in one operation are Mixed, but
for 0-dim tensors of the host where CUDA takes them.
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
from megalite.optim.flat_buffers import observe_allocations
from megalite.pipeline.cuda_graph import CudaGraphPipeline
from megalite.pipeline.runtime import Pipeline
from megalite.training import setup
from megalite.training import train_step as step
from megalite.training import trainer as loop
from simulated_gpu.simulator import cuda, operations, tensors
from simulated_gpu.simulator.memory import Memory, Side
from simulated_gpu.simulator.state import caller
from simulated_gpu.simulator.tape import Dispatch
from simulated_gpu.simulator.trace import Fact, HostAccess, HostRead, HostWait, Launch, Mark, Mixed, Span, Stream


class Card:
    """What is simulated, and all that was written down of it. `device`: the current one of this rank."""

    def __init__(self, trace: list[Fact], index: int = 0):
        self.trace, self.device = trace, torch.device("cuda", index)
        self.memory = Memory(self.write, cuda.current_stream_id)
        self.running = True  # False: whatever is still alive is not written down any more
        self._local = threading.local()

    def write(self, fact: Fact) -> None:
        if self.running:
            self.trace.append(fact)

    # what simulated_gpu/simulator/nccl.py asks for

    def stream(self) -> Stream:
        return cuda.current_stream_id()

    def span(self, x: Tensor) -> Span:
        return self.memory.span(x) or Span(0, 0, 0)  # of a tensor without elements

    def on_card(self, x: Tensor) -> bool:
        return self.memory.on_card(x)

    @property
    def reads(self) -> list[HostRead]:
        return [fact for fact in self.trace if isinstance(fact, HostRead)]

    @property
    def mixed(self) -> list[Mixed]:
        return [fact for fact in self.trace if isinstance(fact, Mixed)]

    # where and when

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
        if torch._C._current_graph_task_id() != -1:  # autograd is at work; a recomputed forward is a part of it
            return "backward"
        marks = self._local.__dict__.get("marks", [])
        return next((name for name in reversed(marks) if name in ("forward", "backward")), "")

    # what is written down

    def launch(self, name: str, reads: Sequence[Tensor] = (), writes: Sequence[Tensor] = ()) -> None:
        """A kernel on the current stream."""
        spans = self.memory.spans
        self.write(Launch(cuda.current_stream_id(), name, spans([*reads]), spans([*writes]), caller()))

    def host_waits(self, kind: str, name: str, reads: tuple[Span, ...] = (), writes: tuple[Span, ...] = ()) -> None:
        """Until the current stream is done; then the host looks at memory of its own, if that is known."""
        where = caller()
        self.write(HostWait(stream=cuda.current_stream_id(), where=where))
        if reads or writes:
            self.write(HostAccess(name, reads, writes, where))
        self.write(HostRead(kind, where, self.phase()))

    def mix(self, what: str) -> None:
        self.write(Mixed(what, caller()))

    def touched(self, name: str, reads: list[Tensor], writes: list[Tensor]) -> None:
        """By the host itself, of memory that copies come from or go to."""
        read, written = self.memory.spans(reads), self.memory.spans(writes)
        if (read or written) and not self.native:
            self.write(HostAccess(name, read, written, caller()))

    # what the replaced functions of torch ask for

    @contextlib.contextmanager
    def making(self, side: Side | None) -> Iterator[None]:
        """The next tensors that operations make are there; None: where their inputs are."""
        before, self._local.side = self._local.__dict__.get("side"), side
        try:
            yield
        finally:
            self._local.side = before

    @property
    def asked(self) -> Side | None:
        return self._local.__dict__.get("side")

    @contextlib.contextmanager
    def aside(self) -> Iterator[None]:
        """Nothing is simulated, in this thread: what runs inside is not the program's."""
        before, self._local.native = self.native, True
        try:
            with _disable_current_modes():
                yield
        finally:
            self._local.native = before

    @property
    def native(self) -> bool:
        return self._local.__dict__.get("native", False)

    # operations

    def operate(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        traits = operations.traits_of(func)
        device = kwargs.get("device")
        read, written = operations.split(traits, args, kwargs)
        if traits.skip or (device is not None and device.type == "meta") or any(x.is_meta for x in read + written):
            return func(*args, **kwargs)
        side = self.asked
        if device is not None and device.type == "cuda":
            side, kwargs = "card", {**kwargs, "device": torch.device("cpu")}
        if kwargs.get("pin_memory"):
            side, kwargs = "pinned", {**kwargs, "pin_memory": False}
        if traits.name in ("copy_", "_to_copy"):
            return self._copy(func, traits.name, args, kwargs, side)
        here = self._meet(traits, args, read + written)
        return self._carry_out(func, traits, args, kwargs, (read, written), side or here)

    def _carry_out(
        self, func: OpOverload, traits: operations.Traits, args: tuple[Any, ...], kwargs: dict[str, Any],
        touched: tuple[list[Tensor], list[Tensor]], side: Side,
    ) -> Any:  # fmt: skip
        result = operations.run(func, args, kwargs)
        read, written = touched
        made = operations.tensors_in(result)
        if side != "host":
            for x in made:
                self.memory.place(x, side)
        if side == "card":
            if traits.launches:
                same = {x.untyped_storage()._cdata for x in written}
                fresh = [x for x in made if x.untyped_storage()._cdata not in same]
                self.launch(traits.name, read, [*written, *fresh])
            if traits.name == "_local_scalar_dense":
                self.launch("copy to the host", read)
                self.host_waits("item", "item")
            elif operations.waits(traits, args, kwargs) and not self._fills(traits, args):
                self.host_waits(traits.name, traits.name)
        elif traits.launches or traits.name == "_local_scalar_dense":
            self.touched(traits.name, read, written)
        return result

    def _meet(self, traits: operations.Traits, args: tuple[Any, ...], inputs: list[Tensor]) -> Side:
        """The side of the result; and whether the inputs may meet."""
        sides = [self.memory.side(x) for x in inputs]
        if "card" not in sides:
            return "host" if "host" in sides or "pinned" in sides else "nobody"
        for x, side in zip(inputs, sides, strict=True):
            if side == "nobody":
                self.memory.place(x, "card")
        strangers = [x for x, side in zip(inputs, sides, strict=True) if side in ("host", "pinned")]
        if traits.name in operations.INDEXING and sides[0] == "card":
            moved = operations.tensors_in(args[1]) + [x for x in inputs if x.dim() == 0]
            rest = [x for x in strangers if not any(x is one for one in moved)]
            if len(rest) < len(strangers) and not self._fills(traits, args):
                self.host_waits("an index on the host", traits.name)
            strangers = rest
        if strangers and (not traits.host_scalar or any(x.dim() for x in strangers)):
            shapes = ", ".join(f"{side} {tuple(x.shape)}" for x, side in zip(inputs, sides, strict=True))
            self.mix(f"{traits.name}({shapes})")
        return "card"

    def _fills(self, traits: operations.Traits, args: tuple[Any, ...]) -> bool:
        return operations.fills(traits, args) and not self.memory.on_card(args[2])

    def _copy(
        self, func: OpOverload, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], side: Side | None
    ) -> Any:
        """`copy_(to, from, non_blocking)`, and `_to_copy(from)` to where it was asked for, or else where it is."""
        source: Tensor = args[-1] if name == "_to_copy" else args[1]
        begin = self.memory.side(source)
        wait = not (kwargs.get("non_blocking") or (name == "copy_" and len(args) > 2 and args[2]))
        if name == "copy_":
            end = self.memory.side(args[0])
            if end == "nobody":
                end = self.memory.place(args[0], begin).side if begin == "card" else end
        else:
            end = side or begin
            if end == "host" and begin == "card" and not wait:
                end = "pinned"  # torch makes it so
        result = func(*args, **kwargs)
        if name == "_to_copy" and end != "host":
            self.memory.place(result, end)
        self.copied(source, result, begin, end, wait)
        return result

    def copied(self, source: Tensor, result: Tensor, begin: Side, end: Side, wait: bool) -> None:
        """Bytes of `source` went to `result`."""
        if begin != "card" and end != "card":
            self.touched("copy", [source], [result])
            return
        if begin == end or "nobody" in (begin, end):
            self.launch("copy", [source], [result])
            return
        over = result if begin == "card" else source
        known = self.memory.place(over, "host").side  # from here on its bytes matter
        if not wait and known != "pinned":
            self.mix(f"copy of {begin} to {end}, non_blocking, and the host's memory is not pinned")
        self.launch("copy to the host" if begin == "card" else "copy to the card", [source], [result])
        if wait and begin == "card":
            self.host_waits("copy to the host", "copy to the host", writes=self.memory.spans([result]))
        elif wait:
            self.host_waits("copy to the card", "copy to the card", reads=self.memory.spans([source]))


class _Operations(Dispatch):
    """Of one thread."""

    def __init__(self, card: Card):
        super().__init__()
        self.card = card

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self.card.running:  # a thread that outlived the simulation
            return func(*args, **(kwargs or {}))
        return self.card.operate(func, args, kwargs or {})


def _in_threads(card: Card) -> Callable[[threading.Thread], None]:
    run = threading.Thread.run

    def run_on_card(self: threading.Thread) -> None:
        if not card.running:
            return run(self)
        with _Operations(card):
            return run(self)

    return run_on_card


def _forget_functions() -> None:
    """dynamo knows torch's functions by a table that it makes once: not of those that stand in for them here."""
    if (rules := sys.modules.get("torch._dynamo.trace_rules")) is not None:
        rules.clear_lru_cache()


@contextlib.contextmanager
def simulated(index: int = 0, cards: int = 8) -> Iterator[Card]:
    """Card `index` of `cards` for what runs inside, in threads that begin there too."""
    card = Card([], index)
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, card, "running", False)
        stack.callback(_forget_functions)
        stack.enter_context(cuda.installed(card.trace, cards))
        torch.cuda.set_device(index)
        stack.enter_context(tensors.replaced(card))
        stack.enter_context(_marks_set_by(card))
        stack.enter_context(tensors.noted(card))
        stack.enter_context(mock.patch.object(threading.Thread, "run", _in_threads(card)))
        stack.enter_context(_Operations(card))
        stack.enter_context(observe_allocations(card.memory))
        yield card


# where a function is looked up -> what its time is called
MARKS = (
    (Pipeline, "_forward", "forward"),
    (Pipeline, "_backward", "backward"),
    (Pipeline, "step", "forward-backward"),
    (CudaGraphPipeline, "step", "forward-backward"),
    (step, "train_step", "step"),
    (step, "_reduce_step_sums", "agree"),
    (step, "_update", "update"),
    (loop, "evaluation_sums", "evaluation"),
    (loop.Trainer, "_log", "log"),
    (loop, "check_replicas", "replica check"),
    (CheckpointSaver, "save", "save"),
    (setup, "build_run", "build"),
)


@contextlib.contextmanager
def _marks_set_by(card: Any) -> Iterator[None]:
    def marked(original: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            with card.mark(name):
                return original(*args, **kwargs)

        return call

    with contextlib.ExitStack() as stack:
        for owner, attribute, name in MARKS:
            stack.enter_context(mock.patch.object(owner, attribute, marked(getattr(owner, attribute), name)))
        yield
