"""The interface of a --save directory, on a file system (file_system.py) or behind a URL (object_store.py).

A checkpoint is a folder iter_NNNNNNN with the file COMPLETE in it.
"""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol, cast

from megalite.checkpoint.storage.local_storage import DirectoryLock, LocalFile, LocalStorage
from megalite.checkpoint.storage.location import (
    LOCK_FILE,
    TRACKER,
    Append,
    P,
    RemotePath,
    checkpoint_dir,
    parse_location,
)
from megalite.checkpoint.storage.remote_storage import RemoteFile, RemoteLock, RemoteStorage

__all__ = ["LOCK_FILE", "TRACKER", "OpenFile", "RunLock", "Storage", "checkpoint_dir", "steps_in", "storage_of"]

OpenFile = LocalFile | RemoteFile
RunLock = DirectoryLock | RemoteLock  # one run per directory


class Storage(Protocol[P]):
    """All methods raise OSError for failures of the storage. None is collective."""

    poll_interval_s: float  # interval between two looks for files of other ranks
    stall_timeout_s: float  # how long nothing may change before such a wait ends
    num_readers: int  # threads per rank that read and hash at once
    sequential: bool  # they take turns at reading, from the start of a file to its end, and small reads cost little

    def steps_in(self, directory: P) -> list[int]: ...  # of all folders with the name of a checkpoint, ascending
    # Name and bytes of every regular file in it, links excluded. Empty where there is no such folder.
    def list_files(self, folder: P) -> dict[str, int]: ...
    def read(self, path: P) -> bytes: ...
    def open(self, path: P) -> OpenFile: ...
    # A new file: the block gets a function that appends bytes; after it the file is durable. If the block raises, the
    # file does not exist, or only a part of it.
    def open_new(self, path: P) -> AbstractContextManager[Append]: ...
    # A small file, whose readers see the old one or the new one, whole; with `sync` also after a power cut.
    def write_text(self, path: P, text: str, sync: bool = True) -> None: ...
    def delete(self, path: P) -> None: ...  # a file that may be missing

    def staging_path(
        self, final: P
    ) -> P: ...  # the folder in which the checkpoint `final` is built until it is complete
    def make_staging(self, part: P) -> None: ...  # make it, empty
    def discard(self, part: P) -> None: ...  # delete it, as far as that is possible
    # Make it the checkpoint `final`, durably, in place of any other. Files of `create` are durable already, but
    # manifest.json and COMPLETE need not be.
    def publish(self, part: P, final: P) -> None: ...
    def remove(self, folder: P) -> None: ...  # a checkpoint; an interrupted deletion leaves no checkpoint
    # Delete the remains of interrupted saves and deletions; their names. For the holder of the lock.
    def remove_leftovers(self, directory: P) -> list[str]: ...

    # Write and delete a small file as a checkpoint would be written. Raises CheckpointError with the obstacle.
    def check_writable(self, directory: P, rank: int) -> None: ...
    # Raises CheckpointError where one more checkpoint, of `needed` bytes, has no room.
    def check_space(self, directory: P, needed: int) -> None: ...
    # One run per directory. Raises CheckpointError that names the holder, where there can be only one.
    def lock(self, directory: P) -> RunLock: ...
    # Keep `folder` from being pruned by a run meanwhile (which asks `in_use`), as far as possible.
    def read_lock(self, folder: P) -> AbstractContextManager[None]: ...
    def in_use(self, folder: P) -> bool: ...


def storage_of(place: P) -> Storage[P]:
    known: object = RemoteStorage() if isinstance(place, RemotePath) else LocalStorage()
    return cast("Storage[P]", known)  # for this kind of place, which a type checker cannot conclude


def steps_in(directory: str | Path | RemotePath) -> list[int]:
    place = parse_location(directory)
    return storage_of(place).steps_in(place)
