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
from enum import IntEnum
from pathlib import Path
from typing import Any

from megalite.checkpoint.storage.local_storage import is_locked
from megalite.checkpoint.storage.location import is_url
from megalite.checkpoint.storage.storage import checkpoint_dir, steps_in
from megalite.common.safe_open import open_nofollow
from megalite.config.console import print_err
from megalite.config.options import Config
from megalite.config.text_file import read_small_text, regular_opener


def timestamp() -> str:
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")


_STARTED = timestamp()
RUN_LOCK = ".run.lock"  # held by the run in this directory (training/job/restarts.py)
MAX_ROW = 1 << 20  # characters of a row of metrics.jsonl or events.jsonl
LEAST_BLOCK = 1024  # bytes that a small file takes on any disk


class ExitCode(IntEnum):
    """Exit code of pretrain_gpt.py; its name in lower case is `outcome` in status.json."""

    DONE = 0
    CRASH = 1
    USAGE = 2
    PREFLIGHT = 3
    RERUN = 16
    BAD_RESULT = 17
    HANG = 70
    REQUEUE = 75
    INTERRUPTED = 130

    @property
    def outcome(self) -> str:
        return self.name.lower().replace("_", "-")


NOT_BEGUN = (
    ExitCode.USAGE.outcome,
    ExitCode.PREFLIGHT.outcome,
    ExitCode.INTERRUPTED.outcome,
)  # of a start before its first step


def run_dir(config: Config) -> Path:
    """Where a run's files go: a local directory even where checkpoints go to a URL, which cannot be appended to."""
    save = config.checkpoint.save
    if save is not None and is_url(save):
        save = f"runs/{save.rstrip('/').rpartition('/')[2]}"
    return Path(config.log.run_dir or (config.log.name and f"runs/{config.log.name}") or save or "runs/last")


def name_conflict(config: Config) -> list[str]:
    """An error where --name is that of another run, which --load does not continue."""
    name, folder, c = config.log.name, run_dir(config), config.checkpoint
    if name is None or config.train.dry_run or not os.path.exists(folder / "status.json"):
        return []
    if c.load is not None and c.load == c.save:
        return []
    free = next(f"{name}-{n}" for n in itertools.count(2) if not os.path.exists(f"{folder}-{n}"))
    otherwise = f"--load {c.save} to continue it" if c.save else "remove it"
    return [f"name={name!r}: {folder} holds a run already; give --name {free}, or {otherwise}"]


def write_atomically(path: Path, text: str | Iterable[str]) -> None:
    """Write a temporary file and rename it: a reader sees the old text or the new, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.unlink(missing_ok=True)
        with open(temporary, "x", encoding="utf-8") as file:
            file.writelines([text] if isinstance(text, str) else text)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)  # exists only after an error


def checkpoint_dirs(config: Config) -> list[str]:
    """Where a run's checkpoints are, the fastest place first."""
    return [root for root in (config.checkpoint.save_local, config.checkpoint.save) if root is not None]


def newest_checkpoint(config: Config) -> tuple[dict[str, Any], str]:
    """The newest complete checkpoint, as status.json has it and in words. URLs are not asked: they may not answer."""
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
    words = f"see {save}" if all(map(is_url, roots)) else f"none in {save} yet"
    return dict(checkpoint=save if is_url(save) else None, checkpoint_step=None), words


def to_resume(config: Config) -> str:
    """The command for the remaining steps, in words."""
    c = config.checkpoint
    if c.save is None:
        return "from step 1 by the same command; --save DIR keeps what a run has done"
    return "the same command" + ("" if c.load == c.save else f" with --load {c.save}")


def read_status(folder: Path) -> dict[str, Any]:
    """status.json; {} where there is none or it cannot be read."""
    with contextlib.suppress(ValueError, RecursionError):
        status = json.loads(read_small_text(folder / "status.json", "the status of a run"))
        if isinstance(status, dict):
            return status
    return {}


