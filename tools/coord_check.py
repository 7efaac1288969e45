#!/usr/bin/env python
"""Check that the maximal update parametrization (--use-mup) keeps activations of one size at every width.

python tools/coord_check.py --config run.toml                      the narrow model, and 2, 4, 8 and 16 times as wide
python tools/coord_check.py FLAGS --widths 1 4 16 --steps 8        any flags of pretrain_gpt.py, for the narrow model
python tools/coord_check.py FLAGS --out coordinates.png --json coordinates.json

It trains the model of the flags, and models whose widths are multiples of it, for --steps steps on the same samples:
with muP, whose base is the narrow model, and without. A wider model has more heads of the same size. The size of an
activation is the root mean square of its coordinates on tokens that stay the same; its change is that since the start.
The check fails if either grows with the width beyond --max-growth with muP: then a learning rate that is good for the
narrow model is too high for a wide one. It runs in one process, on a CPU unless --device cuda. Exit codes: 0 nothing
grows; 1 an activation grows; 2 wrong usage.
"""

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megalite.common.console import print_err
from megalite.config import cli
from megalite.config.options import Config, ConfigError, replace_options
from megalite.config.validation import find_problems
from megalite.models.families import PRESETS
from tools.cli_common import (
    exits_with,
    find_unwritable,
    make_parser,
    number_in_range,
    positive_int,
    run_program,
    write_json,
)

if TYPE_CHECKING:
    from tools.verification.coordinate_check import Measurement

TITLES = {True: "with muP", False: "without muP"}


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of this program's flags."""
    parser = make_parser(__doc__)
    parser.add_argument(
        "--widths",
        type=positive_int,
        nargs="+",
        default=[1, 2, 4, 8, 16],
        metavar="FACTOR",
        help="widths of the models, as multiples of the narrow one; default: 1 2 4 8 16",
    )
    parser.add_argument("--steps", type=positive_int, default=4, help="steps to train; default: 4")
    parser.add_argument(
        "--max-growth",
        type=number_in_range(float, "[1, inf)"),
        default=2.0,
        help="largest allowed ratio of a wide model's activation to the narrow one's; default: 2",
    )
    parser.add_argument("--json", type=Path, help="FILE for all sizes, changes and losses")
    parser.add_argument("--out", type=Path, help="FILE for a plot of the sizes, .png, .svg or .pdf")
    return parser


def prepare_configs(args: argparse.Namespace, run_argv: list[str]) -> dict[bool, list[Config]]:
    """Return the configurations with muP and without, for each width. Raises ConfigError with all problems."""
    problems = list(find_unwritable(images=("out",), json=args.json, out=args.out))
    factors = sorted(set(args.widths))
    if len(factors) < 2:
        problems.append(f"widths={factors[0]} is a single width, with nothing to compare it with; give 1 and another")
    if problems:
        raise ConfigError(problems)
    if not {"--train-iters", "--train-samples", "--config"}.intersection(run_argv):
        run_argv = [*run_argv, "--train-iters", str(args.steps)]
    config = cli.parse_config(run_argv, PRESETS).config
    if (ranks := config.parallel.model_parallel_size) > 1:
        raise ConfigError([f"the layout has {ranks} model-parallel ranks, and the check runs in one process; drop it"])
    if config.checkpoint.load or config.checkpoint.pretrained_checkpoint or config.checkpoint.use_checkpoint_args:
        raise ConfigError(["the check starts from initial weights of every width; drop --load and its like"])
    from tools.verification.coordinate_check import scale_widths  # imports torch

    base = config.model
    configs: dict[bool, list[Config]] = {}
    for use_mup in TITLES:
        configs[use_mup] = []
        for factor in factors:
            model = replace(scale_widths(base, factor), use_mup=use_mup)
            if use_mup:
                head_dim = base.mup_base_head_dim or float(base.qk_channels)
                model = replace(
                    model,
                    mup_base_hidden_size=base.mup_base_hidden_size or base.hidden_size,
                    mup_base_head_dim=None if base.softmax_scale is not None else head_dim,
                )
            scaled = replace_options(
                replace(config, model=model), train_iters=args.steps, train_samples=None, rampup_batch_size=None
            )
            problems += [f"at {factor} times the width: {problem}" for problem in find_problems(scaled, 1)]
            configs[use_mup].append(scaled)
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return configs


