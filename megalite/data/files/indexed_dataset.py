"""Megatron's token files: `prefix.bin` contains every token in order, `prefix.idx` the position of each document.

    .idx   "MMIDIDX\\0\\0" | version u64 = 1 | dtype code u8 | sequences u64 | documents + 1 u64
           lengths i32 [sequences] | pointers i64 [sequences], bytes | document ends i64 [documents + 1] | modes i8

Both files are mapped; nothing is copied until tokens are requested. The rules of an index are checked in bulk:

    lengths[i] >= 0     pointers[0] = 0     pointers[i] + width * lengths[i] = pointers[i + 1], the last: size of .bin
    document_indices    start with 0, never decrease, end with the number of sequences

When all are satisfied, every sequence lies inside the .bin file, by induction over i. The columns are read into buffers
that fit in the cache: a map would count 20 bytes per document as resident memory. Opening takes bounded time and
memory: an index of up to MAX_FULL_CHECK entries is checked completely, a larger one at some hundred places; `verify`
checks the rest. `spans`, which every access goes through, checks the entries that it uses, so a damaged index never
makes the reader look outside the file. A .bin file that is truncated while it is mapped ends the process with SIGBUS:
do not edit data in place, or read it with mmap_bin_files=False.
"""

import mmap
import os
import stat
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from megalite.data.errors import DataError
from megalite.data.files.missing_files import missing_prefix_error

CHUNK = 1 << 15  # entries read at a time
# dtype of each column, and its offset after the header in bytes per sequence
COLUMNS = {"lengths": ("<i4", 0), "pointers": ("<i8", 4), "document_indices": ("<i8", 12)}
# an index too large to be checked completely is checked in NUM_SPOT_CHECKS windows of SPOT_CHECK_SIZE entries
NUM_SPOT_CHECKS, SPOT_CHECK_SIZE = 256, 16
MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<QBQQ")  # version, dtype code, sequences, document entries
VERSION = 1
DTYPES: dict[int, type[np.generic]] = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
CODES = {np.dtype(kind): code for code, kind in DTYPES.items()}
MAX_FULL_CHECK = 1 << 24  # index entries; 2 ns each warm (10 M documents: 19 ms), 20 bytes each to read when cold


class IndexReader:
    """The columns of an open .idx file.

    Args:
        file: descriptor of the .idx file
        start: offset of the first column in bytes
        sequences: number of sequences
        entries: number of entries of document_indices
        width: bytes per token
        size: bytes of the .bin file that the index describes
    """

    def __init__(self, file: int, start: int, sequences: int, entries: int, width: int, size: int):
        self.file, self.start, self.sequences, self.entries = file, start, sequences, entries
        self.width, self.size, self._buffers = width, size, dict[str, NDArray[Any]]()

    def read(self, column: str, a: int, b: int) -> NDArray[Any]:
        """Return entries a..b-1 of a column, valid until the next read of a column with the same dtype."""
        dtype, bytes_before = COLUMNS[column]
        buffer = self._buffers.get(dtype)
        if buffer is None or len(buffer) < b - a:
            buffer = self._buffers[dtype] = np.empty(b - a, dtype)
        entries = buffer[: b - a]
        offset = self.start + bytes_before * self.sequences + entries.itemsize * a
        if os.preadv(self.file, [entries.data], offset) != entries.nbytes:
            raise OSError(None, "the file became shorter while it was read")
        return entries


