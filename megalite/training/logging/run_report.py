"""report.json, the report at the end of a run: where its time went, what it cost, and what would make it faster.

    goodput = time of the steps that count / wall time since the run began, restarts included

A step counts once, however often a crash or a rollback made the run repeat it; its waits count too. The wall time is
that of all processes; after one that was killed it runs until the next has started. Steps come from metrics.jsonl,
processes from events.jsonl. Seconds throughout.
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
from megalite.config.options import Config
from megalite.launch.local_launcher import cpu_count
from megalite.launch.rank_info import RankInfo
from megalite.planning.bottleneck import (
    BOTTLENECKS,
    describe_bottleneck,
    describe_bubble,
    main_bottleneck,
    oversubscription_note,
    remedy,
)
from megalite.planning.run_plan import RunPlan
from megalite.training.logging.log_format import duration
from megalite.training.logging.run_dir import EventLog, ExitCode, read_jsonl, timestamp, write_atomically
from megalite.training.logging.timers import COMPUTE, TIMED_FIRST_STEPS, PhaseTimer
from megalite.training.state import Run

STARTED, ENDED, HUNG = "started", "ended", "hang"  # of a process, in events.jsonl
HEALTHY = (ExitCode.DONE, ExitCode.REQUEUE)  # ended between two steps, with nothing found wrong
MIN_TIMED_STEPS = TIMED_FIRST_STEPS  # steps, all of them timed; the first is slower than all others
ORDERLY_OUTCOMES = (ExitCode.DONE.outcome, ExitCode.REQUEUE.outcome, ExitCode.INTERRUPTED.outcome)


def productive_seconds(metrics: Path) -> float:
    """Time of the steps that count. A row is the mean of `perf/steps` steps. Steps between a process's last row and the
    checkpoint that was resumed from are in no row: they count as long as those before them."""
    kept: list[tuple[int, float, float]] = []  # step, seconds per step, steps of them that updated
    for _, row in read_jsonl(metrics):
        step, each, steps = row.get("step"), row.get("perf/step_s"), row.get("perf/steps")
        if step is None or each is None or steps is None:
            continue
        while kept and kept[-1][0] >= step:  # was repeated
            kept.pop()
        missing = step - steps - kept[-1][0] if kept else 0
        before = max(0, missing) * kept[-1][1] if kept else 0.0
        kept.append((step, each, (steps - row.get("train/skipped", 0)) * each + before))
    return sum(seconds for _, _, seconds in kept)


def read_history(folder: Path, until: float) -> dict[str, Any] | None:
    """A run since it began at step 0: wall_s, productive_s, their goodput, processes, and the tokens trained before; None
    where events.jsonl has no start. `until`: when a process that still runs was last seen, as time.time()."""
    lives: list[dict[str, Any]] = []
    for _, row in read_jsonl(folder / "events.jsonl"):
        if row.get("from_scratch"):
            lives = []
        if row.get("event") in (STARTED, ENDED) and "at" in row:
            lives.append(row)
    if not (starts := [row for row in lives if row["event"] == STARTED]):
        return None
    ends = [*(row["at"] for row in lives[1:]), until if lives[-1]["event"] == STARTED else lives[-1]["at"]]
    wall = sum(
        end - row["at"] for row, end in zip(lives, ends, strict=True) if row.get("outcome") not in ORDERLY_OUTCOMES
    )
    return goodput_of(wall, productive_seconds(folder / "metrics.jsonl"), len(starts), starts[0].get("tokens", 0))


def goodput_of(wall_s: float, productive_s: float, processes: int, tokens: int) -> dict[str, Any]:
    goodput = productive_s / wall_s if wall_s > 0 else 0.0
    return dict(wall_s=wall_s, productive_s=productive_s, goodput=goodput, processes=processes, tokens=tokens)


def format_goodput(past: Mapping[str, Any]) -> str:
    lives = f"{past['processes']} process{'es' * (past['processes'] > 1)}"
    return f"{100 * past['goodput']:.1f} % of {duration(past['wall_s'])} in {lives}: steps that count, with their waits"


def advise(
    percent: Mapping[str, float], work: Mapping[str, Any], plan: RunPlan, per_node: int
) -> tuple[str | None, str]:
    """(bottleneck, advice), or (None, reason) where the times are not those of a healthy run."""
    if work["no_advice_reason"]:
        return None, work["no_advice_reason"]
    shares = {phase: share / 100 for phase, share in percent.items()}
    shares["compute"] = sum(percent.get(phase, 0.0) for phase in COMPUTE) / 100
    limit = main_bottleneck(shares)
    figures = {"bubble": work["planned_bubble"], "checkpoint": "in the background already" * work["background_saves"]}
    way_out = remedy(limit, plan, per_node, work["background_saves"])
    return limit, describe_bottleneck(limit, shares[limit], way_out, figures.get(limit, ""), "the time")


def build_report(
    seconds: Mapping[str, float], work: Mapping[str, Any], past: dict[str, Any] | None, plan: RunPlan, per_node: int
) -> dict[str, Any]:
    """The report. `seconds`: this process's, by phase; `work`: of `Account.work`; `per_node`: ranks of a node."""
    wall = sum(seconds.values())
    percent = {phase: round(100 * s / wall, 2) for phase, s in seconds.items()}
    bottleneck, advice = advise(percent, work, plan, per_node)
    report: dict[str, Any] = dict(time=timestamp(), wall_s=wall, seconds=dict(seconds), percent=percent)
    report |= dict(bottleneck=bottleneck, advice=advice, **work, tokens_per_s=work["tokens"] / wall)
    past = past or goodput_of(wall, 0.0, 1, work["total_tokens"] - work["tokens"])
    report["run"] = run = past | {"gpu_hours": work["devices"] * past["wall_s"] / 3600}
    if work["price_per_gpu_hour"] is not None:
        cost, tokens = run["gpu_hours"] * work["price_per_gpu_hour"], work["total_tokens"] - past["tokens"]
        run |= dict(cost=cost, cost_per_million_tokens=1e6 * cost / tokens if tokens else None)
    return report


