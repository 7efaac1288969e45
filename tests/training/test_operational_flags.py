"""The effects of Megatron-LM's operational flags on the files and the log of a short run."""

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
from program_runs import load_json_lines, load_status, run_pretrain
from test_metrics import events
from train_cases import SMALL_RUN, pretrain

from megalite.common.exit_codes import ExitCode
from megalite.config import cli
from megalite.launch.rank_info import RankInfo
from megalite.models.families import PRESETS
from megalite.training import trainer as loop
from megalite.training.logging.metrics_sinks import TensorBoardSink

LOG_FLAGS = """--log-interval 2 --log-params-norm --log-num-zeros-in-grad --log-throughput --log-progress --log-memory-interval 4
 --timing-log-level 2 --timing-log-option minmax --log-straggler --straggler-minmax-count 2 --eval-interval 2
 --check-weight-hash-across-dp-replicas-interval 3 --exit-interval 5"""
PROFILE_FLAGS = """--profile --use-pytorch-profiler --profile-step-start 2 --profile-step-end 4 --profile-ranks 1
 --pytorch-profiler-collect-shapes --pytorch-profiler-collect-callstack"""
TENSORBOARD_FLAGS = """--tensorboard-log-interval 2 --log-timers-to-tensorboard --log-memory-to-tensorboard
 --log-world-size-to-tensorboard --log-validation-ppl-to-tensorboard --no-log-loss-scale-to-tensorboard"""
SECONDS = r"\(\d+\.\d\d, \d+\.\d\d\)"


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a run of two ranks with all these flags that stops at step 5 of 8."""
    run_dir = tmp_path_factory.mktemp("run")
    flags = [*LOG_FLAGS.split(), *PROFILE_FLAGS.split(), *TENSORBOARD_FLAGS.split(), "--save", str(run_dir)]
    result = run_pretrain(
        *SMALL_RUN, "--train-iters", "8", "--nproc", "2", *flags, "--tensorboard-dir", str(run_dir / "board")
    )
    assert result.returncode == ExitCode.REQUEUE and "WARNING" not in result.stderr, result.stderr
    return run_dir


@pytest.fixture(scope="module")
def plain_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the directory of a run without these flags, in Megatron-LM's style."""
    run_dir = tmp_path_factory.mktemp("plain")
    flags = ["--train-iters", "6", "--save", str(run_dir), "--log-style", "megatron", "--eval-interval", "2"]
    assert run_command(*SMALL_RUN, *flags, "--tensorboard-dir", str(run_dir / "board")) == ExitCode.DONE
    return run_dir


def run_command(*argv: str) -> int:
    """Run the command line on one rank in this process and return the exit code."""
    parsed = cli.parse_config(list(argv), PRESETS)
    return pretrain(parsed.config, RankInfo(), parsed.warnings)


def test_log_flags(run_dir: Path, plain_dir: Path) -> None:
    text, plain_text = (run_dir / "log.txt").read_text(), (plain_dir / "log.txt").read_text()
    lines = re.findall(r"iteration +(\d+)/ +8 \|.*", text)
    assert lines == ["1", "2", "4", "5"]
    for header in (
        *(
            "done with setup ...\ntraining ...\n",
            " > number of parameters on (tensor, pipeline) model parallel rank (0, 0): ",
        ),
        "------------------------ arguments ------------------------",
    ):
        assert header in text and header in plain_text, header
    assert "[after training is done] datetime: " in plain_text
    for pattern, count in (
        (r"\| throughput per GPU \(TFLOP/s/GPU\): \d+\.\d \|", 4),
        (r"\| num zeros: \d+ \| params norm: \d+\.\d{3} \|", 4),
        (r"\(min, max\) time across ranks \(ms\):\n", 4 + 2 + 1),  # lines, evaluations, the save
        (rf"    forward-backward \.+: {SECONDS}\n", 4),
        (rf"    forward-compute \.+: {SECONDS}\n", 4),  # level 2
        (rf"    evaluate \.+: {SECONDS}\n", 2),
        (rf"    save-checkpoint \.+: {SECONDS}\n", 1),
        (r"\[Rank 0\] \(after 4 iterations\) memory \(MB\) \| allocated: ", 1),
        (r">>> Weight hashes match after 3 iterations\.\.\.\n", 1),
        # nothing is timed before the first line
        (r"stragglers \| Mn own/Rnk: [\d.]+ms/[01] [\d.]+ms/[01] \| Mx own/Rnk: ", 3),
        (r"stragglers", 3),
        (r"\[exiting program at iteration 5\] datetime: ", 1),
    ):
        assert len(re.findall(pattern, text)) == count, pattern
        # these timers are of level 0
        if "evaluate" not in pattern and "save-checkpoint" not in pattern and "min, max" not in pattern:
            assert not re.search(pattern, plain_text), pattern
    low, high = map(float, re.findall(r"    forward-backward \.+: \((.+), (.+)\)", text)[0])
    assert 0 < low <= high
    status = load_status(run_dir)
    assert (status["outcome"], status["step"], status["reason"]) == ("requeue", 5, "exit_interval=5")
    progress = [line.split("\t") for line in (run_dir / "progress.txt").read_text().splitlines()]
    assert [row[3:5] for row in progress] == [["Starting job"], ["Saved checkpoint", "Iteration: 5"]]
    assert not (plain_dir / "progress.txt").exists()


