"""A safetensors file, written and read without a second copy of its tensors.

    8 bytes: length of the header | header, JSON: key -> dtype, shape, [begin, end) | bytes of the tensors, packed

The rectangles of a shard follow each other in its flat data (parallel/spec.py), so the payload of a file is the
concatenated data of the shards. The header is known before the first byte is written, and nothing is gathered in
memory. The `safetensors` package needs all tensors at once to write, and memory-maps files to read, where a file that
shrinks raises SIGBUS.

An xxh3-128 hash is stored for every 4 MiB of a file, so that ranks can share the reading of one file and damage can be
located. xxh3 detects accidental corruption, not forgery: whoever can write the files can also write the manifest. It
runs at memory speed, while sha256 is slower than a good disk even with the CPU's SHA instructions
(docs/checkpoints.md). Without the package `xxhash`, checkpoints are written with sha256. The manifest names the hash.
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

BLOCK_BYTES = 1 << 22  # each block adds 34 bytes to the manifest
DEFAULT_HASH = "sha256" if xxh3_128 is None else "xxh3_128"  # the hash of new files
WEIGHT_DTYPE_CODES = {torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
WEIGHT_DTYPES = {code: dtype for dtype, code in WEIGHT_DTYPE_CODES.items()}
_INTEGER_CODES = {torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8"}
DTYPE_CODES = {**WEIGHT_DTYPE_CODES, **_INTEGER_CODES, torch.bool: "BOOL"}
_DTYPES_OF_CODES = {code: dtype for dtype, code in DTYPE_CODES.items()}
_PAGE = 4096  # alignment of the payload in bytes, so that writes and reads copy full pages
_MAX_HEADER_BYTES = 100_000_000  # the limit of the format
_BOUNCE_BYTES = 1 << 25  # pinned host buffer for data that is on a device


@dataclass(frozen=True)
class FileChecksum:
    """The size of a file in bytes, its hash algorithm, and the hex digest of each block of `block_size` bytes."""

    size: int
    algorithm: str
    block_size: int
    digests: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.size < 0 or self.block_size < 1 or len(self.digests) != -(-self.size // self.block_size):
            raise ValueError(f"{len(self.digests)} hashes do not fit {self.size} bytes in blocks of {self.block_size}")


def hash_constructor(algorithm: str) -> Callable[..., Any]:
    """Return the constructor of a hash algorithm. Raises ValueError if it is unknown or not installed."""
    if algorithm == "sha256":
        return hashlib.sha256
    if algorithm != "xxh3_128":
        raise ValueError(f"hash {algorithm!r} is not one of xxh3_128, sha256")
    if xxh3_128 is None:
        raise ValueError("its files are hashed with xxh3, which is not installed: pip install xxhash")
    return xxh3_128


class BlockHash:
    """A hash of a file in blocks, computed while the file is written.

    Call `update` with the bytes in order, then `checksum`.
    """

    def __init__(self, algorithm: str | None = None, block_size: int = BLOCK_BYTES):
        self.algorithm = algorithm or DEFAULT_HASH
        self.block_size = block_size
        self._new_hash = hash_constructor(self.algorithm)
        self._digests: list[str] = []
        self._size = 0
        self._partial = self._new_hash()  # the hash of the last, incomplete block

    def update(self, data: memoryview) -> None:
        """Hash the next bytes of the file."""
        while len(data):
            chunk = data[: self.block_size - self._size % self.block_size]
            self._partial.update(chunk)
            self._size += len(chunk)
            data = data[len(chunk) :]
            if self._size % self.block_size == 0:
                self._digests.append(self._partial.hexdigest())
                self._partial = self._new_hash()

    def checksum(self) -> FileChecksum:
        """Return the checksum of all bytes so far."""
        last = [self._partial.hexdigest()] if self._size % self.block_size else []
        return FileChecksum(self._size, self.algorithm, self.block_size, (*self._digests, *last))


@dataclass(frozen=True)
class PlannedTensor:
    """A tensor that will be written under the key `key`."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """The size of its data in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True)
class WriteItem(PlannedTensor):
    """The rectangle `box` of the tensor `name`, whose full shape is `full_shape`."""

    name: str
    full_shape: tuple[int, ...]
    box: Box


def write_items(parts: Iterable[tuple[str, tuple[int, ...], torch.dtype, Box]]) -> list[WriteItem]:
    """Return a write item for each (tensor name, full shape, dtype, box), with consecutive numbers as keys."""
    return [
        WriteItem(f"{n:06d}", dtype, box.shape, name, full_shape, box)
        for n, (name, full_shape, dtype, box) in enumerate(parts)
    ]


