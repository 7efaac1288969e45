"""What this rank has begun on an axis: a few stores per collective, read by the thread that looks for hangs.

Numbers make ranks comparable: on one axis all ranks do the same collectives in the same order, so number 12 of one is
number 12 of all, and the message that one numbers 12 on its way to a neighbour is that neighbour's number 12 from it.
"""

from __future__ import annotations

import time
from collections import deque
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from megalite.parallel.clock import Clock

KEPT = 16  # of the last ones
SEND, RECEIVE = "send to", "receive from"


class OrderError(RuntimeError):
    """Ranks of one group do different collectives."""


@dataclass(eq=False, slots=True)
class Call:
    """One collective, or one message; `peer`: the global rank at its other end, -1: there is none."""

    of: Calls
    op: str
    peer: int
    number: int
    bytes: int
    span: AbstractContextManager[Any]

    @property
    def told(self) -> tuple[str, int, int, int]:
        return self.op, self.peer, self.number, self.bytes

    def posted(self) -> None:
        """On its way; nothing waits for it."""
        self.of.waiting = None
        self.span.__exit__(None, None, None)

    def wait(self, work: Any) -> None:
        """An error leaves it marked as waited for: that is where this rank was."""
        self.of.waiting = self, time.monotonic()
        with self.of.span(self.op, self.peer):
            work.wait()
        self.of.waiting = None


@dataclass(eq=False)
class Calls:
    """Of one rank on one axis. waiting: what the rank is blocked in, and since when (time.monotonic). clock: of all
    axes; time in a collective counts as communication, in a message as the pipeline's bubble."""

    axis: str = ""
    clock: Clock = field(default_factory=Clock)
    last: deque[Call] = field(default_factory=lambda: deque(maxlen=KEPT))
    waiting: tuple[Call, float] | None = None
    numbers: dict[tuple[str, int], int] = field(default_factory=dict)

    def begin(self, op: str, x: Tensor, peer: int = -1) -> Call:
        """To be called before it is issued, which may block."""
        stream = (op if peer >= 0 else "", peer)
        number = self.numbers[stream] = self.numbers.get(stream, 0) + 1
        call = Call(self, op, peer, number, x.nbytes, self.span(op, peer))
        self.last.append(call)
        self.waiting = call, time.monotonic()
        call.span.__enter__()
        return call

    def span(self, name: str, peer: int) -> AbstractContextManager[Any]:
        if peer >= 0:
            return self.clock.span("bubble", name, peer)
        return self.clock.span("agreement" if self.axis == "world" else "communication", name, self.axis)
