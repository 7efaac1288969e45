"""Gradients land in their views and are reduced over their data axis, a bucket at a time, while backward is under way.

A matrix's gradient is added into its fp32 view by the matmul that computes it (`parameter.sink`, nn/linear.py); what
autograd accumulates itself, a hook adds and drops. The hook is on the parameter's node of the graph, which runs once
per backward, after all uses of the parameter and also if autograd saw no gradient: so it tells that the parameter is
done. The first gradient of a run of backwards writes over the sum; what gets none is zeroed when its bucket is
reduced. The pipeline says which backward of a chunk is the last of its run. A full bucket waits for those before it,
so every rank runs its collectives in one order, even where ranks get gradients for different parameters. Gradients are
sums: tokens, loss scale and clipping are one factor in the optimizer. The extra sums (over replicas, tp, the
pipeline's ends) run on what a rank owns, a fraction of the bytes.

A bucket that stays is reduced once in a step. One that comes and goes (ZeRO-2, arXiv:1910.02054) has memory from the
first gradient of a run until its reduction is through, and is reduced once for each run of backwards of its chunk:

    backward, last of a run   layer 3 lands | layer 2 lands  | layer 1 lands
    reduce-scatter                          | layer 3        | layer 2          at most two whole at once
    sum of what is held                           += layer 3 |  += layer 2

Rejected: hooks that count backward passes to find the last one; they break when a micro-batch skips a layer.
"""

import weakref
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from megalite.nn.parameter import MainGrad
from megalite.optim.flat_buffers import FlatBuffers
from megalite.optim.layout import Bucket
from megalite.parallel.comm import Pending, all_reduce_, start_all_reduce, start_reduce_scatter_into


class ParamMainGrad:
    """The view of one parameter's gradient, [its shape] (nn/parameter.py, GradientSink)."""

    def __init__(self, name: str, grad: Tensor, slot: tuple[int, int], reduce: "GradReducer"):
        """`slot`: its bucket and its entry. `reduce` is kept weakly: Python does not see through the parameter's node,
        to free a cycle of them."""
        self._name, self._main_grad, self.slot, self._reducer = name, grad, slot, weakref.ref(reduce)
        self._in_flight, self._written = reduce.in_flight, reduce.written[slot[0]]

    def accumulator(self) -> tuple[Tensor, bool]:
        (bucket, entry), reduce = self.slot, self._reducer()
        # what is being reduced may be the sum of an earlier run: that is waited for
        if bucket in self._in_flight and not (reduce is not None and reduce.finish_reduce(bucket)):
            text = "a gradient came after its bucket was reduced; arm only the last backward"
            raise RuntimeError(f"{self._name}: {text}")
        begin = entry not in self._written
        if not self._written and reduce is not None:
            reduce.grads.allocate(reduce.buckets[bucket])
        self._written.add(entry)
        return self._main_grad, begin

    def mark_ready(self) -> None:
        if (reduce := self._reducer()) is not None:
            reduce.mark_ready(*self.slot)

    def accumulate_and_mark_ready(self, p: nn.Parameter, *_: Any) -> None:
        """The hook on the parameter's node."""
        if p.grad is not None:
            grad, begin = self.accumulator()
            grad.copy_(p.grad) if begin else grad.add_(p.grad)
            p.grad = None
        self.mark_ready()


