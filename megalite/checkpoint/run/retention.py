"""The checkpoints that are kept: `Retention`, by which rule; `Uploader`, in another place than the fast disk where they
are committed; `Branch`, what becomes of those of later steps than the one where a run begins: a branch that it leaves.

These exist after a rollback (--ckpt-step), after --finetune, and where a run saves to another run's directory. If they
stayed, the next start would continue from them, and --keep-last would delete the new branch's checkpoints first. They
must disappear as soon as the run has a checkpoint of its own, and no earlier: killed at any moment, one branch or the
other is whole. Many folders cannot be renamed at once, so it takes two steps, either of which may be interrupted:

    iter_0000300 -> .iter_0000300.left-at-0000200.for-0000250    hidden: nothing lists, counts or deletes it
    iter_0000250 is committed
    -> abandoned-iter_0000300-left-at-0000200                    or, where it was not committed, back

They stay in the same directory: a read-only checkpoint can be renamed there, but not moved elsewhere, and relative
links stay valid.
"""

import contextlib
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from megalite.checkpoint.format import manifest
from megalite.checkpoint.format.tensor_file import BLOCK, BlockHash, Stamp
from megalite.checkpoint.storage.file_system import to_disk
from megalite.checkpoint.storage.location import CheckpointError, Location, Url, folder_of, reason_of
from megalite.checkpoint.storage.protocol import storage_of

_HIDDEN = re.compile(r"\.(iter_\d{7,})\.(left-at-\d{7,})\.for-(\d{7,})")
_FILES = 4  # sent at once


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


def hide(places: Iterable[Path], begin: int, first: int) -> None:
    """Hide the checkpoints of these directories that are of later steps than `begin`, where a run began that is about
    to commit its first checkpoint, that of step `first`. Raises OSError; call `settle` afterwards in any case."""
    todo = [folder_of(place, step) for place in places for step in reversed(_later(place, begin))]
    taken = f"iter_{first:07d}"  # before the others, so that it exists again only when it is the new one
    for folder in sorted(todo, key=lambda folder: folder.name != taken):
        os.replace(str(folder), str(folder.parent / f".{folder.name}.left-at-{begin:07d}.for-{first:07d}"))
    for place in places:
        to_disk(place)


def settle(*places: Location) -> dict[Path, dict[str, str]]:
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
        to_disk(directory)
    return new


