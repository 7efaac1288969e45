#!/usr/bin/env python
"""Translate a configuration of DeepSpeed, Accelerate, torchtitan, nanotron, Megatron-Bridge or NeMo for --config.

python tools/translate.py ds.json --gpus 8 > run.toml    comments have a verdict on each key, and the launch command

Exit codes: 0 all keys are supported or built in; 3 some have no equivalent; 2 it cannot be read, or contradicts itself.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megalite.config.options import ConfigError
from tools.cli_common import exits_with, make_parser, positive_int, run_program
from tools.translation.translate import translate


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of this program's flags."""
    parser = make_parser(__doc__)
    parser.add_argument("file", help="JSON, YAML or TOML")
    parser.add_argument("--gpus", type=positive_int, metavar="N", help="devices of all machines; default: the file's")
    return parser


@exits_with(2, ConfigError)
def main(argv: list[str]) -> int:
    """Run the program and return its exit code."""
    args = build_parser().parse_args(argv)
    text, is_complete = translate(args.file, args.gpus)
    print(text, end="")
    return 0 if is_complete else 3


if __name__ == "__main__":
    run_program(main)
