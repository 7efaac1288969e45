"""Renames the checkpoints of a branch that a run has left: killed at any moment, one branch or the other is whole.

A run that begins at step 200 of a directory with 280 and 300 makes a branch. These must disappear as soon as it has a
checkpoint of its own, and no earlier. Many folders cannot be renamed at once, so it takes two steps, either of which
may be interrupted:

    iter_0000300 -> .iter_0000300.left-at-0000200.for-0000250    hidden: nothing lists, counts or deletes it
    iter_0000250 is committed
    -> abandoned-iter_0000300-left-at-0000200                    or, where it was not committed, back

They stay in the same directory: a read-only checkpoint can be renamed there, but not moved elsewhere, and relative
links stay valid.
"""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

_HIDDEN = re.compile(r"\.(iter_\d{7,})\.(left-at-\d{7,})\.for-(\d{7,})")


def hide(places: Mapping[Path, Sequence[str]], begin: int, first: int) -> None:
    """Hide these checkpoints of these directories, for a run that began at step `begin` and is about to commit its
    first checkpoint, that of step `first`. Raises OSError; call `settle` afterwards in any case."""
    todo = [(directory, name) for directory, names in places.items() for name in names]
    taken = f"iter_{first:07d}"  # before the others, so that it exists again only when it is the new one
    for directory, name in sorted(todo, key=lambda x: x[1] != taken):
        os.replace(directory / name, directory / f".{name}.left-at-{begin:07d}.for-{first:07d}")
    for directory in places:
        sync(directory)


def settle(*directories: Path) -> dict[Path, dict[str, str]]:
    """End the work of `hide`: {directory: {old name: new name}}. Where the checkpoint that they were hidden for was
    committed, to the first directory, they get new names, else their old ones, or new ones if those are taken. Raises
    OSError."""
    new: dict[Path, dict[str, str]] = {}
    matches = [(d, path, _HIDDEN.fullmatch(path.name)) for d in directories for path in d.glob(".iter_*")]
    hidden = [(directory, path, match.groups()) for directory, path, match in matches if match]
    hidden.sort(key=lambda x: (x[2][0] == f"iter_{x[2][2]}", x[0] == directories[0], x[1]))  # last: see `hide`
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
    """Write a file's bytes, or a directory's entries, to the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)
