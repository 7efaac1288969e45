"""The token file format, byte for byte, and the errors for damaged pairs."""

import os
import random
import re
import signal
import struct
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import token_files
import toml_tables
from token_files import mutate, raise_disk_full, read_documents

from megalite.data.errors import DataError
from megalite.data.files.indexed_dataset import IndexedDataset
from tools.bench import data as bench_data
from tools.preprocess.indexed_writer import IndexedWriter, token_dtype

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [[5, 6, 7], [], [8], [9, 10, 11, 12]]


def write(prefix: Path, documents: list[list[int]] = DOCUMENTS, dtype: type[np.generic] = np.uint16) -> Path:
    return token_files.write_documents(prefix, documents, dtype)


def golden_index() -> bytes:
    """Return the index of DOCUMENTS in uint16, built from the description of the format."""
    head = [b"MMIDIDX\x00\x00", struct.pack("<Q", 1), struct.pack("<B", 8), struct.pack("<QQ", 4, 5)]
    columns = [struct.pack("<4i", 3, 0, 1, 4), struct.pack("<4q", 0, 6, 6, 8), struct.pack("<5q", 0, 1, 2, 3, 4)]
    return b"".join(head + columns)


def test_files_equal_the_format_byte_for_byte(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a")
    assert (tmp_path / "a.idx").read_bytes() == golden_index()
    assert (tmp_path / "a.bin").read_bytes() == struct.pack("<8H", *range(5, 13))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.bin", "a.idx"]
    data = IndexedDataset(prefix)
    assert read_documents(data) == DOCUMENTS
    assert np.shares_memory(data.document(3), data.tokens)  # a view, not a copy
    (tmp_path / "a.idx").write_bytes(golden_index() + bytes(4))  # with modes
    assert len(IndexedDataset(prefix)) == 4
    wide = IndexedDataset(write(tmp_path / "wide", DOCUMENTS, np.int64))
    assert read_documents(wide) == DOCUMENTS and (wide.num_tokens, wide.dtype) == (8, np.int64)


def patched(offset: int, format_string: str, value: int) -> bytes:
    raw = bytearray(golden_index())
    struct.pack_into(format_string, raw, offset, value)
    return bytes(raw)


TABLES = toml_tables.read_table("data/indexed")
POINTERS, ENDS = 34 + 16, 34 + 16 + 32
BAD_INDEX = {
    "empty": (b"", "magic"),
    "magic": (b"X" + golden_index()[1:], "magic"),
    "header cut": (golden_index()[:20], "header"),
    "cut by one byte": (golden_index()[:-1], "size"),
    "cut in lengths": (golden_index()[:40], "size"),
    "one byte more": (golden_index() + b"\0", "size"),
    **{name: (patched(*change), reason) for name, (*change, reason) in TABLES["damaged"].items()},
}


@pytest.mark.parametrize("name", BAD_INDEX)
def test_damaged_index_is_refused_naming_file_and_field(tmp_path: Path, name: str) -> None:
    raw, reason = BAD_INDEX[name]
    write(tmp_path / "a")
    (tmp_path / "a.idx").write_bytes(raw)
    with pytest.raises(DataError, match=reason) as excinfo:
        IndexedDataset(tmp_path / "a")
    assert "a.idx" in str(excinfo.value)


def test_damage_beyond_the_first_chunk_is_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megalite.data.files.indexed_dataset.CHUNK", 2)
    write(tmp_path / "a")
    IndexedDataset(tmp_path / "a")
    for offset, fmt, value, reason in (
        (POINTERS + 24, "<q", 10, r"pointers\[3\]"),
        (ENDS + 16, "<q", 0, r"\[2\]"),  # second entry of a chunk, and the first entry of the next one
        (ENDS + 24, "<q", 1, r"\[3\]"),
    ):
        (tmp_path / "a.idx").write_bytes(patched(offset, fmt, value))
        with pytest.raises(DataError, match=reason):
            IndexedDataset(tmp_path / "a")


def use_everything(data: IndexedDataset) -> list[list[int]]:
    """Use all of the public interface and return the documents.

    Every returned position lies in the file, or the access raises DataError.
    """
    documents = read_documents(data)
    starts, counts = data.spans(np.arange(len(data)))
    assert (counts >= 0).all() and (starts >= 0).all() and (starts + counts <= data.num_tokens).all()
    tokens = np.empty(int(counts.sum()), data.dtype)
    data.copy_tokens(starts, counts, tokens)
    assert tokens.tolist() == [token for document in documents for token in document]
    data.verify()
    return documents


@pytest.mark.parametrize("full", [True, False])
def test_mutated_files_never_give_wrong_tokens(tmp_path: Path, monkeypatch, full: bool) -> None:
    """A mutated pair gives the same documents or is refused.

    The documents are the same if the byte did not matter or only ends of documents changed. An index that is too large
    to be checked completely when it is opened is refused when it is used, at the latest.
    """
    if not full:
        monkeypatch.setattr("megalite.data.files.indexed_dataset.MAX_FULL_CHECK", 0)
        monkeypatch.setattr("megalite.data.files.indexed_dataset.NUM_SPOT_CHECKS", 2)
        monkeypatch.setattr("megalite.data.files.indexed_dataset.SPOT_CHECK_SIZE", 1)
    rng = random.Random(0)
    documents = [[rng.randrange(200) for _ in range(rng.randrange(6))] for _ in range(12)]
    write(tmp_path / "a", documents)
    good, index = (tmp_path / "a.idx").read_bytes(), tmp_path / "a.idx"
    at_open = on_use = 0
    for turn in range(1000):
        index.write_bytes(mutate(good, rng))
        try:
            data = IndexedDataset(tmp_path / "a", mmap_bin_files=turn % 2 == 0)
        except DataError as error:
            assert "a.idx" in str(error)
            at_open += 1
            continue
        try:
            assert use_everything(data) == documents
        except DataError as error:
            assert "a.idx" in str(error) and not full
            on_use += 1
    assert at_open > 500 and at_open + on_use > 750 and (on_use > 100) != full


def test_damage_missed_at_opening_is_detected_on_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megalite.data.files.indexed_dataset.MAX_FULL_CHECK", 10_000)
    prefix = write(tmp_path / "a", [[1, 2]] * 20_000)
    index = tmp_path / "a.idx"
    good = index.read_bytes()
    pointer = 34 + 4 * 20_000 + 8 * 5_077
    for fmt, offset, value, field in (
        ("<i", 34 + 4 * 5_077, -1, r"lengths\[5077\] is -1, negative"),
        ("<q", pointer, 1 << 62, r"pointers\[5077\] is 4611686018427387904"),
        ("<q", pointer, -4, r"pointers\[5077\] is -4"),
        ("<q", pointer, 3, r"pointers\[5077\] is 3"),
        ("<q", pointer + 8, 20310, r"pointers\[5078\] is 20310, but the previous sequence ends at 20312"),
    ):
        raw = bytearray(good)
        struct.pack_into(fmt, raw, offset, value)
        index.write_bytes(raw)
        data = IndexedDataset(prefix)
        assert data.spans(np.array([0, 19_999]))[0].tolist() == [0, 39_998]
        with pytest.raises(DataError, match=field):
            data.spans(np.array([3, 5_077]))
        with pytest.raises(DataError, match=field):
            data.document(5_077)
        with pytest.raises(DataError, match=r"a.idx: (lengths|pointers)\[507[78]\]"):
            data.verify()
    struct.pack_into("<q", raw := bytearray(good), 34 + 12 * 20_000 + 8 * 9_000, 7)
    index.write_bytes(raw)
    with pytest.raises(DataError, match=r"document_indices\[9000\]"):
        IndexedDataset(prefix).verify()


def test_consistent_but_wrong_index_entries_are_detected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sequence ends where the next one starts, but they lie elsewhere in the file."""
    n = 20_000
    prefix = write(tmp_path / "a", [[1, 2]] * n)
    good = (tmp_path / "a.idx").read_bytes()
    monkeypatch.setattr("megalite.data.files.indexed_dataset.MAX_FULL_CHECK", 10_000)

    def shifted(start: int, first: int, last: int, shift: int) -> IndexedDataset:
        raw = bytearray(good)
        column = np.frombuffer(raw, "<i8", last - first, start + 8 * first)
        column += shift
        (tmp_path / "a.idx").write_bytes(raw)
        return IndexedDataset(prefix)

    pointers, ends = 34 + 4 * n, 34 + 12 * n
    for shift in (1 << 40, -(1 << 40)):
        with pytest.raises(DataError, match=r"a.idx: pointers\[\d+\] is -?\d+, outside the 80000 bytes"):
            shifted(pointers, 5000, 15_000, shift)
        with pytest.raises(DataError, match=r"a.idx: document_indices\[\d+\] is -?\d+, outside 0..20000"):
            shifted(ends, 5000, 15_000, shift)
        between = shifted(pointers, 5040, 5080, shift)  # opening checks none of these entries
        with pytest.raises(
            DataError, match=r"a.idx: pointers\[5050\] is -?\d+, not the position of 2 tokens of uint16"
        ):
            between.spans(np.array([5050]))
    with pytest.raises(DataError, match=r"a.idx: pointers\[9000\] is 36001, not the position"):
        shifted(pointers, 5000, 15_000, 1).spans(np.array([9000]))


def test_pair_replaced_while_open_is_refused(tmp_path: Path, monkeypatch) -> None:
    data = IndexedDataset(write(tmp_path / "a"))
    lengths = data.read_lengths(range(1, 4))
    assert lengths.tolist() == [0, 1, 4] and lengths.flags.aligned and data.read_lengths(range(2, 2)).size == 0
    assert data.fully_checked
    monkeypatch.setattr("megalite.data.files.indexed_dataset.MAX_FULL_CHECK", 3)
    data = IndexedDataset(tmp_path / "a")
    assert not data.fully_checked
    data.verify()
    assert data.fully_checked
    write(tmp_path / "a", [[1], [2], [3], [4]])
    for use in (data.verify, lambda: data.read_lengths(range(4))):
        with pytest.raises(DataError, match="a.idx: was replaced while it was in use"):
            use()
    assert data.document(3).tolist() == DOCUMENTS[3]  # the mapped data stays


def test_spans_of_missing_documents_are_refused(tmp_path: Path) -> None:
    data = IndexedDataset(write(tmp_path / "a"))
    for bad in (-1, 4):
        with pytest.raises(IndexError, match="outside 0..3"):
            data.spans(np.array([0, bad]))
    assert [part.tolist() for part in data.spans(np.array([], np.int64))] == [[], []]
    starts, counts = data.spans(np.array([3, 0, 1]))
    assert (starts.tolist(), counts.tolist()) == ([4, 0, 3], [4, 3, 0])
    out = np.zeros(7, np.int64)
    data.copy_tokens(starts, counts, out)
    assert out.tolist() == [9, 10, 11, 12, 5, 6, 7]


def test_documents_of_several_sequences(tmp_path: Path) -> None:
    """Megatron-LM writes one entry per document, which may hold several sequences."""
    (tmp_path / "a.bin").write_bytes(struct.pack("<6i", *range(6)))
    raw = [b"MMIDIDX\0\0", struct.pack("<QBQQ", 1, 4, 3, 3), struct.pack("<3i", 1, 2, 3)]
    raw += [struct.pack("<3q", 0, 4, 12), struct.pack("<3q", 0, 2, 3)]
    (tmp_path / "a.idx").write_bytes(b"".join(raw))
    data = IndexedDataset(tmp_path / "a")
    assert use_everything(data) == [[0], [1, 2], [3, 4, 5]]
    assert data.document_indices.tolist() == [0, 2, 3]


@pytest.mark.parametrize(("dtype", "width"), [(np.uint16, 2), (np.int32, 4)])
def test_files_of_many_gigabytes(tmp_path: Path, dtype: type[np.generic], width: int) -> None:
    """The positions are beyond 2^31 and 2^32 tokens; the files are sparse."""
    lengths = np.array([2**31 - 1, 2**31 - 1, 5, 2**30], "<i4")
    pointers = np.concatenate([[0], np.cumsum(lengths.astype(np.int64))])
    with open(tmp_path / "a.bin", "wb") as file:
        file.seek(width * int(pointers[2]))
        file.write(np.arange(1, 6).astype(dtype).tobytes())
        file.truncate(width * int(pointers[4]))
    raw = golden_index()[:9] + struct.pack("<QBQQ", 1, {2: 8, 4: 4}[width], 4, 5)
    raw += lengths.tobytes() + (pointers[:4] * width).tobytes() + np.arange(5).tobytes()
    (tmp_path / "a.idx").write_bytes(raw)
    for mapped in (True, False):
        data = IndexedDataset(tmp_path / "a", mmap_bin_files=mapped)
        assert data.num_tokens == 2**32 + 2**30 + 3
        assert data.document(2).tolist() == [1, 2, 3, 4, 5]
        assert data.tokens[2**32 - 2 : 2**32 + 4].tolist() == [1, 2, 3, 4, 5, 0]
        out = np.empty(7, np.int32)
        data.copy_tokens(np.array([2**32 - 3, 2**32 + 2**30]), np.array([4, 3]), out)
        assert out.tolist() == [0, 1, 2, 3, 0, 0, 0]


def test_file_truncated_while_open(tmp_path: Path) -> None:
    """A read file gives an error; for a mapped one the process ends with SIGBUS, as the module documents."""
    prefix = write(tmp_path / "a", [[7] * 3000] * 3)
    data = IndexedDataset(prefix, mmap_bin_files=False)
    assert data.document(2).tolist() == [7] * 3000 and data.tokens.dtype == np.uint16
    code = f"from megalite.data.files.indexed_dataset import IndexedDataset as I; d = I({str(prefix)!r}); import os\n"
    code += f"os.truncate({str(prefix) + '.bin'!r}, 6000); d.document(2).sum()"
    command = [sys.executable, "-X", "faulthandler", "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert result.returncode == -signal.SIGBUS and "Bus error" in result.stderr
    with pytest.raises(DataError, match="a.bin: ends at token 3000 of 9000; it was truncated while it was open"):
        data.document(2)
    assert data.document(0).tolist() == [7] * 3000
    with pytest.raises(ValueError, match="steps of 1"):
        data.tokens[::2]


def test_opening_needs_no_memory_for_the_index(tmp_path: Path) -> None:
    """Less than a tenth of an index of 40 MB becomes resident with either way of checking."""
    n = 2_000_000
    with IndexedWriter(tmp_path / "a", np.uint16) as writer:
        writer.add_many(np.zeros(n, np.uint16), np.ones(n, np.int64))
        writer.finish()
    code = f"""
from megalite.data.files import indexed_dataset
def peak():  # getrusage would count the parent's memory at the fork
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
before = peak()
data = indexed_dataset.IndexedDataset({str(tmp_path / "a")!r})
indexed_dataset.MAX_FULL_CHECK = 0
indexed_dataset.IndexedDataset({str(tmp_path / "a")!r}).verify()
print(len(data), peak() - before)
"""
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT, check=True)
    count, growth = map(int, result.stdout.split())
    assert count == n and growth < 4e6


@pytest.mark.parametrize("change", [-1, 1, -16])
def test_bin_of_wrong_size_is_refused(tmp_path: Path, change: int) -> None:
    prefix = write(tmp_path / "a")
    raw = (tmp_path / "a.bin").read_bytes()
    (tmp_path / "a.bin").write_bytes(raw[:change] if change < 0 else raw + b"\0")
    with pytest.raises(DataError, match="truncated or belongs to another"):
        IndexedDataset(prefix)


@pytest.mark.parametrize("suffix", [".bin", ".idx"])
def test_pipe_is_refused_without_waiting(tmp_path: Path, suffix: str) -> None:
    prefix = write(tmp_path / "x")
    Path(f"{prefix}{suffix}").unlink()
    os.mkfifo(f"{prefix}{suffix}")
    for mapped in (True, False):
        with pytest.raises(DataError, match=rf"x\{suffix}: is not a regular file"):
            IndexedDataset(prefix, mmap_bin_files=mapped)


def test_wrong_prefix_suggests_existing_pairs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    pairs = ["data/mine_text_document", "data/mine_title_document", "other_text_document", "many/half"]
    for name in (*pairs, *(f"many/{letter}" for letter in "abcdefg")):
        write(Path(name))
    Path("many/half.bin").unlink()
    Path("text.jsonl").write_text("{}")
    Path("empty").mkdir()
    for prefix, message in TABLES["prefixes"].items():
        with pytest.raises(DataError) as excinfo:
            IndexedDataset(prefix)
        assert str(excinfo.value) == message


@pytest.mark.parametrize(("value", "dtype"), [(70000, np.uint16), (-1, np.uint16), (2**31, np.int32)])
def test_writer_refuses_ids_that_would_wrap(tmp_path: Path, value: int, dtype: type[np.generic]) -> None:
    with IndexedWriter(tmp_path / "a", dtype) as writer:
        writer.add([1, 2])
        with pytest.raises(DataError, match=f"document 2: token id {value} does not fit"):
            writer.add_many([3, 4, value], np.array([1, 2]))
    assert not list(tmp_path.iterdir())  # no partial file is left


def test_failed_write_leaves_nothing_or_the_earlier_pair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prefix = write(tmp_path / "a")
    monkeypatch.setattr("megalite.data.files.indexed_dataset.os.fsync", raise_disk_full)
    for name in ("a", "b"):
        with pytest.raises(OSError, match="No space"), IndexedWriter(tmp_path / name, np.uint16) as writer:
            writer.add([1, 2, 3])
            writer.finish({"documents": 1})
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.bin", "a.idx"]
    assert read_documents(IndexedDataset(prefix)) == DOCUMENTS


def test_second_writer_of_a_prefix_is_refused(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "a", np.uint16) as first:
        first.add([1, 2, 3])
        with pytest.raises(DataError, match="another process is writing"):
            IndexedWriter(tmp_path / "a", np.uint16)
        first.finish()
    assert IndexedDataset(tmp_path / "a").document(0).tolist() == [1, 2, 3]


def test_token_dtype_equals_megatrons() -> None:
    assert token_dtype(65499) == np.uint16
    assert token_dtype(65500) == np.int32


def test_benchmark_measures_every_part(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(bench_data, "in_subprocess", lambda function, *arguments: function(*arguments))
    assert bench_data.main(["--documents", "20000"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 5 and all(re.search(r"\d (s, |M/s|ms|M tokens/s)|by numpy \d", line) for line in lines)
    assert "0.02 M documents, 0.015" in lines[0]
    with pytest.raises(SystemExit):
        bench_data.main(["--documents", "-1"])
