"""Flat storage for weights or gradients: one tensor per bucket, so that each bucket can be allocated and freed alone.

    bucket       full tensor                              this rank's shard
    resident     always allocated                         a view of the full tensor
    resharded    from `allocate` to `free`                a separate tensor, always allocated, on the device or the host
                 (ResizableStorage)

A rank owns its full shard, or a part of it if the shard is split again over replicas (bucket_sharding.py).
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
from megalite.optim.resharded_parameter import set_resharded


class AllocationObserver(Protocol):
    """An observer of allocations by ResizableStorage, which are not operations that a torch dispatch mode would see."""

    def on_allocate(self, flat: Tensor) -> None:
        """Handle memory that has been allocated."""
        ...

    def on_free(self, flat: Tensor) -> None:
        """Handle memory that is about to be freed."""
        ...


_observer: ContextVar[AllocationObserver | None] = ContextVar("allocation_observer", default=None)
# observe_allocations(observer) is a context in which every ResizableStorage calls `observer`
observe_allocations = partial(context_value, _observer)


class ResizableStorage:
    """A flat tensor [numel] whose memory can be freed and reallocated.

    Its views, and the views that autograd has saved, share one storage object. So they are valid again as soon as the
    memory is reallocated, with the values that have been written since then.

    A parameter has another version counter than the flat tensor that contains its data, so autograd does not notice,
    and backward uses the values that are in memory at that time. Nothing checks that the memory is allocated: reading a
    view of freed memory ends the process (SIGSEGV on a CPU). Parameters are protected (optim/resharded_parameter.py).
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device):
        self.flat = torch.empty(numel, dtype=dtype, device=device)
        self._nbytes = self.flat.untyped_storage().nbytes()

    @property
    def is_allocated(self) -> bool:
        """True if the tensor has memory."""
        return self.flat.untyped_storage().nbytes() == self._nbytes

    def allocate(self) -> Tensor:
        """Allocate the memory, with arbitrary values, unless it is allocated. Return the flat tensor."""
        if not self.is_allocated:
            self.flat.untyped_storage().resize_(self._nbytes)
            if (observer := _observer.get()) is not None:
                observer.on_allocate(self.flat)
        return self.flat

    def free(self) -> None:
        """Free the memory.

        On CUDA the allocator may reuse it on the current stream at once, so first wait for any other stream that still
        reads it (parallel/streams.py).
        """
        if self.is_allocated and (observer := _observer.get()) is not None:
            observer.on_free(self.flat)
        self.flat.untyped_storage().resize_(0)


