"""Every rank gets the parts of the weights that the others own.

    bucket stays            after an update, while the next forward is under way: one gather per step
    comes and goes (ZeRO-3, arXiv:1910.02054)
      by layer              around each use of a unit, forward and backward; the next unit's gather runs meanwhile
      by chunk              from a run of a chunk's forwards or backwards to its end (pipeline/schedule.py)

The order of units is the model's own, so nothing is traced: whoever runs a unit (models/gpt.py) says so by `use`, and a
parameter's node in the graph says that backward is through with it. Embedding and head are used in forward alone, since
the loss computes its gradients there.
"""

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge

from megalite.nn.parameter import Sharded
from megalite.optim.flat_storage import FlatStorage
from megalite.parallel.comm import Pending, start_all_gather_into
from megalite.parallel.streams import beside, new_stream, reached

GATHERS_AHEAD, LISTS = 2, (nn.ParameterList, nn.ParameterDict)


class ParamGather:
    """Modules of `chunks`, whose parameters are views of `weights`, wait for them. overlap False: all at once, or, of
    weights that come and go, each when it is used. by_chunk: as above."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], weights: FlatStorage, chunks: Sequence[nn.Module], overlap: bool,
        by_chunk: bool = False,
    ):  # fmt: skip
        self.weights, self.overlap, self.by_chunk = weights, overlap, by_chunk
        self._device = parameters[0].device
        self._up = new_stream(self._device) if weights.on_host else None  # from the host
        self._to_gather: list[int] = []  # in the order in which every rank starts them
        self._gathering: dict[int, Pending] = {}
        self._outer: dict[int, Pending] = {}  # what replicas get of each other of what they hold
        self._buckets = buckets = weights.layout.buckets
        rules = [weights.rules[bucket.kind] for bucket in buckets]
        self._shards = {b: rule.shard for b, rule in enumerate(rules) if rule.is_shared_out}  # all there is to gather
        parts = {id(parameters[slot.entry]): b for b in self._shards for slot in buckets[b].slots}

        def needs(module: nn.Module, stay: bool, recurse: bool = False) -> list[int]:
            lists = [child for child in module.children() if isinstance(child, LISTS)]  # which nobody calls
            mine = {parts[id(p)] for one in (module, *lists) for p in one.parameters(recurse) if id(p) in parts}
            return sorted(b for b in mine if weights.stays(buckets[b]) == stay)

        self._needs: dict[nn.Module, list[int]] = {}  # of a unit that comes and goes
        self._next: dict[tuple[nn.Module, int], list[int]] = {}  # what the unit behind it, or before it, needs
        self._read_again: set[nn.Module] = set()  # by backward
        self._left: dict[int, set[int]] = {}  # entries of a bucket that backward still has to come to
        self._nodes: list[Any] = []  # the parameters' nodes of the graph: autograd itself does not keep them
        for chunk in chunks:
            for module in chunk.modules():
                if stays := needs(module, stay=True):
                    module.register_forward_pre_hook(partial(self._finish_all, stays))
            if all(map(weights.stays, buckets)):
                continue
            assert isinstance(chunk, Sharded), "its weights come and go, and it does not say when they are used"
            units = chunk.units
            self._needs |= {unit: needs(unit, stay=False, recurse=True) for unit in units}
            for before, unit in itertools.pairwise(units):
                self._next[before, 1] = self._needs[unit]
                if units[before]:
                    self._next[unit, -1] = self._needs[before]
            self._read_again |= {unit for unit, again in units.items() if again}
            chunk.use = self.use
        for bucket in buckets:
            for slot in () if by_chunk or weights.stays(bucket) else bucket.slots:
                node = get_gradient_edge(parameters[slot.entry]).node
                node.register_hook(partial(self._passed, bucket.number, slot.entry))
                self._nodes.append(node)

    def _finish_all(self, needs: list[int], *_: Any) -> None:
        for b in needs:
            self._finish(b)

    def gather(self) -> None:
        """What stays, in order of use. GATHERS_AHEAD are under way at a time, and one that is waited for starts the
        next: with a single hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1) all at once would hold up every kernel behind
        them. What replicas share out among them comes before, from all of them at once. What is under way, of weights
        from before a load, ends first: nobody would wait for it again."""
        self.wait()
        for b in self._in_order(list(self._shards)):
            bucket, outer = self._buckets[b], self.weights.rules[self._buckets[b].kind].outer
            if outer.size > 1:
                self._outer[b] = start_all_gather_into(self.weights.held(bucket), self.weights.owned(bucket), outer)
        self._begin_in_order([b for b in self._shards if self.weights.stays(self._buckets[b])])
        if not self.overlap:
            self.wait()

    def _in_order(self, buckets: list[int]) -> list[int]:
        """Of use."""
        return sorted(buckets, key=lambda b: (self._buckets[b].chunk, -b))

    def _begin_in_order(self, buckets: list[int]) -> None:
        self._to_gather += self._in_order(buckets)
        while self._to_gather and len(self._gathering) < GATHERS_AHEAD:
            self._start_next()

    def _start(self, b: int) -> None:
        bucket = self._buckets[b]
        self.weights.come(bucket)
        if b in self._outer:
            self._outer.pop(b).wait()
        whole, held = self.weights.whole(bucket), self.weights.held(bucket)
        with beside(self._up, after=reached(self._device) if self._up else None):
            if self.weights.on_host and not self.weights.stays(bucket):
                held = self.weights.mine(bucket).copy_(held, non_blocking=True)
            self._gathering[b] = start_all_gather_into(whole, held, self._shards[b])

    def _start_next(self) -> None:
        if self._to_gather:
            self._start(self._to_gather.pop(0))

    def _finish(self, b: int) -> None:
        while b in self._to_gather:
            self._start_next()
        pending = self._gathering.pop(b, None)
        if pending is not None:
            pending.wait()
            self._start_next()

    def wait(self) -> None:
        """All weights that stay are whole, and all that a rank holds is there."""
        while self._gathering:
            self._finish(next(iter(self._gathering)))
        while self._outer:
            self._outer.pop(next(iter(self._outer))).wait()

    # ---- weights that come and go

    def use(self, unit: nn.Module, *args: Any, again: bool = False) -> Tensor:
        """unit(*args), with its weights. `again`: in backward, which follows."""
        self._enter(unit, 0 if again else 1)
        y = unit(*args)
        if again:
            self._await_backward(unit)
        else:
            self._leave(unit)
            if y.grad_fn is not None and unit in self._read_again:
                y.grad_fn.register_prehook(lambda _: self._before_backward(unit))
        return y

    def _before_backward(self, unit: nn.Module) -> None:
        self._enter(unit, -1)
        self._await_backward(unit)

    def _enter(self, unit: nn.Module, ahead: int) -> None:
        """The unit's weights are whole from here on, and those of the next one are on their way."""
        needs = self._needs[unit]
        self._want(needs)
        self._finish_all(needs)
        if self.overlap and not self.by_chunk:
            self._want(self._next.get((unit, ahead), []))

    def _want(self, buckets: list[int]) -> None:
        for b in buckets:
            if not self.weights.is_there(self._buckets[b]) and b not in self._to_gather:
                self._start(b)

    def _leave(self, unit: nn.Module) -> None:
        for b in [] if self.by_chunk else self._needs[unit]:
            self.weights.go(self._buckets[b])

    def _await_backward(self, unit: nn.Module) -> None:
        for b in [] if self.by_chunk else self._needs[unit]:
            self._left[b] = {slot.entry for slot in self._buckets[b].slots}

    def _passed(self, b: int, entry: int, *_: Any) -> None:
        """Backward is through with a parameter."""
        if b in self._left:
            self._left[b].discard(entry)
            if not self._left[b]:
                del self._left[b]
                self.weights.go(self._buckets[b])

    def come(self, chunk: int) -> None:
        """A run of the chunk's forwards or backwards is near: gather what both need. Its ends, which backward does not
        read, come with their use."""
        read = {b for unit in self._read_again for b in self._needs[unit]}
        away = [b for b in read if not self.weights.is_there(self._buckets[b])]
        self._begin_in_order([b for b in away if self._buckets[b].chunk == chunk])

    def go(self, chunk: int) -> None:
        """The run is through."""
        for bucket in self._buckets:
            if bucket.chunk == chunk and not self.weights.stays(bucket) and self.weights.is_there(bucket):
                self._finish(bucket.number)
                self.weights.go(bucket)
