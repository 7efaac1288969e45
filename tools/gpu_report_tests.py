"""The tests that need a card, in several processes at once; what tools/gpu_report.py runs and reads.

    python tools/gpu_report_tests.py FOLDER --jobs 8      files FOLDER/share*.jsonl, an object per test

Needs pytest and nothing that runs tests in parallel: each process takes every n-th test. A line is written when a test
begins and when it ends, so that of a process that crashed or was killed the rest is known, and the test that did it.
"""

from __future__ import annotations

import argparse
import collections
import importlib.util
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


def test_files() -> list[str]:
    """Those with a test for a card: the others may need packages that are not there."""
    return sorted(str(path) for path in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in path.read_text("utf-8"))


class Share:
    """A pytest plugin: keeps every n-th test and writes what becomes of it."""

    def __init__(self, part: int, jobs: int, file: Path):
        self.part, self.jobs, self.file = part, jobs, file

    def write(self, **row: Any) -> None:
        with open(self.file, "a", encoding="utf-8") as out:
            out.write(json.dumps(row) + "\n")

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items.sort(key=lambda item: item.nodeid)
        items[:] = [item for item in items if item.get_closest_marker("gpu")][self.part :: self.jobs]

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


def read(folder: Path) -> dict[str, Any]:
    """Counts of the outcomes of all shares, and the failures with their last lines."""
    ends: dict[str, dict[str, Any]] = {}
    for file in sorted(folder.glob("share*.jsonl")):
        for line in file.read_text("utf-8").splitlines():
            row = json.loads(line)
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


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--share", help="I/N: run this one here")
    parser.add_argument("-k", default="", help="of the tests, those whose names have it (as pytest's)")
    args = parser.parse_args(argv)
    if importlib.util.find_spec("pytest") is None:
        print("pytest is not installed: pip install pytest", file=sys.stderr)
        return 1
    args.folder.mkdir(parents=True, exist_ok=True)
    if args.share:
        import pytest

        part, jobs = map(int, args.share.split("/"))
        words = ["-q", "-m", "gpu", "--continue-on-collection-errors", *test_files()]
        words += ["-k", args.k] if args.k else []
        return pytest.main(words, plugins=[Share(part, jobs, args.folder / f"share{part}.jsonl")])
    words = [sys.executable, __file__, str(args.folder), *(["-k", args.k] if args.k else [])]
    running = [subprocess.Popen([*words, "--share", f"{i}/{args.jobs}"], cwd=ROOT) for i in range(args.jobs)]
    codes = [process.wait() for process in running]
    crashed = [code for code in codes if code not in (0, 1, 2, 5)]  # what pytest says of tests is in the files
    return 1 if crashed or read(args.folder).get("failures") else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
