"""Files of the run directory: replaced whole or not at all, and cut back to the step that a run resumes from."""

import datetime
import errno
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from program_runs import pretrain, status_of
from train_cases import SMALL, config_from

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
    return config_from([*SMALL, "--train-iters", "9", *map(str, flags)])


def complete(folder: Path, step: int) -> None:
    """A checkpoint, as far as its folder says."""
    (folder / f"iter_{step:07d}").mkdir(parents=True)
    (folder / f"iter_{step:07d}" / "COMPLETE").touch()


def rows_until(folder: Path, step: int) -> None:
    text = "".join(json.dumps({"step": n, "tokens": 8 * n}) + "\n" for n in range(1, step + 1))
    (folder / "metrics.jsonl").write_text(text + '{"step": 99, "tok')


def test_status_file(tmp_path: Path) -> None:
    run, save = tmp_path / "run", tmp_path / "save"
    run.mkdir()
    write_status(run, "running", config_of())
    assert (read_status(run)["checkpoint"], read_status(run)["checkpoint_step"]) == (None, None)
    config = config_of("--save", save)
    write_status(run, "running", config)
    assert read_status(run)["checkpoint"] is None  # nothing is saved there
    complete(save, 3)
    (save / "iter_0000005").mkdir()  # which is not complete
    write_status(run, "bad-result", config, 'loss "nan"', step=7, tokens=56)
    status = read_status(run)
    times = [datetime.datetime.fromisoformat(status.pop(name)) for name in ("started", "time")]
    assert times[0] <= times[1] and all(one.tzinfo is not None for one in times)
    told = {"outcome": "bad-result", "step": 7, "tokens": 56, "checkpoint": str(save), "checkpoint_step": 3}
    assert status == told | dict(reason='loss "nan"', rank=0, pid=os.getpid(), host=socket.gethostname())
    assert os.listdir(run) == ["status.json"] and (run / "status.json").read_text().startswith('{"outcome": "')


def test_launcher_finalizes_the_status(tmp_path: Path) -> None:
    config = config_of("--save", tmp_path / "save")

    def settled(outcome: str, reason: str, code: int, cause: str, since: float = 0.0) -> tuple[str, str]:
        write_status(tmp_path, outcome, config, reason, step=3)
        finalize_status(tmp_path, config, code, cause, since)
        status = read_status(tmp_path)
        assert status["step"] == 3 and status["pid"] == os.getpid()
        return status["outcome"], status["reason"]

    killed = "rank 1 ended by signal SIGKILL"
    assert settled("running", "", 137, killed) == ("crash", killed)
    assert settled("running", "", 130, "rank 0 ended with exit code 130")[0] == "interrupted"
    assert settled("crash", "lost another rank", 137, killed) == ("crash", f"{killed}; rank 0: lost another rank")
    said = "rank 2: DataError: x"  # which rank 0 may know already
    assert settled("crash", said, 3, said) == ("preflight", said)
    assert settled("crash", "lost another rank", 17, said) == ("bad-result", f"{said}; rank 0: lost another rank")
    of_rank_0 = "rank 0 ended with exit code 1"
    assert settled("crash", "ValueError: x", 1, of_rank_0) == ("crash", "ValueError: x")  # which knew best
    early = f"{of_rank_0}, after rank 1 had ended with exit code 0"  # and could not know
    assert settled("crash", "lost another rank", 1, early) == ("crash", f"{early}; rank 0: lost another rank")
    assert settled("requeue", "SIGTERM", 75, "rank 1 ended with exit code 75") == ("requeue", "SIGTERM")
    assert settled("running", "", 137, killed, time.time() + 60) == ("running", "")  # of another run
    rows_until(tmp_path, 8)
    complete(tmp_path / "save", 6)
    write_status(tmp_path, "running", config, step=1)
    finalize_status(tmp_path, config, 137, killed, 0.0)
    status = read_status(tmp_path)
    assert (status["step"], status["tokens"], status["checkpoint_step"]) == (8, 64, 6)
    for text in ("{", "[1]", ""):  # of a rank 0 that could not write
        (tmp_path / "status.json").write_text(text)
        finalize_status(tmp_path, config, 137, killed, 0.0)
        status = read_status(tmp_path)
        assert (status["outcome"], status["step"], status["reason"]) == ("crash", 8, killed)
    finalize_status(tmp_path / "none", config, 1, killed, 0.0)
    assert not (tmp_path / "none").exists()


def test_refused_run_keeps_another_runs_status(tmp_path: Path) -> None:
    """Another process leaves it, as another run does; that which it continues is its own, unless it is done."""
    rows_until(tmp_path, 5)
    own, other = config_of("--save", tmp_path, "--load", tmp_path), config_of("--run-dir", tmp_path)
    for config, outcome, stays in ((other, "done", True), (own, "crash", False), (own, "done", True)):
        before = json.dumps({"outcome": outcome, "step": 5, "pid": 1})
        (tmp_path / "status.json").write_text(before)
        os.utime(tmp_path / "status.json", (1, 1))
        write_status(tmp_path, "usage", config, "no")
        assert ((tmp_path / "status.json").read_text() == before) == stays
        assert read_status(tmp_path)["step"] == 5
        (tmp_path / "status.json").write_text(before)
        os.utime(tmp_path / "status.json", (1, 1))
        finalize_status(tmp_path, config, 137, "rank 0 ended by signal SIGKILL", 2.0)  # before it said a word
        assert ((tmp_path / "status.json").read_text() == before) == (config is other)
    (tmp_path / "status.json").write_text(before)
    write_status(tmp_path, "running", other)
    write_status(tmp_path, "crash", other, "but once it runs the folder is its own", step=2)
    assert (read_status(tmp_path)["outcome"], read_status(tmp_path)["step"]) == ("crash", 2)


