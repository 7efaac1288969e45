"""Delays weight gradients, for a pipeline that splits its backward (pipeline/schedule.py: Split).

    backward of a matmul    dx = dy W, which the stage before is waiting for; (x, dy) are left here
    run                     dW += dy^T x, oldest first

The pipeline makes one for each forward and passes it with the batch; None: nothing waits. If x is this rank's part of
the sequence, it is gathered here and not in backward, behind the matmuls of the entry before, so there are no more
collectives than without. Only matmuls whose gradient goes to a sink wait.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from megalite.kernels.weight_grad import accumulate_outer_
from megalite.nn.parameter import GradientSink
from megalite.parallel.comm import Pending, start_all_gather
from megalite.parallel.mesh import Axis


def add_weight_grad(sink: GradientSink, dy: Tensor, x: Tensor) -> None:
    """Add dy^T x to the sink's sum, contracted over all dims but the last."""
    grad, begin = sink.open()
    accumulate_outer_(grad.view(-1, grad.shape[-1]), dy.flatten(0, -2), x.flatten(0, -2), begin=begin)


Add = Callable[[GradientSink, Tensor, Tensor], None]


class _Entry(NamedTuple):
    x: Tensor
    over: Axis | None  # the axis over which x is gathered, along dim 0
    parts: list[tuple[GradientSink, Tensor]]  # a sink, and its dy
    add: Add

    def gather(self) -> Pending:
        return Pending(self.x) if self.over is None else start_all_gather(self.x, self.over)


class Later:
    def __init__(self) -> None:
        self._entries: deque[_Entry] = deque()

    def leave(
        self, x: Tensor, over: Axis | None, parts: Iterable[tuple[GradientSink, Tensor]], add: Add = add_weight_grad
    ) -> None:
        """Leave the gradients of matmuls with one input `x`: [S, B, ..] or, with `over`, this rank's positions of it.
        `x` and each dy must not change from now on. `add`: adds the gradient of a dy and x to a sink."""
        self._entries.append(_Entry(x.detach(), over, list(parts), add))  # without the graph that x came from

    @property
    def sinks(self) -> Iterator[GradientSink]:
        """The sinks of all waiting gradients, in order."""
        return (sink for entry in self._entries for sink, _ in entry.parts)

    @torch.no_grad()
    def run(self) -> None:
        """Add all waiting gradients to their sinks, tell each sink, and free the tensors."""
        gathering = self._entries[0].gather() if self._entries else None
        while gathering is not None:
            entry, x = self._entries.popleft(), gathering
            gathering = self._entries[0].gather() if self._entries else None
            x_SBD = x.wait()
            for sink, dy in entry.parts:
                entry.add(sink, dy, x_SBD)
                sink.landed()
