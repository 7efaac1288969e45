#!/usr/bin/env python
"""Everything that needs a card, in one command of less than 8 minutes (10 on several cards): does it train, how fast,
tests, kernels, messages between cards; beside their goals.

    python tools/gpu_report.py                       writes runs/gpu_report/report.json and report.md
    python tools/gpu_report.py --only tests kernels  some parts
    python tools/gpu_report.py --only levers --seconds 590       what kernels, windows, chunks are worth, in pairs
    python tools/gpu_report.py --tiny                everything at tiny sizes: does it run at all?
    python tools/gpu_report.py --cpu                 the same as a dry run without a card

Parts run one after the other, most valuable first, each in processes of its own with a time limit (bench/limited.py): a
crash, a hang, a full disk cost that part, and its last words with their traceback are in the report. Both files are
written before and after each part, so a run that is killed leaves what it has; all that a part printed is in
OUT/NAME/log.txt. After a part that failed the card is asked to compute a little: parts are not run while it cannot.
Needs torch, triton, numpy and sentencepiece, and pytest for the tests.

Exit code 0 when every part ran (whether goals were reached is in the report), 1 when one failed, 2 for a bad flag, 3
without a CUDA device, 130 or 143 when it was ended.
"""

import argparse
import contextlib
import datetime
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
from tools.bench import gpu_report_goals
from tools.bench import timeout as limited
from tools.bench.gpu_report_parts import SHAPES, TINY_SHAPES, Part, Setting, parts_of
from tools.cli_common import local_path, make_parser, read_json

ROOT = Path(__file__).resolve().parent.parent
LEAST_S = 10.0  # a part is not begun with less
PROBE_S, ANSWER_S = 90.0, 30.0
TOTAL_S = {False: 465.0, True: 585.0}  # on one card, on several
SHOWN_LINES = 400  # of what a part printed
PROBE = [sys.executable, str(ROOT / "tools" / "bench" / "gpu_report_probe.py")]


def say(text: str, file: TextIO = sys.stdout) -> None:
    with contextlib.suppress(OSError, ValueError):  # whoever listened may have gone
        print(text, file=file, flush=True)


class Report:
    """What is known so far; `write` puts it on disk, if the disk lets it."""

    def __init__(self, out: Path, facts: dict[str, Any], parts: list[Part], setting: Setting):
        self.out, self.facts, self.setting = out, facts, setting
        self.results: dict[str, dict[str, Any]] = {}
        waiting = {"status": "waiting", "seconds": 0.0, "tail": [], "command": ""}
        self.parts: list[dict[str, Any]] = [{"name": part.name, **waiting} for part in parts]
        self.sick = False  # the card did not answer when it was last asked

    def render(self) -> tuple[dict[str, Any], str]:
        """The content of report.json and of report.md. Raises what results of an unexpected shape lead to."""
        tiny, goals = self.setting.tiny, gpu_report_goals.goals(self.results)
        content = {"dry_run": tiny, "facts": self.facts, "parts": self.parts}
        content |= {"figures": [goal.figure(not tiny) for goal in goals], "results": self.results}
        return content, gpu_report_goals.markdown(content)

    def write(self) -> dict[str, Any]:
        content, page = self.render()
        try:
            for name, text in (("report.json", json.dumps(content, indent=1)), ("report.md", page)):
                write_atomically(self.out / name, text)
        except OSError as error:
            say(f"gpu_report.py: {self.out} cannot be written: {error.strerror}", sys.stderr)
        return content

    def take(self, part: Part, entry: dict[str, Any], folder: Path) -> None:
        """The part's results, if they are there and make sense: a file may have been cut off anywhere."""
        try:
            result = part.read(folder)
            if result:
                self.results[part.name] = result
                self.render()
            elif entry["status"] == "ok":
                entry["status"] = "failed (no results)"
        except Exception as error:  # noqa: BLE001
            self.results.pop(part.name, None)
            entry["status"] += f"; its results cannot be read: {type(error).__name__}: {error}"
            entry["tail"] = entry["tail"] or limited.error_tail(traceback.format_exc())

    def card_answers(self, when: str) -> bool:
        """Whether every card still computes; the first time that it does not, and the next that it does, are told."""
        if self.setting.cpu:
            return True
        status, tail = limited.run([*PROBE, "--answers"], self.out / "answers.txt", ANSWER_S)
        if self.sick != (status != "ok"):
            self.sick = not self.sick
            why = f"does not answer {when}: {status}; {tail[-1] if tail else ''}" if self.sick else f"answers {when}"
            self.facts.setdefault("warnings", []).append(f"the card {why}")
        return not self.sick


def facts_of(out: Path, tiny: bool, cpu: bool) -> tuple[dict[str, Any], str]:
    """The facts of gpu_report_probe.py, and why some are missing."""
    file = out / "machine.json"
    file.unlink(missing_ok=True)
    environment = {"CUDA_VISIBLE_DEVICES": ""} if cpu else {}
    command = [*PROBE, json.dumps(TINY_SHAPES if tiny else SHAPES), str(file)]
    status, tail = limited.run(command, out / "machine.txt", PROBE_S, environment)
    problem = "" if status == "ok" else "\n".join([f"the machine could not be examined: {status}", *tail])
    return read_json(file), problem


