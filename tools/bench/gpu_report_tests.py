"""Run `pytest -m gpu` in several processes at once, for tools/gpu_report.py.

    python tools/bench/gpu_report_tests.py DIR --jobs 8      writes DIR/share*.jsonl, an object per test

Only pytest is needed, without pytest-xdist and pytest-timeout, which machines with a GPU often lack. Each process
selects every n-th test, and writes a line when a test starts and when it ends, so the outcomes so far survive a process
that crashes or is killed. A process ends early after a test that does not end within TEST_S, whose stacks are printed
even if it hangs inside C code, and after a test that broke the GPU for it: every further CUDA call of a process fails
after an invalid address. The rest of its tests then run in a new process. Files that measure times run last and alone.
"""

import argparse
import collections
import faulthandler
import importlib.util
import json
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

from megalite.training.logging.event_log import read_jsonl
from tools.cli_common import make_parser

ROOT = Path(__file__).resolve().parent.parent.parent
TEST_S = 60.0
MAX_TEXT = 1500  # characters of a failure's text, from its end
OWN_PACKAGES = ("megalite", "tools", "cases")
STARTED, FINISHED = "began", "finished"  # outcomes of a test that has not ended, and of all tests of a process


def test_files(directory: Path) -> tuple[list[str], list[str]]:
    """Return the files with GPU tests, those that measure times separately.

    The other files may need packages that are not installed.
    """
    texts = {str(path): path.read_text("utf-8") for path in sorted(directory.rglob("test_*.py"))}
    files = [path for path, text in texts.items() if "pytest.mark.gpu" in text]
    timed = [path for path in files if "cuda.Event(" in texts[path]]
    return [path for path in files if path not in timed], timed


def cuda_is_broken() -> bool:
    """Return True if CUDA calls fail in this process."""
    import torch

    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


class PytestShard:
    """A pytest plugin that runs every n-th GPU test, and appends their outcomes to a file.

    It leaves out the tests that are already in the file.

    Args:
        index: the index of the shard.
        num_shards: the number of shards.
        file: the file for the outcomes.
        test_s: the time limit of a test.
    """

    def __init__(self, index: int, num_shards: int, file: Path, test_s: float):
        self.index, self.num_shards, self.file, self.test_s = index, num_shards, file, test_s
        self.finished = {row["test"] for _, row in read_jsonl(file)}
        self.is_broken = False
        self.stderr = os.dup(2)  # pytest captures file descriptor 2

    def write(self, **row: Any) -> None:
        """Append a line to the file."""
        with open(self.file, "a", encoding="utf-8") as out:
            out.write(json.dumps(row) + "\n")

    def pytest_sessionstart(self, session: Any) -> None:
        """Keep the session, to stop it later."""
        self.session = session

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        """Select the tests of this shard."""
        items.sort(key=lambda item: item.nodeid)
        gpu_items = [item for item in items if item.get_closest_marker("gpu")]
        shard = gpu_items[self.index :: self.num_shards]
        items[:] = [item for item in shard if item.nodeid not in self.finished]

    def pytest_collectreport(self, report: Any) -> None:
        """Write files that cannot be imported; one that needs a missing package is skipped."""
        if report.failed:
            text = str(report.longrepr)
            missing = re.search(r"No module named '(\w+)'", text)
            outcome = "skipped" if missing and missing[1] not in OWN_PACKAGES else "failed"
            self.write(test=report.nodeid, outcome=outcome, text=text[-MAX_TEXT:])

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        """Write that a test starts, and start its time limit."""
        self.write(test=nodeid, outcome=STARTED)
        faulthandler.dump_traceback_later(self.test_s, exit=True, file=self.stderr)

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Write the outcome of a test, and stop if it broke CUDA."""
        if report.when == "call" or report.outcome != "passed":
            text = str(report.longrepr)[-MAX_TEXT:] if report.failed else ""
            self.write(test=report.nodeid, outcome=report.outcome, seconds=report.duration, text=text)
            if report.failed and "CUDA error" in text and cuda_is_broken():
                self.is_broken = True
                self.session.shouldstop = "the GPU does not respond in this process any more"

    def pytest_sessionfinish(self) -> None:
        """End the time limit, and write that all tests ran."""
        faulthandler.cancel_dump_traceback_later()
        if not self.is_broken:
            self.write(test="", outcome=FINISHED)


def read(directory: Path) -> dict[str, Any]:
    """Return the numbers of outcomes over all shards, and the failures with the ends of their texts."""
    last_rows: dict[str, dict[str, Any]] = {}
    for file in sorted(directory.glob("share*.jsonl")):
        for _, row in read_jsonl(file):
            if row["test"] and (row["outcome"] != STARTED or row["test"] not in last_rows):
                last_rows[row["test"]] = row
    if not last_rows:
        return {}
    rows = list(last_rows.values())
    counts = collections.Counter(row["outcome"] for row in rows)
    failed_rows = [row for row in rows if row["outcome"] in ("failed", STARTED)]
    return {
        "passed": counts["passed"],
        "failed": counts["failed"],
        "skipped": counts["skipped"],
        "did_not_end": counts[STARTED],
        "without_their_packages": sorted(row["test"] for row in rows if row["outcome"] == "skipped" and row["text"]),
        "failures": [{"test": row["test"], "text": row.get("text") or "began and did not end"} for row in failed_rows],
    }


def run_shard(args: argparse.Namespace) -> int:
    """Run the tests of the shard `args.share` in this process, and return pytest's exit code."""
    import pytest

    index, num_shards = map(int, args.share.removesuffix("timed").split("/"))
    untimed_files, timed_files = test_files(args.tests)
    files = timed_files if args.share.endswith("timed") else untimed_files
    shard = PytestShard(index, num_shards, file_of(args.directory, args.share), args.test_seconds)
    if not files:  # pytest would collect all tests
        shard.pytest_sessionfinish()
        return 0
    return int(pytest.main(["-q", "-m", "gpu", "--continue-on-collection-errors", *files], plugins=[shard]))


