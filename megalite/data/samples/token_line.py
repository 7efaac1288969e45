"""The tokens that a source has yet to give, as one endless line from any point of an earlier run on. Pure.

    line      | what is left of epoch e | epoch e + 1 | epoch e + 2 ...       segments, in the order of use
    sample j  tokens j*S .. j*S + S of the line: S inputs, and the S labels one ahead
    index i   the samples that begin in one segment, shuffled among themselves

A new run has the line of whole epochs. One that continues with another sequence length has first the rest of the epoch
that its samples so far left over, in its old order, then whole epochs. So every token is used exactly once per epoch
whatever changes during the run, and the line is computed from the numbers of samples taken alone. Where leftovers meet,
unrelated pieces of text follow each other, as at a document's border.
"""

from collections.abc import Callable, Iterator
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

    def _begin(self, segment: int) -> int:
        """First token of a segment in the line."""
        if segment == 0:
            return 0
        return int(self._cumulative[-1]) + (segment - 1) * self.tokens - (self.skip if segment > 1 else 0)

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

    def spans(self, start: int, length: int) -> Iterator[tuple[int, int, int]]:
        """(epoch, first token in it, tokens) of `length` tokens of the line from `start` on."""
        while length > 0:
            segment = int(self._segment(np.array(start)))
            if segment == 0 and self.left is not None:
                at = int(np.searchsorted(self._cumulative, start, side="right")) - 1
                offset = int(self._ranges[at, 0]) + start - int(self._cumulative[at])
                room = int(self._ranges[at, 1]) - offset
            else:
                offset = start - self._begin(segment) + (self.skip if segment == 1 else 0)
                room = self.tokens - offset
            take = min(length, room)
            yield self.epoch + segment, offset, take
            start, length = start + take, length - take

    def cover(self, starts: NDArray[np.int64], length: int) -> tuple[NDArray[np.int64], ...]:
        """`spans` of `length` tokens from each of `starts` on: (epoch, first token in it, tokens, place among all
        len(starts) * length), each [n], not sorted."""
        segments = self._segment(starts)
        begins = np.where(segments == 0, 0, self._begin(1) + (segments - 1) * self.tokens)
        begins -= np.where(segments > 1, self.skip, 0)
        ends = np.where(segments == 0, self._begin(1), begins + self.tokens - np.where(segments == 1, self.skip, 0))
        inside = (starts + length <= ends) & ((segments > 0) | (self.left is None))
        rows = np.flatnonzero(inside)
        offsets = (starts - begins + np.where(segments == 1, self.skip, 0))[rows]
        parts = [(self.epoch + segments[rows], offsets, np.full(len(rows), length), rows * length)]
        for row in np.flatnonzero(~inside).tolist():
            place = row * length
            for epoch, offset, count in self.spans(int(starts[row]), length):
                parts.append(tuple(np.array([x]) for x in (epoch, offset, count, place)))  # type: ignore[arg-type]
                place += count
        return tuple(np.concatenate(column) for column in zip(*parts, strict=True))

    def after(self, samples: int, seq_length: int) -> "Line":
        """The line that remains after the first `samples` samples."""
        segment = int(self._segment(np.array([samples * seq_length]))[0])
        first, count = self._samples_of(segment, seq_length)
        begin, end = self._begin(segment), self._begin(segment + 1)
        waiting = np.sort(self._shuffle(segment, np.arange(samples - first, count), count))
        last_waits = bool(waiting.size) and int(waiting[-1]) == count - 1
        skip = 0 if last_waits else (first + count) * seq_length - end
        cuts = np.flatnonzero(np.diff(waiting) > 1)  # runs of neighbours become one range
        lows = waiting[np.concatenate([np.zeros(min(1, waiting.size), np.int64), cuts + 1])]
        highs = waiting[np.concatenate([cuts, np.full(min(1, waiting.size), waiting.size - 1)]).astype(np.int64)] + 1
        ranges = np.stack([(first + lows) * seq_length, np.minimum((first + highs) * seq_length, end)], 1)
        if segment == 0 and self.left is not None:
            left = self._through_ranges(ranges)
        else:
            left = ranges - begin + (self.skip if segment == 1 else 0)
        skip += self.skip if segment == 0 else 0
        if not len(left):
            return Line(self.tokens, self.key, self.epoch + segment + 1, np.array([[skip, self.tokens]]))
        return Line(self.tokens, self.key, self.epoch + segment, left, skip)

    def _through_ranges(self, wanted: NDArray[np.int64]) -> NDArray[np.int64]:
        """Ranges of the first segment of the line -> ranges of its epoch."""
        cuts = np.unique(np.concatenate([wanted.reshape(-1), self._cumulative]))
        lows, highs = cuts[:-1], cuts[1:]
        holder = np.searchsorted(wanted[:, 0], lows, side="right") - 1
        keep = (holder >= 0) & (lows < wanted[np.maximum(holder, 0), 1])
        lows, highs = lows[keep], highs[keep]
        at = np.searchsorted(self._cumulative, lows, side="right") - 1
        shift = self._ranges[at, 0] - self._cumulative[at]
        return np.stack([lows + shift, highs + shift], 1)

    def documents_begun(self, samples: range, seq_length: int, starts_of: Callable[[int], NDArray[np.int64]]) -> int:
        """Documents that begin in the inputs of the samples. `starts_of(epoch)`: their starts, and the end."""
        total = 0
        for a in range(samples.start, samples.stop, 1 << 20):
            low = self.place(np.arange(a, min(a + (1 << 20), samples.stop)), seq_length)
            high = low + seq_length
            last = int(self._segment(high - 1).max(initial=-1))
            for segment in range(int(self._segment(low).min(initial=0)), last + 1):
                begin, end = self._begin(segment), self._begin(segment + 1)
                within = (low < end) & (high > begin)
                starts = starts_of(self.epoch + segment)[:-1]
                for bound, sign in ((high, 1), (low, -1)):
                    total += sign * int(self._begun_before(segment, np.clip(bound[within], begin, end), starts).sum())
        return total

    def _begun_before(self, segment: int, at: NDArray[np.int64], starts: NDArray[np.int64]) -> NDArray[np.int64]:
        """Documents of a segment that begin before the tokens `at` of the line."""
        if segment > 0 or self.left is None:
            skip = self.skip if segment == 1 else 0
            return np.searchsorted(starts, at - self._begin(segment) + skip) - np.searchsorted(starts, skip)
        low, high = np.searchsorted(starts, self._ranges[:, 0]), np.searchsorted(starts, self._ranges[:, 1])
        whole = np.concatenate([np.zeros(1, np.int64), np.cumsum(high - low)])
        range_ = np.minimum(np.searchsorted(self._cumulative, at, side="right") - 1, len(self._ranges) - 1)
        offset = self._ranges[range_, 0] + at - self._cumulative[range_]
        return whole[range_] + np.searchsorted(starts, offset) - low[range_]
