"""Micro-batches replayed as one CUDA graph: forward, backward and the sums into the gradient buffer cost the host one
call, where a small model's kernels would wait for Python.

    step, dp 1     zero all gradients | replay | replay | ... | replay |
    step, dp > 1   eager              | replay | replay | ... | eager  |     weights are gathered behind the first,
                                                                             gradients are reduced behind the last

A graph repeats kernels with the arguments they had, so what changes between micro-batches lies in tensors that keep
their place: a static batch, into which each one is copied, and the loss weight (batch size, loss scale). Gradients are
always added, never written over, which is why they are zeroed first. No Python runs in a replay, so no hook of a
parameter tells the buffer of its gradient. The first micro-batch of a shape runs eagerly, since compiling a kernel or
loading a library cannot be recorded; the next one records. The graph keeps the memory of a micro-batch's activations;
with dp > 1 the eager ones take as much again.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from megalite.parallel.streams import CudaGraph, Stream, on_stream
from megalite.pipeline.runtime import InFlight, Pipeline


class CudaGraphPipeline(Pipeline):
    """A pipeline of one stage on one rank (pp 1) whose micro-batches are replayed; evaluation is eager.

    graphs       makes an empty graph
    begin_all()  zeroes every gradient that has no sum yet in this step; from then on all are added to
    apart        the first and the last micro-batch of a step are eager (above)
    stream       where steps run; None: where they are called
    """

    def __init__(
        self,
        *args: Any,
        new_graph: Callable[[], CudaGraph],
        zero_unwritten_grads: Callable[[], None],
        eager_first_and_last: bool,
        stream: Stream | None = None,
        **options: Any,
    ):
        super().__init__(*args, **options)
        assert self.last_stage == 0 and self.split is None
        self.graphs, self.begin_all, self.apart, self.stream = (
            new_graph,
            zero_unwritten_grads,
            eager_first_and_last,
            stream,
        )
        self.enabled = True  # False, or a timeline that is wanted: steps are eager
        self._weight = torch.zeros((), dtype=torch.float64, device=self.mesh.device)
        # shape -> static batch, losses, graph; None: seen once
        self._captured: dict[tuple[Any, ...], tuple[Any, Tensor, CudaGraph] | None] = {}

    def step(self, batches: Sequence[Any], loss_grad: float, more_microbatches: bool = False) -> Tensor:
        inner = batches[1:-1] if self.apart else batches
        with on_stream(self.stream):
            if not inner or not self.enabled or self.timeline is not None:
                return super().step(batches, loss_grad, more_microbatches)
            total = torch.zeros(2, dtype=torch.float64, device=self.mesh.device)
            if self.apart:
                total += super().step(batches[:1], loss_grad, more_microbatches=True)
            self.begin_all()
            self._weight.fill_(loss_grad)
            for batch in inner:
                losses = self._replay(batch, loss_grad)
                total[: len(losses)] += losses
            if self.apart:
                total += super().step(batches[-1:], loss_grad, more_microbatches)
            return total

    def _replay(self, batch: Any, loss_grad: float) -> Tensor:
        shape = tuple(_signature(name, value) for name, value in vars(batch).items())
        if shape not in self._captured:
            self._captured[shape] = None
            return super().step([batch], loss_grad, more_microbatches=True)
        static_batch, losses, graph = self._captured[shape] = self._captured[shape] or self._capture(batch)
        for name, value in vars(batch).items():
            if isinstance(value, Tensor):
                getattr(static_batch, name).copy_(value)
        with self.mesh.clock.span("graph", "replay"):
            graph.replay()
        return losses

    def _capture(self, batch: Any) -> tuple[Any, Tensor, CudaGraph]:
        tensors = {name: value.clone() for name, value in vars(batch).items() if isinstance(value, Tensor)}
        static_batch, graph = dataclasses.replace(batch, **tensors), self.graphs()
        losses: list[Tensor] = []

        def forward_backward() -> None:
            flight = InFlight()
            losses.append(self._forward(flight, (0, 0), 0, static_batch, self._weight))
            self._backward(flight, (0, 0), self._weight)

        clock = self.mesh.clock
        timed, clock.timed = clock.timed, False  # a mark that is recorded tells no time
        try:
            graph.capture(forward_backward)
        except RuntimeError as error:
            text = f"a micro-batch could not be recorded as a CUDA graph ({error}); drop --cuda-graph-impl"
            raise RuntimeError(text) from error
        finally:
            clock.timed = timed
        return static_batch, losses[0], graph


def _signature(name: str, value: Any) -> Any:
    """What a graph is recorded for: of tensors all but the elements; other values are no part of what it computes."""
    if isinstance(value, Tensor):
        return name, value.shape, value.dtype
    if value is not None and not isinstance(value, int | float):
        raise TypeError(f"{name}={value!r}: a graph holds tensors of one shape only")
    return name, value is None
