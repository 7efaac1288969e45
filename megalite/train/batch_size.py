"""The global batch size as a pure function of the samples consumed: constant, or growing in equal steps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class BatchSizes:
    """`ramp` = (start, increment, samples): from `start` by `increment` up to `final` over `samples` samples.

    Every size lasts equally long: with k increments, size number i starts at i * samples / k consumed samples. That all
    sizes are multiples of micro-batch size x dp is checked with the configuration: start, increment and final are.

    >>> sizes = BatchSizes(32, ramp=(8, 8, 300))
    >>> [sizes.at(n) for n in (0, 99, 100, 200, 299, 300)]
    [8, 8, 16, 24, 24, 32]
    """

    final: int
    ramp: tuple[int, int, int] | None = None

    def __post_init__(self) -> None:
        if self.ramp is None:
            return
        start, increment, samples = self.ramp
        if start < 1 or increment < 1 or samples < 0 or start > self.final or (self.final - start) % increment:
            raise ValueError(
                f"rampup_batch_size={start} {increment} {samples} does not lead to global_batch_size={self.final}; "
                f"start at 1 to {self.final} and give an increment that divides the difference"
            )

    def at(self, consumed: int) -> int:
        """Size of the step that starts when `consumed` samples are consumed."""
        if self.ramp is None:
            return self.final
        start, increment, samples = self.ramp
        if consumed >= samples:
            return self.final
        increments = (self.final - start) // increment
        return start + increment * (consumed * increments // samples)

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
