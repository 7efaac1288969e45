"""The gradients of one bucket: accumulation in the main_grads, and reduction over the data axis.

    EMPTY --first gradient--> ACCUMULATING --all ready--> READY --start_reduce--> REDUCING --finish_reduce--> REDUCED
      ^                                                                                                          |
      '------------------------------------------------ end_step ------------------------------------------------'

    EMPTY --> READY                       all are ready, but the bucket got no gradient on this rank
    READY --> REDUCED                     no other rank has the bucket
    REDUCING or REDUCED --> ACCUMULATING  in the next pass, if the bucket is resharded; or READY without a gradient

    EMPTY          no gradient of the step yet; the owned part is the sum of the step before
    ACCUMULATING   some main_grads have a gradient of the pass; the others contain arbitrary values
    READY          all gradients of the pass are complete; the bucket waits for its turn
    REDUCING       the reduction over the data axis is in flight
    REDUCED        this rank's shard is the sum over the data axis, of all passes so far

The matmul that computes a matrix's gradient adds it to the fp32 main_grad (`main_grad_of`, nn/linear.py). A hook adds
gradients that autograd accumulates to the main_grad and drops them. The hook is on the parameter's node of the graph,
which runs once per backward, after all uses of the parameter and even if autograd saw no gradient: so it also reports
that the gradient is ready.

The first gradient of a pass overwrites the main_grad. A main_grad without a gradient is zeroed when its bucket is
reduced.

Gradients are sums: the number of tokens, loss scale and clipping are one factor in the optimizer. The additional sums
(over replicas, tp, the first and last pipeline rank) are computed only on the owned part, a fraction of the bytes.

A resident bucket is reduced once in a step. A resharded bucket (ZeRO-2, arXiv:1910.02054) is allocated from the first
gradient of a pass until its reduction is complete, and is reduced once in each pass of backwards of its chunk. The
order of the buckets is the business of sync.py.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from enum import Enum, auto
from typing import Any

import torch
from torch import Tensor, nn

from megalite.optim.zero.layout import BucketLayout, ParamEntry, ParamSlot
from megalite.optim.zero.sharding import BucketSharding
from megalite.optim.zero.storage import BucketStorage, list_names
from megalite.parallel.comm import Pending, all_reduce_, start_all_reduce, start_reduce_scatter_into


class GradState(Enum):
    """The state of the gradients of a bucket."""

    EMPTY = auto()
    ACCUMULATING = auto()
    READY = auto()
    REDUCING = auto()
    REDUCED = auto()


class GradBucket(BucketStorage):
    """The gradients of one bucket.

    Attributes:
        state: the state.
    """

    state: GradState

    def __init__(
        self,
        layout: BucketLayout,
        entries: Sequence[ParamEntry],
        sharding: BucketSharding,
        dtype: torch.dtype,
        device: torch.device,
        reshards: bool,
    ):
        """Allocate zeros; a resharded bucket only has its shard then. The arguments are those of BucketStorage."""
        names = list_names([entries[slot.entry].spec.name for slot in layout.slots])
        message = (
            f"the main_grad of {names} is used while it is freed, outside of a pass of backwards: call accumulator()"
        )
        super().__init__(layout, entries, sharding, dtype, device, reshards, message)
        self._create_shard()
        self._free()
        self.state = GradState.EMPTY
        self._entries = frozenset(slot.entry for slot in layout.slots)
        self._written: set[int] = set()  # entries whose main_grad has a gradient of the current pass
        self._unready: set[int] | None = None  # entries that are not ready in an announced last backward
        self._has_sum = False  # the shard of a resharded bucket contains a sum of this step
        self._pending: Pending | None = None
        self._rounded_shard: Tensor | None = None  # the shard, if the reduction has another dtype

    @property
    def nbytes(self) -> int:
        """The bytes that are always allocated."""
        return self.resident.nbytes

    @property
    def owned_sums(self) -> Tensor:
        """The owned part of a step's gradients, from `end_step` until the first gradient of the next step."""
        self._require("read the gradients of a step", GradState.EMPTY)
        return self.owned

    @property
    def reduction_started(self) -> bool:
        """True if the reduction of the latest gradients is in flight or done."""
        return self.state in (GradState.REDUCING, GradState.REDUCED)

    def start_write(self, slot: ParamSlot, name: str) -> bool:
        """Allow the caller to add to a main_grad at once. Return True if the caller must overwrite it.

        Raises RuntimeError if the gradients of the pass are complete.
        """
        if self.state is not GradState.ACCUMULATING:
            self._finish_previous_pass()
            if self.state not in (GradState.EMPTY, GradState.ACCUMULATING):
                raise RuntimeError(
                    f"{name}: got a gradient after its gradients were declared complete ({self.state.name}); call "
                    "set_last_backward only before the last backward"
                )
            self._allocate()
            self.state = GradState.ACCUMULATING
        overwrite = slot.entry not in self._written
        self._written.add(slot.entry)
        return overwrite

    def _finish_previous_pass(self) -> None:
        """Make a resharded bucket empty again after the reduction of the pass before."""
        if not self.is_resident and self.reduction_started:
            if self.state is GradState.REDUCING:
                self.finish_reduce()
            self.state = GradState.EMPTY

    def announce_last_backward(self, pending_entries: Iterable[int] | None = None) -> None:
        """Announce the last backward of a pass; after it the bucket is READY.

        Args:
            pending_entries: the entries whose gradients it completes, while all others are ready; None: all.
        """
        allowed = [GradState.EMPTY, GradState.ACCUMULATING]
        if not self.is_resident:  # not `_finish_previous_pass`: this backward may overlap with the reduction
            allowed += [GradState.REDUCING, GradState.REDUCED]
        self._require("announce the last backward", *allowed)
        self._unready = set(self._entries if pending_entries is None else self._entries.intersection(pending_entries))
        if not self._unready:
            self.mark_all_ready()

    def mark_ready(self, entry: int) -> bool:
        """Report that a gradient is complete in this backward. Return True if this was the last one of the pass."""
        if not self._unready:
            return False
        self._unready.discard(entry)
        if self._unready:
            return False
        self.mark_all_ready()
        return True

    def mark_all_ready(self) -> None:
        """Declare that the gradients of the pass are complete."""
        self._finish_previous_pass()
        self._require("complete a gradient", GradState.EMPTY, GradState.ACCUMULATING)
        self._unready = None
        self.state = GradState.READY

    def zero_unwritten(self) -> None:
        """Zero the main_grads without a gradient in this pass, so that all later gradients are added."""
        self._require("zero gradients", GradState.EMPTY, GradState.ACCUMULATING, GradState.READY)
        if self._written:
            for slot in self.layout.slots:
                if slot.entry not in self._written:
                    self.param_view(slot).zero_()
        else:
            self._allocate()
            self.full.zero_()
        self._written.update(self._entries)
        if self.state is GradState.EMPTY:
            self.state = GradState.ACCUMULATING

    def start_reduce(self) -> None:
        """Start to reduce the gradients over the data axis; all main_grads have a gradient."""
        self._require("start a reduction", GradState.READY)
        if self._written != self._entries:
            raise RuntimeError(f"bucket of {self}: some main_grads have no gradient; call zero_unwritten() before")
        sharding = self.sharding
        if sharding.shard_axis.size == sharding.replicate_axis.size == 1:
            self.state = GradState.REDUCED
            return
        full, shard = self.full, self.full_shard_view
        if sharding.reduce_dtype is not None:
            full = full.to(sharding.reduce_dtype)
            shard = self._rounded_shard = full[self._shard_range.start : self._shard_range.stop]
        if sharding.is_sharded:
            self._pending = start_reduce_scatter_into(shard, full, sharding.shard_axis)
        else:
            self._pending = start_all_reduce(full, sharding.replicate_axis)
        self.state = GradState.REDUCING

    def finish_reduce(self) -> None:
        """Wait for the reduction.

        A resharded bucket adds the new shard to the sum of earlier passes, and frees the full tensor.
        """
        self._require("finish a reduction", GradState.REDUCING)
        assert self._pending is not None
        self._pending.wait()
        self._pending = None
        if self.is_resident:
            if self._rounded_shard is not None:
                self.shard.copy_(self._rounded_shard)
        else:
            new_shard = self.full_shard_view if self._rounded_shard is None else self._rounded_shard
            if self._has_sum:
                self.shard.add_(new_shard)
            else:
                self.shard.copy_(new_shard)
            self._has_sum = True
            self._free()
            self._written.clear()
        self._rounded_shard = None
        self.state = GradState.REDUCED

    def reduce_owned(self) -> None:
        """Sum the owned part over replicas, and over the axes with partial gradients."""
        self._require("sum the owned gradients", GradState.REDUCED)
        outer = self.sharding.outer_shard_axis
        if outer.size > 1:
            start_reduce_scatter_into(self.owned, self.shard, outer).wait()
        for axis in self.sharding.sum_axes:
            all_reduce_(self.owned, axis)

    def reduce_tied(self) -> None:
        """Sum the owned part over the first and the last pipeline rank, if they have copies of its parameters."""
        self._require("sum tied gradients", GradState.REDUCED)
        if self.sharding.tied_axis is not None:
            all_reduce_(self.owned, self.sharding.tied_axis)

    def end_step(self) -> None:
        """Prepare for the gradients of the next step; `owned_sums` stays valid until the first of them."""
        self._require("end a step", GradState.REDUCED)
        self._written.clear()
        self._unready = None
        self._has_sum = False
        self.state = GradState.EMPTY


