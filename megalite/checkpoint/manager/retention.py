"""The checkpoints of a directory that are kept, and their upload there from a fast disk, where they are committed."""

import contextlib
import threading
import time
from collections import deque
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from megalite.checkpoint.format import manifest
from megalite.checkpoint.format.safetensors_file import BLOCK, BlockHash, FileChecksum
from megalite.checkpoint.storage.location import CheckpointError, Location, checkpoint_dir, error_text
from megalite.checkpoint.storage.storage import storage_of


@dataclass
class RetentionPolicy:
    """Keeps the newest `last` complete checkpoints of a directory (None: all), and multiples of `interval`.

    known     steps known to be complete
    damaged   steps whose content a load has found wrong
    """

    directory: Location
    keep_last: int | None
    interval: int | None = None
    complete_steps: set[int] = field(default_factory=set)
    damaged: Collection[int] = ()

    def should_keep(self, step: int, newer: int) -> bool:
        """Whether to keep a step with `newer` checkpoints after it."""
        return (
            self.keep_last is None
            or newer < self.keep_last
            or (self.interval is not None and step % self.interval == 0)
        )

    def prune(self, saved: int | None = None, dry: bool = False) -> list[int]:
        """Delete the others, the oldest first; their steps. Not collective. Folders with a file KEEP, those that are
        being read, and `saved` are kept as well: after a rollback the step just saved is not the newest. Incomplete,
        damaged and other folders are neither counted nor touched. `dry`: delete nothing."""
        if self.keep_last is None:
            return []
        storage = storage_of(self.directory)
        complete = []
        for step in storage.steps_in(self.directory):
            if (
                step not in self.complete_steps
                and step not in self.damaged
                and is_complete(checkpoint_dir(self.directory, step))
            ):
                self.complete_steps.add(step)
            if step in self.complete_steps:
                complete.append(step)
        deleted = []
        for place, step in enumerate(complete):
            folder = checkpoint_dir(self.directory, step)
            kept = step == saved or self.should_keep(step, len(complete) - 1 - place)
            if not kept and "KEEP" not in storage.list_files(folder) and not storage.in_use(folder):
                if not dry:
                    storage.remove(folder)
                    self.complete_steps.discard(step)
                deleted.append(step)
        return deleted


def is_complete(folder: Location) -> bool:
    """Its manifest is the one that COMPLETE names, and every file has its size; contents are not hashed."""
    try:
        manifest.load_complete_manifest(folder)
    except (CheckpointError, OSError):
        return False
    return True


_FILES = 4  # sent at once


class Uploader:
    """A thread of rank 0 copies checkpoints during training, oldest first. Each file is hashed on the way, so that
    damage is not copied. A local checkpoint is deleted once its copy is whole, except the newest, which stays for a
    quick start. One that would not be kept is not sent. A failed copy is tried again after the next save. All ranks
    must share the disk: one node, or a fast shared file system.

    Call `offer` after every save; for the run that has locked `source`; not collective. `kept`: the rule, and the
    place. `news`: gets lines for the log. Raises CheckpointError where the place cannot be written.
    """

    def __init__(self, source: Location, kept: RetentionPolicy, news: deque[str]):
        self._source, self._target, self._kept = source, kept.directory, kept
        target = kept.directory
        self._here, self._there = storage_of(source), storage_of(target)
        self._there.check_writable(target, 0)
        self._lock = self._there.lock(target)
        self._there.remove_leftovers(target)
        self.paused = True  # until it is known where the run begins: a rollback may need what sending would prune
        self._news, self._wake, self._end = news, threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="megalite-upload", daemon=True)
        self._thread.start()

    def notify(self) -> None:
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
                    self._upload_pending()
            except Exception as error:  # a disk or network failed; training continues
                waiting = "; the next run sends them" if ending else "; the next save tries again"
                failed = f"upload to {self._target} failed ({error_text(error)})"
                self._news.append(f"{failed}: checkpoints wait in {self._source}{waiting}")
            if ending:
                return

    def _upload_pending(self) -> None:
        """Send all waiting checkpoints, and delete those that were sent."""
        for step in self._here.steps_in(self._source):
            folder, copy = checkpoint_dir(self._source, step), checkpoint_dir(self._target, step)
            if not is_complete(folder):
                continue
            newer = sum(other > step for other in self._here.steps_in(self._source))
            if not self._kept.should_keep(step, newer):
                self._here.remove(folder)
                self._news.append(f"did not upload {folder.name}: only newer ones are kept")
                continue
            sent = "COMPLETE" in self._there.list_files(copy)  # which holds the manifest's hash
            if not sent or self._there.read(copy / "COMPLETE") != self._here.read(folder / "COMPLETE"):
                begin = time.perf_counter()
                size = self._send(step, folder, copy)
                took = time.perf_counter() - begin
                self._news.append(f"uploaded {copy} in {took:.2f} s, {size / 2**20 / took:.0f} MiB/s")
                self._kept.complete_steps.add(step)
                self._kept.prune(step)
            newest = step == self._here.steps_in(self._source)[-1]
            if not newest and "KEEP" not in self._here.list_files(folder) and not self._here.in_use(folder):
                self._here.remove(folder)

    def _send(self, step: int, folder: Location, copy: Location) -> int:
        """Copy a checkpoint; its bytes."""
        self._lock.check_held()
        part = self._there.staging_path(copy)
        files = manifest.load_manifest(folder).files
        self._there.make_staging(part)
        try:
            with self._here.read_lock(folder), ThreadPoolExecutor(_FILES, "megalite-upload") as pool:
                list(pool.map(lambda name: self._send_file(folder / name, part / name, files[name]), files))
            self._lock.check_held()
            for name in ("manifest.json", "COMPLETE"):
                self._there.write_text(part / name, self._here.read(folder / name).decode())
            self._there.publish(part, copy)
        except BaseException:
            self._there.discard(part)
            raise
        manifest.write_tracker(self._target, step)
        return sum(stamp.size for stamp in files.values())

    def _send_file(self, source: Location, target: Location, stamp: FileChecksum) -> None:
        hashed, buffer = BlockHash(stamp.algorithm, stamp.block_size), memoryview(bytearray(BLOCK))
        with contextlib.closing(self._here.open(source)) as file, self._there.open_new(target) as append:
            for begin in range(0, stamp.size, BLOCK):
                chunk = buffer[: min(BLOCK, stamp.size - begin)]
                file.pread(chunk, begin)
                hashed.update(chunk)
                append(chunk)
            if hashed.stamp() != stamp:
                raise CheckpointError(f"{source}: its content changed after it was written")
