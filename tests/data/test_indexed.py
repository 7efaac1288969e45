"""The token file format, byte for byte, and every way in which a damaged pair is refused."""

from __future__ import annotations

import random
import struct
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megalite.data.indexed import DataError, IndexedDataset, IndexedWriter, token_dtype

DOCUMENTS = [[5, 6, 7], [], [8], [9, 10, 11, 12]]


def write(prefix: Path, documents: list[list[int]] = DOCUMENTS, dtype: type[np.generic] = np.uint16) -> Path:
    with IndexedWriter(prefix, dtype) as writer:
        for document in documents:
            writer.add(np.array(document, np.int64))
        writer.finish()
    return prefix


def golden_index() -> bytes:
    """DOCUMENTS in uint16, put together from the description of the format."""
    return b"".join(
        [
            b"MMIDIDX\x00\x00",
            struct.pack("<Q", 1),
            struct.pack("<B", 8),
            struct.pack("<QQ", 4, 5),
            struct.pack("<4i", 3, 0, 1, 4),
            struct.pack("<4q", 0, 6, 6, 8),
            struct.pack("<5q", 0, 1, 2, 3, 4),
        ]
    )


def test_files_are_byte_for_byte_the_format(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a")
    assert (tmp_path / "a.idx").read_bytes() == golden_index()
    assert (tmp_path / "a.bin").read_bytes() == struct.pack("<8H", *range(5, 13))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.bin", "a.idx"]
    data = IndexedDataset(prefix)
    assert [data.document(i).tolist() for i in range(len(data))] == DOCUMENTS
    assert np.shares_memory(data.document(3), data.tokens)  # a view, not a copy


def test_index_with_modes_is_read(tmp_path: Path) -> None:
    write(tmp_path / "a")
    (tmp_path / "a.idx").write_bytes(golden_index() + bytes(4))
    assert len(IndexedDataset(tmp_path / "a")) == 4


@settings(max_examples=40, deadline=None)
@given(
    documents=st.lists(st.lists(st.integers(0, 60000), max_size=20), max_size=30),
    dtype=st.sampled_from([np.uint16, np.int32, np.int64]),
)
def test_round_trip(tmp_path_factory: pytest.TempPathFactory, documents: list[list[int]], dtype: type) -> None:
    prefix = tmp_path_factory.mktemp("round") / "a"
    write(prefix, documents, dtype)
    data = IndexedDataset(prefix)
    assert [data.document(i).tolist() for i in range(len(data))] == documents
    assert data.num_tokens == sum(map(len, documents))
    assert data.dtype == dtype


def patched(at: int, fmt: str, value: int) -> bytes:
    raw = bytearray(golden_index())
    struct.pack_into(fmt, raw, at, value)
    return bytes(raw)


LENGTHS, POINTERS, ENDS = 34, 34 + 16, 34 + 16 + 32
BAD_INDEX = {
    "empty": (b"", "magic"),
    "magic": (b"X" + golden_index()[1:], "magic"),
    "header cut": (golden_index()[:20], "header"),
    "version 2": (patched(9, "<Q", 2), "version"),
    "dtype 0": (patched(17, "<B", 0), "dtype code"),
    "dtype float": (patched(17, "<B", 7), "dtype code"),
    "dtype wider": (patched(17, "<B", 4), "pointers"),
    "dtype narrower": (patched(17, "<B", 1), "pointers"),
    "count huge": (patched(18, "<Q", 2**63), "size"),
    "count one more": (patched(18, "<Q", 5), "size"),
    "entries one less": (patched(26, "<Q", 4), "size"),
    "cut by one byte": (golden_index()[:-1], "size"),
    "cut in lengths": (golden_index()[:40], "size"),
    "one byte more": (golden_index() + b"\0", "size"),
    "length -1": (patched(LENGTHS + 4, "<i", -1), r"lengths\[1\]"),
    "length 2^31-1": (patched(LENGTHS + 8, "<i", 2**31 - 1), "bytes|pointers"),
    "length spills": (patched(LENGTHS, "<i", 4), r"pointers\[1\]"),
    "last length": (patched(LENGTHS + 12, "<i", 5), "truncated"),
    "pointer negative": (patched(POINTERS + 8, "<q", -2), r"pointers\[1\]"),
    "pointer odd": (patched(POINTERS + 16, "<q", 7), r"pointers\[2\]"),
    "pointer beyond": (patched(POINTERS + 24, "<q", 1 << 40), r"pointers\[3\]"),
    "first end not 0": (patched(ENDS, "<q", 1), r"document_indices\[0\]"),
    "ends decrease": (patched(ENDS + 16, "<q", 0), r"document_indices\[2\]"),
    "last end beyond": (patched(ENDS + 32, "<q", 9), r"document_indices\[4\]"),
}


@pytest.mark.parametrize("name", BAD_INDEX)
def test_damaged_index_is_refused_with_file_and_field(tmp_path: Path, name: str) -> None:
    raw, reason = BAD_INDEX[name]
    write(tmp_path / "a")
    (tmp_path / "a.idx").write_bytes(raw)
    with pytest.raises(DataError, match=reason) as caught:
        IndexedDataset(tmp_path / "a")
    assert "a.idx" in str(caught.value)


def test_damage_is_found_beyond_the_first_chunk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megalite.data.indexed.CHUNK", 2)
    write(tmp_path / "a")
    IndexedDataset(tmp_path / "a")
    for at, fmt, value, reason in (
        (POINTERS + 24, "<q", 10, r"pointers\[3\]"),
        (ENDS + 16, "<q", 0, r"\[2\]"),  # second entry of a chunk, and the first of the next one
        (ENDS + 24, "<q", 1, r"\[3\]"),
    ):
        (tmp_path / "a.idx").write_bytes(patched(at, fmt, value))
        with pytest.raises(DataError, match=reason):
            IndexedDataset(tmp_path / "a")


def test_thousand_mutations_never_read_wrong_tokens(tmp_path: Path) -> None:
    """Opens with the same documents (the byte did not matter, or only the document ends changed), or is refused."""
    rng = random.Random(0)
    documents = [[rng.randrange(200) for _ in range(rng.randrange(6))] for _ in range(12)]
    write(tmp_path / "a", documents)
    good, index = (tmp_path / "a.idx").read_bytes(), tmp_path / "a.idx"
    refused = 0
    for _ in range(1000):
        raw = bytearray(good)
        kind = rng.randrange(3)
        if kind == 0:
            raw[rng.randrange(len(raw))] = rng.randrange(256)
        elif kind == 1:
            at = rng.randrange(len(raw))
            del raw[at : at + rng.randrange(1, 30)]
        else:
            at = rng.randrange(9, len(raw) - 8)
            raw[at : at + 8] = struct.pack("<q", rng.choice([-1, 0, 1, 2**31 - 1, 2**62, -(2**63)]))
        index.write_bytes(raw)
        try:
            data = IndexedDataset(tmp_path / "a")
        except DataError:
            refused += 1
            continue
        assert [data.document(i).tolist() for i in range(len(data))] == documents
    assert refused > 700


@pytest.mark.parametrize("change", [-1, 1, -16])
def test_bin_of_another_size_is_refused(tmp_path: Path, change: int) -> None:
    prefix = write(tmp_path / "a")
    raw = (tmp_path / "a.bin").read_bytes()
    (tmp_path / "a.bin").write_bytes(raw[:change] if change < 0 else raw + b"\0")
    with pytest.raises(DataError, match="truncated or belongs to another"):
        IndexedDataset(prefix)


def test_missing_files_are_named_with_a_hint(tmp_path: Path) -> None:
    write(tmp_path / "a")
    with pytest.raises(DataError, match="No such file.*prefix is given without suffix"):
        IndexedDataset(tmp_path / "a.bin")
    (tmp_path / "a.bin").unlink()
    with pytest.raises(DataError, match="a.bin: No such file"):
        IndexedDataset(tmp_path / "a")


def test_dataset_without_documents(tmp_path: Path) -> None:
    data = IndexedDataset(write(tmp_path / "a", []))
    assert (len(data), data.num_tokens) == (0, 0)


@pytest.mark.parametrize(("value", "dtype"), [(70000, np.uint16), (-1, np.uint16), (2**31, np.int32)])
def test_writer_refuses_ids_that_would_wrap(tmp_path: Path, value: int, dtype: type[np.generic]) -> None:
    with IndexedWriter(tmp_path / "a", dtype) as writer:
        writer.add([1, 2])
        with pytest.raises(DataError, match=f"document 2: token id {value} does not fit"):
            writer.add_many([3, 4, value], np.array([1, 2]))
    assert not list(tmp_path.iterdir())  # nothing half-written is left


def test_failed_writer_leaves_the_earlier_pair(tmp_path: Path) -> None:
    prefix = write(tmp_path / "a")
    with pytest.raises(RuntimeError), IndexedWriter(prefix, np.uint16) as writer:
        writer.add([1])
        raise RuntimeError
    assert IndexedDataset(prefix).document(0).tolist() == DOCUMENTS[0]


def test_full_disk_while_finishing_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("megalite.data.indexed.os.fsync", full)
    with pytest.raises(OSError, match="No space"), IndexedWriter(tmp_path / "a", np.uint16) as writer:
        writer.add([1, 2, 3])
        writer.finish({"documents": 1})
    assert not list(tmp_path.iterdir())


def test_two_writers_of_one_prefix_are_refused(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "a", np.uint16) as first:
        first.add([1, 2, 3])
        with pytest.raises(DataError, match="another process is writing"):
            IndexedWriter(tmp_path / "a", np.uint16)
        first.finish()
    assert IndexedDataset(tmp_path / "a").document(0).tolist() == [1, 2, 3]


def test_token_dtype_is_megatrons() -> None:
    assert token_dtype(65499) == np.uint16
    assert token_dtype(65500) == np.int32
