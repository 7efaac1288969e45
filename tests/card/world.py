"""A rank of several on a simulated card: its NCCL (nccl.py) writes into the card's trace (device.py)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager

from torch import Tensor

from card import cuda, nccl
from card.device import Card, simulated
from card.trace import Fact, Span, Stream


class OnCard:
    """What nccl.py asks of a card."""

    def __init__(self, card: Card):
        self.card = card

    def write(self, fact: Fact) -> None:
        if self.card.running:
            self.card.trace.append(fact)

    def stream(self) -> Stream:
        return cuda.current_stream_id()

    def span(self, x: Tensor) -> Span:
        return self.card.memory.span(x) or Span(0, 0, 0)  # no elements

    def on_card(self, x: Tensor) -> bool:
        return self.card.memory.on_card(x)

    def aside(self) -> AbstractContextManager[object]:
        return self.card.natively()


@contextlib.contextmanager
def on_card(rank: int) -> Iterator[Card]:
    """Within a process group that was begun with `nccl.join` (`run_ranks(..., backend=nccl.join)`), or alone."""
    with simulated(index=rank) as card:
        nccl.use(OnCard(card))
        try:
            yield card
        finally:
            nccl.join()
