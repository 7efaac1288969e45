"""Runs under torchrun: restarts after a rank was killed, stops by signals, and a torchrun that is killed itself."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import programs
import pytest
from pairwise import nightly_except
from program_runs import ROOT, children_of, is_alive, load_losses, load_status, read_until
from train_cases import SMALL_RUN

STEPS = 40
GUARDS = ("megalite/launch/process_group.py", "megalite/launch/rank_info.py", "megalite/training/job/restarts.py")
RARELY = pytest.mark.nightly(guards=GUARDS)


def torchrun(run_dir: Path, *torchrun_flags: str, steps: int = STEPS) -> AbstractContextManager[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *torchrun_flags]
    command += [str(ROOT / "pretrain_gpt.py"), *SMALL_RUN, "--train-iters", str(steps), "--device", "cpu"]
    command += ["--save", str(run_dir), "--load", str(run_dir), "--save-interval", "5", "--hidden-dropout", "0.1"]
    return programs.program_session(command)


@RARELY
@pytest.mark.timeout(400)
def test_torchrun_restarts_give_the_same_run(tmp_path: Path) -> None:
    with torchrun(tmp_path / "straight") as straight:
        assert straight.communicate(timeout=120)[0] is not None and straight.returncode == 0
    with torchrun(tmp_path / "killed", "--max-restarts", "3") as process:
        for step in (7, 17, 27):
            read_until(process, f"step    {step:2d}/")
            os.kill(children_of(process.pid)[step % 2], signal.SIGKILL)
        out = process.communicate(timeout=200)[0]
    assert process.returncode == 0, out
    assert (
        load_losses(tmp_path / "killed") == load_losses(tmp_path / "straight")
        and len(load_losses(tmp_path / "killed")) == STEPS
    )


@RARELY
def test_ranks_end_with_a_killed_torchrun(tmp_path: Path) -> None:
    with torchrun(tmp_path, steps=100_000) as process:
        read_until(process, "step     3/")
        ranks = children_of(process.pid)
        assert len(ranks) == 2
        os.kill(process.pid, signal.SIGKILL)
        wait_for_exit(ranks)


def wait_for_exit(ranks: list[int]) -> None:
    """Wait until the ranks have exited. A process that is about to exit closes its pipes first."""
    end = time.monotonic() + 10
    while any(is_alive(pid) for pid in ranks):
        assert time.monotonic() < end
        time.sleep(0.05)


HANDLED = "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1"
STOPS: dict[str, tuple[str, int, Callable[[Any, Path], object]]] = {  # torchrun's flags, its exit code, the stop
    "SIGTERM to torchrun": ("", 1, lambda process, run_dir: process.send_signal(signal.SIGTERM)),
    # SLURM sends it to all processes of a step: to torchrun, and to its ranks, which get it from torchrun too
    "SIGUSR1 twice": (HANDLED, 1, lambda process, run_dir: os.killpg(process.pid, signal.SIGUSR1)),
    "stop": ("--max-restarts 3", 0, lambda process, run_dir: (run_dir / "stop").touch()),  # and no restart
}


@pytest.mark.parametrize("name", nightly_except([*STOPS], ["SIGTERM to torchrun"], str, guards=GUARDS))
def test_signal_under_torchrun_saves_and_requeues(tmp_path: Path, name: str) -> None:
    flags, code, stop = STOPS[name]
    with torchrun(tmp_path, *flags.split(), steps=100_000) as process:
        read_until(process, "step     3/")
        stop(process, tmp_path)
        out, _ = process.communicate(timeout=60)
    status = load_status(tmp_path)
    assert (process.returncode, status["outcome"]) == (code, "requeue") and name.split()[0] in status["reason"], out
    assert (tmp_path / f"iter_{status['step']:07d}" / "COMPLETE").is_file()
    assert out.count(f"saving checkpoint at step {status['step']} ") == 1
    before, _, after = out.partition("outcome ")
    assert "Traceback" not in before and "step     1/" not in after


@RARELY
@pytest.mark.timeout(300)
def test_torchrun_failure_is_reported_once_with_its_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGALITE_FAULT", "step.after_forward_backward:1:3:raise")
    with torchrun(tmp_path) as process:
        out = process.communicate(timeout=200)[0]
    assert process.returncode == 1 and out.count("megalite.common.fault_injection.InjectedFault: requested by") == 1, (
        out
    )
    _, _, table = out.partition("Root Cause")
    assert "rank      : 1" in table and "traceback : InjectedFault: requested by MEGALITE_FAULT" in table
    status = load_status(tmp_path)
    assert status["outcome"] == "crash" and status["reason"].startswith("rank 1: InjectedFault: requested by")
    assert "lost another rank" in (tmp_path / "ranks/rank-00000.log").read_text()


@RARELY
def test_torchrun_without_signal_forwarding_is_a_warning(tmp_path: Path, monkeypatch) -> None:
    """Check that the ranks left behind by torchrun save and stop."""
    monkeypatch.setenv("SLURM_JOB_ID", "1")
    with torchrun(tmp_path, steps=100_000) as process:
        lines = read_until(process, "step     3/")
        # logged once so far; the summary at the end repeats it
        [line] = [line for line in lines if "torchrun dies of SIGUSR1" in line]
        assert HANDLED in line
        ranks = children_of(process.pid)
        process.send_signal(signal.SIGUSR1)
        out, _ = process.communicate(timeout=60)
        assert out.count("torchrun has ended without its ranks: they save and stop") <= 1 and "Traceback" not in out
        assert process.returncode == -signal.SIGUSR1
        wait_for_exit(ranks)
    status = load_status(tmp_path)
    assert (status["outcome"], status["reason"], status["checkpoint_step"]) == ("requeue", "SIGTERM", status["step"])


@RARELY
def test_short_grace_period_loses_only_unsaved_steps(tmp_path: Path, monkeypatch) -> None:
    with monkeypatch.context() as patch:
        patch.setenv("MEGALITE_FAULT", ",".join(f"ckpt.before_commit:0:{step}:sleep=90" for step in range(6, 60)))
        with torchrun(tmp_path, "--shutdown-timeout", "2", steps=100_000) as process:
            read_until(process, "saved iter_0000005 ")
            process.send_signal(signal.SIGTERM)
            out, _ = process.communicate(timeout=60)
    assert "saving checkpoint at step " in out and process.returncode == 1
    with torchrun(tmp_path, steps=100_000) as process:
        read_until(process, f"resumed from {tmp_path}/iter_0000005 at step 5")
