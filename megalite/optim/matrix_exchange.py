"""Whole matrices out of the parts that ranks own of them, and back: who sends what to whom. Pure.

    rank 0 owns  | A A A B |       home of A: rank 1       rank 0 -> rank 1: A A A       and then the same elements of
    rank 1 owns  | B B B C |       of B, C: rank 0         rank 1 -> rank 0: B B B C     the results the other way

What a rank owns of a matrix is a range of its flattened box, cut by tp and by the edges of the ZeRO shards: some
rectangles of the matrix (parallel/spec.py), each in one piece where it is owned. Of copies the first is sent, and
all get the result. A rank can tell from the layout and the sizes of the axes what each rank of its stage owns, so
nothing is asked. Bytes per rank: 2 e P / d for P elements in e bytes on a stage of d owners, less what stays.

Homes balance the cubic work, longest first (R. L. Graham, Bounds on multiprocessing timing anomalies, 1969). Matrices
go in groups: one travels while another is worked on, and little is in memory twice.
"""

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from megalite.optim.bucket_sharding import BucketSharding
from megalite.optim.layout import Bucket, BucketKey, BufferLayout, ParamSlot
from megalite.parallel.mesh import stage_coordinates
from megalite.parallel.spec import Box, ParamSpec, flat_offset, rectangles

GROUP_NUMEL = 1 << 26  # elements of a group per rank of the stage: 128 MiB of bf16 to send


class MatrixShape(NamedTuple):
    """[rows, columns]; several may be stored as one parameter."""

    rows: int
    columns: int

    @property
    def numel(self) -> int:
        return self.rows * self.columns

    @property
    def relative_flops(self) -> int:
        """In proportion to the FLOPs of products of the matrix with itself."""
        return min(self.rows, self.columns) * self.numel


class MatrixShard(NamedTuple):
    """The rectangle `box` of matrix number `matrix` is elements [start, stop) of what the rank owns of the bucket.
    `first`: of those ranks that own the same."""

    matrix: int
    box: Box
    bucket: int
    start: int
    stop: int
    is_first_replica: bool


class _MatrixStack(NamedTuple):
    """What lies in `slot` of `bucket`: matrices from number `first` on."""

    bucket: Bucket
    slot: ParamSlot
    spec: ParamSpec
    is_first_replica: int

    @property
    def matrix_ids(self) -> range:
        return range(self.is_first_replica, self.is_first_replica + math.prod(self.spec.shape[:-2]))

    def shards(
        self, rule: BucketSharding, sizes: Mapping[str, int], position: Mapping[str, int]
    ) -> Iterator[MatrixShard]:
        """What the rank of the stage at `position` owns, in order."""
        spec, rule = self.spec, rule.on_rank_at(position)
        box, part = spec.box(sizes, position), self.slot.overlap(rule.owned_range(self.bucket))
        is_first_replica = (
            rule.outer_shard_axis.size > 1 or not position[rule.axis_names[1]]
        ) and spec.is_first_replica(position)
        stacked, one = Box((0,) * len(spec.shape[:-2]), spec.shape[:-2]), Box(box.start[-2:], box.stop[-2:])
        for i, index in enumerate(itertools.product(*map(range, box.start[:-2], box.stop[:-2]))):
            begin = i * one.numel
            start, stop = max(part.span.start, begin), min(part.span.stop, begin + one.numel)
            number = self.is_first_replica + flat_offset(stacked, index)
            at = part.start + start - part.span.start
            for rectangle, span in rectangles(one, range(start - begin, stop - begin)):
                yield MatrixShard(
                    number, rectangle, self.bucket.index, at + span.start, at + span.stop, is_first_replica
                )


def _matrix_stacks(layout: BufferLayout) -> list[_MatrixStack]:
    """All that are updated as matrices, in the order of the buckets."""
    found, is_first_replica = [], 0
    for bucket in layout.buckets:
        for slot in bucket.slots if bucket.key.is_matrix else ():
            found.append(_MatrixStack(bucket, slot, layout.entries[slot.entry].spec, is_first_replica))
            is_first_replica = found[-1].matrix_ids.stop
    return found


def matrix_shapes(layout: BufferLayout) -> list[MatrixShape]:
    """In the order of their numbers."""
    return [MatrixShape(*stack.spec.shape[-2:]) for stack in _matrix_stacks(layout) for _ in stack.matrix_ids]


def group_matrices(matrices: Sequence[MatrixShape], ranks: int) -> list[range]:
    """Numbers of matrices that travel together."""
    groups, begin, numel = [], 0, 0
    for number, matrix in enumerate(matrices):
        numel += matrix.numel
        if numel >= GROUP_NUMEL * ranks:
            groups.append(range(begin, number + 1))
            begin, numel = number + 1, 0
    return groups + [range(begin, len(matrices))] * (begin < len(matrices))


def assign_owners(matrices: Sequence[MatrixShape], ranks: int) -> list[int]:
    """The rank of a stage that each is whole on: in each group the longest first, to the rank with the least so far."""
    loads, owner_ranks = [0] * ranks, [0] * len(matrices)
    for group in group_matrices(matrices, ranks):
        for number in sorted(group, key=lambda n: -matrices[n].relative_flops):
            owner_ranks[number] = loads.index(min(loads))
            loads[owner_ranks[number]] += matrices[number].relative_flops
    return owner_ranks


class GroupExchange(NamedTuple):
    """Of one group, on one rank. By rank of the stage, in its order; a range is told as it is where it is owned.

    given, got       of what this rank owns: what goes to each home, and what comes back
    taken, returned  of what each rank owns: what comes to this home, and what goes back
    """

    send: list[list[MatrixShard]]
    receive_back: list[list[MatrixShard]]
    receive: list[list[MatrixShard]]
    send_back: list[list[MatrixShard]]


def build_exchanges(
    layout: BufferLayout, rules: Mapping[BucketKey, BucketSharding], sizes: Mapping[str, int], rank: int
) -> tuple[list[MatrixShape], list[GroupExchange]]:
    """The matrices of a stage, and its groups on rank `rank` of it."""
    matrices, positions = matrix_shapes(layout), stage_coordinates(sizes)
    owner_ranks, groups = assign_owners(matrices, len(positions)), group_matrices(matrices, len(positions))
    done = [GroupExchange(*([[] for _ in positions] for _ in range(4))) for _ in groups]
    of = {number: exchange for group, exchange in zip(groups, done, strict=True) for number in group}
    for stack in _matrix_stacks(layout):
        is_owner = rank in (owner_ranks[number] for number in stack.matrix_ids)
        for owner, position in enumerate(positions):
            for part in stack.shards(rules[stack.bucket.key], sizes, position) if is_owner or owner == rank else ():
                exchange, home = of[part.matrix], owner_ranks[part.matrix]
                if owner == rank:
                    exchange.receive_back[home].append(part)
                    exchange.send[home] += [part] * part.is_first_replica
                if home == rank:
                    exchange.send_back[owner].append(part)
                    exchange.receive[owner] += [part] * part.is_first_replica
    return matrices, done
