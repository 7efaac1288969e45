"""The run directory and the exit codes.

    run_config.toml   starts the same run again
    log.txt           the lines of the console
    metrics.jsonl     one JSON object per log line and evaluation
    status.json       how the run ended; torchrun turns every exit code but 0 into 1, so scripts that requeue read this
    events.jsonl      one JSON object per other event, of launcher and ranks

Imports no torch.
"""

import contextlib
import datetime
import itertools
import json
import os
import re
import socket
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from megalite.checkpoint.storage.local_storage import is_locked
from megalite.checkpoint.storage.location import is_url
from megalite.checkpoint.storage.storage import checkpoint_dir, steps_in
from megalite.common.console import print_err
from megalite.common.exit_codes import ExitCode
from megalite.common.safe_open import open_nofollow
from megalite.common.text_file import read_small_text, regular_opener
from megalite.config.options import Config


def timestamp() -> str:
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")


_STARTED = timestamp()
RUN_LOCK = ".run.lock"  # locked by the run in this directory (training/job/restarts.py)
MAX_ROW = 1 << 20  # characters of a row of metrics.jsonl or events.jsonl
MIN_BLOCK = 1024  # bytes that a small file occupies on any disk


# Outcomes of a process that ended before its first step.
NOT_STARTED = (ExitCode.USAGE.outcome, ExitCode.PREFLIGHT.outcome, ExitCode.INTERRUPTED.outcome)


def run_dir(config: Config) -> Path:
    """Return the run directory; it is local even if checkpoints go to a URL, because URLs cannot be appended to."""
    save = config.checkpoint.save
    if save is not None and is_url(save):
        save = f"runs/{save.rstrip('/').rpartition('/')[2]}"
    return Path(config.log.run_dir or (config.log.name and f"runs/{config.log.name}") or save or "runs/last")


def name_conflict(config: Config) -> list[str]:
    """Return an error if --name is the name of another run that --load does not resume, else []."""
    name, directory, checkpoint = config.log.name, run_dir(config), config.checkpoint
    if name is None or config.train.dry_run or not os.path.exists(directory / "status.json"):
        return []
    if checkpoint.load is not None and checkpoint.load == checkpoint.save:
        return []
    free_name = next(f"{name}-{n}" for n in itertools.count(2) if not os.path.exists(f"{directory}-{n}"))
    alternative = f"--load {checkpoint.save} to continue it" if checkpoint.save else "remove it"
    return [f"name={name!r}: {directory} holds a run already; give --name {free_name}, or {alternative}"]


def write_atomically(path: Path, text: str | Iterable[str]) -> None:
    """Write a temporary file and rename it, so that a reader sees either the old or the new text."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.unlink(missing_ok=True)
        with open(temporary, "x", encoding="utf-8") as file:
            file.writelines([text] if isinstance(text, str) else text)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)  # exists only after an error


def checkpoint_dirs(config: Config) -> list[str]:
    """Return the directories of a run's checkpoints, the fastest first."""
    return [root for root in (config.checkpoint.save_local, config.checkpoint.save) if root is not None]


def newest_checkpoint(config: Config) -> tuple[dict[str, Any], str]:
    """Return the newest complete checkpoint, as (fields of status.json, text); URLs are not accessed.

    A URL may not answer, so its text refers the user to it.
    """
    save, roots = config.checkpoint.save, checkpoint_dirs(config)
    if save is None:
        return dict(checkpoint=None, checkpoint_step=None), "none, there is no --save"
    try:
        saved = [(step, root) for root in roots if not is_url(root) for step in steps_in(root)]
        saved = [(step, root) for step, root in saved if Path(str(checkpoint_dir(root, step)), "COMPLETE").is_file()]
    except OSError as error:
        return dict(checkpoint=save, checkpoint_step=None), f"{save} cannot be read: {error.strerror}"
    if saved:
        step, root = max(saved)
        return dict(checkpoint=root, checkpoint_step=step), str(checkpoint_dir(root, step))
    text = f"see {save}" if all(map(is_url, roots)) else f"none in {save} yet"
    return dict(checkpoint=save if is_url(save) else None, checkpoint_step=None), text


