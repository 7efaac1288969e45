"""The global batch size as a pure function of the samples consumed: constant, or growing in equal steps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BatchSizes:
    """`ramp` = (start, increment, samples): from `start` by `increment` up to `final` over `samples` samples.

    >>> sizes = BatchSizes(32, ramp=(8, 8, 300)); [sizes.at(n) for n in (0, 99, 100, 200, 299, 300)]
    [8, 8, 16, 24, 24, 32]
    """

    final: int
    ramp: tuple[int, int, int] | None = None

    def at(self, consumed: int) -> int:
        if self.ramp is None:
            return self.final
        start, increment, samples = self.ramp
        steps = (self.final - start) // increment
        if consumed >= samples or steps == 0:
            return self.final
        return start + increment * (consumed * steps // samples)

    def consumed_at(self, step: int) -> int:
        """Samples consumed after `step` steps."""
        consumed = 0
        for done in range(step):
            size = self.at(consumed)
            if size == self.final:
                return consumed + (step - done) * size
            consumed += size
        return consumed

    def steps_for(self, samples: int) -> int:
        """Whole steps that `samples` samples are enough for."""
        consumed, steps = 0, 0
        while (size := self.at(consumed)) != self.final:
            if consumed + size > samples:
                return steps
            consumed, steps = consumed + size, steps + 1
        return steps + (samples - consumed) // self.final
