"""Exact log lines, metrics.jsonl, and TensorBoard events as TensorBoard's own reader returns them.

A run continues when any of its files cannot be written.
"""

import datetime
import importlib.util
import json
import math
import os
import re
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from program_runs import load_status, run_pretrain
from train_cases import SMALL_RUN, config_from, pretrain

from megalite.config.options import Config, LogConfig, iter_options
from megalite.training.datasets import NamedDataset
from megalite.training.job.command import missing_packages
from megalite.training.logging import log_format
from megalite.training.logging.event_log import EventLog
from megalite.training.logging.log_format import Speed, aligned_table, table
from megalite.training.logging.metrics_logger import MetricsLogger
from megalite.training.logging.metrics_sinks import QueuedSink
from megalite.training.logging.status import finalize_status
from megalite.training.logging.step_log import step_metrics
from megalite.training.state import Progress, Run, StepResult
from tools.plots import curves
from tools.plots.run_data import read_runs

NOW = datetime.datetime(2026, 8, 22, 10, 15, 3, 123456)
METRICS: dict[str, Any] = {
    **dict(step=100, last_step=500_000, consumed_samples=25_600, consumed_tokens=25_600 * 2048, batch_size=256),
    **dict(loss=7.654321, lr=1.5e-4, grad_norm=1.2351, loss_scale=1.0, skipped=0, step_s=5.1324, data_s=0.0154),
    **dict(tokens_per_step=256 * 2048, memory_gib=31.42, memory_limit_gib=79.6, nan=0, steps=1),
}
VALIDATION_SET = NamedDataset("", None)
STEP = StepResult(
    loss=6.5,
    losses={"loss": 6.5},
    grad_norm=1.25,
    lr=1.5e-4,
    batch_size=256,
    skipped=False,
    stop=False,
    data_s=0,
    step_s=5,
)
# 412.7 TFLOP/s per device in the line above
SPEED = Speed(flops_per_token=412.7e12 * 8 * 5.1324 / (256 * 2048), devices=8, peak_tflops=989.4)


def metrics_of(step: int, samples: int = 0, **changes: Any) -> dict[str, Any]:
    """Return the metrics of a single step."""
    scaler = SimpleNamespace(scale=changes.pop("scale", 1.0))
    run = SimpleNamespace(progress=Progress(step, samples), last_step=500_000, loss_scaler=scaler, seq_length=2048)
    return step_metrics(cast(Run, run), [replace(STEP, **changes)], None)


def test_megatron_log_line_is_exact() -> None:
    def line(throughput: bool = False, **changes: Any) -> str:
        return log_format.megatron_line(SPEED.add_rates(METRICS | changes), NOW, throughput)

    assert line(throughput=True) == (
        " [2026-08-22 10:15:03.123456] iteration      100/  500000 | consumed samples:        25600 |"
        " elapsed time per iteration (ms): 5132.4 | throughput per GPU (TFLOP/s/GPU): 412.7 |"
        " learning rate: 1.500000E-04 | global batch size:   256 | lm loss: 7.654321E+00 | loss scale: 1.0 |"
        " grad norm: 1.235 | number of skipped iterations:   0 | number of nan iterations:   0 |"
    )
    norms = " | grad norm: 1.235 | num zeros: 97 | params norm: 356.789 | number of skipped iterations:   0 |"
    assert norms in line(zeros=97, params_norm=356.7891)
    assert " | lm loss: 7.654321E+00 | lm z_loss: 1.230000E-03 | loss scale: 1.0 |" in line(z_loss=0.00123)
    skipped_line = line(loss=None, skipped=3, nan=2, loss_scale=2.0**16)
    assert "throughput" not in skipped_line and "lm loss" not in skipped_line
    end = (
        " loss scale: 65536.0 | grad norm: 1.235 | number of skipped iterations:   3 | number of nan iterations:   2 |"
    )
    assert skipped_line.endswith(end)


