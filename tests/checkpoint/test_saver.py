"""Saving in a run: durable order, failures on one rank, the lock, retention, the timer, background saves."""

import os
import resource
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import checkpoint_loads
import programs
import pytest
import torch
from checkpoint_loads import BACKGROUND, SINGLE_PROCESS, full_shard
from checkpoint_loads import row_shard as shard
from hypothesis import given
from hypothesis import strategies as st
from ranks import run_ranks
from safetensors.torch import load_file
from token_files import limit_file_size, raise_disk_full

from megalite.checkpoint.format import manifest as manifests
from megalite.checkpoint.format import reader
from megalite.checkpoint.format import safetensors_file as tensor_file
from megalite.checkpoint.format.manifest import CheckpointError
from megalite.checkpoint.format.safetensors_file import BlockHash
from megalite.checkpoint.manager import async_save as background_save
from megalite.checkpoint.manager import collective as shared
from megalite.checkpoint.manager import retention, saver
from megalite.checkpoint.manager.collective import SaveTimer
from megalite.checkpoint.manager.saver import CheckpointSaver
from megalite.checkpoint.storage import local_storage as file_system
from megalite.checkpoint.storage import storage as storage
from megalite.parallel.mesh import build_mesh
from megalite.parallel.spec import TensorShard

CPU = torch.device("cpu")
MATRIX = full_shard(torch.zeros(2, 8))


def load(directory: Path, like: TensorShard) -> torch.Tensor:
    target = TensorShard(like.name, like.shape, like.box, like.span, torch.zeros_like(like.data))
    manifest = manifests.load_manifest(directory)
    reader.verify_checkpoint(directory, manifest)
    checkpoint_loads.load_shards(directory, manifest, [target], SINGLE_PROCESS, exact=True)
    return target.data.view(like.box.shape)


def save_and_wait(checkpoint_saver: CheckpointSaver, step: int) -> None:
    """Save a checkpoint and wait until it is complete."""
    checkpoint_saver.save(step, [full_shard(torch.ones(2))], {})
    checkpoint_saver.wait()


# ---- the file
@pytest.mark.parametrize("block", [1, 7, 64, 4096])
def test_streamed_file_is_valid_safetensors(tmp_path: Path, block: int) -> None:
    values = {"a": torch.randn(3, 5), "b": torch.randn(7).bfloat16(), "c": torch.arange(4).view(2, 2)}
    values |= {"d": torch.tensor([True, False, True]), "e": torch.tensor(2.5, dtype=torch.float64)}
    rows, ordered = tensor_file.plan_write([full_shard(v, name) for name, v in values.items()])
    checksum = tensor_file.write_safetensors(tmp_path / "x.safetensors", rows, (p.data for p in ordered), block)
    actual = load_file(tmp_path / "x.safetensors")
    assert {row.name: row.key for row in rows}.keys() == values.keys()
    for row in rows:
        assert actual[row.key].dtype == values[row.name].dtype and torch.equal(actual[row.key], values[row.name])
    assert checksum.size == (tmp_path / "x.safetensors").stat().st_size
    block_hash = BlockHash(block_size=block)
    block_hash.update(memoryview((tmp_path / "x.safetensors").read_bytes()))
    assert block_hash.checksum() == checksum
    with pytest.raises(FileExistsError):  # an existing file is never overwritten
        tensor_file.write_safetensors(tmp_path / "x.safetensors", rows, (p.data for p in ordered))


def peak_mib() -> float:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def test_save_needs_no_second_copy_of_the_state(tmp_path: Path) -> None:
    state = [full_shard(torch.randn(16, 1 << 20), f"model/{i}") for i in range(2)]  # 128 MiB
    saver.save(tmp_path, 1, [full_shard(torch.ones(3))], {}, SINGLE_PROCESS)  # does the late imports
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts from now
    before = peak_mib()
    saver.save(tmp_path, 2, state, {}, SINGLE_PROCESS)
    assert peak_mib() - before <= 0.1 * 128
    shutil.rmtree(tmp_path)


