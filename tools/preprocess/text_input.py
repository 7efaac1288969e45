"""Read input files of every format as blocks of complete records, in bounded memory.

    .jsonl .json   one object per line          + .gz (any number of members), .zst (any number of frames)
    .txt           the whole file is one text   + .gz, .zst
    .parquet       a row is a record; the column with the name of the key is its text; needs pyarrow
    -              standard input: lines of JSON

A document longer than MAX_DOCUMENT_BYTES is skipped without storing it, and reported. Every block has the position
after it, at which reading can resume: in a plain file by seeking, in parquet at the row. Compressed files and standard
input are read again up to the position, and their checksum is compared. A truncated compressed file is an error.
"""

import contextlib
import glob
import gzip
import importlib
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import numpy as np

from megalite.common.optional_packages import missing_package_message
from megalite.data.errors import DataError

BLOCK_BYTES = 1 << 19
MAX_DOCUMENT_BYTES = 1 << 28
ZSTD_BYTES = 4096  # compressed bytes at a time: they expand to at most 128 MiB, so no file can fill the memory
MAX_ROWS = 4096  # rows of a parquet block: with a dictionary of long texts, metadata says little about their size
LINES, ROWS, TOO_LONG = range(3)  # payloads of a block: lines of JSON; pack_rows(); the size of a skipped document


@dataclass(frozen=True)
class Position:
    """A position at which reading can resume.

    Attributes:
        file: the index of the file.
        line: the number of the next record, from 1.
        at: the number of uncompressed bytes, or rows, before it.
        crc: the crc32 of these bytes.
    """

    file: int = 0
    line: int = 1
    at: int = 0
    crc: int = 0


@dataclass(frozen=True)
class TextBlock:
    """A block of complete records.

    Attributes:
        file: the index of the file.
        line: the number of the first record, from 1.
        kind: LINES, ROWS or TOO_LONG.
        payload: the content.
        next: the position after it.
        disk: the bytes of the file on disk that were read so far.
    """

    file: int
    line: int
    kind: int
    payload: bytes
    next: Position
    disk: int


def format_of(name: str) -> str:
    """Return lines, text or parquet for the name of a file, or an empty string for other names."""
    stem = name
    if name.endswith((".gz", ".zst")):
        stem = name.removesuffix(".gz").removesuffix(".zst")
    if name == "-" or stem.endswith((".jsonl", ".json")):
        return "lines"
    if stem.endswith(".txt"):
        return "text"
    return "parquet" if name.endswith(".parquet") else ""


def expand(patterns: Sequence[str]) -> list[str]:
    """Return the files that match the patterns, sorted within each. Raises DataError if a pattern matches no file."""
    files: list[str] = []
    for pattern in patterns:
        paths = [pattern] if pattern == "-" or os.path.exists(pattern) else sorted(glob.glob(pattern, recursive=True))
        if not paths:
            raise DataError(f"input={pattern} matches no file; check the path")
        files += [name for name in paths if name not in files]
    for name in files:
        if not format_of(name) or os.path.isdir(name):
            kinds = ".jsonl, .json (one object per line) or .txt file, one of them with .gz or .zst after it"
            raise DataError(f"input={name} is not a {kinds}, a .parquet file, or - for standard input")
    return files


def _import_optional(module: str, file_name: str) -> Any:
    """Import a module that reading a file needs. Raises DataError if its package is not installed."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise DataError(missing_package_message(file_name, module.partition(".")[0])) from error


def read_blocks(
    files: Sequence[str], keys: Sequence[str] = ("text",), start: Position | None = None
) -> Iterator[TextBlock]:
    """Yield the records of all files in order, about BLOCK_BYTES at a time. Raises DataError for an unreadable file."""
    start = start or Position()
    for index in range(start.file, len(files)):
        name = files[index]
        position = start if index == start.file else Position(index)
        try:
            if format_of(name) == "parquet":
                yield from _read_parquet(name, position, keys)
            elif format_of(name) == "text":
                yield _read_text(name, index)
            else:
                yield from _LineReader(name, position).blocks()
        except OSError as error:
            raise DataError(f"{name}: {error.strerror or error}") from error
        except (EOFError, zlib.error) as error:
            raise DataError(f"{name}: truncated or damaged ({error}); fetch the file again") from error


def text_bytes(name: str) -> int:
    """Return the bytes of a file's content, estimated from the first chunk if it is compressed. Raises OSError."""
    size = os.path.getsize(name)
    if name.endswith((".gz", ".zst")):
        with contextlib.suppress(EOFError, zlib.error, DataError, StopIteration):  # reading it all reports the error
            chunk, disk = next(_chunks(name))
            return size * len(chunk) // max(1, disk)
    return size


