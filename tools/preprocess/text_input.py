"""Input files of every format as blocks of whole records, each with the position after it, in bounded memory.

    .jsonl .json   one object per line          + .gz (any number of members), .zst (any number of frames)
    .txt           the whole file is one text   + .gz, .zst
    .parquet       a row is a record, the column named like the key its text; needs pyarrow
    -              standard input: lines of JSON

A document may have MAX_DOCUMENT_BYTES; a longer one is passed over without being held, and reported. Reading can begin
at any position that came with a block: plain files are entered there, compressed ones and standard input are read up
to there and compared by checksum, parquet continues with the row. A compressed file that ends early is an error.
"""

import contextlib
import glob
import gzip
import importlib
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from megalite.common.optional_packages import missing_package_message
from megalite.data.errors import DataError

BLOCK_BYTES = 1 << 19
MAX_DOCUMENT_BYTES = 1 << 28
ZSTD_SLICE = 4096  # compressed bytes at a time: one slice can become 128 MiB at most, so that no file fills the memory
MAX_ROWS = 4096  # of one parquet block: a dictionary of long texts hides how large the rows are
LINES, ROWS, TOO_LONG = range(3)  # what a block holds: lines of JSON; pack_rows(); the size of a document left out


@dataclass(frozen=True)
class Position:
    """Where reading continues. at: uncompressed bytes of the file, or rows, before here; crc: of these bytes."""

    file: int = 0
    line: int = 1
    at: int = 0
    crc: int = 0


class TextBlock(NamedTuple):
    file: int
    line: int  # number of the first record, from 1
    kind: int
    payload: bytes
    next: Position
    disk: int  # bytes of this file on disk that had been read


def format_of(name: str) -> str:
    """lines, text or parquet; empty when the name says none of them."""
    stem = name.removesuffix(".gz").removesuffix(".zst") if name.endswith((".gz", ".zst")) else name
    if name == "-" or stem.endswith((".jsonl", ".json")):
        return "lines"
    return "text" if stem.endswith(".txt") else "parquet" if name.endswith(".parquet") else ""


def expand(patterns: Sequence[str]) -> list[str]:
    """Files that match, each pattern sorted; a pattern without a match is an error."""
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


def _optional(package: str, name: str) -> Any:
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise DataError(missing_package_message(name, package.partition(".")[0])) from error


def read_blocks(
    files: Sequence[str], keys: Sequence[str] = ("text",), start: Position | None = None
) -> Iterator[TextBlock]:
    """The records of all files in order, about BLOCK_BYTES at a time. Errors of a file are DataErrors that name it."""
    start = start or Position()
    for number in range(start.file, len(files)):
        name, here = files[number], start if number == start.file else Position(number)
        try:
            if format_of(name) == "parquet":
                yield from _parquet(name, here, keys)
            elif format_of(name) == "text":
                yield _text(name, number)
            else:
                yield from _lines(name, here)
        except OSError as error:
            raise DataError(f"{name}: {error.strerror or error}") from error
        except (EOFError, zlib.error) as error:
            raise DataError(f"{name}: truncated or damaged ({error}); fetch the file again") from error


def text_bytes(name: str) -> int:
    """Bytes of a file's contents; of a compressed one by how its beginning unpacks. Raises OSError."""
    size = os.path.getsize(name)
    if name.endswith((".gz", ".zst")):
        with contextlib.suppress(EOFError, zlib.error, DataError, StopIteration):  # who reads all of it tells
            chunk, disk = next(_chunks(name))
            return size * len(chunk) // max(1, disk)
    return size


def _chunks(name: str, at: int = 0) -> Iterator[tuple[bytes, int]]:
    """The uncompressed contents from byte `at` of a plain file, else from the beginning; and how far on disk."""
    with open(0, "rb", closefd=False) if name == "-" else open(name, "rb") as raw:
        if name.endswith((".gz", ".zst")) and not os.fstat(raw.fileno()).st_size:
            raise EOFError("empty")
        if name.endswith(".zst"):
            for chunk in _zstd(raw, name):
                yield chunk, raw.tell()
            return
        if at:
            raw.seek(at)
        file = gzip.GzipFile(fileobj=raw) if name.endswith(".gz") else raw
        while chunk := file.read(BLOCK_BYTES):
            yield chunk, 0 if name == "-" else raw.tell()


def _zstd(raw: BinaryIO, name: str) -> Iterator[bytes]:
    zstandard = _optional("zstandard", name)
    frame = None  # the package's stream reader takes a cut frame for a whole one; a frame object knows its end
    while data := raw.read(ZSTD_SLICE):
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
                data, frame = frame.unused_data, None
    if frame:
        raise EOFError("ends within a frame")


def _from(name: str, start: Position) -> Iterator[tuple[bytes, int]]:
    """_chunks from a position; what has to be read to get there must be what was read before."""
    if start.at == 0 or (name != "-" and not name.endswith((".gz", ".zst"))):
        yield from _chunks(name, start.at)
        return
    left, crc = start.at, 0
    for chunk, disk in _chunks(name):
        head = chunk[:left]
        crc, left = zlib.crc32(head, crc), left - len(head)
        if left == 0 and crc != start.crc:
            break
        if len(chunk) > len(head):
            yield chunk[len(head) :], disk
    if left or crc != start.crc:
        other = f"the first {start.at} bytes are not those of the interrupted run"
        raise DataError(f"{name}: {other}: give the same input again, or start over with --overwrite")


