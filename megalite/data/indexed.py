"""Megatron's token files: `prefix.bin` holds every token in order, `prefix.idx` says where each document lies.

    .idx   "MMIDIDX\\0\\0" | version u64 = 1 | dtype code u8 | sequences u64 | documents + 1 u64
           lengths i32 [sequences] | pointers i64 [sequences], bytes | document ends i64 [documents + 1] | modes i8

Both files are mapped; nothing is copied until tokens are asked for. Opening checks the index completely, in
chunks: sequences must lie end to end and fill the .bin file exactly, so no index, however damaged, makes the reader
look outside the file. For GPT data one sequence is one document, which is how the rest of this package speaks.
A .bin file that is truncated while it is mapped ends the process with SIGBUS: do not edit data in place.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import mmap
import os
import struct
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<QBQQ")  # version, dtype code, sequences, document entries
VERSION = 1
DTYPES: dict[int, type[np.generic]] = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
CODES = {np.dtype(kind): code for code, kind in DTYPES.items()}
CHUNK = 1 << 16  # index entries checked at a time: stays in the processor's cache


class DataError(ValueError):
    """Data that cannot be used, by name and reason."""


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The dtype that Megatron-LM stores: two bytes below 65500 tokens, else four."""
    return np.dtype(np.uint16 if vocab_size < 65500 else np.int32)


def _map(path: Path) -> NDArray[np.uint8]:
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size == 0:  # an empty file cannot be mapped
                return np.empty(0, np.uint8)
            return np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint8)
    except OSError as error:
        stem = str(path.with_suffix(""))
        hint = f"; the prefix is given without suffix: {stem}" if stem.endswith((".bin", ".idx")) else ""
        raise DataError(f"{path}: {error.strerror}{hint}") from error


class IndexedDataset:
    """The documents of one `.bin/.idx` pair.

    tokens    every token of the file, mapped [num_tokens]
    lengths   tokens per document [len(self)], int32
    """

    def __init__(self, prefix: str | Path):
        self.prefix = str(prefix)
        index_path, bin_path = Path(self.prefix + ".idx"), Path(self.prefix + ".bin")
        raw = _map(index_path)

        def refuse(field: str, rule: str) -> DataError:
            return DataError(f"{index_path}: {field} {rule}; the index is damaged or of another format: write it again")

        if raw[: len(MAGIC)].tobytes() != MAGIC:
            raise refuse("magic", f"is {raw[: len(MAGIC)].tobytes()!r}, not {MAGIC!r}")
        start = len(MAGIC) + HEADER.size
        if raw.size < start:
            raise refuse("header", f"ends after {raw.size} of {start} bytes")
        version, code, count, entries = HEADER.unpack(raw[len(MAGIC) : start].tobytes())
        if version != VERSION:
            raise refuse("version", f"is {version}, not {VERSION}")
        if code not in DTYPES:
            raise refuse("dtype code", f"is {code}, not one of {sorted(DTYPES)} (integers)")
        size = start + 12 * count + 8 * entries
        if raw.size not in (size, size + count):  # with modes: one byte more per sequence
            raise refuse("size", f"is {raw.size} bytes, not the {size} of {count} sequences and {entries} documents")

        def column(offset: int, kind: str, n: int) -> NDArray[Any]:
            return np.frombuffer(raw, kind, n, offset) if n else np.empty(0, kind)

        self.lengths: NDArray[np.int32] = column(start, "<i4", count)
        self.pointers: NDArray[np.int64] = column(start + 4 * count, "<i8", count)
        self.document_ends: NDArray[np.int64] = column(start + 12 * count, "<i8", entries)
        self.dtype = np.dtype(DTYPES[code])
        data = _map(bin_path)
        end = self._check(refuse, data.size)
        if data.size != end:
            raise DataError(
                f"{bin_path}: size is {data.size} bytes, but {index_path} accounts for {end} bytes of {self.dtype} "
                "tokens; the file is truncated or belongs to another index: write the pair again"
            )
        self.tokens: NDArray[Any] = data.view(self.dtype.newbyteorder("<"))

    def _check(self, refuse: Any, limit: int) -> int:
        """The bytes that the index accounts for; refuses one that is inconsistent, or passes `limit` bytes early."""
        end, width = 0, self.dtype.itemsize
        for a in range(0, len(self.lengths), CHUNK):
            bytes_ = self.lengths[a : a + CHUNK].astype(np.int64) * width
            if bytes_.min() < 0:
                i = a + int(bytes_.argmin())
                raise refuse(f"lengths[{i}]", f"is {self.lengths[i]}, negative")
            ends = np.cumsum(bytes_)
            ends += end
            wrong = self.pointers[a : a + CHUNK] != ends - bytes_
            if wrong.any():
                i = a + int(wrong.argmax())
                expected = int(ends[i - a] - bytes_[i - a])
                raise refuse(f"pointers[{i}]", f"is {self.pointers[i]}, but the sequence before ends at {expected}")
            end = int(ends[-1])
            if end > limit:
                break
        ends = self.document_ends
        if not len(ends) or ends[0] != 0:
            raise refuse("document_indices[0]", f"is {ends[0] if len(ends) else 'missing'}, not 0")
        if ends[-1] != len(self.lengths):
            raise refuse(f"document_indices[{len(ends) - 1}]", f"is {ends[-1]}, not the {len(self.lengths)} sequences")
        for a in range(0, len(ends) - 1, CHUNK):
            steps = ends[a + 1 : a + CHUNK + 1] < ends[a : a + CHUNK][: len(ends) - 1 - a]
            if steps.any():
                raise refuse(f"document_indices[{a + 1 + int(steps.argmax())}]", "is smaller than the one before")
        return end

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def start(self, document: int) -> int:
        """Position of the document's first token in `tokens`."""
        return int(self.pointers[document]) // self.dtype.itemsize

    def document(self, document: int) -> NDArray[Any]:
        """The tokens of one document, a view of the file."""
        start = self.start(document)
        return self.tokens[start : start + int(self.lengths[document])]


