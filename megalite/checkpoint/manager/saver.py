"""The checkpoint saver of one run: its lock on the directory, its pending save, and the retention of checkpoints.

An asynchronous save (`background=True`) overlaps with training:

    every rank's thread   copies its shards into host memory, for which an update waits (`before_update`);
                          writes, hashes and syncs its file, then writes its index
    rank 0's thread       waits until it sees every rank's index; commits; prunes

The threads use no collectives, because these would race with those of training: torch's own asynchronous save was seen
to deadlock on gloo for this reason. A thread that fails leaves a file that ends the waiting of rank 0. Its rank
requests a stop with the all-reduce of the next step, so that all ranks raise at the same step.
"""

import json
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from megalite.checkpoint.format import manifest
from megalite.checkpoint.format import safetensors_file as tensor_file
from megalite.checkpoint.manager.async_save import AsyncSave, HostStager
from megalite.checkpoint.manager.collective import check_shared_filesystem, raise_on_all_ranks, run_on_all_ranks
from megalite.checkpoint.manager.retention import RetentionPolicy
from megalite.checkpoint.manager.superseded import SupersededCheckpoints, finish_renames
from megalite.checkpoint.manager.uploader import Uploader
from megalite.checkpoint.storage.location import CheckpointError, Location, error_text, parse_location
from megalite.checkpoint.storage.storage import RunLock, Storage, checkpoint_dir, storage_of
from megalite.common.fault_injection import inject_fault
from megalite.parallel.comm import all_reduce_int
from megalite.parallel.mesh import Mesh
from megalite.parallel.spec import TensorShard


