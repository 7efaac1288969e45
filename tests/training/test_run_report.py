"""The report at the end of a run: seconds by phase, productive steps, advice, and the names in a profile."""

import gzip
import json
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import programs
import pytest
import toml_tables
import torch
import torch.distributed as dist
from program_runs import run_pretrain
from ranks import run_ranks
from test_train_step import build
from train_cases import SMALL_RUN, config_from

from megalite.parallel import phase_timer
from megalite.parallel.phase_timer import NULL_CONTEXT
from megalite.planning.bottleneck import BOTTLENECKS, COMPUTE_CAUSES, main_bottleneck, oversubscription_note
from megalite.planning.run_plan import RunPlan, make_run_plan
from megalite.training.logging.run_report import advise, build_report, productive_seconds, read_history, summary
from megalite.training.logging.time_breakdown import COMPUTE, PHASES, TimeBreakdown
from megalite.training.train_step import train_step
from tools.bench.breakdown import LOSSES

PLANNED = "20.0% as planned with 4 micro-batches over 2 stages"
SIZES = dict(devices=4, pp=2, chunks=1, microbatches=4, steps=9, tokens=800, total_tokens=1000)
SIZES |= dict(samples=64, memory_utilization=0.25)
WORK = dict(
    **SIZES, background_saves=False, flops=6e9, planned_bubble=PLANNED, price_per_gpu_hour=None, no_advice_reason=""
)