class FlatBuffers:
    """The buckets of weights or of gradients."""

    def __init__(
        self,
        layout: BufferLayout,
        shardings: Mapping[BucketKey, BucketSharding],
        dtypes: Sequence[torch.dtype],
        device: torch.device,
        parameters: Sequence[nn.Parameter] = (),
        resizable: bool = False,
        on_host: bool = False,
    ):
        """Allocate the buckets of `layout`.

        Args:
            layout: the buckets.
            shardings: the sharding for every key of a bucket.
            dtypes: dtype of each bucket.
            device: device of the tensors.
            parameters: the parameters of the entries, whose values are moved to the buffers: they become views. Without
                them the buffers are zeros.
            resizable: make sharded buckets with a unit resharded buckets, which are not allocated at first.
            on_host: keep the shards of resharded buckets in host memory.
        """
        self.layout = layout
        self.shardings = shardings
        self.dtypes = dtypes
        self.on_host = on_host
        self.tensors: list[Tensor] = []  # by bucket
        self._resizable: dict[int, ResizableStorage] = {}  # resharded buckets
        self._shards: dict[int, Tensor] = {}  # shards of resharded buckets
        # views are created here, while memory is allocated: torch cannot create views of an empty storage
        self._full_shard_views: list[Tensor] = []
        self._param_views: dict[ParamSlot, Tensor] = {}
        self._padding: dict[int, list[Tensor]] = {}  # padding of resharded buckets
        self._parameters: dict[int, list[nn.Parameter]] = {}  # parameters of resharded buckets
        resizable_buckets = [b for b in layout.buckets if resizable and b.key.unit and shardings[b.key].is_sharded]
        resizable_indices = {b.index for b in resizable_buckets}
        host_sizes = [
            len(shardings[b.key].shard_range(b)) * dtypes[b.index].itemsize for b in resizable_buckets if on_host
        ]
        self.host_bytes = pinned_bytes(host_sizes)
        host_tensors = allocate_pinned(host_sizes, device)
        for bucket in layout.buckets:  # one at a time: the old memory of its parameters is freed before the next
            is_resizable = bucket.index in resizable_indices
            dtype = dtypes[bucket.index]
            if is_resizable:
                self._resizable[bucket.index] = ResizableStorage(bucket.size, dtype, device)
                flat = self._resizable[bucket.index].flat
            else:
                flat = torch.zeros(bucket.size, dtype=dtype, device=device)
            shard_range = shardings[bucket.key].shard_range(bucket)
            self.tensors.append(flat)
            self._full_shard_views.append(flat[shard_range.start : shard_range.stop])
            self._param_views |= {slot: flat[slot.start : slot.stop] for slot in bucket.slots}
            if is_resizable:
                gap_starts = [0, *(slot.stop for slot in bucket.slots)]
                gap_stops = [*(slot.start for slot in bucket.slots), bucket.size]
                gaps = zip(gap_starts, gap_stops, strict=True)
                self._padding[bucket.index] = [flat[start:stop].zero_() for start, stop in gaps if start < stop]
                self._parameters[bucket.index] = [parameters[slot.entry] for slot in bucket.slots] if parameters else []
            if parameters:
                for slot in bucket.slots:
                    p = parameters[slot.entry]
                    view = self.param_view(slot).view_as(p)
                    write_initial_values(p, view, slot.overlap(shard_range).span if is_resizable else None)
                    p.data = view
            if is_resizable:
                full_shard_view = self.full_shard_view(bucket)
                shard = next(host_tensors).view(dtype) if on_host else torch.zeros_like(full_shard_view)
                self._shards[bucket.index] = shard.copy_(full_shard_view) if parameters else shard
                self.free(bucket)

    @property
    def nbytes(self) -> int:
        """The bytes that are always allocated on the device."""
        resident = sum(flat.nbytes for index, flat in enumerate(self.tensors) if index not in self._resizable)
        return resident + sum(shard.nbytes for shard in self._shards.values() if not self.on_host)

    def is_resident(self, bucket: Bucket) -> bool:
        """Return True if the full bucket is always allocated."""
        return bucket.index not in self._resizable

    def is_allocated(self, bucket: Bucket) -> bool:
        """Return True if the full bucket is allocated."""
        return self.is_resident(bucket) or self._resizable[bucket.index].is_allocated

    def allocate(self, bucket: Bucket) -> None:
        """Allocate the full bucket unless it is allocated; its values are arbitrary then, and its padding is zero."""
        if not self.is_allocated(bucket):
            self._resizable[bucket.index].allocate()
            for gap in self._padding[bucket.index]:
                gap.zero_()
            set_resharded(self._parameters[bucket.index], False)

    def free(self, bucket: Bucket) -> None:
        """Free the full bucket unless it is resident. It must not be read until it is allocated again."""
        if not self.is_resident(bucket):
            self._resizable[bucket.index].free()
            set_resharded(self._parameters[bucket.index], True)

    def full(self, bucket: Bucket) -> Tensor:
        """Return all elements of the bucket, padding included."""
        return self.tensors[bucket.index]

    def full_shard_view(self, bucket: Bucket) -> Tensor:
        """Return this rank's part of the full bucket. If the bucket is resident, this is its shard."""
        return self._full_shard_views[bucket.index]

    def shard(self, bucket: Bucket) -> Tensor:
        """Return this rank's shard of the bucket, which is always allocated."""
        return self.full_shard_view(bucket) if self.is_resident(bucket) else self._shards[bucket.index]

    def owned(self, bucket: Bucket) -> Tensor:
        """Return the elements that this rank owns, a view of its shard."""
        sharding = self.shardings[bucket.key]
        owned_range = sharding.owned_range(bucket)
        start = owned_range.start - sharding.shard_range(bucket).start
        return self.shard(bucket)[start : start + len(owned_range)]

    def param_view(self, slot: ParamSlot) -> Tensor:
        """Return all elements of a parameter, flat."""
        return self._param_views[slot]

    def owned_slice(self, slot: ParamSlot) -> ShardSlice:
        """Return the elements of a parameter that this rank owns, and their position in `owned`."""
        bucket = self.layout.buckets[slot.bucket]
        return slot.overlap(self.shardings[bucket.key].owned_range(bucket))

    def resident_slice(self, slot: ParamSlot) -> tuple[range, Tensor]:
        """Return the elements of a parameter that are always allocated, as (element range, values).

        These are all elements if the bucket is resident, otherwise those in this rank's shard.
        """
        bucket = self.layout.buckets[slot.bucket]
        if self.is_resident(bucket):
            return range(slot.stop - slot.start), self.param_view(slot)
        shard_slice = slot.overlap(self.shardings[bucket.key].shard_range(bucket))
        return shard_slice.span, shard_slice.select(self.shard(bucket))
