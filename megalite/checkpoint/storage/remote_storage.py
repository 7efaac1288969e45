"""A --save directory behind a URL that fsspec knows: s3://, gs://, memory:// and others.

Object stores cannot rename, and copying would move every byte twice, so a checkpoint is written to its final place, and
COMPLETE, which holds the manifest's hash and is written last, makes it exist. Files are uploaded in parts while they
are written; one that fails is discarded, not closed, or its beginning would exist as if it were whole.

There are no locks. A run leaves its name in `.lock`, and looks there before it writes and before it commits: the later
run continues, the earlier ends at its next save. A lock that expires would keep a killed run from starting again; this
one keeps two runs from mixing their files. A reader leaves a mark in the checkpoint's folder, which does expire: a
killed reader delays a deletion, for which no run waits.
"""

import contextlib
import os
import random
import re
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from megalite.checkpoint.storage.location import LOCK_FILE, Append, CheckpointError, RemotePath, step_from_name

T = TypeVar("T")
PART_BYTES = 1 << 26  # bytes uploaded at once, and kept in memory; s3:// takes 10,000 parts: 625 GiB per rank
READ_BYTES = 1 << 25  # bytes per request
ATTEMPTS = 3
FIRST_WAIT_S = 0.5  # doubles each time; the packages of the protocols try again too
RENEW_S = 120.0  # interval at which a reader writes the time into its mark
STALE_S = 900.0  # a mark that is further from the present expires; the clocks of two machines may differ
PERMANENT = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, NotImplementedError)
_NO_DIRECTORIES = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "r2", "memory"}  # have no directories
_OUR_FILES = re.compile(r"rank-\d{5}\.(safetensors|json|failed)|manifest\.json|COMPLETE|KEEP|\.reading-[0-9a-f]{32}")


def retry(url: RemotePath, doing: str, call: Callable[[], T], attempts: int | None = None) -> T:
    """`call()`, repeated after a failure that may pass. Raises OSError for all errors of the packages."""
    attempts = attempts or ATTEMPTS
    for left in reversed(range(attempts)):
        try:
            return call()
        except PERMANENT as error:
            raise type(error)(f"{url}: {doing}: {error or type(error).__name__}") from error
        except Exception as error:
            if not left:
                raise OSError(f"{url}: {doing}: {type(error).__name__}: {error}") from error
        time.sleep(FIRST_WAIT_S * 2 ** (attempts - 1 - left) * random.uniform(1, 1.5))
    raise AssertionError("not reached")


class RemoteFile:
    """A file for reading ranges, like LocalFile."""

    def __init__(self, path: RemotePath):
        self._path = path
        self.size = int(retry(path, "looking it up", lambda: path.files.info(path.path))["size"])

    def pread(self, target: memoryview, begin: int) -> None:
        for first in range(0, len(target), READ_BYTES):
            part = target[first : first + READ_BYTES]
            start, stop = begin + first, begin + first + len(part)
            if stop > self.size:
                raise ValueError(f"{self._path}: ends at byte {self.size}, {stop} wanted")

            def call(start: int = start, stop: int = stop) -> bytes:
                content = self._path.files.cat_file(self._path.path, start=start, end=stop)
                if len(content) != stop - start:
                    raise OSError(f"got {len(content)} bytes instead of {stop - start}")
                return content

            part[:] = retry(self._path, f"reading bytes {start} to {stop}", call)

    def close(self) -> None:
        """Nothing stays open between reads."""


class RemoteLock:
    """The name of this run in the directory, until another run writes its own."""

    def __init__(self, directory: RemotePath):
        self._storage, self._directory = RemoteStorage(), directory
        self._text = f"process {os.getpid()} on {socket.gethostname()}, {uuid.uuid4().hex}\n"
        self._storage.write_text(directory / LOCK_FILE, self._text)

    def _holder(self) -> str:
        try:
            return self._storage.read(self._directory / LOCK_FILE).decode(errors="replace")[:200]
        except FileNotFoundError:
            return ""

    def check_held(self) -> None:
        """Raises CheckpointError when another run has taken the directory over."""
        holder = self._holder()
        if holder != self._text:
            name = holder.partition(",")[0] or "a run that has ended"
            taken = f"save={str(self._directory)!r} was taken over by {name}, which started later"
            raise CheckpointError(f"{taken}: this run stops saving")

    def close(self) -> None:
        with contextlib.suppress(OSError):
            if self._holder() == self._text:
                self._storage.delete(self._directory / LOCK_FILE)