def format_table(widths: Sequence[int], measurements: "Sequence[Measurement]") -> str:
    """Return a row for each activation: its size and its change after the last step at each width."""
    header = f"  {'':<26}" + "".join(f"{width:>10}" for width in widths)
    lines = [header]
    for name in measurements[0].sizes:
        rows = {
            name: [m.sizes[name][-1] for m in measurements],
            f"change of {name}": [m.changes[name][-1] for m in measurements],
        }
        lines += [f"  {key:<26}" + "".join(f"{value:>10.4g}" for value in values) for key, values in rows.items()]
    lines.append(f"  {'loss of the last step':<26}" + "".join(f"{m.losses[-1]:>10.4g}" for m in measurements))
    return "\n".join(lines)


def check_narrow_model(measured: "Measurement", title: str, steps: int) -> None:
    """Raise ConfigError if the narrow model, with which all are compared, diverges or does not change."""
    for name, changes in measured.changes.items():
        if not math.isfinite(changes[-1]):
            raise ConfigError([f"{title}, the narrow model diverges within steps={steps}; give a lower --lr"])
        if changes[-1] == 0:
            raise ConfigError(
                [
                    f"{title}, steps={steps} of training do not change the {name} of the narrow model: the learning "
                    "rate is 0, or its loss scale skips the steps; give more --steps"
                ]
            )


@exits_with(2, ConfigError)
def main(argv: list[str]) -> int:
    """Run the program and return its exit code."""
    args, run_argv = build_parser().parse_known_args(argv)
    configs = prepare_configs(args, run_argv)
    import torch

    from megalite.common.optional_packages import MissingPackageError
    from megalite.kernels.dispatch import KernelError
    from megalite.training.job.preflight import check_kernels, choose_device
    from megalite.training.setup import SetupError
    from tools.verification.coordinate_check import find_growth, largest, measure

    widths = [config.model.hidden_size for config in configs[True]]
    try:
        device = torch.device(choose_device(configs[True][0].parallel.device))
        check_kernels(configs[True][0], device.type)
    except (SetupError, KernelError, MissingPackageError) as error:
        raise ConfigError([str(error)]) from None
    measurements: dict[bool, list[Measurement]] = {}
    for use_mup, title in TITLES.items():
        narrow, *wide = configs[use_mup]
        measurements[use_mup] = [measure(narrow, device)]
        check_narrow_model(measurements[use_mup][0], title, args.steps)
        measurements[use_mup] += [measure(config, device) for config in wide]
        print(f"{title}: root mean square of activations after {args.steps} steps, by hidden size")
        print(format_table(widths, measurements[use_mup]), flush=True)
    growth = {use_mup: find_growth(measured) for use_mup, measured in measurements.items()}
    too_large = {name: value for name, value in growth[True].items() if not value <= args.max_growth}  # or NaN
    if args.json is not None:
        content = {
            "widths": widths,
            "steps": args.steps,
            "max_growth": args.max_growth,
            "growth": {
                TITLES[use_mup]: {name: value if math.isfinite(value) else None for name, value in values.items()}
                for use_mup, values in growth.items()
            },
            "measurements": {
                TITLES[use_mup]: [m.to_json() for m in measured] for use_mup, measured in measurements.items()
            },
        }
        write_json(args.json, content)
    if args.out is not None:
        from tools.plots.style import save
        from tools.plots.widths import picture

        save(
            picture(
                widths, {TITLES[use_mup]: [m.sizes for m in measured] for use_mup, measured in measurements.items()}
            ),
            args.out,
        )
    if too_large:
        worst = max(too_large, key=lambda name: math.inf if math.isnan(too_large[name]) else too_large[name])
        print_err(
            f"coord_check.py: with muP, {worst} is {too_large[worst]:.3g} times as large as in the narrow model, above "
            f"max_growth={args.max_growth:g}"
        )
        return 1
    with_mup, without = (largest(growth[use_mup].values()) for use_mup in (True, False))
    print(f"with muP, no activation grows beyond {with_mup:.3g} times; without, one grows {without:.3g} times")
    return 0


if __name__ == "__main__":
    run_program(main)
