"""A file that one process writes, and what of it is on disk."""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path
from typing import BinaryIO, TextIO

from megalite.config.own_file import opener
from megalite.data.errors import DataError


def open_locked(path: Path) -> BinaryIO:
    """The file, to append to (nothing is cut yet), held by this process alone until it is closed."""
    while True:
        file = open(path, "ab", opener=opener)  # noqa: SIM115
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
    """What was written is on disk."""
    file.flush()
    os.fsync(file.fileno())
