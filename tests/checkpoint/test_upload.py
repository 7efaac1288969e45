"""Saved on a fast disk first, kept elsewhere."""

import functools
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import checkpoint_loads
import programs
import pytest
from checkpoint_loads import ALONE, BACKGROUND, filled, flip, save_steps
from train_cases import SMALL

from megalite.checkpoint.manager import saver, uploader
from megalite.checkpoint.manager.saver import CheckpointSaver
from megalite.checkpoint.storage import local_storage as file_system
from megalite.checkpoint.storage import remote_storage as object_store
from megalite.checkpoint.storage import storage as storage
from megalite.checkpoint.storage.location import CheckpointError

pieces = functools.partial(filled, rows=1, columns=1 << 12, count=1)


def loaded(url: str, **kwargs: Any) -> tuple[str, float]:
    found = checkpoint_loads.newest(url, ALONE, **kwargs)
    targets = pieces(0.0)
    checkpoint_loads.fill(*found, targets, ALONE, exact=True)
    assert len(set(targets[0].data.tolist())) == 1
    return str(found[0]), float(targets[0].data[0])


@pytest.fixture(params=["memory", "local"])
def kept(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Where the checkpoints go in the end."""
    return f"memory://runs/{uuid.uuid4().hex}" if request.param == "memory" else str(tmp_path / "kept")


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Call it to break, or to mend, the writing of files of checkpoints to where they are kept."""
    state = [False]
    for kind in (object_store.RemoteStorage, file_system.LocalStorage):

        def put(self: Any, path: Any, text: str, sync: bool = True, real: Any = kind.write_text) -> None:
            if state[0] and "fast" not in str(path):
                raise OSError("the network is down")
            real(self, path, text)

        monkeypatch.setattr(kind, "write_text", put)
    yield lambda now: state.__setitem__(0, now)


@BACKGROUND
def test_upload_and_retention(kept: str, tmp_path: Path, background: bool) -> None:
    fast = tmp_path / "fast"
    one = CheckpointSaver(fast, ALONE, 0, background=background, upload_to=kept)
    for step in (1, 2, 3):
        one.save(step, pieces(float(step)), {"step": step})
    one.wait()
    one.close()
    news = one.pop_messages()
    assert sum(line.startswith(f"uploaded {kept}/iter_") for line in news) == 3, news
    assert storage.steps_in(kept) == [1, 2, 3] and storage.steps_in(fast) == [3]  # the newest, for a quick start
    assert loaded(kept) == (f"{kept}/iter_0000003", 3.0)
    assert loaded(kept, first=fast) == (f"{fast}/iter_0000003", 3.0)
    assert loaded(kept, first=fast, step=2) == (f"{kept}/iter_0000002", 2.0)
    one = CheckpointSaver(fast, ALONE, 0, keep_last=1, retain_interval=2, upload_to=kept)
    one.save(4, pieces(4.0), {})
    one.save(5, pieces(5.0), {})
    one.close()
    assert storage.steps_in(kept) == [2, 4, 5] and storage.steps_in(fast) == [5]


def test_failed_upload_is_reported_and_retried(kept: str, tmp_path: Path, broken: Any) -> None:
    fast = tmp_path / "fast"
    one = CheckpointSaver(fast, ALONE, 0, upload_to=kept)
    broken(True)
    for step in (1, 2):
        one.save(step, pieces(float(step)), {})
    one.close()
    assert storage.steps_in(fast) == [1, 2]  # nothing is deleted that does not exist
    lines = [line for line in one.pop_messages() if "the network is down" in line]
    assert lines and lines[-1].endswith("; the next run sends them")
    assert checkpoint_loads.newest(kept, ALONE) is None
    assert loaded(kept, first=fast) == (f"{fast}/iter_0000002", 2.0)
    broken(False)
    one = CheckpointSaver(fast, ALONE, 0, upload_to=kept)
    one.set_start_step(2)
    one.close()
    assert storage.steps_in(kept) == [1, 2] and storage.steps_in(fast) == [2] and loaded(kept)[1] == 2.0


def test_training_continues_when_an_upload_fails(kept: str, tmp_path: Path, broken: Any) -> None:
    one = CheckpointSaver(tmp_path / "fast", ALONE, 0, upload_to=kept)
    broken(True)
    one.save(1, pieces(1.0), {})
    told: list[str] = []
    while not any("the next save tries again" in line for line in told):  # the test's time-out ends this
        told += one.pop_messages()
    broken(False)
    one.save(2, pieces(2.0), {})
    while not any(line.startswith("uploaded") and "iter_0000002" in line for line in told):
        told += one.pop_messages()
    assert storage.steps_in(kept) == [1, 2]
    one.close()


def test_upload_skips_checkpoints_that_would_be_deleted(
    kept: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = tmp_path / "fast"
    save_steps(fast, *range(1, 6))
    sent: list[int] = []
    real = uploader.Uploader._upload
    monkeypatch.setattr(
        uploader.Uploader, "_upload", lambda self, step, *a: (sent.append(step), real(self, step, *a))[1]
    )
    one = CheckpointSaver(fast, ALONE, 0, keep_last=2, retain_interval=2, upload_to=kept)
    one.set_start_step(5)
    one.close()
    news = one.pop_messages()
    assert sent == [2, 4, 5], news
    assert storage.steps_in(kept) == [2, 4, 5] and storage.steps_in(fast) == [5]
    assert sum("newer ones are kept" in line for line in news) == 2


def test_upload_refuses_a_checkpoint_changed_on_disk(kept: str, tmp_path: Path) -> None:
    fast = tmp_path / "fast"
    folder = saver.save(fast, 1, pieces(1.0), {}, ALONE)
    flip(folder / "rank-00000.safetensors")
    one = CheckpointSaver(fast, ALONE, 0, upload_to=kept)
    one.set_start_step(1)
    one.close()
    line = one.pop_messages()[-1]
    assert "rank-00000.safetensors: its content changed after it was written" in line
    assert checkpoint_loads.newest(kept, ALONE) is None and storage.steps_in(fast) == [1]


def test_upload_target_is_checked_at_startup(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        CheckpointSaver(tmp_path / "fast", ALONE, 0, upload_to=tmp_path / "file")
    CheckpointSaver(tmp_path / "fast", ALONE, 0).close()  # the lock is dropped
    holder = saver.storage_of(tmp_path).lock(tmp_path)
    with pytest.raises(CheckpointError, match="in use by process"):
        CheckpointSaver(tmp_path / "fast", ALONE, 0, upload_to=tmp_path)
    holder.close()


def run(folder: Path, last: int, *more: str) -> str:
    words = ["--save", str(folder), "--load", str(folder), "--save-interval", "2", "--train-iters", str(last), *more]
    done = programs.python("pretrain_gpt.py", *SMALL, *words, "--lr-decay-style", "constant", ok=True)
    return done.stdout


def test_program_saves_locally_first(tmp_path: Path) -> None:
    kept, fast = tmp_path / "kept", tmp_path / "fast"
    out = run(kept, 5, "--save-local", str(fast), "--nproc", "2", "--keep-last", "1")
    assert f"uploaded {kept}/iter_0000005" in out
    assert storage.steps_in(kept) == [5] and storage.steps_in(fast) == [5]
    out = run(kept, 7, "--save-local", str(fast), "--keep-last", "1")
    assert f"resumed from {fast}/iter_0000005" in out and storage.steps_in(kept) == storage.steps_in(fast) == [7]
    assert "saved iter_" not in run(kept, 7, "--save-local", str(fast), "--keep-last", "1")
