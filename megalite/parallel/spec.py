"""Where a value lives in the whole tensor: how a parameter is sharded, which rectangles a rank's piece is. No torch.

A `ParamSpec` holds all facts about a parameter. Initialisation, gradient reduction, optimizer, gradient norm,
checkpoint and conversion read it, and none of them keeps a copy. Shapes are in elements.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple


@dataclass(frozen=True)
class Normal:
    """Draw from N(0, std^2)."""

    std: float


@dataclass(frozen=True)
class Constant:
    """Fill with one value (norm weights: 1, biases: 0)."""

    value: float


Init = Normal | Constant

# home -> the axis over which gradients are summed, and the axes that split or copy the parameter
MESH_VIEWS: Mapping[str, tuple[str, tuple[str, ...]]] = {"dense": ("dp_cp", ("tp",)), "expert": ("edp", ("ep", "etp"))}
# home -> ranks that share out what is kept of it, and ranks that keep the same
SHARD_AXES: Mapping[str, tuple[str, str]] = {
    "dense": ("dp_shard", "dp_replicate"),
    "expert": ("edp_shard", "edp_replicate"),
}


class Box(NamedTuple):
    """A half-open rectangle of a whole tensor: `start[d] <= index[d] < stop[d]`."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class ParamSpec:
    """One parameter of the model, as a fact about the whole tensor.

    name    canonical, with the global layer number: "layers.17.mlp.gate_up"
    shape   of the whole tensor, in elements
    shards  (dim, axis name) pairs: ((0, "tp"),) splits dim 0 evenly over the tp axis
    home    "dense" or "expert": which view of a stage's ranks it lives in (HOMES)
    partial axes whose ranks hold copies of it, each with only a summand of its gradient: ("tp",) for norms under
            sequence parallelism, row-parallel biases, replicated key/value projections
    init    how the whole tensor is drawn; bits do not depend on the layout (see parallel/rng.py)
    decay   whether weight decay applies
    vocabulary  whether it is the word embedding or the head, which can have a learning rate of their own
    looked_up   whether its rows are picked by an index, so that it is no matrix of a product: embeddings
    tied    a second copy of this parameter lives at the other end of the pipeline; both copies carry the flag,
            and only when the pipeline has more than one rank
    stacked dim 0 counts matrices that are used as one, [2, F, D] for gate and up: split, drawn and known to other
            programs along dim 1, where the rows are
    batch_dims  how many leading dims count tensors that are stored as one and have norms of their own: 1 for [2, F, D]
            and for the experts of [E, D, F], 2 for [E, 2, F, D]; None: 1 if it is stacked, else 0
    trained whether it is a parameter, and not state that follows another rule, as the bias of a router
    offset  added to what is stored wherever it is used: 1 for norm weights that are stored as their difference from 1
    block   how many indices along `block_dim` share a generator of initial values (parallel/rng.py)
    rows    how many rows of dim 0 are vocabulary; others pad it, as the layout needs, and are not stored. None: none do
    """

    name: str
    shape: tuple[int, ...]
    shards: tuple[tuple[int, str], ...] = ()
    mesh_view: Literal["dense", "expert"] = "dense"
    partial_grad_axes: tuple[str, ...] = ()
    init: Init = field(default_factory=lambda: Normal(0.02))
    weight_decay: bool = True
    is_vocab: bool = False
    is_lookup: bool = False
    tied: bool = False
    stacked: bool = False
    batch_dims: int | None = None
    init_block: int = 128
    vocab_rows: int | None = None
    is_parameter: bool = True
    stored_offset: float = 0.0

    @property
    def is_2d(self) -> bool:
        """Whether it is a matrix or a table, or several that are stacked: nearly all of a model's memory."""
        return len(self.shape) - self.stacked > 1

    @property
    def init_dim(self) -> int:
        """The dim along which initial values are drawn in blocks: the sharded dim, or the dim of the rows."""
        return self.shards[0][0] if self.shards else int(self.stacked)

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """How many tensors of one shape are stored as this one, along each of its leading dims."""
        return self.shape[: int(self.stacked) if self.batch_dims is None else self.batch_dims]

    @property
    def is_matrix(self) -> bool:
        """Whether its last two dims are a matrix of a product, and all before count such: no embeddings or head."""
        return self.is_2d and not (self.is_vocab or self.is_lookup)

    @property
    def stored_name(self) -> str:
        """Its name in a checkpoint."""
        return f"{'model' if self.is_parameter else 'state'}/{self.name}"

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape in a checkpoint, without padding: the same under every layout."""
        return self.shape if self.vocab_rows is None else (self.vocab_rows, *self.shape[1:])

    def local_shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Shape on one rank; `sizes` maps axis names to their sizes (absent: 1)."""
        for dim, axis in self.shards:
            if self.shape[dim] % (size := sizes.get(axis, 1)):
                raise ValueError(f"{self.name}: dim {dim} of {self.shape} does not split over {axis}={size}")
        return self.box(sizes, {}).shape

    def box(self, sizes: Mapping[str, int], ranks: Mapping[str, int]) -> Box:
        """The part of the whole tensor that the rank at position `ranks` holds."""
        start, stop = [0] * len(self.shape), list(self.shape)
        for dim, axis in self.shards:
            step = self.shape[dim] // sizes.get(axis, 1)
            start[dim] = step * ranks.get(axis, 0)
            stop[dim] = start[dim] + step
        return Box(tuple(start), tuple(stop))

    def stored_box(self, sizes: Mapping[str, int], ranks: Mapping[str, int]) -> Box:
        """`box` without rows of padding, which come last: a prefix of the flattened `box`, empty if all are padding."""
        box = self.box(sizes, ranks)
        if self.vocab_rows is None:
            return box
        return Box(
            (min(box.start[0], self.vocab_rows), *box.start[1:]), (min(box.stop[0], self.vocab_rows), *box.stop[1:])
        )

    @property
    def replicated_axes(self) -> tuple[str, ...]:
        """The axes along which ranks hold the same elements, apart from the data axis."""
        split = {axis for _, axis in self.shards}
        return tuple(a for a in MESH_VIEWS[self.mesh_view][1] if a not in split) + (("tied_embedding",) if self.tied else ())

    def num_replicas(self, sizes: Mapping[str, int]) -> int:
        """How many ranks hold each element, apart from the data axis: its squared gradient counts 1/replicas."""
        return math.prod(sizes.get(axis, 1) for axis in self.replicated_axes)

    def is_first_replica(self, ranks: Mapping[str, int]) -> bool:
        """Whether the rank at position `ranks` holds the first of the replicas."""
        return not any(ranks.get(axis, 0) for axis in self.replicated_axes)


