"""LAMB (arXiv:1904.00962) and LARS (arXiv:1708.03888): the step of each tensor in proportion to the tensor.

    LAMB   m, v, and their bias corrections as Adam;  u = m / (sqrt(v) + eps) + wd w;   w = w - lr |w| / |u| u
    LARS   v = b v + lr t |w| / (|g| + wd |w|) (g + wd w);                              w = w - v

|x| is the L2 norm of the whole tensor; where one of them is 0 the ratio is 1. Biases and norms have ratios, too, and no
decay. What is stored as one is not one tensor: keys and values have a ratio each, and so have gate and up
(parallel/spec.py: ParamSpec.tensors).

A norm is a sum over what holds parts of the tensor, so one all-reduce per step over the ranks of the stage carries all
squares of its tensors: 2 numbers in fp64 for each. Where ranks own copies each counts its part of 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.config.run_options import OptimConfig
from megalite.kernels.grad_norm import sum_of_squares
from megalite.optim.buffer import ParamBuffer
from megalite.optim.layout import Bucket
from megalite.optim.rule import Finish, Update
from megalite.parallel.comm import all_reduce_


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

    def apply_(self, u: Update, part: slice, w: Tensor, norm: Tensor) -> None:
        """To a tensor: `w` its norm, and `norm` that of u."""
        ratio = torch.where((w > 0) & (norm > 0), w / norm, 1.0)
        u.param[part].sub_(u.grad[part].mul_(ratio.to(u.grad.dtype) * u.lr))

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

    def apply_(self, u: Update, part: slice, w: Tensor, norm: Tensor) -> None:
        """To a tensor: `w` its norm, and `norm` that of the gradient."""
        ratio = torch.where((w > 0) & (norm > 0), self.trust * w / (norm + u.weight_decay * w), 1.0)
        step = u.grad[part].add_(u.param[part], alpha=u.weight_decay).mul_(ratio.to(u.grad.dtype) * u.lr)
        u.param[part].sub_(u.state["velocity"][part].mul_(self.momentum).add_(step))

    def second_half(self, buffer: ParamBuffer, buckets: Sequence[Bucket]) -> Finish:
        return _Norms(self, buffer, buckets).finish


class _Norms:
    """One rank's second half: squares of what it owns of each tensor, their sums, and the update."""

    def __init__(self, rule: Lamb | Lars, buffer: ParamBuffer, buckets: Sequence[Bucket]):
        self.rule, self.mesh, self.count = rule, buffer.mesh, 0
        self.parts: list[list[tuple[int, slice, int]]] = []  # of each bucket: tensor, where it is owned, by how many
        sizes = {**buffer.mesh.sizes, "ends": 1}  # the other end is not in the stage
        for bucket in buckets:
            shared, found = buffer.rules[bucket.kind], []
            for slot in bucket.slots:
                spec = buffer.layout.entries[slot.entry].spec
                stored = spec.stored_box(buffer.mesh.sizes, buffer.mesh.position).numel  # padding has no part in norms
                part = slot._replace(stop=slot.start + stored).part_in(shared.owned(bucket))
                copies = shared.replica.size // shared.outer.size * spec.replicas(sizes)
                first, numel = part.start - part.span.start, stored // spec.tensors
                for i in range(spec.tensors):
                    start, stop = max(part.span.start, i * numel), min(part.span.stop, (i + 1) * numel)
                    where = slice(first + start, first + stop), copies
                    found += [(self.count + i, *where)] * (start < stop)
                self.count += spec.tensors
            self.parts.append(found)

    @torch.no_grad()
    def finish(self, updates: Sequence[Update]) -> None:
        squares = torch.zeros(2, self.count, dtype=torch.float64, device=self.mesh.device)
        for u, parts in zip(updates, self.parts, strict=True):
            for tensor, part, copies in parts:
                for row, flat in zip(squares, (u.param, u.grad), strict=True):
                    row[tensor] = sum_of_squares(flat[part]) / copies
        norms = all_reduce_(squares, self.mesh.stage).sqrt_()
        for u, parts in zip(updates, self.parts, strict=True):
            for tensor, part, _ in parts:
                self.rule.apply_(u, part, *norms[:, tensor].unbind())
            if u.copy is not None:
                u.copy.copy_(u.param)
