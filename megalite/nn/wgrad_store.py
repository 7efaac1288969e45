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

from megalite.kernels.weight_grad import accumulate_weight_grad_
from megalite.nn.parameter import MainGrad
from megalite.parallel.comm import Pending, start_all_gather
from megalite.parallel.mesh import Axis


def accumulate_weight_grad(sink: MainGrad, dy: Tensor, x: Tensor) -> None:
    """Add dy^T x to the sink's sum, contracted over all dims but the last."""
    grad, begin = sink.accumulator()
    accumulate_weight_grad_(grad.view(-1, grad.shape[-1]), dy.flatten(0, -2), x.flatten(0, -2), overwrite=begin)


AccumulateFn = Callable[[MainGrad, Tensor, Tensor], None]


class _DeferredMatmul(NamedTuple):
    x: Tensor
    gather_axis: Axis | None  # the axis over which x is gathered, along dim 0
    outputs: list[tuple[MainGrad, Tensor]]  # a sink, and its dy
    accumulate: AccumulateFn

    def start_gather(self) -> Pending:
        return Pending(self.x) if self.gather_axis is None else start_all_gather(self.x, self.gather_axis)


class WeightGradStore:
    def __init__(self) -> None:
        self._entries: deque[_DeferredMatmul] = deque()

    def put(
        self,
        x: Tensor,
        gather_axis: Axis | None,
        outputs: Iterable[tuple[MainGrad, Tensor]],
        accumulate: AccumulateFn = accumulate_weight_grad,
    ) -> None:
        """Leave the gradients of matmuls with one input `x`: [S, B, ..] or, with `over`, this rank's positions of it.
        `x` and each dy must not change from now on. `add`: adds the gradient of a dy and x to a sink."""
        self._entries.append(
            _DeferredMatmul(x.detach(), gather_axis, list(outputs), accumulate)
        )  # without the graph that x came from

    @property
    def main_grads(self) -> Iterator[MainGrad]:
        """The sinks of all waiting gradients, in order."""
        return (sink for entry in self._entries for sink, _ in entry.outputs)

    @torch.no_grad()
    def compute_all(self) -> None:
        """Add all waiting gradients to their sinks, tell each sink, and free the tensors."""
        pending_x = self._entries[0].start_gather() if self._entries else None
        while pending_x is not None:
            entry, x = self._entries.popleft(), pending_x
            pending_x = self._entries[0].start_gather() if self._entries else None
            x_SBD = x.wait()
            for sink, dy in entry.outputs:
                entry.accumulate(sink, dy, x_SBD)
                sink.mark_ready()