def test_hfu_counts_recomputed_flops() -> None:
    """Recomputing a third of the model's FLOPs gives an HFU of 4/3 of the MFU, and a peak below it is too low."""
    plain = SPEED.add_rates(METRICS)
    assert plain["hfu"] is None and "HFU" not in log_format.megalite_line(plain, NOW)
    recomputed = replace(SPEED, recomputed=1 / 3).add_rates(METRICS)
    assert recomputed["mfu"] == plain["mfu"] == pytest.approx(412.7 / 989.4)
    assert recomputed["hfu"] == pytest.approx(4 / 3 * 412.7 / 989.4)
    assert "MFU 41.7%  HFU 55.6%" in log_format.megalite_line(recomputed, NOW)
    assert log_format.metrics_row(recomputed)["perf/hfu"] == recomputed["hfu"]
    too_fast = replace(SPEED, recomputed=1.5).add_rates(METRICS)  # 1032 TFLOP/s
    assert too_fast["too_fast"] and too_fast["mfu"] is too_fast["hfu"] is None


def test_megatron_validation_and_timer_lines() -> None:
    expected = "[after dataloaders are built] datetime: 2026-08-22 10:15:03.123456 "
    assert log_format.megatron_text("moment", what="after dataloaders are built", now=NOW) == expected
    for reason, end in (
        ("SIGUSR1", "exiting program after receiving SIGUSR1."),
        ("SIGTERM; nothing was saved", "exiting program after receiving SIGTERM."),
        ("exit_interval=5", "exiting program at iteration 5"),
        ("reached the last step", "after training is done"),
        ("exit_duration_in_mins", "exiting program after 1.5 minutes"),
    ):
        assert log_format.megatron_end(reason, 5, 1.5) == end
    expected = " > number of parameters on (tensor, pipeline) model parallel rank (1, 3): 123456"
    assert log_format.megatron_text("parameters", tp=1, pp=3, number=123456) == expected
    assert log_format.megatron_text("sizes", world=8, dp=2, cp=1, tp=2, pp=2) == (
        "using world size: 8, data-parallel size: 2, context-parallel size: 1, hierarchical context-parallel sizes: "
        "None, tensor-model-parallel size: 2, pipeline-model-parallel size: 2"
    )
    first, *lines, last = log_format.megatron_arguments(Config()).split("\n")
    assert (first, last) == (
        "------------------------ arguments ------------------------",
        "-------------------- end of arguments ---------------------",
    )
    assert (
        f"  adam_beta1 {'.' * 38} 0.9" in lines and len(lines) == len(list(iter_options())) and lines == sorted(lines)
    )


def test_timers_in_megatrons_three_formats() -> None:
    times = {"forward-backward": [0.5, 0.25, 0.0], "evaluate": [0.0, 0.0, 0.0]}
    assert log_format.megatron_timers("minmax", times).split("\n") == [
        "(min, max) time across ranks (ms):",
        f"    forward-backward {'.' * 31}: (250.00, 500.00)",  # 48 columns
    ]
    max_lines = f"max time across ranks (ms):\n    forward-backward {'.' * 31}: 500.00"
    assert log_format.megatron_timers("max", times) == max_lines
    all_lines = "times across ranks (ms):\n  forward-backward:\n     rank  0: 500.00\n     rank  1: 250.00"
    assert log_format.megatron_timers("all", times) == all_lines
    assert log_format.megatron_timers("minmax", {"evaluate": [0.0]}) == ""


