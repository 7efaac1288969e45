"""What a dataset is to those that read it, and what the token ledger must know of one that is a file."""

import hashlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megalite.data.files.indexed import IndexedDataset


class Dataset(Protocol):
    """Endless and without state.

    samples(index)  tokens [n, seq_length + 1], for any sample numbers >= 0
    layout(index)   of packed samples the lengths of the pieces, beyond which is padding; None: each is one run of text,
                    as of a dataset that says nothing else
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
        """Begin behind what was taken before: (sequence length, samples), in order. What is worth telling, or None."""

    def count(self, samples: range) -> tuple[int, int]:
        """(tokens, documents that begin) in the inputs of these samples."""
        ...

    def prepare(self, samples: int) -> None:
        """Build, or find in the cache, what the first `samples` samples need beyond what is there."""


def digest_of(data: IndexedDataset, documents: range, lengths: NDArray[Any]) -> str:
    """Of the documents' lengths, and of some tokens, since documents of one length are common."""
    made = hashlib.blake2b(lengths_digest(lengths).encode(), digest_size=16)
    some = np.array([documents[0], documents[len(documents) // 2], documents[-1]])
    for begin in data.spans(some)[0].tolist():
        made.update(np.asarray(data.tokens[begin : begin + 4096]).tobytes())
    return made.hexdigest()


def lengths_digest(lengths: NDArray[Any]) -> str:
    return hashlib.blake2b(lengths.data, digest_size=16).hexdigest()
