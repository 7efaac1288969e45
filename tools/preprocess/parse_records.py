"""Parse the records of a block: lines of JSON, or rows of columns.

JSON is parsed strictly: a line that other parsers would read differently (a duplicate key, NaN, half a surrogate pair,
a byte order mark) is bad. Every reason has a short name, by which bad lines are counted.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from tools.preprocess.text_input import LINES, MAX_DOCUMENT_BYTES, ROWS

SAMPLE_BYTES = 200  # bytes of a bad line that are kept as a sample


class BadLine(ValueError):
    """A record without usable text.

    Attributes:
        reason: a short name by which bad lines are counted.
        text: the beginning of the record.
    """

    def __init__(self, reason: str, detail: str, raw: bytes = b""):
        super().__init__(detail)
        self.reason = reason
        self.text = raw[:SAMPLE_BYTES].decode("utf-8", "backslashreplace")


def _build_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) != len(pairs):
        raise BadLine("duplicate-key", "an object has the same key twice")
    return values


def _refuse_constant(text: str) -> Any:
    raise BadLine("not-json", f"{text} is not JSON")


DECODER = json.JSONDecoder(object_pairs_hook=_build_object, parse_constant=_refuse_constant)


def _decode(raw: bytes) -> str:
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise BadLine("not-utf-8", str(error)) from None


def parse_line(raw: bytes, keys: Sequence[str]) -> list[str] | None:
    """Return the texts under `keys` of one JSON line, or None for a blank line. Raises BadLine."""
    text = _decode(raw).strip(" \t\r\n")
    if not text:
        return None
    if text.startswith("\ufeff"):
        raise BadLine("byte-order-mark", "begins with a byte order mark")
    try:
        record = DECODER.decode(text)
    except RecursionError:
        raise BadLine("nested-too-deeply", "is nested too deeply") from None
    except BadLine:
        raise
    except ValueError as error:
        raise BadLine("not-json", str(error)) from None
    if not isinstance(record, dict):
        raise BadLine("not-an-object", f"is not a JSON object but {type(record).__name__}")
    for key in keys:
        if key not in record:
            raise BadLine("key-missing", f"key {key!r} is missing")
        if not isinstance(record[key], str):
            raise BadLine("not-a-string", f"key {key!r} is not a string")
        try:
            record[key].encode("utf-8")
        except UnicodeEncodeError as error:  # half a surrogate pair is not text
            raise BadLine("lone-surrogate", str(error)) from None
    return [record[key] for key in keys]


def parse_rows(payload: bytes, keys: Sequence[str]) -> Iterator[list[str] | BadLine]:
    """Yield the texts of each row of a block (see `text_input.pack_rows`), or a BadLine."""
    num_rows = int.from_bytes(payload[:8], "little")
    lengths = np.frombuffer(payload, "<i8", len(keys) * num_rows, 8).reshape(len(keys), num_rows)
    sizes = np.maximum(lengths, 0)
    ends = 8 + lengths.nbytes + np.cumsum(sizes).reshape(len(keys), num_rows)
    for row in range(num_rows):
        texts: list[str] = []
        raw = b""
        try:
            for k, key in enumerate(keys):
                end = int(ends[k, row])
                length = int(lengths[k, row])
                raw = payload[end - max(length, 0) : end]
                if length < 0:
                    raise BadLine("not-a-string", f"key {key!r} is null")
                if length > MAX_DOCUMENT_BYTES:
                    raise too_long_line(length)
                texts.append(_decode(raw))
            yield texts
        except BadLine as error:
            yield BadLine(error.reason, str(error), raw)


def too_long_line(size: int) -> BadLine:
    """Return the BadLine for a record of this many bytes."""
    return BadLine("too-long", f"is {size} bytes long, more than the {MAX_DOCUMENT_BYTES} of one document: split it")


def parse_block(kind: int, line: int, payload: bytes, keys: Sequence[str]) -> Iterator[tuple[int, list[str] | BadLine]]:
    """Yield (line number, texts or BadLine) for each record of a block, without blank lines.

    Args:
        kind: LINES, ROWS or TOO_LONG.
        line: the number of the first line.
        payload: the content of the block.
        keys: the keys of the texts.
    """
    if kind == ROWS:
        yield from enumerate(parse_rows(payload, keys), line)
    elif kind == LINES:
        for number, raw in enumerate(payload.split(b"\n"), line):
            try:
                if len(raw) > MAX_DOCUMENT_BYTES:  # possible in LINES: it depends on where chunks end
                    raise too_long_line(len(raw))
                texts = parse_line(raw, keys)
                if texts is not None:
                    yield number, texts
            except BadLine as error:
                sample = raw if error.reason != "too-long" else b""
                yield number, BadLine(error.reason, str(error), sample)
    else:
        yield line, too_long_line(int.from_bytes(payload, "little"))
