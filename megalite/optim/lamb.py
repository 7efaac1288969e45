"""LAMB (arXiv:1904.00962) and LARS (arXiv:1708.03888): the step of each tensor is proportional to the tensor's norm.

    LAMB   m, v, and their bias corrections as Adam;  u = m / (sqrt(v) + eps) + wd w;   w = w - lr |w| / |u| u
    LARS   v = b v + lr t |w| / (|g| + wd |w|) (g + wd w);                              w = w - v

|x| is the L2 norm of the full tensor. If one of the norms is 0, the ratio is 1. Biases and norm weights also have a
ratio, but no weight decay. A parameter may consist of several tensors: keys and values have a ratio each, and so do
gate, up and down of each expert (parallel/spec.py: ParamSpec.batch_shape).

A norm is a sum over the ranks that own parts of the tensor. So one all-reduce per step over the ranks of the stage sums
the squares of all its tensors, two fp64 numbers for each. Squares of elements that several ranks own are divided by the
number of these ranks.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.config.run_options import OptimConfig
from megalite.kernels.grad_norm import sums_of_squares
from megalite.optim.update_rule import Finalizer, ParamUpdate
from megalite.optim.zero.layout import BufferLayout
from megalite.optim.zero.param_bucket import ParamBucket
from megalite.parallel.comm import all_reduce_
from megalite.parallel.mesh import Mesh
from megalite.parallel.spec import Box, ParamSpec, flat_offset


@dataclass(frozen=True)
class _TensorSlice:
    """The owned elements of consecutive tensors of one parameter: all elements of several tensors, or a range of one.

    Attributes:
        tensor_ids: indices of the tensors among all tensors of the stage.
        start, stop: range of the elements in the owned part of the bucket.
        num_owners: number of ranks of the stage that own the same elements.
    """

    tensor_ids: range
    start: int
    stop: int
    num_owners: int

    def rows(self, owned: Tensor) -> Tensor:
        """Return the view [tensors, elements of each] of the owned part of the bucket."""
        return owned[self.start : self.stop].view(len(self.tensor_ids), -1)


@dataclass(frozen=True)
class Lamb:
    """LAMB."""

    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6

    @classmethod
    def from_config(cls, config: OptimConfig) -> "Lamb":
        """Return the rule with the options of a run."""
        return cls((config.adam_beta1, config.adam_beta2), config.adam_eps)

    @property
    def state_dtypes(self) -> dict[str, torch.dtype | None]:
        """The dtypes of the moments."""
        return {"exp_avg": None, "exp_avg_sq": None}

    @torch.no_grad()
    def update_(self, update: ParamUpdate) -> None:
        """Update the moments and replace the gradient by u."""
        beta1, beta2 = self.betas
        exp_avg, exp_avg_sq = update.state["exp_avg"], update.state["exp_avg_sq"]
        grad = update.grad.mul_(update.scale)
        exp_avg.lerp_(grad, 1 - beta1)
        exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        torch.div(exp_avg_sq, 1 - beta2**update.step, out=grad).sqrt_().add_(self.eps)
        torch.div(exp_avg, grad, out=grad).div_(1 - beta1**update.step).add_(update.param, alpha=update.weight_decay)

    def apply_(self, update: ParamUpdate, tensors: _TensorSlice, weight_norm: Tensor, update_norm: Tensor) -> None:
        """Update the weights of some tensors; the norms of weights and u are [tensors, 1]."""
        ratio = torch.where((weight_norm > 0) & (update_norm > 0), weight_norm / update_norm, 1.0)
        step = tensors.rows(update.grad).mul_(ratio.to(update.grad.dtype) * update.lr)
        tensors.rows(update.param).sub_(step)

    def make_finalizer(self, mesh: Mesh, layout: BufferLayout, buckets: Sequence[ParamBucket]) -> Finalizer:
        """Return the second half of the update."""
        return _TrustRatios(self, mesh, layout, buckets).finish


@dataclass(frozen=True)
class Lars:
    """LARS; `trust_coefficient` is t above, and eta in the paper."""

    momentum: float = 0.9
    trust_coefficient: float = 0.001

    @classmethod
    def from_config(cls, config: OptimConfig) -> "Lars":
        """Return the rule with the options of a run."""
        return cls(config.sgd_momentum, config.lars_trust_coefficient)

    @property
    def state_dtypes(self) -> dict[str, torch.dtype | None]:
        """The dtype of the velocity."""
        return {"velocity": None}

    @torch.no_grad()
    def update_(self, update: ParamUpdate) -> None:
        """Scale the gradient."""
        update.grad.mul_(update.scale)

    def apply_(self, update: ParamUpdate, tensors: _TensorSlice, weight_norm: Tensor, grad_norm: Tensor) -> None:
        """Update weights and velocity of some tensors; the norms of weights and gradients are [tensors, 1]."""
        ratio = torch.where(
            (weight_norm > 0) & (grad_norm > 0),
            self.trust_coefficient * weight_norm / (grad_norm + update.weight_decay * weight_norm),
            1.0,
        )
        param, grad, velocity = map(tensors.rows, (update.param, update.grad, update.state["velocity"]))
        step = grad.add_(param, alpha=update.weight_decay).mul_(ratio.to(grad.dtype) * update.lr)
        param.sub_(velocity.mul_(self.momentum).add_(step))

    def make_finalizer(self, mesh: Mesh, layout: BufferLayout, buckets: Sequence[ParamBucket]) -> Finalizer:
        """Return the second half of the update."""
        return _TrustRatios(self, mesh, layout, buckets).finish


class _TrustRatios:
    """The second half of the update on one rank: the norms of all tensors, and the update of the owned parts."""

    def __init__(self, rule: Lamb | Lars, mesh: Mesh, layout: BufferLayout, buckets: Sequence[ParamBucket]):
        self.rule = rule
        self.mesh = mesh
        self.num_tensors = 0
        self.slices: list[list[_TensorSlice]] = []  # by bucket
        sizes = {**mesh.sizes, "tied_embedding": 1}  # the other copy of a tied parameter is in another stage
        for bucket in buckets:
            sharding = bucket.sharding
            bucket_slices: list[_TensorSlice] = []
            for slot in bucket.layout.slots:
                spec = layout.entries[slot.entry].spec
                box = spec.stored_box(mesh.sizes, mesh.coordinates)  # padding is not part of a norm
                owned = slot._replace(stop=slot.start + box.numel).overlap(sharding.owned_range(bucket.layout))
                num_owners = sharding.replicate_axis.size // sharding.outer_shard_axis.size * spec.num_replicas(sizes)
                offset = owned.start - owned.span.start
                for indices, start, stop in _tensors_in(spec, box, owned.span):
                    tensor_ids = range(self.num_tensors + indices.start, self.num_tensors + indices.stop)
                    bucket_slices.append(_TensorSlice(tensor_ids, offset + start, offset + stop, num_owners))
                self.num_tensors += math.prod(spec.batch_shape)
            self.slices.append(bucket_slices)

    @torch.no_grad()
    def finish(self, updates: Sequence[ParamUpdate]) -> None:
        """Update the weights. Collective over the stage."""
        squares = torch.zeros(2, self.num_tensors, dtype=torch.float64, device=self.mesh.device)  # of param, grad
        for update, slices in zip(updates, self.slices, strict=True):
            for tensors in slices:
                first, last = tensors.tensor_ids.start, tensors.tensor_ids.stop
                for row, flat in zip(squares, (update.param, update.grad), strict=True):
                    row[first:last] = sums_of_squares(tensors.rows(flat)) / tensors.num_owners
        norms = all_reduce_(squares, self.mesh.dp_cp_tp).sqrt_()
        for update, slices in zip(updates, self.slices, strict=True):
            for tensors in slices:
                first, last = tensors.tensor_ids.start, tensors.tensor_ids.stop
                weight_norm, grad_norm = norms[:, first:last].unsqueeze(-1).unbind()
                self.rule.apply_(update, tensors, weight_norm, grad_norm)
            if update.model_param is not None:
                update.model_param.copy_(update.param)


def _tensors_in(spec: ParamSpec, box: Box, span: range) -> Iterator[tuple[range, int, int]]:
    """Yield the tensors with elements in `span` of the flattened `box`, as (indices, start, stop).

    `indices` are those of the tensors within the parameter, `start` and `stop` the range of their elements in the box.
    Consecutive complete tensors are yielded together. Of the dims that count tensors, only the first may be sharded.
    """
    num_dims = len(spec.batch_shape)
    numel = math.prod(box.shape[num_dims:])
    first = flat_offset(Box((0,) * num_dims, spec.batch_shape), box.start[:num_dims])
    start = span.start
    while start < span.stop:
        index, offset = divmod(start, numel)
        count = 1 if offset else max(1, (span.stop - start) // numel)
        stop = min(span.stop, (index + count) * numel)
        yield range(first + index, first + index + count), start, stop
        start = stop