def _header(plan: Iterable[PlannedTensor], align: int) -> bytes:
    """Return the length and header of a file with the tensors of `plan`, padded to a multiple of `align` bytes.

    Wider dtypes come first, so that all tensors are aligned to their elements.
    """
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    end = 0
    max_itemsize = 8
    for tensor in plan:
        assert tensor.dtype.itemsize <= max_itemsize, "narrower dtypes must come last"
        max_itemsize = tensor.dtype.itemsize
        start, end = end, end + tensor.num_bytes
        entries[tensor.key] = {"dtype": DTYPE_CODES[tensor.dtype], "shape": tensor.shape, "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % align)
    return len(text).to_bytes(8, "little") + text


def plan_write(shards: Sequence[TensorShard]) -> tuple[list[WriteItem], list[TensorShard]]:
    """Return (write items, shards) in the order in which their data will be written."""
    ordered = sorted(shards, key=lambda shard: -shard.data.element_size())
    parts = (
        (shard.name, shard.shape, shard.data.dtype, box)
        for shard in ordered
        for box, _ in rectangles(shard.box, shard.span)
    )
    return write_items(parts), ordered


def shard_views(shard: TensorShard) -> list[tuple[Box, Tensor]]:
    """Return the rectangles of a shard as (box, view of its values)."""
    data = shard.data.detach()
    return [(box, data[span.start : span.stop].view(box.shape)) for box, span in rectangles(shard.box, shard.span)]


def split_by_size(sizes: Sequence[int], limit: int) -> list[range]:
    """Split consecutive items into as few files of at most `limit` bytes as their order allows.

    An item that is larger than `limit` gets a file of its own.

    >>> split_by_size([3, 4, 9, 1, 1], 8)
    [range(0, 2), range(2, 3), range(3, 5)]
    """
    files: list[range] = []
    start, file_bytes = 0, 0
    for i, size in enumerate(sizes):
        if i > start and file_bytes + size > limit:
            files.append(range(start, i))
            start, file_bytes = i, 0
        file_bytes += size
    return [*files, range(start, len(sizes))] if sizes else []


def flatten(plan: Sequence[PlannedTensor], values: Iterable[Tensor]) -> Iterator[Tensor]:
    """Yield `values`, which have the order of `plan`, as the 1-D tensors that `write_safetensors` takes."""
    for planned, tensor in zip(plan, values, strict=True):
        assert (tensor.dtype, tuple(tensor.shape)) == (planned.dtype, planned.shape), planned.key
        yield tensor.detach().contiguous().view(-1)


def write_safetensors(
    path: Location,
    plan: Sequence[PlannedTensor],
    data: Iterable[Tensor],
    block_size: int = BLOCK_BYTES,
    *,
    align: int = _PAGE,
) -> FileChecksum:
    """Write, hash and sync a new file, and return its checksum.

    Args:
        path: The file, which must not exist.
        plan: The tensors, wider dtypes first.
        data: The planned tensors in this order, 1-D and contiguous, on any device.
        block_size: Bytes per hashed block.
        align: The payload starts at a multiple of this number of bytes.
    """
    block_hash = BlockHash(block_size=block_size)
    with storage_of(path).open_new(path) as append:

        def write(data_bytes: memoryview) -> None:
            for start in range(0, len(data_bytes), BLOCK_BYTES):  # hash each chunk while it is in the CPU cache
                chunk = data_bytes[start : start + BLOCK_BYTES]
                block_hash.update(chunk)
                append(chunk)

        write(memoryview(_header(plan, align)))
        for flat in (tensor.detach().view(torch.uint8) for tensor in data):
            if flat.device.type == "cpu":
                write(memoryview(flat.numpy()))  # type: ignore[arg-type]
                continue
            bounce = torch.empty(min(_BOUNCE_BYTES, len(flat)), dtype=torch.uint8, pin_memory=True)
            for part in flat.split(len(bounce)):
                write(memoryview(bounce[: len(part)].copy_(part).numpy()))  # type: ignore[arg-type]
    return block_hash.checksum()


@dataclass(frozen=True)
class TensorLocation:
    """The dtype and shape of a stored tensor, and its bytes [start, end) in the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int
    end: int


def read_header(path: Location) -> dict[str, TensorLocation]:
    """Return the location of each key of a safetensors file.

    Raises:
        ValueError: The header is damaged or does not fit the size of its file.
        OSError: The file cannot be read.
    """
    with contextlib.closing(storage_of(path).open(path)) as file:
        size, prefix = file.size, bytearray(8)
        file.pread(memoryview(prefix), 0)
        length = int.from_bytes(prefix, "little")
        if length > min(_MAX_HEADER_BYTES, size - 8):
            raise ValueError(f"{path}: its header of {length} bytes does not fit a file of {size}")
        text = bytearray(length)
        file.pread(memoryview(text), 8)
    result = {}
    try:
        for key, entry in json.loads(text).items():
            if key == "__metadata__":
                continue
            dtype, shape = _DTYPES_OF_CODES[entry["dtype"]], tuple(int(n) for n in entry["shape"])
            start, end = (int(n) + 8 + length for n in entry["data_offsets"])
            nbytes = math.prod(shape) * dtype.itemsize
            if min((*shape, start - 8 - length)) < 0 or end > size or end - start != nbytes:
                raise ValueError(f"{path}: {key} is at bytes {start}..{end} of {size}, but needs {nbytes}")
            result[key] = TensorLocation(dtype, shape, start, end)
    except (TypeError, KeyError, AttributeError, RecursionError, OverflowError) as error:
        raise ValueError(repr(error)) from None
    return result