class TensorShard(NamedTuple):
    """The part of one named value that one rank holds: a contiguous range of the flattened (row-major) `box`.

    `span` counts elements inside the flattened box: range(0, box.numel) is the whole box; a ZeRO shard is a
    proper part of it. `data` is the 1-D tensor of `len(span)` elements, a view that loading may write into. `mine`:
    whether this rank is the one of its replicas that saves it.
    """

    name: str
    shape: tuple[int, ...]
    box: Box
    span: range
    data: Any
    is_owner: bool = True


def _row_major_corners(
    shape: tuple[int, ...], start: int, stop: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """(lower, upper) corners, in row-major order, of the flattened range [start, stop) of a box at the origin."""
    if start >= stop:
        return
    if len(shape) <= 1:
        yield (start,) * len(shape), (stop,) * len(shape)
        return
    inner = math.prod(shape[1:])
    row = start // inner
    if start % inner or stop - start < inner:  # a part of one row
        end = min(stop, (row + 1) * inner)
        for low, high in _row_major_corners(shape[1:], start - row * inner, end - row * inner):
            yield (row, *low), (row + 1, *high)
        yield from _row_major_corners(shape, end, stop)
        return
    last = stop // inner
    yield (row, *(0,) * (len(shape) - 1)), (last, *shape[1:])
    yield from _row_major_corners(shape, last * inner, stop)


def rectangles(box: Box, span: range) -> list[tuple[Box, range]]:
    """The rectangles of the whole tensor that make up `span` of the flattened box, each with its part of the span, from
    the span's start: the end of a row, whole rows, the start of a row, and so on inwards: at most 2 n - 1 for n dims.

        . . . # #      box of 3 x 5, range 3 .. 12:   [0, 3:5], [1:2, :], [2, 0:2]
        # # # # #
        # # . . .
    """
    result, done = [], 0
    for corners in _row_major_corners(box.shape, span.start, span.stop):
        part = Box(*(tuple(b + x for b, x in zip(box.start, corner, strict=True)) for corner in corners))
        result.append((part, range(done, done + part.numel)))
        done += part.numel
    return result


def intersect(a: Box, b: Box) -> Box | None:
    """What both hold, or None."""
    start = tuple(max(x, y) for x, y in zip(a.start, b.start, strict=True))
    stop = tuple(min(x, y) for x, y in zip(a.stop, b.stop, strict=True))
    return Box(start, stop) if all(x < y for x, y in zip(start, stop, strict=True)) else None


def slices_within(part: Box, whole: Box) -> tuple[slice, ...]:
    """Slices that pick `part` out of a tensor that holds `whole`."""
    return tuple(slice(p - w, q - w) for p, q, w in zip(part.start, part.stop, whole.start, strict=True))


def flat_offset(box: Box, corner: tuple[int, ...]) -> int:
    """Where the element `corner` of the whole tensor is in the flattened box."""
    stored_offset = 0
    for at, start, n in zip(corner, box.start, box.shape, strict=True):
        stored_offset = stored_offset * n + at - start
    return stored_offset
