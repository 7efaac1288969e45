"""A shuffle without a table: `permute(i, n, key)` is a bijection of 0..n-1 that is computed, not stored.

i = l + a * r with l in [0, a), r in [0, b), a * b >= n, a ~ b ~ sqrt(n). A round adds a hash of one half to the other
(a Feistel network over Z_a x Z_b; Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002). A value in
[n, a * b), less than one in sqrt(n), is sent through again until it is below n (cycle walking).

So the order of a billion samples costs no memory, start-up time or file, where numpy's permutation costs 8 GB; any part
of it can be computed alone; and it depends on integers only, not on a library's random stream.
"""

import functools
import hashlib
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

ROUNDS = 8  # 6 leave the order of 3 elements visibly uneven over keys (tests/data/test_permutation.py)
CHUNK = 1 << 14  # elements at a time: temporaries stay in the cache


def fold(*parts: int | str) -> int:
    """A 64-bit key from coordinates, for example fold(seed, "train", "documents", epoch)."""
    text = "/".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def mix32(x: NDArray[np.uint32], key: int) -> NDArray[np.uint32]:
    """A hash of 32-bit integers (the finaliser of MurmurHash3 between two keys)."""
    x = x ^ np.uint32(key & 0xFFFFFFFF)
    x ^= x >> np.uint32(16)
    x *= np.uint32(0x85EBCA6B)
    x ^= x >> np.uint32(13)
    x += np.uint32(key >> 32)
    x *= np.uint32(0xC2B2AE35)
    x ^= x >> np.uint32(16)
    return x


def below(hashed: NDArray[np.uint32], n: int) -> NDArray[np.uint64]:
    """Uniform 32-bit hashes -> uniform integers in [0, n), n <= 2^32, without a division."""
    return (hashed.astype(np.uint64) * np.uint64(n)) >> np.uint64(32)


def permute(index: NDArray[Any], n: int, key: int) -> NDArray[np.int64]:
    """Where the bijection of 0..n-1 named `key` sends each of `index`, 1-D. n < 2^62."""
    index = np.asarray(index)
    out = np.empty(index.shape, np.int64)
    if index.size and (int(index.min()) < 0 or int(index.max()) >= n):
        raise IndexError(f"index {int(index.min())}..{int(index.max())} is outside 0..{n - 1}")
    a, b, keys = _grid(n, key)
    for start in range(0, len(index), CHUNK):
        values = _rounds(index[start : start + CHUNK], a, b, keys)
        _walk(values, n, a, b, keys)
        out[start : start + CHUNK] = values
    return out


def permutation(n: int, key: int) -> Iterator[NDArray[np.int64]]:
    """permute(0), permute(1), ... permute(n - 1) in parts of some ten thousand, each valid until the next. In order,
    an index costs 15 ns instead of 38 (10 M of them): a round's hash has only a or b different arguments, so each round
    is a table of sqrt(n) numbers, which stays in the cache, and needs no division."""
    if n < 1:
        return
    a, b, keys = _grid(n, key)
    tables = []
    for turn, key in enumerate(keys):
        halves, size = (np.arange(b), a) if turn % 2 == 0 else (np.arange(a), b)
        tables.append(below(mix32(halves.astype(np.uint32), key), size).astype(np.int64))
    rows = max(1, CHUNK // a)  # numbers with equal r = index // a at a time: a row holds each l once
    buffers = np.empty((3, rows * a), np.int64)
    for first in range(0, b, rows):
        count = min(rows, b - first)
        left, right, scratch = buffers[:, : count * a]
        left.reshape(count, a)[:] = np.arange(a)
        right.reshape(count, a)[:] = np.arange(first, first + count)[:, None]
        for turn, table in enumerate(tables):
            half, other, size = (left, right, a) if turn % 2 == 0 else (right, left, b)
            np.take(table, other, out=scratch, mode="clip")  # always in range; "clip" spares a copy
            half += scratch
            np.subtract(half, size, out=scratch)  # a negative number is a large one when read as unsigned
            np.minimum(half.view(np.uint64), scratch.view(np.uint64), out=half.view(np.uint64))
        right *= a
        right += left
        values = right[: n - first * a]
        _walk(values, n, a, b, keys)
        yield values


def _walk(values: NDArray[np.int64], n: int, a: int, b: int, keys: tuple[int, ...]) -> None:
    outside = np.flatnonzero(values >= n)
    while outside.size:
        values[outside] = _rounds(values[outside], a, b, keys)
        outside = outside[values[outside] >= n]


@functools.lru_cache(64)  # the same few for every batch; hashing the keys takes as long as eight samples
def _grid(n: int, key: int) -> tuple[int, int, tuple[int, ...]]:
    """a, b and the key of each round."""
    a = math.isqrt(n - 1) + 1 if n > 1 else 1
    return a, -(-n // a), tuple(fold(key, turn) for turn in range(ROUNDS))


def _rounds(index: NDArray[Any], a: int, b: int, keys: tuple[int, ...]) -> NDArray[np.int64]:
    quotient = index // a
    left = (index - quotient * a).astype(np.uint64)
    right = quotient.astype(np.uint64)
    for turn, key in enumerate(keys):
        if turn % 2 == 0:
            left += below(mix32(right.astype(np.uint32), key), a)
            left -= np.uint64(a) * (left >= np.uint64(a))
        else:
            right += below(mix32(left.astype(np.uint32), key), b)
            right -= np.uint64(b) * (right >= np.uint64(b))
    return (left + right * np.uint64(a)).astype(np.int64)