class ParamMainGrad:
    """The main_grad of one parameter, in the parameter's shape (implements nn/parameter.py: MainGrad)."""

    def __init__(self, name: str, grad: Tensor, bucket: GradBucket, slot: ParamSlot, on_ready: Callable[[], None]):
        """Wrap `grad`, the view of a bucket.

        Args:
            name: name of the parameter.
            grad: the main_grad.
            bucket: the bucket.
            slot: the place of the parameter in it.
            on_ready: a method that is called when the last gradient of the bucket is ready. Only a weak reference is
                kept: its object keeps the parameter's node, which keeps this object, and Python's garbage collector
                does not find cycles through a node.
        """
        self.name = name
        self.bucket = bucket
        self.slot = slot
        self._main_grad = grad
        self._on_ready = weakref.WeakMethod(on_ready)

    def accumulator(self) -> tuple[Tensor, bool]:
        """Return the main_grad, to which the caller adds at once, and True if the caller must overwrite it.

        Raises RuntimeError if its bucket was reduced already.
        """
        overwrite = self.bucket.start_write(self.slot, self.name)
        return self._main_grad, overwrite

    def mark_ready(self) -> None:
        """Report that the gradient is complete in this backward."""
        if self.bucket.mark_ready(self.slot.entry) and (on_ready := self._on_ready()) is not None:
            on_ready()

    def accumulate_and_mark_ready(self, p: nn.Parameter, *_: Any) -> None:
        """Add the gradient that autograd has accumulated, if any (the hook on the parameter's node)."""
        if p.grad is not None:
            grad, overwrite = self.accumulator()
            if overwrite:
                grad.copy_(p.grad)
            else:
                grad.add_(p.grad)
            p.grad = None
        self.mark_ready()
