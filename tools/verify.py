#!/usr/bin/env python
"""Verify that a layout trains like a single process: run a command line at a small size both ways and compare.

python tools/verify.py --config run.toml --tp 2 --pp 4 --dp 8              any flags of pretrain_gpt.py
python tools/verify.py --preset llama3-8b --tp 2 --pp 2 --nproc 8 ...      --nproc: ranks of the run, not of the check
python tools/verify.py FLAGS --dtype bfloat16 --out agreement.png          in bf16, with a plot
python tools/verify.py FLAGS --full-size                                   at its full size, on its own data

It trains --steps steps in one process and on the layout, from the same weights, evaluates after the first and the last
step, and compares every hidden state, loss, gradient and weight of every rank. Sizes and ranks are reduced
(--max-ranks), but everything that characterizes the layout remains. If tp ranks share key/value groups, a second run
may check only that. For a difference it reports the first step, layer and parameter, its ranks and elements, and its
ratio to the one process if it has one. It runs on a CPU unless --device cuda. Exit codes: 0 they agree; 1 they differ,
or the layout failed; 2 wrong usage.
"""

import argparse
import json
import sys
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megalite.common.console import print_err
from megalite.config import cli
from megalite.config.options import ConfigError, replace_options
from megalite.config.validation import find_problems
from megalite.models.families import PRESETS
from tools.cli_common import exits_with, find_unwritable, make_parser, run_program
from tools.verification.shrink import ShrunkConfig, kv_group_check, requested_layout, shrink


def prepare_configs(args: argparse.Namespace, run_argv: list[str]) -> list[ShrunkConfig]:
    """Return the configurations to verify. Raises ConfigError with all problems.

    Args:
        args: the flags of this program.
        run_argv: the flags of the run.
    """
    problems = []
    if args.steps < 1:
        problems.append(f"steps={args.steps} is below 1; give 1 or more")
    if args.max_ranks < 1:
        problems.append(f"max_ranks={args.max_ranks} is below 1; give 1 or more")
    if not 0 < args.timeout < 1e6:
        problems.append(f"timeout={args.timeout:g} is not a time; give seconds above 0")
    problems += find_unwritable(images=("out",), json=args.json, out=args.out)
    if problems:
        raise ConfigError(problems)
    config = cli.parse_config(run_argv, PRESETS, world=lambda config: requested_layout(config)[0].world_size).config
    if config.checkpoint.use_checkpoint_args:
        raise ConfigError(["use_checkpoint_args takes the sizes from a checkpoint; give them as flags, or --config"])
    uses_compile = config.train.compile
    replaces_fla = config.parallel.linear_attention_kernel == "fla" and (
        config.parallel.device != "cuda" or args.dtype == "float64"
    )
    if replaces_fla:
        config = replace_options(config, linear_attention_kernel="auto")
    if config.model.has_experts and args.dtype == "bfloat16":
        options = f"dtype=bfloat16 with num_experts={config.model.num_experts}"
        reason = "a token between two experts goes by rounding to another one than in one process"
        raise ConfigError([f"{options}: {reason}; give float64 or float32"])
    if args.dtype != "float64":  # in float64 the precision's options stay (loss scale, bf16 moments): tensors are wider
        config = replace(config, precision=replace(config.precision, bf16=args.dtype == "bfloat16", fp16=False))
    try:
        first = shrink(config, args.max_ranks, args.steps, args.full_size)
    except ValueError as error:
        raise ConfigError([str(error)]) from None
    configs = [first]
    if not args.full_size:
        second = kv_group_check(config, first, args.max_ranks)
        if second is not None:
            configs.append(second)
    for shrunk in configs:
        problems += find_problems(shrunk.config, shrunk.layout.world_size)
    if problems:
        raise ConfigError([f"at its small size: {problem}; or give --full-size" for problem in problems])
    from megalite.training.job.preflight import choose_device  # imports torch
    from megalite.training.setup import SetupError

    if replaces_fla:
        first.notes.append("linear_attention_kernel=fla is not verified but auto: it needs a GPU, and fp32 or bf16")
    if uses_compile:
        first.notes.append("--compile is not verified: blocks run as they are")
    try:
        choose_device(first.config.parallel.device)
    except SetupError as error:
        raise ConfigError([str(error)]) from None
    return configs


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
    parser.add_argument("--max-ranks", type=int, default=8, help="largest number of processes; default: 8")
    parser.add_argument("--full-size", action="store_true", help="keep sizes, data and layout as they are")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds for each run; default: 600")
    parser.add_argument("--json", type=Path, help="FILE for everything that was compared")
    parser.add_argument("--out", type=Path, help="FILE for a plot of the agreement, .png or .svg")
    return parser


@exits_with(2, ConfigError)
def main(argv: list[str]) -> int:
    """Run the program and return its exit code."""
    args, run_argv = build_parser().parse_known_args(argv)
    configs = prepare_configs(args, run_argv)
    from tools.verification import verify_run

    results: list[verify_run.VerifyResult] = []
    try:
        for shrunk in configs:
            results.append(verify_run.verify(shrunk, args.dtype, args.timeout))
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
    except (OSError, ValueError) as error:  # matplotlib raises ValueError for an unknown format
        raise ConfigError([str(error)]) from None
    return 0 if results[-1].agrees else 1


if __name__ == "__main__":
    run_program(main)