def test_megalite_log_line_is_exact() -> None:
    assert log_format.megalite_line(SPEED.add_rates(METRICS), NOW) == (
        "10:15:03  step   100/500000  loss 7.6543  lr 1.5e-04  grad norm 1.24 | 12.8k tok/s/gpu  413 TF/s  MFU 41.7% | "
        "31.4/80 GiB | data 0.3% | eta 29d 16:41:26"
    )
    slow_step = METRICS | dict(loss=None, skipped=2, loss_scale=1024.0, step_s=1000.0, step=499_999)
    assert log_format.megalite_line(replace(SPEED, peak_tflops=None).add_rates(slow_step), NOW) == (
        "10:15:03  step 499999/500000  loss n/a  lr 1.5e-04  grad norm 1.24  scale 1024 | 66 tok/s/gpu  2.12 TF/s  MFU n/a | "
        "31.4/80 GiB | data 0.0% | eta 00:16:40 | skipped 2"
    )
    for width, rest in (
        (
            143,
            "  loss 7.6543  lr 1.5e-04  grad norm 1.24 | 12.8k tok/s/gpu  413 TF/s  MFU 41.7% | 31.4/80 GiB | eta 29d 16:41:26",
        ),
        (124, "  loss 7.6543  lr 1.5e-04  grad norm 1.24 | 12.8k tok/s/gpu  413 TF/s  MFU 41.7% | 31.4/80 GiB"),
        (104, "  loss 7.6543  lr 1.5e-04  grad norm 1.24 | 12.8k tok/s/gpu  MFU 41.7%"),
        (92, "  loss 7.6543  lr 1.5e-04  grad norm 1.24 | 12.8k tok/s/gpu"),
        (84, "  loss 7.6543  lr 1.5e-04  grad norm 1.24"),
        (64, "  loss 7.6543  grad norm 1.24"),
        (20, "  loss 7.6543"),
    ):
        line = log_format.megalite_line(SPEED.add_rates(METRICS), NOW, width)
        assert line == "10:15:03  step   100/500000" + rest, width
        assert len(line) <= width or width == 20
    values = SPEED.add_rates(METRICS | dict(z_loss=0.00123, params_norm=356.7891, zeros=97))
    expected = "loss 7.6543  z-loss 1.23e-03  lr 1.5e-04  grad norm 1.24  param norm 356.79  zeros 97 | 12.8k"
    assert expected in log_format.megalite_line(values, NOW)


def test_validation_lines() -> None:
    dashes, line, end = log_format.megatron_validation_lines("iteration 1000", 2.345678).split("\n")
    assert line == " validation loss at iteration 1000 | lm loss value: 2.345678E+00 | lm loss PPL: 1.044035E+01 | "
    assert dashes == end == "-" * (len(line) + 1)
    assert f"{math.exp(2.345678):.6E}" == "1.044035E+01"
    assert "PPL: 4.851652E+08" in log_format.megatron_validation_lines("iteration 1", 1e9)  # exp(20): no overflow
    expected = "10:15:03  step   120  validation loss 3.8172  ppl 45.477"
    assert log_format.megalite_validation_line(120, "validation", 3.8172, None, NOW) == expected
    assert log_format.megalite_validation_line(120, "validation wiki", 3.8172, 1.25, NOW).endswith(
        "bits per byte 1.2500"
    )


def rows(run_dir: Path) -> list[dict[str, Any]]:
    def reject(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    text = (run_dir / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line, parse_constant=reject) for line in text.splitlines()]


@pytest.mark.parametrize("style", ["megalite", "megatron"])
def test_console_log_and_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str], style: str) -> None:
    for step in (100, 200):  # the second logger is a resumed run's: it appends to the same files
        report = MetricsLogger(tmp_path / "run", SPEED, LogConfig(log_style=style))
        report.log_train(METRICS | dict(step=step))
        report.log_validation(Progress(step, 25_600, 52_428_800), {"loss": 7.5}, VALIDATION_SET)
        report.log_validation(Progress(step, 25_600, 52_428_800), {"loss": 8.5}, VALIDATION_SET, " on test set")
        report.close()
    output = capsys.readouterr().out
    assert output == (tmp_path / "run/log.txt").read_text(encoding="utf-8")
    assert ("lm loss: 7.654321E+00" in output) == ("lm loss PPL" in output) == (style == "megatron")
    assert ("test loss 8.5000" in output) == (style == "megalite")
    train, valid, test = rows(tmp_path / "run")[:3]
    speed = {"tokens_per_s_per_gpu": 256 * 2048 / 5.1324 / 8, "tflops_per_gpu": 412.7, "mfu": 412.7 / 989.4}
    train_values = {"loss": 7.654321, "lr": 1.5e-4, "grad_norm": 1.2351, "tokens": 25_600 * 2048, "batch_size": 256}
    assert train == {
        **{"step": 100, "tokens": 25_600 * 2048, "mem/max_allocated_gib": 31.42},
        **{f"train/{name}": value for name, value in (train_values | {"loss_scale": 1.0, "skipped": 0}).items()},
        **{f"perf/{name}": pytest.approx(value) for name, value in speed.items()},
        **{"perf/step_s": 5.1324, "perf/steps": 1, "perf/data_s": 0.0154},
    }
    assert valid == {"step": 100, "tokens": 52_428_800, "val/valid/loss": 7.5, "val/valid/ppl": math.exp(7.5)}
    assert test == {"step": 100, "tokens": 52_428_800, "val/test/loss": 8.5, "val/test/ppl": math.exp(8.5)}
    assert [r["step"] for r in rows(tmp_path / "run")] == [100] * 3 + [200] * 3


