"""Where every parameter lies in the flat tensors of weights and gradients, and which rank owns what of them. Pure.

    | bucket 0 (chunk 0, last layers)  | bucket 1 ...     | ...  | partial | tied |      a flat tensor each
    | 0    | 1    | 2    | 3           |                             each bucket splits evenly over its data axis

Parameters are laid in reverse order of use, the order in which their gradients arrive, and cut into buckets of about
`bucket_size` elements that never span model chunks. What is reduced, counted or decayed differently gets buckets of
its own (partial gradients, tied ends, experts, no decay, a rate of its own), so that each of these is one collective or
one update of a whole bucket, and no code below asks what a parameter is. Where gradients or weights come and go
(ZeRO-2 and 3), the matrices of a unit of the model, one of its blocks, are a bucket: they are used at once. Norms and
biases stay as they are, a thousandth of the memory. Padding: slots start at multiples of `ALIGN`.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

from megalite.parallel.spec import MESH_VIEWS, ParamSpec

if TYPE_CHECKING:
    from torch import Tensor

ALIGN = 64  # elements; 128 bytes in bf16, so that every matmul operand is aligned for tensor cores


class ParamEntry(NamedTuple):
    """One local parameter: its spec, its number of local elements, the model chunk it is used in, and the unit of the
    model that it was made for (nn/parameter.py: Maker)."""

    spec: ParamSpec
    numel: int
    chunk: int
    unit: str = ""


class BucketKey(NamedTuple):
    """What all parameters of a bucket have in common (parallel/spec.py). `partial`: of axes that have other ranks.
    `replicas`: ranks that hold each element, the data axis aside. `decoupled_lr`: the learning rate is that of embedding
    and head. `matrix`: they are matrices, which the optimizer updates as such. `unit`: of the model, whose matrices and
    tables they are, where these come and go together; "": they stay."""

    mesh_view: str
    partial_grad_axes: tuple[str, ...]
    tied: bool
    weight_decay: bool
    decoupled_lr: bool
    replicas: int
    is_matrix: bool = False
    unit: str = ""


class ParamSlot(NamedTuple):
    """Elements [start, stop) of bucket number `bucket` are entry number `entry`."""

    bucket: int
    entry: int
    start: int
    stop: int

    def overlap(self, mine: range) -> "ShardSlice":
        """What lies in elements `mine` of the bucket, maybe nothing."""
        first, last = max(self.start, mine.start), min(self.stop, mine.stop)
        return ShardSlice(range(first - self.start, max(first, last) - self.start), first - mine.start)


class ShardSlice(NamedTuple):
    """Elements `span` of a parameter, which begin at element `start` of what a rank has of the bucket."""

    span: range
    start: int

    def select(self, mine: "Tensor") -> "Tensor":
        """Their values, where `mine` has those of all that the rank has of the bucket."""
        return mine[self.start : self.start + len(self.span)]


class Bucket(NamedTuple):
    """`size` elements, padding included; what one collective moves. `number`: its place in the layout."""

    index: int
    chunk: int
    key: BucketKey
    size: int
    slots: tuple[ParamSlot, ...]

    def shard_range(self, ranks: int, rank: int) -> range:
        """The elements that rank `rank` of `ranks` owns, a divisor of its data axis."""
        size = self.size // ranks
        return range(rank * size, (rank + 1) * size)


class BufferLayout(NamedTuple):
    """All buckets, in the order in which a rank reduces them."""

    entries: tuple[ParamEntry, ...]
    buckets: tuple[Bucket, ...]

    @property
    def size(self) -> int:
        """Elements of all buckets."""
        return sum(bucket.size for bucket in self.buckets)


def build_layout(
    entries: Sequence[ParamEntry], *, bucket_size: int, sizes: Mapping[str, int], **apart: bool
) -> BufferLayout:
    """Lay the entries (in order of use) into buckets of at least `bucket_size` elements (the last of a kind: less).
    `sizes`: of the axes (absent: 1). `apart`: `decoupled_lr`, embedding and head have a learning rate of their own;
    `matrices`, the optimizer has another rule for these; `by_unit`, those of each unit that have two dims are a bucket,
    whatever their size.

    Buckets of a chunk are in the order in which backward fills them: that of their last members.
    """
    buckets: list[Bucket] = []
    for chunk in sorted({e.chunk for e in entries}):
        open_slots: dict[BucketKey, list[int]] = {}
        closed: list[tuple[BucketKey, list[int]]] = []
        for index in reversed(range(len(entries))):
            entry = entries[index]
            if entry.chunk != chunk:
                continue
            kind = _bucket_key(entry, sizes, **apart)
            members = open_slots.setdefault(kind, [])
            members.append(index)
            if not kind.unit and sum(entries[i].numel for i in members) >= bucket_size:
                closed.append((kind, open_slots.pop(kind)))
        for kind, members in sorted([*closed, *open_slots.items()], key=lambda bucket: -bucket[1][-1]):
            number, slots, position = len(buckets), [], 0
            for index in members:
                slots.append(ParamSlot(number, index, position, position + entries[index].numel))
                position = _round_up(slots[-1].stop, ALIGN)
            size = _round_up(position, ALIGN * sizes.get(MESH_VIEWS[kind.mesh_view][0], 1))
            buckets.append(Bucket(number, chunk, kind, size, tuple(slots)))
    return BufferLayout(tuple(entries), tuple(buckets))


def _bucket_key(
    entry: ParamEntry,
    sizes: Mapping[str, int],
    decoupled_lr: bool = False,
    matrices: bool = False,
    by_unit: bool = False,
) -> BucketKey:
    spec = entry.spec
    partial_grad_axes = tuple(axis for axis in spec.partial_grad_axes if sizes.get(axis, 1) > 1)
    rate, is_matrix = spec.is_vocab and decoupled_lr, spec.is_matrix and matrices
    unit = entry.unit if by_unit and spec.is_2d else ""
    return BucketKey(
        spec.mesh_view, partial_grad_axes, spec.tied, spec.weight_decay, rate, spec.num_replicas(sizes), is_matrix, unit
    )


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
