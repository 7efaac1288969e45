"""Open what a run reads: tokenizer, training, validation and test sets, and the vocabulary they agree on."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megalite.config import DataConfig


@dataclass(frozen=True)
class Sources:
    """`vocab_size` is the true one; `eod` the end-of-document id; sets are None where nothing was asked for."""

    vocab_size: int
    eod: int | None
    train: Any
    valid: Any
    test: Any
    tokenizer: Any = None


def open_sources(data: DataConfig, seq_length: int, seed: int, train_samples: int, eval_samples: int) -> Sources:
    from megalite.data.batches import MockDataset

    assert data.vocab_size
    size = data.vocab_size
    train = MockDataset(size, seq_length, seed)
    valid = MockDataset(size, seq_length, seed + 1) if eval_samples else None
    return Sources(size, None, train, valid, None)
