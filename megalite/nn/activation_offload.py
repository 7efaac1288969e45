"""What blocks keep for their backward lies in host memory until then.

    forward    | block 0 | block 1 | block 2 |           backward   | block 2 | block 1 | block 0 |
    down                 | block 0 | block 1 | block 2 |       up   | block 1 | block 0 |

Autograd asks what to keep of each tensor that is saved. Its whole storage goes down when the block ends, once, whoever
in the block shares it; the device lets go of it when the next block has ended. In backward a block's storages come up
together, those of the block before it behind its computation. What stays: parameters and what every block is given,
which are there anyway; small storages; what a recomputed part keeps by itself, and what weight gradients wait with.
"""

import contextlib
import itertools
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from megalite.nn.parameter import RunUnit
from megalite.parallel.streams import Event, new_stream, on_side_stream, record_event, wait_event

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
_outer_hooks: ContextVar[Hooks] = ContextVar("hooks", default=(lambda x: x, lambda x: x))


def current_offload_hooks() -> Hooks:
    """Of the block that offloads, if any, to keep and to restore a tensor. Autograd asks only the innermost hooks, so
    whoever has some of its own inside a block gives these what it keeps itself."""
    return _outer_hooks.get()


class ActivationOffload:
    """Of the first `layers` blocks of every stage; storages of `least` elements or more. `sent`: bytes so far."""

    def __init__(self, num_blocks: int, min_numel: int, device: torch.device):
        self.layers, self.least, self.device, self.bytes_offloaded = num_blocks, min_numel, device, 0
        self.d2h_stream, self.h2d_stream = new_stream(device), new_stream(device)

    def __call__(self, use: RunUnit, blocks: int, resident: Iterable[Tensor]) -> RunUnit:
        """`use`, for a micro-batch on its way through a stage's blocks. `stays`: is there anyway, as are weights."""
        names, numbers = set(map(storage_id, resident)), itertools.count(1)
        last: _BlockActivations | None = None

        def run_and_offload(unit: nn.Module, *args: Any, **how: Any) -> Tensor:
            nonlocal last
            activations, number = None, next(numbers)
            with contextlib.ExitStack() as hooks:
                if number <= self.layers and torch.is_grad_enabled():  # there is to be a backward
                    activations = _BlockActivations(self, names.union(map(storage_id, unit.parameters())), last)
                    hooks.enter_context(saved_tensors_hooks(activations.pack, activations.unpack))
                    hooks.callback(_outer_hooks.reset, _outer_hooks.set((activations.pack, activations.unpack)))
                y = use(unit, *args, **how)
            if activations is not None:
                activations.copy_to_host()
            for one in filter(None, (last, activations if number == blocks else None)):
                one.free_device_copies()
            last = activations
            return y

        return run_and_offload


def storage_id(x: Tensor) -> int:
    """Of its storage, while that lives."""
    return x.untyped_storage()._cdata


class _SavedStorage:
    """The bytes of one that was saved: `data` on the device, `copy` on the host. On the meta device it has no copy."""

    def __init__(self, x: Tensor):
        self.size, self.host_copy = x.untyped_storage().nbytes(), None
        self.device_bytes: Any = x.detach().as_strided((self.size // x.itemsize,), (1,), 0).view(torch.uint8)

    def copy_to_host(self) -> None:
        if (
            not self.device_bytes.is_meta
        ):  # torch keeps what it has pinned, and gives it out again when all copies have ended
            host = torch.empty_like(self.device_bytes, device="cpu", pin_memory=self.device_bytes.is_cuda)
            self.host_copy = host.copy_(self.device_bytes, non_blocking=True)


class _BlockActivations:
    """By one block. `before`: the block whose backward comes after this one's."""

    def __init__(self, offload: ActivationOffload, resident: set[int], previous_block: "_BlockActivations | None"):
        self.offload, self.stays, self.before = offload, resident, previous_block
        self.on_device: dict[int, _SavedStorage] = {}
        self.offloaded: WeakValueDictionary[int, _SavedStorage] = (
            WeakValueDictionary()
        )  # what nobody waits for goes by itself
        self.copy_event: Event | None = None  # down, then up

    def pack(self, x: Tensor) -> Any:
        name, size = storage_id(x), x.untyped_storage().nbytes()
        if size < self.offload.least * x.itemsize or size % x.itemsize or name in self.stays:
            return x
        self.on_device[name] = storage = self.on_device.get(name) or _SavedStorage(x)
        return storage, x.dtype, x.shape, x.stride(), int(x.storage_offset())

    def copy_to_host(self) -> None:
        with on_side_stream(self.offload.d2h_stream, after=record_event(self.offload.device)):
            for one in self.on_device.values():
                one.copy_to_host()
                self.offload.bytes_offloaded += one.size
            self.copy_event = record_event(self.offload.device)

    def free_device_copies(self) -> None:
        wait_event(self.copy_event)
        for one in self.on_device.values():
            one.device_bytes = None
        self.offloaded, self.on_device = WeakValueDictionary(self.on_device), {}

    def prefetch(self) -> None:
        if not (found := list(self.offloaded.values())):
            return
        self.offloaded.clear()
        for one in found:
            one.device_bytes = torch.empty(one.size, dtype=torch.uint8, device=self.offload.device)
        with on_side_stream(
            self.offload.h2d_stream, after=record_event(self.offload.device)
        ):  # which has waited for the copies down
            for one in found:
                if one.host_copy is not None:
                    one.device_bytes.copy_(one.host_copy, non_blocking=True)
            self.copy_event = record_event(self.offload.device)

    def unpack(self, saved: Any) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        for activations in filter(None, (self, self.before)):
            activations.prefetch()
        wait_event(self.copy_event)
        storage, dtype, shape, stride, offset = saved
        return storage.device_bytes.view(dtype).as_strided(shape, stride, offset)
