#!/usr/bin/env python
"""Pictures: a pipeline schedule, and what the page of a run shows (tools/report.py), one by one.

python tools/plot.py schedule --pp 4 --vpp 2 --microbatches 8 --split --text
python tools/plot.py schedule --pp 4 --microbatches 8 --out schedule.png
python tools/plot.py pipeline RUN_DIR --out pipeline.png       measured beside planned, from --profile-pipeline STEP
python tools/plot.py loss RUN_DIR [RUN_DIR ...] --out loss.png
python tools/plot.py agreement RUN_DIR RUN_DIR --out agreement.svg

python tools/plot.py bench DIR --show scaling --out scaling.png   of tools/benchmark.py's --out: mfu, breakdown, scaling
python tools/plot.py plan PLAN.json --out plan.png             of tools/plan.py --json; --show layout: who holds what

Also steps (learning rate, gradient norm, tokens/s), experts, time, memory, layout. The suffix of --out is the format.
"""

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megalite.common.text_file import TextFileError, read_small_text
from megalite.config.registry import REGISTRIES
from megalite.pipeline.schedule import SplitBackward, build_schedule
from megalite.pipeline.simulate import simulate
from tools.cli_common import PluginAction, exit_with_error, make_parser, move_plugins_first, positive_int, run_program
from tools.plots import bars as shares
from tools.plots import bench, curves, pipeline
from tools.plots import plan as plans
from tools.plots.run_data import RunData, RunError, read_runs
from tools.plots.style import NARROW, WIDE, Picture, save


def schedule(args: argparse.Namespace) -> None:
    if args.text:
        rows = build_schedule(
            args.schedule, args.pp, args.microbatches, args.vpp, split=SplitBackward() if args.split else None
        )
        print(pipeline.schedule_text(rows))
        print(pipeline.summary(rows, simulate(rows)))
        return
    put(pipeline.schedule(args.schedule, args.pp, args.vpp, args.microbatches, args.split), args)


def put(picture: Picture, args: argparse.Namespace) -> None:
    save(picture, args.out, NARROW if args.narrow else WIDE)


def of_runs(args: argparse.Namespace) -> None:
    runs = read_runs(args.run_dirs)
    for run in runs:
        if problem := lacking(args.picture, run):
            exit_with_error(f"plot.py: {run.directory}: {problem}")
    picture = PICTURES[args.picture][1](runs)
    assert picture is not None  # nothing is lacking
    put(picture, args)


def lacking(picture: str, run: RunData) -> str:
    """A sentence on what the picture needs and the run lacks; empty where it lacks nothing."""
    damaged = "; ".join(run.problems)
    if picture == "pipeline" and run.timeline is None:
        told = f"damaged ({damaged})" if damaged else "not there"
        return f"timeline.json: {told}; train with --profile-pipeline STEP"
    if picture in ("loss", "agreement") and not run.curve("train/loss"):
        return f"no loss in it yet ({damaged})" if damaged else "no loss in it yet"
    if picture == "steps" and not any(run.curve(key) for key, _ in curves.STEP_CURVES):
        return "no steps in it yet"
    if picture == "experts" and not run.expert_loads:
        return "no load of experts in it; it needs a run of a model that has experts"
    if picture == "time" and not shares.time_by_phase(run):
        return "report.json is not there; a run writes it at its end"
    if picture in ("memory", "layout") and getattr(shares, picture)(run) is None:
        return "events.jsonl does not tell; it needs a run of this version, of few pipeline ranks"
    return ""


def agreement(runs: list[RunData]) -> Picture:
    if not any(curves.differences(runs[0], other) for other in runs[1:]):
        exit_with_error("plot.py: agreement: these runs have no step in common; give two that have")
    return curves.agreement(runs)


def timeline(runs: list[RunData]) -> Picture:
    try:
        return pipeline.timeline(runs[0].timeline)
    except (ValueError, LookupError, TypeError, ArithmeticError) as error:
        told = f"damaged ({error}); train with --profile-pipeline STEP again"
        exit_with_error(f"plot.py: {runs[0].directory / 'timeline.json'}: {told}")


def of_plan(args: argparse.Namespace) -> None:
    try:
        plan = json.loads(read_small_text(args.plan, "what tools/plan.py --json wrote"))
        picture = {"memory": plans.picture, "layout": plans.layout}[args.show](plan)
    except TextFileError as error:
        raise RunError(str(error)) from None
    except (ValueError, RecursionError) as error:
        exit_with_error(f"plot.py: {args.plan}: {error}")
    put(picture, args)


