#!/usr/bin/env python
"""Run everything that needs a GPU in one command of less than 8 minutes (10 on several GPUs), and compare with goals.

    python tools/gpu_report.py                                   writes runs/gpu_report/report.json and report.md
    python tools/gpu_report.py --only tests kernels              some parts, or groups of parts
    python tools/gpu_report.py --only levers --seconds 590       what kernels, windows and micro-batches are worth
    python tools/gpu_report.py --tiny                            everything at tiny sizes, to test that it runs
    python tools/gpu_report.py --cpu                             the same as a dry run without a GPU

The parts run one after the other, most valuable first: the GPU tests, the speed of training, levers (values of one flag
next to each other), GPT-2 on Python source text, kernels, and on several GPUs layouts and collectives. Each command is
a process of its own with a time limit (bench/timeout.py). A crash, a hang or a full disk costs only that part, and the
report has its last lines and its traceback. Both files are written before and after each part, so a run that is killed
leaves its results so far; OUT/PART/*.txt has the output of each command. After a part that failed, the GPU must pass a
small computation; further parts are skipped while it does not. Needs torch, numpy, triton, sentencepiece and pytest;
the first line says which of the last three are missing, and their parts are skipped.

Exit code 0 when every part ran (the report says which goals were reached), 1 when one failed, 2 for an invalid flag,
3 without a CUDA device, 130 or 143 when it was ended.
"""

import argparse
import contextlib
import datetime
import importlib.util
import json
import shutil
import signal
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any, TextIO

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megalite.common.safe_open import write_atomically
from tools.bench import gpu_report_goals, gpu_report_page, timeout
from tools.bench.gpu_report_parts import ReportPart, ReportSetting, list_parts
from tools.cli_common import local_path, make_parser, read_json

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("triton", "sentencepiece", "pytest")  # which some parts need
MIN_PART_S = 10.0  # no part is started with less time
PROBE_S, SELF_TEST_S = 90.0, 30.0
TOTAL_S, MULTI_GPU_TOTAL_S = 465.0, 585.0
MAX_LOG_LINES = 400  # of a part, in the report
STOPPED = "failed (exit code 75)"  # the status of a run that has saved and stopped when it was told to
PROBE = [sys.executable, str(ROOT / "tools" / "bench" / "gpu_report_probe.py")]


