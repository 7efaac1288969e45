"""Open and replace a run's files without following a link.

Others may be able to write in the run directory. A link there must not make a run write to another file of its user.
(New files are created with mode "x", which follows no link either.) The openers are for `open`, do not block on a
pipe, and raise OSError.
"""

import errno
import os
import shutil
import stat
from collections.abc import Iterable
from pathlib import Path


class SymlinkError(OSError):
    """A file or directory of a run is a link."""

    def __str__(self) -> str:
        return f"{self.filename}: {self.strerror}"


def open_nofollow(path: str | Path, flags: int) -> int:
    """Open a file in a directory that the user named, which may itself be a link."""
    return _open(path, path, flags, None)


def open_in_run_dir(path: str | Path, flags: int) -> int:
    """Open a file in a directory that the run created, which must not be a link either."""
    directory, name = os.path.split(path)
    try:
        dir_fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise _symlink_error(directory) if os.path.islink(directory) else error from None
    try:
        return _open(path, name, flags, dir_fd)
    finally:
        os.close(dir_fd)


def remove(path: str | Path) -> None:
    """Remove a directory with its contents, a file, or a link (not its target), if there is one. Raises OSError."""
    try:
        is_directory = stat.S_ISDIR(os.lstat(path).st_mode)
    except FileNotFoundError:
        return
    if is_directory:
        shutil.rmtree(path)
    else:
        os.unlink(path)


def _open(path: str | Path, name: str | Path, flags: int, dir_fd: int | None) -> int:
    """Open `name`, and truncate it only after the check for hard links, which needs the open file."""
    safe_flags = (flags & ~os.O_TRUNC) | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    try:
        fd = os.open(name, safe_flags, 0o666, dir_fd=dir_fd)
    except OSError as error:
        raise _symlink_error(path) if error.errno == errno.ELOOP else error from None
    try:
        status = os.fstat(fd)
        if stat.S_ISREG(status.st_mode):
            if status.st_nlink > 1 and flags & (os.O_WRONLY | os.O_RDWR):
                raise _symlink_error(path)
            if flags & os.O_TRUNC:
                os.ftruncate(fd, 0)
    except OSError:
        os.close(fd)
        raise
    return fd


def _symlink_error(path: str | Path) -> SymlinkError:
    return SymlinkError(errno.ELOOP, "is a link to another file, which a run does not open; remove it", str(path))


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
