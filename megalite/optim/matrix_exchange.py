"""The exchange that assembles full matrices from owned parts and returns the results. All functions are pure.

    rank 0 owns  | A A A B |       owner rank of A: 1       rank 0 -> rank 1: A A A       then the same elements of the
    rank 1 owns  | B B B C |       of B and C: 0            rank 1 -> rank 0: B B B C     results in reverse

The owner rank of a matrix computes with the full matrix. Every rank owns a range of a matrix's flattened box, limited
by tp and by the bounds of the ZeRO shards. It consists of some rectangles of the matrix (parallel/spec.py), each of
which is contiguous in the owned part of the bucket. If several ranks own the same elements, the first one sends them,
and all get the result. Layout and axis sizes determine what each rank of the stage owns, so ranks need not ask each
other. Bytes sent per rank: 2 e P / d for P elements of e bytes on a stage of d ranks that own different parts, less the
parts whose owner rank is the rank itself.

Owner ranks balance the cubic work, largest matrix first (R. L. Graham, Bounds on multiprocessing timing anomalies,
1969). Matrices are exchanged in groups, so that the exchange of one group overlaps with the work on another, and only
few matrices are in memory twice.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from megalite.config.width_scaling import WidthRole
from megalite.optim.zero.layout import BucketKey, BucketLayout, BufferLayout, ParamSlot
from megalite.optim.zero.sharding import BucketSharding
from megalite.parallel.mesh import stage_coordinates
from megalite.parallel.spec import Box, ParamSpec, flat_offset, rectangles

GROUP_NUMEL = 1 << 26  # elements of a group per rank of the stage: each rank sends 128 MiB in bf16


class MatrixShape(NamedTuple):
    """The shape of a matrix; a parameter may consist of several matrices."""

    rows: int
    columns: int

    @property
    def numel(self) -> int:
        """The number of elements."""
        return self.rows * self.columns

    @property
    def relative_flops(self) -> int:
        """A number proportional to the FLOPs of the product of the matrix with itself."""
        return min(self.rows, self.columns) * self.numel


class MatrixShard(NamedTuple):
    """A rectangle of a matrix in the owned part of a bucket.

    Attributes:
        matrix: index of the matrix in the stage.
        box: the rectangle.
        bucket: index of the bucket.
        start, stop: its elements in the owned part of the bucket.
        is_first_replica: True if the rank is the first of those that own the same elements.
    """

    matrix: int
    box: Box
    bucket: int
    start: int
    stop: int
    is_first_replica: bool


class _MatrixStack(NamedTuple):
    """The matrices of one parameter, numbered from `first_matrix`."""

    bucket: BucketLayout
    slot: ParamSlot
    spec: ParamSpec
    first_matrix: int

    @property
    def matrix_ids(self) -> range:
        """The indices of its matrices in the stage."""
        return range(self.first_matrix, self.first_matrix + math.prod(self.spec.shape[:-2]))

    def shards(
        self, sharding: BucketSharding, sizes: Mapping[str, int], coordinates: Mapping[str, int]
    ) -> Iterator[MatrixShard]:
        """Yield the rectangles that the rank of the stage with these coordinates owns, in order."""
        spec = self.spec
        sharding = sharding.on_rank_at(coordinates)
        box = spec.box(sizes, coordinates)
        owned = self.slot.overlap(sharding.owned_range(self.bucket))
        is_first_owner = sharding.outer_shard_axis.size > 1 or not coordinates[sharding.axis_names[1]]
        is_first_replica = is_first_owner and spec.is_first_replica(coordinates)
        all_indices = Box((0,) * len(spec.shape[:-2]), spec.shape[:-2])
        matrix_box = Box(box.start[-2:], box.stop[-2:])
        for i, index in enumerate(itertools.product(*map(range, box.start[:-2], box.stop[:-2]))):
            matrix = self.first_matrix + flat_offset(all_indices, index)
            matrix_start = i * matrix_box.numel  # in the flattened box
            start = max(owned.span.start, matrix_start)
            stop = min(owned.span.stop, matrix_start + matrix_box.numel)
            offset = owned.start + start - owned.span.start
            for rectangle, span in rectangles(matrix_box, range(start - matrix_start, stop - matrix_start)):
                yield MatrixShard(
                    matrix, rectangle, self.bucket.index, offset + span.start, offset + span.stop, is_first_replica
                )


def _matrix_stacks(layout: BufferLayout) -> list[_MatrixStack]:
    """Return the parameters that are updated as matrices, in the order of the buckets."""
    stacks: list[_MatrixStack] = []
    first_matrix = 0
    for bucket in layout.buckets:
        if not bucket.key.is_matrix:
            continue
        for slot in bucket.slots:
            stacks.append(_MatrixStack(bucket, slot, layout.entries[slot.entry].spec, first_matrix))
            first_matrix = stacks[-1].matrix_ids.stop
    return stacks


def matrix_shapes(layout: BufferLayout) -> list[MatrixShape]:
    """Return the full shapes of all matrices of a stage, by index."""
    return [MatrixShape(*stack.spec.shape[-2:]) for stack in _matrix_stacks(layout) for _ in stack.matrix_ids]


def matrix_width_roles(layout: BufferLayout) -> list[WidthRole]:
    """Return the roles for muP of all matrices of a stage, by index."""
    return [stack.spec.effective_width_role for stack in _matrix_stacks(layout) for _ in stack.matrix_ids]


def group_matrices(matrices: Sequence[MatrixShape], num_ranks: int) -> list[range]:
    """Return the indices of the matrices that are exchanged together, for each group."""
    groups: list[range] = []
    start = 0
    numel = 0
    for index, matrix in enumerate(matrices):
        numel += matrix.numel
        if numel >= GROUP_NUMEL * num_ranks:
            groups.append(range(start, index + 1))
            start = index + 1
            numel = 0
    if start < len(matrices):
        groups.append(range(start, len(matrices)))
    return groups


def assign_owners(matrices: Sequence[MatrixShape], num_ranks: int) -> list[int]:
    """Return the owner rank of each matrix, an index in the stage.

    In each group the matrix with the most work is assigned first, to the rank with the least work so far.
    """
    loads = [0] * num_ranks
    owner_ranks = [0] * len(matrices)
    for group in group_matrices(matrices, num_ranks):
        for index in sorted(group, key=lambda i: -matrices[i].relative_flops):
            owner_rank = loads.index(min(loads))
            owner_ranks[index] = owner_rank
            loads[owner_rank] += matrices[index].relative_flops
    return owner_ranks


class GroupExchange(NamedTuple):
    """The exchange of one group on one rank.

    Each field is a list for every rank of the stage, in order. A MatrixShard describes the elements on the rank that
    owns them.

    Attributes:
        send: parts that this rank owns and sends to each owner rank of a matrix.
        receive_back: parts that this rank owns and whose results it receives from each owner rank.
        receive: parts that this rank receives, as an owner rank, from each rank.
        send_back: parts whose results this rank, as an owner rank, sends to each rank.
    """

    send: list[list[MatrixShard]]
    receive_back: list[list[MatrixShard]]
    receive: list[list[MatrixShard]]
    send_back: list[list[MatrixShard]]


def build_exchanges(
    layout: BufferLayout, shardings: Mapping[BucketKey, BucketSharding], sizes: Mapping[str, int], rank: int
) -> tuple[list[MatrixShape], list[GroupExchange]]:
    """Return the matrices of a stage, and the exchanges of its groups on rank `rank` of the stage."""
    matrices = matrix_shapes(layout)
    coordinates_by_rank = stage_coordinates(sizes)
    num_ranks = len(coordinates_by_rank)
    owner_ranks = assign_owners(matrices, num_ranks)
    groups = group_matrices(matrices, num_ranks)
    exchanges = [GroupExchange(*([[] for _ in range(num_ranks)] for _ in range(4))) for _ in groups]
    exchange_of = {matrix: exchange for group, exchange in zip(groups, exchanges, strict=True) for matrix in group}
    for stack in _matrix_stacks(layout):
        sharding = shardings[stack.bucket.key]
        is_owner_rank = rank in (owner_ranks[matrix] for matrix in stack.matrix_ids)
        for shard_rank, coordinates in enumerate(coordinates_by_rank):
            if not is_owner_rank and shard_rank != rank:
                continue
            for shard in stack.shards(sharding, sizes, coordinates):
                exchange = exchange_of[shard.matrix]
                owner_rank = owner_ranks[shard.matrix]
                if shard_rank == rank:
                    exchange.receive_back[owner_rank].append(shard)
                    if shard.is_first_replica:
                        exchange.send[owner_rank].append(shard)
                if owner_rank == rank:
                    exchange.send_back[shard_rank].append(shard)
                    if shard.is_first_replica:
                        exchange.receive[shard_rank].append(shard)
    return matrices, exchanges
