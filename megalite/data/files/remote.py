"""A pair of token files behind a URL that fsspec knows: s3://, gs://, http://, file://, memory:// and others.

    cache_path/remote/NAME-HASH/     HASH of both URLs, sizes and versions (ETag or time of change)
        copy.index                   the .idx, fetched once and mapped
        00000a3f.block ...           blocks of the .bin, fetched when they are first needed (block_cache.py)

A pair that is replaced gets another directory at the next start. Every fetch is followed by a look at the source, and a
source that has changed ends the run instead of mixing two versions. Documents are read in random order, so the local
disk should hold the whole pair: then each byte is fetched once per node. fsspec and the package of a protocol (s3fs,
gcsfs) are imported when the first URL is opened, and find the credentials themselves.
"""

import hashlib
import logging
import os
import random
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from megalite.config.environment import variable
from megalite.config.field import secret_in
from megalite.config.packages import needs
from megalite.data.errors import DataError
from megalite.data.files.block_cache import BLOCK, FETCHES, INDEX, Blocks, contents
from megalite.data.locks import appearing, locked

log = logging.getLogger(__name__)

ATTEMPTS = 6
FIRST_WAIT_SECONDS = 0.5  # doubles each time: 15 s in all, and up to half as much again by chance
GROUP = 64  # blocks fetched before their tokens are copied: 256 MiB
VERSION_KEYS = ("ETag", "etag", "md5Hash", "generation", "mtime", "LastModified", "last_modified", "updated", "created")
PERMANENT = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)
PERMANENT += (NotImplementedError, ImportError)
T = TypeVar("T")


def cache_limit(root: Path) -> int:
    """Half of the space that the disk could give to the cache, in bytes."""
    return (shutil.disk_usage(root).free + sum(size for _, size, _ in contents(root))) // 2


class UrlFile:
    """One file behind a URL, as it was when this object was made: `size` bytes, `version`."""

    def __init__(self, url: str):
        if (reason := secret_in(url)) is not None:
            raise DataError(f"the prefix of data {reason}")
        self.url = url
        try:
            import fsspec.core
        except ImportError as error:
            raise DataError(needs(f"{url}: reading from a URL", "fsspec")) from error
        try:
            self._fs, self._path = fsspec.core.url_to_fs(url)
        except (ImportError, ValueError) as error:  # the message names the package, or the protocol nobody knows
            raise DataError(f"{url}: {error}; install what it names, or give a local path") from error
        self.size, self.version = self._look()

    def _look(self) -> tuple[int, str]:
        def info() -> dict[str, Any]:
            self._fs.invalidate_cache(self._path)
            return self._fs.info(self._path)

        state = self._retry("looking it up", info)
        if state.get("type") == "directory" or not isinstance(state.get("size"), int):
            raise DataError(f"{self.url}: is a {state.get('type')} of unknown size, not a file")
        return state["size"], next((f"{key}={state[key]}" for key in VERSION_KEYS if state.get(key)), "")

    def confirm(self) -> None:
        """DataError when the file has changed."""
        now = self._look()
        if now != (self.size, self.version):
            raise DataError(
                f"{self.url}: changed while it was in use: {self.size} bytes, {self.version or 'no version'} before, "
                f"now {now[0]} bytes, {now[1] or 'no version'}; start the run again to use the new data"
            )

    def fetch(self, start: int, stop: int) -> bytes:
        """Bytes start..stop-1."""

        def read() -> bytes:
            part = self._fs.cat_file(self._path, start=start, end=stop)
            if len(part) != stop - start:
                raise OSError(f"{len(part)} bytes came instead of {stop - start}")
            return part

        return self._retry(f"reading bytes {start}..{stop - 1}", read)

    def _retry(self, doing: str, call: Callable[[], T]) -> T:
        last: Exception | None = None
        for attempt in range(ATTEMPTS):
            if attempt:
                time.sleep(FIRST_WAIT_SECONDS * 2 ** (attempt - 1) * random.uniform(1, 1.5))
            try:
                return call()
            except PERMANENT as error:
                hint = "; the prefix is given without .bin or .idx" if isinstance(error, FileNotFoundError) else ""
                raise DataError(f"{self.url}: {doing}: {type(error).__name__}: {error}{hint}") from error
            except Exception as error:  # the packages of the protocols raise kinds of their own
                last = error
        raise DataError(
            f"{self.url}: {doing} failed {ATTEMPTS} times, the last time with {type(last).__name__}: {last}; check the "
            "network and the credentials, then start again: fetched blocks are kept"
        ) from last


def read_whole(url: str, limit: int) -> bytes:
    """A small file, its first `limit` bytes at most. FileNotFoundError when it does not exist."""
    try:
        source = UrlFile(url)
    except DataError as error:
        if isinstance(error.__cause__, FileNotFoundError):
            raise error.__cause__ from None
        raise
    return source.fetch(0, min(source.size, limit)) if source.size else b""


