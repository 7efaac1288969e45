"""All-gather of weights: every rank gets the shards of the other ranks.

    resident bucket              once per step: after the update, during the next forward
    resharded bucket (ZeRO-3, arXiv:1910.02054)
      by unit                    around each run of a unit, forward and backward; overlaps with the unit before
      by chunk                   for a pass of forwards or backwards of a chunk (pipeline/schedule.py)

The order of units is that of the model, so nothing is traced. The model runs its units through `run_unit`
(models/gpt.py), and a hook on a parameter's graph node shows that the backward no longer needs it. Embedding and head
are used only in forward, since the loss computes its gradients there.
"""

import itertools
from collections.abc import Sequence
from functools import partial
from typing import Any

from torch import Tensor, nn

from megalite.nn.parameter import ShardableModule
from megalite.optim.flat_buffers import FlatBuffers
from megalite.optim.resharded_parameter import gradient_node
from megalite.parallel.comm import Pending, start_all_gather_into
from megalite.parallel.streams import new_stream, on_side_stream, record_event

PREFETCH_DEPTH = 2  # gathers in flight at a time
PARAM_CONTAINERS = (nn.ParameterList, nn.ParameterDict)


class ParamGatherer:
    """The all-gather of weights before they are used. Modules wait for the weights that they need."""

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        weights: FlatBuffers,
        chunks: Sequence[nn.Module],
        overlap: bool,
        unshard_by_chunk: bool = False,
    ):
        """Register the hooks on the modules.

        Args:
            parameters: the parameters of the entries of the layout, views of `weights`.
            weights: the buckets.
            chunks: the modules that use the parameters.
            overlap: gather weights ahead of their use. Otherwise resident buckets are gathered all at once, and
                resharded ones when they are used.
            unshard_by_chunk: unshard weights for a pass of a chunk (`unshard`, `reshard`), not for each unit.
        """
        self.weights = weights
        self.overlap = overlap
        self.unshard_by_chunk = unshard_by_chunk
        self._device = parameters[0].device
        self._h2d_stream = new_stream(self._device) if weights.on_host else None
        self._queue: list[int] = []  # buckets to gather, in the order in which every rank starts them
        self._in_flight: dict[int, Pending] = {}
        self._outer_gathers: dict[int, Pending] = {}  # gathers of a shard from the replicas that own its parts
        self._buckets = buckets = weights.layout.buckets
        shardings = [weights.shardings[bucket.key] for bucket in buckets]
        # the buckets that have to be gathered
        self._shard_axes = {b: sharding.shard_axis for b, sharding in enumerate(shardings) if sharding.is_sharded}
        bucket_of_param = {id(parameters[slot.entry]): b for b in self._shard_axes for slot in buckets[b].slots}

        def buckets_of(module: nn.Module, resident: bool, recurse: bool = False) -> list[int]:
            # containers are never called, so the module that contains them has to wait for their parameters
            containers = [child for child in module.children() if isinstance(child, PARAM_CONTAINERS)]
            indices = {
                bucket_of_param[id(p)]
                for owner in (module, *containers)
                for p in owner.parameters(recurse)
                if id(p) in bucket_of_param
            }
            return sorted(b for b in indices if weights.is_resident(buckets[b]) == resident)

        self._buckets_of_unit: dict[nn.Module, list[int]] = {}  # the resharded buckets of a unit
        # (unit, 1): the resharded buckets of the unit after it; (unit, -1): those of the unit before it
        self._prefetch_buckets: dict[tuple[nn.Module, int], list[int]] = {}
        self._read_in_backward: set[nn.Module] = set()  # units whose weights the backward reads
        self._params_left: dict[int, set[int]] = {}  # bucket -> entries that the current backward still needs
        self._nodes: list[Any] = []  # the parameters' graph nodes, which autograd itself does not keep alive
        for chunk in chunks:
            for module in chunk.modules():
                if resident_buckets := buckets_of(module, resident=True):
                    module.register_forward_pre_hook(partial(self._wait_all, resident_buckets))
            if all(map(weights.is_resident, buckets)):
                continue
            assert isinstance(chunk, ShardableModule), "its weights are resharded, but it does not run through units"
            units = chunk.units
            self._buckets_of_unit |= {unit: buckets_of(unit, resident=False, recurse=True) for unit in units}
            for previous, unit in itertools.pairwise(units):
                self._prefetch_buckets[previous, 1] = self._buckets_of_unit[unit]
                if units[previous]:
                    self._prefetch_buckets[unit, -1] = self._buckets_of_unit[previous]
            self._read_in_backward |= {unit for unit, read_in_backward in units.items() if read_in_backward}
            chunk.run_unit = self.run_unit
        for bucket in buckets:
            if unshard_by_chunk or weights.is_resident(bucket):
                continue
            for slot in bucket.slots:
                node = gradient_node(parameters[slot.entry])
                node.register_hook(partial(self._param_backward_done, bucket.index, slot.entry))
                self._nodes.append(node)

    def _wait_all(self, buckets: list[int], *_: Any) -> None:
        for b in buckets:
            self._wait(b)

    def start_param_sync(self) -> None:
        """Start to gather the resident buckets, in order of use.

        PREFETCH_DEPTH gathers are in flight at a time, and a wait for one of them starts the next: with a single
        hardware queue (CUDA_DEVICE_MAX_CONNECTIONS=1), all at once would delay every later kernel. Shards that are
        split again over replicas are gathered first, all at once. Gathers that are in flight, of weights from before a
        load, are completed before, because nothing would wait for them later.
        """
        self.wait_param_sync()
        for b in self._forward_order(list(self._shard_axes)):
            bucket = self._buckets[b]
            outer = self.weights.shardings[bucket.key].outer_shard_axis
            if outer.size > 1:
                self._outer_gathers[b] = start_all_gather_into(
                    self.weights.shard(bucket), self.weights.owned(bucket), outer
                )
        self._enqueue([b for b in self._shard_axes if self.weights.is_resident(self._buckets[b])])
        if not self.overlap:
            self.wait_param_sync()

    def _forward_order(self, buckets: list[int]) -> list[int]:
        """Return the buckets in the order in which forward uses them."""
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
        full = self.weights.full(bucket)
        shard = self.weights.shard(bucket)
        with on_side_stream(self._h2d_stream, after=record_event(self._device) if self._h2d_stream else None):
            if self.weights.on_host and not self.weights.is_resident(bucket):
                shard = self.weights.full_shard_view(bucket).copy_(shard, non_blocking=True)
            self._in_flight[b] = start_all_gather_into(full, shard, self._shard_axes[b])

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
        """Wait for all gathers: of the resident buckets and of the shards."""
        while self._in_flight:
            self._wait(next(iter(self._in_flight)))
        while self._outer_gathers:
            self._outer_gathers.pop(next(iter(self._outer_gathers))).wait()

    # ---- resharded weights

    def run_unit(self, unit: nn.Module, *args: Any, recomputing: bool = False) -> Tensor:
        """Return unit(*args), with unsharded weights.

        With `recomputing` this is a recomputation, which the backward of the unit follows, so the weights are kept.
        """
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

    def _unshard_unit(self, unit: nn.Module, direction: int) -> None:
        """Unshard the weights of a unit, and start to gather those of the next unit.

        `direction` is 1 if that is the next one in forward, -1 in backward, and 0 if nothing is to be prefetched.
        """
        buckets = self._buckets_of_unit[unit]
        self._request(buckets)
        self._wait_all(buckets)
        if self.overlap and not self.unshard_by_chunk:
            self._request(self._prefetch_buckets.get((unit, direction), []))

    def _request(self, buckets: list[int]) -> None:
        """Start to gather the buckets that are neither allocated nor in the queue."""
        for b in buckets:
            if not self.weights.is_allocated(self._buckets[b]) and b not in self._queue:
                self._start_gather(b)

    def _reshard_unit(self, unit: nn.Module) -> None:
        if self.unshard_by_chunk:
            return
        for b in self._buckets_of_unit[unit]:
            self.weights.free(self._buckets[b])

    def _expect_backward(self, unit: nn.Module) -> None:
        """Free the weights of a unit as soon as the backward that follows no longer needs them."""
        if self.unshard_by_chunk:
            return
        for b in self._buckets_of_unit[unit]:
            self._params_left[b] = {slot.entry for slot in self._buckets[b].slots}

    def _param_backward_done(self, b: int, entry: int, *_: Any) -> None:
        """Free the bucket if this was the last of its parameters that the backward needs (hook on a graph node)."""
        if b in self._params_left:
            self._params_left[b].discard(entry)
            if not self._params_left[b]:
                del self._params_left[b]
                self.weights.free(self._buckets[b])

    def unshard(self, chunk: int) -> None:
        """Start to gather the weights of a chunk that forward and backward need, shortly before a pass.

        Embedding and head, whose weights the backward does not read, are gathered when they are used.
        """
        needed = {b for unit in self._read_in_backward for b in self._buckets_of_unit[unit]}
        missing = [b for b in needed if not self.weights.is_allocated(self._buckets[b])]
        self._enqueue([b for b in missing if self._buckets[b].chunk == chunk])

    def reshard(self, chunk: int) -> None:
        """Free the full weights of a chunk after a pass."""
        for bucket in self._buckets:
            if bucket.chunk == chunk and not self.weights.is_resident(bucket) and self.weights.is_allocated(bucket):
                self._wait(bucket.index)
                self.weights.free(bucket)
