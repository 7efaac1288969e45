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

from megalite.nn.parameter import ShardableModule
from megalite.optim.flat_buffers import FlatBuffers
from megalite.parallel.comm import Pending, start_all_gather_into
from megalite.parallel.streams import new_stream, on_side_stream, record_event

PREFETCH_DEPTH, PARAM_CONTAINERS = 2, (nn.ParameterList, nn.ParameterDict)


class ParamGatherer:
    """Modules of `chunks`, whose parameters are views of `weights`, wait for them. overlap False: all at once, or, of
    weights that come and go, each when it is used. by_chunk: as above."""

    def __init__(
        self, parameters: Sequence[nn.Parameter], weights: FlatBuffers, chunks: Sequence[nn.Module], overlap: bool,
        unshard_by_chunk: bool = False,
    ):  # fmt: skip
        self.weights, self.overlap, self.by_chunk = weights, overlap, unshard_by_chunk
        self._device = parameters[0].device
        self._h2d_stream = new_stream(self._device) if weights.on_host else None  # from the host
        self._queue: list[int] = []  # in the order in which every rank starts them
        self._in_flight: dict[int, Pending] = {}
        self._outer_gathers: dict[int, Pending] = {}  # what replicas get of each other of what they hold
        self._buckets = buckets = weights.layout.buckets
        rules = [weights.rules[bucket.key] for bucket in buckets]
        self._shard_axes = {
            b: rule.shard_axis for b, rule in enumerate(rules) if rule.is_sharded
        }  # all there is to gather
        bucket_of_param = {id(parameters[slot.entry]): b for b in self._shard_axes for slot in buckets[b].slots}

        def needs(module: nn.Module, stay: bool, recurse: bool = False) -> list[int]:
            lists = [child for child in module.children() if isinstance(child, PARAM_CONTAINERS)]  # which nobody calls
            mine = {
                bucket_of_param[id(p)]
                for one in (module, *lists)
                for p in one.parameters(recurse)
                if id(p) in bucket_of_param
            }
            return sorted(b for b in mine if weights.is_resident(buckets[b]) == stay)

        self._buckets_of_unit: dict[nn.Module, list[int]] = {}  # of a unit that comes and goes
        self._prefetch_buckets: dict[
            tuple[nn.Module, int], list[int]
        ] = {}  # what the unit behind it, or before it, needs
        self._read_in_backward: set[nn.Module] = set()  # by backward
        self._params_left: dict[int, set[int]] = {}  # entries of a bucket that backward still has to come to
        self._nodes: list[Any] = []  # the parameters' nodes of the graph: autograd itself does not keep them
        for chunk in chunks:
            for module in chunk.modules():
                if stays := needs(module, stay=True):
                    module.register_forward_pre_hook(partial(self._wait_all, stays))
            if all(map(weights.is_resident, buckets)):
                continue
            assert isinstance(chunk, ShardableModule), "its weights come and go, and it does not say when they are used"
            units = chunk.units
            self._buckets_of_unit |= {unit: needs(unit, stay=False, recurse=True) for unit in units}
            for before, unit in itertools.pairwise(units):
                self._prefetch_buckets[before, 1] = self._buckets_of_unit[unit]
                if units[before]:
                    self._prefetch_buckets[unit, -1] = self._buckets_of_unit[before]
            self._read_in_backward |= {unit for unit, recomputing in units.items() if recomputing}
            chunk.run_unit = self.run_unit
        for bucket in buckets:
            for slot in () if unshard_by_chunk or weights.is_resident(bucket) else bucket.slots:
                node = get_gradient_edge(parameters[slot.entry]).node
                node.register_hook(partial(self._param_backward_done, bucket.index, slot.entry))
                self._nodes.append(node)

    def _wait_all(self, needs: list[int], *_: Any) -> None:
        for b in needs:
            self._wait(b)

    def start_param_sync(self) -> None:
        """What stays, in order of use. GATHERS_AHEAD are under way at a time, and one that is waited for starts the
        next: with a single hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1) all at once would hold up every kernel behind
        them. What replicas share out among them comes before, from all of them at once. What is under way, of weights
        from before a load, ends first: nobody would wait for it again."""
        self.wait_param_sync()
        for b in self._forward_order(list(self._shard_axes)):
            bucket, outer = self._buckets[b], self.weights.rules[self._buckets[b].key].outer_shard_axis
            if outer.size > 1:
                self._outer_gathers[b] = start_all_gather_into(
                    self.weights.shard(bucket), self.weights.owned(bucket), outer
                )
        self._enqueue([b for b in self._shard_axes if self.weights.is_resident(self._buckets[b])])
        if not self.overlap:
            self.wait_param_sync()

    def _forward_order(self, buckets: list[int]) -> list[int]:
        """Of use."""
        return sorted(buckets, key=lambda b: (self._buckets[b].chunk, -b))

    def _enqueue(self, buckets: list[int]) -> None:
        self._queue += self._forward_order(buckets)
        while self._queue and len(self._in_flight) < PREFETCH_DEPTH:
            self._start_next_gather()

    def _start_gather(self, b: int) -> None:
        bucket = self._buckets[b]
        self.weights.allocate(bucket)
        if b in self._outer_gathers:
            self._outer_gathers.pop(b).wait()
        whole, held = self.weights.full(bucket), self.weights.shard(bucket)
        with on_side_stream(self._h2d_stream, after=record_event(self._device) if self._h2d_stream else None):
            if self.weights.on_host and not self.weights.is_resident(bucket):
                held = self.weights.full_shard_view(bucket).copy_(held, non_blocking=True)
            self._in_flight[b] = start_all_gather_into(whole, held, self._shard_axes[b])

    def _start_next_gather(self) -> None:
        if self._queue:
            self._start_gather(self._queue.pop(0))

    def _wait(self, b: int) -> None:
        while b in self._queue:
            self._start_next_gather()
        pending = self._in_flight.pop(b, None)
        if pending is not None:
            pending.wait()
            self._start_next_gather()

    def wait_param_sync(self) -> None:
        """All weights that stay are whole, and all that a rank holds is there."""
        while self._in_flight:
            self._wait(next(iter(self._in_flight)))
        while self._outer_gathers:
            self._outer_gathers.pop(next(iter(self._outer_gathers))).wait()

    # ---- weights that come and go

    def run_unit(self, unit: nn.Module, *args: Any, recomputing: bool = False) -> Tensor:
        """unit(*args), with its weights. `again`: in backward, which follows."""
        self._unshard_unit(unit, 0 if recomputing else 1)
        y = unit(*args)
        if recomputing:
            self._expect_backward(unit)
        else:
            self._reshard_unit(unit)
            if y.grad_fn is not None and unit in self._read_in_backward:
                y.grad_fn.register_prehook(lambda _: self._pre_backward(unit))
        return y

    def _pre_backward(self, unit: nn.Module) -> None:
        self._unshard_unit(unit, -1)
        self._expect_backward(unit)

    def _unshard_unit(self, unit: nn.Module, ahead: int) -> None:
        """The unit's weights are whole from here on, and those of the next one are on their way."""
        needs = self._buckets_of_unit[unit]
        self._request(needs)
        self._wait_all(needs)
        if self.overlap and not self.by_chunk:
            self._request(self._prefetch_buckets.get((unit, ahead), []))

    def _request(self, buckets: list[int]) -> None:
        for b in buckets:
            if not self.weights.is_allocated(self._buckets[b]) and b not in self._queue:
                self._start_gather(b)

    def _reshard_unit(self, unit: nn.Module) -> None:
        for b in [] if self.by_chunk else self._buckets_of_unit[unit]:
            self.weights.free(self._buckets[b])

    def _expect_backward(self, unit: nn.Module) -> None:
        for b in [] if self.by_chunk else self._buckets_of_unit[unit]:
            self._params_left[b] = {slot.entry for slot in self._buckets[b].slots}

    def _param_backward_done(self, b: int, entry: int, *_: Any) -> None:
        """Backward is through with a parameter."""
        if b in self._params_left:
            self._params_left[b].discard(entry)
            if not self._params_left[b]:
                del self._params_left[b]
                self.weights.free(self._buckets[b])

    def unshard(self, chunk: int) -> None:
        """A run of the chunk's forwards or backwards is near: gather what both need. Its ends, which backward does not
        read, come with their use."""
        read = {b for unit in self._read_in_backward for b in self._buckets_of_unit[unit]}
        away = [b for b in read if not self.weights.is_allocated(self._buckets[b])]
        self._enqueue([b for b in away if self._buckets[b].chunk == chunk])

    def reshard(self, chunk: int) -> None:
        """The run is through."""
        for bucket in self._buckets:
            if bucket.chunk == chunk and not self.weights.is_resident(bucket) and self.weights.is_allocated(bucket):
                self._wait(bucket.index)
                self.weights.free(bucket)
