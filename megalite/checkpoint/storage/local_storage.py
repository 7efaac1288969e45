"""A --save directory on a file system. A checkpoint is built in `.iter_0000500.part` and renamed: then it exists."""

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
from megalite.common.fault_injection import inject_fault
from megalite.common.safe_open import open_nofollow, remove
from megalite.config.console import print_err
from megalite.config.text_file import read_small_bytes

_REPLACED = ".replaced"
_BEGIN_WRITING = 1 << 22  # bytes
MAX_READ_BYTES = 1 << 30  # a manifest is the largest file that is read whole


def _size(count: int) -> str:
    units = (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10))
    return next((f"{count / size:,.1f} {unit}" for unit, size in units if count >= size), f"{count} bytes")


def fsync_path(path: Path) -> None:
    """Write a file's bytes, or a directory's entries, to the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


class LocalFile:
    """An open file, never behind a link, for reading ranges."""

    def __init__(self, path: Path):
        self._path = path
        self._number = open_nofollow(path, os.O_RDONLY)
        self.size = os.fstat(self._number).st_size

    def pread(self, target: memoryview, begin: int) -> None:
        """Fill `target` with the bytes from `begin`. ValueError where the file ends early; OSError. Thread-safe."""
        done = 0
        while done < len(target):
            count = os.preadv(self._number, [target[done : done + (1 << 30)]], begin + done)
            if count == 0:
                raise ValueError(f"{self._path}: ends at byte {begin + done}, earlier than when it was opened")
            done += count

    def close(self) -> None:
        os.close(self._number)


def is_locked(path: Path, kind: int = fcntl.LOCK_SH) -> bool | None:
    """Whether another process holds a lock that excludes one of this `kind`; None where unknown, as LOCK_EX on NFS."""
    try:
        number = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return None
    try:
        fcntl.flock(number, kind | fcntl.LOCK_NB)
    except OSError as error:
        return True if error.errno in (errno.EWOULDBLOCK, errno.EACCES) else None
    finally:
        os.close(number)
    return False


class DirectoryLock:
    """One run per directory; the kernel drops the lock with its process. `option`: the flag that gave the directory.
    Raises CheckpointError where another process holds it, OSError where none can."""

    def __init__(self, directory: Path, name: str = LOCK_FILE, option: str = "save", remedy: str = "save elsewhere"):
        self._path, self._description = directory / name, (name, option, remedy)
        self._number = open_nofollow(self._path, os.O_RDWR | os.O_CREAT)
        try:
            self._take()
        except OSError as error:
            holder = os.pread(self._number, 200, 0).decode(errors="replace").strip() or "another process"
            os.close(self._number)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            used = f"{option}={str(directory)!r} is in use by {holder}"
            raise CheckpointError(f"{used}: stop that run, or {remedy}") from None
        os.ftruncate(self._number, 0)
        since = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
        os.pwrite(self._number, f"process {os.getpid()} on {socket.gethostname()} since {since}\n".encode(), 0)

    def _take(self) -> None:
        for _ in range(4):  # a process in `is_held` has it for a moment
            with contextlib.suppress(BlockingIOError):
                return fcntl.flock(self._number, fcntl.LOCK_EX | fcntl.LOCK_NB)
            time.sleep(0.05)
        fcntl.flock(self._number, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def check_held(self) -> None:
        """Make and take the lock again if its file was deleted. CheckpointError where another has that one, OSError."""
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.stat(self._path, follow_symlinks=False), os.fstat(self._number)):
                return
        directory, (name, option, remedy) = self._path.parent, self._description
        directory.mkdir(parents=True, exist_ok=True)
        again = DirectoryLock(directory, name, option, remedy)
        self._number, again._number = again._number, self._number
        os.close(again._number)
        lost = "its lock was deleted under the run, perhaps with other files"
        print_err(f"WARNING: {option}={str(directory)!r}: {lost}; it is made and locked again")

    def close(self) -> None:
        os.ftruncate(self._number, 0)
        os.close(self._number)  # not unlinked: another process may have it open already


def _not_writable_error(directory: Path, error: OSError) -> CheckpointError:
    """Return the error of a --save directory that cannot be made or written, with its remedy."""
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    remedy = "free some space, or save elsewhere" if full else "give --save a writable directory"
    return CheckpointError(f"save={str(directory)!r} cannot be written ({error.strerror}): {remedy}")


class LocalStorage:
    """Storage (protocol.py) of a local directory."""

    poll_interval_s = 0.02
    stall_timeout_s = 600.0
    num_readers = 2  # one waits for the disk while another hashes; more would compete for the processor
    sequential = True
    open, lock = LocalFile, DirectoryLock

    def steps_in(self, directory: Path) -> list[int]:
        steps = {
            p: step for p in directory.glob("iter_*") if (step := step_from_name(p.name)) is not None and p.is_dir()
        }
        return sorted(step for p, step in steps.items() if not is_megatron_checkpoint(p))

    def list_files(self, folder: Path) -> dict[str, int]:
        try:
            with os.scandir(folder) as entries:
                return {e.name: e.stat().st_size for e in entries if e.is_file(follow_symlinks=False)}
        except (FileNotFoundError, NotADirectoryError):
            return {}

    def read(self, path: Path) -> bytes:
        return read_small_bytes(path, MAX_READ_BYTES, open_nofollow)

    @contextlib.contextmanager
    def open_new(self, path: Path) -> Iterator[Append]:
        with open(path, "xb", buffering=1 << 20) as file:
            begun = 0

            def append(part: bytes | bytearray | memoryview) -> None:
                nonlocal begun
                file.write(part)
                if file.tell() - begun >= _BEGIN_WRITING and hasattr(os, "posix_fadvise"):
                    file.flush()
                    # Linux begins to write pages that it is told to drop, so the disk works while the rest is hashed
                    os.posix_fadvise(file.fileno(), begun, file.tell() - begun, os.POSIX_FADV_DONTNEED)
                    begun = file.tell()

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

    def make_staging(self, part: Path) -> None:
        try:
            remove(part)
        except OSError as error:
            wrong = f"{part} is in the way and cannot be removed ({error.strerror})"
            raise CheckpointError(f"save={str(part.parent)!r}: {wrong}: remove it, or save elsewhere") from None
        part.mkdir(parents=True)

    def discard(self, part: Path) -> None:
        with contextlib.suppress(OSError):
            remove(part)

    def publish(self, part: Path, final: Path) -> None:
        for name in ("manifest.json", "COMPLETE"):
            fsync_path(part / name)
        fsync_path(part)
        old = final.with_name(f".{final.name}{_REPLACED}")
        self.discard(old)
        if os.path.lexists(final):  # the same step again, after a rollback; see `sweep`
            os.replace(final, old)
        os.replace(part, final)
        self.discard(old)
        fsync_path(final.parent)

    def remove(self, folder: Path) -> None:
        old = folder.with_name(f".{folder.name}.old")  # renamed first: `sweep` ends an interrupted deletion
        self.discard(old)
        os.replace(folder, old)
        self.discard(old)

    def remove_leftovers(self, directory: Path) -> list[str]:
        left = [p for p in directory.glob(".iter_*") if p.suffix in (".part", ".old", _REPLACED)]
        for folder in left:
            final = folder.with_name(folder.stem[1:])
            is_ours = folder.is_dir() and not folder.is_symlink()
            # killed between two renames: it is still valid
            if folder.suffix == _REPLACED and is_ours and not os.path.lexists(final):
                os.replace(folder, final)
            else:
                self.discard(folder)
        return sorted(p.name for p in left)

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
        """Check that the directory could be made and written, and create nothing that stays. Raises CheckpointError."""
        try:
            nearest = next(path for path in (directory, *directory.parents) if path.exists())
            tempfile.TemporaryDirectory(prefix=".probe-", dir=nearest).cleanup()
        except OSError as error:
            raise _not_writable_error(directory, error) from None

    def check_space(self, directory: Path, needed: int) -> None:
        if (free := shutil.disk_usage(directory).free) < needed:
            left, wanted = _size(free), _size(needed)
            left, wanted = (left, wanted) if left != wanted else (f"{free:,} bytes", f"{needed:,} bytes")
            room = f"has {left} left, a checkpoint needs {wanted}"
            raise CheckpointError(f"save={str(directory)!r} {room}: free some space, or save elsewhere")

    @contextlib.contextmanager
    def read_lock(self, folder: Path) -> Iterator[None]:
        number = open_nofollow(folder / "COMPLETE", os.O_RDONLY)
        try:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(number, fcntl.LOCK_SH)
            yield
        finally:
            os.close(number)

    def in_use(self, folder: Path) -> bool:
        return is_locked(folder / "COMPLETE", fcntl.LOCK_EX) is True
