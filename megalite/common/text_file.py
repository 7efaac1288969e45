"""Reading small text files that are not trusted: configurations, lists of paths, the JSON files of a model.

Such a path may name a pipe or a device, which can be read forever, or a file that does not fit into memory. These
functions open without blocking, accept regular files only, and stop reading at a limit.
"""

import errno
import os
import stat
from collections.abc import Callable

MAX_BYTES = 16 << 20
Opener = Callable[[str, int], int]


class TextFileError(ValueError):
    """A file that cannot be used; its text has the path, the reason and a remedy, and `reason` only the reason."""

    def __init__(self, path: str | os.PathLike[str], reason: str, remedy: str):
        super().__init__(f"{os.fspath(path)}: {reason}; {remedy}")
        self.reason = reason


def read_small_text(path: str | os.PathLike[str], what: str, max_bytes: int = MAX_BYTES) -> str:
    """Return the text of a regular UTF-8 file of at most `max_bytes`, with line ends as \\n.

    Args:
        what: the expected kind of file, for the remedy, such as "a TOML file".

    Raises:
        TextFileError: for any other file; its cause is the OSError or UnicodeDecodeError, if there is one.
    """
    remedy = f"give {what}"
    try:
        content = read_small_bytes(path, max_bytes)
    except OSError as error:
        raise TextFileError(path, f"cannot be read ({error.strerror or error})", remedy) from error
    except ValueError as error:  # a null character in the path
        raise TextFileError(repr(os.fspath(path)), f"cannot be read ({error})", remedy) from error
    try:
        text = content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise TextFileError(path, f"is not UTF-8 text ({error})", remedy) from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def read_small_bytes(path: str | os.PathLike[str], max_bytes: int = MAX_BYTES, opener: Opener | None = None) -> bytes:
    """Return the content of a regular file of at most `max_bytes`.

    Args:
        opener: see the built-in `open`; default `regular_opener`.

    Raises:
        OSError: if it cannot be read, is larger, or is not a regular file.
    """
    with open(path, "rb", opener=opener or regular_opener) as file:
        _check_is_regular(file.fileno(), path)
        size = os.fstat(file.fileno()).st_size
        content = b"" if size > max_bytes else file.read(max_bytes + 1)  # the file may grow, and in /proc its size is 0
    if max(size, len(content)) > max_bytes:
        raise OSError(errno.EFBIG, f"it has more than {format_size(max_bytes)}", os.fspath(path))
    return content


def read_ends(path: str | os.PathLike[str], max_bytes: int = MAX_BYTES) -> tuple[str, int]:
    """Return (text of a log, number of bytes omitted in its middle).

    A file of at most `max_bytes` is returned in full. Bytes that are not UTF-8 are replaced. Raises OSError if the file
    cannot be read or is not a regular file.
    """
    with open(path, "rb", opener=regular_opener) as file:
        size = os.fstat(file.fileno()).st_size
        half = max_bytes // 2
        left_out = max(0, size - 2 * half)
        if not left_out:
            return file.read(2 * half).decode("utf-8", "replace"), 0
        first = file.read(half)
        file.seek(size - half)
        last = file.read(half)
    # only complete lines, because the rest of a cut line would look like a line of the log
    first, last = first[: first.rfind(b"\n") + 1], last[last.find(b"\n") + 1 :]
    return (first + last).decode("utf-8", "replace"), size - len(first) - len(last)


def regular_opener(path: str, flags: int) -> int:
    """Open a regular file; an `opener` for `open`. Raises OSError for a directory, pipe or device, without blocking."""
    number = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)
    try:
        _check_is_regular(number, path)
    except OSError:
        os.close(number)
        raise
    return number


def _check_is_regular(number: int, path: str | os.PathLike[str]) -> None:
    mode = os.fstat(number).st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), os.fspath(path))
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "it is not a regular file, but a pipe, a device or a socket", os.fspath(path))


def format_size(count: int) -> str:
    """Return a number of bytes as text, in MiB or KiB if that is an integer."""
    if count % (1 << 20) == 0:
        return f"{count >> 20} MiB"
    return f"{count >> 10} KiB" if count % (1 << 10) == 0 else f"{count} bytes"