class GradReducer:
    """Puts a sink on each of `parameters`, the entries of the layout of `grads`.

    overlap  reductions begin in the last backward; else all of them in `finish`, and those of buckets that come and go
             are waited for where they begin
    """

    def __init__(self, parameters: Sequence[nn.Parameter], grads: FlatBuffers, overlap: bool):
        self.grads, self.shardings, self.overlap = grads, grads.rules, overlap
        self.buckets = grads.layout.buckets
        self._unready: dict[int, set[int]] = {}  # armed and not yet reduced, in order: entries still to land
        self.in_flight: dict[int, Pending | None] = {}  # None: nobody has other summands
        self._reduce_dtype_copies: dict[int, Tensor] = {}  # what is owned of buckets on their way in another dtype
        # of each bucket, entries whose gradient is of this run of backwards; all else is left from the last
        self.written: list[set[int]] = [set() for _ in self.buckets]
        self._accumulated: set[int] = set()  # buckets that come and go of which what is held has a sum of this step
        self.pre_reduce_hook: Callable[[Bucket], None] | None = (
            None  # gets each bucket before it is reduced: this rank's own sum
        )
        self.main_grads: dict[str, ParamMainGrad] = {}
        self._nodes: list[Any] = []  # the parameters' nodes of the graph: autograd itself does not keep them
        for b, bucket in enumerate(self.buckets):
            for slot in bucket.slots:
                p, name = parameters[slot.entry], grads.layout.entries[slot.entry].spec.name
                grad = grads.param_view(slot).view_as(p)
                p.sink = self.main_grads[name] = sink = ParamMainGrad(name, grad, (b, slot.entry), self)  # type: ignore[attr-defined]
                node = get_gradient_edge(p).node
                node.register_hook(partial(sink.accumulate_and_mark_ready, p))
                self._nodes.append(node)

    def zero_unwritten_grads(self) -> None:
        """Zero what got no gradient in this run so far: all that come are added."""
        for bucket in self.buckets:
            self._zero_unwritten(bucket)

    def _zero_unwritten(self, bucket: Bucket) -> None:
        written = self.written[bucket.index]
        if not written:
            self.grads.allocate(bucket)
        unwritten = [slot for slot in bucket.slots if slot.entry not in written]
        for flat in map(self.grads.param_view, unwritten) if written else [self.grads.full(bucket)]:
            flat.zero_()
        written.update(slot.entry for slot in unwritten)

    def set_last_backward(
        self, chunk: int, main_grads: Iterable[MainGrad] | None = None, last_in_step: bool = True
    ) -> None:
        """The next backward of `chunk` is the last of its run, and of the step: reduce each bucket when its last
        gradient lands. `sinks`: where the weight gradients that come next are the last, those; all other gradients are
        there. `of_step` False: more runs follow, so buckets that stay are not reduced."""
        still_to_come = (
            None if main_grads is None else {sink.slot[1] for sink in main_grads if isinstance(sink, ParamMainGrad)}
        )
        for bucket in self._buckets_ending(chunk, last_in_step and self.overlap):
            self._unready[bucket.index] = {
                s.entry for s in bucket.slots if still_to_come is None or s.entry in still_to_come
            }
        self._start_ready()

    def finish_pass(self, chunk: int, last_in_step: bool = True) -> None:
        """The run is through: what has not been reduced on the way is, so that all ranks reduce as often."""
        for bucket in self._buckets_ending(chunk, last_in_step and self.overlap):
            if self._unready.pop(bucket.index, None) is not None:
                self._start_reduce(bucket.index)

    def _buckets_ending(self, chunk: int, last_in_step: bool) -> list[Bucket]:
        """Buckets of a chunk that a run ends for."""
        return [b for b in self.buckets if b.chunk == chunk and (last_in_step or not self.grads.is_resident(b))]

    def mark_ready(self, b: int, entry: int) -> None:
        if b in self._unready:
            self._unready[b].discard(entry)
            self._start_ready()

    def _start_ready(self) -> None:
        """Reduce the full buckets at the head of the queue. One behind a bucket that is not full waits: ranks
        that start collectives in different orders would sum gradients of different parameters."""
        for b in list(self._unready):
            if self._unready[b]:
                return
            del self._unready[b]
            self._start_reduce(b)

    def _start_reduce(self, b: int) -> None:
        bucket = self.buckets[b]
        rule = self.shardings[bucket.key]
        if not self.grads.is_resident(bucket):
            for other in list(self.in_flight):
                self.finish_reduce(other)
        self._zero_unwritten(bucket)
        if self.pre_reduce_hook is not None:
            self.pre_reduce_hook(bucket)
        self.in_flight[b] = None
        if rule.shard_axis.size == rule.replicate_axis.size == 1:
            return
        whole, mine = self.grads.full(bucket), self.grads.full_shard_view(bucket)
        if rule.reduce_dtype is not None:
            held, whole = rule.shard_range(bucket), whole.to(rule.reduce_dtype)
            mine = self._reduce_dtype_copies[b] = whole[held.start : held.stop]
        if rule.is_sharded:
            self.in_flight[b] = start_reduce_scatter_into(mine, whole, rule.shard_axis)
            if not self.overlap:
                self.finish_reduce(b)
        else:
            self.in_flight[b] = start_all_reduce(whole, rule.replicate_axis)

    def finish_reduce(self, b: int) -> bool:
        """Wait for the sum of a bucket that comes and goes, add what this rank holds of it to those of earlier runs of
        the step, and let go of the rest. False: the bucket stays."""
        bucket = self.buckets[b]
        if self.grads.is_resident(bucket):
            return False
        work = self.in_flight.pop(b)
        assert work is not None  # it is shared out
        work.wait()
        part, held = self._reduce_dtype_copies.pop(b, self.grads.full_shard_view(bucket)), self.grads.shard(bucket)
        held.add_(part) if b in self._accumulated else held.copy_(part)
        self._accumulated.add(b)
        self.grads.free(bucket)
        self.written[b].clear()
        return True

    def finish_grad_sync(self) -> None:
        """The step's backwards are through: every gradient this rank owns is complete (summed over data, tp, ends)."""
        for b in [*self._unready, *range(len(self.buckets))]:
            through = b in self.in_flight or (b in self._accumulated and not self.written[b])
            if not through:  # behind a parameter that got no gradient here, or never armed
                self._start_reduce(b)
        self._unready.clear()
        for b, work in list(self.in_flight.items()):
            if not self.finish_reduce(b) and work is not None:
                work.wait()
        for b, rounded in self._reduce_dtype_copies.items():
            self.grads.shard(self.buckets[b]).copy_(rounded)
        self._reduce_dtype_copies.clear()
        for bucket in self.buckets:
            if (outer := self.shardings[bucket.key].outer_shard_axis).size > 1:
                start_reduce_scatter_into(self.grads.owned(bucket), self.grads.shard(bucket), outer).wait()
            for axis in self.shardings[bucket.key].sum_axes:
                all_reduce_(self.grads.owned(bucket), axis)
        for bucket in self.buckets:
            if (ends := self.shardings[bucket.key].tied_axis) is not None:
                all_reduce_(self.grads.owned(bucket), ends)
        for written in self.written:
            written.clear()
        self.in_flight.clear()
        self._accumulated.clear()
