"""A slow rank and an unhealthy GPU are named and acted on; a healthy run is not interrupted."""

import math
import os
import statistics
import sys
import types
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import torch
from program_runs import load_json_lines, load_status, run_pretrain
from train_cases import SMALL_RUN

from megalite.common.exit_codes import ExitCode
from megalite.config.options import OperationsConfig
from megalite.parallel.mesh import Mesh
from megalite.training.logging.event_log import EventLog
from megalite.training.logging.time_breakdown import TimeBreakdown
from megalite.training.monitoring.gpu_monitor import GpuMonitor, read_sensors
from megalite.training.monitoring.health import (
    HEALTH,
    LINES_IN_A_ROW,
    OWN_PHASES,
    HealthMonitor,
    slow_ranks,
    straggler_line,
)


def row(pp: int = 0, **values: float) -> dict[str, float]:
    phases = dict(data=0.001, forward=0.1, backward=0.2, graph=0.0, optimizer=0.01, other=0.01)
    return {**dict.fromkeys(HEALTH, math.nan), "step_s": 0.5, "queued_s": 0.0, **phases, "pp": float(pp), **values}


# ---- slow ranks
@pytest.mark.parametrize(
    ("rows", "slow"),
    [
        ([row(), row(), row(), row()], {}),
        ([row(), row(forward=0.25), row(), row()], {1: "+150.0 ms in forward"}),
        ([row(), row(data=0.3)], {1: "+299.0 ms in data"}),
        ([row(), row(other=0.4), row(), row(optimizer=0.4)], {1: "+390.0 ms in other", 3: "+390.0 ms in optimizer"}),
        ([row(), row(forward=0.15)], {}),  # within the margin
        ([row(step_s=9.0), row(step_s=9.0, forward=0.25)], {}),  # too little for steps of 9 s
        ([row(pp=0), row(pp=1, forward=0.3)], {}),  # another pipeline rank has other work
        ([row(pp=0), row(pp=0, forward=0.3), row(pp=1, forward=0.3), row(pp=1, forward=0.3)], {1: "in forward"}),
        ([row(), row(forward=0.25, queued_s=0.1)], {}),  # it waited for a processor
        ([row(), row(forward=0.45, queued_s=0.1)], {1: "in forward"}),
        ([row(**dict.fromkeys(OWN_PHASES, math.nan))] * 2, {}),  # nothing was timed yet
        ([row(forward=5.0)], {}),
    ],
)
def test_rank_is_compared_with_ranks_of_equal_work(rows: list[dict[str, float]], slow: dict[int, str]) -> None:
    reasons = slow_ranks(rows)
    assert set(reasons) == set(slow)
    for rank, reason in slow.items():
        assert reason in reasons[rank]


def monitor_of(tmp_path: Path, ranks: int = 2, **options: Any) -> HealthMonitor:
    phases = TimeBreakdown(Mesh.single_process(), 0.0)
    phases.recent.extend([{"forward": 0.1}] * 4)
    hosts = [f"node{rank}" for rank in range(ranks)]
    return HealthMonitor(Mesh.single_process(), phases, hosts, EventLog(tmp_path, 0), OperationsConfig(**options))


def problems_of(monitor: HealthMonitor, *lines: list[dict[str, float]]) -> list[list[tuple[str, int]]]:
    return [[(problem.event, problem.rank) for problem in monitor.new_problems(rows)] for rows in lines]


def test_thousands_of_ranks_are_compared_at_once() -> None:
    rows = [row(forward=0.1 + rank * 1e-9) for rank in range(16_384)]  # all pairs would be 268 million
    rows[77] = row(forward=0.4)
    rows[78] = row(**dict.fromkeys(OWN_PHASES, math.nan))
    assert list(slow_ranks(rows)) == [77]