# ---- durable, and failing
def test_save_order_survives_a_power_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    real_sync, real_replace = os.fsync, os.replace

    def sync(number: int) -> None:
        events.append(f"sync {Path(os.readlink(f'/proc/self/fd/{number}')).name}")
        real_sync(number)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", lambda a, b: (events.append(f"rename {Path(b).name}"), real_replace(a, b)))
    saver.save(tmp_path, 1, [full_shard(torch.ones(2))], {}, SINGLE_PROCESS)
    files = ["sync rank-00000.safetensors", *(f"rename {x}" for x in ("rank-00000.json", "manifest.json", "COMPLETE"))]
    files += ["sync manifest.json", "sync COMPLETE", "sync .iter_0000001.part", "rename iter_0000001"]
    assert events == [*files, f"sync {tmp_path.name}", f"rename {storage.TRACKER}"]


@BACKGROUND
@pytest.mark.parametrize("call", ["fsync", "replace", "open"])
def test_failed_save_keeps_the_previous_checkpoint(tmp_path: Path, monkeypatch, call: str, background: bool) -> None:
    checkpoint_saver = CheckpointSaver(tmp_path, SINGLE_PROCESS, 8, background=background)
    save_and_wait(checkpoint_saver, 1)

    with monkeypatch.context() as patch:
        patch.setattr(file_system if call == "open" else os, call, raise_disk_full, raising=False)
        with pytest.raises(CheckpointError, match="No space left"):
            save_and_wait(checkpoint_saver, 2)
    newest = checkpoint_loads.load_newest(tmp_path, SINGLE_PROCESS)
    assert newest is not None and newest[0].name == "iter_0000001"
    assert not list(tmp_path.glob(".iter_*"))
    save_and_wait(checkpoint_saver, 3)  # and the next one works again
    checkpoint_saver.close()
    assert checkpoint_loads.load_newest(tmp_path, SINGLE_PROCESS)[0].name == "iter_0000003"  # type: ignore[index]


@BACKGROUND
def test_unrelated_files_do_not_end_a_run(tmp_path: Path, background: bool, capsys) -> None:
    """A tracker file that cannot be written, and then a directory that is deleted: it is created and locked again."""
    save_dir = tmp_path / "save"
    (save_dir / storage.TRACKER / "inside").mkdir(parents=True)
    checkpoint_saver = CheckpointSaver(save_dir, SINGLE_PROCESS, 0, background=background)
    save_and_wait(checkpoint_saver, 1)
    stderr = capsys.readouterr().err
    assert f"WARNING: {save_dir / storage.TRACKER}: Is a directory; it does not name step 1, whose checkpoint" in stderr
    shutil.rmtree(save_dir)
    save_and_wait(checkpoint_saver, 2)
    stderr = capsys.readouterr().err
    assert stderr.count(f"WARNING: save='{save_dir}': its lock was deleted under the run") == stderr.count("\n") == 1, (
        stderr
    )
    assert (save_dir / storage.TRACKER).read_text() == "2\n" and storage.steps_in(save_dir) == [2]
    with pytest.raises(CheckpointError, match=f"in use by process {os.getpid()} "):
        CheckpointSaver(save_dir, SINGLE_PROCESS, 0)
    shutil.rmtree(save_dir)
    save_dir.mkdir()
    other_saver = CheckpointSaver(save_dir, SINGLE_PROCESS, 0)  # it takes the lock first
    with pytest.raises(CheckpointError, match="in use by process"):
        checkpoint_saver.save(3, [full_shard(torch.ones(2))], {})
    checkpoint_saver.close()
    other_saver.close()