def test_missing_metrics_are_null(tmp_path: Path) -> None:
    report = MetricsLogger(tmp_path, replace(SPEED, peak_tflops=None), board(tmp_path / "tb"))
    report.log_train(METRICS | dict(loss=None, grad_norm=math.inf, skipped=1, reserved_gib=40.0))
    report.log_step(metrics_of(100, loss=math.nan, skipped=True), {})
    report.log_train(METRICS | dict(step=200, loss=math.nan))
    report.log_step(metrics_of(200, loss=math.nan), {})
    report.close()
    first, second = rows(tmp_path)
    assert first["train/loss"] is first["perf/mfu"] is first["train/grad_norm"] is second["train/loss"] is None
    assert first["mem/max_reserved_gib"] == 40.0 and "mem/max_reserved_gib" not in second
    assert [e.step for e in events(tmp_path / "tb").Scalars("lm loss")] == [200]


def events(board_dir: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(board_dir))
    accumulator.Reload()
    return accumulator


def board(board_dir: Path, **options: Any) -> LogConfig:
    return LogConfig(log_style="megalite", tensorboard_dir=str(board_dir), **options)


def test_tensorboard_has_megatrons_tags(tmp_path: Path) -> None:
    report = MetricsLogger(tmp_path, SPEED, board(tmp_path / "tb"))
    report.log_train(METRICS)
    report.log_step(metrics_of(100, 25_600, scale=2.0), {})
    report.log_validation(Progress(100, 25_600, 52_428_800), {"loss": 7.5}, VALIDATION_SET)
    report.log_validation(Progress(100, 25_600, 52_428_800), {"loss": 8.5}, VALIDATION_SET, " on test set")
    report.close()
    options: dict[str, Any] = {f"log_{n}_to_tensorboard": True for n in ("timers", "validation_ppl", "world_size")}
    log = board(tmp_path / "all", **options, log_loss_scale_to_tensorboard=False)
    report = MetricsLogger(tmp_path, SPEED, replace(log, log_style="megatron"))
    report.log_step(
        metrics_of(100, 25_600, zeros=97, losses={"loss": 6.5, "z_loss": 0.1}) | {"params_norm": 356.7},
        {"mem-allocated-bytes": 5.0},
    )
    report.log_timers(100, {"forward-backward": [0.25, 0.5]})
    report.log_validation(Progress(100, 25_600, 52_428_800), {"loss": 7.5}, NamedDataset("wiki", None, 4.0))
    report.close()
    assert " validation-wiki loss at iteration 100 | lm loss value: 7.5" in (tmp_path / "log.txt").read_text()
    assert rows(tmp_path)[-1]["val/wiki/bpb"] == pytest.approx(7.5 / math.log(2) / 4)
    default_events = events(tmp_path / "tb")
    tags = ["learning-rate", "batch-size", "lm loss", "loss-scale", "grad-norm", "lm loss validation"]
    twins = [f"{t} vs samples" for t in tags]
    assert set(default_events.Tags()["scalars"]) == {*tags, *twins, "iteration-time", "throughput", "mfu"}
    for tag, value in (("lm loss", 6.5), ("lm loss validation", 7.5), ("batch-size", 256.0)):
        [event] = default_events.Scalars(tag)
        [twin] = default_events.Scalars(f"{tag} vs samples")
        assert (event.step, twin.step) == (100, 25_600)
        assert event.value == twin.value == pytest.approx(value, rel=1e-6)
    tags = [
        "learning-rate",
        "batch-size",
        "lm loss",
        "lm z_loss",
        "world-size",
        "grad-norm",
        "num-zeros",
        "params-norm",
    ]
    tags += ["lm loss validation-wiki", "lm loss validation-wiki ppl"]
    single_tags = ["mem-allocated-bytes", "forward-backward-time"]
    all_events = events(tmp_path / "all")
    assert set(all_events.Tags()["scalars"]) == {*tags, *[f"{t} vs samples" for t in tags], *single_tags}
    assert all_events.Scalars("forward-backward-time")[0].value == 0.5


