"""The interfaces of datasets.

`Dataset` is what batches are read from. `DocumentDataset` adds what the data ledger needs to count and resume a source.
"""

import hashlib
from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megalite.data.datasets.permutation import Ints, fold
from megalite.data.files.indexed_dataset import IndexedDataset

# Two large sources are compared in this many windows of WINDOW_SIZE tokens.
NUM_COMPARED_WINDOWS = 64
WINDOW_SIZE = 1 << 16


class Dataset(Protocol):
    """The interface of an endless dataset without state: sample i is always the same."""

    seq_length: int

    def samples(self, index: Ints) -> Ints:
        """Return the tokens [n, seq_length + 1] of the samples `index` [n]; any numbers >= 0 are valid."""
        ...

    def piece_lengths(self, index: Ints) -> list[NDArray[np.int32]] | None:
        """Return the lengths of the pieces of each packed sample, in order and without padding; None if not packed."""
        return None

    def locate(self, i: int, position: int) -> str:
        """Return file, document and position of a token of sample `i`, for error messages."""
        ...

    def describe(self, samples: int) -> str:
        """Return a description for the log; `samples` is the number of samples that the run will read."""
        ...


class DocumentDataset(Dataset):
    """A dataset over the documents `documents` of one token file.

    `packed` is True if samples consist of complete pieces of documents (packed_dataset.py).
    """

    packed = False

    def __init__(self, data: IndexedDataset, documents: range, seq_length: int, seed: int, split: str):
        if not data.fully_checked:
            data.verify()  # 2 ns per document; building an order costs 30 ns
        self.seq_length = seq_length
        self.name = data.prefix
        self._data = data
        self._documents = documents
        self._lengths = data.read_lengths(documents)
        self.num_tokens = int(np.sum(self._lengths, dtype=np.int64))
        self._key = fold(seed, split)

    @cached_property
    def _lengths_digest(self) -> str:
        return hashlib.blake2b(self._lengths.data, digest_size=16).hexdigest()

    @property
    def digest(self) -> str:
        """A digest of the documents' lengths and of a few tokens, since equal lengths are common."""
        documents = self._documents
        digest = hashlib.blake2b(self._lengths_digest.encode(), digest_size=16)
        sampled = np.array([documents[0], documents[len(documents) // 2], documents[-1]])
        for start in self._data.spans(sampled)[0].tolist():
            digest.update(np.asarray(self._data.tokens[start : start + 4096]).tobytes())
        return digest.hexdigest()

    def same_documents(self, other: "DocumentDataset") -> bool:
        """Return True if a source of the same digest has the same tokens.

        Up to NUM_COMPARED_WINDOWS * WINDOW_SIZE tokens are all compared. Of a larger source, that many windows of this
        size are compared.
        """
        total = self.num_tokens
        self_start = int(self._data.spans(np.array(self._documents[:1]))[0][0])
        other_start = int(other._data.spans(np.array(other._documents[:1]))[0][0])
        starts = np.arange(0, total, WINDOW_SIZE)
        if len(starts) > NUM_COMPARED_WINDOWS:
            starts = np.linspace(0, total - WINDOW_SIZE, NUM_COMPARED_WINDOWS).astype(np.int64)
        for start in starts.tolist():
            end = min(start + WINDOW_SIZE, total)
            window = self._data.tokens[self_start + start : self_start + end]
            if not np.array_equal(window, other._data.tokens[other_start + start : other_start + end]):
                return False
        return True

    def resume(self, history: Sequence[tuple[int, int]]) -> str | None:
        """Continue after the samples that a run has used so far.

        Args:
            history: (sequence length, number of samples) of each earlier phase of the run, in order

        Returns:
            a note for the log, or None
        """
        raise NotImplementedError

    def count_tokens_and_documents(self, samples: range) -> tuple[int, int]:
        """Return (tokens, documents that start) in the inputs of these samples."""
        raise NotImplementedError
