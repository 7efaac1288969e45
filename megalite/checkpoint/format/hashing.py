"""Hashes of a file's blocks: xxh3-128 of every 4 MiB, so that ranks share the work of one file and damage has a place.

xxh3 finds accidents, not forgery: who can write the files can write the manifest. It runs at the speed of memory, where
sha256 with the processor's instructions stays below a good disk (docs/checkpoints.md). Without the package `xxhash` a
checkpoint is written with sha256; the name of the hash stands in the manifest.
"""

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

BLOCK = 1 << 22  # bytes; 34 bytes of manifest for each


@dataclass(frozen=True)
class Stamp:
    """What a file must be: its size in bytes, and the hash of each block of `block` bytes, as hex."""

    size: int
    name: str
    block: int
    digests: tuple[str, ...]

    def __post_init__(self) -> None:
        if self.size < 0 or self.block < 1 or len(self.digests) != -(-self.size // self.block):
            raise ValueError(f"{len(self.digests)} hashes do not fit {self.size} bytes in blocks of {self.block}")


def fastest() -> str:
    """The hash that new files get."""
    try:
        import xxhash  # noqa: F401
    except ImportError:
        return "sha256"
    return "xxh3_128"


def maker(name: str) -> Callable[..., Any]:
    """A constructor of hash objects. ValueError for a hash that is unknown, or not installed."""
    if name == "sha256":
        return hashlib.sha256
    if name == "xxh3_128":
        try:
            import xxhash  # noqa: F401
        except ImportError:
            raise ValueError("its files are hashed with xxh3, which is not installed: pip install xxhash") from None
        return xxhash.xxh3_128
    raise ValueError(f"hash {name!r} is not one of xxh3_128, sha256")


class BlockHash:
    """Hash a file while it is written: `update` with its bytes in order, then `stamp`."""

    def __init__(self, name: str | None = None, block: int = BLOCK):
        self.name, self.block = name or fastest(), block
        self._make, self._digests, self._size = maker(self.name), [], 0
        self._now: Any = None

    def update(self, data: memoryview) -> None:
        while len(data):
            if self._now is None:
                self._now = self._make()
            part = data[: self.block - self._size % self.block]
            self._now.update(part)
            self._size += len(part)
            data = data[len(part) :]
            if self._size % self.block == 0:
                self._close()

    def _close(self) -> None:
        self._digests.append(self._now.hexdigest())
        self._now = None

    def stamp(self) -> Stamp:
        if self._now is not None:
            self._close()
        return Stamp(self._size, self.name, self.block, tuple(self._digests))
