#!/usr/bin/env python
"""Print the logs of all ranks of a run in the order of time, and which failure came first.

    python tools/logs.py RUN            the failures, then every line of ranks/ and events.jsonl
    python tools/logs.py RUN --short    only the failures

RUN is a run directory. Each machine's times are from its own clock. Exit codes: 0; 1 a rank's file cannot be read and
is omitted; 2 usage.
"""

import argparse
import contextlib
import datetime
import itertools
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megalite.common.console import escape_control_chars, print_err
from megalite.common.text_file import read_ends
from megalite.training.logging.event_log import read_jsonl
from megalite.training.logging.status import current_outcome, last_logged_progress, read_status
from tools.cli_common import exit_with_error, make_parser, run_program

TIMESTAMPED_LINE = re.compile(r"(\d{4}-\d\d-\d\dT[\d:.]+(?:[+-]\d\d:\d\d|Z)) ?(.*)")
FAILURE = re.compile(r"Traceback \(most recent|Fatal Python error|(pretrain_gpt\.py|megalite \w+): |lost another rank")
LOST = "lost another rank"
LOST_RANKS = re.compile(r": ranks? (\d[\d, -]*) of \w+ ha(?:s|ve) ended \(process")  # of a rank that reports others
TIME_FIELDS = ("at",)  # seconds since 1970; events also have their time as text
END_EVENTS = ("failed", "restart", "restarts-exhausted")  # events of the launcher after all ranks have ended
MAX_LIST_ITEMS = 8  # of a list in an event
# added to an event's time, which has no fraction, so that the event follows the lines that it is about
EVENT_DELAY = datetime.timedelta(milliseconds=999)


@dataclass(frozen=True)
class Entry:
    """A line, or several with the same time, such as a traceback.

    Attributes:
        time: Its time.
        source: "rank N" or "launcher".
        lines: Its lines.
        event: The name of an event, or an empty string.
        cause: The cause in an event that the launcher reports.
    """

    time: datetime.datetime
    source: str
    lines: tuple[str, ...]
    event: str = ""
    cause: str = ""

    @property
    def headline(self) -> str:
        """The first line, followed by the last one of a traceback."""
        first = self.lines[0]
        last = next(line for line in reversed(self.lines) if line.strip())
        return first if first == last else f"{first} {last}"


def parse_time(text: str) -> datetime.datetime:
    """Return the time in a text, in the local zone if it has no zone. Raises ValueError or OverflowError."""
    time = datetime.datetime.fromisoformat(text)
    return time if time.tzinfo is not None else time.astimezone()


def rank_entries(path: Path) -> Iterator[Entry]:
    """Yield the entries of a rank's file. Raises OSError.

    Lines without a time are from faulthandler. They get the time when the file was last written.
    """
    text, num_omitted = read_ends(path)
    if num_omitted:
        print_err(f"logs.py: {path}: {num_omitted:,} bytes in its middle are left out")
    source = f"rank {path.stem.partition('-')[2].lstrip('0') or 0}"
    end = datetime.datetime.fromtimestamp(path.stat().st_mtime).astimezone()
    timed_lines = []
    for line in text.splitlines():
        time, message = end, line
        if match := TIMESTAMPED_LINE.fullmatch(line):
            with contextlib.suppress(ValueError):
                time, message = parse_time(match[1]), match[2]
        timed_lines.append((time, message))
    for time, group in itertools.groupby(timed_lines, key=lambda pair: pair[0]):
        yield Entry(time, source, tuple(message for _, message in group))


def event_facts(row: dict[str, Any]) -> Iterator[str]:
    """Yield the fields of an event as "name value". Fields that do not fit into a line are only named."""
    omitted = []
    for name, value in row.items():
        if value is None or name in TIME_FIELDS:
            continue
        text = format_value(value)
        if text is None:
            omitted.append(name)
        else:
            yield f"{name} {text}"
    if omitted:
        yield f"({', '.join(omitted)}: in events.jsonl)"


def format_value(value: Any) -> str | None:
    """Return a short text for a value, or None for a nested one."""
    match value:
        case None:
            return "n/a"
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.4g}"
        case list() if not any(isinstance(part, list | dict) for part in value):
            more = f" and {len(value) - MAX_LIST_ITEMS} more" if len(value) > MAX_LIST_ITEMS else ""
            return ", ".join(format_value(part) or "" for part in value[:MAX_LIST_ITEMS]) + more
        case list() | dict():
            return None
    return str(value)


