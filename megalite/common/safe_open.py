"""Opens a run's files, in a folder where others may write: never through a link, so that nobody can make a run write to
another file of its user. (A new file is made with mode "x", which follows no link either.)

Both openers are for `open`, do not block on a pipe, and raise OSError.
"""

import errno
import os
import shutil
import stat
from pathlib import Path


class SymlinkError(OSError):
    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


def open_nofollow(path: str | Path, flags: int) -> int:
    """For a file in a folder that the user named, which may itself be a link."""
    return _open(path, path, flags, None)


def open_in_run_dir(path: str | Path, flags: int) -> int:
    """For a file in a folder that the run made, which must not be a link either."""
    folder, name = os.path.split(path)
    try:
        number = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise _refusal(folder) if os.path.islink(folder) else error from None
    try:
        return _open(path, name, flags, number)
    finally:
        os.close(number)


def remove(path: str | Path) -> None:
    """Remove whatever stands at a path that a run takes for itself: a directory with all that is in it, or a file or a
    link, never what the link names. Nothing there is fine. Raises OSError."""
    try:
        is_directory = stat.S_ISDIR(os.lstat(path).st_mode)
    except FileNotFoundError:
        return
    if is_directory:
        shutil.rmtree(path)
    else:
        os.unlink(path)


def _open(path: str | Path, name: str | Path, flags: int, folder: int | None) -> int:
    """Truncates only after the check for hard links, which needs the open file."""
    safe = (flags & ~os.O_TRUNC) | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        number = os.open(name, safe, 0o666, dir_fd=folder)
    except OSError as error:
        raise _refusal(path) if error.errno == errno.ELOOP else error from None
    try:
        status = os.fstat(number)
        if stat.S_ISREG(status.st_mode):
            if status.st_nlink > 1 and flags & (os.O_WRONLY | os.O_RDWR):
                raise _refusal(path)
            if flags & os.O_TRUNC:
                os.ftruncate(number, 0)
    except OSError:
        os.close(number)
        raise
    return number


def _refusal(path: str | Path) -> SymlinkError:
    return SymlinkError(errno.ELOOP, "is a link to another file, and a run opens none; remove it", str(path))
