"""Samples that follow a packing (packing.py).

epoch e    all bins, in the order of a shuffle of (seed, e); the pieces of a bin are shuffled too, since best fit
           puts the longest first, so that a position would tell a document's length
sample i   bin permute(i mod bins) of epoch i // bins
tokens     piece | piece | ... | padding     S + 1 of them, as from GptDataset; layout() gives the pieces' lengths
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megalite.data.errors import DataError
from megalite.data.files.indexed import IndexedDataset
from megalite.data.samples.packing import CHUNK, pack
from megalite.data.samples.permutation import fold, mix32, permute
from megalite.data.samples.source import Source


class PackedDataset(Source):
    """The documents `documents` of one file, packed into samples of seq_length + 1 tokens, epoch after epoch. `pad`: id
    of the padding, usually the end-of-document id."""

    packed = True

    def __init__(
        self, data: IndexedDataset, documents: range, seq_length: int, seed: int, pad: int, split: str = "train"
    ):
        super().__init__(data, documents, seq_length, seed, split)
        self.pad, self._first = pad, 0
        if not len(self._lengths) or int(self._lengths.max()) < 2:
            raise DataError(
                f"{data.prefix}: the {split} split has no document of two tokens or more among {len(documents)}, so "
                "nothing to predict: use a larger part in --split, or more data"
            )
        self.plan = pack(self._lengths, seq_length + 1)

    def go_on(self, taken: Sequence[tuple[int, int]]) -> str | None:
        """After bins of another length the next epoch begins."""
        self._first, note = 0, None
        for seq_length, samples in taken:
            if seq_length == self.seq_length:
                self._first += samples
            elif samples:
                bins = pack(self._lengths, seq_length + 1).num_bins
                self._first += -(-samples // bins) * self.plan.num_bins
                note = f"{self.name} was packed for {seq_length} tokens before: it continues with its next epoch"
        return note

    def count(self, samples: range) -> tuple[int, int]:
        tokens = documents = 0
        for a in range(samples.start, samples.stop, CHUNK):
            _, _, start, length = self._rows(np.arange(a, min(a + CHUNK, samples.stop)))
            tokens += int(length.sum())
            documents += int((start == 0).sum())
        return tokens, documents

    def samples(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        ends, document, start, length = self._rows(index)
        out = np.full((len(index), self.seq_length + 1), self.pad, np.int64)
        begins = self._data.spans(document + self._documents.start)[0] + start
        together = np.empty(int(length.sum()), np.int64)
        self._data.copy(begins, length, together)
        used = np.add.reduceat(length, ends[:-1]) if len(index) else length
        out[np.arange(self.seq_length + 1) < used[:, None]] = together
        return out

    def layout(self, index: NDArray[np.int64]) -> list[NDArray[np.int32]]:
        ends, _, _, length = self._rows(index)
        return np.split(length.astype(np.int32), ends[1:-1]) if len(index) else []

    def _rows(self, index: NDArray[np.int64]) -> tuple[NDArray[np.int64], ...]:
        """The pieces of some samples, one sample after the other: (ends, document, first token in it, length); those of
        row r are ends[r] : ends[r + 1] of the last three."""
        epochs, numbers = np.divmod(np.asarray(index, np.int64) + self._first, self.plan.num_bins)
        bins = np.empty_like(numbers)
        for e in np.unique(epochs).tolist():
            in_epoch = epochs == e
            bins[in_epoch] = permute(numbers[in_epoch], self.plan.num_bins, fold(self._key, "bins", e))
        starts, counts = self.plan.starts[bins], self.plan.starts[bins + 1] - self.plan.starts[bins]
        ends = np.concatenate([[0], np.cumsum(counts)])
        row = np.repeat(np.arange(len(bins)), counts)
        piece = self.plan.order[starts[row] + np.arange(len(row)) - ends[row]].astype(np.int64)
        turn = np.empty(len(row), np.uint32)
        for e in np.unique(epochs).tolist():
            in_epoch = epochs[row] == e
            turn[in_epoch] = mix32(piece[in_epoch].astype(np.uint32), fold(self._key, "pieces", e))
        piece = piece[np.lexsort((piece, turn, row))]
        return ends, *self.plan.pieces.find(piece)

    def where(self, i: int, position: int) -> str:
        _, document, start, length = self._rows(np.array([i]))
        ends = np.cumsum(length)
        at = int(np.searchsorted(ends, position, side="right"))
        if at == len(ends):
            return f"{self._data.prefix}.bin, padding of sample {i}, position {position}"
        token = int(start[at]) + position - int(ends[at] - length[at])
        return f"{self._data.prefix}.bin, document {int(document[at]) + self._documents.start}, token {token}"

    def describe(self, samples: int) -> str:
        plan, cut = self.plan, cut_end_to_end(self._lengths, self.seq_length)
        return (
            f"{self._data.prefix}: {len(self._documents)} documents, {self.num_tokens} tokens, "
            f"{samples / plan.num_bins:.2f} epochs; packed into {plan.num_bins} samples, {100 * plan.padding:.2f} % "
            f"padding, {plan.pieces.num_cut} documents cut (end to end: about {cut:.0f})"
        )


def cut_end_to_end(lengths: NDArray[np.int32], seq_length: int) -> float:
    """The expected number of documents that samples of GptDataset cut. Cuts are seq_length apart and the token there
    belongs to both samples, so one falls into L tokens with probability (L - 2) / S, for 2 <= L <= S + 2."""
    parts = (lengths[a : a + CHUNK] for a in range(0, len(lengths), CHUNK))
    return sum(float(np.sum(np.clip((part - 2.0) / seq_length, 0, 1))) for part in parts)