def test_slow_rank_is_named_once_after_several_lines(tmp_path: Path) -> None:
    monitor, slow, healthy = monitor_of(tmp_path), [row(), row(forward=0.4)], [row(), row()]
    assert problems_of(monitor, slow, healthy, slow, slow, healthy) == [[]] * 5
    assert (
        problems_of(monitor, *[slow] * (LINES_IN_A_ROW + 3))
        == [[]] * (LINES_IN_A_ROW - 1) + [[("straggler", 1)]] + [[]] * 3
    )
    assert problems_of(monitor, healthy, *[slow] * LINES_IN_A_ROW)[-1] == [("straggler", 1)]  # it had recovered
    early_monitor = monitor_of(tmp_path)
    early_monitor._timed_steps = deque(list(early_monitor._timed_steps)[:3])
    assert problems_of(early_monitor, *[slow] * 9) == [[]] * 9


def test_unhealthy_gpu_is_named(tmp_path: Path) -> None:
    monitor = monitor_of(tmp_path, max_gpu_temperature=85)
    hot = [row(temperature_c=70.0), row(temperature_c=90.0)]
    assert problems_of(monitor, hot, hot) == [[("temperature", 1)], []]
    [problem] = monitor_of(tmp_path, max_gpu_temperature=85).new_problems(hot)
    assert "rank 1 on node1 has a GPU at 90 C, above 85" in problem.text
    # errors from before the run are not reported
    ecc = [[row(ecc_errors=float(n)), row(ecc_errors=3.0)] for n in (7, 7, 8, 9, 9)]
    assert problems_of(monitor, *ecc) == [[], [], [("ecc", 0)], [("ecc", 0)], []]
    throttled = [row(throttled=float(0x40 + 0x8)), row(throttled=0.0)]
    assert problems_of(monitor, *[throttled] * LINES_IN_A_ROW) == [[]] * (LINES_IN_A_ROW - 1) + [[("throttled", 0)]]
    assert problems_of(monitor_of(tmp_path), hot) == [[]]  # no limit was given
    problems = monitor_of(tmp_path, max_step_time_s=0.4).new_problems([row(), row(forward=0.15)])
    assert [(problem.event, problem.rank) for problem in problems] == [("step-time", 1)]


class Nvml(types.ModuleType):
    """The calls of nvidia-ml-py that GpuMonitor makes, for a GPU that reports everything but its power."""

    NVML_TEMPERATURE_GPU, NVML_CLOCK_SM, NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 0, 1, 1, 0

    def __init__(self) -> None:
        super().__init__("pynvml")
        self.requested_uuids: list[str] = []
        answers = dict(Temperature=61, ClockInfo=1980, TotalEccErrors=2, CurrentClocksThrottleReasons=0x44, Name="H100")
        for name, value in answers.items():
            setattr(self, f"nvmlDeviceGet{name}", lambda *a, value=value: value)
        self.nvmlInit = lambda: None
        self.nvmlSystemGetDriverVersion = lambda: "570.86"
        self.nvmlDeviceGetHandleByUUID = self.requested_uuids.append

    def nvmlDeviceGetPowerUsage(self, handle: Any) -> float:
        raise RuntimeError("Not Supported")


def test_gpu_sensors_are_read_if_the_package_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    assert GpuMonitor(torch.device("cpu")).sensors == {}
    nvml = Nvml()
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    properties = types.SimpleNamespace(uuid="0a1b")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monitor = GpuMonitor(torch.device("cuda", 3))
    assert nvml.requested_uuids == ["GPU-0a1b"]
    assert read_sensors(monitor.sensors) == {"temperature_c": 61, "clock_mhz": 1980, "ecc_errors": 2, "throttled": 0x40}
    assert read_sensors(monitor.facts) == {"gpu": "H100", "driver": "570.86"}
    monkeypatch.setitem(sys.modules, "pynvml", None)  # not installed
    assert GpuMonitor(torch.device("cuda", 3)).sensors == {}


def test_straggler_line_names_the_requested_number_of_ranks() -> None:
    rows = [row(), row(forward=0.3, temperature_c=50.0), row(forward=0.2)]
    line = straggler_line(rows, 2)
    assert "Mn own/Rnk: 321.0ms/0 421.0ms/2 | Mx own/Rnk: 521.0ms/1 421.0ms/2 |" in line
    assert "Mn temperature/Rnk: 50.0C/1 | Mx temperature/Rnk: 50.0C/1" in line and "power" not in line


