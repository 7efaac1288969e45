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
from megalite.optim.buffer import ParamAndGradBuffer
from megalite.optim.layout import Bucket
from megalite.optim.matrix_exchange import (
    GroupExchange,
    MatrixShape,
    MatrixShard,
    assign_owners,
    build_exchanges,
    group_matrices,
)
from megalite.optim.update_rule import Finalizer, ParamUpdate
from megalite.parallel.comm import Pending, start_all_to_all

BATCH_NUMEL = 1 << 26  # elements that are worked on at a time: a matrix of 8,192 x 8,192, or many small ones
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
    def from_config(cls, o: OptimConfig) -> "Muon":
        ways: dict[str, Any] = dict(coefficient_type=o.muon_coefficient_type, scale_mode=o.muon_scale_mode)
        ways |= dict(extra_scale=o.muon_extra_scale_factor, in_bf16=o.muon_fp32_matmul_prec == "medium")
        return cls(o.muon_momentum, o.muon_nesterov, o.muon_num_ns_steps, **ways)

    @property
    def state_dtypes(self) -> dict[str, torch.dtype | None]:
        return {"momentum_buffer": None}

    @torch.no_grad()
    def update_(self, update: ParamUpdate) -> None:
        momentum_buffer = update.state["momentum_buffer"]
        momentum_buffer.lerp_(update.grad.mul_(update.scale), 1 - self.momentum)
        update.grad.lerp_(momentum_buffer, self.momentum) if self.nesterov else update.grad.copy_(momentum_buffer)

    def make_finalizer(self, buffer: ParamAndGradBuffer, buckets: Sequence[Bucket]) -> Finalizer:
        return _DistributedNewtonSchulz(self, buffer, buckets).finalize


class _DistributedNewtonSchulz:
    """One rank's second half, group after group: one travels to its homes while another is worked on."""

    def __init__(self, rule: Muon, buffer: ParamAndGradBuffer, buckets: Sequence[Bucket]):
        self.rule, self.axis = rule, buffer.mesh.dp_cp_tp
        self.steps = coefficients(rule.coefficient_type, rule.steps)
        self.index_of_bucket = {bucket.index: i for i, bucket in enumerate(buckets)}  # in what `finish` gets
        sizes, rank = buffer.mesh.sizes, buffer.mesh.dp_cp_tp.rank
        self.matrices, self.groups = build_exchanges(buffer.layout, buffer.shardings, sizes, rank)

    @torch.no_grad()
    def finalize(self, updates: Sequence[ParamUpdate]) -> None:
        incoming = [self._send_momentum(group, updates) for group in self.groups[:1]]
        outgoing: list[tuple[GroupExchange, Pending]] = []
        for group, after in zip(self.groups, [*self.groups, None][1:], strict=True):
            incoming += [self._send_momentum(after, updates)] if after else []
            results = self._orthogonalize(group, incoming.pop(0).wait())
            outgoing.append((group, self._start_exchange(results, group.send_back, group.receive_back)))
            if len(outgoing) > 1:
                self._scatter_updates(*outgoing.pop(0), updates)
        for last in outgoing:
            self._scatter_updates(*last, updates)
        for u in updates:
            u.param.mul_(1 - u.lr * u.weight_decay).add_(u.grad, alpha=-u.lr)
            if u.model_param is not None:
                u.model_param.copy_(u.param)

    def _send_momentum(self, group: GroupExchange, updates: Sequence[ParamUpdate]) -> Pending:
        parts = [
            updates[self.index_of_bucket[r.bucket]].grad[r.start : r.stop] for ranges in group.send for r in ranges
        ]
        grad = updates[0].grad
        dtype = torch.bfloat16 if self.rule.in_bf16 and grad.dtype == torch.float32 else grad.dtype
        given = torch.cat([part.to(dtype) for part in parts]) if parts else grad.new_empty(0, dtype=dtype)
        return self._start_exchange(given, group.send, group.receive)

    def _start_exchange(self, x: Tensor, send: list[list[MatrixShard]], receive: list[list[MatrixShard]]) -> Pending:
        return start_all_to_all(x, _counts(send), _counts(receive), self.axis)

    def _orthogonalize(self, group: GroupExchange, arrived: Tensor) -> Tensor:
        """Of the ranges in `group.taken`, one after the other, those in `group.returned`."""
        taken, returned = _slices_by_matrix(group.receive), _slices_by_matrix(group.send_back)
        results = arrived.new_empty(sum(_counts(group.send_back)))
        for numbers in _batches(self.matrices, taken):
            whole = arrived.new_empty(len(numbers), *self.matrices[numbers[0]])
            for one, number in zip(whole, numbers, strict=True):
                for receive, at in taken[number]:
                    one[receive].copy_(arrived[at].view_as(one[receive]))
            for one, number in zip(newton_schulz(whole, self.steps), numbers, strict=True):
                for receive, at in returned[number]:
                    results[at].view_as(one[receive]).copy_(one[receive])
        return results

    def _scatter_updates(self, group: GroupExchange, results: Pending, updates: Sequence[ParamUpdate]) -> None:
        """Put what came back in the place of the gradients."""
        at, flat, rule = 0, results.wait(), self.rule
        for part in (part for ranges in group.receive_back for part in ranges):
            grad = updates[self.index_of_bucket[part.bucket]].grad[part.start : part.stop]
            scale = rule.extra_scale * SCALES[rule.scale_mode](*self.matrices[part.matrix])
            grad.copy_(flat[at : at + part.box.numel]).mul_(scale)
            at += part.box.numel


