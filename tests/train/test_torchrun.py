"""torchrun, as its users start it: restarts after a rank was killed, and a torchrun that is killed itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest
from train_cases import SMALL

ROOT = Path(__file__).resolve().parents[2]
STEPS = 40


@contextmanager
def torchrun(folder: Path, *words: str, steps: int = STEPS) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *words]
    command += [str(ROOT / "pretrain_gpt.py"), *SMALL, "--train-iters", str(steps), "--device", "cpu"]
    command += ["--save", str(folder), "--load", str(folder), "--save-interval", "5", "--hidden-dropout", "0.1"]
    pipe = subprocess.PIPE
    process = subprocess.Popen(
        command, stdout=pipe, stderr=subprocess.STDOUT, text=True, cwd=ROOT, start_new_session=True
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def shown(process: subprocess.Popen[str], what: str) -> list[str]:
    """Its lines until one has `what` in it."""
    lines = []
    assert process.stdout is not None
    for line in process.stdout:
        lines.append(line)
        if what in line:
            return lines
    raise AssertionError("".join(lines))


def ranks_of(process: subprocess.Popen[str]) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


def losses(folder: Path) -> list[float]:
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["train/loss"] for row in rows if "train/loss" in row]


@pytest.mark.long
@pytest.mark.timeout(400)
def test_every_restart_meets_and_the_run_is_the_same_run(tmp_path: Path) -> None:
    with torchrun(tmp_path / "straight") as straight:
        assert straight.communicate(timeout=120)[0] is not None and straight.returncode == 0
    with torchrun(tmp_path / "killed", "--max-restarts", "3") as process:
        for step in (7, 17, 27):
            shown(process, f"step    {step:2d}/")
            os.kill(ranks_of(process)[step % 2], signal.SIGKILL)
        out = process.communicate(timeout=200)[0]
    assert process.returncode == 0, out
    assert losses(tmp_path / "killed") == losses(tmp_path / "straight") and len(losses(tmp_path / "killed")) == STEPS


@pytest.mark.long
def test_ranks_end_with_a_torchrun_that_is_killed(tmp_path: Path) -> None:
    with torchrun(tmp_path, steps=100_000) as process:
        shown(process, "step     3/")
        ranks = ranks_of(process)
        assert len(ranks) == 2
        os.kill(process.pid, signal.SIGKILL)
        end = time.monotonic() + 2
        while any(alive(pid) for pid in ranks):
            assert time.monotonic() < end
            time.sleep(0.05)


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.long
def test_sigterm_to_torchrun_saves_and_says_requeue(tmp_path: Path) -> None:
    with torchrun(tmp_path, steps=100_000) as process:
        shown(process, "step     3/")
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["outcome"], status["reason"]) == ("requeue", "SIGTERM")  # torchrun's own code is 1
    assert (tmp_path / f"iter_{status['step']:07d}" / "COMPLETE").is_file()


@pytest.mark.long
@pytest.mark.timeout(300)
def test_the_rank_that_fails_is_told_once_with_its_cause(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MEGALITE_FAULT", "step.after_forward_backward:1:3:raise")
    with torchrun(tmp_path) as process:
        out = process.communicate(timeout=200)[0]
    assert process.returncode == 1 and out.count("megalite.config.faults.InjectedFault: asked for") == 1, out
    _, _, table = out.partition("Root Cause")
    assert "rank      : 1" in table and "traceback : InjectedFault: asked for by MEGALITE_FAULT" in table
    status = json.loads((tmp_path / "status.json").read_text())
    assert status["outcome"] == "crash" and status["reason"].startswith("rank 1: InjectedFault: asked for")
    assert "lost another rank" in (tmp_path / "ranks/rank-00000.log").read_text()
