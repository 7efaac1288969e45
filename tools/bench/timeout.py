"""A command that is gone when its time is over, its parent is gone or the disk is full; and what it said last.

`run` starts this file as a keeper, in a bare interpreter of its own, and the keeper the command. What the command
starts stays in the keeper's reach even where it leaves its group or its parent (PR_SET_CHILD_SUBREAPER). At the end of
its time every process of it first gets SIGABRT, at which Python tells where it stands (PYTHONFAULTHANDLER), in C too,
then SIGKILL. The keeper ends when its standard input does, so a parent that is killed leaves nothing on the card.
"""

import contextlib
import ctypes
import json
import os
import resource
import select
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

LEAST_FREE = 256 << 20  # bytes of the disk that no command may take from the others
TRACE_S, KILL_S, SLACK_S = 2.0, 5.0, 15.0  # for a last word; for the kernel to end it; for the keeper to tell
LOG_BYTES, LINES, WIDTH = 1 << 20, 60, 400
MARKS = ("Traceback (most recent call last)", "Fatal Python error", "Current thread 0x")
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


def descendants() -> dict[int, str]:
    """Names of the living processes below this one, by id."""
    below, found = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            name, _, rest = stat.read_text(errors="replace").partition(" (")[2].rpartition(") ")
            state, parent = rest.split()[:2]
            below.setdefault(int(parent), []).append((int(stat.parent.name), name, state))
    waiting = [os.getpid()]
    while waiting:
        for pid, name, state in below.get(waiting.pop(), []):
            waiting.append(pid)
            if state not in "ZX":
                found[pid] = name
    return found


def end_all(living: Callable[[], dict[int, str]] = descendants, trace: bool = False, seconds: float = KILL_S) -> str:
    """End what `living` names; who is left after `seconds` (a driver may hold a process for ever). `trace`: each of
    them first says where it is."""
    for number, limit in ((signal.SIGABRT, TRACE_S), (signal.SIGKILL, seconds))[0 if trace else 1 :]:
        until, told = time.monotonic() + limit, set()
        while (left := living()) and time.monotonic() < until:
            for pid in left.keys() - (told if number == signal.SIGABRT else set()):
                told.add(pid)
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, number)
            with contextlib.suppress(ChildProcessError):
                while os.waitpid(-1, os.WNOHANG)[0]:
                    pass
            time.sleep(0.02)
    return ", ".join(f"{name} ({pid})" for pid, name in living().items())


def keep(log: Path, seconds: float, command: list[str], temporary: str) -> dict[str, str]:
    """The keeper's own life: how it ended and who could not be ended."""
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # else exit codes are lost where the caller ignores it
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    least = min(LEAST_FREE, shutil.disk_usage(log.parent).free // 2)
    more = {"TMPDIR": temporary, "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}
    begin, status = time.monotonic(), ""
    with open(log, "wb") as file:
        try:
            child = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=file, stderr=file, env=os.environ | more,
                                     start_new_session=True,
                                     preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL))  # fmt: skip
        except OSError as error:
            return {"status": f"failed (cannot be started: {error})", "stuck": ""}
    while not status and child.poll() is None:
        if select.select([0], [], [], 0.03)[0]:
            status = "its parent is gone"
        elif time.monotonic() - begin > seconds:
            status = "out of time"
        elif min(shutil.disk_usage(folder).free for folder in (log.parent, temporary)) < least:
            status = "stopped: it has filled the disk"
    stuck = end_all(trace=status == "out of time")
    if not status:
        status = "ok" if child.returncode == 0 else f"failed (exit code {child.returncode})"
    return {"status": status, "stuck": stuck}


def run(command: list[str], log: Path, seconds: float, more: dict[str, str] | None = None) -> tuple[str, list[str]]:
    """Status ("ok" or what went wrong) and the telling lines of a command that gets `seconds`; `log` is all it said."""
    words = [sys.executable, "-I", "-S", __file__, str(log), str(seconds), *command]
    environment = {**os.environ, **(more or {})}
    log.unlink(missing_ok=True)  # a link is not written through
    log.touch(exist_ok=False)
    keeper = subprocess.Popen(words, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        out, _ = keeper.stdout.read() if keeper.wait(seconds + SLACK_S) == 0 else b"", None  # type: ignore[union-attr]
    except subprocess.TimeoutExpired:
        out = b""
    finally:
        for end in (keeper.stdin, keeper.stdout):
            end.close()  # type: ignore[union-attr]
        with contextlib.suppress(subprocess.TimeoutExpired):
            keeper.wait(SLACK_S)
        keeper.kill()
    made = json.loads(out) if out else {"status": "failed (its keeper was killed)", "stuck": ""}
    stuck = f"; cannot be ended: {made['stuck']}" if made["stuck"] else ""
    return made["status"] + stuck, telling(shorten(log))


def shorten(log: Path) -> str:
    """Begin and end of what was said, and no more on disk."""
    with open(log, "r+b") as file:
        size = file.seek(0, os.SEEK_END)
        if size > 2 * LOG_BYTES:
            file.seek(size - LOG_BYTES)
            last = file.read()
            file.seek(LOG_BYTES)
            file.write(b"\n... (%d bytes)\n" % (size - 2 * LOG_BYTES) + last)
            file.truncate()
        file.seek(0)
        return file.read().decode("utf-8", errors="replace")


def telling(text: str) -> list[str]:
    """The last lines; from the first traceback on, its middle left out, where it began earlier: with many ranks the
    first one is the cause and the others follow."""
    lines = [line[:WIDTH] for line in text.splitlines() if "<frozen " not in line]
    first = next((n for n, line in enumerate(lines) if any(mark in line for mark in MARKS)), None)
    if first is None or first >= len(lines) - LINES:
        return lines[-LINES:]
    return [*lines[first : first + LINES // 2], "...", *lines[-LINES // 2 :]]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="part-", ignore_cleanup_errors=True) as folder:
        told = keep(Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3:], folder)
    print(json.dumps(told))