# ---- the clock
def test_time_belongs_to_the_innermost_span(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = phase_timer.PhaseTimer()
    with clock.span("forward"):
        pass
    # nothing is recorded unless a step is timed
    assert clock.span("forward") is NULL_CONTEXT and clock.phase_seconds() == {}
    timestamps = iter((0.0, 1.0, 3.0, 7.0, 15.0, 31.0))
    monkeypatch.setattr("megalite.parallel.phase_timer.record_timestamp", lambda device: next(timestamps))
    clock.start_step(torch.device("cpu"))
    with clock.span("backward", "B0.3"), clock.span("communication"):
        pass
    clock.end_step()
    assert clock.phase_seconds() == {"other": 1.0 + 16.0, "backward": 2.0 + 8.0, "communication": 4.0}
    assert clock.phase_seconds() == {}


# ---- phases of steps
def phases_of(flags: str, slow_phase: str, late_s: float) -> dict[str, float]:
    """Return the seconds by phase of six steps on this rank, with a delay of `late_s` in each of them."""
    run = build(flags)
    phases = TimeBreakdown(run.mesh, time.perf_counter())
    phases.end_startup()
    last = dist.is_initialized() and dist.get_rank() == dist.get_world_size() - 1

    def delayed(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            time.sleep(late_s)
            return call(*args, **kwargs)

        return wrapped

    if slow_phase == "optimizer":
        run.optimizer.step = delayed(run.optimizer.step)  # type: ignore[method-assign]
    elif slow_phase == "checkpoint":
        run.before_update = delayed(run.before_update)
    elif slow_phase == "forward":
        run.pipeline._forward = delayed(run.pipeline._forward)  # type: ignore[method-assign]
    elif slow_phase == "last rank" and last:
        run.pipeline.step = delayed(run.pipeline.step)  # type: ignore[method-assign]
    for _ in range(6):
        phases.before_step()
        result = train_step(run)
        phases.after_step(result.data_s, result.step_s)
    if slow_phase == "evaluation":
        with phases("evaluation"):
            time.sleep(6 * late_s)
    seconds = phases.seconds()
    assert sum(seconds.values()) == pytest.approx(phases.wall_s, rel=0.02, abs=0.05)
    phases.average_over_ranks()
    return seconds


@pytest.mark.parametrize("slow_phase", ["optimizer", "checkpoint", "evaluation", "forward"])
def test_slow_phase_is_visible(slow_phase: str) -> None:
    late_s = 0.05
    expected_s = 6 * late_s * (2 if slow_phase == "forward" else 1)  # two micro-batches
    assert phases_of("", slow_phase, late_s)[slow_phase] >= expected_s


@pytest.mark.parametrize("flags", ["", "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"])
def test_late_rank_appears_as_waiting(flags: str) -> None:
    late_s = 0.3
    first, last = run_ranks(2, phases_of, flags, "last rank", late_s)
    phase = "bubble" if "pipeline" in flags else "communication"
    total_late_s = 6 * late_s
    assert first[phase] > 0.6 * total_late_s and first["other"] < 0.5 * total_late_s  # minus the work of rank 0 itself
    assert last["other"] >= total_late_s


def test_untimed_steps_use_the_last_timed_shares() -> None:
    run = build("")
    phases, timed_steps = TimeBreakdown(run.mesh, time.perf_counter()), []
    start_step = run.mesh.phase_timer.start_step
    run.mesh.phase_timer.start_step = lambda device: (timed_steps.append(phases._steps), start_step(device))  # type: ignore[assignment, func-returns-value]
    for step in range(1, 33):
        phases.before_step()
        if run.mesh.phase_timer.timed:
            with run.mesh.phase_timer.span("forward"):
                time.sleep(0.003)
        phases.after_step(0.0, 1.0)
        if step == 24:
            with phases("checkpoint"):
                pass
    assert timed_steps == [*range(1, 11), 20, 25, 30]
    seconds = phases.seconds()
    assert seconds["forward"] > 0.8 * 32  # 32 steps were reported as a second each


# ---- steps that count
def rows(path: Path, *rows: dict[str, Any]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def row(step: int, each: float, steps: int, skipped: int = 0) -> dict[str, Any]:
    return {"step": step, "perf/step_s": each, "perf/steps": steps, "train/skipped": skipped}


def test_repeated_step_counts_once_in_the_report(tmp_path: Path) -> None:
    metrics = tmp_path / "metrics.jsonl"
    assert productive_seconds(metrics) == 0.0
    rows(metrics, row(1, 3.0, 1), row(10, 2.0, 9), {"step": 10, "val/valid/loss": 1.0}, row(20, 2.0, 10, skipped=1))
    with open(metrics, "a") as file:
        file.write('{"step": 30, "per')  # torn
    assert productive_seconds(metrics) == 3 + 18 + 18
    # killed after the checkpoint of step 14: the row of step 20 is dropped, 11 to 14 are in none
    rows(metrics, row(1, 3.0, 1), row(10, 2.0, 9), row(15, 5.0, 1), row(20, 1.0, 5))
    assert productive_seconds(metrics) == 3 + 18 + (4 * 2.0 + 5) + 5
    rows(metrics, row(1, 1.0, 1), row(10, 1.0, 9), row(5, 1.0, 4), row(10, 2.0, 5))  # a rollback to step 1
    assert productive_seconds(metrics) == 1 + 4 + 10


def job_event(timestamp: float, event: str, step: int, **facts: Any) -> dict[str, Any]:
    return {"event": event, "step": step, "at": timestamp, **facts}


def test_crash_time_is_lost_and_queue_time_is_not(tmp_path: Path) -> None:
    events, metrics = tmp_path / "events.jsonl", tmp_path / "metrics.jsonl"
    assert read_history(tmp_path, 0.0) is None
    rows(metrics, row(100, 0.5, 100))
    rows(
        events,
        job_event(0, "started", 0, from_scratch=True),  # another run, in the same directory
        job_event(500, "started", 0, tokens=0, from_scratch=True),
        job_event(520, "started", 0, tokens=0, from_scratch=False),  # restarted before its first checkpoint
        {"event": "straggler", "step": 3, "time": "x"},
        job_event(560, "ended", 50, outcome="requeue"),
        job_event(9000, "started", 50, tokens=7),
        job_event(9020, "ended", 70, outcome="crash"),
        job_event(9030, "started", 60, tokens=9),
        job_event(9040, "ended", 100, outcome="done"),
    )
    history = read_history(tmp_path, 1e9)
    assert history == dict(wall_s=20 + 40 + 30 + 10, processes=4, tokens=0, productive_s=50, goodput=pytest.approx(0.5))
    rows(events, job_event(500, "started", 0))  # killed, or still running
    history = read_history(tmp_path, 600.0)
    assert history is not None and history["wall_s"] == 100.0


def test_job_without_a_start_is_not_counted(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    rows(tmp_path / "events.jsonl", job_event(560, "ended", 50, outcome="requeue"))
    assert read_history(tmp_path, 600.0) is None
    rows(tmp_path / "events.jsonl", {"event": "started", "at": {}}, job_event(3, "ended", 1))
    result = programs.run_python("tools/report.py", str(tmp_path))
    assert result.returncode == 3 and "give a run directory" in result.stderr and "Traceback" not in result.stderr


ADVICE = toml_tables.read_table("training/cases")["advice"]


def planned(*flags: str, world: int = 4) -> RunPlan:
    base_flags = (
        SMALL_RUN
        if "--mock-data" in flags
        else [flag for flag in SMALL_RUN if flag != "--mock-data"] + ["--data-path", "x"]
    )
    return make_run_plan(
        config_from([*base_flags, *(flag for flag in flags if flag != "--mock-data"), "--train-iters", "9"]), world, 93
    )


TALK = {"forward": 20, "backward": 30, "communication": 50}
RAISE = "--global-batch-size"


CHANGES: dict[str, tuple[str, int, dict[str, float], tuple[str, ...], tuple[str, ...]]] = {
    "tp 2 on one machine": ("--tp 2", 4, TALK, ("a smaller tp", RAISE, "--log-straggler"), ("within a node", "cp")),
    "all of the ranks are tp's": ("--tp 4", 4, TALK, ("a smaller tp", "larger micro-batches"), (RAISE, "bf16")),
    "tp over machines": ("--tp 4", 2, TALK, ("tp within a node",), ("a smaller tp", RAISE)),
    "no tp": ("", 2, TALK, (RAISE,), ("tp", "larger micro-batches", "bf16")),
    "stragglers are logged": ("--log-straggler", 2, TALK, ("one rank is slower",), ("--log-straggler",)),
    "no tp, bf16": ("--bf16", 2, TALK, (RAISE, "--grad-reduce-in-bf16"), ("tp",)),
    "sums in bf16 already": ("--bf16 --grad-reduce-in-bf16", 2, TALK, (RAISE,), ("--grad-reduce-in-bf16",)),
    "cp": ("--cp 2", 4, TALK, ("a smaller cp",), ("tp", "within a node")),
    "cp over machines": ("--cp 2 --tp 2", 2, TALK, ("a smaller tp", "cp within a node"), ("tp within",)),
    "experts": ("--num-experts 4 --ep 4", 4, TALK, ("a smaller ep",), ("tp", "within a node")),
    "experts over machines": ("--num-experts 4 --ep 4", 2, TALK, ("ep within a node",), ("a smaller ep",)),
    "a split backward": ("--pp 2 --split-backward", 4, {"bubble": 50}, (RAISE, "less dp"), ("--split-backward",)),
    "pp alone": ("--pp 4", 4, {"bubble": 50}, (RAISE, "--split-backward"), ("less dp", "--num-virtual")),
    "chunks": ("--pp 2", 4, {"bubble": 50}, ("--num-virtual-stages-per-pipeline-rank",), ()),
    "generated data": ("--mock-data", 4, {"data": 50}, ("leave a processor free",), ("disk", "--data-path")),
    "saves in the background": ("", 4, {"checkpoint": 50}, ("save less often",), ("--async-save",)),
    "one batch of evaluation": ("", 4, {"evaluation": 50}, ("--eval-interval",), ("--eval-iters",)),
    "an update that all do": (
        "--no-use-distributed-optimizer",
        4,
        {"optimizer": 50},
        ("--use-distributed-optimizer",),
        ("more dp",),
    ),
    "an update of one rank": ("--tp 4 --no-use-distributed-optimizer", 4, {"optimizer": 50}, (RAISE,), (" or ",)),
}


@pytest.mark.parametrize("case", CHANGES)
def test_advice_fits_the_layout(case: str) -> None:
    flags, per_node, shares, parts, absent_parts = CHANGES[case]
    plan = planned(*flags.split())
    work = WORK | {"background_saves": "background" in case, "planned_bubble": ""}
    _, advice = advise(shares, work, plan, per_node)
    remedy = advice.partition(": ")[2]
    assert all(part in remedy for part in parts), remedy
    unfit = [part for part in absent_parts if re.search(rf"(?<![\w-]){re.escape(part.strip())}(?!\w)", remedy)]
    assert not unfit, remedy


@pytest.mark.parametrize("bottleneck", ADVICE)
def test_bottleneck_is_named_with_advice(bottleneck: str) -> None:
    percent, text = ADVICE[bottleneck]
    plan = planned("--pp", "2", "--bf16")
    name, advice = advise(percent, WORK, plan, 4)
    assert name == bottleneck and text in advice
    report = build_report(percent, WORK | {"no_advice_reason": "the run ended as hang"}, None, plan, 4, {})
    assert report["bottleneck"] is None and summary(report)["bottleneck"] == "unknown: the run ended as hang"


def test_worst_share_of_each_kind_is_named() -> None:
    # StepTime.parts and the fixed costs
    parts = {"compute", "bubble", "tp", "cp", "pp", "dp", "optimizer", "fixed costs"}
    for names in (parts, LOSSES, {*PHASES} - {*COMPUTE, "profiler"}):
        assert {*names} <= {*BOTTLENECKS}
        for name in {*names} - {*COMPUTE_CAUSES}:
            others = dict.fromkeys({*names} - {name}, 0.04)
            assert main_bottleneck(others | {name: 0.6}) == name
    assert main_bottleneck({"recompute": 0.3, "kernels": 0.2, "tp": 0.1}) == "recompute"  # none is above its threshold


def test_ranks_on_shared_cores_are_explained() -> None:
    assert oversubscription_note(2, 1, 2) == oversubscription_note(1, 2, 2) == ""
    assert oversubscription_note(4, 1, 2).startswith("4 ranks of 1 thread share 2 cores")
    assert oversubscription_note(2, 2, 2).startswith("2 ranks of 2 threads share 2 cores")


def test_price_gives_a_cost() -> None:
    plan = planned("--pp", "2")
    report = build_report({"forward": 30.0, "other": 10.0}, WORK | {"price_per_gpu_hour": 2.0}, None, plan, 4, {})
    assert report["percent"] == {"forward": 75.0, "other": 25.0} and report["tokens_per_s"] == 20.0
    run = report["run"]
    assert run["gpu_hours"] == pytest.approx(4 * 40 / 3600) and run["cost"] == pytest.approx(8 * 40 / 3600)
    assert run["cost_per_million_tokens"] == pytest.approx(run["cost"] / 800 * 1e6)
    lines = summary(report)
    assert lines["time breakdown"] == "forward 75.0 %, other 25.0 %; of the process's 00:00:40"
    assert "per million" in lines["cost"]
    assert lines["goodput"].startswith("0.0 % of 00:00:40 in 1 process: steps that count, with their waits, ")
    assert "cost" not in summary(build_report({"forward": 30.0}, WORK, None, plan, 4, {}))


def test_report_has_the_efficiency_of_the_steps() -> None:
    """Time outside of steps does not count; with a graph, forward and backward are not known."""
    plan, work = planned("--pp", "2"), WORK | {"price_per_gpu_hour": 2.25}
    seconds = {"start-up": 50.0, "evaluation": 10.0, "checkpoint": 4.0, "data": 2.0, "forward": 8.0, "backward": 14.0}
    seconds |= {"communication": 4.0, "optimizer": 2.0, "other": 2.0}
    report = build_report(seconds, work, None, plan, 4, {})
    expected = dict(gpu_utilization=0.75, memory_utilization=0.25, samples_per_s=2.0, cost_per_sample=9 / 7200)
    expected |= dict(data_time=0.0625, forward_time=0.25, backward_time=0.4375, communication_time=0.125)
    assert report["efficiency"] == pytest.approx(expected)
    assert "devices compute 75.0% of a step" in summary(report)["efficiency"]
    graph = build_report({"graph": 3.0, "data": 1.0}, WORK, None, plan, 4, {})["efficiency"]
    assert graph["gpu_utilization"] == 0.75 and graph["forward_time"] is graph["cost_per_sample"] is None
    assert "efficiency" not in summary(build_report(seconds, work | {"steps": 0}, None, plan, 4, {}))
    del report["efficiency"]  # as earlier versions wrote it
    assert "efficiency" not in summary(report)


# ---- names in a profile


@pytest.mark.nightly
def test_profile_names_actions_and_collectives(tmp_path: Path) -> None:
    flags = (
        "--nproc 4 --pp 2 --train-iters 3 --profile --use-pytorch-profiler --profile-step-start 1 --profile-step-end"
    )
    assert run_pretrain(*SMALL_RUN, *flags.split(), "2", "--profile-ranks", "0", "--run-dir", tmp_path).returncode == 0
    events = json.loads(gzip.decompress((tmp_path / "trace/rank-000.json.gz").read_bytes()))["traceEvents"]
    names = {e["name"] for e in events if e.get("cat") == "user_annotation"}
    assert {"F0.0", "SF0.0", "RB0.0", "wait for RB0.0", "B0.0"} <= names  # pipeline actions
    assert {"all-gather dp", "reduce-scatter dp", "all-reduce tied_embedding", "all-reduce world"} <= names
    assert {"wait for data", "gradient norm", "optimizer"} <= names


# ---- a whole run
LONG = [*SMALL_RUN, "--train-iters", "12", "--save-interval", "4"]


@pytest.mark.nightly
def test_report_of_a_restarted_run(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    flags = ["--save", str(run_dir), "--load", str(run_dir), "--price-per-gpu-hour", "3.5"]
    assert run_pretrain(*LONG, *flags, fault="data.get:0:8:kill").returncode == -9
    assert not (run_dir / "report.json").exists()
    slow = "data.get:*:9:sleep=3,ckpt.before_commit:0:12:sleep=2"
    second = run_pretrain(*LONG, *flags, "--nproc", "2", "--pipeline-model-parallel-size", "2", fault=slow, check=True)
    report = json.loads((run_dir / "report.json").read_text())
    seconds, run = report["seconds"], report["run"]
    assert sum(report["percent"].values()) == pytest.approx(100, abs=0.1)
    assert sum(seconds.values()) == pytest.approx(report["wall_s"])
    assert seconds["data"] >= 3 and seconds["checkpoint"] >= 2
    assert all(seconds[phase] > 0 for phase in ("forward", "backward", "bubble", "optimizer", "evaluation", "start-up"))
    assert report["bottleneck"] is None and report["advice"] == "8 steps; at least 10 are needed"
    assert (report["steps"], report["tokens"], run["processes"], run["tokens"]) == (8, 8 * 8 * 16, 2, 0)
    assert run["wall_s"] > report["wall_s"] + 0.5 and 0 < run["goodput"] < 1
    assert run["productive_s"] == pytest.approx(productive_seconds(run_dir / "metrics.jsonl"))
    assert run["cost"] == pytest.approx(2 * run["wall_s"] / 3600 * 3.5)
    for line in ("time breakdown", "goodput", "bottleneck", "cost", "report "):
        assert f"\n{line}" in second.stdout
    result = programs.run_python("tools/report.py", str(run_dir))
    assert result.returncode == 0 and "bottleneck" in result.stdout and "in 2 processes" in result.stdout, result.stderr


@pytest.mark.nightly
def test_split_backward_is_advised_against_a_bubble(tmp_path: Path) -> None:
    bubbles = []
    for name, extra_flags in (("whole", []), ("split", ["--split-backward"])):
        flags = ["--run-dir", str(tmp_path / name), "--nproc", "2", "--pipeline-model-parallel-size", "2"]
        result = run_pretrain(
            *LONG, *flags, "--train-iters", "10", *extra_flags, fault="pipeline.message:0:*:sleep=0.2", check=True
        )
        report = json.loads((tmp_path / name / "report.json").read_text())
        assert report["bottleneck"] == "bubble", report["percent"]
        output = programs.run_python("tools/report.py", str(tmp_path / name)).stdout
        pattern = r"\((\S+)% as planned with 4 micro-batches over 2 stages, \S+ with twice .*?\)(?:, (\S+)% with --split-backward)?"
        match = re.search(pattern, " ".join(output.split()))
        assert match is not None and f"bubble {match[1]}%" in result.stdout, result.stdout  # as planned
        bubbles.append(match.groups())
    (joint, remedy), (split, none) = bubbles
    assert remedy == split and float(split) < float(joint) and none is None
