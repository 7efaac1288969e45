"""Memory that comes and goes under tensors that stay: of weights that are gathered, gradients that are reduced."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Protocol

import torch
from torch import Tensor


class Listener(Protocol):
    """Is told of memory that comes and goes, which is no operation of torch's: no dispatch mode sees it."""

    def came(self, flat: Tensor) -> None:
        """It has its memory again."""

    def goes(self, flat: Tensor) -> None:
        """Its memory is about to be given back."""


_listener: ContextVar[Listener | None] = ContextVar("listener", default=None)


@contextlib.contextmanager
def listening(listener: Listener) -> Iterator[None]:
    """Inside, `listener` is told by every Elastic."""
    token = _listener.set(listener)
    try:
        yield
    finally:
        _listener.reset(token)


class Elastic:
    """A flat tensor [numel] whose memory is given back and taken again. Its views, and what autograd has saved of
    them, share one storage object: they are whole again when it is, with whatever was written into it meanwhile.

    A parameter's version is not that of the flat tensor its data is a part of, so autograd takes no offence: backward
    uses the values that are there then. Nobody checks that the memory is there: whoever reads a view while it is away
    ends the process (SIGSEGV on a CPU).
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device):
        self.flat = torch.empty(numel, dtype=dtype, device=device)
        self._bytes = self.flat.untyped_storage().nbytes()

    @property
    def is_there(self) -> bool:
        return self.flat.untyped_storage().nbytes() == self._bytes

    def come(self) -> Tensor:
        """The flat tensor, with memory; where it had none the values are arbitrary."""
        if not self.is_there:
            self.flat.untyped_storage().resize_(self._bytes)
            if (listener := _listener.get()) is not None:
                listener.came(self.flat)
        return self.flat

    def go(self) -> None:
        """Give the memory back. On CUDA the allocator may hand it to the current stream at once: another stream that
        still reads it has to be waited for before (parallel/streams.py)."""
        if self.is_there and (listener := _listener.get()) is not None:
            listener.goes(self.flat)
        self.flat.untyped_storage().resize_(0)
