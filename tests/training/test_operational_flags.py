"""Megatron-LM's flags of operations, typed on the command line of a short run: what each of them leaves behind."""

import gc
import gzip
import json
import os
import re
import socket
import sys
import types
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from program_runs import pretrain, rows, status_of
from test_metrics import events
from train_cases import SMALL
from train_cases import pretrain as pretrain_here

from megalite.common.exit_codes import ExitCode
from megalite.config import cli
from megalite.launch.rank_info import RankInfo
from megalite.models.families import PRESETS
from megalite.training import trainer as loop
from megalite.training.logging import metrics_logger as metrics

TOLD = """--log-interval 2 --log-params-norm --log-num-zeros-in-grad --log-throughput --log-progress --log-memory-interval 4
 --timing-log-level 2 --timing-log-option minmax --log-straggler --straggler-minmax-count 2 --eval-interval 2
 --check-weight-hash-across-dp-replicas-interval 3 --exit-interval 5"""
PROFILED = """--profile --use-pytorch-profiler --profile-step-start 2 --profile-step-end 4 --profile-ranks 1
 --pytorch-profiler-collect-shapes --pytorch-profiler-collect-callstack"""
DRAWN = """--tensorboard-log-interval 2 --log-timers-to-tensorboard --log-memory-to-tensorboard
 --log-world-size-to-tensorboard --log-validation-ppl-to-tensorboard --no-log-loss-scale-to-tensorboard"""
SECONDS = r"\(\d+\.\d\d, \d+\.\d\d\)"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a run of two ranks with all of them, that stops at step 5 of 8."""
    folder = tmp_path_factory.mktemp("run")
    flags = [*TOLD.split(), *PROFILED.split(), *DRAWN.split(), "--save", str(folder)]
    done = pretrain(*SMALL, "--train-iters", "8", "--nproc", "2", *flags, "--tensorboard-dir", str(folder / "board"))
    assert done.returncode == ExitCode.REQUEUE and "WARNING" not in done.stderr, done.stderr
    return folder


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same without any of them, in Megatron-LM's style."""
    folder = tmp_path_factory.mktemp("plain")
    words = ["--train-iters", "6", "--save", str(folder), "--log-style", "megatron", "--eval-interval", "2"]
    assert typed(*SMALL, *words, "--tensorboard-dir", str(folder / "board")) == ExitCode.DONE
    return folder


def typed(*words: str) -> int:
    """The exit code of a run of one rank in this process."""
    found = cli.parse_config(list(words), PRESETS)
    return pretrain_here(found.config, RankInfo(), found.warnings)


def test_log_flags(folder: Path, plain: Path) -> None:
    text, without = (folder / "log.txt").read_text(), (plain / "log.txt").read_text()
    lines = re.findall(r"iteration +(\d+)/ +8 \|.*", text)
    assert lines == ["1", "2", "4", "5"]
    for words in (
        *(
            "done with setup ...\ntraining ...\n",
            " > number of parameters on (tensor, pipeline) model parallel rank (0, 0): ",
        ),
        "------------------------ arguments ------------------------",
    ):
        assert words in text and words in without, words
    assert "[after training is done] datetime: " in without
    for what, times in (
        (r"\| throughput per GPU \(TFLOP/s/GPU\): \d+\.\d \|", 4),
        (r"\| num zeros: \d+ \| params norm: \d+\.\d{3} \|", 4),
        (r"\(min, max\) time across ranks \(ms\):\n", 4 + 2 + 1),  # lines, evaluations, the save
        (rf"    forward-backward \.+: {SECONDS}\n", 4),
        (rf"    forward-compute \.+: {SECONDS}\n", 4),  # level 2
        (rf"    evaluate \.+: {SECONDS}\n", 2),
        (rf"    save-checkpoint \.+: {SECONDS}\n", 1),
        (r"\[Rank 0\] \(after 4 iterations\) memory \(MB\) \| allocated: ", 1),
        (r">>> Weight hashes match after 3 iterations\.\.\.\n", 1),
        (r"stragglers \| Mn own/Rnk: [\d.]+ms/[01] [\d.]+ms/[01] \| Mx own/Rnk: ", 3),  # the first has timed nothing
        (r"stragglers", 3),
        (r"\[exiting program at iteration 5\] datetime: ", 1),
    ):
        assert len(re.findall(what, text)) == times, what
        if "evaluate" not in what and "save-checkpoint" not in what and "min, max" not in what:  # which are of level 0
            assert not re.search(what, without), what
    low, high = map(float, re.findall(r"    forward-backward \.+: \((.+), (.+)\)", text)[0])
    assert 0 < low <= high
    status = status_of(folder)
    assert (status["outcome"], status["step"], status["reason"]) == ("requeue", 5, "exit_interval=5")
    progress = [line.split("\t") for line in (folder / "progress.txt").read_text().splitlines()]
    assert [row[3:5] for row in progress] == [["Starting job"], ["Saved checkpoint", "Iteration: 5"]]
    assert not (plain / "progress.txt").exists()


