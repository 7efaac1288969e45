#!/usr/bin/env python
"""What data costs: samples and batches beside their goals, and preprocessing beside the tokenizers' libraries.

python tools/bench/data.py samples                  building an epoch's order, opening a pair, reading batches
python tools/bench/data.py preprocess --help

Exit code 0 when all was measured, 2 for a bad flag, 3 for bad input.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tools.bench import data_preprocess, data_samples
from tools.program import parser_of, refusing

SUBJECTS = {"samples": data_samples, "preprocess": data_preprocess}


@refusing(3, OSError, ValueError)  # a DataError is a ValueError
def main(argv: list[str]) -> int:
    parser, raw = parser_of(__doc__), argparse.RawDescriptionHelpFormatter
    commands = parser.add_subparsers(dest="subject", required=True, metavar="|".join(SUBJECTS))
    for name, module in SUBJECTS.items():
        about = module.__doc__ or ""
        module.add_flags(commands.add_parser(name, description=about, formatter_class=raw, allow_abbrev=False))
    options = parser.parse_args(argv)
    return SUBJECTS[options.subject].run(options)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
