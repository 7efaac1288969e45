#!/usr/bin/env python
"""Pictures: a pipeline schedule, the measured timeline of a run beside its plan, loss curves.

python tools/plot.py schedule --pp 4 --vpp 2 --microbatches 8 --split --text
python tools/plot.py schedule --pp 4 --microbatches 8 --out schedule.png
python tools/plot.py pipeline RUN_DIR --out pipeline.png       RUN_DIR/timeline.json, from --profile-pipeline STEP
python tools/plot.py loss RUN_DIR [RUN_DIR ...] --out loss.png
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megalite.pipeline.schedule import SCHEDULES, Action, Op, Split, in_flight, plan  # noqa: E402
from megalite.pipeline.simulate import WORK, Simulation, draw, simulate  # noqa: E402

Bar = tuple[int, Action, float, float]  # pipeline rank, F, B or W, start, end
COLOURS = {
    Op.F: ("#4c8ed9", "#2f6bb3", "#1f4f8a", "#143861"),
    Op.B: ("#f2a65a", "#d9822b", "#b3661a", "#8a4c10"),
    Op.W: ("#6fbf73", "#4a9c4f", "#347a39", "#205424"),
}
LEGEND = "blue: forward, orange: backward, green: weights' gradients; darker: later chunk; number: micro-batch"


def axes(rows: int, height: float) -> tuple[Any, Any]:
    """A figure with `rows` axes; matplotlib is imported here, as only pictures need it."""
    try:
        import matplotlib
    except ImportError:
        raise SystemExit("plot.py: matplotlib is missing; pip install matplotlib, or use --text") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, many = plt.subplots(rows, 1, figsize=(13, height * rows + 0.6), squeeze=False, layout="constrained")
    return figure, [a[0] for a in many]


def read_action(text: str) -> Action:
    """F0.3, as it prints."""
    if (found := re.fullmatch(r"([A-Z]+)(\d+)\.(\d+)", text)) is None:
        raise ValueError(f"{text!r} is no action")
    return Action(Op(found[1]), int(found[2]), int(found[3]))


def read_timeline(data: Any) -> tuple[list[Bar], float, Simulation]:
    """What each rank did and when; seconds of work in it; and the same with nothing but that work.

    What is measured includes the wait for an input, which is bubble: an action's work is what the shortest of its kind
    on its stage took."""
    rows: list[list[Action]] = [[] for _ in range(data["pp"])]
    spans, took = [], {}
    for rank in data["ranks"]:
        for span in rank["spans"]:
            action, start, stop = read_action(span["action"]), float(span["start_s"]), float(span["end_s"])
            rows[rank["pp_rank"]].append(action)
            if action.op in WORK:
                spans.append((rank["pp_rank"], action, start, stop))
                took.setdefault((action.op, action.stage), []).append(stop - start)
    cost = {key: sorted(some)[len(some) // 4] for key, some in took.items()}
    work = sum(min(stop - start, cost[action.op, action.stage]) for _, action, start, stop in spans)
    stages = range(data["pp"] * data["vpp"])
    f, b, w = ([cost.get((op, stage), 0.0) for stage in stages] for op in WORK)
    return spans, work, simulate(rows, list(zip(f, b, w, strict=True)))


def bars(axis: Any, spans: list[Bar], pp: int, title: str) -> None:
    end = max(s[3] for s in spans)
    for rank, action, start, stop in spans:
        colours, microbatch = COLOURS[action.op], action.microbatch
        colour = colours[min(action.stage // pp, len(colours) - 1)]
        axis.barh(rank, stop - start, left=start, height=0.86, color=colour, edgecolor="white", linewidth=0.6)
        if (stop - start) / end > 0.009:
            axis.text((start + stop) / 2, rank, str(microbatch), ha="center", va="center", color="white", fontsize=8)
    axis.set_yticks(range(pp), [f"rank {r}" for r in range(pp)])
    axis.invert_yaxis()
    axis.set_xlim(0, end * 1.005)
    axis.set_title(title, loc="left", fontsize=10)
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)


def schedule(args: argparse.Namespace) -> None:
    rows = plan(args.schedule, args.pp, args.microbatches, args.vpp, split=Split() if args.split else None)
    result = simulate(rows)
    held = ", ".join(f"{in_flight(row):.0f}" for row in rows)
    summary = f"bubble {100 * result.bubble:.1f} %, activations held per rank: {held}"
    if args.text:
        print(draw(rows))
        print(summary)
        return
    figure, (axis,) = axes(1, 0.5 + 0.35 * args.pp)
    name = f"{args.schedule}{', split backward' * args.split}"
    title = f"{name}, pp {args.pp}, vpp {args.vpp}, {args.microbatches} micro-batches: {summary}"
    bars(axis, [(s.rank, s.action, s.start, s.end) for s in result.spans], args.pp, title)
    axis.set_xlabel(f"time in forwards ({LEGEND})")
    figure.savefig(args.out, dpi=110)


def pipeline(args: argparse.Namespace) -> None:
    path = Path(args.run_dir) / "timeline.json"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        spans, work, ideal = read_timeline(data)
        name, microbatches, pp, vpp = (data[key] for key in ("schedule", "microbatches", "pp", "vpp"))
        end = max(s[3] for s in spans)
    except OSError as error:
        raise SystemExit(f"plot.py: {path}: {error.strerror}; train with --profile-pipeline STEP") from None
    except (ValueError, LookupError, TypeError) as error:
        raise SystemExit(f"plot.py: {path}: damaged ({error}); train with --profile-pipeline STEP again") from None
    figure, (above, below) = axes(2, 0.7 + 0.4 * pp)
    split = any(action.op is Op.W for _, action, _, _ in spans)
    bars(
        above,
        [(s.rank, s.action, s.start, s.end) for s in ideal.spans],
        pp,
        f"planned: {name}{', split backward' * split}, pp {pp}, vpp {vpp}, {microbatches} micro-batches, "
        f"bubble {100 * ideal.bubble:.1f} % (times of each stage as measured, no other cost)",
    )
    bars(below, spans, pp, f"measured: {end * 1000:.0f} ms, bubble and waits {100 * (1 - work / (pp * end)):.1f} %")
    for axis in (above, below):
        axis.set_xlim(0, max(end, ideal.end) * 1.005)
    below.set_xlabel(f"seconds ({LEGEND})")
    figure.savefig(args.out, dpi=110)


def loss(args: argparse.Namespace) -> None:
    figure, (axis,) = axes(1, 5.0)
    for folder in args.run_dirs:
        path = Path(folder) / "metrics.jsonl" if Path(folder).is_dir() else Path(folder)
        try:
            rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
        except OSError as error:
            raise SystemExit(f"plot.py: {path}: {error.strerror}; give a run directory") from None
        except ValueError as error:
            raise SystemExit(f"plot.py: {path}: damaged ({error}); the run mends it when it is resumed") from None
        if not any(r.get("train/loss") is not None for r in rows):
            raise SystemExit(f"plot.py: {path}: no loss in it yet")
        label = f"{Path(folder).name} " if len(args.run_dirs) > 1 else ""
        for key, style, name in (("train/loss", "-", "training"), ("val/valid/loss", "o--", "validation")):
            points = [(r["tokens"], r[key]) for r in rows if r.get(key) is not None]
            if points:
                x, y = zip(*points, strict=True)
                axis.plot(
                    [t / 1e6 for t in x], y, style, markersize=5, linewidth=1.4, label=f"{label}{name} {y[-1]:.3f}"
                )
    axis.set_xlabel("million tokens")
    axis.set_ylabel("loss, nats per token")
    axis.grid(alpha=0.25)
    axis.legend()
    figure.savefig(args.out, dpi=110)


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(required=True)
    one = commands.add_parser("schedule", help="a schedule as text or picture")
    one.add_argument("--schedule", choices=sorted(SCHEDULES), default="1f1b")
    one.add_argument("--pp", type=positive, default=4, help="pipeline ranks")
    one.add_argument("--vpp", type=positive, default=1, help="chunks per rank")
    one.add_argument("--microbatches", type=positive, default=8)
    one.add_argument("--split", action="store_true", help="weight gradients apart from backward")
    one.add_argument(
        "--text",
        action="store_true",
        help="print it: digits are micro-batches, ' a later chunk, [] backward, () weights' gradients",
    )
    one.add_argument("--out", default="schedule.png")
    one.set_defaults(run=schedule)
    two = commands.add_parser("pipeline", help="measured beside planned")
    two.add_argument("run_dir")
    two.add_argument("--out", default="pipeline.png")
    two.set_defaults(run=pipeline)
    three = commands.add_parser("loss", help="loss curves")
    three.add_argument("run_dirs", nargs="+")
    three.add_argument("--out", default="loss.png")
    three.set_defaults(run=loss)
    args = parser.parse_args()
    try:
        args.run(args)
    except (OSError, ValueError) as error:  # matplotlib says by ValueError that it does not know a format
        raise SystemExit(f"plot.py: {args.out}: {error}") from None


if __name__ == "__main__":
    main()
