"""Signals and full disks, to the program as a user starts it."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from train_cases import SMALL, TP2_PP2

ROOT = Path(__file__).resolve().parents[2]
LONG = [*SMALL, "--train-iters", "100000"]


def signalled(*flags: str, number: int, after: str = "step     5/") -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a run that gets a signal once it has shown `after`."""
    words = [sys.executable, str(ROOT / "pretrain_gpt.py"), *flags]
    pipe = subprocess.PIPE
    process = subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True, cwd=ROOT, start_new_session=True)
    shown = []
    try:
        assert process.stdout is not None
        for line in process.stdout:
            shown.append(line)
            if after in line:
                break
        if number == signal.SIGINT:  # as a terminal does: to all processes of the group
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)
        out, err = process.communicate(timeout=60)
        return process.returncode, "".join(shown) + out, err
    finally:
        process.kill()


@pytest.mark.parametrize("layout", [[], ["--nproc", "2"]], ids=["one process", "two"])
def test_ctrl_c_says_the_step_and_the_newest_checkpoint(tmp_path: Path, layout: list[str]) -> None:
    flags = [*LONG, *layout, "--save", str(tmp_path), "--save-interval", "3", "--keep-last", "1000"]
    code, out, err = signalled(*flags, number=signal.SIGINT)
    assert code == 130, err
    status = json.loads((tmp_path / "status.json").read_text())
    assert (status["outcome"], status["reason"]) == ("interrupted", "SIGINT") and status["step"] >= 4
    newest = max(tmp_path.glob("iter_*"))
    [line] = [line for line in err.splitlines() if line.startswith("pretrain_gpt.py: interrupted")]
    assert line == f"pretrain_gpt.py: interrupted at step {status['step']}; checkpoint: {newest}"
    assert "Traceback" not in err and "outcome " in out


def test_ctrl_c_before_the_first_checkpoint(tmp_path: Path) -> None:
    code, _, err = signalled(*LONG, "--run-dir", str(tmp_path), number=signal.SIGINT)
    assert code == 130 and "; checkpoint: none, there is no --save" in err


@pytest.mark.parametrize("name", ["SIGUSR1", "SIGUSR2"])
def test_an_exit_signal_saves_and_stops(tmp_path: Path, name: str) -> None:
    flags = [*LONG, *TP2_PP2, "--save", str(tmp_path), "--save-interval", "50000", "--exit-signal", name]
    code, _, err = signalled(*flags, number=getattr(signal, name))
    assert code == 75, err
    status = json.loads((tmp_path / "status.json").read_text())
    assert status["outcome"] == "requeue" and name in status["reason"]
    assert (tmp_path / f"iter_{status['step']:07d}" / "COMPLETE").is_file()


def test_a_disk_that_is_full_ends_no_training(tmp_path: Path) -> None:
    """No file may be longer than 500 bytes: log.txt, metrics.jsonl, TensorBoard, run_config.toml and status.json."""
    words = [sys.executable, str(ROOT / "pretrain_gpt.py"), *SMALL, "--train-iters", "6", "--run-dir", str(tmp_path)]
    words += ["--tensorboard-dir", str(tmp_path / "tb"), "--log-style", "megatron"]
    limit = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (500, 500))  # noqa: E731
    pipe = subprocess.PIPE
    done = subprocess.run(words, stdout=pipe, stderr=pipe, text=True, timeout=90, cwd=ROOT, preexec_fn=limit)
    assert done.returncode == 0, done.stderr
    assert "iteration        6/       6" in done.stdout
    assert done.stderr.count("Traceback") <= 1  # of TensorBoard's own thread
    for what in (tmp_path / "log.txt", tmp_path / "metrics.jsonl"):
        assert done.stderr.count(f"WARNING: {what}: ") == 2, done.stderr  # the first time, and the count
        assert what.stat().st_size == 500
    assert "WARNING: TensorBoard: " in done.stderr
    assert json.loads((tmp_path / "status.json").read_text())["outcome"] == "done"


def test_a_directory_that_cannot_be_made_ends_no_training(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    words = [sys.executable, str(ROOT / "pretrain_gpt.py"), *SMALL, "--train-iters", "2"]
    words += ["--run-dir", str(tmp_path / "file/run"), "--profile-pipeline", "2"]
    done = subprocess.run(words, capture_output=True, text=True, timeout=90, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "step     2/2" in done.stdout and "Traceback" not in done.stderr
    assert "timeline.json" in done.stderr and "file/run/log.txt: Not a directory" in done.stderr
