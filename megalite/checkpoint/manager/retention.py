"""The rule that says which checkpoints of a directory are retained."""

from collections.abc import Collection
from dataclasses import dataclass, field

from megalite.checkpoint.format import manifest
from megalite.checkpoint.storage.location import CheckpointError, Location, checkpoint_dir
from megalite.checkpoint.storage.storage import storage_of


@dataclass
class RetentionPolicy:
    """A rule that keeps the newest `keep_last` complete checkpoints and the multiples of `interval`.

    Attributes:
        directory: The directory of the checkpoints.
        keep_last: The number of checkpoints to keep; None keeps all.
        interval: Also keep steps that are multiples of this number; None: no further ones.
        complete_steps: Steps that are known to be complete.
        damaged: Steps in which a load has found wrong contents.
    """

    directory: Location
    keep_last: int | None
    interval: int | None = None
    complete_steps: set[int] = field(default_factory=set)
    damaged: Collection[int] = ()

    def should_keep(self, step: int, newer: int) -> bool:
        """Return True if a step is kept when `newer` later checkpoints exist."""
        return (
            self.keep_last is None
            or newer < self.keep_last
            or (self.interval is not None and step % self.interval == 0)
        )

    def prune(self, saved: int | None = None, dry: bool = False) -> list[int]:
        """Delete the checkpoints that are not kept, oldest first, and return their steps. Not collective.

        Directories with a file KEEP, checkpoints that are being read, and `saved` are kept as well. After a rollback,
        the step that was just saved is not the newest. Incomplete, damaged and other directories are neither counted
        nor touched.

        Args:
            saved: The step that was just saved.
            dry: Delete nothing, and only return the steps.
        """
        if self.keep_last is None:
            return []
        storage = storage_of(self.directory)
        complete = []
        for step in storage.steps_in(self.directory):
            is_unknown = step not in self.complete_steps and step not in self.damaged
            if is_unknown and is_complete(checkpoint_dir(self.directory, step)):
                self.complete_steps.add(step)
            if step in self.complete_steps:
                complete.append(step)
        deleted = []
        for index, step in enumerate(complete):
            checkpoint = checkpoint_dir(self.directory, step)
            newer = len(complete) - 1 - index
            if step == saved or self.should_keep(step, newer):
                continue
            if "KEEP" not in storage.list_files(checkpoint) and not storage.in_use(checkpoint):
                if not dry:
                    storage.remove(checkpoint)
                    self.complete_steps.discard(step)
                deleted.append(step)
        return deleted


def is_complete(checkpoint: Location) -> bool:
    """Return True if the manifest is the one that COMPLETE names, and every file has its size.

    Contents are not hashed.
    """
    try:
        manifest.load_complete_manifest(checkpoint)
    except (CheckpointError, OSError):
        return False
    return True
