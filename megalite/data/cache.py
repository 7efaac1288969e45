"""Epoch orders kept on disk, so that the ranks of a node share one copy and a restart does not build it again.

A file's name is a hash of everything that determines its content (the documents' lengths among it), so a cache
never goes stale: other data has another name. Files appear whole, by rename; builders of the same one take turns
under a lock, and where the file system has no locks both build the same bytes. What is there is checked before it
is used, and built again with a warning when it is damaged. A directory that cannot be written is no error either.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalite.data.samples import Epoch

log = logging.getLogger(__name__)


def load_or_build(directory: str | Path, name: str, lengths: NDArray[Any], build: Callable[[], Epoch]) -> Epoch:
    """The epoch called `name`, from `directory` if it is there, else built and left there. `lengths` check it."""
    path = Path(directory) / name
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_name(name + ".lock")):
            epoch = _load(path, lengths)
            if epoch is None:
                built = build()
                _save(path.with_name(name + ".order.npy"), built.order)
                _save(path.with_name(name + ".starts.npy"), built.starts)
                epoch = _load(path, lengths) or built
        return epoch
    except OSError as error:
        log.warning("data_cache_path=%s cannot be used (%s); building the index in memory", directory, error)
        return _load(path, lengths) or build()


def _load(path: Path, lengths: NDArray[Any]) -> Epoch | None:
    """None when missing or damaged; a damaged one is named. Checks both ends and a thousand places between."""
    arrays = []
    try:
        for part in ("order", "starts"):
            arrays.append(np.load(path.with_name(f"{path.name}.{part}.npy"), mmap_mode="r", allow_pickle=False))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, EOFError) as error:
        log.warning("%s: damaged index cache (%s); building it again", path, error)
        return None
    order, starts = (np.asarray(a) for a in arrays)  # plain views of the maps: np.memmap slices slowly
    n = len(lengths)
    wanted = (np.dtype(np.int32 if n < 1 << 31 else np.int64), (n,), np.dtype(np.int64), (n + 1,))
    if (order.dtype, order.shape, starts.dtype, starts.shape) == wanted:
        places = np.unique(np.linspace(0, n - 1, min(n, 1024)).astype(np.int64))
        documents = order[places]
        if (
            (documents >= 0).all()
            and (documents < n).all()
            and starts[0] == 0
            and starts[-1] == int(np.sum(lengths, dtype=np.int64))
            and (starts[places + 1] - starts[places] == lengths[documents]).all()
        ):
            return Epoch(order, starts)
    log.warning("%s: damaged index cache (it does not fit the data); building it again", path)
    return None


def _save(path: Path, array: NDArray[Any]) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".partial")
    try:
        with os.fdopen(handle, "wb") as file:
            np.save(file, array, allow_pickle=False)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with open(path, "a") as file:
        with contextlib.suppress(OSError):  # no locks here: both build, the rename keeps it whole
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
