#!/usr/bin/env python
"""The runs in a folder, newest last: how each ended, how far it came, its losses and its speed.

python tools/runs.py                  those in runs/
python tools/runs.py FOLDER --json    one JSON object a line

A run is a folder with a status.json, up to three levels down. "killed" is who says "running" while the lock of the run
is free or, without one, its process is gone from this machine. Loss and validation are the last of metrics.jsonl,
tokens/s the median of its lines, of all devices.
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
from tools.plots.run_data import RunError, number, read_run
from tools.plots.run_data import table as table_of

DEPTH = 3
HEAD = ("run", "outcome", "steps", "loss", "validation", "tokens/s", "when")


def found_in(folder: Path, depth: int = DEPTH) -> Iterator[Path]:
    """Folders of runs, this one included; not those inside a run."""
    if (folder / "status.json").is_file():
        yield folder
    elif depth:
        for below in sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith(".")):
            yield from found_in(below, depth - 1)


def row_of(folder: Path) -> dict[str, Any]:
    """The figures of a run's files; None for those that are missing or not finite. Raises RunError where there is no
    status."""
    run = read_run(folder, folder.name)
    if not run.status:
        raise RunError(f"{folder}: {'; '.join(run.problems) or 'status.json is damaged'}")
    steps = [number(row.get("step")) for row in (run.status, *run.rows)]  # status.json is written now and then
    step = max((one for one in steps if one is not None), default=None)
    loss = None
    validation: dict[str, float | None] = {}
    validated_at: dict[str, float | None] = {}
    speeds: list[float | None] = []
    for row in run.rows:
        loss = number(row.get("train/loss", loss))
        losses = {key: value for key, value in row.items() if key.startswith("val/") and key.endswith("/loss")}
        validation |= {key.split("/")[1]: number(value) for key, value in losses.items()}
        validated_at |= {key.split("/")[1]: number(row.get("step")) for key in losses}
        speeds.append(number(row.get("perf/tokens_per_s_per_gpu")))
    known_speeds = [speed for speed in speeds if speed is not None]
    return {
        "run": str(folder),
        "outcome": run.outcome,
        "step": None if step is None else int(step),
        "steps": table_of(run.config.get("train")).get("train_iters"),
        "loss": loss,
        "validation": validation,
        "validation_step": validated_at,
        "tokens_per_s": statistics.median(known_speeds) * run.devices if known_speeds else None,
        "time": run.status.get("time"),
    }


def _loss(value: float | None) -> str:
    return "n/a" if value is None else f"{value:.4f}"


def table(rows: list[dict[str, Any]], base: Path) -> str:
    """For people; names are those below `base`."""
    shown: list[tuple[str, ...]] = [HEAD]
    for row in rows:
        folder = Path(row["run"])
        name = str(folder.relative_to(base)) if folder != base and folder.is_relative_to(base) else str(folder)
        at = {name: step for name, step in row["validation_step"].items() if step not in (None, row["step"])}
        where = {name: f" at step {step:.0f}" for name, step in at.items()}
        losses = {name: _loss(value) + where.get(name, "") for name, value in row["validation"].items()}
        said = losses.values() if len(losses) < 2 else (f"{name} {value}" for name, value in losses.items())
        of = f" of {row['steps']}" if row["steps"] else ""
        speed = "" if row["tokens_per_s"] is None else f"{row['tokens_per_s']:,.0f}"
        when = str(row["time"] or "").replace("T", " ")[:16]
        steps = f"{row['step']}{of}"
        shown.append((name, str(row["outcome"]), steps, _loss(row["loss"]), ", ".join(said), speed, when))
    return aligned_table(shown)


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of this program's flags."""
    parser = make_parser(__doc__, allow_abbrev=True)
    parser.add_argument("folder", nargs="?", default=Path("runs"), type=Path, help="default: runs")
    parser.add_argument("--json", action="store_true", help="print one object a line, all numbers with all digits")
    return parser


def main(argv: list[str]) -> int:
    args = build_parser().parse_args(argv)
    rows = []
    try:
        for folder in found_in(args.folder):
            try:
                rows.append(row_of(folder))
            except RunError as error:
                print_err(f"runs.py: {error}")
    except OSError as error:
        print_err(f"runs.py: {args.folder}: {error.strerror}; give the folder that the runs are in")
        return 3
    rows.sort(key=lambda row: str(row["time"]))
    if args.json:
        for row in rows:
            print(json.dumps(row))
    elif rows:
        print(escape_control_chars(table(rows, args.folder)))
    else:
        print(f"no run in {args.folder}")
    return 0


if __name__ == "__main__":
    run_program(main)
