"""Open the data of a run: the tokenizer, the training, validation and test sets, and the vocabulary size."""

import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, TypeVar

from megalite.common.text_file import TextFileError, read_small_text
from megalite.config.option import invalid_text_reason
from megalite.config.options import DataConfig
from megalite.data.datasets.base_dataset import Dataset
from megalite.data.datasets.bits_per_byte import bytes_per_token
from megalite.data.datasets.blended_dataset import BlendedDataset, build_blend
from megalite.data.datasets.data_path import one_set_per_prefix, parse_data_path, parse_named_sets, split_fractions
from megalite.data.datasets.fim_dataset import FimDataset, FimOptions
from megalite.data.datasets.ledger import DataLedger
from megalite.data.datasets.map_dataset import MapDataset, build_plugin_dataset
from megalite.data.datasets.mock_dataset import MockDataset
from megalite.data.datasets.requests import RequestSet, open_requests
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
    """A validation or test set."""

    name: str  # empty if there is only one set
    data: Data  # a Dataset, or a rank's loader of it
    bytes_per_token: float | None = None  # mean over the text, if known


@dataclass(frozen=True)
class DatasetBundle:
    """The datasets of a run, and the vocabulary that they share."""

    vocab_size: int  # without padding
    eod: int | None  # id of the end-of-document token
    train: Dataset
    tokenizer: Tokenizer | None
    ledger: DataLedger | None = None  # record of the samples that `train` reads; None for generated data
    valid: list[NamedDataset[Dataset]] = field(default_factory=list)
    test: list[NamedDataset[Dataset]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)  # lines for the log
    ignored_label: int | None = None  # id that pads samples of `train` and does not count as a label
    requests: RequestSet | None = None  # what each evaluation scores by likelihood


def open_tokenizer(data: DataConfig) -> Tokenizer | None:
    """Open the tokenizer that the options name; return None if they give only a vocabulary size."""
    if data.tokenizer_type is None:
        return None
    return build_tokenizer(**{name: getattr(data, name) for name in TOKENIZER_OPTIONS})


def build_datasets(data: DataConfig, seq_length: int, seed: int, eval_iters: int) -> DatasetBundle:
    """Open the datasets without reading tokens; validation and test sets only if eval_iters > 0.

    Raises:
        DataError: if data is missing, damaged or too little, or if requests cannot be used.
    """
    tokenizer = open_tokenizer(data)
    vocab_size = true_vocab_size(data, tokenizer)
    builder = _DatasetBuilder(data, seq_length, seed, eval_iters > 0, tokenizer, vocab_size)
    if data.mock_data:
        sources = builder.generated()
    elif data.dataset is not None:
        sources = builder.from_plugin(data.dataset)
    else:
        sources = builder.from_files()
    if data.eval_requests is None or tokenizer is None:
        return sources
    requests = open_requests(data.eval_requests, tokenizer, seq_length)
    return replace(sources, requests=requests, notes=[*sources.notes, requests.describe(data.eval_requests)])


