"""The layout of parameters in buckets, the flat tensors of weights and gradients. Nothing here allocates memory.

    | bucket 0 (chunk 0, last layers)  | bucket 1 ...     | ...  | partial | tied |      one flat tensor each
    | 0    | 1    | 2    | 3           |                             each bucket splits evenly over its data axis

Parameters are placed in reverse order of use, the order in which their gradients become ready, and split into buckets
of about `bucket_size` elements that never span model chunks. Parameters that are reduced, counted or decayed in another
way, or have another dtype, get separate buckets (partial gradients, tied embeddings, experts, no weight decay, a
decoupled learning rate, muP's factor of the rate, fp32 weights in a bf16 model). So each of these is one collective or
one update of a full bucket, and no later code needs to know what a parameter is.

If gradients or weights are resharded (ZeRO-2 and 3), the matrices of each unit of the model (a block) are one bucket,
since they are used together. Norms and biases stay in resident buckets; they take a thousandth of the memory.

Slots start at multiples of `ALIGN`, with padding before them.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from megalite.config.width_scaling import WidthRole
from megalite.nn.parameter import spec_of
from megalite.parallel.mesh import Mesh
from megalite.parallel.spec import MESH_VIEWS, ParamSpec

DEFAULT_BUCKET_SIZE = 40_000_000  # elements
ALIGN = 64  # elements; 128 bytes in bf16, so that every matmul operand is aligned for tensor cores


class ParamEntry(NamedTuple):
    """One local parameter.

    Attributes:
        spec: its spec.
        numel: number of local elements.
        chunk: index of the model chunk that uses it.
        unit: name of the unit of the model that it was created for (nn/parameter.py: ParamFactory).
        dtype: dtype of its weights.
    """

    spec: ParamSpec
    numel: int
    chunk: int
    unit: str = ""
    dtype: torch.dtype = torch.float32


class BucketKey(NamedTuple):
    """The properties that all parameters of a bucket share (see also parallel/spec.py: ParamSpec).

    Attributes:
        mesh_view: "dense" or "expert".
        partial_grad_axes: axes with more than one rank over which partial gradients are summed.
        tied: True if the other end of the pipeline has a second copy.
        weight_decay: True if weight decay applies.
        decoupled_lr: True for parameters with the learning rate of embedding and head.
        replicas: number of ranks that have each element, apart from the data axis.
        is_matrix: True for matrices that the optimizer updates with its rule for matrices.
        unit: name of the unit whose matrices and tables the bucket contains, if these are resharded together; "" for
            resident buckets.
        dtype: dtype of the weights.
        lr_multiplier: factor of the learning rate by muP.
    """

    mesh_view: str
    partial_grad_axes: tuple[str, ...]
    tied: bool
    weight_decay: bool
    decoupled_lr: bool
    replicas: int
    is_matrix: bool = False
    unit: str = ""
    dtype: torch.dtype = torch.float32
    lr_multiplier: float = 1.0


class ParamSlot(NamedTuple):
    """The place of one parameter in a bucket, whose elements [start, stop) are those of entry `entry`."""

    entry: int
    start: int
    stop: int

    def overlap(self, shard: range) -> "ShardSlice":
        """Return the part of the parameter in the elements `shard` of the bucket; it may be empty."""
        start = max(self.start, shard.start)
        stop = max(start, min(self.stop, shard.stop))
        return ShardSlice(range(start - self.start, stop - self.start), start - shard.start)


class ShardSlice(NamedTuple):
    """The part of a parameter in a shard: elements `span` of the parameter start at element `start` of the shard."""

    span: range
    start: int

    def select(self, shard: Tensor) -> Tensor:
        """Return the view of these elements in the shard."""
        return shard[self.start : self.start + len(self.span)]


class BucketLayout(NamedTuple):
    """A set of parameters in one flat tensor, which one collective transfers.

    Attributes:
        index: index in the layout.
        chunk: index of the model chunk.
        key: the properties that its parameters share.
        size: number of elements, padding included.
        slots: the places of its parameters.
    """

    index: int
    chunk: int
    key: BucketKey
    size: int
    slots: tuple[ParamSlot, ...]

    def shard_range(self, num_ranks: int, rank: int) -> range:
        """Return the elements in shard `rank` of `num_ranks`, which must divide the size of the data axis."""
        size = self.size // num_ranks
        return range(rank * size, (rank + 1) * size)


class BufferLayout(NamedTuple):
    """The local parameters and the buckets, in the order in which a rank reduces them."""

    entries: tuple[ParamEntry, ...]
    buckets: tuple[BucketLayout, ...]

    @property
    def size(self) -> int:
        """The number of elements of all buckets, padding included."""
        return sum(bucket.size for bucket in self.buckets)


def chunk_layout(
    chunks: Sequence[nn.Module], mesh: Mesh, bucket_size: int | None = None, **separate_buckets: Any
) -> tuple[list[nn.Parameter], BufferLayout]:
    """Return the parameters of `chunks`, each once, and their layout: entry i of the layout is parameter i.

    Args:
        chunks: modules whose parameters have a `.spec`.
        mesh: the mesh.
        bucket_size: minimum number of elements of a bucket; None: DEFAULT_BUCKET_SIZE.
        separate_buckets: reasons for separate buckets (build_layout).
    """
    chunk_of_param: dict[int, tuple[int, nn.Parameter]] = {}
    for chunk, module in enumerate(chunks):
        for p in module.parameters():
            chunk_of_param.setdefault(id(p), (chunk, p))
    parameters = [p for _, p in chunk_of_param.values()]
    entries = [
        ParamEntry(spec_of(p), p.numel(), chunk, getattr(p, "unit", ""), p.dtype)
        for chunk, p in chunk_of_param.values()
    ]
    size = DEFAULT_BUCKET_SIZE if bucket_size is None else bucket_size
    return parameters, build_layout(entries, bucket_size=size, sizes=mesh.sizes, **separate_buckets)


def build_layout(
    entries: Sequence[ParamEntry], *, bucket_size: int, sizes: Mapping[str, int], **separate_buckets: Any
) -> BufferLayout:
    """Assign the entries to buckets.

    The buckets of a chunk are in the order in which backward completes them: the order of their last entries.

    Args:
        entries: the local parameters, in order of use.
        bucket_size: minimum number of elements of a bucket; the last bucket with a key may be smaller.
        sizes: axis names -> sizes (absent: 1).
        separate_buckets: reasons for separate buckets, False by default. `decoupled_lr`: embedding and head have a
            separate learning rate. `lr_multipliers`: muP's factor of the rate for each role of a parameter.
            `matrices`: the optimizer has a separate rule for matrices, which applies muP itself. `by_unit`: the
            parameters with two dims of a unit are one bucket of any size.
    """
    buckets: list[BucketLayout] = []
    for chunk in sorted({entry.chunk for entry in entries}):
        open_buckets: dict[BucketKey, list[int]] = {}  # indices of entries
        closed_buckets: list[tuple[BucketKey, list[int]]] = []
        for index in reversed(range(len(entries))):
            entry = entries[index]
            if entry.chunk != chunk:
                continue
            key = _bucket_key(entry, sizes, **separate_buckets)
            members = open_buckets.setdefault(key, [])
            members.append(index)
            if not key.unit and sum(entries[i].numel for i in members) >= bucket_size:
                closed_buckets.append((key, open_buckets.pop(key)))
        for key, members in sorted([*closed_buckets, *open_buckets.items()], key=lambda bucket: -bucket[1][-1]):
            slots: list[ParamSlot] = []
            position = 0
            for index in members:
                slots.append(ParamSlot(index, position, position + entries[index].numel))
                position = _round_up(slots[-1].stop, ALIGN)
            size = _round_up(position, ALIGN * sizes.get(MESH_VIEWS[key.mesh_view][0], 1))
            buckets.append(BucketLayout(len(buckets), chunk, key, size, tuple(slots)))
    return BufferLayout(tuple(entries), tuple(buckets))


def _bucket_key(
    entry: ParamEntry,
    sizes: Mapping[str, int],
    decoupled_lr: bool = False,
    matrices: bool = False,
    by_unit: bool = False,
    lr_multipliers: Mapping[WidthRole, float] | None = None,
) -> BucketKey:
    spec = entry.spec
    is_matrix = spec.is_matrix and matrices
    has_decoupled_lr = spec.is_vocab and decoupled_lr
    lr_multiplier = 1.0
    if lr_multipliers and not (is_matrix or has_decoupled_lr):
        lr_multiplier = lr_multipliers[spec.effective_width_role]
    return BucketKey(
        mesh_view=spec.mesh_view,
        partial_grad_axes=tuple(axis for axis in spec.partial_grad_axes if sizes.get(axis, 1) > 1),
        tied=spec.tied,
        weight_decay=spec.weight_decay,
        decoupled_lr=has_decoupled_lr,
        replicas=spec.num_replicas(sizes),
        is_matrix=is_matrix,
        unit=entry.unit if by_unit and spec.is_2d else "",
        dtype=entry.dtype,
        lr_multiplier=lr_multiplier,
    )


def _round_up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
