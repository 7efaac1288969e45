"""A safetensors file, written and read without a second copy of its tensors.

    8 bytes: length of the header | header, JSON: key -> dtype, shape, [begin, end) | bytes of the tensors, packed

A piece's rectangles follow each other in its flat data (pieces.py), so the payload of a file is the pieces' data one
after the other: the header is known before the first byte is written, and nothing is gathered in memory. Reading goes
straight into the target where the bytes are contiguous on both sides. `safetensors` itself wants all tensors at once
to write, and maps the file to read: a file that shrinks meanwhile then kills the process with SIGBUS.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megalite.checkpoint.format.hashing import BLOCK, BlockHash, Stamp
from megalite.checkpoint.format.pieces import inside, rectangles
from megalite.checkpoint.storage.location import Location
from megalite.checkpoint.storage.protocol import OpenFile, storage_of
from megalite.parallel.spec import Box, Piece

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_DTYPES = {name: dtype for dtype, name in _NAMES.items()}
_PAGE = 4096  # the payload begins at a multiple of it: writes and reads then copy whole pages
_HEADER = 100_000_000  # bytes; the limit of the format
_BOUNCE = 1 << 25  # bytes of host memory for data that is on a device, or not contiguous in the file


@dataclass(frozen=True)
class Row:
    """One rectangle of the whole tensor `name`, stored as `key`."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    key: str
    box: Box


def plan(pieces: Sequence[Piece]) -> tuple[bytes, list[Row], list[Piece]]:
    """(header, rows, the pieces in the order of their data). Wide dtypes come first, so that all are aligned."""
    ordered = sorted(pieces, key=lambda p: -p.data.element_size())
    rows: list[Row] = []
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    for piece in ordered:
        for box, _ in rectangles(piece.box, piece.span):
            begin, end = end, end + box.numel * piece.data.element_size()
            key = f"{len(rows):06d}"
            entries[key] = {"dtype": _NAMES[piece.data.dtype], "shape": box.shape, "data_offsets": [begin, end]}
            rows.append(Row(piece.name, piece.shape, str(piece.data.dtype)[6:], key, box))
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % _PAGE)
    return len(text).to_bytes(8, "little") + text, rows, ordered


def write(path: Location, header: bytes, data: Iterable[Tensor], block: int = BLOCK) -> Stamp:
    """Write a new file, hash it on the way, and sync it. `data`: 1-D contiguous tensors in the order of the header."""
    hashed = BlockHash(block=block)
    with storage_of(path).create(path) as append:

        def put(part: memoryview) -> None:
            for begin in range(0, len(part), BLOCK):  # hashed while it is in the processor's cache
                chunk = part[begin : begin + BLOCK]
                hashed.update(chunk)
                append(chunk)

        put(memoryview(header))
        for tensor in data:
            for part in _host_bytes(tensor):
                put(part)
    return hashed.stamp()


def _host_bytes(data: Tensor) -> Iterator[memoryview]:
    """The bytes of a 1-D tensor: in place on the CPU, through a small buffer from a device."""
    flat = data.detach().view(torch.uint8)
    if flat.device.type == "cpu":
        yield memoryview(flat.numpy())  # type: ignore[arg-type]
        return
    bounce = torch.empty(min(_BOUNCE, len(flat)), dtype=torch.uint8, pin_memory=True)
    for part in flat.split(len(bounce)):
        yield memoryview(bounce[: len(part)].copy_(part).numpy())  # type: ignore[arg-type]


@dataclass(frozen=True)
class Place:
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int  # byte in the file
    end: int


def places(path: Location) -> dict[str, Place]:
    """Where each key of a safetensors file is. ValueError for a header that does not fit its file; OSError."""
    file = storage_of(path).open(path)
    try:
        return _places(path, file)
    finally:
        file.close()


def _places(path: Location, file: OpenFile) -> dict[str, Place]:
    size, prefix = file.size, bytearray(8)
    file.pread(memoryview(prefix), 0)
    length = int.from_bytes(prefix, "little")
    if length > min(_HEADER, size - 8):
        raise ValueError(f"{path}: its header of {length} bytes does not fit a file of {size}")
    text = bytearray(length)
    file.pread(memoryview(text), 8)
    entries = json.loads(text)
    result = {}
    for key, entry in entries.items():
        if key == "__metadata__":
            continue
        dtype, shape = _DTYPES[entry["dtype"]], tuple(int(n) for n in entry["shape"])
        begin, end = (int(n) + 8 + length for n in entry["data_offsets"])
        wanted = math.prod(shape) * torch.empty((), dtype=dtype).element_size()
        if min((*shape, begin - 8 - length)) < 0 or end > size or end - begin != wanted:
            raise ValueError(f"{path}: {key} is at bytes {begin}..{end} of {size}, {wanted} wanted")
        result[key] = Place(dtype, shape, begin, end)
    return result


class TensorFile:
    """An open safetensors file, for reading rectangles. OSError and ValueError name the file."""

    def __init__(self, path: Location):
        self.path, self._file = path, storage_of(path).open(path)
        try:
            self.places = _places(path, self._file)
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        self._file.close()

    def copy(self, key: str, stored: Box, both: Box, target: Tensor, box: Box) -> None:
        """Copy the rectangle `both` of the tensor `key`, which holds `stored`, into `target`, which holds `box`."""
        place = self.places[key]
        if place.shape != stored.shape:
            raise ValueError(f"{self.path}: {key} has shape {place.shape}, the manifest says {stored.shape}")
        item = (place.end - place.begin) // max(1, stored.numel)
        row = stored.numel // stored.shape[0] if stored.shape else 1  # elements
        first = both.start[0] - stored.start[0] if stored.shape else 0
        rows = both.shape[0] if stored.shape else 1
        into = target[inside(both, box)]
        direct = both.shape[1:] == stored.shape[1:] and into.is_contiguous()
        if direct and target.device.type == "cpu" and target.dtype == place.dtype:
            flat = into.reshape(-1).view(torch.uint8)
            self._file.pread(memoryview(flat.numpy()), place.begin + first * row * item)  # type: ignore[arg-type]
            return
        at_once = max(1, _BOUNCE // (row * item))  # rows; whole ones, of which a part may be wanted
        bounce = torch.empty(min(rows, at_once) * row * item, dtype=torch.uint8)
        for begin in range(0, rows, at_once):
            n = min(at_once, rows - begin)
            raw = bounce[: n * row * item]
            self._file.pread(memoryview(raw.numpy()), place.begin + (first + begin) * row * item)  # type: ignore[arg-type]
            values = raw.view(place.dtype).view(n, *stored.shape[1:]) if stored.shape else raw.view(place.dtype)[0]
            part = values[(slice(None), *inside(both, stored)[1:])] if stored.shape else values
            (into[begin : begin + n] if stored.shape else into).copy_(part)
