"""A pair of token files behind a URL that fsspec supports: s3://, gs://, http://, file://, memory:// and others.

    cache_path/remote/NAME-HASH/    HASH of both URLs, sizes and versions (ETag or time of change)
        copy.idx, copy.bin          of full size, with holes where blocks have not been needed yet
        copy.bin.crc                8 bytes per block: 2^32 + its crc32 if the block is present, else 0
        copy.bin.K.lock             locked by the process that fetches block K

So a copy is an ordinary file, mapped and read in the same way as any pair. A block's crc is written after its bytes,
and each process compares both before it first uses the block, so correctness depends neither on order nor on locks: two
processes that fetch the same block write the same bytes. A pair that is replaced gets another directory at the next
start. After every fetch the source is checked, and a source that has changed ends the run instead of mixing two
versions. Documents are read in random order, so the local disk must have space for the full pair. fsspec and the
package of a protocol (s3fs, gcsfs) are imported when the first URL is opened, and find the credentials themselves.
"""

import errno
import hashlib
import logging
import os
import random
import shutil
import time
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from megalite.common.environment import getenv
from megalite.common.optional_packages import missing_package_message
from megalite.common.safe_open import open_nofollow
from megalite.config.option import find_url_secret
from megalite.data.errors import DataError
from megalite.data.file_lock import file_lock

log = logging.getLogger(__name__)

# An object store answers after 20 to 50 ms and then delivers 50 to 90 MB/s per connection, so larger blocks gain little
# speed. Smaller ones need more requests, and each request costs money.
BLOCK = 4 << 20
MAX_CONNECTIONS = 16  # connections at a time
BLOCKS_PER_LOCK = 64  # blocks locked at a time
ATTEMPTS = 6
FIRST_WAIT_SECONDS = 0.5  # doubles each time: 15 s in total, plus up to 50 % of random jitter
VERSION_KEYS = ("ETag", "etag", "md5Hash", "generation", "mtime", "LastModified", "last_modified", "updated", "created")
PERMANENT = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
PERMANENT += (NotImplementedError, ImportError)
T = TypeVar("T")


class UrlFile:
    """One file behind a URL, as it was when this object was created: `size` in bytes and `version`."""

    def __init__(self, url: str):
        if (reason := find_url_secret(url)) is not None:
            raise DataError(f"the prefix of data {reason}")
        self.url = url
        try:
            import fsspec.core
        except ImportError as error:
            raise DataError(missing_package_message(f"{url}: reading from a URL", "fsspec")) from error
        try:
            self._fs, self._path = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:  # the message names the missing package or the unknown protocol
            raise DataError(f"{url}: {error}; install what it names, or give a local path") from error
        self.size, self.version = self._stat()

    def _stat(self) -> tuple[int, str]:
        """Return (size in bytes, version) of the file as it is now."""

        def info() -> dict[str, Any]:
            self._fs.invalidate_cache(self._path)
            return self._fs.info(self._path)

        state = self._retry("looking it up", info)
        if state.get("type") == "directory" or not isinstance(state.get("size"), int):
            raise DataError(f"{self.url}: is a {state.get('type')} of unknown size, not a file")
        return state["size"], next((f"{key}={state[key]}" for key in VERSION_KEYS if state.get(key)), "")

    def check_unchanged(self) -> None:
        """Raise DataError if the file has changed."""
        expected, current = (self.size, self.version), self._stat()
        if current != expected:
            old, new = (f"{size} bytes, {version or 'no version'}" for size, version in (expected, current))
            changed = f"changed while it was in use: {old} before, now {new}"
            raise DataError(f"{self.url}: {changed}; start the run again to use the new data")

    def fetch(self, start: int, stop: int) -> bytes:
        """Return bytes start..stop-1. Raises DataError after ATTEMPTS failures."""

        def read() -> bytes:
            data = self._fs.cat_file(self._path, start=start, end=stop)
            if len(data) != stop - start:
                raise OSError(f"{len(data)} bytes were received instead of {stop - start}")
            return data

        return self._retry(f"reading bytes {start}..{stop - 1}", read)

    def _retry(self, action: str, call: Callable[[], T]) -> T:
        """Return call(), repeated up to ATTEMPTS times after an error that may be temporary."""
        last_error: Exception | None = None
        for attempt in range(ATTEMPTS):
            if attempt:
                time.sleep(FIRST_WAIT_SECONDS * 2 ** (attempt - 1) * random.uniform(1, 1.5))
            try:
                return call()
            except PERMANENT as error:
                hint = "; the prefix is given without .bin or .idx" if isinstance(error, FileNotFoundError) else ""
                raise DataError(f"{self.url}: {action}: {type(error).__name__}: {error}{hint}") from error
            except Exception as error:  # each protocol's package has its own exceptions
                last_error = error
        problem = f"{action} failed {ATTEMPTS} times, the last time with {type(last_error).__name__}: {last_error}"
        remedy = "check the network and the credentials, then start again: fetched blocks are kept"
        raise DataError(f"{self.url}: {problem}; {remedy}") from last_error


