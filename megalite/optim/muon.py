"""Muon: momentum, orthogonalised by Newton-Schulz (K. Jordan, 2024; at scale: arXiv:2502.16982), for matrices.

    m = b m + (1 - b) g;    u = g + b (m - g) with Nesterov's look ahead, else m          each rank, of what it owns
    o = scale * newton_schulz(u)                                                       the home of each whole matrix
    w = w (1 - lr wd) - lr o                                                              each rank, of what it owns

Queries, keys, values, gate and up are matrices of their own, since they are stored so (nn/attention.py, nn/mlp.py).
Each matrix is orthogonalised once, as a whole, by one rank of its stage, under every layout: what ranks own of it
travels there and back (exchange.py), in the precision of the matmuls. The definition is that of NVIDIA's
Emerging-Optimizers; gate and up are one matrix there. The state is one momentum.

Scales of an [m, n] matrix: spectral sqrt(max(m, n)), shape_scaling sqrt(max(1, m / n)), unit_rms_norm sqrt(m / n).
"""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megalite.config.run_options import OptimConfig
from megalite.kernels.newton_schulz import CoefficientType, coefficients, newton_schulz
from megalite.optim.buffer import ParamBuffer
from megalite.optim.exchange import Exchange, Matrix, Range, exchanges, homes_of, in_groups
from megalite.optim.layout import Bucket
from megalite.optim.rule import Finish, Update
from megalite.parallel.comm import Pending, start_all_to_all

BATCH = 1 << 26  # elements that are worked on at a time: a matrix of 8,192 x 8,192, or many small ones
SCALES: dict[str, Callable[[int, int], float]] = {
    "spectral": lambda m, n: math.sqrt(max(m, n)),
    "shape_scaling": lambda m, n: math.sqrt(max(1.0, m / n)),
    "unit_rms_norm": lambda m, n: math.sqrt(m / n),
}


@dataclass(frozen=True)
class Muon:
    """`in_bf16`: the matmuls, and what travels, where weights are kept in fp32."""

    momentum: float = 0.95
    nesterov: bool = False
    steps: int = 5
    coefficient_type: CoefficientType = "quintic"
    scale_mode: str = "spectral"
    extra_scale: float = 1.0
    in_bf16: bool = True

    @classmethod
    def of(cls, o: OptimConfig) -> "Muon":
        ways: dict[str, Any] = dict(coefficient_type=o.muon_coefficient_type, scale_mode=o.muon_scale_mode)
        ways |= dict(extra_scale=o.muon_extra_scale_factor, in_bf16=o.muon_fp32_matmul_prec == "medium")
        return cls(o.muon_momentum, o.muon_nesterov, o.muon_num_ns_steps, **ways)

    @property
    def states(self) -> dict[str, torch.dtype | None]:
        return {"momentum_buffer": None}

    @torch.no_grad()
    def update_(self, u: Update) -> None:
        moving = u.state["momentum_buffer"]
        moving.lerp_(u.grad.mul_(u.scale), 1 - self.momentum)
        u.grad.lerp_(moving, self.momentum) if self.nesterov else u.grad.copy_(moving)

    def second_half(self, buffer: ParamBuffer, buckets: Sequence[Bucket]) -> Finish:
        return _WholeMatrices(self, buffer, buckets).finish


