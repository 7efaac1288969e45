"""How far an interrupted run had come: one line per entry, each written after the data it vouches for is on disk.

crc32 of the rest, 8 hex digits | JSON
line 1: what the run is (tokenizer, inputs, keys): a run that differs cannot continue from it
others: one `Tally` each; the last whole one counts, a line cut by the end of power does not
"""

import contextlib
import fcntl
import json
import os
import zlib
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, TextIO

from megalite.checkpoint.storage import local_storage as file_system
from megalite.common.safe_open import open_nofollow
from megalite.data.errors import DataError
from tools.preprocess.text_input import Position


@dataclass
class Tally:
    """Everything that a run knows after a block; with the partial files it is all that continuing needs."""

    position: Position = field(default_factory=Position)
    documents: list[int] = field(default_factory=list)  # per key
    tokens: list[int] = field(default_factory=list)
    empty: list[int] = field(default_factory=list)
    text_bytes: list[int] = field(default_factory=list)  # UTF-8
    records: int = 0  # good and bad
    bad: dict[str, int] = field(default_factory=dict)  # by reason
    rejects_bytes: int = 0
    input_bytes: int = 0  # uncompressed
    complete: bool = False  # all input was read; what is left is to name the files


class Journal:
    """Locked as long as it is open. `last` is where an interrupted run of the same kind stopped, if there is one."""

    def __init__(self, path: Path, header: dict[str, Any], resume: bool, overwrite: bool):
        self.path, self.last = path, None
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = open_locked(path)
        try:
            found = _read(path)
            if len(found) > 1 and not overwrite:
                if not resume:
                    raise DataError(
                        f"{path}: an interrupted run was kept here: continue it with --resume, or discard it with "
                        "--overwrite"
                    )
                self._compare(found[0], header)
                self.last = _progress(path, found[-1])
            whole = sum(len(_line(entry)) for entry in found) if self.last else 0
            self._file.truncate(whole)  # a cut line must not stand between whole ones
            if not self.last:
                self._write(header)
                file_system.fsync_path(path.parent)
        except BaseException:
            self._file.close()
            raise

    def _compare(self, old: dict[str, Any], new: dict[str, Any]) -> None:
        for name in new:
            if old.get(name) != new[name]:
                was, now = (json.dumps(x, ensure_ascii=False)[:500] for x in (old.get(name), new[name]))
                both = f"the interrupted run had {name} {was}, this one has {now}"
                raise DataError(f"{self.path}: {both}: give the same, or start over with --overwrite")

    def append(self, progress: Tally) -> None:
        """To be called when all that `progress` counts has been synced."""
        self._write(asdict(progress))
        self.last = progress

    def _write(self, entry: dict[str, Any]) -> None:
        self._file.write(_line(entry))
        sync(self._file)

    def close(self, remove: bool) -> None:
        if remove and not self._file.closed:
            self.path.unlink(missing_ok=True)
        self._file.close()


def _line(entry: dict[str, Any]) -> bytes:
    text = json.dumps(entry).encode("ascii")
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _read(path: Path) -> list[dict[str, Any]]:
    """All entries up to the first line that is cut or damaged."""
    found = []
    with open(path, "rb") as file:
        for line in file:
            crc, _, text = line.partition(b" ")
            if not line.endswith(b"\n") or crc != b"%08x" % zlib.crc32(text[:-1]):
                break
            found.append(json.loads(text))
    return found


def _progress(path: Path, entry: dict[str, Any]) -> Tally:
    try:
        return Tally(**{**entry, "position": Position(**entry["position"])})
    except (TypeError, KeyError) as error:
        raise DataError(f"{path}: written by another version; start over with --overwrite") from error


def open_locked(path: Path) -> BinaryIO:
    """The file, to append to (nothing is cut yet), held by this process alone until it is closed."""
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
        file.close()  # its last owner renamed or removed it between opening and locking


def sync(file: BinaryIO | TextIO) -> None:
    """Wait until what was written is on disk."""
    file.flush()
    os.fsync(file.fileno())
