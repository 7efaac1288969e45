"""Generated data for --mock-data: noisy arithmetic progressions, a pure function of (seed, sample, t).

    token[t] = scale * ((first + step * t) mod m),   one token in NOISE replaced by any other

`first` and `step` (1..STEPS) are drawn per sample; m is the size of the vocabulary, at most VALUES, and `scale` spreads
the values over it, so that every part of a split vocabulary is used.
"""

import numpy as np
from numpy.typing import NDArray

from megalite.data.samples.permutation import below, fold, mix32
from megalite.data.samples.source import Dataset

VALUES = 512  # few enough to be learnt in a few hundred steps
STEPS = 4
NOISE = 16


class MockDataset(Dataset):
    """Samples of seq_length + 1 tokens below vocab_size; as endless as a real dataset."""

    def __init__(self, vocab_size: int, seq_length: int, seed: int, name: str = "train"):
        self.vocab_size, self.seq_length = vocab_size, seq_length
        self._modulus = min(vocab_size, VALUES)
        self._scale = vocab_size // self._modulus
        self._key = fold(seed, "mock", name)

    def _hash(self, purpose: str, index_n1: NDArray[np.int64], t: NDArray[np.int64]) -> NDArray[np.uint32]:
        """Uniform 32 bits for every (sample, t)."""
        key = fold(self._key, purpose)
        low, high = (index_n1 & 0xFFFFFFFF).astype(np.uint32), (index_n1 >> 32).astype(np.uint32)
        return mix32(mix32(mix32(low, key) ^ high, key >> 7) + t.astype(np.uint32), key >> 13)

    def samples(self, index: NDArray[np.int64]) -> NDArray[np.int64]:
        index_n1 = np.asarray(index, np.int64)[:, None]
        t = np.arange(self.seq_length + 1)[None, :]
        zero = np.zeros((1, 1), np.int64)
        first = below(self._hash("first", index_n1, zero), self._modulus).astype(np.int64)
        step = 1 + below(self._hash("step", index_n1, zero), STEPS).astype(np.int64)
        values = (first + step * t) % self._modulus
        noisy = below(self._hash("noisy", index_n1, t), NOISE) == 0
        values = np.where(noisy, below(self._hash("noise", index_n1, t), self._modulus).astype(np.int64), values)
        return values * self._scale

    def where(self, i: int, position: int) -> str:
        return f"mock sample {i}, token {position}"

    def describe(self, samples: int) -> str:
        return f"generated progressions, {samples} samples of {self.seq_length} tokens"
