"""The flat tensors of one bucket: weights (param_bucket.py) or gradients (grad_bucket.py).

    bucket       full tensor                              this rank's shard
    resident     always allocated                         a view of the full tensor
    resharded    while it is unsharded                    a separate tensor, always allocated, on the device or the host
                 (ResizableStorage)

A rank owns its full shard, or a part of it if the shard is split again over replicas (sharding.py).
"""

from collections.abc import Sequence
from contextvars import ContextVar
from enum import Enum
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from megalite.kernels.dispatch import context_value
from megalite.optim.zero.layout import BucketLayout, ParamEntry, ParamSlot, ShardSlice
from megalite.optim.zero.sharding import BucketSharding

MAX_NAMES = 3  # parameters that an error message lists


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
    and backward uses the values that are in memory at that time.

    Reading a view of freed memory is a RuntimeError with torch's CUDA builds, on any device: CUDA graphs made torch
    check an error message of the storage at every access to its data. torch's CPU builds contain the check, but no
    function that turns it on. There, most operations read address 0 instead, which ends the process (SIGSEGV), and
    only parameters are protected (resharded_parameter.py).

    Rejected: `torch._C._set_throw_on_mutable_data_ptr`, which CPU builds have. It raises only for writes, and cannot be
    unset.
    """

    def __init__(self, numel: int, dtype: torch.dtype, device: torch.device, freed_message: str):
        """Allocate the memory.

        Args:
            numel: number of elements.
            dtype: dtype of the tensor.
            device: device of the tensor.
            freed_message: message of the error when the memory is used while it is freed.
        """
        self.flat = torch.empty(numel, dtype=dtype, device=device)
        self._nbytes = self.flat.untyped_storage().nbytes()
        self._freed_message = freed_message

    @property
    def is_allocated(self) -> bool:
        """True if the tensor has memory."""
        return self.flat.untyped_storage().nbytes() == self._nbytes

    def allocate(self) -> Tensor:
        """Allocate the memory, with arbitrary values, unless it is allocated. Return the flat tensor."""
        if not self.is_allocated:
            storage = self.flat.untyped_storage()
            if _CHECKS_ACCESS:
                _torch_c._clear_storage_data_ptr_access_error_msg(storage._cdata)
            storage.resize_(self._nbytes)
            if (observer := _observer.get()) is not None:
                observer.on_allocate(self.flat)
        return self.flat

    def free(self) -> None:
        """Free the memory unless it is freed.

        On CUDA the allocator may reuse it on the current stream at once, so first wait for any other stream that still
        reads it (parallel/streams.py).
        """
        if not self.is_allocated:
            return
        if (observer := _observer.get()) is not None:
            observer.on_free(self.flat)
        storage = self.flat.untyped_storage()
        storage.resize_(0)
        if _CHECKS_ACCESS:
            _torch_c._set_storage_data_ptr_access_error_msg(storage._cdata, self._freed_message)


_torch_c: Any = torch._C
_CHECKS_ACCESS = hasattr(_torch_c, "_set_storage_data_ptr_access_error_msg")  # only in CUDA builds


class BucketStorage:
    """The full tensor of a bucket, and the parts of it that a rank has. The state of a bucket is in its subclasses.

    Attributes:
        layout: the bucket's parameters and their places.
        sharding: the ranks that share the bucket.
        names: names of the parameters, in order of their places.
        dtype: dtype of the elements.
        is_resident: True if the full tensor is always allocated.
        full: all elements, padding included.
        full_shard_view: this rank's part of `full`. If the bucket is resident, this is its shard.
        shard: this rank's shard, which is always allocated.
        owned: the elements that this rank owns, a view of its shard.
    """

    state: Enum

    def __init__(
        self,
        layout: BucketLayout,
        entries: Sequence[ParamEntry],
        sharding: BucketSharding,
        dtype: torch.dtype,
        device: torch.device,
        reshards: bool,
        freed_message: str,
    ):
        """Allocate the full tensor, and create the views of it: torch cannot create views of an empty storage.

        A subclass then calls `_create_shard`.

        Args:
            layout: the bucket.
            entries: the entries of the layout that contains the bucket.
            sharding: the ranks that share the bucket.
            dtype: dtype of the elements.
            device: device of the full tensor.
            reshards: True to free the full tensor while it is not in use, if that is possible.
            freed_message: the error when the full tensor is used while it is freed.
        """
        self.layout = layout
        self.sharding = sharding
        self.names = [entries[slot.entry].spec.name for slot in layout.slots]
        self.dtype = dtype
        self.is_resident = not (reshards and sharding.can_reshard(layout))
        self._resizable: ResizableStorage | None = None
        self._padding: list[Tensor] = []
        if self.is_resident:
            self.full = torch.zeros(layout.size, dtype=dtype, device=device)
        else:
            self._resizable = ResizableStorage(layout.size, dtype, device, freed_message)
            self.full = self._resizable.flat
            gap_starts = [0, *(slot.stop for slot in layout.slots)]
            gap_stops = [*(slot.start for slot in layout.slots), layout.size]
            gaps = zip(gap_starts, gap_stops, strict=True)
            self._padding = [self.full[start:stop].zero_() for start, stop in gaps if start < stop]
        self._shard_range = sharding.shard_range(layout)
        self._owned_range = sharding.owned_range(layout)
        self.full_shard_view = self.full[self._shard_range.start : self._shard_range.stop]
        self._param_views = {slot: self.full[slot.start : slot.stop] for slot in layout.slots}

    def _create_shard(self, shard: Tensor | None = None) -> None:
        """Create `shard` and `owned`. `shard` is memory for the shard of a resharded bucket; None: zeros."""
        if self.is_resident:
            self.shard = self.full_shard_view
        else:
            self.shard = torch.zeros_like(self.full_shard_view) if shard is None else shard
        start = self._owned_range.start - self._shard_range.start
        self.owned = self.shard[start : start + len(self._owned_range)]

    @property
    def is_allocated(self) -> bool:
        """True if the full tensor is allocated."""
        return self._resizable is None or self._resizable.is_allocated

    @property
    def resident(self) -> Tensor:
        """The elements that are always allocated: the full tensor of a resident bucket, otherwise the shard."""
        return self.full if self.is_resident else self.shard

    def param_view(self, slot: ParamSlot) -> Tensor:
        """Return all elements of a parameter, flat."""
        return self._param_views[slot]

    def owned_slice(self, slot: ParamSlot) -> ShardSlice:
        """Return the elements of a parameter that this rank owns, and their position in `owned`."""
        return slot.overlap(self._owned_range)

    def resident_slice(self, slot: ParamSlot) -> tuple[range, Tensor]:
        """Return the elements of a parameter that are always allocated, as (element range, values).

        These are all elements if the bucket is resident, otherwise those in this rank's shard.
        """
        if self.is_resident:
            return range(slot.stop - slot.start), self.param_view(slot)
        shard_slice = slot.overlap(self._shard_range)
        return shard_slice.span, shard_slice.select(self.shard)

    def _allocate(self) -> None:
        """Allocate the full tensor unless it is allocated; its values are arbitrary then, and its padding is zero."""
        if self._resizable is not None and not self._resizable.is_allocated:
            self._resizable.allocate()
            for gap in self._padding:
                gap.zero_()

    def _free(self) -> None:
        """Free the full tensor unless the bucket is resident. It must not be read until it is allocated again."""
        if self._resizable is not None:
            self._resizable.free()

    def _require(self, action: str, *states: Enum) -> None:
        """Raise a RuntimeError if the bucket is not in one of the states in which `action` is allowed."""
        if self.state not in states:
            allowed = " or ".join(state.name for state in states)
            raise RuntimeError(f"bucket of {self}: cannot {action} in state {self.state.name}, only in {allowed}")

    def __str__(self) -> str:
        return list_names(self.names)


def list_names(names: Sequence[str]) -> str:
    """Return the first names, and the number of the others."""
    text = ", ".join(names[:MAX_NAMES])
    return text if len(names) <= MAX_NAMES else f"{text} and {len(names) - MAX_NAMES} more"
