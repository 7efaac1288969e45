"""ranks/rank-NNNNN.log in the run directory: each rank's stderr with times, and the stack of a crash in C code.

The console gets only the first failure of each machine; these files have all of them (tools/logs.py).
"""

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

from megalite.common.safe_open import open_in_run_dir
from megalite.config.console import print_err
from megalite.config.text_file import read_ends
from megalite.launch.rank_info import FAILURE_PRINTED, FIRST_FAILURE, RankInfo, read_first_failure
from megalite.training.logging.run_dir import write_atomically

RANK_LOG_DIR, MOST_LINES = "ranks", 30
PATIENCE_S = 3.0  # how long to wait for a failed rank to say why


class RankStderr:
    """A sys.stderr whose lines also go into the file, with the time before each."""

    def __init__(self, console: TextIO, path: Path, who: str):
        self.console, self._rest = console, f"{who}\n"  # `who` is written with the first line
        self.number = open_in_run_dir(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self.console.write(text)
        self.write_to_file(text)  # after the console, as the disk may hang
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self.console.flush()

    def write_to_file(self, text: str) -> None:
        """Write into the file alone; errors are ignored, as the console has what counts."""
        whole, end, self._rest = (self._rest + text).rpartition("\n")
        stamp = datetime.datetime.now().astimezone().isoformat(timespec="milliseconds")
        lines = "".join(f"{stamp} {line}\n" for line in whole.split("\n") if end)
        with contextlib.suppress(OSError):
            os.write(self.number, lines.encode(errors="backslashreplace"))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.console, name)


@contextlib.contextmanager
def rank_log(folder: Path, ranks: RankInfo) -> Iterator[None]:
    """Copies this rank's stderr into its file, which is removed if it stays empty. Never raises by itself."""
    path = folder / RANK_LOG_DIR / f"rank-{ranks.rank:05d}.log"
    who = f"rank {ranks.rank} of {ranks.world_size} on {socket.gethostname()}, process {os.getpid()}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        stderr = RankStderr(sys.stderr, path, who)
    except OSError:
        yield
        return
    faulthandler.enable(stderr.number)
    try:
        with contextlib.redirect_stderr(stderr):
            yield
    finally:
        faulthandler.disable()
        with contextlib.suppress(OSError):
            if os.fstat(stderr.number).st_size == 0:
                path.unlink()
                path.parent.rmdir()  # succeeds if no other file is left
        os.close(stderr.number)


def crash_stack(folder: Path, cause: str, since: float) -> str:
    """The stack of a crash in C code of the rank that `cause` names, or "". `since`: the rank's start."""
    named = re.match(r"rank (\d+) ended by signal", cause)
    with contextlib.suppress(OSError):
        if named and (path := folder / RANK_LOG_DIR / f"rank-{int(named[1]):05d}.log").stat().st_mtime >= since:
            _, begin, rest = read_ends(path)[0].rpartition("Fatal Python error")
            return "\n".join((begin + rest).splitlines()[:MOST_LINES]) if begin else ""
    return ""


def log_to_rank_file(text: str) -> None:
    """Write what another rank reports better into this rank's file alone, or on stderr where there is no file."""
    if isinstance(sys.stderr, RankStderr):
        sys.stderr.write_to_file(text + "\n")
    else:
        print_err(text)


def report_failure_once(ranks: RankInfo, code: int, reason: str, text: str) -> None:
    """Report this rank's failure: on stderr if no rank of this machine has failed before."""
    (print_err if claim_first_failure(ranks, code, reason) else log_to_rank_file)(text)
    if ranks.shared_dir is not None:
        with contextlib.suppress(OSError):
            Path(ranks.shared_dir, FAILURE_PRINTED).touch()


def claim_first_failure(ranks: RankInfo, code: int, reason: str) -> bool:
    """Whether this rank fails first on its machine; if so, leave the reason for the launcher and torchrun's table."""
    if ranks.shared_dir is None:
        return True
    folder = Path(ranks.shared_dir)
    with contextlib.suppress(OSError):
        try:
            with open(folder / FIRST_FAILURE, "x", encoding="utf-8") as file:
                json.dump({"rank": ranks.rank, "code": int(code), "reason": reason}, file)
        except FileExistsError:
            return False
        if (own := folder / str(ranks.local_rank)).is_dir():
            # torchrun shows the earliest whole second first: be before ranks that fail because of this one
            extra = {"timestamp": str(int(time.time()) - 1)}
            write_atomically(own / "error.json", json.dumps({"message": {"message": reason, "extraInfo": extra}}))
    return True


def first_failure_reason(ranks: RankInfo) -> str | None:
    """The reason of the rank that failed first on this machine."""
    first = read_first_failure(Path(ranks.shared_dir)) if ranks.shared_dir else None
    return first and first[1]


def wait_for_first_failure(ranks: RankInfo) -> bool:
    """Whether a rank of this machine has said why it failed, or does so soon; True where that is unknown."""
    deadline = time.monotonic() + PATIENCE_S
    while ranks.shared_dir is not None and not Path(ranks.shared_dir, FAILURE_PRINTED).exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
