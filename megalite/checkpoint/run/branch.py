"""What a --save directory holds of later steps than the one where a run begins: of a branch that the run leaves.

It happens after a rollback (--ckpt-step), after --finetune, and where a run saves to a directory that was another's. If
it stayed, the next start would go on from it, and --keep-last would delete the new branch's checkpoints before it.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path

from megalite.checkpoint.run.log_lines import LogLines
from megalite.checkpoint.storage import left_branch
from megalite.checkpoint.storage.location import CheckpointError, Location, folder_of
from megalite.checkpoint.storage.protocol import storage_of


class Branch:
    """A run that begins at step `begin` and saves to `directory`, and from there to `kept`. Nothing is collective.

    `damaged`: what is of later steps was tried, and is not whole. Raises CheckpointError where something else is there
    behind a URL, where it cannot be renamed: COMPLETE cannot be put aside for all of it at once.
    """

    def __init__(self, directory: Location, kept: Location | None, begin: int, damaged: bool):
        self._places = [directory] if kept is None else [directory, kept]
        self._begin = begin
        self.damaged: set[int] = set()  # and stays where it is
        left = {step for place in self._places for step in _later(place, begin)}
        self.pending = bool(left)  # until there is a first save
        self.unsettled = False  # some are hidden yet: the first save has to stay, since it says that they are left
        fixed = next((place for place in self._places if not isinstance(place, Path)), None)
        if fixed is not None and (stuck := _later(fixed, begin)):
            if not damaged:
                copy = f" (with iter_{begin:07d} copied to it --load can be the same)" if begin else ""
                raise CheckpointError(
                    f"save={str(fixed)!r}: {_named(stuck)}, of later steps than {begin}, where this run begins, would "
                    "be taken for its own, and nothing can be renamed behind a URL: give --save another URL"
                    f"{copy}, delete them, or go on from the newest: --load without --ckpt-step and --finetune"
                )
            self.damaged = set(stuck)
        self.note = (
            f"{_named(left)} in {' and '.join(map(str, self._places))}: of later steps than {begin}, where this run "
            "begins; the first save renames that to abandoned-..., and deletes nothing. To go on from the newest "
            f"instead, stop now, and give --load {self._places[-1]} without --ckpt-step and --finetune"
            if left and not damaged
            else None
        )

    @contextlib.contextmanager
    def replaced_by(self, first: int, tell: LogLines) -> Iterator[None]:
        """Around the commit of the checkpoint `first`: if it is the run's first one, what is of later steps than the
        begin goes with it, or stays where the commit raises. `tell`: gets a line for people."""
        paths = [place for place in self._places if isinstance(place, Path)]
        if self.unsettled:
            self._settle(paths, tell)
        if not self.pending or not paths:
            yield
            return
        try:
            left = {path: [folder_of(path, n).name for n in reversed(_later(path, self._begin))] for path in paths}
            left_branch.hide(left, self._begin, first)
            yield
        except BaseException:
            with contextlib.suppress(OSError):  # the next start does it
                left_branch.settle(*paths)
            raise
        self.pending = False
        self._settle(paths, tell)

    def _settle(self, paths: list[Path], tell: LogLines) -> None:
        self.unsettled = True
        try:
            for path, new in left_branch.settle(*paths).items():
                renamed = ", ".join(f"{name} to {other}" for name, other in new.items())
                tell.append(
                    f"begun at step {self._begin}, the run has left what was there: renamed in {path} {renamed}"
                )
            self.unsettled = False
        except OSError as error:  # they are hidden
            later = "the next save or start tries again, and until then nothing is deleted or uploaded"
            tell.append(f"cannot rename what the run left at step {self._begin} ({error}): {later}")


def _later(directory: Location, begin: int) -> list[int]:
    return [step for step in storage_of(directory).steps_in(directory) if step > begin]


def _named(steps: Iterable[int]) -> str:
    """For people: all if they are few, else the ends."""
    names = [f"iter_{step:07d}" for step in sorted(steps)]
    return ", ".join(names) if len(names) < 4 else f"{len(names)} checkpoints, {names[0]} to {names[-1]}"
