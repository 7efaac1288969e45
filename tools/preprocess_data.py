#!/usr/bin/env python
"""Text to tokens: .jsonl and .txt files -> Megatron's PREFIX_text_document.bin/.idx, with Megatron-LM's flags.

    python tools/preprocess_data.py --input 'corpus/*.jsonl' --output-prefix data/corpus \\
        --tokenizer-type SentencePieceTokenizer --tokenizer-model spm.model --append-eod --workers 8

A .jsonl file holds one document per line, an object with the text under each of --json-keys; a .txt file is one
document. Empty documents are left out; any other bad line ends the run and is named.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megalite.data.indexed import DataError, IndexedDataset  # noqa: E402
from megalite.data.preprocess import preprocess  # noqa: E402
from megalite.data.tokenizer import TYPES  # noqa: E402


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--input", nargs="+", required=True, metavar="GLOB", help=".jsonl, .json (lines), .txt files")
    parser.add_argument("--output-prefix", required=True, help="files are named PREFIX_KEY_document")
    parser.add_argument("--json-keys", nargs="+", default=["text"], metavar="KEY", help="one pair of files for each")
    parser.add_argument("--tokenizer-type", required=True, choices=TYPES)
    parser.add_argument("--tokenizer-model", help="SentencePiece .model; tokenizer.json or its directory")
    parser.add_argument("--vocab-file", help="GPT-2 vocab.json")
    parser.add_argument("--merge-file", help="GPT-2 merges.txt")
    parser.add_argument("--vocab-size", type=int, help="of NullTokenizer")
    parser.add_argument("--append-eod", action="store_true", help="end every document with the end-of-document token")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes; default: one per core")
    parser.add_argument(
        "--log-interval", type=int, default=10_000, metavar="N", help="documents between progress lines"
    )
    return parser


def main(argv: list[str]) -> int:
    # input order is always kept and blocks are handed out one by one, so these have nothing left to decide
    settled = [flag for flag in ("--keep-sequential-samples",) if flag in argv]
    for flag in settled:
        print(f"note: {flag} is always on", file=sys.stderr)
    args = vars(build_parser().parse_args([word for word in argv if word not in settled]))
    begin = time.perf_counter()
    try:
        if args["workers"] < 1:
            raise DataError(f"workers={args['workers']} is not positive")
        prefixes = preprocess(args.pop("input"), args.pop("output_prefix"), keys=args.pop("json_keys"), **args)
        for prefix in prefixes:
            data = IndexedDataset(prefix)
            print(
                f"{prefix}: {len(data)} documents, {data.num_tokens} tokens ({data.dtype}), "
                f"{time.perf_counter() - begin:.1f} s"
            )
    except DataError as error:
        print(f"preprocess_data.py: {error}", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