def _chunks(name: str, offset: int = 0) -> Iterator[tuple[bytes, int]]:
    """Yield (chunk of the uncompressed content, bytes read from disk).

    Args:
        name: the file.
        offset: the first byte of a plain file; compressed files start at their beginning.
    """
    with open(0, "rb", closefd=False) if name == "-" else open(name, "rb") as raw:
        if name.endswith((".gz", ".zst")) and not os.fstat(raw.fileno()).st_size:
            raise EOFError("empty")
        if name.endswith(".zst"):
            for chunk in _zstd_chunks(raw, name):
                yield chunk, raw.tell()
            return
        if offset:
            raw.seek(offset)
        file = gzip.GzipFile(fileobj=raw) if name.endswith(".gz") else raw
        while chunk := file.read(BLOCK_BYTES):
            yield chunk, 0 if name == "-" else raw.tell()


def _zstd_chunks(raw: BinaryIO, name: str) -> Iterator[bytes]:
    zstandard = _import_optional("zstandard", name)
    # the package's stream reader accepts a truncated frame; a decompression object knows the end of its frame
    frame = None
    while data := raw.read(ZSTD_BYTES):
        while data:
            frame = frame or zstandard.ZstdDecompressor().decompressobj()
            try:
                chunk = frame.decompress(data)
            except zstandard.ZstdError as error:
                raise EOFError(error) from error
            for a in range(0, len(chunk), BLOCK_BYTES):
                yield chunk[a : a + BLOCK_BYTES]
            data = b""
            if frame.eof:
                data = frame.unused_data
                frame = None
    if frame:
        raise EOFError("ends within a frame")


def _chunks_from(name: str, start: Position) -> Iterator[tuple[bytes, int]]:
    """Yield `_chunks` from a position. Raises DataError if the content before it is not what was read before."""
    if start.at == 0 or (name != "-" and not name.endswith((".gz", ".zst"))):
        yield from _chunks(name, start.at)
        return
    num_left = start.at
    crc = 0
    for chunk, disk in _chunks(name):
        head = chunk[:num_left]
        crc = zlib.crc32(head, crc)
        num_left -= len(head)
        if num_left == 0 and crc != start.crc:
            break
        if len(chunk) > len(head):
            yield chunk[len(head) :], disk
    if num_left or crc != start.crc:
        problem = f"the first {start.at} bytes are not those of the interrupted run"
        raise DataError(f"{name}: {problem}: give the same input again, or start over with --overwrite")


class _LineReader:
    """The lines of a file, as blocks. It keeps track of the position after the last block."""

    def __init__(self, name: str, start: Position):
        self._name = name
        self._file = start.file
        self._start = start
        self._line = start.line
        self._offset = start.at
        self._crc = start.crc
        self._disk = 0

    def blocks(self) -> Iterator[TextBlock]:
        """Yield blocks of complete lines."""
        lines: list[bytes] = []  # complete lines
        tail: list[bytes] = []  # the beginning of the next line
        lines_size = tail_size = 0
        skipped_size = 0  # of the line that is being skipped, since it is too long
        for chunk, disk in _chunks_from(self._name, self._start):
            self._disk = disk
            if skipped_size:
                end = chunk.find(b"\n") + 1 or len(chunk)
                self._advance(chunk[:end])
                skipped_size += end
                if not chunk[:end].endswith(b"\n"):
                    continue
                yield self._skipped_block(skipped_size - 1)
                skipped_size = 0
                chunk = chunk[end:]
            end = chunk.rfind(b"\n") + 1
            if end:
                lines += [*tail, chunk[:end]]
                lines_size += tail_size + end
                tail = []
                tail_size = 0
            tail.append(chunk[end:])
            tail_size += len(chunk) - end
            if lines_size >= BLOCK_BYTES or (lines and tail_size > MAX_DOCUMENT_BYTES):
                yield self._block(lines)
                lines = []
                lines_size = 0
            if tail_size > MAX_DOCUMENT_BYTES:
                for piece in tail:
                    self._advance(piece)
                skipped_size = tail_size
                tail = []
                tail_size = 0
        if skipped_size:
            yield self._skipped_block(skipped_size)
        elif lines_size + tail_size:
            yield self._block(lines + tail)

    def _advance(self, data: bytes) -> None:
        self._offset += len(data)
        self._crc = zlib.crc32(data, self._crc)

    def _block(self, pieces: list[bytes]) -> TextBlock:
        payload = b"".join(pieces)
        first = self._line
        self._advance(payload)
        self._line += payload.count(b"\n")
        return TextBlock(self._file, first, LINES, payload, self._position(), self._disk)

    def _skipped_block(self, size: int) -> TextBlock:
        first = self._line
        self._line += 1
        return TextBlock(self._file, first, TOO_LONG, size.to_bytes(8, "little"), self._position(), self._disk)

    def _position(self) -> Position:
        return Position(self._file, self._line, self._offset, self._crc)


