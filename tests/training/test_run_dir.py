"""Files of the run directory are replaced atomically, and truncated to the step from which a run resumes."""

import datetime
import errno
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from program_runs import load_status, run_pretrain
from train_cases import SMALL_RUN, config_from

from megalite.common.exit_codes import ExitCode
from megalite.common.safe_open import write_atomically
from megalite.config.options import Config
from megalite.training.job.restarts import lock_run_dir
from megalite.training.logging.event_log import AppendOnlyFile, truncate_metrics_after
from megalite.training.logging.status import current_outcome, finalize_status, read_status, write_status


def test_exit_codes_and_outcomes_equal_the_documents() -> None:
    documented = {"done": 0, "crash": 1, "usage": 2, "preflight": 3, "bad-result": 17, "requeue": 75}
    documented |= {"rerun": 16, "hang": 70, "interrupted": 130}
    assert {e.outcome: int(e) for e in ExitCode} == documented


def config_of(*flags: str | Path) -> Config:
    return config_from([*SMALL_RUN, "--train-iters", "9", *map(str, flags)])


def make_checkpoint(save_dir: Path, step: int) -> None:
    """Create the directory of a complete checkpoint, without its files."""
    (save_dir / f"iter_{step:07d}").mkdir(parents=True)
    (save_dir / f"iter_{step:07d}" / "COMPLETE").touch()


def write_rows_until(run_dir: Path, step: int) -> None:
    text = "".join(json.dumps({"step": n, "tokens": 8 * n}) + "\n" for n in range(1, step + 1))
    (run_dir / "metrics.jsonl").write_text(text + '{"step": 99, "tok')


def test_status_file(tmp_path: Path) -> None:
    run_dir, save_dir = tmp_path / "run", tmp_path / "save"
    run_dir.mkdir()
    write_status(run_dir, "running", config_of())
    assert (read_status(run_dir)["checkpoint"], read_status(run_dir)["checkpoint_step"]) == (None, None)
    config = config_of("--save", save_dir)
    write_status(run_dir, "running", config)
    assert read_status(run_dir)["checkpoint"] is None  # nothing is saved there
    make_checkpoint(save_dir, 3)
    (save_dir / "iter_0000005").mkdir()  # incomplete
    write_status(run_dir, "bad-result", config, 'loss "nan"', step=7, tokens=56)
    status = read_status(run_dir)
    times = [datetime.datetime.fromisoformat(status.pop(name)) for name in ("started", "time")]
    assert times[0] <= times[1] and all(timestamp.tzinfo is not None for timestamp in times)
    expected = {"outcome": "bad-result", "step": 7, "tokens": 56, "checkpoint": str(save_dir), "checkpoint_step": 3}
    assert status == expected | dict(reason='loss "nan"', rank=0, pid=os.getpid(), host=socket.gethostname())
    assert os.listdir(run_dir) == ["status.json"] and (run_dir / "status.json").read_text().startswith('{"outcome": "')


def test_launcher_finalizes_the_status(tmp_path: Path) -> None:
    config = config_of("--save", tmp_path / "save")

    def finalized(outcome: str, reason: str, code: int, cause: str, since: float = 0.0) -> tuple[str, str]:
        write_status(tmp_path, outcome, config, reason, step=3)
        finalize_status(tmp_path, config, code, cause, since)
        status = read_status(tmp_path)
        assert status["step"] == 3 and status["pid"] == os.getpid()
        return status["outcome"], status["reason"]

    killed = "rank 1 ended by signal SIGKILL"
    assert finalized("running", "", 137, killed) == ("crash", killed)
    assert finalized("running", "", 130, "rank 0 ended with exit code 130")[0] == "interrupted"
    assert finalized("crash", "lost another rank", 137, killed) == ("crash", f"{killed}; rank 0: lost another rank")
    rank_2 = "rank 2: DataError: x"  # rank 0 may know the cause already
    assert finalized("crash", rank_2, 3, rank_2) == ("preflight", rank_2)
    assert finalized("crash", "lost another rank", 17, rank_2) == ("bad-result", f"{rank_2}; rank 0: lost another rank")
    rank_0 = "rank 0 ended with exit code 1"
    # rank 0 knew the reason
    assert finalized("crash", "ValueError: x", 1, rank_0) == ("crash", "ValueError: x")
    early = f"{rank_0}, after rank 1 had ended with exit code 0"  # rank 0 did not know the reason
    assert finalized("crash", "lost another rank", 1, early) == ("crash", f"{early}; rank 0: lost another rank")
    assert finalized("requeue", "SIGTERM", 75, "rank 1 ended with exit code 75") == ("requeue", "SIGTERM")
    assert finalized("running", "", 137, killed, time.time() + 60) == ("running", "")  # another run's status
    write_rows_until(tmp_path, 8)
    make_checkpoint(tmp_path / "save", 6)
    write_status(tmp_path, "running", config, step=1)
    finalize_status(tmp_path, config, 137, killed, 0.0)
    status = read_status(tmp_path)
    assert (status["step"], status["tokens"], status["checkpoint_step"]) == (8, 64, 6)
    for text in ("{", "[1]", ""):  # rank 0 could not write
        (tmp_path / "status.json").write_text(text)
        finalize_status(tmp_path, config, 137, killed, 0.0)
        status = read_status(tmp_path)
        assert (status["outcome"], status["step"], status["reason"]) == ("crash", 8, killed)
    finalize_status(tmp_path / "none", config, 1, killed, 0.0)
    assert not (tmp_path / "none").exists()


