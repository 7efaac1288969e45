"""Rollback and --finetune in the directory that is saved to: runs resume from the new branch and keep it."""

import functools
import itertools
import os
import shutil
import uuid
from pathlib import Path
from typing import Any

import pytest
from chaos.fault_runs import drill
from checkpoint_loads import BACKGROUND, SINGLE_PROCESS, constant_shards, save_steps
from token_files import raise_disk_full
from train_cases import config_from, pretrain, run_from

from megalite.checkpoint.manager import loader
from megalite.checkpoint.manager import superseded as branch
from megalite.checkpoint.manager.saver import CheckpointSaver
from megalite.checkpoint.manager.uploader import Uploader
from megalite.checkpoint.storage import storage as storage
from megalite.checkpoint.storage.location import CheckpointError
from megalite.launch.rank_info import RankInfo
from megalite.training.checkpointing.initial_state import load_initial_state

SIZES = {"rows": 1, "columns": 8, "count": 1}
pieces, save_small = functools.partial(constant_shards, **SIZES), functools.partial(save_steps, **SIZES)


def value_of(directory: str | Path, step: int | None = None) -> float:
    target = pieces(0.0)
    assert loader.load_newest(directory, SINGLE_PROCESS, lambda *_: loader.LoadPlan(target), step)
    return float(target[0].data[0])


def names(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.glob("*iter_*"))


def die(*_: Any) -> None:
    raise KeyboardInterrupt


def die_at_rename(patch: pytest.MonkeyPatch, num_renames: int) -> None:
    """Let `num_renames` renames succeed and none after them, not even in the clean-up after an error."""
    real, calls = os.replace, itertools.count()

    def replace(a: Any, b: Any) -> None:
        if next(calls) >= num_renames:
            raise KeyboardInterrupt
        real(a, b)

    patch.setattr(os, "replace", replace)


ABANDONED = ["abandoned-iter_0000003-left-at-0000002", "abandoned-iter_0000004-left-at-0000002"]


@BACKGROUND
def test_first_save_renames_superseded_checkpoints(tmp_path: Path, background: bool) -> None:
    save_small(tmp_path, 1, 2, 3, 4)
    checkpoint_saver = CheckpointSaver(tmp_path, SINGLE_PROCESS, 0, keep_last=2, background=background)
    note = checkpoint_saver.set_start_step(2)
    assert note is not None and "iter_0000003, iter_0000004" in note and "abandoned-" in note
    assert storage.steps_in(tmp_path) == [1, 2, 3, 4]  # until another one is saved
    checkpoint_saver.save(4, pieces(40.0), {})  # the same step again
    checkpoint_saver.wait()
    assert storage.steps_in(tmp_path) == [2, 4] and value_of(tmp_path) == 40.0
    assert [name for name in names(tmp_path) if "abandoned" in name] == ABANDONED
    (line,) = [line for line in checkpoint_saver.pop_messages() if "left" in line]
    assert all(name in line for name in ABANDONED)
    checkpoint_saver.save(5, pieces(50.0), {})
    checkpoint_saver.close()
    assert storage.steps_in(tmp_path) == [4, 5] and not [
        line for line in checkpoint_saver.pop_messages() if "left" in line
    ]
    shutil.move(tmp_path / ABANDONED[1], tmp_path / "again" / "iter_0000004")
    assert value_of(tmp_path / "again") == 4.0


def test_superseded_checkpoints_between_those_of_the_run_are_not_used(tmp_path: Path) -> None:
    """A tracker file that names the newest would not be enough: steps 2 and 3 are below it once step 4 is saved."""
    save_small(tmp_path, 1, 2, 3)
    checkpoint_saver = CheckpointSaver(tmp_path, SINGLE_PROCESS, 0, keep_last=2)
    checkpoint_saver.set_start_step(1)
    checkpoint_saver.save(4, pieces(40.0), {})
    checkpoint_saver.close()
    assert storage.steps_in(tmp_path) == [1, 4]  # --keep-last has not counted them
    (tmp_path / storage.TRACKER).unlink()
    assert value_of(tmp_path) == 40.0
    file = tmp_path / "iter_0000004" / "rank-00000.safetensors"
    file.write_bytes(bytes(file.stat().st_size))
    assert value_of(tmp_path) == 1.0  # of the same branch


