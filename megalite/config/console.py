"""stdout and stderr, which may end before the program does, and the bar at the bottom of a terminal.

    show, complain   a line on stdout, on stderr
    Bar              how far something long is: rich.progress, one line that other lines scroll above

A bar is for people who watch: not where stdout is no terminal, with NO_COLOR or TERM=dumb, or under a launcher, which
collects what ranks say; there its lines of text come now and then. It is drawn by whoever does the work, at most
four times a second, and the cursor stays as it is: no thread, and nothing to put right where a run is killed.
Nothing here raises for what the console does.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import re
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from megalite.config.environment import wants_plain_lines
from megalite.config.packages import CODE, MissingPackage

T = TypeVar("T")
ERASE = "\r\x1b[2K"  # this line of the terminal
STEERS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")  # also the direction
EVERY_S = 0.25
OTHERS = 20 + 8 + 4  # columns of the bar, the time that is left, and what is between
_bars: list[Bar] = []  # those on a terminal, of this process; the last one is shown


def let_go_of_console() -> None:
    """What cannot be written there any more, as on a full disk, is no failure of the run: Python tries again at its
    end, and would make it one (exit code 120, of a rank 1)."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (AttributeError, ValueError):  # there is none, or it was closed before
            continue
        except OSError:
            with contextlib.suppress(OSError, ValueError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def as_command(run: Callable[[], int], prints: bool = True) -> int:
    """The exit code of a program: 130 after Ctrl-C, that of SIGPIPE where whoever reads its output has enough, as head
    has, 1 where a disk is full that it writes to, 3 without a package that it needs. `prints`: what it prints is what
    it is for; it is lost else."""
    try:
        code = run()
        if prints and sys.stdout is not None:
            sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        os._exit(130)
    except BrokenPipeError:
        stdout = select.poll()
        stdout.register(1, 0)
        if stdout.poll(0):
            return 128 + signal.SIGPIPE
        raise
    except MissingPackage as error:
        complain(f"{os.path.basename(sys.argv[0])}: {error}")
        return CODE
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        complain(f"{error}: what was printed or written is not whole; make room")
        return 1
    finally:
        let_go_of_console()


def watched() -> bool:
    """Whether somebody looks at stdout as it is written."""
    try:
        return not wants_plain_lines() and sys.stdout.isatty()
    except (AttributeError, ValueError):
        return False


def printable(text: str) -> str:
    """Text of a file, for a terminal: what would steer it, as Python's escapes."""
    return STEERS.sub(lambda c: ascii(c[0])[1:-1], text)


def show(text: str) -> None:
    """On stdout while that can be written: its reader may be gone, or its disk be full, which ends no run."""
    try:
        print(ERASE * watched() + printable(text) + "\n", end="", flush=True)  # one write: ranks share it
        for bar in _bars[-1:]:  # there may be none when it is looked for again: other threads close some
            bar.draw(again=True)
    except (OSError, ValueError):
        let_go_of_console()


def complain(text: str) -> None:
    """On stderr, where that can be written: its disk may be the one that is full."""
    with contextlib.suppress(OSError, ValueError):
        if watched():  # the bar, of this rank or another
            sys.stdout.write(ERASE)
            sys.stdout.flush()
    with contextlib.suppress(OSError, ValueError):
        sys.stderr.write(printable(text) + "\n")  # at once: other ranks write there, too
        sys.stderr.flush()


class Bar:
    """How much of `total` is done: floats in `unit`. Where nobody watches, `plain` tells what is done: `first_s` after
    the begin, then every `every_s` seconds; without one there is nothing to tell. `quiet`: somebody else shows it.

    `add` and `at` may be called from any thread. A bar that is not closed lies over what is shown next.
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
        self.what, self.total, self.unit, self.done, self.text = what, total, unit, done, ""
        self._every_s, self._plain, self._lock = every_s, plain, threading.Lock()
        self._next = time.monotonic() + (every_s if first_s is None else first_s)
        self.live = watched() and not quiet
        if self.live:
            self._next, self._progress, self._drawn = 0.0, _rich_progress(), ""
            self._task = self._progress.add_task(what, total=total, completed=done, count="", more="")
            _bars.append(self)

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def add(self, amount: float) -> None:
        with self._lock:
            self.done += amount
        self._tell()

    def at(self, done: float, text: str) -> None:
        """`text`: what else there is to say, on a terminal."""
        self.done, self.text = done, text
        self._tell()

    def _tell(self) -> None:
        with self._lock:
            if (now := time.monotonic()) < self._next:
                return
            self._next = now + (EVERY_S if self.live else self._every_s)
        if self.live:
            self.draw()
        elif self._plain is not None:
            self._plain(self.done)

    def each(self, things: Iterable[T]) -> Iterator[T]:
        for one in things:
            yield one
            self.add(1)

    def draw(self, again: bool = False) -> None:
        """If it is the one that is shown, and the terminal takes it at once: one that is stopped holds up nobody.
        `again`: as it was; a new line takes 0.8 ms to make."""
        try:
            number = sys.stdout.fileno()
            in_front = _bars[-1:] == [self] and os.tcgetpgrp(number) == os.getpgrp()
            if not in_front or not select.select([], [number], [], 0)[1]:
                return
            if not again:
                self._drawn = self._line(os.get_terminal_size(number).columns)
            sys.stdout.write(ERASE + self._drawn)
            sys.stdout.flush()
        except (OSError, ValueError):
            self.close()

    def _line(self, columns: int) -> str:
        from rich.console import Console

        count = f"{self.done:.4g}/{self.total:.4g} {self.unit}".rstrip()
        width = (columns or 80) - 1
        more = self.text[: max(0, width - len(self.what) - len(count) - OTHERS)]
        self._progress.update(self._task, completed=self.done, count=count, more=more)
        drawn = Console(file=io.StringIO(), force_terminal=True, width=width)
        drawn.print(self._progress.make_tasks_table(self._progress.tasks), end="")
        return drawn.file.getvalue().partition("\n")[0]  # type: ignore[attr-defined]

    def close(self) -> None:
        """Its line goes; that of the bar before it comes back."""
        if not self.live:
            return
        self.live = False
        with contextlib.suppress(ValueError):  # another thread closes it, too
            _bars.remove(self)
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.write(ERASE)
            sys.stdout.flush()
        for bar in _bars[-1:]:
            bar.draw()


def _rich_progress() -> Any:
    """Never started: it only makes the line, and knows the time that is left."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

    def text(field: str) -> TextColumn:
        return TextColumn("{task." + field + "}", markup=False)

    parts = (text("description"), BarColumn(20), text("fields[count]"), text("fields[more]"), TimeRemainingColumn())
    return Progress(*parts, console=Console(file=io.StringIO()), auto_refresh=False, speed_estimate_period=600.0)


def told(what: str, total: float, unit: str, quiet: bool = False, every_s: float = 10.0) -> Bar:
    """A bar whose plain form is a line on stdout."""
    plain = lambda done: None if quiet else show(f"{what}: {done:.4g} of {total:.4g} {unit}")  # noqa: E731
    return Bar(what, total, unit, quiet=quiet, every_s=every_s, plain=plain)
