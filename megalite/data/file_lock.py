"""Files that several processes share: a lock for the writer, and writes that become visible at once."""

import contextlib
import fcntl
import logging
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from megalite.common.safe_open import open_nofollow

log = logging.getLogger(__name__)

POLL_SECONDS = 0.1
WARN_AFTER_S, WARN_EVERY_S = 2.0, 60.0


@contextlib.contextmanager
def file_lock(path: Path, product: str) -> Iterator[bool]:
    """Hold the lock file `path` while `product` is built; a process that waits for long logs it.

    Yields True, or False where the file system has no locks.
    """
    with open(path, "a+", opener=open_nofollow) as file:
        start = time.monotonic()
        next_warning_s = WARN_AFTER_S
        locked = None
        while locked is None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                locked = True
            except BlockingIOError:
                waited = time.monotonic() - start
                if waited >= next_warning_s:
                    file.seek(0)
                    holder = file.read(200) or "another process"
                    log.warning("%s: waiting for %s, which builds it (%.0f s so far)", product, holder, waited)
                    next_warning_s = waited + WARN_EVERY_S
                time.sleep(POLL_SECONDS)
            except OSError:
                locked = False
        if locked:
            file.truncate(0)  # mode "a" writes at the end
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
        yield locked


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """Yield a file to write, which gets the name `path` once it is complete.

    An error leaves nothing behind; a killed process leaves a *.partial file.
    """
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name + ".", suffix=".partial")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
