"""What a rank of each pipeline position takes at its peak: bytes counted from its shape and schedule, without a run.

    weights, gradients, optimizer   plan/holding.py: Holding, exactly what the run allocates
    activations                     Arrangement.activations: what the schedule has in flight
    buffers                         what there is beside these at the worst moment of the schedule: messages that have
                                    come or are on their way, and what one layer, or the head, takes while it computes

The peak is found by going through a rank's actions, and in each through the stage's layers by their own bills
(plan/bill.py). As the Triton kernels keep it. Not counted: tokens, what CUDA, NCCL and cuBLAS take (gigabytes on a
card), and what the allocator cannot reuse. In the 24 layouts of tests/planning/test_rank_memory.py activations with
buffers are within ACTIVATIONS_ERROR of what is allocated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megalite.pipeline.schedule import Action
    from megalite.plan.arrangement import Arrangement
    from megalite.plan.bill import Bill

ACTIVATIONS_ERROR = 0.02  # with buffers, of what was allocated, in the tested layouts
LARGEST_ERROR = 0.02  # of any layout that was ever counted


@dataclass(frozen=True)
class RankMemory:
    """Of the ranks of one pipeline position, bytes."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int

    @property
    def peak(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.buffers


def memory(made: Arrangement) -> list[RankMemory]:
    """Of every pipeline rank."""
    return [
        RankMemory(held.weights, held.gradients, held.optimizer, *more)
        for held, more in zip(made.holdings, activations_and_buffers(made), strict=True)
    ]


def activations_and_buffers(made: Arrangement) -> list[tuple[int, int]]:
    return [
        (activations, max(0, round(peak_of(row, made)) - activations))
        for activations, row in zip(made.activations, made.told_rows, strict=True)
    ]


def peak_of(row: Sequence[Action], made: Arrangement) -> int:
    """The most bytes of activations, messages and moments that one rank has at once, going through its actions."""
    walk = _Walk(made)
    for action in row:
        walk.take(action)
    return walk.most


class _Walk:
    """kept: what forwards have left behind; messages: on this rank, whether they have come or are on their way, of
    which `sent` are on their way; each of `edge` bytes, as x_sBD. most: bytes at once so far."""

    def __init__(self, made: Arrangement):
        from megalite.pipeline.runtime import SENT
        from megalite.pipeline.schedule import Op

        self.ops, self.most_sent = Op, SENT
        self.made, self.last = made, len(made.stages) - 1
        self.edge = made.edge
        self.bills: dict[int, list[Bill]] = {}
        self.kept = self.most = 0
        self.messages = self.sent = 0

    def take(self, action: Action) -> None:
        Op, stage = self.ops, action.stage
        if stage not in self.bills:
            self.bills[stage] = self.made.layers.bills(self.made.stages[stage])
        if action.op is Op.F:
            self._forward(stage)
        elif action.op is Op.B:
            self._backward(stage)
        elif action.op is Op.W:
            for bill in reversed(self.bills[stage]):
                self._reach(bill.moment["W"])
                self.kept -= bill.waiting
        elif action.op in (Op.RECV_F, Op.RECV_B):
            self.messages += 1
        else:
            self.messages, self.sent = self.messages - (self.sent == self.most_sent), min(self.most_sent, self.sent + 1)
        self._reach(0)

    def _reach(self, moment: int) -> None:
        self.most = max(self.most, self.kept + self.messages * self.edge + moment)

    def _forward(self, stage: int) -> None:
        if stage == 0:
            self._reach(self.made.layers.embedding.moment["F"])
        else:
            self.messages -= 1  # x had come, and is the first layer's
        for bill in self.bills[stage]:
            self._reach(self.edge + bill.moment["F"])
            self.kept += bill.saved
        if stage == self.last:
            self._reach(self.edge + self.made.layers.head.moment["F"])
            self.kept += self.made.layers.head.saved
        else:
            self.messages += 1  # y is to be sent

    def _backward(self, stage: int) -> None:
        if stage == self.last:
            self.kept -= self.made.layers.head.saved
        else:
            self.messages -= 1  # dy had come, and is the last layer's
        for bill in reversed(self.bills[stage]):
            self._reach(self.edge + bill.moment["B"])
            self.kept += bill.waiting - bill.saved
        if stage == 0:
            self._reach(self.edge + self.made.layers.embedding.moment["B"])
        else:
            self.messages += 1  # dx is to be sent
