"""Every input format gives the same records from any position, and a damaged file gives one error."""

import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.data.errors import DataError
from tools.preprocess import parse_records, text_input
from tools.preprocess.bad_records import ValidTexts
from tools.preprocess.parse_records import BadLine, parse_block, parse_line
from tools.preprocess.text_input import Position, expand, pack_rows, read_blocks, text_bytes

TEXT = st.text(st.characters(exclude_categories=("Cs",)), max_size=40)


def jsonl(texts: list[str]) -> bytes:
    return b"".join(json.dumps({"text": text}, ensure_ascii=False).encode() + b"\n" for text in texts)


def write_lines(path: Path, texts: list[str]) -> None:
    path.write_bytes(jsonl(texts))


def write_gz(path: Path, texts: list[str]) -> None:
    """Write three gzip members, which end in the middle of lines."""
    raw = jsonl(texts)
    cuts = [0, len(raw) // 3, len(raw) // 2, len(raw)]
    path.write_bytes(b"".join(gzip.compress(raw[a:b], 1, mtime=0) for a, b in zip(cuts, cuts[1:], strict=False)))


def write_zst(path: Path, texts: list[str]) -> None:
    """Write two frames with a skippable frame between them."""
    raw = jsonl(texts)
    skippable = b"\x50\x2a\x4d\x18\x04\x00\x00\x00user"
    frames = [zstandard.compress(raw[: len(raw) // 2], 1), skippable, zstandard.compress(raw[len(raw) // 2 :], 1)]
    path.write_bytes(b"".join(frames))


def write_parquet(path: Path, texts: list[str]) -> None:
    table = pa.table({"id": range(len(texts)), "text": texts})
    pq.write_table(table, path, row_group_size=97, compression="zstd")


WRITERS: dict[str, Callable[[Path, list[str]], None]] = {
    "a.jsonl": write_lines,
    "a.jsonl.gz": write_gz,
    "a.json.zst": write_zst,
    "a.parquet": write_parquet,
}


def texts_from(path: Path, start: Position | None = None) -> list[tuple[Position, list[str]]]:
    """Return the texts of each block, with the position after it."""
    blocks = []
    for block in read_blocks([str(path)], ("text",), start):
        texts = [texts for _, texts in parse_block(block.kind, block.line, block.payload, ("text",))]
        blocks.append((block.next, [text for [text] in texts]))
    return blocks


@pytest.mark.parametrize("name", WRITERS)
def test_every_format_reads_from_any_position(tmp_path: Path, monkeypatch, name: str) -> None:
    monkeypatch.setattr(text_input, "BLOCK_BYTES", 2000)
    texts = [f"text {i} ü\n" * (i % 13) for i in range(400)]
    WRITERS[name](tmp_path / name, texts)
    blocks = texts_from(tmp_path / name)
    assert [text for _, block_texts in blocks for text in block_texts] == texts
    assert len(blocks) > 10
    num_read = 0
    for position, block_texts in blocks:
        num_read += len(block_texts)
        assert position.line == num_read + 1
        rest = [text for _, more_texts in texts_from(tmp_path / name, position) for text in more_texts]
        assert rest == texts[num_read:]


def test_changed_content_after_an_interruption_is_refused(tmp_path: Path) -> None:
    write_gz(tmp_path / "a.jsonl.gz", ["some text"] * 10)
    [(position, _)] = texts_from(tmp_path / "a.jsonl.gz")
    for other in (["some Text"] * 10, ["some text"] * 9):
        write_gz(tmp_path / "a.jsonl.gz", other)
        with pytest.raises(DataError, match="are not those of the interrupted run"):
            texts_from(tmp_path / "a.jsonl.gz", position)


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.json.zst", "a.parquet"])
def test_damaged_file_is_one_error_with_its_name(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    rng = np.random.default_rng(0)
    WRITERS[name](path, ["".join(map(chr, rng.integers(32, 127, 200))) for _ in range(300)])
    good = path.read_bytes()
    for content in (good[: len(good) // 2], good[:-1], b"", b"\0" * 50, good[: len(good) // 3] + b"\xff" * 40):
        path.write_bytes(content)
        with pytest.raises(DataError, match=f"{name}: .*(truncated|damaged|gzip|CRC)"):
            texts_from(path)


def test_compressed_text_file_is_one_document(tmp_path: Path) -> None:
    text = "one\ntwo ü\n"
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.txt.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "c.txt.zst").write_bytes(zstandard.compress(text.encode()))
    assert list(ValidTexts(expand([str(tmp_path / "*")]), ("text",))) == [text] * 3


def test_compressed_file_smaller_than_its_text(tmp_path: Path) -> None:
    """Without this estimate a bound in bytes of text would let several times as much through."""
    lines = (json.dumps({"text": f"line {i * i} of {i % 97} words"}) + "\n" for i in range(60_000))
    raw = "".join(lines).encode()
    packed = {"a.jsonl": raw, "a.jsonl.gz": gzip.compress(raw), "a.jsonl.zst": zstandard.compress(raw)}
    for name, data in packed.items():
        (tmp_path / name).write_bytes(data)
        assert text_bytes(str(tmp_path / name)) == pytest.approx(len(raw), rel=0.2), name
        assert len(data) < len(raw) / 2 or name == "a.jsonl"


def test_too_long_document_is_skipped_without_buffering(tmp_path: Path, monkeypatch) -> None:
    for module in (text_input, parse_records):
        monkeypatch.setattr(module, "MAX_DOCUMENT_BYTES", 3000)
    monkeypatch.setattr(text_input, "BLOCK_BYTES", 700)
    texts = ["a", "b" * 2900, "c" * 3100, "d", "e" * 50_000, "f" * 20_000, "g"]
    write_lines(tmp_path / "a.jsonl", texts)
    write_parquet(tmp_path / "b.parquet", texts)
    (tmp_path / "c.jsonl").write_bytes(jsonl(texts)[:-15])  # ends within a line that is too long
    for name, n in (("a.jsonl", 7), ("b.parquet", 7), ("c.jsonl", 6)):
        records, sizes = [], []
        long_texts = {3: "c" * 3100, 5: "e" * 50_000, 6: "f" * 20_000}
        for block in read_blocks([str(tmp_path / name)], ("text",)):
            records += parse_block(block.kind, block.line, block.payload, ("text",))
            sizes.append(len(block.payload))
            next_block = next(read_blocks([str(tmp_path / name)], ("text",), block.next), None)
            assert next_block is None or next_block.line == block.next.line
        assert [line for line, _ in records] == list(range(1, n + 1))
        bad = {line: str(error) for line, error in records if isinstance(error, BadLine) and error.reason == "too-long"}
        overhead = 0 if name == "b.parquet" else len('{"text": ""}')
        assert set(bad) == {3, 5, 6}
        for line in (3, 5):
            assert f"is {len(long_texts[line]) + overhead} bytes long" in bad[line]
        assert name == "b.parquet" or max(sizes) < 5000
    (tmp_path / "d.txt").write_text("x" * 3001)
    with pytest.raises(DataError, match="d.txt:1: is 3001 bytes long, more than the 3000 of one document"):
        list(ValidTexts([str(tmp_path / "d.txt")], ("text",)))


def test_parquet_columns(tmp_path: Path) -> None:
    path = str(tmp_path / "a.parquet")
    table = {
        "text": pa.array(["a", None, "ü"], pa.large_string()),
        "words": pa.array(["x", "y", "x"]).dictionary_encode(),
        "raw": pa.array([b"ok", b"\xff", b""], pa.binary()),
        "n": [1, 2, 3],
    }
    pq.write_table(pa.table(table), path)
    assert list(ValidTexts([path], ("words",))) == ["x", "y", "x"]
    for key, reason in (("text", "a.parquet:2: key 'text' is null"), ("raw", "a.parquet:2: .*0xff")):
        with pytest.raises(DataError, match=reason):
            list(ValidTexts([path], (key,)))
    for key, reason in (("n", "column 'n' is int64, not text"), ("x", "no column 'x'; it has text, words, raw, n")):
        with pytest.raises(DataError, match=reason):
            list(ValidTexts([path], (key,)))
    [block] = read_blocks([path], ("words", "text"))
    rows = [texts for _, texts in parse_block(block.kind, block.line, block.payload, ("words", "text"))]
    assert rows[0] == ["x", "a"] and rows[2] == ["x", "ü"]


@pytest.mark.parametrize(("package", "name"), [("zstandard", "a.jsonl.zst"), ("pyarrow", "a.parquet")])
def test_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, name: str) -> None:
    monkeypatch.setitem(__import__("sys").modules, package, None)
    (tmp_path / name).write_bytes(b"anything")
    with pytest.raises(DataError, match=f"{name} needs the package {package}; pip install {package}"):
        list(read_blocks([str(tmp_path / name)]))


def test_invalid_inputs_are_refused(tmp_path: Path) -> None:
    for name in ("a.pdf", "b.parquet.gz", "c.gz"):
        (tmp_path / name).touch()
        with pytest.raises(DataError, match=f"{name} is not a .jsonl"):
            expand([str(tmp_path / name)])
    with pytest.raises(DataError, match=r"none\*.jsonl matches no file"):
        expand([str(tmp_path / "none*.jsonl")])
    (tmp_path / "odd[1].txt").write_text("x")
    assert expand([str(tmp_path / "odd[1].txt"), "-"]) == [str(tmp_path / "odd[1].txt"), "-"]


@settings(max_examples=60)
@given(st.lists(TEXT, max_size=30), st.integers(1, 400), st.booleans(), st.sampled_from([b"\n", b"\r\n", b"\n \n"]))
def test_texts_round_trip_through_blocks_of_any_size(
    texts: list[str], size: int, ends_with_newline: bool, ending: bytes
) -> None:
    raw = b"".join(json.dumps({"text": text}, ensure_ascii=False).encode() + ending for text in texts)
    raw = raw if ends_with_newline else raw.removesuffix(ending)
    chunks = [(raw[a : a + size], 0) for a in range(0, len(raw), size)]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(text_input, "BLOCK_BYTES", size)
        patch.setattr(text_input, "_chunks", lambda *_: iter(chunks))
        blocks = list(read_blocks(["a.jsonl"]))
    assert b"".join(block.payload for block in blocks) == raw
    parsed = [t for block in blocks for _, t in parse_block(block.kind, block.line, block.payload, ("text",))]
    assert parsed == [[text] for text in texts]
    line = 1
    for block in blocks:
        assert block.line == line
        line += block.payload.count(b"\n")
        assert block.next.line == line


@settings(max_examples=60)
@given(st.lists(st.tuples(TEXT, st.none() | TEXT), max_size=20))
def test_rows_round_trip(rows: list[tuple[str, str | None]]) -> None:
    columns = [[row[k] for row in rows] for k in range(2)]
    lengths = [np.array([-1 if x is None else len(x.encode()) for x in column], np.int64) for column in columns]
    payload = pack_rows(lengths, ["".join(x or "" for x in column).encode() for column in columns])
    parsed = [texts for _, texts in parse_block(text_input.ROWS, 1, payload, ("a", "b"))]
    assert len(parsed) == len(rows)
    for (a, b), texts in zip(rows, parsed, strict=True):
        assert texts == [a, b] if b is not None else str(texts) == "key 'b' is null"


@settings(max_examples=200)
@given(TEXT, st.dictionaries(TEXT, st.integers() | TEXT), st.booleans())
def test_text_round_trips_through_its_line(text: str, others: dict, ascii_: bool) -> None:
    line = json.dumps({**others, "text": text}, ensure_ascii=ascii_).encode()
    assert parse_line(line, ("text",)) == [text]


@settings(max_examples=300)
@given(st.binary(max_size=60) | st.binary(max_size=30).map(lambda raw: b'{"text": "' + raw + b'"}'))
def test_bad_line_is_only_refused(raw: bytes) -> None:
    try:
        texts = parse_line(raw, ("text",))
    except BadLine as error:
        assert error.reason and str(error)
    else:
        assert texts is None or json.loads(raw)["text"] == texts[0]


def test_reading_a_large_file_needs_little_memory(tmp_path: Path) -> None:
    """The blocks of 200 MB that are 200 kB on disk stay near BLOCK_BYTES."""
    line = json.dumps({"text": "x" * 999_988}).encode() + b"\n"
    raw = io.BytesIO()
    with gzip.GzipFile(fileobj=raw, mode="wb", compresslevel=1) as file:
        for _ in range(200):
            file.write(line)
    (tmp_path / "a.jsonl.gz").write_bytes(raw.getvalue())
    sizes = [len(block.payload) for block in read_blocks([str(tmp_path / "a.jsonl.gz")])]
    assert sum(sizes) == 200 * len(line) and max(sizes) <= 2 * text_input.BLOCK_BYTES + len(line)