class RemoteStorage:
    """Storage (protocol.py) behind a URL."""

    poll_interval_s = 1.0
    stall_timeout_s = 3600.0  # a file is visible only when it is complete
    num_readers = 16
    sequential = False
    open, lock = RemoteFile, RemoteLock

    def _list(self, folder: RemotePath) -> list[dict[str, Any]]:
        def call() -> list[dict[str, Any]]:
            folder.files.invalidate_cache()
            try:
                return folder.files.ls(folder.path, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return []

        return retry(folder, "listing it", call)

    def steps_in(self, directory: RemotePath) -> list[int]:
        names = [e["name"].rstrip("/").rpartition("/")[2] for e in self._list(directory) if e["type"] == "directory"]
        return sorted({step for name in names if (step := step_from_name(name)) is not None})

    def list_files(self, folder: RemotePath) -> dict[str, int]:
        files = [e for e in self._list(folder) if e["type"] == "file" and e["name"].rpartition("/")[0] == folder.path]
        return {e["name"].rpartition("/")[2]: int(e["size"]) for e in files}

    def read(self, path: RemotePath) -> bytes:
        return retry(path, "reading it", lambda: path.files.cat_file(path.path))

    @contextlib.contextmanager
    def open_new(self, path: RemotePath) -> Iterator[Append]:
        self._make_folder(path.parent)
        file = retry(path, "writing it", lambda: path.files.open(path.path, "wb", block_size=PART_BYTES))
        try:
            yield lambda data: retry(path, "writing it", lambda: file.write(data), attempts=1)
            retry(path, "writing it", file.close, attempts=1)
        except BaseException:
            with contextlib.suppress(Exception):
                file.discard()  # the uploaded parts
            with contextlib.suppress(AttributeError):  # a file in memory
                file.closed = True  # fsspec closes, and so commits, a file that is garbage-collected
            raise

    def write_text(self, path: RemotePath, text: str, sync: bool = True) -> None:
        self._make_folder(path.parent)
        retry(path, "writing it", lambda: path.files.pipe_file(path.path, text.encode()))

    def _make_folder(self, folder: RemotePath) -> None:
        if folder.text.partition("://")[0] not in _NO_DIRECTORIES:
            retry(folder, "making it", lambda: folder.files.makedirs(folder.path, exist_ok=True))

    def delete(self, path: RemotePath) -> None:
        with contextlib.suppress(FileNotFoundError):
            retry(path, "deleting it", lambda: path.files.rm_file(path.path))

    def staging_path(self, final: RemotePath) -> RemotePath:
        return final

    def discard(self, part: RemotePath) -> None:
        """COMPLETE first: an interruption leaves no checkpoint. Files that the run did not write are kept."""
        names = [name for name in self.list_files(part) if _OUR_FILES.fullmatch(name)]
        for name in sorted(names, key=lambda name: name != "COMPLETE"):
            self.delete(part / name)
        if part.text.partition("://")[0] not in _NO_DIRECTORIES:
            with contextlib.suppress(Exception):  # not empty, or not there
                part.files.rmdir(part.path)

    make_staging = remove = discard

    def publish(self, part: RemotePath, final: RemotePath) -> None:
        """Done: COMPLETE is there."""

    def remove_leftovers(self, directory: RemotePath) -> list[str]:
        """Delete folders without COMPLETE in which all files are ours."""
        left = []
        for step in self.steps_in(directory):
            folder = directory / f"iter_{step:07d}"
            names = self.list_files(folder)
            if "COMPLETE" not in names and names and all(_OUR_FILES.fullmatch(name) for name in names):
                self.discard(folder)
                left.append(folder.name)
        return left

    def check_writable(self, directory: RemotePath, rank: int) -> None:
        test, text = directory / f".probe-{rank:05d}", uuid.uuid4().hex
        try:
            self.write_text(test, text)
            if self.read(test) != text.encode():
                raise OSError(f"{test} does not hold what was written to it")
            self.delete(test)
        except OSError as error:
            unwritable = f"save={str(directory)!r} cannot be written ({error})"
            raise CheckpointError(f"{unwritable}: check its name and your permissions there") from None

    def check_space(self, directory: RemotePath, needed: int) -> None:
        """A store has no limit to ask for."""

    @contextlib.contextmanager
    def read_lock(self, folder: RemotePath) -> Iterator[None]:
        """Without the right to write, or before the mark exists, a deletion ends the reading with an error."""
        mark, over = folder / f".reading-{uuid.uuid4().hex}", threading.Event()

        def renew() -> None:
            while not over.wait(RENEW_S):
                with contextlib.suppress(OSError):
                    self.write_text(mark, str(time.time()))

        thread = threading.Thread(target=renew, name="megalite-reading", daemon=True)
        with contextlib.suppress(OSError):
            self.write_text(mark, str(time.time()))
            thread.start()
        try:
            yield
        finally:
            over.set()
            if thread.ident is not None:
                thread.join()
                with contextlib.suppress(OSError):
                    self.delete(mark)

    def in_use(self, folder: RemotePath) -> bool:
        for name, size in self.list_files(folder).items():
            if name.startswith(".reading-") and size < 100:
                with contextlib.suppress(FileNotFoundError, ValueError):  # just ended, or not a mark
                    if abs(time.time() - float(self.read(folder / name))) < STALE_S:
                        return True
        return False
