#!/usr/bin/env python
"""Merge token files (.bin/.idx pairs) of one tokenizer into one, documents in the order of the inputs.

    python tools/merge_datasets.py --input parts/ --output-prefix data/all_text_document
    python tools/merge_datasets.py --input a_text_document b_text_document --output-prefix data/all_text_document

A directory stands for all pairs in it, sorted by name. Data made with different tokenizers is refused, by the
fingerprints in prefix.json.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megalite.data.errors import DataError  # noqa: E402
from megalite.data.files.merge import expand_prefixes, merge  # noqa: E402


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--input", nargs="+", required=True, metavar="DIR_OR_PREFIX", help="what to merge, in order")
    parser.add_argument("--output-prefix", required=True, help="writes PREFIX.bin, PREFIX.idx and PREFIX.json")
    args = parser.parse_args(argv)
    try:
        prefixes = expand_prefixes(args.input)
        merged = merge(prefixes, args.output_prefix)
    except DataError as error:
        print(f"merge_datasets.py: {error}", file=sys.stderr)
        return 3
    if 0 < len(merged.without_info) < len(prefixes):
        names = ", ".join(merged.without_info)
        print(f"note: no {args.output_prefix}.json is written, as these inputs have none: {names}", file=sys.stderr)
    print(f"{args.output_prefix}: {merged.documents} documents, {merged.tokens} tokens of {len(prefixes)} inputs")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
