"""Opens the data of a run: tokenizer, training, validation and test sets, and the vocabulary they agree on."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from megalite.config.option import invalid_text_reason
from megalite.config.options import DataConfig
from megalite.config.text_file import TextFileError, read_small_text
from megalite.data.datasets import blended_dataset as blends
from megalite.data.datasets.base_dataset import Dataset, MockDataset, build_plugin_dataset
from megalite.data.datasets.fim_dataset import FimDataset, FimOptions
from megalite.data.datasets.ledger import DataLedger
from megalite.data.errors import DataError
from megalite.data.tokenizers.build_tokenizer import build_tokenizer
from megalite.data.tokenizers.tokenizer import Tokenizer

TOKENIZER_OPTIONS = ("tokenizer_type", "tokenizer_model", "vocab_file", "merge_file", "vocab_size", "tiktoken_pattern")
SPLITS = ("train", "valid", "test")
DEFAULT_SPLIT = "969, 30, 1"  # Megatron-LM's
Paths = Sequence[str]
Data = TypeVar("Data")


@dataclass(frozen=True)
class NamedDataset(Generic[Data]):
    """A validation or test set; `name` is empty where there is only one. `bytes_per_token`: of its text, if known."""

    name: str
    data: Data  # a Dataset, or a rank's loader of it
    bytes_per_token: float | None = None


@dataclass(frozen=True)
class DatasetBundle:
    """`vocab_size`: without padding. `eod`: end of document. `ledger`: of what `train` reads; None: generated data."""

    vocab_size: int
    eod: int | None
    train: Dataset
    tokenizer: Tokenizer | None
    ledger: DataLedger | None = None
    valid: list[NamedDataset[Dataset]] = field(default_factory=list)
    test: list[NamedDataset[Dataset]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # for the log
    ignored_label: int | None = None  # pads samples of `train`


def open_tokenizer(data: DataConfig) -> Tokenizer | None:
    """The tokenizer that the options name; None where they give only a vocabulary size."""
    return (
        None
        if data.tokenizer_type is None
        else build_tokenizer(**{name: getattr(data, name) for name in TOKENIZER_OPTIONS})
    )


def build_datasets(data: DataConfig, seq_length: int, seed: int, eval_iters: int) -> DatasetBundle:
    """Open everything without reading tokens; validation and test sets only if eval_iters > 0. Raises DataError for
    data that is missing, damaged or too little."""
    tokenizer = open_tokenizer(data)
    vocab_size = true_vocab_size(data, tokenizer)
    eod = None if tokenizer is None else tokenizer.eod
    if data.mock_data:
        train, *others = (MockDataset(vocab_size, seq_length, seed, name) for name in SPLITS)
        valid, test = ([NamedDataset[Dataset]("", dataset_)] if eval_iters > 0 else [] for dataset_ in others)
        return DatasetBundle(vocab_size, eod, train, tokenizer, None, valid, test)
    if data.dataset is not None:
        splits = SPLITS if eval_iters > 0 else SPLITS[:1]
        own, *rest = (build_plugin_dataset(data.dataset, split, seq_length, seed, tokenizer) for split in splits)
        if own is None:
            raise DataError(f"dataset={data.dataset!r} gives nothing for the split train; it has to")
        ledger = DataLedger(blends.BlendedDataset([own], [1]), seed)
        valid, test = ([NamedDataset[Dataset]("", one)] if one else [] for one in rest or (None, None))
        return DatasetBundle(vocab_size, eod, ledger.blend, tokenizer, ledger, valid, test)

    def blend(paths: Paths, split: str, part: tuple[float, float]) -> blends.BlendedDataset:
        return blends.build_blend(paths, seq_length, seed, split, part, data, tokenizer)

    lists, parts = split_data_paths(data)
    if lists["train"] is None or parts["train"] is None:
        raise DataError(f"split={data.split!r} leaves nothing to train on; give the first part a weight")
    train: Dataset
    ledger = DataLedger(blend(lists["train"], "train", parts["train"]), seed)
    train, ignored = ledger.blend, None
    notes = list(ledger.blend.notes)
    if data.fim_data and tokenizer is not None:
        fim = _fim(data, tokenizer, notes)
        train, ignored = FimDataset(train, fim, seed, tokenizer), None if fim.pad == tokenizer.eod else fim.pad
    sets: dict[str, list[NamedDataset[Dataset]]] = {"valid": [], "test": []}
    for split, named in sets.items():
        paths, part = lists[split], parts[split]
        if eval_iters <= 0 or not paths or part is None:
            continue
        each = {"": list(paths)}
        if split == "valid" and data.multiple_validation_sets:
            each = blends.one_set_per_prefix(each[""], data.validation_set_names)
        elif split == "valid":
            each = blends.parse_named_sets(each[""], unnamed="")
        for name, own_paths in each.items():
            try:
                dataset = blend(own_paths, split, part)
            except DataError as error:
                if part == (0.0, 1.0):
                    raise
                notes.append(f"no {split} set: {error}")  # as in Megatron-LM, which splits small data nevertheless
                continue
            notes += [f"{split} set{' ' + name if name else ''}: {note}" for note in dataset.notes]
            named.append(NamedDataset(name, dataset, blends.bytes_per_token(*blends.parse_data_path(own_paths))))
    if data.fim_data and (sets["valid"] or sets["test"]):
        notes.append("fim_data rearranges the training data alone; Megatron-LM rearranges validation and test too")
    return DatasetBundle(vocab_size, eod, train, tokenizer, ledger, sets["valid"], sets["test"], notes, ignored)


def _fim(data: DataConfig, tokenizer: Tokenizer, notes: list[str]) -> FimOptions:
    def id_of(name: str) -> int:
        if (number := tokenizer.token_id(getattr(data, name))) is not None:
            return number
        lacks = f"{name}={getattr(data, name)!r} is not a token of {tokenizer.name}"
        if tokenizer.unk_id is None:
            raise DataError(f"{lacks}; name one that it has, or train a tokenizer with it")
        notes.append(f"{lacks}: its unknown token, id {tokenizer.unk_id}, stands for it, as in Megatron-LM")
        return tokenizer.unk_id

    return FimOptions(
        rate=data.fim_rate,
        spm_rate=data.fim_spm_rate,
        **{name: id_of(f"fim_{name}_token") for name in ("prefix", "middle", "suffix", "pad")},
        eod=tokenizer.eod if data.fim_eod_token is None else id_of("fim_eod_token"),
        unknown=tokenizer.unk_id,
        split=None if data.fim_split_sample is None else id_of("fim_split_sample"),
        fragment_rate=data.fim_fragment_rate,
        no_prefix=data.fim_no_prefix,
        characters=not data.fim_split_on_tokens,
    )


def true_vocab_size(data: DataConfig, tokenizer: Tokenizer | None) -> int:
    """The size given, or the tokenizer's, or 0. Raises DataError where they do not agree."""
    given = data.vocab_size or 0
    own = 0 if tokenizer is None else tokenizer.vocab_size
    if 0 < given < own:
        raise DataError(f"vocab_size={given} is below the {own} of {tokenizer and tokenizer.name}; leave it out")
    size, rows = max(given, own), data.padded_vocab_size
    if rows is not None and rows < size:
        raise DataError(f"padded_vocab_size={rows} is below the vocabulary of {size}; give more, or leave it out")
    return size


