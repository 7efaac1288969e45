"""Deferred weight gradients, for pipelines that split their backward (pipeline/schedule.py: SplitBackward).

    backward of a matmul    dx = dy W, which the stage before is waiting for; (x, dy) are stored here
    compute_all             dW += dy^T x, oldest first

The pipeline creates one store for each forward and passes it with the batch; None: nothing is deferred. If x is this
rank's part of the sequence, it is gathered here instead of in backward, behind the matmuls of the entry before, so the
number of collectives is the same. Only gradients that go to a main gradient are deferred.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.kernels.weight_grad import accumulate_weight_grad_
from megalite.nn.parameter import MainGrad
from megalite.parallel.comm import Pending, start_all_gather
from megalite.parallel.mesh import Axis


def accumulate_weight_grad(main_grad: MainGrad, dy: Tensor, x: Tensor) -> None:
    """Add dy^T x, contracted over all dims but the last, to the main gradient."""
    grad, overwrite = main_grad.accumulator()
    accumulate_weight_grad_(grad.view(-1, grad.shape[-1]), dy.flatten(0, -2), x.flatten(0, -2), overwrite=overwrite)


AccumulateFn = Callable[[MainGrad, Tensor, Tensor], None]


@dataclass(frozen=True)
class _DeferredMatmul:
    """The weight gradients of matmuls with one input."""

    x: Tensor
    gather_axis: Axis | None  # the axis over which x is gathered, along dim 0
    outputs: list[tuple[MainGrad, Tensor]]  # with dy
    accumulate: AccumulateFn
    widths: list[int] | None  # the channels of x that each matmul reads, in order; None: each reads all

    def inputs(self, x: Tensor) -> Sequence[Tensor]:
        """Return the input of each matmul, given the gathered x."""
        if self.widths is None:
            return [x] * len(self.outputs)
        return x[..., : sum(self.widths)].split(self.widths, -1)

    def start_gather(self) -> Pending:
        return Pending(self.x) if self.gather_axis is None else start_all_gather(self.x, self.gather_axis)


class WeightGradStore:
    """The deferred weight gradients of one forward."""

    def __init__(self) -> None:
        self._entries: deque[_DeferredMatmul] = deque()

    def put(
        self,
        x: Tensor,
        gather_axis: Axis | None,
        outputs: Iterable[tuple[MainGrad, Tensor]],
        accumulate: AccumulateFn = accumulate_weight_grad,
        widths: list[int] | None = None,
    ) -> None:
        """Store the weight gradients of matmuls with one input.

        `x` and each dy must not change from now on.

        Args:
            x: the input, [S, B, ...]; with `gather_axis`, this rank's positions of it.
            gather_axis: the axis over which x is gathered.
            outputs: main gradient and dy of each matmul.
            accumulate: adds the gradient for a dy and x to a main gradient.
            widths: the number of channels of x that each matmul reads, in order; None: each reads all channels.
        """
        # detached, to free the graph that x belongs to
        self._entries.append(_DeferredMatmul(x.detach(), gather_axis, list(outputs), accumulate, widths))

    @property
    def main_grads(self) -> Iterator[MainGrad]:
        """The main gradients of all deferred gradients, in order."""
        return (main_grad for entry in self._entries for main_grad, _ in entry.outputs)

    @torch.no_grad()
    def compute_all(self) -> None:
        """Add all deferred gradients to their main gradients, mark these as ready, and free the tensors."""
        uses_left = Counter(map(id, self.main_grads))  # a layer may be used several times in a forward
        pending_x = self._entries[0].start_gather() if self._entries else None
        while pending_x is not None:
            entry = self._entries.popleft()
            x = pending_x
            pending_x = self._entries[0].start_gather() if self._entries else None
            for (main_grad, dy), input_SBD in zip(entry.outputs, entry.inputs(x.wait()), strict=True):
                entry.accumulate(main_grad, dy, input_SBD)
                uses_left[id(main_grad)] -= 1
                if not uses_left[id(main_grad)]:
                    main_grad.mark_ready()
