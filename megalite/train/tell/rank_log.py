"""ranks/rank-NNNNN.log of the run directory: what each rank said on stderr, with the time, and where C code ended it.

Every rank writes its own file, so that what ends a run of many ranks can be found (tools/logs.py), while the console
hears only the first that failed on each machine.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import json
import os
import re
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, TextIO

from megalite.config.console import complain
from megalite.config.own_file import inner_opener
from megalite.parallel.launch import FIRST_FAILURE, SAID, Ranks, read_first_failure
from megalite.train.tell.run_dir import write_atomically

FOLDER, MOST_LINES = "ranks", 30
PATIENCE_S = 3.0  # with a rank that has failed and is to say why


class RankStderr:
    """A sys.stderr whose lines also go into the file, each with the time before it."""

    def __init__(self, console: TextIO, path: Path, who: str):
        self.console, self._rest = console, f"{who}\n"  # before the first line
        self.number = inner_opener(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self.console.write(text)
        self.aside(text)  # last: the disk may hang
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self.console.flush()

    def aside(self, text: str) -> None:
        """Into the file alone. A full disk is not told: the console has what counts."""
        whole, end, self._rest = (self._rest + text).rpartition("\n")
        stamp = datetime.datetime.now().astimezone().isoformat(timespec="milliseconds")
        lines = "".join(f"{stamp} {line}\n" for line in whole.split("\n") if end)
        with contextlib.suppress(OSError):
            os.write(self.number, lines.encode(errors="backslashreplace"))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.console, name)


@contextlib.contextmanager
def rank_log(folder: Path, ranks: Ranks) -> Iterator[None]:
    """While inside, this rank's stderr has its file, which goes again if nothing was said. Never raises by itself."""
    path, console = folder / FOLDER / f"rank-{ranks.rank:05d}.log", sys.stderr
    who = f"rank {ranks.rank} of {ranks.world} on {socket.gethostname()}, process {os.getpid()}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        stderr = RankStderr(console, path, who)
    except OSError:
        yield
        return
    faulthandler.enable(stderr.number)
    sys.stderr = stderr  # type: ignore[assignment]
    try:
        yield
    finally:
        sys.stderr = console
        faulthandler.disable()
        with contextlib.suppress(OSError):
            if os.fstat(stderr.number).st_size == 0:
                path.unlink()
                path.parent.rmdir()  # the last one does
        os.close(stderr.number)


def stack_of(folder: Path, cause: str, since: float) -> str:
    """Where C code ended the rank that `cause` begins with, as its file has it; "" where it has not. `since`: its
    start."""
    found = re.match(r"rank (\d+) ended by signal", cause)
    with contextlib.suppress(OSError):
        if found and (path := folder / FOLDER / f"rank-{int(found[1]):05d}.log").stat().st_mtime >= since:
            _, begin, rest = path.read_text("utf-8", "replace").rpartition("Fatal Python error")
            return "\n".join((begin + rest).splitlines()[:MOST_LINES]) if begin else ""
    return ""


def complain_aside(text: str) -> None:
    """Of what others tell better: into this rank's file, on stderr where there is none."""
    if isinstance(sys.stderr, RankStderr):
        sys.stderr.aside(text + "\n")
    else:
        complain(text)


def complain_of(ranks: Ranks, code: int, reason: str, text: str) -> None:
    """Of this rank's failure: on stderr if no rank of this machine has failed before."""
    (complain if fails_first(ranks, code, reason) else complain_aside)(text)
    if ranks.shared is not None:
        with contextlib.suppress(OSError):
            Path(ranks.shared, SAID).touch()


def fails_first(ranks: Ranks, code: int, reason: str) -> bool:
    """This rank's word is left for the launcher, and for the table that torchrun prints."""
    if ranks.shared is None:
        return True
    folder = Path(ranks.shared)
    try:
        with open(folder / FIRST_FAILURE, "x", encoding="utf-8") as file:
            json.dump({"rank": ranks.rank, "code": int(code), "reason": reason}, file)
        if (own := folder / str(ranks.local_rank)).is_dir():
            # of whole seconds the earliest is first in torchrun's table: before those that this rank takes with it
            more = {"extraInfo": {"timestamp": str(int(time.time()) - 1)}}
            write_atomically(own / "error.json", json.dumps({"message": {"message": reason, **more}}))
    except FileExistsError:
        return False
    except OSError:
        pass
    return True


def told_first(ranks: Ranks) -> str | None:
    """What the rank that failed first on this machine has left."""
    first = read_first_failure(Path(ranks.shared)) if ranks.shared else None
    return first and first[1]


def wait_until_told(ranks: Ranks) -> bool:
    """Whether a rank of this machine has said why it failed, or does so soon; True where that cannot be seen."""
    deadline = time.monotonic() + PATIENCE_S
    while ranks.shared is not None and not Path(ranks.shared, SAID).exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
