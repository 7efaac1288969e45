"""Do the ranks of a layout have what one process has? Every hidden state, loss, gradient and weight, on every rank.

A rank's tensor is compared with its part of the one process's (places.py), copies each by itself: a stale one is found
where the owner's is right. `apart` is the norm of the difference over that of the reference, spread evenly:

    apart = |a - b| / (rms(whole b) sqrt(elements of a))       rms of gradients at least FLOOR of that of all gradients

Tolerance: a sum of n rounded terms is off by about eps sqrt(n) of its size (Higham, Accuracy and Stability of Numerical
Algorithms, 2002, sec. 2.8 and 4.2); n: the longest sum, over the tokens of a step or the widest layer. In half
precision sums run in fp32, and what is rounded is each of the OPERATIONS of a layer, one after another. A step trains
on what the one before left, and Adam divides by small numbers: each allows GROWTH times more. Copies of a weight are
equal to the bit, in every precision.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tools.verification.record import FINAL, MICROBATCH, STEP, Item, Recording
from tools.verification.reference_sharding import Layout, Place, of_experts, place

Array = NDArray[Any]
Key = tuple[float, str, str]  # step (n + 0.5: the evaluation after step n), kind, name
KINDS = ("input", "forward", "loss", "gradient", "norm", "router", "weight")  # in the order of a step
INPUTS = ("tokens", "positions", "labels", "loss mask")
EPS = {"float64": 2.0**-52, "float32": 2.0**-23, "bfloat16": 2.0**-8, "float16": 2.0**-11}
ALLOWED, GROWTH, FLOOR = 16.0, 4.0, 0.1
# of half precision: what is summed over all tokens is rounded less; docs/verify.md has what was measured
HALF, HALF_GROWTH, OPERATIONS = {"forward": 2.5, "loss": 0.25, "gradient": 5.0, "norm": 1.0, "weight": 2.0}, 2.0, 12


class Tolerance(NamedTuple):
    """`terms`: of the longest sum; `layers`: of the model."""

    dtype: str
    terms: int
    layers: int

    def at(self, step: float, kind: str) -> float:
        if kind == "input":
            return 0.0
        eps, later = EPS[self.dtype], max(0, step - 1)
        if eps > EPS["float32"]:
            return HALF[kind] * HALF_GROWTH**later * eps * math.sqrt(OPERATIONS * self.layers)
        return ALLOWED * GROWTH**later * eps * math.sqrt(self.terms)


class Piece(NamedTuple):
    """A rank's part of an array and the same part in one process, both flat and of one length. `odd`: where it differs
    from most copies."""

    place: Place
    item: Item
    slices: tuple[slice, ...]
    here: Array
    there: Array
    odd: Array | None = None

    @property
    def box(self) -> tuple[tuple[int, int], ...]:
        """Where it lies in the whole tensor."""
        return tuple((cut.start, cut.stop) for cut in self.slices)

    @property
    def error(self) -> float:
        return float(np.linalg.norm(self.here - self.there))

    def bad(self, tolerance: float) -> Array:
        """Which elements differ; where all are a little off, those that are most."""
        if self.odd is not None:
            return self.odd
        apart = np.abs(self.here - self.there)
        size, most = (float(some[np.isfinite(some)].max(initial=0.0)) for some in (np.abs(self.there), apart))
        return ~(apart <= min(tolerance * size, most / 2))  # NaN is


@dataclass
class Row:
    """How far one quantity is apart at one step; `wrong`: the pieces that are beyond the tolerance."""

    step: float
    kind: str
    name: str
    tolerance: float
    apart: float = 0.0
    pieces: list[Piece] = field(default_factory=list)
    wrong: list[Piece] = field(default_factory=list)
    missing: str = ""

    @property
    def differs(self) -> bool:
        return bool(self.missing or self.wrong)


class Reference:
    """The arrays of the one process."""

    def __init__(self, recording: Recording):
        self.parameters, self.vocabulary = recording.parameters, recording.vocabulary
        self.arrays: dict[Key, dict[int, Array]] = {}
        for item, data in recording.items:
            samples = self.arrays.setdefault((item.step, item.kind, item.name), {})
            samples[item.sample] = data.reshape(item.shape)
        self.forward = list(dict.fromkeys(item.name for item, _ in recording.items if item.kind == "forward"))
        gradients: dict[float, list[Array]] = {}
        for (step, kind, _), samples in self.arrays.items():
            if kind == "gradient":
                gradients.setdefault(step, []).append(samples[-1])
        self.floors = {step: FLOOR * _rms(each) for step, each in gradients.items()}

    def scale(self, key: Key) -> float:
        """The size by which differences of this array are divided."""
        floor = self.floors[key[0]] if key[1] == "gradient" else 0.0
        return max(_rms(self.arrays[key].values()), floor, 1e-300)

    def order(self, key: Key) -> tuple[float, int, int, str]:
        """When it is computed: gradients in the order of backward."""
        step, kind, name = key
        at = 0
        if kind in ("gradient", "weight") and name in self.parameters:
            at = self.parameters.index(name) * (-1 if kind == "gradient" else 1)
        elif kind == "forward" and name in self.forward:
            at = self.forward.index(name)
        elif name in INPUTS:
            at = INPUTS.index(name)
        elif kind == "loss":
            at = (MICROBATCH, STEP).index(name)
        return step, KINDS.index(kind), at, name


def when(step: float) -> str:
    """In words."""
    return f"step {step:g}" if step == int(step) else f"the evaluation after step {math.floor(step)}"


def _rms(arrays: Iterable[Array]) -> float:
    """The root mean square over all arrays together."""
    each = [(float(np.square(one.astype(np.float64)).sum()), one.size) for one in arrays]
    return math.sqrt(sum(square for square, _ in each) / max(1, sum(size for _, size in each)))


def compare(
    reference: Reference, ranks: Sequence[Recording], layout: Layout, tolerance: Tolerance
) -> tuple[list[Row], dict[Key, list[Piece]]]:
    """In the order of computation: how far everything is apart, and all pieces of what is."""
    pieces: dict[Key, list[Piece]] = {}
    odd: dict[Key, str] = {}
    for rank, recording in enumerate(ranks):
        for item, data in recording.items:
            key = (item.step, item.kind, item.name)
            whole = reference.arrays.get(key, {}).get(item.sample)
            if whole is None:
                what = f"micro-batch of sample {item.sample}" if item.sample >= 0 else item.name
                odd.setdefault(key, f"rank {rank} has a {what}, which one process has not")
                continue
            try:
                where = layout.at(rank)
                rows = item.shape if item.row < 0 else whole.shape[:1] + item.shape[1:]
                slices = place(rows, whole.shape, where, layout, of_experts(item.name))
                if item.row >= 0:
                    slices = (slice(item.row, item.row + item.shape[0]), *slices[1:])
                there = whole[slices].reshape(-1)[item.first : item.first + data.size].astype(np.float64)
                here = data.reshape(-1).astype(np.float64)[: there.size]  # what is behind is padding
                pieces.setdefault(key, []).append(Piece(where, item, slices, here, there))
            except ValueError as error:
                odd.setdefault(key, str(error))
    rows = []
    for key in sorted({*reference.arrays, *odd}, key=reference.order):
        row = Row(*key, tolerance.at(key[0], key[1]), pieces=pieces.get(key, []), missing=odd.get(key, ""))
        if key in reference.arrays:
            row.missing = row.missing or _uncovered(reference.arrays[key], row.pieces)
            _measure(row, reference.scale(key))
            if not row.wrong and row.kind == "weight":
                row.wrong = list(_odd_copies(row.pieces))
        rows.append(row)
    return rows, pieces


def _measure(row: Row, scale: float) -> None:
    for piece in row.pieces:
        if not piece.here.size:
            continue
        if row.kind == "input":
            apart = float((piece.here != piece.there).any())
        else:
            apart = piece.error / (scale * math.sqrt(piece.here.size))
        apart = math.inf if math.isnan(apart) else apart
        row.apart = max(row.apart, apart)
        if apart > row.tolerance:
            row.wrong.append(piece)


def _odd_copies(pieces: Sequence[Piece]) -> Iterator[Piece]:
    """Those that are not what most copies of the same elements are; of two, the one further from the one process."""
    places: dict[tuple[Any, ...], list[Piece]] = {}
    for piece in pieces:
        places.setdefault((piece.box, piece.item.first, piece.here.size), []).append(piece)
    for copies in places.values():
        kinds: dict[bytes, list[Piece]] = {}
        for piece in copies:
            kinds.setdefault(piece.here.tobytes(), []).append(piece)
        usual, *rest = sorted(kinds.values(), key=lambda some: (-len(some), some[0].error))
        for piece in (piece for some in rest for piece in some):
            yield piece._replace(odd=piece.here != usual[0].here)


def _uncovered(samples: dict[int, Array], pieces: Sequence[Piece]) -> str:
    """A sentence on the elements that no rank has; empty where there are none."""
    for sample, whole in samples.items():
        there = np.zeros(whole.shape, bool)
        for piece in pieces:
            if piece.item.sample == sample:
                box = there[piece.slices]
                flat = box.reshape(-1)
                flat[piece.item.first : piece.item.first + piece.here.size] = True
                there[piece.slices] = flat.reshape(box.shape)
        if not there.all():
            part = f"{int((~there).sum()):,} of {there.size:,} elements"
            return f"{part} are on no rank" + (f", of the micro-batch of sample {sample}" if sample >= 0 else "")
    return ""


def second_reading(reference: Reference, tolerance: Tolerance) -> Iterator[str]:
    """Check the losses of the one process itself against their definition: cross entropy of the final hidden
    states over the true vocabulary, labels that count alone, divided by how many these are. A line per step."""
    for step in sorted({step for step, kind, _ in reference.arrays if kind == "loss"}):
        had = {name: reference.arrays.get((step, "input", name), {}) for name in ("labels", "loss mask")}
        final, told = reference.arrays[step, "forward", FINAL], reference.arrays[step, "loss", MICROBATCH]
        last = reference.vocabulary[-1]  # the head, or the embedding that it is tied to
        head = reference.arrays[math.ceil(step) - 1, "weight", last][-1].astype(np.float64)
        total, count, bound = 0.0, 0.0, tolerance.at(step, "loss")
        for sample, hidden in final.items():
            labels = had["labels"][sample]
            mask = had["loss mask"].get(sample, np.ones(labels.shape))
            if hidden.size // hidden.shape[-1] * head.shape[0] > 2**27:
                return  # a gigabyte of logits
            logits = hidden.astype(np.float64) @ head.T
            most = logits.max(-1, keepdims=True)
            lse = np.log(np.exp(logits - most).sum(-1)) + most[..., 0]
            loss = float(((lse - np.take_along_axis(logits, labels[..., None], -1)[..., 0]) * mask).sum())
            total, count = total + loss, count + float(mask.sum())
            if abs(loss - float(told[sample])) > bound * max(abs(loss), 1.0):
                yield (
                    f"{when(step)}: the loss of the micro-batch of sample {sample} is {float(told[sample]):.9g}, and "
                    f"by its definition {loss:.9g}: {int(mask.sum())} of {mask.size} labels count, of {len(head)} ids"
                )
                return
        mean = float(reference.arrays[step, "loss", STEP][-1])
        if count and abs(mean - total / count) > bound * max(abs(mean), 1.0):
            yield (
                f"{when(step)}: the loss is {mean:.9g}, and by its definition {total / count:.9g}: the sum of all "
                f"micro-batches over the {count:.0f} labels that count"
            )
            return
