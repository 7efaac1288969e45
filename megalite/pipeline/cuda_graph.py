"""A pipeline that replays micro-batches as one CUDA graph.

Forward, backward and the accumulation of gradients cost the host one call; the kernels of a small model would otherwise
wait for Python.

    step, dp 1     zero all gradients | replay | replay | ... | replay |
    step, dp > 1   eager              | replay | replay | ... | eager  |

With dp > 1, weights are all-gathered during the first micro-batch and gradients are reduced during the last one.

A graph repeats kernels with the same arguments, so values that change between micro-batches are in tensors with a fixed
address: a static batch and a static context, into which those of each micro-batch are copied. Numbers of the context
that change (loss_grad depends on batch size and loss scale) become tensors.
Graphs always accumulate gradients and never overwrite them, so gradients are zeroed first. A replay runs no Python, so
no hook of a parameter reports its gradient to its bucket. The first micro-batch of a shape runs eagerly, since
compiling a kernel or loading a library cannot be captured; the second one is captured. The graph keeps the memory of a
micro-batch's activations; with dp > 1, the eager micro-batches take the same amount in addition.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megalite.nn.loss_sums import LossSums
from megalite.nn.micro_batch import Batch, ForwardContext
from megalite.parallel.streams import CudaGraph, Stream, on_stream
from megalite.pipeline.runtime import InFlight, Pipeline


@dataclasses.dataclass(frozen=True)
class CapturedMicroBatch:
    """A captured graph of one micro-batch: its replay reads the tensors of `batch` and `ctx`."""

    batch: Batch
    ctx: ForwardContext
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
        # By the signature of batch and context. None: the signature has occurred once.
        self._captured: dict[tuple[Any, ...], CapturedMicroBatch | None] = {}

    def step(self, batches: Sequence[Batch], ctx: ForwardContext, more_microbatches: bool = False) -> None:
        """Run forward and backward of all micro-batches, as Pipeline.step does."""
        inner = batches[1:-1] if self.eager_first_and_last else batches
        with on_stream(self.stream):
            if not inner or not self.enabled or self.timeline is not None:
                super().step(batches, ctx, more_microbatches)
                return
            if self.eager_first_and_last:
                super().step(batches[:1], ctx, more_microbatches=True)
            self.zero_unwritten_grads()
            for batch in inner:
                self._replay(batch, ctx)
            if self.eager_first_and_last:
                super().step(batches[-1:], ctx, more_microbatches)

    def _replay(self, batch: Batch, ctx: ForwardContext) -> None:
        """Run one micro-batch: eagerly the first time that its signature occurs, then as a graph."""
        signature = _signature(batch) + _signature(ctx)
        if signature not in self._captured:
            self._captured[signature] = None
            super().step([batch], ctx, more_microbatches=True)
            return
        captured = self._captured[signature]
        if captured is None:
            captured = self._captured[signature] = self._capture(batch, ctx)
        _fill_tensors(captured.batch, batch)
        _fill_tensors(captured.ctx, ctx)
        with self.mesh.phase_timer.span("graph", "replay"):
            captured.graph.replay()

    def _capture(self, batch: Batch, ctx: ForwardContext) -> CapturedMicroBatch:
        """Capture a micro-batch with the shapes of `batch` and the options of `ctx`."""
        static_batch = dataclasses.replace(batch, **_cloned_tensors(batch))
        assert ctx.loss_grad is not None
        loss_grad = torch.as_tensor(ctx.loss_grad, dtype=torch.float64, device=self.mesh.device)
        static_ctx = dataclasses.replace(ctx, **(_cloned_tensors(ctx) | {"loss_grad": loss_grad}))
        graph = self.new_graph()

        def forward_backward() -> None:
            flight = InFlight()
            self._forward(flight, (0, 0), 0, static_batch, static_ctx)
            self._backward(flight, (0, 0), static_ctx)

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
        return CapturedMicroBatch(static_batch, static_ctx, graph)


def _cloned_tensors(values: Batch | ForwardContext) -> dict[str, Tensor]:
    """Return copies of the tensors among the fields of a batch or a context."""
    return {name: value.clone() for name, value in vars(values).items() if isinstance(value, Tensor)}


def _fill_tensors(static: Batch | ForwardContext, values: Batch | ForwardContext) -> None:
    """Copy the values of a micro-batch into the tensors of a captured one."""
    for name, tensor in vars(static).items():
        if isinstance(tensor, Tensor):
            value = getattr(values, name)
            if isinstance(value, Tensor):
                tensor.copy_(value)
            else:
                tensor.fill_(value)


def _signature(values: Batch | ForwardContext) -> tuple[Any, ...]:
    """Return the properties of the fields for which a graph is captured.

    They are all but the elements of a tensor. Numbers are not part of what the graph computes. Raises TypeError for
    values of other types.
    """
    signature: list[Any] = []
    for name, value in vars(values).items():
        if isinstance(value, Tensor):
            signature.append((name, value.shape, value.dtype))
        elif isinstance(value, LossSums):  # the graph adds to its tensor
            signature.append((name, id(value)))
        elif value is None or isinstance(value, int | float) or value == {}:
            signature.append((name, value is None))
        else:
            raise TypeError(f"{name}={value!r}: a graph holds tensors of one shape only")
    return tuple(signature)
