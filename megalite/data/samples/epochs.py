"""The order of the documents of an epoch, a pure function of lengths and keys; and its copy on disk.

    epoch e    the documents in the order of a shuffle of (seed, e), laid end to end: T tokens

Only the two epochs in use exist, at 12 bytes per document (`Epoch`). No table of samples is kept: the beginning of
sample j is arithmetic (token_line.py), and a binary search in `starts` finds the document there.

Orders are kept on disk, so that the ranks of a node share one copy and a restart does not build it again. A file's name
is a hash of everything that determines its content, so a cache never goes stale. Files appear whole, by rename, and are
read without a lock. Builders of the same one take turns under a lock, or build the same bytes where there are no locks.
A damaged file is built again with a warning, and in memory where the directory cannot be written.
"""

import contextlib
import logging
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalite.data.locks import appearing, locked
from megalite.data.samples.permutation import permutation

log = logging.getLogger(__name__)

STALE_SECONDS = 24 * 3600.0  # a partial file this old has no writer


@dataclass(frozen=True)
class Epoch:
    """One pass over the documents: order [D] of document numbers, starts [D + 1] in tokens of the epoch."""

    order: NDArray[Any]
    starts: NDArray[np.int64]


def build_epoch(lengths: NDArray[Any], key: int) -> Epoch:
    """Shuffle the documents of `lengths` (numbered from 0) by `key`."""
    n, a = len(lengths), 0
    order = np.empty(n, np.int32 if n < 1 << 31 else np.int64)
    starts = np.zeros(n + 1, np.int64)
    for part in permutation(n, key):
        b = a + len(part)
        order[a:b] = part
        ends = starts[a + 1 : b + 1]
        ends[:] = np.take(lengths, part)
        ends[0] += starts[a]
        np.cumsum(ends, out=ends)
        a = b
    return Epoch(order, starts)


def load_or_build(directory: str | Path, name: str, lengths: NDArray[Any], build: Callable[[], Epoch]) -> Epoch:
    """The epoch called `name`, from `directory` if it exists, else built and stored there. `lengths` check it."""
    path = Path(directory) / name
    if (epoch := _load(path, lengths)) is not None:
        return epoch
    built: Epoch | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path.with_name(name + ".lock"), f"index cache {path}") as alone:
            epoch = _load(path, lengths, warn=False)  # another process may have built it meanwhile
            if epoch is None:
                _sweep(path, alone)
                built = build()
                for column, array in (("order", built.order), ("starts", built.starts)):
                    with appearing(path.with_name(f"{name}.{column}.npy")) as file:
                        np.save(file, array, allow_pickle=False)
                        os.fchmod(file.fileno(), 0o644)
                epoch = _load(path, lengths) or built
        return epoch
    except OSError as error:
        log.warning("data_cache_path=%s cannot be used (%s); building the index in memory", directory, error)
        return built or build()


def _load(path: Path, lengths: NDArray[Any], warn: bool = True) -> Epoch | None:
    """The stored epoch, checked at both ends and a thousand places between; None when missing or damaged."""
    try:
        order = np.load(path.with_name(f"{path.name}.order.npy"), mmap_mode="r", allow_pickle=False)
        starts = np.load(path.with_name(f"{path.name}.starts.npy"), mmap_mode="r", allow_pickle=False)
        return _checked(np.asarray(order), np.asarray(starts), lengths)  # plain views: np.memmap slices slowly
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, EOFError) as error:
        if warn:
            log.warning("%s: damaged index cache (%s); building it again", path, error)
        return None


def _checked(order: NDArray[Any], starts: NDArray[Any], lengths: NDArray[Any]) -> Epoch:
    """Raises ValueError."""
    n, misfit = len(lengths), ValueError("it does not fit the data")
    wanted = (np.dtype(np.int32 if n < 1 << 31 else np.int64), (n,), np.dtype(np.int64), (n + 1,))
    if (order.dtype, order.shape, starts.dtype, starts.shape) != wanted:
        raise misfit
    places = np.unique(np.linspace(0, n - 1, min(n, 1024)).astype(np.int64))
    documents = order[places]
    sound = (
        (documents >= 0).all()
        and (documents < n).all()
        and starts[0] == 0
        and starts[-1] == int(np.sum(lengths, dtype=np.int64))
        and (starts[places + 1] - starts[places] == lengths[documents]).all()
    )
    if not sound:
        raise misfit
    return Epoch(order, starts)


def _sweep(path: Path, alone: bool) -> None:
    """Remove partial files of killed builders: those of this file when we hold its lock, and all old ones."""
    for partial in path.parent.glob("*.partial"):
        with contextlib.suppress(OSError):  # another process may sweep, too
            ours = alone and partial.name.startswith(path.name + ".")
            if ours or time.time() - partial.stat().st_mtime > STALE_SECONDS:
                partial.unlink()
