"""Megatron's token files: `prefix.bin` holds every token in order, `prefix.idx` says where each document lies.

    .idx   "MMIDIDX\\0\\0" | version u64 = 1 | dtype code u8 | sequences u64 | documents + 1 u64
           lengths i32 [sequences] | pointers i64 [sequences], bytes | document ends i64 [documents + 1] | modes i8

Both files are mapped; nothing is copied until tokens are asked for. Opening takes bounded time and memory: an index of
up to FULL_CHECK entries is checked completely (index_rules.py), a larger one at some hundred places; `verify` does the
rest. `spans`, which every access goes through, checks the entries it uses, so a damaged index never makes the reader
look outside the file. A .bin file that is truncated while it is mapped ends the process with SIGBUS: do not edit data
in place, or read it with mmap_bin_files=False.
"""

import mmap
import os
import stat
import struct
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from megalite.data.errors import DataError
from megalite.data.files.index_rules import COLUMNS, IndexColumns, damage
from megalite.data.files.missing_files import missing

MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<QBQQ")  # version, dtype code, sequences, document entries
VERSION = 1
DTYPES: dict[int, type[np.generic]] = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
CODES = {np.dtype(kind): code for code, kind in DTYPES.items()}
FULL_CHECK = 1 << 24  # index entries; 2 ns each warm (10 M documents: 19 ms), 20 bytes each to read when cold


def _open(path: Path | str) -> int:
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # opening a pipe would wait
        if stat.S_ISREG(os.fstat(file).st_mode):
            return file
        os.close(file)
        raise DataError(f"{path}: is not a regular file; write the pair again")
    except FileNotFoundError as error:
        raise DataError(missing(str(path)[:-4])) from error
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error


def _map(file: int, path: Path | str) -> NDArray[np.uint8]:
    try:
        if os.fstat(file).st_size == 0:  # an empty file cannot be mapped
            return np.empty(0, np.uint8)
        return np.frombuffer(mmap.mmap(file, 0, access=mmap.ACCESS_READ), np.uint8)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be mapped: {error}; try mmap_bin_files=False") from error


class FileTokens:
    """`tokens[a:b]` and `len(tokens)` of a .bin file that is read, not mapped: a few KB take 2 to 3 us, not 1 to 2,
    but a file that is truncated meanwhile is a DataError, and slow or stale maps of a file system do not matter."""

    def __init__(self, path: str, dtype: np.dtype[Any]):
        self.dtype, self._path = dtype, path
        self._file = os.fdopen(_open(path), "rb", 0)
        self._length = os.fstat(self._file.fileno()).st_size // dtype.itemsize

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, part: slice) -> NDArray[Any]:
        start, stop, step = part.indices(self._length)
        if step != 1:
            raise ValueError(f"tokens are read in steps of 1, not {step}")
        wanted = max(0, stop - start) * self.dtype.itemsize
        try:
            raw = os.pread(self._file.fileno(), wanted, start * self.dtype.itemsize)
        except OSError as error:
            raise DataError(f"{self._path}: {error.strerror} at token {start}") from error
        if len(raw) != wanted:
            now = os.fstat(self._file.fileno()).st_size // self.dtype.itemsize
            raise DataError(
                f"{self._path}: ends at token {now} of {self._length}; it was truncated while it was open: write the "
                "pair again"
            )
        return np.frombuffer(raw, self.dtype)