class CheckpointSaver:
    """The saver of one run's checkpoints.

    The constructor locks the directory, deletes the remains of interrupted saves, and checks that all ranks can write
    to it. Methods are collective over all ranks unless they say otherwise. The lines of `pop_messages` are for the log
    of rank 0.

    Args:
        directory: The --save directory, a path or a URL.
        mesh: The mesh of the run.
        nbytes: The size of this rank's shards in bytes.
        keep_last: The number of newest checkpoints to keep; None keeps all, or one if `retain_interval` is given.
        retain_interval: Also keep checkpoints of steps that are multiples of this number.
        background: Save asynchronously.
        upload_to: The directory whose checkpoints `keep_last` and `retain_interval` apply to, in place of `directory`.

    Raises:
        CheckpointError: On all ranks, if the directory is not writable, has no space for one checkpoint, is in use, or
            is not the same on every rank.
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
        self.directory, self.mesh, self.background = parse_location(directory), mesh, background
        self.storage: Storage = storage_of(self.directory)
        self.upload_to = None if upload_to is None else parse_location(upload_to)
        self.directories = [path for path in (self.directory, self.upload_to) if path is not None]
        self.keep_last = 1 if keep_last is None and retain_interval is not None else keep_last
        self._retention = RetentionPolicy(self.upload_to or self.directory, self.keep_last, retain_interval)
        self.blocked_s = 0.0  # time for which training waited for the last save
        self._previous_s = 0.0  # the part of this time that was spent waiting for the save before it
        self._lock: RunLock | None = None
        self._pending_save: AsyncSave | None = None
        self._stager = HostStager(mesh.device)
        self._messages: deque[str] = deque()  # appended to by any thread
        self._superseded = SupersededCheckpoints()  # of no checkpoints, until `set_start_step`
        self._uploader: Uploader | None = None
        self.megatron_style = False  # log in the style of Megatron-LM
        try:
            check_writable = partial(self.storage.check_writable, self.directory, mesh.world.rank)
            run_on_all_ranks(mesh, check_writable, f"trying to write to {self.directory}")
            self._checkpoint_bytes = all_reduce_int(nbytes, mesh)
            run_on_all_ranks(mesh, self._prepare, f"preparing {self.directory}")
            check_shared_filesystem(self.directory, mesh)
        except CheckpointError:
            self.close(wait=False)
            raise

    def _prepare(self) -> None:
        """Lock and clean up the directory on rank 0."""
        if not self.mesh.world.is_first:
            return
        self._lock = self.storage.lock(self.directory)
        if self.upload_to is not None:
            self._uploader = Uploader(self.directory, self._retention, self._messages)
        finish_renames(*self.directories)
        if leftovers := self.storage.remove_leftovers(self.directory):
            self._messages.append(f"deleted the remains of an unfinished save: {', '.join(leftovers)}")
        self.storage.check_space(self.directory, self._checkpoint_bytes)

    def set_start_step(self, step: int, damaged: bool = False) -> str | None:
        """Set the step from which the run starts, and return a message for the user on rank 0.

        Checkpoints of later steps are renamed with the run's first save (superseded.py), unless they are `damaged`.
        Raises CheckpointError on all ranks.
        """

        def find_superseded() -> str | None:
            if self.mesh.world.is_first:
                self._superseded = SupersededCheckpoints(self.directories, step, damaged)
                self._retention.damaged = self._superseded.damaged
                if self._uploader is not None:
                    self._uploader.paused = self._superseded.pending
                    self._uploader.notify()  # an earlier run may have left checkpoints
            return self._superseded.message

        return run_on_all_ranks(self.mesh, find_superseded, f"looking for checkpoints in {self.directory}")

    # ---- saving

    def save(self, step: int, shards: Sequence[TensorShard], state: dict[str, Any], *, last: bool = False) -> Location:
        """Save this rank's shards as they are at the call, and return the directory of the checkpoint.

        The save is asynchronous if `background` is set, unless it is the `last`. Call `before_update` before the shards
        change.

        Args:
            step: The step of the checkpoint.
            shards: The shards that this rank writes.
            state: The values of rank 0 that are not tensors, as plain JSON.
            last: This is the last save of the run, so wait for it.

        Raises:
            CheckpointError: On all ranks, also if the previous save has failed.
        """
        called = time.perf_counter()
        self.wait()
        started = time.perf_counter()
        self._previous_s = started - called
        final = checkpoint_dir(self.directory, step)
        is_sync = last or not self.background
        staging_dir = self.storage.staging_path(final)
        # serialized now, because the run changes its state in the meantime
        state_json = json.dumps(state) if self.mesh.world.is_first else ""

        def commit() -> None:
            self._check_lock()
            with self._superseded.superseded_by(step, self._messages.append):
                manifest.commit(staging_dir, final, json.loads(state_json), step, self.mesh.world.size)
            if self._uploader is not None:
                self._uploader.paused = self._superseded.unfinished
            self._log_saved(final.name, step, time.perf_counter() - started, is_sync)
            self._prune(step)

        if is_sync:
            save(self.directory, step, shards, {}, self.mesh, self._check_lock, commit)
            self.blocked_s = time.perf_counter() - called
            return final
        _make_staging(staging_dir, self.mesh, self._check_lock)
        self._stager.start()
        self._pending_save = AsyncSave(
            staging_dir=staging_dir,
            step=step,
            mesh=self.mesh,
            stager=self._stager,
            shards=list(shards),
            commit=commit,
            check_lock=self._check_lock,
            log=self._log,
        )
        self._messages.append(f"scheduled {final.name}")
        if self.megatron_style:
            self._messages.append(f"  scheduled an async checkpoint save at iteration {step:7d} to {self.directory}")
        self.blocked_s = time.perf_counter() - called
        self._pending_save.start()
        return final

    def _log_saved(self, name: str, step: int, elapsed_s: float, is_sync: bool) -> None:
        """Log the time, size and speed of a save."""
        gib = self._checkpoint_bytes / 2**30
        size = f"{gib:.3g} GiB, {gib / elapsed_s:.2g} GiB/s" if self._checkpoint_bytes else ""
        previous = f", {self._previous_s:.3f} s of it for the previous save" if self._previous_s >= 0.0005 else ""
        if is_sync:
            shown_size = f" ({size})" if size else ""
            line = f"saved {name} in {elapsed_s:.2f} s{shown_size}{previous}"
        else:
            times = f"{elapsed_s:.2f} s, {size}" if size else f"{elapsed_s:.2f} s"
            blocked = f"training blocked for {self.blocked_s:.3f} s{previous}"
            line = f"saved {name} in the background ({times}; {blocked})"
        self._messages.append(line)
        if self.megatron_style:  # the line that scripts of Megatron-LM's users look for
            ranks = f"[ t 1/{self.mesh.tp.size}, p 1/{self.mesh.pp.size} ]"
            self._messages.append(
                f"  successfully saved checkpoint from iteration {step:7d} to {self.directory} {ranks}"
            )

    def before_update(self) -> None:
        """Wait while the saved tensors are being copied. Not collective.

        Call this before anything changes these tensors.
        """
        if self._pending_save is not None:
            started = time.perf_counter()
            self._stager.wait_until_staged()
            self.blocked_s += time.perf_counter() - started

    def _check_lock(self) -> None:
        if self._lock is not None:
            self._lock.check_held()

    def _log(self, line: str) -> None:
        """Log a line of any rank: in the messages on rank 0, on stderr elsewhere."""
        if self.mesh.world.is_first:
            self._messages.append(line)
        else:
            print(line, file=sys.stderr, flush=True)

    def save_message(self, step: int) -> str:
        """Return the line to log before `save`."""
        if self.megatron_style:
            return f"saving checkpoint at iteration {step:7d} to {self.directory} in megalite format"
        return f"saving checkpoint at step {step} to {self.directory}"

    @property
    def failed(self) -> bool:
        """True if this rank's pending save has failed, so that `wait` will raise. Not collective."""
        return self._pending_save is not None and self._pending_save.error is not None

    def wait(self) -> None:
        """Wait until no save is pending. Raises CheckpointError on all ranks if the save failed on any."""
        pending = self._pending_save
        if pending is None:
            return
        if not self.mesh.world.is_first:
            pending.join()  # to know if it failed; this waits for no other rank, and rank 0 waits for it anyway
        if all_reduce_int(self.failed, self.mesh):
            pending.abort.set()
        pending.join()
        self._pending_save = None
        try:
            raise_on_all_ranks(pending.error, self.mesh, f"saving to {pending.staging_dir} in the background")
        except CheckpointError:
            if self.mesh.world.is_first:
                manifest.discard_quietly(pending.staging_dir)
            raise

    def pop_messages(self) -> list[str]:
        """Return the lines to log since the last call. Not collective."""
        return [self._messages.popleft() for _ in range(len(self._messages))]

    def close(self, wait: bool = True) -> str | None:
        """Finish the pending save and release the lock. Not collective.

        Returns the error of the last save if it failed and `wait` was not called. The messages include it, and failed
        uploads. `wait=False` does not wait for the pending save, for the case that other ranks are dead.
        """
        message = None
        pending = self._pending_save
        if pending is not None and wait:
            pending.join()
        if pending is not None and pending.error is not None:
            message = f"the last save, to {pending.staging_dir}, failed: {error_text(pending.error)}"
            self._messages.append(message)
        if self._uploader is not None:
            self._uploader.close(wait)
        if self._lock is not None:
            self._lock.close()
            self._lock = None
        return message

    def _prune(self, step: int) -> None:
        """Delete or upload checkpoints after a commit."""
        if self._superseded.unfinished:  # the new checkpoint must stay
            return
        if self._uploader is not None:
            self._uploader.notify()
        else:
            self._retention.complete_steps.add(step)
            try:
                self._retention.prune(step)
            except OSError as error:
                self._messages.append(f"could not delete an old checkpoint: {error}")


