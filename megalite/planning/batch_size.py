"""The global batch size as a pure function of the consumed samples: constant, a linear ramp, or any steps."""

import math
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class BatchSizeSchedule:
    """The batch size of every step.

    The checks of the configuration ensure that all sizes are multiples of micro-batch size x dp.

    >>> sizes = BatchSizeSchedule.ramp(32, 8, 8, 300)
    >>> [sizes.at(n) for n in (0, 99, 100, 200, 299, 300)]
    [8, 8, 16, 24, 24, 32]

    Attributes:
        milestones: (samples, size), increasing from 0: each size is used from that number of consumed samples on.
        keep_last_batch: Train on a last batch that fits into --train-samples only in part, as Megatron-LM does with
            --step-batch-size-schedule.
    """

    milestones: tuple[tuple[int, int], ...]
    keep_last_batch: bool = False

    @classmethod
    def constant(cls, size: int) -> "BatchSizeSchedule":
        return cls(((0, size),))

    @classmethod
    def ramp(cls, final: int, start: int, increment: int, samples: int) -> "BatchSizeSchedule":
        """Return a ramp from `start` to `final` over `samples` samples, with the same number of samples at each size.

        Raises:
            ValueError: The increment does not lead from `start` to `final`.
        """
        if start < 1 or increment < 1 or samples < 0 or start > final or (final - start) % increment:
            raise ValueError(
                f"rampup_batch_size={start} {increment} {samples} does not lead to global_batch_size={final}; "
                f"start at 1 to {final} and give an increment that divides the difference"
            )
        num_increments = (final - start) // increment
        size_from = {0: start}  # first sample -> size; of several sizes with the same first sample the last is used
        for i in range(1, num_increments + 1):
            first_sample = -(-i * samples // num_increments)
            # Megatron-LM divides like this, and its rounding may lose one
            if samples and int(first_sample / (samples / num_increments)) < i:
                first_sample += 1
            size_from[first_sample] = start + i * increment
        return cls(tuple(size_from.items()))

    @property
    def final(self) -> int:
        return self.milestones[-1][1]

    def at(self, consumed: int) -> int:
        """Return the batch size of the step that starts after `consumed` samples."""
        return next(size for first_sample, size in reversed(self.milestones) if first_sample <= consumed)

    def samples_after(self, step: int) -> int:
        """Return the samples consumed after `step` steps."""
        consumed = 0
        steps_left = step
        for consumed, size, num_steps in self._phases():
            if steps_left <= num_steps:
                return consumed + steps_left * size
            steps_left -= int(num_steps)
        return consumed

    def num_steps_for(self, samples: int) -> int:
        """Return the number of full steps in `samples` samples; with `keep_last_batch` it includes a partial one."""
        total = 0
        for consumed, size, num_steps in self._phases():
            samples_left = samples - consumed
            fitting = -(-samples_left // size) if self.keep_last_batch else samples_left // size
            if fitting < num_steps:
                return total + max(fitting, 0)
            total += int(num_steps)
        return total

    def _phases(self) -> Iterator[tuple[int, int, float]]:
        """Yield (samples consumed before, size, number of steps) of each size; the last one has math.inf steps."""
        consumed = 0
        ends = [first_sample for first_sample, _ in self.milestones[1:]]
        for (_, size), end in zip(self.milestones, [*ends, None], strict=True):
            if end is None:
                yield consumed, size, math.inf
            elif end > consumed:
                num_steps = -(-(end - consumed) // size)
                yield consumed, size, num_steps
                consumed += num_steps * size