@BACKGROUND
def test_error_without_text_shows_type_and_location(tmp_path: Path, monkeypatch, background: bool) -> None:
    monkeypatch.setattr(manifests, "write_rank_file", lambda *_: bytearray(1 << 62))
    checkpoint_saver = CheckpointSaver(tmp_path, SINGLE_PROCESS, 0, background=background)
    with pytest.raises(CheckpointError, match=r"failed while .*: MemoryError in test_saver.py:\d+$"):
        save_and_wait(checkpoint_saver, 1)
    checkpoint_saver.close()


def _disk_full_on_rank_1(directory: str, background: bool) -> tuple[str, bool]:
    mesh = build_mesh(tp=1, pp=1, device=CPU)
    checkpoint_saver = CheckpointSaver(directory, mesh, 100, background=background)
    checkpoint_saver.save(1, [shard(mesh, 1.0)], {})
    checkpoint_saver.wait()
    if mesh.world.rank == 1:
        limit_file_size(4096)
    with pytest.raises(CheckpointError) as error:
        checkpoint_saver.save(2, [shard(mesh, 2.0, 100_000)], {})
        checkpoint_saver.wait()
    limit_file_size(resource.RLIM_INFINITY)
    newest = checkpoint_loads.load_newest(directory, mesh)
    checkpoint_saver.close()
    return str(error.value), newest is not None and newest[0].name == "iter_0000001"


@BACKGROUND
def test_full_disk_on_one_rank_is_an_error_on_all(tmp_path: Path, background: bool) -> None:
    (first, ok0), (second, ok1) = run_ranks(2, _disk_full_on_rank_1, str(tmp_path), background)
    assert "File too large" in second and "rank 1" in second and "rank" in first and ok0 and ok1
    assert not list(tmp_path.glob(".iter_*"))


# ---- the directory
def test_second_run_in_the_same_directory_is_refused(tmp_path: Path) -> None:
    program = (
        "import time; from pathlib import Path; from megalite.checkpoint.storage.local_storage import DirectoryLock"
    )
    program += f"\nlock = DirectoryLock(Path({str(tmp_path)!r})); print('held', flush=True); time.sleep(60)"
    process = programs.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        with pytest.raises(CheckpointError, match=f"in use by process {process.pid} on"):
            CheckpointSaver(tmp_path, SINGLE_PROCESS, 0)
    finally:
        process.kill()
        process.wait()
    checkpoint_saver = CheckpointSaver(tmp_path, SINGLE_PROCESS, 0)  # a killed run leaves no stale lock
    with pytest.raises(CheckpointError, match=f"in use by process {os.getpid()}"):
        CheckpointSaver(tmp_path, SINGLE_PROCESS, 0)
    checkpoint_saver.close()
    CheckpointSaver(tmp_path, SINGLE_PROCESS, 0).close()


def _two_directories(base: str) -> str:
    mesh = build_mesh(tp=1, pp=1, device=CPU)
    shared.check_shared_filesystem.__defaults__ = (0.2,)  # type: ignore[attr-defined]
    with pytest.raises(CheckpointError) as error:
        CheckpointSaver(Path(base) / f"of rank {mesh.world.rank}", mesh, 0)
    return str(error.value)


def test_unshared_directory_is_refused(tmp_path: Path) -> None:
    assert "is not the same directory as on rank 0" in run_ranks(2, _two_directories, str(tmp_path))[1]


