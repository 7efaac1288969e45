"""Token files at URLs: the tokens equal those on disk, each byte is fetched once per node, and every fault is named."""

import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import checkpoint_loads
import fsspec
import numpy as np
import programs
import pytest
import token_files
from fsspec.implementations.local import LocalFileSystem
from hypothesis import given, settings
from hypothesis import strategies as st
from token_files import read_documents as documents

from megalite.config.options import DataConfig
from megalite.data.datasets.blended_dataset import build_blend
from megalite.data.datasets.gpt_dataset import GPTDataset
from megalite.data.errors import DataError
from megalite.data.files import remote_files as remote
from megalite.data.files.indexed_dataset import IndexedDataset
from megalite.data.files.sidecar import read_sidecar
from megalite.data.tokenizers.build_tokenizer import build_tokenizer
from tools.preprocess.indexed_writer import IndexedWriter
from tools.preprocess.tokenize_run import make_info

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [list(range(k * 100, k * 100 + k * 7 % 23)) for k in range(60)]


class Flaky(LocalFileSystem):
    """A local file system that records its reads, and fails on demand."""

    protocol = "flaky"
    cachable = False
    reads: list[tuple[str, int, int]] = []
    faults: list[Exception | bytes] = []  # the next reads raise or return these instead
    barrier: threading.Barrier | None = None
    infos: dict[str, dict[str, Any]] = {}  # a cache that is kept until it is invalidated, as object stores do

    def info(self, path: str, **options: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)
        if path not in Flaky.infos:
            Flaky.infos[path] = super().info(path, **options)
        return Flaky.infos[path]

    def invalidate_cache(self, path: str | None = None) -> None:
        Flaky.infos.pop(self._strip_protocol(path or ""), None)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.removeprefix("flaky://"))

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        if Flaky.barrier is not None and path.endswith(".bin"):
            Flaky.barrier.wait(timeout=20)
        Flaky.reads.append((path, start, end))
        if Flaky.faults:
            fault = Flaky.faults.pop(0)
            if isinstance(fault, Exception):
                raise fault
            return fault
        with open(self._strip_protocol(path), "rb") as file:
            file.seek(start)
            return file.read(end - start)


fsspec.register_implementation("flaky", Flaky, clobber=True)


@pytest.fixture(autouse=True)
def small_and_quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(remote, "BLOCK", 64)
    monkeypatch.setattr(remote, "FIRST_WAIT_SECONDS", 0.001)
    monkeypatch.setenv("MEGALITE_CACHE", str(tmp_path / "default"))
    Flaky.reads, Flaky.faults, Flaky.barrier, Flaky.infos = [], [], None, {}
    yield


def write(prefix: Path, documents: list[list[int]] = DOCUMENTS, dtype: type[np.generic] = np.uint16) -> str:
    return f"flaky://{token_files.write_documents(prefix, documents, dtype)}"


def cached_blocks(directory: Path) -> list[int]:
    """Return the numbers of the blocks of the .bin that a cache holds."""
    (path,) = directory.glob("remote/*/copy.bin.crc")
    return np.flatnonzero(np.fromfile(path, "<u8")).tolist()


@pytest.mark.parametrize("dtype", [np.uint16, np.int32])
@pytest.mark.parametrize("kind", ["memory", "file"])
def test_remote_tokens_equal_local_tokens(tmp_path: Path, kind: str, dtype: type[np.generic]) -> None:
    write(tmp_path / "a", dtype=dtype)
    url = f"file://{tmp_path}/a"
    if kind == "memory":
        url = f"memory://bucket-{np.dtype(dtype)}/a"
        for suffix in (".bin", ".idx"):
            fsspec.filesystem("memory").pipe_file(url + suffix, Path(f"{tmp_path}/a{suffix}").read_bytes())
    local, remote_data = IndexedDataset(tmp_path / "a"), IndexedDataset(url, cache_path=tmp_path / "cache")
    assert documents(remote_data) == DOCUMENTS and (len(remote_data.tokens), remote_data.tokens.dtype) == (
        len(local.tokens),
        local.dtype,
    )
    assert (
        remote_data.num_tokens == local.num_tokens and remote_data.tokens[5:40].tolist() == local.tokens[5:40].tolist()
    )
    assert remote_data.tokens[-3:].tolist() == local.tokens[-3:].tolist() and remote_data.tokens[7:7].tolist() == []
    remote_data.verify()
    actual, expected = (
        GPTDataset(data, range(len(data)), 30, 1).samples(np.arange(60)) for data in (remote_data, local)
    )
    assert np.array_equal(actual, expected)
    read_data = IndexedDataset(url, cache_path=tmp_path / "cache", mmap_bin_files=False)
    assert documents(read_data) == DOCUMENTS and read_data.tokens[5:40].tolist() == local.tokens[5:40].tolist()


