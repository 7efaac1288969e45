"""The memory of weights or of gradients: a flat tensor for each bucket, so that each can come and go by itself.

                  whole                              held
    stays         always there                       this rank's part of it
    comes, goes   from `come` to `go` (Elastic)      memory of its own, always there, the device's or the host's

What a rank owns is all that it holds, or where that is shared out once more (bucket_rule.py) a part of it.
"""

from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from functools import partial
from typing import Protocol

import torch
from torch import Tensor, nn

from megalite.kernels.dispatch import being
from megalite.nn.parameter import write_initial
from megalite.optim.bucket_rule import BucketRule
from megalite.optim.host_memory import host_memory, pinned_bytes
from megalite.optim.layout import Bucket, Kind, Layout, Part, Slot


class Watcher(Protocol):
    """Is told when memory came, and before it goes, which is no operation of torch's: no dispatch mode sees it."""

    def came(self, flat: Tensor) -> None: ...
    def goes(self, flat: Tensor) -> None: ...


_watcher: ContextVar[Watcher | None] = ContextVar("watcher", default=None)
listening = partial(being, _watcher)  # listening(watcher): inside, `watcher` is told by every Elastic


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


def main_dtype(weights: torch.dtype) -> torch.dtype:
    """What gradients, main weights and states are kept in."""
    return torch.float64 if weights == torch.float64 else torch.float32


class FlatStorage:
    """Zeros for the entries of `layout`, whose kinds have `rules`; or, where they are given, the values of
    `parameters`, which become views of it. `elastic`: buckets of a unit that are shared out come and go; they are away
    at first. `on_host`: what is held of these is in host memory."""

    def __init__(
        self,
        layout: Layout,
        rules: Mapping[Kind, BucketRule],
        dtype: torch.dtype,
        device: torch.device,
        parameters: Sequence[nn.Parameter] = (),
        elastic: bool = False,
        on_host: bool = False,
    ):
        self.layout, self.rules, self.dtype, self.on_host = layout, rules, dtype, on_host
        self.flats: list[Tensor] = []  # of the buckets, in order
        self._elastic: dict[int, Elastic] = {}
        self._held: dict[int, Tensor] = {}  # of these
        # views, made while there is memory: torch takes none of a tensor that has none
        self._mine: list[Tensor] = []
        self._parts: dict[Slot, Tensor] = {}
        self._gaps: dict[int, list[Tensor]] = {}  # padding of what comes and goes
        move = [b for b in layout.buckets if elastic and b.kind.unit and rules[b.kind].is_shared_out]
        numbers = {b.number for b in move}
        sizes = [len(rules[b.kind].held(b)) * dtype.itemsize for b in move if on_host]
        self.host_bytes, room = pinned_bytes(sizes), host_memory(sizes, device)
        for bucket in layout.buckets:  # one by one: what a parameter had is let go of before the next
            if comes := bucket.number in numbers:
                self._elastic[bucket.number] = Elastic(bucket.size, dtype, device)
            flat = self._elastic[bucket.number].flat if comes else torch.zeros(bucket.size, dtype=dtype, device=device)
            held = rules[bucket.kind].held(bucket)
            self.flats.append(flat)
            self._mine.append(flat[held.start : held.stop])
            self._parts |= {slot: flat[slot.start : slot.stop] for slot in bucket.slots}
            if comes:
                ends = [0, *(slot.stop for slot in bucket.slots)]
                gaps = zip(ends, [*(slot.start for slot in bucket.slots), bucket.size], strict=True)
                self._gaps[bucket.number] = [flat[a:b].zero_() for a, b in gaps if a < b]
            for slot in bucket.slots if parameters else ():
                p = parameters[slot.entry]
                view = self.part(slot).view_as(p)
                write_initial(p, view, slot.part_in(held).span if comes else None)
                p.data = view
            if comes:
                mine = self.mine(bucket)
                held = next(room).view(dtype) if on_host else torch.zeros_like(mine)
                self._held[bucket.number] = held.copy_(mine) if parameters else held
                self.go(bucket)

    @property
    def nbytes(self) -> int:
        """That are always there, on the device."""
        stay = (flat.nbytes for n, flat in enumerate(self.flats) if n not in self._elastic)
        return sum(stay) + sum(held.nbytes for held in self._held.values() if not self.on_host)

    def stays(self, bucket: Bucket) -> bool:
        """Whether the whole bucket is always there."""
        return bucket.number not in self._elastic

    def is_there(self, bucket: Bucket) -> bool:
        return self.stays(bucket) or self._elastic[bucket.number].is_there

    def come(self, bucket: Bucket) -> None:
        """The whole bucket has memory from here on; what had none holds arbitrary values, and zeros as padding."""
        if not self.is_there(bucket):
            self._elastic[bucket.number].come()
            for gap in self._gaps[bucket.number]:
                gap.zero_()

    def go(self, bucket: Bucket) -> None:
        """The whole bucket, where it does not stay, is read by nobody until it comes again."""
        if not self.stays(bucket):
            self._elastic[bucket.number].go()

    def whole(self, bucket: Bucket) -> Tensor:
        """All elements of the bucket, padding included."""
        return self.flats[bucket.number]

    def mine(self, bucket: Bucket) -> Tensor:
        """This rank's part of the whole bucket; where that stays, what it holds."""
        return self._mine[bucket.number]

    def held(self, bucket: Bucket) -> Tensor:
        """The elements that are this rank's part of those that share the bucket out."""
        return self.mine(bucket) if self.stays(bucket) else self._held[bucket.number]

    def owned(self, bucket: Bucket) -> Tensor:
        """The elements that this rank owns."""
        held, owned, rule = self.held(bucket), self.rules[bucket.kind].owned(bucket), self.rules[bucket.kind]
        first = owned.start - rule.held(bucket).start
        return held[first : first + len(owned)]

    def part(self, slot: Slot) -> Tensor:
        """All elements of a parameter, flat."""
        return self._parts[slot]

    def owned_part(self, slot: Slot) -> Part:
        """Of a parameter what this rank owns: which of its elements, and where in `owned`."""
        bucket = self.layout.buckets[slot.bucket]
        return slot.part_in(self.rules[bucket.kind].owned(bucket))

    def kept(self, slot: Slot) -> tuple[range, Tensor]:
        """Of a parameter what is always there, all or, where the bucket comes and goes, what is held: which of its
        elements, and their values."""
        bucket = self.layout.buckets[slot.bucket]
        if self.stays(bucket):
            return range(slot.stop - slot.start), self.part(slot)
        part = slot.part_in(self.rules[bucket.kind].held(bucket))
        return part.span, part.of(self.held(bucket))
