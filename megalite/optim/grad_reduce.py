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

from megalite.nn.parameter import GradientSink
from megalite.optim.flat_storage import FlatStorage
from megalite.optim.layout import Bucket
from megalite.parallel.comm import Pending, all_reduce_, start_all_reduce, start_reduce_scatter_into


class Sink:
    """The view of one parameter's gradient, [its shape] (nn/parameter.py, GradientSink)."""

    def __init__(self, name: str, grad: Tensor, slot: tuple[int, int], reduce: "GradReduce"):
        """`slot`: its bucket and its entry. `reduce` is kept weakly: Python does not see through the parameter's node,
        to free a cycle of them."""
        self._name, self._grad, self.slot, self._reduce = name, grad, slot, weakref.ref(reduce)
        self._reducing, self._begun = reduce.reducing, reduce.begun[slot[0]]

    def open(self) -> tuple[Tensor, bool]:
        (bucket, entry), reduce = self.slot, self._reduce()
        # what is being reduced may be the sum of an earlier run: that is waited for
        if bucket in self._reducing and not (reduce is not None and reduce.settle(bucket)):
            text = "a gradient came after its bucket was reduced; arm only the last backward"
            raise RuntimeError(f"{self._name}: {text}")
        begin = entry not in self._begun
        if not self._begun and reduce is not None:
            reduce.grads.come(reduce.buckets[bucket])
        self._begun.add(entry)
        return self._grad, begin

    def landed(self) -> None:
        if (reduce := self._reduce()) is not None:
            reduce.landed(*self.slot)

    def land(self, p: nn.Parameter, *_: Any) -> None:
        """The hook on the parameter's node."""
        if p.grad is not None:
            grad, begin = self.open()
            grad.copy_(p.grad) if begin else grad.add_(p.grad)
            p.grad = None
        self.landed()