def test_second_rollback_to_the_same_step(tmp_path: Path) -> None:
    save_small(tmp_path, 2, 4)
    for n in range(3):
        checkpoint_saver = CheckpointSaver(tmp_path, SINGLE_PROCESS, 0)
        checkpoint_saver.set_start_step(2)
        checkpoint_saver.save(4, pieces(40.0 + n), {})
        checkpoint_saver.close()
    abandoned = "abandoned-iter_0000004-left-at-0000002"
    assert names(tmp_path) == [abandoned, f"{abandoned}-2", f"{abandoned}-3", "iter_0000002", "iter_0000004"]
    assert value_of(tmp_path) == 42.0


def test_failed_first_save_renames_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_small(tmp_path, 1, 2, 3)
    checkpoint_saver = CheckpointSaver(tmp_path, SINGLE_PROCESS, 0)
    checkpoint_saver.set_start_step(1)

    for broken in ("publish", "open_new"):
        with monkeypatch.context() as patch:
            patch.setattr(storage.LocalStorage, broken, raise_disk_full)
            with pytest.raises(CheckpointError, match="No space left"):
                checkpoint_saver.save(2, pieces(20.0), {})
        assert storage.steps_in(tmp_path) == [1, 2, 3] and value_of(tmp_path) == 3.0
    with monkeypatch.context() as patch:
        patch.setattr(branch.os, "replace", raise_disk_full)
        with pytest.raises(CheckpointError, match="No space left"):
            checkpoint_saver.save(2, pieces(20.0), {})
    assert not list(tmp_path.glob(".iter_*"))
    checkpoint_saver.save(2, pieces(20.0), {})
    checkpoint_saver.close()
    assert storage.steps_in(tmp_path) == [1, 2] and value_of(tmp_path) == 20.0


@pytest.mark.parametrize("local", [False, True], ids=["one place", "saved locally first"])
def test_superseded_checkpoint_that_cannot_be_renamed_is_not_loaded(tmp_path, monkeypatch, local: bool) -> None:
    """--keep-last would delete the first save, which records what it superseded."""
    final_dir = tmp_path / "kept"
    save_small(final_dir, 1, 2, 3, 9)
    save_dir = tmp_path / "fast" if local else final_dir
    checkpoint_saver = CheckpointSaver(save_dir, SINGLE_PROCESS, 0, keep_last=2, upload_to=final_dir if local else None)
    checkpoint_saver.set_start_step(2)
    real, calls = branch.finish_renames, list[int]()

    def finish_renames(*directories: Path) -> Any:
        calls.append(1)
        if len(calls) < 4:
            raise OSError(116, "Stale file handle")
        return real(*directories)

    monkeypatch.setattr(branch, "finish_renames", finish_renames)
    for step in (4, 5, 6):
        checkpoint_saver.save(step, pieces(step * 10.0), {})
    assert {4, 5, 6} <= set(storage.steps_in(save_dir)) and 9 not in storage.steps_in(final_dir)
    assert sum("Stale file handle" in line for line in checkpoint_saver.pop_messages()) == 3
    checkpoint_saver.save(7, pieces(70.0), {})
    checkpoint_saver.close()
    assert storage.steps_in(final_dir) == [6, 7] and value_of(final_dir) == 70.0
    assert [name for name in names(final_dir) if "9" in name] == ["abandoned-iter_0000009-left-at-0000002"]


def test_damaged_checkpoints_do_not_count_as_kept(tmp_path: Path) -> None:
    """The files have the right sizes, so only a load detects the damage."""
    save_small(tmp_path, 1, 2, 3, 4)
    for step in (3, 4):
        file = tmp_path / f"iter_000000{step}" / "rank-00000.safetensors"
        file.write_bytes(bytes(file.stat().st_size))
    assert value_of(tmp_path) == 2.0
    checkpoint_saver = CheckpointSaver(tmp_path, SINGLE_PROCESS, 0, keep_last=2)
    assert checkpoint_saver.set_start_step(2, damaged=True) is None
    checkpoint_saver.save(3, pieces(30.0), {})
    assert storage.steps_in(tmp_path) == [2, 3] and value_of(tmp_path) == 30.0
    checkpoint_saver.close()


