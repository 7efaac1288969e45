"""Ranks that hang, or do something else than the others, are named with the cause in the run's own messages."""

import datetime
import json
import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import programs
import pytest
import toml_tables
import torch
from pairwise import nightly_except
from program_runs import ROOT, load_json_lines, load_status, running_program
from ranks import run_ranks
from train_cases import SMALL_RUN, config_from, run_from

from megalite.common.exit_codes import ExitCode
from megalite.parallel import comm
from megalite.parallel.cpu.shared_memory import CollectiveMismatchError
from megalite.parallel.mesh import ABSTRACT, RECEIVE, SEND, Mesh, build_mesh
from megalite.training.job.startup import long_evaluation_note
from megalite.training.logging.timers import Timers
from megalite.training.monitoring import watchdog as hang
from megalite.training.monitoring.hang_diagnosis import AxisCalls, CallRecord, RankState, Wait, diagnose
from megalite.training.monitoring.watchdog import Activity, Heartbeat, Watchdog
from megalite.training.train_step import train_step

CPU = torch.device("cpu")

# ---- the diagnosis alone
GATHER, SUM = CallRecord("all-gather", -1, 12, 4096), CallRecord("all-reduce", -1, 7, 40)


def view(
    rank: int, places: str = "", call: CallRecord | None = None, dp: CallRecord = GATHER, phase: str = "", step: int = 5
) -> RankState:
    axes = {"dp": AxisCalls([0, 1, 2], [dp]), "world": AxisCalls([0, 1, 2], [SUM])}
    wait = None if call is None else Wait("dp", call, 3.0)
    return RankState(rank, step, "step", phase, 3.0, places.split(), wait, axes)


WAITS = [view(0, "optim/a.py:1", GATHER), view(2, "optim/a.py:1", GATHER)]


@pytest.mark.parametrize(
    ("third", "late_ranks", "texts"),
    [
        (view(1, "data/b.py:2"), [1], ["rank 1 in step 5", "data/b.py:2", "data stall", "rank 0 in", "all-gather 12"]),
        (view(1, "training/train_step.py:2", phase="batch-generator"), [1], ["data stall"]),
        (view(1, "train/x.py:2 checkpoint/y.py:3 training/trainer.py:4"), [1], ["slow checkpoint"]),
        (view(1, "nn/mlp.py:3"), [1], ["rank 1 in step 5, step, nn/mlp.py:3; rank 0 in"]),
        (
            view(1, call=GATHER, dp=replace(GATHER, num_bytes=2048)),
            [1],
            ["on dp sizes differ", "rank 1 all-gather 12 of 2,048"],
        ),
        (
            view(1, call=SUM, dp=CallRecord("all-reduce", -1, 12, 64)),
            [1],
            ["order differs", "ranks 0, 2 all-gather 12"],
        ),
        (view(1, call=GATHER, step=4), [1], ["every rank waits for another: rank 1 in step 4"]),
    ],
    ids=["data", "batch", "checkpoint", "elsewhere", "sizes", "order", "deadlock"],
)
def test_late_rank_and_cause_are_named(third: RankState, late_ranks: list[int], texts: list[str]) -> None:
    verdict = diagnose({v.rank: v for v in [*WAITS, third]}, {})
    assert verdict.late_ranks == late_ranks and all(text in verdict.reason for text in texts), verdict


def test_silent_rank_is_named_first() -> None:
    verdict = diagnose({0: WAITS[0]}, {1: "process 7: stopped by a signal", 2: ""})
    assert verdict.late_ranks == [1, 2]
    assert verdict.reason.startswith("ranks 1-2 no longer answer (process 7: stopped by a signal); rank 0")
    assert diagnose({r: view(r, "nn/mlp.py:3") for r in range(3)}, {}).late_ranks == [0, 1, 2]


def test_state_survives_the_store() -> None:
    state = view(0, "optim/a.py:1", GATHER)
    assert RankState.from_json(json.loads(json.dumps(asdict(state)))) == state


