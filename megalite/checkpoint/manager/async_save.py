"""Asynchronous saving: staging the state in host memory, and waiting for the files of other ranks.

The next update is the first operation to change the state, so the copy is made during the forward and backward before
it: by a thread on the CPU, and on a separate stream on CUDA. An update waits only until the copy is done. Without
enough memory for a copy, the state itself is written, and the update waits for the write.
"""

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megalite.checkpoint.format import manifest
from megalite.checkpoint.format import safetensors_file as tensor_file
from megalite.checkpoint.storage.location import CheckpointError, Location, OtherRankError, error_text
from megalite.checkpoint.storage.storage import storage_of
from megalite.common.fault_injection import inject_fault
from megalite.parallel.mesh import Mesh
from megalite.parallel.spec import TensorShard
from megalite.parallel.streams import Event, new_stream, on_side_stream, record_event, wait_event


class HostStager:
    """A copy of tensors in host memory (pinned on CUDA).

    The buffer is reused by the next save, because pinning memory takes longer than filling it. The training thread
    calls `start` and `wait_until_staged`, and the writing thread calls `stage`. There is one copy at a time.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._buffer: Tensor | None = None
        self._stream = new_stream(device)
        self._ready: Event | None = None
        self._done: Event | None = None
        self._staged = threading.Event()
        self._staged.set()
        self.no_memory_reason: str | None = None  # why the last copy found no memory

    def start(self) -> None:
        """Mark the state to copy: the result of all work that training has enqueued before this call."""
        self._staged.clear()
        self._done = self.no_memory_reason = None
        self._ready = record_event(self._device)

    def stage(self, data: Sequence[Tensor]) -> list[Tensor]:
        """Copy `data` (1-D, contiguous tensors) to host memory, and return the copies as bytes.

        Without enough memory, returns `data` itself, which must not change until `release`.
        """
        try:
            staged = self._parts(data)
        except (MemoryError, RuntimeError) as error:  # which one depends on the device
            self.no_memory_reason = str(error).partition("\n")[0] or type(error).__name__
            wait_event(self._ready)
            return list(data)
        try:
            with on_side_stream(self._stream, after=self._ready):
                try:
                    for target, tensor in zip(staged, data, strict=True):
                        target.copy_(tensor.detach().view(torch.uint8), non_blocking=True)
                finally:
                    self._done = record_event(self._device)
        finally:
            self._staged.set()
        if self._done is not None:
            self._done.synchronize()
        return staged

    def _parts(self, data: Sequence[Tensor]) -> list[Tensor]:
        """Return a slice of the buffer for each tensor, and enlarge the buffer if needed."""
        sizes = [tensor.numel() * tensor.element_size() for tensor in data]
        if self._buffer is None or len(self._buffer) < sum(sizes):
            self._buffer = None  # free the old one first
            self._buffer = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        return list(self._buffer[: sum(sizes)].split(sizes)) if sizes else []

    def release(self) -> None:
        """Let all waiting threads continue, because the save has ended."""
        self._staged.set()

    def wait_until_staged(self) -> None:
        """Wait until the copy is done. On CUDA the current stream waits for it, not the host."""
        self._staged.wait()
        wait_event(self._done)


@dataclass
class AsyncSave:
    """One asynchronous save on one rank.

    Every rank writes `shards` into the staging directory. Rank 0 then waits for the files of all ranks, and commits.

    Attributes:
        staging_dir: The staging directory.
        step: The step of the checkpoint.
        mesh: The mesh of the run.
        stager: The stager that copies the state.
        shards: The shards that this rank writes.
        commit: Called on rank 0 after all files are written.
        check_lock: Called on rank 0 while it waits. It raises if the run has lost its lock on the directory.
        log: Receives lines for the log.
        error: The error of this rank's save, if it failed.
        abort: Set when a rank has failed, so that its index file will not appear.
    """

    staging_dir: Location
    step: int
    mesh: Mesh
    stager: HostStager
    shards: Sequence[TensorShard]
    commit: Callable[[], None]
    check_lock: Callable[[], None]
    log: Callable[[str], None]
    error: Exception | None = None
    abort: threading.Event = field(default_factory=threading.Event)

    def start(self) -> None:
        """Run the save in a thread, or synchronously if the system has no more threads."""
        self._thread = threading.Thread(target=self._run, name="megalite-save", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            self._run()

    def join(self) -> None:
        """Wait for the thread of this rank."""
        if self._thread.ident is not None:  # it was started
            self._thread.join()

    def _run(self) -> None:
        device = self.mesh.device  # a new thread uses the first GPU, on which pinning would allocate memory
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            self._save()

    def _save(self) -> None:
        rank = self.mesh.world.rank
        try:
            rows, ordered = tensor_file.plan_write(self.shards)
            data = self.stager.stage([shard.data for shard in ordered])
            if self.stager.no_memory_reason is not None:
                consequence = "the state itself is written, and the next update waits for that"
                reason = self.stager.no_memory_reason
                self.log(f"rank {rank} has no memory for a copy of what it saves ({reason}): {consequence}")
            manifest.write_rank_file(self.staging_dir, rank, rows, data)
            inject_fault("ckpt.shard_written", rank, self.step)
            self.stager.release()
            if self.mesh.world.is_first:
                wait_for_rank_files(self.staging_dir, self.mesh.world.size, self.abort, self.check_lock)
                self.commit()
        except Exception as error:  # CheckpointSaver.wait raises it on all ranks
            self.error = error
            failed = self.staging_dir / f"rank-{rank:05d}.failed"
            # This file makes rank 0 stop waiting. A full disk may only accept an empty file, or none at all: then rank
            # 0 learns of the failure in `CheckpointSaver.wait`.
            for content in (f"rank {rank}: {error_text(error)}", ""):
                with contextlib.suppress(OSError, MemoryError):
                    storage_of(failed).write_text(failed, content)
                    break
        finally:
            self.stager.release()  # also after an error before the copy


def wait_for_rank_files(
    staging_dir: Location, world_size: int, abort: threading.Event, check_lock: Callable[[], None]
) -> None:
    """Wait until all ranks have written their index files.

    `check_lock` is called repeatedly, because a run that takes over the directory may delete the files.

    Raises:
        OtherRankError: A rank has failed, or `abort` is set.
        CheckpointError: No file has grown for `stall_timeout_s`.
    """
    storage = storage_of(staging_dir)
    largest_size = -1
    last_growth = time.monotonic()
    while True:
        names = storage.list_files(staging_dir)
        missing = [rank for rank in range(world_size) if manifest.rank_index_name(rank) not in names]
        if not missing:
            return
        check_lock()
        failed = sorted(name for name in names if name.endswith(".failed"))
        if failed:
            reason = storage.read(staging_dir / failed[0]).decode(errors="replace")
            raise OtherRankError(reason or f"{failed[0].removesuffix('.failed')} could not be written, nor the reason")
        size = sum(size for name, size in names.items() if name.endswith(".safetensors"))  # these files only grow
        if size != largest_size:
            largest_size, last_growth = size, time.monotonic()
        elif time.monotonic() - last_growth > storage.stall_timeout_s:
            raise CheckpointError(
                f"rank {missing[0]} has written nothing to {staging_dir} for {storage.stall_timeout_s:.0f} s"
            )
        if abort.wait(storage.poll_interval_s):
            raise OtherRankError(f"rank {missing[0]}, or another one, has failed")
