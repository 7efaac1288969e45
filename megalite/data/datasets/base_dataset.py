"""The interfaces of datasets, to those that read them, and to the token ledger; generated data; and a dataset of a
user's own (config/plugins.py): samples by number, made endless, shuffled and counted as token files are, so that a run
resumes, its ledger counts and the ranks of dp share it as they do theirs."""

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
PLACES, WINDOW = 64, 1 << 16  # places, and tokens at each, at which two large sources are compared


class Dataset(Protocol):
    """Endless and without state.

    samples(index)  tokens [n, seq_length + 1], for any sample numbers >= 0
    layout(index)   for each packed sample the lengths of its pieces, in order, before its padding; None: not packed
    where           file, document and position of a token, for errors
    """

    seq_length: int

    def samples(self, index: Ints) -> Ints: ...
    def piece_lengths(self, index: Ints) -> list[NDArray[np.int32]] | None:
        return None

    def locate(self, i: int, position: int) -> str: ...
    def describe(self, samples: int) -> str: ...


class DocumentDataset(Dataset):
    """A dataset over the documents `documents` of one file. packed: samples are whole pieces."""

    packed = False

    def __init__(self, data: IndexedDataset, documents: range, seq_length: int, seed: int, split: str):
        if not data.fully_checked:
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

    def same_documents(self, other: "DocumentDataset") -> bool:
        """Whether a source of the same digest has the same tokens: all of them, or those at PLACES places."""
        total = self.num_tokens
        mine, its = (int(one._data.spans(np.array(one._documents[:1]))[0][0]) for one in (self, other))
        begins = np.arange(0, total, WINDOW)
        if len(begins) > PLACES:
            begins = np.linspace(0, total - WINDOW, PLACES).astype(np.int64)
        for begin in begins.tolist():
            end = min(begin + WINDOW, total)
            own = self._data.tokens[mine + begin : mine + end]
            if not np.array_equal(own, other._data.tokens[its + begin : its + end]):
                return False
        return True

    def resume(self, taken: Sequence[tuple[int, int]]) -> str | None:
        """Continue after the samples `taken` so far: (sequence length, samples), in order. Returns a note, or None."""
        raise NotImplementedError

    def count_tokens_and_documents(self, samples: range) -> tuple[int, int]:
        """(tokens, documents that begin) in the inputs of these samples."""
        raise NotImplementedError


class MockDataset(Dataset):
    """For --mock-data: noisy arithmetic progressions, a pure function of (seed, sample, t).

        token[t] = scale * ((first + step * t) mod m),   one token in NOISE replaced by any other

    `first` and `step` (1..STEPS) are drawn per sample; m is the size of the vocabulary, at most VALUES, and `scale`
    spreads the values over it, so that every part of a split vocabulary is used.
    """

    def __init__(self, vocab_size: int, seq_length: int, seed: int, name: str = "train"):
        self.vocab_size, self.seq_length = vocab_size, seq_length
        self._modulus = min(vocab_size, NUM_VALUES)
        self._scale = vocab_size // self._modulus
        self._key = fold(seed, "mock", name)

    def _hash(self, purpose: str, index_n1: Ints, t: Ints) -> NDArray[np.uint32]:
        """Uniform 32 bits for every (sample, t)."""
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
    """Epoch after epoch each of `samples` once, in an order of its own: what has len, and [i], which gives seq_length
    + 1 token ids, the same ones whenever they are asked for."""

    def __init__(self, name: str, samples: Any, seq_length: int, seed: int, split: str):
        self.name, self.seq_length, self._samples, self._taken = f"dataset {name}", seq_length, samples, 0
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

    def _places(self, index: Ints) -> Ints:
        epochs, places = np.divmod(np.asarray(index, np.int64) + self._taken, count := len(self._samples))
        for epoch in np.unique(epochs).tolist():
            rows = epochs == epoch
            places[rows] = permute(places[rows], count, fold(self._key, "samples", epoch))
        return places

    def samples(self, index: Ints) -> Ints:
        return np.stack([self._sample(k) for k in self._places(index).tolist()]).astype(np.int64)

    @property
    def digest(self) -> str:
        """Of the number of samples, and of some."""
        count = len(self._samples)
        digest = hashlib.blake2b(f"{self.name} {count}".encode(), digest_size=16)
        for k in (0, count // 2, count - 1):
            digest.update(self._sample(k).astype(np.int64).tobytes())
        return digest.hexdigest()

    def resume(self, taken: Sequence[tuple[int, int]]) -> str | None:
        self._taken = sum(samples for _, samples in taken)
        return None

    def count_tokens_and_documents(self, samples: range) -> tuple[int, int]:
        """A sample counts as a document."""
        return len(samples) * self.seq_length, len(samples)

    def locate(self, i: int, position: int) -> str:
        return f"{self.name}, sample {int(self._places(np.array([i]))[0])}, token {position}"

    def describe(self, samples: int) -> str:
        return f"{self.name}: {len(self._samples)} samples, {samples / len(self._samples):.2f} epochs"


def build_plugin_dataset(
    name: str, split: str, seq_length: int, seed: int, tokenizer: Tokenizer | None
) -> MapDataset | None:
    """The dataset that plugins call `name`; None where it has no such split."""
    samples = REGISTRIES["dataset"].get(name)(split, seq_length, tokenizer)
    if samples is None:
        return None
    if lacks := [one for one in ("__len__", "__getitem__") if not hasattr(samples, one)]:
        raise DataError(f"dataset={name!r} gives a {type(samples).__name__} without {' and '.join(lacks)}; add them")
    return MapDataset(name, samples, seq_length, seed, split)
