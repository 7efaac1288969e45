"""The launcher restarts ranks that die, with the same results, and a run directory belongs to a single run."""

import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import programs
import pytest
from program_runs import load_json_lines, load_losses, load_status, rank_pids, read_until, run_pretrain, running_program
from test_run_dir import config_of, make_checkpoint
from train_cases import SMALL_RUN, config_from

from megalite.checkpoint.storage.location import CheckpointError
from megalite.common.exit_codes import ExitCode
from megalite.config.options import Config
from megalite.launch.local_launcher import LaunchResult, launch_local
from megalite.launch.rank_info import RankInfo
from megalite.training.job import restarts
from megalite.training.job.restarts import RestartPolicy, lock_run_dir

BASE = [*SMALL_RUN, "--device", "cpu", "--hidden-dropout", "0.1"]


@pytest.mark.timeout(500)
def test_restart_after_a_killed_rank_resumes_from_the_last_save(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    flags = f"--nproc 2 --train-iters 100000 --save-interval 50 --keep-last 2 --max-restarts 1 --run-dir {run_dir}"
    with running_program(*BASE, *flags.split(), "--save", tmp_path / "a", ready_text="step    51/") as process:
        before = (run_dir / "metrics.jsonl").read_bytes()
        second = run_pretrain(*BASE, "--run-dir", run_dir, "--save", tmp_path / "b", "--train-iters", "2")
        assert second.returncode == ExitCode.PREFLIGHT and not (tmp_path / "b").exists()
        in_use = rf"run_dir='{run_dir}' is in use by process {process.pid} on \S+ since 20\S+: stop that run, or give "
        assert re.search(rf"^pretrain_gpt.py: {in_use}another --run-dir\n\Z", second.stderr, re.M), second.stderr
        assert (run_dir / "metrics.jsonl").read_bytes().startswith(before)
        os.kill(rank_pids(run_dir)[2], signal.SIGKILL)
        read_until(process, "note: the run was restarted")
        read_until(process, "/100000  loss")
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=100)
    assert process.returncode == ExitCode.REQUEUE, err
    assert "rank 1 ended by signal SIGKILL: restarting all ranks (1 of 1 within an hour)" in err
    assert "Traceback" not in err
    status = load_status(run_dir)
    assert status["outcome"] == "requeue" and [*load_losses(run_dir)] == [*range(1, status["step"] + 1)]
    [event] = [row for row in load_json_lines(run_dir / "events.jsonl") if row["event"] == "restart"]
    assert event["cause"] == "rank 1 ended by signal SIGKILL" and event["code"] == 137
    logs = programs.run_python("tools/logs.py", str(run_dir)).stdout.splitlines()
    assert re.fullmatch(r"failure 1: \S+ \S+  rank 1 ended by signal SIGKILL", logs[0]), logs
    assert logs[1] == f"the end: requeue at step {status['step']}: SIGTERM"
    assert any("rank 0 | " in line and "lost another rank" in line for line in logs[2:])


@pytest.mark.parametrize("victim", [0, 1])
def test_crash_message_names_rank_place_and_resume_command(tmp_path: Path, victim: int) -> None:
    fault = {"MEGALITE_FAULT": f"step.after_forward_backward:{victim}:6:kill"}
    flags = ["--nproc", "2", "--pp", "2", "--train-iters", "9", "--save", tmp_path, "--save-interval", "3"]
    result = run_pretrain(*BASE, *flags, env={**os.environ, **fault})
    output, killed = f"{result.stdout}\n{result.stderr}", f"rank {victim} ended by signal SIGKILL"
    resume_command = f"the same command with --load {tmp_path}"
    assert result.returncode == 137, output
    assert "Traceback" not in output and "third_party" not in output and max(map(len, output.splitlines())) < 400, (
        output
    )
    if victim == 1:  # the other rank names the group and the call in which it lost the victim
        [lost_peer] = [line for line in result.stderr.splitlines() if "lost another rank" in line]
        place = r"rank 0 \(pp 0\), step 6: lost another rank \([\w ]+\): rank 1 of \w+ has ended \(process \d+\); "
        call = r"(message \d+ \(receive from rank 1\)|all-reduce \d+) over (pp|pp_grad|tied_embedding|world)"
        call_site = rf"in [\w-]+, \S+:\d+ \w+: {call}"
        assert re.fullmatch(place + call_site, lost_peer), lost_peer
        assert re.search(rf"^to resume +{resume_command}$", result.stdout, re.M), result.stdout
    else:
        message = f"{killed} at step 5; checkpoint: {tmp_path}/iter_0000003; to resume: {resume_command}"
        assert f"pretrain_gpt.py: {message}" in result.stderr
    assert load_status(tmp_path)["reason"].startswith(killed)
    logs = programs.run_python("tools/logs.py", str(tmp_path)).stdout.splitlines()
    assert re.fullmatch(rf"failure 1: \S+ \S+  {killed}", logs[0]), logs
    assert logs[1].startswith(f"the end: crash at step 5: {killed}"), logs
    assert not [line for line in logs if re.search(r"[{}\[\]]|\d{10}\.", line) or len(line) > 400], logs
    assert programs.run_python("tools/logs.py", str(tmp_path), "--short").stdout.splitlines()[0] == logs[0]


