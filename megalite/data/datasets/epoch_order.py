"""The order of the documents of an epoch, a pure function of lengths and keys, and its cache on disk.

    epoch e    the documents in the order of a shuffle of (seed, e), concatenated: T tokens

Only the two epochs in use exist, at 12 bytes per document (`EpochOrder`). There is no table of samples: the start of
sample j is arithmetic (gpt_dataset.py), and a binary search in `starts` finds the document there.

Orders are stored on disk, so that the ranks of a node share one copy and a restart does not build it again:

    NAME.epoch    starts, i64 | order | crc32 of both, u32

NAME is a hash of everything that determines the content, so a cache never becomes stale. Files appear complete, by
rename, and are read without a lock. Processes that build the same file wait for each other with a lock, or build the
same bytes where locks do not work. A damaged file is built again with a warning. Where the directory cannot be written,
the order is built in memory.
"""

import contextlib
import logging
import mmap
import os
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from megalite.common.text_file import regular_opener
from megalite.data.datasets.permutation import Ints, permute
from megalite.data.file_lock import atomic_write, file_lock

log = logging.getLogger(__name__)

STALE_SECONDS = 24 * 3600.0  # a partial file this old has no writer
CHUNK = 1 << 20  # documents at a time; enough for `permute` to use its tables
_CRC32_RESIDUE = 0x2144DF1C  # the crc32 of any bytes followed by their crc32


class EpochOrder(NamedTuple):
    """One pass over the documents: order [D] of document numbers, starts [D + 1] in tokens of the epoch."""

    order: NDArray[Any]
    starts: Ints


def build_epoch(lengths: NDArray[Any], key: int) -> EpochOrder:
    """Shuffle the documents of `lengths` (numbered from 0) by `key`."""
    n = len(lengths)
    order = np.empty(n, _index_dtype(n))
    starts = np.zeros(n + 1, np.int64)
    for a in range(0, n, CHUNK):
        b = min(a + CHUNK, n)
        order[a:b] = part = permute(np.arange(a, b), n, key)
        starts[a + 1 : b + 1] = np.take(lengths, part)
    return EpochOrder(order, np.cumsum(starts, out=starts))


def _index_dtype(documents: int) -> type[np.signedinteger[Any]]:
    return np.int32 if documents < 1 << 31 else np.int64


def load_or_build(directory: str | Path, name: str, documents: int, build: Callable[[], EpochOrder]) -> EpochOrder:
    """Return the order called `name` of `documents` documents from `directory`; build and store it if it is missing."""
    path = Path(directory) / f"{name}.epoch"
    if (epoch := _load(path, documents)) is not None:
        return epoch
    built: EpochOrder | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with file_lock(path.with_suffix(".lock"), f"index cache {path}") as is_locked:
            epoch = _load(path, documents, warn=False)  # another process may have built it meanwhile
            if epoch is None:
                _remove_stale_files(path, is_locked)
                built = build()
                with atomic_write(path) as file:
                    file.writelines([built.starts.data, built.order.data])
                    file.write(zlib.crc32(built.order.data, zlib.crc32(built.starts.data)).to_bytes(4, "little"))
                    os.fchmod(file.fileno(), 0o644)
                epoch = _load(path, documents) or built
        return epoch
    except OSError as error:
        log.warning("data_cache_path=%s cannot be used (%s); building the index in memory", directory, error)
        return built or build()


def _load(path: Path, documents: int, warn: bool = True) -> EpochOrder | None:
    """Return the stored order; None if it is missing or damaged.

    The check reads the file, since pages of a map would count as resident memory.
    """
    damage = "its CRC does not match"
    expected_size = 8 * (documents + 1) + np.dtype(_index_dtype(documents)).itemsize * documents + 4
    try:
        with open(path, "rb", opener=regular_opener) as file:
            crc = 0
            size = os.fstat(file.fileno()).st_size
            while part := file.read(1 << 20):
                crc = zlib.crc32(part, crc)
            if crc == _CRC32_RESIDUE and size == expected_size:
                raw = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                order = np.frombuffer(raw, _index_dtype(documents), documents, 8 * (documents + 1))
                return EpochOrder(order, np.frombuffer(raw, np.int64, documents + 1))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        damage = str(error.strerror)
    if warn:
        log.warning("%s: damaged index cache (%s); rebuilding it", path, damage)
    return None


def _remove_stale_files(path: Path, is_locked: bool) -> None:
    """Remove partial files of killed processes: this file's if we hold its lock, and all old ones."""
    for partial in path.parent.glob("*.partial"):
        with contextlib.suppress(OSError):  # another process may remove it at the same time
            is_abandoned = is_locked and partial.name.startswith(path.name + ".")
            if is_abandoned or time.time() - partial.stat().st_mtime > STALE_SECONDS:
                partial.unlink()
