"""Files of a run, in a folder that others may write: never opened through a link, so that nobody can make a run write
to a file elsewhere that its user may write. A new file beside is made with mode "x", which follows no link either.

Each is an `opener` of `open`, and never waits, as that of a pipe would for one who reads it. Raises OSError.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path


class LinkError(OSError):
    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


def opener(path: str | Path, flags: int) -> int:
    """For a file in a folder that the user named: that may be a link."""
    return _open(path, path, flags, None)


def inner_opener(path: str | Path, flags: int) -> int:
    """For a file in a folder that the run makes in its own: that is no link either."""
    folder, name = os.path.split(path)
    try:
        number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise _refusal(folder) if os.path.islink(folder) else error from None
    try:
        return _open(path, name, flags, number)
    finally:
        os.close(number)


def _open(path: str | Path, name: str | Path, flags: int, folder: int | None) -> int:
    """A hard link is seen only once it is open, so nothing is cut before."""
    safe = (flags & ~os.O_TRUNC) | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        number = os.open(name, safe, 0o666, dir_fd=folder)
    except OSError as error:
        raise _refusal(path) if error.errno == errno.ELOOP else error from None
    try:
        found = os.fstat(number)
        if stat.S_ISREG(found.st_mode):
            if found.st_nlink > 1 and flags & (os.O_WRONLY | os.O_RDWR):
                raise _refusal(path)
            if flags & os.O_TRUNC:
                os.ftruncate(number, 0)
    except OSError:
        os.close(number)
        raise
    return number


def _refusal(path: str | Path) -> LinkError:
    return LinkError(errno.ELOOP, "is a link to another file, and a run opens none; remove it", str(path))