@pytest.mark.nightly
@pytest.mark.timeout(500)
def test_run_killed_at_any_fault_point_is_the_same_run(tmp_path: Path) -> None:
    """Start from another run's weights and kill rank 1, rank 0 and the fork server, one restart each."""
    other, straight, killed = (tmp_path / name for name in ("other", "straight", "killed"))
    assert run_pretrain(*BASE, "--train-iters", "3", "--save", other).returncode == 0
    argv = [*BASE, *f"--load {other} --finetune --nproc 2 --train-iters 24 --save-interval 5".split()]
    assert run_pretrain(*argv, "--save", straight).returncode == 0
    with running_program(*argv, "--save", killed, "--max-restarts", "3", ready_text="step     1/") as process:
        for number, step in enumerate((6, 12, 18)):
            read_until(process, f"step    {step:2d}/24")
            os.kill(rank_pids(killed)[2 - number], signal.SIGKILL)
        _, err = process.communicate(timeout=150)
    assert process.returncode == 0, err
    assert load_losses(killed) == load_losses(straight) and len(load_losses(killed)) == 24
    assert [row["count"] for row in load_json_lines(killed / "events.jsonl") if row["event"] == "restart"] == [1, 2, 3]


def _rank(ranks: RankInfo, config: Config) -> int:
    from train_cases import pretrain

    return int(pretrain(config, ranks))


def test_restarts_without_a_valid_checkpoint_end(tmp_path: Path) -> None:
    flags = f"--save {tmp_path} --load {tmp_path} --lr-decay-iters 2 --device cpu --max-restarts 3 --train-iters"
    two, four = (config_from([*SMALL_RUN, *flags.split(), *extra]) for extra in (["4", "--exit-interval", "2"], ["4"]))
    assert launch_local(1, _rank, (two,), timeout_s=100) == ExitCode.REQUEUE
    for file in (tmp_path / "iter_0000002").glob("*.safetensors"):
        file.write_bytes(file.read_bytes()[:-8] + b"\xff" * 8)
    for nproc in (1, 2):
        assert launch_local(nproc, _rank, (four,), timeout_s=100, on_exit=RestartPolicy(four)) == ExitCode.PREFLIGHT
        status = load_status(tmp_path)
        assert status["outcome"] == "preflight" and "no checkpoint in it is valid" in status["reason"]
    logs = [line for file in (tmp_path / "ranks").iterdir() for line in file.read_text().splitlines()]
    assert sum("no checkpoint in it is valid" in line for line in logs) == 2 and "Traceback" not in "".join(logs)
    assert not {"restart", "restarts-exhausted"} & {row["event"] for row in load_json_lines(tmp_path / "events.jsonl")}


def policy(save_dir: Path, max_restarts: int) -> RestartPolicy:
    return RestartPolicy(config_of("--save", save_dir, *f"--max-restarts {max_restarts} --nproc 2".split()))


KILLED = LaunchResult(137, "rank 1 ended by signal SIGKILL", ())


