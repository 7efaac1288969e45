"""A pipeline that replays micro-batches as one CUDA graph.

Forward, backward and the accumulation of gradients cost the host one call; the kernels of a small model would otherwise
wait for Python.

    step, dp 1     zero all gradients | replay | replay | ... | replay |
    step, dp > 1   eager              | replay | replay | ... | eager  |

With dp > 1, weights are all-gathered during the first micro-batch and gradients are reduced during the last one.

A graph repeats kernels with the same arguments, so values that change between micro-batches are in tensors with a fixed
address: a static batch, into which each batch is copied, and loss_grad (it depends on batch size and loss scale).
Graphs always accumulate gradients and never overwrite them, so gradients are zeroed first. A replay runs no Python, so
no hook of a parameter reports its gradient to the buffer. The first micro-batch of a shape runs eagerly, since
compiling a kernel or loading a library cannot be captured; the second one is captured. The graph keeps the memory of a
micro-batch's activations; with dp > 1, the eager micro-batches take the same amount in addition.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megalite.parallel.streams import CudaGraph, Stream, on_stream
from megalite.pipeline.runtime import InFlight, Pipeline


@dataclasses.dataclass(frozen=True)
class CapturedMicroBatch:
    """A captured graph of one micro-batch: its replay reads `static_batch` and writes `losses`."""

    static_batch: Any
    losses: Tensor
    graph: CudaGraph


class CudaGraphPipeline(Pipeline):
    """A pipeline with one stage (pp 1) whose training micro-batches are replayed; evaluation is eager."""

    def __init__(
        self,
        *args: Any,
        new_graph: Callable[[], CudaGraph],
        zero_unwritten_grads: Callable[[], None],
        eager_first_and_last: bool,
        stream: Stream | None = None,
        **options: Any,
    ):
        """Create the pipeline.

        Args:
            args, options: arguments of Pipeline.
            new_graph: returns an empty graph.
            zero_unwritten_grads: zeroes every gradient that has no value yet in this step; from then on all gradients
                are accumulated.
            eager_first_and_last: run the first and the last micro-batch of a step eagerly (see above).
            stream: stream on which steps run; None: the current stream of the caller.
        """
        super().__init__(*args, **options)
        assert self.last_stage == 0 and self.split_backward is None
        self.new_graph = new_graph
        self.zero_unwritten_grads = zero_unwritten_grads
        self.eager_first_and_last = eager_first_and_last
        self.stream = stream
        self.enabled = True  # if False, or if a timeline is recorded, steps are eager
        self._loss_grad = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        # By the signature of the batch. None: the signature has occurred once.
        self._captured: dict[tuple[Any, ...], CapturedMicroBatch | None] = {}

    def step(self, batches: Sequence[Any], loss_grad: float, more_microbatches: bool = False) -> Tensor:
        """Run forward and backward of all micro-batches, as Pipeline.step does."""
        inner = batches[1:-1] if self.eager_first_and_last else batches
        with on_stream(self.stream):
            if not inner or not self.enabled or self.timeline is not None:
                return super().step(batches, loss_grad, more_microbatches)
            total = torch.zeros(2, dtype=torch.float64, device=self.mesh.device)
            if self.eager_first_and_last:
                total += super().step(batches[:1], loss_grad, more_microbatches=True)
            self.zero_unwritten_grads()
            self._loss_grad.fill_(loss_grad)
            for batch in inner:
                losses = self._replay(batch, loss_grad)
                total[: len(losses)] += losses
            if self.eager_first_and_last:
                total += super().step(batches[-1:], loss_grad, more_microbatches)
            return total

    def _replay(self, batch: Any, loss_grad: float) -> Tensor:
        """Run one micro-batch: eagerly the first time that its signature occurs, then as a graph. Return its losses."""
        signature = tuple(_signature(name, value) for name, value in vars(batch).items())
        if signature not in self._captured:
            self._captured[signature] = None
            return super().step([batch], loss_grad, more_microbatches=True)
        captured = self._captured[signature]
        if captured is None:
            captured = self._captured[signature] = self._capture(batch)
        for name, value in vars(batch).items():
            if isinstance(value, Tensor):
                getattr(captured.static_batch, name).copy_(value)
        with self.mesh.phase_timer.span("graph", "replay"):
            captured.graph.replay()
        return captured.losses

    def _capture(self, batch: Any) -> CapturedMicroBatch:
        """Capture a micro-batch like `batch`."""
        tensors = {name: value.clone() for name, value in vars(batch).items() if isinstance(value, Tensor)}
        static_batch = dataclasses.replace(batch, **tensors)
        graph = self.new_graph()
        losses: list[Tensor] = []

        def forward_backward() -> None:
            flight = InFlight()
            losses.append(self._forward(flight, (0, 0), 0, static_batch, self._loss_grad))
            self._backward(flight, (0, 0), self._loss_grad)

        timer = self.mesh.phase_timer
        was_timed = timer.timed
        timer.timed = False  # a captured event has no timestamp
        try:
            graph.capture(forward_backward)
        except RuntimeError as error:
            text = f"a micro-batch could not be recorded as a CUDA graph ({error}); drop --cuda-graph-impl"
            raise RuntimeError(text) from error
        finally:
            timer.timed = was_timed
        return CapturedMicroBatch(static_batch, losses[0], graph)


def _signature(name: str, value: Any) -> Any:
    """Return the properties of a batch's field for which a graph is captured.

    They are all but the elements of a tensor. Numbers are not part of what the graph computes. Raises TypeError for
    values of other types.
    """
    if isinstance(value, Tensor):
        return name, value.shape, value.dtype
    if value is not None and not isinstance(value, int | float):
        raise TypeError(f"{name}={value!r}: a graph holds tensors of one shape only")
    return name, value is None