def peak_bytes(
    matrices: Sequence[MatrixShape], ranks: int, copies: float, size: int, work: Callable[[int, MatrixShape, int], int]
) -> int:
    """The most that `finish` takes, on the rank where that is most: what comes of a group and goes back of it, of the
    next what is on its way there, and of the one before on its way back. What ranks own of a group is taken as even.
    copies: ranks that own an element; size: bytes of one on its way; work(k, matrix, size): of k that are worked on."""
    homes, groups, most = assign_owners(matrices, ranks), group_matrices(matrices, ranks), 0.0
    owned = [sum(matrices[n].numel for n in group) / ranks * (ranks > 1) for group in groups]  # alone nothing travels
    at_home: list[list[list[int]]] = [[[] for _ in groups] for _ in range(ranks)]
    for g, number in ((g, number) for g, group in enumerate(groups) for number in group):
        at_home[homes[number]][g].append(number)
    for receive in filter(any, at_home):
        found = [(0.0, 0.0, 0.0, 0)]
        for numbers, each in zip(receive, owned, strict=True):
            busy = max((work(len(some), matrices[some[0]], size) for some in _batches(matrices, numbers)), default=0)
            numel = sum(matrices[n].numel for n in numbers)
            found.append((numel * (1 + copies), numel + each, (numel + each) * copies, busy))
        around = zip(found, found[1:], [*found[2:], found[0]], strict=False)
        most = max(most, *(size * (x[0] + after[1] + before[2]) + x[3] for before, x, after in around))
    return round(most)


def _batches(matrices: Sequence[MatrixShape], numbers: Iterable[int]) -> Iterator[list[int]]:
    """Of one shape each, of BATCH elements at most."""
    shapes: dict[MatrixShape, list[int]] = {}
    for number in sorted(numbers):
        shapes.setdefault(matrices[number], []).append(number)
    for one, alike in shapes.items():
        most = max(1, BATCH_NUMEL // one.numel)
        yield from (alike[i : i + most] for i in range(0, len(alike), most))


def _counts(ranks: Sequence[Sequence[MatrixShard]]) -> list[int]:
    """Elements to or from each rank."""
    return [sum(part.box.numel for part in ranges) for ranges in ranks]


def _slices_by_matrix(ranks: Sequence[Sequence[MatrixShard]]) -> dict[int, list[tuple[tuple[slice, ...], slice]]]:
    """Of each matrix: its rectangles, and where each lies in all of them flat."""
    found: dict[int, list[tuple[tuple[slice, ...], slice]]] = {}
    at = 0
    for part in (part for ranges in ranks for part in ranges):
        receive = tuple(map(slice, part.box.start, part.box.stop))
        found.setdefault(part.matrix, []).append((receive, slice(at, at + part.box.numel)))
        at += part.box.numel
    return found
