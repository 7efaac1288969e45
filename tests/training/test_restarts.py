"""Ranks that die are started again by their launcher, and the run is the same run; one run per run directory."""

import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import programs
import pytest
from program_runs import losses, pretrain, rank_pids, rows, running, shown, status_of
from test_run_dir import complete, config_of
from train_cases import SMALL, config_from

from megalite.checkpoint.storage.location import CheckpointError
from megalite.common.exit_codes import ExitCode
from megalite.config.options import Config
from megalite.launch.local_launcher import LaunchResult, launch_local
from megalite.launch.rank_info import RankInfo
from megalite.training.job import restarts
from megalite.training.job.restarts import RestartPolicy, lock_run_dir

BASE = [*SMALL, "--device", "cpu", "--hidden-dropout", "0.1"]


@pytest.mark.timeout(500)
def test_restart_after_a_killed_rank_resumes_from_the_last_save(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    flags = f"--nproc 2 --train-iters 100000 --save-interval 50 --keep-last 2 --max-restarts 1 --run-dir {folder}"
    with running(*BASE, *flags.split(), "--save", tmp_path / "a", until="step    51/") as process:
        before = (folder / "metrics.jsonl").read_bytes()
        second = pretrain(*BASE, "--run-dir", folder, "--save", tmp_path / "b", "--train-iters", "2")
        assert second.returncode == ExitCode.PREFLIGHT and not (tmp_path / "b").exists()
        who = rf"run_dir='{folder}' is in use by process {process.pid} on \S+ since 20\S+: stop that run, or give "
        assert re.search(rf"^pretrain_gpt.py: {who}another --run-dir\n\Z", second.stderr, re.M), second.stderr
        assert (folder / "metrics.jsonl").read_bytes().startswith(before)
        os.kill(rank_pids(folder)[2], signal.SIGKILL)
        shown(process, "note: the run was restarted")
        shown(process, "/100000  loss")
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=100)
    assert process.returncode == ExitCode.REQUEUE, err
    assert "rank 1 ended by signal SIGKILL: restarting all ranks (1 of 1 within an hour)" in err
    assert "Traceback" not in err
    status = status_of(folder)
    assert status["outcome"] == "requeue" and [*losses(folder)] == [*range(1, status["step"] + 1)]
    [event] = [row for row in rows(folder / "events.jsonl") if row["event"] == "restart"]
    assert event["cause"] == "rank 1 ended by signal SIGKILL" and event["code"] == 137
    logs = programs.python("tools/logs.py", str(folder)).stdout.splitlines()
    assert re.fullmatch(r"failure 1: \S+ \S+  rank 1 ended by signal SIGKILL", logs[0]), logs
    assert logs[1] == f"the end: requeue at step {status['step']}: SIGTERM"
    assert any("rank 0 | " in line and "lost another rank" in line for line in logs[2:])


@pytest.mark.parametrize("victim", [0, 1])
def test_crash_message_names_rank_place_and_resume_command(tmp_path: Path, victim: int) -> None:
    fault = {"MEGALITE_FAULT": f"step.after_forward_backward:{victim}:6:kill"}
    flags = ["--nproc", "2", "--pp", "2", "--train-iters", "9", "--save", tmp_path, "--save-interval", "3"]
    done = pretrain(*BASE, *flags, env={**os.environ, **fault})
    said, killed = f"{done.stdout}\n{done.stderr}", f"rank {victim} ended by signal SIGKILL"
    again = f"the same command with --load {tmp_path}"
    assert done.returncode == 137, said
    assert "Traceback" not in said and "third_party" not in said and max(map(len, said.splitlines())) < 400, said
    if victim == 1:  # the other one misses it, and says of which group, and in what
        [lost] = [line for line in done.stderr.splitlines() if "lost another rank" in line]
        who = r"rank 0 \(pp 0\), step 6: lost another rank \([\w ]+\): rank 1 of \w+ has ended \(process \d+\); "
        call = r"(message \d+ \(receive from rank 1\)|all-reduce \d+) over (pp|pp_grad|tied_embedding|world)"
        where = rf"in [\w-]+, \S+:\d+ \w+: {call}"
        assert re.fullmatch(who + where, lost), lost
        assert re.search(rf"^to resume +{again}$", done.stdout, re.M), done.stdout
    else:
        told = f"{killed} at step 5; checkpoint: {tmp_path}/iter_0000003; to resume: {again}"
        assert f"pretrain_gpt.py: {told}" in done.stderr
    assert status_of(tmp_path)["reason"].startswith(killed)
    logs = programs.python("tools/logs.py", str(tmp_path)).stdout.splitlines()
    assert re.fullmatch(rf"failure 1: \S+ \S+  {killed}", logs[0]), logs
    assert logs[1].startswith(f"the end: crash at step 5: {killed}"), logs
    assert not [line for line in logs if re.search(r"[{}\[\]]|\d{10}\.", line) or len(line) > 400], logs
    assert programs.python("tools/logs.py", str(tmp_path), "--short").stdout.splitlines()[0] == logs[0]


