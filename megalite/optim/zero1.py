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
from megalite.optim.buffer import ParamBuffer
from megalite.optim.host_store import HostStore
from megalite.optim.layout import Bucket
from megalite.optim.rule import Finish, Rule, Update, WholeRule
from megalite.parallel.spec import Piece


class Zero1:
    """`rule` applied to what `buffer` says this rank owns. `updates` counts the steps taken, skipped ones excluded.
    `matrix_rule`: of the buckets that are laid out as matrices. `offloaded`: the share of elements of which the host
    has main weights and states, in a mapped file of `folder` where one is given; only with one rule, which is no
    WholeRule."""

    def __init__(
        self, buffer: ParamBuffer, rule: Rule, matrix_rule: Rule | None = None, offloaded: float = 0.0,
        folder: str | None = None,
    ):  # fmt: skip
        self.buffer, self.updates = buffer, 0
        self.kept_by = rule, matrix_rule or rule
        self.rules = [self.kept_by[bucket.kind.matrix] for bucket in buffer.layout.buckets]
        self.same = buffer.weights.dtype == buffer.grads.dtype  # then main weights are the weights, or on the host
        self.host = HostStore(buffer, rule.states, offloaded, folder or "")
        self.main: list[Tensor] = []
        self.state: list[dict[str, Tensor]] = []
        for bucket, of in zip(buffer.layout.buckets, self.rules, strict=True):
            if (kept := self.host.kept.get(bucket.number)) is None:
                main = buffer.weights.owned(bucket).to(buffer.grads.dtype)  # the weights, if they have it
                kept = main, {name: torch.zeros_like(main, dtype=dtype) for name, dtype in of.states.items()}
            self.main.append(kept[0])
            self.state.append(kept[1])
        self.second_halves: list[tuple[list[int], Finish]] = []  # of a rule: the buckets that have it
        for rule in (rule for rule in dict.fromkeys(self.kept_by) if isinstance(rule, WholeRule)):
            mine = [b for b, of in enumerate(self.rules) if of is rule]
            self.second_halves.append((mine, rule.second_half(buffer, [buffer.layout.buckets[b] for b in mine])))

    def has_copy(self, bucket: Bucket) -> bool:
        """Whether the weights are a copy of the main weights."""
        return not self.same or bucket.number in self.host.kept

    def local_norm_sq(self) -> Tensor:
        """This rank's share of the squared gradient norm, fp64 scalar; unscaled sums of gradients. NaN and inf stay."""
        return self._once(sum_of_squares(self.buffer.grads.owned(b)) for b in self.buffer.layout.buckets)

    def local_weight_norm_sq(self) -> Tensor:
        """This rank's share of the squared norm of all parameters, fp64 scalar."""
        return self._once(map(sum_of_squares, self.main))

    def local_zeros(self) -> Tensor:
        """This rank's share of the number of gradient elements that are 0, fp64 scalar."""
        grads, counts = self.buffer.grads, []
        for bucket in self.buffer.layout.buckets:
            there = sum(len(grads.owned_part(slot).span) for slot in bucket.slots)
            counts.append(there - grads.owned(bucket).count_nonzero())  # the padding is 0 and no element
        return self._once(counts)

    def _once(self, of_buckets: Iterable[Tensor]) -> Tensor:
        """The sum of a figure of each bucket, such that the sum over the world counts every element once."""
        buffer = self.buffer
        total = torch.zeros((), dtype=torch.float64, device=buffer.mesh.device)
        for bucket, figure in zip(buffer.layout.buckets, of_buckets, strict=True):
            total += figure / buffer.rules[bucket.kind].copies
        return total

    def step(self, *, lr: float, weight_decay: float, scale: float, decoupled_lr: float = 0.0) -> None:
        """Update by scale * gradient; then `buffer.gather()` spreads the weights. The gradients are used up.
        `decoupled_lr`: of the buckets that are laid out so."""
        self.updates, updates = self.updates + 1, []
        for bucket, main, state in zip(self.buffer.layout.buckets, self.main, self.state, strict=True):
            decay = weight_decay if bucket.kind.decay else 0.0
            grad = self.buffer.grads.owned(bucket)
            copy = self.buffer.weights.owned(bucket) if self.has_copy(bucket) else None
            rate = decoupled_lr if bucket.kind.decoupled else lr
            updates.append(Update(main, grad, state, rate, decay, self.updates, scale, copy))
        for b, (rule, update) in enumerate(zip(self.rules, updates, strict=True)):
            if b not in self.host.kept:
                rule.update_(update)
        self.host.update_(self.kept_by[0], [updates[b] for b in self.host.kept])
        for mine, finish in self.second_halves:
            finish([updates[b] for b in mine])

    def pieces(self) -> list[Piece]:
        """Everything a checkpoint needs of this rank, as views that loading may write: names are
        model/NAME, optimizer.main/NAME (unless the weights are the main weights) and optimizer.STATE/NAME."""
        buffer, mesh = self.buffer, self.buffer.mesh
        sizes, position, result = mesh.sizes, mesh.position, []
        for b, bucket in enumerate(buffer.layout.buckets):
            rule = buffer.rules[bucket.kind]
            owned = rule.owned(bucket)
            flats = {"model": buffer.weights.owned(bucket)} | ({} if self.same else {"optimizer.main": self.main[b]})
            flats |= {f"optimizer.{name}": flat for name, flat in self.state[b].items()}
            for slot in bucket.slots:
                spec = buffer.layout.entries[slot.entry].spec
                box = spec.stored_box(sizes, position)
                part = slot._replace(stop=slot.start + box.numel).part_in(owned)  # the padding is not stored
                if not part.span:
                    continue
                mine = (rule.outer.size > 1 or rule.replica.is_first) and spec.first_copy(position)
                for prefix, flat in flats.items():
                    name, data = f"{prefix}/{spec.name}", part.of(flat)
                    result.append(Piece(name, spec.stored_shape, box, part.span, data, mine))
        return result

    def kinds(self) -> dict[str, str]:
        """The first parts of the names of `pieces` -> dtype; the same on all ranks, whatever they own."""
        weights, main = self.buffer.weights.dtype, self.buffer.grads.dtype
        kinds = {"model": weights} | ({} if self.same else {"optimizer.main": main})
        for rule in self.kept_by:
            kinds |= {f"optimizer.{name}": dtype or main for name, dtype in rule.states.items()}
        return {kind: str(dtype)[6:] for kind, dtype in kinds.items()}

    def after_load(self, main_loaded: bool = True) -> None:
        """Make the copies agree after `pieces()` were written: weights from main weights, or the other way round."""
        for bucket, main in zip(self.buffer.layout.buckets, self.main, strict=True):
            weight = self.buffer.weights.owned(bucket)  # a copy of what are the weights is one onto itself
            weight.copy_(main) if main_loaded and not self.same else main.copy_(weight)
        self.buffer.gather()