def event_entries(path: Path) -> Iterator[Entry]:
    """Yield the entries of events.jsonl."""
    for _, row in read_jsonl(path):
        try:
            time = parse_time(row.pop("time")) + EVENT_DELAY
            event = str(row.pop("event"))
        except (ValueError, KeyError, TypeError, OverflowError):
            continue  # not an event of this program
        rank = row.pop("rank", None)
        source = "launcher" if rank is None else f"rank {rank}"
        line = f"{event}  {'  '.join(event_facts(row))}".rstrip()
        yield Entry(time, source, (line,), event, str(row.get("cause", "")))


def read_entries(run_dir: Path, problems: list[str]) -> list[Entry]:
    """Return all entries of a run in the order of time, and add a message to `problems` for each unreadable rank file.

    Raises OSError if the events cannot be read.
    """
    entries: list[Entry] = []
    for path in sorted((run_dir / "ranks").glob("rank-*.log")):
        try:
            entries += rank_entries(path)
        except OSError as error:
            problems.append(f"{path}: cannot be read ({error.strerror}); it is left out")
    events = run_dir / "events.jsonl"
    if events.is_file():
        entries += event_entries(events)
    return sorted(entries, key=lambda entry: entry.time)


def failures(entries: list[Entry]) -> Iterator[str]:
    """Yield a line about the first failure after each start of the ranks."""
    candidates: list[Entry] = []
    for entry in entries:
        if entry.event in END_EVENTS:
            yield _first_failure(candidates, entry)
            candidates = []
        elif FAILURE.search("\n".join(entry.lines)):
            candidates.append(entry)
    if candidates:
        yield _first_failure(candidates, None)


def _first_failure(candidates: list[Entry], end: Entry | None) -> str:
    """Return a line about the failure that caused the others.

    Args:
        candidates: the entries of ranks that report a failure.
        end: the launcher's event about the end of the ranks, if there is one.
    """
    # ranks that lost another one failed because of it, so they come last; of these, those that name it come first
    first = min(
        candidates,
        key=lambda entry: (LOST in entry.headline, LOST_RANKS.search(entry.headline) is None, entry.time),
        default=None,
    )
    if end is not None and (first is None or LOST in first.headline):
        return f"{end.time:%Y-%m-%d %H:%M:%S}  {end.cause}"  # a rank that is killed cannot report it
    assert first is not None
    text = f"{first.source}  {first.headline}"
    if LOST in first.headline and (lost := LOST_RANKS.search(first.headline)):
        text = f"rank {lost[1]}  ended without a message; {first.headline}"
    return f"{first.time:%Y-%m-%d %H:%M:%S}  {text}"


def status_line(run_dir: Path) -> str:
    """Return a line about the outcome of the run."""
    status = read_status(run_dir)
    if not status:
        return "not known (status.json is missing or damaged)"
    outcome = current_outcome(run_dir, status)
    if outcome in ("running", "killed"):
        step = last_logged_progress(run_dir).get("step", 0)
    else:
        step = status.get("step")
    return f"{outcome} at step {step}: {status.get('reason', '')}".rstrip(": ")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of this program's flags."""
    parser = make_parser(__doc__, allow_abbrev=True)
    parser.add_argument("run", type=Path, help="a run directory")
    parser.add_argument("--short", action="store_true", help="print only the failures")
    return parser


def main(argv: list[str]) -> int:
    """Run the program and return its exit code."""
    args = build_parser().parse_args(argv)
    if not args.run.is_dir():
        exit_with_error(f"logs.py: {args.run} is not a directory; give that of a run")
    problems: list[str] = []
    entries = read_entries(args.run, problems)
    lines = [f"failure {number}: {line}" for number, line in enumerate(failures(entries), 1)]
    lines.append(f"the end: {status_line(args.run)}")
    lines += [f"see also: {path}" for path in sorted((args.run / "hang").glob("*"))]
    if not args.short:
        for entry in entries:
            time = f"{entry.time:%m-%d %H:%M:%S.%f}"[:-3]  # milliseconds
            lines += [f"{time}  {entry.source:>8} | {line}" for line in entry.lines]
    print(escape_control_chars("\n".join(lines)))
    for problem in problems:
        print_err(f"logs.py: {problem}")
    return 1 if problems else 0


if __name__ == "__main__":
    run_program(main)
