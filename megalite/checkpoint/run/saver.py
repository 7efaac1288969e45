"""The saves of one run: its lock on the directory, at most one save in flight, and the checkpoints that are kept.

A save in the background (`background=True`) overlaps with training:

    every rank's thread   copies its part into host memory, for which an update waits (`before_update`)
                          writes, hashes and syncs its file, then its list
    rank 0's thread       waits until it sees every rank's list; commits, prunes

Threads use no collectives, which would race with those of training: torch's own async save on gloo was seen to deadlock
on that. A thread that fails leaves a file that ends rank 0's waiting; its rank asks for a stop with the next step's
all-reduce, so that all ranks raise at the same step.
"""

import contextlib
import json
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from megalite.checkpoint.format import writer
from megalite.checkpoint.run import foreground
from megalite.checkpoint.run.agreement import agree, check_shared, together
from megalite.checkpoint.run.background_save import BackgroundSave, HostCopy
from megalite.checkpoint.run.branch import Branch
from megalite.checkpoint.run.retention import Retention
from megalite.checkpoint.run.upload import Uploader
from megalite.checkpoint.storage.location import CheckpointError, Location, parse, reason_of
from megalite.checkpoint.storage.protocol import RunLock, Storage, folder_of, storage_of
from megalite.parallel.comm import reduce_number
from megalite.parallel.mesh import Mesh
from megalite.parallel.spec import Piece


