"""status.json: whether a run is running, and how it ended.

torchrun turns every exit code but 0 into 1, so scripts that requeue read the outcome here. Imports no torch.
"""

import contextlib
import json
import os
import re
import socket
import sys
from pathlib import Path
from typing import Any

from megalite.checkpoint.storage.local_storage import is_locked
from megalite.common.console import print_err
from megalite.common.exit_codes import ExitCode
from megalite.common.safe_open import open_nofollow, write_atomically
from megalite.common.text_file import read_small_text
from megalite.config.options import Config
from megalite.training.logging.event_log import read_jsonl, timestamp
from megalite.training.logging.run_dir import RUN_LOCK, newest_checkpoint

_STARTED = timestamp()
MIN_BLOCK = 1024  # bytes that a small file occupies on any disk

# Outcomes of a process that ended before its first step.
NOT_STARTED = (ExitCode.USAGE.outcome, ExitCode.PREFLIGHT.outcome, ExitCode.INTERRUPTED.outcome)


def read_status(directory: Path) -> dict[str, Any]:
    """Return the content of status.json; {} if it does not exist or cannot be read."""
    with contextlib.suppress(ValueError, RecursionError):
        status = json.loads(read_small_text(directory / "status.json", "the status of a run"))
        if isinstance(status, dict):
            return status
    return {}


def last_logged_progress(directory: Path) -> dict[str, int]:
    """Return `step` and `tokens` of the last row of metrics.jsonl, or {} without rows.

    This is newer than the progress in a status with the outcome "running".
    """
    last: dict[str, int] = {}
    with contextlib.suppress(OSError, RecursionError):
        for _, row in read_jsonl(directory / "metrics.jsonl"):
            if type(row.get("step")) is int and type(row.get("tokens")) is int:
                last = {"step": row["step"], "tokens": row["tokens"]}
    return last


def current_outcome(directory: Path, status: dict[str, Any]) -> str:
    """Return the outcome of `status`, or "killed" if it is "running" but the process has ended.

    The process has ended if its lock is free. If the lock cannot be checked, its id is looked up on its own machine.
    """
    outcome, pid = str(status.get("outcome", "unknown")), status.get("pid")
    if outcome != "running":
        return outcome
    locked = is_locked(directory / RUN_LOCK)
    is_local = status.get("host") == socket.gethostname() and type(pid) is int and sys.platform == "linux"
    has_ended = locked is False or (locked is None and is_local and not Path(f"/proc/{pid}").exists())
    return "killed" if has_ended else outcome


def belongs_to_another_run(directory: Path, config: Config, resumes: bool) -> bool:
    """Return True if status.json belongs to a different run that this one does not resume.

    A run that fails before its first step must not overwrite it.

    Args:
        resumes: The run was restarted after a rank had died.
    """
    checkpoint = config.checkpoint
    return (
        bool(read_status(directory)) and not resumes and (checkpoint.load is None or checkpoint.load != checkpoint.save)
    )


def is_done(directory: Path) -> bool:
    """Return True if a run has finished in `directory`; a start that fails or is interrupted keeps its status."""
    return read_status(directory).get("outcome") == ExitCode.DONE.outcome


def write_status(
    directory: Path,
    outcome: str,
    config: Config,
    reason: str = "",
    step: int = 0,
    tokens: int = 0,
    resumes: bool = False,
) -> None:
    """Write status.json, if the directory exists.

    A process that has not written "running" before leaves the status of another run alone.

    Args:
        outcome: The outcome of an ExitCode, or "running", which is written repeatedly during training.
        step, tokens: The progress of training.
        resumes: The run was restarted after a rank had died.
    """
    if not directory.is_dir():
        return
    process = dict(rank=0, pid=os.getpid(), host=socket.gethostname(), started=_STARTED)
    previous = read_status(directory)
    has_started = outcome == "running" or all(previous.get(key) == value for key, value in process.items())
    is_hang = outcome == ExitCode.HANG.outcome  # which only a run that has started can have
    if not has_started and not is_hang and belongs_to_another_run(directory, config, resumes):
        return
    if not has_started and not resumes and outcome in NOT_STARTED and is_done(directory):
        return
    if not has_started or (not step and outcome != "running"):  # it may have ended before it had loaded its progress
        logged = last_logged_progress(directory)
        step, tokens = max(step, logged.get("step", 0)), max(tokens, logged.get("tokens", 0))
    checkpoint, _ = newest_checkpoint(config)
    _write_status(directory, dict(outcome=outcome, step=step, tokens=tokens, **checkpoint, reason=reason, **process))


