"""Which checkpoints of a directory stay."""

from __future__ import annotations

from collections.abc import Collection

from megalite.checkpoint.format import manifest as manifests
from megalite.checkpoint.storage.location import CheckpointError, Location
from megalite.checkpoint.storage.protocol import folder_of, storage_of


def prune(
    directory: Location,
    keep: int,
    retain_interval: int | None,
    known: set[int],
    *,
    damaged: Collection[int] = (),
    saved: int | None = None,
    dry: bool = False,
) -> list[int]:
    """Delete all but the newest `keep` complete checkpoints; returns their steps. Not collective.

    What stays: multiples of `retain_interval`, folders with a file KEEP in them, one that is being read, and `saved`:
    after a rollback the step just saved is not the newest by number. What is not complete, or is a stranger, is
    neither counted nor touched, nor are those of `damaged`, whose content a load has found wrong. `known`: steps
    that need no look; it is added to. `dry`: delete nothing.
    """
    storage = storage_of(directory)
    complete = []
    for step in storage.steps_in(directory):
        if step not in known and step not in damaged and is_complete(folder_of(directory, step)):
            known.add(step)
        if step in known:
            complete.append(step)
    gone = []
    for step in complete[:-keep]:
        folder = folder_of(directory, step)
        kept = step == saved or (retain_interval is not None and step % retain_interval == 0)
        if not kept and "KEEP" not in storage.entries(folder) and not storage.in_use(folder):
            if not dry:
                storage.remove(folder)
                known.discard(step)
            gone.append(step)
    return gone


def is_complete(folder: Location) -> bool:
    """Its manifest is the one that COMPLETE names, and every file has its size; contents are not hashed."""
    try:
        files = manifests.load(folder).files
        sizes = storage_of(folder).entries(folder)
        return all(sizes.get(name) == stamp.size for name, stamp in files.items())
    except (CheckpointError, OSError):
        return False
