"""What a save in the background needs: a copy of the state that training hardly waits for, and the others' files.

The first that changes the state is the next update, so the copy is made behind the forward and the backward before it:
by a thread on the CPU, by a stream of its own on CUDA. Only an update that comes earlier than the copy's end waits.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from megalite.checkpoint import writer
from megalite.checkpoint.location import CheckpointError, Location
from megalite.checkpoint.storage import storage_of


class HostCopy:
    """A copy of tensors in host memory (pinned on CUDA), kept for the next one: pinning takes longer than filling.

    `begin` and `wait_before_change` are training's, `fill` is for the thread that then writes. One at a time.
    """

    def __init__(self, device: torch.device):
        self._device = device
        self._buffer: Tensor | None = None
        self._stream: torch.cuda.Stream | None = None
        self._ready: torch.cuda.Event | None = None
        self._done: torch.cuda.Event | None = None
        self._staged = threading.Event()
        self._staged.set()

    def begin(self) -> None:
        """What is copied is the state at this call: all that training has started until now."""
        self._staged.clear()
        self._done = None
        if self._device.type == "cuda":
            self._ready = torch.cuda.Event()
            self._ready.record(torch.cuda.current_stream(self._device))

    def fill(self, data: Sequence[Tensor]) -> list[Tensor]:
        """The bytes of `data`, which are 1-D and contiguous. Raises what ends a copy: no memory."""
        try:
            if self._device.type == "cuda":
                with torch.cuda.device(self._device):
                    parts = self._copy_on_stream(data)
            else:
                parts = self._parts(data, pinned=False)
                for part, tensor in zip(parts, data, strict=True):
                    part.copy_(tensor.detach().view(torch.uint8))
        finally:
            self._staged.set()
        if self._done is not None:
            self._done.synchronize()
        return parts

    def _parts(self, data: Sequence[Tensor], pinned: bool) -> list[Tensor]:
        sizes = [tensor.numel() * tensor.element_size() for tensor in data]
        if self._buffer is None or len(self._buffer) < sum(sizes):
            self._buffer = None  # let go of the old one first
            self._buffer = torch.empty(sum(sizes), dtype=torch.uint8, pin_memory=pinned)
        return list(self._buffer[: sum(sizes)].split(sizes)) if sizes else []

    def _copy_on_stream(self, data: Sequence[Tensor]) -> list[Tensor]:
        parts = self._parts(data, pinned=True)
        stream = self._stream = self._stream or torch.cuda.Stream(self._device)
        with torch.cuda.stream(stream):
            if self._ready is not None:
                stream.wait_event(self._ready)
            try:
                for part, tensor in zip(parts, data, strict=True):
                    part.copy_(tensor.detach().view(torch.uint8), non_blocking=True)
            finally:
                self._done = torch.cuda.Event()
                self._done.record(stream)
        return parts

    def release(self) -> None:
        """Nobody is to wait any longer: the save has ended."""
        self._staged.set()

    def wait_before_change(self) -> None:
        """The state may change after this: at once where the copy is done. On CUDA the stream waits, not the host."""
        self._staged.wait()
        done = self._done
        if done is not None:
            torch.cuda.current_stream(self._device).wait_event(done)


def wait_for_lists(
    part: Location,
    world: int,
    give_up: threading.Event,
    patience_s: float | None = None,
    confirm: Callable[[], None] = lambda: None,
) -> None:
    """Until all ranks have written their list. CheckpointError when one failed, or when nothing grows any more.
    `confirm` is asked meanwhile: who has taken the directory over may have deleted what is waited for."""
    storage = storage_of(part)
    patience_s = storage.patience_s if patience_s is None else patience_s
    seen, since = -1, time.monotonic()
    while True:
        names = storage.entries(part)
        missing = [rank for rank in range(world) if writer.list_of(part, rank).name not in names]
        if not missing:
            return
        confirm()
        failed = sorted(name for name in names if name.endswith(".failed"))
        if failed:
            raise CheckpointError(storage.read(part / failed[0]).decode(errors="replace"))
        size = sum(size for name, size in names.items() if name.endswith(".safetensors"))  # these only grow
        if size != seen:
            seen, since = size, time.monotonic()
        elif time.monotonic() - since > patience_s:
            raise CheckpointError(f"rank {missing[0]} has written nothing to {part} for {patience_s:.0f} s")
        if give_up.wait(storage.look_every_s):
            raise CheckpointError(f"rank {missing[0]}, or another, has failed")
