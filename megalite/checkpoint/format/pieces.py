"""The views of a piece's rectangles (parallel/rectangles.py), and whether boxes are a whole tensor. Pure."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalite.parallel.rectangles import rectangles
from megalite.parallel.spec import Box, Piece


def views(piece: Piece) -> list[tuple[Box, Any]]:
    """The rectangles of a piece, each with a view of its values."""
    data = piece.data.detach()
    return [(box, data[span.start : span.stop].view(box.shape)) for box, span in rectangles(piece.box, piece.span)]


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