def last_logged_progress(folder: Path) -> dict[str, int]:
    """`step` and `tokens` of the last row of metrics.jsonl, which is newer than a status "running"; {} without rows."""
    last: dict[str, int] = {}
    with contextlib.suppress(OSError, RecursionError):
        for _, row in read_jsonl(folder / "metrics.jsonl"):
            if type(row.get("step")) is int and type(row.get("tokens")) is int:
                last = {"step": row["step"], "tokens": row["tokens"]}
    return last


def current_outcome(folder: Path, status: dict[str, Any]) -> str:
    """The outcome of `status`; "killed" where it is "running" but its lock is free, or without one its process gone."""
    said, pid = str(status.get("outcome", "unknown")), status.get("pid")
    if said != "running":
        return said
    held = is_locked(folder / RUN_LOCK)
    same_machine = status.get("host") == socket.gethostname() and type(pid) is int and sys.platform == "linux"
    return "killed" if held is False or (held is None and same_machine and not Path(f"/proc/{pid}").exists()) else said


def belongs_to_another_run(folder: Path, config: Config, resumes: bool) -> bool:
    """Whether a run that ends before it began leaves the status there alone: it is another run's, which this one does
    not continue. `resumes`: the run was started again after a rank had died."""
    c = config.checkpoint
    return bool(read_status(folder)) and not resumes and (c.load is None or c.load != c.save)


def is_done(folder: Path) -> bool:
    """Whether a run has finished there, whose status a start that is refused or interrupted leaves alone."""
    return read_status(folder).get("outcome") == ExitCode.DONE.outcome


def write_status(
    folder: Path, outcome: str, config: Config, reason: str = "", step: int = 0, tokens: int = 0, resumes: bool = False
) -> None:
    """Write status.json, if there is a folder. `outcome`: of `Exit`, or "running", which is repeated while the run
    trains; without it a run leaves another's status alone. `step`, `tokens`: trained. `resumes`: of `Ranks`."""
    if not folder.is_dir():
        return
    me = dict(rank=0, pid=os.getpid(), host=socket.gethostname(), started=_STARTED)
    before = read_status(folder)
    begun = outcome == "running" or all(before.get(key) == value for key, value in me.items())
    if (
        not begun and outcome != ExitCode.HANG.outcome and belongs_to_another_run(folder, config, resumes)
    ):  # a hang is of a run that began
        return
    if not begun and not resumes and outcome in NOT_BEGUN and is_done(folder):
        return
    if not begun or (not step and outcome != "running"):  # it ended before it had loaded what it continues
        logged = last_logged_progress(folder)
        step, tokens = max(step, logged.get("step", 0)), max(tokens, logged.get("tokens", 0))
    saved, _ = newest_checkpoint(config)
    _write_status(folder, dict(outcome=outcome, step=step, tokens=tokens, **saved, reason=reason, **me))


def finalize_status(
    folder: Path, config: Config, end: tuple[int, str], since: float, resumes: bool = False
) -> dict[str, Any] | None:
    """Complete status.json by the launcher once all ranks have ended, with what rank 0 could not write or did not know.
    `end`: (the first failing exit code, the cause). `since`: their start; an older status is not theirs. Returns the
    status if rank 0 has not said how the run ended."""
    code, cause = end
    path, status = folder / "status.json", read_status(folder)
    if not folder.is_dir() or (path.exists() and not path.is_file()):
        return None
    with contextlib.suppress(OSError):
        if path.stat().st_mtime < since:
            if (code in (ExitCode.USAGE, ExitCode.PREFLIGHT) and not resumes) or belongs_to_another_run(
                folder, config, resumes
            ):
                return None
            if code == ExitCode.INTERRUPTED and not resumes and is_done(folder):
                return None
            status = {}
    outcome, reason = status.get("outcome"), str(status.get("reason"))
    first = {int(e): e.outcome for e in ExitCode}.get(code, ExitCode.CRASH.outcome)
    if outcome in (None, "running"):
        status |= dict(outcome=first, reason=cause or "ended without a message" * (code != 0))
    elif outcome == ExitCode.CRASH.outcome and re.search(r"\brank [1-9]", cause) and code != ExitCode.REQUEUE:
        status |= dict(outcome=first, reason=reason if cause in reason else f"{cause}; rank 0: {reason}")
    else:
        return None
    last = max(
        ({"step": 0, "tokens": 0}, status, last_logged_progress(folder)), key=lambda known: known.get("step", -1)
    )
    about = dict(rank=0, pid=os.getpid(), host=socket.gethostname(), started=_STARTED) | status
    about |= {"step": last["step"], "tokens": last["tokens"]} | newest_checkpoint(config)[0]
    _write_status(folder, about)
    return about if outcome in (None, "running") else None


