"""The journal of a preprocessing run, from which an interrupted run resumes.

Each entry is a line, written after the data that it counts has been synced to disk:

    crc32 of the rest, 8 hex digits | JSON
    line 1    tokenizer, inputs and keys; a run with other ones cannot resume from the journal
    others    one `Progress` each; the last complete line counts (a loss of power may truncate one)
"""

import contextlib
import fcntl
import json
import os
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from megalite.checkpoint.storage import local_storage
from megalite.common.safe_open import open_nofollow
from megalite.data.errors import DataError
from tools.preprocess.text_input import Position


@dataclass
class Progress:
    """The counts of a run after a block; with the partial files, they are all that resuming needs."""

    position: Position = field(default_factory=Position)
    documents: list[int] = field(default_factory=list)  # per key
    tokens: list[int] = field(default_factory=list)
    empty: list[int] = field(default_factory=list)
    text_bytes: list[int] = field(default_factory=list)  # UTF-8
    records: int = 0  # good and bad
    bad: dict[str, int] = field(default_factory=dict)  # by reason
    rejects_bytes: int = 0
    input_bytes: int = 0  # uncompressed
    complete: bool = False  # all input was read, and the files only need their final names


class Journal:
    """The journal of a run, locked while it is open.

    Args:
        path: its path.
        header: the content of its first line.
        resume: use the entries of an interrupted run, if there is one.
        overwrite: discard an interrupted run.

    Attributes:
        last: the progress at which the interrupted run stopped, or the last one that was appended.

    Raises:
        DataError: There is an interrupted run but neither flag, it had another header, or the journal is locked.
    """

    def __init__(self, path: Path, header: dict[str, Any], resume: bool, overwrite: bool):
        self.path = path
        self.last: Progress | None = None
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open_locked(path)
        try:
            entries = _read_entries(path)
            if len(entries) > 1 and not overwrite:
                if not resume:
                    raise DataError(
                        f"{path}: an interrupted run was kept here: continue it with --resume, or discard it with "
                        "--overwrite"
                    )
                self._compare(entries[0], header)
                self.last = _parse_progress(path, entries[-1])
                self._file.truncate(sum(len(_format_line(entry)) for entry in entries))  # remove a truncated line
            else:
                self._file.truncate(0)
                self._write(header)
                local_storage.fsync_path(path.parent)
        except BaseException:
            self._file.close()
            raise

    def _compare(self, old_header: dict[str, Any], header: dict[str, Any]) -> None:
        for name, value in header.items():
            if old_header.get(name) != value:
                old_text = json.dumps(old_header.get(name), ensure_ascii=False)[:500]
                text = json.dumps(value, ensure_ascii=False)[:500]
                difference = f"the interrupted run had {name} {old_text}, this one has {text}"
                raise DataError(f"{self.path}: {difference}: give the same, or start over with --overwrite")

    def append(self, progress: Progress) -> None:
        """Add an entry. Everything that `progress` counts must have been synced."""
        self._write(asdict(progress))
        self.last = progress

    def _write(self, entry: dict[str, Any]) -> None:
        self._file.write(_format_line(entry))
        sync(self._file)

    def close(self, remove: bool) -> None:
        """Close the journal, and delete its file if `remove`."""
        if remove and not self._file.closed:
            self.path.unlink(missing_ok=True)
        self._file.close()


def _format_line(entry: dict[str, Any]) -> bytes:
    text = json.dumps(entry).encode("ascii")
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _read_entries(path: Path) -> list[dict[str, Any]]:
    """Return all entries before the first truncated or damaged line."""
    entries = []
    with open(path, "rb") as file:
        for line in file:
            crc, _, text = line.partition(b" ")
            if not line.endswith(b"\n") or crc != b"%08x" % zlib.crc32(text[:-1]):
                break
            entries.append(json.loads(text))
    return entries


def _parse_progress(path: Path, entry: dict[str, Any]) -> Progress:
    try:
        return Progress(**{**entry, "position": Position(**entry["position"])})
    except (TypeError, KeyError) as error:
        raise DataError(f"{path}: written by another version; start over with --overwrite") from error


def open_locked(path: Path) -> BinaryIO:
    """Open a file for appending, locked by this process until it is closed. Raises DataError if it is locked."""
    while True:
        file = open(path, "ab", opener=open_nofollow)  # noqa: SIM115
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.close()
            raise DataError(f"{path}: another process is writing it ({error.strerror})") from error
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                return file
        file.close()  # the process that held the lock renamed or removed the file before this one got the lock


def sync(file: BinaryIO | TextIO) -> None:
    """Wait until everything written to the file is on disk."""
    file.flush()
    os.fsync(file.fileno())