class GradReduce:
    """Puts a sink on each of `parameters`, the entries of the layout of `grads`.

    overlap  reductions begin in the last backward; else all of them in `finish`, and those of buckets that come and go
             are waited for where they begin
    """

    def __init__(self, parameters: Sequence[nn.Parameter], grads: FlatStorage, overlap: bool):
        self.grads, self.rules, self.overlap = grads, grads.rules, overlap
        self.buckets = grads.layout.buckets
        self._waiting: dict[int, set[int]] = {}  # armed and not yet reduced, in order: entries still to land
        self.reducing: dict[int, Pending | None] = {}  # None: nobody has other summands
        self._rounded: dict[int, Tensor] = {}  # what is owned of buckets on their way in another dtype
        # of each bucket, entries whose gradient is of this run of backwards; all else is left from the last
        self.begun: list[set[int]] = [set() for _ in self.buckets]
        self._summed: set[int] = set()  # buckets that come and go of which what is held has a sum of this step
        self.look: Callable[[Bucket], None] | None = None  # gets each bucket before it is reduced: this rank's own sum
        self.sinks: dict[str, Sink] = {}
        self._nodes: list[Any] = []  # the parameters' nodes of the graph: autograd itself does not keep them
        for b, bucket in enumerate(self.buckets):
            for slot in bucket.slots:
                p, name = parameters[slot.entry], grads.layout.entries[slot.entry].spec.name
                grad = grads.part(slot).view_as(p)
                p.sink = self.sinks[name] = sink = Sink(name, grad, (b, slot.entry), self)  # type: ignore[attr-defined]
                node = get_gradient_edge(p).node
                node.register_hook(partial(sink.land, p))
                self._nodes.append(node)

    def begin_all(self) -> None:
        """Zero what got no gradient in this run so far: all that come are added."""
        for bucket in self.buckets:
            self._begin_rest(bucket)

    def _begin_rest(self, bucket: Bucket) -> None:
        begun = self.begun[bucket.number]
        if not begun:
            self.grads.come(bucket)
        rest = [slot for slot in bucket.slots if slot.entry not in begun]
        for flat in map(self.grads.part, rest) if begun else [self.grads.whole(bucket)]:
            flat.zero_()
        begun.update(slot.entry for slot in rest)

    def on_last_backward(self, chunk: int, sinks: Iterable[GradientSink] | None = None, of_step: bool = True) -> None:
        """The next backward of `chunk` is the last of its run, and of the step: reduce each bucket when its last
        gradient lands. `sinks`: where the weight gradients that come next are the last, those; all other gradients are
        there. `of_step` False: more runs follow, so buckets that stay are not reduced."""
        coming = None if sinks is None else {sink.slot[1] for sink in sinks if isinstance(sink, Sink)}
        for bucket in self._of(chunk, of_step and self.overlap):
            self._waiting[bucket.number] = {s.entry for s in bucket.slots if coming is None or s.entry in coming}
        self._start_full()

    def after_run(self, chunk: int, of_step: bool = True) -> None:
        """The run is through: what has not been reduced on the way is, so that all ranks reduce as often."""
        for bucket in self._of(chunk, of_step and self.overlap):
            if self._waiting.pop(bucket.number, None) is not None:
                self._start(bucket.number)

    def _of(self, chunk: int, of_step: bool) -> list[Bucket]:
        """Buckets of a chunk that a run ends for."""
        return [b for b in self.buckets if b.chunk == chunk and (of_step or not self.grads.stays(b))]

    def landed(self, b: int, entry: int) -> None:
        if b in self._waiting:
            self._waiting[b].discard(entry)
            self._start_full()

    def _start_full(self) -> None:
        """Reduce the full buckets at the head of the queue. One behind a bucket that is not full waits: ranks
        that start collectives in different orders would sum gradients of different parameters."""
        for b in list(self._waiting):
            if self._waiting[b]:
                return
            del self._waiting[b]
            self._start(b)

    def _start(self, b: int) -> None:
        bucket = self.buckets[b]
        rule = self.rules[bucket.kind]
        if not self.grads.stays(bucket):
            for other in list(self.reducing):
                self.settle(other)
        self._begin_rest(bucket)
        if self.look is not None:
            self.look(bucket)
        self.reducing[b] = None
        if rule.shard.size == rule.replica.size == 1:
            return
        whole, mine = self.grads.whole(bucket), self.grads.mine(bucket)
        if rule.moved_as is not None:
            held, whole = rule.held(bucket), whole.to(rule.moved_as)
            mine = self._rounded[b] = whole[held.start : held.stop]
        if rule.is_shared_out:
            self.reducing[b] = start_reduce_scatter_into(mine, whole, rule.shard)
            if not self.overlap:
                self.settle(b)
        else:
            self.reducing[b] = start_all_reduce(whole, rule.replica)

    def settle(self, b: int) -> bool:
        """Wait for the sum of a bucket that comes and goes, add what this rank holds of it to those of earlier runs of
        the step, and let go of the rest. False: the bucket stays."""
        bucket = self.buckets[b]
        if self.grads.stays(bucket):
            return False
        work = self.reducing.pop(b)
        assert work is not None  # it is shared out
        work.wait()
        part, held = self._rounded.pop(b, self.grads.mine(bucket)), self.grads.held(bucket)
        held.add_(part) if b in self._summed else held.copy_(part)
        self._summed.add(b)
        self.grads.go(bucket)
        self.begun[b].clear()
        return True

    def finish(self) -> None:
        """The step's backwards are through: every gradient this rank owns is complete (summed over data, tp, ends)."""
        for b in [*self._waiting, *range(len(self.buckets))]:
            through = b in self.reducing or (b in self._summed and not self.begun[b])
            if not through:  # behind a parameter that got no gradient here, or never armed
                self._start(b)
        self._waiting.clear()
        for b, work in list(self.reducing.items()):
            if not self.settle(b) and work is not None:
                work.wait()
        for b, rounded in self._rounded.items():
            self.grads.held(self.buckets[b]).copy_(rounded)
        self._rounded.clear()
        for bucket in self.buckets:
            if (outer := self.rules[bucket.kind].outer).size > 1:
                start_reduce_scatter_into(self.grads.owned(bucket), self.grads.held(bucket), outer).wait()
            for axis in self.rules[bucket.kind].sums:
                all_reduce_(self.grads.owned(bucket), axis)
        for bucket in self.buckets:
            if (ends := self.rules[bucket.kind].ends) is not None:
                all_reduce_(self.grads.owned(bucket), ends)
        for begun in self.begun:
            begun.clear()
        self.reducing.clear()
        self._summed.clear()
