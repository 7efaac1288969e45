"""A safetensors file, written and read without a second copy of its tensors.

    8 bytes: length of the header | header, JSON: key -> dtype, shape, [begin, end) | bytes of the tensors, packed

A piece's rectangles follow each other in its flat data (parallel/spec.py), so the payload of a file is the pieces' data
one after the other: the header is known before the first byte is written, and nothing is gathered in memory. The
package safetensors needs all tensors at once to write, and maps the file to read: one that shrinks is a SIGBUS.

xxh3-128 of every 4 MiB of a file is kept, so that ranks share the work of one file and damage has a place. xxh3 finds
accidents, not forgery: whoever can write the files can write the manifest. It runs at the speed of memory, where sha256
with the processor's instructions is slower than a good disk (docs/checkpoints.md). Without the package `xxhash` a
checkpoint is written with sha256; the manifest names the hash.
"""

import contextlib
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megalite.checkpoint.storage.location import Location
from megalite.checkpoint.storage.storage import storage_of
from megalite.parallel.spec import Box, TensorShard, rectangles

try:
    from xxhash import xxh3_128
except ImportError:
    xxh3_128 = None

BLOCK = 1 << 22  # bytes; 34 bytes of manifest for each
DEFAULT_HASH = "sha256" if xxh3_128 is None else "xxh3_128"  # the hash of new files
_INTEGERS = {torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8"}
CODES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}  # of weights
NAMES = {**CODES, **_INTEGERS, torch.bool: "BOOL"}
_DTYPES = {name: dtype for dtype, name in NAMES.items()}
DTYPES = {name: dtype for dtype, name in CODES.items()}
_PAGE = 4096  # the payload begins at a multiple of it: writes and reads then copy whole pages
_HEADER = 100_000_000  # bytes; the limit of the format
_BOUNCE = 1 << 25  # bytes of host memory for data that is on a device, or not contiguous in the file


@dataclass(frozen=True)
class FileChecksum:
    """A file's size in bytes, the name of its hash, and the hash of each block of `block` bytes, as hex."""

    size: int
    algorithm: str
    block_size: int
    digests: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.size < 0 or self.block_size < 1 or len(self.digests) != -(-self.size // self.block_size):
            raise ValueError(f"{len(self.digests)} hashes do not fit {self.size} bytes in blocks of {self.block_size}")


def hash_constructor(algorithm: str) -> Callable[..., Any]:
    """A constructor of hash objects. ValueError for a hash that is unknown, or not installed."""
    if algorithm == "sha256":
        return hashlib.sha256
    if algorithm != "xxh3_128":
        raise ValueError(f"hash {algorithm!r} is not one of xxh3_128, sha256")
    if xxh3_128 is None:
        raise ValueError("its files are hashed with xxh3, which is not installed: pip install xxhash")
    return xxh3_128


class BlockHash:
    """Hashes a file while it is written: `update` with its bytes in order, then `stamp`."""

    def __init__(self, algorithm: str | None = None, block_size: int = BLOCK):
        self.name, self.block = algorithm or DEFAULT_HASH, block_size
        self._make, self._digests, self._size = hash_constructor(self.name), list[str](), 0
        self._begun = self._make()  # the hash of the last block, which is not complete

    def update(self, data: memoryview) -> None:
        while len(data):
            part = data[: self.block - self._size % self.block]
            self._begun.update(part)
            self._size += len(part)
            data = data[len(part) :]
            if self._size % self.block == 0:
                self._digests.append(self._begun.hexdigest())
                self._begun = self._make()

    def stamp(self) -> FileChecksum:
        last = [self._begun.hexdigest()] if self._size % self.block else []
        return FileChecksum(self._size, self.name, self.block, (*self._digests, *last))


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor that will be written as `key`; `bytes` of its data."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class WriteItem(PlannedTensor):
    """It is the rectangle `box` of the tensor `name`, which has the shape `whole`."""

    algorithm: str
    full_shape: tuple[int, ...]
    box: Box


def write_items(parts: Iterable[tuple[str, tuple[int, ...], torch.dtype, Box]]) -> list[WriteItem]:
    """Rows for (tensor, its shape, dtype, rectangle), with numbers as keys."""
    return [
        WriteItem(f"{n:06d}", dtype, box.shape, algorithm, whole, box)
        for n, (algorithm, whole, dtype, box) in enumerate(parts)
    ]


def _header(plan: Iterable[PlannedTensor], align: int) -> bytes:
    """The start of a file with the tensors of `plan`: wider dtypes first, so that all are aligned to their elements."""
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end, width = 0, 8
    for p in plan:
        assert p.dtype.itemsize <= width, "narrower dtypes come last"
        begin, end, width = end, end + p.bytes, p.dtype.itemsize
        entries[p.key] = {"dtype": NAMES[p.dtype], "shape": p.shape, "data_offsets": [begin, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % align)
    return len(text).to_bytes(8, "little") + text


def plan_write(pieces: Sequence[TensorShard]) -> tuple[list[WriteItem], list[TensorShard]]:
    """(rectangles, pieces), both in the order of the data."""
    ordered = sorted(pieces, key=lambda p: -p.data.element_size())
    parts = ((p.name, p.shape, p.data.dtype, box) for p in ordered for box, _ in rectangles(p.box, p.span))
    return write_items(parts), ordered


def shard_views(piece: TensorShard) -> list[tuple[Box, Tensor]]:
    """The rectangles of a piece, each with a view of its values."""
    data = piece.data.detach()
    return [(box, data[span.start : span.stop].view(box.shape)) for box, span in rectangles(piece.box, piece.span)]


def split_by_size(sizes: Sequence[int], limit: int) -> list[range]:
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


def flatten(plan: Sequence[PlannedTensor], values: Iterable[Tensor]) -> Iterator[Tensor]:
    """`values`, in the plan's order, as the 1-D tensors that `write` takes."""
    for p, tensor in zip(plan, values, strict=True):
        assert (tensor.dtype, tuple(tensor.shape)) == (p.dtype, p.shape), p.key
        yield tensor.detach().contiguous().view(-1)


def write_safetensors(
    path: Location,
    plan: Sequence[PlannedTensor],
    data: Iterable[Tensor],
    block_size: int = BLOCK,
    *,
    align: int = _PAGE,
) -> FileChecksum:
    """Write, hash and sync a new file. `data`: the planned tensors, 1-D and contiguous, at multiples of `align`."""
    hashed = BlockHash(block_size=block_size)
    with storage_of(path).open_new(path) as append:

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
class TensorLocation:
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int  # byte in the file
    end: int


def read_header(path: Location) -> dict[str, TensorLocation]:
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
            result[key] = TensorLocation(dtype, shape, begin, end)
    except (TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
        raise ValueError(repr(error)) from None
    return result
