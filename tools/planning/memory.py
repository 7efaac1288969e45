"""What a rank of each pipeline position takes at its peak: bytes counted from its shape and schedule, without a run.

    weights, gradients, optimizer   train/holding.py: Holding, exactly what the run allocates
    activations                     Arrangement.activations: what the schedule has in flight, and what is recomputed
    buffers                         what lives for a moment beside these, at the worst moment of the schedule:
        messages    received before they are needed, and sent until the next one is
        layer       a layer's backward: the MLP's gradients (da, a again, du), with tp > 1 the gathered dy
        head        one chunk of logits, the normed x, with tp > 1 x and its gradient gathered

As the Triton kernels keep it, bf16 or fp32, without dropout. Not counted: tokens and statistics of rows, what CUDA,
NCCL and cuBLAS take (gigabytes on a card), and what the allocator cannot reuse. In the 16 layouts of
tests/planning/test_rank_memory.py activations with buffers are within ACTIVATIONS_ERROR of what is allocated, in others
they were up to 16 % off (docs/planning.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from megalite.pipeline.schedule import Action
    from megalite.train.arrangement import Arrangement

ACTIVATIONS_ERROR = 0.05  # with buffers, of what was allocated, in the tested layouts
LARGEST_ERROR = 0.164  # of any layout that was ever counted


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


@dataclass(frozen=True)
class Moments:
    """Bytes on one rank. edge: of x_sBD, which is also a message. layer: that a layer's backward takes beside what its
    forward kept and the gradient it gets. head: that the head takes beside x and its gradient."""

    edge: float
    layer: float
    head: float


def moments(made: Arrangement) -> Moments:
    import torch

    from megalite.kernels.linear_cross_entropy import chunk_tokens

    m, tp, size = made.config.model, made.tp, made.dtype.itemsize
    tokens = m.seq_length * made.config.train.micro_batch_size
    whole = float(tokens * m.hidden_size * size)
    widths = 4 if m.activation == "swiglu" else 3  # of F: da, a, and du
    gathered = whole if tp > 1 else 0.0
    columns = made.padded_vocab // tp
    logits = chunk_tokens(tokens, columns, made.dtype, torch.device("cuda")) * columns * size
    layer = gathered + widths * tokens * m.ffn_size / tp * size
    return Moments(edge=whole / tp, layer=layer, head=logits + whole / tp + 2 * gathered)


def memory(made: Arrangement) -> list[RankMemory]:
    """Of every pipeline rank."""
    return [
        RankMemory(held.weights, held.gradients, held.optimizer, *more)
        for held, more in zip(made.holdings, activations_and_buffers(made), strict=True)
    ]


def activations_and_buffers(made: Arrangement) -> list[tuple[int, int]]:
    from megalite.pipeline.schedule import in_flight

    brief = moments(made)
    return [
        (activations, round(max(0.0, peak_of(row, made, brief) - in_flight(row, made.held))))
        for activations, row in zip(made.activations, made.told_rows, strict=True)
    ]


def peak_of(row: Sequence[Action], made: Arrangement, brief: Moments) -> float:
    """The most bytes of activations, messages and moments that one rank has at once, going through its actions."""
    from megalite.pipeline.runtime import SENT
    from megalite.pipeline.schedule import Op, held_more

    held, counts, last, split = made.held, made.counts, len(made.counts) - 1, made.split is not None
    kept = most = 0.0  # what forwards have left behind
    messages, sent = 0, 0  # in edges; `sent`: of these, those that are on their way
    for action in row:
        stage, change = action.stage, held_more(action.op, held[action.stage], split)
        others = kept + messages * brief.edge
        if action.op in (Op.RECV_F, Op.RECV_B):
            messages += 1
        elif action.op in (Op.SEND_F, Op.SEND_B):
            messages, sent = messages - (sent == SENT), min(SENT, sent + 1)
        elif action.op is Op.F:
            messages += (stage < last) - (
                stage > 0
            )  # y is to be sent; the x that had come is what the first layer keeps
            most = max(most, others + change + (brief.head if stage == last else 0.0))
        elif action.op is Op.B:
            own = brief.layer + (-brief.edge if stage == last else 0.0)  # x and its gradient are gone, dy is there
            most = max(most, others + (own if counts[stage] else 0.0))
            messages += (stage > 0) - (stage < last)
            if split and counts[stage]:
                most = max(most, others + change * (1 - 1 / counts[stage]) + brief.layer)
        kept += change
        most = max(most, kept + messages * brief.edge)
    return most
