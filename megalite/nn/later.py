"""Weight gradients that may wait, for a pipeline that splits its backward (pipeline/schedule.py, Split).

    backward of a matmul    dx = dy W, which the stage before is waiting for; (x, dy) are left here
    run                     dW += dy^T x, oldest first

One for each forward, made by the pipeline and handed down with its batch; None: nothing waits. Where x is this rank's
part of the sequence it is gathered here and not in backward, the next one behind this one's matmuls: as many
collectives as without. What does not add to a sink, and all that is no matmul, does not wait.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.kernels.weight_grad import accumulate_outer_
from megalite.nn.parameter import GradientSink
from megalite.parallel.comm import Pending, start_all_gather
from megalite.parallel.mesh import Axis


def add_weight_grad(sink: GradientSink, dy: Tensor, x: Tensor) -> None:
    """The sink's sum += dy^T x, over all dims but the last."""
    grad, begin = sink.open()
    accumulate_outer_(grad.view(-1, grad.shape[-1]), dy.flatten(0, -2), x.flatten(0, -2), begin=begin)


@dataclass(frozen=True)
class _Left:
    x: Tensor
    over: Axis | None  # to be gathered over, along dim 0
    parts: list[tuple[GradientSink, Tensor]]  # where to, and its dy

    def gather(self) -> Pending:
        return Pending(self.x) if self.over is None else start_all_gather(self.x, self.over)


class Later:
    def __init__(self) -> None:
        self._left: deque[_Left] = deque()

    def leave(self, x: Tensor, over: Axis | None, parts: Iterable[tuple[GradientSink, Tensor]]) -> None:
        """Of matmuls of one input: `x`, [S, B, ..] or, with `over`, this rank's positions of it; nobody may change it
        or a dy from now on."""
        self._left.append(_Left(x.detach(), over, list(parts)))  # without the graph that x came from

    @property
    def sinks(self) -> Iterator[GradientSink]:
        """Those that wait, in order."""
        return (sink for left in self._left for sink, _ in left.parts)

    @torch.no_grad()
    def run(self) -> None:
        """Add all that waits, telling each sink, and let go of it."""
        coming = self._left[0].gather() if self._left else None
        while coming is not None:
            left, x = self._left.popleft(), coming
            coming = self._left[0].gather() if self._left else None
            x_SBD = x.wait()
            for sink, dy in left.parts:
                add_weight_grad(sink, dy, x_SBD)
                sink.landed()
