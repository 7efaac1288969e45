"""Accumulation of gradients in their buckets, and reduction over the data axis, bucket by bucket during the backward.

The matmul that computes a matrix's gradient adds it to the fp32 main_grad (`main_grad_of`, nn/linear.py). A hook adds
gradients that autograd accumulates to the main_grad and drops them. The hook is on the parameter's node of the graph,
which runs once per backward, after all uses of the parameter and even if autograd saw no gradient: so it also reports
that the gradient is ready.

The first gradient of a pass overwrites the main_grad. A main_grad without a gradient is zeroed when its bucket is
reduced. The pipeline announces the last backward of a pass of a chunk. A bucket whose gradients are all ready waits for
the buckets before it, so that every rank starts its collectives in the same order, even if ranks get gradients for
different parameters.

Gradients are sums: the number of tokens, loss scale and clipping are one factor in the optimizer. The additional sums
(over replicas, tp, the first and last pipeline rank) are computed only on the owned part, a fraction of the bytes.

A resident bucket is reduced once in a step. A resharded bucket (ZeRO-2, arXiv:1910.02054) is allocated from the first
gradient of a pass until its reduction is complete, and is reduced once in each pass of backwards of its chunk:

    last backward of a pass   layer 3 ready | layer 2 ready  | layer 1 ready
    reduce-scatter                          | layer 3        | layer 2          at most two full buckets
    sum of the shards                             += layer 3 |  += layer 2

Rejected: hooks that count backwards to find the last one. They break when a micro-batch skips a layer.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from megalite.nn.parameter import MainGrad
from megalite.optim.flat_buffers import FlatBuffers
from megalite.optim.layout import Bucket
from megalite.optim.resharded_parameter import gradient_node
from megalite.parallel.comm import Pending, all_reduce_, start_all_reduce, start_reduce_scatter_into


class ParamMainGrad:
    """The main_grad of one parameter, in the parameter's shape (implements nn/parameter.py: MainGrad)."""

    def __init__(self, name: str, grad: Tensor, slot: tuple[int, int], reducer: "GradReducer"):
        """Wrap `grad`, the view of a bucket.

        Args:
            name: name of the parameter.
            grad: the main_grad.
            slot: indices of its bucket and its entry.
            reducer: the owner of this object. Only a weak reference is kept: the reducer keeps the parameter's node,
                which keeps this object, and Python's garbage collector does not find cycles through a node.
        """
        self._name = name
        self._main_grad = grad
        self.slot = slot
        self._reducer = weakref.ref(reducer)
        self._in_flight = reducer.in_flight
        self._written = reducer.written[slot[0]]

    def accumulator(self) -> tuple[Tensor, bool]:
        """Return the main_grad, to which the caller adds at once, and True if the caller must overwrite it.

        Raises RuntimeError if a resident bucket was reduced already.
        """
        bucket, entry = self.slot
        reducer = self._reducer()
        # a resharded bucket may still be in the reduction of the pass before, which is finished here
        if bucket in self._in_flight and not (reducer is not None and reducer.finish_reduce(bucket)):
            text = "got a gradient after its bucket was reduced; call set_last_backward only before the last backward"
            raise RuntimeError(f"{self._name}: {text}")
        overwrite = entry not in self._written
        if not self._written and reducer is not None:
            reducer.grads.allocate(reducer.buckets[bucket])
        self._written.add(entry)
        return self._main_grad, overwrite

    def mark_ready(self) -> None:
        """Report that the gradient is complete in this backward."""
        if (reducer := self._reducer()) is not None:
            reducer.mark_ready(*self.slot)

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


