"""Signals to complete runs of pretrain_gpt.py."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import programs
import pytest
from pairwise import nightly_except
from program_runs import ROOT, children_of, load_json_lines, load_losses, load_status, run_pretrain, running_program
from train_cases import SMALL_RUN, TP2_PP2, run_with_signal

GUARDS = ("megalite/training/job/stop_signals.py", "megalite/launch/local_launcher.py", "pretrain_gpt.py")
RARELY = pytest.mark.nightly(guards=GUARDS)
LONG = [*SMALL_RUN, "--train-iters", "100000"]


TWO = ["--nproc", "2"]
STOPS: dict[str, tuple[str, list[str], dict[str, Any]]] = {
    **{f"{name}-two": (name, TWO, {}) for name in ("SIGTERM", "SIGINT", "SIGXCPU", "SIGUSR1", "SIGHUP")},
    **{f"{name}-one process": (name, [], {}) for name in ("SIGTERM", "SIGUSR1", "SIGHUP", "SIGINT", "SIGXCPU")},
    "SIGTERM-ZeRO-3": ("SIGTERM", [*TWO, "--zero-stage", "3"], {}),
    **{f"{name} before the first step": (name, TWO, {"after_text": ""}) for name in ("SIGTERM", "SIGUSR1")},
    **{
        f"--exit-signal {n}": (n, [*TP2_PP2, "--exit-signal", n], {"only_launcher": True})
        for n in ("SIGUSR1", "SIGUSR2")
    },
}
OFTEN = ["SIGTERM-two", "SIGXCPU-two", "SIGHUP-one process", "SIGTERM-ZeRO-3", "SIGTERM before the first step"]
OFTEN += ["--exit-signal SIGUSR2"]


@pytest.mark.parametrize("name", nightly_except([*STOPS], OFTEN, str, guards=GUARDS))
def test_signal_saves_and_stops(tmp_path: Path, name: str) -> None:
    number, layout, options = STOPS[name]
    flags = [*LONG, *layout, "--save", str(tmp_path), "--save-interval", "50000"]
    code, out, err = run_with_signal(*flags, signal_number=getattr(signal, number), **options)
    status = load_status(tmp_path)
    assert (code, status["outcome"]) == (75, "requeue") and number in status["reason"], err
    assert status["step"] == 1 if "after_text" in options else status["step"] >= 4
    assert (tmp_path / f"iter_{status['step']:07d}" / "COMPLETE").is_file()
    assert f"to resume the same command with --load {tmp_path}" in " ".join(out.split())
    assert "Traceback" not in err and status["time"] >= status["started"]


@pytest.mark.parametrize(
    ("layout", "number"),
    [
        pytest.param([], signal.SIGINT, id="one process", marks=RARELY),
        pytest.param(["--nproc", "2"], signal.SIGINT, id="two"),
        pytest.param(["--nproc", "2"], signal.SIGQUIT, id="two, Ctrl-backslash", marks=RARELY),
    ],
)
def test_ctrl_c_during_the_torch_import_ends_at_once(tmp_path: Path, layout: list, number: signal.Signals) -> None:
    """Interrupt the import, which a single process does for all ranks of --nproc."""
    argv = [sys.executable, str(ROOT / "pretrain_gpt.py"), *LONG, *layout, "--save", str(tmp_path / "run")]
    process = subprocess.Popen(argv, stderr=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True)
    try:
        assert any("without --save-interval" in line for line in process.stderr)  # the last message before the import
        while layout and len(children_of(process.pid)) < 2:
            assert process.poll() is None
            time.sleep(0.01)
        os.killpg(process.pid, number)
        _, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (130, f"stopping: {number.name}\n")
        assert not (tmp_path / "run" / "log.txt").exists()
    finally:
        process.kill()


def test_signal_interrupts_evaluation_and_resume_is_equal(tmp_path: Path) -> None:
    """Signal a single rank during an evaluation that would take hours."""

    def run(run_dir: Path, *flags: str, fault: str = "") -> tuple[int, str]:
        argv = [*SMALL_RUN, "--nproc", "2", "--train-iters", "6", *flags, "--save", run_dir, "--run-dir", run_dir]
        result = run_pretrain(*argv, fault=fault)
        return result.returncode, result.stdout + result.stderr

    stopped, straight = tmp_path / "broken", tmp_path / "whole"
    flags = ["--eval-interval", "3", "--eval-iters", "1000000"]
    code, text = run(stopped, *flags, fault="eval.begin:1:3:term")
    assert code == 75 and "note: eval_iters=1000000: 3,000,000 batches are evaluated for 6 steps" in text, text
    assert re.search(r"stopping \(.*\): the evaluation of step 3 ends after \d+ of 1000000 batches, without", text)
    status, metrics = load_status(stopped), (stopped / "metrics.jsonl").read_text()
    assert (status["outcome"], status["step"]) == ("requeue", 3) and "val/" not in metrics
    # all steps are trained, only the evaluation is left
    code, text = run(stopped, *flags, "--load", str(stopped), fault="eval.begin:0:6:term")
    assert (code, load_status(stopped)["step"]) == (75, 6) and "val/" not in (stopped / "metrics.jsonl").read_text(), (
        text
    )
    code, text = run(stopped, "--load", str(stopped))
    assert (code, load_status(stopped)["outcome"]) == (0, "done"), text
    assert "val/" in (stopped / "metrics.jsonl").read_text()
    assert run(straight)[0] == 0 and load_losses(stopped) == load_losses(straight) and len(load_losses(straight)) == 6


@pytest.mark.parametrize(
    ("fault", "code", "step"),
    [
        ("eval.begin:1:4:term", 75, 5),
        pytest.param("ckpt.before_commit:0:4:term", 75, 5, marks=pytest.mark.nightly),
        ("step.after_update:1:8:term", 0, 8),  # nothing is left to requeue
        pytest.param("eval.begin:0:8:term", 0, 8, marks=pytest.mark.nightly),
    ],
)
def test_signal_during_evaluation_saves_or_ends(tmp_path: Path, fault: str, code: int, step: int) -> None:
    """Signal a single rank."""
    flags = "--nproc 2 --train-iters 8 --eval-interval 4 --save-interval 4 --save".split()
    result, status = run_pretrain(*SMALL_RUN, *flags, tmp_path, fault=fault), load_status(tmp_path)
    outcome = "requeue" if code else "done"
    assert (result.returncode, status["outcome"], status["step"]) == (code, outcome, step), result.stderr
    complete_names = {path.parent.name for path in tmp_path.glob("iter_*/COMPLETE")}
    assert complete_names == {"iter_0000004", f"iter_{step:07d}"} and "Traceback" not in result.stderr
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text().strip() == str(step)


def test_second_ctrl_c_stops_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Interrupt again while the first signal waits for a step that takes too long."""
    monkeypatch.setenv("MEGALITE_FAULT", "step.begin:*:3:sleep=90")
    flags = [*LONG, *TWO, "--save", str(tmp_path), "--save-interval", "50000"]
    code, _, err = run_with_signal(*flags, signal_number=signal.SIGINT, after_text="step     2/", repeat_after_s=1.0)
    assert code == 130 and "Traceback" not in err, err
    assert load_status(tmp_path)["outcome"] == "interrupted" and not list(tmp_path.glob("iter_*"))


