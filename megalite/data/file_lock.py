"""Files that several processes share: who may write one, and when it can be seen."""

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
    """Hold the lock file `path` while `product` is made; whoever waits for long logs it. Yields False without locks."""
    with open(path, "a+", opener=open_nofollow) as file:
        begin, next_line, alone = time.monotonic(), WARN_AFTER_S, None
        while alone is None:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                alone = True
            except BlockingIOError:
                waited = time.monotonic() - begin
                if waited >= next_line:
                    file.seek(0)
                    holder = file.read(200) or "another process"
                    log.warning("%s: waiting for %s, which builds it (%.0f s so far)", product, holder, waited)
                    next_line = waited + WARN_EVERY_S
                time.sleep(POLL_SECONDS)
            except OSError:
                alone = False
        if alone:
            file.truncate(0)  # "a": what is written goes to the end
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
        yield alone


@contextlib.contextmanager
def atomic_write(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which gets the name `path` once it is whole. An error leaves nothing, a kill a *.partial."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name + ".", suffix=".partial")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
