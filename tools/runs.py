#!/usr/bin/env python
"""List the runs in a directory, newest last, with their outcome, steps, losses and speed.

python tools/runs.py               the runs in runs/
python tools/runs.py DIR --json    one JSON object per line

A run is a directory with a status.json, up to three levels down. A run is "killed" if its status says "running" but
nobody holds its lock, or, without a lock, if its process does not exist on this machine. Loss and validation are the
last values in metrics.jsonl; tokens/s is the median of its lines, for all devices together.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megalite.common.console import escape_control_chars, print_err
from megalite.training.logging.log_format import aligned_table
from tools.cli_common import make_parser, run_program
from tools.plots.run_data import RunError, as_dict, finite_number, read_run

MAX_DEPTH = 3
HEADER = ("run", "outcome", "steps", "loss", "validation", "tokens/s", "when")


def find_runs(directory: Path, max_depth: int = MAX_DEPTH) -> Iterator[Path]:
    """Yield the directories of runs in `directory`, which may be one itself, without looking into those of runs."""
    if (directory / "status.json").is_file():
        yield directory
    elif max_depth:
        for path in sorted(directory.iterdir()):
            if path.is_dir() and not path.name.startswith("."):
                yield from find_runs(path, max_depth - 1)


def summarize_run(run_dir: Path) -> dict[str, Any]:
    """Return the values in a run's files, with None for those that are missing or not finite.

    Raises RunError if the run has no status.
    """
    run = read_run(run_dir, run_dir.name)
    if not run.status:
        raise RunError(f"{run_dir}: {'; '.join(run.problems) or 'status.json is damaged'}")
    # status.json is not written at every step
    steps = [step for row in (run.status, *run.rows) if (step := finite_number(row.get("step"))) is not None]
    loss = None
    validation: dict[str, float | None] = {}
    validation_step: dict[str, float | None] = {}
    speeds: list[float] = []
    for row in run.rows:
        loss = finite_number(row.get("train/loss", loss))
        for key, value in row.items():
            if key.startswith("val/") and key.endswith("/loss"):
                name = key.split("/")[1]
                validation[name] = finite_number(value)
                validation_step[name] = finite_number(row.get("step"))
        if (speed := finite_number(row.get("perf/tokens_per_s_per_gpu"))) is not None:
            speeds.append(speed)
    return {
        "run": str(run_dir),
        "outcome": run.outcome,
        "step": int(max(steps)) if steps else None,
        "steps": as_dict(run.config.get("train")).get("train_iters"),
        "loss": loss,
        "validation": validation,
        "validation_step": validation_step,
        "tokens_per_s": statistics.median(speeds) * run.devices if speeds else None,
        "time": run.status.get("time"),
    }


def _format_loss(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.4f}"


def _format_validation(row: dict[str, Any]) -> str:
    """Return the validation losses, with their step if it is not the last one, and with names if there are several."""
    texts = []
    for name, loss in row["validation"].items():
        text = _format_loss(loss)
        step = row["validation_step"][name]
        if step is not None and step != row["step"]:
            text += f" at step {step:.0f}"
        texts.append(text if len(row["validation"]) < 2 else f"{name} {text}")
    return ", ".join(texts)


def table(rows: list[dict[str, Any]], base_dir: Path) -> str:
    """Return a table of runs, with their directories relative to `base_dir`."""
    lines: list[tuple[str, ...]] = [HEADER]
    for row in rows:
        run_dir = Path(row["run"])
        if run_dir != base_dir and run_dir.is_relative_to(base_dir):
            run_dir = run_dir.relative_to(base_dir)
        steps = f"{row['step']} of {row['steps']}" if row["steps"] else str(row["step"])
        speed = "" if row["tokens_per_s"] is None else f"{row['tokens_per_s']:,.0f}"
        time = str(row["time"] or "").replace("T", " ")[:16]
        loss = _format_loss(row["loss"])
        lines.append((str(run_dir), str(row["outcome"]), steps, loss, _format_validation(row), speed, time))
    return aligned_table(lines)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of this program's flags."""
    parser = make_parser(__doc__, allow_abbrev=True)
    parser.add_argument("dir", nargs="?", metavar="DIR", default=Path("runs"), type=Path, help="default: runs")
    parser.add_argument("--json", action="store_true", help="print one object per line, all numbers with all digits")
    return parser


def main(argv: list[str]) -> int:
    """Run the program and return its exit code."""
    args = build_parser().parse_args(argv)
    rows = []
    try:
        for run_dir in find_runs(args.dir):
            try:
                rows.append(summarize_run(run_dir))
            except RunError as error:
                print_err(f"runs.py: {error}")
    except OSError as error:
        print_err(f"runs.py: {args.dir}: {error.strerror}; give the directory that the runs are in")
        return 3
    rows.sort(key=lambda row: str(row["time"]))
    if args.json:
        for row in rows:
            print(json.dumps(row))
    elif rows:
        print(escape_control_chars(table(rows, args.dir)))
    else:
        print(f"no run in {args.dir}")
    return 0


if __name__ == "__main__":
    run_program(main)
