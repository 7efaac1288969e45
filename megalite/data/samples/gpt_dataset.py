"""Samples of one token file: its shuffled documents as one line of tokens, cut every seq_length tokens.

`epochs.py` shuffles the documents, `token_line.py` says where in them a sample lies.
"""

import functools
import threading
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megalite.data.errors import DataError
from megalite.data.files.indexed import IndexedDataset
from megalite.data.samples.epochs import Epoch, build_epoch, load_or_build
from megalite.data.samples.permutation import fold
from megalite.data.samples.source import Source
from megalite.data.samples.token_line import Line

MANY_EPOCHS = 4  # up to here repeated data is nearly as good as new (arXiv:2305.16264, fig. 1)


class GptDataset(Source):
    """The documents `documents` of one file, cut into samples of seq_length + 1 tokens, epoch after epoch."""

    def __init__(
        self,
        data: IndexedDataset,
        documents: range,
        seq_length: int,
        seed: int,
        split: str = "train",
        cache_path: str | Path | None = None,
    ):
        super().__init__(data, documents, seq_length, seed, split)
        if self.num_tokens < seq_length + 1:
            raise DataError(
                f"{data.prefix}: the {split} split has {self.num_tokens} tokens in {len(documents)} documents, fewer "
                f"than one sample of seq_length {seq_length} + 1: use a larger part in --split, more data or a smaller "
                "--seq-length"
            )
        self._line, self._taken = Line(self.num_tokens, self._key), 0  # the next sample is number `taken` of the line
        self._split, self._cache_path = split, cache_path
        self._last_two = functools.lru_cache(2)(self._make_epoch)
        self._lock = threading.Lock()  # the prefetch thread and the main one may meet here

    def go_on(self, taken: Sequence[tuple[int, int]]) -> str | None:
        line, length, count = Line(self.num_tokens, self._key), self.seq_length, 0
        for seq_length, samples in [*taken, (self.seq_length, 0)]:
            if seq_length != length:
                line, length, count = line.after(count, length) if count else line, seq_length, 0
            count += samples
        self._line, self._taken = line, count
        return None

    def count(self, samples: range) -> tuple[int, int]:
        moved = range(samples.start + self._taken, samples.stop + self._taken)
        begun = self._line.documents_begun(moved, self.seq_length, lambda epoch: self._epoch(epoch).starts)
        return len(samples) * self.seq_length, begun

    def _epoch(self, number: int) -> Epoch:
        with self._lock:
            return self._last_two(number)

    def _make_epoch(self, number: int) -> Epoch:
        key = fold(self._key, "documents", number)
        if not self._cache_path:
            return build_epoch(self._lengths, key)
        stem = Path(self._data.prefix).name
        file = f"{stem}-{self._split}-{fold('epoch order 2', self._lengths_digest, len(self._lengths), key):016x}"
        return load_or_build(self._cache_path, file, len(self._lengths), lambda: build_epoch(self._lengths, key))

    def samples(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        width = self.seq_length + 1
        out = np.empty((len(index), width), np.int64)
        starts = self._line.place(np.asarray(index) + self._taken, self.seq_length)
        epochs, offsets, counts, rows = self._line.cover(starts, width)
        parts = [(starts[:0],) * 3]
        for number in np.unique(epochs).tolist():
            parts.append(self._segments(number, *(a[epochs == number] for a in (offsets, counts, rows))))
        begins, sizes, places = (np.concatenate(columns) for columns in zip(*parts, strict=True))
        order = np.argsort(places, kind="stable")
        self._data.copy(begins[order], sizes[order], out.reshape(-1))
        return out

    def _segments(
        self, number: int, offsets: NDArray[np.int64], counts: NDArray[np.int64], places: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
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
        skip = np.maximum(offsets[owner] - starts, 0)
        sizes = np.minimum(starts + lengths, ends[owner]) - starts - skip
        if (epoch.starts[at + 1] - starts != lengths).any():
            wrong = f"the order of epoch {number} does not fit the documents' lengths"
            raise DataError(f"{self._data.prefix}: {wrong}; remove its files from data_cache_path={self._cache_path}")
        return begins + skip, sizes, places[owner] + starts + skip - offsets[owner]

    def where(self, i: int, position: int) -> str:
        start = self._line.place(np.array([i + self._taken]), self.seq_length) + position
        number, offset = (int(a[0]) for a in self._line.cover(start, 1)[:2])
        epoch = self._epoch(number)
        at = int(np.searchsorted(epoch.starts, offset, side="right")) - 1
        document = int(epoch.order[at]) + self._documents.start
        return f"{self._data.prefix}.bin, document {document}, token {offset - int(epoch.starts[at])}"

    def describe(self, samples: int) -> str:
        epochs = samples * self.seq_length / self.num_tokens
        many = f"; more than {MANY_EPOCHS} teach little" if epochs > MANY_EPOCHS else ""
        counts = f"{len(self._documents)} documents, {self.num_tokens} tokens"
        return f"{self._data.prefix}: {counts}, {epochs:.2f} epochs{many}"