def test_refused_restart_is_not_a_crash(tmp_path: Path) -> None:
    """Nothing was saved yet, so its rank 0 takes what is there for another run's; the launcher knows better."""
    config, refused = config_of("--save", tmp_path), (int(ExitCode.PREFLIGHT), "rank 0: no room")
    write_status(tmp_path, "running", config)
    write_status(tmp_path, "crash", config, "rank 1 was killed", step=2)
    os.utime(tmp_path / "status.json", (1, 1))
    rows_until(tmp_path, 2)
    finalize_status(tmp_path, config, *refused, 2.0)  # of a first start
    assert read_status(tmp_path)["outcome"] == "crash"
    finalize_status(tmp_path, config, *refused, 2.0, resumes=True)
    told = [read_status(tmp_path)[name] for name in ("outcome", "step", "reason")]
    assert told == ["preflight", 2, "rank 0: no room"]


def test_early_end_reports_the_existing_steps(tmp_path: Path) -> None:
    """It has begun, as it continues what is there, and its own step is still 0."""
    own = config_of("--save", tmp_path, "--load", tmp_path)
    rows_until(tmp_path, 5)
    write_status(tmp_path, "running", own)
    write_status(tmp_path, "preflight", own, "no checkpoint is valid")
    status = read_status(tmp_path)
    assert (status["outcome"], status["step"], status["tokens"]) == ("preflight", 5, 40)


def test_status_is_replaced_on_a_full_disk(tmp_path: Path, capsys) -> None:
    """As on a full disk: no new file can be made beside it."""
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
    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr("megalite.training.logging.status.write_atomically", full)
    write_status(tmp_path, "crash", config_of(), "why")
    error = capsys.readouterr().err
    assert "No space left on device" in error and "No such file" not in error
    assert not (tmp_path / "status.json").exists()


def test_status_running_needs_a_live_process(tmp_path: Path) -> None:
    """The lock says it; without one the process, on its own machine."""
    config = config_of("--run-dir", tmp_path)
    with lock_run_dir(config):
        write_status(tmp_path, "running", config)
        dead = read_status(tmp_path) | {"pid": 2**22 + 1}  # a rank that is started again
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

    def broken() -> Iterator[str]:
        yield "new\n" * 10_000
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"):
        write_atomically(path, broken())
    assert path.read_text() == "old\n" and os.listdir(tmp_path) == ["metrics.jsonl"]


def test_resume_drops_later_and_torn_rows(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    good = ['{"step": 1, "train/loss": 5.0}', '{"step": 2, "note": "\u2028 ü"}', '{"step": 2, "val/valid/loss": 4.0}']
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


REFUSED = {  # words that a start of a finished run is refused for, and its exit code
    "data that is not there": ("--data-path none --split 1,0,0", 3),
    "another model": ("--mock-data --hidden-size 64", 2),
    "a checkpoint of other moments": ("--mock-data --optimizer sgd", 2),
}


@pytest.mark.parametrize("nproc", ["1", "2"])
def test_refused_start_keeps_the_status_of_a_finished_run(tmp_path: Path, nproc: str) -> None:
    words = [word for word in SMALL if word != "--mock-data"]
    words += f"--device cpu --nproc {nproc} --train-iters 2 --save {tmp_path} --load {tmp_path}".split()
    assert pretrain(*words, "--mock-data").returncode == 0
    done = (tmp_path / "status.json").read_bytes()
    assert status_of(tmp_path)["outcome"] == "done"
    for what, (more, code) in REFUSED.items():
        refused = pretrain(*words, *more.split(), "--train-iters", "4")
        assert refused.returncode == code, f"{what}: {refused.stderr}"
        assert (tmp_path / "status.json").read_bytes() == done, what


def test_dry_run_refuses_an_unwritable_save(tmp_path: Path) -> None:
    words = [*SMALL, "--device", "cpu", "--train-iters", "2", "--dry-run"]
    for option in ("--save", "--save-local"):
        kept = ["--save", tmp_path / "kept"] if option == "--save-local" else []
        refused = pretrain(*words, *kept, option, "/dev/null/mine")
        assert refused.returncode == 3 and "Traceback" not in refused.stderr
        assert "save='/dev/null/mine' cannot be written (Not a directory): give --save a" in refused.stderr
    elsewhere = pretrain(*words, "--save", "/dev/null/mine", "--dry-run-rank", "0")
    assert elsewhere.returncode == 0 and "WARNING: on this machine save='/dev/null/mine' cannot" in elsewhere.stderr
    assert pretrain(*words, "--save", tmp_path / "new/mine").returncode == 0 and not [*tmp_path.iterdir()]