LOST_FIRST = """
import signal, sys
import pretrain_gpt
from megalite.training.job import job

def lost(error):
    job.is_lost_peer_error = lambda error: False
    signal.raise_signal(signal.SIGTERM)
    return True

job.is_lost_peer_error = lost
sys.exit(pretrain_gpt.main(sys.argv[1:]))
"""


def test_late_signal_is_the_reported_reason(tmp_path: Path) -> None:
    """Lose another rank to the signal before the rank's own handler runs, as can happen in a collective."""
    argv = [sys.executable, "-c", LOST_FIRST, *LONG, "--run-dir", str(tmp_path)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "MEGALITE_FAULT": "step.begin:0:3:raise"}
    result = programs.run(argv, capture_output=True, text=True, env=env, timeout=120)
    status = load_status(tmp_path)
    assert (result.returncode, status["outcome"], status["reason"]) == (130, "interrupted", "SIGTERM"), result.stderr
    assert status["step"] == 2 and "pretrain_gpt.py: interrupted at step 2; checkpoint: none" in result.stderr
    assert re.search(r"^outcome +interrupted: SIGTERM", result.stdout, re.MULTILINE), result.stdout


@pytest.mark.parametrize(("name", "layout"), [("SIGTERM", TWO), ("SIGINT", [])], ids=["two", "one process"])
def test_signal_without_saving_stops_at_once(tmp_path: Path, name: str, layout: list[str]) -> None:
    code, out, err = run_with_signal(*LONG, *layout, "--run-dir", str(tmp_path), signal_number=getattr(signal, name))
    status = load_status(tmp_path)
    assert (code, status["outcome"], status["reason"]) == (130, "interrupted", name), err
    [line] = [line for line in err.splitlines() if line.startswith("pretrain_gpt.py: interrupted")]
    assert f"at step {status['step']}; checkpoint: none, because --save is not set; to resume: from step 1" in line
    assert "Traceback" not in err and "outcome " in out and "--save DIR saves the progress of a run" in err


def test_stop_file_stops_a_run(tmp_path: Path) -> None:
    with running_program(*LONG, "--nproc", "2", "--save", tmp_path, "--save-interval", "50000") as process:
        (tmp_path / "stop").touch()
        process.communicate(timeout=60)
    status = load_status(tmp_path)
    assert (process.returncode, status["outcome"], status["reason"]) == (75, "requeue", str(tmp_path / "stop"))
    assert not (tmp_path / "stop").exists() and (tmp_path / f"iter_{status['step']:07d}/COMPLETE").is_file()


def test_sigquit_ends_a_run_at_once(tmp_path: Path) -> None:
    flags = [*LONG, "--nproc", "2", "--save", str(tmp_path), "--save-interval", "50000"]
    code, _, err = run_with_signal(*flags, signal_number=signal.SIGQUIT)
    status = load_status(tmp_path)
    assert (code, status["outcome"], status["reason"]) == (130, "interrupted", "SIGQUIT"), err
    assert (
        status["step"] >= load_json_lines(tmp_path / "metrics.jsonl")[-1]["step"] >= 4 and status["checkpoint"] is None
    )
