"""From --data-path and --split to a training, a validation and a test dataset.

A dataset is endless and has no state: `samples(index)` -> tokens [n, seq_length + 1] for any sample numbers >= 0, in
any order. `GptDataset` reads one token file, `Blend` mixes several; `samples.py` and `blend.py` hold the arithmetic.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from megalite.data.blend import BlendOrder
from megalite.data.cache import load_or_build
from megalite.data.indexed import DataError, IndexedDataset
from megalite.data.info import check_tokenizer
from megalite.data.mock import MockDataset
from megalite.data.permutation import fold
from megalite.data.samples import Epoch, build_epoch, place, split_ranges
from megalite.data.tokenizer import Tokenizer

SPLITS = ("train", "valid", "test")


class Dataset(Protocol):
    """What `Batches` needs. `where` names file, document and position of a token, for errors."""

    @property
    def seq_length(self) -> int: ...
    def samples(self, index: NDArray[np.int64]) -> NDArray[np.int64]: ...
    def where(self, i: int, position: int) -> str: ...
    def describe(self, samples: int) -> str: ...


class GptDataset:
    """The documents `documents` of one file, cut into samples of seq_length + 1 tokens, epoch after epoch."""

    def __init__(
        self,
        data: IndexedDataset,
        documents: range,
        seq_length: int,
        seed: int,
        name: str = "train",
        cache_path: str | Path | None = None,
    ):
        self.seq_length, self.name = seq_length, name
        self._data, self._documents = data, documents
        if not data.checked:
            data.verify()  # 2 ns a document, where shuffling costs 50
        self._lengths = data.read_lengths(documents)
        self.num_tokens = int(np.sum(self._lengths, dtype=np.int64))
        if self.num_tokens < seq_length + 1:
            raise DataError(
                f"{data.prefix}: the {name} split has {self.num_tokens} tokens in {len(documents)} documents, fewer "
                f"than one sample of seq_length {seq_length} + 1: use a larger part in --split, more data or a smaller "
                "--seq-length"
            )
        self._key = fold(seed, name)
        self._cache_path = cache_path
        self._digest = hashlib.blake2b(self._lengths.data, digest_size=16).hexdigest() if cache_path else ""
        self._epochs: dict[int, Epoch] = {}  # the last two used
        self._lock = threading.Lock()  # the prefetch thread and the main one may meet here

    def _epoch(self, number: int) -> Epoch:
        with self._lock:
            epoch = self._epochs.pop(number, None) or self._make_epoch(number)
            self._epochs[number] = epoch
            while len(self._epochs) > 2:
                del self._epochs[next(iter(self._epochs))]
            return epoch

    def _make_epoch(self, number: int) -> Epoch:
        key = fold(self._key, "documents", number)
        if not self._cache_path:
            return build_epoch(self._lengths, key)
        stem = Path(self._data.prefix).name
        file = f"{stem}-{self.name}-{fold('epoch order 1', self._digest, len(self._lengths), key):016x}"
        return load_or_build(self._cache_path, file, self._lengths, lambda: build_epoch(self._lengths, key))

    def samples(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        width = self.seq_length + 1
        out = np.empty((len(index), width), np.int64)
        epochs, offsets = place(index, self.num_tokens, self.seq_length, self._key)
        rows = np.arange(len(index), dtype=np.int64) * width
        counts = np.minimum(width, self.num_tokens - offsets)
        if (over := np.flatnonzero(counts < width)).size:  # these end in the next epoch
            epochs = np.append(epochs, epochs[over] + 1)
            offsets = np.append(offsets, np.zeros(len(over), np.int64))
            rows = np.append(rows, rows[over] + counts[over])
            counts = np.append(counts, width - counts[over])
        numbers = np.unique(epochs).tolist()
        parts = [self._segments(number, *(a[epochs == number] for a in (offsets, counts, rows))) for number in numbers]
        begins, sizes, places = (
            (np.concatenate(columns) for columns in zip(*parts, strict=True)) if parts else (index,) * 3
        )
        if len(parts) > 1:
            order = np.argsort(places, kind="stable")
            begins, sizes = begins[order], sizes[order]
        self._data.copy(begins, sizes, out.reshape(-1))
        return out

    def sample(self, i: int) -> NDArray[np.int64]:
        return self.samples(np.array([i]))[0]

    def _segments(
        self, number: int, offsets: NDArray[np.int64], counts: NDArray[np.int64], places: NDArray[np.int64]
    ) -> tuple[NDArray[np.int64], ...]:
        """Where the tokens offsets[k] .. offsets[k] + counts[k] of epoch `number` lie, document by document.

        (first token, number of tokens, place in the output) of each part; those of k follow each other from places[k].
        """
        epoch = self._epoch(number)
        ends = offsets + counts
        first = np.searchsorted(epoch.starts, offsets, side="right") - 1  # the document that holds the first token
        holding = np.searchsorted(epoch.starts, ends - 1, side="right") - first  # documents up to the last token
        if (holding < 1).any():
            raise self._misfit(number)
        owner = np.repeat(np.arange(len(offsets)), holding)
        at = np.arange(len(owner)) + np.repeat(first - (np.cumsum(holding) - holding), holding)
        documents, starts = epoch.order[at], epoch.starts[at]
        if int(documents.min()) < 0 or int(documents.max()) >= len(self._documents):
            raise self._misfit(number)
        begins, lengths = self._data.spans(documents + np.int64(self._documents.start))
        skip = np.maximum(offsets[owner] - starts, 0)
        sizes = np.minimum(starts + lengths, ends[owner]) - starts - skip
        if (epoch.starts[at + 1] - starts != lengths).any() or int(sizes.min()) < 0 or sizes.sum() != counts.sum():
            raise self._misfit(number)
        return begins + skip, sizes, places[owner] + starts + skip - offsets[owner]

    def _misfit(self, number: int) -> DataError:
        """Damage between the places that cache.py looks at when it loads an order."""
        return DataError(
            f"{self._data.prefix}: the order of epoch {number} does not fit the documents' lengths; remove its files "
            f"from data_cache_path={self._cache_path}"
        )

    def where(self, i: int, position: int) -> str:
        number, offset = (int(a[0]) for a in place(np.array([i]), self.num_tokens, self.seq_length, self._key))
        offset += position
        if offset >= self.num_tokens:
            number, offset = number + 1, offset - self.num_tokens
        epoch = self._epoch(number)
        at = int(np.searchsorted(epoch.starts, offset, side="right")) - 1
        document = int(epoch.order[at]) + self._documents.start
        return f"{self._data.prefix}.bin, document {document}, token {offset - int(epoch.starts[at])}"

    def describe(self, samples: int) -> str:
        epochs = samples * self.seq_length / self.num_tokens
        return f"{self._data.prefix}: {len(self._documents)} documents, {self.num_tokens} tokens, {epochs:.2f} epochs"


class Blend:
    """Samples of several datasets, interleaved so that every prefix holds the weights (see blend.py)."""

    def __init__(self, datasets: Sequence[Dataset], weights: Sequence[float | int]):
        if len(datasets) != len(weights):
            raise DataError(f"{len(weights)} weights for {len(datasets)} datasets")
        self.datasets, self.weights, self.order = list(datasets), list(weights), BlendOrder(weights)
        self.seq_length = datasets[0].seq_length

    def samples(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        sources, numbers = self.order.at(index)
        out = np.empty((len(index), self.seq_length + 1), np.int64)
        for k in np.unique(sources).tolist():
            rows = np.flatnonzero(sources == k)
            out[rows] = self.datasets[k].samples(numbers[rows])
        return out

    def sample(self, i: int) -> NDArray[np.int64]:
        return self.samples(np.array([i]))[0]

    def where(self, i: int, position: int) -> str:
        source, number = (int(a[0]) for a in self.order.at(np.array([i])))
        return self.datasets[source].where(number, position)

    def describe(self, samples: int) -> str:
        total = sum(self.weights)
        shares = [(weight / total, dataset) for weight, dataset in zip(self.weights, self.datasets, strict=True)]
        return "\n".join(f"{share:.4f} of {dataset.describe(round(samples * share))}" for share, dataset in shares)


def parse_data_path(data_path: Sequence[str]) -> tuple[list[str], list[float] | None]:
    """(prefixes, weights); weights None when only prefixes are given.

    >>> parse_data_path(["0.3", "a", "0.7", "b"])
    (['a', 'b'], [0.3, 0.7])
    """

    def number(text: str) -> float | None:
        try:
            return float(text)
        except ValueError:
            return None

    numbers = [number(text) for text in data_path]
    if not data_path:
        raise DataError("data_path is empty; give --data-path PREFIX, or WEIGHT PREFIX pairs")
    if numbers[0] is None:
        return list(data_path), None
    weights = [value for value in numbers[::2] if value is not None]
    if len(data_path) % 2 or len(weights) * 2 != len(data_path):
        raise DataError(
            f"data_path={' '.join(data_path)} is not a list of WEIGHT PREFIX pairs; give each prefix a weight, or none"
        )
    return list(data_path[1::2]), weights


def build_datasets(
    data_path: Sequence[str],
    split: str,
    seq_length: int,
    seed: int,
    samples: tuple[int, int, int],
    *,
    data_cache_path: str | Path | None = None,
    tokenizer: Tokenizer | None = None,
) -> tuple[Dataset | None, Dataset | None, Dataset | None]:
    """Training, validation and test dataset; None where no samples are asked for, or whose part in `split` is 0.

    data_path  prefixes, or weight prefix pairs; without weights each file counts by its tokens
    samples    how many each will be asked for at least: here only whether it is needed at all
    tokenizer  when given, data made by another one is refused
    """
    prefixes, weights = parse_data_path(data_path)
    files = []
    for prefix in prefixes:
        files.append(IndexedDataset(prefix, cache_path=data_cache_path))
        if tokenizer is not None:
            check_tokenizer(prefix, tokenizer)
    whole = split_ranges(split, 1 << 40)
    built: list[Dataset | None] = []
    for k, name in enumerate(SPLITS):
        if samples[k] <= 0 or not whole[k]:
            built.append(None)
            continue
        parts = [
            GptDataset(file, split_ranges(split, len(file))[k], seq_length, seed, name, data_cache_path)
            for file in files
        ]
        shares: Sequence[float | int] = weights or [part.num_tokens for part in parts]
        built.append(parts[0] if len(parts) == 1 else Blend(parts, shares))
    return built[0], built[1], built[2]


def build_mock_datasets(
    vocab_size: int, seq_length: int, seed: int, samples: tuple[int, int, int]
) -> tuple[Dataset | None, Dataset | None, Dataset | None]:
    """The same for --mock-data."""
    built: list[Any] = [
        MockDataset(vocab_size, seq_length, seed, name) if samples[k] > 0 else None for k, name in enumerate(SPLITS)
    ]
    return built[0], built[1], built[2]