def _lines(name: str, start: Position) -> Iterator[TextBlock]:
    line, at, crc, disk = start.line, start.at, start.crc, 0
    ready: list[bytes] = []  # whole lines
    tail: list[bytes] = []  # the beginning of the next line
    ready_size = tail_size = dropped = 0

    def pass_(pieces: Sequence[bytes]) -> None:
        nonlocal at, crc
        for piece in pieces:
            at, crc = at + len(piece), zlib.crc32(piece, crc)

    def take(pieces: list[bytes]) -> TextBlock:
        nonlocal line
        payload, first = b"".join(pieces), line
        pass_([payload])
        line += payload.count(b"\n")
        return TextBlock(start.file, first, LINES, payload, Position(start.file, line, at, crc), disk)

    def leave_out(size: int) -> TextBlock:
        nonlocal line
        line += 1
        after = Position(start.file, line, at, crc)
        return TextBlock(start.file, line - 1, TOO_LONG, size.to_bytes(8, "little"), after, disk)

    for chunk, disk in _from(name, start):  # noqa: B007, the functions above read it
        if dropped:
            end = chunk.find(b"\n") + 1 or len(chunk)
            pass_([chunk[:end]])
            dropped += end
            if chunk[end - 1] != 10:  # the line continues
                continue
            yield leave_out(dropped - 1)
            dropped, chunk = 0, chunk[end:]
        cut = chunk.rfind(b"\n") + 1
        if cut:
            ready += [*tail, chunk[:cut]]
            ready_size += tail_size + cut
            tail, tail_size = [], 0
        tail.append(chunk[cut:])
        tail_size += len(chunk) - cut
        if ready_size >= BLOCK_BYTES or (ready and tail_size > MAX_DOCUMENT_BYTES):
            yield take(ready)
            ready, ready_size = [], 0
        if tail_size > MAX_DOCUMENT_BYTES:
            pass_(tail)
            tail, tail_size, dropped = [], 0, tail_size
    if dropped:
        yield leave_out(dropped)
    elif ready_size + tail_size:
        yield take(ready + tail)


def _text(name: str, number: int) -> TextBlock:
    pieces, size, disk = [], 0, 0
    for chunk, disk in _chunks(name):  # noqa: B007
        size += len(chunk)
        if size > MAX_DOCUMENT_BYTES:  # how long it really is would take reading it to the end
            return TextBlock(number, 1, TOO_LONG, size.to_bytes(8, "little"), Position(number + 1), disk)
        pieces.append(chunk)
    return TextBlock(number, 1, ROWS, pack_rows([np.array([size])], pieces), Position(number + 1), disk)


def pack_rows(lengths: Sequence[Any], contents: Sequence[bytes]) -> bytes:
    """A block of rows: their number u64 | bytes of each text i64 [keys, rows], -1 for null | the texts, key by key."""
    table = np.stack(lengths).astype("<i8")
    return b"".join([table.shape[1].to_bytes(8, "little"), table.tobytes(), *contents])


def _parquet(name: str, start: Position, keys: Sequence[str]) -> Iterator[TextBlock]:
    arrow, parquet = _optional("pyarrow", name), _optional("pyarrow.parquet", name)
    try:
        # buffered, page by page: never a whole row group
        with parquet.ParquetFile(name, buffer_size=BLOCK_BYTES, pre_buffer=False) as file:
            _check_columns(name, file.schema_arrow, keys, arrow)
            size, row = os.path.getsize(name), 0
            for group in range(file.metadata.num_row_groups):
                rows = file.metadata.row_group(group).num_rows
                if row + rows <= start.at:
                    row += rows
                    continue
                about = file.metadata.row_group(group)
                columns = (about.column(i) for i in range(about.num_columns))
                size_of_keys = sum(one.total_uncompressed_size for one in columns if one.path_in_schema in keys)
                most = max(1, min(MAX_ROWS, rows * BLOCK_BYTES // max(size_of_keys, 1)))
                for batch in file.iter_batches(most, [group], list(keys), use_threads=False):
                    first, row = row, row + batch.num_rows
                    if row <= start.at:
                        continue
                    batch = batch.slice(max(start.at - first, 0))
                    payload = _columns(batch, keys, arrow)
                    disk = size * row // file.metadata.num_rows
                    at = Position(start.file, row + 1, row)
                    yield TextBlock(start.file, row - batch.num_rows + 1, ROWS, payload, at, disk)
    except arrow.ArrowException as error:
        raise DataError(f"{name}: truncated or damaged ({error}); fetch the file again") from error


def _check_columns(name: str, schema: Any, keys: Sequence[str], arrow: Any) -> None:
    for key in keys:
        if schema.names.count(key) != 1:
            raise DataError(f"{name}: no column {key!r}; it has {', '.join(schema.names)}: choose with --json-keys")
        kind = schema.field(key).type
        kind = kind.value_type if arrow.types.is_dictionary(kind) else kind
        if str(kind).replace("large_", "").replace("_view", "") not in ("string", "binary"):
            raise DataError(f"{name}: column {key!r} is {kind}, not text: choose another with --json-keys")


def _columns(batch: Any, keys: Sequence[str], arrow: Any) -> bytes:
    lengths, contents = [], []
    for key in keys:
        column = batch.column(key).cast(arrow.large_binary())
        missing = column.is_null().to_numpy(zero_copy_only=False)
        column = column.fill_null(b"")  # what lies under a null is not defined
        _, offsets, data = column.buffers()
        ends = np.frombuffer(offsets, "<i8")[column.offset : column.offset + len(column) + 1]
        lengths.append(np.where(missing, -1, np.diff(ends)))
        contents.append(data[int(ends[0]) : int(ends[-1])].to_pybytes() if data is not None else b"")
    return pack_rows(lengths, contents)
