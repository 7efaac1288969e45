"""A safetensors file, written and read without a second copy of its tensors.

    8 bytes: length of the header | header, JSON: key -> dtype, shape, [begin, end) | bytes of the tensors, packed

A piece's rectangles follow each other in its flat data (parallel/spec.py), so the payload of a file is the
pieces' data one after the other: the header is known before the first byte is written, and nothing is gathered in
memory. The package safetensors needs all tensors at once to write, and maps the file to read, so that a shrinking file
causes a SIGBUS.
"""

import contextlib
import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.checkpoint.format.hashing import BLOCK, BlockHash, Stamp
from megalite.checkpoint.storage.location import Location
from megalite.checkpoint.storage.protocol import storage_of
from megalite.parallel.spec import Box, Piece, rectangles

_INTEGERS = {torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8"}
CODES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}  # of weights
_NAMES = {**CODES, **_INTEGERS, torch.bool: "BOOL"}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
DTYPES = {name: dtype for dtype, name in CODES.items()}
_PAGE = 4096  # the payload begins at a multiple of it: writes and reads then copy whole pages
_HEADER = 100_000_000  # bytes; the limit of the format
_BOUNCE = 1 << 25  # bytes of host memory for data that is on a device, or not contiguous in the file


@dataclass(frozen=True)
class Planned:
    """A tensor that will be written as `key`; `bytes` of its data."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class Row(Planned):
    """It is the rectangle `box` of the tensor `name`, which has the shape `whole`."""

    name: str
    whole: tuple[int, ...]
    box: Box


def rows_of(parts: Iterable[tuple[str, tuple[int, ...], torch.dtype, Box]]) -> list[Row]:
    """Rows for (tensor, its shape, dtype, rectangle), with numbers as keys."""
    return [Row(f"{n:06d}", dtype, box.shape, name, whole, box) for n, (name, whole, dtype, box) in enumerate(parts)]


def _header(plan: Iterable[Planned], align: int) -> bytes:
    """The start of a file with the tensors of `plan` in order: wider dtypes first, so that every tensor starts at a
    multiple of its element's size."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end, width = 0, 8
    for p in plan:
        assert p.dtype.itemsize <= width, "narrower dtypes come last"
        begin, end, width = end, end + p.bytes, p.dtype.itemsize
        entries[p.key] = {"dtype": _NAMES[p.dtype], "shape": p.shape, "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % align)
    return len(text).to_bytes(8, "little") + text


def plan(pieces: Sequence[Piece]) -> tuple[list[Row], list[Piece]]:
    """(rectangles, pieces), both in the order of the data."""
    ordered = sorted(pieces, key=lambda p: -p.data.element_size())
    parts = ((p.name, p.shape, p.data.dtype, box) for p in ordered for box, _ in rectangles(p.box, p.span))
    return rows_of(parts), ordered


def views(piece: Piece) -> list[tuple[Box, Tensor]]:
    """The rectangles of a piece, each with a view of its values."""
    data = piece.data.detach()
    return [(box, data[span.start : span.stop].view(box.shape)) for box, span in rectangles(piece.box, piece.span)]


def cut(sizes: Sequence[int], limit: int) -> list[range]:
    """Consecutive items in as few files of at most `limit` bytes as their order allows; a larger item gets its own.

    >>> cut([3, 4, 9, 1, 1], 8)
    [range(0, 2), range(2, 3), range(3, 5)]
    """
    files, start, held = [], 0, 0
    for i, size in enumerate(sizes):
        if i > start and held + size > limit:
            files.append(range(start, i))
            start, held = i, 0
        held += size
    return [*files, range(start, len(sizes))] if sizes else []


def flat(plan: Sequence[Planned], values: Iterable[Tensor]) -> Iterator[Tensor]:
    """`values`, in the plan's order, as the 1-D tensors that `write` takes."""
    for p, tensor in zip(plan, values, strict=True):
        assert (tensor.dtype, tuple(tensor.shape)) == (p.dtype, p.shape), p.key
        yield tensor.detach().contiguous().view(-1)


def write(
    path: Location, plan: Sequence[Planned], data: Iterable[Tensor], block: int = BLOCK, *, align: int = _PAGE
) -> Stamp:
    """Write a new file, hash it on the way, and sync it. `data`: the planned tensors as 1-D contiguous ones, which
    begin at a multiple of `align` bytes."""
    hashed = BlockHash(block=block)
    with storage_of(path).create(path) as append:

        def put(part: memoryview) -> None:
            for begin in range(0, len(part), BLOCK):  # hashed while it is in the processor's cache
                chunk = part[begin : begin + BLOCK]
                hashed.update(chunk)
                append(chunk)

        put(memoryview(_header(plan, align)))
        for flat in (tensor.detach().view(torch.uint8) for tensor in data):
            if flat.device.type == "cpu":
                put(memoryview(flat.numpy()))  # type: ignore[arg-type]
                continue
            bounce = torch.empty(min(_BOUNCE, len(flat)), dtype=torch.uint8, pin_memory=True)
            for part in flat.split(len(bounce)):
                put(memoryview(bounce[: len(part)].copy_(part).numpy()))  # type: ignore[arg-type]
    return hashed.stamp()


@dataclass(frozen=True)
class Place:
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int  # byte in the file
    end: int


def places(path: Location) -> dict[str, Place]:
    """Where each key of a safetensors file is. ValueError for a header that does not fit its file; OSError."""
    with contextlib.closing(storage_of(path).open(path)) as file:
        size, prefix = file.size, bytearray(8)
        file.pread(memoryview(prefix), 0)
        length = int.from_bytes(prefix, "little")
        if length > min(_HEADER, size - 8):
            raise ValueError(f"{path}: its header of {length} bytes does not fit a file of {size}")
        text = bytearray(length)
        file.pread(memoryview(text), 8)
    result = {}
    try:
        for key, entry in json.loads(text).items():
            if key == "__metadata__":
                continue
            dtype, shape = _DTYPES[entry["dtype"]], tuple(int(n) for n in entry["shape"])
            begin, end = (int(n) + 8 + length for n in entry["data_offsets"])
            wanted = math.prod(shape) * dtype.itemsize
            if min((*shape, begin - 8 - length)) < 0 or end > size or end - begin != wanted:
                raise ValueError(f"{path}: {key} is at bytes {begin}..{end} of {size}, {wanted} wanted")
            result[key] = Place(dtype, shape, begin, end)
    except (TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
        raise ValueError(repr(error)) from None
    return result