def file_of(directory: Path, share: str) -> Path:
    """Return the file for the outcomes of a shard."""
    return directory / f"share{share.replace('/', '_of_')}.jsonl"


def run_processes(args: argparse.Namespace, share: str) -> bool:
    """Run a shard in one process after another, and return True if the last one ran to its end.

    A process that ended early is followed by another one, unless it started no test.
    """
    command = [sys.executable, __file__, str(args.directory), "--share", share]
    command += ["--tests", str(args.tests), "--test-seconds", str(args.test_seconds)]
    num_started = 0
    while True:
        subprocess.run(command, cwd=ROOT)
        outcomes = [row["outcome"] for _, row in read_jsonl(file_of(args.directory, share))]
        if outcomes[-1:] == [FINISHED]:
            return True
        previously_started, num_started = num_started, outcomes.count(STARTED)
        if num_started == previously_started:
            return False


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of this program's flags."""
    parser = make_parser(__doc__, allow_abbrev=True)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--tests", type=Path, default=ROOT / "tests", help="directory of the tests")
    parser.add_argument("--test-seconds", type=float, default=TEST_S, help="time limit of a test")
    parser.add_argument(
        "--share", help="I/N: run part I of N in this process; I/Ntimed: of the files that measure times"
    )
    return parser


def main(argv: list[str]) -> int:
    """Run the program, and return its exit code."""
    args = build_parser().parse_args(argv)
    if importlib.util.find_spec("pytest") is None:
        print("pytest is not installed: pip install pytest", file=sys.stderr)
        return 1
    args.directory.mkdir(parents=True, exist_ok=True)
    if args.share:
        return run_shard(args)
    with ThreadPoolExecutor(args.jobs) as pool:
        shares = [f"{index}/{args.jobs}" for index in range(args.jobs)]
        all_ended = all([*pool.map(lambda share: run_processes(args, share), shares)])
    all_ended &= run_processes(args, "0/1timed")
    return 0 if all_ended and not read(args.directory).get("failures") else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
