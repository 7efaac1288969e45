"""The units of the model whose weights or gradients are unsharded for a while (ZeRO-2 and 3), and their bytes.

The methods of UnshardedUnits are the events of a run in their order (optim/zero/sync.py):

    weights    of a unit while it runs, and of the next unit, which is prefetched
    gradients  of a bucket, from the first one that is added until its reduction has ended, for which the next one waits

They need no tensors: a search plans thousands of actions, and memory.py caches the effect of each by `state`.
tests/planning/test_unsharded_units.py compares them with a run: the same events, and never fewer bytes.
"""

from collections.abc import Sequence

from megalite.planning.run_plan import RunPlan

BucketId = tuple[str, int]  # unit, index of one of its buckets
# names of units whose weights are unsharded, buckets of gradients, and the one that is being reduced
UnshardedState = tuple[frozenset[str], frozenset[BucketId], BucketId | None]


class UnshardedUnits:
    """The unsharded units on a pipeline rank, and the events that change them.

    A unit is identified by its name: "embedding", "layers.17" or "head". A gradient belongs to a bucket of a unit: with
    a split backward, for example, the gradients of an expert's biases are added long before those of its weights.
    """

    def __init__(self, plan: RunPlan, rank: int):
        parallel = plan.config.parallel
        self.buckets = plan.model_states.by_rank[rank].unit_buckets
        # (unit, name of a parameter in it) -> index of its bucket
        self.bucket_of_param = {
            (unit, param): index
            for unit, buckets in self.buckets.items()
            for index, bucket in enumerate(buckets)
            for param in bucket.params
        }
        self.weight_bytes = {
            unit: sum(bucket.weight_bytes for bucket in buckets) for unit, buckets in self.buckets.items()
        }
        self.grad_bytes = plan.shape.bytes_per_element()[1]
        self.unshards = parallel.effective_zero_stage > 2 and bool(self.buckets)
        self.by_chunk = plan.shape.sharding_policy.unshard_by_chunk
        self.prefetches = parallel.overlap_param_gather and not self.by_chunk
        self.overlaps_reduce = parallel.overlap_grad_reduce
        self.weights: set[str] = set()
        self.gradients: set[BucketId] = set()
        self.reducing: BucketId | None = None

    @property
    def state(self) -> UnshardedState:
        """The units whose weights or gradients are unsharded."""
        return frozenset(self.weights), frozenset(self.gradients), self.reducing

    @state.setter
    def state(self, state: UnshardedState) -> None:
        weights, gradients, self.reducing = state
        self.weights, self.gradients = set(weights), set(gradients)

    @property
    def bytes(self) -> int:
        num_bytes = 0
        for unit in self.weights:
            num_bytes += self.weight_bytes.get(unit, 0)
        for unit, index in self.gradients:
            num_bytes += self.buckets[unit][index].numel * self.grad_bytes
        if self.reducing is not None:
            unit, index = self.reducing
            bucket = self.buckets[unit][index]
            if bucket.reduce_itemsize != self.grad_bytes:
                num_bytes += bucket.numel * bucket.reduce_itemsize  # a copy in bf16
        return num_bytes

    def unshard(self, units: Sequence[str], prefetch: Sequence[str] = ()) -> None:
        """Unshard the weights of units that are about to run, and start to unshard those of the units `prefetch`."""
        if not self.unshards:
            return
        self.weights.update(units)
        if self.prefetches:
            self.weights.update(prefetch)

    def reshard(self, units: Sequence[str]) -> None:
        """Reshard the weights of units that have run; with `by_chunk` they stay unsharded until the pass has ended."""
        if not self.by_chunk:
            self.weights.difference_update(units)

    def first_grad(self, unit: str, param: str) -> None:
        """Allocate the bucket of a parameter's gradient, before the first one of a pass is added."""
        index = self.bucket_of_param.get((unit, param))
        if index is None:  # resident, or no parameter
            return
        if (unit, index) == self.reducing:
            self._finish_reduce()
        self.gradients.add((unit, index))

    def reduce(self, unit: str) -> None:
        """Start to reduce the gradients of a unit, one bucket after another."""
        for index in range(len(self.buckets.get(unit, ()))):
            self._finish_reduce()
            self.gradients.add((unit, index))
            self.reducing = unit, index
        if not self.overlaps_reduce:
            self._finish_reduce()

    def _finish_reduce(self) -> None:
        if self.reducing is not None:
            self.gradients.discard(self.reducing)
            self.reducing = None
