"""What a stretch of Python does to tensors, to be repeated: on a CPU it stands for the card's graph. Recording changes
nothing that lasts; a replay repeats the very operations on the very tensors, and must decide on the host as before."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from simulated_gpu.simulator.operations import split, tensors_in, traits_of


class Dispatch(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here; torch would import its compiler at the first operation: seconds


class Tape(Dispatch):
    """`after_each`: called when an operation has been recorded."""

    def __init__(self, after_each: Callable[[], None] = lambda: None):
        super().__init__()
        self.after_each, self.replays = after_each, 0
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []
        self._made: dict[int, torch.UntypedStorage] = {}  # by identity; held, so that none is given out again
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        read, written = split(traits_of(func), args, kwargs)
        inputs = {_storage(tensor)._cdata for tensor in read + written}
        for tensor in written:
            self._keep(_storage(tensor))
        out = func(*args, **kwargs)
        for storage in map(_storage, tensors_in(out)):
            if storage._cdata not in inputs:
                self._made[storage._cdata] = storage
        self.calls.append((func, args, kwargs, out))
        self.after_each()
        return out

    def _keep(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._made and storage._cdata not in self._before:
            with _disable_current_modes():
                self._before[storage._cdata] = storage, storage.clone()

    def put_back(self) -> None:
        with _disable_current_modes():
            for storage, before in self._before.values():
                storage.copy_(before)
        self._before.clear()

    def capture(self, work: Callable[[], None]) -> None:
        try:
            with self:
                work()
        finally:
            self.put_back()

    @torch.no_grad()
    def replay(self) -> None:
        self.replays += 1
        for func, args, kwargs, out in self.calls:
            again = func(*args, **kwargs)
            for old, new in zip(tree_leaves(out), tree_leaves(again), strict=True):
                if not isinstance(old, Tensor):
                    assert old == new, f"{func} decides on the host"
                elif old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()