def test_tensorboard_flags(folder: Path, plain: Path) -> None:
    drawn, without = events(folder / "board"), events(plain / "board")
    tags, usual = set(drawn.Tags()["scalars"]), set(without.Tags()["scalars"])
    steps = {tag: [event.step for event in drawn.Scalars(tag)] for tag in tags}
    memory = {f"mem-{name}" for name in ("reserved-bytes", "allocated-bytes", "max-allocated-bytes", "allocated-count")}
    for tag in ("world-size", "params-norm", "num-zeros", "mem-allocated-bytes"):
        assert steps[tag] == [2, 4] and tag not in usual, tag
    assert {tag for tag in tags if tag.startswith("mem-")} <= memory
    assert {event.value for event in drawn.Scalars("world-size")} == {2.0}
    assert steps["lm loss"] == [2, 4] and [e.step for e in without.Scalars("lm loss")] == [1, 2, 3, 4, 5, 6]
    assert steps["forward-backward-time"] == [1, 2, 4, 5] and steps["evaluate-time"] == [2, 4]
    assert not any(tag.endswith("-time") and tag != "iteration-time" for tag in usual)
    assert steps["lm loss validation ppl"] == [2, 4] and "lm loss validation ppl" not in usual
    assert "loss-scale" in usual and "loss-scale" not in tags


def test_profile_flags_select_steps_and_ranks(folder: Path) -> None:
    assert os.listdir(folder / "trace") == ["rank-001.json.gz"]
    trace = json.loads(gzip.decompress((folder / "trace/rank-001.json.gz").read_bytes()))["traceEvents"]
    names = Counter(event.get("name") for event in trace)
    assert names["F0.0"] == names["F0.1"] == names["B0.1"] == 2  # steps 3 and 4
    assert any("Input Dims" in event.get("args", {}) for event in trace)
    assert any(event.get("cat") == "python_function" and "train_step" in event["name"] for event in trace)


@pytest.mark.parametrize(
    ("option", "form"),
    [
        ("max", r"max time across ranks \(ms\):\n    forward-backward \.+: \d+\.\d\d\n"),
        ("all", r"\ntimes across ranks \(ms\):\n  forward-backward:\n     rank  0: \d+\.\d\d\n"),
    ],
)
def test_timer_flags(tmp_path: Path, option: str, form: str, monkeypatch) -> None:
    """With W&B, of which there is only what it is called with."""
    asked: list[Any] = []
    log = lambda row, step: asked.append({"step": step, **row})  # noqa: E731
    run = types.SimpleNamespace(log=log, finish=lambda: asked.append("finished"))
    wandb = types.SimpleNamespace(init=lambda **how: asked.append(how) or run, __spec__="installed")
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    words = f"--train-iters 2 --run-dir {tmp_path} --log-style megatron --peak-tflops 1e-9 --timing-log-level 1"
    names = "--wandb-project p --wandb-exp-name n --wandb-entity team --wandb-save-dir there"
    assert typed(*SMALL, *words.split(), "--timing-log-option", option, *names.split()) == ExitCode.DONE
    assert re.search(form, (tmp_path / "log.txt").read_text())
    [how, *logged, last] = asked
    written = rows(tmp_path / "metrics.jsonl")
    assert logged == [{name: value for name, value in row.items() if value is not None} for row in written] != written
    assert [row["step"] for row in logged] == [1, 2, 2, 2]  # validation and test
    assert how.pop("config")["train"]["train_iters"] == 2 and last == "finished"
    assert how == {"project": "p", "name": "n", "entity": "team", "dir": "there"}


