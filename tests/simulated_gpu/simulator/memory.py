"""Where tensors' memory is: on the card, pinned, or on the host, kept by storage, so that views share it. A storage
that is not known is the host's; one that C++ made unasked (zeros for a gradient that did not come) is nobody's until it
meets another."""

import itertools
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from simulated_gpu.simulator.trace import Alloc, Fact, Free, Span, Stream

Side = Literal["card", "pinned", "host", "nobody"]


@dataclass
class Block:
    """One allocation. `watch`: of its storage, called when the last reference in Python or C++ is gone. `there`: it has
    its memory, which may have been given back meanwhile (optim/flat_buffers.py)."""

    number: int
    side: Side
    size: int
    watch: weakref.ref[Any]
    there: bool = True


class Memory:
    def __init__(self, write: Callable[[Fact], None], stream: Callable[[], Stream]):
        """`write`: takes a fact of the trace; `stream`: the one that is current."""
        self._write, self._stream = write, stream
        self._blocks: dict[int, Block] = {}  # by the address of the storage, which is given out again when it is gone
        self._alive: dict[int, Block] = {}  # by its number
        self._numbers = itertools.count(1)

    def block(self, x: Tensor) -> Block | None:
        """Another thread may have got the address of a storage whose end has not been told yet."""
        found = self._blocks.get(x.untyped_storage()._cdata)
        return None if found is None or found.watch() is None else found

    def side(self, x: Tensor) -> Side:
        block = self.block(x)
        return "host" if block is None else block.side

    def on_card(self, x: Tensor) -> bool:
        block = self.block(x)
        return block is not None and block.side == "card"

    def place(self, x: Tensor, side: Side) -> Block:
        """Note where `x` lies, if its storage is new or nobody's; an Alloc."""
        storage = x.untyped_storage()
        address = storage._cdata
        block = self._blocks.get(address)
        if block is None or block.watch() is None:
            number = next(self._numbers)
            watch = weakref.ref(storage, lambda _: self._gone(address, number))
            block = self._blocks[address] = self._alive[number] = Block(number, side, storage.nbytes(), watch)
        elif block.side == "nobody":
            block.side = side
        else:
            return block
        if block.side != "nobody":
            at = self._stream() if block.side == "card" else 0
            self._write(Alloc(block.number, block.side, block.size, at))
        return block

    def _gone(self, address: int, number: int) -> None:
        block = self._alive.pop(number)
        if self._blocks.get(address) is block:
            del self._blocks[address]
        if block.side != "nobody" and block.there:
            self._write(Free(block.number))

    def on_free(self, flat: Tensor) -> None:
        """A storage that stays gives its memory back, and may get other memory later: of another number."""
        block = self.block(flat)
        if block is not None and block.side == "card":
            block.there = False
            self._write(Free(block.number))

    def on_allocate(self, flat: Tensor) -> None:
        block = self.block(flat)
        if block is not None and block.side == "card":
            block.number, block.there = next(self._numbers), True
            self._write(Alloc(block.number, block.side, block.size, self._stream()))

    def span(self, x: Tensor) -> Span | None:
        """None: it has no bytes, or lies in memory of the host that nobody copied from or to."""
        block = self.block(x)
        if block is None or block.side == "nobody":
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
            alone = self.span(tensors[0])
            return () if alone is None else (alone,)
        return tuple(dict.fromkeys(span for x in tensors if (span := self.span(x)) is not None))
