"""Write a `.bin/.idx` pair (megalite/data/files/indexed_dataset.py), resumable at any point.

If an index exists under its final name, the data that belongs to it does, too.
"""

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalite.checkpoint.storage import local_storage
from megalite.common.safe_open import open_nofollow
from megalite.data.errors import DataError
from megalite.data.files.indexed_dataset import CHUNK, CODES, HEADER, MAGIC, VERSION
from tools.preprocess.journal import open_locked, sync


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """Return the dtype that Megatron-LM stores: two bytes below 65500 tokens, otherwise four."""
    return np.dtype(np.uint16 if vocab_size < 65500 else np.int32)


class IndexedWriter:
    """A writer of a pair: `add` documents, then `finish`. Files get their final names in `finish`.

    Tokens go to `prefix.bin.partial` and lengths to `prefix.lengths.partial`, so that memory does not grow with the
    documents. `prefix.bin.partial` is locked, so two writers cannot mix their data. `finish` removes an old index first
    and renames the new one last, so that an .idx never exists without its .bin (and .json).

    Args:
        prefix: the path of the pair without suffix.
        dtype: the dtype of the tokens.
        resume_at: resume a writer that was left with `keep` or killed (at any time up to the end of `finish`), at
            (documents, tokens), which `sync` has returned. Later data is cut off.
    """

    def __init__(self, prefix: str | Path, dtype: Any, resume_at: tuple[int, int] | None = None):
        self.prefix = str(prefix)
        self.dtype = np.dtype(dtype)
        if self.dtype not in CODES:
            raise DataError(f"dtype={self.dtype} cannot be stored; use one of {sorted(str(d) for d in CODES)}")
        limits = np.iinfo(self.dtype)
        self._min = int(limits.min)
        self._max = int(limits.max)
        self.num_documents, self.num_tokens = resume_at or (0, 0)
        Path(self.prefix).parent.mkdir(parents=True, exist_ok=True)
        self._tokens_partial = Path(f"{self.prefix}.bin.partial")
        self._lengths_partial = Path(f"{self.prefix}.lengths.partial")
        # an interrupted `finish` may have renamed the tokens already
        self._is_renamed = bool(resume_at) and not self._tokens_partial.exists()
        self._tokens = open_locked(Path(f"{self.prefix}.bin") if self._is_renamed else self._tokens_partial)
        try:
            # stays open until finish()
            self._lengths = open(self._lengths_partial, "ab", opener=open_nofollow)  # noqa: SIM115
            sizes = ((self._tokens, self.num_tokens * self.dtype.itemsize), (self._lengths, 4 * self.num_documents))
            for file, size in sizes:
                if os.fstat(file.fileno()).st_size < size:
                    raise DataError(f"{file.name}: shorter than the {size} bytes written before; start over")
            for file, size in sizes:
                file.truncate(size)
        except BaseException:
            self._tokens.close()
            raise

    def add(self, tokens: Any) -> None:
        """Append one document, an integer array. Raises DataError for an id that does not fit the dtype."""
        tokens = np.asarray(tokens)
        self.add_many(tokens, np.array([tokens.size]))

    def add_many(self, tokens: Any, lengths: NDArray[Any]) -> None:
        """Append documents that are concatenated in `tokens`; `lengths` are the tokens per document."""
        flat = np.asarray(tokens).reshape(-1)
        if int(np.sum(lengths, dtype=np.int64)) != flat.size:
            raise DataError(f"lengths sum to {int(np.sum(lengths))}, not to the {flat.size} tokens given")
        if flat.size and flat.dtype != self.dtype:  # values of the same dtype always fit
            self._check_values(flat, lengths)
        if len(lengths) and int(np.max(lengths)) >= 1 << 31:
            raise DataError(
                f"a document of {int(np.max(lengths))} tokens is too long for the format (2^31 - 1); split it"
            )
        self._tokens.write(np.ascontiguousarray(flat, self.dtype.newbyteorder("<")).data)
        self._lengths.write(np.ascontiguousarray(lengths, "<i4").data)
        self.num_documents += len(lengths)
        self.num_tokens += flat.size

    def _check_values(self, flat: NDArray[Any], lengths: NDArray[Any]) -> None:
        """Raise DataError if a token is not an integer or does not fit the dtype."""
        if flat.dtype.kind not in "iu":
            raise DataError(f"tokens are {flat.dtype}, not integers")
        for value in (int(flat.min()), int(flat.max())):
            if not self._min <= value <= self._max:
                first = int(np.flatnonzero(flat == value)[0])
                document = self.num_documents + int(np.searchsorted(np.cumsum(lengths), first, side="right"))
                limits = f"{self.dtype} ({self._min}..{self._max}); check the vocabulary size or use int32"
                raise DataError(f"{self.prefix}: document {document}: token id {value} does not fit {limits}")

    def sync(self) -> tuple[int, int]:
        """Sync the files and return (documents, tokens), which survive a loss of power from now on."""
        sync(self._tokens)
        sync(self._lengths)
        return self.num_documents, self.num_tokens

    def finish(self, info: dict[str, Any] | None = None) -> None:
        """Give the files their final names.

        Args:
            info: the content of `prefix.json` (see megalite/data/files/sidecar.py); None writes no such file.
        """
        self.sync()
        index = Path(f"{self.prefix}.idx")
        sidecar = Path(f"{self.prefix}.json")
        index_partial = Path(f"{index}.partial")
        sidecar_partial = Path(f"{sidecar}.partial")
        with open(index_partial, "wb", opener=open_nofollow) as file:
            self._write_index(file)
            sync(file)
        if info is not None:
            with open(sidecar_partial, "w", encoding="utf-8", opener=open_nofollow) as file:
                json.dump(info, file, indent=2, sort_keys=True)
                file.write("\n")
                sync(file)
        index.unlink(missing_ok=True)
        sidecar.unlink(missing_ok=True)
        if not self._is_renamed:
            os.replace(self._tokens_partial, f"{self.prefix}.bin")
        if info is not None:
            os.replace(sidecar_partial, sidecar)
        os.replace(index_partial, index)
        # the new names must survive a loss of power before the lengths, from which the index can be made again, go
        local_storage.fsync_path(index.parent)
        self._lengths_partial.unlink()
        self.keep()  # releases the lock

    def _write_index(self, file: Any) -> None:
        count = self.num_documents
        width = self.dtype.itemsize
        file.write(MAGIC + HEADER.pack(VERSION, CODES[self.dtype], count, count + 1))
        with open(self._lengths_partial, "rb") as lengths:
            while chunk := lengths.read(4 * CHUNK):
                file.write(chunk)
            lengths.seek(0)
            end = 0
            while chunk := lengths.read(4 * CHUNK):
                ends = end + np.cumsum(np.frombuffer(chunk, "<i4"), dtype=np.int64)
                starts = np.concatenate([[end], ends[:-1]])
                file.write((starts * width).astype("<i8").data)
                end = int(ends[-1])
        for a in range(0, count + 1, CHUNK):
            file.write(np.arange(a, min(a + CHUNK, count + 1), dtype="<i8").data)

    def keep(self) -> None:
        """Close the files and leave them as they are, so that another writer can resume."""
        for file in (self._lengths, self._tokens):
            with contextlib.suppress(OSError):  # on a full disk, flushing the last bytes fails again
                file.close()

    def abort(self) -> None:
        """Remove the partial files. An earlier pair of this name is not changed."""
        if not self._tokens.closed:
            for suffix in (".bin", ".idx", ".json", ".lengths"):
                Path(f"{self.prefix}{suffix}.partial").unlink(missing_ok=True)
            self.keep()

    def __enter__(self) -> "IndexedWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()  # does nothing after finish()
