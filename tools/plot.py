#!/usr/bin/env python
"""Plot a pipeline schedule, a plan, a benchmark, or one of the plots on the page of a run (tools/report.py).

python tools/plot.py schedule --pp 4 --vpp 2 --microbatches 8 --split --text
python tools/plot.py schedule --pp 4 --microbatches 8 --out schedule.png
python tools/plot.py pipeline RUN_DIR --out pipeline.png       measured and planned, from --profile-pipeline STEP
python tools/plot.py loss RUN_DIR [RUN_DIR ...] --out loss.png
python tools/plot.py agreement RUN_DIR RUN_DIR --out agreement.svg

python tools/plot.py bench DIR --show scaling --out scaling.png   DIR is tools/benchmark.py's --out; also mfu, breakdown
python tools/plot.py plan PLAN.json --out plan.png             from tools/plan.py --json; --show layout: layers of ranks

Also scores, steps (learning rate, gradient norm, tokens/s), experts, time, memory, layout. The suffix of --out is the
format.
"""

import argparse
import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megalite.common.text_file import TextFileError, read_small_text
from megalite.config.registry import REGISTRIES
from megalite.pipeline.schedule import SplitBackward, build_schedule
from megalite.pipeline.simulate import simulate
from tools.cli_common import PluginAction, exit_with_error, make_parser, move_plugins_first, positive_int, run_program
from tools.plots import bars, bench, curves, pipeline
from tools.plots import plan as plan_plots
from tools.plots.run_data import RunData, RunError, read_runs
from tools.plots.style import NARROW, WIDE, Picture, save


def plot_schedule(args: argparse.Namespace) -> None:
    """Plot a schedule, or print it as text."""
    if args.text:
        split = SplitBackward() if args.split else None
        rows = build_schedule(args.schedule, args.pp, args.microbatches, args.vpp, split=split)
        print(pipeline.schedule_text(rows))
        print(pipeline.summary(rows, simulate(rows)))
        return
    write_picture(pipeline.schedule(args.schedule, args.pp, args.vpp, args.microbatches, args.split), args)


def write_picture(picture: Picture, args: argparse.Namespace) -> None:
    """Write a plot into the file of --out."""
    save(picture, args.out, NARROW if args.narrow else WIDE)


def plot_runs(args: argparse.Namespace) -> None:
    """Draw a plot of RUN_PLOTS."""
    runs = read_runs(args.run_dirs)
    for run in runs:
        if problem := missing_data(args.picture, run):
            exit_with_error(f"plot.py: {run.directory}: {problem}")
    picture = RUN_PLOTS[args.picture].draw(runs)
    assert picture is not None  # None means that data is missing
    write_picture(picture, args)


def missing_data(name: str, run: RunData) -> str:
    """Return a message about data that a plot of RUN_PLOTS needs and a run lacks, or an empty string."""
    problems = "; ".join(run.problems)
    if name == "pipeline" and run.timeline is None:
        state = f"damaged ({problems})" if problems else "not there"
        return f"timeline.json: {state}; train with --profile-pipeline STEP"
    if name in ("loss", "agreement") and not run.curve("train/loss"):
        return f"no loss in it yet ({problems})" if problems else "no loss in it yet"
    if name == "steps" and not any(run.curve(key) for key, _ in curves.STEP_CURVES):
        return "no steps in it yet"
    if name == "scores" and curves.scores([run]) is None:
        return "no scores in it; train with --eval-requests FILE"
    if name == "experts" and not run.expert_loads:
        return "no load of experts in it; it needs a run of a model that has experts"
    if name == "time" and not bars.time_by_phase(run):
        return "report.json is not there; a run writes it at its end"
    if (name == "memory" and bars.memory(run) is None) or (name == "layout" and bars.layout(run) is None):
        return "events.jsonl lacks its data; it needs a run of this version, of few pipeline ranks"
    return ""


def plot_agreement(runs: list[RunData]) -> Picture:
    """Plot the differences of the losses of several runs."""
    if not any(curves.differences(runs[0], other) for other in runs[1:]):
        exit_with_error("plot.py: agreement: these runs have no step in common; give two that have")
    return curves.agreement(runs)


def plot_timeline(runs: list[RunData]) -> Picture:
    """Plot the measured and the planned pipeline of a run."""
    try:
        return pipeline.timeline(runs[0].timeline)
    except (ValueError, LookupError, TypeError, ArithmeticError) as error:
        problem = f"damaged ({error}); train with --profile-pipeline STEP again"
        exit_with_error(f"plot.py: {runs[0].directory / 'timeline.json'}: {problem}")