def collections(*words: str) -> list[int]:
    """Generations of all of Python's garbage that a run collects between its first step and its end."""
    seen, usual = list[int](), gc.get_threshold()

    def look(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            seen.append(info["generation"])

    real = loop.Trainer.steps

    def watched(self: Any) -> Iterator[Any]:
        gc.callbacks.append(look)
        gc.set_threshold(50)
        try:
            yield from real(self)
        finally:
            gc.callbacks.remove(look)
            gc.set_threshold(*usual)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.Trainer, "steps", watched)
        assert typed(*SMALL, "--train-iters", "6", "--eval-interval", "4", *words) == ExitCode.DONE
    return seen


def test_manual_gc_flags(tmp_path: Path) -> None:
    manual = ["--run-dir", str(tmp_path), "--manual-gc"]
    assert len(collections("--run-dir", str(tmp_path))) > 3  # by itself
    assert collections(*manual) == [2, 0]  # before and after the evaluation
    assert collections(*manual, "--manual-gc-interval", "2", "--disable-manual-gc-eval") == [2, 2, 2]
    assert collections(*manual, "--manual-gc-interval", "3", "--no-manual-gc-eval") == [2, 2]
    assert gc.isenabled()  # afterwards


def test_exit_duration_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what TensorBoard may keep in memory is what was asked for."""
    words = ["--train-iters", "1000000", "--save", str(tmp_path), "--exit-duration-in-mins", "0.02"]
    queue = ["--tensorboard-dir", str(tmp_path / "board"), "--tensorboard-queue-size", "7"]
    sizes: list[int] = []
    close = metrics.MetricsLogger.close

    def look(self: Any) -> None:
        sizes.append(self._board.file_writer.event_writer._async_writer._byte_queue.maxsize)
        close(self)

    monkeypatch.setattr(metrics.MetricsLogger, "close", look)
    assert typed(*SMALL, *words, *queue, "--disable-log-loss-scale-to-tensorboard") == ExitCode.REQUEUE
    assert sizes == [7]
    status = status_of(tmp_path)
    assert (status["outcome"], status["reason"]) == ("requeue", "exit_duration_in_mins")
    assert (tmp_path / f"iter_{status['step']:07d}" / "COMPLETE").is_file()
    drawn = events(tmp_path / "board")
    assert len(drawn.Scalars("lm loss")) == status["step"] and "loss-scale" not in drawn.Tags()["scalars"]


def test_replica_mismatch_stops_the_run(tmp_path: Path) -> None:
    """Before the next update, though no check of all hashes is due before step 8."""
    words = f"--nproc 2 --train-iters 8 --run-dir {tmp_path} --check-weight-hash-across-dp-replicas-interval 8"
    done = pretrain(*SMALL, *words.split(), fault="step.after_update:1:2:bitflip")
    status = status_of(tmp_path)
    assert (done.returncode, status["outcome"], status["step"]) == (ExitCode.BAD_RESULT, "bad-result", 2), done.stderr
    said = r"step 3, before its update: replicas of the weights differ: \S+ differs over dp on ranks \[0, 1\]"
    assert re.match(said, status["reason"])


def test_missing_rank_is_reported_after_the_timeout(tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    alone = dict(RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
    words = ["--train-iters", "2", "--run-dir", str(tmp_path), "--distributed-timeout-minutes", "0.05"]
    done = pretrain(*SMALL, *words, env={**alone, "MASTER_PORT": str(port)})
    assert done.returncode == ExitCode.PREFLIGHT and "only ranks 0 of 2 joined within 3 s" in done.stderr, done.stderr


@pytest.mark.parametrize(("flags", "code"), [((), ExitCode.INTERRUPTED), (("--exit-signal-handler",), ExitCode.DONE)])
def test_exit_signal_handler_waits_for_the_step(tmp_path: Path, flags: tuple, code: ExitCode) -> None:
    fault = "step.after_reduce:1:3:term"
    done = pretrain(*SMALL, "--nproc", "2", "--train-iters", "9", "--run-dir", tmp_path, *flags, fault=fault)
    status = status_of(tmp_path)
    assert (done.returncode, status["outcome"]) == (code, code.outcome), done.stderr
    if flags:
        assert status["step"] in (3, 4) and status["reason"].endswith("; nothing was saved")