class GradReducer:
    """The main_grads of all parameters, and their reduction.

    Attributes:
        in_flight: buckets whose reduction has been started -> the reduction; None if there is only one rank.
        written: for each bucket, the entries whose main_grad has a gradient of the current pass. The other main_grads
            contain old values.
        pre_reduce_hook: called with each bucket before it is reduced, when it contains the sum of this rank.
        main_grads: the main_grads by name of the parameter.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], grads: FlatBuffers, overlap: bool):
        """Attach a main_grad to each parameter.

        Args:
            parameters: the parameters of the entries of the layout.
            grads: the buckets.
            overlap: start reductions during the last backward; otherwise in `finish_grad_sync`, except for resharded
                buckets, whose reductions are waited for as soon as they are started.
        """
        self.grads = grads
        self.shardings = grads.shardings
        self.overlap = overlap
        self.buckets = grads.layout.buckets
        self._unready: dict[int, set[int]] = {}  # buckets to reduce, in order -> entries that are not ready
        self.in_flight: dict[int, Pending | None] = {}
        self._reduce_dtype_copies: dict[int, Tensor] = {}  # shards of buckets that are reduced in another dtype
        self.written: list[set[int]] = [set() for _ in self.buckets]
        self._accumulated: set[int] = set()  # resharded buckets whose shard contains a sum of this step
        self.pre_reduce_hook: Callable[[Bucket], None] | None = None
        self.main_grads: dict[str, ParamMainGrad] = {}
        self._nodes: list[Any] = []  # the parameters' graph nodes, which autograd itself does not keep alive
        for bucket in self.buckets:
            for slot in bucket.slots:
                p = parameters[slot.entry]
                name = grads.layout.entries[slot.entry].spec.name
                main_grad = ParamMainGrad(name, grads.param_view(slot).view(p.shape), (bucket.index, slot.entry), self)
                self.main_grads[name] = main_grad
                p.main_grad = main_grad  # type: ignore[attr-defined]
                node = gradient_node(p)
                node.register_hook(partial(main_grad.accumulate_and_mark_ready, p))
                self._nodes.append(node)

    def zero_unwritten_grads(self) -> None:
        """Zero the main_grads without a gradient in this pass, so that all later gradients are added."""
        for bucket in self.buckets:
            self._zero_unwritten(bucket)

    def _zero_unwritten(self, bucket: Bucket) -> None:
        written = self.written[bucket.index]
        if written:
            unwritten = [slot for slot in bucket.slots if slot.entry not in written]
            for slot in unwritten:
                self.grads.param_view(slot).zero_()
        else:
            unwritten = list(bucket.slots)
            self.grads.allocate(bucket)
            self.grads.full(bucket).zero_()
        written.update(slot.entry for slot in unwritten)

    def set_last_backward(
        self, chunk: int, main_grads: Iterable[MainGrad] | None = None, last_in_step: bool = True
    ) -> None:
        """Announce that the next backward of `chunk` is the last of its pass: reduce each bucket once it is ready.

        Args:
            chunk: index of the chunk.
            main_grads: with a split backward, the gradients that the last W will complete; all other gradients are
                ready.
            last_in_step: True if the pass is also the last of the step; otherwise resident buckets are not reduced.
        """
        pending_entries: set[int] | None = None
        if main_grads is not None:
            pending_entries = {grad.slot[1] for grad in main_grads if isinstance(grad, ParamMainGrad)}
        for bucket in self._buckets_to_reduce(chunk, last_in_step and self.overlap):
            entries = {slot.entry for slot in bucket.slots}
            self._unready[bucket.index] = entries if pending_entries is None else entries & pending_entries
        self._start_ready()

    def finish_pass(self, chunk: int, last_in_step: bool = True) -> None:
        """Finish a pass: reduce the buckets that are still waiting, so that all ranks call the same collectives."""
        for bucket in self._buckets_to_reduce(chunk, last_in_step and self.overlap):
            if self._unready.pop(bucket.index, None) is not None:
                self._start_reduce(bucket.index)

    def _buckets_to_reduce(self, chunk: int, include_resident: bool) -> list[Bucket]:
        """Return the buckets of a chunk that are reduced at the end of a pass."""
        return [b for b in self.buckets if b.chunk == chunk and (include_resident or not self.grads.is_resident(b))]

    def mark_ready(self, b: int, entry: int) -> None:
        """Report that the gradient of an entry of bucket `b` is complete in this backward."""
        if b in self._unready:
            self._unready[b].discard(entry)
            self._start_ready()

    def _start_ready(self) -> None:
        """Reduce the buckets at the head of the queue that are ready.

        A bucket waits for those before it: ranks that start collectives in different orders would sum gradients of
        different parameters.
        """
        for b in list(self._unready):
            if self._unready[b]:
                return
            del self._unready[b]
            self._start_reduce(b)

    def _start_reduce(self, b: int) -> None:
        """Start to reduce a bucket over its data axis."""
        bucket = self.buckets[b]
        sharding = self.shardings[bucket.key]
        if not self.grads.is_resident(bucket):  # free the buckets before it, so that at most two are allocated
            for other in list(self.in_flight):
                self.finish_reduce(other)
        self._zero_unwritten(bucket)
        if self.pre_reduce_hook is not None:
            self.pre_reduce_hook(bucket)
        self.in_flight[b] = None
        if sharding.shard_axis.size == sharding.replicate_axis.size == 1:
            return
        full = self.grads.full(bucket)
        shard = self.grads.full_shard_view(bucket)
        if sharding.reduce_dtype is not None:
            shard_range = sharding.shard_range(bucket)
            full = full.to(sharding.reduce_dtype)
            shard = self._reduce_dtype_copies[b] = full[shard_range.start : shard_range.stop]
        if sharding.is_sharded:
            self.in_flight[b] = start_reduce_scatter_into(shard, full, sharding.shard_axis)
            if not self.overlap:
                self.finish_reduce(b)
        else:
            self.in_flight[b] = start_all_reduce(full, sharding.replicate_axis)

    def finish_reduce(self, b: int) -> bool:
        """Wait for the reduction of a resharded bucket, add this rank's shard to that of earlier passes, and free it.

        Returns False if the bucket is resident; then this does nothing.
        """
        bucket = self.buckets[b]
        if self.grads.is_resident(bucket):
            return False
        work = self.in_flight.pop(b)
        assert work is not None  # resharded buckets are sharded over several ranks
        work.wait()
        new_shard = self._reduce_dtype_copies.pop(b, self.grads.full_shard_view(bucket))
        shard = self.grads.shard(bucket)
        if b in self._accumulated:
            shard.add_(new_shard)
        else:
            shard.copy_(new_shard)
        self._accumulated.add(b)
        self.grads.free(bucket)
        self.written[b].clear()
        return True

    def finish_grad_sync(self) -> None:
        """Complete the gradients of the step: the owned ones are summed over the data, tp and tied-embedding axes."""
        for b in [*self._unready, *range(len(self.buckets))]:
            is_reduced = b in self.in_flight or (b in self._accumulated and not self.written[b])
            if not is_reduced:  # it waited for a bucket without some gradient on this rank, or was never announced
                self._start_reduce(b)
        self._unready.clear()
        for b, work in list(self.in_flight.items()):
            if not self.finish_reduce(b) and work is not None:
                work.wait()
        for b, rounded in self._reduce_dtype_copies.items():
            self.grads.shard(self.buckets[b]).copy_(rounded)
        self._reduce_dtype_copies.clear()
        for bucket in self.buckets:
            sharding = self.shardings[bucket.key]
            outer = sharding.outer_shard_axis
            if outer.size > 1:
                start_reduce_scatter_into(self.grads.owned(bucket), self.grads.shard(bucket), outer).wait()
            for axis in sharding.sum_axes:
                all_reduce_(self.grads.owned(bucket), axis)
        for bucket in self.buckets:
            tied_axis = self.shardings[bucket.key].tied_axis
            if tied_axis is not None:
                all_reduce_(self.grads.owned(bucket), tied_axis)
        for written in self.written:
            written.clear()
        self.in_flight.clear()
        self._accumulated.clear()
