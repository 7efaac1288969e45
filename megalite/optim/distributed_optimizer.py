"""The distributed optimizer: fp32 main weights and state of the owned parameters only (arXiv:1910.02054, stage 1).

Memory per parameter in bf16: 2 (weight) + 4 (gradient) + 12/dp_shard (main weight and two moments) bytes. If the
weights are fp32, in the entire model or in a bucket, the main weights are the owned part of the weights themselves. All
parameters of a bucket are updated in the same way (zero/layout.py), so an update is one call per bucket. Main weights
and state of a bucket are on the device, in host memory or in a mapped file (optimizer_offload.py).

A step has two halves, with one all-reduce by the caller between them: `local_norm_sq` (of the owned elements, each
weighted by 1/num_owners, so that the sum over the world is the squared norm), then `step` with the one factor that
unscales, averages and clips.
"""

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.kernels.grad_norm import sum_of_squares
from megalite.optim.optimizer_offload import HostUpdater, offloaded_buckets
from megalite.optim.update_rule import Finalizer, ParamUpdate, UpdateRule, WholeTensorRule
from megalite.optim.zero.grad_bucket import GradBucket
from megalite.optim.zero.layout import BucketLayout
from megalite.optim.zero.param_bucket import ParamBucket
from megalite.optim.zero.sharding import BucketSharding
from megalite.optim.zero.sync import BucketSync
from megalite.parallel.spec import TensorShard


@dataclass(frozen=True)
class OptimizerBucket:
    """The elements of a bucket that this rank updates, with their main weights and optimizer state.

    Attributes:
        params: the weights.
        grads: the gradients.
        rule: the update rule.
        main: main weights; `params.owned` itself if nothing needs a separate tensor.
        state: optimizer state by name.
        is_offloaded: True if the host updates the bucket; `main` and `state` are in host memory or on disk.
    """

    params: ParamBucket
    grads: GradBucket
    rule: UpdateRule
    main: Tensor
    state: Mapping[str, Tensor]
    is_offloaded: bool

    @property
    def layout(self) -> BucketLayout:
        """The parameters and their places."""
        return self.params.layout

    @property
    def sharding(self) -> BucketSharding:
        """The ranks that share the bucket."""
        return self.params.sharding

    @property
    def copies_main(self) -> bool:
        """True if the weights are a copy of the main weights, in their own dtype or for a host that updates them."""
        return self.main is not self.params.owned

    @property
    def rounds_main(self) -> bool:
        """True if the weights are rounded main weights, so that a checkpoint has both."""
        return self.params.dtype != self.main.dtype

    def update(self, *, lr: float, decoupled_lr: float, weight_decay: float, step: int, scale: float) -> ParamUpdate:
        """Return the arguments of an update (DistributedOptimizer.step).

        MuP's factor of the learning rate does not change what weight decay subtracts, the product of both.
        """
        key = self.layout.key
        return ParamUpdate(
            param=self.main,
            grad=self.grads.owned_sums,
            state=self.state,
            lr=(decoupled_lr if key.decoupled_lr else lr) * key.lr_multiplier,
            weight_decay=weight_decay / key.lr_multiplier if key.weight_decay else 0.0,
            step=step,
            scale=scale,
            model_param=self.params.owned if self.copies_main else None,
        )