def save(
    directory: str | Location,
    step: int,
    shards: Sequence[TensorShard],
    state: dict[str, Any],
    mesh: Mesh,
    check_lock: Callable[[], None] = lambda: None,
    commit: Callable[[], None] | None = None,
) -> Location:
    """Save synchronously, and return the directory of the checkpoint. Collective over all ranks.

    Every rank writes its shards into one file, all ranks agree that every file exists, and rank 0 commits.

    Args:
        directory: The --save directory.
        step: The step of the checkpoint.
        shards: The shards that this rank writes.
        state: The values that are not tensors, as plain JSON.
        mesh: The mesh of the run.
        check_lock: Called on rank 0 before anything changes. Its errors end the save.
        commit: Called on rank 0 at the end, in place of manifest.commit.

    Raises:
        CheckpointError: On all ranks. The staging directory has been removed.
    """
    final = checkpoint_dir(directory, step)
    staging_dir = storage_of(final).staging_path(final)
    _make_staging(staging_dir, mesh, check_lock)

    def write() -> None:
        rows, ordered = tensor_file.plan_write(shards)
        manifest.write_rank_file(staging_dir, mesh.world.rank, rows, (shard.data for shard in ordered))
        inject_fault("ckpt.shard_written", mesh.world.rank, step)

    def commit_on_first() -> None:
        if not mesh.world.is_first:
            return
        if commit is not None:
            commit()
        else:
            manifest.commit(staging_dir, final, state, step, mesh.world.size)

    try:
        run_on_all_ranks(mesh, write, f"writing to {staging_dir}")
        run_on_all_ranks(mesh, commit_on_first, f"committing {final}")
    except CheckpointError:
        if mesh.world.is_first:
            manifest.discard_quietly(staging_dir)
        raise
    return final


def _make_staging(staging_dir: Location, mesh: Mesh, check_lock: Callable[[], None]) -> None:
    """Make an empty directory in which a checkpoint is built. Collective over all ranks."""

    def make() -> None:
        if mesh.world.is_first:
            check_lock()
            storage_of(staging_dir).make_staging(staging_dir)

    run_on_all_ranks(mesh, make, f"creating {staging_dir}")
