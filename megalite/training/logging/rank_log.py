"""ranks/rank-NNNNN.log in the run directory: each rank's stderr with timestamps, and the stack of a crash in C code.

The console shows only the first failure of each machine; these files have all failures (tools/logs.py).
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

from megalite.common.console import print_err
from megalite.common.safe_open import open_in_run_dir, write_atomically
from megalite.common.text_file import read_ends
from megalite.launch.rank_info import FAILURE_PRINTED, FIRST_FAILURE, RankInfo, read_first_failure

RANK_LOG_DIR = "ranks"
MAX_STACK_LINES = 30
PATIENCE_S = 3.0  # how long to wait until a failed rank has reported its failure


class RankStderr:
    """A sys.stderr that also writes its lines into a file, each with a timestamp.

    Args:
        header: A line that is written before the first one.

    Attributes:
        number: The file descriptor.
    """

    def __init__(self, console: TextIO, path: Path, header: str):
        self.console = console
        self.number = open_in_run_dir(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        self._incomplete_line = f"{header}\n"

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            self.console.write(text)
        self.write_to_file(text)  # after the console, as the disk may hang
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            self.console.flush()

    def write_to_file(self, text: str) -> None:
        """Write only into the file; errors are ignored, because the console has the most important lines."""
        complete, newline, self._incomplete_line = (self._incomplete_line + text).rpartition("\n")
        stamp = datetime.datetime.now().astimezone().isoformat(timespec="milliseconds")
        lines = complete.split("\n") if newline else []
        stamped = "".join(f"{stamp} {line}\n" for line in lines)
        with contextlib.suppress(OSError):
            os.write(self.number, stamped.encode(errors="backslashreplace"))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.console, name)


@contextlib.contextmanager
def rank_log(directory: Path, ranks: RankInfo) -> Iterator[None]:
    """Copy this rank's stderr into its file within the context.

    The file is removed if nothing was written. The context raises no errors of its own.
    """
    path = directory / RANK_LOG_DIR / f"rank-{ranks.rank:05d}.log"
    header = f"rank {ranks.rank} of {ranks.world_size} on {socket.gethostname()}, process {os.getpid()}"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        stderr = RankStderr(sys.stderr, path, header)
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


def crash_stack(directory: Path, cause: str, since: float) -> str:
    """Return the stack of a crash in C code, or "".

    Args:
        cause: The launcher's description of the end; a rank that it names was killed by a signal.
        since: The start of the rank; an older file is not its own.
    """
    match = re.match(r"rank (\d+) ended by signal", cause)
    if match is None:
        return ""
    path = directory / RANK_LOG_DIR / f"rank-{int(match[1]):05d}.log"
    with contextlib.suppress(OSError):
        if path.stat().st_mtime >= since:
            _, title, rest = read_ends(path)[0].rpartition("Fatal Python error")
            return "\n".join((title + rest).splitlines()[:MAX_STACK_LINES]) if title else ""
    return ""


def log_to_rank_file(text: str) -> None:
    """Write `text`, which another rank reports better, only into this rank's file, or on stderr without a file."""
    if isinstance(sys.stderr, RankStderr):
        sys.stderr.write_to_file(text + "\n")
    else:
        print_err(text)


def report_failure_once(ranks: RankInfo, code: int, reason: str, text: str) -> None:
    """Report this rank's failure: on stderr if it is the first of this machine, otherwise only in the rank's file."""
    if claim_first_failure(ranks, code, reason):
        print_err(text)
    else:
        log_to_rank_file(text)
    if ranks.shared_dir is not None:
        with contextlib.suppress(OSError):
            Path(ranks.shared_dir, FAILURE_PRINTED).touch()


def claim_first_failure(ranks: RankInfo, code: int, reason: str) -> bool:
    """Return True if this rank is the first of its machine to fail.

    If it is, the reason is written for the launcher and for torchrun's error table.
    """
    if ranks.shared_dir is None:
        return True
    directory = Path(ranks.shared_dir)
    with contextlib.suppress(OSError):
        try:
            with open(directory / FIRST_FAILURE, "x", encoding="utf-8") as file:
                json.dump({"rank": ranks.rank, "code": int(code), "reason": reason}, file)
        except FileExistsError:
            return False
        torchrun_dir = directory / str(ranks.local_rank)
        if torchrun_dir.is_dir():
            # torchrun shows the error with the earliest full second, so precede ranks that fail because of this one.
            extra_info = {"timestamp": str(int(time.time()) - 1)}
            message = {"message": {"message": reason, "extraInfo": extra_info}}
            write_atomically(torchrun_dir / "error.json", json.dumps(message))
    return True


def first_failure_reason(ranks: RankInfo) -> str | None:
    """Return the reason of the rank that failed first on this machine, if it is known."""
    failure = read_first_failure(Path(ranks.shared_dir)) if ranks.shared_dir else None
    return failure and failure.cause


def wait_for_first_failure(ranks: RankInfo) -> bool:
    """Wait until a rank of this machine has reported its failure; returns False if none does within PATIENCE_S.

    Without a shared directory the result is True.
    """
    deadline = time.monotonic() + PATIENCE_S
    while ranks.shared_dir is not None and not Path(ranks.shared_dir, FAILURE_PRINTED).exists():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True