def to_resume(config: Config) -> str:
    """Describe the command that trains the remaining steps."""
    checkpoint = config.checkpoint
    if checkpoint.save is None:
        return "from step 1 by the same command; --save DIR keeps what a run has done"
    if checkpoint.load == checkpoint.save:
        return "the same command"
    return f"the same command with --load {checkpoint.save}"


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
    directory: Path, config: Config, end: tuple[int, str], since: float, resumes: bool = False
) -> dict[str, Any] | None:
    """Complete status.json after all ranks have ended; called by the launcher.

    Adds the outcome and reason if rank 0 could not write them or did not know them.

    Args:
        end: (the first failing exit code, its cause).
        since: The start of the ranks; an older status belongs to other ranks.
        resumes: The ranks were restarted after a rank had died.

    Returns:
        The status if rank 0 had not written how the run ended, otherwise None.
    """
    code, cause = end
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
            with open(path, "r+b", buffering=0, opener=open_nofollow) as file:
                capacity = max(os.fstat(file.fileno()).st_size, MIN_BLOCK)
                while len(json.dumps(status)) >= capacity and len(status["reason"]) > 3:
                    status["reason"] = status["reason"][: len(status["reason"]) * 9 // 10 - 3] + "..."
                text = json.dumps(status).ljust(os.fstat(file.fileno()).st_size - 1) + "\n"
                if file.write(text.encode()) < len(text):
                    raise
    except OSError as error:
        if status["outcome"] != "running":
            print_err(f"{path}: {error.strerror}; it does not say how this run ended: {status['outcome']}")


class AppendOnlyFile:
    """A file to which full lines are appended, each in one write, so that processes do not mix their lines.

    Nothing is buffered, so a failed write is not repeated.
    """

    def __init__(self, path: Path):
        self.path = path
        self.file: Any = None
        self._is_torn = False  # the last line was written only partly

    def write(self, text: str) -> None:
        """Append a line; raises OSError, or ValueError if the underlying file was closed by someone else."""
        if self.file is not None and os.fstat(self.file.fileno()).st_nlink == 0:  # it was deleted
            self.close()
        if self.file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.file = open(self.path, "ab", buffering=0, opener=open_nofollow)  # noqa: SIM115 (closed in close)
        data = text.encode(errors="backslashreplace") + b"\n"
        if self._is_torn:
            data = b"\n" + data
        written = self.file.write(data)
        self._is_torn = written < len(data)
        if self._is_torn:
            raise OSError(None, "only part of a line could be written")

    def close(self) -> None:
        """Close the file; the next write opens it again."""
        if self.file is not None:
            self.file.close()
            self.file = None


class EventLog:
    """A process's events, appended to events.jsonl: time, event, rank (None: the launcher), step and facts.

    It never raises; the first failed write is reported on stderr.
    """

    def __init__(self, directory: Path, rank: int | None = None):
        self.rank = rank
        self._file = AppendOnlyFile(directory / "events.jsonl")
        self._has_failed = False

    def add(self, event: str, step: int | None = None, **facts: Any) -> None:
        """Append an event; `facts` are JSON values, and other types are written as their text."""
        row = {"time": timestamp(), "event": event, "rank": self.rank, "step": step, **facts}
        try:
            self._file.write(json.dumps(row, default=str))
            self._file.close()
        except (OSError, ValueError) as error:
            if not self._has_failed:
                reason = getattr(error, "strerror", None) or error
                print_err(f"WARNING: {self._file.path}: {reason}; events are lost there")
            self._has_failed = True


def read_jsonl(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield (line, object) for each line of a file of JSON objects, which may be large; raises OSError.

    Incomplete lines are skipped, and so are lines of more than MAX_ROW characters.
    """
    if not path.is_file():  # reading a pipe or a device may never end
        return
    with open(path, encoding="utf-8", errors="replace", newline="\n", opener=regular_opener) as lines:
        for line in iter(lambda: lines.readline(MAX_ROW), ""):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError):
                continue
            if isinstance(row, dict):
                yield line.rstrip("\n"), row


def truncate_metrics_after(path: Path, step: int, validated: bool = True) -> None:
    """Drop rows of metrics.jsonl after `step`, which a resumed run will write again, and incomplete rows.

    Args:
        validated: If False, the losses of validation and test sets at `step` itself are dropped too.
    """
    if not path.is_file():
        return

    def is_kept(row: dict[str, Any]) -> bool:
        row_step = row.get("step")
        is_evaluation = row_step == step and any(key.startswith("val/") for key in row)
        return isinstance(row_step, int) and row_step <= step and (validated or not is_evaluation)

    write_atomically(path, (f"{line}\n" for line, row in read_jsonl(path) if is_kept(row)))