class CachedFile:
    """The local copy of `source` at `path`, filled block by block as the processes of this node need it."""

    def __init__(self, source: UrlFile, path: Path):
        self.source, self.path = source, path
        files = [open_nofollow(file, os.O_RDWR | os.O_CREAT) for file in (path, f"{path}.crc")]
        self._data, self._crcs = (os.fdopen(file, "r+b", 0) for file in files)
        os.truncate(self._data.fileno(), source.size)
        self._valid_blocks: set[int] = set()  # blocks whose crc this process has checked

    def ensure_blocks(self, numbers: Iterable[int]) -> None:
        """Fetch the blocks `numbers` that are missing from the file. Raises DataError."""
        try:
            missing = [k for k in sorted(numbers) if not self._is_valid(k)]
            for a in range(0, len(missing), BLOCKS_PER_LOCK):
                self._fetch(missing[a : a + BLOCKS_PER_LOCK])
        except OSError as error:
            raise DataError(f"{self.path}: {error.strerror}; give another directory for copies") from error

    def _fetch(self, numbers: list[int]) -> None:
        with ExitStack() as locks, ThreadPoolExecutor(MAX_CONNECTIONS, thread_name_prefix="megalite-fetch") as pool:
            for k in numbers:  # ascending in every process, so that no two processes can deadlock
                locks.enter_context(file_lock(Path(f"{self.path}.{k}.lock"), f"block {k} of {self.source.url}"))
            numbers = [k for k in numbers if not self._is_valid(k)]  # another process may have fetched some meanwhile
            crcs = list(pool.map(self._download_block, numbers))
            if numbers:
                self.source.check_unchanged()
            for k, crc in zip(numbers, crcs, strict=True):
                os.pwrite(self._crcs.fileno(), crc.to_bytes(8, "little"), 8 * k)
                self._valid_blocks.add(k)

    def _download_block(self, k: int) -> int:
        data = self.source.fetch(k * BLOCK, min((k + 1) * BLOCK, self.source.size))
        if os.pwrite(self._data.fileno(), data, k * BLOCK) != len(data):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return _crc(data)

    def _is_valid(self, k: int) -> bool:
        if k not in self._valid_blocks:
            stored_crc = int.from_bytes(os.pread(self._crcs.fileno(), 8, 8 * k), "little")
            if not stored_crc:
                return False
            if _crc(os.pread(self._data.fileno(), BLOCK, k * BLOCK)) != stored_crc:
                log.warning("%s: damaged block %d; fetching it again", self.path, k)
                os.pwrite(self._crcs.fileno(), bytes(8), 8 * k)
                return False
            self._valid_blocks.add(k)
        return True


def _crc(data: bytes) -> int:
    """Return the crc32 with bit 32 set, so that it is never 0."""
    return 1 << 32 | zlib.crc32(data)


def open_remote_pair(prefix: str, cache_path: str | Path | None) -> list[CachedFile]:
    """Return the local copies of the .idx and the .bin of the pair at `prefix`; the .idx is fetched completely.

    They are in `cache_path`, $MEGALITE_CACHE or the user's cache directory. Raises DataError.
    """
    sources = [UrlFile(prefix + suffix) for suffix in (".idx", ".bin")]
    identity = [value for source in sources for value in (source.url, str(source.size), source.version)]
    digest = hashlib.blake2b("\n".join(identity).encode(), digest_size=8).hexdigest()
    user_cache = Path(getenv("XDG_CACHE_HOME") or "~/.cache") / "megalite"
    root = Path(cache_path or getenv("MEGALITE_CACHE") or user_cache).expanduser() / "remote"
    directory = root / f"{prefix.rsplit('/', 1)[-1][:80]}-{digest}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        copies = [CachedFile(source, directory / f"copy{source.url[-4:]}") for source in sources]
        missing = sum(max(0, copy.source.size - 512 * os.stat(copy.path).st_blocks) for copy in copies)
        free = shutil.disk_usage(root).free
    except OSError as error:
        raise DataError(f"{directory}: {error.strerror}; give a directory for copies of {prefix}") from error
    if missing > free:
        problem = f"{missing / 1e9:.3g} GB of it are not at {root} yet, where {free / 1e9:.3g} GB are free"
        remedy = "the run ends when that disk is full; give a larger one, or remove directories of older data there"
        log.warning(f"{prefix}: {problem}: {remedy}")
    copies[0].ensure_blocks(range(-(-sources[0].size // BLOCK)))
    return copies


class RemoteBinReader:
    """The tokens of a remote .bin, as `tokens[a:b]` and `len(tokens)`; `local` reads its local `copy`."""

    def __init__(self, copy: CachedFile, local: Any):
        self.dtype, self._copy, self._local = local.dtype, copy, local

    def __len__(self) -> int:
        return len(self._local)

    def __getitem__(self, item: slice) -> NDArray[Any]:
        start, stop, _ = item.indices(len(self))
        return self.after_fetching(np.array([start]), np.array([max(0, stop - start)]))[item]

    def after_fetching(self, starts: NDArray[np.int64], counts: NDArray[np.int64]) -> Any:
        """Fetch tokens starts[k] .. starts[k] + counts[k] for all k; return `local`, where only these may be read."""
        first_blocks = starts * self.dtype.itemsize // BLOCK
        end_blocks = -(-(starts + counts) * self.dtype.itemsize // BLOCK)
        self._copy.ensure_blocks(
            {k for a, b in zip(first_blocks.tolist(), end_blocks.tolist(), strict=True) for k in range(a, b)}
        )
        return self._local