def _sequences(index: IndexReader, full: bool) -> tuple[str, str] | None:
    """Check lengths and pointers; return (field, the rule that it breaks), or None if they are valid.

    Unless `full`, only both ends and NUM_SPOT_CHECKS windows are checked, in O(1).
    """
    n = index.sequences
    if n and (first := int(index.read("pointers", 0, 1)[0])):
        return "pointers[0]", f"is {first}, not 0"
    scratch = np.empty(max(CHUNK, SPOT_CHECK_SIZE), np.int64)
    for a, b in _windows(n, full):
        lengths = index.read("lengths", a, b)
        pointers = index.read("pointers", a, min(b + 1, n))
        if lengths.min() < 0:
            i = int(lengths.argmin())
            return f"lengths[{a + i}]", f"is {lengths[i]}, negative"
        ends = np.multiply(lengths, index.width, out=scratch[: b - a], dtype=np.int64)
        ends += pointers[: b - a]
        is_wrong = ends[: len(pointers) - 1] != pointers[1:]
        if is_wrong.any():
            i = int(is_wrong.argmax())
            return f"pointers[{a + i + 1}]", f"is {pointers[i + 1]}, but the previous sequence ends at {ends[i]}"
        if not 0 <= pointers[0] <= ends[-1] <= index.size and b < n:  # also catches sums that pass 2^63
            return f"pointers[{b}]", f"is {ends[-1]}, outside the {index.size} bytes of the .bin file"
        if b == n and (pointers[0] < 0 or ends[-1] != index.size):
            return "size", f"accounts for {ends[-1]} bytes"
    return ("size", "accounts for 0 bytes") if n == 0 and index.size else None


def _documents(index: IndexReader, full: bool) -> tuple[str, str] | None:
    """Check document_indices in the same way as `_sequences` checks the other columns."""
    n = index.entries
    if not n or (first := int(index.read("document_indices", 0, 1)[0])):
        return "document_indices[0]", "is missing" if not n else f"is {first}, not 0"
    last = int(index.read("document_indices", n - 1, n)[0])
    if last != index.sequences:
        return f"document_indices[{n - 1}]", f"is {last}, not the {index.sequences} sequences"
    for a, b in _windows(n - 1, full):
        entries = index.read("document_indices", a, b + 1)
        is_wrong = entries[1:] < entries[:-1]
        if is_wrong.any():
            return f"document_indices[{a + 1 + int(is_wrong.argmax())}]", "is smaller than the previous one"
        if not 0 <= entries[0] <= index.sequences:
            return f"document_indices[{a}]", f"is {entries[0]}, outside 0..{index.sequences}"
    return None


def _windows(n: int, full: bool) -> Iterator[tuple[int, int]]:
    """Yield windows [a, b) that cover 0..n-1, or NUM_SPOT_CHECKS windows, including the first and the last."""
    if full or n <= NUM_SPOT_CHECKS * SPOT_CHECK_SIZE:
        for a in range(0, n, CHUNK):
            yield a, min(a + CHUNK, n)
    else:
        for i in range(NUM_SPOT_CHECKS):
            a = i * (n - SPOT_CHECK_SIZE) // (NUM_SPOT_CHECKS - 1)
            yield a, a + SPOT_CHECK_SIZE


def _open(path: Path | str) -> int:
    try:
        file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # opening a pipe would wait
        if stat.S_ISREG(os.fstat(file).st_mode):
            return file
        os.close(file)
        raise DataError(f"{path}: is not a regular file; write the pair again")
    except FileNotFoundError as error:
        raise DataError(missing_prefix_error(str(path)[:-4])) from error
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error


def _map(file: int, path: Path | str) -> NDArray[np.uint8]:
    try:
        if os.fstat(file).st_size == 0:  # an empty file cannot be mapped
            return np.empty(0, np.uint8)
        return np.frombuffer(mmap.mmap(file, 0, access=mmap.ACCESS_READ), np.uint8)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be mapped: {error}; try mmap_bin_files=False") from error


class FileBinReader:
    """The tokens of a .bin file that is read, not mapped, as `tokens[a:b]` and `len(tokens)`.

    A few KB take 2 to 3 us instead of 1 to 2. In return, a file that is truncated while it is open raises DataError,
    and slow or stale maps of a file system do not matter.
    """

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
        num_bytes = max(0, stop - start) * self.dtype.itemsize
        try:
            raw = os.pread(self._file.fileno(), num_bytes, start * self.dtype.itemsize)
        except OSError as error:
            raise DataError(f"{self._path}: {error.strerror} at token {start}") from error
        if len(raw) != num_bytes:
            actual_length = os.fstat(self._file.fileno()).st_size // self.dtype.itemsize
            problem = f"ends at token {actual_length} of {self._length}; it was truncated while it was open"
            raise DataError(f"{self._path}: {problem}: write the pair again")
        return np.frombuffer(raw, self.dtype)


