"""Parameter specs: how a parameter is sharded, and which rectangles of the full tensor a rank's shard consists of.

A `ParamSpec` is the only place for facts about a parameter. Initialization, gradient reduction, optimizer, gradient
norm, checkpoint and conversion read it, and none of them keeps a copy. Shapes are in elements. This module does not
import torch.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from megalite.config.width_scaling import INIT_POWERS, WidthRole


@dataclass(frozen=True)
class Normal:
    """Initialization from N(0, std^2)."""

    std: float


@dataclass(frozen=True)
class Constant:
    """Initialization with one value (norm weights: 1, biases: 0)."""

    value: float


@dataclass(frozen=True)
class Uniform:
    """Initialization from the uniform distribution over [low, high); `of_log`: with the logarithm of such a number."""

    low: float
    high: float
    of_log: bool = False


@dataclass(frozen=True)
class InverseSoftplus:
    """Initialization with x for which softplus(x) is a number whose logarithm is uniform over [log low, log high)."""

    low: float
    high: float


Init = Normal | Constant | Uniform | InverseSoftplus

# mesh view -> the axis over which gradients are summed, and the axes along which a parameter is sharded or replicated
MESH_VIEWS: Mapping[str, tuple[str, tuple[str, ...]]] = {"dense": ("dp_cp", ("tp",)), "expert": ("edp", ("ep", "etp"))}
# mesh view -> the axis over which optimizer state is sharded, and the axis along which it is replicated
SHARD_AXES: Mapping[str, tuple[str, str]] = {
    "dense": ("dp_shard", "dp_replicate"),
    "expert": ("edp_shard", "edp_replicate"),
}


class Box(NamedTuple):
    """A half-open rectangle of a full tensor: `start[d] <= index[d] < stop[d]`."""

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
    """One parameter of the model. All fields describe the full tensor, independently of the layout.

    Attributes:
        name: canonical name with the global layer number: "layers.17.mlp.gate_up".
        shape: shape of the full tensor, in elements.
        shards: (dim, axis name) pairs: ((0, "tp"),) shards dim 0 evenly over the tp axis.
        mesh_view: "dense" or "expert", the view of a pipeline stage's ranks in which it is sharded (MESH_VIEWS).
        partial_grad_axes: axes along which it is replicated and each rank computes only a summand of its gradient:
            ("tp",) for norms under sequence parallelism, row-parallel biases and replicated key/value projections.
        init: distribution of the initial full tensor; its bits do not depend on the layout (parallel/rng.py).
        weight_decay: True if weight decay applies.
        is_vocab: True for the word embedding and the head, which can have a learning rate of their own.
        is_lookup: True for embeddings: rows are selected by an index, so it is not the matrix of a product.
        tied: True if the other end of the pipeline has a second copy. Both copies carry the flag, and only when the
            pipeline has more than one rank.
        stacked: True if dim 0 counts matrices that are used as one, [2, F, D] for gate and up. They are sharded, drawn
            and converted along dim 1, the dim of the rows.
        batch_dims: number of leading dims that count tensors stored as one, each with a norm of its own: 1 for
            [2, F, D] and for the experts of [E, D, F], 2 for [E, 2, F, D]. None: 1 if it is stacked, else 0.
        init_block: number of indices along `init_dim` that share a generator of initial values (parallel/rng.py).
        vocab_rows: number of rows of dim 0 that belong to the vocabulary. The other rows are padding that the layout
            needs, and are not stored. None: there is no padding.
        is_parameter: False for state that follows another rule than the optimizer's, like the bias of a router.
        stored_offset: added to the stored value wherever it is used: 1 for norm weights that are stored as their
            difference from 1.
        keep_fp32: True if the weights are in fp32 in a bf16 or fp16 model, like the decay rates of a recurrence, whose
            steps are smaller than bf16 resolves.
        is_filter: True for a filter of each channel, like the taps of a convolution: no row meets another channel, so
            it is not the matrix of a product.
        width_role: which sides of its product grow with the width of the model, for muP (config/width_scaling.py).
            None: "hidden" for a matrix, otherwise "input".
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
    keep_fp32: bool = False
    is_filter: bool = False
    width_role: WidthRole | None = None

    @property
    def is_2d(self) -> bool:
        """True for a matrix or a table, or a stack of them: nearly all of a model's memory."""
        return len(self.shape) - self.stacked > 1

    @property
    def init_dim(self) -> int:
        """The dim along which initial values are drawn in blocks: the first sharded dim, else the dim of the rows."""
        return self.shards[0][0] if self.shards else int(self.stacked)

    @property
    def batch_shape(self) -> tuple[int, ...]:
        """The leading dims that count tensors of one shape stored as this one; () if it is a single tensor."""
        return self.shape[: int(self.stacked) if self.batch_dims is None else self.batch_dims]

    @property
    def is_matrix(self) -> bool:
        """True if its last two dims are the matrix of a product and all others count matrices; not embeddings, head."""
        return self.is_2d and not (self.is_vocab or self.is_lookup or self.is_filter)

    @property
    def effective_width_role(self) -> WidthRole:
        """The role of the parameter for muP."""
        if self.width_role is not None:
            return self.width_role
        return "hidden" if self.is_matrix else "input"

    def for_width(self, width_mult: float) -> "ParamSpec":
        """Return the spec with the initial weights of muP, for a model that is `width_mult` times as wide as its base.

        Only normal distributions are scaled.
        """
        power = INIT_POWERS[self.effective_width_role]
        if width_mult == 1 or not power or not isinstance(self.init, Normal):
            return self
        return replace(self, init=Normal(self.init.std * width_mult**power))

    @property
    def stored_name(self) -> str:
        """The name in a checkpoint."""
        return f"{'model' if self.is_parameter else 'state'}/{self.name}"

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The shape in a checkpoint, without padding: the same under every layout."""
        return self.shape if self.vocab_rows is None else (self.vocab_rows, *self.shape[1:])

    def local_shape(self, sizes: Mapping[str, int]) -> tuple[int, ...]:
        """Return the shape on one rank; `sizes` maps axis names to their sizes (absent: 1).

        Raises ValueError if a dim does not split evenly.
        """
        for dim, axis in self.shards:
            if self.shape[dim] % (size := sizes.get(axis, 1)):
                raise ValueError(f"{self.name}: dim {dim} of {self.shape} does not split over {axis}={size}")
        return self.box(sizes, {}).shape

    def box(self, sizes: Mapping[str, int], ranks: Mapping[str, int]) -> Box:
        """Return the part of the full tensor on the rank with coordinates `ranks`."""
        start, stop = [0] * len(self.shape), list(self.shape)
        for dim, axis in self.shards:
            step = self.shape[dim] // sizes.get(axis, 1)
            start[dim] = step * ranks.get(axis, 0)
            stop[dim] = start[dim] + step
        return Box(tuple(start), tuple(stop))

    def stored_box(self, sizes: Mapping[str, int], ranks: Mapping[str, int]) -> Box:
        """Return `box` without the padding rows.

        Padding comes last, so this is a prefix of the flattened `box`; it is empty if all rows are padding.
        """
        box = self.box(sizes, ranks)
        if self.vocab_rows is None:
            return box
        start = (min(box.start[0], self.vocab_rows), *box.start[1:])
        stop = (min(box.stop[0], self.vocab_rows), *box.stop[1:])
        return Box(start, stop)

    @property
    def replicated_axes(self) -> tuple[str, ...]:
        """The axes other than the data axis along which ranks have the same elements."""
        sharded = {axis for _, axis in self.shards}
        replicated = tuple(axis for axis in MESH_VIEWS[self.mesh_view][1] if axis not in sharded)
        return (*replicated, "tied_embedding") if self.tied else replicated

    def num_replicas(self, sizes: Mapping[str, int]) -> int:
        """Return the number of ranks that have each element, apart from the data axis.

        In the gradient norm, the squared gradient of each replica counts 1/replicas.
        """
        return math.prod(sizes.get(axis, 1) for axis in self.replicated_axes)

    def is_first_replica(self, ranks: Mapping[str, int]) -> bool:
        """Return True if the rank with coordinates `ranks` has the first of the replicas."""
        return not any(ranks.get(axis, 0) for axis in self.replicated_axes)


@dataclass(frozen=True)
class TensorShard:
    """The part of one named tensor on one rank: a contiguous range of the flattened (row-major) `box`.

    Attributes:
        name: name in a checkpoint.
        shape: shape of the full tensor.
        box: the part of the full tensor that contains the shard.
        span: elements of the flattened box. range(0, box.numel) is the full box; a ZeRO shard is a proper part of it.
        data: 1-D tensor of `len(span)` elements, a view that loading may write to.
        is_owner: True if this rank is the one among its replicas that saves the shard.
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
    """Yield the (start, stop) corners of the rectangles that make up a range of a flattened box, in row-major order.

    The range is [start, stop), the box has `shape` and starts at the origin.
    """
    if start >= stop:
        return
    if len(shape) <= 1:
        yield (start,) * len(shape), (stop,) * len(shape)
        return
    inner = math.prod(shape[1:])
    row = start // inner
    if start % inner or stop - start < inner:  # the range starts with a part of one row
        end = min(stop, (row + 1) * inner)
        for low, high in _row_major_corners(shape[1:], start - row * inner, end - row * inner):
            yield (row, *low), (row + 1, *high)
        yield from _row_major_corners(shape, end, stop)
        return
    stop_row = stop // inner
    origin = (0,) * (len(shape) - 1)
    yield (row, *origin), (stop_row, *shape[1:])
    yield from _row_major_corners(shape, stop_row * inner, stop)