# ---- whole runs
def train(run_dir: Path, steps: int, *flags: str, fault: str = "") -> tuple[int, list[dict[str, Any]]]:
    """Return the exit code and the events of a run of two ranks."""
    argv = [
        *SMALL_RUN,
        "--train-iters",
        steps,
        "--device",
        "cpu",
        "--nproc",
        2,
        "--run-dir",
        run_dir,
        "--eval-iters",
        0,
    ]
    result = run_pretrain(*argv, *flags, fault=fault, timeout=400)
    assert "Traceback" not in result.stderr, result.stderr
    return result.returncode, load_json_lines(run_dir / "events.jsonl")


def test_too_slow_step_ends_the_run(tmp_path: Path) -> None:
    """End all ranks at the same step, after a save."""
    flags = ["--max-step-time-s", "1e-6", "--health-action", "exit", "--save", str(tmp_path / "save")]
    code, events = train(tmp_path, 50, *flags, "--log-interval", "2", "--log-straggler")
    assert code == ExitCode.RERUN
    status = load_status(tmp_path)
    assert status["outcome"] == "rerun" and status["step"] == 1 and " on " in status["reason"]
    assert (tmp_path / "save" / "iter_0000001" / "COMPLETE").exists()
    [event_row] = [event for event in events if event["event"] == "step-time"]
    assert event_row["step"] == 1 and event_row["host"] and event_row["subject_rank"] in (0, 1)
    [heartbeat] = [event for event in events if event["event"] == "heartbeat"]
    assert len(heartbeat["step_s"]) == len(heartbeat["memory_gib"]) == 2 and "temperature_c" not in heartbeat
    assert "stragglers | Mn" not in (tmp_path / "log.txt").read_text()  # nothing was timed before the first line


def test_problem_saves_once(tmp_path: Path) -> None:
    """A step saves only if a problem was found after it: steps 1, 3 and 4 have log lines, step 2 has none."""
    flags = ["--max-step-time-s", "1e-6", "--health-action", "checkpoint", "--save", str(tmp_path / "save")]
    code, events = train(tmp_path, 4, *flags, "--log-interval", "3", "--async-save", "off")
    problem_steps = {row["step"] for row in events if row["event"] == "step-time"}
    assert code == ExitCode.DONE and 1 in problem_steps
    saved = {path.parent.name for path in (tmp_path / "save").glob("iter_*/COMPLETE")}
    assert saved == {f"iter_{step:07d}" for step in problem_steps | {4}}


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_slow_rank_is_named_within_ten_steps(tmp_path: Path) -> None:
    code, events = train(tmp_path / "clean", 200, "--log-straggler")
    stragglers = [event for event in events if event["event"] == "straggler"]
    if os.getloadavg()[0] > 2 * (os.cpu_count() or 1):
        pytest.skip("the machine is too busy to say which of two ranks is slow")
    assert code == 0 and not stragglers
    step_seconds = [metrics["perf/step_s"] for metrics in load_json_lines(tmp_path / "clean" / "metrics.jsonl")]
    sleep = max(0.05, 3 * statistics.median(step_seconds))  # 50 ms where steps are short; more on a busy machine
    for point, phase in (("step.begin", "other"), ("step.after_forward_backward", "other"), ("data.get", "data")):
        run_dir = tmp_path / point
        code, events = train(run_dir, 12, "--log-straggler", fault=f"{point}:1:*:sleep={sleep}")
        assert code == 0
        [straggler] = [event for event in events if event["event"] == "straggler"]
        assert straggler["subject_rank"] == 1 and straggler["step"] <= 10 and f"ms in {phase}" in straggler["text"]
        assert f"WARNING: step {straggler['step']}: rank 1 on" in (run_dir / "log.txt").read_text()
