"""The interfaces of datasets: to those that read them, and to the token ledger."""

import hashlib
from collections.abc import Sequence
from functools import cached_property
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from megalite.data.files.indexed import IndexedDataset
from megalite.data.samples.permutation import fold


class Dataset(Protocol):
    """Endless and without state.

    samples(index)  tokens [n, seq_length + 1], for any sample numbers >= 0
    layout(index)   for each packed sample the lengths of its pieces, in order, before its padding; None: not packed
    where           file, document and position of a token, for errors
    """

    seq_length: int

    def samples(self, index: NDArray[np.int64]) -> NDArray[np.int64]: ...
    def layout(self, index: NDArray[np.int64]) -> list[NDArray[np.int32]] | None:
        return None

    def where(self, i: int, position: int) -> str: ...
    def describe(self, samples: int) -> str: ...


class Source(Dataset):
    """A dataset over the documents `documents` of one file. packed: samples are whole pieces."""

    packed = False

    def __init__(self, data: IndexedDataset, documents: range, seq_length: int, seed: int, split: str):
        if not data.checked:
            data.verify()  # 2 ns per document; building an order costs 30
        self.seq_length, self.name = seq_length, data.prefix
        self._data, self._documents, self._lengths = data, documents, data.read_lengths(documents)
        self.num_tokens = int(np.sum(self._lengths, dtype=np.int64))
        self._key = fold(seed, split)

    @cached_property
    def _lengths_digest(self) -> str:
        return hashlib.blake2b(self._lengths.data, digest_size=16).hexdigest()

    @property
    def digest(self) -> str:
        """A digest of the documents' lengths, and of some tokens, since documents of one length are common."""
        digest, documents = hashlib.blake2b(self._lengths_digest.encode(), digest_size=16), self._documents
        some = np.array([documents[0], documents[len(documents) // 2], documents[-1]])
        for begin in self._data.spans(some)[0].tolist():
            digest.update(np.asarray(self._data.tokens[begin : begin + 4096]).tobytes())
        return digest.hexdigest()

    def go_on(self, taken: Sequence[tuple[int, int]]) -> str | None:
        """Continue after the samples `taken` so far: (sequence length, samples), in order. Returns a note, or None."""
        raise NotImplementedError

    def count(self, samples: range) -> tuple[int, int]:
        """(tokens, documents that begin) in the inputs of these samples."""
        raise NotImplementedError
