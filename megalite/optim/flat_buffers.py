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

from megalite.kernels.dispatch import context_value
from megalite.nn.parameter import write_initial_values
from megalite.optim.bucket_sharding import BucketSharding
from megalite.optim.host_memory import allocate_pinned, pinned_bytes
from megalite.optim.layout import Bucket, BucketKey, BufferLayout, ParamSlot, ShardSlice


class AllocationObserver(Protocol):
    """Is told when memory came, and before it goes, which is no operation of torch's: no dispatch mode sees it."""

    def on_allocate(self, flat: Tensor) -> None: ...
    def on_free(self, flat: Tensor) -> None: ...


_observer: ContextVar[AllocationObserver | None] = ContextVar("watcher", default=None)
observe_allocations = partial(
    context_value, _observer
)  # listening(watcher): inside, `watcher` is told by every Elastic


class ResizableStorage:
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
    def is_allocated(self) -> bool:
        return self.flat.untyped_storage().nbytes() == self._bytes

    def allocate(self) -> Tensor:
        """Allocate the memory unless it is there, with arbitrary values; return the flat tensor."""
        if not self.is_allocated:
            self.flat.untyped_storage().resize_(self._bytes)
            if (watcher := _observer.get()) is not None:
                watcher.on_allocate(self.flat)
        return self.flat

    def free(self) -> None:
        """Free the memory. On CUDA the allocator may give it to the current stream at once, so wait first for any other
        stream that still reads it (parallel/streams.py)."""
        if self.is_allocated and (watcher := _observer.get()) is not None:
            watcher.on_free(self.flat)
        self.flat.untyped_storage().resize_(0)


def main_param_dtype(weights: torch.dtype) -> torch.dtype:
    """What gradients, main weights and states are kept in."""
    return torch.float64 if weights == torch.float64 else torch.float32


class FlatBuffers:
    """Zeros for the entries of `layout`, whose kinds have `rules`; or, where they are given, the values of
    `parameters`, which become views of it. `elastic`: buckets of a unit that are shared out come and go; they are away
    at first. `on_host`: what is held of these is in host memory."""

    def __init__(
        self,
        layout: BufferLayout,
        shardings: Mapping[BucketKey, BucketSharding],
        dtype: torch.dtype,
        device: torch.device,
        parameters: Sequence[nn.Parameter] = (),
        resizable: bool = False,
        on_host: bool = False,
    ):
        self.layout, self.rules, self.dtype, self.on_host = layout, shardings, dtype, on_host
        self.tensors: list[Tensor] = []  # of the buckets, in order
        self._resizable: dict[int, ResizableStorage] = {}
        self._shards: dict[int, Tensor] = {}  # of these
        # views, made while there is memory: torch takes none of a tensor that has none
        self._full_shard_views: list[Tensor] = []
        self._param_views: dict[ParamSlot, Tensor] = {}
        self._padding: dict[int, list[Tensor]] = {}  # padding of what comes and goes
        resizable_buckets = [b for b in layout.buckets if resizable and b.key.unit and shardings[b.key].is_sharded]
        numbers = {b.index for b in resizable_buckets}
        sizes = [len(shardings[b.key].shard_range(b)) * dtype.itemsize for b in resizable_buckets if on_host]
        self.host_bytes, host_tensors = pinned_bytes(sizes), allocate_pinned(sizes, device)
        for bucket in layout.buckets:  # one by one: what a parameter had is let go of before the next
            if is_resizable := bucket.index in numbers:
                self._resizable[bucket.index] = ResizableStorage(bucket.size, dtype, device)
            flat = (
                self._resizable[bucket.index].flat
                if is_resizable
                else torch.zeros(bucket.size, dtype=dtype, device=device)
            )
            shard = shardings[bucket.key].shard_range(bucket)
            self.tensors.append(flat)
            self._full_shard_views.append(flat[shard.start : shard.stop])
            self._param_views |= {slot: flat[slot.start : slot.stop] for slot in bucket.slots}
            if is_resizable:
                ends = [0, *(slot.stop for slot in bucket.slots)]
                padding = zip(ends, [*(slot.start for slot in bucket.slots), bucket.size], strict=True)
                self._padding[bucket.index] = [flat[a:b].zero_() for a, b in padding if a < b]
            for slot in bucket.slots if parameters else ():
                p = parameters[slot.entry]
                view = self.param_view(slot).view_as(p)
                write_initial_values(p, view, slot.overlap(shard).span if is_resizable else None)
                p.data = view
            if is_resizable:
                full_shard_view = self.full_shard_view(bucket)
                shard = next(host_tensors).view(dtype) if on_host else torch.zeros_like(full_shard_view)
                self._shards[bucket.index] = shard.copy_(full_shard_view) if parameters else shard
                self.free(bucket)

    @property
    def nbytes(self) -> int:
        """That are always there, on the device."""
        stay = (flat.nbytes for n, flat in enumerate(self.tensors) if n not in self._resizable)
        return sum(stay) + sum(shard.nbytes for shard in self._shards.values() if not self.on_host)

    def is_resident(self, bucket: Bucket) -> bool:
        """Whether the whole bucket is always there."""
        return bucket.index not in self._resizable

    def is_allocated(self, bucket: Bucket) -> bool:
        return self.is_resident(bucket) or self._resizable[bucket.index].is_allocated

    def allocate(self, bucket: Bucket) -> None:
        """The whole bucket has memory from here on; what had none holds arbitrary values, and zeros as padding."""
        if not self.is_allocated(bucket):
            self._resizable[bucket.index].allocate()
            for gap in self._padding[bucket.index]:
                gap.zero_()

    def free(self, bucket: Bucket) -> None:
        """The whole bucket, where it does not stay, is read by nobody until it comes again."""
        if not self.is_resident(bucket):
            self._resizable[bucket.index].free()

    def full(self, bucket: Bucket) -> Tensor:
        """All elements of the bucket, padding included."""
        return self.tensors[bucket.index]

    def full_shard_view(self, bucket: Bucket) -> Tensor:
        """This rank's part of the whole bucket; where that stays, what it holds."""
        return self._full_shard_views[bucket.index]

    def shard(self, bucket: Bucket) -> Tensor:
        """The elements that are this rank's part of those that share the bucket out."""
        return self.full_shard_view(bucket) if self.is_resident(bucket) else self._shards[bucket.index]

    def owned(self, bucket: Bucket) -> Tensor:
        """The elements that this rank owns."""
        shard, owned, rule = self.shard(bucket), self.rules[bucket.key].owned_range(bucket), self.rules[bucket.key]
        first = owned.start - rule.shard_range(bucket).start
        return shard[first : first + len(owned)]

    def param_view(self, slot: ParamSlot) -> Tensor:
        """All elements of a parameter, flat."""
        return self._param_views[slot]

    def owned_slice(self, slot: ParamSlot) -> ShardSlice:
        """Of a parameter what this rank owns: which of its elements, and where in `owned`."""
        bucket = self.layout.buckets[slot.bucket]
        return slot.overlap(self.rules[bucket.key].owned_range(bucket))

    def resident_slice(self, slot: ParamSlot) -> tuple[range, Tensor]:
        """Of a parameter what is always there, all or, where the bucket comes and goes, what is held: which of its
        elements, and their values."""
        bucket = self.layout.buckets[slot.bucket]
        if self.is_resident(bucket):
            return range(slot.stop - slot.start), self.param_view(slot)
        param_view = slot.overlap(self.rules[bucket.key].shard_range(bucket))
        return param_view.span, param_view.select(self.shard(bucket))
