"""A --save directory on a local file system.

A checkpoint is built in `.iter_0000500.part`, and exists once this is renamed to `iter_0000500`.
"""

import contextlib
import datetime
import errno
import fcntl
import os
import shutil
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from megalite.checkpoint.storage.location import (
    LOCK_FILE,
    Append,
    CheckpointError,
    is_megatron_checkpoint,
    step_from_name,
)
from megalite.common.console import print_err
from megalite.common.fault_injection import inject_fault
from megalite.common.safe_open import open_nofollow, remove
from megalite.common.text_file import read_small_bytes

_REPLACED = ".replaced"
_WRITEBACK_BYTES = 1 << 22  # start writing to the disk after this many buffered bytes
MAX_READ_BYTES = 1 << 30  # a manifest is the largest file that is read at once


def _format_size(count: int) -> str:
    units = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
    return next((f"{count / size:,.1f} {unit}" for unit, size in units if count >= size), f"{count} bytes")


def fsync_path(path: Path) -> None:
    """Flush the bytes of a file, or the entries of a directory, to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


class LocalFile:
    """A file that is open for reading ranges. It is never opened through a link."""

    def __init__(self, path: Path):
        self._path = path
        self._fd = open_nofollow(path, os.O_RDONLY)
        self.size = os.fstat(self._fd).st_size

    def pread(self, target: memoryview, start: int) -> None:
        """Fill `target` with the bytes from `start`. Thread-safe.

        Raises:
            ValueError: The file ends early.
            OSError: The file cannot be read.
        """
        done = 0
        while done < len(target):
            count = os.preadv(self._fd, [target[done : done + (1 << 30)]], start + done)
            if count == 0:
                raise ValueError(f"{self._path}: ends at byte {start + done}, earlier than when it was opened")
            done += count

    def close(self) -> None:
        os.close(self._fd)


def is_locked(path: Path, kind: int = fcntl.LOCK_SH) -> bool | None:
    """Return True if another process holds a lock that excludes one of this `kind`.

    Returns None if this is unknown, for example for LOCK_EX on NFS.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(fd, kind | fcntl.LOCK_NB)
    except OSError as error:
        return True if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else None
    finally:
        os.close(fd)
    return False


class DirectoryLock:
    """A lock on a directory, for one run at a time. The kernel releases it when its process ends.

    Args:
        directory: The directory.
        name: The name of the lock file in it.
        option: The flag with which the user gave the directory, for messages.
        remedy: The advice to the user if the directory is in use.

    Raises:
        CheckpointError: Another process holds the lock.
        OSError: The directory cannot be locked.
    """

    def __init__(self, directory: Path, name: str = LOCK_FILE, option: str = "save", remedy: str = "save elsewhere"):
        self._path, self._description = directory / name, (name, option, remedy)
        self._fd = open_nofollow(self._path, os.O_RDWR | os.O_CREAT)
        try:
            self._take()
        except OSError as error:
            holder = os.pread(self._fd, 200, 0).decode(errors="replace").strip() or "another process"
            os.close(self._fd)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            message = f"{option}={str(directory)!r} is in use by {holder}"
            raise CheckpointError(f"{message}: stop that run, or {remedy}") from None
        os.ftruncate(self._fd, 0)
        since = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        os.pwrite(self._fd, f"process {os.getpid()} on {socket.gethostname()} since {since}\n".encode(), 0)

    def _take(self) -> None:
        """Lock the file, with retries. Raises OSError."""
        for _ in range(4):  # a process in `is_locked` holds the lock briefly
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            time.sleep(0.05)
        fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def check_held(self) -> None:
        """Recreate and lock the lock file if it was deleted.

        Raises:
            CheckpointError: Another process has locked the new file.
            OSError: The file cannot be created.
        """
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(self._path, follow_symlinks=False), os.fstat(self._fd)):
                return
        directory, (name, option, remedy) = self._path.parent, self._description
        directory.mkdir(parents=True, exist_ok=True)
        new_lock = DirectoryLock(directory, name, option, remedy)
        self._fd, new_lock._fd = new_lock._fd, self._fd
        os.close(new_lock._fd)
        message = "its lock was deleted under the run, perhaps with other files"
        print_err(f"WARNING: {option}={str(directory)!r}: {message}; it is created and locked again")

    def close(self) -> None:
        """Release the lock."""
        os.ftruncate(self._fd, 0)
        os.close(self._fd)  # not deleted, because another process may already have opened it