def test_refused_run_keeps_another_runs_status(tmp_path: Path) -> None:
    """Keep the status of another run, and of a finished one; a run may replace the status of the run that it resumes."""
    write_rows_until(tmp_path, 5)
    own_config, other_config = config_of("--save", tmp_path, "--load", tmp_path), config_of("--run-dir", tmp_path)
    cases = (other_config, "done", True), (own_config, "crash", False), (own_config, "done", True)
    for config, outcome, is_kept in cases:
        before = json.dumps({"outcome": outcome, "step": 5, "pid": 1})
        (tmp_path / "status.json").write_text(before)
        os.utime(tmp_path / "status.json", (1, 1))
        write_status(tmp_path, "usage", config, "no")
        assert ((tmp_path / "status.json").read_text() == before) == is_kept
        assert read_status(tmp_path)["step"] == 5
        (tmp_path / "status.json").write_text(before)
        os.utime(tmp_path / "status.json", (1, 1))
        finalize_status(tmp_path, config, 137, "rank 0 ended by signal SIGKILL", 2.0)  # before it wrote anything
        assert ((tmp_path / "status.json").read_text() == before) == (config is other_config)
    (tmp_path / "status.json").write_text(before)
    write_status(tmp_path, "running", other_config)
    write_status(tmp_path, "crash", other_config, "the directory belongs to a run that has started", step=2)
    assert (read_status(tmp_path)["outcome"], read_status(tmp_path)["step"]) == ("crash", 2)


def test_refused_restart_is_not_a_crash(tmp_path: Path) -> None:
    """Finalize a status that rank 0 takes for another run's, as nothing was saved yet; the launcher knows it is not."""
    config, refused = config_of("--save", tmp_path), (int(ExitCode.PREFLIGHT), "rank 0: no room")
    write_status(tmp_path, "running", config)
    write_status(tmp_path, "crash", config, "rank 1 was killed", step=2)
    os.utime(tmp_path / "status.json", (1, 1))
    write_rows_until(tmp_path, 2)
    finalize_status(tmp_path, config, *refused, 2.0)  # a first start
    assert read_status(tmp_path)["outcome"] == "crash"
    finalize_status(tmp_path, config, *refused, 2.0, resumes=True)
    actual = [read_status(tmp_path)[name] for name in ("outcome", "step", "reason")]
    assert actual == ["preflight", 2, "rank 0: no room"]


def test_early_end_reports_the_existing_steps(tmp_path: Path) -> None:
    """Report the steps of the run that is resumed, as the new process has not trained yet."""
    config = config_of("--save", tmp_path, "--load", tmp_path)
    write_rows_until(tmp_path, 5)
    write_status(tmp_path, "running", config)
    write_status(tmp_path, "preflight", config, "no checkpoint is valid")
    status = read_status(tmp_path)
    assert (status["outcome"], status["step"], status["tokens"]) == ("preflight", 5, 40)


def test_status_is_replaced_on_a_full_disk(tmp_path: Path, capsys) -> None:
    """Write the status when no new file can be created next to it, as on a full disk."""
    write_status(tmp_path, "running", config_of(), step=1)
    (tmp_path / f".status.json.{os.getpid()}").mkdir()
    write_status(tmp_path, "crash", config_of(), "ü" * 5000, step=7)
    status = read_status(tmp_path)
    assert (status["outcome"], status["step"]) == ("crash", 7) and status["reason"].endswith("ü...")
    assert (tmp_path / "status.json").stat().st_size <= 1024 and capsys.readouterr().err == ""
    write_status(tmp_path, "done", config_of(), "", step=9)  # shorter than what was there
    assert read_status(tmp_path)["outcome"] == "done"
    (tmp_path / "other").write_text("keep")
    (tmp_path / "status.json").unlink()
    (tmp_path / "status.json").symlink_to(tmp_path / "other")
    write_status(tmp_path, "running", config_of())
    write_status(tmp_path, "done", config_of("--load", "a", "--save", "a"), "")
    assert (tmp_path / "other").read_text() == "keep"
    assert f"{tmp_path / 'status.json'}: " in capsys.readouterr().err


def test_missing_status_on_a_full_disk_names_the_full_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def raise_disk_full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("megalite.training.logging.status.write_atomically", raise_disk_full)
    write_status(tmp_path, "crash", config_of(), "why")
    error = capsys.readouterr().err
    assert "No space left on device" in error and "No such file" not in error
    assert not (tmp_path / "status.json").exists()