def split_data_paths(data: DataConfig) -> tuple[dict[str, Paths | None], dict[str, tuple[float, float] | None]]:
    """For each split (its list as of --data-path, its begin and end as fractions); None where it has no data."""
    whole: dict[str, tuple[float, float] | None] = dict.fromkeys(SPLITS, (0.0, 1.0))
    if data.per_split_data_args_path is not None:
        lists = _read_json(data.per_split_data_args_path)
        _check_paths(data.per_split_data_args_path, [path for paths in lists.values() for path in paths or ()])
        return lists, whole
    if data.train_data_path is not None:
        return dict(zip(SPLITS, (data.train_data_path, data.valid_data_path, data.test_data_path), strict=True)), whole
    paths: Paths = data.data_path or ()
    if data.data_args_path is not None:
        paths = _read_list(data.data_args_path).split()
        _check_paths(data.data_args_path, paths)
    return dict.fromkeys(SPLITS, paths), dict(
        zip(SPLITS, blends.split_fractions(data.split or DEFAULT_SPLIT), strict=True)
    )


def _check_paths(file: str, paths: Paths) -> None:
    """Raises DataError for a path that the command line would refuse."""
    for reason in filter(None, (invalid_text_reason(path, path=True) for path in paths)):
        raise DataError(f"{file}: a path in it {reason}")


def _read_list(path: str) -> str:
    try:
        return read_small_text(path, "a text file with the data paths")
    except TextFileError as error:
        raise DataError(str(error)) from None


def _read_json(path: str) -> dict[str, Paths | None]:
    form = 'write {"train": [...], "valid": [...], "test": [...]}, each a list as of --data-path'
    text = _read_list(path)
    try:
        lists = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not JSON ({error}); {form}") from None
    right = isinstance(lists, dict) and bool(lists.get("train")) and not lists.keys() - set(SPLITS)
    for words in [words for words in lists.values() if words is not None] if right else ():
        right &= isinstance(words, list) and all(isinstance(word, str | float | int) for word in words)
    if not right:
        raise DataError(f"{path}: {form}")
    return {split: None if lists.get(split) is None else [str(word) for word in lists[split]] for split in SPLITS}