def summary(report: Mapping[str, Any]) -> dict[str, str]:
    """The report in a few lines."""
    shares, run = sorted(report["percent"].items(), key=lambda item: -item[1]), report["run"]
    went = ", ".join(f"{phase} {share:.1f} %" for phase, share in shares if share >= 0.05)
    rows = {
        "time breakdown": f"{went}; of the process's {duration(report['wall_s'])}",
        "computed": f"{report['flops']:.3g} FLOPs in {report['steps']:,} steps, {report['tokens_per_s']:,.0f} tokens/s",
        "goodput": f"{format_goodput(run)}, {run['gpu_hours']:.4g} device hours",
        "bottleneck": f"{report['bottleneck'] or 'unknown'}: {report['advice']}",
    }
    if "cost" in run:
        each = run["cost_per_million_tokens"]
        rows["cost"] = f"{run['cost']:.2f}" + (f", {each:.3g} per million tokens" if each is not None else "")
    return rows


@dataclass
class RunReport:
    """Rank 0's account of its process, in events.jsonl and report.json. `run_info`: training/logging/plan_summary.py: facts."""

    folder: Path
    run: Run
    phases: PhaseTimer
    flops_per_token: float
    config: Config
    plan: RunPlan
    run_info: Mapping[str, Any]
    ranks: RankInfo

    def __post_init__(self) -> None:
        state, c = self.run.state, self.config.checkpoint
        resumes = c.save is not None and c.load == c.save  # also at step 0: a process may have died before it saved
        started_at, from_scratch = time.time() - self.phases.wall_s, state.step == 0 and not resumes
        self._events, self._begin = EventLog(self.folder, 0), replace(state)
        self._events.add(
            STARTED,
            step=state.step,
            at=started_at,
            tokens=state.consumed_tokens,
            from_scratch=from_scratch,
            run_info=self.run_info,
        )

    def close(self, outcome: ExitCode, saver: CheckpointSaver | None) -> dict[str, str]:
        """Write report.json; returns its lines for the summary."""
        self._events.add(ENDED, step=self.run.state.step, at=time.time(), outcome=outcome.outcome)
        seconds = self.phases.seconds()
        work, past = self.work(seconds, outcome, saver), read_history(self.folder, time.time())
        report = build_report(seconds, work, past, self.plan, self.ranks.local_world_size)
        write_atomically(self.folder / "report.json", json.dumps(report, indent=1) + "\n")
        return summary(report)

    def work(self, seconds: Mapping[str, float], outcome: ExitCode, saver: CheckpointSaver | None) -> dict[str, Any]:
        """`chunks`: per pipeline rank. `tokens` and `flops` are this process's, `total_tokens` the run's.
        `planned_bubble`: and its remedies, "" where it is small. `no_advice_reason`: why the times are no healthy run's."""
        run, state, begin = self.run, self.run.state, self._begin
        tokens, steps = state.consumed_tokens - begin.consumed_tokens, state.step - begin.step
        micro_batch = self.config.train.micro_batch_size * run.mesh.dp.size
        waits = seconds.get("bubble", 0.0) >= BOTTLENECKS["bubble"].threshold * sum(seconds.values())
        return {
            "devices": run.mesh.world.size,
            "pp": run.mesh.pp.size,
            "chunks": len(run.pipeline.stages),
            "microbatches": run.batch_sizes.at(state.consumed_samples) // micro_batch,
            "background_saves": saver is not None and saver.background,
            **dict(steps=steps, tokens=tokens, total_tokens=state.consumed_tokens, flops=tokens * self.flops_per_token),
            "price_per_gpu_hour": self.config.operations.price_per_gpu_hour,
            "planned_bubble": describe_bubble(self.plan) if waits else "",  # takes a second or two for a long plan
            "no_advice_reason": self._no_advice_reason(outcome, steps),
        }

    def _no_advice_reason(self, outcome: ExitCode, steps: int) -> str:
        if outcome not in HEALTHY:
            return f"the run ended as {outcome.outcome}, so its times are not those of a healthy one"
        events = [row.get("event") for _, row in read_jsonl(self.folder / "events.jsonl")]
        if HUNG in itertools.takewhile(STARTED.__ne__, reversed(events)):
            return "it hung and resumed, so its times are not those of a healthy run"
        on_cpu = self.run.mesh.device.type == "cpu"
        if on_cpu and (
            shared := oversubscription_note(self.ranks.local_world_size, torch.get_num_threads(), cpu_count())
        ):
            return shared
        return (
            f"{steps} step{'s' * (steps != 1)}; it takes {MIN_TIMED_STEPS} to tell" if steps < MIN_TIMED_STEPS else ""
        )
