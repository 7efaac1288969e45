"""A remote file as numbered blocks on the local disk, each fetched once by one of the processes of a node.

    directory/00000a3f.block     BLOCK bytes of the file (the last one: fewer), then their crc32
    directory/blocks.lock        byte k is locked by the process that fetches block k

Blocks appear whole, by rename. Each process checks the crc when it first opens a block, and fetches a damaged one
again. When the blocks under `root` pass the limit, the least recently opened are removed; a process that has one
mapped keeps reading it, and any other fetches it again. So the processes need not agree about anything.
"""

import contextlib
import fcntl
import logging
import mmap
import os
import struct
import threading
import time
import zlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from megalite.config.own_file import opener
from megalite.data.locks import appearing

log = logging.getLogger(__name__)

# An object store answers after 20 to 50 ms and then gives 50 to 90 MB/s per connection, so larger blocks gain little
# speed; smaller ones cost more requests, each of which is paid for.
BLOCK = 4 << 20
FETCHES = 16  # connections at a time
OPEN_BLOCKS = 1024  # mapped at a time; removed blocks may occupy the disk for as long as they are mapped
EVICT_EVERY = 16  # stored blocks between two looks at the size of the cache
KEEP = 0.9  # of the limit, once it was passed
STALE_SECONDS = 24 * 3600.0  # a partial file this old has no writer
POLL_SECONDS, SAY_AFTER_POLLS = 0.02, 250
INDEX = "copy.index"  # beside the blocks: the .idx, whole
CRC = struct.Struct("<I")


class Blocks:
    """Blocks of a remote file: `fetch(start, stop)` gives its bytes, from any thread, and `confirm()`, called between
    fetching and storing, raises when it has changed."""

    def __init__(
        self, directory: Path, size: int, limit: int, fetch: Callable[[int, int], bytes], confirm: Callable[[], None]
    ):
        self._directory, self._size, self._limit = directory, size, limit
        self._fetch, self._confirm = fetch, confirm
        self._open: OrderedDict[int, NDArray[np.uint8]] = OrderedDict()
        self._verified: set[int] = set()
        self._thread_lock = threading.Lock()  # record locks exclude processes, not threads
        self._lock_file = open(directory / "blocks.lock", "ab", opener=opener)  # noqa: SIM115  (closing it would drop the locks)
        self._pool: ThreadPoolExecutor | None = None
        self._stored, self._said_full = 0, False
        evict(directory.parent, limit)

    def get(self, numbers: Sequence[int]) -> list[NDArray[np.uint8]]:
        """The blocks `numbers`, at most OPEN_BLOCKS of them, as mapped uint8; missing ones are fetched first."""
        with self._thread_lock:
            missing = [number for number in numbers if not self._have(number)]
            polls = 0
            while missing:
                mine = [number for number in missing if self._lock(number)]
                try:
                    self._fetch_missing([number for number in mine if not self._have(number)])
                finally:
                    for number in mine:
                        self._unlock(number)
                missing = [number for number in missing if not self._have(number)]
                if missing:  # other processes fetch these
                    polls += 1
                    if polls == SAY_AFTER_POLLS:
                        log.warning("%s: waiting for block %d from another process", self._directory, missing[0])
                    time.sleep(POLL_SECONDS)
            blocks = [self._open[number] for number in numbers]
            for number in numbers:
                self._open.move_to_end(number)
            while len(self._open) > OPEN_BLOCKS:
                self._open.popitem(last=False)
            if self._stored >= EVICT_EVERY:
                self._stored = 0
                with contextlib.suppress(OSError):
                    os.utime(self._directory / INDEX)  # in use, although it was opened long ago
                evict(self._directory.parent, self._limit)
                for number in [number for number in self._open if not self._path(number).exists()]:
                    del self._open[number]  # the space is free when nobody has it mapped
            return blocks

    def _path(self, number: int) -> Path:
        return self._directory / f"{number:08x}.block"

    def _length(self, number: int) -> int:
        return min(BLOCK, self._size - number * BLOCK)

    def _have(self, number: int) -> bool:
        """Whether the block is mapped, or is sound on disk and could be mapped now."""
        if number in self._open:
            return True
        path, length = self._path(number), self._length(number)
        try:
            with open(path, "rb") as file:
                whole = os.fstat(file.fileno()).st_size == length + CRC.size
                raw = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) if whole else b""
        except OSError:
            return False
        block = np.frombuffer(raw, np.uint8)
        if number not in self._verified:
            if not whole or zlib.crc32(block[:length].data) != CRC.unpack(block[length:].tobytes())[0]:
                log.warning("%s: damaged block; fetching it again", path)
                path.unlink(missing_ok=True)
                return False
            self._verified.add(number)
        if not whole:
            return False
        with contextlib.suppress(OSError):
            os.utime(path)  # removed last
        self._open[number] = block[:length]
        return True

    def _fetch_missing(self, numbers: list[int]) -> None:
        if not numbers:
            return
        if self._pool is None:
            self._pool = ThreadPoolExecutor(FETCHES, thread_name_prefix="megalite-fetch")
        parts = list(self._pool.map(lambda k: self._fetch(k * BLOCK, k * BLOCK + self._length(k)), numbers))
        self._confirm()
        for number, part in zip(numbers, parts, strict=True):
            self._store(number, part)

    def _store(self, number: int, part: bytes) -> None:
        try:
            with appearing(self._path(number)) as file:
                file.writelines([part, CRC.pack(zlib.crc32(part))])
            self._stored += 1
        except OSError as error:
            if not self._said_full:
                self._said_full = True
                log.warning("%s: blocks cannot be stored (%s); they are fetched each time", self._directory, error)
        self._verified.add(number)
        self._open[number] = np.frombuffer(part, np.uint8)

    def _lock(self, number: int) -> bool:
        try:
            fcntl.lockf(self._lock_file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, number)
        except (BlockingIOError, PermissionError):
            return False
        except OSError:
            pass  # a file system without locks: several processes may fetch the same block, to the same effect
        return True

    def _unlock(self, number: int) -> None:
        with contextlib.suppress(OSError):
            fcntl.lockf(self._lock_file, fcntl.LOCK_UN, 1, number)


def contents(root: Path) -> list[tuple[float, int, Path]]:
    """(last opened, bytes, path) of all files cached under root/*/. Removes half-written files of killed processes."""
    files: list[tuple[float, int, Path]] = []
    now = time.time()
    for path in root.glob("*/*"):
        with contextlib.suppress(OSError):  # other processes remove files, too
            state = path.stat()
            if path.suffix in (".block", ".index"):
                files.append((state.st_mtime, state.st_size, path))
            elif path.suffix == ".partial" and now - state.st_mtime > STALE_SECONDS:
                path.unlink()
    return files


def evict(root: Path, limit: int) -> None:
    """When all files together pass `limit` bytes, remove the least recently opened."""
    files = contents(root)
    total = sum(size for _, size, _ in files)
    goal = KEEP * limit if total > limit else total
    for _, size, path in sorted(files):
        if total <= goal:
            break
        path.unlink(missing_ok=True)
        total -= size