def test_restart_policy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(restarts.time, "time", lambda: now[0])
    make_checkpoint(tmp_path, 3)  # another run's checkpoint: nothing to resume from
    decide = policy(tmp_path, 2)
    assert decide(LaunchResult(137, "", [signal.SIGTERM])) is None  # it was asked to stop
    assert decide(KILLED) is False
    make_checkpoint(tmp_path, 5)
    assert decide(LaunchResult(70, "hangs", ())) is True and decide(KILLED) is None  # the third within an hour
    now[0] += 3601
    assert decide(KILLED) is True  # an hour later; the fruitless restart still counts
    events = load_json_lines(tmp_path / "events.jsonl")
    assert [row["event"] for row in events] == ["restart", "restart", "restarts-exhausted", "restart"]
    assert "as many as --max-restarts allows" in events[2]["reason"]
    assert policy(tmp_path, 0)(KILLED) is None
    assert all(policy(tmp_path, 9)(LaunchResult(code, "", ())) is None for code in (0, 2, 3, 16, 17, 75, 130))


def test_unreachable_store_does_not_start_from_scratch(tmp_path: Path, monkeypatch) -> None:
    decide = policy(tmp_path, 2)

    def raise_error(root: str) -> list[int]:
        raise OSError("no answer")

    monkeypatch.setattr(restarts, "steps_in", raise_error)
    assert decide(KILLED) is True


def test_restarts_without_progress_end(tmp_path: Path) -> None:
    decide = policy(tmp_path, 100)
    assert [decide(KILLED), decide(KILLED)] == [False, False]
    make_checkpoint(tmp_path, 5)
    assert [decide(KILLED) for _ in range(4)] == [True, True, True, None]
    assert "without a new checkpoint" in load_json_lines(tmp_path / "events.jsonl")[-1]["reason"]


def test_refused_restart_is_retried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Retry after a full disk or a lost mount, which only time repairs. A stop signal in between ends the retries."""
    clock, stop_signals = [1000.0], list[int]()
    monkeypatch.setattr(restarts.time, "time", lambda: clock[0])
    monkeypatch.setattr(restarts.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(restarts.time, "sleep", lambda seconds: clock.append(clock.pop() + seconds))
    refused = LaunchResult(ExitCode.PREFLIGHT, "rank 0: no room", stop_signals)
    decide, waits = policy(tmp_path, 9), list[float]()
    assert decide(refused) is None  # the first start: the same command would fail again
    assert decide(KILLED) is False
    for _ in range(8):
        start_s = clock[0]
        assert decide(refused) is False
        waits.append(clock[0] - start_s)
    assert waits == [15, 30, 60, 120, 240, 480, 900, 900]
    assert (
        decide(refused) is None
        and "9 restarts in a row were refused" in load_json_lines(tmp_path / "events.jsonl")[-1]["reason"]
    )
    clock[0] += 3600
    stop_signals.append(signal.SIGTERM)
    assert decide(refused) is None


def test_lock_of_a_dead_process_is_free(tmp_path: Path) -> None:
    config = config_of("--run-dir", tmp_path / "r")
    (tmp_path / "r").mkdir()
    (tmp_path / "r/.run.lock").write_text("process 1 on elsewhere since long ago\n")
    with lock_run_dir(config) as is_locked:
        assert is_locked
        with pytest.raises(CheckpointError, match=rf"process {os.getpid()} on .* since 20"), lock_run_dir(config):
            raise AssertionError
    with lock_run_dir(config) as is_relocked:
        assert is_relocked
    assert (tmp_path / "r").is_dir()


@pytest.mark.parametrize("outcome,subdir", [("usage", "ranks"), ("crash", "ranks"), ("usage", "x")])
def test_directory_of_a_refused_run_is_removed(tmp_path: Path, outcome: str, subdir: str) -> None:
    with lock_run_dir(config_of("--run-dir", tmp_path / "r")):
        (tmp_path / "r" / subdir).mkdir()
        (tmp_path / "r/status.json").write_text(json.dumps({"outcome": outcome}))
    assert (tmp_path / "r").exists() != ((outcome, subdir) == ("usage", "ranks"))


def test_unlockable_directory_does_not_end_training(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").touch()
    with lock_run_dir(config_of("--run-dir", tmp_path / "file/r")) as is_locked:
        assert not is_locked
    assert "file/r: Not a directory; nothing prevents a second run from writing there" in capsys.readouterr().err


@pytest.mark.parametrize("create", [Path.touch, lambda run: None], ids=["a file", "nothing"])
def test_lost_run_directory_does_not_fail_the_launcher(tmp_path: Path, create: Callable) -> None:
    with lock_run_dir(config_of("--run-dir", tmp_path / "run")):
        shutil.rmtree(tmp_path / "run")
        create(tmp_path / "run")