class _WholeMatrices:
    """One rank's second half, group after group: one travels to its homes while another is worked on."""

    def __init__(self, rule: Muon, buffer: ParamBuffer, buckets: Sequence[Bucket]):
        self.rule, self.axis = rule, buffer.mesh.stage
        self.steps = coefficients(rule.coefficient_type, rule.steps)
        self.place = {bucket.number: i for i, bucket in enumerate(buckets)}  # in what `finish` gets
        sizes, rank = buffer.mesh.sizes, buffer.mesh.stage.rank
        self.matrices, self.groups = exchanges(buffer.layout, buffer.rules, sizes, rank)

    @torch.no_grad()
    def finish(self, updates: Sequence[Update]) -> None:
        coming = [self._collect(group, updates) for group in self.groups[:1]]
        leaving: list[tuple[Exchange, Pending]] = []
        for group, after in zip(self.groups, [*self.groups, None][1:], strict=True):
            coming += [self._collect(after, updates)] if after else []
            results = self._orthogonalised(group, coming.pop(0).wait())
            leaving.append((group, self._travels(results, group.returned, group.got)))
            if len(leaving) > 1:
                self._spread(*leaving.pop(0), updates)
        for last in leaving:
            self._spread(*last, updates)
        for u in updates:
            u.param.mul_(1 - u.lr * u.weight_decay).add_(u.grad, alpha=-u.lr)
            if u.copy is not None:
                u.copy.copy_(u.param)

    def _collect(self, group: Exchange, updates: Sequence[Update]) -> Pending:
        parts = [updates[self.place[r.bucket]].grad[r.start : r.stop] for ranges in group.given for r in ranges]
        grad = updates[0].grad
        dtype = torch.bfloat16 if self.rule.in_bf16 and grad.dtype == torch.float32 else grad.dtype
        given = torch.cat([part.to(dtype) for part in parts]) if parts else grad.new_empty(0, dtype=dtype)
        return self._travels(given, group.given, group.taken)

    def _travels(self, x: Tensor, away: list[list[Range]], here: list[list[Range]]) -> Pending:
        return start_all_to_all(x, _counts(away), _counts(here), self.axis)

    def _orthogonalised(self, group: Exchange, arrived: Tensor) -> Tensor:
        """Of the ranges in `group.taken`, one after the other, those in `group.returned`."""
        taken, returned = _by_matrix(group.taken), _by_matrix(group.returned)
        results = arrived.new_empty(sum(_counts(group.returned)))
        for numbers in _batches(self.matrices, taken):
            whole = arrived.new_empty(len(numbers), *self.matrices[numbers[0]])
            for one, number in zip(whole, numbers, strict=True):
                for here, at in taken[number]:
                    one[here].copy_(arrived[at].view_as(one[here]))
            for one, number in zip(newton_schulz(whole, self.steps), numbers, strict=True):
                for here, at in returned[number]:
                    results[at].view_as(one[here]).copy_(one[here])
        return results

    def _spread(self, group: Exchange, results: Pending, updates: Sequence[Update]) -> None:
        """Put what came back in the place of the gradients."""
        at, flat, rule = 0, results.wait(), self.rule
        for part in (part for ranges in group.got for part in ranges):
            grad = updates[self.place[part.bucket]].grad[part.start : part.stop]
            scale = rule.extra_scale * SCALES[rule.scale_mode](*self.matrices[part.matrix])
            grad.copy_(flat[at : at + part.box.numel]).mul_(scale)
            at += part.box.numel


def bytes_at_once(
    matrices: Sequence[Matrix], ranks: int, copies: float, size: int, work: Callable[[int, Matrix, int], int]
) -> int:
    """The most that `finish` takes, on the rank where that is most: what comes of a group and goes back of it, of the
    next what is on its way there, and of the one before on its way back. What ranks own of a group is taken as even.
    copies: ranks that own an element; size: bytes of one on its way; work(k, matrix, size): of k that are worked on."""
    homes, groups, most = homes_of(matrices, ranks), in_groups(matrices, ranks), 0.0
    owned = [sum(matrices[n].numel for n in group) / ranks * (ranks > 1) for group in groups]  # alone nothing travels
    at_home: list[list[list[int]]] = [[[] for _ in groups] for _ in range(ranks)]
    for g, number in ((g, number) for g, group in enumerate(groups) for number in group):
        at_home[homes[number]][g].append(number)
    for here in filter(any, at_home):
        found = [(0.0, 0.0, 0.0, 0)]
        for numbers, each in zip(here, owned, strict=True):
            busy = max((work(len(some), matrices[some[0]], size) for some in _batches(matrices, numbers)), default=0)
            numel = sum(matrices[n].numel for n in numbers)
            found.append((numel * (1 + copies), numel + each, (numel + each) * copies, busy))
        around = zip(found, found[1:], [*found[2:], found[0]], strict=False)
        most = max(most, *(size * (x[0] + after[1] + before[2]) + x[3] for before, x, after in around))
    return round(most)


def _batches(matrices: Sequence[Matrix], numbers: Iterable[int]) -> Iterator[list[int]]:
    """Of one shape each, of BATCH elements at most."""
    shapes: dict[Matrix, list[int]] = {}
    for number in sorted(numbers):
        shapes.setdefault(matrices[number], []).append(number)
    for one, alike in shapes.items():
        most = max(1, BATCH // one.numel)
        yield from (alike[i : i + most] for i in range(0, len(alike), most))


def _counts(ranks: Sequence[Sequence[Range]]) -> list[int]:
    """Elements to or from each rank."""
    return [sum(part.box.numel for part in ranges) for ranges in ranks]


def _by_matrix(ranks: Sequence[Sequence[Range]]) -> dict[int, list[tuple[tuple[slice, ...], slice]]]:
    """Of each matrix: its rectangles, and where each lies in all of them flat."""
    found: dict[int, list[tuple[tuple[slice, ...], slice]]] = {}
    at = 0
    for part in (part for ranges in ranks for part in ranges):
        here = tuple(map(slice, part.box.start, part.box.stop))
        found.setdefault(part.matrix, []).append((here, slice(at, at + part.box.numel)))
        at += part.box.numel
    return found
