"""Where every parameter lies in the flat weight and gradient tensors, and which rank owns what of them. Pure.

    | bucket 0 (chunk 0, last layers)  | bucket 1 ...     | ...  | partial | tied |      one flat tensor per rank
    | 0    | 1    | 2    | 3           |                             each bucket splits evenly over its data axis

Parameters are laid in reverse order of use, the order in which their gradients arrive, and cut into buckets of about
`bucket_size` elements that never span model chunks. What is reduced, counted or decayed differently gets buckets of
its own (partial gradients, tied ends, experts, no decay, a rate of its own), so that each of these is one collective or
one update of a whole bucket, and no code below asks what a parameter is. Padding: slots start at multiples of `ALIGN`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from megalite.parallel.spec import HOMES, ParamSpec

ALIGN = 64  # elements; 128 bytes in bf16, so that every matmul operand is aligned for tensor cores


@dataclass(frozen=True)
class Entry:
    """One local parameter: its spec, its number of local elements, the model chunk it is used in."""

    spec: ParamSpec
    numel: int
    chunk: int


@dataclass(frozen=True)
class Kind:
    """What all parameters of a bucket have in common (parallel/spec.py). `partial`: of axes that have other ranks.
    `replicas`: ranks that hold each element, the data axis aside. `decoupled`: the learning rate is that of embedding
    and head."""

    home: str
    partial: tuple[str, ...]
    tied: bool
    decay: bool
    decoupled: bool
    replicas: int


@dataclass(frozen=True)
class Slot:
    """Elements [start, stop) of the flat tensor are entry number `entry`."""

    entry: int
    start: int
    stop: int


@dataclass(frozen=True)
class Bucket:
    """Elements [start, stop) of the flat tensor, padding included; what one collective moves."""

    chunk: int
    kind: Kind
    start: int
    stop: int
    slots: tuple[Slot, ...]

    def shard(self, ranks: int, rank: int) -> range:
        """The part of the flat tensor that rank `rank` of `ranks` owns, a divisor of its data axis."""
        size = (self.stop - self.start) // ranks
        return range(self.start + rank * size, self.start + (rank + 1) * size)


@dataclass(frozen=True)
class Layout:
    """All buckets, back to back; `size` elements in the flat tensor."""

    entries: tuple[Entry, ...]
    buckets: tuple[Bucket, ...]
    size: int

    def __str__(self) -> str:
        lines = []
        for i, b in enumerate(self.buckets):
            kind = "partial" if b.kind.partial else "tied" if b.kind.tied else "whole"
            names = [self.entries[s.entry].spec.name for s in b.slots]
            lines.append(
                f"bucket {i:3d} chunk {b.chunk} {kind:7s} {'decay' if b.kind.decay else 'plain'} "
                f"{b.stop - b.start:11,d} elements  {names[0]} .. {names[-1]}"
            )
        return "\n".join(lines)


def lay_out(entries: Sequence[Entry], *, bucket_size: int, sizes: Mapping[str, int], decoupled: bool = False) -> Layout:
    """Lay the entries (in order of use) into buckets of at least `bucket_size` elements (the last of a kind: less).
    `sizes`: of the axes (absent: 1). `decoupled`: embedding and head have a learning rate of their own.

    Buckets of a chunk are in the order in which backward fills them: that of their last members.
    """
    buckets: list[Bucket] = []
    position = 0
    for chunk in sorted({e.chunk for e in entries}):
        open_slots: dict[Kind, list[int]] = {}
        closed: list[tuple[Kind, list[int]]] = []
        for index in reversed(range(len(entries))):
            entry = entries[index]
            if entry.chunk != chunk:
                continue
            kind = _kind(entry.spec, sizes, decoupled)
            members = open_slots.setdefault(kind, [])
            members.append(index)
            if sum(entries[i].numel for i in members) >= bucket_size:
                closed.append((kind, open_slots.pop(kind)))
        for kind, members in sorted([*closed, *open_slots.items()], key=lambda bucket: -bucket[1][-1]):
            start, slots = position, []
            unit = ALIGN * sizes.get(HOMES[kind.home][0], 1)
            for index in members:
                slots.append(Slot(index, position, position + entries[index].numel))
                position = _up(slots[-1].stop, ALIGN)
            position = start + _up(position - start, unit)
            buckets.append(Bucket(chunk, kind, start, position, tuple(slots)))
    return Layout(tuple(entries), tuple(buckets), position)


def _kind(spec: ParamSpec, sizes: Mapping[str, int], decoupled: bool) -> Kind:
    partial = tuple(axis for axis in spec.partial if sizes.get(axis, 1) > 1)
    return Kind(spec.home, partial, spec.tied, spec.decay, spec.vocabulary and decoupled, spec.replicas(sizes))


def _up(n: int, multiple: int) -> int:
    return -(-n // multiple) * multiple
