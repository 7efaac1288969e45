"""The saves of one run: its lock on the directory, at most one save in flight, and the checkpoints that are kept.

A save in the background (`background=True`) overlaps with training:

    every rank's thread   copies its part into host memory, for which an update waits (`before_update`)
                          writes, hashes and syncs its file, then its list
    rank 0's thread       waits until it sees every rank's list; commits, prunes

Threads use no collectives, which would race with those of training: torch's own async save on gloo was seen to deadlock
on that. A thread that fails leaves a file that ends rank 0's waiting; its rank asks for a stop with the next step's
all-reduce, so that all ranks raise at the same step.
"""

import json
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from megalite.checkpoint.format import manifest
from megalite.checkpoint.format import safetensors_file as tensor_file
from megalite.checkpoint.manager.async_save import AsyncSave, HostStager
from megalite.checkpoint.manager.collective import check_shared_filesystem, raise_on_all_ranks, run_on_all_ranks
from megalite.checkpoint.manager.retention import RetentionPolicy, Uploader
from megalite.checkpoint.manager.superseded import SupersededCheckpoints, finish_renames
from megalite.checkpoint.storage.location import CheckpointError, Location, error_text, parse_location
from megalite.checkpoint.storage.storage import RunLock, Storage, checkpoint_dir, storage_of
from megalite.common.fault_injection import inject_fault
from megalite.parallel.comm import all_reduce_int
from megalite.parallel.mesh import Mesh
from megalite.parallel.spec import TensorShard