def test_unwritable_directory_is_refused_at_startup(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below", Path("/proc/nothing")):
        with pytest.raises(CheckpointError, match="cannot be written"):
            CheckpointSaver(path, SINGLE_PROCESS, 0)
    with pytest.raises(CheckpointError, match=r"GiB left, a checkpoint needs 1,073,741,824.0 GiB: "):
        CheckpointSaver(tmp_path, SINGLE_PROCESS, 1 << 60)
    unusual_dir = tmp_path / "päth with späces ☃"
    checkpoint_saver = CheckpointSaver(unusual_dir, SINGLE_PROCESS, 0)
    checkpoint_saver.save(1, [full_shard(torch.ones(2))], {})
    checkpoint_saver.close()
    assert checkpoint_loads.load_newest(unusual_dir, SINGLE_PROCESS)[0].name == "iter_0000001"  # type: ignore[index]
    assert sorted(p.name for p in unusual_dir.iterdir()) == [storage.LOCK_FILE, "iter_0000001", storage.TRACKER]


def test_leftovers_of_unfinished_saves_are_removed(tmp_path: Path) -> None:
    for name in (".iter_0000003.part", ".iter_0000001.old", ".mine", "iter_0000002"):
        (tmp_path / name).mkdir()
    checkpoint_saver = CheckpointSaver(tmp_path, SINGLE_PROCESS, 0)
    checkpoint_saver.close()
    assert ".iter_0000003.part" in checkpoint_saver.pop_messages()[0]
    assert sorted(p.name for p in tmp_path.iterdir()) == [storage.LOCK_FILE, ".mine", "iter_0000002"]


# ---- retention
def test_retention_deletes_only_complete_checkpoints(tmp_path: Path) -> None:
    checkpoint_loads.save_steps(tmp_path, *range(1, 9))
    (tmp_path / "iter_backup").mkdir()
    (tmp_path / "iter_0000009").mkdir()  # not complete: neither counted nor touched
    os.truncate(tmp_path / "iter_0000008" / "rank-00000.safetensors", 8)  # damaged: neither
    (tmp_path / "iter_0000001" / "KEEP").touch()
    with file_system.LocalStorage().read_lock(tmp_path / "iter_0000002"):
        deleted = retention.RetentionPolicy(tmp_path, 2, 4).prune()
    assert deleted == [
        3,
        5,
    ]  # 7 and 6 are the newest two that are undamaged, 4 is retained, 2 is being read, 1 is pinned
    assert retention.RetentionPolicy(tmp_path, 1).prune() == [2, 4, 6]
    remaining = sorted(p.name for p in tmp_path.glob("iter_*"))
    assert remaining == ["iter_0000001", "iter_0000007", "iter_0000008", "iter_0000009", "iter_backup"]


def test_interrupted_deletion_leaves_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint_loads.save_steps(tmp_path, 1, 2)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *a, **k: None)
        retention.RetentionPolicy(tmp_path, 1).prune()
    assert storage.steps_in(tmp_path) == [2] and (tmp_path / ".iter_0000001.old").is_dir()
    CheckpointSaver(tmp_path, SINGLE_PROCESS, 0).close()
    assert not (tmp_path / ".iter_0000001.old").exists()


def test_retention_keeps_the_newest_checkpoint(tmp_path: Path) -> None:
    """After a rollback the newest checkpoint does not have the highest step."""
    checkpoint_loads.save_steps(tmp_path, 10, 20, 30)
    checkpoint_saver = CheckpointSaver(tmp_path, SINGLE_PROCESS, 0, keep_last=1)
    checkpoint_saver.save(15, [full_shard(torch.ones(2))], {})
    checkpoint_saver.close()
    assert storage.steps_in(tmp_path) == [15, 30]
    assert retention.RetentionPolicy(tmp_path, 1).prune() == [15]  # and the only valid one stays for ever
    os.truncate(tmp_path / "iter_0000030" / "rank-00000.safetensors", 8)
    saver.save(tmp_path, 12, [full_shard(torch.ones(2))], {}, SINGLE_PROCESS)
    assert retention.RetentionPolicy(tmp_path, 1).prune() == []


