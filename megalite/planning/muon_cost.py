"""The cost of an update by Muon: FLOPs, bytes between ranks, and the peak of temporary memory (optim/muon.py)."""

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from megalite.config.options import OptimConfig
from megalite.kernels.newton_schulz import coefficients, newton_schulz, newton_schulz_flops
from megalite.optim.matrix_exchange import MatrixShape, assign_owners, group_matrices, matrix_shapes
from megalite.optim.muon import equal_shape_batches
from megalite.optim.zero.layout import BufferLayout
from megalite.parallel.mesh import Mesh
from megalite.planning.meta_mode import META, MetaMode

GIB = 2**30


@dataclass(frozen=True)
class MuonCost:
    """The cost of an update by Muon.

    Attributes:
        flops: FLOPs of Newton-Schulz on the stage's busiest rank.
        bytes_moved: Bytes that each rank sends to owner ranks and back.
        peak_bytes: The peak of temporary memory.
    """

    flops: int
    bytes_moved: float
    peak_bytes: int

    def __str__(self) -> str:
        text = f"{self.flops / 1e12:.3g} TFLOP of Newton-Schulz on the busiest rank"
        if self.bytes_moved > 0:
            text += f", {self.bytes_moved / GIB:.3g} GiB to their owner ranks and back"
        return text


def muon_cost(
    layout: BufferLayout, mesh: Mesh, optim: OptimConfig, optimizer_shards: Mapping[str, int]
) -> MuonCost | None:
    """Return the cost of an update with the exchanges of optim/matrix_exchange.py; None without Muon.

    Args:
        layout: The layout of the parameters of a rank.
        mesh: The mesh of the rank.
        optim: The options of the optimizer.
        optimizer_shards: The number of ranks that share the optimizer state, by mesh view.
    """
    matrices = matrix_shapes(layout) if optim.is_muon else []
    if not matrices:
        return None
    num_ranks = mesh.dp_cp_tp.size
    itemsize = 2 if optim.muon_fp32_matmul_prec == "medium" else 4
    flops_of_rank = [0] * num_ranks
    for matrix, owner_rank in zip(matrices, assign_owners(matrices, num_ranks), strict=True):
        flops_of_rank[owner_rank] += newton_schulz_flops(matrix.rows, matrix.columns, optim.muon_num_ns_steps)
    owned_numel = sum(
        entry.numel / optimizer_shards[entry.spec.mesh_view] for entry in layout.entries if entry.spec.is_matrix
    )
    shard_numel = sum(matrix.numel for matrix in matrices) / num_ranks
    bytes_moved = 0.0
    if num_ranks > 1:
        # one of the ranks that own the same elements sends them, and all of these ranks receive the result
        bytes_moved = itemsize * (shard_numel + owned_numel)
    num_owners = owned_numel / shard_numel
    return MuonCost(max(flops_of_rank), bytes_moved, _peak_bytes(matrices, num_ranks, num_owners, itemsize))


@dataclass(frozen=True)
class _GroupNumels:
    """The number of elements in the buffers of one group on one rank, and the bytes of its workspace."""

    processing: float = 0.0  # received matrices and results
    incoming: float = 0.0  # momentum on its way to owner ranks: this rank's, and what it receives
    outgoing: float = 0.0  # results on their way back: this rank's, and what it receives
    workspace_bytes: int = 0


def _peak_bytes(matrices: Sequence[MatrixShape], num_ranks: int, num_owners: float, itemsize: int) -> int:
    """Return the peak bytes of the second half of the update on the busiest rank.

    These are one group's matrices and results, the next group's incoming and the previous group's outgoing buffers. The
    shards of a group are assumed to be evenly distributed.

    Args:
        matrices: The matrices of the stage.
        num_ranks: The number of ranks of the stage.
        num_owners: The number of ranks that own each element.
        itemsize: The bytes per element in the exchange.
    """
    owner_ranks = assign_owners(matrices, num_ranks)
    groups = group_matrices(matrices, num_ranks)
    shard_numels = [0.0 for _ in groups]  # elements that a rank sends; with one rank nothing is sent
    if num_ranks > 1:
        shard_numels = [sum(matrices[n].numel for n in group) / num_ranks for group in groups]
    assigned: list[list[list[int]]] = [[[] for _ in groups] for _ in range(num_ranks)]  # [rank][group] -> matrices
    for g, group in enumerate(groups):
        for index in group:
            assigned[owner_ranks[index]][g].append(index)
    peak = 0.0
    for indices_by_group in assigned:
        if not any(indices_by_group):
            continue
        numels = [_GroupNumels()]
        for indices, shard_numel in zip(indices_by_group, shard_numels, strict=True):
            batches = equal_shape_batches(matrices, indices)
            batch_bytes = (_newton_schulz_bytes(len(batch), matrices[batch[0]], itemsize) for batch in batches)
            numel = sum(matrices[n].numel for n in indices)
            numels.append(
                _GroupNumels(
                    processing=numel * (1 + num_owners),
                    incoming=numel + shard_numel,
                    outgoing=(numel + shard_numel) * num_owners,
                    workspace_bytes=max(batch_bytes, default=0),
                )
            )
        numels.append(_GroupNumels())
        for previous, current, following in zip(numels, numels[1:], numels[2:], strict=False):
            numel = current.processing + following.incoming + previous.outgoing
            peak = max(peak, itemsize * numel + current.workspace_bytes)
    return round(peak)


@functools.lru_cache(maxsize=4096)
def _newton_schulz_bytes(count: int, shape: MatrixShape, itemsize: int) -> int:
    """Return the peak bytes of Newton-Schulz on a batch of `count` matrices, which are included."""
    dtype = torch.bfloat16 if itemsize == 2 else torch.float32
    with MetaMode() as mode:
        batch = torch.empty(count, shape.rows, shape.columns, dtype=dtype, device=META)
        newton_schulz(batch, coefficients("simple", 2))
    return mode.peak
