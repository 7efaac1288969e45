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

from megalite.nn.parameter import Use
from megalite.parallel.streams import Event, beside, new_stream, reached, wait_for

Hooks = tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]
_hooks: ContextVar[Hooks] = ContextVar("hooks", default=(lambda x: x, lambda x: x))


def hooks_around() -> Hooks:
    """Of the block that offloads, if any, to keep and to restore a tensor. Autograd asks only the innermost hooks, so
    whoever has some of its own inside a block gives these what it keeps itself."""
    return _hooks.get()


class Offload:
    """Of the first `layers` blocks of every stage; storages of `least` elements or more. `sent`: bytes so far."""

    def __init__(self, layers: int, least: int, device: torch.device):
        self.layers, self.least, self.device, self.sent = layers, least, device, 0
        self.down, self.up = new_stream(device), new_stream(device)

    def __call__(self, use: Use, blocks: int, stays: Iterable[Tensor]) -> Use:
        """`use`, for a micro-batch on its way through a stage's blocks. `stays`: is there anyway, as are weights."""
        names, numbers = set(map(_name, stays)), itertools.count(1)
        last: _Kept | None = None

        def moving(unit: nn.Module, *args: Any, **how: Any) -> Tensor:
            nonlocal last
            kept, number = None, next(numbers)
            with contextlib.ExitStack() as hooks:
                if number <= self.layers and torch.is_grad_enabled():  # there is to be a backward
                    kept = _Kept(self, names.union(map(_name, unit.parameters())), last)
                    hooks.enter_context(saved_tensors_hooks(kept.pack, kept.unpack))
                    hooks.callback(_hooks.reset, _hooks.set((kept.pack, kept.unpack)))
                y = use(unit, *args, **how)
            if kept is not None:
                kept.go_down()
            for one in filter(None, (last, kept if number == blocks else None)):
                one.let_go()
            last = kept
            return y

        return moving


def _name(x: Tensor) -> int:
    """Of its storage, while that lives."""
    return x.untyped_storage()._cdata


class _Storage:
    """The bytes of one that was saved: `data` on the device, `copy` on the host. On the meta device it has no copy."""

    def __init__(self, x: Tensor):
        self.size, self.copy = x.untyped_storage().nbytes(), None
        self.data: Any = x.detach().as_strided((self.size // x.itemsize,), (1,), 0).view(torch.uint8)

    def go_down(self) -> None:
        if not self.data.is_meta:  # torch keeps what it has pinned, and gives it out again when all copies have ended
            host = torch.empty_like(self.data, device="cpu", pin_memory=self.data.is_cuda)
            self.copy = host.copy_(self.data, non_blocking=True)


class _Kept:
    """By one block. `before`: the block whose backward comes after this one's."""

    def __init__(self, offload: Offload, stays: set[int], before: "_Kept | None"):
        self.offload, self.stays, self.before = offload, stays, before
        self.here: dict[int, _Storage] = {}
        self.away: WeakValueDictionary[int, _Storage] = WeakValueDictionary()  # what nobody waits for goes by itself
        self.copied: Event | None = None  # down, then up

    def pack(self, x: Tensor) -> Any:
        name, size = _name(x), x.untyped_storage().nbytes()
        if size < self.offload.least * x.itemsize or size % x.itemsize or name in self.stays:
            return x
        self.here[name] = storage = self.here.get(name) or _Storage(x)
        return storage, x.dtype, x.shape, x.stride(), int(x.storage_offset())

    def go_down(self) -> None:
        with beside(self.offload.down, after=reached(self.offload.device)):
            for one in self.here.values():
                one.go_down()
                self.offload.sent += one.size
            self.copied = reached(self.offload.device)

    def let_go(self) -> None:
        wait_for(self.copied)
        for one in self.here.values():
            one.data = None
        self.away, self.here = WeakValueDictionary(self.here), {}

    def come_up(self) -> None:
        if not (found := list(self.away.values())):
            return
        self.away.clear()
        for one in found:
            one.data = torch.empty(one.size, dtype=torch.uint8, device=self.offload.device)
        with beside(self.offload.up, after=reached(self.offload.device)):  # which has waited for the copies down
            for one in found:
                if one.copy is not None:
                    one.data.copy_(one.copy, non_blocking=True)
            self.copied = reached(self.offload.device)

    def unpack(self, saved: Any) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        for kept in filter(None, (self, self.before)):
            kept.come_up()
        wait_for(self.copied)
        storage, dtype, shape, stride, offset = saved
        return storage.data.view(dtype).as_strided(shape, stride, offset)
