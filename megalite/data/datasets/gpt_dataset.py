"""Samples of one token file: its shuffled documents as one endless stream of tokens, cut every seq_length.

    stream    | rest of epoch e | epoch e + 1 | epoch e + 2 ...       segments, in the order of use
    sample j  tokens j*S .. j*S + S of the stream: S inputs, and the S labels one token ahead
    index i   the samples that start in one segment, shuffled among themselves

The stream of a new run consists of full epochs (epoch_order.py). A run that continues with another sequence length
first reads the rest of the epoch that its earlier samples have not used, in its old order, then full epochs. So every
token is used exactly once per epoch whatever changes during the run, and the stream is computed from the numbers of
samples used alone. Where two remaining ranges meet, unrelated pieces of text follow each other, as at a document
boundary.
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
    """The tokens that a source has yet to give, from any point of an earlier run on. Immutable.

    tokens     number of tokens in an epoch
    key        key of the shuffles of samples
    epoch      epoch of the first segment
    remaining  [n, 2] start and end of the unused ranges of that epoch, ascending, in tokens; None: the full epoch
    overlap    tokens at the start of the next epoch that the last sample before it has used
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
    def _range_starts(self) -> Ints:
        """The position in the stream of each range of the first segment; the last entry is the segment's length."""
        lengths = self._ranges[:, 1] - self._ranges[:, 0]
        return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])

    def _segment_start(self, segment: Any) -> Any:
        """Return the stream position of the first token of a segment, or of each of an array of segments."""
        later_start = int(self._range_starts[-1]) + (segment - 1) * self.tokens
        return (segment > 0) * later_start - (segment > 1) * self.overlap

    def _segments_at(self, positions: Ints) -> Ints:
        """Return the segment of each of these stream positions."""
        second_start = self._segment_start(1)
        return np.where(positions < second_start, 0, 1 + (positions - second_start + self.overlap) // self.tokens)

    def _shuffle(self, segment: int, index: Ints, count: int) -> Ints:
        """Return the shuffled places of the samples `index` among the `count` samples of a segment."""
        if self.remaining is None or segment > 0:  # a full epoch
            key = fold(self.key, "samples", self.epoch + segment)
        else:
            key = fold(self.key, "samples", self.epoch, "left", self._segment_start(1))
        return permute(index, count, key)

    def _samples_in(self, segment: int, seq_length: int) -> tuple[int, int]:
        """Return (first, number) of the samples that start in a segment."""
        first = -(-self._segment_start(segment) // seq_length)
        return first, -(-self._segment_start(segment + 1) // seq_length) - first

    def sample_starts(self, index: NDArray[Any], seq_length: int) -> Ints:
        """Return the stream positions at which the samples `index` start."""
        index = np.asarray(index, np.int64)
        segments = self._segments_at(index * seq_length)
        starts = np.empty_like(index)
        for segment in np.unique(segments).tolist():
            rows = segments == segment
            first, count = self._samples_in(segment, seq_length)
            starts[rows] = (first + self._shuffle(segment, index[rows] - first, count)) * seq_length
        return starts

    def token_ranges(self, starts: Ints, lengths: Ints | int) -> tuple[Ints, ...]:
        """Return the ranges of epochs that make up the tokens starts[k] .. starts[k] + lengths[k] of the stream.

        The tokens are cut where an epoch, or an unused range of it, ends.

        Returns:
            (epoch, first token in the epoch, number of tokens, position in the concatenated result), each [n], unsorted
        """
        positions, remaining = starts, np.broadcast_to(lengths, starts.shape)
        out_positions = np.cumsum(remaining) - remaining
        parts: list[tuple[Ints, ...]] = []
        while positions.size or not parts:
            segments = self._segments_at(positions)
            # the range of each position; only meaningful in the first segment
            ranges = np.searchsorted(self._range_starts[:-1], positions, side="right") - 1
            later_offsets = positions - self._segment_start(segments) + (segments == 1) * self.overlap
            offsets = np.where(
                segments == 0, positions - self._range_starts[ranges] + self._ranges[ranges, 0], later_offsets
            )
            counts = np.minimum(remaining, np.where(segments == 0, self._ranges[ranges, 1], self.tokens) - offsets)
            parts.append((self.epoch + segments, offsets, counts, out_positions))
            unfinished = counts < remaining
            positions = (positions + counts)[unfinished]
            remaining = (remaining - counts)[unfinished]
            out_positions = (out_positions + counts)[unfinished]
        return tuple(np.concatenate(column) for column in zip(*parts, strict=True))

    def advanced_by(self, samples: int, seq_length: int) -> "TokenStream":
        """Return the stream that remains after the first `samples` samples."""
        segment = int(self._segments_at(np.array([samples * seq_length]))[0])
        first, count = self._samples_in(segment, seq_length)
        end = self._segment_start(segment + 1)
        unused = np.sort(self._shuffle(segment, np.arange(samples - first, count), count))
        last_is_unused = bool(unused.size) and int(unused[-1]) == count - 1
        overlap = 0 if last_is_unused else (first + count) * seq_length - end
        if segment == 0:
            overlap += self.overlap
        # consecutive unused samples become one range
        lows = (first + unused[np.diff(unused, prepend=-2) > 1]) * seq_length
        highs = np.minimum((first + unused[np.diff(unused, append=count + 1) > 1] + 1) * seq_length, end)
        _, offsets, counts, _ = self.token_ranges(lows, highs - lows)
        if not len(offsets):
            return TokenStream(self.tokens, self.key, self.epoch + segment + 1, np.array([[overlap, self.tokens]]))
        order = np.argsort(offsets)
        remaining = np.stack([offsets, offsets + counts], 1)[order]
        return TokenStream(self.tokens, self.key, self.epoch + segment, remaining, overlap)

    def count_document_starts(self, samples: range, seq_length: int, starts_of: Callable[[int], Ints]) -> int:
        """Return the number of documents that start in the inputs of the samples.

        Args:
            starts_of: returns, for an epoch, the starts of its documents and its end, in tokens
        """
        total = 0
        for a in range(samples.start, samples.stop, 1 << 20):
            inputs = self.sample_starts(np.arange(a, min(a + (1 << 20), samples.stop)), seq_length)
            epochs, offsets, counts, _ = self.token_ranges(inputs, seq_length)
            for epoch in np.unique(epochs).tolist():
                starts = starts_of(epoch)[:-1]
                rows = epochs == epoch
                num_starts = np.searchsorted(starts, (offsets + counts)[rows]) - np.searchsorted(starts, offsets[rows])
                total += int(num_starts.sum())
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
        self._stream = TokenStream(self.num_tokens, self._key)
        self._first_sample = 0  # number in the stream of this dataset's sample 0
        self._split, self._cache_path = split, cache_path
        self._cached_epoch = functools.lru_cache(2)(self._make_epoch)  # the two epochs in use
        self._lock = threading.Lock()  # for calls from the prefetch thread and the main thread

    def resume(self, history: Sequence[tuple[int, int]]) -> str | None:
        stream = TokenStream(self.num_tokens, self._key)
        length, count = self.seq_length, 0  # `count` samples of `length` tokens have been used of `stream`
        for seq_length, samples in [*history, (self.seq_length, 0)]:
            if seq_length != length:
                if count:
                    stream = stream.advanced_by(count, length)
                length, count = seq_length, 0
            count += samples
        self._stream, self._first_sample = stream, count
        return None

    def count_tokens_and_documents(self, samples: range) -> tuple[int, int]:
        in_stream = range(samples.start + self._first_sample, samples.stop + self._first_sample)
        num_documents = self._stream.count_document_starts(
            in_stream, self.seq_length, lambda epoch: self._epoch(epoch).starts
        )
        return len(samples) * self.seq_length, num_documents

    def _epoch(self, number: int) -> EpochOrder:
        with self._lock:
            return self._cached_epoch(number)

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
        starts = self._stream.sample_starts(np.asarray(index) + self._first_sample, self.seq_length)
        epochs, offsets, counts, out_positions = self._stream.token_ranges(starts, width)
        parts = [(starts[:0],) * 3]
        for number in np.unique(epochs).tolist():
            parts.append(self._document_parts(number, *(a[epochs == number] for a in (offsets, counts, out_positions))))
        starts_in_file, sizes, part_positions = (np.concatenate(columns) for columns in zip(*parts, strict=True))
        order = np.argsort(part_positions, kind="stable")
        self._data.copy_tokens(starts_in_file[order], sizes[order], out.reshape(-1))
        return out

    def _document_parts(self, number: int, offsets: Ints, counts: Ints, out_positions: Ints) -> tuple[Ints, Ints, Ints]:
        """Return the parts of documents that make up the tokens offsets[k] .. offsets[k] + counts[k] of epoch `number`.

        The parts of range k follow each other in the output from out_positions[k] on.

        Returns:
            (first token in the file, number of tokens, position in the output) of each part
        """
        epoch = self._epoch(number)
        ends = offsets + counts
        # place, in the epoch's order, of the document with the first token; then the documents up to the last token
        first = np.searchsorted(epoch.starts, offsets, side="right") - 1
        num_documents = np.searchsorted(epoch.starts, ends - 1, side="right") - first
        owner = np.repeat(np.arange(len(offsets)), num_documents)
        rows = np.arange(len(owner)) + np.repeat(first - (np.cumsum(num_documents) - num_documents), num_documents)
        documents, starts = epoch.order[rows], epoch.starts[rows]
        starts_in_file, lengths = self._data.spans(documents + np.int64(self._documents.start))
        skipped = np.maximum(offsets[owner] - starts, 0)
        sizes = np.minimum(starts + lengths, ends[owner]) - starts - skipped
        if (epoch.starts[rows + 1] - starts != lengths).any():
            problem = f"the order of epoch {number} does not fit the documents' lengths"
            raise DataError(f"{self._data.prefix}: {problem}; remove its files from data_cache_path={self._cache_path}")
        return starts_in_file + skipped, sizes, out_positions[owner] + starts + skipped - offsets[owner]

    def locate(self, i: int, position: int) -> str:
        start = self._stream.sample_starts(np.array([i + self._first_sample]), self.seq_length) + position
        number, offset = (int(a[0]) for a in self._stream.token_ranges(start, 1)[:2])
        epoch = self._epoch(number)
        place = int(np.searchsorted(epoch.starts, offset, side="right")) - 1
        document = int(epoch.order[place]) + self._documents.start
        return f"{self._data.prefix}.bin, document {document}, token {offset - int(epoch.starts[place])}"

    def describe(self, samples: int) -> str:
        epochs = samples * self.seq_length / self.num_tokens
        note = f"; more than {MAX_USEFUL_EPOCHS} add little" if epochs > MAX_USEFUL_EPOCHS else ""
        counts = f"{len(self._documents)} documents, {self.num_tokens} tokens"
        return f"{self._data.prefix}: {counts}, {epochs:.2f} epochs{note}"