def finalize_status(
    directory: Path, config: Config, code: int, cause: str, since: float, resumes: bool = False
) -> dict[str, Any] | None:
    """Complete status.json after all ranks have ended; called by the launcher.

    Adds the outcome and reason if rank 0 could not write them or did not know them.

    Args:
        code: The first failing exit code; 0 if no rank has failed.
        cause: The cause of that failure.
        since: The start of the ranks; an older status belongs to other ranks.
        resumes: The ranks were restarted after a rank had died.

    Returns:
        The status if rank 0 had not written how the run ended, otherwise None.
    """
    path, status = directory / "status.json", read_status(directory)
    if not directory.is_dir() or (path.exists() and not path.is_file()):
        return None
    with contextlib.suppress(OSError):
        if path.stat().st_mtime < since:
            failed_at_start = code in (ExitCode.USAGE, ExitCode.PREFLIGHT) and not resumes
            if failed_at_start or belongs_to_another_run(directory, config, resumes):
                return None
            if code == ExitCode.INTERRUPTED and not resumes and is_done(directory):
                return None
            status = {}
    outcome, reason = status.get("outcome"), str(status.get("reason"))
    end_outcome = {int(exit_code): exit_code.outcome for exit_code in ExitCode}.get(code, ExitCode.CRASH.outcome)
    if outcome in (None, "running"):
        default_reason = "" if code == 0 else "ended without a message"
        status |= dict(outcome=end_outcome, reason=cause or default_reason)
    elif outcome == ExitCode.CRASH.outcome and re.search(r"\brank [1-9]", cause) and code != ExitCode.REQUEUE:
        status |= dict(outcome=end_outcome, reason=reason if cause in reason else f"{cause}; rank 0: {reason}")
    else:
        return None
    candidates = ({"step": 0, "tokens": 0}, status, last_logged_progress(directory))
    last = max(candidates, key=lambda progress: progress.get("step", -1))
    final = dict(rank=0, pid=os.getpid(), host=socket.gethostname(), started=_STARTED) | status
    final |= {"step": last["step"], "tokens": last["tokens"]} | newest_checkpoint(config)[0]
    _write_status(directory, final)
    return final if outcome in (None, "running") else None


def _write_status(directory: Path, status: dict[str, Any]) -> None:
    """Replace status.json, or overwrite it in place if the disk is full.

    A failure is reported unless the outcome is "running".
    """
    path, status = directory / "status.json", {"outcome": status["outcome"]} | status | {"time": timestamp()}
    try:
        try:
            write_atomically(path, json.dumps(status) + "\n")
        except OSError:
            if not os.path.lexists(path):  # there is nothing to overwrite, and the first error says why
                raise
            with open(path, "r+b", buffering=0, opener=open_nofollow) as file:
                capacity = max(os.fstat(file.fileno()).st_size, MIN_BLOCK)
                while len(json.dumps(status)) >= capacity and len(status["reason"]) > 3:
                    status["reason"] = status["reason"][: len(status["reason"]) * 9 // 10 - 3] + "..."
                text = json.dumps(status).ljust(os.fstat(file.fileno()).st_size - 1) + "\n"
                if file.write(text.encode()) < len(text):
                    raise
    except OSError as error:
        if status["outcome"] != "running":
            print_err(f"{path}: {error.strerror}; it lacks the outcome of this run: {status['outcome']}")