PICTURES: dict[str, tuple[str, Callable[[list[RunData]], Picture | None], str | None]] = {  # help, make, runs it takes
    "pipeline": ("measured beside planned", timeline, None),
    "loss": ("losses over tokens and steps", curves.loss, "+"),
    "steps": ("learning rate, gradient norm and tokens/s", curves.training_curves, "+"),
    "experts": ("how many tokens each expert got", curves.experts, None),
    "time": ("where the time went", shares.time_bars, "+"),
    "agreement": ("how far the losses of runs are apart", agreement, "+"),
    "memory": ("planned parts and measured peaks of ranks", lambda runs: shares.memory(runs[0]), None),
    "layout": ("which rank holds which layers", lambda runs: shares.layout(runs[0]), None),
}


def of_benchmark(args: argparse.Namespace) -> None:
    from tools.bench import format_results as tables
    from tools.bench import results as turns

    try:
        made = turns.read(args.folder / "bench.json")
    except (OSError, ValueError) as error:
        told = f"{args.folder}: {error.strerror}" if isinstance(error, OSError) else str(error)
        exit_with_error(f"plot.py: {told}; give what tools/benchmark.py had as --out")
    found = tables.summarize(made.rows)
    found = tables.add_scaling_efficiency(found) if made.facts.get("scaling") else found
    picture = {"mfu": bench.mfu, "breakdown": bench.breakdown, "scaling": bench.scaling}[args.show](found)
    if picture is None:
        exit_with_error(f"plot.py: {args.folder}: no {args.show} was measured there")
    put(picture, args)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of this program's flags."""
    parser = make_parser(__doc__, allow_abbrev=True)
    commands = parser.add_subparsers(required=True)
    add_schedule_flags(commands.add_parser("schedule", help="a schedule as text or picture"))

    plan_command = commands.add_parser("plan", help="memory of a plan's ranks, and where its step time goes")
    plan_command.add_argument("plan", metavar="PLAN.json", type=Path)
    plan_command.add_argument(
        "--show", choices=["memory", "layout"], default="memory", help="memory and time, or which rank has what"
    )
    plan_command.set_defaults(run=of_plan, picture="plan")

    for name, (text, _, many) in PICTURES.items():
        run_command = commands.add_parser(name, help=text)
        run_command.add_argument("run_dirs", nargs=many or 1, metavar="RUN_DIR", type=Path)
        run_command.set_defaults(run=of_runs, picture=name)

    bench_command = commands.add_parser("bench", help="a benchmark: MFU by configuration, scaling, parts of a step")
    bench_command.add_argument("folder", metavar="DIR", type=Path)
    bench_command.add_argument("--show", choices=["mfu", "breakdown", "scaling"], default="mfu")
    bench_command.set_defaults(run=of_benchmark, picture="bench")

    for name, command in commands.choices.items():
        command.add_argument("--out", default=f"{name}.png")
        command.add_argument("--narrow", action="store_true", help="draw it for a column of text or a phone")
    return parser


def add_schedule_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of `schedule`."""
    parser.add_argument("--schedule", choices=REGISTRIES["pipeline_schedule"], default="1f1b")
    parser.add_argument("--plugin", action=PluginAction)
    parser.add_argument("--pp", type=positive_int, default=4, help="pipeline ranks")
    parser.add_argument("--vpp", type=positive_int, default=1, help="chunks per rank")
    parser.add_argument("--microbatches", type=positive_int, default=8)
    parser.add_argument("--split", action="store_true", help="separate weight gradients from backward")
    parser.add_argument(
        "--text",
        action="store_true",
        help="print it: digits are micro-batches, ' a later chunk, [] backward, () weight gradients",
    )
    parser.set_defaults(run=schedule, picture="schedule")


def main(argv: list[str]) -> None:
    args = build_parser().parse_args([*argv[:1], *move_plugins_first(argv[1:])])
    try:
        args.run(args)
    except RunError as error:
        more = " of --profile-pipeline STEP" if args.picture == "pipeline" else ""
        exit_with_error(f"plot.py: {error}{more}")
    except (OSError, ValueError) as error:  # matplotlib says by ValueError that it does not know a format
        exit_with_error(f"plot.py: {args.out}: {error}", 2)


if __name__ == "__main__":
    run_program(main)