def test_ends_of_a_message_are_compared() -> None:
    sent, received = CallRecord("send to", 1, 3, 512), CallRecord("receive from", 0, 3, 256)
    ends = {
        0: replace(view(0), axes={"pp": AxisCalls([0, 1], [sent])}),
        1: replace(view(1), axes={"pp": AxisCalls([0, 1], [received])}),
    }
    reason = diagnose(ends, {}).reason
    assert "on pp" in reason and "message 3 (send to rank 1) of 512 bytes" in reason and "256 bytes" in reason
    ends[1] = replace(ends[1], axes={"pp": AxisCalls([0, 1], [replace(received, num_bytes=512)])})
    assert "differ" not in diagnose(ends, {}).reason


# ---- mismatches are errors, never wrong data
def _group_timeouts() -> list[float]:
    mesh = build_mesh(tp=2, pp=2, device=CPU, timeout=datetime.timedelta(seconds=7))
    assert {axis.name for axis in mesh.active_axes} >= {"pp", "tp", "pp_grad", "tied_embedding", "world"}
    groups = {id(axis.group): axis.group for axis in mesh.active_axes}
    shared_memory: Any = mesh.tp.custom_backend

    def timeouts() -> list[float]:
        own = [group._get_backend(CPU).options._timeout for group in groups.values()]  # type: ignore[union-attr]
        return [timeout.total_seconds() for timeout in [*own, shared_memory.timeout]]

    before = timeouts()
    mesh.set_timeout(datetime.timedelta(seconds=9))
    return before + timeouts()


def test_every_group_has_the_given_timeout() -> None:
    for timeouts in run_ranks(4, _group_timeouts):
        half = len(timeouts) // 2
        assert timeouts == [7.0] * half + [9.0] * half


def _mismatched_message(elements: int, dtype: torch.dtype, mark: int) -> bool:
    """Let rank 1 expect another message than rank 0 sends; the receive buffer is large enough."""
    mesh = build_mesh(tp=1, pp=2, device=CPU, timeout=datetime.timedelta(seconds=1))
    x = torch.ones(4) if mesh.pp.rank == 0 else torch.zeros(elements, dtype=dtype)
    pending = comm.start_p2p(x, mesh.pp, 1 - mesh.pp.rank, (SEND, RECEIVE)[mesh.pp.rank], mark * mesh.pp.rank)
    if mesh.pp.rank == 0:
        time.sleep(2)
        return True
    with pytest.raises(RuntimeError, match="Timed out waiting|closed by peer"):
        pending.wait()
    return not x.any() and mesh.pp.comm_log.blocked_on is not None


MISMATCHES = [(8, torch.float32, 0), pytest.param(4, torch.int32, 0, marks=pytest.mark.nightly), (4, torch.float32, 1)]


@pytest.mark.parametrize("elements,dtype,mark", MISMATCHES)
def test_mismatched_message_is_refused(elements: int, dtype: Any, mark: int) -> None:
    assert run_ranks(2, _mismatched_message, elements, dtype, mark) == [True, True]


