"""The distributed optimizer: main weights and states in fp32 for what this rank owns (arXiv:1910.02054, stage 1).

Memory per parameter in bf16: 2 (weight) + 4 (gradient) + 12/shard (main weight and two moments) bytes. When the weights
are fp32 already, the main weights are the owned part of the weights themselves. Everything in a bucket is of one
kind (optim/layout.py), so an update is one call per bucket.

The step is in two halves with the caller's one all-reduce between them: `local_norm_sq` (what this rank owns, each
element weighted by 1/replicas, so that the sum over the world is the true squared norm), then `step` with the one
factor that unscales, averages and clips.
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
    """`rule` applied to what `buffer` says this rank owns. `updates` counts the steps taken, skipped ones excluded.
    `matrix_rule`: of the buckets that are laid out as matrices. `offloaded`: the share of elements of which the host
    has main weights and states, in a mapped file of `folder` where one is given; only with one rule, which is no
    WholeRule."""

    def __init__(
        self, buffer: ParamAndGradBuffer, rule: UpdateRule, matrix_rule: UpdateRule | None = None, offloaded: float = 0.0,
        folder: str | None = None,
    ):  # fmt: skip
        self.buffer, self.num_updates = buffer, 0
        self.rules = rule, matrix_rule or rule
        self.rule_of_bucket = [self.rules[bucket.key.is_matrix] for bucket in buffer.layout.buckets]
        self.main_is_model = (
            buffer.weights.dtype == buffer.grads.dtype
        )  # then main weights are the weights, or on the host
        self.offloaded = OffloadedState(buffer, rule.state_dtypes, offloaded, folder or "")
        self.main: list[Tensor] = []
        self.state: list[dict[str, Tensor]] = []
        for bucket, rule in zip(buffer.layout.buckets, self.rule_of_bucket, strict=True):
            if (kept := self.offloaded.state.get(bucket.index)) is None:
                main = buffer.weights.owned(bucket).to(buffer.grads.dtype)  # the weights, if they have it
                kept = main, {name: torch.zeros_like(main, dtype=dtype) for name, dtype in rule.state_dtypes.items()}
            self.main.append(kept[0])
            self.state.append(kept[1])
        self.finalizers: list[tuple[list[int], Finalizer]] = []  # of a rule: the buckets that have it
        for rule in (rule for rule in dict.fromkeys(self.rules) if isinstance(rule, WholeTensorRule)):
            is_owner = [b for b, of in enumerate(self.rule_of_bucket) if of is rule]
            self.finalizers.append(
                (is_owner, rule.make_finalizer(buffer, [buffer.layout.buckets[b] for b in is_owner]))
            )

    def has_separate_main(self, bucket: Bucket) -> bool:
        """Whether the weights are a copy of the main weights."""
        return not self.main_is_model or bucket.index in self.offloaded.state

    def local_norm_sq(self) -> Tensor:
        """This rank's share of the squared gradient norm, fp64 scalar; unscaled sums of gradients. NaN and inf stay."""
        return self._sum_once(sum_of_squares(self.buffer.grads.owned(b)) for b in self.buffer.layout.buckets)

    def local_weight_norm_sq(self) -> Tensor:
        """This rank's share of the squared norm of all parameters, fp64 scalar."""
        return self._sum_once(map(sum_of_squares, self.main))

    def local_num_zeros(self) -> Tensor:
        """This rank's share of the number of gradient elements that are 0, fp64 scalar."""
        grads, counts = self.buffer.grads, []
        for bucket in self.buffer.layout.buckets:
            there = sum(len(grads.owned_slice(slot).span) for slot in bucket.slots)
            counts.append(there - grads.owned(bucket).count_nonzero())  # the padding is 0 and no element
        return self._sum_once(counts)

    def _sum_once(self, of_buckets: Iterable[Tensor]) -> Tensor:
        """The sum of a figure of each bucket, such that the sum over the world counts every element once."""
        buffer = self.buffer
        total = torch.zeros((), dtype=torch.float64, device=buffer.mesh.device)
        for bucket, figure in zip(buffer.layout.buckets, of_buckets, strict=True):
            total += figure / buffer.shardings[bucket.key].num_owners
        return total

    def step(self, *, lr: float, weight_decay: float, scale: float, decoupled_lr: float = 0.0) -> None:
        """Update by scale * gradient; then `buffer.start_param_sync()` spreads the weights. The gradients are used up.
        `decoupled_lr`: of the buckets that are laid out so."""
        self.num_updates, updates = self.num_updates + 1, []
        for bucket, main, state in zip(self.buffer.layout.buckets, self.main, self.state, strict=True):
            decay = weight_decay if bucket.key.weight_decay else 0.0
            grad = self.buffer.grads.owned(bucket)
            copy = self.buffer.weights.owned(bucket) if self.has_separate_main(bucket) else None
            rate = decoupled_lr if bucket.key.decoupled_lr else lr
            updates.append(ParamUpdate(main, grad, state, rate, decay, self.num_updates, scale, copy))
        for b, (rule, update) in enumerate(zip(self.rule_of_bucket, updates, strict=True)):
            if b not in self.offloaded.state:
                rule.update_(update)
        self.offloaded.update_(self.rules[0], [updates[b] for b in self.offloaded.state])
        for is_owner, finish in self.finalizers:
            finish([updates[b] for b in is_owner])

    def checkpoint_shards(self) -> list[TensorShard]:
        """Everything a checkpoint needs of this rank, as views that loading may write: names are
        model/NAME, optimizer.main/NAME (unless the weights are the main weights) and optimizer.STATE/NAME."""
        buffer, mesh = self.buffer, self.buffer.mesh
        sizes, position, result = mesh.sizes, mesh.coordinates, []
        for b, bucket in enumerate(buffer.layout.buckets):
            rule = buffer.shardings[bucket.key]
            owned = rule.owned_range(bucket)
            flats = {"model": buffer.weights.owned(bucket)} | (
                {} if self.main_is_model else {"optimizer.main": self.main[b]}
            )
            flats |= {f"optimizer.{name}": flat for name, flat in self.state[b].items()}
            for slot in bucket.slots:
                spec = buffer.layout.entries[slot.entry].spec
                box = spec.stored_box(sizes, position)
                part = slot._replace(stop=slot.start + box.numel).overlap(owned)  # the padding is not stored
                if not part.span:
                    continue
                is_owner = (rule.outer_shard_axis.size > 1 or rule.replicate_axis.is_first) and spec.is_first_replica(
                    position
                )
                for prefix, flat in flats.items():
                    name, data = f"{prefix}/{spec.name}", part.select(flat)
                    result.append(TensorShard(name, spec.stored_shape, box, part.span, data, is_owner))
        return result

    def shard_dtypes(self) -> dict[str, str]:
        """The first parts of the names of `pieces` -> dtype; the same on all ranks, whatever they own."""
        weights, main = self.buffer.weights.dtype, self.buffer.grads.dtype
        shard_dtypes = {"model": weights} | ({} if self.main_is_model else {"optimizer.main": main})
        for rule in self.rules:
            shard_dtypes |= {f"optimizer.{name}": dtype or main for name, dtype in rule.state_dtypes.items()}
        return {kind: str(dtype)[6:] for kind, dtype in shard_dtypes.items()}

    def sync_after_load(self, main_loaded: bool = True) -> None:
        """Make the copies agree after `pieces()` were written: weights from main weights, or the other way round."""
        for bucket, main in zip(self.buffer.layout.buckets, self.main, strict=True):
            weight = self.buffer.weights.owned(bucket)  # a copy of what are the weights is one onto itself
            weight.copy_(main) if main_loaded and not self.main_is_model else main.copy_(weight)
        self.buffer.start_param_sync()
