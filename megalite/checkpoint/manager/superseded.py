"""Renaming of the checkpoints that a run supersedes when it starts from an earlier step.

Checkpoints of later steps exist after a rollback (--ckpt-step), after --finetune, and when a run saves to the directory
of another run. If they stayed, the next start would resume from them, and --keep-last would delete the new checkpoints
first. They must disappear as soon as the run has a checkpoint of its own, and not earlier: if the run is killed at any
time, either the old or the new checkpoints are complete. Many directories cannot be renamed atomically, so it takes two
steps, and both may be interrupted:

    iter_0000300 -> .iter_0000300.left-at-0000200.for-0000250    hidden: not listed, counted or deleted
    iter_0000250 is committed
    -> abandoned-iter_0000300-left-at-0000200                    or, if it was not committed, the old name

The checkpoints stay in the directory: a read-only checkpoint can be renamed, but not moved, and relative links stay
valid.

Rejected: a tracker file that names the newest checkpoint (Megatron-LM, DeepSpeed), with later directories ignored and
overwritten. They would be later only until the run passes their steps. From then on they would lie between its own
checkpoints: if the newest were damaged, a start would continue from another branch, and --keep-last would count them
and delete the run's own. A directory copied without the tracker would resume from them at once, and a save of the same
step would destroy a complete checkpoint before the new one has its name. Renaming once, before the commit, would leave
a directory without a checkpoint if --finetune in it is killed between the two.
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


def hide_later(directories: Iterable[Path], start_step: int, first_step: int) -> None:
    """Hide the checkpoints after step `start_step` before the run commits its first checkpoint, of step `first_step`.

    Raises OSError. Call `finish_renames` afterwards in any case.
    """
    checkpoints = [
        checkpoint_dir(directory, step)
        for directory in directories
        for step in reversed(_later_steps(directory, start_step))
    ]
    # This name is freed before all others, so that it exists again only as the new checkpoint.
    first_name = f"iter_{first_step:07d}"
    for checkpoint in sorted(checkpoints, key=lambda checkpoint: checkpoint.name != first_name):
        os.replace(
            str(checkpoint),
            str(checkpoint.parent / f".{checkpoint.name}.left-at-{start_step:07d}.for-{first_step:07d}"),
        )
    for directory in directories:
        fsync_path(directory)


def finish_renames(*locations: Location) -> dict[Path, dict[str, str]]:
    """Finish the renames of `hide_later` in those locations that are local directories.

    If the checkpoint that they were hidden for was committed to the first directory, the hidden checkpoints get their
    `abandoned-` names. Otherwise they get their old names back, or `abandoned-` names if those exist by now.

    Returns:
        {directory: {old name: new name}} of the checkpoints with new names.

    Raises:
        OSError: A rename failed. Call this again later.
    """
    directories = [location for location in locations if isinstance(location, Path)]
    renamed: dict[Path, dict[str, str]] = {}
    hidden: list[tuple[Path, Path, str, str, str]] = []
    for directory in directories:
        for path in directory.glob(".iter_*"):
            if match := _HIDDEN.fullmatch(path.name):
                name, suffix, first_step = match.groups()
                hidden.append((directory, path, name, suffix, first_step))

    def rename_order(entry: tuple[Path, Path, str, str, str]) -> tuple[bool, bool, Path]:
        # The checkpoint with the name of the new one comes last, for the reason given in `hide_later`.
        directory, path, name, _, first_step = entry
        return name == f"iter_{first_step}", directory == directories[0], path

    committed = {first_step: (directories[0] / f"iter_{first_step}").exists() for *_, first_step in hidden}
    for directory, path, name, suffix, first_step in sorted(hidden, key=rename_order):
        if not committed[first_step] and not os.path.lexists(directory / name):
            os.replace(path, directory / name)
            continue
        attempt = 1
        target = directory / f"abandoned-{name}-{suffix}"
        while os.path.lexists(target):
            attempt += 1
            target = directory / f"abandoned-{name}-{suffix}-{attempt}"
        os.replace(path, target)
        renamed.setdefault(directory, {})[name] = target.name
    for directory in {directory for directory, *_ in hidden}:
        fsync_path(directory)
    return renamed


class SupersededCheckpoints:
    """The checkpoints of later steps than the one from which a run starts. Not collective.

    Args:
        directories: The directory to which the run saves, then the one to which it uploads, if any.
        start_step: The step from which the run starts.
        damaged: The later checkpoints were tried and are damaged. Behind a URL, these stay.

    Raises:
        CheckpointError: Undamaged later checkpoints are behind a URL, where directories cannot be renamed.
    """

    def __init__(self, directories: Sequence[Location] = (), start_step: int = 0, damaged: bool = False):
        self._paths = [directory for directory in directories if isinstance(directory, Path)]
        self._start_step = start_step
        later = {directory: steps for directory in directories if (steps := _later_steps(directory, start_step))}
        for directory, steps in later.items():
            if isinstance(directory, RemotePath) and not damaged:
                copy_hint = f" (and copy iter_{start_step:07d} to it, to load from it as well)" if start_step else ""
                reason = "a restart would resume from them, and they cannot be renamed at a URL; give another URL"
                newest_hint = "continue from the newest: --load without --ckpt-step and --finetune"
                raise CheckpointError(
                    f"save={str(directory)!r} holds {_format_names(steps)}, later than step "
                    f"{start_step}, where this run starts: {reason}{copy_hint}, delete them, or {newest_hint}"
                )
        self.damaged = {
            step for directory, steps in later.items() if isinstance(directory, RemotePath) for step in steps
        }
        self.pending = bool(later)  # until the first save
        # True while some are still hidden. The first save must stay then, because it marks them as superseded.
        self.unfinished = False
        self.message: str | None = None
        if later and not damaged:
            names = _format_names(set().union(*later.values()))
            self.message = (
                f"{names} in {' and '.join(map(str, directories))}, later than step {start_step}, where this run "
                "starts; the first save renames them to abandoned-... and deletes nothing. To continue from them, stop "
                f"now and give --load {directories[-1]} without --ckpt-step and --finetune"
            )

    @contextlib.contextmanager
    def superseded_by(self, first_step: int, log: Callable[[str], None]) -> Iterator[None]:
        """Wrap the commit of step `first_step`, and rename the superseded checkpoints with the first commit of the run.

        They keep their names if the commit raises. `log` receives lines for the log.
        """
        if self.unfinished:
            self._settle(log)
        if not self.pending or not self._paths:
            yield
            return
        try:
            hide_later(self._paths, self._start_step, first_step)
            yield
        except BaseException:
            with contextlib.suppress(OSError):  # the next start finishes the renames
                finish_renames(*self._paths)
            raise
        self.pending = False
        self._settle(log)

    def _settle(self, log: Callable[[str], None]) -> None:
        """Finish the renames, and log them, or a failure."""
        self.unfinished = True
        try:
            for path, new_names in finish_renames(*self._paths).items():
                renamed = ", ".join(f"{name} to {new_name}" for name, new_name in new_names.items())
                message = f"the run started at step {self._start_step}, so later checkpoints are superseded"
                log(f"{message}: renamed in {path} {renamed}")
            self.unfinished = False
        except OSError as error:  # the checkpoints stay hidden
            consequence = "the next save or start tries again, and until then nothing is deleted or uploaded"
            log(f"cannot rename the checkpoints later than step {self._start_step} ({error}): {consequence}")


def _later_steps(directory: Location, start_step: int) -> list[int]:
    """Return the steps after `start_step` of the checkpoints in a directory."""
    return [step for step in storage_of(directory).steps_in(directory) if step > start_step]


def _format_names(steps: Iterable[int]) -> str:
    """Return the names of the checkpoints, or if there are more than three, their number and the first and last."""
    names = [f"iter_{step:07d}" for step in sorted(steps)]
    return ", ".join(names) if len(names) < 4 else f"{len(names)} checkpoints, {names[0]} to {names[-1]}"