def _extra_collective(directory: str) -> tuple[bool, str]:
    """Run an extra collective on rank 0, of the size of the next one."""
    run = run_from([*SMALL_RUN, "--train-iters", "3"])
    train_step(run)
    run.sync.wait_param_sync()
    before, dp = torch.cat([bucket.full for bucket in run.sync.param_buckets]), run.mesh.dp
    watchdog = Watchdog(run.mesh, Path(directory), Timers(), 600.0)
    with pytest.raises(CollectiveMismatchError) as error:
        if dp.rank == 0:
            [size] = {call.num_bytes // 4 for call in dp.comm_log.recent if call.seq_id == 1}
            comm.start_reduce_scatter(torch.zeros(size), dp).wait()
        train_step(run)
    assert torch.equal(before, torch.cat([bucket.full for bucket in run.sync.param_buckets]))
    explained = watchdog.explain_error(error.value)
    assert explained is not None and explained.exit_code is ExitCode.CRASH
    watchdog.close()
    run.train_loader.close()
    return "different collectives" in explained.reason, watchdog.verdict.reason


def test_extra_collective_is_an_error_on_all_ranks(tmp_path: Path) -> None:
    (first, reason), (second, other) = run_ranks(2, _extra_collective, str(tmp_path))
    assert first and second and reason == other
    assert re.search(r"rank 1 in .* over dp.*; rank 0 in .* over dp|on dp ", reason), reason


# ---- the watchdog
def _watchdog(directory: Path, timeout_s: float = 1.0) -> Watchdog:
    return Watchdog(Mesh.single_process(), directory, Timers(), timeout_s)


def test_first_steps_and_other_work_are_never_late(tmp_path: Path) -> None:
    watchdog = _watchdog(tmp_path, 600.0)
    try:
        for step in range(hang.MIN_STEPS):
            watchdog.set_activity("step", step)
            watchdog._activity = Activity("step", step, time.monotonic() - 1000)
            assert not watchdog._is_late()
            watchdog._activity = Activity("step", step, time.monotonic() - 20.0)  # its actual duration
        watchdog.set_activity("save", 3)
        watchdog._activity = Activity("save", 3, time.monotonic() - 1000)
        assert not watchdog._is_late() and watchdog.patience_s == pytest.approx(200, rel=0.01)
        for seconds, is_late in ((190, False), (210, True)):
            watchdog._activity = Activity("step", 4, time.monotonic() - seconds)
            watchdog._reported_activity = watchdog._activity  # so that the thread does not report it
            assert watchdog._is_late() == is_late
        watchdog._step_times.clear()
        watchdog._step_times.extend([0.1] * 3)
        assert watchdog.patience_s == hang.MIN_PATIENCE_S
        watchdog._step_times.extend([250.0] * 9)
        assert watchdog.patience_s == 750.0
    finally:
        watchdog.close()


@pytest.mark.parametrize("size", [1, 2, 1024, 16_384])
def test_store_is_polled_within_its_capacity(tmp_path: Path, size: int, monkeypatch) -> None:
    monkeypatch.setattr(hang, "_own_connection", lambda: None)
    mesh = Mesh.single_process()
    world = replace(mesh.world, size=size, backend=ABSTRACT)
    watchdog = Watchdog(replace(mesh, world=world), tmp_path, Timers(), 600.0)
    watchdog._closing.set()
    assert size / (watchdog.pace * hang.POLL_S) <= 2048 and (size > 1024 or watchdog.pace == 1)
    assert 0.8 * 600 + 2 * watchdog.pace * (hang.POLL_S + hang.ANSWER_S) < 600  # reported before the group's timeout


def test_status_is_running_until_the_hang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Update the status whatever the main thread does."""
    monkeypatch.setattr(hang, "HEARTBEAT_S", 0.02)
    config = config_from([*SMALL_RUN, "--train-iters", "3", "--eval-iters", "9"])
    run, file = run_from(config), tmp_path / "status.json"
    run.last_step = 3
    assert long_evaluation_note(run, config.train)[0].startswith("eval_iters=9: 18 batches are evaluated for 3 steps")
    run.last_step = 6
    assert not long_evaluation_note(run, config.train)  # a forward is a third of a step
    watchdog = _watchdog(tmp_path)
    heartbeat = Heartbeat(tmp_path, run, config, watchdog, False)
    run.progress.step = 2
    while json.loads(file.read_text())["step"] != 2:
        time.sleep(0.01)
    watchdog._reported_activity = watchdog._activity
    assert watchdog.hang_reported
    run.progress.step = 3
    time.sleep(0.2)
    assert json.loads(file.read_text())["step"] == 2
    watchdog.set_activity("step", 4)
    while json.loads(file.read_text())["step"] != 3:
        time.sleep(0.01)
    heartbeat.close()
    watchdog.close()
    assert json.loads(file.read_text())["outcome"] == "running" and not heartbeat._thread.is_alive()


# ---- complete runs
Outcome = tuple[int, str, dict[str, Any]]


def run_to_end(
    run_dir: Path, *flags: str, fault: str = "", launcher: tuple[str, ...] = (), limit_s: int = 3
) -> Outcome:
    """Return exit code, stderr and status of a run of up to 30 steps with a timeout of `limit_s`."""
    flags = (*SMALL_RUN, "--train-iters", "30", *flags, "--run-dir", str(run_dir), "--device", "cpu")
    command = [sys.executable, *launcher, str(ROOT / "pretrain_gpt.py"), *flags]
    command += ["--distributed-timeout-seconds-after-init", str(limit_s)]
    env = {**os.environ, "MEGALITE_FAULT": fault, "TORCH_FR_BUFFER_SIZE": "100"}
    result = programs.run(command, capture_output=True, text=True, cwd=ROOT, env=env, timeout=120)
    return result.returncode, result.stderr, load_status(run_dir)


FROZEN = r"rank {} no longer answers \(process \d+: stopped by a signal\); rank {} in step 6"


def test_frozen_rank_is_named_and_the_outcome_is_hang(tmp_path: Path) -> None:
    code, err, status = run_to_end(tmp_path, "--nproc", "2", fault="step.begin:0:6:stop")
    assert (code, status["outcome"], status["step"]) == (70, "hang", 5), err
    assert re.match(FROZEN.format(0, 1), status["reason"])
    assert "waits" in status["reason"] and " over dp, " in status["reason"] and "optim/" in status["reason"]
    assert err.count("NO PROGRESS") == 1 and "Traceback" not in err
    text = (tmp_path / "hang" / "rank-001.txt").read_text()
    assert "File" in text and text.count("Thread 0x") >= 2
    entries = json.loads((tmp_path / "hang" / "rank-001.json").read_text())["entries"]
    assert any("all_reduce" in entry["profiling_name"] for entry in entries)
    [event] = [
        row for row in load_json_lines(tmp_path / "events.jsonl") if row["event"] == "hang"
    ]  # a single rank reports it
    assert (event["step"], event["late_ranks"], event["reason"]) == (6, [0], status["reason"])


def test_startup_has_its_own_timeout(tmp_path: Path) -> None:
    """Delay the start-up of rank 0, which alone plans, measures and describes the run."""
    code, err, status = run_to_end(tmp_path, "--nproc", "2", fault="init.ready:0:0:sleep=9", limit_s=4)
    assert (code, status["outcome"]) == (0, "done") and "NO PROGRESS" not in err, err


@pytest.mark.nightly
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("shared", ["--shared-memory", "--no-shared-memory"])
def test_timeout_holds_with_torch_collective_checks(
    rank: int, shared: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCH_DISTRIBUTED_DEBUG", "DETAIL")
    code, err, status = run_to_end(tmp_path / "stop", "--nproc", "2", shared, fault=f"step.after_reduce:{rank}:6:stop")
    assert (code, status["outcome"], status["step"]) == (70, "hang", 5), err
    assert re.match(rf"rank {rank} no longer answers .* over world", status["reason"])
    assert not re.search("Warning: |Traceback", err), err
    code, err, status = run_to_end(tmp_path / "kill", "--nproc", "2", shared, fault=f"step.after_reduce:{rank}:6:kill")
    assert (code, status["outcome"]) == (137, "crash") and not re.search("Warning: |Traceback", err), err
    assert status["reason"].startswith(f"rank {rank} ended by signal SIGKILL")


HANGS = toml_tables.read_table("training/cases")["hangs"]


@pytest.mark.parametrize(
    "name", nightly_except(HANGS, ["at the first collective"], str, guards=("megalite/training/monitoring",))
)
def test_hanging_rank_is_named_with_its_location(name: str, tmp_path: Path) -> None:
    flags, fault, step, reason = HANGS[name]
    code, err, status = run_to_end(tmp_path, *flags.format(tmp_path).split(), fault=fault)
    assert (code, status["outcome"], status["step"]) == (70, "hang", step), err
    assert re.match(reason, status["reason"]), status
    assert err.count("NO PROGRESS") == 1 and "Traceback" not in err
    if "evaluation" in name:
        report = json.loads((tmp_path / "report.json").read_text())
        assert report["bottleneck"] is None and report["advice"].startswith("the run ended as hang, ")
    if "four" in name:
        assert len(list((tmp_path / "hang").glob("rank-*.txt"))) == 4


def run_and_abort(run_dir: Path, fault: str, ready_text: str) -> tuple[int, dict[str, Any]]:
    """Return exit code and status of a run whose rank 0 gets SIGABRT once the run has printed `ready_text`.

    NCCL's watchdog sends it to a rank that waits too long. Python cannot handle it.
    """
    argv = [
        *SMALL_RUN,
        *"--train-iters 100000 --nproc 2 --device cpu --distributed-timeout-seconds-after-init 10".split(),
    ]
    env = {**os.environ, "MEGALITE_FAULT": fault}
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    with running_program(*argv, "--run-dir", run_dir, ready_text=ready_text, env=env, **pipes) as process:
        time.sleep(0.5)  # until the files are written, too
        os.kill(load_status(run_dir)["pid"], signal.SIGABRT)
        process.communicate(timeout=60)
    return process.returncode, load_status(run_dir)


SIGABRT = "rank 0 ended by signal SIGABRT"
ABORTS = {  # after a reported hang it is that hang; after the step resumed it is a crash
    "hang": ("step.begin:1:6:stop", "NO PROGRESS", 70, f".*rank 1 no longer answers.*{SIGABRT}"),
    "crash": ("step.begin:1:6:sleep=7", "step 6 resumed after ", 134, f"{SIGABRT}$"),
}


@pytest.mark.parametrize("outcome", ABORTS)
def test_abort_keeps_the_reported_reason(tmp_path: Path, outcome: str) -> None:
    fault, ready_text, code, reason = ABORTS[outcome]
    exit_code, status = run_and_abort(tmp_path, fault, ready_text)
    assert (exit_code, status["outcome"]) == (code, outcome) and re.match(reason, status["reason"]), status


@pytest.mark.nightly
def test_torchrun_status_is_hang(tmp_path: Path) -> None:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--shutdown-timeout", "2")
    code, err, status = run_to_end(tmp_path, fault="step.begin:0:6:stop", launcher=launcher)
    assert (code, status["outcome"]) == (1, "hang"), err
    assert status["reason"].startswith("rank 0 no longer answers")


@pytest.mark.nightly
def test_clean_run_and_slow_step_are_not_reported(tmp_path: Path) -> None:
    """Let the first step, evaluations and saves take longer than a training step may."""
    flags = ["--nproc", "2", "--save", str(tmp_path / "saved"), "--save-interval", "10", "--eval-interval", "10"]
    sleeps = "step.begin:1:1:sleep=5,eval.begin:1:10:sleep=5,ckpt.shard_written:1:10:sleep=5"
    code, err, status = run_to_end(tmp_path / "clean", *flags, fault=sleeps, limit_s=8)
    assert (code, status["outcome"]) == (0, "done") and "NO PROGRESS" not in err, err
    assert not (tmp_path / "clean" / "hang").exists()
    code, err, status = run_to_end(tmp_path / "slow", "--nproc", "2", fault="step.begin:1:9:sleep=5.5", limit_s=8)
    assert (code, status["outcome"]) == (0, "done") and err.count("NO PROGRESS") == 1, err
    assert err.count("step 9 resumed after ") == 1 and "rank 1 in step 9" in err
    assert json.loads((tmp_path / "slow" / "report.json").read_text())["advice"].startswith("it hung and resumed, ")
