"""A dataset of a user's own (config/plugins.py): samples by number, made endless, shuffled and counted as token files
are, so that a run resumes, its ledger counts and the ranks of dp share it as they do theirs."""

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np

from megalite.config.registry import KINDS
from megalite.data.errors import DataError
from megalite.data.samples.permutation import Ints, fold, permute
from megalite.data.samples.source import Source
from megalite.data.tokenizers.tokenizer import Tokenizer


class NumberedDataset(Source):
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

    def go_on(self, taken: Sequence[tuple[int, int]]) -> str | None:
        self._taken = sum(samples for _, samples in taken)
        return None

    def count(self, samples: range) -> tuple[int, int]:
        """A sample counts as a document."""
        return len(samples) * self.seq_length, len(samples)

    def where(self, i: int, position: int) -> str:
        return f"{self.name}, sample {int(self._places(np.array([i]))[0])}, token {position}"

    def describe(self, samples: int) -> str:
        return f"{self.name}: {len(self._samples)} samples, {samples / len(self._samples):.2f} epochs"


def numbered(name: str, split: str, seq_length: int, seed: int, tokenizer: Tokenizer | None) -> NumberedDataset | None:
    """The dataset that plugins call `name`; None where it has no such split."""
    samples = KINDS["dataset"].find(name)(split, seq_length, tokenizer)
    if samples is None:
        return None
    if lacks := [one for one in ("__len__", "__getitem__") if not hasattr(samples, one)]:
        raise DataError(f"dataset={name!r} gives a {type(samples).__name__} without {' and '.join(lacks)}; add them")
    return NumberedDataset(name, samples, seq_length, seed, split)