def commit() -> str:
    """The commit of the working tree, with a mark where it was changed; "unknown" outside of git."""
    words = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        return subprocess.run(words, capture_output=True, text=True, timeout=20).stdout.strip() or "unknown"
    return "unknown"


def run(part: Part, entry: dict[str, Any], report: Report, seconds: float) -> None:
    refused = ""
    if part.skip is not None:
        refused = f"skipped: {part.skip}"
    elif seconds < LEAST_S:
        refused = "not run: no time was left"
    elif report.sick and not report.card_answers(f"before {part.name}"):
        refused = "not run: the card does not answer"
    if refused:
        entry["status"] = refused
        return
    folder = report.out / part.name.replace(" ", "-")
    shutil.rmtree(folder, ignore_errors=True)  # of another run
    folder.mkdir(parents=True, exist_ok=True)
    command = part.command(folder, seconds)
    entry |= {"status": "running", "command": " ".join(command)}
    report.write()
    begin = time.monotonic()
    environment = {"CUDA_VISIBLE_DEVICES": ""} if report.setting.cpu else {}
    try:
        entry["status"], entry["tail"] = limited.run(command, folder / "log.txt", seconds, environment)
        if entry["status"] == "ok":
            entry["tail"] = limited.truncate_log(folder / "log.txt").splitlines()[-SHOWN_LINES:]
        else:  # what the part itself started may have had more to say, and no time to hand it on
            others = [limited.truncate_log(log) for log in sorted(folder.glob("*.txt")) if log.name != "log.txt"]
            entry["tail"] += [
                line for text in others if limited.TRACEBACK_MARKS[1] in text for line in limited.error_tail(text)
            ]
    except (KeyboardInterrupt, SystemExit):
        entry["status"] = "interrupted"
        raise
    finally:
        entry["seconds"] = time.monotonic() - begin
        report.take(part, entry, folder)
    if entry["status"] != "ok":
        report.card_answers(f"after {part.name}")


def run_all(parts: list[Part], report: Report, end: float) -> dict[str, Any]:
    """Every part until the clock says `end`; the finished report."""
    try:
        for part, entry in zip(parts, report.parts, strict=True):
            try:
                run(part, entry, report, min(part.limit_s, end - time.monotonic()))
            except Exception:  # noqa: BLE001  what is wrong with one part, or with this program, costs that part
                entry |= {"status": "failed (it could not be run)", "tail": limited.error_tail(traceback.format_exc())}
            say(f"{entry['name']}: {entry['status']}, {entry['seconds']:.0f} s")
            report.write()
    finally:
        content = report.write()
    return content


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of this program's flags."""
    names = [part.name.removeprefix("train ") for part in parts_of(Setting(True, {}))]
    parser = make_parser(__doc__)
    parser.add_argument("--out", type=local_path, default=Path("runs/gpu_report"), metavar="DIR")
    parser.add_argument("--only", nargs="+", metavar="PART", choices=names, help="parts to run: " + ", ".join(names))
    parser.add_argument("--seconds", type=float, help="for all parts together (default 465, on several GPUs 585)")
    parser.add_argument("--tiny", action="store_true", help="use tiny sizes, whose results mean nothing")
    parser.add_argument("--cpu", action="store_true", help="a dry run without a GPU; implies --tiny")
    return parser


def main(argv: list[str]) -> int:
    begin = time.monotonic()
    parser = build_parser()
    args = parser.parse_args(argv)
    args.tiny |= args.cpu
    if args.seconds is not None and args.seconds <= 0:
        parser.error(f"--seconds {args.seconds} is not positive")
    try:
        args.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        parser.error(f"--out {args.out} cannot be made: {error.strerror}")
    facts, problem = facts_of(args.out, args.tiny, args.cpu)
    if not args.cpu and facts.get("device", "CPU") == "CPU":
        why = f" ({facts['why']})" if "why" in facts else ""
        text = f"torch sees no CUDA device{why}; use a machine with one, or --cpu for a dry run"
        say(f"gpu_report.py: {text if facts else problem}", sys.stderr)
        return 3
    facts |= {"date": datetime.date.today().isoformat(), "commit": commit()}
    facts["warnings"] = [*facts.get("warnings", [])]
    if problem:
        facts["warnings"].append(problem)
    together = not any("one process at a time" in text for text in facts["warnings"])
    cards, triton = 2 if args.cpu else facts["cards"], facts.get("triton") is not None
    setting = Setting(args.cpu, facts.get("plans", {}), cards, args.tiny, together, triton)
    parts = [part for part in parts_of(setting) if not args.only or part.name.removeprefix("train ") in args.only]
    report = Report(args.out, facts, parts, setting)
    if problem:
        say(f"gpu_report.py: {problem}", sys.stderr)
    content = run_all(parts, report, begin + (args.seconds or TOTAL_S[cards > 1]))
    for figure in content["figures"]:
        if figure["value"] is not None:
            say(f"{figure['what']}: {figure['shown']} (goal {figure['goal']}): {figure['met']}")
    say(f"written: {args.out / 'report.md'}, {args.out / 'report.json'}")
    bad = [e for e in report.parts if not e["status"].startswith(("ok", "skipped"))]
    return 1 if bad or problem else 0


def terminated(*_: Any) -> None:
    raise SystemExit(143)  # so that what is running is ended too


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, terminated)
    signal.signal(signal.SIGHUP, signal.SIG_IGN)  # a connection that breaks ends nothing
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit(130)
