"""Muon for matrices: momentum, orthogonalized by Newton-Schulz (K. Jordan, 2024; at scale: arXiv:2502.16982).

    m = b m + (1 - b) g;    u = g + b (m - g) with Nesterov momentum, else m      each rank, for the elements it owns
    o = scale * newton_schulz(u)                                                  the owner rank of each matrix
    w = w (1 - lr wd) - lr o                                                      each rank, for the elements it owns

Queries, keys, values, gate and up are separate matrices, since they are stored separately (nn/attention.py,
nn/mlp.py). With every layout, one rank of the stage orthogonalizes the full matrix once: the parts that ranks own are
sent to it, and results back (matrix_exchange.py), in the precision of the matmuls. The definition is that of NVIDIA's
Emerging-Optimizers, where gate and up are one matrix. The state is one momentum.

Scales of an [m, n] matrix: spectral sqrt(max(m, n)), shape_scaling sqrt(max(1, m / n)), unit_rms_norm sqrt(m / n).

MuP wants updates whose spectral norm is proportional to sqrt(m / n) at every width (arXiv:2310.17813, condition 1). So
unit_rms_norm is muP's rate already, and with the other scales `Muon.width_factor` adds what they lack.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch
from torch import Tensor

from megalite.config.run_options import OptimConfig
from megalite.config.width_scaling import WidthRole
from megalite.kernels.newton_schulz import CoefficientType, coefficients, newton_schulz
from megalite.optim.matrix_exchange import GroupExchange, MatrixShape, MatrixShard, build_exchanges, matrix_width_roles
from megalite.optim.update_rule import Finalizer, ParamUpdate
from megalite.optim.zero.layout import BufferLayout
from megalite.optim.zero.param_bucket import ParamBucket
from megalite.parallel.comm import Pending, start_all_to_all
from megalite.parallel.mesh import Mesh

BATCH_NUMEL = 1 << 26  # elements in one Newton-Schulz batch: a matrix of 8,192 x 8,192, or many small ones
SCALES: dict[str, Callable[[float, float], float]] = {
    "spectral": lambda m, n: math.sqrt(max(m, n)),
    "shape_scaling": lambda m, n: math.sqrt(max(1.0, m / n)),
    "unit_rms_norm": lambda m, n: math.sqrt(m / n),
}


@dataclass(frozen=True)
class Muon:
    """Muon.

    in_bf16     use bf16 for the matmuls and the exchange if the main weights are in fp32
    width_mult  the width of the model over that of muP's base model
    """

    momentum: float = 0.95
    nesterov: bool = False
    steps: int = 5
    coefficient_type: CoefficientType = "quintic"
    scale_mode: str = "spectral"
    extra_scale: float = 1.0
    in_bf16: bool = True
    width_mult: float = 1.0

    @classmethod
    def from_config(cls, config: OptimConfig) -> "Muon":
        """Return the rule with the options of a run."""
        return cls(
            momentum=config.muon_momentum,
            nesterov=config.muon_nesterov,
            steps=config.muon_num_ns_steps,
            coefficient_type=cast("CoefficientType", config.muon_coefficient_type),
            scale_mode=config.muon_scale_mode,
            extra_scale=config.muon_extra_scale_factor,
            in_bf16=config.muon_fp32_matmul_prec == "medium",
        )

    def for_width(self, width_mult: float) -> "Muon":
        """Return the rule for a model that is `width_mult` times as wide as muP's base model."""
        return replace(self, width_mult=width_mult)

    def width_factor(self, rows: int, columns: int, role: WidthRole) -> float:
        """Return the factor with which updates of a matrix have muP's norm, relative to the matrix of the base model.

        Args:
            rows: output channels.
            columns: input channels.
            role: the sides that grow with the width (config/width_scaling.py).
        """
        if self.width_mult == 1:
            return 1.0
        base_rows = rows if role == "output" else rows / self.width_mult
        base_columns = columns if role == "input" else columns / self.width_mult
        scale, mup_scale = SCALES[self.scale_mode], SCALES["unit_rms_norm"]
        growth = scale(rows, columns) / scale(base_rows, base_columns)
        return mup_scale(rows, columns) / mup_scale(base_rows, base_columns) / growth

    @property
    def state_dtypes(self) -> dict[str, torch.dtype | None]:
        """The dtype of the momentum."""
        return {"momentum_buffer": None}

    @torch.no_grad()
    def update_(self, update: ParamUpdate) -> None:
        """Update the momentum and replace the gradient by u."""
        momentum_buffer = update.state["momentum_buffer"]
        momentum_buffer.lerp_(update.grad.mul_(update.scale), 1 - self.momentum)
        if self.nesterov:
            update.grad.lerp_(momentum_buffer, self.momentum)
        else:
            update.grad.copy_(momentum_buffer)

    def make_finalizer(self, mesh: Mesh, layout: BufferLayout, buckets: Sequence[ParamBucket]) -> Finalizer:
        """Return the second half of the update."""
        return _DistributedNewtonSchulz(self, mesh, layout, buckets).finalize