@pytest.mark.nightly
@pytest.mark.timeout(500)
def test_run_killed_at_any_fault_point_is_the_same_run(tmp_path: Path) -> None:
    """It begins with another run's weights; rank 1, rank 0 and the fork server die. Then nothing is left to restart."""
    other, straight, killed = (tmp_path / name for name in ("other", "straight", "killed"))
    assert pretrain(*BASE, "--train-iters", "3", "--save", other).returncode == 0
    begin = [*BASE, *f"--load {other} --finetune --nproc 2 --train-iters 24 --save-interval 5".split()]
    assert pretrain(*begin, "--save", straight).returncode == 0
    with running(*begin, "--save", killed, "--max-restarts", "3", until="step     1/") as process:
        for which, step in enumerate((6, 12, 18)):
            shown(process, f"step    {step:2d}/24")
            os.kill(rank_pids(killed)[2 - which], signal.SIGKILL)
        _, err = process.communicate(timeout=150)
    assert process.returncode == 0, err
    assert losses(killed) == losses(straight) and len(losses(killed)) == 24
    assert [row["count"] for row in rows(killed / "events.jsonl") if row["event"] == "restart"] == [1, 2, 3]


def _rank(ranks: RankInfo, config: Config) -> int:
    from train_cases import pretrain

    return int(pretrain(config, ranks))


def test_restarts_without_a_valid_checkpoint_end(tmp_path: Path) -> None:
    words = f"--save {tmp_path} --load {tmp_path} --lr-decay-iters 2 --device cpu --max-restarts 3 --train-iters"
    two, four = (config_from([*SMALL, *words.split(), *more]) for more in (["4", "--exit-interval", "2"], ["4"]))
    assert launch_local(1, _rank, (two,), timeout_s=100) == ExitCode.REQUEUE
    for file in (tmp_path / "iter_0000002").glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-8] + b"\xff" * 8)
    for nproc in (1, 2):
        assert launch_local(nproc, _rank, (four,), timeout_s=100, on_exit=RestartPolicy(four)) == ExitCode.PREFLIGHT
        status = status_of(tmp_path)
        assert status["outcome"] == "preflight" and "no checkpoint in it is valid" in status["reason"]
    said = [line for file in (tmp_path / "ranks").iterdir() for line in file.read_text().splitlines()]
    assert sum("no checkpoint in it is valid" in line for line in said) == 2 and "Traceback" not in "".join(said)
    assert not {"restart", "restarts-exhausted"} & {row["event"] for row in rows(tmp_path / "events.jsonl")}


def policy(folder: Path, most: int) -> RestartPolicy:
    return RestartPolicy(config_of("--save", folder, *f"--max-restarts {most} --nproc 2".split()))


KILLED = LaunchResult(137, "rank 1 ended by signal SIGKILL", ())