def print_safely(text: str, file: TextIO = sys.stdout) -> None:
    """Print a line, even if the reader of the stream is gone."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=file, flush=True)


class Report:
    """The results so far.

    Attributes:
        out: the directory of the report.
        facts: the versions, the hardware and warnings.
        setting: the machine and the sizes.
        results: the results by part.
        parts: the status of every part, in their order.
        gpu_failed: True if the GPU failed its last self-test.
    """

    def __init__(self, out: Path, facts: dict[str, Any], parts: list[ReportPart], setting: ReportSetting):
        self.out, self.facts, self.setting = out, facts, setting
        self.results: dict[str, dict[str, Any]] = {}
        self.parts: list[dict[str, Any]] = [
            {"name": part.name, "status": "waiting", "seconds": 0.0, "tail": [], "command": ""} for part in parts
        ]
        self.gpu_failed = False

    def render(self) -> tuple[dict[str, Any], str]:
        """Return the content of report.json and of report.md. Raises an exception if results have the wrong shape."""
        tiny, goals = self.setting.tiny, gpu_report_goals.goals(self.results)
        content = {
            "dry_run": tiny,
            "facts": self.facts,
            "parts": self.parts,
            "figures": [goal.to_json(judge=not tiny) for goal in goals],
            "results": self.results,
        }
        return content, gpu_report_page.markdown(content)

    def write(self) -> dict[str, Any]:
        """Write both files, or print that this is impossible, and return the content of report.json."""
        content, page = self.render()
        try:
            write_atomically(self.out / "report.json", json.dumps(content, indent=1))
            write_atomically(self.out / "report.md", page)
        except OSError as error:
            print_safely(f"gpu_report.py: {self.out} cannot be written: {error.strerror}", sys.stderr)
        return content

    def read_results(self, part: ReportPart, entry: dict[str, Any], directory: Path) -> None:
        """Read the results of a part. An error, such as of a truncated file, becomes its status."""
        try:
            result = part.read(directory)
            if result:
                self.results[part.name] = result
                self.render()
            elif entry["status"] == "ok":
                entry["status"] = "failed (no results)"
        except Exception as error:  # noqa: BLE001
            self.results.pop(part.name, None)
            entry["status"] += f"; its results cannot be read: {type(error).__name__}: {error}"
            entry["tail"] = entry["tail"] or timeout.error_tail(traceback.format_exc())

    def gpu_responds(self, when: str) -> bool:
        """Return True if every GPU passes its self-test. Adds a warning when this changes."""
        if self.setting.cpu:
            return True
        status, tail = timeout.run([*PROBE, "--self-test"], self.out / "self_test.txt", SELF_TEST_S)
        failed = status != "ok"
        if failed != self.gpu_failed:
            self.gpu_failed = failed
            warnings = self.facts.setdefault("warnings", [])
            if failed:
                warnings.append(f"the GPU does not respond {when}: {status}; {tail[-1] if tail else ''}")
            else:
                warnings.append(f"the GPU responds {when}")
        return not failed


def device_environment(cpu: bool) -> dict[str, str]:
    """Return the environment variables of a part, which hide the GPUs in a dry run."""
    return {"CUDA_VISIBLE_DEVICES": ""} if cpu else {}


def probe_machine(out: Path, tiny: bool, cpu: bool) -> tuple[dict[str, Any], str]:
    """Return the facts of gpu_report_probe.py, and the reason if some are missing."""
    file = out / "machine.json"
    file.unlink(missing_ok=True)
    command = [*PROBE, "tiny" if tiny else "full", str(file)]
    status, tail = timeout.run(command, out / "machine.txt", PROBE_S, device_environment(cpu))
    problem = "" if status == "ok" else "\n".join([f"the machine could not be examined: {status}", *tail])
    return read_json(file), problem


def git_commit() -> str:
    """Return the commit of the working tree, with a mark if it was changed, or "unknown" outside of git."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(command, capture_output=True, text=True, timeout=20).stdout.strip() or "unknown"
    return "unknown"


def reason_to_skip(part: ReportPart, report: Report, seconds: float) -> str:
    """Return the status of a part that cannot run now, or an empty string."""
    if part.skip is not None:
        return f"skipped: {part.skip}"
    if seconds < MIN_PART_S:
        return "not run: no time was left"
    if report.gpu_failed and not report.gpu_responds(f"before {part.name}"):
        return "not run: the GPU does not respond"
    return ""


def run_part(part: ReportPart, entry: dict[str, Any], report: Report, seconds: float) -> None:
    """Run a part for at most `seconds`, and set its entry and its results."""
    if status := reason_to_skip(part, report, seconds):
        entry["status"] = status
        return
    directory = report.out / part.name.replace(" ", "-")
    shutil.rmtree(directory, ignore_errors=True)  # of a previous report
    directory.mkdir(parents=True, exist_ok=True)
    start = time.monotonic()
    entry["status"] = "running"
    try:
        for command in part.commands(directory, seconds):
            entry["command"] = " ".join(command)
            report.write()
            run_command(command, entry, directory, start + seconds - time.monotonic(), report.setting)
            if entry["status"] != "ok":
                break
    except (KeyboardInterrupt, SystemExit):
        entry["status"] = "interrupted"
        raise
    finally:
        entry["seconds"] = time.monotonic() - start
        report.read_results(part, entry, directory)
    if entry["status"] != "ok":
        report.gpu_responds(f"after {part.name}")


def run_command(
    command: list[str], entry: dict[str, Any], directory: Path, seconds: float, setting: ReportSetting
) -> None:
    """Run one command of a part, and set the status and the last lines of its entry."""
    log = directory / f"{Path(command[1]).stem}.txt"
    status, tail = timeout.run(command, log, seconds, device_environment(setting.cpu))
    if status in ("ok", STOPPED):
        status, tail = "ok", timeout.truncate_log(log).splitlines()[-MAX_LOG_LINES:]
    entry["status"], entry["tail"] = status, tail