@settings(max_examples=40)
@given(data=st.data())
def test_any_spans_are_copied(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    prefix = tmp_path_factory.mktemp("far") / "a"
    pair = IndexedDataset(write(prefix), cache_path=prefix.parent)
    flat = np.concatenate([np.array(d, np.int64) for d in DOCUMENTS])
    span_strategy = st.tuples(st.integers(0, len(flat)), st.integers(0, 150))
    spans = [(a, min(n, len(flat) - a)) for a, n in data.draw(st.lists(span_strategy, max_size=12))]
    starts, counts = (np.array([span[k] for span in spans], np.int64) for k in (0, 1))
    out = np.empty(int(counts.sum()), np.int64)
    pair.copy_tokens(starts, counts, out)
    assert out.tolist() == [token for a, n in spans for token in flat[a : a + n].tolist()]


def test_every_byte_is_fetched_once_and_cached(tmp_path: Path) -> None:
    url, size = write(tmp_path / "a"), (tmp_path / "a.bin").stat().st_size
    for _ in range(2):
        assert documents(IndexedDataset(url, cache_path=tmp_path / "c")) == DOCUMENTS
    fetched = {end: sorted(read[1:] for read in Flaky.reads if read[0].endswith(end)) for end in (".bin", ".idx")}
    assert fetched[".bin"] == [(a, min(a + 64, size)) for a in range(0, size, 64)]
    assert sum(end - start for start, end in fetched[".idx"]) == (tmp_path / "a.idx").stat().st_size
    IndexedDataset(url)
    assert len(list((tmp_path / "default" / "remote").glob("a-*/copy.idx"))) == 1  # $MEGALITE_CACHE


def test_blocks_of_one_batch_are_fetched_together(tmp_path: Path) -> None:
    data = IndexedDataset(write(tmp_path / "a"), cache_path=tmp_path / "c")
    data.tokens[33:40]
    assert [r[1:] for r in Flaky.reads if r[0].endswith(".bin")] == [(64, 128)]  # only what is needed
    data = IndexedDataset(write(tmp_path / "b"), cache_path=tmp_path / "c")
    Flaky.barrier = threading.Barrier(4)  # each read waits until four reads are under way
    out = np.empty(4, np.int64)
    data.copy_tokens(np.array([0, 40, 80, 120]), np.ones(4, np.int64), out)
    assert out.tolist() == [data.tokens[k : k + 1][0] for k in (0, 40, 80, 120)]


DAMAGE = {
    "flipped bit": lambda path: checkpoint_loads.invert_bit(path, 8 * 100),
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "empty": lambda path: os.truncate(path, 0),
    "longer": lambda path: path.write_bytes(path.read_bytes()[:-1] + b"xx"),
}


@pytest.mark.parametrize("suffix", [".idx", ".bin"])
@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_cache_is_fetched_again(tmp_path: Path, caplog: Any, name: str, suffix: str) -> None:
    url, cache = write(tmp_path / "a"), tmp_path / "c"
    documents(IndexedDataset(url, cache_path=cache))
    (copy,) = cache.glob(f"remote/*/copy{suffix}")
    original = copy.read_bytes()
    DAMAGE[name](copy)
    broken = (copy.read_bytes() + bytes(len(original)))[: len(original)]  # a hole reads as zeros
    damaged = [k for k in range(-(-len(original) // 64)) if broken[64 * k :][:64] != original[64 * k :][:64]]
    Flaky.reads = []
    with caplog.at_level(logging.WARNING):
        assert documents(IndexedDataset(url, cache_path=cache)) == DOCUMENTS
    assert damaged and caplog.text.count("fetching it again") == len(damaged)
    assert all(f"copy{suffix}: damaged block {k}; fetching it again" in caplog.text for k in damaged)
    assert sorted(start // 64 for _, start, _ in Flaky.reads) == damaged
    assert copy.read_bytes() == original == (tmp_path / f"a{suffix}").read_bytes()


def test_damaged_source_is_refused(tmp_path: Path) -> None:
    url = write(tmp_path / "a")
    checkpoint_loads.invert_bit(tmp_path / "a.idx", 8 * ((tmp_path / "a.idx").stat().st_size // 2))
    for _ in range(2):
        with pytest.raises(DataError, match=r"flaky://.*a.idx: (lengths|pointers|document_indices)\["):
            IndexedDataset(url, cache_path=tmp_path / "c")
    write(tmp_path / "a")
    os.truncate(tmp_path / "a.bin", 100)
    with pytest.raises(DataError, match=r"flaky://.*a.bin: size is 100 bytes of uint16, but .*a.idx accounts for"):
        IndexedDataset(url, cache_path=tmp_path / "c")


@pytest.mark.parametrize("same_size", [True, False])
def test_changed_source_is_refused_until_the_next_start(tmp_path, same_size: bool) -> None:
    url, cache = write(tmp_path / "a"), tmp_path / "c"
    data = IndexedDataset(url, cache_path=cache)
    data.tokens[0:10]
    changed = [[token + 1 for token in document] for document in DOCUMENTS] + ([] if same_size else [[1, 2, 3]])
    time.sleep(0.01)
    write(tmp_path / "a", changed)
    with pytest.raises(DataError, match=r"a.bin: changed while it was in use: \d+ bytes, mtime=.* now \d+ bytes, mt"):
        data.tokens[200:300]
    assert data.tokens[0:10].tolist() == [t for d in DOCUMENTS for t in d][:10]  # the fetched blocks stay valid
    assert documents(IndexedDataset(url, cache_path=cache)) == changed


def test_transient_faults_are_retried(tmp_path: Path) -> None:
    url = write(tmp_path / "a")
    Flaky.faults = [ConnectionResetError("reset"), b"short", TimeoutError("slow"), RuntimeError("503")]
    data = IndexedDataset(url, cache_path=tmp_path / "c")
    Flaky.faults = [OSError(5, "I/O error"), b"", KeyError("their bug")]
    assert documents(data) == DOCUMENTS and not Flaky.faults


def test_permanent_faults_end_after_bounded_attempts(tmp_path: Path) -> None:
    url = write(tmp_path / "a")
    data = IndexedDataset(url, cache_path=tmp_path / "c")
    Flaky.reads, Flaky.faults = [], [ConnectionResetError("reset by peer")] * 100
    message = "a.bin: reading bytes 0..63 failed 6 times, the last time with ConnectionResetError: reset by peer"
    with pytest.raises(DataError, match=message):
        data.tokens[0:3]
    assert len(Flaky.reads) == remote.ATTEMPTS
    Flaky.reads, Flaky.faults = [], [PermissionError("403")] * 100
    with pytest.raises(DataError, match="a.bin: reading bytes 0..63: PermissionError: 403"):
        data.tokens[0:3]
    assert len(Flaky.reads) == 1  # it is not retried
    Flaky.faults = []
    assert documents(data) == DOCUMENTS


def test_unopenable_urls_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = write(tmp_path / "a")
    with pytest.raises(DataError, match=r"none.idx: looking it up: FileNotFoundError.*without .bin or .idx"):
        IndexedDataset(f"flaky://{tmp_path}/none", cache_path=tmp_path)
    with pytest.raises(DataError, match=r"nosuch://b/a.idx: Protocol not known: nosuch"):
        IndexedDataset("nosuch://b/a", cache_path=tmp_path)
    (tmp_path / "d.idx").mkdir()
    with pytest.raises(DataError, match="d.idx: is a directory"):
        IndexedDataset(f"flaky://{tmp_path}/d", cache_path=tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(DataError, match="give a directory for copies"):
        IndexedDataset(url, cache_path=tmp_path / "file")
    monkeypatch.setitem(sys.modules, "s3fs", None)
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)  # another test has opened it
    with pytest.raises(DataError, match=r"s3://b/a.idx: Install s3fs"):
        IndexedDataset("s3://b/a", cache_path=tmp_path)
    monkeypatch.setitem(sys.modules, "fsspec.core", None)
    with pytest.raises(DataError, match="needs the package fsspec; pip install fsspec"):
        IndexedDataset(url, cache_path=tmp_path)


def test_too_small_disk_is_reported_at_startup(tmp_path, monkeypatch, caplog) -> None:
    url, cache = write(tmp_path / "a"), tmp_path / "c"
    monkeypatch.setattr(remote.shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**9, 10**9, 0))
    data = IndexedDataset(url, cache_path=cache)
    assert "GB of it are not at" in caplog.text and "0 GB are free: the run ends when that disk is full" in caplog.text
    original_pwrite = os.pwrite
    monkeypatch.setattr(remote.os, "pwrite", lambda file, part, offset: original_pwrite(file, part[:-1], offset))
    with pytest.raises(DataError, match="copy.bin: No space left on device; give another directory for copies"):
        data.tokens[0:10]
    monkeypatch.undo()
    monkeypatch.setattr(remote, "BLOCK", 64)
    assert cached_blocks(cache) == [] and documents(data) == DOCUMENTS
    caplog.clear()
    IndexedDataset(url, cache_path=cache)
    assert "GB of it" not in caplog.text  # all blocks are cached


def weighted_sum(data: IndexedDataset, seed: int) -> int:
    """Return the sum of position times token over all documents, read in an order given by the seed."""
    starts, counts = data.spans(np.random.default_rng(seed).permutation(len(data)))
    out = np.empty(int(counts.sum()), np.int64)
    data.copy_tokens(starts, counts, out)
    return int((out * np.arange(out.size)).sum())


READER = """
import sys, time
sys.path[:0] = ["tests", "tests/support"]
from data import test_remote_files
from megalite.data.files import remote_files as remote
from megalite.data.files.indexed_dataset import IndexedDataset

remote.BLOCK = 64
url, cache, journal = sys.argv[1:]
original = test_remote_files.Flaky.cat_file
def cat_file(self, path, start=None, end=None, **options):
    time.sleep(0.02)
    with open(journal, "a") as file:
        file.write(f"{path[-4:]} {start}\\n")
    return original(self, path, start=start, end=end)
test_remote_files.Flaky.cat_file = cat_file
data = IndexedDataset(url, cache_path=cache)
print(test_remote_files.weighted_sum(data, url.encode()[-1]))
"""


def test_concurrent_processes_fetch_each_block_once(tmp_path: Path) -> None:
    url, journal = write(tmp_path / "a"), tmp_path / "journal"
    command = [sys.executable, "-c", READER, url, str(tmp_path / "c"), str(journal)]
    running = [programs.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) for _ in range(3)]
    sums = [process.communicate(timeout=60)[0] for process in running]
    assert all(process.returncode == 0 for process in running) and len(set(sums)) == 1
    lines = journal.read_text().splitlines()
    sizes = {suffix: (tmp_path / f"a{suffix}").stat().st_size for suffix in (".bin", ".idx")}
    assert sorted(lines) == sorted(f"{suffix} {start}" for suffix in sizes for start in range(0, sizes[suffix], 64))
    assert int(sums[0]) == weighted_sum(IndexedDataset(tmp_path / "a"), ord("a"))


def test_datasets_and_their_sidecar_by_url(tmp_path: Path) -> None:
    tokenizer = build_tokenizer("NullTokenizer", vocab_size=6001)
    with IndexedWriter(tmp_path / "a", np.uint16) as writer:
        writer.add_many(np.arange(5000), np.full(50, 100))
        writer.finish(make_info(tokenizer, 50, 5000, []))
    url, cache = f"flaky://{tmp_path}/a", tmp_path / "c"
    train = build_blend([url], 30, 1, "train", data_config=DataConfig(data_cache_path=str(cache)), tokenizer=tokenizer)
    local = build_blend([str(tmp_path / "a")], 30, 1, "train")
    assert np.array_equal(train.samples(np.arange(200)), local.samples(np.arange(200)))
    assert cached_blocks(cache) and read_sidecar(url) == read_sidecar(tmp_path / "a")
    with pytest.raises(DataError, match=r"vocabulary 6001\), but this run has NullTokenizer\(51\)"):
        small = build_tokenizer("NullTokenizer", vocab_size=51)
        build_blend([url], 30, 1, "train", data_config=DataConfig(data_cache_path=str(cache)), tokenizer=small)
    (tmp_path / "a.json").unlink()
    assert read_sidecar(url) is None
    (tmp_path / "a.json").write_bytes(b"")
    with pytest.raises(DataError, match="a.json: damaged"):
        read_sidecar(url)


def test_fsspec_is_imported_only_for_urls(tmp_path: Path) -> None:
    write(tmp_path / "a")
    code = f"import sys; from megalite.data.files.indexed_dataset import IndexedDataset as I; I({str(tmp_path / 'a')!r}).document(0)\n"
    code += "print([m for m in sys.modules if m.startswith('fsspec') or m == 'megalite.data.files.remote_files'])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert result.stdout == "[]\n", result.stderr
