"""A shuffle without a table: `permute(i, n, key)` is a bijection of 0..n-1 that is computed, not stored.

An index is split as i = l + a * r with l in [0, a), r in [0, b), a * b >= n, a ~ b ~ sqrt(n). A round adds a hash of
one half to the other (a Feistel network over Z_a x Z_b; Black and Rogaway, "Ciphers with Arbitrary Finite Domains",
2002). A value in [n, a * b), less than one in sqrt(n), goes through the network again until it is below n (cycle
walking).

So the order of a billion samples costs no memory, start-up time or file, where numpy's permutation costs 8 GB. Any
subset of it can be computed alone, and it depends on integers only, not on a library's random stream.
"""

import functools
import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROUNDS = 8  # 6 leave the order of 3 elements visibly uneven over keys (tests/data/test_samples.py)
CHUNK = 1 << 14  # elements at a time, so that temporaries fit in the cache
Ints = NDArray[np.int64]
Round = Callable[[Ints], Ints]


def fold(*parts: int | str) -> int:
    """Return a 64-bit key from coordinates, for example fold(seed, "train", "documents", epoch)."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def mix32(x: NDArray[np.uint32], key: int) -> NDArray[np.uint32]:
    """Return a hash of 32-bit integers (the finalizer of MurmurHash3 between two keys)."""
    x = x ^ np.uint32(key & 0xFFFFFFFF)
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x85EBCA6B)
    x ^= x >> np.uint32(13)
    x += np.uint32(key >> 32)
    x *= np.uint32(0xC2B2AE35)
    x ^= x >> np.uint32(16)
    return x


def bounded(hashed: NDArray[np.uint32], n: int) -> NDArray[np.uint64]:
    """Map uniform 32-bit hashes to uniform integers in [0, n), n <= 2^32, without a division."""
    return (hashed.astype(np.uint64) * np.uint64(n)) >> np.uint64(32)


def permute(index: NDArray[Any], n: int, key: int) -> Ints:
    """Return the images of `index` (1-D) under the bijection of 0..n-1 that `key` names; n < 2^62.

    A round's hash has about sqrt(n) different arguments, so for more numbers than that it becomes a table in the cache:
    23 ns each instead of 38 ns. Raises IndexError for an index outside 0..n-1.
    """
    index = np.asarray(index, np.int64)
    out = np.empty(index.shape, np.int64)
    if index.size and (int(index.min()) < 0 or int(index.max()) >= n):
        raise IndexError(f"index {int(index.min())}..{int(index.max())} is outside 0..{n - 1}")
    a, b, rounds = _feistel_shape(n, key)
    if len(index) > 2 * a:
        rounds = [hashed(np.arange((b, a)[turn % 2])).__getitem__ for turn, hashed in enumerate(rounds)]
    for start in range(0, len(index), CHUNK):
        values = _feistel(index[start : start + CHUNK], a, b, rounds)
        while (outside := np.flatnonzero(values >= n)).size:
            values[outside] = _feistel(values[outside], a, b, rounds)
        out[start : start + CHUNK] = values
    return out


@functools.lru_cache(64)  # every batch uses the same few; hashing the keys takes as long as eight samples
def _feistel_shape(n: int, key: int) -> tuple[int, int, list[Round]]:
    """Return a, b and the function of each round: what it adds to one half, computed from the other."""
    a = math.isqrt(n - 1) + 1 if n > 1 else 1
    b = -(-n // a)
    return a, b, [functools.partial(_hashed, fold(key, turn), (a, b)[turn % 2]) for turn in range(ROUNDS)]


def _hashed(key: int, size: int, half: Ints) -> Ints:
    return bounded(mix32(half.astype(np.uint32), key), size).astype(np.int64)


def _feistel(index: NDArray[Any], a: int, b: int, rounds: Sequence[Round]) -> Ints:
    right = index // a
    left = index - right * a
    for turn, added in enumerate(rounds):
        half, other, size = (left, right, a) if turn % 2 == 0 else (right, left, b)
        half += added(other)
        half -= size * (half >= size)
    return left + right * a