class IndexedWriter:
    """Writes a pair: `add` documents, then `finish`. Nothing with the final names exists before `finish`.

    Tokens go to `prefix.bin.partial` and lengths to `prefix.lengths.partial`, so that memory does not grow with the
    documents. The former is locked: two writers of one prefix cannot mix. `finish` removes an old index first and
    renames the new one last: a visible .idx always has its own .bin (and .json) beside it.

    A writer that was left with `keep` or killed is taken up with resume_at = (documents, tokens), as `sync` returned
    them; what came later is cut off. That works at any moment up to the end of `finish`.
    """

    def __init__(
        self,
        prefix: str | Path,
        dtype: np.dtype[Any] | type[np.generic],
        resume_at: tuple[int, int] | None = None,
    ):
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
            self._lengths = open(self._lengths_partial, "ab")  # noqa: SIM115
            sizes = ((self._file, self.num_tokens * self.dtype.itemsize), (self._lengths, 4 * self.num_documents))
            for file, size in sizes:
                if os.fstat(file.fileno()).st_size < size:
                    raise DataError(f"{file.name}: shorter than the {size} bytes written before; begin anew")
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
                    raise DataError(
                        f"{self.prefix}: document {document}: token id {value} does not fit {self.dtype} "
                        f"({self._min}..{self._max}); check the vocabulary size or use int32"
                    )
        if len(lengths) and int(np.max(lengths)) >= 1 << 31:
            raise DataError(
                f"a document of {int(np.max(lengths))} tokens is too long for the format (2^31 - 1); split it"
            )
        self._file.write(np.ascontiguousarray(flat, self.dtype.newbyteorder("<")).data)
        self._lengths.write(np.ascontiguousarray(lengths, "<i4").data)
        self.num_documents += len(lengths)
        self.num_tokens += flat.size

    def sync(self) -> tuple[int, int]:
        """(documents, tokens) that survive even a loss of power from now on."""
        _sync(self._file)
        _sync(self._lengths)
        return self.num_documents, self.num_tokens

    def finish(self, info: dict[str, Any] | None = None) -> None:
        """Make the pair visible, with `prefix.json` holding `info` (see data/info.py) when given."""
        self.sync()
        index, sidecar = Path(self.prefix + ".idx"), Path(self.prefix + ".json")
        index_partial, sidecar_partial = Path(str(index) + ".partial"), Path(str(sidecar) + ".partial")
        with open(index_partial, "wb") as file:
            self._write_index(file)
            _sync(file)
        if info is not None:
            with open(sidecar_partial, "w", encoding="utf-8") as file:
                json.dump(info, file, indent=2, sort_keys=True)
                file.write("\n")
                _sync(file)
        index.unlink(missing_ok=True)
        sidecar.unlink(missing_ok=True)
        if self._at == self._partial:
            os.replace(self._partial, self.prefix + ".bin")
        if info is not None:
            os.replace(sidecar_partial, sidecar)
        os.replace(index_partial, index)
        sync_directory(index.parent)  # the names survive a loss of power too, before what could make them again goes
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

    def __enter__(self) -> IndexedWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()  # does nothing after finish()


def open_locked(path: Path) -> BinaryIO:
    """The file, to append to (nothing is cut yet), held by this process alone until it is closed."""
    while True:
        file = open(path, "ab")  # noqa: SIM115
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.close()
            raise DataError(f"{path}: another process is writing it ({error.strerror})") from error
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(file.fileno()), os.stat(path)):
                return file
        file.close()  # its last owner renamed or removed it between opening and locking


def sync_directory(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sync(file: Any) -> None:
    file.flush()
    os.fsync(file.fileno())
