"""Synthetic token sequences for --mock-data."""

import numpy as np
from numpy.typing import NDArray

from megalite.data.datasets.base_dataset import Dataset
from megalite.data.datasets.permutation import Ints, bounded, fold, mix32

NUM_VALUES = 512  # few enough to be learnt in a few hundred steps
MAX_STRIDE = 4
NOISE_PERIOD = 16


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
