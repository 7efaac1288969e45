"""Log lines to the letter, metrics.jsonl, and TensorBoard events read back with TensorBoard's own reader."""

from __future__ import annotations

import datetime
import importlib.util
import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megalite.train.metrics import (
    Interval,
    Reporter,
    Speed,
    duration,
    megalite_line,
    megalite_validation_line,
    megatron_line,
    megatron_validation_lines,
    missing_packages,
)

NOW = datetime.datetime(2026, 8, 22, 10, 15, 3, 123456)
SEEN = Interval(
    step=100,
    last_step=500_000,
    consumed_samples=25_600,
    consumed_tokens=25_600 * 2048,
    batch_size=256,
    loss=7.654321,
    lr=1.5e-4,
    grad_norm=1.2351,
    loss_scale=1.0,
    skipped=0,
    step_s=5.1324,
    data_s=0.0154,
    tokens_per_step=256 * 2048,
    memory_gib=31.42,
    memory_limit_gib=79.6,
)
# 412.7 TFLOP/s per device in the interval above
SPEED = Speed(flops_per_token=412.7e12 * 8 * 5.1324 / (256 * 2048), devices=8, peak_tflops=989.4)


def test_megatrons_line_to_the_letter() -> None:
    assert megatron_line(SEEN, SPEED, NOW, throughput=True) == (
        " [2026-08-22 10:15:03.123456] iteration      100/  500000 | consumed samples:        25600 |"
        " elapsed time per iteration (ms): 5132.4 | throughput per GPU (TFLOP/s/GPU): 412.7 |"
        " learning rate: 1.500000E-04 | global batch size:   256 | lm loss: 7.654321E+00 | loss scale: 1.0 |"
        " grad norm: 1.235 | number of skipped iterations:   0 | number of nan iterations:   0 |"
    )
    line = megatron_line(replace(SEEN, z_loss=0.00123), SPEED, NOW, throughput=False)
    assert " | lm loss: 7.654321E+00 | z_loss: 1.230000E-03 | loss scale: 1.0 |" in line
    line = megatron_line(replace(SEEN, loss=None, skipped=3, nan=2, loss_scale=2.0**16), SPEED, NOW, throughput=False)
    assert "throughput" not in line and "lm loss" not in line
    assert line.endswith(
        " loss scale: 65536.0 | grad norm: 1.235 | number of skipped iterations:   3 | number of nan iterations:   2 |"
    )


def test_megalites_line_to_the_letter() -> None:
    assert megalite_line(SEEN, SPEED, NOW) == (
        "10:15:03  step   100/500000  loss 7.6543  lr 1.5e-04  gnorm 1.24 | 12.8k tok/s/gpu  413 TF/s  MFU 41.7% | "
        "31.4/80 GiB | data 0.3% | eta 29d 16:41:26"
    )
    slow = replace(SEEN, loss=None, skipped=2, loss_scale=1024.0, step_s=1000.0, step=499_999)
    assert megalite_line(slow, replace(SPEED, peak_tflops=None), NOW) == (
        "10:15:03  step 499999/500000  loss n/a  lr 1.5e-04  gnorm 1.24  scale 1024 | 66 tok/s/gpu  2.12 TF/s  MFU n/a | "
        "31.4/80 GiB | data 0.0% | eta 00:16:40 | skipped 2"
    )


def test_rates_are_per_device() -> None:
    speed = Speed(flops_per_token=6e9, devices=4, peak_tflops=200.0)
    i = replace(SEEN, tokens_per_step=1_000_000, step_s=2.0)
    assert speed.tokens_per_s(i) == 125_000
    assert speed.tflops(i) == pytest.approx(750)
    assert speed.mfu(i) == pytest.approx(3.75)
    assert replace(speed, peak_tflops=None).mfu(i) is None


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "00:00:00"), (86_399.9, "23:59:59"), (86_400, "1d 00:00:00"), (216_061, "2d 12:01:01")],
)
def test_durations_longer_than_a_day(seconds: float, text: str) -> None:
    assert duration(seconds) == text


def test_validation_lines() -> None:
    dashes, line, again = megatron_validation_lines("iteration 1000", 2.345678).split("\n")
    assert line == " validation loss at iteration 1000 | lm loss value: 2.345678E+00 | lm loss PPL: 1.044035E+01 | "
    assert dashes == again == "-" * len(line)
    assert f"{math.exp(2.345678):.6E}" == "1.044035E+01"
    assert "PPL: 4.851652E+08" in megatron_validation_lines("iteration 1", 1e9)  # exp(20): no overflow
    assert megalite_validation_line(120, "validation", 3.8172, None, NOW) == (
        "10:15:03  step   120  validation loss 3.8172  ppl 45.477"
    )
    assert megalite_validation_line(120, "validation wiki", 3.8172, 1.25, NOW).endswith("bits per byte 1.2500")


def rows(folder: Path) -> list[dict[str, Any]]:
    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    text = (folder / "metrics.jsonl").read_text(encoding="utf-8")
    return [json.loads(line, parse_constant=refuse) for line in text.splitlines()]


