"""A save in the background: a copy of the state that training hardly waits for, and the wait for other ranks' files.

The next update is the first to change the state, so the copy is made during the forward and backward before it: by a
thread on the CPU, by a stream of its own on CUDA. An update waits only until the copy is done. Without memory for a
copy the state itself is written, and the update waits for that.
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
    """A copy of tensors in host memory (pinned on CUDA), kept for the next one: pinning takes longer than filling.
    Training calls `begin` and `wait_before_change`, the writing thread `fill`. One copy at a time."""

    def __init__(self, device: torch.device):
        self._device = device
        self._buffer: Tensor | None = None
        self._stream = new_stream(device)
        self._ready: Event | None = None
        self._done: Event | None = None
        self._staged = threading.Event()
        self._staged.set()
        self.no_memory_reason: str | None = None  # why there was no memory, the last time

    def start(self) -> None:
        """The copy will be of the state at this call, with all that training has started."""
        self._staged.clear()
        self._done = self.no_memory_reason = None
        self._ready = record_event(self._device)

    def stage(self, data: Sequence[Tensor]) -> list[Tensor]:
        """The bytes of `data`, 1-D and contiguous; without memory `data` itself, unchangeable until `release`."""
        try:
            parts = self._parts(data)
        except (MemoryError, RuntimeError) as error:  # depending on the device
            self.no_memory_reason = str(error).partition("\n")[0] or type(error).__name__
            wait_event(self._ready)
            return list(data)
        try:
            with on_side_stream(self._stream, after=self._ready):
                try:
                    for part, tensor in zip(parts, data, strict=True):
                        part.copy_(tensor.detach().view(torch.uint8), non_blocking=True)
                finally:
                    self._done = record_event(self._device)
        finally:
            self._staged.set()
        if self._done is not None:
            self._done.synchronize()
        return parts

    def _parts(self, data: Sequence[Tensor]) -> list[Tensor]:
        sizes = [tensor.numel() * tensor.element_size() for tensor in data]
        if self._buffer is None or len(self._buffer) < sum(sizes):
            self._buffer = None  # free the old one first
            self._buffer = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=self._device.type == "cuda")
        return list(self._buffer[: sum(sizes)].split(sizes)) if sizes else []

    def release(self) -> None:
        """End all waiting, since the save has ended."""
        self._staged.set()

    def wait_until_staged(self) -> None:
        """Wait until the copy is done; on CUDA the stream waits, not the host."""
        self._staged.wait()
        wait_event(self._done)


@dataclass
class AsyncSave:
    """One save in the background, on one rank: writes `pieces` into `part`; rank 0 then waits for the lists of all
    ranks, and commits. `confirm`: see `wait_for_lists`; `tell`: gets lines for people."""

    part: Location
    step: int
    mesh: Mesh
    host: HostStager
    pieces: Sequence[TensorShard]
    commit: Callable[[], None]
    check_lock: Callable[[], None]
    log: Callable[[str], None]
    error: Exception | None = None
    abort: threading.Event = field(default_factory=threading.Event)  # a rank has failed: its list will not come

    def start(self) -> None:
        """Run in a thread, or at once if the system has no more threads."""
        self._thread = threading.Thread(target=self._run, name="megalite-save", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:
            self._run()

    def join(self) -> None:
        if self._thread.ident is not None:  # it was started
            self._thread.join()

    def _run(self) -> None:
        device = self.mesh.device  # a new thread has the first device, and pinning would take memory on it
        with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
            self._save()

    def _save(self) -> None:
        rank = self.mesh.world.rank
        try:
            rows, ordered = tensor_file.plan_write(self.pieces)
            data = self.host.stage([piece.data for piece in ordered])
            if self.host.no_memory_reason is not None:
                slow = "the state itself is written, and the next update waits for that"
                self.log(
                    f"rank {rank} has no memory for a copy of what it saves ({self.host.no_memory_reason}): {slow}"
                )
            manifest.write_rank_file(self.part, rank, rows, data)
            inject_fault("ckpt.shard_written", rank, self.step)
            self.host.release()
            if self.mesh.world.is_first:
                wait_for_rank_files(self.part, self.mesh.world.size, self.abort, confirm=self.check_lock)
                self.commit()
        except Exception as error:  # the saver's `wait` raises it, on all ranks
            self.error = error
            failed = self.part / f"rank-{rank:05d}.failed"
            # ends rank 0's waiting; a full disk may take an empty file only, or nothing: then `wait` tells it
            for content in (f"rank {rank}: {error_text(error)}", ""):
                with contextlib.suppress(OSError, MemoryError):
                    storage_of(failed).write_text(failed, content)
                    break
        finally:
            self.host.release()  # also after an error before the copy


def wait_for_rank_files(part: Location, world: int, give_up: threading.Event, confirm: Callable[[], None]) -> None:
    """Wait until all ranks have written their lists. ElsewhereError when one failed, CheckpointError when no file grows
    any more. `confirm` is called meanwhile: a run that takes the directory over may delete the lists."""
    storage = storage_of(part)
    seen, since = -1, time.monotonic()
    while True:
        names = storage.list_files(part)
        missing = [rank for rank in range(world) if manifest.rank_index_name(rank) not in names]
        if not missing:
            return
        confirm()
        failed = sorted(name for name in names if name.endswith(".failed"))
        if failed:
            why = storage.read(part / failed[0]).decode(errors="replace")
            raise OtherRankError(why or f"{failed[0].removesuffix('.failed')} could not be written, nor the reason")
        size = sum(size for name, size in names.items() if name.endswith(".safetensors"))  # these only grow
        if size != seen:
            seen, since = size, time.monotonic()
        elif time.monotonic() - since > storage.stall_timeout_s:
            raise CheckpointError(
                f"rank {missing[0]} has written nothing to {part} for {storage.stall_timeout_s:.0f} s"
            )
        if give_up.wait(storage.poll_interval_s):
            raise OtherRankError(f"rank {missing[0]}, or another, has failed")
