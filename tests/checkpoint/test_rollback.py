"""Rollback and --finetune in the directory that is saved to: the new branch is the one that is gone on from and kept."""

import functools
import itertools
import os
import shutil
import uuid
from pathlib import Path
from typing import Any

import pytest
from chaos.fault_runs import drill
from checkpoint_loads import ALONE, BACKGROUND, filled, save_steps
from token_files import full
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
pieces, saved = functools.partial(filled, **SIZES), functools.partial(save_steps, **SIZES)


def value_of(directory: str | Path, step: int | None = None) -> float:
    target = pieces(0.0)
    assert loader.load_newest(directory, ALONE, lambda *_: loader.LoadPlan(target), step)
    return float(target[0].data[0])


def names(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.glob("*iter_*"))


def dead(*_: Any) -> None:
    raise KeyboardInterrupt


def die_at_rename(patch: pytest.MonkeyPatch, last: int) -> None:
    """`last` renames are made, and none after them: whatever tidies up after an error is dead too."""
    real, calls = os.replace, itertools.count()

    def replace(a: Any, b: Any) -> None:
        if next(calls) >= last:
            raise KeyboardInterrupt
        real(a, b)

    patch.setattr(os, "replace", replace)


LEFT = ["abandoned-iter_0000003-left-at-0000002", "abandoned-iter_0000004-left-at-0000002"]


@BACKGROUND
def test_first_save_renames_superseded_checkpoints(tmp_path: Path, background: bool) -> None:
    saved(tmp_path, 1, 2, 3, 4)
    one = CheckpointSaver(tmp_path, ALONE, 0, keep_last=2, background=background)
    note = one.set_start_step(2)
    assert note is not None and "iter_0000003, iter_0000004" in note and "abandoned-" in note
    assert storage.steps_in(tmp_path) == [1, 2, 3, 4]  # as long as there is no other
    one.save(4, pieces(40.0), {})  # the same step again
    one.wait()
    assert storage.steps_in(tmp_path) == [2, 4] and value_of(tmp_path) == 40.0
    assert [name for name in names(tmp_path) if "abandoned" in name] == LEFT
    (line,) = [line for line in one.pop_messages() if "left" in line]
    assert all(name in line for name in LEFT)
    one.save(5, pieces(50.0), {})
    one.close()
    assert storage.steps_in(tmp_path) == [4, 5] and not [line for line in one.pop_messages() if "left" in line]
    shutil.move(tmp_path / LEFT[1], tmp_path / "again" / "iter_0000004")
    assert value_of(tmp_path / "again") == 4.0


def test_second_rollback_to_the_same_step(tmp_path: Path) -> None:
    saved(tmp_path, 2, 4)
    for n in range(3):
        one = CheckpointSaver(tmp_path, ALONE, 0)
        one.set_start_step(2)
        one.save(4, pieces(40.0 + n), {})
        one.close()
    left = "abandoned-iter_0000004-left-at-0000002"
    assert names(tmp_path) == [left, f"{left}-2", f"{left}-3", "iter_0000002", "iter_0000004"]
    assert value_of(tmp_path) == 42.0


def test_failed_first_save_renames_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path, 1, 2, 3)
    one = CheckpointSaver(tmp_path, ALONE, 0)
    one.set_start_step(1)

    for broken in ("publish", "open_new"):
        with monkeypatch.context() as patch:
            patch.setattr(storage.LocalStorage, broken, full)
            with pytest.raises(CheckpointError, match="No space left"):
                one.save(2, pieces(20.0), {})
        assert storage.steps_in(tmp_path) == [1, 2, 3] and value_of(tmp_path) == 3.0
    with monkeypatch.context() as patch:
        patch.setattr(branch.os, "replace", full)
        with pytest.raises(CheckpointError, match="No space left"):
            one.save(2, pieces(20.0), {})
    assert not list(tmp_path.glob(".iter_*"))
    one.save(2, pieces(20.0), {})
    one.close()
    assert storage.steps_in(tmp_path) == [1, 2] and value_of(tmp_path) == 20.0


@pytest.mark.parametrize("local", [False, True], ids=["one place", "saved locally first"])
def test_superseded_checkpoint_that_cannot_be_renamed_is_not_loaded(tmp_path, monkeypatch, local: bool) -> None:
    """--keep-last would delete the first save, which says that it was left."""
    kept = tmp_path / "kept"
    saved(kept, 1, 2, 3, 9)
    folder = tmp_path / "fast" if local else kept
    one = CheckpointSaver(folder, ALONE, 0, keep_last=2, upload_to=kept if local else None)
    one.set_start_step(2)
    real, calls = branch.finish_renames, list[int]()

    def finish_renames(*directories: Path) -> Any:
        calls.append(1)
        if len(calls) < 4:
            raise OSError(116, "Stale file handle")
        return real(*directories)

    monkeypatch.setattr(branch, "finish_renames", finish_renames)
    for step in (4, 5, 6):
        one.save(step, pieces(step * 10.0), {})
    assert {4, 5, 6} <= set(storage.steps_in(folder)) and 9 not in storage.steps_in(kept)
    assert sum("Stale file handle" in line for line in one.pop_messages()) == 3
    one.save(7, pieces(70.0), {})
    one.close()
    assert storage.steps_in(kept) == [6, 7] and value_of(kept) == 70.0
    assert [name for name in names(kept) if "9" in name] == ["abandoned-iter_0000009-left-at-0000002"]