class Branch:
    """A run that begins at step `begin`, saves to the first of `places`, and uploads to the other. Not collective.
    `damaged`: the checkpoints of later steps were tried and are not whole; behind a URL they stay. Raises
    CheckpointError where others of later steps are behind a URL, where no folder can be renamed."""

    def __init__(self, places: Sequence[Location] = (), begin: int = 0, damaged: bool = False):
        self._paths, self._begin = [place for place in places if isinstance(place, Path)], begin
        later = {place: steps for place in places if (steps := _later(place, begin))}
        for place, steps in later.items():
            if isinstance(place, Url) and not damaged:
                copy = f" (and copy iter_{begin:07d} to it, to load from it as well)" if begin else ""
                why = "they would be taken for its own, and cannot be renamed behind a URL; give --save another URL"
                newest = "continue from the newest: --load without --ckpt-step and --finetune"
                raise CheckpointError(
                    f"save={str(place)!r} holds {_named(steps)}, of later steps than {begin}, where this run begins: "
                    f"{why}{copy}, delete them, or {newest}"
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
            hide(self._paths, self._begin, first)
            yield
        except BaseException:
            with contextlib.suppress(OSError):  # the next start does it
                settle(*self._paths)
            raise
        self.pending = False
        self._settle(tell)

    def _settle(self, tell: Callable[[str], None]) -> None:
        self.unsettled = True
        try:
            for path, new in settle(*self._paths).items():
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


class Uploader:
    """A thread of rank 0 copies checkpoints during training, oldest first. Each file is hashed on the way, so that
    damage is not copied. A local checkpoint is deleted once its copy is whole, except the newest, which stays for a
    quick start. One that would not be kept is not sent. A failed copy is tried again after the next save. All ranks
    must share the disk: one node, or a fast shared file system.

    Call `offer` after every save; for the run that has locked `source`; not collective. `kept`: the rule, and the
    place. `news`: gets lines for the log. Raises CheckpointError where the place cannot be written.
    """

    def __init__(self, source: Location, kept: Retention, news: deque[str]):
        self._source, self._target, self._kept = source, kept.directory, kept
        target = kept.directory
        self._here, self._there = storage_of(source), storage_of(target)
        self._there.probe(target, 0)
        self._lock = self._there.lock(target)
        self._there.sweep(target)
        self.paused = True  # until it is known where the run begins: a rollback may need what sending would prune
        self._news, self._wake, self._end = news, threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="megalite-upload", daemon=True)
        self._thread.start()

    def offer(self) -> None:
        """There may be a checkpoint to send."""
        self._wake.set()

    def close(self, wait: bool = True) -> None:
        """Send the remaining checkpoints, unless `wait` is False; `news` gets those that could not be sent."""
        self._end.set()
        self._wake.set()
        if wait:
            self._thread.join()
        self._lock.close()  # an upload that still runs sees that before it commits

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            ending = self._end.is_set()  # before the round: a later offer wakes another one
            try:
                if not self.paused:
                    self._round()
            except Exception as error:  # a disk or network failed; training continues
                waiting = "; the next run sends them" if ending else "; the next save tries again"
                failed = f"upload to {self._target} failed ({reason_of(error)})"
                self._news.append(f"{failed}: checkpoints wait in {self._source}{waiting}")
            if ending:
                return

    def _round(self) -> None:
        """Send all waiting checkpoints, and delete those that were sent."""
        for step in self._here.steps_in(self._source):
            folder, copy = folder_of(self._source, step), folder_of(self._target, step)
            if not is_complete(folder):
                continue
            newer = sum(other > step for other in self._here.steps_in(self._source))
            if not self._kept.keeps(step, newer):
                self._here.remove(folder)
                self._news.append(f"did not upload {folder.name}: only newer ones are kept")
                continue
            sent = "COMPLETE" in self._there.entries(copy)  # which holds the manifest's hash
            if not sent or self._there.read(copy / "COMPLETE") != self._here.read(folder / "COMPLETE"):
                begin = time.perf_counter()
                size = self._send(step, folder, copy)
                took = time.perf_counter() - begin
                self._news.append(f"uploaded {copy} in {took:.2f} s, {size / 2**20 / took:.0f} MiB/s")
                self._kept.known.add(step)
                self._kept.prune(step)
            newest = step == self._here.steps_in(self._source)[-1]
            if not newest and "KEEP" not in self._here.entries(folder) and not self._here.in_use(folder):
                self._here.remove(folder)

    def _send(self, step: int, folder: Location, copy: Location) -> int:
        """Copy a checkpoint; its bytes."""
        self._lock.confirm()
        part = self._there.part_of(copy)
        files = manifest.load(folder).files
        self._there.begin(part)
        try:
            with self._here.reading(folder), ThreadPoolExecutor(_FILES, "megalite-upload") as pool:
                list(pool.map(lambda name: self._send_file(folder / name, part / name, files[name]), files))
            self._lock.confirm()
            for name in ("manifest.json", "COMPLETE"):
                self._there.put(part / name, self._here.read(folder / name).decode())
            self._there.publish(part, copy)
        except BaseException:
            self._there.discard(part)
            raise
        manifest.name_newest(self._target, step)
        return sum(stamp.size for stamp in files.values())

    def _send_file(self, source: Location, target: Location, stamp: Stamp) -> None:
        hashed, buffer = BlockHash(stamp.name, stamp.block), memoryview(bytearray(BLOCK))
        with contextlib.closing(self._here.open(source)) as file, self._there.create(target) as append:
            for begin in range(0, stamp.size, BLOCK):
                chunk = buffer[: min(BLOCK, stamp.size - begin)]
                file.pread(chunk, begin)
                hashed.update(chunk)
                append(chunk)
            if hashed.stamp() != stamp:
                raise CheckpointError(f"{source}: its content changed after it was written")
