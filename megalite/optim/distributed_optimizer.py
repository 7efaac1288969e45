"""The distributed optimizer: fp32 main weights and state of the owned parameters only (arXiv:1910.02054, stage 1).

Memory per parameter in bf16: 2 (weight) + 4 (gradient) + 12/dp_shard (main weight and two moments) bytes. If the
weights are fp32, in the entire model or in a bucket, the main weights are the owned part of the weights themselves. All
parameters of a bucket are updated in the same way (optim/layout.py), so an update is one call per bucket.

A step has two halves, with one all-reduce by the caller between them: `local_norm_sq` (of the owned elements, each
weighted by 1/num_owners, so that the sum over the world is the squared norm), then `step` with the one factor that
unscales, averages and clips.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from megalite.kernels.grad_norm import sum_of_squares
from megalite.optim.buffer import ParamAndGradBuffer
from megalite.optim.layout import Bucket
from megalite.optim.optimizer_offload import OffloadedState
from megalite.optim.update_rule import Finalizer, ParamUpdate, UpdateRule, WholeTensorRule
from megalite.parallel.spec import TensorShard


class DistributedOptimizer:
    """The optimizer of the parameters that this rank owns.

    Attributes:
        num_updates: number of updates, without skipped steps.
        main: main weights by bucket. If they have the dtype of the weights, they are the weights themselves, unless
            they are offloaded.
        state: optimizer state by bucket.
    """

    def __init__(
        self,
        buffer: ParamAndGradBuffer,
        rule: UpdateRule,
        matrix_rule: UpdateRule | None = None,
        offload_fraction: float = 0.0,
        offload_dir: str | None = None,
    ):
        """Create main weights and optimizer state.

        Args:
            buffer: the weights and gradients.
            rule: the update rule.
            matrix_rule: the rule for buckets of matrices; None: `rule`.
            offload_fraction: fraction of the elements whose main weights and state are in host memory. Only with a
                single rule that is not a WholeTensorRule.
            offload_dir: a directory for a mapped file with the offloaded state; None: it is in memory.
        """
        self.buffer = buffer
        self.num_updates = 0
        self.rules = rule, matrix_rule or rule
        self.rule_of_bucket = [self.rules[bucket.key.is_matrix] for bucket in buffer.layout.buckets]
        self.offloaded = OffloadedState(buffer, rule.state_dtypes, offload_fraction, offload_dir or "")
        self.main: list[Tensor] = []
        self.state: list[dict[str, Tensor]] = []
        for bucket, bucket_rule in zip(buffer.layout.buckets, self.rule_of_bucket, strict=True):
            if bucket.index in self.offloaded.state:
                main, state = self.offloaded.state[bucket.index]
            else:
                main = buffer.weights.owned(bucket).to(buffer.main_dtype)  # not a copy if the dtype is the same
                dtypes = bucket_rule.state_dtypes
                state = {name: torch.zeros_like(main, dtype=dtype) for name, dtype in dtypes.items()}
            self.main.append(main)
            self.state.append(state)
        self.finalizers: list[tuple[list[int], Finalizer]] = []  # (buckets of a rule, its second half)
        for whole_tensor_rule in dict.fromkeys(self.rules):
            if not isinstance(whole_tensor_rule, WholeTensorRule):
                continue
            indices = [b for b, bucket_rule in enumerate(self.rule_of_bucket) if bucket_rule is whole_tensor_rule]
            buckets = [buffer.layout.buckets[b] for b in indices]
            self.finalizers.append((indices, whole_tensor_rule.make_finalizer(buffer, buckets)))

    def rounds_main(self, bucket: Bucket) -> bool:
        """Return True if the weights are rounded main weights, so that a checkpoint has both."""
        return bucket.key.dtype != self.buffer.main_dtype

    def has_separate_main(self, bucket: Bucket) -> bool:
        """Return True if the weights are a copy of the main weights."""
        return self.rounds_main(bucket) or bucket.index in self.offloaded.state

    def local_norm_sq(self) -> Tensor:
        """Return this rank's summand of the squared norm of the unscaled gradient sums, an fp64 scalar.

        NaN and inf in a gradient propagate to it.
        """
        return self._sum_once(sum_of_squares(self.buffer.grads.owned(b)) for b in self.buffer.layout.buckets)

    def local_weight_norm_sq(self) -> Tensor:
        """Return this rank's summand of the squared norm of all parameters, an fp64 scalar."""
        return self._sum_once(map(sum_of_squares, self.main))

    def local_num_zeros(self) -> Tensor:
        """Return this rank's summand of the number of gradient elements that are 0, an fp64 scalar."""
        grads = self.buffer.grads
        counts = []
        for bucket in self.buffer.layout.buckets:
            numel = sum(len(grads.owned_slice(slot).span) for slot in bucket.slots)  # without padding, which is 0
            counts.append(numel - grads.owned(bucket).count_nonzero())
        return self._sum_once(counts)

    def _sum_once(self, values: Iterable[Tensor]) -> Tensor:
        """Sum a value for each bucket so that the sum over the world counts every element once."""
        buffer = self.buffer
        total = torch.zeros((), dtype=torch.float64, device=buffer.mesh.device)
        for bucket, value in zip(buffer.layout.buckets, values, strict=True):
            total += value / buffer.shardings[bucket.key].num_owners
        return total

    def step(self, *, lr: float, weight_decay: float, scale: float, decoupled_lr: float = 0.0) -> None:
        """Update the owned weights with the gradient scale * grad. The gradient buffer is overwritten.

        Afterwards, `buffer.start_param_sync()` has to gather the weights.

        Args:
            lr: learning rate.
            weight_decay: weight decay of the buckets to which it applies.
            scale: factor of the gradient sums.
            decoupled_lr: learning rate of the buckets with a decoupled one.
        """
        self.num_updates += 1
        updates = []
        for bucket, main, state in zip(self.buffer.layout.buckets, self.main, self.state, strict=True):
            has_separate_main = self.has_separate_main(bucket)
            updates.append(
                ParamUpdate(
                    param=main,
                    grad=self.buffer.grads.owned(bucket),
                    state=state,
                    lr=decoupled_lr if bucket.key.decoupled_lr else lr,
                    weight_decay=weight_decay if bucket.key.weight_decay else 0.0,
                    step=self.num_updates,
                    scale=scale,
                    model_param=self.buffer.weights.owned(bucket) if has_separate_main else None,
                )
            )
        for b, (rule, update) in enumerate(zip(self.rule_of_bucket, updates, strict=True)):
            if b not in self.offloaded.state:
                rule.update_(update)
        self.offloaded.update_(self.rules[0], [updates[b] for b in self.offloaded.state])
        for indices, finalize in self.finalizers:
            finalize([updates[b] for b in indices])

    def checkpoint_shards(self) -> list[TensorShard]:
        """Return this rank's part of a checkpoint, as views that loading may write to.

        The names are model/NAME, optimizer.main/NAME (unless its weights and main weights have one dtype) and
        optimizer.STATE/NAME.
        """
        buffer = self.buffer
        sizes, coordinates = buffer.mesh.sizes, buffer.mesh.coordinates
        shards: list[TensorShard] = []
        for b, bucket in enumerate(buffer.layout.buckets):
            sharding = buffer.shardings[bucket.key]
            owned_range = sharding.owned_range(bucket)
            is_first_owner = sharding.outer_shard_axis.size > 1 or sharding.replicate_axis.is_first
            flats = {"model": buffer.weights.owned(bucket)}
            if self.rounds_main(bucket):
                flats["optimizer.main"] = self.main[b]
            for name, flat in self.state[b].items():
                flats[f"optimizer.{name}"] = flat
            for slot in bucket.slots:
                spec = buffer.layout.entries[slot.entry].spec
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
        main_dtype = self.buffer.main_dtype
        model_dtype = min((bucket.key.dtype for bucket in self.buffer.layout.buckets), key=lambda dtype: dtype.itemsize)
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
        for bucket, main in zip(self.buffer.layout.buckets, self.main, strict=True):
            weight = self.buffer.weights.owned(bucket)
            if main_loaded and self.rounds_main(bucket):
                weight.copy_(main)
            else:
                main.copy_(weight)  # a copy onto itself if the main weights are the weights
        self.buffer.start_param_sync()
