"""Checkpoints that are saved on a fast disk first and then uploaded."""

import functools
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import checkpoint_loads
import programs
import pytest
from checkpoint_loads import BACKGROUND, SINGLE_PROCESS, constant_shards, invert_bit, save_steps
from train_cases import SMALL_RUN

from megalite.checkpoint.manager import saver, uploader
from megalite.checkpoint.manager.saver import CheckpointSaver
from megalite.checkpoint.storage import local_storage as file_system
from megalite.checkpoint.storage import remote_storage as object_store
from megalite.checkpoint.storage import storage as storage
from megalite.checkpoint.storage.location import CheckpointError

pieces = functools.partial(constant_shards, rows=1, columns=1 << 12, count=1)


def load_value(url: str, **kwargs: Any) -> tuple[str, float]:
    newest = checkpoint_loads.load_newest(url, SINGLE_PROCESS, **kwargs)
    targets = pieces(0.0)
    checkpoint_loads.load_shards(*newest, targets, SINGLE_PROCESS, exact=True)
    assert len(set(targets[0].data.tolist())) == 1
    return str(newest[0]), float(targets[0].data[0])


@pytest.fixture(params=["memory", "local"])
def upload_to(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the place that checkpoints are uploaded to."""
    return f"memory://runs/{uuid.uuid4().hex}" if request.param == "memory" else str(tmp_path / "kept")


@pytest.fixture
def set_broken(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Yield a function that makes writing checkpoint files to the upload target fail (True) or work again (False)."""
    state = [False]
    for kind in (object_store.RemoteStorage, file_system.LocalStorage):

        def write_text(self: Any, path: Any, text: str, sync: bool = True, real: Any = kind.write_text) -> None:
            if state[0] and "fast" not in str(path):
                raise OSError("the network is down")
            real(self, path, text)

        monkeypatch.setattr(kind, "write_text", write_text)
    yield lambda is_broken: state.__setitem__(0, is_broken)


@BACKGROUND
def test_upload_and_retention(upload_to: str, tmp_path: Path, background: bool) -> None:
    fast = tmp_path / "fast"
    checkpoint_saver = CheckpointSaver(fast, SINGLE_PROCESS, 0, background=background, upload_to=upload_to)
    for step in (1, 2, 3):
        checkpoint_saver.save(step, pieces(float(step)), {"step": step})
    checkpoint_saver.wait()
    checkpoint_saver.close()
    messages = checkpoint_saver.pop_messages()
    assert sum(line.startswith(f"uploaded {upload_to}/iter_") for line in messages) == 3, messages
    assert storage.steps_in(upload_to) == [1, 2, 3] and storage.steps_in(fast) == [
        3
    ]  # the newest stays, for a quick start
    assert load_value(upload_to) == (f"{upload_to}/iter_0000003", 3.0)
    assert load_value(upload_to, preferred=fast) == (f"{fast}/iter_0000003", 3.0)
    assert load_value(upload_to, preferred=fast, step=2) == (f"{upload_to}/iter_0000002", 2.0)
    checkpoint_saver = CheckpointSaver(fast, SINGLE_PROCESS, 0, keep_last=1, retain_interval=2, upload_to=upload_to)
    checkpoint_saver.save(4, pieces(4.0), {})
    checkpoint_saver.save(5, pieces(5.0), {})
    checkpoint_saver.close()
    assert storage.steps_in(upload_to) == [2, 4, 5] and storage.steps_in(fast) == [5]


def test_failed_upload_is_reported_and_retried(upload_to: str, tmp_path: Path, set_broken: Any) -> None:
    fast = tmp_path / "fast"
    checkpoint_saver = CheckpointSaver(fast, SINGLE_PROCESS, 0, upload_to=upload_to)
    set_broken(True)
    for step in (1, 2):
        checkpoint_saver.save(step, pieces(float(step)), {})
    checkpoint_saver.close()
    assert storage.steps_in(fast) == [1, 2]  # nothing is deleted before its upload
    lines = [line for line in checkpoint_saver.pop_messages() if "the network is down" in line]
    assert lines and lines[-1].endswith("; the next run sends them")
    assert checkpoint_loads.load_newest(upload_to, SINGLE_PROCESS) is None
    assert load_value(upload_to, preferred=fast) == (f"{fast}/iter_0000002", 2.0)
    set_broken(False)
    checkpoint_saver = CheckpointSaver(fast, SINGLE_PROCESS, 0, upload_to=upload_to)
    checkpoint_saver.set_start_step(2)
    checkpoint_saver.close()
    assert storage.steps_in(upload_to) == [1, 2] and storage.steps_in(fast) == [2] and load_value(upload_to)[1] == 2.0


def test_training_continues_when_an_upload_fails(upload_to: str, tmp_path: Path, set_broken: Any) -> None:
    checkpoint_saver = CheckpointSaver(tmp_path / "fast", SINGLE_PROCESS, 0, upload_to=upload_to)
    set_broken(True)
    checkpoint_saver.save(1, pieces(1.0), {})
    messages: list[str] = []
    while not any("the next save tries again" in line for line in messages):  # the test's timeout ends this
        messages += checkpoint_saver.pop_messages()
    set_broken(False)
    checkpoint_saver.save(2, pieces(2.0), {})
    while not any(line.startswith("uploaded") and "iter_0000002" in line for line in messages):
        messages += checkpoint_saver.pop_messages()
    assert storage.steps_in(upload_to) == [1, 2]
    checkpoint_saver.close()


def test_upload_skips_checkpoints_that_would_be_deleted(
    upload_to: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fast = tmp_path / "fast"
    save_steps(fast, *range(1, 6))
    uploaded: list[int] = []
    real = uploader.Uploader._upload
    monkeypatch.setattr(
        uploader.Uploader, "_upload", lambda self, step, *a: (uploaded.append(step), real(self, step, *a))[1]
    )
    checkpoint_saver = CheckpointSaver(fast, SINGLE_PROCESS, 0, keep_last=2, retain_interval=2, upload_to=upload_to)
    checkpoint_saver.set_start_step(5)
    checkpoint_saver.close()
    messages = checkpoint_saver.pop_messages()
    assert uploaded == [2, 4, 5], messages
    assert storage.steps_in(upload_to) == [2, 4, 5] and storage.steps_in(fast) == [5]
    assert sum("newer ones are kept" in line for line in messages) == 2


def test_upload_refuses_a_checkpoint_changed_on_disk(upload_to: str, tmp_path: Path) -> None:
    fast = tmp_path / "fast"
    checkpoint_dir = saver.save(fast, 1, pieces(1.0), {}, SINGLE_PROCESS)
    invert_bit(checkpoint_dir / "rank-00000.safetensors")
    checkpoint_saver = CheckpointSaver(fast, SINGLE_PROCESS, 0, upload_to=upload_to)
    checkpoint_saver.set_start_step(1)
    checkpoint_saver.close()
    line = checkpoint_saver.pop_messages()[-1]
    assert "rank-00000.safetensors: its content changed after it was written" in line
    assert checkpoint_loads.load_newest(upload_to, SINGLE_PROCESS) is None and storage.steps_in(fast) == [1]


def test_upload_target_is_checked_at_startup(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written"):
        CheckpointSaver(tmp_path / "fast", SINGLE_PROCESS, 0, upload_to=tmp_path / "file")
    CheckpointSaver(tmp_path / "fast", SINGLE_PROCESS, 0).close()  # the lock was released
    holder = saver.storage_of(tmp_path).lock(tmp_path)
    with pytest.raises(CheckpointError, match="in use by process"):
        CheckpointSaver(tmp_path / "fast", SINGLE_PROCESS, 0, upload_to=tmp_path)
    holder.close()


def run(run_dir: Path, train_iters: int, *options: str) -> str:
    flags = [
        "--save",
        str(run_dir),
        "--load",
        str(run_dir),
        "--save-interval",
        "2",
        "--train-iters",
        str(train_iters),
        *options,
    ]
    result = programs.run_python("pretrain_gpt.py", *SMALL_RUN, *flags, "--lr-decay-style", "constant", check=True)
    return result.stdout


def test_program_saves_locally_first(tmp_path: Path) -> None:
    final_dir, fast = tmp_path / "kept", tmp_path / "fast"
    out = run(final_dir, 5, "--save-local", str(fast), "--nproc", "2", "--keep-last", "1")
    assert f"uploaded {final_dir}/iter_0000005" in out
    assert storage.steps_in(final_dir) == [5] and storage.steps_in(fast) == [5]
    out = run(final_dir, 7, "--save-local", str(fast), "--keep-last", "1")
    assert f"resumed from {fast}/iter_0000005" in out and storage.steps_in(final_dir) == storage.steps_in(fast) == [7]
    assert "saved iter_" not in run(final_dir, 7, "--save-local", str(fast), "--keep-last", "1")