def test_damaged_checkpoints_do_not_count_as_kept(tmp_path: Path) -> None:
    """Of the right sizes: only a load finds it out."""
    saved(tmp_path, 1, 2, 3, 4)
    for step in (3, 4):
        file = tmp_path / f"iter_000000{step}" / "rank-00000.safetensors"
        file.write_bytes(bytes(file.stat().st_size))
    assert value_of(tmp_path) == 2.0
    one = CheckpointSaver(tmp_path, ALONE, 0, keep_last=2)
    assert one.set_start_step(2, damaged=True) is None
    one.save(3, pieces(30.0), {})
    assert storage.steps_in(tmp_path) == [2, 3] and value_of(tmp_path) == 30.0
    one.close()


def test_rollback_with_links_and_read_only_directories(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    saved(tmp_path / "archive", 3)
    saved(folder, 1, 2)
    (folder / "iter_0000003").symlink_to(Path("..") / "archive" / "iter_0000003")
    (folder / "iter_0000002").chmod(0o555)
    one = CheckpointSaver(folder, ALONE, 0)
    one.set_start_step(1)
    one.save(4, pieces(40.0), {})
    one.close()
    assert storage.steps_in(folder) == [1, 4]
    link = folder / "abandoned-iter_0000003-left-at-0000001"
    assert link.is_symlink() and (link / "COMPLETE").is_file()
    (folder / "abandoned-iter_0000002-left-at-0000001").chmod(0o755)


def test_rollback_in_a_remote_store_is_refused(tmp_path: Path) -> None:
    url = f"memory://runs/{uuid.uuid4().hex}"
    saved(url, 1, 2, 3)
    one = CheckpointSaver(url, ALONE, 0)
    with pytest.raises(CheckpointError, match=r"iter_0000002, iter_0000003, later than .* give another"):
        one.set_start_step(1)
    one.close()
    assert storage.steps_in(url) == [1, 2, 3]
    one = CheckpointSaver(url, ALONE, 0, keep_last=2)
    assert one.set_start_step(1, damaged=True) is None
    for step in (4, 5):
        one.save(step, pieces(float(step)), {})
    assert storage.steps_in(url) == [2, 3, 4, 5]  # two that are right, not 3 and 5
    one.save(3, pieces(30.0), {})  # made again: it counts now, though not among the newest two
    one.close()
    assert storage.steps_in(url) == [2, 3, 4, 5]
    local = CheckpointSaver(tmp_path, ALONE, 0, upload_to=url)
    with pytest.raises(CheckpointError, match="renamed at a URL"):
        local.set_start_step(1)
    local.close()
    fresh = f"memory://runs/{uuid.uuid4().hex}"
    saved(tmp_path, 1, 2)
    local = CheckpointSaver(tmp_path, ALONE, 0, upload_to=fresh)
    note = local.set_start_step(1)  # what is there was never sent
    assert note is not None and "iter_0000002" in note
    local.save(3, pieces(3.0), {})
    local.close()
    assert storage.steps_in(fresh) == [1, 3] and storage.steps_in(tmp_path) == [3]


def test_failed_start_uploads_and_deletes_nothing(tmp_path: Path) -> None:
    """A wrong flag beside --ckpt-step 1 must not cost step 1."""
    fast, kept = tmp_path / "fast", tmp_path / "kept"
    saved(kept, 1, 2)
    saved(fast, 3)
    CheckpointSaver(fast, ALONE, 0, keep_last=2, upload_to=kept).close()
    assert storage.steps_in(kept) == [1, 2] and storage.steps_in(fast) == [3]
    one = CheckpointSaver(fast, ALONE, 0, keep_last=2, upload_to=kept)
    one.set_start_step(3)  # the run before was killed before it could
    one.close()
    assert storage.steps_in(kept) == [2, 3]


@pytest.mark.parametrize("killed", [False, True])
def test_rollback_renames_local_and_uploaded_checkpoints_together(tmp_path: Path, monkeypatch, killed: bool) -> None:
    """Killed between the commit and the last renames, the next start finds the new branch in both."""
    fast, kept = tmp_path / "fast", tmp_path / "kept"
    saved(kept, 1, 2, 3)
    saved(fast, 4)
    sent: list[int] = []
    real = Uploader._upload
    monkeypatch.setattr(Uploader, "_upload", lambda self, step, *a: (sent.append(step), real(self, step, *a))[1])
    one = CheckpointSaver(fast, ALONE, 0, keep_last=2, upload_to=kept)
    one.set_start_step(1)
    if killed:
        with monkeypatch.context() as patch:
            patch.setattr(branch, "finish_renames", dead)
            with pytest.raises(KeyboardInterrupt):
                one.save(2, pieces(20.0), {})
        one._lock.close()
        one._uploader._lock.close()
        one = CheckpointSaver(fast, ALONE, 0, keep_last=2, upload_to=kept)
        one.set_start_step(2)
    else:
        one.save(2, pieces(20.0), {})
    one.close()
    assert sent == [2]  # and not, before, what would have made --keep-last delete step 1
    assert storage.steps_in(fast) == [2] and storage.steps_in(kept) == [1, 2] and value_of(kept) == 20.0
    assert sum("abandoned" in name for name in names(kept)) == 2 and sum("abandoned" in n for n in names(fast)) == 1


@pytest.mark.parametrize("fast", [[], [2, 3]], ids=["one place", "saved locally first"])
def test_kill_at_any_rename_leaves_one_complete_branch(tmp_path: Path, monkeypatch, fast: list[int]) -> None:
    """Both may hold the step that is saved first: the newest stays in the fast one after it was sent."""
    monkeypatch.setattr(Uploader, "_upload_pending", lambda self: None)
    old = {place: [f"iter_{n:07d}" for n in steps] for place, steps in (("kept", [1, 2, 3]), ("fast", fast)) if steps}
    gone = [f"abandoned-iter_000000{n}-left-at-0000001" for n in (2, 3)]
    new = {place: [*gone, *(name for name in was if name.endswith("1"))] for place, was in old.items()}
    new[[*old][-1]] += ["iter_0000002"]  # where it is saved
    seen, ended = [], False
    while not ended:
        places = {name: tmp_path / str(len(seen)) / name for name in old}
        for name, folder in places.items():
            saved(folder, *(int(step[-1]) for step in old[name]))
        kept, target = places["kept"], [*places.values()][-1]
        one = CheckpointSaver(target, ALONE, 0, upload_to=kept if fast else None)
        one.set_start_step(1)
        with monkeypatch.context() as patch:
            die_at_rename(patch, len(seen))
            try:
                one.save(2, pieces(20.0), {})
                ended = True
            except KeyboardInterrupt:
                pass
        one.close()
        CheckpointSaver(target, ALONE, 0, upload_to=kept if fast else None).close()  # the next start
        seen.append({name: names(folder) for name, folder in places.items()})
        assert seen[-1] in (old, new), len(seen)
        assert value_of(target, 2) == (20.0 if seen[-1] == new else 2.0)
    assert seen[0] == old and seen[-1] == new and len(seen) > 8


@pytest.mark.parametrize("committed", [False, True])
def test_interrupted_recovery_can_be_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, committed: bool) -> None:
    """Whatever went back already, the step that is saved first must not be there before all others are."""
    last, ended = 0, False
    while not ended:
        places = {tmp_path / str(last) / name: ["iter_0000002", "iter_0000003"] for name in ("fast", "kept")}
        for folder in [place / name for place, names in places.items() for name in names]:
            folder.mkdir(parents=True)
        branch.hide_later(places, 1, 2)
        if committed:
            (next(iter(places)) / "iter_0000002").mkdir()
        with monkeypatch.context() as patch:
            die_at_rename(patch, last)
            try:
                branch.finish_renames(*places)
                ended = True
            except KeyboardInterrupt:
                pass
        branch.finish_renames(*places)
        left = [sum(name.startswith("abandoned") for name in names(place)) for place in places]
        assert left == ([2, 2] if committed else [0, 0]), last
        assert all(not list(place.glob(".iter_*")) for place in places)
        last += 1
    assert last > 4


