"""Saves by the clock, at the same step on all ranks and with few collectives."""

import time
from collections.abc import Callable

from megalite.parallel.comm import first_says
from megalite.parallel.mesh import Mesh


class SaveClock:
    """`due(step)` after every step: True about every `interval_s` seconds, at the same step on all ranks.

    Clocks differ between ranks, so rank 0's decides. Each of its answers fixes the step of the next question: half way
    to the end at the pace so far, and after no more steps than that pace was measured over. That is about 2 log2(steps
    per interval) broadcasts per save; an all-reduce in every step would make all ranks wait for the slowest.
    """

    def __init__(self, interval_s: float, mesh: Mesh, step: int, now: Callable[[], float] = time.monotonic):
        self._interval_s, self._mesh, self._now = interval_s, mesh, now
        self.saved(step)

    def saved(self, step: int) -> None:
        """A checkpoint was made: the interval starts again."""
        self._from, self._begin, self._ask = step, self._now(), step + 1

    def due(self, step: int) -> bool:
        """Collective at some steps, the same on all ranks."""
        if step < self._ask:
            return False
        elapsed = self._now() - self._begin
        steps, left = step - self._from, self._interval_s - elapsed
        pace = elapsed / steps
        skip = 0 if left <= pace / 2 else 1 if pace <= 0 else max(1, min(int(left / pace / 2), steps))
        skip = first_says(skip, self._mesh)
        self._ask = step + skip
        return skip == 0
