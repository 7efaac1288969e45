"""Lines on stdout (`print_out`) and stderr (`print_err`), and a progress bar at the bottom of a terminal.

If stdout is not a terminal, with NO_COLOR or TERM=dumb, and under a launcher, which collects the output of ranks, a bar
prints a plain line now and then instead. The bar is drawn by rich, in the thread that does the work, at most four times
a second. It never hides the cursor, so a killed run leaves nothing to restore.

No function of this module raises if output cannot be written.
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

from megalite.common.environment import wants_plain_output

T = TypeVar("T")
ERASE = "\r\x1b[2K"  # erases the current line of a terminal
_CONTROL_CHARS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
MAX_LINE_CHARACTERS = 2000  # of a line on stderr
MAX_ERROR_CHARACTERS = 30_000  # characters of all lines that one call prints on stderr
REDRAW_S = 0.25  # minimum time between two drawings of a bar
_bars: "list[ProgressBar]" = []  # open bars of this process on its terminal; only the last one is shown


def discard_unwritable_output() -> None:
    """Discard buffered output that cannot be written, for example on a full disk.

    Python would try again to write it at exit, and the failure would change the exit code (120; 1 for a rank).
    """
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, ValueError):  # there is no such stream, or it is closed
            continue
        except OSError:
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def shortened(text: str, max_length: int = MAX_LINE_CHARACTERS) -> str:
    """Return `text` with its middle cut out if it is longer than `max_length` characters."""
    if len(text) <= max_length:
        return text
    return f"{text[: max_length * 2 // 3]} ... ({len(text):,} characters) ... {text[len(text) - max_length // 3 :]}"


def is_interactive() -> bool:
    """Return True if stdout is a terminal that takes more than plain lines."""
    try:
        return not wants_plain_output() and sys.stdout.isatty()
    except (AttributeError, ValueError):
        return False


def _takes_output() -> bool:
    """Return True if a write to stdout would not block, as it does after Ctrl-S. Raises OSError if stdout is gone."""
    return bool(select.select([], [sys.stdout.fileno()], [], 0)[1])


def width_of_terminal() -> int | None:
    """Return the number of columns if stdout is a terminal with a known width, otherwise None."""
    try:
        return os.get_terminal_size(sys.stdout.fileno()).columns or None
    except (AttributeError, OSError, ValueError):
        return None


def escape_control_chars(text: str) -> str:
    """Return the text with control characters replaced by Python's escapes, so that it is safe on a terminal."""
    return _CONTROL_CHARS.sub(lambda c: ascii(c[0])[1:-1], text)


@cache
def _commands() -> dict[str, str]:
    """Return file of a program in a clone -> the command of `megalite` that runs it."""
    table = tomllib.loads((Path(__file__).resolve().parent.parent / "commands.toml").read_text("utf-8"))
    return {f"{module.replace('.', '/')}.py": f"megalite {name}" for name, (module, _) in table.items() if module}


def as_commands(text: str) -> str:
    """Replace the files of programs in a text by the commands of `megalite` that run them.

    A wheel, unlike a clone, does not have the files.
    """
    for file, command in _commands().items():
        path, name = re.escape(file), re.escape(file.rpartition("/")[2])
        text = re.sub(rf"(torchrun .*){path}", rf"\1-m {command}", text)
        text = re.sub(rf"(?<![\w/.-])(python )?{path}(?!\w)", command, text)
        text = re.sub(rf"^{name}: ", f"{command}: ", text, flags=re.MULTILINE)
    return text


def as_typed(text: str) -> str:
    """Name the programs in a text in the way this one was started: by their files, or as commands of `megalite`."""
    return as_commands(text) if sys.argv[:1] and sys.argv[0].startswith("megalite ") else text


def print_out(text: str) -> None:
    """Print a line on stdout. Ignores errors, so that a closed pipe or a full disk does not end a run."""
    erase = ERASE if is_interactive() else ""
    try:
        # a single write, because ranks share stdout
        print(f"{erase}{escape_control_chars(as_typed(text))}\n", end="", flush=True)
        for bar in _bars[-1:]:  # a slice, because another thread may close the last bar
            bar.draw()
    except (OSError, ValueError):
        discard_unwritable_output()


def print_err(text: str) -> None:
    """Print one or several lines on stderr, shortened if they are very long. Ignores errors."""
    text = "\n".join(shortened(line) for line in shortened(text, MAX_ERROR_CHARACTERS).split("\n"))
    with contextlib.suppress(OSError, ValueError):
        if is_interactive():  # erase the bar of this rank or another one
            sys.stdout.write(ERASE)
            sys.stdout.flush()
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(escape_control_chars(as_typed(text)) + "\n")  # a single write, because ranks share stderr
        sys.stderr.flush()


class ProgressBar(contextlib.AbstractContextManager["ProgressBar"]):
    """Progress out of `total`, in `unit`: a bar at the bottom of a terminal, or a call of `plain` now and then.

    `add` and `update` may be called from any thread.

    Args:
        what: the name of the work, shown before the bar.
        done: the part of `total` that is done at the start.
        quiet: show no bar on a terminal, because another rank does.
        every_s: the time between calls of `plain`.
        first_s: the time until the first call of `plain`; by default `every_s`.
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
            from megalite.common.rich_progress import one_line_progress

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

    def track(self, items: Iterable[T]) -> Iterator[T]:
        """Yield the items; each adds 1 when the next one is requested."""
        for item in items:
            yield item
            self.add(1)

    def draw(self) -> None:
        """Draw the bar if it is the last one, this process is in the foreground, and the terminal does not block."""
        try:
            if _bars[-1:] != [self] or os.tcgetpgrp(sys.stdout.fileno()) != os.getpgrp() or not _takes_output():
                return
            count = f"{self.done:.4g}/{self.total:.4g} {self.unit}".rstrip()
            self._progress.update(self._task, completed=self.done, count=count, text=escape_control_chars(self.text))
            if self._progress.live.is_started:
                self._progress.refresh()
            else:
                sys.stdout.write(ERASE)  # another bar may be shown
                self._progress.start()
        except (OSError, ValueError):
            self.close()

    def close(self) -> None:
        """Erase the bar and redraw the one before it."""
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
    """Return a progress bar that prints a line on stdout every 10 s if stdout is not a terminal."""

    def print_line(done: float) -> None:
        if not quiet:
            print_out(f"{what}: {done:.4g} of {total:.4g} {unit}")

    return ProgressBar(what, total, unit, quiet=quiet, plain=print_line)
