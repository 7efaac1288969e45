#!/usr/bin/env python
"""Merge token files (.bin/.idx pairs) of one tokenizer into one, with the documents in the order of the inputs.

    python tools/merge_datasets.py --input parts/ --output-prefix data/all_text_document
    python tools/merge_datasets.py --input a_text_document b_text_document --output-prefix data/all_text_document

A directory stands for all pairs in it, sorted by name. Data made with different tokenizers, which have different
fingerprints in prefix.json, is refused. Tokens are copied in blocks of COPY_TOKENS (or one document, if that is
longer), so memory does not grow with the data, apart from the 4 bytes per document of the new index. Files get their
final names after everything is copied.
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np

from megalite.common.console import print_err
from megalite.data.errors import DataError
from megalite.data.files.indexed_dataset import IndexedDataset
from megalite.data.files.sidecar import read_sidecar
from tools.cli_common import exits_with, local_path_str, make_parser, run_program
from tools.preprocess.indexed_writer import IndexedWriter

COPY_TOKENS = 1 << 22
INDEX_ENTRIES = 1 << 16  # entries of an index that are read at a time
SUMMED_KEYS = ("documents", "tokens", "bytes")  # values of prefix.json that are added


def expand_prefixes(inputs: Sequence[str]) -> list[str]:
    """Return the prefixes of the inputs, with a directory replaced by all pairs in it, sorted by name.

    Raises DataError if a file of a pair is missing, or a prefix is given twice.
    """
    prefixes: list[str] = []
    for name in inputs:
        if not Path(name).is_dir():
            prefixes.append(name)
            continue
        index_stems = {path.stem for path in Path(name).glob("*.idx")}
        token_stems = {path.stem for path in Path(name).glob("*.bin")}
        if without_tokens := sorted(index_stems - token_stems):
            raise DataError(f"{Path(name, without_tokens[0])}.idx has no .bin beside it; complete or remove the pair")
        if without_index := sorted(token_stems - index_stems):
            raise DataError(f"{Path(name, without_index[0])}.bin has no .idx beside it; complete or remove the pair")
        if not index_stems:
            raise DataError(f"input={name} holds no .idx file; give a directory of pairs, or prefixes")
        prefixes += [str(Path(name, stem)) for stem in sorted(index_stems)]
    duplicates = {prefix for prefix in prefixes if prefixes.count(prefix) > 1}
    if duplicates:
        raise DataError(f"input={min(duplicates)} is given twice; its documents would count twice")
    return prefixes


def document_blocks(data: IndexedDataset) -> Iterator[tuple[int, int, int, int]]:
    """Yield (first document, last + 1, first token, last + 1) of consecutive blocks of at most COPY_TOKENS tokens.

    A longer document is a block of its own.
    """
    token_offset = 0
    for document_offset in range(0, len(data), INDEX_ENTRIES):
        ends = np.cumsum(data.lengths[document_offset : document_offset + INDEX_ENTRIES], dtype=np.int64)
        first = 0
        begin = 0
        while first < len(ends):
            last = max(first + 1, int(np.searchsorted(ends, begin + COPY_TOKENS, side="right")))
            end = int(ends[last - 1])
            yield document_offset + first, document_offset + last, token_offset + begin, token_offset + end
            first = last
            begin = end
        token_offset += begin


def merge_info(infos: Sequence[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """Return the prefix.json of the merged data, for a list of (prefix, content of its prefix.json).

    Counts are added and sources appended; other values remain if they are equal. Raises DataError for data of different
    tokenizers.
    """
    first_prefix, first = infos[0]
    for prefix, info in infos[1:]:
        if info["tokenizer"]["fingerprint"] != first["tokenizer"]["fingerprint"]:
            made_with = f"{prefix} was made with tokenizer {_tokenizer_name(info)}"
            raise DataError(
                f"{made_with}, but {first_prefix} with {_tokenizer_name(first)}: their ids mean different text; "
                "use one tokenizer"
            )
    merged = {key: value for key, value in first.items() if all(info.get(key) == value for _, info in infos)}
    for key in SUMMED_KEYS:
        values = [info.get(key) for _, info in infos]
        merged.pop(key, None)
        if all(type(value) is int for value in values):
            merged[key] = sum(value for value in values if value is not None)
    lists = [info.get("sources") for _, info in infos]
    merged["sources"] = [name for names in lists if isinstance(names, list) for name in names]
    merged["tokenizer"] = first["tokenizer"]
    return merged


def _tokenizer_name(info: dict[str, Any]) -> str:
    return f"{info['tokenizer'].get('name')} {info['tokenizer']['fingerprint'][:12]}"


def merge(prefixes: Sequence[str], output_prefix: str) -> tuple[int, int, list[str]]:
    """Write `output_prefix`.bin/.idx, and .json if all inputs have one.

    Returns (number of documents, number of tokens, inputs without a .json). Raises DataError.
    """
    if not prefixes:
        raise DataError("there is nothing to merge; give prefixes or a directory of pairs")
    target = Path(output_prefix).resolve()
    for prefix in prefixes:
        if Path(prefix).resolve() == target:
            raise DataError(f"output_prefix={output_prefix} is among the inputs; give another name or move it away")
    files = [IndexedDataset(prefix) for prefix in prefixes]
    for file in files:
        if file.dtype != files[0].dtype:
            dtypes = f"{file.prefix} holds {file.dtype} tokens, but {files[0].prefix} {files[0].dtype}"
            raise DataError(f"{dtypes}: they cannot share a file; preprocess them again with one vocabulary")
        _check_one_sequence_per_document(file)
    infos = []
    without_info = []
    for prefix in prefixes:
        info = read_sidecar(prefix)
        if info is None:
            without_info.append(prefix)
        else:
            infos.append((prefix, info))
    merged_info = merge_info(infos) if infos else None  # also if it is not written, to compare the tokenizers
    try:
        with IndexedWriter(output_prefix, files[0].dtype) as writer:
            for file in files:
                for first, last, begin, end in document_blocks(file):
                    writer.add_many(file.tokens[begin:end], np.asarray(file.lengths[first:last]))
            writer.finish(None if without_info else merged_info)
    except OSError as error:
        reason = error.strerror or error
        raise DataError(f"{output_prefix}: {reason}; nothing was written under the final names") from error
    return writer.num_documents, writer.num_tokens, without_info


def _check_one_sequence_per_document(file: IndexedDataset) -> None:
    """Raise DataError for a sentence-split file, whose documents have several sequences: the writer would lose them."""
    if _has_one_sequence_per_document(file):
        return
    problem = "its documents consist of several sequences each (made with --split-sentences)"
    raise DataError(f"{file.prefix}: {problem}, which cannot be merged; preprocess it without that")


def _has_one_sequence_per_document(file: IndexedDataset) -> bool:
    indices = file.document_indices
    if len(indices) != len(file) + 1:
        return False
    for a in range(0, len(indices), INDEX_ENTRIES):
        block = indices[a : a + INDEX_ENTRIES]
        if (block != np.arange(a, a + len(block))).any():
            return False
    return True


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of this program's flags."""
    parser = make_parser(__doc__)
    parser.add_argument(
        "--input", nargs="+", required=True, metavar="DIR_OR_PREFIX", help="token files to merge, in order"
    )
    parser.add_argument(
        "--output-prefix", type=local_path_str, required=True, help="writes PREFIX.bin, PREFIX.idx and PREFIX.json"
    )
    return parser


@exits_with(3, DataError)
def main(argv: list[str]) -> int:
    """Run the program and return its exit code."""
    args = build_parser().parse_args(argv)
    prefixes = expand_prefixes(args.input)
    num_documents, num_tokens, without_info = merge(prefixes, args.output_prefix)
    if 0 < len(without_info) < len(prefixes):
        names = ", ".join(without_info)
        print_err(f"note: no {args.output_prefix}.json is written, as these inputs have none: {names}")
    print(f"{args.output_prefix}: {num_documents} documents, {num_tokens} tokens of {len(prefixes)} inputs")
    return 0


if __name__ == "__main__":
    run_program(main)
