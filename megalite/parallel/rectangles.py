"""Which rectangles of a whole tensor a piece is, and how rectangles meet. Pure.

A piece is a contiguous range of a flattened box (spec.py). Such a range is the end of a row, whole rows and
the start of a row, and so on inwards: at most 2 n - 1 rectangles for n dims (3 for a matrix).

    . . . # #      box of 3 x 5, range 3 .. 12:   [0, 3:5], [1:2, :], [2, 0:2]
    # # # # #
    # # . . .
"""

import math
from collections.abc import Iterator

from megalite.parallel.spec import Box


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
    """The rectangles of the whole tensor that make up `span` of the flattened box, each with its part of the span,
    counted from the span's start."""
    result, done = [], 0
    for low, high in _split(box.shape, span.start, span.stop):
        start = tuple(b + x for b, x in zip(box.start, low, strict=True))
        stop = tuple(b + x for b, x in zip(box.start, high, strict=True))
        part = Box(start, stop)
        result.append((part, range(done, done + part.numel)))
        done += part.numel
    return result


def intersect(a: Box, b: Box) -> Box | None:
    """What both hold, or None."""
    start = tuple(max(x, y) for x, y in zip(a.start, b.start, strict=True))
    stop = tuple(min(x, y) for x, y in zip(a.stop, b.stop, strict=True))
    return Box(start, stop) if all(x < y for x, y in zip(start, stop, strict=True)) else None


def inside(part: Box, whole: Box) -> tuple[slice, ...]:
    """Slices that pick `part` out of a tensor that holds `whole`."""
    return tuple(slice(p - w, q - w) for p, q, w in zip(part.start, part.stop, whole.start, strict=True))


def offset_in(box: Box, corner: tuple[int, ...]) -> int:
    """Where the element `corner` of the whole tensor is in the flattened box."""
    offset = 0
    for at, start, n in zip(corner, box.start, box.shape, strict=True):
        offset = offset * n + at - start
    return offset