class _DistributedNewtonSchulz:
    """The second half of the update on one rank, group by group: exchanges overlap with the work on another group."""

    def __init__(self, rule: Muon, mesh: Mesh, layout: BufferLayout, buckets: Sequence[ParamBucket]):
        self.rule = rule
        self.axis = mesh.dp_cp_tp
        self.steps = coefficients(rule.coefficient_type, rule.steps)
        self.update_index = {bucket.layout.index: i for i, bucket in enumerate(buckets)}  # bucket -> index in updates
        shardings = {bucket.layout.key: bucket.sharding for bucket in buckets}
        self.matrices, self.groups = build_exchanges(layout, shardings, mesh.sizes, self.axis.rank)
        self.scales = [
            rule.extra_scale * SCALES[rule.scale_mode](*shape) * rule.width_factor(*shape, role)
            for shape, role in zip(self.matrices, matrix_width_roles(layout), strict=True)
        ]

    @torch.no_grad()
    def finalize(self, updates: Sequence[ParamUpdate]) -> None:
        """Update the weights. Collective over the stage."""
        incoming = [self._send_momentum(group, updates) for group in self.groups[:1]]
        outgoing: list[tuple[GroupExchange, Pending]] = []
        for i, group in enumerate(self.groups):
            if i + 1 < len(self.groups):
                incoming.append(self._send_momentum(self.groups[i + 1], updates))
            results = self._orthogonalize(group, incoming.pop(0).wait())
            outgoing.append((group, self._start_exchange(results, group.send_back, group.receive_back)))
            if len(outgoing) > 1:
                self._scatter_updates(*outgoing.pop(0), updates)
        for exchange in outgoing:
            self._scatter_updates(*exchange, updates)
        for update in updates:
            update.param.mul_(1 - update.lr * update.weight_decay).add_(update.grad, alpha=-update.lr)
            if update.model_param is not None:
                update.model_param.copy_(update.param)

    def _send_momentum(self, group: GroupExchange, updates: Sequence[ParamUpdate]) -> Pending:
        """Start to send u to the owner ranks of a group."""
        grad = updates[0].grad
        dtype = torch.bfloat16 if self.rule.in_bf16 and grad.dtype == torch.float32 else grad.dtype
        parts = [self._grad_of(shard, updates).to(dtype) for shards in group.send for shard in shards]
        momentum = torch.cat(parts) if parts else grad.new_empty(0, dtype=dtype)
        return self._start_exchange(momentum, group.send, group.receive)

    def _grad_of(self, shard: MatrixShard, updates: Sequence[ParamUpdate]) -> Tensor:
        return updates[self.update_index[shard.bucket]].grad[shard.start : shard.stop]

    def _start_exchange(self, x: Tensor, send: list[list[MatrixShard]], receive: list[list[MatrixShard]]) -> Pending:
        return start_all_to_all(x, _split_sizes(send), _split_sizes(receive), self.axis)

    def _orthogonalize(self, group: GroupExchange, received: Tensor) -> Tensor:
        """Orthogonalize the matrices of a group that this rank is the owner rank of.

        `received` has the shards of `group.receive` one after the other; the result has those of `group.send_back`.
        """
        input_slices = _slices_by_matrix(group.receive)
        output_slices = _slices_by_matrix(group.send_back)
        results = received.new_empty(sum(_split_sizes(group.send_back)))
        for batch in equal_shape_batches(self.matrices, input_slices):
            matrices = received.new_empty(len(batch), *self.matrices[batch[0]])
            for matrix, index in zip(matrices, batch, strict=True):
                for rectangle, elements in input_slices[index]:
                    matrix[rectangle].copy_(received[elements].view_as(matrix[rectangle]))
            for matrix, index in zip(newton_schulz(matrices, self.steps), batch, strict=True):
                for rectangle, elements in output_slices[index]:
                    results[elements].view_as(matrix[rectangle]).copy_(matrix[rectangle])
        return results

    def _scatter_updates(self, group: GroupExchange, results: Pending, updates: Sequence[ParamUpdate]) -> None:
        """Replace the gradients by the scaled results of a group."""
        flat = results.wait()
        offset = 0
        for shard in itertools.chain.from_iterable(group.receive_back):
            result = flat[offset : offset + shard.box.numel]
            self._grad_of(shard, updates).copy_(result).mul_(self.scales[shard.matrix])
            offset += shard.box.numel


def equal_shape_batches(matrices: Sequence[MatrixShape], indices: Iterable[int]) -> Iterator[list[int]]:
    """Yield the indices in batches of matrices of one shape, with at most BATCH_NUMEL elements or a single matrix."""
    indices_by_shape: dict[MatrixShape, list[int]] = {}
    for index in sorted(indices):
        indices_by_shape.setdefault(matrices[index], []).append(index)
    for shape, same_shape in indices_by_shape.items():
        batch_size = max(1, BATCH_NUMEL // shape.numel)
        for i in range(0, len(same_shape), batch_size):
            yield same_shape[i : i + batch_size]


def _split_sizes(shards_by_rank: Sequence[Sequence[MatrixShard]]) -> list[int]:
    """Return the number of elements for each rank."""
    return [sum(shard.box.numel for shard in shards) for shards in shards_by_rank]


def _slices_by_matrix(
    shards_by_rank: Sequence[Sequence[MatrixShard]],
) -> dict[int, list[tuple[tuple[slice, ...], slice]]]:
    """Return for each matrix (rectangle of the matrix, elements of the flat buffer of all shards)."""
    slices: dict[int, list[tuple[tuple[slice, ...], slice]]] = {}
    offset = 0
    for shard in itertools.chain.from_iterable(shards_by_rank):
        rectangle = tuple(map(slice, shard.box.start, shard.box.stop))
        slices.setdefault(shard.matrix, []).append((rectangle, slice(offset, offset + shard.box.numel)))
        offset += shard.box.numel
    return slices