# ---- the program


SHAPE = (
    "--num-layers 1 --hidden-size 8 --num-attention-heads 2 --seq-length 8 --max-position-embeddings 8 "
    "--vocab-size 21 --micro-batch-size 1 --global-batch-size 2 --mock-data --eval-iters 0 --save-interval 2"
).split()
BACK = "--lr 0.02 --train-iters 8 --keep-last 3 --ckpt-step 4 --override-opt-param-scheduler"


def flags_of(folder: Path, words: str) -> list[str]:
    return [*SHAPE, "--save", str(folder), "--load", str(folder), *words.split()]


def alone(folder: Path, words: str) -> tuple[int, str]:
    """(exit code, log) of one process: this one."""
    (folder / "log.txt").unlink(missing_ok=True)
    code = pretrain(config_from(flags_of(folder, words)), RankInfo())
    return int(code), (folder / "log.txt").read_text()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 4, 6, 7 of a run that has ended."""
    folder = tmp_path_factory.mktemp("branches") / "run"
    assert alone(folder, "--lr 0.01 --train-iters 7 --keep-last 3")[0] == 0
    assert storage.steps_in(folder) == [4, 6, 7]
    return folder


@pytest.fixture
def run(trained: Path, tmp_path: Path) -> Path:
    return shutil.copytree(trained, tmp_path / "run")


def test_restarted_rollback_resumes(run: Path) -> None:
    code, said = alone(run, f"{BACK} --exit-interval 5")
    assert code == 75 and "at step 4" in said, said
    assert "note: iter_0000006, iter_0000007 in" in said and "abandoned-iter_0000007-left-at-0000004" in said
    assert storage.steps_in(run) == [4, 5]
    other = BACK.replace("--lr 0.02", "--lr 0.03")  # another training
    code, said = alone(run, f"{other} --exit-interval 6")
    assert code == 75 and "at step 4" in said and storage.steps_in(run) == [4, 6], said
    how = "--save-interval 3 --log-interval 1 --eval-interval 5 --micro-batch-size 1 --recompute-granularity selective"
    code, said = alone(Path(f"{run}/"), f"{other} --wandb-exp-name second {how}")
    assert code == 0 and "at step 6" in said and "note: these checkpoints are from the same training" in said, said
    assert storage.steps_in(run) == [4, 6, 8] and "abandoned" not in said
    code, said = alone(run, "--lr 0.02 --train-iters 9 --keep-last 3 --override-opt-param-scheduler")
    assert code == 0 and "at step 8" in said and storage.steps_in(run) == [6, 8, 9]


def test_rollback_on_two_ranks_repeats_until_it_has_saved(run: Path) -> None:
    for fault, code, steps in (("step.begin:*:5:kill", 137, [4, 6, 7]), ("", 75, [4, 5]), ("", 0, [5, 6, 8])):
        end = drill(run.parent / "two", 2, flags_of(run, f"{BACK} --exit-interval 5"), fault)
        assert end.code == code and storage.steps_in(run) == steps, end
        assert f"at step {5 if code == 0 else 4}" in end.said[0]


def test_damaged_newest_checkpoint_of_the_same_command(run: Path) -> None:
    for _ in range(2):
        alone(run, f"{BACK} --exit-interval 5")
    assert storage.steps_in(run) == [5, 6, 8]
    for name in ("iter_0000008/manifest.json", "iter_0000006/rank-00000.safetensors"):
        (run / name).write_bytes(bytes((run / name).stat().st_size))
    code, said = alone(run, f"{BACK} --exit-interval 5")
    assert code == 0 and "at step 5" in said and "note: these checkpoints are from the same training" in said, said
    assert storage.steps_in(run) == [5, 6, 8]  # made again; the damaged ones are put aside
    assert len(list(run.glob("abandoned-*left-at-0000005"))) == 2


TUNE = "--lr 0.001 --train-iters 7 --finetune --exit-interval 3 --save-local {}"


def test_finetune_in_the_same_directory_resumes(run: Path) -> None:
    tune = TUNE.format(run.with_name("fast"))
    code, said = alone(run, tune)
    assert code == 75 and "starts from" in said and "only the weights are loaded" in said, said
    assert storage.steps_in(run) == [2, 3] and len(list(run.glob("abandoned-*left-at-0000000"))) == 3
    for step in (3, 6):
        code, said = alone(run, tune)
        assert f"at step {step}" in said and "only the weights" not in said, said
    assert code == 0 and storage.steps_in(run) == [2, 3, 4, 6, 7]
    code, said = alone(run, tune)
    assert code == 0 and "at step 7" in said and "saved iter_" not in said


def test_finetune_after_loss_of_the_local_disk_resumes(run: Path, monkeypatch) -> None:
    """What it began with has been left, and what it saved never got here."""
    tune = TUNE.format(run.with_name("fast"))
    monkeypatch.setattr(Uploader, "_upload_pending", lambda self: None)
    assert alone(run, tune)[0] == 75 and not storage.steps_in(run)
    shutil.rmtree(run.with_name("fast"))
    config = config_from(flags_of(run, tune))
    one = run_from(config)
    with pytest.raises(CheckpointError, match=r"holds only checkpoints .*abandoned-iter_0000007.*: rename the one"):
        load_initial_state(one, config)
    (run / "abandoned-iter_0000007-left-at-0000000").rename(run / "iter_0000007")
    loaded, _ = load_initial_state(one, config)
    assert loaded == run / "iter_0000007"
