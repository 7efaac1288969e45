"""The interfaces of datasets, and the datasets that do not read token files.

`Dataset` is what batches are read from. `DocumentDataset` adds what the data ledger needs to count and resume a source.
`MockDataset` generates its data. `MapDataset` wraps a user's own map-style dataset (config/plugins.py): it makes the
samples endless, shuffles and counts them in the same way as token files, so that a run can resume, the ledger can count
them and the data-parallel ranks can split them.
"""

import hashlib
from collections.abc import Sequence
from functools import cached_property
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megalite.config.registry import REGISTRIES
from megalite.data.datasets.permutation import Ints, bounded, fold, mix32, permute
from megalite.data.errors import DataError
from megalite.data.files.indexed_dataset import IndexedDataset
from megalite.data.tokenizers.tokenizer import Tokenizer

NUM_VALUES = 512  # few enough to be learnt in a few hundred steps
MAX_STRIDE = 4
NOISE_PERIOD = 16
# two large sources are compared in PLACES windows of WINDOW tokens each
PLACES = 64
WINDOW = 1 << 16


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

        Up to PLACES * WINDOW tokens are all compared; of a larger source, PLACES windows are.
        """
        total = self.num_tokens
        self_start = int(self._data.spans(np.array(self._documents[:1]))[0][0])
        other_start = int(other._data.spans(np.array(other._documents[:1]))[0][0])
        starts = np.arange(0, total, WINDOW)
        if len(starts) > PLACES:
            starts = np.linspace(0, total - WINDOW, PLACES).astype(np.int64)
        for start in starts.tolist():
            end = min(start + WINDOW, total)
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


class MockDataset(Dataset):
    """The dataset of --mock-data: noisy arithmetic progressions, a pure function of (seed, sample, t).

        token[t] = scale * ((first + step * t) mod m),   one token in NOISE_PERIOD replaced by a random one

    `first` and `step` (1..MAX_STRIDE) are drawn per sample. m is the size of the vocabulary, at most NUM_VALUES.
    `scale` spreads the values over the vocabulary, so that every shard of a vocabulary-parallel embedding is used.
    """

    def __init__(self, vocab_size: int, seq_length: int, seed: int, name: str = "train"):
        self.vocab_size, self.seq_length = vocab_size, seq_length
        self._modulus = min(vocab_size, NUM_VALUES)
        self._scale = vocab_size // self._modulus
        self._key = fold(seed, "mock", name)

    def _hash(self, purpose: str, index_n1: Ints, t: Ints) -> NDArray[np.uint32]:
        """Return 32 uniform bits for every (sample, t)."""
        key = fold(self._key, purpose)
        low, high = (index_n1 & 0xFFFFFFFF).astype(np.uint32), (index_n1 >> 32).astype(np.uint32)
        return mix32(mix32(mix32(low, key) ^ high, key >> 7) + t.astype(np.uint32), key >> 13)

    def samples(self, index: Ints) -> Ints:
        index_n1 = np.asarray(index, np.int64)[:, None]
        t = np.arange(self.seq_length + 1)[None, :]
        zero = np.zeros((1, 1), np.int64)
        first = bounded(self._hash("first", index_n1, zero), self._modulus).astype(np.int64)
        step = 1 + bounded(self._hash("step", index_n1, zero), MAX_STRIDE).astype(np.int64)
        values = (first + step * t) % self._modulus
        noisy = bounded(self._hash("noisy", index_n1, t), NOISE_PERIOD) == 0
        values = np.where(noisy, bounded(self._hash("noise", index_n1, t), self._modulus).astype(np.int64), values)
        return values * self._scale

    def locate(self, i: int, position: int) -> str:
        return f"mock sample {i}, token {position}"

    def describe(self, samples: int) -> str:
        return f"generated progressions, {samples} samples of {self.seq_length} tokens"


class MapDataset(DocumentDataset):
    """The endless dataset made of a map-style one: each epoch reads every sample once, in its own order.

    `samples` must have __len__ and __getitem__. Item i must be seq_length + 1 token ids, the same ones at every access.
    """

    def __init__(self, name: str, samples: Any, seq_length: int, seed: int, split: str):
        self.name = f"dataset {name}"
        self.seq_length = seq_length
        self._samples = samples
        self._first_sample = 0  # samples of earlier phases of the run
        if len(samples) < 1:
            raise DataError(f"dataset={name!r} has no samples of {split}; give None where there are none")
        self.num_tokens, self._key = len(samples) * seq_length, fold(seed, split)

    def _sample(self, k: int) -> Ints:
        try:
            row = np.asarray(self._samples[k])
        except ValueError as error:
            raise DataError(f"{self.name}: its sample {k} cannot be made: {error}; correct the plugin") from error
        if row.shape != (self.seq_length + 1,) or row.dtype.kind not in "iu":
            wrong = f"its sample {k} is {row.dtype} {list(row.shape)}"
            raise DataError(f"{self.name}: {wrong}; give seq_length + 1 = {self.seq_length + 1} token ids")
        return row

    def _shuffled(self, index: Ints) -> Ints:
        """Return the numbers, within the map-style dataset, of the samples `index`."""
        count = len(self._samples)
        epochs, numbers = np.divmod(np.asarray(index, np.int64) + self._first_sample, count)
        for epoch in np.unique(epochs).tolist():
            rows = epochs == epoch
            numbers[rows] = permute(numbers[rows], count, fold(self._key, "samples", epoch))
        return numbers

    def samples(self, index: Ints) -> Ints:
        return np.stack([self._sample(k) for k in self._shuffled(index).tolist()]).astype(np.int64)

    @property
    def digest(self) -> str:
        """A digest of the number of samples and of three of them."""
        count = len(self._samples)
        digest = hashlib.blake2b(f"{self.name} {count}".encode(), digest_size=16)
        for k in (0, count // 2, count - 1):
            digest.update(self._sample(k).astype(np.int64).tobytes())
        return digest.hexdigest()

    def resume(self, history: Sequence[tuple[int, int]]) -> str | None:
        self._first_sample = sum(samples for _, samples in history)
        return None

    def count_tokens_and_documents(self, samples: range) -> tuple[int, int]:
        """Return (tokens, samples): each sample counts as one document."""
        return len(samples) * self.seq_length, len(samples)

    def locate(self, i: int, position: int) -> str:
        return f"{self.name}, sample {int(self._shuffled(np.array([i]))[0])}, token {position}"

    def describe(self, samples: int) -> str:
        return f"{self.name}: {len(self._samples)} samples, {samples / len(self._samples):.2f} epochs"


def build_plugin_dataset(
    name: str, split: str, seq_length: int, seed: int, tokenizer: Tokenizer | None
) -> MapDataset | None:
    """Return the dataset that a plugin registered as `name`, or None if it has no such split."""
    samples = REGISTRIES["dataset"].get(name)(split, seq_length, tokenizer)
    if samples is None:
        return None
    missing = [method for method in ("__len__", "__getitem__") if not hasattr(samples, method)]
    if missing:
        raise DataError(f"dataset={name!r} gives a {type(samples).__name__} without {' and '.join(missing)}; add them")
    return MapDataset(name, samples, seq_length, seed, split)