@pytest.mark.parametrize("style", ["megalite", "megatron"])
def test_console_log_and_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str], style: str) -> None:
    for step in (100, 200):  # the second is a resumed run: it goes on in the same files
        report = Reporter(tmp_path / "run", SPEED, style=style)
        report.train(replace(SEEN, step=step))
        report.validation(step, 25_600, 52_428_800, 7.5)
        report.validation(step, 25_600, 52_428_800, 8.5, " on test set")
        report.close()
    shown = capsys.readouterr().out
    assert shown == (tmp_path / "run/log.txt").read_text(encoding="utf-8")
    assert ("lm loss: 7.654321E+00" in shown) == ("lm loss PPL" in shown) == (style == "megatron")
    assert ("test loss 8.5000" in shown) == (style == "megalite")
    train, valid, test = rows(tmp_path / "run")[:3]
    assert train == {
        "step": 100,
        "tokens": 25_600 * 2048,
        "train/loss": 7.654321,
        "train/lr": 1.5e-4,
        "train/grad_norm": 1.2351,
        "train/tokens": 25_600 * 2048,
        "train/batch_size": 256,
        "train/loss_scale": 1.0,
        "train/skipped": 0,
        "perf/tokens_per_s_per_gpu": pytest.approx(256 * 2048 / 5.1324 / 8),
        "perf/tflops_per_gpu": pytest.approx(412.7),
        "perf/mfu": pytest.approx(412.7 / 989.4),
        "perf/step_s": 5.1324,
        "perf/data_s": 0.0154,
        "mem/max_allocated_gib": 31.42,
    }
    assert valid == {"step": 100, "tokens": 52_428_800, "val/valid/loss": 7.5, "val/valid/ppl": math.exp(7.5)}
    assert test == {"step": 100, "tokens": 52_428_800, "val/test/loss": 8.5, "val/test/ppl": math.exp(8.5)}
    assert [r["step"] for r in rows(tmp_path / "run")] == [100] * 3 + [200] * 3


def test_what_does_not_exist_is_null(tmp_path: Path) -> None:
    report = Reporter(tmp_path, replace(SPEED, peak_tflops=None), tensorboard_dir=str(tmp_path / "tb"))
    report.train(replace(SEEN, loss=None, grad_norm=math.inf, skipped=1, reserved_gib=40.0))
    report.train(replace(SEEN, step=200, loss=math.nan))
    report.close()
    first, second = rows(tmp_path)
    assert first["train/loss"] is first["perf/mfu"] is first["train/grad_norm"] is second["train/loss"] is None
    assert first["mem/max_reserved_gib"] == 40.0 and "mem/max_reserved_gib" not in second
    assert [e.step for e in events(tmp_path / "tb").Scalars("lm loss")] == [200]


def events(folder: Path) -> Any:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulator = EventAccumulator(str(folder))
    accumulator.Reload()
    return accumulator


def test_tensorboard_has_megatrons_tags(tmp_path: Path) -> None:
    report = Reporter(tmp_path, SPEED, tensorboard_dir=str(tmp_path / "tb"))
    report.train(SEEN)
    report.validation(100, 25_600, 52_428_800, 7.5)
    report.validation(100, 25_600, 52_428_800, 8.5, " on test set")
    report.close()
    report = Reporter(tmp_path, SPEED, tensorboard_dir=str(tmp_path / "named"), style="megatron")
    report.validation(100, 25_600, 52_428_800, 7.5, name="wiki", bytes_per_token=4.0)
    report.close()
    assert "lm loss validation-wiki ppl vs samples" in events(tmp_path / "named").Tags()["scalars"]
    assert " validation-wiki loss at iteration 100 | lm loss value: 7.5" in (tmp_path / "log.txt").read_text()
    assert rows(tmp_path)[-1]["val/wiki/bpb"] == pytest.approx(7.5 / math.log(2) / 4)
    found = events(tmp_path / "tb")
    both = ["learning-rate", "batch-size", "lm loss", "loss-scale", "grad-norm", "lm loss validation"]
    both += ["lm loss validation ppl"]
    assert set(found.Tags()["scalars"]) == {*both, *[f"{t} vs samples" for t in both], "iteration-time", "throughput"}
    for tag, value in (("lm loss", 7.654321), ("lm loss validation", 7.5), ("batch-size", 256.0)):
        [event] = found.Scalars(tag)
        [twin] = found.Scalars(f"{tag} vs samples")
        assert (event.step, twin.step) == (100, 25_600)
        assert event.value == twin.value == pytest.approx(value, rel=1e-6)


@pytest.mark.parametrize(
    ("package", "option"),
    [("tensorboard", "tensorboard_dir"), ("wandb", "wandb_project")],
    ids=["tensorboard", "wandb"],
)
def test_a_missing_package_is_named_before_anything_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str, option: str
) -> None:
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find(name))
    options: Any = {option: str(tmp_path / "there")}
    with pytest.raises(RuntimeError, match=f"{option}=.* needs the package {package}; pip install {package}"):
        Reporter(tmp_path / "run", SPEED, **options)
    assert not list(tmp_path.iterdir())
    assert missing_packages(None, None) == []


def test_wandb_gets_the_rows_and_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    run = SimpleNamespace(log=lambda row, step: calls.append((step, row)), finish=lambda: calls.append("finished"))
    wandb = SimpleNamespace(init=lambda **kw: calls.append(kw) or run, __spec__="installed")
    monkeypatch.setitem(sys.modules, "wandb", wandb)
    report = Reporter(tmp_path, SPEED, wandb_project="p", wandb_name="n", wandb_config={"train": {"seed": 1}})
    report.train(replace(SEEN, loss=None))
    report.validation(100, 25_600, 52_428_800, 7.5)
    report.close()
    assert calls[0] == {"project": "p", "name": "n", "config": {"train": {"seed": 1}}}
    written = [{k: v for k, v in row.items() if k != "step" and v is not None} for row in rows(tmp_path)]
    assert calls[1:-1] == [(100, row) for row in written] and "train/loss" not in written[0]
    assert calls[-1] == "finished"
