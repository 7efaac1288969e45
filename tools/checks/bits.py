"""Are two tensors the same to the bit, and a foreign checkpoint and ours?"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megalite.interop.convert import Foreign, Ours
from megalite.interop.rules import Specs
from tools.foreign_import import kept


@dataclass(frozen=True)
class Difference:
    """How one tensor differs from another. `note`: in its shape, its dtype, or in being there at all. `count` elements
    differ, the first at `index`, where it is `here` and `there`, by at most `largest`."""

    name: str
    note: str = ""
    index: tuple[int, ...] | None = None
    here: float = 0.0
    there: float = 0.0
    largest: float = 0.0
    count: int = 0


def difference(name: str, here: Tensor, there: Tensor) -> Difference | None:
    """Of two tensors of one shape: in any bit, or where their dtypes differ, in any value. NaN equals NaN then."""
    note = "" if here.dtype == there.dtype else f"{str(here.dtype)[6:]} and {str(there.dtype)[6:]}"
    if note:
        x, y = here.double(), there.double()
        far = ~((x == y) | (x.isnan() & y.isnan()))
    else:
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[here.dtype.itemsize]
        far = here.contiguous().view(bits) != there.contiguous().view(bits)
    if not far.any():
        return Difference(name, note) if note else None
    first = far.reshape(-1).to(torch.uint8).argmax()
    index = tuple(int(i) for i in torch.unravel_index(first, here.shape)) if here.dim() else ()
    x, y = here[far].double(), there[far].double()
    largest = float((x - y).abs().nan_to_num(math.inf, math.inf).max())
    return Difference(name, note, index, float(x[0]), float(y[0]), largest, len(x))


@dataclass(frozen=True)
class Verdict:
    """`differing`: rectangles of ours, by the name of theirs and ours."""

    tensors: int
    elements: int
    differing: list[Difference]

    def __str__(self) -> str:
        if not self.differing:
            return f"check: {self.tensors} tensors, {self.elements:,} elements, all bits equal"
        largest = max(self.differing, key=lambda d: d.largest)
        lines = [f"check: {len(self.differing)} parts of {self.tensors} tensors differ"]
        return "\n".join([*lines, f"first: {_told(self.differing[0])}", f"largest: {_told(largest)}"])


def _told(d: Difference) -> str:
    more = f"{d.count:,} elements of it differ, by at most {d.largest:g}"
    return f"{d.name}{list(d.index or ())}: {d.there!r} there, {d.here!r} here; {d.note and d.note + ', '}{more}"


def compare(foreign: Iterable[Foreign], ours: Ours, specs: Specs) -> Verdict:
    """Every foreign tensor against ours, bit by bit; `specs` tell which rows pad the vocabulary and do not count."""
    tensors, elements, differing = 0, 0, []
    for one in foreign:
        tensors += 1
        for spec, box, theirs in kept(one, specs):
            elements += theirs.numel()
            found = difference(f"{one.place}, {spec.name}", ours.read(spec.name, box), theirs)
            if found is not None:
                at = zip(found.index or (), box.start, strict=False)  # no index where only dtypes differ
                differing.append(replace(found, index=tuple(i + start for i, start in at)))
    return Verdict(tensors, elements, differing)
