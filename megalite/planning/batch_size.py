"""The global batch size as a pure function of the samples consumed: constant, in equal steps, or in any steps."""

import math
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class BatchSizeSchedule:
    """`steps`: (samples, size): each size is used from that number of consumed samples on; the first at 0, increasing.
    The check of the configuration ensures that all sizes are multiples of micro-batch size x dp. `last_whole`: train on
    a last batch that only partly fits into --train-samples, as Megatron-LM does with --step-batch-size-schedule.

    >>> sizes = BatchSizeSchedule.ramp(32, 8, 8, 300)
    >>> [sizes.at(n) for n in (0, 99, 100, 200, 299, 300)]
    [8, 8, 16, 24, 24, 32]
    """

    milestones: tuple[tuple[int, int], ...]
    keep_last_batch: bool = False

    @classmethod
    def constant(cls, size: int) -> "BatchSizeSchedule":
        return cls(((0, size),))

    @classmethod
    def ramp(cls, final: int, start: int, increment: int, samples: int) -> "BatchSizeSchedule":
        """Sizes from `start` by `increment` up to `final` over `samples` samples, each for as many samples."""
        if start < 1 or increment < 1 or samples < 0 or start > final or (final - start) % increment:
            raise ValueError(
                f"rampup_batch_size={start} {increment} {samples} does not lead to global_batch_size={final}; "
                f"start at 1 to {final} and give an increment that divides the difference"
            )
        count = (final - start) // increment
        begins = {0: start}  # sample -> size; if several sizes begin at one sample, the last counts
        for i in range(1, count + 1):
            begin = -(-i * samples // count)
            if samples and int(begin / (samples / count)) < i:  # Megatron-LM divides like this, and rounding loses one
                begin += 1
            begins[begin] = start + i * increment
        return cls(tuple(begins.items()))

    @property
    def final(self) -> int:
        return self.milestones[-1][1]

    def at(self, consumed: int) -> int:
        """Batch size of the step that starts after `consumed` samples."""
        return next(size for begin, size in reversed(self.milestones) if begin <= consumed)

    def samples_after(self, step: int) -> int:
        """Samples consumed after `step` steps."""
        consumed = 0
        for consumed, size, count in self._phases():
            if step <= count:
                return consumed + int(step) * size
            step -= int(count)
        return consumed

    def num_steps_for(self, samples: int) -> int:
        """The number of whole steps in `samples` samples; with `last_whole`, also the step that exceeds them."""
        milestones = 0
        for consumed, size, count in self._phases():
            left = samples - consumed
            fitting = -(-left // size) if self.keep_last_batch else left // size
            if fitting < count:
                return milestones + max(fitting, 0)
            milestones += int(count)
        return milestones

    def _phases(self) -> Iterator[tuple[int, int, float]]:
        """(samples consumed before it, size, number of steps) of each size that is used; the last one has no end."""
        consumed = 0
        for (_, size), (end, _) in zip(self.milestones, (*self.milestones[1:], (math.inf, 0)), strict=True):
            if end == math.inf:
                yield consumed, size, math.inf
            elif end > consumed:
                count = -(-(int(end) - consumed) // size)
                yield consumed, size, count
                consumed += count * size
