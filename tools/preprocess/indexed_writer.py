"""Writes a `.bin/.idx` pair (megalite/data/files/indexed_dataset.py), resumable at any point.

A visible index always has its own data beside it.
"""

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from megalite.checkpoint.storage import local_storage as file_system
from megalite.common.safe_open import open_nofollow
from megalite.data.errors import DataError
from megalite.data.files.indexed_dataset import CHUNK, CODES, HEADER, MAGIC, VERSION
from tools.preprocess.journal import open_locked, sync


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The dtype that Megatron-LM stores: two bytes below 65500 tokens, else four."""
    return np.dtype(np.uint16 if vocab_size < 65500 else np.int32)


class IndexedWriter:
    """Writes a pair: `add` documents, then `finish`. Nothing with the final names exists before `finish`.

    Tokens go to `prefix.bin.partial` and lengths to `prefix.lengths.partial`, so that memory does not grow with the
    documents. The former is locked: two writers of one prefix cannot mix. `finish` removes an old index first and
    renames the new one last: a visible .idx always has its own .bin (and .json) beside it.

    A writer that was left with `keep` or killed is continued with resume_at = (documents, tokens), as `sync` returned
    them; what came later is cut off. That works at any moment up to the end of `finish`.
    """

    def __init__(self, prefix: str | Path, dtype: Any, resume_at: tuple[int, int] | None = None):
        self.prefix, self.dtype = str(prefix), np.dtype(dtype)
        if self.dtype not in CODES:
            raise DataError(f"dtype={self.dtype} cannot be stored; use one of {sorted(str(d) for d in CODES)}")
        limits = np.iinfo(self.dtype)
        self._min, self._max = int(limits.min), int(limits.max)
        self.num_documents, self.num_tokens = resume_at or (0, 0)
        Path(self.prefix).parent.mkdir(parents=True, exist_ok=True)
        self._partial, self._lengths_partial = (Path(f"{self.prefix}.{x}.partial") for x in ("bin", "lengths"))
        # a `finish` that was interrupted may have renamed the tokens already
        renamed = bool(resume_at) and not self._partial.exists()
        self._at = Path(self.prefix + ".bin") if renamed else self._partial
        self._file = open_locked(self._at)
        try:
            # stays open until finish()
            self._lengths = open(self._lengths_partial, "ab", opener=open_nofollow)  # noqa: SIM115
            sizes = ((self._file, self.num_tokens * self.dtype.itemsize), (self._lengths, 4 * self.num_documents))
            for file, size in sizes:
                if os.fstat(file.fileno()).st_size < size:
                    raise DataError(f"{file.name}: shorter than the {size} bytes written before; start over")
            for file, size in sizes:
                file.truncate(size)
        except BaseException:
            self._file.close()
            raise

    def add(self, tokens: Any) -> None:
        """Append one document of any integer array; an id that the dtype cannot hold is refused, never wrapped."""
        tokens = np.asarray(tokens)
        self.add_many(tokens, np.array([tokens.size]))

    def add_many(self, tokens: Any, lengths: NDArray[Any]) -> None:
        """Append documents that lie end to end in `tokens`; `lengths` are tokens per document."""
        flat = np.asarray(tokens).reshape(-1)
        if int(np.sum(lengths, dtype=np.int64)) != flat.size:
            raise DataError(f"lengths sum to {int(np.sum(lengths))}, not to the {flat.size} tokens given")
        if flat.size and flat.dtype != self.dtype:  # equal types hold what they hold
            if flat.dtype.kind not in "iu":
                raise DataError(f"tokens are {flat.dtype}, not integers")
            for value in (int(flat.min()), int(flat.max())):
                if not self._min <= value <= self._max:
                    first = int(np.flatnonzero(flat == value)[0])
                    document = self.num_documents + int(np.searchsorted(np.cumsum(lengths), first, side="right"))
                    held = f"{self.dtype} ({self._min}..{self._max}); check the vocabulary size or use int32"
                    raise DataError(f"{self.prefix}: document {document}: token id {value} does not fit {held}")
        if len(lengths) and int(np.max(lengths)) >= 1 << 31:
            most = int(np.max(lengths))
            raise DataError(f"a document of {most} tokens is too long for the format (2^31 - 1); split it")
        self._file.write(np.ascontiguousarray(flat, self.dtype.newbyteorder("<")).data)
        self._lengths.write(np.ascontiguousarray(lengths, "<i4").data)
        self.num_documents += len(lengths)
        self.num_tokens += flat.size

    def sync(self) -> tuple[int, int]:
        """(documents, tokens) that survive even a loss of power from now on."""
        sync(self._file)
        sync(self._lengths)
        return self.num_documents, self.num_tokens

    def finish(self, info: dict[str, Any] | None = None) -> None:
        """Make the pair visible, with `prefix.json` holding `info` (see megalite/data/files/sidecar.py) when given."""
        self.sync()
        index, sidecar = Path(self.prefix + ".idx"), Path(self.prefix + ".json")
        index_partial, sidecar_partial = (Path(f"{path}.partial") for path in (index, sidecar))
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
        if self._at == self._partial:
            os.replace(self._partial, self.prefix + ".bin")
        if info is not None:
            os.replace(sidecar_partial, sidecar)
        os.replace(index_partial, index)
        file_system.fsync_path(
            index.parent
        )  # the names survive a loss of power, before what could make them again goes
        self._lengths_partial.unlink()
        self.keep()  # the lock is held up to here

    def _write_index(self, file: Any) -> None:
        count, width = self.num_documents, self.dtype.itemsize
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
        """Close the files and leave them as they are, to be resumed."""
        for file in (self._lengths, self._file):
            with contextlib.suppress(OSError):  # a full disk refuses the last bytes again
                file.close()

    def abort(self) -> None:
        """Remove what was written; an earlier pair of this name stays as it was."""
        if not self._file.closed:
            for suffix in (".bin", ".idx", ".json", ".lengths"):
                Path(f"{self.prefix}{suffix}.partial").unlink(missing_ok=True)
            self.keep()

    def __enter__(self) -> "IndexedWriter":
        return self

    def __exit__(self, *_: object) -> None:
        self.abort()  # does nothing after finish()
