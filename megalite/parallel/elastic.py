"""Frees and restores the memory of tensors that stay: weights that are gathered, gradients that are reduced."""

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Protocol

import torch
from torch import Tensor


class Watcher(Protocol):
    """Is told of memory that comes and goes, which is no operation of torch's: no dispatch mode sees it."""

    def came(self, flat: Tensor) -> None:
        """It has its memory again."""

    def goes(self, flat: Tensor) -> None:
        """Its memory is about to be given back."""


_watcher: ContextVar[Watcher | None] = ContextVar("watcher", default=None)


@contextlib.contextmanager
def listening(watcher: Watcher) -> Iterator[None]:
    """Inside, `watcher` is told by every Elastic."""
    token = _watcher.set(watcher)
    try:
        yield
    finally:
        _watcher.reset(token)


class Elastic:
    """A flat tensor [numel] whose memory can be freed and allocated again. Its views, and the views that autograd has
    saved, share one storage object, so they are valid again as soon as it is, with the values that were written since.

    A parameter's version counter is not that of the flat tensor that its data is part of, so autograd does not notice,
    and backward uses the values that are there at that time. Nothing checks that the memory is there: reading a view
    without it ends the process (SIGSEGV on a CPU).
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device):
        self.flat = torch.empty(numel, dtype=dtype, device=device)
        self._bytes = self.flat.untyped_storage().nbytes()

    @property
    def is_there(self) -> bool:
        return self.flat.untyped_storage().nbytes() == self._bytes

    def come(self) -> Tensor:
        """Allocate the memory unless it is there, with arbitrary values; return the flat tensor."""
        if not self.is_there:
            self.flat.untyped_storage().resize_(self._bytes)
            if (watcher := _watcher.get()) is not None:
                watcher.came(self.flat)
        return self.flat

    def go(self) -> None:
        """Free the memory. On CUDA the allocator may give it to the current stream at once, so wait first for any other
        stream that still reads it (parallel/streams.py)."""
        if self.is_there and (watcher := _watcher.get()) is not None:
            watcher.goes(self.flat)
        self.flat.untyped_storage().resize_(0)
