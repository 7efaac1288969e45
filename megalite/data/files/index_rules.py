"""The rules of an index, checked in bulk, as a pure function of an open file.

    lengths[i] >= 0     pointers[0] = 0     pointers[i] + width * lengths[i] = pointers[i + 1], the last: size of .bin
    document_indices    begin with 0, never decrease, end with the number of sequences

When all hold, every sequence lies inside the .bin file, by induction over i. The columns are read into buffers that
stay in the cache: a map would count 20 bytes per document as resident memory. A document costs 2 ns when warm.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

CHUNK = 1 << 15  # entries read at a time
# the dtype of each, and its place: bytes per sequence behind the header
COLUMNS = {"lengths": ("<i4", 0), "pointers": ("<i8", 4), "document_indices": ("<i8", 12)}
PLACES, WINDOW = 256, 16  # places, and entries at each, that are checked of a file too large to be checked whole


@dataclass(frozen=True)
class IndexColumns:
    """The columns of an open .idx file: where they begin, in bytes, and the `size` of the .bin that they describe."""

    file: int
    start: int
    sequences: int
    entries: int
    width: int
    size: int
    _buffers: dict[str, NDArray[Any]] = field(default_factory=dict)

    def read(self, column: str, a: int, b: int) -> NDArray[Any]:
        """Entries a..b-1 of a column, valid until the next read of one of its dtype."""
        kind, before = COLUMNS[column]
        buffer = self._buffers.get(kind)
        if buffer is None or len(buffer) < b - a:
            buffer = self._buffers[kind] = np.empty(b - a, kind)
        part = buffer[: b - a]
        if os.preadv(self.file, [part.data], self.start + before * self.sequences + part.itemsize * a) != part.nbytes:
            raise OSError(None, "the file became shorter while it was read")
        return part


def damage(index: IndexColumns, whole: bool) -> tuple[str, str] | None:
    """(field, the rule that it breaks), None when sound. Unless `whole`, only both ends and PLACES windows between are
    checked, in O(1)."""
    return _sequences(index, whole) or _documents(index, whole)


def _sequences(index: IndexColumns, whole: bool) -> tuple[str, str] | None:
    n = index.sequences
    if n and (first := int(index.read("pointers", 0, 1)[0])):
        return "pointers[0]", f"is {first}, not 0"
    scratch = np.empty(max(CHUNK, WINDOW), np.int64)
    for a, b in _windows(n, whole):
        lengths = index.read("lengths", a, b)
        pointers = index.read("pointers", a, min(b + 1, n))
        if lengths.min() < 0:
            i = int(lengths.argmin())
            return f"lengths[{a + i}]", f"is {lengths[i]}, negative"
        ends = np.multiply(lengths, index.width, out=scratch[: b - a], dtype=np.int64)
        ends += pointers[: b - a]
        wrong = ends[: len(pointers) - 1] != pointers[1:]
        if wrong.any():
            i = int(wrong.argmax())
            return f"pointers[{a + i + 1}]", f"is {pointers[i + 1]}, but the sequence before ends at {ends[i]}"
        if not 0 <= pointers[0] <= ends[-1] <= index.size and b < n:  # also catches sums that pass 2^63
            return f"pointers[{b}]", f"is {ends[-1]}, outside the {index.size} bytes of the .bin file"
        if b == n and (pointers[0] < 0 or ends[-1] != index.size):
            return "size", f"accounts for {ends[-1]} bytes"
    return ("size", "accounts for 0 bytes") if n == 0 and index.size else None


def _documents(index: IndexColumns, whole: bool) -> tuple[str, str] | None:
    n = index.entries
    if not n or (first := int(index.read("document_indices", 0, 1)[0])):
        return "document_indices[0]", "is missing" if not n else f"is {first}, not 0"
    last = int(index.read("document_indices", n - 1, n)[0])
    if last != index.sequences:
        return f"document_indices[{n - 1}]", f"is {last}, not the {index.sequences} sequences"
    for a, b in _windows(n - 1, whole):
        entries = index.read("document_indices", a, b + 1)
        wrong = entries[1:] < entries[:-1]
        if wrong.any():
            return f"document_indices[{a + 1 + int(wrong.argmax())}]", "is smaller than the one before"
        if not 0 <= entries[0] <= index.sequences:
            return f"document_indices[{a}]", f"is {entries[0]}, outside 0..{index.sequences}"
    return None


def _windows(n: int, whole: bool) -> Iterator[tuple[int, int]]:
    """[a, b) that cover 0..n-1, or PLACES of them, the first and the last among them."""
    if whole or n <= PLACES * WINDOW:
        for a in range(0, n, CHUNK):
            yield a, min(a + CHUNK, n)
    else:
        for place in range(PLACES):
            a = place * (n - WINDOW) // (PLACES - 1)
            yield a, a + WINDOW
