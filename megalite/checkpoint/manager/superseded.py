"""`Branch`: what becomes of checkpoints of later steps than the one where a run begins, of a branch that it leaves.

These exist after a rollback (--ckpt-step), after --finetune, and where a run saves to another run's directory. If they
stayed, the next start would continue from them, and --keep-last would delete the new branch's checkpoints first. They
must disappear as soon as the run has a checkpoint of its own, and no earlier: killed at any moment, one branch or the
other is whole. Many folders cannot be renamed at once, so it takes two steps, either of which may be interrupted:

    iter_0000300 -> .iter_0000300.left-at-0000200.for-0000250    hidden: nothing lists, counts or deletes it
    iter_0000250 is committed
    -> abandoned-iter_0000300-left-at-0000200                    or, where it was not committed, back

They stay in the directory: a read-only checkpoint can be renamed, but not moved, and relative links stay valid.
"""

import contextlib
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from megalite.checkpoint.storage.local_storage import fsync_path
from megalite.checkpoint.storage.location import CheckpointError, Location, RemotePath, checkpoint_dir
from megalite.checkpoint.storage.storage import storage_of

_HIDDEN = re.compile(r"\.(iter_\d{7,})\.(left-at-\d{7,})\.for-(\d{7,})")


def hide_later(places: Iterable[Path], begin: int, first: int) -> None:
    """Hide the checkpoints of these directories that are of later steps than `begin`, where a run began that is about
    to commit its first checkpoint, that of step `first`. Raises OSError; call `settle` afterwards in any case."""
    todo = [checkpoint_dir(place, step) for place in places for step in reversed(_later(place, begin))]
    taken = f"iter_{first:07d}"  # before the others, so that it exists again only when it is the new one
    for folder in sorted(todo, key=lambda folder: folder.name != taken):
        os.replace(str(folder), str(folder.parent / f".{folder.name}.left-at-{begin:07d}.for-{first:07d}"))
    for place in places:
        fsync_path(place)


def finish_renames(*places: Location) -> dict[Path, dict[str, str]]:
    """End the work of `hide` in those that are directories: {directory: {old name: new name}}. Where the checkpoint
    that they were hidden for was committed, to the first one, they get new names, else their old ones, or new ones if
    those are taken. Raises OSError."""
    directories = [place for place in places if isinstance(place, Path)]
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
        fsync_path(directory)
    return new


class SupersededCheckpoints:
    """A run that begins at step `begin`, saves to the first of `places`, and uploads to the other. Not collective.
    `damaged`: the checkpoints of later steps were tried and are not whole; behind a URL they stay. Raises
    CheckpointError where others of later steps are behind a URL, where no folder can be renamed."""

    def __init__(self, places: Sequence[Location] = (), begin: int = 0, damaged: bool = False):
        self._paths, self._begin = [place for place in places if isinstance(place, Path)], begin
        later = {place: steps for place in places if (steps := _later(place, begin))}
        for place, steps in later.items():
            if isinstance(place, RemotePath) and not damaged:
                copy = f" (and copy iter_{begin:07d} to it, to load from it as well)" if begin else ""
                why = "they would be taken for its own, and cannot be renamed behind a URL; give --save another URL"
                newest = "continue from the newest: --load without --ckpt-step and --finetune"
                raise CheckpointError(
                    f"save={str(place)!r} holds {_named(steps)}, of later steps than {begin}, where this run begins: "
                    f"{why}{copy}, delete them, or {newest}"
                )
        self.damaged = {step for place, steps in later.items() if isinstance(place, RemotePath) for step in steps}
        self.pending = bool(later)  # until there is a first save
        self.unfinished = False  # some are still hidden: the first save must stay, since it shows that they are left
        self.message: str | None = None
        if later and not damaged:
            self.message = (
                f"{_named(set().union(*later.values()))} in {' and '.join(map(str, places))}: of later steps than "
                f"{begin}, where this run begins; the first save renames them to abandoned-... and deletes nothing. "
                f"To continue from them, stop now and give --load {places[-1]} without --ckpt-step and --finetune"
            )

    @contextlib.contextmanager
    def superseded_by(self, first: int, tell: Callable[[str], None]) -> Iterator[None]:
        """Around the commit of step `first`: with the run's first checkpoint, all of later steps than `begin` are
        renamed, unless the commit raises. `tell`: gets lines for people."""
        if self.unfinished:
            self._settle(tell)
        if not self.pending or not self._paths:
            yield
            return
        try:
            hide_later(self._paths, self._begin, first)
            yield
        except BaseException:
            with contextlib.suppress(OSError):  # the next start does it
                finish_renames(*self._paths)
            raise
        self.pending = False
        self._settle(tell)

    def _settle(self, tell: Callable[[str], None]) -> None:
        self.unfinished = True
        try:
            for path, new in finish_renames(*self._paths).items():
                renamed = ", ".join(f"{name} to {other}" for name, other in new.items())
                began = f"the run began at step {self._begin} and left the branch of later checkpoints"
                tell(f"{began}: renamed in {path} {renamed}")
            self.unfinished = False
        except OSError as error:  # they stay hidden
            later = "the next save or start tries again, and until then nothing is deleted or uploaded"
            tell(f"cannot rename the checkpoints that the run left at step {self._begin} ({error}): {later}")


def _later(directory: Location, begin: int) -> list[int]:
    return [step for step in storage_of(directory).steps_in(directory) if step > begin]


def _named(steps: Iterable[int]) -> str:
    """Their names, or how many they are, with the first and the last."""
    names = [f"iter_{step:07d}" for step in sorted(steps)]
    return ", ".join(names) if len(names) < 4 else f"{len(names)} checkpoints, {names[0]} to {names[-1]}"