def run_all(parts: list[ReportPart], report: Report, deadline: float) -> dict[str, Any]:
    """Run every part until the deadline, and return the content of report.json."""
    try:
        for part, entry in zip(parts, report.parts, strict=True):
            try:
                run_part(part, entry, report, min(part.limit_s, deadline - time.monotonic()))
            except Exception:  # noqa: BLE001  an error of a part, or of this program, costs only that part
                status = "failed (it could not be run)"
                entry |= {"status": status, "tail": timeout.error_tail(traceback.format_exc())}
            print_safely(f"{entry['name']}: {entry['status']}, {entry['seconds']:.0f} s")
            report.write()
    finally:
        content = report.write()
    return content


def names_of(part: ReportPart) -> tuple[str, str]:
    """Return the two names of a part in --only: its own without that of its kind, and that of its group."""
    return part.name.split()[-1], part.group


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of this program's flags."""
    parts = list_parts(ReportSetting(cpu=True, plans={}))
    names = [*dict.fromkeys(name for part in parts for name in (part.group, names_of(part)[0]))]
    parser = make_parser(__doc__)
    parser.add_argument("--out", type=local_path, default=Path("runs/gpu_report"), metavar="DIR")
    parser.add_argument("--only", nargs="+", metavar="PART", choices=names, help="parts to run: " + ", ".join(names))
    parser.add_argument("--seconds", type=float, help="for all parts together (default 465, on several GPUs 585)")
    parser.add_argument("--tiny", action="store_true", help="use tiny sizes, whose results mean nothing")
    parser.add_argument("--cpu", action="store_true", help="a dry run without a GPU; implies --tiny")
    return parser


def main(argv: list[str]) -> int:
    """Run the program, and return its exit code."""
    start = time.monotonic()
    parser = build_parser()
    args = parser.parse_args(argv)
    args.tiny |= args.cpu
    if args.seconds is not None and args.seconds <= 0:
        parser.error(f"--seconds {args.seconds} is not positive")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out {args.out} cannot be made: {error.strerror}")
    missing = tuple(name for name in PACKAGES if importlib.util.find_spec(name) is None)
    if missing:
        print_safely(
            f"gpu_report.py: not installed: {', '.join(missing)}; parts are skipped; pip install them", sys.stderr
        )
    facts, problem = probe_machine(args.out, args.tiny, args.cpu)
    if not args.cpu and facts.get("device", "CPU") == "CPU":
        if facts:
            reason = f" ({facts['why']})" if "why" in facts else ""
            problem = f"torch sees no CUDA device{reason}; use a machine with one, or --cpu for a dry run"
        print_safely(f"gpu_report.py: {problem}", sys.stderr)
        return 3
    facts["date"] = datetime.date.today().isoformat()
    facts["commit"] = git_commit()
    facts["warnings"] = [*facts.get("warnings", [])]
    if problem:
        facts["warnings"].append(problem)
        print_safely(f"gpu_report.py: {problem}", sys.stderr)
    setting = ReportSetting(
        cpu=args.cpu,
        plans=facts.get("plans", {}),
        num_gpus=2 if args.cpu else facts["gpus"],
        tiny=args.tiny,
        shares_gpu=not any("one process at a time" in text for text in facts["warnings"]),
        missing=missing,
    )
    parts = [part for part in list_parts(setting) if not args.only or {*names_of(part)} & {*args.only}]
    report = Report(args.out, facts, parts, setting)
    total_s = args.seconds or (MULTI_GPU_TOTAL_S if setting.num_gpus > 1 else TOTAL_S)
    content = run_all(parts, report, start + total_s)
    for goal in content["figures"]:
        if goal["value"] is not None:
            print_safely(f"{goal['what']}: {goal['shown']} (goal {goal['goal']}): {goal['met']}")
    print_safely(f"written: {args.out / 'report.md'}, {args.out / 'report.json'}")
    any_failed = any(not entry["status"].startswith(("ok", "skipped")) for entry in report.parts)
    return 1 if any_failed or problem else 0


def on_sigterm(*_: Any) -> None:
    """Raise SystemExit, so that the running part ends, too."""
    raise SystemExit(143)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, on_sigterm)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a lost connection ends nothing
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