def test_rollback_with_links_and_read_only_directories(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    save_small(tmp_path / "archive", 3)
    save_small(run_dir, 1, 2)
    (run_dir / "iter_0000003").symlink_to(Path("..") / "archive" / "iter_0000003")
    (run_dir / "iter_0000002").chmod(0o555)
    checkpoint_saver = CheckpointSaver(run_dir, SINGLE_PROCESS, 0)
    checkpoint_saver.set_start_step(1)
    checkpoint_saver.save(4, pieces(40.0), {})
    checkpoint_saver.close()
    assert storage.steps_in(run_dir) == [1, 4]
    link = run_dir / "abandoned-iter_0000003-left-at-0000001"
    assert link.is_symlink() and (link / "COMPLETE").is_file()
    (run_dir / "abandoned-iter_0000002-left-at-0000001").chmod(0o755)


def test_rollback_in_a_remote_store_is_refused(tmp_path: Path) -> None:
    url = f"memory://runs/{uuid.uuid4().hex}"
    save_small(url, 1, 2, 3)
    checkpoint_saver = CheckpointSaver(url, SINGLE_PROCESS, 0)
    with pytest.raises(CheckpointError, match=r"iter_0000002, iter_0000003, later than .* give another"):
        checkpoint_saver.set_start_step(1)
    checkpoint_saver.close()
    assert storage.steps_in(url) == [1, 2, 3]
    checkpoint_saver = CheckpointSaver(url, SINGLE_PROCESS, 0, keep_last=2)
    assert checkpoint_saver.set_start_step(1, damaged=True) is None
    for step in (4, 5):
        checkpoint_saver.save(step, pieces(float(step)), {})
    assert storage.steps_in(url) == [2, 3, 4, 5]  # two undamaged ones, not 3 and 5
    checkpoint_saver.save(3, pieces(30.0), {})  # saved again: it counts now, though not among the newest two
    checkpoint_saver.close()
    assert storage.steps_in(url) == [2, 3, 4, 5]
    local = CheckpointSaver(tmp_path, SINGLE_PROCESS, 0, upload_to=url)
    with pytest.raises(CheckpointError, match="renamed at a URL"):
        local.set_start_step(1)
    local.close()
    new_url = f"memory://runs/{uuid.uuid4().hex}"
    save_small(tmp_path, 1, 2)
    local = CheckpointSaver(tmp_path, SINGLE_PROCESS, 0, upload_to=new_url)
    note = local.set_start_step(1)  # the later checkpoint was never uploaded
    assert note is not None and "iter_0000002" in note
    local.save(3, pieces(3.0), {})
    local.close()
    assert storage.steps_in(new_url) == [1, 3] and storage.steps_in(tmp_path) == [3]


def test_failed_start_uploads_and_deletes_nothing(tmp_path: Path) -> None:
    """A wrong flag beside --ckpt-step 1 must not cost step 1."""
    fast, final_dir = tmp_path / "fast", tmp_path / "kept"
    save_small(final_dir, 1, 2)
    save_small(fast, 3)
    CheckpointSaver(fast, SINGLE_PROCESS, 0, keep_last=2, upload_to=final_dir).close()
    assert storage.steps_in(final_dir) == [1, 2] and storage.steps_in(fast) == [3]
    checkpoint_saver = CheckpointSaver(fast, SINGLE_PROCESS, 0, keep_last=2, upload_to=final_dir)
    checkpoint_saver.set_start_step(3)  # the previous run was killed before it could upload
    checkpoint_saver.close()
    assert storage.steps_in(final_dir) == [2, 3]


@pytest.mark.parametrize("killed", [False, True])
def test_rollback_renames_local_and_uploaded_checkpoints_together(tmp_path: Path, monkeypatch, killed: bool) -> None:
    """Killed between the commit and the last renames, the next start finds the new branch in both."""
    fast, final_dir = tmp_path / "fast", tmp_path / "kept"
    save_small(final_dir, 1, 2, 3)
    save_small(fast, 4)
    uploaded: list[int] = []
    real = Uploader._upload
    monkeypatch.setattr(Uploader, "_upload", lambda self, step, *a: (uploaded.append(step), real(self, step, *a))[1])
    checkpoint_saver = CheckpointSaver(fast, SINGLE_PROCESS, 0, keep_last=2, upload_to=final_dir)
    checkpoint_saver.set_start_step(1)
    if killed:
        with monkeypatch.context() as patch:
            patch.setattr(branch, "finish_renames", die)
            with pytest.raises(KeyboardInterrupt):
                checkpoint_saver.save(2, pieces(20.0), {})
        checkpoint_saver._lock.close()
        checkpoint_saver._uploader._lock.close()
        checkpoint_saver = CheckpointSaver(fast, SINGLE_PROCESS, 0, keep_last=2, upload_to=final_dir)
        checkpoint_saver.set_start_step(2)
    else:
        checkpoint_saver.save(2, pieces(20.0), {})
    checkpoint_saver.close()
    assert uploaded == [2]  # and not step 4 before it, for which --keep-last would delete step 1
    assert storage.steps_in(fast) == [2] and storage.steps_in(final_dir) == [1, 2] and value_of(final_dir) == 20.0
    assert (
        sum("abandoned" in name for name in names(final_dir)) == 2 and sum("abandoned" in n for n in names(fast)) == 1
    )


@pytest.mark.parametrize("fast", [[], [2, 3]], ids=["one place", "saved locally first"])
def test_kill_at_any_rename_leaves_one_complete_branch(tmp_path: Path, monkeypatch, fast: list[int]) -> None:
    """Both directories may hold the step of the first save: the newest stays in the fast one after its upload."""
    monkeypatch.setattr(Uploader, "_upload_pending", lambda self: None)
    old = {place: [f"iter_{n:07d}" for n in steps] for place, steps in (("kept", [1, 2, 3]), ("fast", fast)) if steps}
    abandoned = [f"abandoned-iter_000000{n}-left-at-0000001" for n in (2, 3)]
    new = {place: [*abandoned, *(name for name in old_names if name.endswith("1"))] for place, old_names in old.items()}
    new[[*old][-1]] += ["iter_0000002"]  # where it is saved
    outcomes, finished = [], False
    while not finished:
        places = {name: tmp_path / str(len(outcomes)) / name for name in old}
        for name, directory in places.items():
            save_small(directory, *(int(step[-1]) for step in old[name]))
        final_dir, target = places["kept"], [*places.values()][-1]
        checkpoint_saver = CheckpointSaver(target, SINGLE_PROCESS, 0, upload_to=final_dir if fast else None)
        checkpoint_saver.set_start_step(1)
        with monkeypatch.context() as patch:
            die_at_rename(patch, len(outcomes))
            try:
                checkpoint_saver.save(2, pieces(20.0), {})
                finished = True
            except KeyboardInterrupt:
                pass
        checkpoint_saver.close()
        CheckpointSaver(target, SINGLE_PROCESS, 0, upload_to=final_dir if fast else None).close()  # the next start
        outcomes.append({name: names(directory) for name, directory in places.items()})
        assert outcomes[-1] in (old, new), len(outcomes)
        assert value_of(target, 2) == (20.0 if outcomes[-1] == new else 2.0)
    assert outcomes[0] == old and outcomes[-1] == new and len(outcomes) > 8


@pytest.mark.parametrize("committed", [False, True])
def test_interrupted_recovery_can_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, committed: bool) -> None:
    """However much is renamed back, the step of the first save must not be in place before all others are."""
    num_renames, finished = 0, False
    while not finished:
        places = {tmp_path / str(num_renames) / name: ["iter_0000002", "iter_0000003"] for name in ("fast", "kept")}
        for checkpoint_dir in [place / name for place, names in places.items() for name in names]:
            checkpoint_dir.mkdir(parents=True)
        branch.hide_later(places, 1, 2)
        if committed:
            (next(iter(places)) / "iter_0000002").mkdir()
        with monkeypatch.context() as patch:
            die_at_rename(patch, num_renames)
            try:
                branch.finish_renames(*places)
                finished = True
            except KeyboardInterrupt:
                pass
        branch.finish_renames(*places)
        num_abandoned = [sum(name.startswith("abandoned") for name in names(place)) for place in places]
        assert num_abandoned == ([2, 2] if committed else [0, 0]), num_renames
        assert all(not list(place.glob(".iter_*")) for place in places)
        num_renames += 1
    assert num_renames > 4


