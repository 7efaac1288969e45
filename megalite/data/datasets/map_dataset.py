"""A user's own map-style dataset (config/plugins.py) as a source of training data.

Its samples become endless and are shuffled and counted like those of token files, so that a run can resume, the ledger
can count them and the data-parallel ranks can split them.
"""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from megalite.config.registry import REGISTRIES
from megalite.data.datasets.base_dataset import DocumentDataset
from megalite.data.datasets.permutation import Ints, fold, permute
from megalite.data.errors import DataError
from megalite.data.tokenizers.tokenizer import Tokenizer


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
            raise DataError(f"dataset={name!r} has no samples of {split}; return None for a split without samples")
        self.num_tokens, self._key = len(samples) * seq_length, fold(seed, split)

    def _sample(self, k: int) -> Ints:
        try:
            row = np.asarray(self._samples[k])
        except ValueError as error:
            raise DataError(f"{self.name}: its sample {k} cannot be built: {error}; correct the plugin") from error
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
        lacks = " and ".join(missing)
        raise DataError(f"dataset={name!r} returns a {type(samples).__name__} that lacks {lacks}; add it")
    return MapDataset(name, samples, seq_length, seed, split)