@dataclass(frozen=True)
class _DatasetBuilder:
    """The arguments of `build_datasets`, and a method for each source of data."""

    data: DataConfig
    seq_length: int
    seed: int
    evaluates: bool  # validation and test sets are needed
    tokenizer: Tokenizer | None
    vocab_size: int

    @property
    def eod(self) -> int | None:
        return None if self.tokenizer is None else self.tokenizer.eod

    def generated(self) -> DatasetBundle:
        """Return the datasets of --mock-data."""

        def mock(split: str) -> MockDataset:
            return MockDataset(self.vocab_size, self.seq_length, self.seed, split)

        valid: list[NamedDataset[Dataset]] = []
        test: list[NamedDataset[Dataset]] = []
        if self.evaluates:
            valid.append(NamedDataset("", mock("valid")))
            test.append(NamedDataset("", mock("test")))
        return DatasetBundle(self.vocab_size, self.eod, mock("train"), self.tokenizer, None, valid, test)

    def from_plugin(self, name: str) -> DatasetBundle:
        """Return the datasets of a plugin's dataset `name`."""

        def build(split: str) -> MapDataset | None:
            return build_plugin_dataset(name, split, self.seq_length, self.seed, self.tokenizer)

        def build_eval(split: str) -> list[NamedDataset[Dataset]]:
            dataset = build(split) if self.evaluates else None
            return [] if dataset is None else [NamedDataset("", dataset)]

        train = build("train")
        valid = build_eval("valid")
        test = build_eval("test")
        if train is None:
            raise DataError(f"dataset={name!r} returns None for the split train; return samples for it")
        ledger = DataLedger(BlendedDataset([train], [1]), self.seed)
        return DatasetBundle(self.vocab_size, self.eod, ledger.blend, self.tokenizer, ledger, valid, test)

    def from_files(self) -> DatasetBundle:
        """Return the datasets of the data files that the options name."""
        data, tokenizer = self.data, self.tokenizer
        paths_by_split, fractions_by_split = split_data_paths(data)
        train_paths, train_fractions = paths_by_split["train"], fractions_by_split["train"]
        if train_paths is None or train_fractions is None:
            raise DataError(f"split={data.split!r} leaves nothing to train on; give the first part a weight")
        ledger = DataLedger(self._blend(train_paths, "train", train_fractions), self.seed)
        train: Dataset = ledger.blend
        ignored_label = None
        notes = list(ledger.blend.notes)
        if data.fim_data and tokenizer is not None:
            fim = _fim_options(data, tokenizer, notes)
            train = FimDataset(train, fim, self.seed, tokenizer)
            ignored_label = None if fim.pad == tokenizer.eod else fim.pad
        valid = self._eval_sets("valid", paths_by_split["valid"], fractions_by_split["valid"], notes)
        test = self._eval_sets("test", paths_by_split["test"], fractions_by_split["test"], notes)
        if data.fim_data and (valid or test):
            notes.append("fim_data rearranges only the training data; Megatron-LM rearranges validation and test too")
        return DatasetBundle(self.vocab_size, self.eod, train, tokenizer, ledger, valid, test, notes, ignored_label)

    def _eval_sets(
        self, split: str, paths: Paths | None, fractions: tuple[float, float] | None, notes: list[str]
    ) -> list[NamedDataset[Dataset]]:
        """Return the validation or test sets in data files; adds to `notes`."""
        named_datasets: list[NamedDataset[Dataset]] = []
        if not self.evaluates or not paths or fractions is None:
            return named_datasets
        paths_by_name = {"": list(paths)}
        if split == "valid" and self.data.multiple_validation_sets:
            paths_by_name = one_set_per_prefix(list(paths), self.data.validation_set_names)
        elif split == "valid":
            paths_by_name = parse_named_sets(list(paths), unnamed="")
        for name, set_paths in paths_by_name.items():
            try:
                dataset = self._blend(set_paths, split, fractions)
            except DataError as error:
                if fractions == (0.0, 1.0):
                    raise
                # Splitting small data may leave an empty set; Megatron-LM continues without it too.
                notes.append(f"no {split} set: {error}")
                continue
            notes += [f"{split} set{' ' + name if name else ''}: {note}" for note in dataset.notes]
            token_bytes = bytes_per_token(*parse_data_path(set_paths))
            named_datasets.append(NamedDataset(name, dataset, token_bytes))
        return named_datasets

    def _blend(self, paths: Paths, split: str, fractions: tuple[float, float]) -> BlendedDataset:
        return build_blend(paths, self.seq_length, self.seed, split, fractions, self.data, self.tokenizer)


