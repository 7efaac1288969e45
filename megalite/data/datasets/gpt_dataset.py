"""Samples of one token file: its shuffled documents (epochs.py) as one endless line of tokens, cut every seq_length.

    line      | what is left of epoch e | epoch e + 1 | epoch e + 2 ...       segments, in the order of use
    sample j  tokens j*S .. j*S + S of the line: S inputs, and the S labels one ahead
    index i   the samples that begin in one segment, shuffled among themselves

A new run has the line of whole epochs. One that continues with another sequence length has first the rest of the epoch
that its samples so far left over, in its old order, then whole epochs. So every token is used exactly once per epoch
whatever changes during the run, and the line is computed from the numbers of samples taken alone. Where leftovers meet,
unrelated pieces of text follow each other, as at a document's border.
"""

import functools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalite.data.datasets.base_dataset import DocumentDataset
from megalite.data.datasets.epoch_order import EpochOrder, build_epoch, load_or_build
from megalite.data.datasets.permutation import Ints, fold, permute
from megalite.data.errors import DataError
from megalite.data.files.indexed_dataset import IndexedDataset

MAX_USEFUL_EPOCHS = 4  # up to here repeated data is nearly as good as new (arXiv:2305.16264, fig. 1)


@dataclass(frozen=True)
class TokenStream:
    """The tokens that a source has yet to give, from any point of an earlier run on. Pure.

    tokens   in an epoch
    key      of the shuffles of samples
    epoch    of the first segment
    left     [n, 2] begin and end of the ranges left of it, ascending, in tokens of the epoch; None: all of it
    skip     tokens at the beginning of the next epoch that the last sample before it has used
    """

    tokens: int
    key: int
    epoch: int = 0
    remaining: Ints | None = None
    overlap: int = 0

    @cached_property
    def _ranges(self) -> Ints:
        return np.array([[0, self.tokens]], np.int64) if self.remaining is None else self.remaining

    @cached_property
    def _cumulative(self) -> Ints:
        """Where each range of the first segment begins in the line; the last entry is the segment's length."""
        lengths = self._ranges[:, 1] - self._ranges[:, 0]
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])

    def _begin(self, segment: Any) -> Any:
        """First token of a segment in the line, or of each of an array of them."""
        later = int(self._cumulative[-1]) + (segment - 1) * self.tokens
        return (segment > 0) * later - (segment > 1) * self.overlap

    def _segment(self, at: Ints) -> Ints:
        """The segments with the tokens `at` of the line."""
        first = self._begin(1)
        return np.where(at < first, 0, 1 + (at - first + self.overlap) // self.tokens)

    def _shuffle(self, segment: int, index: Ints, count: int) -> Ints:
        whole = self.remaining is None or segment > 0
        parts = ("samples", self.epoch + segment) if whole else ("samples", self.epoch, "left", self._begin(1))
        return permute(index, count, fold(self.key, *parts))

    def _samples_of(self, segment: int, seq_length: int) -> tuple[int, int]:
        """(first, number) of the samples that begin in a segment."""
        first = -(-self._begin(segment) // seq_length)
        return first, -(-self._begin(segment + 1) // seq_length) - first

    def sample_starts(self, index: NDArray[Any], seq_length: int) -> Ints:
        """Where in the line the samples `index` begin."""
        index = np.asarray(index, np.int64)
        segments = self._segment(index * seq_length)
        starts = np.empty_like(index)
        for segment in np.unique(segments).tolist():
            rows = segments == segment
            first, count = self._samples_of(segment, seq_length)
            starts[rows] = (first + self._shuffle(segment, index[rows] - first, count)) * seq_length
        return starts

    def token_ranges(self, starts: Ints, lengths: Ints | int) -> tuple[Ints, ...]:
        """The tokens starts[k] .. starts[k] + lengths[k] of the line, cut where an epoch or a range of it ends: (epoch,
        first token in it, tokens, place among all of them end to end), each [n], not sorted."""
        at, remaining = starts, np.broadcast_to(lengths, starts.shape)
        places = np.cumsum(remaining) - remaining
        parts: list[tuple[Ints, ...]] = []
        while at.size or not parts:
            segments = self._segment(at)
            held = np.searchsorted(self._cumulative[:-1], at, side="right") - 1  # range, where it is the first segment
            later = at - self._begin(segments) + (segments == 1) * self.overlap
            offsets = np.where(segments == 0, at - self._cumulative[held] + self._ranges[held, 0], later)
            counts = np.minimum(remaining, np.where(segments == 0, self._ranges[held, 1], self.tokens) - offsets)
            parts.append((self.epoch + segments, offsets, counts, places))
            more = counts < remaining
            at, remaining, places = (at + counts)[more], (remaining - counts)[more], (places + counts)[more]
        return tuple(np.concatenate(column) for column in zip(*parts, strict=True))

    def advanced_by(self, samples: int, seq_length: int) -> "TokenStream":
        """The line that remains after the first `samples` samples."""
        segment = int(self._segment(np.array([samples * seq_length]))[0])
        first, count = self._samples_of(segment, seq_length)
        end = self._begin(segment + 1)
        waiting = np.sort(self._shuffle(segment, np.arange(samples - first, count), count))
        last_waits = bool(waiting.size) and int(waiting[-1]) == count - 1
        overlap = (0 if last_waits else (first + count) * seq_length - end) + (self.overlap if segment == 0 else 0)
        lows = (first + waiting[np.diff(waiting, prepend=-2) > 1]) * seq_length  # runs of neighbours become one range
        highs = np.minimum((first + waiting[np.diff(waiting, append=count + 1) > 1] + 1) * seq_length, end)
        _, offsets, counts, _ = self.token_ranges(lows, highs - lows)
        if not len(offsets):
            return TokenStream(self.tokens, self.key, self.epoch + segment + 1, np.array([[overlap, self.tokens]]))
        order = np.argsort(offsets)
        remaining = np.stack([offsets, offsets + counts], 1)[order]
        return TokenStream(self.tokens, self.key, self.epoch + segment, remaining, overlap)

    def count_document_starts(self, samples: range, seq_length: int, starts_of: Callable[[int], Ints]) -> int:
        """Documents that begin in the inputs of the samples. `starts_of(epoch)`: their starts, and the end."""
        total = 0
        for a in range(samples.start, samples.stop, 1 << 20):
            inputs = self.sample_starts(np.arange(a, min(a + (1 << 20), samples.stop)), seq_length)
            epochs, begins, counts, _ = self.token_ranges(inputs, seq_length)
            for epoch in np.unique(epochs).tolist():
                starts, rows = starts_of(epoch)[:-1], epochs == epoch
                begun = np.searchsorted(starts, (begins + counts)[rows]) - np.searchsorted(starts, begins[rows])
                total += int(begun.sum())
        return total


class GPTDataset(DocumentDataset):
    """The documents `documents` of one file, cut into samples of seq_length + 1 tokens, epoch after epoch."""

    def __init__(
        self, data: IndexedDataset, documents: range, seq_length: int, seed: int, split: str = "train",
        cache_path: str | Path | None = None,
    ):  # fmt: skip
        super().__init__(data, documents, seq_length, seed, split)
        if self.num_tokens < seq_length + 1:
            raise DataError(
                f"{data.prefix}: the {split} split has {self.num_tokens} tokens in {len(documents)} documents, fewer "
                f"than one sample of seq_length {seq_length} + 1: use a larger part in --split, more data or a smaller "
                "--seq-length"
            )
        self._line, self._taken = (
            TokenStream(self.num_tokens, self._key),
            0,
        )  # the next sample is number `taken` of the line
        self._split, self._cache_path = split, cache_path
        self._last_two = functools.lru_cache(2)(self._make_epoch)
        self._lock = threading.Lock()  # the prefetch thread and the main one may meet here

    def resume(self, taken: Sequence[tuple[int, int]]) -> str | None:
        line, length, count = TokenStream(self.num_tokens, self._key), self.seq_length, 0
        for seq_length, samples in [*taken, (self.seq_length, 0)]:
            if seq_length != length:
                line, length, count = line.advanced_by(count, length) if count else line, seq_length, 0
            count += samples
        self._line, self._taken = line, count
        return None

    def count_tokens_and_documents(self, samples: range) -> tuple[int, int]:
        moved = range(samples.start + self._taken, samples.stop + self._taken)
        begun = self._line.count_document_starts(moved, self.seq_length, lambda epoch: self._epoch(epoch).starts)
        return len(samples) * self.seq_length, begun

    def _epoch(self, number: int) -> EpochOrder:
        with self._lock:
            return self._last_two(number)

    def _make_epoch(self, number: int) -> EpochOrder:
        key = fold(self._key, "documents", number)
        if not self._cache_path:
            return build_epoch(self._lengths, key)
        stem = Path(self._data.prefix).name
        file = f"{stem}-{self._split}-{fold('epoch order 2', self._lengths_digest, len(self._lengths), key):016x}"
        return load_or_build(self._cache_path, file, len(self._lengths), lambda: build_epoch(self._lengths, key))

    def samples(self, index: Ints) -> Ints:
        width = self.seq_length + 1
        out = np.empty((len(index), width), np.int64)
        starts = self._line.sample_starts(np.asarray(index) + self._taken, self.seq_length)
        epochs, offsets, counts, rows = self._line.token_ranges(starts, width)
        parts = [(starts[:0],) * 3]
        for number in np.unique(epochs).tolist():
            parts.append(self._segments(number, *(a[epochs == number] for a in (offsets, counts, rows))))
        begins, sizes, places = (np.concatenate(columns) for columns in zip(*parts, strict=True))
        order = np.argsort(places, kind="stable")
        self._data.copy_tokens(begins[order], sizes[order], out.reshape(-1))
        return out

    def _segments(self, number: int, offsets: Ints, counts: Ints, places: Ints) -> tuple[Ints, Ints, Ints]:
        """(first token in the file, number of tokens, place in the output) of each document's part of the tokens
        offsets[k] .. offsets[k] + counts[k] of epoch `number`; the parts of k follow each other from places[k]."""
        epoch = self._epoch(number)
        ends = offsets + counts
        first = np.searchsorted(epoch.starts, offsets, side="right") - 1  # the document that holds the first token
        holding = np.searchsorted(epoch.starts, ends - 1, side="right") - first  # documents up to the last token
        owner = np.repeat(np.arange(len(offsets)), holding)
        at = np.arange(len(owner)) + np.repeat(first - (np.cumsum(holding) - holding), holding)
        documents, starts = epoch.order[at], epoch.starts[at]
        begins, lengths = self._data.spans(documents + np.int64(self._documents.start))
        overlap = np.maximum(offsets[owner] - starts, 0)
        sizes = np.minimum(starts + lengths, ends[owner]) - starts - overlap
        if (epoch.starts[at + 1] - starts != lengths).any():
            wrong = f"the order of epoch {number} does not fit the documents' lengths"
            raise DataError(f"{self._data.prefix}: {wrong}; remove its files from data_cache_path={self._cache_path}")
        return begins + overlap, sizes, places[owner] + starts + overlap - offsets[owner]

    def locate(self, i: int, position: int) -> str:
        start = self._line.sample_starts(np.array([i + self._taken]), self.seq_length) + position
        number, offset = (int(a[0]) for a in self._line.token_ranges(start, 1)[:2])
        epoch = self._epoch(number)
        at = int(np.searchsorted(epoch.starts, offset, side="right")) - 1
        document = int(epoch.order[at]) + self._documents.start
        return f"{self._data.prefix}.bin, document {document}, token {offset - int(epoch.starts[at])}"

    def describe(self, samples: int) -> str:
        epochs = samples * self.seq_length / self.num_tokens
        many = f"; more than {MAX_USEFUL_EPOCHS} teach little" if epochs > MAX_USEFUL_EPOCHS else ""
        counts = f"{len(self._documents)} documents, {self.num_tokens} tokens"
        return f"{self._data.prefix}: {counts}, {epochs:.2f} epochs{many}"
