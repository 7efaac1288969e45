#!/usr/bin/env python
"""Does a layout train as one process does? Your command line at a small size, both ways, everything compared.

python tools/verify.py --config run.toml --tp 2 --pp 4 --dp 8              any flags of pretrain_gpt.py
python tools/verify.py --preset llama3-8b --tp 2 --pp 2 --nproc 8 ...      --nproc: ranks of the run, not of the check
python tools/verify.py FLAGS --dtype bfloat16 --out agreement.png          in bf16, with a picture
python tools/verify.py FLAGS --whole                                       at its own size, on its own data

Trains --steps steps in one process and on the layout, from the same weights, evaluates after the first and the last,
and compares every hidden state, loss, gradient and weight of every rank. Sizes and ranks are reduced (--most-ranks)
with all that the layout is about left in them; where tp ranks share groups of keys and values, a second run may be of
that alone. Where something differs: the first step, layer and parameter, its ranks and elements, and what leaves such
a pattern. On a CPU unless --device cuda. Exit codes: 0 they agree; 1 they differ, or the layout failed; 2 usage.
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megalite.common.console import print_err
from megalite.config import cli
from megalite.config.options import ConfigError
from megalite.config.validation import find_problems
from megalite.models.families import PRESETS
from tools.cli_common import exits_with, find_unwritable, make_parser, run_program
from tools.verification.shrink import ShrunkConfig, kv_group_check, requested_layout, shrink


def prepare(args: argparse.Namespace, words: list[str]) -> list[ShrunkConfig]:
    """Raises ConfigError, with every problem."""
    counts = (("steps", args.steps), ("most_ranks", args.most_ranks))
    wrong = [f"{name}={value} is below 1; give 1 or more" for name, value in counts if value < 1]
    wrong += [] if 0 < args.timeout < 1e6 else [f"timeout={args.timeout:g} is not a time; give seconds above 0"]
    if wrong := [*wrong, *find_unwritable(images=("out",), json=args.json, out=args.out)]:
        raise ConfigError(wrong)
    parsed = cli.parse_config(words, PRESETS, world=lambda config: requested_layout(config)[0].world_size)
    if parsed.config.checkpoint.use_checkpoint_args:
        raise ConfigError(["use_checkpoint_args takes the sizes from a checkpoint; give them as flags, or --config"])
    config = parsed.config
    if any(config.model.moe_layers) and args.dtype == "bfloat16":
        what = f"dtype=bfloat16 with num_experts={config.model.num_experts}"
        why = "a token between two experts goes by rounding to another one than in one process"
        raise ConfigError([f"{what}: {why}; give float64 or float32"])
    if args.dtype != "float64":  # there options stay (a loss scale, bf16 moments), and only tensors are wider
        config = replace(config, precision=replace(config.precision, bf16=args.dtype == "bfloat16", fp16=False))
    try:
        first = shrink(config, args.most_ranks, args.steps, args.whole)
    except ValueError as error:
        raise ConfigError([str(error)]) from None
    second = None if args.whole else kv_group_check(config, first, args.most_ranks)
    runs = [first] if second is None else [first, second]
    if wrong := [line for small in runs for line in find_problems(small.config, small.layout.world_size)]:
        raise ConfigError([f"at its small size: {line}; or give --whole" for line in wrong])
    from megalite.training.job.preflight import choose_device  # imports torch
    from megalite.training.setup import SetupError

    if parsed.config.train.compile:
        first.notes.append("--compile is not verified: blocks run as they are")
    try:
        choose_device(first.config.parallel.device)
    except SetupError as error:
        raise ConfigError([str(error)]) from None
    return runs


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of this program's flags."""
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=int, default=3, help="steps to train; default: 3")
    parser.add_argument(
        "--dtype",
        choices=["float64", "float32", "bfloat16"],
        default="float64",
        help="dtype to train in; in float64, the default, no difference is hidden by rounding",
    )
    parser.add_argument("--most-ranks", type=int, default=8, help="largest number of processes; default: 8")
    parser.add_argument("--whole", action="store_true", help="keep sizes, data and layout as they are")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for each run; default: 600")
    parser.add_argument("--json", type=Path, help="FILE for everything that was compared")
    parser.add_argument("--out", type=Path, help="FILE for a picture of the agreement, .png or .svg")
    return parser


@exits_with(2, ConfigError)
def main(argv: list[str]) -> int:
    args, words = build_parser().parse_known_args(argv)
    runs = prepare(args, words)
    from tools.verification import verify_run

    results: list[verify_run.VerifyResult] = []
    try:
        for small in runs:
            results.append(verify_run.verify(small, args.dtype, args.timeout))
            if len(results) > 1:
                print()
            print(verify_run.format_result(results[-1], args.dtype), flush=True)
            if not results[-1].agrees:
                break
    except verify_run.RunFailed as error:
        print_err(f"verify.py: {error}")
        return 1
    except verify_run.RunStopped as stopped:
        print_err("verify.py: interrupted")
        return stopped.code
    try:
        if args.json is not None:
            args.json.write_text(json.dumps(verify_run.to_json(results, args.dtype)), "utf-8")
        if args.out is not None:
            verify_run.draw(results[0] if results[-1].agrees else results[-1], args.out, args.dtype)
    except (OSError, ValueError) as error:  # matplotlib says by ValueError that it does not know a format
        raise ConfigError([str(error)]) from None
    return 0 if results[-1].agrees else 1


if __name__ == "__main__":
    run_program(main)
