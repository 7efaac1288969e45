"""report.json, the report at the end of a run: time breakdown, goodput, cost, and the bottleneck with advice.

    goodput = time of the steps that count / wall time since the run started, restarts included

A step counts once, even if a crash or a rollback made the run repeat it, and includes its waits. The wall time is the
sum over all processes; after a process that was killed it continues until the next one has started. Steps are read from
metrics.jsonl, processes from events.jsonl. All times are in seconds.
"""

import itertools
import json
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megalite.checkpoint.manager.saver import CheckpointSaver
from megalite.common.exit_codes import ExitCode
from megalite.common.safe_open import write_atomically
from megalite.common.wording import plural
from megalite.config.options import Config
from megalite.launch.local_launcher import cpu_count
from megalite.launch.rank_info import RankInfo
from megalite.planning import bottleneck
from megalite.planning.bottleneck import BOTTLENECKS, oversubscription_note
from megalite.planning.remedies import describe_bubble
from megalite.planning.run_plan import RunPlan
from megalite.training.logging.device_memory import memory_metrics
from megalite.training.logging.efficiency import OUTSIDE_STEPS, describe_efficiency, efficiency, step_shares
from megalite.training.logging.event_log import EventLog, read_jsonl, timestamp
from megalite.training.logging.log_format import duration
from megalite.training.logging.time_breakdown import COMPUTE, TIMED_FIRST_STEPS, TimeBreakdown
from megalite.training.monitoring.hardware_monitor import HardwareMonitor, describe_hardware
from megalite.training.state import Run

STARTED, ENDED, HUNG = "started", "ended", "hang"  # events of a process in events.jsonl
HEALTHY = (ExitCode.DONE, ExitCode.REQUEUE)  # ended between two steps, without any problem
MIN_TIMED_STEPS = TIMED_FIRST_STEPS  # for advice; all of them are timed, and the first is slower than all others
ORDERLY_OUTCOMES = (ExitCode.DONE.outcome, ExitCode.REQUEUE.outcome, ExitCode.INTERRUPTED.outcome)


@dataclass(frozen=True)
class MetricsRow:
    """A row of metrics.jsonl; `productive_s` is the time that the report counts for it."""

    step: int
    step_s: float
    productive_s: float


def productive_seconds(metrics: Path) -> float:
    """Return the time of the steps that count, from metrics.jsonl.

    A row holds the mean of `perf/steps` steps. Steps between a process's last row and the checkpoint from which the run
    was resumed are in no row; they count with the duration of the steps before them.
    """
    rows: list[MetricsRow] = []
    for _, row in read_jsonl(metrics):
        step, step_s, steps = row.get("step"), row.get("perf/step_s"), row.get("perf/steps")
        if step is None or step_s is None or steps is None:
            continue
        while rows and rows[-1].step >= step:  # the run has repeated these steps
            rows.pop()
        productive_s = (steps - row.get("train/skipped", 0)) * step_s
        if rows:
            previous = rows[-1]
            missing = step - steps - previous.step
            productive_s += max(0, missing) * previous.step_s
        rows.append(MetricsRow(step, step_s, productive_s))
    return sum(row.productive_s for row in rows)


def read_history(directory: Path, until: float) -> dict[str, Any] | None:
    """Return the history of a run since step 0, as `build_history`; None if events.jsonl has no start.

    Args:
        until: The time (time.time()) at which a process that still runs was last seen.
    """
    events: list[dict[str, Any]] = []  # starts and ends of processes
    for _, row in read_jsonl(directory / "events.jsonl"):
        if row.get("from_scratch"):
            events = []
        if row.get("event") in (STARTED, ENDED) and "at" in row:
            events.append(row)
    starts = [row for row in events if row["event"] == STARTED]
    if not starts:
        return None
    last_time = until if events[-1]["event"] == STARTED else events[-1]["at"]
    end_times = [*(row["at"] for row in events[1:]), last_time]
    # The time after an orderly end, until the next start, does not count.
    wall_s = sum(
        end - row["at"]
        for row, end in zip(events, end_times, strict=True)
        if row.get("outcome") not in ORDERLY_OUTCOMES
    )
    return build_history(
        wall_s, productive_seconds(directory / "metrics.jsonl"), len(starts), starts[0].get("tokens", 0)
    )


def build_history(wall_s: float, productive_s: float, processes: int, tokens: int) -> dict[str, Any]:
    """Return a run's history with its goodput; `tokens` are those trained before its first process."""
    goodput = productive_s / wall_s if wall_s > 0 else 0.0
    return dict(wall_s=wall_s, productive_s=productive_s, goodput=goodput, processes=processes, tokens=tokens)