class IndexedDataset:
    """The sequences of one `.bin/.idx` pair; for GPT data one sequence is one document.

    prefix          path without suffix, or a URL (s3://, gs://, ...: see remote.py)
    mmap_bin_files  False: tokens are read, not mapped (`FileTokens`); False is --no-mmap-bin-files
    cache_path      directory for files fetched from a URL (default: see remote.py); not used for local files

    tokens          every token of the file: an array [num_tokens], or with the same slices `FileTokens`, `RemoteTokens`
    lengths         tokens per sequence [len(self)], int32
    pointers        where each begins in the file, bytes, int64
    document_ends   sequences before each document, and their number, int64
    checked         whether opening has checked the whole index; otherwise `verify` does

    Raises DataError with file, field and index.
    """

    def __init__(self, prefix: str | Path, *, mmap_bin_files: bool = True, cache_path: str | Path | None = None):
        self.prefix = str(prefix)
        self._index_path = self.prefix + ".idx"
        files, self._remote = [self._index_path, self.prefix + ".bin"], None
        if "://" in self.prefix:
            from megalite.data.files.remote import RemoteTokens, open_pair

            copies = open_pair(self.prefix, cache_path)
            files = [str(copy.path) for copy in copies]
        self._index_file, bin_path = files
        index, data = _open(self._index_file), _open(bin_path)
        try:
            self._read_index(index, os.fstat(data).st_size)
            mapped = _map(data, bin_path).view(self._little) if mmap_bin_files else None
            self.tokens: Any = FileTokens(bin_path, self._little) if mapped is None else mapped
        finally:
            os.close(index)
            os.close(data)
        if "://" in self.prefix:
            self.tokens = self._remote = RemoteTokens(copies[1], self.tokens)

    def _read_index(self, file: int, bin_size: int) -> None:
        """Check the index in `file`, all of it up to FULL_CHECK entries, and map it."""
        start = len(MAGIC) + HEADER.size
        head, state = os.pread(file, start, 0), os.fstat(file)
        actual, self._inode = state.st_size, (state.st_dev, state.st_ino)
        if head[: len(MAGIC)] != MAGIC:
            raise self._refuse("magic", f"is {head[: len(MAGIC)]!r}, not {MAGIC!r}")
        if len(head) < start:
            raise self._refuse("header", f"ends after {len(head)} of {start} bytes")
        version, code, count, entries = HEADER.unpack(head[len(MAGIC) :])
        if version != VERSION:
            raise self._refuse("version", f"is {version}, not {VERSION}")
        if code not in DTYPES:
            raise self._refuse("dtype code", f"is {code}, not one of {sorted(DTYPES)} (integers)")
        size = start + 12 * count + 8 * entries
        if actual not in (size, size + count):  # with modes: one byte more per sequence
            wanted = f"not the {size} of {count} sequences and {entries} documents"
            raise self._refuse("size", f"is {actual} bytes, {wanted}")
        self.dtype = np.dtype(DTYPES[code])
        self._little = self.dtype.newbyteorder("<")
        self._bin_size, self._layout = bin_size, (start, count, entries)
        self.checked = max(count, entries) <= FULL_CHECK
        self._check(file, self.checked)
        raw = _map(file, self._index_path)

        def column(name: str, n: int) -> NDArray[Any]:
            kind, before = COLUMNS[name]
            return np.frombuffer(raw, kind, n, start + before * count) if n else np.empty(0, kind)

        self.lengths: NDArray[np.int32] = column("lengths", count)
        self.pointers: NDArray[np.int64] = column("pointers", count)
        self.document_ends: NDArray[np.int64] = column("document_indices", entries)

    def _refuse(self, field: str, rule: str) -> DataError:
        damaged = "the index is damaged or of another format: write it again"
        return DataError(f"{self._index_path}: {field} {rule}; {damaged}")

    def _check(self, file: int, whole: bool) -> None:
        try:
            wrong = damage(IndexColumns(file, *self._layout, self.dtype.itemsize, self._bin_size), whole)
        except OSError as error:
            raise self._refuse("size", f"cannot be read: {error.strerror}") from error
        if wrong and wrong[0] == "size":
            raise DataError(
                f"{self.prefix}.bin: size is {self._bin_size} bytes of {self.dtype}, but {self._index_path} "
                f"{wrong[1]}; the file is truncated or belongs to another index: write the pair again"
            )
        if wrong:
            raise self._refuse(*wrong)

    def verify(self) -> None:
        """Check every entry of the index, 2 ns each."""
        with self._reopened() as file:
            self._check(file.fileno(), whole=True)
        self.checked = True

    def read_lengths(self, documents: range) -> NDArray[np.int32]:
        """Tokens of each of `documents`, as an aligned copy: pages of the map would count as resident memory."""
        with self._reopened() as file:
            lengths = np.fromfile(file, "<i4", len(documents), offset=self._layout[0] + 4 * documents.start)
        if len(lengths) != len(documents):
            raise self._refuse("size", f"ends before length {documents.start + len(lengths)}")
        return lengths

    def _reopened(self) -> BinaryIO:
        """The index file; DataError when another one has taken its place."""
        file = os.fdopen(_open(self._index_file), "rb")
        state = os.fstat(file.fileno())
        if (state.st_dev, state.st_ino) != self._inode:
            file.close()
            raise DataError(f"{self._index_path}: was replaced while it was in use; start again to use the new data")
        return file

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_tokens(self) -> int:
        return len(self.tokens)

    def spans(self, documents: NDArray[Any]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(first token, number of tokens) of each of `documents` [n], checked to lie inside `tokens`. IndexError for a
        number that is no document, DataError for damaged entries in the index."""
        documents = np.asarray(documents, np.int64)
        n, width = len(self.lengths), self.dtype.itemsize
        if documents.size and not 0 <= int(documents.min()) <= int(documents.max()) < n:
            raise IndexError(f"documents {documents.min()}..{documents.max()} are outside 0..{n - 1}")
        counts = self.lengths[documents].astype(np.int64)
        begins = self.pointers[documents]
        ends = begins + counts * width
        after = self.pointers[np.minimum(documents + 1, n - 1)] if n else ends
        after = np.where(documents == n - 1, self._bin_size, after)
        bad = (begins < 0) | (ends < begins) | (ends > self._bin_size) | (ends != after) | (begins % width != 0)
        if bad.any():
            k = int(bad.argmax())
            i, begin, end = int(documents[k]), int(begins[k]), int(ends[k])
            if counts[k] < 0:
                raise self._refuse(f"lengths[{i}]", f"is {counts[k]}, negative")
            if begin < 0 or begin % width or end > self._bin_size or end < begin:
                raise self._refuse(f"pointers[{i}]", f"is {begin}, not the place of {counts[k]} tokens of {self.dtype}")
            raise self._refuse(f"pointers[{i + 1}]", f"is {after[k]}, but the sequence before ends at {end}")
        return begins // width, counts

    def copy(self, begins: NDArray[np.int64], counts: NDArray[np.int64], out: NDArray[Any]) -> None:
        """Tokens begins[k] .. begins[k] + counts[k] for all k, end to end, into `out` [sum of counts], of any dtype."""
        tokens, done = self._remote.with_all(begins, counts) if self._remote else self.tokens, 0
        for begin, count in zip(begins.tolist(), counts.tolist(), strict=True):
            out[done : done + count] = tokens[begin : begin + count]
            done += count

    def document(self, document: int) -> NDArray[Any]:
        """The tokens of one document; a view of the file where it is mapped."""
        begins, counts = self.spans(np.array([document]))
        return self.tokens[int(begins[0]) : int(begins[0] + counts[0])]
