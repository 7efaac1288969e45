"""The rectangles of the whole tensor that make up a piece, and their intersections. Pure.

A piece is a contiguous range of a flattened box (parallel/spec.py). Such a range is the end of a row, whole rows and
the start of a row, and so on inwards: at most 2 n - 1 rectangles for n dims (3 for a matrix).

    . . . # #      box of 3 x 5, range 3 .. 12:   [0, 3:5], [1:2, :], [2, 0:2]
    # # # # #
    # # . . .
"""

import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalite.parallel.spec import Box, Piece


def _split(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
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
        for low, high in _split(shape[1:], start - row * inner, end - row * inner):
            yield (row, *low), (row + 1, *high)
        yield from _split(shape, end, stop)
        return
    last = stop // inner
    yield (row, *(0,) * (len(shape) - 1)), (last, *shape[1:])
    yield from _split(shape, last * inner, stop)


def rectangles(box: Box, span: range) -> list[tuple[Box, range]]:
    """The rectangles of the whole tensor that make up `span` of the flattened box, each with its place in the span."""
    result, done = [], 0
    for low, high in _split(box.shape, span.start, span.stop):
        part = Box(*(tuple(b + x for b, x in zip(box.start, corner, strict=True)) for corner in (low, high)))
        result.append((part, range(done, done + part.numel)))
        done += part.numel
    return result


def views(piece: Piece) -> list[tuple[Box, Any]]:
    """The rectangles of a piece, each with a view of its values."""
    data = piece.data.detach()
    return [(box, data[span.start : span.stop].view(box.shape)) for box, span in rectangles(piece.box, piece.span)]


def intersect(a: Box, b: Box) -> Box | None:
    """The elements of both, None if there are none."""
    start = tuple(max(x, y) for x, y in zip(a.start, b.start, strict=True))
    stop = tuple(min(x, y) for x, y in zip(a.stop, b.stop, strict=True))
    return Box(start, stop) if all(x < y for x, y in zip(start, stop, strict=True)) else None


def inside(part: Box, whole: Box) -> tuple[slice, ...]:
    """Slices that pick `part` out of a tensor that holds `whole`."""
    return tuple(slice(p - w, q - w) for p, q, w in zip(part.start, part.stop, whole.start, strict=True))


def offset_in(box: Box, corner: tuple[int, ...]) -> int:
    """Offset of the element `corner` of the whole tensor in the flattened box."""
    offset = 0
    for at, start, n in zip(corner, box.start, box.shape, strict=True):
        offset = offset * n + at - start
    return offset


def cover(shape: tuple[int, ...], boxes: Sequence[Box]) -> bool:
    """Whether the boxes hold every element of a tensor exactly once, in time n log n. OverflowError from 2^63 elements.

    The differences along every dim of a function that is 1 inside a box are its corners, half of them positive. They
    can be summed up again, so boxes add up to the whole if their corners do.
    """
    strides = [math.prod(n + 1 for n in shape[d + 1 :]) for d in range(len(shape))]
    if math.prod(n + 1 for n in shape) >= 1 << 63:
        raise OverflowError(f"a tensor of {shape}")
    plus, minus = _corners(boxes, strides)
    whole_plus, whole_minus = _corners([Box((0,) * len(shape), shape)], strides)
    return np.array_equal(np.sort(np.append(plus, whole_minus)), np.sort(np.append(minus, whole_plus)))


def _corners(boxes: Sequence[Box], strides: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Offsets of the positive and of the negative corners, [2^(n - 1), boxes] each."""
    sides = [box.start for box in boxes], [box.stop for box in boxes]
    plus, minus = np.zeros((1, len(boxes)), np.int64), np.zeros((0, len(boxes)), np.int64)
    for d, stride in enumerate(strides):
        low, high = (stride * np.array([ends[d] for ends in side], np.int64) for side in sides)
        plus, minus = np.concatenate([plus + low, minus + high]), np.concatenate([minus + low, plus + high])
    return plus, minus
