"""A --save directory behind a URL that fsspec supports: s3://, gs://, memory:// and others.

Object stores cannot rename, and copying would transfer every byte twice, so a checkpoint is written to its final
location. COMPLETE, which holds the hash of the manifest and is written last, makes it exist. Files are uploaded in
parts while they are written. A file that fails is discarded, not closed, because closing would publish the incomplete
file.

There are no locks. A run writes its name into `.lock`, and checks it before it writes and before it commits: the later
run continues, and the earlier one ends at its next save. A lock that expires would keep a killed run from restarting,
while this one keeps two runs from mixing their files. A reader leaves a marker file in the checkpoint's directory,
which does expire: a killed reader only delays a deletion, and no run waits for that.
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
PART_BYTES = 1 << 26  # size of an uploaded part, buffered in memory; s3:// accepts 10,000 parts: 625 GiB per rank
READ_BYTES = 1 << 25  # bytes per request
ATTEMPTS = 3
FIRST_WAIT_S = 0.5  # doubles with each retry; the packages of the protocols retry too
RENEW_S = 120.0  # interval at which a reader writes the current time into its marker
STALE_S = 900.0  # a marker whose time differs by more has expired; the clocks of two machines may differ
PERMANENT = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError, NotImplementedError)
# protocols whose stores have no directories
_NO_DIRECTORIES = {"s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oss", "r2", "memory"}
_OUR_FILES = re.compile(r"rank-\d{5}\.(safetensors|json|failed)|manifest\.json|COMPLETE|KEEP|\.reading-[0-9a-f]{32}")


def retry(url: RemotePath, action: str, call: Callable[[], T], attempts: int | None = None) -> T:
    """Return `call()`, and retry after errors that may be transient.

    `action` describes the call in messages ("reading it"). All errors of the protocol's package are raised as OSError.
    """
    attempts = attempts or ATTEMPTS
    for remaining in reversed(range(attempts)):
        try:
            return call()
        except PERMANENT as error:
            raise type(error)(f"{url}: {action}: {error or type(error).__name__}") from error
        except Exception as error:
            if not remaining:
                raise OSError(f"{url}: {action}: {type(error).__name__}: {error}") from error
        time.sleep(FIRST_WAIT_S * 2 ** (attempts - 1 - remaining) * random.uniform(1, 1.5))
    raise AssertionError("not reached")


class RemoteFile:
    """A file for reading ranges, like LocalFile."""

    def __init__(self, path: RemotePath):
        self._path = path
        self.size = int(retry(path, "looking it up", lambda: path.files.info(path.path))["size"])

    def pread(self, target: memoryview, start: int) -> None:
        """Fill `target` with the bytes from `start`. Raises ValueError if the file ends early, and OSError."""
        for offset in range(0, len(target), READ_BYTES):
            part = target[offset : offset + READ_BYTES]
            part_start, part_stop = start + offset, start + offset + len(part)
            if part_stop > self.size:
                raise ValueError(f"{self._path}: ends at byte {self.size}, before byte {part_stop}")

            def read_part(part_start: int = part_start, part_stop: int = part_stop) -> bytes:
                content = self._path.files.cat_file(self._path.path, start=part_start, end=part_stop)
                if len(content) != part_stop - part_start:
                    raise OSError(f"got {len(content)} bytes instead of {part_stop - part_start}")
                return content

            part[:] = retry(self._path, f"reading bytes {part_start} to {part_stop}", read_part)

    def close(self) -> None:
        """Do nothing, because no connection stays open between reads."""


class RemoteLock:
    """The name of this run in the directory, until another run replaces it with its own."""

    def __init__(self, directory: RemotePath):
        self._storage, self._directory = RemoteStorage(), directory
        self._text = f"process {os.getpid()} on {socket.gethostname()}, {uuid.uuid4().hex}\n"
        self._storage.write_text(directory / LOCK_FILE, self._text)

    def _holder(self) -> str:
        """Return the contents of the lock file, or "" if there is none."""
        try:
            return self._storage.read(self._directory / LOCK_FILE).decode(errors="replace")[:200]
        except FileNotFoundError:
            return ""

    def check_held(self) -> None:
        """Raise CheckpointError if another run has taken over the directory."""
        holder = self._holder()
        if holder != self._text:
            name = holder.partition(",")[0] or "a run that has ended"
            message = f"save={str(self._directory)!r} was taken over by {name}, which started later"
            raise CheckpointError(f"{message}: this run stops saving")

    def close(self) -> None:
        """Delete the lock file, if it is still the one of this run."""
        with contextlib.suppress(OSError):
            if self._holder() == self._text:
                self._storage.delete(self._directory / LOCK_FILE)


class RemoteStorage:
    """The storage (see storage.py) behind a URL."""

    poll_interval_s = 1.0
    stall_timeout_s = 3600.0  # a file only becomes visible when it is complete
    num_readers = 16
    sequential = False
    open, lock = RemoteFile, RemoteLock

    def _list(self, directory: RemotePath) -> list[dict[str, Any]]:
        def list_directory() -> list[dict[str, Any]]:
            directory.files.invalidate_cache()
            try:
                return directory.files.ls(directory.path, detail=True)
            except (FileNotFoundError, NotADirectoryError):
                return []

        return retry(directory, "listing it", list_directory)

    def steps_in(self, directory: RemotePath) -> list[int]:
        directories = [entry["name"] for entry in self._list(directory) if entry["type"] == "directory"]
        names = [name.rstrip("/").rpartition("/")[2] for name in directories]
        return sorted({step for name in names if (step := step_from_name(name)) is not None})

    def list_files(self, directory: RemotePath) -> dict[str, int]:
        sizes = {}
        for entry in self._list(directory):
            parent, _, name = entry["name"].rpartition("/")
            if entry["type"] == "file" and parent == directory.path:
                sizes[name] = int(entry["size"])
        return sizes

    def read(self, path: RemotePath) -> bytes:
        return retry(path, "reading it", lambda: path.files.cat_file(path.path))

    @contextlib.contextmanager
    def open_new(self, path: RemotePath) -> Iterator[Append]:
        self._make_directory(path.parent)
        file = retry(path, "writing it", lambda: path.files.open(path.path, "wb", block_size=PART_BYTES))
        try:
            yield lambda data: retry(path, "writing it", lambda: file.write(data), attempts=1)
            retry(path, "writing it", file.close, attempts=1)
        except BaseException:
            with contextlib.suppress(Exception):
                file.discard()  # deletes the uploaded parts
            with contextlib.suppress(AttributeError):  # the attribute of a memory:// file is read-only
                file.closed = True  # fsspec would close, and so commit, the file when it is garbage-collected
            raise

    def write_text(self, path: RemotePath, text: str, sync: bool = True) -> None:
        self._make_directory(path.parent)
        retry(path, "writing it", lambda: path.files.pipe_file(path.path, text.encode()))

    def _make_directory(self, directory: RemotePath) -> None:
        if directory.text.partition("://")[0] not in _NO_DIRECTORIES:
            retry(directory, "creating it", lambda: directory.files.makedirs(directory.path, exist_ok=True))

    def delete(self, path: RemotePath) -> None:
        with contextlib.suppress(FileNotFoundError):
            retry(path, "deleting it", lambda: path.files.rm_file(path.path))

    def staging_path(self, final: RemotePath) -> RemotePath:
        return final

    def discard(self, staging_dir: RemotePath) -> None:
        """Delete the files that the run has written.

        COMPLETE is deleted first, so that no checkpoint remains after an interruption.
        """
        names = [name for name in self.list_files(staging_dir) if _OUR_FILES.fullmatch(name)]
        for name in sorted(names, key=lambda name: name != "COMPLETE"):
            self.delete(staging_dir / name)
        if staging_dir.text.partition("://")[0] not in _NO_DIRECTORIES:
            with contextlib.suppress(Exception):  # it is not empty, or does not exist
                staging_dir.files.rmdir(staging_dir.path)

    make_staging = remove = discard

    def publish(self, staging_dir: RemotePath, final: RemotePath) -> None:
        """Do nothing, because writing COMPLETE has published the checkpoint."""

    def remove_leftovers(self, directory: RemotePath) -> list[str]:
        """Delete checkpoint directories without COMPLETE in which megalite has written all files."""
        leftovers = []
        for step in self.steps_in(directory):
            checkpoint = directory / f"iter_{step:07d}"
            names = self.list_files(checkpoint)
            if "COMPLETE" not in names and names and all(_OUR_FILES.fullmatch(name) for name in names):
                self.discard(checkpoint)
                leftovers.append(checkpoint.name)
        return leftovers

    def check_writable(self, directory: RemotePath, rank: int) -> None:
        test, text = directory / f".probe-{rank:05d}", uuid.uuid4().hex
        try:
            self.write_text(test, text)
            if self.read(test) != text.encode():
                raise OSError(f"{test} does not hold what was written to it")
            self.delete(test)
        except OSError as error:
            message = f"save={str(directory)!r} cannot be written ({error})"
            raise CheckpointError(f"{message}: check its name and your permissions there") from None

    def check_space(self, directory: RemotePath, needed: int) -> None:
        """Do nothing, because an object store has no known limit."""

    @contextlib.contextmanager
    def read_lock(self, checkpoint: RemotePath) -> Iterator[None]:
        """Leave a marker in the checkpoint, and renew it, while the context is active.

        Without permission to write, or before the marker exists, a deletion ends the reading with an error.
        """
        marker = checkpoint / f".reading-{uuid.uuid4().hex}"
        is_done = threading.Event()

        def renew() -> None:
            while not is_done.wait(RENEW_S):
                with contextlib.suppress(OSError):
                    self.write_text(marker, str(time.time()))

        thread = threading.Thread(target=renew, name="megalite-reading", daemon=True)
        with contextlib.suppress(OSError):
            self.write_text(marker, str(time.time()))
            thread.start()
        try:
            yield
        finally:
            is_done.set()
            if thread.ident is not None:
                thread.join()
                with contextlib.suppress(OSError):
                    self.delete(marker)

    def in_use(self, checkpoint: RemotePath) -> bool:
        for name, size in self.list_files(checkpoint).items():
            if name.startswith(".reading-") and size < 100:
                # the reader may have just finished, or the file may not be a marker
                with contextlib.suppress(FileNotFoundError, ValueError):
                    if abs(time.time() - float(self.read(checkpoint / name))) < STALE_S:
                        return True
        return False
