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

from megalite.optim.bucket_rule import BucketRule
from megalite.optim.layout import Bucket, Kind, Layout, Slot
from megalite.parallel.mesh import stage_positions
from megalite.parallel.spec import Box, ParamSpec, offset_in, rectangles

GROUP = 1 << 26  # elements of a group per rank of the stage: 128 MiB of bf16 to send


class Matrix(NamedTuple):
    """[rows, columns]; several may be stored as one parameter."""

    rows: int
    columns: int

    @property
    def numel(self) -> int:
        return self.rows * self.columns

    @property
    def work(self) -> int:
        """In proportion to the FLOPs of products of the matrix with itself."""
        return min(self.rows, self.columns) * self.numel


class Range(NamedTuple):
    """The rectangle `box` of matrix number `matrix` is elements [start, stop) of what the rank owns of the bucket.
    `first`: of those ranks that own the same."""

    matrix: int
    box: Box
    bucket: int
    start: int
    stop: int
    first: bool


class _Stack(NamedTuple):
    """What lies in `slot` of `bucket`: matrices from number `first` on."""

    bucket: Bucket
    slot: Slot
    spec: ParamSpec
    first: int

    @property
    def numbers(self) -> range:
        return range(self.first, self.first + math.prod(self.spec.shape[:-2]))

    def ranges(self, rule: BucketRule, sizes: Mapping[str, int], position: Mapping[str, int]) -> Iterator[Range]:
        """What the rank of the stage at `position` owns, in order."""
        spec, rule = self.spec, rule.seen_from(position)
        box, part = spec.box(sizes, position), self.slot.part_in(rule.owned(self.bucket))
        first = (rule.outer.size > 1 or not position[rule.owners[1]]) and spec.first_copy(position)
        stacked, one = Box((0,) * len(spec.shape[:-2]), spec.shape[:-2]), Box(box.start[-2:], box.stop[-2:])
        for i, index in enumerate(itertools.product(*map(range, box.start[:-2], box.stop[:-2]))):
            begin = i * one.numel
            start, stop = max(part.span.start, begin), min(part.span.stop, begin + one.numel)
            number = self.first + offset_in(stacked, index)
            at = part.start + start - part.span.start
            for rectangle, span in rectangles(one, range(start - begin, stop - begin)):
                yield Range(number, rectangle, self.bucket.number, at + span.start, at + span.stop, first)


def _stacks(layout: Layout) -> list[_Stack]:
    """All that are updated as matrices, in the order of the buckets."""
    found, first = [], 0
    for bucket in layout.buckets:
        for slot in bucket.slots if bucket.kind.matrix else ():
            found.append(_Stack(bucket, slot, layout.entries[slot.entry].spec, first))
            first = found[-1].numbers.stop
    return found


def matrices_of(layout: Layout) -> list[Matrix]:
    """In the order of their numbers."""
    return [Matrix(*stack.spec.shape[-2:]) for stack in _stacks(layout) for _ in stack.numbers]


def in_groups(matrices: Sequence[Matrix], ranks: int) -> list[range]:
    """Numbers of matrices that travel together."""
    groups, begin, numel = [], 0, 0
    for number, matrix in enumerate(matrices):
        numel += matrix.numel
        if numel >= GROUP * ranks:
            groups.append(range(begin, number + 1))
            begin, numel = number + 1, 0
    return groups + [range(begin, len(matrices))] * (begin < len(matrices))


def homes_of(matrices: Sequence[Matrix], ranks: int) -> list[int]:
    """The rank of a stage that each is whole on: in each group the longest first, to the rank with the least so far."""
    loads, homes = [0] * ranks, [0] * len(matrices)
    for group in in_groups(matrices, ranks):
        for number in sorted(group, key=lambda n: -matrices[n].work):
            homes[number] = loads.index(min(loads))
            loads[homes[number]] += matrices[number].work
    return homes


class Exchange(NamedTuple):
    """Of one group, on one rank. By rank of the stage, in its order; a range is told as it is where it is owned.

    given, got       of what this rank owns: what goes to each home, and what comes back
    taken, returned  of what each rank owns: what comes to this home, and what goes back
    """

    given: list[list[Range]]
    got: list[list[Range]]
    taken: list[list[Range]]
    returned: list[list[Range]]


def exchanges(
    layout: Layout, rules: Mapping[Kind, BucketRule], sizes: Mapping[str, int], rank: int
) -> tuple[list[Matrix], list[Exchange]]:
    """The matrices of a stage, and its groups on rank `rank` of it."""
    matrices, positions = matrices_of(layout), stage_positions(sizes)
    homes, groups = homes_of(matrices, len(positions)), in_groups(matrices, len(positions))
    done = [Exchange(*([[] for _ in positions] for _ in range(4))) for _ in groups]
    of = {number: exchange for group, exchange in zip(groups, done, strict=True) for number in group}
    for stack in _stacks(layout):
        come_here = rank in (homes[number] for number in stack.numbers)
        for owner, position in enumerate(positions):
            for part in stack.ranges(rules[stack.bucket.kind], sizes, position) if come_here or owner == rank else ():
                exchange, home = of[part.matrix], homes[part.matrix]
                if owner == rank:
                    exchange.got[home].append(part)
                    exchange.given[home] += [part] * part.first
                if home == rank:
                    exchange.returned[owner].append(part)
                    exchange.taken[owner] += [part] * part.first
    return matrices, done