def format_goodput(history: Mapping[str, Any]) -> str:
    """Format the goodput of a run's history for the summary."""
    processes = f"{history['processes']} {plural('process', history['processes'])}"
    share = f"{100 * history['goodput']:.1f} % of {duration(history['wall_s'])}"
    return f"{share} in {processes}: steps that count, with their waits"


def advise(
    percent: Mapping[str, float], work: Mapping[str, Any], plan: RunPlan, per_node: int
) -> tuple[str | None, str]:
    """Return (bottleneck, advice), or (None, reason) if the run was too short or not healthy.

    Args:
        percent: The share of each phase in the wall time, in percent.
        work: The result of `RunReport.work`.
        per_node: The number of ranks per node.
    """
    if work["no_advice_reason"]:
        return None, work["no_advice_reason"]
    shares = {phase: share / 100 for phase, share in percent.items()}
    shares["compute"] = sum(percent.get(phase, 0.0) for phase in COMPUTE) / 100
    advice = bottleneck.advise(shares, plan, per_node, work["background_saves"])
    details = {
        "bubble": work["planned_bubble"],
        "checkpoint": "in the background already" if work["background_saves"] else "",
    }
    return advice.cause, advice.sentence(details.get(advice.cause, ""), "the time")


def build_report(
    seconds: Mapping[str, float],
    work: Mapping[str, Any],
    history: dict[str, Any] | None,
    plan: RunPlan,
    per_node: int,
    hardware: Mapping[str, float],
) -> dict[str, Any]:
    """Return the content of report.json.

    Args:
        seconds: The seconds of this process by phase.
        work: The result of `RunReport.work`.
        history: The result of `read_history`.
        per_node: The number of ranks per node.
        hardware: The result of `HardwareMonitor.totals`.
    """
    wall_s = sum(seconds.values())
    percent = {phase: round(100 * phase_s / wall_s, 2) for phase, phase_s in seconds.items()}
    cause, advice = advise(percent, work, plan, per_node)
    history = history or build_history(wall_s, 0.0, 1, work["total_tokens"] - work["tokens"])
    run = {**history, "gpu_hours": work["devices"] * history["wall_s"] / 3600}
    if work["price_per_gpu_hour"] is not None:
        cost, tokens = run["gpu_hours"] * work["price_per_gpu_hour"], work["total_tokens"] - history["tokens"]
        run["cost"] = cost
        run["cost_per_million_tokens"] = 1e6 * cost / tokens if tokens else None
    return {
        "time": timestamp(),
        "wall_s": wall_s,
        "seconds": dict(seconds),
        "percent": percent,
        "bottleneck": cause,
        "advice": advice,
        **work,
        "tokens_per_s": work["tokens"] / wall_s,
        "efficiency": _efficiency(seconds, work),
        "hardware": dict(hardware),
        "run": run,
    }


def _efficiency(seconds: Mapping[str, float], work: Mapping[str, Any]) -> dict[str, float | None] | None:
    """Return the efficiency values of this process's steps, or None if it made no step."""
    steps_s = sum(phase_s for phase, phase_s in seconds.items() if phase not in OUTSIDE_STEPS)
    if not work["steps"] or not steps_s:
        return None
    price = work["price_per_gpu_hour"]
    price_per_hour = None if price is None else price * work["devices"]
    return efficiency(step_shares(seconds), work["samples"] / steps_s, work["memory_utilization"], price_per_hour)


def summary(report: Mapping[str, Any]) -> dict[str, str]:
    """Return the report as rows of the run's summary."""
    shares, run = sorted(report["percent"].items(), key=lambda item: -item[1]), report["run"]
    breakdown = ", ".join(f"{phase} {share:.1f} %" for phase, share in shares if share >= 0.05)
    rows = {
        "time breakdown": f"{breakdown}; of the process's {duration(report['wall_s'])}",
        "computed": f"{report['flops']:.3g} FLOPs in {report['steps']:,} steps, {report['tokens_per_s']:,.0f} tokens/s",
        "goodput": f"{format_goodput(run)}, {run['gpu_hours']:.4g} device hours",
        "bottleneck": f"{report['bottleneck'] or 'unknown'}: {report['advice']}",
    }
    if report.get("efficiency"):  # reports of earlier versions have none
        rows["efficiency"] = describe_efficiency(report["efficiency"])
    if report.get("hardware"):
        rows["hardware"] = describe_hardware(report["hardware"])
    if "cost" in run:
        rows["cost"] = f"{run['cost']:.2f}"
        if run["cost_per_million_tokens"] is not None:
            rows["cost"] += f", {run['cost_per_million_tokens']:.3g} per million tokens"
    return rows


