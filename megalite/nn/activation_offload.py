"""Offload of saved activations to host memory between forward and backward.

    forward    | block 0 | block 1 | block 2 |           backward   | block 2 | block 1 | block 0 |
    d2h                  | block 0 | block 1 | block 2 |       h2d  | block 1 | block 0 |

Saved-tensor hooks see each tensor that autograd saves. Its storage is copied to the host once when the block ends,
however many tensors share it. The device copy is freed when the next block has ended. In backward, a block's storages
are copied back together while the block after it computes. These stay on the device: parameters and inputs of every
block, which are there anyway; small storages; tensors that a recomputed part saves itself; and tensors of deferred
weight gradients.
"""

import contextlib
import itertools
from collections.abc import Iterable
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from megalite.nn.parameter import RunUnit
from megalite.nn.saved_tensors import nested_hooks
from megalite.nn.storage_identity import storage_id
from megalite.parallel.streams import Event, new_stream, on_side_stream, record_event, wait_event


class ActivationOffload:
    """Offload by the first `num_blocks` blocks of every stage, of storages with at least `min_numel` elements."""

    def __init__(self, num_blocks: int, min_numel: int, device: torch.device):
        self.num_blocks = num_blocks
        self.min_numel = min_numel
        self.device = device
        self.bytes_offloaded = 0
        self.d2h_stream, self.h2d_stream = new_stream(device), new_stream(device)

    def __call__(self, run_unit: RunUnit, blocks: int, resident: Iterable[Tensor]) -> RunUnit:
        """Return `run_unit` with offload, for one micro-batch in a stage of `blocks` blocks.

        `resident` tensors stay on the device anyway, like weights.
        """
        resident_ids = set(map(storage_id, resident))
        numbers = itertools.count(1)
        previous: _BlockActivations | None = None

        def run_and_offload(unit: nn.Module, *args: Any, **kwargs: Any) -> Tensor:
            nonlocal previous
            activations = None
            number = next(numbers)
            with contextlib.ExitStack() as hooks:
                if number <= self.num_blocks and torch.is_grad_enabled():
                    activations = _BlockActivations(
                        self, resident_ids.union(map(storage_id, unit.parameters())), previous
                    )
                    hooks.enter_context(nested_hooks(activations.pack, activations.unpack))
                y = run_unit(unit, *args, **kwargs)
            if activations is not None:
                activations.copy_to_host()
            if previous is not None:
                previous.free_device_copies()
            if activations is not None and number == blocks:
                activations.free_device_copies()
            previous = activations
            return y

        return run_and_offload


class _SavedStorage:
    """The bytes of a saved storage on the device and, except on the meta device, their copy on the host."""

    def __init__(self, x: Tensor):
        self.size = x.untyped_storage().nbytes()
        self.host_copy = None
        self.device_bytes: Any = x.detach().as_strided((self.size // x.itemsize,), (1,), 0).view(torch.uint8)

    def copy_to_host(self) -> None:
        if not self.device_bytes.is_meta:  # torch caches pinned memory, and reuses it when all copies have ended
            host = torch.empty_like(self.device_bytes, device="cpu", pin_memory=self.device_bytes.is_cuda)
            self.host_copy = host.copy_(self.device_bytes, non_blocking=True)


class _BlockActivations:
    """The saved storages of one block. `previous_block` has its backward after this one."""

    def __init__(self, offload: ActivationOffload, resident: set[int], previous_block: "_BlockActivations | None"):
        self.offload = offload
        self.resident = resident
        self.previous_block = previous_block
        self.on_device: dict[int, _SavedStorage] = {}
        # weak: a storage whose tensors are no longer needed is freed
        self.offloaded: WeakValueDictionary[int, _SavedStorage] = WeakValueDictionary()
        self.copy_event: Event | None = None  # of the copies to the host, later of those to the device

    def pack(self, x: Tensor) -> Any:
        key = storage_id(x)
        size = x.untyped_storage().nbytes()
        if size < self.offload.min_numel * x.itemsize or size % x.itemsize or key in self.resident:
            return x
        self.on_device[key] = storage = self.on_device.get(key) or _SavedStorage(x)
        return storage, x.dtype, x.shape, x.stride(), int(x.storage_offset())

    def copy_to_host(self) -> None:
        with on_side_stream(self.offload.d2h_stream, after=record_event(self.offload.device)):
            for storage in self.on_device.values():
                storage.copy_to_host()
                self.offload.bytes_offloaded += storage.size
            self.copy_event = record_event(self.offload.device)

    def free_device_copies(self) -> None:
        wait_event(self.copy_event)
        for storage in self.on_device.values():
            storage.device_bytes = None
        self.offloaded = WeakValueDictionary(self.on_device)
        self.on_device = {}

    def prefetch(self) -> None:
        if not (storages := list(self.offloaded.values())):
            return
        self.offloaded.clear()
        for storage in storages:
            storage.device_bytes = torch.empty(storage.size, dtype=torch.uint8, device=self.offload.device)
        # the current stream has waited for the copies to the host
        with on_side_stream(self.offload.h2d_stream, after=record_event(self.offload.device)):
            for storage in storages:
                if storage.host_copy is not None:
                    storage.device_bytes.copy_(storage.host_copy, non_blocking=True)
            self.copy_event = record_event(self.offload.device)

    def unpack(self, saved: Any) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        self.prefetch()
        if self.previous_block is not None:
            self.previous_block.prefetch()
        wait_event(self.copy_event)
        storage, dtype, shape, stride, offset = saved
        return storage.device_bytes.view(dtype).as_strided(shape, stride, offset)