def _fim_options(data: DataConfig, tokenizer: Tokenizer, notes: list[str]) -> FimOptions:
    """Return the options of fill-in-the-middle, with the ids of its tokens; adds to `notes`."""

    def id_of(name: str) -> int:
        token_id = tokenizer.token_id(getattr(data, name))
        if token_id is not None:
            return token_id
        problem = f"{name}={getattr(data, name)!r} is not a token of {tokenizer.name}"
        if tokenizer.unk_id is None:
            raise DataError(f"{problem}; name one that it has, or train a tokenizer with it")
        notes.append(f"{problem}: its unknown token, id {tokenizer.unk_id}, is used instead, as in Megatron-LM")
        return tokenizer.unk_id

    return FimOptions(
        rate=data.fim_rate,
        spm_rate=data.fim_spm_rate,
        **{part: id_of(f"fim_{part}_token") for part in ("prefix", "middle", "suffix", "pad")},
        eod=tokenizer.eod if data.fim_eod_token is None else id_of("fim_eod_token"),
        unknown=tokenizer.unk_id,
        split=None if data.fim_split_sample is None else id_of("fim_split_sample"),
        fragment_rate=data.fim_fragment_rate,
        no_prefix=data.fim_no_prefix,
        characters=not data.fim_split_on_tokens,
    )


def true_vocab_size(data: DataConfig, tokenizer: Tokenizer | None) -> int:
    """Return the vocabulary size without padding: --vocab-size, or else the tokenizer's, or else 0.

    Raises:
        DataError: if --vocab-size is below the tokenizer's, or --padded-vocab-size below the result.
    """
    requested = data.vocab_size or 0
    tokens = 0 if tokenizer is None else tokenizer.vocab_size
    if 0 < requested < tokens:
        raise DataError(f"vocab_size={requested} is below the {tokens} of {tokenizer and tokenizer.name}; leave it out")
    size, padded_size = max(requested, tokens), data.padded_vocab_size
    if padded_size is not None and padded_size < size:
        raise DataError(
            f"padded_vocab_size={padded_size} is below the vocabulary of {size}; give more, or leave it out"
        )
    return size


def split_data_paths(data: DataConfig) -> tuple[dict[str, Paths | None], dict[str, tuple[float, float] | None]]:
    """Return for each split its list of paths (in the form of --data-path), and which fraction of them it takes.

    A fraction is a pair (start, stop) in [0, 1]. A split without data has None.
    """
    everything: dict[str, tuple[float, float] | None] = dict.fromkeys(SPLITS, (0.0, 1.0))
    if data.per_split_data_args_path is not None:
        paths_by_split = _read_paths_json(data.per_split_data_args_path)
        all_paths = [path for paths in paths_by_split.values() for path in paths or ()]
        _check_paths(data.per_split_data_args_path, all_paths)
        return paths_by_split, everything
    if data.train_data_path is not None:
        return {"train": data.train_data_path, "valid": data.valid_data_path, "test": data.test_data_path}, everything
    paths: Paths = data.data_path or ()
    if data.data_args_path is not None:
        paths = _read_text(data.data_args_path).split()
        _check_paths(data.data_args_path, paths)
    fractions = split_fractions(data.split or DEFAULT_SPLIT)
    return dict.fromkeys(SPLITS, paths), dict(zip(SPLITS, fractions, strict=True))


def _check_paths(file: str, paths: Paths) -> None:
    """Raise DataError if `file` names a path that the command line would refuse."""
    for path in paths:
        if reason := invalid_text_reason(path, path=True):
            raise DataError(f"{file}: a path in it {reason}")


def _read_text(path: str) -> str:
    try:
        return read_small_text(path, "a text file with the data paths")
    except TextFileError as error:
        raise DataError(str(error)) from None


def _read_paths_json(path: str) -> dict[str, Paths | None]:
    """Read the file of --per-split-data-args-path: a JSON object with a list of weights and paths for each split."""
    remedy = 'write {"train": [...], "valid": [...], "test": [...]}, each a list like that of --data-path'
    text = _read_text(path)
    try:
        lists = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path}: not JSON ({error}); {remedy}") from None

    def is_list(items: Any) -> bool:
        return isinstance(items, list) and all(isinstance(item, str | float | int) for item in items)

    has_splits = isinstance(lists, dict) and bool(lists.get("train")) and not lists.keys() - set(SPLITS)
    if not has_splits or not all(items is None or is_list(items) for items in lists.values()):
        raise DataError(f"{path}: {remedy}")
    return {split: None if lists.get(split) is None else [str(item) for item in lists[split]] for split in SPLITS}