def test_hfu_and_efficiency_reach_tensorboard(tmp_path: Path) -> None:
    """The values are those of metrics.jsonl; one that is not known has no tag and no key."""
    values = {"gpu_utilization": 0.75, "cost_per_sample": None}
    report = MetricsLogger(tmp_path, replace(SPEED, recomputed=1 / 3), board(tmp_path / "tb"))
    report.log_train(METRICS | {"efficiency": values})
    report.close()
    written, [row] = events(tmp_path / "tb"), rows(tmp_path)
    for tag, key in (("mfu", "perf/mfu"), ("hfu", "perf/hfu"), ("efficiency/gpu_utilization",) * 2):
        [event] = written.Scalars(tag)
        assert event.value == pytest.approx(row[key], rel=1e-6)
    assert row["efficiency/gpu_utilization"] == 0.75
    assert "efficiency/cost_per_sample" not in row | dict.fromkeys(written.Tags()["scalars"])


def test_mfu_above_the_peak_is_explained_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = MetricsLogger(tmp_path, replace(SPEED, peak_tflops=2.01e-05, too_low="it was measured while"))
    for step in (100, 200):
        report.log_train(METRICS | dict(step=step))
    report.close()
    output = capsys.readouterr().out
    assert output.count("MFU n/a") == 2
    assert output.count("note: MFU is n/a: 413 TFLOP/s is above the peak of 2.01e-05: it was measured while") == 1
    assert [row["perf/mfu"] for row in rows(tmp_path)] == [None, None]


def log_everything(report: MetricsLogger) -> None:
    for step in (1, 2, 3):
        report.log_train(METRICS | dict(step=step))
        report.log_step(metrics_of(step, step), {})
    report.warning("this is missing")
    report.log_validation(Progress(3, 3, 3), {"loss": 7.5}, VALIDATION_SET)
    report.log_summary({"steps": "3"})
    report.close()


def test_full_disk_is_reported_once_and_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
    try:
        log_everything(MetricsLogger(tmp_path, SPEED, board(tmp_path / "tb")))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    console = capsys.readouterr()
    assert "step     3/" in console.out and "validation loss  7.5000" in console.out  # the console still works
    log, metrics = (str(tmp_path / name) for name in ("log.txt", "metrics.jsonl"))
    warnings = console.err.splitlines()
    reason = "File too large; training continues, and lost writes are counted"
    assert warnings.count(f"WARNING: {log}: {reason}") == 1
    assert f"WARNING: {metrics}: 4 writes failed" in warnings
    assert f"WARNING: {log}: 6 writes failed" in warnings
    assert sum("TensorBoard: " in line for line in warnings) == 2  # and no traceback from its thread
    assert len(warnings) == 7  # and the warning


def test_disk_with_room_again_gets_complete_lines(tmp_path: Path) -> None:
    report = MetricsLogger(tmp_path, SPEED)
    report.log_train(METRICS)
    real_file = report._rows.file
    report._rows.file = SimpleNamespace(write=lambda data: real_file.write(data[:20]), fileno=real_file.fileno)
    report.log_train(METRICS | dict(step=200))  # torn
    report._rows.file = real_file
    report.log_train(METRICS | dict(step=300))
    report.close()
    first, torn, last = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert json.loads(first)["step"] == 100 and len(torn) == 20 and json.loads(last)["step"] == 300


@pytest.mark.parametrize("cause", ["under a file", "closed"])
def test_failed_writes_never_raise(tmp_path: Path, cause: str, capsys) -> None:
    (tmp_path / "file").touch()
    run_dir = tmp_path / ("file/run" if cause == "under a file" else "run")
    report = MetricsLogger(run_dir, SPEED, board(run_dir / "tb"))
    if cause == "closed":
        report.log_train(METRICS)
        report._log.file.close()
        report._rows.file.close()
        report._tag_sinks[0].close()
        broken_sink = SimpleNamespace(name="TensorBoard", open=lambda: None, log=raise_closed, close=raise_closed)
        report._tag_sinks = [QueuedSink(broken_sink, report.try_write)]
    log_everything(report)
    err = capsys.readouterr().err
    for name in (str(run_dir / "log.txt"), str(run_dir / "metrics.jsonl"), "TensorBoard"):
        assert err.count(f"WARNING: {name}: ") == 2, name  # at the first failure, and with the count


