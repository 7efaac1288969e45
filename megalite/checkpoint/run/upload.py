"""Local first: checkpoints that are committed on a fast disk go to where they are kept, while the run trains on.

A thread of rank 0 copies them, oldest first, each file hashed on the way, so that what has changed on the disk since is
not taken along. Only what is there whole is deleted here, and the newest stays for a quick start. What would not be
kept there is not sent. A copy that fails is tried again after the next save; until then the disk fills, and when it is
full the save says so. The disk must be shared by all ranks: one node, or a fast shared file system.
"""

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from megalite.checkpoint.format import manifest as manifests
from megalite.checkpoint.format import writer
from megalite.checkpoint.format.hashing import BLOCK, BlockHash, Stamp
from megalite.checkpoint.run.log_lines import LogLines
from megalite.checkpoint.run.retention import Retention, is_complete
from megalite.checkpoint.storage import left_branch
from megalite.checkpoint.storage.location import CheckpointError, Location, reason_of
from megalite.checkpoint.storage.protocol import folder_of, storage_of

_FILES = 4  # sent at once


class Uploader:
    """`offer` after every save; only for the run that has locked `source`; nothing here is collective. `kept`: which
    stay, and where. Raises CheckpointError where nothing can be written there."""

    def __init__(self, source: Location, kept: Retention):
        self._source, self._target, self._kept = source, kept.directory, kept
        target = kept.directory
        self._here, self._there = storage_of(source), storage_of(target)
        self._there.probe(target, 0)
        self._lock = self._there.lock(target)
        if isinstance(target, Path) and isinstance(source, Path):
            left_branch.settle(source, target)  # before a sweep of either, which does not know of the other
        self._there.sweep(target)
        self.paused = True  # until it is known where the run begins: a rollback may need what sending would prune
        self._news, self._wake, self._end = LogLines(), threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="megalite-upload", daemon=True)
        self._thread.start()

    def offer(self) -> None:
        """There may be a new one; at the start of a run: of the run before."""
        self._wake.set()

    def news(self) -> list[str]:
        """What happened since the last call."""
        return self._news.take()

    def close(self, wait: bool = True) -> None:
        """Send what is left, each once more, unless `wait` is False; `news` says what could not be sent."""
        self._end.set()
        self._wake.set()
        if wait:
            self._thread.join()
        self._lock.close()  # what is still sending finds that out before it commits

    def _run(self) -> None:
        while True:
            self._wake.wait()
            self._wake.clear()
            ending = self._end.is_set()  # before the round: what is offered later than this wakes another one
            try:
                if not self.paused:
                    self._round()
            except Exception as error:  # of a disk or a network: training continues
                waiting = "; they stay there, and the next run sends them" if ending else ", the next save tries again"
                failed = f"upload to {self._target} failed ({reason_of(error)})"
                self._news.append(f"{failed}: checkpoints wait in {self._source}{waiting}")
            if ending:
                return

    def _round(self) -> None:
        """Send all that wait, and delete here what is there."""
        for step in self._here.steps_in(self._source):
            folder, copy = folder_of(self._source, step), folder_of(self._target, step)
            if not is_complete(folder):
                continue
            newer = sum(other > step for other in self._here.steps_in(self._source))
            if not self._kept.keeps(step, newer):
                self._here.remove(folder)
                self._news.append(f"did not upload {folder.name}: newer ones are kept")
                continue
            if not self._same(folder, copy):
                begin = time.perf_counter()
                size = self._send(step, folder, copy)
                took = time.perf_counter() - begin
                self._news.append(f"uploaded {copy} in {took:.2f} s, {size / 2**20 / took:.0f} MiB/s")
                self._kept.known.add(step)
                self._kept.prune(step)
            newest = step == self._here.steps_in(self._source)[-1]
            if not newest and "KEEP" not in self._here.entries(folder) and not self._here.in_use(folder):
                self._here.remove(folder)

    def _same(self, folder: Location, copy: Location) -> bool:
        """Whether COMPLETE, which names the manifest, is there, and the same."""
        if "COMPLETE" not in self._there.entries(copy):
            return False
        return self._there.read(copy / "COMPLETE") == self._here.read(folder / "COMPLETE")

    def _send(self, step: int, folder: Location, copy: Location) -> int:
        """Copy a checkpoint; bytes."""
        self._lock.confirm()
        part = self._there.part_of(copy)
        files = manifests.load(folder).files
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
        writer.name_newest(self._target, step)
        return sum(stamp.size for stamp in files.values())

    def _send_file(self, source: Location, target: Location, stamp: Stamp) -> None:
        hashed, buffer = BlockHash(stamp.name, stamp.block), memoryview(bytearray(BLOCK))
        file = self._here.open(source)
        try:
            with self._there.create(target) as append:
                for begin in range(0, stamp.size, BLOCK):
                    chunk = buffer[: min(BLOCK, stamp.size - begin)]
                    file.pread(chunk, begin)
                    hashed.update(chunk)
                    append(chunk)
                if hashed.stamp() != stamp:
                    raise CheckpointError(f"{source}: its content changed after it was written")
        finally:
            file.close()
