"""Checkpoints of later steps than the one where a run begins: those of a branch that the run leaves.

They exist after a rollback (--ckpt-step), after --finetune, and where a run saves to another run's directory. If they
stayed, the next start would continue from them, and --keep-last would delete the new branch's checkpoints first.
"""

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

from megalite.checkpoint.storage import left_branch
from megalite.checkpoint.storage.location import CheckpointError, Location, Url, folder_of
from megalite.checkpoint.storage.protocol import storage_of


class Branch:
    """A run that begins at step `begin`, saves to the first of `places`, and uploads to the other. Not collective.

    `damaged`: the checkpoints of later steps were tried and are not whole; behind a URL they stay. Raises
    CheckpointError where others of later steps are behind a URL, where no folder can be renamed.
    """

    def __init__(self, places: Sequence[Location] = (), begin: int = 0, damaged: bool = False):
        self._paths, self._begin = [place for place in places if isinstance(place, Path)], begin
        later = {place: steps for place in places if (steps := _later(place, begin))}
        for place, steps in later.items():
            if isinstance(place, Url) and not damaged:
                copy = f" (and copy iter_{begin:07d} to it, to load from it as well)" if begin else ""
                raise CheckpointError(
                    f"save={str(place)!r} holds {_named(steps)}, of later steps than {begin}, where this run begins: "
                    "they would be taken for its own, and cannot be renamed behind a URL; give --save another URL"
                    f"{copy}, delete them, or continue from the newest: --load without --ckpt-step and --finetune"
                )
        self.damaged = {step for place, steps in later.items() if isinstance(place, Url) for step in steps}
        self.pending = bool(later)  # until there is a first save
        self.unsettled = False  # some are still hidden: the first save must stay, since it shows that they are left
        self.note: str | None = None
        if later and not damaged:
            self.note = (
                f"{_named(set().union(*later.values()))} in {' and '.join(map(str, places))}: of later steps than "
                f"{begin}, where this run begins; the first save renames them to abandoned-... and deletes nothing. "
                f"To continue from them, stop now and give --load {places[-1]} without --ckpt-step and --finetune"
            )

    @contextlib.contextmanager
    def replaced_by(self, first: int, tell: Callable[[str], None]) -> Iterator[None]:
        """Around the commit of step `first`: with the run's first checkpoint, all of later steps than `begin` are
        renamed, unless the commit raises. `tell`: gets lines for people."""
        if self.unsettled:
            self._settle(tell)
        if not self.pending or not self._paths:
            yield
            return
        try:
            left = {path: reversed(_later(path, self._begin)) for path in self._paths}
            names = {path: [folder_of(path, step).name for step in steps] for path, steps in left.items()}
            left_branch.hide(names, self._begin, first)
            yield
        except BaseException:
            with contextlib.suppress(OSError):  # the next start does it
                left_branch.settle(*self._paths)
            raise
        self.pending = False
        self._settle(tell)

    def _settle(self, tell: Callable[[str], None]) -> None:
        self.unsettled = True
        try:
            for path, new in left_branch.settle(*self._paths).items():
                renamed = ", ".join(f"{name} to {other}" for name, other in new.items())
                began = f"the run began at step {self._begin} and left the branch of later checkpoints"
                tell(f"{began}: renamed in {path} {renamed}")
            self.unsettled = False
        except OSError as error:  # they stay hidden
            later = "the next save or start tries again, and until then nothing is deleted or uploaded"
            tell(f"cannot rename the checkpoints that the run left at step {self._begin} ({error}): {later}")


def _later(directory: Location, begin: int) -> list[int]:
    return [step for step in storage_of(directory).steps_in(directory) if step > begin]


def _named(steps: Iterable[int]) -> str:
    """Their names, or how many they are, with the first and the last."""
    names = [f"iter_{step:07d}" for step in sorted(steps)]
    return ", ".join(names) if len(names) < 4 else f"{len(names)} checkpoints, {names[0]} to {names[-1]}"