def test_restart_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(restarts.time, "time", lambda: now[0])
    complete(tmp_path, 3)  # of another run: nothing to continue from
    ask = policy(tmp_path, 2)
    assert ask(LaunchResult(137, "", [signal.SIGTERM])) is None  # it was told to stop
    assert ask(KILLED) is False
    complete(tmp_path, 5)
    assert ask(LaunchResult(70, "hangs", ())) is True and ask(KILLED) is None  # the third within an hour
    now[0] += 3601
    assert ask(KILLED) is True  # an hour later, with the fruitless one counted
    events = rows(tmp_path / "events.jsonl")
    assert [row["event"] for row in events] == ["restart", "restart", "restarts-exhausted", "restart"]
    assert "as many as --max-restarts allows" in events[2]["reason"]
    assert policy(tmp_path, 0)(KILLED) is None
    assert all(policy(tmp_path, 9)(LaunchResult(code, "", ())) is None for code in (0, 2, 3, 16, 17, 75, 130))


def test_unreachable_store_does_not_start_from_scratch(tmp_path: Path, monkeypatch) -> None:
    ask = policy(tmp_path, 2)

    def broken(root: str) -> list[int]:
        raise OSError("no answer")

    monkeypatch.setattr(restarts, "steps_in", broken)
    assert ask(KILLED) is True


def test_restarts_without_progress_end(tmp_path: Path) -> None:
    ask = policy(tmp_path, 100)
    assert [ask(KILLED), ask(KILLED)] == [False, False]
    complete(tmp_path, 5)
    assert [ask(KILLED) for _ in range(4)] == [True, True, True, None]
    assert "without a new checkpoint" in rows(tmp_path / "events.jsonl")[-1]["reason"]


def test_refused_restart_is_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk, or a mount that is gone: nothing but time mends it. Who is asked to stop meanwhile stops."""
    clock, asked = [1000.0], list[int]()
    monkeypatch.setattr(restarts.time, "time", lambda: clock[0])
    monkeypatch.setattr(restarts.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(restarts.time, "sleep", lambda seconds: clock.append(clock.pop() + seconds))
    full = LaunchResult(ExitCode.PREFLIGHT, "rank 0: no room", asked)
    ask, waits = policy(tmp_path, 9), list[float]()
    assert ask(full) is None  # of the first start: the same command would end the same way
    assert ask(KILLED) is False
    for _ in range(8):
        begin = clock[0]
        assert ask(full) is False
        waits.append(clock[0] - begin)
    assert waits == [15, 30, 60, 120, 240, 480, 900, 900]
    assert ask(full) is None and "9 restarts in a row were refused" in rows(tmp_path / "events.jsonl")[-1]["reason"]
    clock[0] += 3600
    asked.append(signal.SIGTERM)
    assert ask(full) is None


def test_lock_of_a_dead_process_is_free(tmp_path: Path) -> None:
    config = config_of("--run-dir", tmp_path / "r")
    (tmp_path / "r").mkdir()
    (tmp_path / "r/.run.lock").write_text("process 1 on elsewhere since long ago\n")
    with lock_run_dir(config) as held:
        assert held
        with pytest.raises(CheckpointError, match=rf"process {os.getpid()} on .* since 20"), lock_run_dir(config):
            raise AssertionError
    with lock_run_dir(config) as again:
        assert again
    assert (tmp_path / "r").is_dir()


@pytest.mark.parametrize("outcome,more", [("usage", "ranks"), ("crash", "ranks"), ("usage", "x")])
def test_directory_of_a_refused_run_is_removed(tmp_path: Path, outcome: str, more: str) -> None:
    with lock_run_dir(config_of("--run-dir", tmp_path / "r")):
        (tmp_path / "r" / more).mkdir()
        (tmp_path / "r/status.json").write_text(json.dumps({"outcome": outcome}))
    assert (tmp_path / "r").exists() != ((outcome, more) == ("usage", "ranks"))


def test_unlockable_directory_does_not_end_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    with lock_run_dir(config_of("--run-dir", tmp_path / "file/r")) as held:
        assert not held
    assert "file/r: Not a directory; nothing prevents a second run from writing there" in capsys.readouterr().err


@pytest.mark.parametrize("then", [Path.touch, lambda run: None], ids=["a file", "nothing"])
def test_lost_run_directory_does_not_fail_the_launcher(tmp_path: Path, then: Callable) -> None:
    with lock_run_dir(config_of("--run-dir", tmp_path / "run")):
        shutil.rmtree(tmp_path / "run")
        then(tmp_path / "run")