class DistributedOptimizer:
    """The optimizer of the parameters that this rank owns.

    Attributes:
        sync: the weights and gradients.
        num_updates: number of updates, without skipped steps.
        rules: the update rule, and the rule for matrices; they may be the same.
        buckets: main weights and state, in the order of the layout.
        host_updater: updates the offloaded buckets.
    """

    def __init__(
        self,
        sync: BucketSync,
        rule: UpdateRule,
        matrix_rule: UpdateRule | None = None,
        offload_fraction: float = 0.0,
        offload_dir: str | None = None,
    ):
        """Create main weights and optimizer state.

        Args:
            sync: the weights and gradients.
            rule: the update rule.
            matrix_rule: the rule for buckets of matrices; None: `rule`.
            offload_fraction: fraction of the elements whose main weights and state are in host memory. Only with a
                single rule that is not a WholeTensorRule.
            offload_dir: a directory for a mapped file with the offloaded state; None: it is in memory.
        """
        self.sync = sync
        self.num_updates = 0
        self.rules = rule, matrix_rule or rule
        num_offloaded = len(offloaded_buckets(sync.layout, offload_fraction))
        num_on_device = len(sync.param_buckets) - num_offloaded
        self.host_updater = HostUpdater(
            sync.param_buckets[:num_offloaded], sync.main_dtype, rule.state_dtypes, sync.mesh.device, offload_dir or ""
        )
        self.buckets: list[OptimizerBucket] = []
        allocations = [*self.host_updater.allocations, *itertools.repeat(None, num_on_device)]
        for params, grads, allocation in zip(sync.param_buckets, sync.grad_buckets, allocations, strict=True):
            bucket_rule = self.rules[params.layout.key.is_matrix]
            if allocation is not None:
                main, state = allocation
            else:
                main = params.owned.to(sync.main_dtype)  # not a copy if the dtype is the same
                dtypes = bucket_rule.state_dtypes
                state = {name: torch.zeros_like(main, dtype=dtype) for name, dtype in dtypes.items()}
            self.buckets.append(OptimizerBucket(params, grads, bucket_rule, main, state, allocation is not None))
        self._finalizers: list[tuple[UpdateRule, Finalizer]] = []  # (rule, its second half)
        for whole_tensor_rule in dict.fromkeys(self.rules):
            if isinstance(whole_tensor_rule, WholeTensorRule):
                params = [bucket.params for bucket in self.buckets if bucket.rule is whole_tensor_rule]
                finalizer = whole_tensor_rule.make_finalizer(sync.mesh, sync.layout, params)
                self._finalizers.append((whole_tensor_rule, finalizer))

    def local_norm_sq(self) -> Tensor:
        """Return this rank's summand of the squared norm of the unscaled gradient sums, an fp64 scalar.

        NaN and inf in a gradient propagate to it.
        """
        return self._sum_once(lambda bucket: sum_of_squares(bucket.grads.owned_sums))

    def local_weight_norm_sq(self) -> Tensor:
        """Return this rank's summand of the squared norm of all parameters, an fp64 scalar."""
        return self._sum_once(lambda bucket: sum_of_squares(bucket.main))

    def local_num_zeros(self) -> Tensor:
        """Return this rank's summand of the number of gradient elements that are 0, an fp64 scalar."""

        def num_zeros(bucket: OptimizerBucket) -> Tensor:
            grads = bucket.grads
            numel = sum(
                len(grads.owned_slice(slot).span) for slot in bucket.layout.slots
            )  # without padding, which is 0
            return numel - grads.owned_sums.count_nonzero()

        return self._sum_once(num_zeros)

    def _sum_once(self, value: Callable[[OptimizerBucket], Tensor]) -> Tensor:
        """Sum a value of each bucket so that the sum over the world counts every element once."""
        total = torch.zeros((), dtype=torch.float64, device=self.sync.mesh.device)
        for bucket in self.buckets:
            total += value(bucket) / bucket.sharding.num_owners
        return total

    def step(self, *, lr: float, weight_decay: float, scale: float, decoupled_lr: float = 0.0) -> None:
        """Update the owned weights with the gradient scale * grad. The gradients are overwritten.

        Afterwards, `sync.start_param_sync()` has to gather the weights.

        Args:
            lr: learning rate.
            weight_decay: weight decay of the buckets to which it applies.
            scale: factor of the gradient sums.
            decoupled_lr: learning rate of the buckets with a decoupled one.
        """
        self.num_updates += 1
        updates = [
            bucket.update(
                lr=lr, decoupled_lr=decoupled_lr, weight_decay=weight_decay, step=self.num_updates, scale=scale
            )
            for bucket in self.buckets
        ]
        for bucket, update in zip(self.buckets, updates, strict=True):
            if not bucket.is_offloaded:
                bucket.rule.update_(update)
        self.host_updater.update_(self.rules[0], updates[: len(self.host_updater.allocations)])
        for rule, finalize in self._finalizers:
            finalize([update for bucket, update in zip(self.buckets, updates, strict=True) if bucket.rule is rule])

    def checkpoint_shards(self) -> list[TensorShard]:
        """Return this rank's part of a checkpoint, as views that loading may write to.

        The names are model/NAME, optimizer.main/NAME (unless its weights and main weights have one dtype) and
        optimizer.STATE/NAME.
        """
        sizes, coordinates = self.sync.mesh.sizes, self.sync.mesh.coordinates
        shards: list[TensorShard] = []
        for bucket in self.buckets:
            sharding = bucket.sharding
            owned_range = sharding.owned_range(bucket.layout)
            is_first_owner = sharding.outer_shard_axis.size > 1 or sharding.replicate_axis.is_first
            flats = {"model": bucket.params.owned}
            if bucket.rounds_main:
                flats["optimizer.main"] = bucket.main
            for name, flat in bucket.state.items():
                flats[f"optimizer.{name}"] = flat
            for slot in bucket.layout.slots:
                spec = self.sync.layout.entries[slot.entry].spec
                box = spec.stored_box(sizes, coordinates)
                owned = slot._replace(stop=slot.start + box.numel).overlap(owned_range)  # without vocabulary padding
                if not owned.span:
                    continue
                is_owner = is_first_owner and spec.is_first_replica(coordinates)
                for prefix, flat in flats.items():
                    name = f"{prefix}/{spec.name}"
                    shards.append(TensorShard(name, spec.stored_shape, box, owned.span, owned.select(flat), is_owner))
        return shards

    def shard_dtypes(self) -> dict[str, str]:
        """Return the prefix of the names of `checkpoint_shards` -> dtype. It is the same on all ranks.

        The dtype of the weights is that of the model, although some of them may stay in fp32.
        """
        main_dtype = self.sync.main_dtype
        model_dtype = min((bucket.params.dtype for bucket in self.buckets), key=lambda dtype: dtype.itemsize)
        dtypes = {"model": model_dtype}
        if model_dtype != main_dtype:
            dtypes["optimizer.main"] = main_dtype
        for rule in self.rules:
            for name, dtype in rule.state_dtypes.items():
                dtypes[f"optimizer.{name}"] = dtype or main_dtype
        return {prefix: str(dtype).removeprefix("torch.") for prefix, dtype in dtypes.items()}

    def sync_after_load(self, main_loaded: bool = True) -> None:
        """Make the copies of the weights agree after `checkpoint_shards` were written.

        Weights are copied from main weights, or if `main_loaded` is False main weights from weights.
        """
        for bucket in self.buckets:
            if main_loaded and bucket.rounds_main:
                bucket.params.owned.copy_(bucket.main)
            else:
                bucket.main.copy_(bucket.params.owned)  # onto itself if the main weights are the weights
        self.sync.start_param_sync()
