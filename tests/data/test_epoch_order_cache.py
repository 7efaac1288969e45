"""The cache of epoch orders with several processes.

One process builds an order, the others name the process that they wait for, and killed ones leave nothing.
"""

import fcntl
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import checkpoint_loads
import numpy as np
import programs
import pytest
from token_files import raise_disk_full, write_numbered

from megalite.data.datasets import epoch_order as cache
from megalite.data.datasets.epoch_order import EpochOrder, build_epoch, load_or_build
from megalite.data.datasets.gpt_dataset import GPTDataset
from megalite.data.errors import DataError
from megalite.data.files.indexed_dataset import IndexedDataset

ROOT = Path(__file__).resolve().parents[2]
LENGTHS = np.arange(5000, dtype=np.int32) % 97

BUILDER = """
import logging, sys, time
import numpy as np
from megalite.data import file_lock
from megalite.data.datasets import epoch_order as cache
from megalite.data.datasets.epoch_order import build_epoch

logging.basicConfig(format="%(message)s")
file_lock.WARN_AFTER_S = 0.2
directory, step = sys.argv[1], sys.argv[2]
lengths = np.arange(5000, dtype=np.int32) % 97

def build():
    print("building", flush=True)
    time.sleep(0.0 if step == "hang" else 1.0)
    return build_epoch(lengths, 7)

if step == "hang":  # while its file is half written
    def crc32(*_):
        print("hangs", flush=True)
        time.sleep(60)
    cache.zlib.crc32 = crc32
epoch = cache.load_or_build(directory, "a", 5000, build)
print(int((epoch.starts * np.arange(5001)).sum()))
"""
EXPECTED_SUM = int((build_epoch(LENGTHS, 7).starts * np.arange(5001)).sum())


def start(directory: Path, step: str = "build") -> subprocess.Popen[str]:
    command, pipe = [sys.executable, "-c", BUILDER, str(directory), step], subprocess.PIPE
    return programs.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=pipe, stderr=pipe, text=True)


def never() -> EpochOrder:
    raise AssertionError("built although it was there")


def once() -> Callable[[], EpochOrder]:
    """Return a build function that fails when it is called again."""
    return iter([build_epoch(LENGTHS, 8)]).__next__


def test_concurrent_processes_build_the_order_once(tmp_path: Path) -> None:
    processes = [start(tmp_path / "cache") for _ in range(3)]
    results = [process.communicate(timeout=60) for process in processes]
    assert all(process.returncode == 0 for process in processes), results
    builders = [i for i, (out, _) in enumerate(results) if "building" in out]
    assert len(builders) == 1
    assert [out.split()[-1] for out, _ in results] == [str(EXPECTED_SUM)] * 3
    for i, (_, stderr) in enumerate(results):
        if i not in builders:  # it may have started after the file was written, and then has not waited
            message = f"index cache {tmp_path}/cache/a.epoch: waiting for process {processes[builders[0]].pid} on"
            assert not stderr or message in stderr
    assert any("which builds it" in stderr for _, stderr in results)
    assert sorted(p.name for p in (tmp_path / "cache").iterdir()) == ["a.epoch", "a.lock"]


def test_killed_builder_releases_the_lock_and_its_file_is_removed(tmp_path: Path) -> None:
    killed = start(tmp_path, "hang")
    assert [killed.stdout.readline() for _ in range(2)] == ["building\n", "hangs\n"]
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=30)
    assert len(list(tmp_path.glob("a.epoch.*.partial"))) == 1
    other = tmp_path / "b.epoch.x.partial"  # of another process, which is alive
    other.write_bytes(b"")
    dead = tmp_path / "c.epoch.y.partial"
    dead.write_bytes(b"")
    os.utime(dead, (0, time.time() - cache.STALE_SECONDS - 1))
    epoch = load_or_build(tmp_path, "a", 5000, lambda: build_epoch(LENGTHS, 7))
    assert int((epoch.starts * np.arange(5001)).sum()) == EXPECTED_SUM
    assert [p.name for p in tmp_path.glob("*.partial")] == [other.name]


def refuse(*_: object) -> None:
    raise OSError(30, "Read-only file system")


