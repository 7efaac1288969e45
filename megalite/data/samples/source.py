"""The interfaces of datasets: to those that read them, and to the token ledger."""

import hashlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megalite.data.files.indexed import IndexedDataset


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


class Source(Dataset, Protocol):
    """A dataset of one file. digest: equal for equal documents; name: for people; packed: samples are whole pieces."""

    name: str
    num_tokens: int
    packed: bool = False

    @property
    def digest(self) -> str: ...
    def go_on(self, taken: Sequence[tuple[int, int]]) -> str | None:
        """Continue after the samples `taken` so far: (sequence length, samples), in order. Returns a note, or None."""

    def count(self, samples: range) -> tuple[int, int]:
        """(tokens, documents that begin) in the inputs of these samples."""
        ...

    def prepare(self, samples: int) -> None:
        """Build, or find in the cache, the orders of the epochs that the first `samples` samples read."""


def digest_of(data: IndexedDataset, documents: range, lengths: NDArray[Any]) -> str:
    """A digest of the documents' lengths, and of some tokens, since documents of one length are common."""
    digest = hashlib.blake2b(lengths_digest(lengths).encode(), digest_size=16)
    some = np.array([documents[0], documents[len(documents) // 2], documents[-1]])
    for begin in data.spans(some)[0].tolist():
        digest.update(np.asarray(data.tokens[begin : begin + 4096]).tobytes())
    return digest.hexdigest()


def lengths_digest(lengths: NDArray[Any]) -> str:
    return hashlib.blake2b(lengths.data, digest_size=16).hexdigest()