class CheckpointSaver:
    """Methods are collective unless they say otherwise; `news` is for the log of rank 0. Locks the directory, deletes
    the remains of interrupted saves, and tries whether all ranks can write to it. `nbytes`: size of this rank's part.
    `upload_to`: where the checkpoints are kept by `keep_last` and `retain_interval`, instead of in `directory`. Raises
    CheckpointError on all ranks: not writable, no room for one checkpoint, in use, or not the same on every rank."""

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
        self.directory, self.mesh, self.background = parse_location(directory), mesh, background
        self.storage: Storage = storage_of(self.directory)
        self.upload_to = None if upload_to is None else parse_location(upload_to)
        self.directories = [place for place in (self.directory, self.upload_to) if place is not None]
        self.keep_last = 1 if keep_last is None and retain_interval is not None else keep_last
        self._retention = RetentionPolicy(self.upload_to or self.directory, self.keep_last, retain_interval)
        self.blocked_s = 0.0  # time that training waited for the last save
        self._before_s = 0.0  # ... and the part of it for the save before
        self._lock: RunLock | None = None
        self._pending_save: AsyncSave | None = None
        self._host = HostStager(mesh.device)
        self._news: deque[str] = deque()  # filled from any thread
        self._branch = SupersededCheckpoints()  # leaves nothing, until `begins_at`
        self._uploader: Uploader | None = None
        self.megatron = False  # whether the log is in its style
        try:
            probe = lambda: self.storage.check_writable(self.directory, mesh.world.rank)  # noqa: E731
            run_on_all_ranks(mesh, probe, f"trying to write to {self.directory}")
            self._bytes = all_reduce_int(nbytes, mesh)  # of one checkpoint
            run_on_all_ranks(mesh, self._prepare, f"preparing {self.directory}")
            check_shared_filesystem(self.directory, mesh)
        except CheckpointError:
            self.close(wait=False)
            raise

    def _prepare(self) -> None:
        if not self.mesh.world.is_first:
            return
        self._lock = self.storage.lock(self.directory)
        if self.upload_to is not None:
            self._uploader = Uploader(self.directory, self._retention, self._news)
        finish_renames(*self.directories)
        if left := self.storage.remove_leftovers(self.directory):
            self._news.append(f"deleted the remains of an unfinished save: {', '.join(left)}")
        self.storage.check_space(self.directory, self._bytes)

    def set_start_step(self, step: int, damaged: bool = False) -> str | None:
        """Tell the step at which the run begins: checkpoints of later steps make way for its first save (branch.py),
        unless they are `damaged`. Returns a note for people, on rank 0. Raises CheckpointError on all ranks."""

        def look() -> str | None:
            if self.mesh.world.is_first:
                self._branch = SupersededCheckpoints(self.directories, step, damaged)
                self._retention.damaged = self._branch.damaged
                if self._uploader is not None:
                    self._uploader.paused = self._branch.pending
                    self._uploader.notify()  # an earlier run may have left checkpoints
            return self._branch.message

        return run_on_all_ranks(self.mesh, look, f"looking for checkpoints in {self.directory}")

    # ---- saving

    def save(self, step: int, pieces: Sequence[TensorShard], state: dict[str, Any], *, last: bool = False) -> Location:
        """Save this rank's pieces as they are at the call, provided that `before_update` is called before they change;
        in the background unless `last`. Returns where the checkpoint will be. `state`: plain JSON of rank 0. Raises
        CheckpointError on all ranks, also for the save before this one."""
        asked = time.perf_counter()
        self.wait()
        begin = time.perf_counter()
        self._before_s = begin - asked
        final, waits = checkpoint_dir(self.directory, step), last or not self.background
        part = self.storage.staging_path(final)
        frozen = json.dumps(state) if self.mesh.world.is_first else ""  # the run changes its own meanwhile

        def commit() -> None:
            self._check_lock()
            with self._branch.superseded_by(step, self._news.append):
                manifest.commit(part, final, json.loads(frozen), step, self.mesh.world.size)
            if self._uploader is not None:
                self._uploader.paused = self._branch.unfinished
            took = time.perf_counter() - begin
            gib = self._bytes / 2**30
            size = f"{gib:.3g} GiB, {gib / took:.2g} GiB/s" if self._bytes else ""
            before = f", {self._before_s:.3f} s of it for the save before" if self._before_s >= 0.0005 else ""
            if waits:
                shown_size = f" ({size})" if size else ""
                line = f"saved {final.name} in {took:.2f} s{shown_size}{before}"
            else:
                times = f"{took:.2f} s, {size}" if size else f"{took:.2f} s"
                blocked = f"training blocked for {self.blocked_s:.3f} s{before}"
                line = f"saved {final.name} in the background ({times}; {blocked})"
            self._news.append(line)
            if self.megatron:  # the log line that scripts of Megatron-LM's users look for
                where = f"[ t 1/{self.mesh.tp.size}, p 1/{self.mesh.pp.size} ]"
                line = f"  successfully saved checkpoint from iteration {step:7d} to {self.directory} {where}"
                self._news.append(line)
            self._prune(step)

        if waits:
            save(self.directory, step, pieces, {}, self.mesh, self._check_lock, commit)
            self.blocked_s = time.perf_counter() - asked
            return final
        _begin(part, self.mesh, self._check_lock)
        self._host.start()
        whom = commit, self._check_lock, self._log
        self._pending_save = AsyncSave(part, step, self.mesh, self._host, list(pieces), *whom)
        self._news.append(f"scheduled {final.name}")
        if self.megatron:
            self._news.append(f"  scheduled an async checkpoint save at iteration {step:7d} to {self.directory}")
        self.blocked_s = time.perf_counter() - asked
        self._pending_save.start()
        return final

    def before_update(self) -> None:
        """Not collective: call it before anything changes the saved tensors. Waits while they are being copied."""
        if self._pending_save is not None:
            begin = time.perf_counter()
            self._host.wait_until_staged()
            self.blocked_s += time.perf_counter() - begin

    def _check_lock(self) -> None:
        if self._lock is not None:
            self._lock.check_held()

    def _log(self, line: str) -> None:
        """A line from any rank; the news are those of rank 0."""
        self._news.append(line) if self.mesh.world.is_first else print(line, file=sys.stderr, flush=True)

    def save_message(self, step: int) -> str:
        """The log line before `save`."""
        if self.megatron:
            return f"saving checkpoint at iteration {step:7d} to {self.directory} in megalite format"
        return f"saving checkpoint at step {step} to {self.directory}"

    @property
    def failed(self) -> bool:
        """Not collective: this rank's save in the background failed; `wait` on all ranks raises."""
        return self._pending_save is not None and self._pending_save.error is not None

    def wait(self) -> None:
        """Wait until no save is in flight. Raises CheckpointError on all ranks if it failed on one."""
        flight = self._pending_save
        if flight is None:
            return
        if not self.mesh.world.is_first:
            flight.join()  # to know whether it failed; it waits for no other rank, and rank 0 waits for it anyway
        if all_reduce_int(self.failed, self.mesh):
            flight.abort.set()
        flight.join()
        self._pending_save = None
        try:
            raise_on_all_ranks(flight.error, self.mesh, f"saving to {flight.part} in the background")
        except CheckpointError:
            if self.mesh.world.is_first:
                manifest.discard_quietly(flight.part)
            raise

    def pop_messages(self) -> list[str]:
        """Not collective: the lines for the log since the last call."""
        return [self._news.popleft() for _ in range(len(self._news))]

    def close(self, wait: bool = True) -> str | None:
        """Not collective: finish the save in flight (unless the other ranks may be dead) and drop the lock. Returns why
        the last save is lost, if it failed and nobody waited for it; `news` has that too, and failed uploads."""
        lost, flight = None, self._pending_save
        if flight is not None and wait:
            flight.join()
        if flight is not None and flight.error is not None:
            lost = f"the last save, to {flight.part}, failed: {error_text(flight.error)}"
            self._news.append(lost)
        if self._uploader is not None:
            self._uploader.close(wait)
        if self._lock is not None:
            self._lock.close()
            self._lock = None
        return lost

    def _prune(self, step: int) -> None:
        if self._branch.unfinished:
            return
        if self._uploader is not None:
            self._uploader.notify()
        else:
            self._retention.complete_steps.add(step)
            try:
                self._retention.prune(step)
            except OSError as error:
                self._news.append(f"could not delete an old checkpoint: {error}")


