"""Files of JSON lines in the run directory: events.jsonl, and reading metrics.jsonl. Imports no torch."""

import datetime
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megalite.common.console import print_err
from megalite.common.safe_open import open_nofollow, write_atomically
from megalite.common.text_file import regular_opener

MAX_ROW = 1 << 20  # characters of a row of metrics.jsonl or events.jsonl


def timestamp() -> str:
    return datetime.datetime.now().astimezone().isoformat(timespec="seconds")


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
        validated: If False, the losses of sets and the scores of requests at `step` itself are dropped too.
    """
    if not path.is_file():
        return

    def is_kept(row: dict[str, Any]) -> bool:
        row_step = row.get("step")
        is_evaluation = row_step == step and any(key.startswith(("val/", "eval/")) for key in row)
        return isinstance(row_step, int) and row_step <= step and (validated or not is_evaluation)

    write_atomically(path, (f"{line}\n" for line, row in read_jsonl(path) if is_kept(row)))