def _read_text(name: str, file_index: int) -> TextBlock:
    """Return a text file as a block of one row."""
    pieces = []
    size = disk = 0
    next_position = Position(file_index + 1)
    for chunk, disk in _chunks(name):  # noqa: B007  used after the loop
        size += len(chunk)
        if size > MAX_DOCUMENT_BYTES:  # its real size is unknown, to avoid reading it to the end
            return TextBlock(file_index, 1, TOO_LONG, size.to_bytes(8, "little"), next_position, disk)
        pieces.append(chunk)
    return TextBlock(file_index, 1, ROWS, pack_rows([np.array([size])], pieces), next_position, disk)


def pack_rows(lengths: Sequence[Any], contents: Sequence[bytes]) -> bytes:
    """Return the payload of a block of rows.

    number of rows u64 | bytes of each text i64 [keys, rows], -1 for null | the texts, key by key

    Args:
        lengths: for each key, the bytes of each text.
        contents: the texts, in any number of pieces.
    """
    table = np.stack(lengths).astype("<i8")
    return b"".join([table.shape[1].to_bytes(8, "little"), table.tobytes(), *contents])


def _read_parquet(name: str, start: Position, keys: Sequence[str]) -> Iterator[TextBlock]:
    """Yield blocks of the rows of a parquet file."""
    arrow = _import_optional("pyarrow", name)
    parquet = _import_optional("pyarrow.parquet", name)
    try:
        # buffered reads get pages, never a complete row group
        with parquet.ParquetFile(name, buffer_size=BLOCK_BYTES, pre_buffer=False) as file:
            _check_columns(name, file.schema_arrow, keys, arrow)
            file_size = os.path.getsize(name)
            end = 0  # number of rows up to the end of the current batch
            for group_index in range(file.metadata.num_row_groups):
                group = file.metadata.row_group(group_index)
                if end + group.num_rows <= start.at:
                    end += group.num_rows
                    continue
                columns = (group.column(i) for i in range(group.num_columns))
                text_size = sum(column.total_uncompressed_size for column in columns if column.path_in_schema in keys)
                batch_rows = max(1, min(MAX_ROWS, group.num_rows * BLOCK_BYTES // max(text_size, 1)))
                for batch in file.iter_batches(batch_rows, [group_index], list(keys), use_threads=False):
                    begin = end
                    end += batch.num_rows
                    if end <= start.at:
                        continue
                    begin = max(begin, start.at)
                    batch = batch.slice(batch.num_rows - (end - begin))
                    payload = _pack_batch(batch, keys, arrow)
                    disk = file_size * end // file.metadata.num_rows
                    yield TextBlock(start.file, begin + 1, ROWS, payload, Position(start.file, end + 1, end), disk)
    except arrow.ArrowException as error:
        raise DataError(f"{name}: truncated or damaged ({error}); fetch the file again") from error


def _check_columns(name: str, schema: Any, keys: Sequence[str], arrow: Any) -> None:
    """Raise DataError unless the file has one text column for each key."""
    for key in keys:
        if schema.names.count(key) != 1:
            raise DataError(f"{name}: no column {key!r}; it has {', '.join(schema.names)}: choose with --json-keys")
        column_type = schema.field(key).type
        if arrow.types.is_dictionary(column_type):
            column_type = column_type.value_type
        if str(column_type).replace("large_", "").replace("_view", "") not in ("string", "binary"):
            raise DataError(f"{name}: column {key!r} is {column_type}, not text: choose another with --json-keys")


def _pack_batch(batch: Any, keys: Sequence[str], arrow: Any) -> bytes:
    """Return the payload for a batch of rows."""
    lengths = []
    contents = []
    for key in keys:
        column = batch.column(key).cast(arrow.large_binary())
        is_null = column.is_null().to_numpy(zero_copy_only=False)
        column = column.fill_null(b"")  # the bytes of a null are undefined
        _, offsets, data = column.buffers()
        ends = np.frombuffer(offsets, "<i8")[column.offset : column.offset + len(column) + 1]
        lengths.append(np.where(is_null, -1, np.diff(ends)))
        contents.append(data[int(ends[0]) : int(ends[-1])].to_pybytes() if data is not None else b"")
    return pack_rows(lengths, contents)
