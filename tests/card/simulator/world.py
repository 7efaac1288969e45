"""A rank of several on a simulated card: its NCCL (nccl.py) writes into the card's trace (device.py)."""

import contextlib
from collections.abc import Iterator

from card.simulator import nccl
from card.simulator.device import Card, simulated


@contextlib.contextmanager
def on_card(rank: int) -> Iterator[Card]:
    """Within a process group that was begun with `nccl.join` (`run_ranks(..., backend=nccl.join)`), or alone."""
    with simulated(index=rank) as card:
        nccl.use(card)
        try:
            yield card
        finally:
            nccl.join()
