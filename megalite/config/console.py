"""Lines on stdout (`show`) and stderr (`complain`), and a progress bar at the bottom of a terminal (`Bar`).

Where stdout is not a terminal, with NO_COLOR or TERM=dumb, or under a launcher, which collects what ranks print, a bar
prints a plain line now and then instead. rich draws it, in the thread that does the work, at most four times a second.
It never hides the cursor, so a killed run leaves nothing to restore. No function here raises for an error of the
console.
"""

import contextlib
import os
import re
import select
import sys
import threading
import time
import tomllib
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import TypeVar

from megalite.config.environment import wants_plain_output

T = TypeVar("T")
ERASE = "\r\x1b[2K"  # this line of the terminal
_CONTROL_CHARS = re.compile(
    r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)  # control characters
MOST_CHARACTERS, MOST_OF_AN_ERROR = 2000, 30_000  # of a line that is printed on stderr, and of all that belong together
REDRAW_S = 0.25  # between two drawings of a bar
_bars: "list[ProgressBar]" = []  # those on a terminal, of this process; the last one is shown


def discard_unwritable_output() -> None:
    """Drop buffered text that cannot be written, as on a full disk: Python would try again as it exits, and turn that
    into a failure of the run (exit code 120, of a rank 1)."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, ValueError):  # there is none, or it was closed before
            continue
        except OSError:
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def shortened(text: str, most: int = MOST_CHARACTERS) -> str:
    """Return `text` with its middle cut out if it is longer than `most` characters."""
    if len(text) <= most:
        return text
    return f"{text[: most * 2 // 3]} ... ({len(text):,} characters) ... {text[len(text) - most // 3 :]}"


def is_interactive() -> bool:
    """Whether stdout is a terminal that takes more than plain lines."""
    try:
        return not wants_plain_output() and sys.stdout.isatty()
    except (AttributeError, ValueError):
        return False


def _takes_output() -> bool:
    """Return whether a write to stdout would not block, as it does after Ctrl-S. Raises OSError if stdout is gone."""
    return bool(select.select([], [sys.stdout.fileno()], [], 0)[1])


def width_of_terminal() -> int | None:
    """The columns of the terminal that stdout is; None where it is none, or does not say."""
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or None
    except (AttributeError, OSError, ValueError):
        return None


def escape_control_chars(text: str) -> str:
    """The text with control characters as Python's escapes, safe to print on a terminal."""
    return _CONTROL_CHARS.sub(lambda c: ascii(c[0])[1:-1], text)


@cache
def _commands() -> dict[str, str]:
    """File of a program in a clone -> the command of `megalite` that runs it."""
    table = tomllib.loads((Path(__file__).resolve().parent.parent / "commands.toml").read_text("utf-8"))
    return {f"{module.replace('.', '/')}.py": f"megalite {name}" for name, (module, _) in table.items() if module}


def as_commands(text: str) -> str:
    """`text` with commands of `megalite` in place of the files that they run, which are not there without a clone."""
    for file, command in _commands().items():
        path, name = re.escape(file), re.escape(file.rpartition("/")[2])
        text = re.sub(rf"(torchrun .*){path}", rf"\1-m {command}", text)
        text = re.sub(rf"(?<![\w/.-])(python )?{path}(?!\w)", command, text)
        text = re.sub(rf"^{name}: ", f"{command}: ", text, flags=re.MULTILINE)
    return text


def as_typed(text: str) -> str:
    """`text` with programs named as this one was started: by its file, or as a command of `megalite`."""
    return as_commands(text) if sys.argv[:1] and sys.argv[0].startswith("megalite ") else text


def print_out(text: str) -> None:
    """Print a line on stdout. A reader that is gone or a full disk ends no run."""
    try:
        print(
            ERASE * is_interactive() + escape_control_chars(as_typed(text)) + "\n", end="", flush=True
        )  # one write: ranks share stdout
        for bar in _bars[-1:]:  # a slice: another thread may close the last one
            bar.draw()
    except (OSError, ValueError):
        discard_unwritable_output()