def test_kill_while_replacing_the_same_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two renames neither the old checkpoint nor the new one is in place; the next start restores the old one."""
    saver.save(tmp_path, 1, [full_shard(torch.ones(2))], {}, SINGLE_PROCESS)
    real = os.replace

    def replace_until_killed(a: Path, b: Path) -> None:
        if Path(b).name == "iter_0000001":
            raise KeyboardInterrupt
        real(a, b)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "replace", replace_until_killed)
        saver.save(tmp_path, 1, [full_shard(torch.zeros(2))], {}, SINGLE_PROCESS)
    assert storage.steps_in(tmp_path) == []
    CheckpointSaver(tmp_path, SINGLE_PROCESS, 0).close()
    assert load(tmp_path / "iter_0000001", full_shard(torch.zeros(2))).tolist() == [1.0, 1.0]
    assert not list(tmp_path.glob(".iter_*"))


@given(paces=st.lists(st.floats(0.01, 5.0), min_size=1, max_size=6), interval=st.floats(1.0, 60.0))
def test_save_interval_in_time_is_kept_at_any_pace(paces: list[float], interval: float) -> None:
    """At a steady pace the interval is kept to half a step, at a cyclic one to two cycles."""
    now, last, saves = [0.0], 0.0, []
    timer = SaveTimer(interval, SINGLE_PROCESS, 0, lambda: now[0])
    for step in range(1, 200):
        pace = paces[step % len(paces)]
        now[0] += pace
        if timer.is_due(step):
            saves.append(now[0] - last)
            last = now[0]
            timer.restart(step)
    tolerance = 0.5 * paces[0] if len(set(paces)) == 1 else 2 * len(paces) * max(paces)
    for elapsed in saves:
        assert elapsed >= interval - max(paces) / 2 - 1e-6 and elapsed <= max(interval + tolerance, max(paces)) + 1e-6
    assert saves or now[0] < interval + tolerance + max(paces)


def test_save_timer_communicates_rarely() -> None:
    now, num_decisions = [0.0], 0
    timer = SaveTimer(1000.0, SINGLE_PROCESS, 0, lambda: now[0])
    for step in range(1, 2001):
        now[0] = step * 1.0
        num_decisions += step >= timer._next_decision
        if timer.is_due(step):
            timer.restart(step)
    assert num_decisions <= 2 * 2 * 10  # two saves, log2(1000) each way


# ---- in the background
def test_only_the_update_waits_for_staging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, real = threading.Event(), background_save.HostStager._parts

    def slow(*args: object, **kwargs: object) -> list[torch.Tensor]:
        assert gate.wait(10)
        return real(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(background_save.HostStager, "_parts", slow)
    checkpoint_saver, piece = CheckpointSaver(tmp_path, SINGLE_PROCESS, 0, background=True), full_shard(torch.ones(4))
    checkpoint_saver.before_update()  # nothing to wait for
    state = {"n": [1]}
    checkpoint_saver.save(1, [piece], state)  # returns, although nothing can be copied yet
    threading.Timer(0.2, gate.set).start()
    checkpoint_saver.before_update()
    assert gate.is_set() and checkpoint_saver.blocked_s > 0
    piece.data.zero_()
    state["n"].append(2)
    checkpoint_saver.wait()
    assert load(tmp_path / "iter_0000001", piece).tolist() == [1.0] * 4
    assert manifests.load_manifest(tmp_path / "iter_0000001").state == {"n": [1]}
    scheduled, committed = checkpoint_saver.pop_messages()
    assert scheduled == "scheduled iter_0000001" and committed.startswith("saved iter_0000001 in the background (")
    assert f"training blocked for {checkpoint_saver.blocked_s:.3f} s" in committed
    checkpoint_saver.close()


def test_failed_staging_blocks_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint_saver = CheckpointSaver(tmp_path, SINGLE_PROCESS, 0, background=True)
    with monkeypatch.context() as patch:
        patch.setattr(tensor_file, "plan_write", no_memory)
        checkpoint_saver.save(1, [full_shard(torch.ones(4))], {})
        checkpoint_saver.before_update()
        with pytest.raises(CheckpointError, match="out of memory"):
            checkpoint_saver.wait()
    save_and_wait(checkpoint_saver, 2)
    checkpoint_saver.close()
    assert storage.steps_in(tmp_path) == [2]


def test_only_one_save_is_in_flight_and_close_waits_for_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    gate, num_writing, max_writing = threading.Event(), [0], [0]
    real = manifests.write_rank_file

    def slow(*args: object) -> None:
        num_writing[0] += 1
        max_writing[0] = max(max_writing[0], num_writing[0])
        gate.wait(10)
        real(*args)  # type: ignore[arg-type]
        num_writing[0] -= 1

    monkeypatch.setattr(manifests, "write_rank_file", slow)
    checkpoint_saver = CheckpointSaver(tmp_path, SINGLE_PROCESS, 0, background=True)
    checkpoint_saver.save(1, [full_shard(torch.ones(2))], {})  # returns, although nothing can be written yet
    assert not (tmp_path / "iter_0000001").exists()
    threading.Timer(0.2, gate.set).start()
    checkpoint_saver.save(2, [full_shard(torch.ones(2))], {})  # waits for the first
    assert (tmp_path / "iter_0000001" / "COMPLETE").is_file()
    checkpoint_saver.close()
    assert (tmp_path / "iter_0000002" / "COMPLETE").is_file() and max_writing[0] == 1


def no_memory(*args: object, **kwargs: object) -> list[torch.Tensor]:
    raise RuntimeError("CUDA error: out of memory\nand much that explains nothing")


def test_without_staging_memory_the_update_waits_for_the_file(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(background_save.HostStager, "_parts", no_memory)
    gate, real = threading.Event(), manifests.write_rank_file
    monkeypatch.setattr(manifests, "write_rank_file", lambda *a: (gate.wait(10), real(*a)))
    checkpoint_saver, piece = CheckpointSaver(tmp_path, SINGLE_PROCESS, 0, background=True), full_shard(torch.ones(4))
    checkpoint_saver.save(1, [piece], {})
    threading.Timer(0.2, gate.set).start()
    checkpoint_saver.before_update()
    assert gate.is_set() and checkpoint_saver.blocked_s > 0.1
    piece.data.zero_()
    checkpoint_saver.wait()
    assert load(tmp_path / "iter_0000001", piece).tolist() == [1.0] * 4
    line = "rank 0 has no memory for a copy of what it saves (CUDA error: out of memory): the state itself is written"
    assert any(message.startswith(line) for message in checkpoint_saver.pop_messages())
    checkpoint_saver.close()


def test_without_a_thread_the_save_is_synchronous(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    checkpoint_saver = CheckpointSaver(tmp_path, SINGLE_PROCESS, 0, background=True)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        checkpoint_saver.save(1, [full_shard(torch.ones(4))], {})
    assert storage.steps_in(tmp_path) == [1]
    checkpoint_saver.wait()
    checkpoint_saver.close()


def test_blocked_time_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = manifests.write_rank_file
    monkeypatch.setattr(manifests, "write_rank_file", lambda *a: (time.sleep(0.1), real(*a)))
    checkpoint_saver = CheckpointSaver(tmp_path, SINGLE_PROCESS, 0, background=True)
    for step in (1, 2):
        checkpoint_saver.save(step, [full_shard(torch.ones(4))], {})
    assert checkpoint_saver.blocked_s > 0.07
    checkpoint_saver.save(3, [full_shard(torch.ones(4))], {}, last=True)
    assert checkpoint_saver.blocked_s > 0.17
    first, second, third = [line for line in checkpoint_saver.pop_messages() if not line.startswith("scheduled")]
    assert "for the previous save" not in first
    stall, before = (float(part.split(" s")[0]) for part in second.split("blocked for ")[1].split(" s, "))
    assert second.endswith(" s of it for the previous save)") and 0.07 < before <= stall
    assert third.startswith("saved iter_0000003 in ") and float(third.split(" s, ")[1].split()[0]) > 0.07
    checkpoint_saver.close()


def test_failed_background_save_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint_saver = CheckpointSaver(tmp_path, SINGLE_PROCESS, 0, background=True)
    checkpoint_saver.save(1, [full_shard(torch.ones(2))], {})
    assert checkpoint_saver.close() is None
    checkpoint_saver = CheckpointSaver(tmp_path, SINGLE_PROCESS, 0, background=True)
    with monkeypatch.context() as patch:
        patch.setattr(manifests, "write_rank_file", no_memory)
        checkpoint_saver.save(2, [full_shard(torch.ones(2))], {})
        message = checkpoint_saver.close()
    assert (
        message is not None
        and "iter_0000002" in message
        and "out of memory" in message
        and message in checkpoint_saver.pop_messages()
    )


def _silent_failure(directory: str) -> str:
    """Rank 1's disk accepts nothing, and the failure comes after the ranks have exchanged their status."""
    mesh = build_mesh(tp=1, pp=1, device=CPU)
    checkpoint_saver = CheckpointSaver(directory, mesh, 0, background=True)
    if mesh.world.rank == 1:
        manifests.write_rank_file = lambda *_: (time.sleep(0.3), raise_disk_full())  # type: ignore[assignment]
        file_system.LocalStorage.write_text = raise_disk_full  # type: ignore[method-assign, assignment]
    checkpoint_saver.save(1, [shard(mesh, 1.0)], {})
    with pytest.raises(CheckpointError) as error:
        checkpoint_saver.wait()
    checkpoint_saver.close()
    return str(error.value)


