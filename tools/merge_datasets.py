#!/usr/bin/env python
"""Merge token files (.bin/.idx pairs) of one tokenizer into one, documents in the order of the inputs.

    python tools/merge_datasets.py --input parts/ --output-prefix data/all_text_document
    python tools/merge_datasets.py --input a_text_document b_text_document --output-prefix data/all_text_document

A directory stands for all pairs in it, sorted by name. Data made with different tokenizers is refused, by the
fingerprints in prefix.json. The tokens are copied in pieces of COPY_TOKENS (or one document, if that is longer), so
memory does not grow with the data, apart from the 4 bytes per document of the index that is written. Nothing has its
final name before all is copied.
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
BLOCK_DOCUMENTS = 1 << 16
SUMS = ("documents", "tokens", "bytes")  # of prefix.json; `sources` are appended, all else must be equal to be kept


def expand_prefixes(inputs: Sequence[str]) -> list[str]:
    """Prefixes as given; a directory stands for all pairs in it, sorted by name. Half a pair is refused."""
    prefixes: list[str] = []
    for name in inputs:
        if not Path(name).is_dir():
            prefixes.append(name)
            continue
        stems = {suffix: {p.stem for p in Path(name).glob(f"*{suffix}")} for suffix in (".idx", ".bin")}
        for suffix, other in ((".idx", ".bin"), (".bin", ".idx")):
            alone = sorted(stems[suffix] - stems[other])
            if alone:
                raise DataError(f"{Path(name, alone[0])}{suffix} has no {other} beside it; complete or remove the pair")
        if not stems[".idx"]:
            raise DataError(f"input={name} holds no .idx file; give a directory of pairs, or prefixes")
        prefixes += [str(Path(name, stem)) for stem in sorted(stems[".idx"])]
    twice = {prefix for prefix in prefixes if prefixes.count(prefix) > 1}
    if twice:
        raise DataError(f"input={min(twice)} is given twice; its documents would count twice")
    return prefixes


def document_blocks(data: IndexedDataset) -> Iterator[tuple[int, int, int, int]]:
    """(first document, last + 1, first token, last + 1) of consecutive runs, each of at most COPY_TOKENS tokens."""
    at = 0
    for block in range(0, len(data), BLOCK_DOCUMENTS):
        ends = np.cumsum(data.lengths[block : block + BLOCK_DOCUMENTS], dtype=np.int64)
        first, begin = 0, 0
        while first < len(ends):
            last = max(first + 1, int(np.searchsorted(ends, begin + COPY_TOKENS, side="right")))
            end = int(ends[last - 1])
            yield block + first, block + last, at + begin, at + end
            first, begin = last, end
        at += begin


def merge_info(infos: Sequence[tuple[str, dict[str, Any]]]) -> dict[str, Any]:
    """One prefix.json for all of (prefix, prefix.json). Refuses data of different tokenizers, naming both."""
    prefix, first = infos[0]
    mine = first["tokenizer"]
    for other, info in infos[1:]:
        theirs = info["tokenizer"]
        if theirs["fingerprint"] != mine["fingerprint"]:
            both = [f"{one.get('name')} {one['fingerprint'][:12]}" for one in (theirs, mine)]
            makers = f"{other} was made with tokenizer {both[0]}, but {prefix} with {both[1]}"
            raise DataError(f"{makers}: their ids mean different text; use one tokenizer")
    merged = {key: value for key, value in first.items() if all(info.get(key) == value for _, info in infos)}
    for key in SUMS:
        values = [info.get(key) for _, info in infos]
        merged.pop(key, None)
        if all(type(value) is int for value in values):
            merged[key] = sum(value for value in values if value is not None)
    lists = [info.get("sources") for _, info in infos]
    merged["sources"] = [name for names in lists if isinstance(names, list) for name in names]
    merged["tokenizer"] = mine
    return merged


def merge(prefixes: Sequence[str], output_prefix: str) -> tuple[int, int, list[str]]:
    """Write `output_prefix`.bin/.idx, and .json where all inputs have one. Documents, tokens, and the inputs without a
    .json. Raises DataError."""
    if not prefixes:
        raise DataError("there is nothing to merge; give prefixes or a directory of pairs")
    target = Path(output_prefix).resolve()
    for prefix in prefixes:
        if Path(prefix).resolve() == target:
            raise DataError(f"output_prefix={output_prefix} is among the inputs; give another name or move it away")
    files = [IndexedDataset(prefix) for prefix in prefixes]
    for file in files:
        if file.dtype != files[0].dtype:
            both = f"{file.prefix} holds {file.dtype} tokens, but {files[0].prefix} {files[0].dtype}"
            raise DataError(f"{both}: they cannot share a file; preprocess them again with one vocabulary")
        _one_sequence_each(file)
    found = [(prefix, read_sidecar(prefix)) for prefix in prefixes]
    infos = [(prefix, info) for prefix, info in found if info is not None]
    info = merge_info(infos) if infos else None
    missing = [prefix for prefix, one in found if one is None]
    try:
        with IndexedWriter(output_prefix, files[0].dtype) as writer:
            for file in files:
                for a, b, begin, end in document_blocks(file):
                    writer.add_many(file.tokens[begin:end], np.asarray(file.lengths[a:b]))
            writer.finish(None if missing else info)
    except OSError as error:
        why = error.strerror or error
        raise DataError(f"{output_prefix}: {why}; nothing was written under the final names") from error
    return writer.num_documents, writer.num_tokens, missing


def _one_sequence_each(file: IndexedDataset) -> None:
    """Sentence-split files keep several sequences per document: the writer would forget which belong together."""
    ends = file.document_indices
    same = len(ends) == len(file) + 1
    for a in range(0, len(ends) if same else 0, BLOCK_DOCUMENTS):
        part = ends[a : a + BLOCK_DOCUMENTS]
        same = same and bool((part == np.arange(a, a + len(part))).all())
    if not same:
        several = "its documents consist of several sequences each (made with --split-sentences)"
        raise DataError(f"{file.prefix}: {several}, which cannot be merged; preprocess it without that")


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
    args = build_parser().parse_args(argv)
    prefixes = expand_prefixes(args.input)
    documents, tokens, missing = merge(prefixes, args.output_prefix)
    if 0 < len(missing) < len(prefixes):
        print_err(f"note: no {args.output_prefix}.json is written, as these inputs have none: {', '.join(missing)}")
    print(f"{args.output_prefix}: {documents} documents, {tokens} tokens of {len(prefixes)} inputs")
    return 0


if __name__ == "__main__":
    run_program(main)
