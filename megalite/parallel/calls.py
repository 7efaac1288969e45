"""Records what this rank has begun on an axis: a few stores per collective, read by the thread that looks for hangs.

All ranks of an axis do the same collectives in the same order, so collective 12 of one rank is collective 12 of all,
and message 12 that a rank sends to a neighbour is message 12 that the neighbour receives from it.
"""

import time
from collections import deque
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

KEPT = 16  # calls
SEND, RECEIVE = "send to", "receive from"


@dataclass(eq=False)
class Call:
    """One collective, or one message to or from the global rank `peer` (-1 for a collective). The rank enters it as a
    context manager while it issues the call and while it waits for it."""

    axis: Any  # an Axis, which has the Calls
    op: str
    peer: int
    number: int
    bytes: int
    dtype: Any  # of its tensor

    @property
    def told(self) -> tuple[str, int, int, int]:
        return self.op, self.peer, self.number, self.bytes

    def __enter__(self) -> "Call":
        self.axis.calls.waiting = self, time.monotonic()
        if self.peer < 0:  # the pipeline has spans of its own for messages
            phase = "agreement" if self.axis.name == "world" else "communication"
            self._span = self.axis.clock.span(phase, self.op, self.axis.name)
            self._span.__enter__()
        return self

    def __exit__(self, kind: Any, *error: Any) -> None:
        if self.peer < 0:
            self._span.__exit__(kind, *error)
        if kind is None:  # after an error it stays, since that is where this rank was
            self.axis.calls.waiting = None


@dataclass(eq=False)
class Calls:
    """The calls of one rank on one axis.

    waiting         the call that blocks the rank, and since when (time.monotonic)
    message_limit   how long it waits for a message; None: the time-out that gloo was given when it made the group
    """

    last: deque[Call] = field(default_factory=lambda: deque(maxlen=KEPT))
    waiting: tuple[Call, float] | None = None
    numbers: dict[tuple[str, int], int] = field(default_factory=dict)
    message_limit: timedelta | None = None
