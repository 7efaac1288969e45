"""Hashes of a file's blocks: xxh3-128 of every 4 MiB, so that ranks share the work of one file and damage has a place.

xxh3 finds accidents, not forgery: whoever can write the files can write the manifest. It runs at the speed of memory,
where sha256 with the processor's instructions is slower than a good disk (docs/checkpoints.md). Without the package
`xxhash` a checkpoint is written with sha256; the manifest names the hash.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

try:
    from xxhash import xxh3_128
except ImportError:
    xxh3_128 = None

BLOCK = 1 << 22  # bytes; 34 bytes of manifest for each


@dataclass(frozen=True)
class Stamp:
    """A file's size in bytes, the name of its hash, and the hash of each block of `block` bytes, as hex."""

    size: int
    name: str
    block: int
    digests: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.size < 0 or self.block < 1 or len(self.digests) != -(-self.size // self.block):
            raise ValueError(f"{len(self.digests)} hashes do not fit {self.size} bytes in blocks of {self.block}")


def fastest() -> str:
    """The hash of new files."""
    return "sha256" if xxh3_128 is None else "xxh3_128"


def maker(name: str) -> Callable[..., Any]:
    """A constructor of hash objects. ValueError for a hash that is unknown, or not installed."""
    if name == "sha256":
        return hashlib.sha256
    if name != "xxh3_128":
        raise ValueError(f"hash {name!r} is not one of xxh3_128, sha256")
    if xxh3_128 is None:
        raise ValueError("its files are hashed with xxh3, which is not installed: pip install xxhash")
    return xxh3_128


class BlockHash:
    """Hashes a file while it is written: `update` with its bytes in order, then `stamp`."""

    def __init__(self, name: str | None = None, block: int = BLOCK):
        self.name, self.block = name or fastest(), block
        self._make, self._digests, self._size = maker(self.name), list[str](), 0
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

    def stamp(self) -> Stamp:
        last = [self._begun.hexdigest()] if self._size % self.block else []
        return Stamp(self._size, self.name, self.block, (*self._digests, *last))