def _not_writable_error(directory: Path, error: OSError) -> CheckpointError:
    """Return the error of a --save directory that cannot be made or written, with its remedy."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    remedy = "free some space, or save elsewhere" if full else "give --save a writable directory"
    return CheckpointError(f"save={str(directory)!r} cannot be written ({error.strerror}): {remedy}")


class LocalStorage:
    """The storage (see storage.py) of a local directory."""

    poll_interval_s = 0.02
    stall_timeout_s = 600.0
    num_readers = 2  # one waits for the disk while the other hashes; more would compete for the CPU
    sequential = True
    open, lock = LocalFile, DirectoryLock

    def steps_in(self, directory: Path) -> list[int]:
        steps = {
            path: step
            for path in directory.glob("iter_*")
            if (step := step_from_name(path.name)) is not None and path.is_dir()
        }
        return sorted(step for path, step in steps.items() if not is_megatron_checkpoint(path))

    def list_files(self, directory: Path) -> dict[str, int]:
        try:
            with os.scandir(directory) as entries:
                return {entry.name: entry.stat().st_size for entry in entries if entry.is_file(follow_symlinks=False)}
        except (FileNotFoundError, NotADirectoryError):
            return {}

    def read(self, path: Path) -> bytes:
        return read_small_bytes(path, MAX_READ_BYTES, open_nofollow)

    @contextlib.contextmanager
    def open_new(self, path: Path) -> Iterator[Append]:
        with open(path, "xb", buffering=1 << 20) as file:
            written = 0

            def append(data: bytes | bytearray | memoryview) -> None:
                nonlocal written
                file.write(data)
                if file.tell() - written >= _WRITEBACK_BYTES and hasattr(os, "posix_fadvise"):
                    file.flush()
                    # Linux starts writing pages that it is asked to drop, so the disk works while the rest is hashed
                    os.posix_fadvise(file.fileno(), written, file.tell() - written, os.POSIX_FADV_DONTNEED)
                    written = file.tell()

            yield append
            file.flush()
            os.fsync(file.fileno())

    def write_text(self, path: Path, text: str, sync: bool = True) -> None:
        temporary = path.with_name(f".{path.name}.part")
        temporary.unlink(missing_ok=True)
        with open(temporary, "x", encoding="utf-8") as file:
            file.write(text)
        if sync:
            fsync_path(temporary)
        os.replace(temporary, path)
        if sync:
            fsync_path(path.parent)

    def delete(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def staging_path(self, final: Path) -> Path:
        return final.with_name(f".{final.name}.part")

    def make_staging(self, staging_dir: Path) -> None:
        try:
            remove(staging_dir)
        except OSError as error:
            message = f"{staging_dir} is in the way and cannot be removed ({error.strerror})"
            raise CheckpointError(
                f"save={str(staging_dir.parent)!r}: {message}: remove it, or save elsewhere"
            ) from None
        staging_dir.mkdir(parents=True)

    def discard(self, staging_dir: Path) -> None:
        with contextlib.suppress(OSError):
            remove(staging_dir)

    def publish(self, staging_dir: Path, final: Path) -> None:
        for name in ("manifest.json", "COMPLETE"):
            fsync_path(staging_dir / name)
        fsync_path(staging_dir)
        replaced = final.with_name(f".{final.name}{_REPLACED}")
        self.discard(replaced)
        if os.path.lexists(final):  # the step was saved before a rollback; see `remove_leftovers`
            os.replace(final, replaced)
        os.replace(staging_dir, final)
        self.discard(replaced)
        fsync_path(final.parent)

    def remove(self, checkpoint: Path) -> None:
        doomed = checkpoint.with_name(f".{checkpoint.name}.old")  # `remove_leftovers` finishes an interrupted deletion
        self.discard(doomed)
        os.replace(checkpoint, doomed)
        self.discard(doomed)

    def remove_leftovers(self, directory: Path) -> list[str]:
        leftovers = [path for path in directory.glob(".iter_*") if path.suffix in (".part", ".old", _REPLACED)]
        for leftover in leftovers:
            final = leftover.with_name(leftover.stem[1:])
            is_directory = leftover.is_dir() and not leftover.is_symlink()
            # the process was killed between the two renames of `publish`: the old checkpoint is still valid
            if leftover.suffix == _REPLACED and is_directory and not os.path.lexists(final):
                os.replace(leftover, final)
            else:
                self.discard(leftover)
        return sorted(path.name for path in leftovers)

    def check_writable(self, directory: Path, rank: int) -> None:
        test = directory / f".probe-{rank:05d}"
        try:
            directory.mkdir(parents=True, exist_ok=True)
            test.unlink(missing_ok=True)
            with open(test, "xb") as file:
                file.write(b"megalite")
            inject_fault("init.storage", rank, 0)
            fsync_path(test)
            os.replace(test, test.with_suffix(".renamed"))
            test.with_suffix(".renamed").unlink()
        except OSError as error:
            with contextlib.suppress(OSError):
                test.unlink(missing_ok=True)
            raise _not_writable_error(directory, error) from None

    def check_can_create(self, directory: Path) -> None:
        """Check that the directory can be made and written, and leave nothing behind. Raises CheckpointError."""
        try:
            nearest = next(path for path in (directory, *directory.parents) if path.exists())
            tempfile.TemporaryDirectory(prefix=".probe-", dir=nearest).cleanup()
        except OSError as error:
            raise _not_writable_error(directory, error) from None

    def check_space(self, directory: Path, needed: int) -> None:
        free = shutil.disk_usage(directory).free
        if free < needed:
            free_text, needed_text = _format_size(free), _format_size(needed)
            if free_text == needed_text:
                free_text, needed_text = f"{free:,} bytes", f"{needed:,} bytes"
            problem = f"has {free_text} left, a checkpoint needs {needed_text}"
            raise CheckpointError(f"save={str(directory)!r} {problem}: free some space, or save elsewhere")

    @contextlib.contextmanager
    def read_lock(self, checkpoint: Path) -> Iterator[None]:
        fd = open_nofollow(checkpoint / "COMPLETE", os.O_RDONLY)
        try:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(fd, fcntl.LOCK_SH)
            yield
        finally:
            os.close(fd)

    def in_use(self, checkpoint: Path) -> bool:
        return is_locked(checkpoint / "COMPLETE", fcntl.LOCK_EX) is True
