#!/usr/bin/env python
"""Report on a run: where its time went, as text, and a page with plots of everything that it wrote.

python tools/report.py RUN_DIR                      the text, and RUN_DIR/report/index.html with its plots as PNGs
python tools/report.py RUN_DIR RUN_DIR --out DIR    several runs in the same plots, and their differences
python tools/report.py RUN_DIR --text               only the text; nothing is written

It works for a run that is still running or was killed, too. The page is one file without scripts; it loads nothing.
"""

import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megalite.common.console import escape_control_chars, print_err
from megalite.common.exit_codes import ExitCode
from megalite.common.optional_packages import MissingPackageError
from megalite.common.safe_open import write_atomically
from megalite.training.logging.log_format import table
from megalite.training.logging.run_report import format_goodput, read_history, summary
from tools.cli_common import exit_with_error, exits_with, local_path, make_parser, run_program
from tools.plots.html_report import DAMAGE_ERRORS, HtmlReport
from tools.plots.run_data import RunData, RunError, read_runs
from tools.plots.style import save


def report_text(run: RunData) -> str:
    """Return report.json of the last process that ended, and the goodput so far. Raises any of DAMAGE_ERRORS."""
    metrics = run.directory / "metrics.jsonl"
    if not run.report and not metrics.exists():
        return table({"outcome": f"{run.outcome}, before its first step"})
    rows = {}
    if run.outcome in ("running", "killed"):
        rows["outcome"] = run.outcome
    if run.report:
        rows["written"] = str(run.report["time"])
        rows |= summary(run.report)
    history = read_history(run.directory, metrics.stat().st_mtime)
    if history is not None:
        rows["run so far"] = f"goodput {format_goodput(history)}"
    return table(rows or {"outcome": run.outcome})


def write_page(runs: list[RunData], directory: Path) -> Path:
    """Write the page and its PNGs, and return the path of the page. Raises OSError or MissingPackageError."""
    page = HtmlReport(runs)
    html = page.text()
    directory.mkdir(parents=True, exist_ok=True)
    for picture in page.pictures:
        image = directory / f"{picture.name}.png"
        image.unlink(missing_ok=True)  # matplotlib would write through a link
        save(picture, image)
    path = directory / "index.html"
    write_atomically(path, html)
    return path


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of this program's flags."""
    parser = make_parser(__doc__, allow_abbrev=True)
    parser.add_argument("run_dirs", nargs="+", type=Path, metavar="RUN_DIR")
    parser.add_argument("--out", type=local_path, metavar="DIR", help="directory for the page (default RUN_DIR/report)")
    parser.add_argument("--text", action="store_true", help="print where the time went, and write nothing")
    return parser


@exits_with(3, RunError)
def main(argv: list[str]) -> int:
    """Run the program and return its exit code."""
    args = build_parser().parse_args(argv)
    code = 0
    runs = read_runs(args.run_dirs)
    for run in runs:
        if len(runs) > 1:
            print(f"\n{run.name}")
        try:
            print(escape_control_chars(report_text(run)))
        except DAMAGE_ERRORS as error:
            print_err(f"report.py: {run.directory}: {error!r}; give a run directory")
            code = 3
    if args.text:
        return code
    try:
        page = write_page(runs, args.out or runs[0].directory / "report")
    except MissingPackageError as error:
        print_err(f"report.py: no page: {error}; --text asks for none")
        return ExitCode.PREFLIGHT if args.out else code
    except OSError as error:
        exit_with_error(f"report.py: {error.filename}: {error.strerror}; give another --out", 2)
    print(f"page: {page}")
    return code


if __name__ == "__main__":
    run_program(main)
