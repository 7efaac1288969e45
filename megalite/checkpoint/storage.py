"""The directory of checkpoints as a file system sees it: names, durable writes, the lock of a run, the probe."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import socket
from pathlib import Path

from megalite.checkpoint.manifest import CheckpointError

TRACKER = "latest_checkpointed_iteration.txt"
LOCK = ".lock"


def folder_of(directory: str | Path, step: int) -> Path:
    return Path(directory) / f"iter_{step:07d}"


def part_of(final: Path) -> Path:
    """Where a checkpoint is built until it is complete."""
    return final.with_name(f".{final.name}.part")


def steps_in(directory: str | Path) -> list[int]:
    """The steps of all folders that look like checkpoints, ascending; strangers are left out."""
    if not Path(directory).is_dir():
        return []
    steps = {int(p.name[5:]) for p in Path(directory).glob("iter_*") if p.name[5:].isdecimal() and p.is_dir()}
    return sorted(step for step in steps if folder_of(directory, step).is_dir())


def sync(path: Path) -> None:
    """To disk: a file's bytes, or a directory's entries."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def write_durably(path: Path, text: str) -> None:
    """Beside it, synced, then renamed: whoever reads it sees the old text or the new, also after a power cut."""
    temporary = path.with_name(f".{path.name}.part")
    temporary.write_text(text, encoding="utf-8")
    sync(temporary)
    os.replace(temporary, path)
    sync(path.parent)


def remove(folder: Path) -> None:
    """Delete a checkpoint. Renamed first, so that an interrupted deletion is no checkpoint; `sweep` ends it."""
    gone = folder.with_name(f".{folder.name}.old")
    shutil.rmtree(gone, ignore_errors=True)
    os.replace(folder, gone)
    shutil.rmtree(gone, ignore_errors=True)


def sweep(directory: Path) -> list[str]:
    """Delete what saves and deletions that were cut short have left; the names. Only for who holds the lock."""
    left = [p for p in directory.glob(".iter_*") if p.suffix in (".part", ".old") and p.is_dir()]
    for folder in left:
        shutil.rmtree(folder, ignore_errors=True)
    return sorted(p.name for p in left)


def probe(directory: Path, rank: int) -> None:
    """Write and delete a small file as a checkpoint would be written. CheckpointError says what is in the way."""
    test = directory / f".probe-{rank:05d}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        test.write_bytes(b"megalite")
        sync(test)
        os.replace(test, test.with_suffix(".renamed"))
        test.with_suffix(".renamed").unlink()
    except OSError as error:
        with contextlib.suppress(OSError):
            test.unlink(missing_ok=True)
        raise CheckpointError(
            f"save={str(directory)!r} cannot be written ({error.strerror}): give --save a directory that can"
        ) from None


def check_space(directory: Path, needed: int) -> None:
    """`needed` bytes: one checkpoint. The ones that are there stay until a new one is complete."""
    free = shutil.disk_usage(directory).free
    if free < needed:
        raise CheckpointError(
            f"save={str(directory)!r} has {free / 2**30:.2f} GiB left, a checkpoint needs {needed / 2**30:.2f}: "
            "free some, or save elsewhere"
        )


class Lock:
    """One run per directory. The kernel drops it with the process that holds it, however that ends."""

    def __init__(self, directory: Path):
        path = directory / LOCK
        self._number = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(self._number, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._number, 200, 0).decode(errors="replace").strip() or "another process"
            os.close(self._number)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            raise CheckpointError(
                f"save={str(directory)!r} is in use by {holder}: stop that run, or save elsewhere"
            ) from None
        os.ftruncate(self._number, 0)
        os.pwrite(self._number, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)

    def close(self) -> None:
        os.ftruncate(self._number, 0)
        os.close(self._number)  # not unlinked: another process may have it open already


@contextlib.contextmanager
def reading(folder: Path):
    """Keep `folder` from being pruned by a run meanwhile (it asks with `in_use`). Best effort: a file system without
    locks gives none."""
    number = os.open(folder / "COMPLETE", os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):
            fcntl.flock(number, fcntl.LOCK_SH)
        yield
    finally:
        os.close(number)


def in_use(folder: Path) -> bool:
    """Whether somebody is `reading` it. flock of a read-only descriptor: on NFS this answers False."""
    try:
        number = os.open(folder / "COMPLETE", os.O_RDONLY)
    except OSError:
        return False
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in (errno.EWOULDBLOCK, errno.EACCES)
    finally:
        os.close(number)
    return False
