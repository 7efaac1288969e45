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
from megalite.optim.buffer import ParamBuffer
from megalite.optim.layout import Bucket
from megalite.optim.rule import Finish, Update
from megalite.parallel.comm import all_reduce_
from megalite.parallel.spec import Box, ParamSpec, offset_in


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
    def of(cls, o: OptimConfig) -> "Lamb":
        return cls((o.adam_beta1, o.adam_beta2), o.adam_eps)

    @property
    def states(self) -> dict[str, torch.dtype | None]:
        return {"exp_avg": None, "exp_avg_sq": None}

    @torch.no_grad()
    def update_(self, u: Update) -> None:
        """The gradient becomes u."""
        (b1, b2), first, second = self.betas, u.state["exp_avg"], u.state["exp_avg_sq"]
        grad = u.grad.mul_(u.scale)
        first.lerp_(grad, 1 - b1)
        second.mul_(b2).addcmul_(grad, grad, value=1 - b2)
        torch.div(second, 1 - b2**u.step, out=grad).sqrt_().add_(self.eps)
        torch.div(first, grad, out=grad).div_(1 - b1**u.step).add_(u.param, alpha=u.weight_decay)

    def apply_(self, u: Update, part: _Part, w: Tensor, norm: Tensor) -> None:
        """To some tensors: `w` their norms, and `norm` those of u."""
        ratio = torch.where((w > 0) & (norm > 0), w / norm, 1.0)
        part.rows(u.param).sub_(part.rows(u.grad).mul_(ratio.to(u.grad.dtype) * u.lr))

    def second_half(self, buffer: ParamBuffer, buckets: Sequence[Bucket]) -> Finish:
        return _Norms(self, buffer, buckets).finish


@dataclass(frozen=True)
class Lars:
    """`trust`: the coefficient t, eta in the paper."""

    momentum: float = 0.9
    trust: float = 0.001

    @classmethod
    def of(cls, o: OptimConfig) -> "Lars":
        return cls(o.sgd_momentum, o.lars_trust_coefficient)

    @property
    def states(self) -> dict[str, torch.dtype | None]:
        return {"velocity": None}

    @torch.no_grad()
    def update_(self, u: Update) -> None:
        u.grad.mul_(u.scale)

    def apply_(self, u: Update, part: _Part, w: Tensor, norm: Tensor) -> None:
        """To some tensors: `w` their norms, and `norm` those of the gradient."""
        ratio = torch.where((w > 0) & (norm > 0), self.trust * w / (norm + u.weight_decay * w), 1.0)
        param, grad, velocity = map(part.rows, (u.param, u.grad, u.state["velocity"]))
        step = grad.add_(param, alpha=u.weight_decay).mul_(ratio.to(grad.dtype) * u.lr)
        param.sub_(velocity.mul_(self.momentum).add_(step))

    def second_half(self, buffer: ParamBuffer, buckets: Sequence[Bucket]) -> Finish:
        return _Norms(self, buffer, buckets).finish


class _Norms:
    """One rank's second half: squares of what it owns of each tensor, their sums, and the update."""

    def __init__(self, rule: Lamb | Lars, buffer: ParamBuffer, buckets: Sequence[Bucket]):
        self.rule, self.mesh, self.count = rule, buffer.mesh, 0
        self.parts: list[list[_Part]] = []  # of each bucket
        sizes = {**buffer.mesh.sizes, "ends": 1}  # the other end is not in the stage
        for bucket in buckets:
            shared, found = buffer.rules[bucket.kind], []
            for slot in bucket.slots:
                spec = buffer.layout.entries[slot.entry].spec
                box = spec.stored_box(buffer.mesh.sizes, buffer.mesh.position)  # padding has no part in norms
                part = slot._replace(stop=slot.start + box.numel).part_in(shared.owned(bucket))
                copies = shared.replica.size // shared.outer.size * spec.replicas(sizes)
                for numbers, start, stop in _tensors_in(spec, box, part.span):
                    first = part.start - part.span.start
                    numbers = range(self.count + numbers.start, self.count + numbers.stop)
                    found.append(_Part(numbers, first + start, first + stop, copies))
                self.count += math.prod(spec.batch_shape)
            self.parts.append(found)

    @torch.no_grad()
    def finish(self, updates: Sequence[Update]) -> None:
        squares = torch.zeros(2, self.count, dtype=torch.float64, device=self.mesh.device)
        for u, parts in zip(updates, self.parts, strict=True):
            for part in parts:
                for row, flat in zip(squares, (u.param, u.grad), strict=True):
                    row[part.numbers.start : part.numbers.stop] = sums_of_squares(part.rows(flat)) / part.copies
        norms = all_reduce_(squares, self.mesh.stage).sqrt_()
        for u, parts in zip(updates, self.parts, strict=True):
            for part in parts:
                self.rule.apply_(u, part, *norms[:, part.numbers.start : part.numbers.stop].unsqueeze(-1).unbind())
            if u.copy is not None:
                u.copy.copy_(u.param)


def _tensors_in(spec: ParamSpec, box: Box, span: range) -> Iterator[tuple[range, int, int]]:
    """The tensors of which elements lie in `span` of the flattened `box`: their numbers within the parameter, and where
    in the box these elements begin and end. Whole tensors that follow each other come at once.

    Of the dims that count tensors, only the first is sharded.
    """
    dims = len(spec.batch_shape)
    numel = math.prod(box.shape[dims:])
    first = offset_in(Box((0,) * dims, spec.batch_shape), box.start[:dims])
    start = span.start
    while start < span.stop:
        number, before = divmod(start, numel)
        count = 1 if before else max(1, (span.stop - start) // numel)
        stop = min(span.stop, (number + count) * numel)
        yield range(first + number, first + number + count), start, stop
        start = stop
