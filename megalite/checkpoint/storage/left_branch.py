"""Renaming the checkpoints of a branch that a run has left: killed at any moment, one branch or the other is whole.

A run that begins at step 200 of a directory where 280 and 300 are makes a branch. They must be gone as soon as it has
a checkpoint of its own, and be there as long as it has none. Many folders cannot be renamed at once, so it takes two
steps, and any of the renames may be the last:

    iter_0000300 -> .iter_0000300.left-at-0000200.for-0000250    hidden: nothing lists, counts or deletes it
    iter_0000250 is committed
    -> abandoned-iter_0000300-left-at-0000200                    or, where it was not committed, back

They stay in the same folder: a checkpoint that may not be written to can be renamed there, though not moved elsewhere,
and a relative link still points where it did.
"""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

_HIDDEN = re.compile(r"\.(iter_\d{7,})\.(left-at-\d{7,})\.for-(\d{7,})")


def hide(places: Mapping[Path, Sequence[str]], begin: int, first: int) -> None:
    """Rename the checkpoints of these names in these directories, for a run that began at step `begin` and is about to
    have its first checkpoint, that of step `first`. Raises OSError; `settle` is for after it in any case."""
    todo = [(directory, name) for directory, names in places.items() for name in names]
    taken = f"iter_{first:07d}"  # before the others: that it is there will mean that it is the new one
    for directory, name in sorted(todo, key=lambda x: x[1] != taken):
        os.replace(directory / name, directory / f".{name}.left-at-{begin:07d}.for-{first:07d}")
    for directory in places:
        sync(directory)


def settle(*directories: Path) -> dict[Path, dict[str, str]]:
    """End what `hide` began in them: the new names by the old ones, where the checkpoint that they were hidden for is
    there, in the first of them, where the run commits. Else they go back; where a name is taken it is a new one too.
    Raises OSError."""
    new: dict[Path, dict[str, str]] = {}
    hidden = sorted(
        (
            (directory, path, found.groups())
            for directory in directories
            for path in directory.glob(".iter_*")
            if (found := _HIDDEN.fullmatch(path.name))
        ),
        key=lambda x: (x[2][0] == f"iter_{x[2][2]}", x[0] == directories[0], x[1]),  # last: see `hide`
    )
    committed = {first: (directories[0] / f"iter_{first}").exists() for _, _, (_, _, first) in hidden}
    for directory, path, (name, left, first) in hidden:
        if not committed[first] and not os.path.lexists(directory / name):
            os.replace(path, directory / name)
            continue
        number, target = 1, directory / f"abandoned-{name}-{left}"
        while os.path.lexists(target):
            number += 1
            target = directory / f"abandoned-{name}-{left}-{number}"
        os.replace(path, target)
        new.setdefault(directory, {})[name] = target.name
    for directory in {directory for directory, _, _ in hidden}:
        sync(directory)
    return new


def sync(path: Path) -> None:
    """To disk: a file's bytes, or a directory's entries."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
