"""Open what a run reads: tokenizer, training, validation and test sets, and the vocabulary they agree on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from megalite.config import DataConfig
from megalite.data.datasets import Blend, Dataset, build_blend, parse_data_path
from megalite.data.indexed import DataError
from megalite.data.info import bytes_per_token
from megalite.data.ledger import Ledger
from megalite.data.mock import MockDataset
from megalite.data.samples import split_parts
from megalite.data.tokenizer import Tokenizer, build_tokenizer

SPLITS = ("train", "valid", "test")
Paths = Sequence[str]


@dataclass(frozen=True)
class NamedSet:
    """A validation or test set; `name` is empty where there is one only. bytes_per_token: of its text, if known."""

    name: str
    dataset: Dataset
    bytes_per_token: float | None = None


@dataclass(frozen=True)
class Sources:
    """`vocab_size` is the true one; `eod` the end-of-document id. `ledger` is `train`, unless that is generated."""

    vocab_size: int
    eod: int | None
    train: Dataset
    tokenizer: Tokenizer | None
    ledger: Ledger | None = None
    valid: list[NamedSet] = field(default_factory=list)
    test: list[NamedSet] = field(default_factory=list)


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


def open_sources(data: DataConfig, seq_length: int, seed: int, eval_samples: int) -> Sources:
    """Open everything, reading no token yet. Raises DataError for data that is missing, damaged or too little.
    Validation and test sets are opened when eval_samples > 0."""
    tokenizer = open_tokenizer(data)
    vocab_size = data.vocab_size or 0
    if tokenizer is not None:
        if data.vocab_size is not None and data.vocab_size < tokenizer.vocab_size and not tokenizer.is_null:
            raise DataError(
                f"vocab_size={data.vocab_size} is below the {tokenizer.vocab_size} tokens of {tokenizer.name}; leave it out"
            )
        vocab_size = max(vocab_size, tokenizer.vocab_size)
    eod = None if tokenizer is None else tokenizer.eod
    if data.mock_data:
        train, valid, test = (MockDataset(vocab_size, seq_length, seed, name) for name in SPLITS)
        sets = [[NamedSet("", one)] if eval_samples else [] for one in (valid, test)]
        return Sources(vocab_size, eod, train, tokenizer, None, *sets)

    def blend(paths: Paths, split: str, part: tuple[float, float]) -> Blend:
        return build_blend(paths, seq_length, seed, split, part, data.data_cache_path, tokenizer)

    lists, parts = read_paths(data)
    if lists["train"] is None or parts["train"] is None:
        raise DataError(f"split={data.split!r} leaves nothing to train on; give the first part a weight")
    train = Ledger(blend(lists["train"], "train", parts["train"]), seed)
    found: dict[str, list[NamedSet]] = {"valid": [], "test": []}
    for split, named in found.items():
        paths, part = lists[split], parts[split]
        if not eval_samples or not paths or part is None:
            continue
        several = split == "valid" and data.multiple_validation_sets
        for name, some in name_sets(paths, data.validation_set_names) if several else [("", paths)]:
            named.append(NamedSet(name, blend(some, split, part), bytes_per_token(parse_data_path(some)[0])))
    return Sources(vocab_size, eod, train, tokenizer, train, **found)


def read_paths(data: DataConfig) -> tuple[dict[str, Paths | None], dict[str, tuple[float, float] | None]]:
    """(what --data-path would be, begin and end in parts of 1) for each split; None where there is nothing."""
    whole: dict[str, tuple[float, float] | None] = dict.fromkeys(SPLITS, (0.0, 1.0))
    if data.per_split_data_args_path is not None:
        return _read_json(data.per_split_data_args_path), whole
    if data.train_data_path is not None:
        return dict(zip(SPLITS, (data.train_data_path, data.valid_data_path, data.test_data_path), strict=True)), whole
    paths: Paths = data.data_path or ()
    if data.data_args_path is not None:
        paths = _read_text(data.data_args_path).split()
    return dict.fromkeys(SPLITS, paths), dict(zip(SPLITS, split_parts(data.split), strict=True))


def _read_text(path: str) -> str:
    try:
        return Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({error}); give a text file with the data paths") from None


def _read_json(path: str) -> dict[str, Paths | None]:
    form = 'write {"train": [...], "valid": [...], "test": [...]}, each a list as of --data-path'
    try:
        found = json.loads(_read_text(path))
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not JSON ({error}); {form}") from None
    if not isinstance(found, dict) or not found.get("train") or found.keys() - set(SPLITS):
        raise DataError(f"{path}: {form}")
    for value in found.values():
        if value is not None and (
            not isinstance(value, list) or not all(isinstance(v, (str, float, int)) for v in value)
        ):
            raise DataError(f"{path}: {form}")
    return {split: None if found.get(split) is None else [str(v) for v in found[split]] for split in SPLITS}


def name_sets(paths: Paths, names: Sequence[str] | None) -> list[tuple[str, Paths]]:
    """One set per prefix, with its name.

    >>> name_sets(["data/wiki", "data/code"], None)
    [('wiki', ['data/wiki']), ('code', ['data/code'])]
    """
    prefixes, weights = parse_data_path(paths)
    if weights is not None:
        raise DataError("valid_data_path has weights, but with --multiple-validation-sets nothing is mixed; drop them")
    if names is not None and len(names) != len(prefixes):
        raise DataError(f"validation_set_names has {len(names)} names for {len(prefixes)} sets; give one for each")
    chosen = list(names or (Path(prefix).name for prefix in prefixes))
    if len(set(chosen)) < len(chosen) or "" in chosen:
        raise DataError(
            f"validation sets are called {', '.join(chosen)}; give each a --validation-set-names of its own"
        )
    return [(name, [prefix]) for name, prefix in zip(chosen, prefixes, strict=True)]
