"""Open what a run reads: tokenizer, training, validation and test sets, and the vocabulary they agree on."""

from __future__ import annotations

from dataclasses import dataclass

from megalite.config import DataConfig
from megalite.data.datasets import Dataset, build_datasets, build_mock_datasets
from megalite.data.indexed import DataError
from megalite.data.tokenizer import Tokenizer, build_tokenizer


@dataclass(frozen=True)
class Sources:
    """`vocab_size` is the true one; `eod` the end-of-document id; sets are None where nothing was asked for."""

    vocab_size: int
    eod: int | None
    train: Dataset
    valid: Dataset | None
    test: Dataset | None
    tokenizer: Tokenizer | None


def open_tokenizer(data: DataConfig) -> Tokenizer | None:
    """The tokenizer that the options name; None where they give only a vocabulary size."""
    if data.tokenizer_type is None:
        return None
    return build_tokenizer(
        data.tokenizer_type,
        tokenizer_model=data.tokenizer_model,
        vocab_file=data.vocab_file,
        merge_file=data.merge_file,
        vocab_size=data.vocab_size,
    )


def open_sources(data: DataConfig, seq_length: int, seed: int, train_samples: int, eval_samples: int) -> Sources:
    """Open everything, reading no token yet. Raises DataError for data that is missing, damaged or too little."""
    tokenizer = open_tokenizer(data)
    vocab_size = data.vocab_size or 0 if tokenizer is None else tokenizer.vocab_size
    samples = (train_samples, eval_samples, eval_samples)
    if data.mock_data:
        train, valid, test = build_mock_datasets(vocab_size, seq_length, seed, samples)
    else:
        train, valid, test = build_datasets(
            data.data_path or (),
            data.split,
            seq_length,
            seed,
            samples,
            data_cache_path=data.data_cache_path,
            tokenizer=tokenizer,
        )
    if train is None:
        raise DataError(f"split={data.split!r} leaves nothing to train on; give the first part a weight")
    return Sources(vocab_size, None if tokenizer is None else tokenizer.eod, train, valid, test, tokenizer)