def test_tensorboard_flags(run_dir: Path, plain_dir: Path) -> None:
    board, plain_board = events(run_dir / "board"), events(plain_dir / "board")
    tags, plain_tags = set(board.Tags()["scalars"]), set(plain_board.Tags()["scalars"])
    steps = {tag: [event.step for event in board.Scalars(tag)] for tag in tags}
    memory = {f"mem-{name}" for name in ("reserved-bytes", "allocated-bytes", "max-allocated-bytes", "allocated-count")}
    for tag in ("world-size", "params-norm", "num-zeros", "mem-allocated-bytes"):
        assert steps[tag] == [2, 4] and tag not in plain_tags, tag
    assert {tag for tag in tags if tag.startswith("mem-")} <= memory
    assert {event.value for event in board.Scalars("world-size")} == {2.0}
    assert steps["lm loss"] == [2, 4] and [e.step for e in plain_board.Scalars("lm loss")] == [1, 2, 3, 4, 5, 6]
    assert steps["forward-backward-time"] == [1, 2, 4, 5] and steps["evaluate-time"] == [2, 4]
    assert not any(tag.endswith("-time") and tag != "iteration-time" for tag in plain_tags)
    assert steps["lm loss validation ppl"] == [2, 4] and "lm loss validation ppl" not in plain_tags
    assert "loss-scale" in plain_tags and "loss-scale" not in tags


def test_profile_flags_select_steps_and_ranks(run_dir: Path) -> None:
    assert os.listdir(run_dir / "trace") == ["rank-001.json.gz"]
    trace = json.loads(gzip.decompress((run_dir / "trace/rank-001.json.gz").read_bytes()))["traceEvents"]
    names = Counter(event.get("name") for event in trace)
    assert names["F0.0"] == names["F0.1"] == names["B0.1"] == 2  # steps 3 and 4
    assert any("Input Dims" in event.get("args", {}) for event in trace)
    assert any(event.get("cat") == "python_function" and "train_step" in event["name"] for event in trace)


@pytest.mark.parametrize(
    ("option", "pattern"),
    [
        ("max", r"max time across ranks \(ms\):\n    forward-backward \.+: \d+\.\d\d\n"),
        ("all", r"\ntimes across ranks \(ms\):\n  forward-backward:\n     rank  0: \d+\.\d\d\n"),
    ],
)
def test_timer_flags(tmp_path: Path, option: str, pattern: str, monkeypatch) -> None:
    """Replace W&B by a stub that records its calls."""
    calls: list[Any] = []
    log = lambda row, step: calls.append({"step": step, **row})  # noqa: E731
    run = types.SimpleNamespace(id="run-1", log=log, finish=lambda: calls.append("finished"))
    wandb = types.SimpleNamespace(init=lambda **init_options: calls.append(init_options) or run, __spec__="installed")
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    flags = f"--train-iters 2 --run-dir {tmp_path} --log-style megatron --peak-tflops 1e-9 --timing-log-level 1"
    wandb_flags = "--wandb-project p --wandb-exp-name n --wandb-entity team --wandb-save-dir there"
    assert run_command(*SMALL_RUN, *flags.split(), "--timing-log-option", option, *wandb_flags.split()) == ExitCode.DONE
    assert re.search(pattern, (tmp_path / "log.txt").read_text())
    [init_options, *logged, end] = calls
    written = load_json_lines(tmp_path / "metrics.jsonl")
    assert logged == [{name: value for name, value in row.items() if value is not None} for row in written] != written
    assert [row["step"] for row in logged] == [1, 2, 2, 2]  # validation and test
    assert init_options.pop("config")["train"]["train_iters"] == 2 and end == "finished"
    assert init_options == {"project": "p", "name": "n", "entity": "team", "dir": "there"}


