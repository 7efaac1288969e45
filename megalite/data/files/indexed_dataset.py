"""Megatron's token files: `prefix.bin` holds every token in order, `prefix.idx` says where each document lies.

    .idx   "MMIDIDX\\0\\0" | version u64 = 1 | dtype code u8 | sequences u64 | documents + 1 u64
           lengths i32 [sequences] | pointers i64 [sequences], bytes | document ends i64 [documents + 1] | modes i8

Both files are mapped; nothing is copied until tokens are asked for. The rules of an index are checked in bulk:

    lengths[i] >= 0     pointers[0] = 0     pointers[i] + width * lengths[i] = pointers[i + 1], the last: size of .bin
    document_indices    begin with 0, never decrease, end with the number of sequences

When all hold, every sequence lies inside the .bin file, by induction over i. The columns are read into buffers that
stay in the cache: a map would count 20 bytes per document as resident memory. Opening takes bounded time and memory: an
index of up to MAX_FULL_CHECK entries is checked completely, a larger one at some hundred places; `verify` does the rest.
`spans`, which every access goes through, checks the entries it uses, so a damaged index never makes the reader look
outside the file. A .bin file that is truncated while it is mapped ends the process with SIGBUS: do not edit data in
place, or read it with mmap_bin_files=False.
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
# the dtype of each, and its place: bytes per sequence behind the header
COLUMNS = {"lengths": ("<i4", 0), "pointers": ("<i8", 4), "document_indices": ("<i8", 12)}
NUM_SPOT_CHECKS, SPOT_CHECK_SIZE = (
    256,
    16,
)  # places, and entries at each, that are checked of a file too large to be checked whole
MAGIC = b"MMIDIDX\x00\x00"
HEADER = struct.Struct("<QBQQ")  # version, dtype code, sequences, document entries
VERSION = 1
DTYPES: dict[int, type[np.generic]] = {1: np.uint8, 2: np.int8, 3: np.int16, 4: np.int32, 5: np.int64, 8: np.uint16}
CODES = {np.dtype(kind): code for code, kind in DTYPES.items()}
MAX_FULL_CHECK = 1 << 24  # index entries; 2 ns each warm (10 M documents: 19 ms), 20 bytes each to read when cold


class IndexReader:
    """The columns of an open .idx file: where they begin, in bytes, and the `size` of the .bin that they describe."""

    def __init__(self, file: int, start: int, sequences: int, entries: int, width: int, size: int):
        self.file, self.start, self.sequences, self.entries = file, start, sequences, entries
        self.width, self.size, self._buffers = width, size, dict[str, NDArray[Any]]()

    def read(self, column: str, a: int, b: int) -> NDArray[Any]:
        """Entries a..b-1 of a column, valid until the next read of one of its dtype."""
        kind, before = COLUMNS[column]
        buffer = self._buffers.get(kind)
        if buffer is None or len(buffer) < b - a:
            buffer = self._buffers[kind] = np.empty(b - a, kind)
        part = buffer[: b - a]
        if os.preadv(self.file, [part.data], self.start + before * self.sequences + part.itemsize * a) != part.nbytes:
            raise OSError(None, "the file became shorter while it was read")
        return part


def _sequences(index: IndexReader, whole: bool) -> tuple[str, str] | None:
    """(field, the rule that it breaks), None when sound. Unless `whole`, only both ends and PLACES windows between are
    checked, in O(1). `_documents`: the same."""
    n = index.sequences
    if n and (first := int(index.read("pointers", 0, 1)[0])):
        return "pointers[0]", f"is {first}, not 0"
    scratch = np.empty(max(CHUNK, SPOT_CHECK_SIZE), np.int64)
    for a, b in _windows(n, whole):
        lengths = index.read("lengths", a, b)
        pointers = index.read("pointers", a, min(b + 1, n))
        if lengths.min() < 0:
            i = int(lengths.argmin())
            return f"lengths[{a + i}]", f"is {lengths[i]}, negative"
        ends = np.multiply(lengths, index.width, out=scratch[: b - a], dtype=np.int64)
        ends += pointers[: b - a]
        wrong = ends[: len(pointers) - 1] != pointers[1:]
        if wrong.any():
            i = int(wrong.argmax())
            return f"pointers[{a + i + 1}]", f"is {pointers[i + 1]}, but the sequence before ends at {ends[i]}"
        if not 0 <= pointers[0] <= ends[-1] <= index.size and b < n:  # also catches sums that pass 2^63
            return f"pointers[{b}]", f"is {ends[-1]}, outside the {index.size} bytes of the .bin file"
        if b == n and (pointers[0] < 0 or ends[-1] != index.size):
            return "size", f"accounts for {ends[-1]} bytes"
    return ("size", "accounts for 0 bytes") if n == 0 and index.size else None


def _documents(index: IndexReader, whole: bool) -> tuple[str, str] | None:
    n = index.entries
    if not n or (first := int(index.read("document_indices", 0, 1)[0])):
        return "document_indices[0]", "is missing" if not n else f"is {first}, not 0"
    last = int(index.read("document_indices", n - 1, n)[0])
    if last != index.sequences:
        return f"document_indices[{n - 1}]", f"is {last}, not the {index.sequences} sequences"
    for a, b in _windows(n - 1, whole):
        entries = index.read("document_indices", a, b + 1)
        wrong = entries[1:] < entries[:-1]
        if wrong.any():
            return f"document_indices[{a + 1 + int(wrong.argmax())}]", "is smaller than the one before"
        if not 0 <= entries[0] <= index.sequences:
            return f"document_indices[{a}]", f"is {entries[0]}, outside 0..{index.sequences}"
    return None


def _windows(n: int, whole: bool) -> Iterator[tuple[int, int]]:
    """[a, b) that cover 0..n-1, or PLACES of them, the first and the last among them."""
    if whole or n <= NUM_SPOT_CHECKS * SPOT_CHECK_SIZE:
        for a in range(0, n, CHUNK):
            yield a, min(a + CHUNK, n)
    else:
        for place in range(NUM_SPOT_CHECKS):
            a = place * (n - SPOT_CHECK_SIZE) // (NUM_SPOT_CHECKS - 1)
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
            cut = f"ends at token {now} of {self._length}; it was truncated while it was open"
            raise DataError(f"{self._path}: {cut}: write the pair again")
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
            from megalite.data.files.remote_files import RemoteBinReader, open_remote_pair

            copies = open_remote_pair(self.prefix, cache_path)
            files = [str(copy.path) for copy in copies]
        self._index_file, bin_path = files
        index, data = _open(self._index_file), _open(bin_path)
        try:
            self._read_index(index, os.fstat(data).st_size)
            kind = self._little
            self.tokens: Any = _map(data, bin_path).view(kind) if mmap_bin_files else FileBinReader(bin_path, kind)
        finally:
            os.close(index)
            os.close(data)
        if "://" in self.prefix:
            self.tokens = self._remote = RemoteBinReader(copies[1], self.tokens)

    def _read_index(self, file: int, bin_size: int) -> None:
        """Check the index in `file`, all of it up to MAX_FULL_CHECK entries, and map it."""
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
            wanted = f"not the {size} of {count} sequences and {entries} documents"
            raise self._format_error("size", f"is {actual} bytes, {wanted}")
        self.dtype = np.dtype(DTYPES[code])
        self._little = self.dtype.newbyteorder("<")
        self._bin_size, self._layout = bin_size, (start, count, entries)
        self.fully_checked = max(count, entries) <= MAX_FULL_CHECK
        self._check(file, self.fully_checked)
        raw = _map(file, self._index_path)

        def column(name: str, n: int) -> NDArray[Any]:
            kind, before = COLUMNS[name]
            return np.frombuffer(raw, kind, n, start + before * count) if n else np.empty(0, kind)

        self.lengths: NDArray[np.int32] = column("lengths", count)
        self.pointers: NDArray[np.int64] = column("pointers", count)
        self.document_indices: NDArray[np.int64] = column("document_indices", entries)

    def _format_error(self, field: str, rule: str) -> DataError:
        damaged = "the index is damaged or of another format: write it again"
        return DataError(f"{self._index_path}: {field} {rule}; {damaged}")

    def _check(self, file: int, whole: bool) -> None:
        try:
            index = IndexReader(file, *self._layout, self.dtype.itemsize, self._bin_size)
            wrong = _sequences(index, whole) or _documents(index, whole)
        except OSError as error:
            raise self._format_error("size", f"cannot be read: {error.strerror}") from error
        if wrong and wrong[0] == "size":
            raise DataError(
                f"{self.prefix}.bin: size is {self._bin_size} bytes of {self.dtype}, but {self._index_path} {wrong[1]}"
                "; the file is truncated or belongs to another index: write the pair again"
            )
        if wrong:
            raise self._format_error(*wrong)

    def verify(self) -> None:
        """Check every entry of the index, 2 ns each."""
        with self._reopen() as file:
            self._check(file.fileno(), whole=True)
        self.fully_checked = True

    def read_lengths(self, documents: range) -> NDArray[np.int32]:
        """Tokens of each of `documents`, as an aligned copy: pages of the map would count as resident memory."""
        with self._reopen() as file:
            lengths = np.fromfile(file, "<i4", len(documents), offset=self._layout[0] + 4 * documents.start)
        if len(lengths) != len(documents):
            raise self._format_error("size", f"ends before length {documents.start + len(lengths)}")
        return lengths

    def _reopen(self) -> BinaryIO:
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
                raise self._format_error(f"lengths[{i}]", f"is {counts[k]}, negative")
            if begin < 0 or begin % width or end > self._bin_size or end < begin:
                raise self._format_error(
                    f"pointers[{i}]", f"is {begin}, not the place of {counts[k]} tokens of {self.dtype}"
                )
            raise self._format_error(f"pointers[{i + 1}]", f"is {after[k]}, but the sequence before ends at {end}")
        return begins // width, counts

    def copy_tokens(self, begins: NDArray[np.int64], counts: NDArray[np.int64], out: NDArray[Any]) -> None:
        """Tokens begins[k] .. begins[k] + counts[k] for all k, end to end, into `out` [sum of counts], of any dtype."""
        tokens, done = self._remote.after_fetching(begins, counts) if self._remote else self.tokens, 0
        for begin, count in zip(begins.tolist(), counts.tolist(), strict=True):
            out[done : done + count] = tokens[begin : begin + count]
            done += count

    def document(self, document: int) -> NDArray[Any]:
        """The tokens of one document; a view of the file where it is mapped."""
        begins, counts = self.spans(np.array([document]))
        return self.tokens[int(begins[0]) : int(begins[0] + counts[0])]
