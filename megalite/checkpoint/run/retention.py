"""The checkpoints of a directory that are kept."""

from collections.abc import Collection
from dataclasses import dataclass, field

from megalite.checkpoint.format import manifest
from megalite.checkpoint.storage.location import CheckpointError, Location, folder_of
from megalite.checkpoint.storage.protocol import storage_of


@dataclass
class Retention:
    """Keeps the newest `last` complete checkpoints of a directory (None: all), and multiples of `interval`.

    known     steps known to be complete
    damaged   steps whose content a load has found wrong
    """

    directory: Location
    last: int | None
    interval: int | None = None
    known: set[int] = field(default_factory=set)
    damaged: Collection[int] = ()

    def keeps(self, step: int, newer: int) -> bool:
        """Whether to keep a step with `newer` checkpoints after it."""
        return self.last is None or newer < self.last or (self.interval is not None and step % self.interval == 0)

    def prune(self, saved: int | None = None, dry: bool = False) -> list[int]:
        """Delete the others, the oldest first; their steps. Not collective. Folders with a file KEEP, those that are
        being read, and `saved` are kept as well: after a rollback the step just saved is not the newest. Incomplete,
        damaged and other folders are neither counted nor touched. `dry`: delete nothing."""
        if self.last is None:
            return []
        storage = storage_of(self.directory)
        complete = []
        for step in storage.steps_in(self.directory):
            if step not in self.known and step not in self.damaged and is_complete(folder_of(self.directory, step)):
                self.known.add(step)
            if step in self.known:
                complete.append(step)
        deleted = []
        for place, step in enumerate(complete):
            folder = folder_of(self.directory, step)
            kept = step == saved or self.keeps(step, len(complete) - 1 - place)
            if not kept and "KEEP" not in storage.entries(folder) and not storage.in_use(folder):
                if not dry:
                    storage.remove(folder)
                    self.known.discard(step)
                deleted.append(step)
        return deleted


def is_complete(folder: Location) -> bool:
    """Its manifest is the one that COMPLETE names, and every file has its size; contents are not hashed."""
    try:
        manifest.load_whole(folder)
    except (CheckpointError, OSError):
        return False
    return True
