"""Contradictions in the options of the data and the tokenizer."""

from collections.abc import Iterator

from megalite.config.option_parsers import parse_split
from megalite.config.options import Config
from megalite.config.problems import Problem, exclusive, options_set, requires, shown
from megalite.config.run_options import SENTENCEPIECE

SPLIT_PATHS = ("train_data_path", "valid_data_path", "test_data_path")
ALL_SOURCES = ("data_path", "data_args_path", "per_split_data_args_path", "mock_data", "dataset", *SPLIT_PATHS)
ONE_WAY = "give the data in one way"


def data_problems(config: Config, is_complete: bool) -> Iterator[Problem]:
    data = config.data
    if data.multiple_validation_sets and not data.valid_data_path and not data.per_split_data_args_path:
        yield requires("multiple_validation_sets", "valid_data_path", also=("per_split_data_args_path",))
    yield from _fill_in_the_middle_problems(config)
    if is_complete and not data.tokenizer_type:
        for name in options_set(config, "eod_mask_loss", "reset_position_ids", "reset_attention_mask", "fim_data"):
            yield Problem(
                f"{name} needs a tokenizer that knows the end of a document; give --tokenizer-type",
                options=(name, "tokenizer_type"),
            )
    if is_complete and data.eval_requests and not data.tokenizer_type:
        yield requires("eval_requests", "tokenizer_type")
    if data.dataset:
        for name in options_set(config, "fim_data", "document_packing", "split"):
            yield Problem(
                f"{shown(config, name)} applies to token files, and dataset={data.dataset} has none; remove it",
                options=(name, "dataset"),
            )
    yield from _source_problems(config)
    tp = config.parallel.tensor_model_parallel_size
    if data.padded_vocab_size is not None and data.padded_vocab_size % tp:
        yield Problem(
            f"tensor_model_parallel_size={tp} does not divide padded_vocab_size={data.padded_vocab_size}; change one",
            options=("tensor_model_parallel_size", "padded_vocab_size"),
        )


def _fill_in_the_middle_problems(config: Config) -> Iterator[Problem]:
    data = config.data
    if data.fim_data and data.document_packing != "concatenate":
        yield Problem(
            f"fim_data and document_packing={data.document_packing} exclude each other: three tokens more would cut "
            "whole documents; drop one",
            options=("fim_data", "document_packing"),
        )
    if data.fim_split_sample and data.fim_fragment_rate is None:
        yield requires(f"fim_split_sample={data.fim_split_sample}", "fim_fragment_rate")
    if data.fim_fragment_rate is not None and not data.fim_split_sample:
        yield requires(f"fim_fragment_rate={data.fim_fragment_rate}", "fim_split_sample")
    if data.fim_no_prefix == "":
        yield Problem(
            "fim_no_prefix is empty, which every text starts with; drop --fim-no-prefix", options=("fim_no_prefix",)
        )


def _source_problems(config: Config) -> Iterator[Problem]:
    """Yield the problems of data that is given in no way or in several."""
    data = config.data
    sources = set(options_set(config, *ALL_SOURCES))
    if not sources:
        yield Problem("data_path is not set; give --data-path PREFIX, or --mock-data", options=ALL_SOURCES)
    ways_to_train = ("train_data_path", "data_path", "data_args_path", "per_split_data_args_path", "mock_data")
    if sources.isdisjoint(ways_to_train):
        for name in options_set(config, "valid_data_path", "test_data_path"):
            yield Problem(f"train_data_path is not set, although {name} is; give it", options=(name, *ways_to_train))
    if data.mock_data and data.data_path:
        yield exclusive("mock_data", "data_path")
    if data.data_path or data.mock_data:
        for name in options_set(config, "data_args_path", "per_split_data_args_path", *SPLIT_PATHS):
            yield Problem(
                f"{name} and data_path or mock_data exclude each other; {ONE_WAY}",
                options=(name, "data_path", "mock_data"),
            )
    if data.data_args_path:
        for name in options_set(config, "per_split_data_args_path", *SPLIT_PATHS):
            yield exclusive(name, "data_args_path", remedy=ONE_WAY)
    if data.dataset:
        for name in options_set(config, "mock_data", "data_path", "data_args_path", "per_split_data_args_path"):
            yield exclusive(name, "dataset", remedy=ONE_WAY)
        for name in options_set(config, *SPLIT_PATHS):
            yield exclusive(name, "dataset", remedy=ONE_WAY)
    if data.per_split_data_args_path:
        for name in options_set(config, *SPLIT_PATHS):
            yield exclusive(name, "per_split_data_args_path", remedy=ONE_WAY)


def tokenizer_problems(config: Config, is_complete: bool) -> Iterator[Problem]:
    data = config.data
    kind = data.tokenizer_type
    if not kind and data.vocab_size is None and is_complete:
        yield Problem(
            "vocab_size is not set; give a tokenizer (--tokenizer-type, --tokenizer-model) or --vocab-size",
            options=("tokenizer_type", "vocab_size", "tokenizer_model"),
        )
    if kind == "NullTokenizer" and data.vocab_size is None:
        yield requires(f"tokenizer_type={kind}", "vocab_size")
    if kind == "GPT2BPETokenizer" and not (data.vocab_file and data.merge_file):
        yield Problem(
            f"tokenizer_type={kind} needs --vocab-file and --merge-file",
            options=("tokenizer_type", "vocab_file", "merge_file"),
        )
    if data.vocab_file and not data.merge_file and not kind:
        yield Problem(
            f"vocab_file={data.vocab_file} is half of GPT-2's tokenizer; give --merge-file too",
            options=("vocab_file", "merge_file", "tokenizer_type"),
        )
    if data.merge_file and not data.vocab_file and not kind:
        yield Problem(
            f"merge_file={data.merge_file} is half of GPT-2's tokenizer; give --vocab-file too",
            options=("merge_file", "vocab_file", "tokenizer_type"),
        )
    if kind in (*SENTENCEPIECE, "HuggingFaceTokenizer", "TikTokenizer") and not data.tokenizer_model:
        yield requires(f"tokenizer_type={kind}", "tokenizer_model")


def split_problems(config: Config) -> Iterator[Problem]:
    split = config.data.split
    if split is not None:
        try:
            parse_split(split)
        except ValueError as error:
            yield Problem(f"split={split!r} {error}", options=("split",))