@dataclass
class RunReport:
    """Rank 0's record of its process, in events.jsonl and report.json; `run_info` is the result of `plan_as_json`."""

    directory: Path
    run: Run
    time_breakdown: TimeBreakdown
    flops_per_token: float
    config: Config
    plan: RunPlan
    run_info: Mapping[str, Any]
    ranks: RankInfo
    hardware: HardwareMonitor

    def __post_init__(self) -> None:
        progress, checkpoint = self.run.progress, self.config.checkpoint
        # A run with --load equal to --save resumes even at step 0: a process may have died before its first save.
        resumes = checkpoint.save is not None and checkpoint.load == checkpoint.save
        self._initial_progress = replace(progress)
        self._events = EventLog(self.directory, 0)
        self._events.add(
            STARTED,
            step=progress.step,
            at=time.time() - self.time_breakdown.wall_s,
            tokens=progress.consumed_tokens,
            from_scratch=progress.step == 0 and not resumes,
            run_info=self.run_info,
        )

    def close(self, outcome: ExitCode, saver: CheckpointSaver | None) -> dict[str, str]:
        """Write report.json and return its rows for the run's summary."""
        self._events.add(ENDED, step=self.run.progress.step, at=time.time(), outcome=outcome.outcome)
        seconds = self.time_breakdown.seconds()
        work = self.work(seconds, outcome, saver)
        history = read_history(self.directory, time.time())
        per_node, hardware = self.ranks.local_world_size, self.hardware.totals()
        report = build_report(seconds, work, history, self.plan, per_node, hardware)
        write_atomically(self.directory / "report.json", json.dumps(report, indent=1) + "\n")
        return summary(report)

    def work(self, seconds: Mapping[str, float], outcome: ExitCode, saver: CheckpointSaver | None) -> dict[str, Any]:
        """Return what this process has done, as fields of report.json.

        `chunks` are per pipeline rank. `steps`, `samples`, `tokens` and `flops` are this process's, `total_tokens` the
        run's. `memory_utilization` is rank 0's. `planned_bubble` describes the bubble and its remedies, "" if it is
        small. `no_advice_reason` says why the times do not allow advice, "" if they do.
        """
        run, progress, initial = self.run, self.run.progress, self._initial_progress
        tokens, steps = progress.consumed_tokens - initial.consumed_tokens, progress.step - initial.step
        samples_per_microbatch = self.config.train.micro_batch_size * run.mesh.dp.size
        memory = memory_metrics(run.mesh)
        large_bubble = seconds.get("bubble", 0.0) >= BOTTLENECKS["bubble"].threshold * sum(seconds.values())
        return {
            "devices": run.mesh.world.size,
            "pp": run.mesh.pp.size,
            "chunks": len(run.pipeline.stages),
            "microbatches": run.batch_sizes.at(progress.consumed_samples) // samples_per_microbatch,
            "background_saves": saver is not None and saver.background,
            "steps": steps,
            "tokens": tokens,
            "samples": progress.consumed_samples - initial.consumed_samples,
            "memory_utilization": memory["memory_gib"] / memory["memory_limit_gib"],
            "total_tokens": progress.consumed_tokens,
            "flops": tokens * self.flops_per_token,
            "price_per_gpu_hour": self.config.operations.price_per_gpu_hour,
            "planned_bubble": describe_bubble(self.plan) if large_bubble else "",  # takes seconds for a long plan
            "no_advice_reason": self._no_advice_reason(outcome, steps),
        }

    def _no_advice_reason(self, outcome: ExitCode, steps: int) -> str:
        """Return why the times of this process do not allow advice, "" if they do."""
        if outcome not in HEALTHY:
            return f"the run ended as {outcome.outcome}, so its times are not those of a healthy one"
        events = [row.get("event") for _, row in read_jsonl(self.directory / "events.jsonl")]
        if HUNG in itertools.takewhile(STARTED.__ne__, reversed(events)):
            return "it hung and resumed, so its times are not those of a healthy run"
        if self.run.mesh.device.type == "cpu":
            note = oversubscription_note(self.ranks.local_world_size, torch.get_num_threads(), cpu_count())
            if note:
                return note
        if steps < MIN_TIMED_STEPS:
            return f"{steps} {plural('step', steps)}; at least {MIN_TIMED_STEPS} are needed"
        return ""
