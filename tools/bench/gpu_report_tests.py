"""Run the tests that need a GPU in several processes at once, for tools/gpu_report.py.

    python tools/bench/gpu_report_tests.py DIR --jobs 8      writes DIR/share*.jsonl, an object per test

Only pytest is needed, without a plugin for parallel tests: each process takes every n-th test. Files that measure times
run last and alone. A line is written when a test starts and when it ends. If a process crashes or is killed, the file
has the outcomes of the tests before, and names the test that was running. After a fatal error of the GPU (an invalid
address, a failed assertion) every further CUDA call of the process fails, so the remaining tests run in a new process.
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
MAX_TEXT = 1500  # characters of a failure's text, from its end
OWN_PACKAGES = ("megalite", "tools", "cases")


def test_files() -> tuple[list[str], list[str]]:
    """Return the files with GPU tests, those that measure times separately.

    The other files may need packages that are not installed.
    """
    texts = {str(path): path.read_text("utf-8") for path in sorted((ROOT / "tests").rglob("test_*.py"))}
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
    """A pytest plugin that runs every n-th GPU test, and writes their outcomes.

    It leaves out tests that are already in the file, and stops after a fatal error of the GPU (`is_broken`).

    Args:
        index: the index of the shard.
        num_shards: the number of shards.
        file: the file for the outcomes.
    """

    def __init__(self, index: int, num_shards: int, file: Path):
        self.index, self.num_shards, self.file = index, num_shards, file
        self.finished = {row["test"] for _, row in read_jsonl(file)}
        self.is_broken = False

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
        """Write that a test starts."""
        self.write(test=nodeid, outcome="began")

    def pytest_runtest_logreport(self, report: Any) -> None:
        """Write the outcome of a test, and stop if it broke CUDA."""
        if report.when == "call" or report.outcome != "passed":
            text = str(report.longrepr)[-MAX_TEXT:] if report.failed else ""
            self.write(test=report.nodeid, outcome=report.outcome, seconds=report.duration, text=text)
            if report.failed and "CUDA error" in text and cuda_is_broken():
                self.is_broken = True
                self.session.shouldstop = "the GPU does not respond in this process any more"


def read(directory: Path) -> dict[str, Any]:
    """Return the numbers of outcomes over all shards, and the failures with the ends of their texts."""
    last_rows: dict[str, dict[str, Any]] = {}
    for file in sorted(directory.glob("share*.jsonl")):
        for _, row in read_jsonl(file):
            if row["outcome"] != "began" or row["test"] not in last_rows:
                last_rows[row["test"]] = row
    if not last_rows:
        return {}
    rows = list(last_rows.values())
    counts = collections.Counter(row["outcome"] for row in rows)
    failed_rows = [row for row in rows if row["outcome"] in ("failed", "began")]
    return {
        "passed": counts["passed"],
        "failed": counts["failed"],
        "skipped": counts["skipped"],
        "did_not_end": counts["began"],
        "without_their_packages": sorted(row["test"] for row in rows if row["outcome"] == "skipped" and row["text"]),
        "failures": [{"test": row["test"], "text": row.get("text") or "began and did not end"} for row in failed_rows],
    }


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of this program's flags."""
    parser = make_parser(__doc__, allow_abbrev=True)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--share", help="I/N: run part I of N in this process")
    parser.add_argument("--timed", action="store_true", help="with --share: run the files that measure times")
    return parser


def run_shard(args: argparse.Namespace, argv: list[str]) -> int:
    """Run one shard in this process, and return pytest's exit code. Restarts the process if CUDA is broken."""
    import pytest

    index, num_shards = map(int, args.share.split("/"))
    untimed_files, timed_files = test_files()
    if args.timed:
        files = timed_files
    else:
        files = untimed_files + timed_files if num_shards == 1 else untimed_files
    suffix = "timed" if args.timed else ""
    shard = PytestShard(index, num_shards, args.directory / f"share{index}{suffix}.jsonl")
    exit_code = int(pytest.main(["-q", "-m", "gpu", "--continue-on-collection-errors", *files], plugins=[shard]))
    if shard.is_broken:
        os.execv(sys.executable, [sys.executable, __file__, *argv])
    return exit_code


def main(argv: list[str]) -> int:
    """Run the program, and return its exit code."""
    args = build_parser().parse_args(argv)
    if importlib.util.find_spec("pytest") is None:
        print("pytest is not installed: pip install pytest", file=sys.stderr)
        return 1
    args.directory.mkdir(parents=True, exist_ok=True)
    if args.share:
        return run_shard(args, argv)
    command = [sys.executable, __file__, str(args.directory)]
    processes = [
        subprocess.Popen([*command, "--share", f"{index}/{args.jobs}"], cwd=ROOT) for index in range(args.jobs)
    ]
    exit_codes = [process.wait() for process in processes]
    if args.jobs > 1:
        exit_codes.append(subprocess.run([*command, "--share", "0/1", "--timed"], cwd=ROOT).returncode)
    has_crashed = any(code not in (0, 1, 2, 5) for code in exit_codes)  # these are pytest's, and the files say more
    return 1 if has_crashed or read(args.directory).get("failures") else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