class IndexedDataset:
    """The sequences of one `.bin/.idx` pair; for GPT data one sequence is one document.

    Args:
        prefix: path without suffix, or a URL (s3://, gs://, ...; see remote_files.py)
        mmap_bin_files: False (--no-mmap-bin-files) reads tokens (`FileBinReader`) instead of mapping the file
        cache_path: directory for files fetched from a URL (default: see remote_files.py); not used for local files

    Attributes:
        tokens: every token of the file, an array [num_tokens], or a `FileBinReader` or `RemoteBinReader` with the same
            slices
        lengths: tokens per sequence [len(self)], int32
        pointers: start of each sequence in the .bin file, bytes, int64
        document_indices: number of sequences before each document, and their total, int64
        fully_checked: True if opening has checked the whole index; otherwise `verify` does

    Raises:
        DataError: a file is missing or damaged; the message names file, field and index
    """

    def __init__(self, prefix: str | Path, *, mmap_bin_files: bool = True, cache_path: str | Path | None = None):
        self.prefix = str(prefix)
        self._index_path = self.prefix + ".idx"
        files = [self._index_path, self.prefix + ".bin"]
        self._remote = None
        if "://" in self.prefix:
            from megalite.data.files.remote_files import RemoteBinReader, open_remote_pair

            copies = open_remote_pair(self.prefix, cache_path)
            files = [str(copy.path) for copy in copies]
        self._index_file, bin_path = files
        index, data = _open(self._index_file), _open(bin_path)
        try:
            self._read_index(index, os.fstat(data).st_size)
            dtype = self._little_endian_dtype
            self.tokens: Any = _map(data, bin_path).view(dtype) if mmap_bin_files else FileBinReader(bin_path, dtype)
        finally:
            os.close(index)
            os.close(data)
        if "://" in self.prefix:
            self.tokens = self._remote = RemoteBinReader(copies[1], self.tokens)

    def _read_index(self, file: int, bin_size: int) -> None:
        """Check the index in `file` (completely up to MAX_FULL_CHECK entries), and map it."""
        start = len(MAGIC) + HEADER.size
        head, state = os.pread(file, start, 0), os.fstat(file)
        actual, self._inode = state.st_size, (state.st_dev, state.st_ino)
        if head[: len(MAGIC)] != MAGIC:
            raise self._format_error("magic", f"is {head[: len(MAGIC)]!r}, not {MAGIC!r}")
        if len(head) < start:
            raise self._format_error("header", f"ends after {len(head)} of {start} bytes")
        version, code, count, entries = HEADER.unpack(head[len(MAGIC) :])
        if version != VERSION:
            raise self._format_error("version", f"is {version}, not {VERSION}")
        if code not in DTYPES:
            raise self._format_error("dtype code", f"is {code}, not one of {sorted(DTYPES)} (integers)")
        size = start + 12 * count + 8 * entries
        if actual not in (size, size + count):  # with modes: one byte more per sequence
            expected = f"not the {size} of {count} sequences and {entries} documents"
            raise self._format_error("size", f"is {actual} bytes, {expected}")
        self.dtype = np.dtype(DTYPES[code])
        self._little_endian_dtype = self.dtype.newbyteorder("<")
        self._bin_size, self._layout = bin_size, (start, count, entries)
        self.fully_checked = max(count, entries) <= MAX_FULL_CHECK
        self._check(file, self.fully_checked)
        raw = _map(file, self._index_path)

        def column(name: str, n: int) -> NDArray[Any]:
            column_dtype, bytes_before = COLUMNS[name]
            return np.frombuffer(raw, column_dtype, n, start + bytes_before * count) if n else np.empty(0, column_dtype)

        self.lengths: NDArray[np.int32] = column("lengths", count)
        self.pointers: NDArray[np.int64] = column("pointers", count)
        self.document_indices: NDArray[np.int64] = column("document_indices", entries)

    def _format_error(self, field: str, rule: str) -> DataError:
        damaged = "the index is damaged or of another format: write it again"
        return DataError(f"{self._index_path}: {field} {rule}; {damaged}")

    def _check(self, file: int, full: bool) -> None:
        """Raise DataError if the index is damaged or does not fit the .bin file."""
        try:
            index = IndexReader(file, *self._layout, self.dtype.itemsize, self._bin_size)
            violation = _sequences(index, full) or _documents(index, full)
        except OSError as error:
            raise self._format_error("size", f"cannot be read: {error.strerror}") from error
        if violation and violation[0] == "size":
            sizes = f"size is {self._bin_size} bytes of {self.dtype}, but {self._index_path} {violation[1]}"
            remedy = "the file is truncated or belongs to another index: write the pair again"
            raise DataError(f"{self.prefix}.bin: {sizes}; {remedy}")
        if violation:
            raise self._format_error(*violation)

    def verify(self) -> None:
        """Check every entry of the index, 2 ns each. Raises DataError."""
        with self._reopen() as file:
            self._check(file.fileno(), full=True)
        self.fully_checked = True

    def read_lengths(self, documents: range) -> NDArray[np.int32]:
        """Return the number of tokens of each of `documents`, as an aligned copy.

        The file is read, since pages of the map would count as resident memory.
        """
        with self._reopen() as file:
            lengths = np.fromfile(file, "<i4", len(documents), offset=self._layout[0] + 4 * documents.start)
        if len(lengths) != len(documents):
            raise self._format_error("size", f"ends before length {documents.start + len(lengths)}")
        return lengths

    def _reopen(self) -> BinaryIO:
        """Open the index file again; raise DataError if another file has replaced it."""
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
        """Return (first token, number of tokens) of each of `documents` [n], checked to lie inside `tokens`.

        Raises IndexError for a number outside 0..len(self) - 1, and DataError for damaged entries in the index.
        """
        documents = np.asarray(documents, np.int64)
        n, width = len(self.lengths), self.dtype.itemsize
        if documents.size and not 0 <= int(documents.min()) <= int(documents.max()) < n:
            raise IndexError(f"documents {documents.min()}..{documents.max()} are outside 0..{n - 1}")
        counts = self.lengths[documents].astype(np.int64)
        starts = self.pointers[documents]
        ends = starts + counts * width
        next_start = self.pointers[np.minimum(documents + 1, n - 1)] if n else ends
        next_start = np.where(documents == n - 1, self._bin_size, next_start)
        is_bad = (starts < 0) | (ends < starts) | (ends > self._bin_size) | (ends != next_start) | (starts % width != 0)
        if is_bad.any():
            k = int(is_bad.argmax())
            i, start, end = int(documents[k]), int(starts[k]), int(ends[k])
            if counts[k] < 0:
                raise self._format_error(f"lengths[{i}]", f"is {counts[k]}, negative")
            if start < 0 or start % width or end > self._bin_size or end < start:
                raise self._format_error(
                    f"pointers[{i}]", f"is {start}, not the position of {counts[k]} tokens of {self.dtype}"
                )
            raise self._format_error(
                f"pointers[{i + 1}]", f"is {next_start[k]}, but the previous sequence ends at {end}"
            )
        return starts // width, counts

    def copy_tokens(self, starts: NDArray[np.int64], counts: NDArray[np.int64], out: NDArray[Any]) -> None:
        """Copy tokens starts[k] .. starts[k] + counts[k] for all k to `out`.

        `out` [sum of counts] receives them concatenated and may have any integer dtype.
        """
        tokens = self._remote.after_fetching(starts, counts) if self._remote else self.tokens
        done = 0
        for start, count in zip(starts.tolist(), counts.tolist(), strict=True):
            out[done : done + count] = tokens[start : start + count]
            done += count

    def document(self, document: int) -> NDArray[Any]:
        """Return the tokens of one document; a view if the file is mapped."""
        starts, counts = self.spans(np.array([document]))
        return self.tokens[int(starts[0]) : int(starts[0] + counts[0])]