def plot_plan(args: argparse.Namespace) -> None:
    """Plot what tools/plan.py --json wrote."""
    try:
        plan = json.loads(read_small_text(args.plan, "what tools/plan.py --json wrote"))
        picture = plan_plots.layout(plan) if args.show == "layout" else plan_plots.picture(plan)
    except TextFileError as error:
        raise RunError(str(error)) from None
    except (ValueError, RecursionError) as error:
        exit_with_error(f"plot.py: {args.plan}: {error}")
    write_picture(picture, args)


@dataclass(frozen=True)
class RunPlot:
    """A plot of the data of runs.

    Attributes:
        help: its text in --help.
        draw: returns the plot of some runs, or None if data is missing.
        takes_several: it can show more than one run.
    """

    help: str
    draw: Callable[[list[RunData]], Picture | None]
    takes_several: bool = False


RUN_PLOTS = {
    "pipeline": RunPlot("measured and planned", plot_timeline),
    "loss": RunPlot("losses over tokens and steps", curves.loss, takes_several=True),
    "steps": RunPlot("learning rate, gradient norm and tokens/s", curves.training_curves, takes_several=True),
    "scores": RunPlot("scores of --eval-requests by task", curves.scores, takes_several=True),
    "experts": RunPlot("number of tokens for each expert", curves.experts),
    "time": RunPlot("where the time went", bars.time_bars, takes_several=True),
    "agreement": RunPlot("differences of the losses of runs", plot_agreement, takes_several=True),
    "memory": RunPlot("planned parts and measured peaks of ranks", lambda runs: bars.memory(runs[0])),
    "layout": RunPlot("the layers of each rank", lambda runs: bars.layout(runs[0])),
}


def plot_benchmark(args: argparse.Namespace) -> None:
    """Plot what tools/benchmark.py wrote into --out."""
    from tools.bench import format_results, results

    try:
        results_file = results.read(args.dir / "bench.json")
    except (OSError, ValueError) as error:
        problem = f"{args.dir}: {error.strerror}" if isinstance(error, OSError) else str(error)
        exit_with_error(f"plot.py: {problem}; give what tools/benchmark.py had as --out")
    rows = format_results.summarize(results_file.rows)
    if results_file.facts.get("scaling"):
        rows = format_results.add_scaling_efficiency(rows)
    draw = {"mfu": bench.mfu, "breakdown": bench.breakdown, "scaling": bench.scaling}[args.show]
    picture = draw(rows)
    if picture is None:
        exit_with_error(f"plot.py: {args.dir}: no {args.show} was measured there")
    write_picture(picture, args)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of this program's flags."""
    parser = make_parser(__doc__, allow_abbrev=True)
    commands = parser.add_subparsers(required=True)
    add_schedule_flags(commands.add_parser("schedule", help="a schedule as text or plot"))

    plan_command = commands.add_parser("plan", help="memory of a plan's ranks, and where its step time goes")
    plan_command.add_argument("plan", metavar="PLAN.json", type=Path)
    plan_command.add_argument(
        "--show", choices=["memory", "layout"], default="memory", help="memory and time, or the layers of each rank"
    )
    plan_command.set_defaults(run=plot_plan, picture="plan")

    for name, plot in RUN_PLOTS.items():
        run_command = commands.add_parser(name, help=plot.help)
        run_command.add_argument("run_dirs", nargs="+" if plot.takes_several else 1, metavar="RUN_DIR", type=Path)
        run_command.set_defaults(run=plot_runs, picture=name)

    bench_command = commands.add_parser("bench", help="a benchmark: MFU by configuration, scaling, parts of a step")
    bench_command.add_argument("dir", metavar="DIR", type=Path)
    bench_command.add_argument("--show", choices=["mfu", "breakdown", "scaling"], default="mfu")
    bench_command.set_defaults(run=plot_benchmark, picture="bench")

    for name, command in commands.choices.items():
        command.add_argument("--out", default=f"{name}.png")
        command.add_argument("--narrow", action="store_true", help="draw for a column of text or a phone")
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
    parser.set_defaults(run=plot_schedule, picture="schedule")


def main(argv: list[str]) -> None:
    """Run the program."""
    args = build_parser().parse_args([*argv[:1], *move_plugins_first(argv[1:])])
    try:
        args.run(args)
    except RunError as error:
        hint = " of --profile-pipeline STEP" if args.picture == "pipeline" else ""
        exit_with_error(f"plot.py: {error}{hint}")
    except (OSError, ValueError) as error:  # matplotlib raises ValueError for an unknown format
        exit_with_error(f"plot.py: {args.out}: {error}", 2)


if __name__ == "__main__":
    run_program(main)