def print_err(text: str) -> None:
    """Print a line on stderr, or several; an error of that is ignored. What would fill the console is cut short."""
    text = "\n".join(shortened(line) for line in shortened(text, MOST_OF_AN_ERROR).split("\n"))
    with contextlib.suppress(OSError, ValueError):
        if is_interactive():  # erase the bar, of this rank or another
            sys.stdout.write(ERASE)
            sys.stdout.flush()
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(escape_control_chars(as_typed(text)) + "\n")  # one write: ranks share stderr
        sys.stderr.flush()


class ProgressBar(contextlib.AbstractContextManager["ProgressBar"]):
    """Progress out of `total`, in `unit`: a bar at the bottom of a terminal, or a call of `plain` now and then.

    `add` and `at` may be called from any thread.

    Args:
        what: the name of the work, shown before the bar.
        done: how much of `total` is done at the start.
        quiet: another rank shows the bar; this one shows none on a terminal.
        every_s: the time between calls of `plain`.
        first_s: the time until its first call; by default `every_s`.
        plain: called with the amount done where stdout is not a terminal that takes more than plain lines.
    """

    def __init__(
        self,
        what: str,
        total: float,
        unit: str = "",
        *,
        done: float = 0.0,
        quiet: bool = False,
        every_s: float = 10.0,
        first_s: float | None = None,
        plain: Callable[[float], None] | None = None,
    ):
        self.what = what
        self.total = total
        self.unit = unit
        self.done = done
        self.text = ""
        self._every_s = every_s
        self._plain = plain
        self._lock = threading.Lock()
        self._next = time.monotonic() + (every_s if first_s is None else first_s)
        self.live = is_interactive() and not quiet
        if self.live:
            from megalite.config.rich_progress import one_line_progress

            self._next = 0.0
            self._progress = one_line_progress()
            self._task = self._progress.add_task(
                "", total=total, completed=int(done), what=escape_control_chars(what), count="", text=""
            )
            _bars.append(self)

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, amount: float) -> None:
        with self._lock:
            self.done += amount
        self._refresh()

    def update(self, done: float, text: str) -> None:
        """Set the amount done, and the text that a terminal shows after it."""
        self.done = done
        self.text = text
        self._refresh()

    def _refresh(self) -> None:
        with self._lock:
            now = time.monotonic()
            if now < self._next:
                return
            self._next = now + (REDRAW_S if self.live else self._every_s)
        if self.live:
            self.draw()
        elif self._plain is not None:
            self._plain(self.done)

    def track(self, things: Iterable[T]) -> Iterator[T]:
        for thing in things:
            yield thing
            self.add(1)

    def draw(self) -> None:
        """Draw the bar if it is the last one, and the terminal does not block."""
        try:
            if _bars[-1:] != [self] or os.tcgetpgrp(sys.stdout.fileno()) != os.getpgrp() or not _takes_output():
                return
            count = f"{self.done:.4g}/{self.total:.4g} {self.unit}".rstrip()
            self._progress.update(self._task, completed=self.done, count=count, text=escape_control_chars(self.text))
            if self._progress.live.is_started:
                self._progress.refresh()
            else:
                sys.stdout.write(ERASE)  # another bar may be there
                self._progress.start()
        except (OSError, ValueError):
            self.close()

    def close(self) -> None:
        """Erase the bar, and show the one before it again."""
        if not self.live:
            return
        self.live = False
        with contextlib.suppress(ValueError):  # another thread may close it at the same time
            _bars.remove(self)
        with contextlib.suppress(OSError, ValueError):
            self._progress.console.quiet = not _takes_output()
            self._progress.stop()
        for bar in _bars[-1:]:
            bar.draw()


def logged_progress(what: str, total: float, unit: str, quiet: bool = False) -> ProgressBar:
    """A bar whose plain form is a line on stdout."""
    plain = lambda done: None if quiet else print_out(f"{what}: {done:.4g} of {total:.4g} {unit}")  # noqa: E731
    return ProgressBar(what, total, unit, quiet=quiet, plain=plain)
