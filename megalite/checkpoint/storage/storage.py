"""The interface of a --save directory, on a file system (local_storage.py) or behind a URL (remote_storage.py).

A checkpoint is a directory iter_NNNNNNN that contains the file COMPLETE.
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
    """The operations on a --save directory.

    All methods raise OSError for failures of the storage. None is collective.

    Attributes:
        poll_interval_s: Seconds between two polls for the files of other ranks.
        stall_timeout_s: Seconds without any change after which such a wait ends.
        num_readers: Threads per rank that read and hash concurrently.
        sequential: The threads take turns at reading, from the start of a file to its end, and small reads are cheap.
    """

    poll_interval_s: float
    stall_timeout_s: float
    num_readers: int
    sequential: bool

    def steps_in(self, directory: P) -> list[int]:
        """Return the steps of all directories with the name of a checkpoint, ascending."""
        ...

    def list_files(self, directory: P) -> dict[str, int]:
        """Return the name and size of every regular file, without links; {} if there is no such directory."""
        ...

    def read(self, path: P) -> bytes:
        """Return the contents of a small file."""
        ...

    def open(self, path: P) -> OpenFile:
        """Open a file for reading ranges."""
        ...

    def open_new(self, path: P) -> AbstractContextManager[Append]:
        """Create a file. The context is a function that appends bytes, and the file is durable after it.

        If the context raises, the file does not exist, or only a part of it.
        """
        ...

    def write_text(self, path: P, text: str, sync: bool = True) -> None:
        """Write a small file atomically, so that readers see the old or the new contents.

        With `sync`, this also holds after a power cut.
        """
        ...

    def delete(self, path: P) -> None:
        """Delete a file, which may be missing."""
        ...

    def staging_path(self, final: P) -> P:
        """Return the directory in which the checkpoint `final` is built until it is complete."""
        ...

    def make_staging(self, staging_dir: P) -> None:
        """Make the staging directory, and empty it if it exists."""
        ...

    def discard(self, staging_dir: P) -> None:
        """Delete the staging directory, as far as possible."""
        ...

    def publish(self, staging_dir: P, final: P) -> None:
        """Turn the staging directory durably into the checkpoint `final`, and replace any other one.

        The files of `open_new` are durable already, but manifest.json and COMPLETE need not be.
        """
        ...

    def remove(self, checkpoint: P) -> None:
        """Delete a checkpoint. If the deletion is interrupted, the checkpoint is no longer valid."""
        ...

    def remove_leftovers(self, directory: P) -> list[str]:
        """Delete the remains of interrupted saves and deletions, and return their names.

        Only the holder of the lock may call this.
        """
        ...

    def check_writable(self, directory: P, rank: int) -> None:
        """Write and delete a small file in the way a checkpoint is written. Raises CheckpointError with the reason."""
        ...

    def check_space(self, directory: P, needed: int) -> None:
        """Raise CheckpointError if there is no space for another `needed` bytes."""
        ...

    def lock(self, directory: P) -> RunLock:
        """Lock the directory for one run. Raises CheckpointError naming the holder if locks are exclusive."""
        ...

    def read_lock(self, checkpoint: P) -> AbstractContextManager[None]:
        """Keep other runs from pruning the checkpoint within the context, as far as possible (see `in_use`)."""
        ...

    def in_use(self, checkpoint: P) -> bool:
        """Return True if a process holds a read lock on the checkpoint."""
        ...


def storage_of(location: P) -> Storage[P]:
    """Return the storage of a path or URL."""
    storage: object = RemoteStorage() if isinstance(location, RemotePath) else LocalStorage()
    return cast("Storage[P]", storage)  # a type checker cannot infer that it fits the type of the location


def steps_in(directory: str | Path | RemotePath) -> list[int]:
    """Return the steps of the checkpoints in a directory, ascending."""
    location = parse_location(directory)
    return storage_of(location).steps_in(location)
