"""A recording of operations on tensors that can be replayed: the CPU's substitute for a CUDA graph.

Recording leaves all tensors as they were. A replay runs the same operations on the same tensors, and the host must make
the same decisions.
"""

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
        # nothing is compiled here; otherwise torch imports its compiler at the first operation, which takes seconds
        return False


class Tape(Dispatch):
    """A dispatch mode that records operations and calls `after_each` after each of them."""

    def __init__(self, after_each: Callable[[], None] = lambda: None):
        super().__init__()
        self.after_each, self.replays = after_each, 0
        self.calls: list[tuple[Any, tuple[Any, ...], dict[str, Any], Any]] = []
        self._created: dict[int, torch.UntypedStorage] = {}  # by address; referenced, so that no address is reused
        self._originals: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        read, written = split(traits_of(func), args, kwargs)
        inputs = {_storage(tensor)._cdata for tensor in read + written}
        for tensor in written:
            self._save_original(_storage(tensor))
        out = func(*args, **kwargs)
        for storage in map(_storage, tensors_in(out)):
            if storage._cdata not in inputs:
                self._created[storage._cdata] = storage
        self.calls.append((func, args, kwargs, out))
        self.after_each()
        return out

    def _save_original(self, storage: torch.UntypedStorage) -> None:
        if storage._cdata not in self._created and storage._cdata not in self._originals:
            with _disable_current_modes():
                self._originals[storage._cdata] = storage, storage.clone()

    def restore(self) -> None:
        with _disable_current_modes():
            for storage, original in self._originals.values():
                storage.copy_(original)
        self._originals.clear()

    def capture(self, work: Callable[[], None]) -> None:
        try:
            with self:
                work()
        finally:
            self.restore()

    @torch.no_grad()
    def replay(self) -> None:
        self.replays += 1
        for func, args, kwargs, out in self.calls:
            new_out = func(*args, **kwargs)
            for old, new in zip(tree_leaves(out), tree_leaves(new_out), strict=True):
                if not isinstance(old, Tensor):
                    assert old == new, f"{func} decides on the host"
                elif old.data_ptr() != new.data_ptr():
                    old.copy_(new)


def _storage(tensor: Tensor) -> torch.UntypedStorage:
    return tensor.untyped_storage()
