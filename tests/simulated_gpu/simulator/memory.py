"""The location of tensors' memory (GPU, pinned, host), recorded by storage, so that views share it.

An unknown storage is the host's. One that C++ created by itself (zeros for a missing gradient) is "unplaced" until it
is used together with another.
"""

import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from simulated_gpu.simulator.trace import Alloc, Fact, Free, Span, Stream

Side = Literal["gpu", "pinned", "host", "unplaced"]


@dataclass
class Block:
    """One allocation.

    The callback of `watch` runs when the last reference to the storage, in Python or C++, is gone. `is_allocated` is
    False while the storage has released its memory (optim/zero/storage.py).
    """

    number: int
    side: Side
    size: int
    watch: weakref.ref[Any]
    is_allocated: bool = True


class Memory:
    def __init__(self, write: Callable[[Fact], None], stream: Callable[[], Stream]):
        """Add facts to the trace with `write`; `stream` returns the current stream."""
        self._write, self._stream = write, stream
        self._blocks: dict[int, Block] = {}  # by the address of the storage, which is reused after its release
        self._alive: dict[int, Block] = {}  # by number
        self._numbers = itertools.count(1)

    def block(self, x: Tensor) -> Block | None:
        """Return the block of `x`, but none of a dead storage whose address another thread has reused."""
        block = self._blocks.get(x.untyped_storage()._cdata)
        return None if block is None or block.watch() is None else block

    def side(self, x: Tensor) -> Side:
        block = self.block(x)
        return "host" if block is None else block.side

    def on_gpu(self, x: Tensor) -> bool:
        block = self.block(x)
        return block is not None and block.side == "gpu"

    def place(self, x: Tensor, side: Side) -> Block:
        """Record where `x` lies, with an Alloc, if its storage is new or unplaced."""
        storage = x.untyped_storage()
        address = storage._cdata
        block = self._blocks.get(address)
        if block is None or block.watch() is None:
            number = next(self._numbers)
            watch = weakref.ref(storage, lambda _: self._on_release(address, number))
            block = self._blocks[address] = self._alive[number] = Block(number, side, storage.nbytes(), watch)
        elif block.side == "unplaced":
            block.side = side
        else:
            return block
        if block.side != "unplaced":
            stream = self._stream() if block.side == "gpu" else 0
            self._write(Alloc(block.number, block.side, block.size, stream))
        return block

    def _on_release(self, address: int, number: int) -> None:
        block = self._alive.pop(number)
        if self._blocks.get(address) is block:
            del self._blocks[address]
        if block.side != "unplaced" and block.is_allocated:
            self._write(Free(block.number))

    def on_free(self, flat: Tensor) -> None:
        """Record that a storage released its memory. If it gets memory later, that has another number."""
        block = self.block(flat)
        if block is not None and block.side == "gpu":
            block.is_allocated = False
            self._write(Free(block.number))

    def on_allocate(self, flat: Tensor) -> None:
        block = self.block(flat)
        if block is not None and block.side == "gpu":
            block.number, block.is_allocated = next(self._numbers), True
            self._write(Alloc(block.number, block.side, block.size, self._stream()))

    def span(self, x: Tensor) -> Span | None:
        """Return the bytes of `x`, or None if it has none or lies in host memory that no copy used."""
        block = self.block(x)
        if block is None or block.side == "unplaced":
            return None
        elements = x.numel()
        if elements == 0:
            return None
        if not x.is_contiguous():
            elements = 1 + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
        item = x.itemsize
        start = x.storage_offset() * item
        return Span(block.number, start, start + elements * item)

    def spans(self, tensors: list[Tensor]) -> tuple[Span, ...]:
        if len(tensors) == 1:
            span = self.span(tensors[0])
            return () if span is None else (span,)
        return tuple(dict.fromkeys(span for x in tensors if (span := self.span(x)) is not None))
