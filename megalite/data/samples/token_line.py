"""The tokens that a source has yet to give, as one endless line from any point of an earlier run on. Pure.

    line      | what is left of epoch e | epoch e + 1 | epoch e + 2 ...       segments, in the order of use
    sample j  tokens j*S .. j*S + S of the line: S inputs, and the S labels one ahead
    index i   the samples that begin in one segment, shuffled among themselves

A new run has the line of whole epochs. One that continues with another sequence length has first the rest of the epoch
that its samples so far left over, in its old order, then whole epochs. So every token is used exactly once per epoch
whatever changes during the run, and the line is computed from the numbers of samples taken alone. Where leftovers meet,
unrelated pieces of text follow each other, as at a document's border.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalite.data.samples.permutation import fold, permute


@dataclass(frozen=True)
class Line:
    """tokens   in an epoch
    key      of the shuffles of samples
    epoch    of the first segment
    left     [n, 2] begin and end of the ranges left of it, ascending, in tokens of the epoch; None: all of it
    skip     tokens at the beginning of the next epoch that the last sample before it has used
    """

    tokens: int
    key: int
    epoch: int = 0
    left: NDArray[np.int64] | None = None
    skip: int = 0

    @cached_property
    def _ranges(self) -> NDArray[np.int64]:
        return np.array([[0, self.tokens]], np.int64) if self.left is None else self.left

    @cached_property
    def _cumulative(self) -> NDArray[np.int64]:
        """Where each range of the first segment begins in the line; the last entry is the segment's length."""
        lengths = self._ranges[:, 1] - self._ranges[:, 0]
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])

    def _begin(self, segment: Any) -> Any:
        """First token of a segment in the line, or of each of an array of them."""
        later = int(self._cumulative[-1]) + (segment - 1) * self.tokens
        return (segment > 0) * later - (segment > 1) * self.skip

    def _segment(self, at: NDArray[np.int64]) -> NDArray[np.int64]:
        """The segments with the tokens `at` of the line."""
        first = self._begin(1)
        return np.where(at < first, 0, 1 + (at - first + self.skip) // self.tokens)

    def _shuffle(self, segment: int, index: NDArray[np.int64], count: int) -> NDArray[np.int64]:
        whole = self.left is None or segment > 0
        parts = ("samples", self.epoch + segment) if whole else ("samples", self.epoch, "left", self._begin(1))
        return permute(index, count, fold(self.key, *parts))

    def _samples_of(self, segment: int, seq_length: int) -> tuple[int, int]:
        """(first, number) of the samples that begin in a segment."""
        first = -(-self._begin(segment) // seq_length)
        return first, -(-self._begin(segment + 1) // seq_length) - first

    def place(self, index: NDArray[Any], seq_length: int) -> NDArray[np.int64]:
        """Where in the line the samples `index` begin."""
        index = np.asarray(index, np.int64)
        segments = self._segment(index * seq_length)
        starts = np.empty_like(index)
        for segment in np.unique(segments).tolist():
            rows = segments == segment
            first, count = self._samples_of(segment, seq_length)
            starts[rows] = (first + self._shuffle(segment, index[rows] - first, count)) * seq_length
        return starts

    def cover(self, starts: NDArray[np.int64], lengths: NDArray[np.int64] | int) -> tuple[NDArray[np.int64], ...]:
        """The tokens starts[k] .. starts[k] + lengths[k] of the line, cut where an epoch or a range of it ends: (epoch,
        first token in it, tokens, place among all of them end to end), each [n], not sorted."""
        at, left = starts, np.broadcast_to(lengths, starts.shape)
        places = np.cumsum(left) - left
        parts: list[tuple[NDArray[np.int64], ...]] = []
        while at.size or not parts:
            segments = self._segment(at)
            held = np.searchsorted(self._cumulative[:-1], at, side="right") - 1  # range, where it is the first segment
            later = at - self._begin(segments) + (segments == 1) * self.skip
            offsets = np.where(segments == 0, at - self._cumulative[held] + self._ranges[held, 0], later)
            counts = np.minimum(left, np.where(segments == 0, self._ranges[held, 1], self.tokens) - offsets)
            parts.append((self.epoch + segments, offsets, counts, places))
            more = counts < left
            at, left, places = (at + counts)[more], (left - counts)[more], (places + counts)[more]
        return tuple(np.concatenate(column) for column in zip(*parts, strict=True))

    def after(self, samples: int, seq_length: int) -> "Line":
        """The line that remains after the first `samples` samples."""
        segment = int(self._segment(np.array([samples * seq_length]))[0])
        first, count = self._samples_of(segment, seq_length)
        end = self._begin(segment + 1)
        waiting = np.sort(self._shuffle(segment, np.arange(samples - first, count), count))
        last_waits = bool(waiting.size) and int(waiting[-1]) == count - 1
        skip = (0 if last_waits else (first + count) * seq_length - end) + (self.skip if segment == 0 else 0)
        lows = (first + waiting[np.diff(waiting, prepend=-2) > 1]) * seq_length  # runs of neighbours become one range
        highs = np.minimum((first + waiting[np.diff(waiting, append=count + 1) > 1] + 1) * seq_length, end)
        _, offsets, counts, _ = self.cover(lows, highs - lows)
        if not len(offsets):
            return Line(self.tokens, self.key, self.epoch + segment + 1, np.array([[skip, self.tokens]]))
        order = np.argsort(offsets)
        left = np.stack([offsets, offsets + counts], 1)[order]
        return Line(self.tokens, self.key, self.epoch + segment, left, skip)

    def documents_begun(self, samples: range, seq_length: int, starts_of: Callable[[int], NDArray[np.int64]]) -> int:
        """Documents that begin in the inputs of the samples. `starts_of(epoch)`: their starts, and the end."""
        total = 0
        for a in range(samples.start, samples.stop, 1 << 20):
            inputs = self.place(np.arange(a, min(a + (1 << 20), samples.stop)), seq_length)
            epochs, begins, counts, _ = self.cover(inputs, seq_length)
            for epoch in np.unique(epochs).tolist():
                starts, rows = starts_of(epoch)[:-1], epochs == epoch
                begun = np.searchsorted(starts, (begins + counts)[rows]) - np.searchsorted(starts, begins[rows])
                total += int(begun.sum())
        return total