def save(
    directory: str | Location,
    step: int,
    pieces: Sequence[TensorShard],
    state: dict[str, Any],
    mesh: Mesh,
    confirm: Callable[[], None] = lambda: None,
    commit: Callable[[], None] | None = None,
) -> Location:
    """A save that training waits for; collective: every rank writes the pieces that it owns into one file, all agree
    that every file is there, and rank 0 commits. Returns the folder of the checkpoint. `confirm`: called on rank 0
    before anything changes; its errors end the save. `commit`: what rank 0 does in the end, in place of the commit
    alone. Raises CheckpointError on all ranks, and removes the folder."""
    final = checkpoint_dir(directory, step)
    part = storage_of(final).staging_path(final)
    _begin(part, mesh, confirm)

    def write() -> None:
        rows, ordered = tensor_file.plan_write(pieces)
        manifest.write_rank_file(part, mesh.world.rank, rows, (p.data for p in ordered))
        inject_fault("ckpt.shard_written", mesh.world.rank, step)

    commit = commit or (lambda: manifest.commit(part, final, state, step, mesh.world.size))
    try:
        run_on_all_ranks(mesh, write, f"writing to {part}")
        run_on_all_ranks(mesh, commit if mesh.world.is_first else lambda: None, f"committing {final}")
    except CheckpointError:
        if mesh.world.is_first:
            manifest.discard_quietly(part)
        raise
    return final


def _begin(part: Location, mesh: Mesh, confirm: Callable[[], None]) -> None:
    """Make an empty folder to build a checkpoint in; collective."""

    def begin() -> None:
        if mesh.world.is_first:
            confirm()
            storage_of(part).make_staging(part)

    run_on_all_ranks(mesh, begin, f"making {part}")
