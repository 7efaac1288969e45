#!/usr/bin/env python
"""What all ranks of a run said, in the order of time, and which failure came first.

    python tools/logs.py RUN            the failures, then every line of ranks/ and events.jsonl
    python tools/logs.py RUN --short    the failures only

RUN is a run directory. Times are those of each machine's own clock. Exit codes: 0; 1 a rank's file cannot be read and
is left out; 2 usage.
"""

import argparse
import datetime
import itertools
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megalite.common.console import escape_control_chars, print_err
from megalite.common.text_file import read_ends
from megalite.training.logging.event_log import read_jsonl
from megalite.training.logging.status import current_outcome, last_logged_progress, read_status
from tools.cli_common import exit_with_error, make_parser, run_program

STAMP = re.compile(r"(\d{4}-\d\d-\d\dT[\d:.]+(?:[+-]\d\d:\d\d|Z)) ?(.*)")
FAILURE = re.compile(r"Traceback \(most recent|Fatal Python error|(pretrain_gpt\.py|megalite \w+): |lost another rank")
LOST = "lost another rank"
GONE = re.compile(r": ranks? (\d[\d, -]*) of \w+ ha(?:s|ve) ended \(process")  # those that another rank has lost
TIMES = ("at",)  # seconds since 1970; an event has its time in words
ENDS = ("failed", "restart", "restarts-exhausted")  # events of the launcher: all ranks have ended, of this cause
MOST = 8  # values of a list that are shown
WHOLE_SECOND = datetime.timedelta(milliseconds=999)  # an event's time has no fraction, and follows what it tells of


class Entry(NamedTuple):
    """One line, or a traceback."""

    time: datetime.datetime
    who: str
    lines: tuple[str, ...]
    event: str = ""
    cause: str = ""

    @property
    def headline(self) -> str:
        """The first line, with the last one of a traceback behind it."""
        first, last = self.lines[0], next(line for line in reversed(self.lines) if line.strip())
        return first if first == last else f"{first} {last}"


def time_of(text: str) -> datetime.datetime:
    """The time in a text, in the local zone where it names none. Raises ValueError, OverflowError."""
    time = datetime.datetime.fromisoformat(text)
    return time if time.tzinfo is not None else time.astimezone()


def of_rank(path: Path) -> Iterator[Entry]:
    """A rank's file. Lines without a time are faulthandler's, of the moment when the file was last written. Raises
    OSError where it cannot be read."""
    text, left_out = read_ends(path)
    if left_out:
        print_err(f"logs.py: {path}: {left_out:,} bytes in its middle are left out")
    who = f"rank {path.stem.partition('-')[2].lstrip('0') or 0}"
    end = datetime.datetime.fromtimestamp(path.stat().st_mtime).astimezone()
    stamped = []
    for line in text.splitlines():
        match = STAMP.fullmatch(line)
        try:
            stamped.append((time_of(match[1]), match[2]) if match else (end, line))
        except ValueError:
            stamped.append((end, line))
    for time, lines in itertools.groupby(stamped, key=lambda pair: pair[0]):
        yield Entry(time, who, tuple(text for _, text in lines))


def facts_of(row: dict[str, Any]) -> Iterator[str]:
    """The facts of an event, each as its name and value; what is too long for a line is only named."""
    row = {name: value for name, value in row.items() if value is not None and name not in TIMES}
    texts = {name: readable(value) for name, value in row.items()}
    yield from (f"{name} {text}" for name, text in texts.items() if text is not None)
    if long := [name for name, text in texts.items() if text is None]:
        yield f"({', '.join(long)}: in events.jsonl)"


def readable(value: Any) -> str | None:
    """A value as people write it; None for what has parts of its own."""
    match value:
        case None:
            return "n/a"
        case bool():
            return "yes" if value else "no"
        case float():
            return f"{value:.4g}"
        case list() if not any(isinstance(part, list | dict) for part in value):
            more = f" and {len(value) - MOST} more" if len(value) > MOST else ""
            return ", ".join(readable(part) or "" for part in value[:MOST]) + more
        case list() | dict():
            return None
    return str(value)


def of_events(path: Path) -> Iterator[Entry]:
    for _, row in read_jsonl(path):
        try:
            time, event = time_of(row.pop("time")) + WHOLE_SECOND, str(row.pop("event"))
        except (ValueError, KeyError, TypeError, OverflowError):
            continue  # not an event of this program
        rank = row.pop("rank", None)
        facts = "  ".join(facts_of(row))
        who = "launcher" if rank is None else f"rank {rank}"
        yield Entry(time, who, (f"{event}  {facts}".rstrip(),), event, str(row.get("cause", "")))


def read(run: Path, unread: list[str]) -> list[Entry]:
    """All of a run, in the order of time. `unread` gets a line for each file that cannot be read. Raises OSError."""
    entries: list[Entry] = []
    for path in sorted((run / "ranks").glob("rank-*.log")):
        try:
            entries += of_rank(path)
        except OSError as error:
            unread.append(f"{path}: cannot be read ({error.strerror}); it is left out")
    if (events := run / "events.jsonl").is_file():
        entries += of_events(events)
    return sorted(entries, key=lambda entry: entry.time)


def failures(entries: list[Entry]) -> Iterator[str]:
    """The first one of each start of the ranks, a line each."""
    said: list[Entry] = []
    for entry in [*entries, None]:
        if entry is not None and entry.event not in ENDS:
            said += [entry] if FAILURE.search("\n".join(entry.lines)) else []
            continue
        order = lambda e: (LOST in e.headline, GONE.search(e.headline) is None, e.time)  # noqa: E731
        first = min(said, key=order, default=None)
        known = first is not None and LOST not in first.headline
        if known or (entry is None and first is not None):
            assert first is not None
            gone = GONE.search(first.headline) if not known else None
            text = (
                f"rank {gone[1]}  ended without a word; {first.headline}" if gone else f"{first.who}  {first.headline}"
            )
            yield f"{first.time:%Y-%m-%d %H:%M:%S}  {text}"
        elif entry is not None:  # nobody says anything when it is killed
            yield f"{entry.time:%Y-%m-%d %H:%M:%S}  {entry.cause}"
        said = []


def status_line(run: Path) -> str:
    if not (status := read_status(run)):
        return "not known (status.json is missing or damaged)"
    outcome, reason = current_outcome(run, status), status.get("reason", "")
    step = status.get("step") if outcome not in ("running", "killed") else last_logged_progress(run).get("step", 0)
    return f"{outcome} at step {step}: {reason}".rstrip(": ")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of this program's flags."""
    parser = make_parser(__doc__, allow_abbrev=True)
    parser.add_argument("run", type=Path, help="a run directory")
    parser.add_argument("--short", action="store_true", help="print only the failures")
    return parser


def main(argv: list[str]) -> int:
    args = build_parser().parse_args(argv)
    if not args.run.is_dir():
        exit_with_error(f"logs.py: {args.run} is not a directory; give that of a run")
    unread: list[str] = []
    entries = read(args.run, unread)
    lines = [f"failure {number}: {line}" for number, line in enumerate(failures(entries), 1)]
    lines += [f"the end: {status_line(args.run)}"]
    lines += [f"see also: {path}" for path in sorted((args.run / "hang").glob("*"))]
    for entry in [] if args.short else entries:
        lines += [f"{entry.time:%m-%d %H:%M:%S.%f}"[:-3] + f"  {entry.who:>8} | {line}" for line in entry.lines]
    print(escape_control_chars("\n".join(lines)))
    for problem in unread:
        print_err(f"logs.py: {problem}")
    return 1 if unread else 0


if __name__ == "__main__":
    run_program(main)