def raise_closed(*args: Any) -> None:
    raise RuntimeError("the queue is closed")


def test_run_resumes_with_a_full_console(tmp_path: Path) -> None:
    """Print to a full console before the metrics logger exists, and from other ranks: neither ends the run."""
    flags = [*SMALL_RUN, "--eval-iters", "0", "--lr-decay-style", "constant", "--save", tmp_path, "--nproc", "2"]
    flags += ["--load", tmp_path, "--tensor-model-parallel-size", "2", "--log-style", "megatron"]
    with open("/dev/full", "w") as full_device:
        for steps in ("1", "2"):
            streams = {"stdout": full_device, "stderr": full_device, "capture_output": False}
            assert run_pretrain(*flags, "--train-iters", steps, **streams).returncode == 0
    assert load_status(tmp_path)["step"] == 2 and "iteration        2/ " in (tmp_path / "log.txt").read_text()


def test_summary_has_last_losses_and_warnings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "timeline.json").touch()
    log_everything(MetricsLogger(tmp_path, SPEED))
    console = capsys.readouterr()
    assert "WARNING: this is missing" in console.err  # at once
    text = (tmp_path / "log.txt").read_text()
    assert text.count("WARNING: this is missing") == 2 and text.endswith("WARNING: this is missing\n")
    for pattern in (
        r"steps +3 *$",
        r"training loss +7\.6543 at step 3 *$",
        r"validation loss +7\.5000 at step 3, perplexity 1808",
        r"metrics +\S+metrics.jsonl",
        r"timeline +\S+timeline.json",
    ):
        assert re.search(pattern, text, re.MULTILINE), pattern


@pytest.mark.parametrize("option", ["tensorboard_dir", "wandb_project", "mlflow_experiment", "trackio_project"])
def test_missing_logging_package_is_named(tmp_path: Path, monkeypatch, option: str) -> None:
    package, find_spec = option.split("_")[0], importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find_spec(name))
    log = LogConfig(**{option: str(tmp_path / "there")})  # type: ignore[arg-type]
    [message] = missing_packages(log)
    assert message.startswith(f"{option}=") and f"needs the package {package}; pip install {package}" in message
    assert missing_packages(LogConfig()) == []


def test_log_line_length() -> None:
    """Do not wrap lines in files and pipes, so that a search finds complete sentences."""
    # gloo's errors begin with a path in brackets, which rich would take for the end of a tag
    reason = "lost another rank ([/third_party/pair.cc:553] closed by peer [127.0.0.1]:40934), run[1] :smile:"
    assert reason in table({"outcome": reason})
    sentences = "and so on " * 30
    assert table({"outcome": sentences + "end", "data": "x\ny"}) == f"outcome  {sentences}end\ndata     x\n         y"
    assert aligned_table([("run", "s"), ("a", "10"), ("b", "1")]) == "run   s\na    10\nb     1"


def test_moe_metrics_are_in_every_log(tmp_path: Path) -> None:
    """Log the balancing losses, the imbalance of experts and, on request, the losses of each layer."""
    model = " --num-experts 4 --moe-layer-freq [0,1,0,0] --swiglu --disable-bias-linear --moe-per-layer-logging"
    losses = " --moe-router-load-balancing-type seq_aux_loss --moe-aux-loss-coeff 0.1 --moe-z-loss-coeff 0.1"
    output_flags = f" --run-dir {tmp_path / 'run'} --tensorboard-dir {tmp_path / 'board'} --train-iters 3"
    assert pretrain(config_from(" ".join(SMALL_RUN) + model + losses + output_flags)) == 0
    rows = map(json.loads, (tmp_path / "run" / "metrics.jsonl").read_text().splitlines())
    row = next(row for row in rows if row["step"] == 3)
    assert sum(row["moe/load"]) == pytest.approx(4) and max(row["moe/load"]) == pytest.approx(row["moe/imbalance"])
    assert row["moe/rank_imbalance"] == 1 and "moe/load_balancing_loss" not in row
    assert 1 <= row["moe/seq_load_balancing_loss"] < 4 and row["moe/router_z_loss"] > 0
    line = (tmp_path / "run" / "log.txt").read_text()
    assert re.search(r"  seq-aux [\d.]+  router-z [\d.]+  lr .* \| experts [\d.]+ \| ", line)
    board = events(tmp_path / "board")
    for tag in ("seq_load_balancing_loss", "z_loss"):
        assert [e.value for e in board.Scalars(tag)] == [e.value for e in board.Scalars(f"moe/{tag}_layer_1")]
    assert not any("layer_0" in tag for tag in board.Tags()["scalars"])
    picture = curves.experts(read_runs([tmp_path / "run"]))
    assert picture is not None and len(picture.draw(6.0).axes[0].lines) == 4 + 2


