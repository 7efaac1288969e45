"""The first difference between a layout and one process: its ranks, its elements, and its ratio to the reference."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tools.verification.compare_ranks import QuantityDiff
from tools.verification.reference_sharding import Layout

RATIO_TOLERANCE = 1e-3  # relative; in half precision the tolerance of the comparison if that is larger
MAX_NAMED_SAMPLES = 6


@dataclass(frozen=True)
class Finding:
    """The first difference in the order of computation.

    Attributes:
        layer: number of the layer; None outside the layers.
        ranks: the ranks that differ, by axis.
        location: the range of elements in the full tensor.
        ratio: the wrong values are those of one process times this number; None if they have no common ratio, or it
            is 1. A value that was summed or averaged once too often, or not at all, has one.
        ratio_sizes: the sizes of the layout that are equal to the ratio, such as "dp", or to its inverse, as "1/dp".
        differing: names of all quantities of the same kind that differ at the same step.
    """

    step: float
    kind: str
    name: str
    layer: int | None
    distance: float
    tolerance: float
    ranks: dict[str, list[int]]
    location: str
    ratio: float | None
    ratio_sizes: list[str]
    differing: list[str]


def first_difference(diffs: Sequence[QuantityDiff], layout: Layout, num_microbatches: int) -> Finding | None:
    """Return the first difference, or None if nothing differs.

    Args:
        diffs: the result of `compare`.
        num_microbatches: micro-batches per rank and step.
    """
    first = next((diff for diff in diffs if diff.differs), None)
    if first is None:
        return None
    axes = ["rank", "pp", "dp", "tp"]
    axes += [axis for axis in ("cp", "ep", "etp") if getattr(layout, axis) > 1]
    layer = re.match(r"layers\.(\d+)", first.name)
    ratio = _ratio(first)
    return Finding(
        step=first.step,
        kind=first.kind,
        name=first.name,
        layer=int(layer[1]) if layer else None,
        distance=first.distance,
        tolerance=first.tolerance,
        ranks={axis: sorted({getattr(part.rank, axis) for part in first.wrong_parts}) for axis in axes},
        location=first.problem or _location(first),
        ratio=ratio,
        ratio_sizes=[] if ratio is None else _sizes_equal_to(ratio, layout, num_microbatches, _ratio_tolerance(first)),
        differing=[diff.name for diff in diffs if diff.differs and (diff.step, diff.kind) == (first.step, first.kind)],
    )


def _location(diff: QuantityDiff) -> str:
    """Return the range of each dim of the full tensor that contains all the wrong elements, and their number."""
    spans: list[tuple[int, int]] = []
    num_wrong, total = 0, 0
    for part in diff.wrong_parts:
        wrong = part.wrong_elements(diff.tolerance)
        num_wrong += int(wrong.sum())
        total += wrong.size
        if not wrong.any() or not part.slices:
            continue
        shape = [cut.stop - cut.start for cut in part.slices]
        indices = np.unravel_index(part.tensor.start + np.flatnonzero(wrong), shape)
        for dim, index in enumerate(indices):
            low = int(index.min()) + part.slices[dim].start
            high = int(index.max()) + part.slices[dim].start
            if dim == len(spans):
                spans.append((low, high))
            spans[dim] = min(spans[dim][0], low), max(spans[dim][1], high)
    box = ", ".join(str(low) if low == high else f"{low}..{high}" for low, high in spans)
    elements = f"[{box}], {num_wrong:,} of {total:,} elements" if spans else ""
    wrong_samples = {part.tensor.sample for part in diff.wrong_parts}
    if wrong_samples == {part.tensor.sample for part in diff.parts}:
        return elements
    names = [str(sample) for sample in sorted(wrong_samples)[:MAX_NAMED_SAMPLES]]
    if len(wrong_samples) > MAX_NAMED_SAMPLES:
        names.append("...")
    samples = f"only in micro-batches of samples {', '.join(names)}"
    return f"{elements}, {samples}" if elements else samples


def _ratio(diff: QuantityDiff) -> float | None:
    """Return the number by which the reference has to be multiplied to get all wrong parts, or None."""
    ratios = []
    tolerance = _ratio_tolerance(diff)
    for part in diff.wrong_parts:
        square = float(part.expected @ part.expected)
        if square <= 0:
            return None
        ratio = float(part.actual @ part.expected) / square
        rest = float(np.linalg.norm(part.actual - ratio * part.expected))
        if not rest <= tolerance * float(np.linalg.norm(part.actual)):
            return None
        ratios.append(ratio)
    if not ratios or max(ratios) - min(ratios) > tolerance * max(map(abs, ratios)):
        return None
    ratio = sum(ratios) / len(ratios)
    return None if math.isclose(ratio, 1.0, rel_tol=tolerance) else ratio


def _ratio_tolerance(diff: QuantityDiff) -> float:
    return max(RATIO_TOLERANCE, diff.tolerance)


def _sizes_equal_to(ratio: float, layout: Layout, num_microbatches: int, tolerance: float) -> list[str]:
    """Return the sizes above 1 that are equal to a ratio, such as "dp", or to its inverse, as "1/dp"."""
    sizes = {axis: getattr(layout, axis) for axis in ("dp", "cp", "tp", "pp", "ep", "etp", "edp")}
    sizes["micro-batches"] = num_microbatches
    large = {name: size for name, size in sizes.items() if size > 1}
    equal = [name for name, size in large.items() if math.isclose(ratio, size, rel_tol=tolerance)]
    return equal + [f"1/{name}" for name, size in large.items() if math.isclose(ratio * size, 1.0, rel_tol=tolerance)]
