"""The tests that need a card, in several processes at once; what tools/gpu_report.py runs and reads.

    python tools/bench/gpu_report_tests.py FOLDER --jobs 8      files FOLDER/share*.jsonl, an object per test

Needs pytest and nothing that runs tests in parallel: each process takes every n-th test, and files that take times come
last, alone. A line is written when a test begins and when it ends, so that of a process that crashed or was killed the
rest is known, and the test that did it. After a fault of the card (an address, an assertion) CUDA answers nothing any
more in that process: the remaining tests run in a new one.
"""

import argparse
import collections
import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from megalite.training.logging.event_log import read_jsonl
from tools.cli_common import make_parser

ROOT = Path(__file__).resolve().parent.parent.parent


def test_files() -> tuple[list[str], list[str]]:
    """Those with a test for a card (the others may need packages that are not there), and of them those that take
    times."""
    texts = {str(path): path.read_text("utf-8") for path in sorted((ROOT / "tests").rglob("test_*.py"))}
    files = [path for path, text in texts.items() if "pytest.mark.gpu" in text]
    timed = [path for path in files if "cuda.Event(" in texts[path]]
    return [path for path in files if path not in timed], timed


def cuda_is_broken() -> bool:
    import torch

    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


class Share:
    """A pytest plugin: keeps every n-th test but those that `file` tells of, writes what becomes of each, and begins
    none after a fault of the card."""

    def __init__(self, part: int, jobs: int, file: Path):
        self.part, self.jobs, self.file = part, jobs, file
        self.done = {row["test"] for _, row in read_jsonl(file)}
        self.broken = False

    def write(self, **row: Any) -> None:
        with open(self.file, "a", encoding="utf-8") as out:
            out.write(json.dumps(row) + "\n")

    def pytest_sessionstart(self, session: Any) -> None:
        self.session = session

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items.sort(key=lambda item: item.nodeid)
        share = [item for item in items if item.get_closest_marker("gpu")][self.part :: self.jobs]
        items[:] = [item for item in share if item.nodeid not in self.done]

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            text = str(report.longrepr)
            needs = re.search(r"No module named '(\w+)'", text)  # a package that is not installed is no failure
            outcome = "skipped" if needs and needs[1] not in ("megalite", "tools", "cases") else "failed"
            self.write(test=report.nodeid, outcome=outcome, text=text[-1500:])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self.write(test=nodeid, outcome="began")

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            text = str(report.longrepr)[-1500:] if report.failed else ""
            self.write(test=report.nodeid, outcome=report.outcome, seconds=report.duration, text=text)
            if report.failed and "CUDA error" in text and cuda_is_broken():
                self.session.shouldstop, self.broken = "the card does not answer in this process any more", True


def read(folder: Path) -> dict[str, Any]:
    """Counts of the outcomes of all shares, and the failures with their last lines."""
    ends: dict[str, dict[str, Any]] = {}
    for file in sorted(folder.glob("share*.jsonl")):
        for _, row in read_jsonl(file):
            if row["outcome"] != "began" or row["test"] not in ends:
                ends[row["test"]] = row
    if not ends:
        return {}
    counts = collections.Counter(row["outcome"] for row in ends.values())
    missing = sorted({row["test"] for row in ends.values() if row["outcome"] == "skipped" and row["text"]})
    bad = [row for row in ends.values() if row["outcome"] in ("failed", "began")]
    failures = [{"test": row["test"], "text": row.get("text") or "began and did not end"} for row in bad]
    return {"passed": counts["passed"], "failed": counts["failed"], "skipped": counts["skipped"],
            "did_not_end": counts["began"], "without_their_packages": missing, "failures": failures}  # fmt: skip


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of this program's flags."""
    parser = make_parser(__doc__, allow_abbrev=True)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--share", help="I/N: run part I of N in this process")
    parser.add_argument("--timed", action="store_true", help="with --share: run the files that measure times")
    return parser


def main(argv: list[str]) -> int:
    args = build_parser().parse_args(argv)
    if importlib.util.find_spec("pytest") is None:
        print("pytest is not installed: pip install pytest", file=sys.stderr)
        return 1
    args.folder.mkdir(parents=True, exist_ok=True)
    if args.share:
        import pytest

        part, jobs = map(int, args.share.split("/"))
        untimed, timed = test_files()
        if args.timed:
            files = timed
        else:
            files = untimed + timed if jobs == 1 else untimed
        words = ["-q", "-m", "gpu", "--continue-on-collection-errors", *files]
        share = Share(part, jobs, args.folder / f"share{part}{'timed' if args.timed else ''}.jsonl")
        code = int(pytest.main(words, plugins=[share]))
        if share.broken:
            os.execv(sys.executable, [sys.executable, __file__, *argv])
        return code
    words = [sys.executable, __file__, str(args.folder)]
    running = [subprocess.Popen([*words, "--share", f"{i}/{args.jobs}"], cwd=ROOT) for i in range(args.jobs)]
    codes = [process.wait() for process in running]
    if args.jobs > 1:
        codes.append(subprocess.run([*words, "--share", "0/1", "--timed"], cwd=ROOT).returncode)
    crashed = [code for code in codes if code not in (0, 1, 2, 5)]  # what pytest says of tests is in the files
    return 1 if crashed or read(args.folder).get("failures") else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
