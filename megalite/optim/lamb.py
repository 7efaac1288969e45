"""LAMB (arXiv:1904.00962) and LARS (arXiv:1708.03888): the step of each tensor in proportion to the tensor.

    LAMB   m, v, and their bias corrections as Adam;  u = m / (sqrt(v) + eps) + wd w;   w = w - lr |w| / |u| u
    LARS   v = b v + lr t |w| / (|g| + wd |w|) (g + wd w);                              w = w - v

|x| is the L2 norm of the whole tensor; where one of them is 0 the ratio is 1. Biases and norms have ratios, too, and no
decay. What is stored as one is not one tensor: keys and values have a ratio each, and so have gate, up and down of each
expert (parallel/spec.py: ParamSpec.batch_shape).

A norm is a sum over what holds parts of the tensor, so one all-reduce per step over the ranks of the stage carries all
squares of its tensors: 2 numbers in fp64 for each. Where ranks own copies each counts its part of 1.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from megalite.config.run_options import OptimConfig
from megalite.kernels.grad_norm import sums_of_squares
from megalite.optim.buffer import ParamAndGradBuffer
from megalite.optim.layout import Bucket
from megalite.optim.update_rule import Finalizer, ParamUpdate
from megalite.parallel.comm import all_reduce_
from megalite.parallel.spec import Box, ParamSpec, flat_offset


class _Part(NamedTuple):
    """What a rank owns of `count` tensors of one parameter, which follow each other in a bucket: all of several, or
    a range of one.

    numbers      of the tensors, among all of the stage
    start, stop  of what this rank owns of the bucket
    copies       how many ranks of the stage own the same
    """

    numbers: range
    start: int
    stop: int
    copies: int

    def rows(self, owned: Tensor) -> Tensor:
        """[tensors, elements of each], a view."""
        return owned[self.start : self.stop].view(len(self.numbers), -1)


@dataclass(frozen=True)
class Lamb:
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6

    @classmethod
    def from_config(cls, o: OptimConfig) -> "Lamb":
        return cls((o.adam_beta1, o.adam_beta2), o.adam_eps)

    @property
    def state_dtypes(self) -> dict[str, torch.dtype | None]:
        return {"exp_avg": None, "exp_avg_sq": None}

    @torch.no_grad()
    def update_(self, update: ParamUpdate) -> None:
        """The gradient becomes u."""
        (b1, b2), first, second = self.betas, update.state["exp_avg"], update.state["exp_avg_sq"]
        grad = update.grad.mul_(update.scale)
        first.lerp_(grad, 1 - b1)
        second.mul_(b2).addcmul_(grad, grad, value=1 - b2)
        torch.div(second, 1 - b2**update.step, out=grad).sqrt_().add_(self.eps)
        torch.div(first, grad, out=grad).div_(1 - b1**update.step).add_(update.param, alpha=update.weight_decay)

    def apply_(self, update: ParamUpdate, part: _Part, weight_norm: Tensor, norm: Tensor) -> None:
        """To some tensors: `w` their norms, and `norm` those of u."""
        ratio = torch.where((weight_norm > 0) & (norm > 0), weight_norm / norm, 1.0)
        part.rows(update.param).sub_(part.rows(update.grad).mul_(ratio.to(update.grad.dtype) * update.lr))

    def make_finalizer(self, buffer: ParamAndGradBuffer, buckets: Sequence[Bucket]) -> Finalizer:
        return _TrustRatios(self, buffer, buckets).finish


@dataclass(frozen=True)
class Lars:
    """`trust`: the coefficient t, eta in the paper."""

    momentum: float = 0.9
    trust_coefficient: float = 0.001

    @classmethod
    def from_config(cls, o: OptimConfig) -> "Lars":
        return cls(o.sgd_momentum, o.lars_trust_coefficient)

    @property
    def state_dtypes(self) -> dict[str, torch.dtype | None]:
        return {"velocity": None}

    @torch.no_grad()
    def update_(self, update: ParamUpdate) -> None:
        update.grad.mul_(update.scale)

    def apply_(self, update: ParamUpdate, part: _Part, weight_norm: Tensor, norm: Tensor) -> None:
        """To some tensors: `w` their norms, and `norm` those of the gradient."""
        ratio = torch.where(
            (weight_norm > 0) & (norm > 0),
            self.trust_coefficient * weight_norm / (norm + update.weight_decay * weight_norm),
            1.0,
        )
        param, grad, velocity = map(part.rows, (update.param, update.grad, update.state["velocity"]))
        step = grad.add_(param, alpha=update.weight_decay).mul_(ratio.to(grad.dtype) * update.lr)
        param.sub_(velocity.mul_(self.momentum).add_(step))

    def make_finalizer(self, buffer: ParamAndGradBuffer, buckets: Sequence[Bucket]) -> Finalizer:
        return _TrustRatios(self, buffer, buckets).finish


class _TrustRatios:
    """One rank's second half: squares of what it owns of each tensor, their sums, and the update."""

    def __init__(self, update_rule: Lamb | Lars, buffer: ParamAndGradBuffer, buckets: Sequence[Bucket]):
        self.rule, self.mesh, self.num_tensors = update_rule, buffer.mesh, 0
        self.slices: list[list[_Part]] = []  # of each bucket
        sizes = {**buffer.mesh.sizes, "tied_embedding": 1}  # the other end is not in the stage
        for bucket in buckets:
            sharding, tensor_slices = buffer.shardings[bucket.key], []
            for slot in bucket.slots:
                spec = buffer.layout.entries[slot.entry].spec
                box = spec.stored_box(buffer.mesh.sizes, buffer.mesh.coordinates)  # padding has no part in norms
                part = slot._replace(stop=slot.start + box.numel).overlap(sharding.owned_range(bucket))
                copies = sharding.replicate_axis.size // sharding.outer_shard_axis.size * spec.num_replicas(sizes)
                for numbers, start, stop in _tensors_in(spec, box, part.span):
                    first = part.start - part.span.start
                    numbers = range(self.num_tensors + numbers.start, self.num_tensors + numbers.stop)
                    tensor_slices.append(_Part(numbers, first + start, first + stop, copies))
                self.num_tensors += math.prod(spec.batch_shape)
            self.slices.append(tensor_slices)

    @torch.no_grad()
    def finish(self, updates: Sequence[ParamUpdate]) -> None:
        squares = torch.zeros(2, self.num_tensors, dtype=torch.float64, device=self.mesh.device)
        for update, slices in zip(updates, self.slices, strict=True):
            for part in slices:
                for row, flat in zip(squares, (update.param, update.grad), strict=True):
                    row[part.numbers.start : part.numbers.stop] = sums_of_squares(part.rows(flat)) / part.copies
        norms = all_reduce_(squares, self.mesh.dp_cp_tp).sqrt_()
        for update, slices in zip(updates, self.slices, strict=True):
            for part in slices:
                self.rule.apply_(update, part, *norms[:, part.numbers.start : part.numbers.stop].unsqueeze(-1).unbind())
            if update.model_param is not None:
                update.model_param.copy_(update.param)


def _tensors_in(spec: ParamSpec, box: Box, span: range) -> Iterator[tuple[range, int, int]]:
    """The tensors of which elements lie in `span` of the flattened `box`: their numbers within the parameter, and where
    in the box these elements begin and end. Whole tensors that follow each other come at once.

    Of the dims that count tensors, only the first is sharded.
    """
    dims = len(spec.batch_shape)
    numel = math.prod(box.shape[dims:])
    first = flat_offset(Box((0,) * dims, spec.batch_shape), box.start[:dims])
    start = span.start
    while start < span.stop:
        number, before = divmod(start, numel)
        count = 1 if before else max(1, (span.stop - start) // numel)
        stop = min(span.stop, (number + count) * numel)
        yield range(first + number, first + number + count), start, stop
        start = stop