def test_failure_without_a_file_does_not_delay_rank_0(tmp_path: Path) -> None:
    _, text = run_ranks(2, _silent_failure, str(tmp_path))  # run_ranks ends ranks that take a minute
    assert "No space left on device" in text


def test_no_log_line_of_a_background_save_is_lost(tmp_path: Path) -> None:
    checkpoint_saver, messages = CheckpointSaver(tmp_path, build_mesh(tp=1, pp=1, device=CPU), 0), []
    threads = [
        threading.Thread(target=lambda n=n: [checkpoint_saver._log(f"{n} {i}") for i in range(2000)]) for n in range(3)
    ]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        messages += checkpoint_saver.pop_messages()
    messages += checkpoint_saver.pop_messages()
    checkpoint_saver.close()
    assert len(messages) == len(set(messages)) == 6000


def _slow_rank(directory: str) -> list[str]:
    """Rank 1's file comes late; rank 0 waits for it without any collective while all ranks train."""
    mesh = build_mesh(tp=1, pp=1, device=CPU)
    if mesh.world.rank == 1:
        real = manifests.write_rank_file
        manifests.write_rank_file = lambda *a: (time.sleep(0.3), real(*a))[1]  # type: ignore[assignment]
    checkpoint_saver = CheckpointSaver(directory, mesh, 0, background=True)
    checkpoint_saver.save(4, [shard(mesh, float(mesh.world.rank))], {"step": 4})
    for _ in range(20):  # "training"
        torch.distributed.all_reduce(torch.ones(8))
    exists_early = storage.checkpoint_dir(directory, 4).exists()
    checkpoint_saver.wait()
    checkpoint_saver.close()
    return [str(exists_early), *checkpoint_saver.pop_messages()]


def test_rank_0_commits_after_the_last_file(tmp_path: Path) -> None:
    first, second = run_ranks(2, _slow_rank, str(tmp_path))
    assert first[0] == second[0] == "False" and first[-1].startswith("saved iter_0000004 in the background (")
    assert load(tmp_path / "iter_0000004", MATRIX).tolist() == [[0.0] * 8, [1.0] * 8]


@pytest.mark.parametrize(
    "failed,is_aborted,message",
    [("", False, "rank 0 has written nothing"), ("rank 1: broken", False, "rank 1: broken"), ("", True, "has failed")],
)
def test_rank_0_does_not_wait_forever_for_a_missing_file(
    tmp_path: Path, failed: str, is_aborted: bool, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(file_system.LocalStorage, "stall_timeout_s", 0.1)
    if failed:
        (tmp_path / "rank-00001.failed").write_text(failed)
    event = threading.Event()
    event.set() if is_aborted else event.clear()
    with pytest.raises(CheckpointError, match=message):
        background_save.wait_for_rank_files(tmp_path, 2, event, lambda: None)
