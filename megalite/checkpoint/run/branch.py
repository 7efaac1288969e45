"""What a --save directory holds of later steps than the one where a run begins: of a branch that the run leaves.

It happens after a rollback (--ckpt-step), after --finetune, and where a run saves to a directory that was another's. If
it stayed, the next start would continue from it, and --keep-last would delete the new branch's checkpoints before it.
"""

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from megalite.checkpoint.run.log_lines import LogLines
from megalite.checkpoint.storage import left_branch
from megalite.checkpoint.storage.location import CheckpointError, Location, Url, folder_of
from megalite.checkpoint.storage.protocol import storage_of


class Branch:
    """A run that begins at step `begin` and saves to the first of `places`, from there to the other. Not collective.

    `damaged`: what is of later steps was tried, and is not whole; behind a URL it stays where it is. Raises
    CheckpointError where something else of later steps is behind a URL, where no folder can be renamed.
    """

    def __init__(self, places: Sequence[Location] = (), begin: int = 0, damaged: bool = False):
        self._paths, self._begin = [place for place in places if isinstance(place, Path)], begin
        later = {place: steps for place in places if (steps := _later(place, begin))}
        for place, steps in later.items():
            if isinstance(place, Url) and not damaged:
                copy = f" (with iter_{begin:07d} copied to it --load can be the same)" if begin else ""
                raise CheckpointError(
                    f"save={str(place)!r} holds {_named(steps)}, of later steps than {begin}, where this run begins: "
                    "they would be taken for its own, and cannot be renamed behind a URL; give --save another URL"
                    f"{copy}, delete them, or continue from the newest: --load without --ckpt-step and --finetune"
                )
        self.damaged = {step for place, steps in later.items() if isinstance(place, Url) for step in steps}
        self.pending = bool(later)  # until there is a first save
        self.unsettled = False  # some are hidden yet: the first save has to stay, since it says that they are left
        self.note: str | None = None
        if later and not damaged:
            self.note = (
                f"{_named(set().union(*later.values()))} in {' and '.join(map(str, places))}: of later steps than "
                f"{begin}, where this run begins; the first save renames them to abandoned-..., and deletes nothing. "
                f"To continue from them, stop now, and give --load {places[-1]} without --ckpt-step and --finetune"
            )

    @contextlib.contextmanager
    def replaced_by(self, first: int, tell: LogLines) -> Iterator[None]:
        """Around the commit of the checkpoint `first`: if it is the run's first one, all of later steps than `begin` is
        renamed with it, or stays where the commit raises. `tell`: gets a line for people."""
        if self.unsettled:
            self._settle(tell)
        if not self.pending or not self._paths:
            yield
            return
        try:
            left = {
                path: [folder_of(path, n).name for n in reversed(_later(path, self._begin))] for path in self._paths
            }
            left_branch.hide(left, self._begin, first)
            yield
        except BaseException:
            with contextlib.suppress(OSError):  # the next start does it
                left_branch.settle(*self._paths)
            raise
        self.pending = False
        self._settle(tell)

    def _settle(self, tell: LogLines) -> None:
        self.unsettled = True
        try:
            for path, new in left_branch.settle(*self._paths).items():
                renamed = ", ".join(f"{name} to {other}" for name, other in new.items())
                began = f"the run began at step {self._begin} and left the branch of later checkpoints"
                tell.append(f"{began}: renamed in {path} {renamed}")
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
