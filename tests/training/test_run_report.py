"""The report at the end: seconds by phase that add up, the steps that count, and what a profile names."""

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
from program_runs import pretrain
from ranks import run_ranks
from test_train_step import build
from train_cases import SMALL, config_from

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
def phases_of(flags: str, spoil: str, late_s: float) -> dict[str, float]:
    """Of six steps on this rank, where something is late by `late_s` in each step."""
    run = build(flags)
    phases = TimeBreakdown(run.mesh, time.perf_counter())
    phases.end_startup()
    last = dist.is_initialized() and dist.get_rank() == dist.get_world_size() - 1

    def late(call: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            time.sleep(late_s)
            return call(*args, **kwargs)

        return wrapped

    if spoil == "optimizer":
        run.optimizer.step = late(run.optimizer.step)  # type: ignore[method-assign]
    elif spoil == "checkpoint":
        run.before_update = late(run.before_update)
    elif spoil == "forward":
        run.pipeline._forward = late(run.pipeline._forward)  # type: ignore[method-assign]
    elif spoil == "last rank" and last:
        run.pipeline.step = late(run.pipeline.step)  # type: ignore[method-assign]
    for _ in range(6):
        phases.before_step()
        result = train_step(run)
        phases.after_step(result.data_s, result.step_s)
    if spoil == "evaluation":
        with phases("evaluation"):
            time.sleep(6 * late_s)
    seconds = phases.seconds()
    assert sum(seconds.values()) == pytest.approx(phases.wall_s, rel=0.02, abs=0.05)
    phases.average_over_ranks()
    return seconds


@pytest.mark.parametrize("spoilt", ["optimizer", "checkpoint", "evaluation", "forward"])
def test_slow_phase_is_visible(spoilt: str) -> None:
    late_s = 0.05
    wanted = 6 * late_s * (2 if spoilt == "forward" else 1)  # of two micro-batches
    assert phases_of("", spoilt, late_s)[spoilt] >= wanted


@pytest.mark.parametrize("flags", ["", "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"])
def test_late_rank_appears_as_waiting(flags: str) -> None:
    late_s = 0.3
    first, last = run_ranks(2, phases_of, flags, "last rank", late_s)
    phase = "bubble" if "pipeline" in flags else "communication"
    late = 6 * late_s
    assert first[phase] > 0.6 * late and first["other"] < 0.5 * late  # less what rank 0 has to do itself
    assert last["other"] >= late


def test_untimed_steps_use_the_last_timed_shares() -> None:
    run = build("")
    phases, begun = TimeBreakdown(run.mesh, time.perf_counter()), []
    real = run.mesh.phase_timer.start_step
    run.mesh.phase_timer.start_step = lambda device: (begun.append(phases._steps), real(device))  # type: ignore[assignment, func-returns-value]
    for step in range(1, 33):
        phases.before_step()
        if run.mesh.phase_timer.timed:
            with run.mesh.phase_timer.span("forward"):
                time.sleep(0.003)
        phases.after_step(0.0, 1.0)
        if step == 24:
            with phases("checkpoint"):
                pass
    assert begun == [*range(1, 11), 20, 25, 30]
    seconds = phases.seconds()
    assert seconds["forward"] > 0.8 * 32  # of 32 steps that were said to take a second each


# ---- what counts
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


def life(at: float, event: str, step: int, **facts: Any) -> dict[str, Any]:
    return {"event": event, "step": step, "at": at, **facts}


def test_crash_time_is_lost_and_queue_time_is_not(tmp_path: Path) -> None:
    events, metrics = tmp_path / "events.jsonl", tmp_path / "metrics.jsonl"
    assert read_history(tmp_path, 0.0) is None
    rows(metrics, row(100, 0.5, 100))
    rows(
        events,
        life(0, "started", 0, from_scratch=True),  # another run, in the same directory
        life(500, "started", 0, tokens=0, from_scratch=True),
        life(520, "started", 0, tokens=0, from_scratch=False),  # restarted before its first checkpoint
        {"event": "straggler", "step": 3, "time": "x"},
        life(560, "ended", 50, outcome="requeue"),
        life(9000, "started", 50, tokens=7),
        life(9020, "ended", 70, outcome="crash"),
        life(9030, "started", 60, tokens=9),
        life(9040, "ended", 100, outcome="done"),
    )
    past = read_history(tmp_path, 1e9)
    assert past == dict(wall_s=20 + 40 + 30 + 10, processes=4, tokens=0, productive_s=50, goodput=pytest.approx(0.5))
    rows(events, life(500, "started", 0))  # killed, or still running
    past = read_history(tmp_path, 600.0)
    assert past is not None and past["wall_s"] == 100.0


def test_job_without_a_start_is_not_counted(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").touch()
    rows(tmp_path / "events.jsonl", life(560, "ended", 50, outcome="requeue"))
    assert read_history(tmp_path, 600.0) is None
    rows(tmp_path / "events.jsonl", {"event": "started", "at": {}}, life(3, "ended", 1))
    shown = programs.python("tools/report.py", str(tmp_path))
    assert shown.returncode == 3 and "give a run directory" in shown.stderr and "Traceback" not in shown.stderr


ADVICE = toml_tables.read("training/cases")["advice"]


def planned(*words: str, world: int = 4) -> RunPlan:
    small = (
        SMALL if "--mock-data" in words else [word for word in SMALL if word != "--mock-data"] + ["--data-path", "x"]
    )
    return make_run_plan(
        config_from([*small, *(word for word in words if word != "--mock-data"), "--train-iters", "9"]), world, 93
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
    words, per_node, shares, has, has_not = CHANGES[case]
    plan = planned(*words.split())
    work = WORK | {"background_saves": "background" in case, "planned_bubble": ""}
    _, advice = advise(shares, work, plan, per_node)
    remedy = advice.partition(": ")[2]
    assert all(part in remedy for part in has), remedy
    assert not [part for part in has_not if re.search(rf"(?<![\w-]){re.escape(part.strip())}(?!\w)", remedy)], remedy


@pytest.mark.parametrize("bottleneck", ADVICE)
def test_bottleneck_is_named_with_advice(bottleneck: str) -> None:
    percent, words = ADVICE[bottleneck]
    plan = planned("--pp", "2", "--bf16")
    named, advice = advise(percent, WORK, plan, 4)
    assert named == bottleneck and words in advice
    made = build_report(percent, WORK | {"no_advice_reason": "the run ended as hang"}, None, plan, 4)
    assert made["bottleneck"] is None and summary(made)["bottleneck"] == "unknown: the run ended as hang"


def test_worst_share_of_each_kind_is_named() -> None:
    planned = {"compute", "bubble", "tp", "cp", "pp", "dp", "optimizer", "fixed costs"}  # StepTime.parts, and its fixed
    for names in (planned, LOSSES, {*PHASES} - {*COMPUTE, "profiler"}):
        assert {*names} <= {*BOTTLENECKS}
        for name in {*names} - {*COMPUTE_CAUSES}:
            others = dict.fromkeys({*names} - {name}, 0.04)
            assert main_bottleneck(others | {name: 0.6}) == name
    assert main_bottleneck({"recompute": 0.3, "kernels": 0.2, "tp": 0.1}) == "recompute"  # nothing is worth a word


def test_ranks_on_shared_cores_are_explained() -> None:
    assert oversubscription_note(2, 1, 2) == oversubscription_note(1, 2, 2) == ""
    assert oversubscription_note(4, 1, 2).startswith("4 ranks of 1 thread share 2 cores")
    assert oversubscription_note(2, 2, 2).startswith("2 ranks of 2 threads share 2 cores")


def test_price_gives_a_cost() -> None:
    plan = planned("--pp", "2")
    made = build_report({"forward": 30.0, "other": 10.0}, WORK | {"price_per_gpu_hour": 2.0}, None, plan, 4)
    assert made["percent"] == {"forward": 75.0, "other": 25.0} and made["tokens_per_s"] == 20.0
    run = made["run"]
    assert run["gpu_hours"] == pytest.approx(4 * 40 / 3600) and run["cost"] == pytest.approx(8 * 40 / 3600)
    assert run["cost_per_million_tokens"] == pytest.approx(run["cost"] / 800 * 1e6)
    told = summary(made)
    assert told["time breakdown"] == "forward 75.0 %, other 25.0 %; of the process's 00:00:40"
    assert "per million" in told["cost"]
    assert told["goodput"].startswith("0.0 % of 00:00:40 in 1 process: steps that count, with their waits, ")
    assert "cost" not in summary(build_report({"forward": 30.0}, WORK, None, plan, 4))


# ---- names in a profile


@pytest.mark.nightly
def test_profile_names_actions_and_collectives(tmp_path: Path) -> None:
    flags = (
        "--nproc 4 --pp 2 --train-iters 3 --profile --use-pytorch-profiler --profile-step-start 1 --profile-step-end"
    )
    assert pretrain(*SMALL, *flags.split(), "2", "--profile-ranks", "0", "--run-dir", tmp_path).returncode == 0
    events = json.loads(gzip.decompress((tmp_path / "trace/rank-000.json.gz").read_bytes()))["traceEvents"]
    names = {e["name"] for e in events if e.get("cat") == "user_annotation"}
    assert {"F0.0", "SF0.0", "RB0.0", "wait for RB0.0", "B0.0"} <= names  # of the pipeline
    assert {"all-gather dp", "reduce-scatter dp", "all-reduce tied_embedding", "all-reduce world"} <= names
    assert {"wait for data", "gradient norm", "optimizer"} <= names


# ---- a whole run
LONG = [*SMALL, "--train-iters", "12", "--save-interval", "4"]


@pytest.mark.nightly
def test_report_of_a_restarted_run(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    where = ["--save", str(folder), "--load", str(folder), "--price-per-gpu-hour", "3.5"]
    assert pretrain(*LONG, *where, fault="data.get:0:8:kill").returncode == -9
    assert not (folder / "report.json").exists()
    slow = "data.get:*:9:sleep=3,ckpt.before_commit:0:12:sleep=2"
    second = pretrain(*LONG, *where, "--nproc", "2", "--pipeline-model-parallel-size", "2", fault=slow, ok=True)
    report = json.loads((folder / "report.json").read_text())
    seconds, run = report["seconds"], report["run"]
    assert sum(report["percent"].values()) == pytest.approx(100, abs=0.1)
    assert sum(seconds.values()) == pytest.approx(report["wall_s"])
    assert seconds["data"] >= 3 and seconds["checkpoint"] >= 2
    assert all(seconds[phase] > 0 for phase in ("forward", "backward", "bubble", "optimizer", "evaluation", "start-up"))
    assert report["bottleneck"] is None and report["advice"] == "8 steps; at least 10 are needed"
    assert (report["steps"], report["tokens"], run["processes"], run["tokens"]) == (8, 8 * 8 * 16, 2, 0)
    assert run["wall_s"] > report["wall_s"] + 0.5 and 0 < run["goodput"] < 1
    assert run["productive_s"] == pytest.approx(productive_seconds(folder / "metrics.jsonl"))
    assert run["cost"] == pytest.approx(2 * run["wall_s"] / 3600 * 3.5)
    for line in ("time breakdown", "goodput", "bottleneck", "cost", "report "):
        assert f"\n{line}" in second.stdout
    shown = programs.python("tools/report.py", str(folder))
    assert shown.returncode == 0 and "bottleneck" in shown.stdout and "in 2 processes" in shown.stdout, shown.stderr


@pytest.mark.nightly
def test_split_backward_is_advised_against_a_bubble(tmp_path: Path) -> None:
    bubbles = []
    for name, also in (("whole", []), ("split", ["--split-backward"])):
        where = ["--run-dir", str(tmp_path / name), "--nproc", "2", "--pipeline-model-parallel-size", "2"]
        done = pretrain(*LONG, *where, "--train-iters", "10", *also, fault="pipeline.message:0:*:sleep=0.2", ok=True)
        report = json.loads((tmp_path / name / "report.json").read_text())
        assert report["bottleneck"] == "bubble", report["percent"]
        shown = programs.python("tools/report.py", str(tmp_path / name)).stdout
        said = r"\((\S+)% as planned with 4 micro-batches over 2 stages, \S+ with twice .*?\)(?:, (\S+)% with --split-backward)?"
        planned = re.search(said, " ".join(shown.split()))
        assert planned is not None and f"bubble {planned[1]}%" in done.stdout, done.stdout  # what the plan said
        bubbles.append(planned.groups())
    (whole, remedy), (split, none) = bubbles
    assert remedy == split and float(split) < float(whole) and none is None
