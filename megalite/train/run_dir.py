"""The run directory and the exit codes: what is left of a run when its process is gone.

    run_config.toml   makes the same run again
    log.txt           what the console showed
    metrics.jsonl     one JSON object per log line and evaluation
    status.json       how it ended
    events.jsonl      what else happened, one JSON object per event, of launcher and ranks

torchrun turns every exit code but 0 into 1, so scripts that requeue a run read status.json. Imports no torch.
"""

from __future__ import annotations

import datetime
import itertools
import json
import os
import re
import socket
from collections.abc import Iterable, Iterator
from enum import IntEnum
from pathlib import Path
from typing import Any

from megalite.checkpoint.storage.location import is_url
from megalite.config.console import complain
from megalite.config.options import Config
from megalite.config.own_file import opener


def now() -> str:
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")


_STARTED = now()


class Exit(IntEnum):
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


def run_folder(config: Config) -> Path:
    """Where a run's files go. They are appended to, which a URL cannot take: of a run that saves to one, here."""
    save = config.checkpoint.save
    if save is not None and is_url(save):
        save = f"runs/{save.rstrip('/').rpartition('/')[2]}"
    return Path(config.log.run_dir or (config.log.name and f"runs/{config.log.name}") or save or "runs/last")


def taken(config: Config) -> list[str]:
    """A line where --name is that of another run; one that --load continues is none."""
    name, folder, c = config.log.name, run_folder(config), config.checkpoint
    if name is None or config.train.dry_run or not os.path.exists(folder / "status.json"):
        return []
    if c.load is not None and c.load == c.save:
        return []
    free = next(f"{name}-{n}" for n in itertools.count(2) if not os.path.exists(f"{folder}-{n}"))
    goes_on = f"--load {c.save} to continue it" if c.save else "remove it"
    return [f"name={name!r}: {folder} holds a run already; give --name {free}, or {goes_on}"]


def write_atomically(path: Path, text: str | Iterable[str]) -> None:
    """Write beside and rename: a reader sees the old text or the new, never a part."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.unlink(missing_ok=True)
        with open(temporary, "x", encoding="utf-8") as file:
            file.writelines([text] if isinstance(text, str) else text)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)  # there only if the disk is full or a row could not be read


def leave_status(
    folder: Path, outcome: str, *, checkpoint: str | None, reason: str, step: int = 0, tokens: int = 0
) -> None:
    """status.json. `outcome`: of `Exit`, or "running", which is said again while the run trains. `tokens` and `step`:
    trained so far. `checkpoint`: the directory to resume from. `reason`: for people. A full disk is told at the end,
    and changes nothing else."""
    status = dict(outcome=outcome, step=step, tokens=tokens, checkpoint=checkpoint, reason=reason, rank=0)
    status |= dict(pid=os.getpid(), host=socket.gethostname(), started=_STARTED, time=now())
    try:
        write_atomically(folder / "status.json", json.dumps(status) + "\n")
    except OSError as error:
        if outcome != "running":
            complain(f"{folder / 'status.json'}: {error.strerror}; it does not tell how this run ended")


def settle_status(folder: Path, code: int, cause: str, since: float) -> None:
    """What rank 0 could not write, or did not know: the launcher's word, once all ranks have ended. `code`: the first
    failing exit code. `cause`: of whom. `since`: when they were started; an older status is another run's."""
    file = folder / "status.json"
    if not file.is_file():
        return
    try:
        status = json.loads(file.read_text("utf-8")) if file.stat().st_mtime >= since else {}
    except (OSError, ValueError):
        return
    outcome, reason = status.get("outcome"), str(status.get("reason"))
    first = {int(e): e.outcome for e in Exit}.get(code, Exit.CRASH.outcome)
    if outcome == "running":
        status |= dict(outcome=first, reason=cause or "ended without a word")
    elif outcome == Exit.CRASH.outcome and re.search(r"\brank [1-9]", cause) and code != Exit.REQUEUE:
        status |= dict(outcome=first, reason=reason if cause in reason else f"{cause}; rank 0: {reason}")
    else:
        return
    try:
        write_atomically(file, json.dumps(status | dict(time=now())) + "\n")
    except OSError as error:
        complain(f"{file}: {error.strerror}; it does not tell how this run ended")


class AppendedFile:
    """Whole lines at the end of a file, each in one write, so that no process tears another's. Nothing is kept in
    memory: what could not be written would come again."""

    def __init__(self, path: Path):
        self.path, self._torn = path, False
        self.file: Any = None

    def write(self, text: str) -> None:
        """Raises OSError, or ValueError where the file was closed."""
        if self.file is None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.file = open(self.path, "ab", buffering=0, opener=opener)  # noqa: SIM115 (closed in close)
        data = b"\n" * self._torn + text.encode(errors="backslashreplace") + b"\n"
        written = self.file.write(data)
        self._torn = written < len(data)
        if self._torn:
            raise OSError(None, "only a part of a line could be written")

    def close(self) -> None:
        if self.file is not None:
            self.file.close()


class Events:
    """events.jsonl, of one process; `rank` None: the launcher. A row holds time, event, rank, step and facts. Telling
    never raises: the first loss is said on stderr."""

    def __init__(self, folder: Path, rank: int | None = None):
        self.rank, self._file, self._lost = rank, AppendedFile(folder / "events.jsonl"), False

    def add(self, event: str, step: int | None = None, **facts: Any) -> None:
        """`facts`: what JSON can hold; anything else as its text."""
        row = {"time": now(), "event": event, "rank": self.rank, "step": step, **facts}
        try:
            self._file.write(json.dumps(row, default=str))
        except (OSError, ValueError) as error:
            if not self._lost:
                complain(
                    f"WARNING: {self._file.path}: {getattr(error, 'strerror', None) or error}; events are lost there"
                )
            self._lost = True


def json_rows(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """(line, what it holds) of a file of JSON objects, one by one: it may be large. Torn lines are left out. Raises
    OSError."""
    if not path.is_file():  # a pipe has nobody who writes, /dev/full no end
        return
    with open(path, encoding="utf-8", errors="replace", newline="\n") as lines:
        for line in lines:
            try:
                row = json.loads(line)
            except ValueError:
                continue
            if isinstance(row, dict):
                yield line.rstrip("\n"), row


def keep_rows_until(path: Path, step: int, validated: bool = True) -> None:
    """Drop rows of metrics.jsonl beyond `step`, which a resumed run writes again, and rows torn by a crash.
    `validated` False: also the losses of validation and test sets at `step` itself."""
    if not path.is_file():  # /dev/full has no end
        return

    def stays(row: dict[str, Any]) -> bool:
        at = row.get("step")
        again = at == step and any(key.startswith("val/") for key in row)
        return isinstance(at, int) and at <= step and (validated or not again)

    write_atomically(path, (f"{line}\n" for line, row in json_rows(path) if stays(row)))
