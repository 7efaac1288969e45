"""The weights of one bucket, and their all-gather from the ranks that have the shards.

    SHARDED --unshard--> UNSHARDING --finish_unshard--> UNSHARDED --reshard--> SHARDED

    SHARDED      only this rank's shard is valid
    UNSHARDING   the all-gather is in flight
    UNSHARDED    the full tensor is valid

A resharded bucket (ZeRO-3, arXiv:1910.02054) frees its full tensor while it is SHARDED, and a use of its parameters is
an error then (resharded_parameter.py). A resident bucket keeps the memory: it is SHARDED from an update of the shards
until the all-gather that follows. A bucket that only one rank has is always UNSHARDED.
"""

from collections.abc import Sequence
from enum import Enum, auto
from typing import Any

from torch import Tensor, nn

from megalite.nn.parameter import write_initial_values
from megalite.optim.zero.layout import BucketLayout, ParamEntry
from megalite.optim.zero.resharded_parameter import set_resharded, use_message
from megalite.optim.zero.sharding import BucketSharding
from megalite.optim.zero.storage import BucketStorage
from megalite.parallel.comm import Pending, start_all_gather_into
from megalite.parallel.streams import Stream, on_side_stream, record_event


class ParamState(Enum):
    """The state of the weights of a bucket."""

    SHARDED = auto()
    UNSHARDING = auto()
    UNSHARDED = auto()


class ParamBucket(BucketStorage):
    """The weights of one bucket.

    Attributes:
        state: the state.
        parameters: its parameters, in order of their places.
        on_host: True if the shard of a resharded bucket is in host memory.
    """

    state: ParamState

    def __init__(
        self,
        layout: BucketLayout,
        entries: Sequence[ParamEntry],
        sharding: BucketSharding,
        parameters: Sequence[nn.Parameter],
        reshards: bool,
        host_shard: Tensor | None = None,
        h2d_stream: Stream | None = None,
    ):
        """Move the values of the parameters to the bucket; the parameters become views of it.

        Args:
            layout: the bucket.
            entries: the entries of the layout that contains the bucket.
            sharding: the ranks that share the bucket.
            parameters: the parameters of all entries.
            reshards: True to free the full tensor while it is not in use, if that is possible.
            host_shard: uint8 host memory for the shard of a resharded bucket; None: the shard is on the device.
            h2d_stream: the stream on which such a shard is copied to the device.
        """
        dtype, device = layout.key.dtype, parameters[0].device
        self.parameters = [parameters[slot.entry] for slot in layout.slots]
        names = [entries[slot.entry].spec.name for slot in layout.slots]
        super().__init__(layout, entries, sharding, dtype, device, reshards, use_message(names, layout.key.unit))
        self.on_host = host_shard is not None
        self._h2d_stream = h2d_stream if self.on_host else None
        self._pending: Pending | None = None
        self._pending_shard: Pending | None = None  # the gather of the shard from the replicas that own its parts
        self._backward_entries: set[int] = set()  # entries that the current backward still needs
        for slot, p in zip(layout.slots, self.parameters, strict=True):
            view = self.param_view(slot).view_as(p)
            span = None if self.is_resident else slot.overlap(self._shard_range).span
            write_initial_values(p, view, span)
            p.data = view
        self._create_shard(None if host_shard is None else host_shard.view(dtype))
        self.state = ParamState.UNSHARDED
        if not self.is_resident:
            self.shard.copy_(self.full_shard_view)
            self.reshard()

    @property
    def nbytes(self) -> int:
        """The bytes that are always allocated on the device."""
        return 0 if self.on_host else self.resident.nbytes

    def unshard(self) -> None:
        """Start to gather the full tensor."""
        self._require("start to unshard", ParamState.SHARDED)
        self._allocate()
        self.wait_for_shard()
        after = record_event(self.full.device) if self._h2d_stream is not None else None
        with on_side_stream(self._h2d_stream, after=after):
            shard = self.shard
            if self.on_host:
                shard = self.full_shard_view.copy_(shard, non_blocking=True)
            self._pending = start_all_gather_into(self.full, shard, self.sharding.shard_axis)
        self.state = ParamState.UNSHARDING

    def finish_unshard(self) -> None:
        """Wait for the all-gather."""
        self._require("finish the all-gather", ParamState.UNSHARDING)
        assert self._pending is not None
        self._pending.wait()
        self._pending = None
        if not self.is_resident:
            set_resharded(self.parameters, False)
        self.state = ParamState.UNSHARDED

    def reshard(self) -> None:
        """Declare that only the shard is valid, and free the full tensor of a resharded bucket."""
        self._require("reshard", ParamState.UNSHARDED)
        self._backward_entries.clear()
        if not self.is_resident:
            self._free()
            set_resharded(self.parameters, True)
        self.state = ParamState.SHARDED

    def start_shard_gather(self) -> None:
        """Start to gather the shard from the replicas that own its parts, if it is split again over replicas."""
        self._require("gather the shard", ParamState.SHARDED)
        outer = self.sharding.outer_shard_axis
        if outer.size > 1:
            self._pending_shard = start_all_gather_into(self.shard, self.owned, outer)

    def wait_for_shard(self) -> None:
        """Wait for the gather of the shard, if it is in flight."""
        if self._pending_shard is not None:
            self._pending_shard.wait()
            self._pending_shard = None

    def reshard_after_backward(self) -> None:
        """Reshard as soon as the backward that follows needs no parameter any more.

        Each parameter that it uses calls `param_backward_done`. At its end the caller calls `end_backward`.
        """
        self._require("wait for a backward", ParamState.UNSHARDED)
        self._backward_entries = {slot.entry for slot in self.layout.slots}

    def param_backward_done(self, entry: int, *_: Any) -> None:
        """Reshard if this was the last parameter that the backward needs (the hook on the parameter's node)."""
        if self._backward_entries:
            self._backward_entries.discard(entry)
            if not self._backward_entries:
                self.reshard()

    def end_backward(self) -> None:
        """Reshard if a parameter is left that the backward did not use, so that all ranks gather for the next use."""
        if self._backward_entries:
            self.reshard()