def gc_generations(*flags: str) -> list[int]:
    """Return the generations that a run collects between its first step and its end."""
    generations, thresholds = list[int](), gc.get_threshold()

    def record(phase: str, info: dict[str, int]) -> None:
        if phase == "start":
            generations.append(info["generation"])

    real_steps = loop.Trainer.steps

    def steps_with_gc_callback(self: Any) -> Iterator[Any]:
        gc.callbacks.append(record)
        gc.set_threshold(50)
        try:
            yield from real_steps(self)
        finally:
            gc.callbacks.remove(record)
            gc.set_threshold(*thresholds)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.Trainer, "steps", steps_with_gc_callback)
        assert run_command(*SMALL_RUN, "--train-iters", "6", "--eval-interval", "4", *flags) == ExitCode.DONE
    return generations


def test_manual_gc_flags(tmp_path: Path) -> None:
    manual = ["--run-dir", str(tmp_path), "--manual-gc"]
    assert len(gc_generations("--run-dir", str(tmp_path))) > 3  # automatically
    assert gc_generations(*manual) == [2, 0]  # before and after the evaluation
    assert gc_generations(*manual, "--manual-gc-interval", "2", "--disable-manual-gc-eval") == [2, 2, 2]
    assert gc_generations(*manual, "--manual-gc-interval", "3", "--no-manual-gc-eval") == [2, 2]
    assert gc.isenabled()  # afterwards


def test_exit_duration_flag(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also check the size of TensorBoard's queue, as --tensorboard-queue-size sets it."""
    flags = ["--train-iters", "1000000", "--save", str(tmp_path), "--exit-duration-in-mins", "0.02"]
    queue = ["--tensorboard-dir", str(tmp_path / "board"), "--tensorboard-queue-size", "7"]
    sizes: list[int] = []
    close = TensorBoardSink.close

    def record_and_close(self: Any) -> None:
        sizes.append(self._writer.file_writer.event_writer._async_writer._byte_queue.maxsize)
        close(self)

    monkeypatch.setattr(TensorBoardSink, "close", record_and_close)
    assert run_command(*SMALL_RUN, *flags, *queue, "--disable-log-loss-scale-to-tensorboard") == ExitCode.REQUEUE
    assert sizes == [7]
    status = load_status(tmp_path)
    assert (status["outcome"], status["reason"]) == ("requeue", "exit_duration_in_mins")
    assert (tmp_path / f"iter_{status['step']:07d}" / "COMPLETE").is_file()
    board = events(tmp_path / "board")
    assert len(board.Scalars("lm loss")) == status["step"] and "loss-scale" not in board.Tags()["scalars"]


def test_replica_mismatch_stops_the_run(tmp_path: Path) -> None:
    """Stop before the next update although no check of all hashes is due before step 8."""
    flags = f"--nproc 2 --train-iters 8 --run-dir {tmp_path} --check-weight-hash-across-dp-replicas-interval 8"
    result = run_pretrain(*SMALL_RUN, *flags.split(), fault="step.after_update:1:2:bitflip")
    status = load_status(tmp_path)
    assert (result.returncode, status["outcome"], status["step"]) == (ExitCode.BAD_RESULT, "bad-result", 2), (
        result.stderr
    )
    pattern = r"step 3, before its update: replicas of the weights differ: \S+ differs over dp on ranks \[0, 1\]"
    assert re.match(pattern, status["reason"])


def test_missing_rank_is_reported_after_the_timeout(tmp_path: Path) -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port = server.getsockname()[1]
    rank_variables = dict(RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", LOCAL_WORLD_SIZE="2", MASTER_ADDR="127.0.0.1")
    flags = ["--train-iters", "2", "--run-dir", str(tmp_path), "--distributed-timeout-minutes", "0.05"]
    result = run_pretrain(*SMALL_RUN, *flags, env={**rank_variables, "MASTER_PORT": str(port)})
    assert result.returncode == ExitCode.PREFLIGHT and "only ranks 0 of 2 joined within 3 s" in result.stderr, (
        result.stderr
    )


@pytest.mark.parametrize(("flags", "code"), [((), ExitCode.INTERRUPTED), (("--exit-signal-handler",), ExitCode.DONE)])
def test_exit_signal_handler_waits_for_the_step(tmp_path: Path, flags: tuple, code: ExitCode) -> None:
    fault = "step.after_reduce:1:3:term"
    result = run_pretrain(*SMALL_RUN, "--nproc", "2", "--train-iters", "9", "--run-dir", tmp_path, *flags, fault=fault)
    status = load_status(tmp_path)
    assert (result.returncode, status["outcome"]) == (code, code.outcome), result.stderr
    if flags:
        assert status["step"] in (3, 4) and status["reason"].endswith("; nothing was saved")