def test_unwritable_cache_directory(tmp_path: Path, monkeypatch, caplog: pytest.LogCaptureFixture) -> None:
    load_or_build(tmp_path, "a", 5000, lambda: build_epoch(LENGTHS, 7))
    monkeypatch.setattr(cache, "file_lock", refuse)
    assert load_or_build(tmp_path, "a", 5000, never).starts[-1] == LENGTHS.sum()
    assert not caplog.text  # an existing file needs no lock
    assert load_or_build(tmp_path, "b", 5000, once()).starts[-1] == LENGTHS.sum()
    assert "Read-only file system); building the index in memory" in caplog.text
    monkeypatch.undo()
    monkeypatch.setattr(cache.os, "fchmod", raise_disk_full)  # a full disk
    assert load_or_build(tmp_path / "c", "a", 5000, once()).starts[-1] == LENGTHS.sum()
    assert [p.name for p in (tmp_path / "c").iterdir()] == ["a.lock"]


def test_cache_on_a_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", refuse)
    (tmp_path / "a.epoch.z.partial").write_bytes(b"")  # may belong to a process that is building
    epoch = load_or_build(tmp_path, "a", 5000, lambda: build_epoch(LENGTHS, 7))
    assert np.array_equal(epoch.order, build_epoch(LENGTHS, 7).order)
    assert len(list(tmp_path.glob("*.partial"))) == 1


def flip(path: Path) -> None:
    """Flip one bit of one document's number or position."""
    checkpoint_loads.invert_bit(path, 8 * 31_003)


DAMAGE: dict[str, Callable[[Path], object]] = {
    "flipped bit": flip,
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "one byte short": lambda path: os.truncate(path, path.stat().st_size - 1),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "of fewer documents": lambda path: store(path, build_epoch(LENGTHS[1:], 7)),
    "zeros": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "empty": lambda path: os.truncate(path, 0),
    "text": lambda path: path.write_text("not an order"),
    "a pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "a device without an end": lambda path: (path.unlink(), path.symlink_to("/dev/zero")),
}


def store(path: Path, epoch: EpochOrder) -> None:
    path.unlink()
    load_or_build(path.parent, path.stem, len(epoch.order), lambda: epoch)


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_files_are_rebuilt_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str) -> None:
    expected = build_epoch(LENGTHS, 7)
    load_or_build(tmp_path, "a", 5000, lambda: expected)
    DAMAGE[name](tmp_path / "a.epoch")
    with caplog.at_level(logging.WARNING):
        actual = load_or_build(tmp_path, "a", 5000, lambda: expected)
    assert "a.epoch: damaged index cache" in caplog.text
    assert np.array_equal(actual.order, expected.order) and np.array_equal(actual.starts, expected.starts)
    caplog.clear()
    reread = load_or_build(tmp_path, "a", 5000, never)
    assert np.array_equal(reread.starts, expected.starts) and not caplog.text


def test_order_of_other_data_is_detected_on_use(tmp_path: Path) -> None:
    """The file has been renamed. No sample is made of other tokens than the intended ones."""
    data = write_numbered(tmp_path / "a", LENGTHS.tolist())
    dataset(data, tmp_path / "cache").samples(np.arange(20))
    (path,) = (tmp_path / "cache").glob("*.epoch")
    store(path, build_epoch(LENGTHS[::-1].copy(), 8))
    with pytest.raises(DataError, match=f"the documents' lengths; remove its files from data_cache_path={tmp_path}"):
        dataset(data, tmp_path / "cache").samples(np.arange(20))


def dataset(data: IndexedDataset, directory: Path | None, seed: int = 1) -> GPTDataset:
    return GPTDataset(data, range(len(data)), 7, seed, "train", directory)


def test_cache_gives_the_same_samples_and_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data, directory = write_numbered(tmp_path / "a", [10] * 50), tmp_path / "cache"
    expected = dataset(data, None).samples(np.arange(150))  # over two epoch boundaries
    assert np.array_equal(dataset(data, directory).samples(np.arange(150)), expected)
    assert len(list(directory.glob("*.epoch"))) == 3
    monkeypatch.setattr("megalite.data.datasets.gpt_dataset.build_epoch", lambda *_: never())
    assert np.array_equal(dataset(data, directory).samples(np.arange(150)), expected)


def test_other_data_seed_or_split_uses_other_files(tmp_path: Path) -> None:
    data, directory = write_numbered(tmp_path / "a", [10] * 50), tmp_path / "cache"
    seen: set[str] = set()
    for step in range(4):
        if step == 2:
            data = write_numbered(tmp_path / "a", [10] * 51)  # the same name, other documents
        dataset(data, directory, seed=2 if step == 1 else 1).samples(np.array([0]))[0]
        if step == 3:
            # the lengths of the first data again
            GPTDataset(data, range(50), 7, 1, "train", directory).samples(np.array([0]))
        names = {path.name for path in directory.glob("*.epoch")}
        assert len(names - seen) == (1 if step < 3 else 0)
        seen = names
