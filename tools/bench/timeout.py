"""Run a command with a time limit, and return the decisive lines of its output.

`run` starts this file as a supervisor, in a bare interpreter of its own, and the supervisor starts the command. The
supervisor is the subreaper of all processes below it (PR_SET_CHILD_SUBREAPER), so it reaches them even if they leave
their process group or their parent. It ends the command when its time is over, the disk is full or the parent is gone:
it notices the last by the end of its standard input, so a parent that is killed leaves no process on the GPU. At a
timeout every process first gets SIGABRT, on which Python prints its stack (PYTHONFAULTHANDLER), even inside C code, and
then SIGKILL.
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

MIN_FREE_BYTES = 256 << 20  # disk space that a command must leave for other programs
TRACE_S = 2.0  # for the processes to print their stacks
KILL_S = 5.0  # for the kernel to end them
SLACK_S = 15.0  # for the supervisor to report
LOG_BYTES = 1 << 20  # of each end of a log that is kept
MAX_LINES, MAX_WIDTH = 60, 400  # of the lines that `run` returns
FATAL_ERROR = "Fatal Python error"
TRACEBACK_MARKS = ("Traceback (most recent call last)", FATAL_ERROR, "Current thread 0x")
PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36  # linux/prctl.h


def descendants() -> dict[int, str]:
    """Return the names of the living processes below this one, by process ID."""
    children: dict[int, list[tuple[int, str, str]]] = {}
    living = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            name, _, rest = stat.read_text(errors="replace").partition(" (")[2].rpartition(") ")
            state, parent = rest.split()[:2]
            children.setdefault(int(parent), []).append((int(stat.parent.name), name, state))
    pending = [os.getpid()]
    while pending:
        for pid, name, state in children.get(pending.pop(), []):
            pending.append(pid)
            if state not in "ZX":
                living[pid] = name
    return living


def kill_all(living: Callable[[], dict[int, str]] = descendants, trace: bool = False, seconds: float = KILL_S) -> str:
    """Kill all processes that `living` returns, and name those that remain.

    Args:
        living: returns the names of the processes by process ID, like `descendants`.
        trace: first let every process print its stack.
        seconds: the time after which the remaining processes are given up; a driver may block one forever.

    Returns:
        The remaining processes as "name (pid), ...", or an empty string.
    """
    if trace:
        _send_until_gone(signal.SIGABRT, living, TRACE_S)
    _send_until_gone(signal.SIGKILL, living, seconds)
    return ", ".join(f"{name} ({pid})" for pid, name in living().items())


def _send_until_gone(number: int, living: Callable[[], dict[int, str]], seconds: float) -> None:
    """Send a signal to the processes until none is left or the time is over. Each gets SIGABRT only once."""
    deadline = time.monotonic() + seconds
    signalled: set[int] = set()
    while (remaining := living()) and time.monotonic() < deadline:
        for pid in remaining:
            if number == signal.SIGABRT and pid in signalled:
                continue
            signalled.add(pid)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, number)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        time.sleep(0.02)


def supervise(log: Path, seconds: float, command: list[str], temporary: str) -> dict[str, str]:
    """Run the command as its supervisor.

    Returns:
        `status`, "ok" or the reason of the failure, and `stuck`, the processes that could not be killed.
    """
    libc = ctypes.CDLL(None)
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # exit codes are lost if the caller ignores this signal
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    min_free = min(MIN_FREE_BYTES, shutil.disk_usage(log.parent).free // 2)
    variables = {"TMPDIR": temporary, "PYTHONFAULTHANDLER": "1", "PYTHONUNBUFFERED": "1"}
    start, status = time.monotonic(), ""
    with open(log, "wb") as file:
        try:
            child = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                env=os.environ | variables,
                start_new_session=True,
                preexec_fn=lambda: libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL),
            )
        except OSError as error:
            return {"status": f"failed (cannot be started: {error})", "stuck": ""}
    while not status and child.poll() is None:
        if select.select([0], [], [], 0.03)[0]:
            status = "its parent is gone"
        elif time.monotonic() - start > seconds:
            status = "out of time"
        elif min(shutil.disk_usage(directory).free for directory in (log.parent, temporary)) < min_free:
            status = "stopped: it has filled the disk"
    stuck = kill_all(trace=status == "out of time")
    if not status:
        status = "ok" if child.returncode == 0 else f"failed (exit code {child.returncode})"
    return {"status": status, "stuck": stuck}


def run(
    command: list[str], log: Path, seconds: float, environment: dict[str, str] | None = None
) -> tuple[str, list[str]]:
    """Run a command for at most `seconds`.

    Args:
        command: the program and its arguments.
        log: the file for all output; its middle is cut out if it is long.
        seconds: the time limit.
        environment: variables in addition to those of this process.

    Returns:
        The status, "ok" or the reason of the failure, and the decisive lines of the output (`error_tail`).
    """
    supervisor_command = [sys.executable, "-I", "-S", __file__, str(log), str(seconds), *command]
    log.unlink(missing_ok=True)  # do not write through a link
    log.touch(exist_ok=False)
    supervisor = subprocess.Popen(
        supervisor_command, env={**os.environ, **(environment or {})}, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert supervisor.stdin is not None and supervisor.stdout is not None
    output = b""
    try:
        if supervisor.wait(seconds + SLACK_S) == 0:
            output = supervisor.stdout.read()
    except subprocess.TimeoutExpired:
        pass
    finally:
        supervisor.stdin.close()
        supervisor.stdout.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            supervisor.wait(SLACK_S)
        supervisor.kill()
    result = json.loads(output) if output else {"status": "failed (its supervisor was killed)", "stuck": ""}
    status = result["status"]
    if result["stuck"]:
        status += f"; cannot be killed: {result['stuck']}"
    return status, error_tail(truncate_log(log))


def truncate_log(log: Path) -> str:
    """Cut the middle out of a long log, and return what the file then contains."""
    with open(log, "r+b") as file:
        size = file.seek(0, os.SEEK_END)
        if size > 2 * LOG_BYTES:
            file.seek(size - LOG_BYTES)
            end = file.read()
            file.seek(LOG_BYTES)
            file.write(b"\n... (%d bytes)\n" % (size - 2 * LOG_BYTES) + end)
            file.truncate()
        file.seek(0)
        return file.read().decode("utf-8", errors="replace")


def error_tail(text: str) -> list[str]:
    """Return the last lines of an output, which include the beginning of its first traceback.

    With many ranks the first traceback is the cause, and the others follow from it. If it is too far from the end, the
    lines between are left out.
    """
    lines = [line[:MAX_WIDTH] for line in text.splitlines() if "<frozen " not in line]
    first = next((n for n, line in enumerate(lines) if any(mark in line for mark in TRACEBACK_MARKS)), None)
    if first is None or first >= len(lines) - MAX_LINES:
        return lines[-MAX_LINES:]
    return [*lines[first : first + MAX_LINES // 2], "...", *lines[-MAX_LINES // 2 :]]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="part-", ignore_cleanup_errors=True) as temporary_dir:
        outcome = supervise(Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3:], temporary_dir)
    print(json.dumps(outcome))