def _write_status(folder: Path, status: dict[str, Any]) -> None:
    """Replace status.json, or on a full disk overwrite it, which takes no room. Failure at the end is reported."""
    path, status = folder / "status.json", {"outcome": status["outcome"]} | status | {"time": timestamp()}
    try:
        try:
            write_atomically(path, json.dumps(status) + "\n")
        except OSError:
            with open(path, "r+b", buffering=0, opener=open_nofollow) as file:
                room = max(os.fstat(file.fileno()).st_size, LEAST_BLOCK)
                while len(json.dumps(status)) >= room and len(status["reason"]) > 3:
                    status["reason"] = status["reason"][: len(status["reason"]) * 9 // 10 - 3] + "..."
                text = json.dumps(status).ljust(os.fstat(file.fileno()).st_size - 1) + "\n"
                if file.write(text.encode()) < len(text):
                    raise
    except OSError as error:
        if status["outcome"] != "running":
            print_err(f"{path}: {error.strerror}; it does not say how this run ended: {status['outcome']}")


class AppendOnlyFile:
    """Appends whole lines to a file, each in one write, so that processes do not tear each other's lines. Nothing is
    buffered: a failed write is not repeated."""

    def __init__(self, path: Path):
        self.path, self._torn = path, False
        self.file: Any = None

    def write(self, text: str) -> None:
        """Raises OSError, or ValueError where the file was closed."""
        if self.file is not None and os.fstat(self.file.fileno()).st_nlink == 0:  # it was deleted
            self.close()
        if self.file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.file = open(self.path, "ab", buffering=0, opener=open_nofollow)  # noqa: SIM115 (closed in close)
        data = b"\n" * self._torn + text.encode(errors="backslashreplace") + b"\n"
        written = self.file.write(data)
        self._torn = written < len(data)
        if self._torn:
            raise OSError(None, "only part of a line could be written")

    def close(self) -> None:
        if self.file is not None:
            self.file.close()
            self.file = None


class EventLog:
    """Appends a process's events to events.jsonl: time, event, rank (None: the launcher), step and facts. Never raises:
    the first failed write is said on stderr."""

    def __init__(self, folder: Path, rank: int | None = None):
        self.rank, self._file, self._lost = rank, AppendOnlyFile(folder / "events.jsonl"), False

    def add(self, event: str, step: int | None = None, **facts: Any) -> None:
        """`facts`: JSON values; anything else is written as its text."""
        row = {"time": timestamp(), "event": event, "rank": self.rank, "step": step, **facts}
        try:
            self._file.write(json.dumps(row, default=str))
            self._file.close()
        except (OSError, ValueError) as error:
            if not self._lost:
                why = getattr(error, "strerror", None) or error
                print_err(f"WARNING: {self._file.path}: {why}; events are lost there")
            self._lost = True


def read_jsonl(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(line, object) of a file of JSON objects, one by one, as it may be large; without torn lines, and without lines
    of more than MAX_ROW characters, whose end reads like a torn line. Raises OSError."""
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
    """Drop rows of metrics.jsonl beyond `step`, which a resumed run writes again, and torn rows. `validated` False:
    also the losses of validation and test sets at `step` itself."""
    if not path.is_file():
        return

    def stays(row: dict[str, Any]) -> bool:
        at = row.get("step")
        again = at == step and any(key.startswith("val/") for key in row)
        return isinstance(at, int) and at <= step and (validated or not again)

    write_atomically(path, (f"{line}\n" for line, row in read_jsonl(path) if stays(row)))
