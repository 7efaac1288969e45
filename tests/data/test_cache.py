"""The cache of epoch orders among processes: one builds, the others say whom they wait for, and killed ones leave nothing."""

import fcntl
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import programs
import pytest
from token_files import full, numbered

from megalite.data.errors import DataError
from megalite.data.files.indexed import IndexedDataset
from megalite.data.samples import epochs as cache
from megalite.data.samples.epochs import Epoch, build_epoch, load_or_build
from megalite.data.samples.gpt_dataset import GptDataset
from megalite.data.samples.permutation import fold
from megalite.data.samples.token_line import Line

ROOT = Path(__file__).resolve().parents[2]
LENGTHS = np.arange(5000, dtype=np.int32) % 97

BUILDER = """
import logging, sys, time
import numpy as np
from megalite.data import locks
from megalite.data.samples import epochs as cache
from megalite.data.samples.epochs import build_epoch

logging.basicConfig(format="%(message)s")
locks.SAY_AFTER_SECONDS = 0.2
directory, step = sys.argv[1], sys.argv[2]
lengths = np.arange(5000, dtype=np.int32) % 97

def build():
    print("building", flush=True)
    time.sleep(1.0)
    return build_epoch(lengths, 7)

if step == "hang":  # while its file is half written
    write = np.save
    def save(file, array, **options):
        file.write(b"half")
        file.flush()
        print("hangs", flush=True)
        time.sleep(60)
    np.save = save
epoch = cache.load_or_build(directory, "a", lengths, build)
print(int((epoch.starts * np.arange(5001)).sum()))
"""
WANT = int((build_epoch(LENGTHS, 7).starts * np.arange(5001)).sum())


def start(directory: Path, step: str = "build") -> subprocess.Popen[str]:
    command, pipe = [sys.executable, "-c", BUILDER, str(directory), step], subprocess.PIPE
    return programs.Popen(command, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=pipe, stderr=pipe, text=True)


def never() -> Epoch:
    raise AssertionError("built although it was there")


def once() -> Callable[[], Epoch]:
    """What builds, and fails when it is asked again."""
    return iter([build_epoch(LENGTHS, 8)]).__next__


def test_processes_that_start_at_once_build_once_and_the_others_say_for_whom_they_wait(tmp_path: Path) -> None:
    processes = [start(tmp_path / "cache") for _ in range(3)]
    results = [process.communicate(timeout=60) for process in processes]
    assert all(process.returncode == 0 for process in processes), results
    built = [i for i, (out, _) in enumerate(results) if "building" in out]
    assert len(built) == 1
    assert [out.split()[-1] for out, _ in results] == [str(WANT)] * 3
    for i, (_, error) in enumerate(results):
        if i not in built:  # it may have come after the files did, and then it had nothing to wait for
            waits = f"index cache {tmp_path}/cache/a: waiting for process {processes[built[0]].pid} on"
            assert not error or waits in error
    assert any("which builds it" in error for _, error in results)
    assert sorted(p.name for p in (tmp_path / "cache").iterdir()) == ["a.lock", "a.order.npy", "a.starts.npy"]


def test_killed_builder_leaves_its_turn_and_its_file_is_swept(tmp_path: Path) -> None:
    killed = start(tmp_path, "hang")
    assert [killed.stdout.readline() for _ in range(2)] == ["building\n", "hangs\n"]
    killed.send_signal(signal.SIGKILL)
    killed.communicate(timeout=30)
    assert len(list(tmp_path.glob("a.order.npy.*.partial"))) == 1
    other = tmp_path / "b.order.npy.x.partial"  # somebody else's, and alive
    other.write_bytes(b"")
    dead = tmp_path / "c.order.npy.y.partial"
    dead.write_bytes(b"")
    os.utime(dead, (0, time.time() - cache.STALE_SECONDS - 1))
    epoch = load_or_build(tmp_path, "a", LENGTHS, lambda: build_epoch(LENGTHS, 7))
    assert int((epoch.starts * np.arange(5001)).sum()) == WANT
    assert [p.name for p in tmp_path.glob("*.partial")] == [other.name]


def refuse(*_: object) -> None:
    raise OSError(30, "Read-only file system")