def rectangles(box: Box, span: range) -> list[tuple[Box, range]]:
    """Return the rectangles of the full tensor that make up `span` of the flattened box.

    Each comes with its part of the span, counted from the start of the span. The rectangles are the end of a row, full
    rows and the start of a row, and recursively the same within a row: at most 2 n - 1 for n dims.

        . . . # #      box of 3 x 5, range 3 .. 12:   [0, 3:5], [1:2, :], [2, 0:2]
        # # # # #
        # # . . .
    """
    result: list[tuple[Box, range]] = []
    offset = 0
    for corners in _row_major_corners(box.shape, span.start, span.stop):
        part = Box(*(tuple(b + x for b, x in zip(box.start, corner, strict=True)) for corner in corners))
        result.append((part, range(offset, offset + part.numel)))
        offset += part.numel
    return result


def intersect(a: Box, b: Box) -> Box | None:
    """Return the intersection of two boxes, or None if it is empty."""
    start = tuple(max(x, y) for x, y in zip(a.start, b.start, strict=True))
    stop = tuple(min(x, y) for x, y in zip(a.stop, b.stop, strict=True))
    return Box(start, stop) if all(x < y for x, y in zip(start, stop, strict=True)) else None


def slices_within(part: Box, outer: Box) -> tuple[slice, ...]:
    """Return the slices that select `part` from a tensor with the elements of `outer`."""
    return tuple(slice(p - o, q - o) for p, q, o in zip(part.start, part.stop, outer.start, strict=True))


def flat_offset(box: Box, corner: tuple[int, ...]) -> int:
    """Return the index in the flattened box of the element `corner` of the full tensor."""
    offset = 0
    for index, start, size in zip(corner, box.start, box.shape, strict=True):
        offset = offset * size + index - start
    return offset
