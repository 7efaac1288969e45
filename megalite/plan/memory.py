"""The peak memory of a rank of each pipeline position, in bytes: counted from its shape and schedule, without a run.

    weights, gradients, optimizer   plan/holding.py: Holding, exactly the bytes that the run allocates
    activations                     Arrangement.activations: the bytes that the schedule has in flight
    buffers                         all other bytes at the worst moment of the schedule: messages that have come or are
                                    on their way, and temporary tensors of one layer, or of the head

The peak is found by walking through a rank's actions, and in each through the bills of the stage's layers
(plan/bill.py), as the Triton kernels allocate. Not counted: tokens, memory of CUDA, NCCL and cuBLAS (gigabytes on a
card), and memory that the allocator cannot reuse. In the 24 layouts of tests/planning/test_rank_memory.py activations
with buffers are within ACTIVATIONS_ERROR of the allocated bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megalite.pipeline.schedule import Action
    from megalite.plan.arrangement import Arrangement
    from megalite.plan.bill import Bill

ACTIVATIONS_ERROR = 0.02  # of activations with buffers, as a share of the allocated bytes, in the tested layouts
LARGEST_ERROR = 0.02  # in any layout that was ever counted


@dataclass(frozen=True)
class RankMemory:
    """Bytes on each rank of one pipeline position."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    buffers: int

    @property
    def peak(self) -> int:
        return self.weights + self.gradients + self.optimizer + self.activations + self.buffers


def memory(made: Arrangement) -> list[RankMemory]:
    """The memory of every pipeline rank."""
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
    """The most bytes of activations, messages and temporary tensors that a rank with these actions has at once."""
    walk = _Walk(made)
    for action in row:
        walk.take(action)
    return walk.most


class _Walk:
    """kept: bytes that forwards have saved; messages: number of messages on this rank that have come or are on their
    way, `sent` of them on their way; each has `edge` bytes, as x_sBD. most: the most bytes at once so far."""

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
            self.messages -= 1  # x has come, and is now the first layer's
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
            self.messages -= 1  # dy has come, and is now the last layer's
        for bill in reversed(self.bills[stage]):
            self._reach(self.edge + bill.moment["B"])
            self.kept += bill.waiting - bill.saved
        if stage == 0:
            self._reach(self.edge + self.made.layers.embedding.moment["B"])
        else:
            self.messages += 1  # dx is to be sent
