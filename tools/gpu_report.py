#!/usr/bin/env python
"""Everything that needs a card, in one command of less than 8 minutes: tests, kernels, training; beside their goals.

    python tools/gpu_report.py                       writes runs/gpu_report/report.json and report.md
    python tools/gpu_report.py --only tests kernels  some parts
    python tools/gpu_report.py --cpu                 a dry run of all parts without a card, at tiny sizes

Parts run one after the other, most valuable first, each in a process of its own with a time limit: a crash or a hang of
one costs that one. Both files are written before and after each part, so a run that is killed leaves what it has; all
that a part printed is in OUT/NAME/log.txt. Needs torch, triton, numpy and sentencepiece; pytest for the tests,
compute-sanitizer (of the CUDA toolkit) for the last part.

Exit code 0 when every part ran (whether goals were reached is in the report), 1 when one failed, 2 for a bad flag, 3
without a CUDA device.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tools.bench import gpu_report_goals  # noqa: E402
from tools.bench.gpu_report_parts import SHAPES, TINY_SHAPES, Part, Setting, load, parts_of  # noqa: E402

LEAST_S = 10.0  # a part is not begun with less
TAIL = 25  # lines of a failed part
PROBE_S = 90.0


def entry_of(part: Part) -> dict[str, Any]:
    return {"name": part.name, "status": "waiting", "seconds": 0.0, "tail": [], "command": ""}


class Report:
    """What is known so far; `write` puts it on disk."""

    def __init__(self, out: Path, facts: dict[str, Any], parts: list[Part], cpu: bool):
        self.out, self.facts, self.cpu = out, facts, cpu
        self.results: dict[str, dict[str, Any]] = {}
        self.parts = [entry_of(part) for part in parts]

    def write(self) -> dict[str, Any]:
        judge = not self.cpu
        made = {
            "dry_run": self.cpu,
            "facts": self.facts,
            "parts": self.parts,
            "figures": [goal.figure(self.results, judge) for goal in gpu_report_goals.goals()],
            "results": self.results,
        }
        for name, text in (("report.json", json.dumps(made, indent=1)), ("report.md", gpu_report_goals.markdown(made))):
            beside = self.out / f".{name}"
            beside.write_text(text, encoding="utf-8")
            os.replace(beside, self.out / name)
        return made


def run_process(command: list[str], log: Path, seconds: float, more: dict[str, str]) -> tuple[str, list[str]]:
    """Status and last lines of a command that gets `seconds`; it and all that it started are gone afterwards."""
    status = "out of time"
    with open(log, "wb") as file:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=file, stderr=subprocess.STDOUT, env={**os.environ, **more}, start_new_session=True
        )
        try:
            code = process.wait(timeout=seconds)
            status = "ok" if code == 0 else f"failed (exit code {code})"
        except subprocess.TimeoutExpired:
            pass
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return status, log.read_text("utf-8", errors="replace").splitlines()[-TAIL:]


def facts_of(out: Path, cpu: bool) -> tuple[dict[str, Any], str]:
    """What gpu_report_probe.py found, and why not, if it did not."""
    file = out / "machine.json"
    file.unlink(missing_ok=True)
    shapes = json.dumps(TINY_SHAPES if cpu else SHAPES)
    command = [sys.executable, str(ROOT / "tools" / "bench" / "gpu_report_probe.py"), shapes, str(file)]
    more = {"CUDA_VISIBLE_DEVICES": ""} if cpu else {}
    status, tail = run_process(command, out / "machine.txt", PROBE_S, more)
    return load(file), "" if status == "ok" else "\n".join([status, *tail])


def commit() -> str:
    """Of the working tree, with a mark where it was changed; "unknown" outside of git."""
    try:
        words = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
        done = subprocess.run(words, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip() or "unknown"


def run(part: Part, entry: dict[str, Any], report: Report, seconds: float) -> None:
    folder = report.out / part.name.replace(" ", "-")
    if part.skip is not None:
        entry["status"] = f"skipped: {part.skip}"
        return
    if seconds < LEAST_S:
        entry["status"] = "not run: no time was left"
        return
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():  # of another run
        old.unlink()
    command = part.command(folder, seconds)
    entry |= {"status": "running", "command": " ".join(command)}
    report.write()
    begin = time.monotonic()
    more = part.environment | ({"CUDA_VISIBLE_DEVICES": ""} if report.cpu else {})
    status, tail = run_process(command, folder / "log.txt", seconds, more)
    entry |= {"status": status, "tail": tail, "seconds": time.monotonic() - begin}
    try:
        report.results[part.name] = part.read(folder)
        if status == "ok" and not report.results[part.name]:
            entry["status"] = "failed (no results)"
    except (ValueError, KeyError, TypeError) as error:  # a file that was cut off
        entry["status"] = f"{status}; its results cannot be read: {type(error).__name__}: {error}"


def run_all(parts: list[Part], report: Report, end: float) -> dict[str, Any]:
    """Every part until the clock says `end`; the finished report."""
    for part, entry in zip(parts, list(report.parts), strict=True):
        run(part, entry, report, min(part.limit_s, end - time.monotonic()))
        print(f"{part.name}: {entry['status']}, {entry['seconds']:.0f} s", flush=True)
        if part.smaller is not None and any("out of memory" in line.lower() for line in entry["tail"]):
            again = entry_of(part.smaller)
            report.parts.insert(report.parts.index(entry) + 1, again)
            run(part.smaller, again, report, min(part.limit_s, end - time.monotonic()))
            print(f"{part.name}, smaller: {again['status']}, {again['seconds']:.0f} s", flush=True)
        report.write()
    return report.write()


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    names = [part.name.removeprefix("train ") for part in parts_of(Setting(True, {}))]
    parser.add_argument("--out", type=Path, default=Path("runs/gpu_report"), metavar="DIR")
    parser.add_argument("--only", nargs="+", choices=names, metavar="PART", help="of " + ", ".join(names))
    parser.add_argument("--seconds", type=float, default=465, help="for all parts together (default 465)")
    parser.add_argument("--cpu", action="store_true", help="a dry run without a card")
    args = parser.parse_args(argv)
    if args.seconds <= 0:
        parser.error(f"--seconds {args.seconds} is not positive")
    end = time.monotonic() + args.seconds
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out {args.out} cannot be made: {error.strerror}")
    facts, problem = facts_of(args.out, args.cpu)
    if not args.cpu and (problem or facts["device"] == "CPU"):
        text = problem or "torch sees no CUDA device; use a machine with one, or --cpu for a dry run"
        print(f"gpu_report.py: {text}", file=sys.stderr)
        return 3
    facts |= {"date": datetime.date.today().isoformat(), "commit": commit()}
    setting = Setting(args.cpu, facts.get("plans", {}))
    parts = [part for part in parts_of(setting) if not args.only or part.name.removeprefix("train ") in args.only]
    report = Report(args.out, facts, parts, args.cpu)
    if problem:
        print(f"gpu_report.py: {problem}", file=sys.stderr)
    made = run_all(parts, report, end)
    for figure in made["figures"]:
        if figure["value"] is not None:
            print(f"{figure['what']}: {figure['shown']} (goal {figure['goal']}): {figure['met']}")
    print(f"written: {args.out / 'report.md'}, {args.out / 'report.json'}")
    bad = [e for e in report.parts if not e["status"].startswith(("ok", "skipped"))]
    return 1 if bad or problem else 0


def terminated(*_: Any) -> None:
    raise SystemExit(143)  # so that what is running is ended too


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, terminated)
    sys.exit(main(sys.argv[1:]))