def test_status_running_needs_a_live_process(tmp_path: Path) -> None:
    """Decide by the lock, or without one by the process if it was on this machine."""
    config = config_of("--run-dir", tmp_path)
    with lock_run_dir(config):
        write_status(tmp_path, "running", config)
        dead = read_status(tmp_path) | {"pid": 2**22 + 1}  # a rank that is being restarted
        assert current_outcome(tmp_path, read_status(tmp_path)) == current_outcome(tmp_path, dead) == "running"
    assert current_outcome(tmp_path, read_status(tmp_path)) == "killed"
    assert current_outcome(tmp_path, dead | {"host": "elsewhere"}) == "killed"
    assert current_outcome(tmp_path, dead | {"outcome": "done"}) == "done"
    (tmp_path / ".run.lock").unlink()
    assert current_outcome(tmp_path, read_status(tmp_path)) == "running" and current_outcome(tmp_path, dead) == "killed"
    assert current_outcome(tmp_path, dead | {"host": "elsewhere"}) == "running"


def test_lines_continue_after_the_file_was_deleted(tmp_path: Path) -> None:
    file = AppendOnlyFile(tmp_path / "run" / "metrics.jsonl")
    file.write("1")
    file.path.unlink()
    file.path.parent.rmdir()
    file.write("2")
    file.close()
    assert file.path.read_text() == "2\n"


def test_failed_write_keeps_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text("old\n")

    def failing_lines() -> Iterator[str]:
        yield "new\n" * 10_000
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"):
        write_atomically(path, failing_lines())
    assert path.read_text() == "old\n" and os.listdir(tmp_path) == ["metrics.jsonl"]


def test_resume_drops_later_and_torn_rows(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    good = ['{"step": 1, "train/loss": 5.0}', '{"step": 2, "note": "\u2028 ü"}', '{"step": 2, "val/valid/loss": 4.0}']
    good.append('{"step": 2, "eval/hellaswag/acc": 0.5}')
    bad = ['{"step": 3}', "", "3", '{"tokens": 5}', '{"step": "2"}', '{"step": 1, "train/lo']
    torn = b'{"step": 2, "note": "\xff\x00'
    path.write_bytes("\n".join([good[0], bad[0], *good[1:], *bad[1:]]).encode() + b"\n" + torn)
    truncate_metrics_after(path, 2)
    assert path.read_text(encoding="utf-8").split("\n") == [*good, ""]
    truncate_metrics_after(path, 2, validated=False)  # the resumed run validates at this step (again)
    assert path.read_text(encoding="utf-8").split("\n") == [*good[:2], ""]
    truncate_metrics_after(path, 0)
    assert path.read_text() == ""
    truncate_metrics_after(tmp_path / "none.jsonl", 2)
    assert os.listdir(tmp_path) == ["metrics.jsonl"]


REFUSED = {  # flags for which a start of a finished run is refused, and the exit code
    "data that is not there": ("--data-path none --split 1,0,0", 3),
    "another model": ("--mock-data --hidden-size 64", 2),
    "a checkpoint of other moments": ("--mock-data --optimizer sgd", 2),
}


@pytest.mark.parametrize("nproc", ["1", "2"])
def test_refused_start_keeps_the_status_of_a_finished_run(tmp_path: Path, nproc: str) -> None:
    argv = [flag for flag in SMALL_RUN if flag != "--mock-data"]
    argv += f"--device cpu --nproc {nproc} --train-iters 2 --save {tmp_path} --load {tmp_path}".split()
    assert run_pretrain(*argv, "--mock-data").returncode == 0
    finished_status = (tmp_path / "status.json").read_bytes()
    assert load_status(tmp_path)["outcome"] == "done"
    for case, (extra_flags, code) in REFUSED.items():
        refused = run_pretrain(*argv, *extra_flags.split(), "--train-iters", "4")
        assert refused.returncode == code, f"{case}: {refused.stderr}"
        assert (tmp_path / "status.json").read_bytes() == finished_status, case


def test_dry_run_refuses_an_unwritable_save(tmp_path: Path) -> None:
    argv = [*SMALL_RUN, "--device", "cpu", "--train-iters", "2", "--dry-run"]
    for option in ("--save", "--save-local"):
        save_flags = ["--save", tmp_path / "kept"] if option == "--save-local" else []
        refused = run_pretrain(*argv, *save_flags, option, "/dev/null/mine")
        assert refused.returncode == 3 and "Traceback" not in refused.stderr
        assert "save='/dev/null/mine' cannot be written (Not a directory): give --save a" in refused.stderr
    remote = run_pretrain(*argv, "--save", "/dev/null/mine", "--dry-run-rank", "0")
    assert remote.returncode == 0 and "WARNING: on this machine save='/dev/null/mine' cannot" in remote.stderr
    assert run_pretrain(*argv, "--save", tmp_path / "new/mine").returncode == 0 and not [*tmp_path.iterdir()]