# ---- the program


SHAPE = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --max-position-embeddings 8 "
    "--vocab-size 21 --micro-batch-size 1 --global-batch-size 2 --mock-data --eval-iters 0 --save-interval 2"
).split()
BACK = "--lr 0.02 --train-iters 8 --keep-last 3 --ckpt-step 4 --override-opt-param-scheduler"


def flags_of(run_dir: Path, flags: str) -> list[str]:
    return [*SHAPE, "--save", str(run_dir), "--load", str(run_dir), *flags.split()]


def pretrain_here(run_dir: Path, flags: str) -> tuple[int, str]:
    """Run the training in this process; return (exit code, log)."""
    (run_dir / "log.txt").unlink(missing_ok=True)
    code = pretrain(config_from(flags_of(run_dir, flags)), RankInfo())
    return int(code), (run_dir / "log.txt").read_text()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a finished run, with checkpoints of steps 4, 6 and 7."""
    run_dir = tmp_path_factory.mktemp("branches") / "run"
    assert pretrain_here(run_dir, "--lr 0.01 --train-iters 7 --keep-last 3")[0] == 0
    assert storage.steps_in(run_dir) == [4, 6, 7]
    return run_dir


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "run")


def test_restarted_rollback_resumes(run: Path) -> None:
    code, log = pretrain_here(run, f"{BACK} --exit-interval 5")
    assert code == 75 and "at step 4" in log, log
    assert "note: iter_0000006, iter_0000007 in" in log and "abandoned-iter_0000007-left-at-0000004" in log
    assert storage.steps_in(run) == [4, 5]
    other = BACK.replace("--lr 0.02", "--lr 0.03")  # another training
    code, log = pretrain_here(run, f"{other} --exit-interval 6")
    assert code == 75 and "at step 4" in log and storage.steps_in(run) == [4, 6], log
    changed_flags = (
        "--save-interval 3 --log-interval 1 --eval-interval 5 --micro-batch-size 1 --recompute-granularity selective"
    )
    code, log = pretrain_here(Path(f"{run}/"), f"{other} --wandb-exp-name second {changed_flags}")
    assert code == 0 and "at step 6" in log and "note: these checkpoints are from the same training" in log, log
    assert storage.steps_in(run) == [4, 6, 8] and "abandoned" not in log
    code, log = pretrain_here(run, "--lr 0.02 --train-iters 9 --keep-last 3 --override-opt-param-scheduler")
    assert code == 0 and "at step 8" in log and storage.steps_in(run) == [6, 8, 9]


def test_rollback_on_two_ranks_repeats_until_it_has_saved(run: Path) -> None:
    for fault, code, steps in (("step.begin:*:5:kill", 137, [4, 6, 7]), ("", 75, [4, 5]), ("", 0, [5, 6, 8])):
        result = drill(run.parent / "two", 2, flags_of(run, f"{BACK} --exit-interval 5"), fault)
        assert result.code == code and storage.steps_in(run) == steps, result
        assert f"at step {5 if code == 0 else 4}" in result.outputs[0]


def test_damaged_newest_checkpoint_of_the_same_command(run: Path) -> None:
    for _ in range(2):
        pretrain_here(run, f"{BACK} --exit-interval 5")
    assert storage.steps_in(run) == [5, 6, 8]
    for name in ("iter_0000008/manifest.json", "iter_0000006/rank-00000.safetensors"):
        (run / name).write_bytes(bytes((run / name).stat().st_size))
    code, log = pretrain_here(run, f"{BACK} --exit-interval 5")
    assert code == 0 and "at step 5" in log and "note: these checkpoints are from the same training" in log, log
    assert storage.steps_in(run) == [5, 6, 8]  # saved again; the damaged ones are renamed
    assert len(list(run.glob("abandoned-*left-at-0000005"))) == 2


TUNE = "--lr 0.001 --train-iters 7 --finetune --exit-interval 3 --save-local {}"


def test_finetune_in_the_same_directory_resumes(run: Path) -> None:
    tune = TUNE.format(run.with_name("fast"))
    code, log = pretrain_here(run, tune)
    assert code == 75 and "starts from" in log and "only the weights are loaded" in log, log
    assert storage.steps_in(run) == [2, 3] and len(list(run.glob("abandoned-*left-at-0000000"))) == 3
    for step in (3, 6):
        code, log = pretrain_here(run, tune)
        assert f"at step {step}" in log and "only the weights" not in log, log
    assert code == 0 and storage.steps_in(run) == [2, 3, 4, 6, 7]
    code, log = pretrain_here(run, tune)
    assert code == 0 and "at step 7" in log and "saved iter_" not in log


def test_finetune_after_loss_of_the_local_disk_resumes(run: Path, monkeypatch) -> None:
    """The checkpoint that it started from is abandoned, and its own were never uploaded."""
    tune = TUNE.format(run.with_name("fast"))
    monkeypatch.setattr(Uploader, "_upload_pending", lambda self: None)
    assert pretrain_here(run, tune)[0] == 75 and not storage.steps_in(run)
    shutil.rmtree(run.with_name("fast"))
    config = config_from(flags_of(run, tune))
    new_run = run_from(config)
    with pytest.raises(CheckpointError, match=r"holds only checkpoints .*abandoned-iter_0000007.*: rename the one"):
        load_initial_state(new_run, config)
    (run / "abandoned-iter_0000007-left-at-0000000").rename(run / "iter_0000007")
    loaded, _ = load_initial_state(new_run, config)
    assert loaded == run / "iter_0000007"