class RemotePair:
    """The index and the tokens of the pair at `prefix`, cached under `cache_path`, else $MEGALITE_CACHE, else the
    user's cache directory."""

    def __init__(self, prefix: str, cache_path: str | Path | None):
        self._index, self._bin = UrlFile(prefix + ".idx"), UrlFile(prefix + ".bin")
        self.size = self._bin.size
        parts = [part for source in (self._index, self._bin) for part in (source.url, str(source.size), source.version)]
        digest = hashlib.blake2b("\n".join(parts).encode(), digest_size=8).hexdigest()
        own = cache_path or variable("MEGALITE_CACHE")
        root = Path(own or Path(variable("XDG_CACHE_HOME") or "~/.cache") / "megalite").expanduser() / "remote"
        self._directory = root / f"{prefix.rsplit('/', 1)[-1][:80]}-{digest}"
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._limit, total = cache_limit(root), self.size + self._index.size
        except OSError as error:
            raise DataError(f"{self._directory}: {error.strerror}; give a directory for copies of {prefix}") from error
        if total > self._limit:
            log.warning(
                f"{prefix}: has {total / 1e9:.3g} GB, but the cache at {root} holds {self._limit / 1e9:.3g} GB: "
                f"documents are read in random order, so most will be fetched again, {BLOCK / 1e6:.3g} MB each; copy "
                "the data to the nodes, or give a larger disk"
            )

    def fetch_index(self, use: Callable[[int, int], None]) -> str:
        """Path of the local copy of the .idx; `use(file, size of the .bin)` reads it and refuses damage (DataError)."""
        path = self._directory / INDEX

        def read() -> None:
            with open(path, "rb") as file:
                use(file.fileno(), self.size)
            os.utime(path)

        try:
            with locked(self._directory / "index.lock", f"{self._index.url} -> {path}"):
                if path.exists():
                    try:
                        read()
                        return str(path)
                    except DataError:
                        log.warning("%s: damaged copy; fetching it again", path)
                self._download(path)
                read()
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}; give another directory for copies") from error
        return str(path)

    def _download(self, path: Path) -> None:
        source = self._index
        with appearing(path) as file, ThreadPoolExecutor(FETCHES) as pool:
            for group in range(0, source.size, GROUP * BLOCK):
                starts = range(group, min(group + GROUP * BLOCK, source.size), BLOCK)
                for part in pool.map(lambda start: source.fetch(start, min(start + BLOCK, source.size)), starts):
                    file.write(part)
            source.confirm()

    def tokens(self, dtype: np.dtype[Any]) -> "RemoteTokens":
        blocks = Blocks(self._directory, self.size, self._limit, self._bin.fetch, self._bin.confirm)
        return RemoteTokens(blocks, self.size // dtype.itemsize, dtype)


class RemoteTokens:
    """`tokens[a:b]` and `len(tokens)` of a remote .bin; `copy` takes many places at once and fetches them together."""

    def __init__(self, blocks: Blocks, length: int, dtype: np.dtype[Any]):
        self.dtype, self._length, self._blocks = dtype, length, blocks

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, part: slice) -> NDArray[Any]:
        start, stop, step = part.indices(self._length)
        if step != 1:
            raise ValueError(f"tokens are read in steps of 1, not {step}")
        out = np.empty(max(0, stop - start), self.dtype)
        self.copy(np.array([start]), np.array([len(out)]), out)
        return out

    def copy(self, begins: NDArray[np.int64], counts: NDArray[np.int64], out: NDArray[Any]) -> None:
        """Tokens begins[k] .. begins[k] + counts[k] for all k, end to end, into `out`."""
        if len(begins) and (int(begins.min()) < 0 or int((begins + counts).max()) > self._length):
            raise IndexError(f"tokens {begins.min()}..{(begins + counts).max()} are outside 0..{self._length}")
        per_block = BLOCK // self.dtype.itemsize
        pieces: dict[int, list[tuple[int, int, int]]] = {}  # block -> first token in it, tokens, place in `out`
        place = 0
        for begin, count in zip(begins.tolist(), counts.tolist(), strict=True):
            while count > 0:
                number, at = divmod(begin, per_block)
                n = min(count, per_block - at)
                pieces.setdefault(number, []).append((at, n, place))
                begin, count, place = begin + n, count - n, place + n
        numbers = sorted(pieces)
        for a in range(0, len(numbers), GROUP):
            group = numbers[a : a + GROUP]
            for number, block in zip(group, self._blocks.get(group), strict=True):
                tokens = block.view(self.dtype)
                for at, n, place in pieces[number]:
                    out[place : place + n] = tokens[at : at + n]
