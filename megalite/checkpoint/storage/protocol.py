"""What a --save directory must be able to do, on a file system (file_system.py) or behind a URL (object_store.py).

A checkpoint is the folder iter_NNNNNNN with the file COMPLETE in it; nothing else is believed.
"""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol, cast

from megalite.checkpoint.storage.file_system import LocalFile, LocalStorage, Lock
from megalite.checkpoint.storage.location import LOCK, TRACKER, Append, P, Url, folder_of, parse
from megalite.checkpoint.storage.object_store import Claim, RemoteFile, RemoteStorage

__all__ = ["LOCK", "TRACKER", "OpenFile", "RunLock", "Storage", "folder_of", "steps_in", "storage_of"]


OpenFile = LocalFile | RemoteFile
RunLock = Lock | Claim  # one run per directory


class Storage(Protocol[P]):
    """All raise OSError for what goes wrong. No method is collective."""

    look_every_s: float  # a wait for files of other ranks looks this often
    patience_s: float  # ... and gives up when nothing has changed for so long
    readers: int  # threads per rank that read and hash at once
    in_order: bool  # ... taking turns at reading, from the start of a file to its end, and small reads cost little

    def steps_in(self, directory: P) -> list[int]:
        """The steps of all folders that look like checkpoints, ascending; strangers are left out."""
        ...

    def entries(self, folder: P) -> dict[str, int]:
        """Name and bytes of every plain file in it; links are none. Empty where there is no such folder."""
        ...

    def read(self, path: P) -> bytes: ...

    def open(self, path: P) -> OpenFile: ...

    def create(self, path: P) -> AbstractContextManager[Append]:
        """A new file: `with` gives a function that appends bytes; after it the file is durable. If the block raises,
        it does not exist, or in part only."""
        ...

    def put(self, path: P, text: str, sync: bool = True) -> None:
        """A small file; whoever reads it sees the one before or this one, whole. `sync`: also after a power cut."""
        ...

    def delete(self, path: P) -> None:
        """A file that may be missing."""
        ...

    def part_of(self, final: P) -> P:
        """Where a checkpoint is built until it is complete."""
        ...

    def begin(self, part: P) -> None:
        """An empty folder to build in."""
        ...

    def discard(self, part: P) -> None:
        """What was built there, as far as it can be deleted."""
        ...

    def publish(self, part: P, final: P) -> None:
        """Make what is complete the checkpoint `final`, durably, in the place of one that may be there. Files of
        `create` are durable already, manifest.json and COMPLETE need not be."""
        ...

    def remove(self, folder: P) -> None:
        """Delete a checkpoint so that an interrupted deletion is no checkpoint."""
        ...

    def sweep(self, directory: P) -> list[str]:
        """Clear up what saves and deletions that were cut short have left; the names. For the holder of the lock."""
        ...

    def probe(self, directory: P, rank: int) -> None:
        """Write and delete a small file as a checkpoint would be written. CheckpointError says what is in the way."""
        ...

    def check_space(self, directory: P, needed: int) -> None:
        """`needed` bytes: one checkpoint; those that are there stay until it is complete. Raises CheckpointError."""
        ...

    def lock(self, directory: P) -> RunLock:
        """One run per directory. Raises CheckpointError that names the holder, where there can be only one."""
        ...

    def reading(self, folder: P) -> AbstractContextManager[None]:
        """Keep `folder` from being pruned by a run meanwhile (it asks with `in_use`), as far as possible."""
        ...

    def in_use(self, folder: P) -> bool:
        """Whether somebody is `reading` it."""
        ...


def storage_of(place: P) -> Storage[P]:
    known: Storage[Path] | Storage[Url] = RemoteStorage() if isinstance(place, Url) else LocalStorage()
    return cast("Storage[P]", known)  # of this kind of place, which no type can say of an isinstance


def steps_in(directory: str | Path | Url) -> list[int]:
    place = parse(directory)
    return storage_of(place).steps_in(place)