# ---- complete runs with unwritable files, or with secrets in the environment
ROOT = Path(__file__).resolve().parents[2]


def test_run_with_unwritable_files_trains(tmp_path: Path) -> None:
    """Plant a pipe without a reader, a link, a directory, and a file instead of a directory; close stdout."""
    os.mkfifo(tmp_path / "log.txt")
    (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
    for name in ("status.json", "run_config.toml", "timeline.json", "report.json"):
        (tmp_path / name / "inside").mkdir(parents=True)
    (tmp_path / "board").touch()
    flags = ["--train-iters", "3", "--run-dir", str(tmp_path), "--tensorboard-dir", str(tmp_path / "board")]
    argv = [sys.executable, "pretrain_gpt.py", *SMALL_RUN, *flags, "--profile-pipeline", "2"]
    closed = ["sh", "-c", 'exec "$@" >&-', "sh"]
    result = subprocess.run([*closed, *argv], stderr=subprocess.PIPE, text=True, timeout=120, cwd=ROOT)
    stderr = result.stderr
    assert result.returncode == 0 and "Traceback" not in stderr, stderr
    for name in ("log.txt", "metrics.jsonl", "status.json", "run_config.toml", "timeline.json"):
        assert str(tmp_path / name) in stderr, name
    assert "WARNING: TensorBoard: " in stderr and "WARNING: report.json: " in stderr
    assert [path.name for path in tmp_path.glob(".*")] == [".run.lock"]  # nothing half-written


SECRETS = {
    "FSSPEC_FTP_PASSWORD": "hunter2-of-a-store",
    "AWS_SECRET_ACCESS_KEY": "hunter2-of-a-bucket",
    "WANDB_API_KEY": "hunter2-of-a-log",
    "HF_TOKEN": "hunter2-of-a-hub",
}


def test_run_files_do_not_contain_the_environment(tmp_path: Path, monkeypatch, capfd) -> None:
    for name, value in SECRETS.items():
        monkeypatch.setenv(name, value)
    save = ["--save", str(tmp_path), "--log-style", "megatron", "--log-progress", "--train-iters", "3"]
    assert pretrain(config_from([*SMALL_RUN, *save, "--tensorboard-dir", str(tmp_path / "board")])) == 0
    assert "hunter2" not in "".join(capfd.readouterr())
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    expected = {"log.txt", "metrics.jsonl", "run_config.toml", "status.json", "manifest.json", "progress.txt"}
    assert expected <= {path.name for path in files}
    assert [path.name for path in files if b"hunter2" in path.read_bytes()] == []


def test_events_never_block_or_raise(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "events.jsonl")
    os.mkfifo(tmp_path / "status.json")
    event_log = EventLog(tmp_path)
    for _ in range(3):
        event_log.add("something")
    finalize_status(tmp_path, config_from([*SMALL_RUN, "--train-iters", "1"]), 1, "rank 1 died", 0.0)
    assert capsys.readouterr().err.count(f"WARNING: {tmp_path / 'events.jsonl'}: ") == 1
    (tmp_path / "events.jsonl").unlink()
    (tmp_path / "events.jsonl").symlink_to("/dev/full")
    EventLog(tmp_path).add("something")
    message = "is a link to another file, which a run does not open; remove it; events are lost there"
    assert message in capsys.readouterr().err
    EventLog(Path("/proc/run")).add("something")
    assert "/proc/run/events.jsonl" in capsys.readouterr().err
