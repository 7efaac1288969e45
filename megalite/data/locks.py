"""Files that several processes share: who may write one, and when it can be seen.

locked      one process at a time does a piece of work; the others wait and say for whom
appearing   a file has its name only when it is whole
"""

import contextlib
import fcntl
import logging
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, TextIO

from megalite.config.own_file import opener

log = logging.getLogger(__name__)

POLL_SECONDS = 0.1
SAY_AFTER_SECONDS, SAY_EVERY_SECONDS = 2.0, 60.0


@contextlib.contextmanager
def locked(path: Path, what: str) -> Iterator[bool]:
    """Hold the lock file `path`; who waits for long says for what and for whom. False: there are no locks here."""
    with open(path, "a+", opener=opener) as file:
        alone = _take(file, what)
        if alone:
            file.truncate(0)  # "a": what is written goes to the end
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
        yield alone


def _take(file: TextIO, what: str) -> bool:
    begin, said = time.monotonic(), 0.0
    while True:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            waited = time.monotonic() - begin
            if waited >= (said + SAY_EVERY_SECONDS if said else SAY_AFTER_SECONDS):
                file.seek(0)
                holder = file.read(200) or "another process"
                log.warning("%s: waiting for %s, which makes it (%.0f s so far)", what, holder, waited)
                said = waited
            time.sleep(POLL_SECONDS)
        except OSError:
            return False


@contextlib.contextmanager
def appearing(path: Path) -> Iterator[BinaryIO]:
    """A file to write, which is called `path` once it is whole. Of an error nothing remains, of a kill *.partial."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name + ".", suffix=".partial")
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