class Saver:
    """Methods are collective unless they say otherwise; `news` is for the log of rank 0.

    Locks the directory, deletes the remains of interrupted saves, and tries whether all ranks can write to it.
    `nbytes`: size of this rank's part. `upload_to`: where the checkpoints are kept by `keep_last` and
    `retain_interval`, instead of in `directory`. Raises CheckpointError on all ranks: not writable, no room for one
    checkpoint, in use by another run, or not the same directory on every rank.
    """

    def __init__(
        self,
        directory: str | Location,
        mesh: Mesh,
        nbytes: int,
        *,
        keep_last: int | None = None,
        retain_interval: int | None = None,
        background: bool = False,
        upload_to: str | Location | None = None,
    ):
        self.directory, self.mesh, self.background = parse(directory), mesh, background
        self.storage: Storage = storage_of(self.directory)
        self.upload_to = None if upload_to is None else parse(upload_to)
        self.keep_last = 1 if keep_last is None and retain_interval is not None else keep_last
        self._kept = Retention(self.upload_to or self.directory, self.keep_last, retain_interval)
        self.waited_s = 0.0  # time that training waited for the last save
        self._before_s = 0.0  # ... and the part of it for the save before
        self._lock: RunLock | None = None
        self._flight: BackgroundSave | None = None
        self._host = HostCopy(mesh.device)
        self._news: deque[str] = deque()  # filled from any thread
        self._branch = Branch()  # leaves nothing, until `begins_at`
        self._uploader: Uploader | None = None
        self.megatron = False  # whether the log is in its style
        try:
            probe = lambda: self.storage.probe(self.directory, mesh.world.rank)  # noqa: E731
            together(mesh, probe, f"trying to write to {self.directory}")
            self._bytes = reduce_number(nbytes, mesh)  # of one checkpoint
            together(mesh, self._prepare, f"preparing {self.directory}")
            check_shared(self.directory, mesh)
        except CheckpointError:
            self.close(wait=False)
            raise

    def _prepare(self) -> None:
        if not self.mesh.world.is_first:
            return
        self._lock = self.storage.lock(self.directory)
        if self.upload_to is not None:
            self._uploader = Uploader(self.directory, self._kept, self._news)
        if left := self.storage.sweep(self.directory):
            self._news.append(f"deleted the remains of an unfinished save: {', '.join(left)}")
        self.storage.check_space(self.directory, self._bytes)

    def begins_at(self, step: int, damaged: bool = False) -> str | None:
        """Tell the step at which the run begins: checkpoints of later steps make way for its first save (branch.py),
        unless they are `damaged`. Returns a note for people, on rank 0. Raises CheckpointError on all ranks."""

        def look() -> str | None:
            if self.mesh.world.is_first:
                places = [place for place in (self.directory, self.upload_to) if place is not None]
                self._branch = Branch(places, step, damaged)
                self._kept.damaged = self._branch.damaged
                if self._uploader is not None:
                    self._uploader.paused = self._branch.pending
                    self._uploader.offer()  # an earlier run may have left checkpoints
            return self._branch.note

        return together(self.mesh, look, f"looking for checkpoints in {self.directory}")

    # ---- saving

    def save(self, step: int, pieces: Sequence[Piece], state: dict[str, Any], *, last: bool = False) -> Location:
        """Save this rank's pieces as they are at the call, provided that `before_update` is called before they change;
        in the background unless `last`. Returns where the checkpoint will be. `state`: plain JSON of rank 0. Raises
        CheckpointError on all ranks, also for the save before this one."""
        asked = time.perf_counter()
        self.wait()
        begin = time.perf_counter()
        self._before_s = begin - asked
        final = folder_of(self.directory, step)
        if not self.background or last:
            around = partial(self._replaced_by, step)
            foreground.save(self.directory, step, pieces, state, self.mesh, self._confirm, around)
            if self.mesh.world.is_first:
                self._prune(step)
            self.waited_s = time.perf_counter() - asked
            took = time.perf_counter() - begin
            self._news.append(f"saved {final.name} in {took:.2f} s{self._size(took)}{self._of_them()}")
            self._tell_megatron(step)
            return final
        part = self.storage.part_of(final)
        foreground.begin_part(part, self.mesh, self._confirm)
        frozen = json.dumps(state) if self.mesh.world.is_first else ""  # the run changes its own meanwhile

        def commit() -> None:
            with self._replaced_by(step):
                writer.commit(part, final, json.loads(frozen), step, self.mesh.world.size)
            took = time.perf_counter() - begin
            times = f"{took:.2f} s after it was scheduled{self._size(took)}"
            waited = f"training waited {self.waited_s:.3f} s{self._of_them()}"
            self._news.append(f"committed {final.name}, {times}; {waited}")
            self._tell_megatron(step)
            self._prune(step)

        self._host.begin()
        self._flight = BackgroundSave(
            part, step, self.mesh, self._host, list(pieces), commit, self._confirm, self._tell
        )
        self._news.append(f"scheduled {final.name}")
        if self.megatron:
            self._news.append(f"  scheduled an async checkpoint save at iteration {step:7d} to {self.directory}")
        self.waited_s = time.perf_counter() - asked
        self._flight.start()
        return final

    def before_update(self) -> None:
        """Not collective: call it before anything changes the saved tensors. Waits while they are being copied."""
        if self._flight is not None:
            begin = time.perf_counter()
            self._host.wait_before_change()
            self.waited_s += time.perf_counter() - begin

    def _confirm(self) -> None:
        if self._lock is not None:
            self._lock.confirm()

    def _tell(self, line: str) -> None:
        """A line from any rank; the news are those of rank 0."""
        self._news.append(line) if self.mesh.world.is_first else print(line, file=sys.stderr, flush=True)

    def beginning(self, step: int) -> str:
        """The log line before `save`."""
        if self.megatron:
            return f"saving checkpoint at iteration {step:7d} to {self.directory} in megalite format"
        return f"saving checkpoint at step {step} to {self.directory}"

    def _tell_megatron(self, step: int) -> None:
        """The log line that scripts of Megatron-LM's users look for."""
        if self.megatron:
            where = f"[ t 1/{self.mesh.tp.size}, p 1/{self.mesh.pp.size} ]"
            self._news.append(f"  successfully saved checkpoint from iteration {step:7d} to {self.directory} {where}")

    def _size(self, took_s: float) -> str:
        gib = self._bytes / 2**30
        return f" ({gib:.3g} GiB, {gib / took_s:.2g} GiB/s)" if self._bytes else ""

    def _of_them(self) -> str:
        return f", {self._before_s:.3f} s of it for the save before" if self._before_s >= 0.0005 else ""

    @contextlib.contextmanager
    def _replaced_by(self, step: int) -> Iterator[None]:
        """Around rank 0's commit."""
        with self._branch.replaced_by(step, self._news.append):
            yield
        if self._uploader is not None:
            self._uploader.paused = self._branch.unsettled

    @property
    def failed(self) -> bool:
        """Not collective: this rank's save in the background failed; `wait` on all ranks raises."""
        return self._flight is not None and self._flight.error is not None

    def wait(self) -> None:
        """Wait until no save is in flight. Raises CheckpointError on all ranks if it failed on one."""
        flight = self._flight
        if flight is None:
            return
        if not self.mesh.world.is_first:
            flight.join()  # to know whether it failed; it waits for no other rank, and rank 0 waits for it anyway
        if reduce_number(self.failed, self.mesh):
            flight.give_up.set()
        flight.join()
        self._flight = None
        try:
            agree(flight.error, self.mesh, f"saving to {flight.part} in the background")
        except CheckpointError:
            if self.mesh.world.is_first:
                writer.abandon(flight.part)
            raise

    def news(self) -> list[str]:
        """Not collective: the lines for the log since the last call."""
        return [self._news.popleft() for _ in range(len(self._news))]

    def close(self, wait: bool = True) -> str | None:
        """Not collective: finish the save in flight (unless the other ranks may be dead) and drop the lock. Returns why
        the last save is lost, if it failed and nobody waited for it; `news` has that too, and failed uploads."""
        lost, flight = None, self._flight
        if flight is not None and wait:
            flight.join()
        if flight is not None and flight.error is not None:
            lost = f"the last save, to {flight.part}, failed: {reason_of(flight.error)}"
            self._news.append(lost)
        if self._uploader is not None:
            self._uploader.close(wait)
        if self._lock is not None:
            self._lock.close()
            self._lock = None
        return lost

    def places_of(self, step: int) -> list[Location]:
        """Where the checkpoint of a step is written, and where it is kept in the end."""
        return [folder_of(self.directory, step), folder_of(self.upload_to or self.directory, step)]

    def _prune(self, step: int) -> None:
        if self._branch.unsettled:
            return
        if self._uploader is not None:
            self._uploader.offer()
        else:
            self._kept.known.add(step)
            try:
                self._kept.prune(step)
            except OSError as error:
                self._news.append(f"could not delete an old checkpoint: {error}")
