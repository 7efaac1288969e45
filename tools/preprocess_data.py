#!/usr/bin/env python
"""Tokenize .jsonl and .txt files into Megatron's PREFIX_text_document.bin/.idx, with Megatron-LM's flags.

    python tools/preprocess_data.py --input 'corpus/*.jsonl' --output-prefix data/corpus \\
        --tokenizer-type SentencePieceTokenizer --tokenizer-model spm.model --append-eod --workers 8

A .jsonl file has one document per line, an object with the text under each of --json-keys. A .txt file is one document.
A row of a .parquet file is a record with the keys as columns. .gz and .zst files are decompressed, and - is standard
input. Texts without tokens are omitted. The first bad line ends the run with its file and line, unless
--max-bad-fraction allows some; these are counted, and samples written to PREFIX.rejects.jsonl. An interrupted run
resumes with --resume; if it reads standard input, give the same stream again. Exit code 3: the data or the disk is at
fault.
"""

import argparse
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megalite.common.console import print_err
from megalite.config.registry import REGISTRIES
from megalite.data.errors import DataError
from megalite.data.files.indexed_dataset import IndexedDataset
from tools.cli_common import (
    PluginAction,
    add_max_bad_fraction,
    exits_with,
    local_path_str,
    make_parser,
    move_plugins_first,
    positive_int,
    run_program,
)
from tools.preprocess.tokenize_run import preprocess
from tools.preprocess.workers import Job


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of this program's flags."""
    parser = make_parser(__doc__)
    parser.add_argument(
        "--input",
        nargs="+",
        required=True,
        metavar="GLOB",
        help=".jsonl, .json (lines), .txt, each also .gz or .zst; .parquet; - for standard input",
    )
    parser.add_argument(
        "--output-prefix", type=local_path_str, required=True, help="files are named PREFIX_KEY_document"
    )
    parser.add_argument(
        "--json-keys", nargs="+", default=["text"], metavar="KEY", help="one pair of files is written for each key"
    )
    parser.add_argument("--tokenizer-type", required=True, choices=REGISTRIES["tokenizer_type"])
    parser.add_argument("--plugin", action=PluginAction)
    parser.add_argument("--tokenizer-model", help="SentencePiece .model; tokenizer.json or its directory")
    parser.add_argument("--vocab-file", help="GPT-2 vocab.json")
    parser.add_argument("--merge-file", help="GPT-2 merges.txt")
    parser.add_argument("--vocab-size", type=int, help="vocabulary size of a NullTokenizer")
    parser.add_argument("--tiktoken-pattern", help="pattern of a TikTokenizer: v1 or v2")
    parser.add_argument(
        "--no-gigatoken", dest="gigatoken", action="store_false", help="always use the tokenizer's own library"
    )
    parser.add_argument("--append-eod", action="store_true", help="end every document with the end-of-document token")
    parser.add_argument(
        "--workers", type=positive_int, default=os.cpu_count() or 1, help="number of processes; default: one per core"
    )
    parser.add_argument(
        "--log-interval", type=positive_int, default=10_000, metavar="N", help="documents between progress lines"
    )
    parser.add_argument(
        "--partitions", type=int, default=1, help="accepted for Megatron-LM; the result never depends on it"
    )
    parser.add_argument("--keep-sequential-samples", action="store_true", help="accepted for Megatron-LM; always on")
    parser.add_argument("--split-sentences", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--keep-newlines", action="store_true", help=argparse.SUPPRESS)
    add_max_bad_fraction(parser)
    interrupted = parser.add_mutually_exclusive_group()
    interrupted.add_argument("--resume", action="store_true", help="continue an interrupted run, if there is one")
    interrupted.add_argument("--overwrite", action="store_true", help="discard an interrupted run and start over")
    return parser


@exits_with(3, DataError)
def main(argv: list[str]) -> int:
    """Run the program and return its exit code."""
    args = build_parser().parse_args(move_plugins_first(argv))
    for flag, is_set in (("--split-sentences", args.split_sentences), ("--keep-newlines", args.keep_newlines)):
        if is_set:
            reason = "is for BERT and T5 data, which megalite does not make: drop it"
            print_err(f"preprocess_data.py: {flag} {reason}")
            return 2
    if args.keep_sequential_samples:
        print_err("note: --keep-sequential-samples is always on")
    if args.partitions != 1:
        print_err("note: --partitions changes nothing: blocks of all files go to the workers one by one")
    tokenizer = {
        "tokenizer_type": args.tokenizer_type,
        "tokenizer_model": args.tokenizer_model,
        "vocab_file": args.vocab_file,
        "merge_file": args.merge_file,
        "vocab_size": args.vocab_size,
        "tiktoken_pattern": args.tiktoken_pattern,
    }
    job = Job(tokenizer, tuple(args.json_keys), args.append_eod, args.gigatoken)
    start = time.perf_counter()
    prefixes = preprocess(
        args.input,
        args.output_prefix,
        job,
        workers=args.workers,
        log_interval=args.log_interval,
        max_bad_fraction=args.max_bad_fraction,
        resume=args.resume,
        overwrite=args.overwrite,
    )
    for prefix in prefixes:
        data = IndexedDataset(prefix)
        seconds = time.perf_counter() - start
        print(f"{prefix}: {len(data)} documents, {data.num_tokens} tokens ({data.dtype}), {seconds:.1f} s")
    return 0


if __name__ == "__main__":
    run_program(main)