def test_directory_that_cannot_be_written(tmp_path: Path, monkeypatch, caplog: pytest.LogCaptureFixture) -> None:
    load_or_build(tmp_path, "a", LENGTHS, lambda: build_epoch(LENGTHS, 7))
    monkeypatch.setattr(cache, "locked", refuse)
    assert load_or_build(tmp_path, "a", LENGTHS, never).starts[-1] == LENGTHS.sum()
    assert not caplog.text  # what is there needs no lock
    assert load_or_build(tmp_path, "b", LENGTHS, once()).starts[-1] == LENGTHS.sum()
    assert "Read-only file system); building the index in memory" in caplog.text
    monkeypatch.undo()
    monkeypatch.setattr(cache.np, "save", full)  # a full disk
    assert load_or_build(tmp_path / "c", "a", LENGTHS, once()).starts[-1] == LENGTHS.sum()
    assert [p.name for p in (tmp_path / "c").iterdir()] == ["a.lock"]


def test_file_system_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", refuse)
    (tmp_path / "a.order.npy.z.partial").write_bytes(b"")  # perhaps of a builder at work: nobody can know
    epoch = load_or_build(tmp_path, "a", LENGTHS, lambda: build_epoch(LENGTHS, 7))
    assert np.array_equal(epoch.order, build_epoch(LENGTHS, 7).order)
    assert len(list(tmp_path.glob("*.partial"))) == 1


def save_object(path: Path) -> None:
    np.save(path, np.array([Tripwire()], object), allow_pickle=True)


class Tripwire:
    """Unpickling it writes a file."""

    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return os.mkdir, ("tripwire-was-unpickled",)


def save_other(path: Path) -> None:
    other = build_epoch(LENGTHS[::-1].copy(), 8)
    np.save(path, getattr(other, path.name.split(".")[1]))


DAMAGE: dict[str, Callable[[Path], object]] = {
    "pickled": save_object,
    "of other data": save_other,
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "header only": lambda path: os.truncate(path, 128),
    "empty": lambda path: os.truncate(path, 0),
    "text": lambda path: path.write_text("not an array"),
    "values": lambda path: np.save(path, np.load(path) + 10**6),
    "shape": lambda path: np.save(path, np.load(path)[1:]),
    "float": lambda path: np.save(path, np.load(path).astype(np.float64)),
    "two dimensions": lambda path: np.save(path, np.load(path)[None]),
}


@pytest.mark.parametrize("part", ["order", "starts"])
@pytest.mark.parametrize("name", DAMAGE)
def test_damaged_files_are_rebuilt_with_a_warning(tmp_path: Path, monkeypatch, caplog, name: str, part: str) -> None:
    monkeypatch.chdir(tmp_path)
    want = build_epoch(LENGTHS, 7)
    load_or_build(tmp_path, "a", LENGTHS, lambda: want)
    DAMAGE[name](tmp_path / f"a.{part}.npy")
    with caplog.at_level(logging.WARNING):
        got = load_or_build(tmp_path, "a", LENGTHS, lambda: want)
    assert "a: damaged index cache" in caplog.text and not Path("tripwire-was-unpickled").exists()
    assert np.array_equal(got.order, want.order) and np.array_equal(got.starts, want.starts)
    caplog.clear()
    again = load_or_build(tmp_path, "a", LENGTHS, never)
    assert np.array_equal(again.starts, want.starts) and not caplog.text


@pytest.mark.parametrize("part", ["order", "starts"])
@pytest.mark.parametrize("value", [-1, 0, 7, 4999, 10**7])
def test_damage_that_loading_does_not_see_is_found_on_use(tmp_path: Path, part: str, value: int) -> None:
    """Loading looks at a thousand places; no sample is made of tokens that are not the ones meant."""
    numbered(tmp_path / "a", LENGTHS.tolist())

    def dataset() -> GptDataset:
        data = IndexedDataset(tmp_path / "a")
        return GptDataset(data, range(len(data)), 20, 1, "train", tmp_path / "cache")

    sound = dataset()
    want = sound.samples(np.arange(12_000))
    offsets = Line(int(LENGTHS.sum()), fold(1, "train")).place(np.arange(12_000), 20)
    damaged_at = build_epoch(LENGTHS, fold(fold(1, "train"), "documents", 0)).starts[1004]
    near = np.flatnonzero(np.abs(offsets - damaged_at) < 150)
    for path in (tmp_path / "cache").glob(f"*.{part}.npy"):
        array = np.load(path)
        array[1004] = value
        np.save(path, array)
    damaged, refused = dataset(), 0
    for i in near.tolist():
        try:
            assert np.array_equal(damaged.samples(np.array([i]))[0], want[i])
        except DataError as error:
            assert f"the documents' lengths; remove its files from data_cache_path={tmp_path}" in str(error)
            refused += 1
    assert 0 < refused < len(near)
