"""The report at the end of a run: where its time went, what it cost, and what would make it faster. report.json.

    goodput = time of the steps that count / wall time since the run was begun, restarts included

A step counts once, with what it waits, however often a crash or a rollback made the run repeat it. Of a process that
ended in order the wall time is its life; after one that was killed it goes on until the next has started. Both come
from the run directory: steps from metrics.jsonl, lives from events.jsonl. Seconds throughout.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from megalite.checkpoint.run.saver import Saver
from megalite.config.options import Config
from megalite.parallel.launch import Ranks
from megalite.parallel.local_ranks import cores
from megalite.plan.advice import CAUSES, about_the_bubble, limit_of, sentence, too_few_cores
from megalite.plan.arrangement import Arrangement
from megalite.train.state import Run
from megalite.train.tell.figures import duration
from megalite.train.tell.phases import COMPUTE, FIRST, Phases
from megalite.train.tell.run_dir import Events, Exit, json_rows, now, write_atomically

STARTED, ENDED, HUNG = "started", "ended", "hang"  # of a process, in events.jsonl
HEALTHY = (Exit.DONE, Exit.REQUEUE)  # ends between two steps, with nothing that was found wrong
ENOUGH = FIRST  # steps, each of them timed; the first is slower than all others
IN_ORDER = (Exit.DONE.outcome, Exit.REQUEUE.outcome, Exit.INTERRUPTED.outcome)


@dataclass(frozen=True)
class Past:
    """Of a run directory: since the run was begun at step 0, in how many processes, and the tokens it had then."""

    wall_s: float
    useful_s: float
    processes: int
    tokens: int

    def __str__(self) -> str:
        lives = f"{self.processes} process{'es' * (self.processes > 1)}"
        return f"{100 * self.goodput:.1f} % of {duration(self.wall_s)} in {lives}: steps that count, with their waits"

    @property
    def goodput(self) -> float:
        return self.useful_s / self.wall_s if self.wall_s > 0 else 0.0


def useful_seconds(metrics: Path) -> float:
    """Time of the steps that count. A row is the mean of `perf/steps` steps; those that no row has, as a process was
    killed between a log line and the checkpoint that was resumed from, took as long as those before them."""
    kept: list[tuple[int, float, float]] = []  # step, seconds per step, steps of them that updated
    for _, row in json_rows(metrics):
        step, each, steps = row.get("step"), row.get("perf/step_s"), row.get("perf/steps")
        if step is None or each is None or steps is None:
            continue
        while kept and kept[-1][0] >= step:  # came again
            kept.pop()
        missing = step - steps - kept[-1][0] if kept else 0
        before = max(0, missing) * kept[-1][1] if kept else 0.0
        kept.append((step, each, (steps - row.get("train/skipped", 0)) * each + before))
    return sum(seconds for _, _, seconds in kept)


def read_past(folder: Path, until: float) -> Past | None:
    """None where events.jsonl does not tell of a start. `until`: when what still runs was seen last, as time.time()."""
    lives: list[dict[str, Any]] = []
    for _, row in json_rows(folder / "events.jsonl"):
        if row.get("fresh"):
            lives = []
        if row.get("event") in (STARTED, ENDED) and "at" in row:
            lives.append(row)
    starts = [row for row in lives if row["event"] == STARTED]
    if not starts:  # or that line was lost
        return None
    ends = [*(row["at"] for row in lives[1:]), until if lives[-1]["event"] == STARTED else lives[-1]["at"]]
    wall = sum(end - row["at"] for row, end in zip(lives, ends, strict=True) if row.get("outcome") not in IN_ORDER)
    return Past(wall, useful_seconds(folder / "metrics.jsonl"), len(starts), starts[0].get("tokens", 0))


@dataclass(frozen=True)
class Work:
    """What was done, with what. `tokens`, `flops`: of this process; `all_tokens`: of the run."""

    devices: int
    pp: int
    chunks: int  # per pipeline rank
    microbatches: int
    background_saves: bool
    steps: int
    tokens: int
    all_tokens: int
    flops: float
    price_per_gpu_hour: float | None = None
    planned_bubble: str = ""  # as planned, and with its remedies; empty where it is not worth a word
    unlike: str = ""  # why its times are not those of a healthy run


def advise(percent: Mapping[str, float], work: Work) -> tuple[str | None, str]:
    """The bottleneck, and what to do about it; None, and why, where the times are not those of a healthy run."""
    if work.unlike:
        return None, work.unlike
    shares = shares_of(percent)
    limit = limit_of(shares)
    figures = {"bubble": work.planned_bubble, "checkpoint": "in the background already" * work.background_saves}
    return limit, sentence(limit, shares[limit], figures.get(limit, ""), "the time")


def shares_of(percent: Mapping[str, float]) -> dict[str, float]:
    """By the names that the adviser has: forward and backward are one."""
    computing = sum(percent.get(phase, 0.0) for phase in COMPUTE) / 100
    return {phase: share / 100 for phase, share in percent.items()} | {"compute": computing}


def make(seconds: Mapping[str, float], work: Work, past: Past | None) -> dict[str, Any]:
    """`seconds`: by phase, of this process."""
    wall = sum(seconds.values())
    percent = {phase: round(100 * s / wall, 2) for phase, s in seconds.items()}
    bottleneck, advice = advise(percent, work)
    report: dict[str, Any] = dict(time=now(), wall_s=wall, seconds=dict(seconds), percent=percent)
    report |= dict(bottleneck=bottleneck, advice=advice, **asdict(work), tokens_per_s=work.tokens / wall)
    past = past or Past(wall, 0.0, 1, work.all_tokens - work.tokens)
    report["run"] = dict(**asdict(past), goodput=past.goodput, gpu_hours=work.devices * past.wall_s / 3600)
    if work.price_per_gpu_hour is not None:
        cost, tokens = report["run"]["gpu_hours"] * work.price_per_gpu_hour, work.all_tokens - past.tokens
        report["run"] |= dict(cost=cost, cost_per_million_tokens=1e6 * cost / tokens if tokens else None)
    return report


def summary(report: Mapping[str, Any]) -> dict[str, str]:
    """The report in a few lines."""
    shares = sorted(report["percent"].items(), key=lambda item: -item[1])
    run = report["run"]
    went = ", ".join(f"{phase} {share:.1f} %" for phase, share in shares if share >= 0.05)
    past = Past(run["wall_s"], run["useful_s"], run["processes"], run["tokens"])
    rows = {
        "time went to": f"{went}; of the process's {duration(report['wall_s'])}",
        "computed": f"{report['flops']:.3g} FLOPs in {report['steps']:,} steps, {report['tokens_per_s']:,.0f} tokens/s",
        "goodput": f"{past}, {run['gpu_hours']:.4g} device hours",
        "bottleneck": f"{report['bottleneck'] or 'not told'}: {report['advice']}",
    }
    if "cost" in run:
        each = run["cost_per_million_tokens"]
        rows["cost"] = f"{run['cost']:.2f}" + (f", {each:.3g} per million tokens" if each is not None else "")
    return rows


class Account:
    """Rank 0's, of one process: notes that it has started, with `about` (train/tell/overview.py: facts), and what came
    of it."""

    def __init__(
        self,
        folder: Path,
        run: Run,
        phases: Phases,
        flops_per_token: float,
        config: Config,
        plan: Arrangement,
        about: Mapping[str, Any],
        ranks: Ranks,
    ):
        self._folder, self._run, self._phases, self._plan = folder, run, phases, plan
        self._price, self._local_ranks = config.operations.price_per_gpu_hour, ranks.local_world
        self._micro_batch = config.train.micro_batch_size * run.mesh.dp.size
        c = config.checkpoint
        restarts = c.save is not None and c.load == c.save  # at step 0, too: it may have died before it could save
        self._flops_per_token, self._begin = flops_per_token, replace(run.state)
        self._events = Events(folder, 0)
        at, state, fresh = time.time() - phases.wall_s, run.state, run.state.step == 0 and not restarts
        self._events.add(STARTED, step=state.step, at=at, tokens=state.consumed_tokens, fresh=fresh, about=about)

    def close(self, outcome: Exit, saver: Saver | None) -> dict[str, str]:
        """Writes report.json; returns its lines for the summary."""
        run, state, begin = self._run, self._run.state, self._begin
        self._events.add(ENDED, step=state.step, at=time.time(), outcome=outcome.outcome)
        tokens, seconds = state.consumed_tokens - begin.consumed_tokens, self._phases.seconds()
        waits = seconds.get("bubble", 0.0) >= CAUSES["bubble"].worth * sum(seconds.values())
        work = Work(
            devices=run.mesh.world.size,
            pp=run.mesh.pp.size,
            chunks=len(run.pipeline.stages),
            microbatches=run.batch_sizes.at(state.consumed_samples) // self._micro_batch,
            background_saves=saver is not None and saver.background,
            steps=state.step - begin.step,
            tokens=tokens,
            all_tokens=state.consumed_tokens,
            flops=tokens * self._flops_per_token,
            price_per_gpu_hour=self._price,
            planned_bubble=about_the_bubble(self._plan) if waits else "",  # a second or two for a long plan
            unlike=self._unlike(outcome, state.step - begin.step),
        )
        report = make(seconds, work, read_past(self._folder, time.time()))
        write_atomically(self._folder / "report.json", json.dumps(report, indent=1) + "\n")
        return summary(report)

    def _unlike(self, outcome: Exit, steps: int) -> str:
        if outcome not in HEALTHY:
            return f"the run ended as {outcome.outcome}, so its times are not those of a healthy one"
        told = [row.get("event") for _, row in json_rows(self._folder / "events.jsonl")]
        if HUNG in itertools.takewhile(STARTED.__ne__, reversed(told)):
            return "it hung and went on, so its times are not those of a healthy run"
        on_cpu = self._run.mesh.device.type == "cpu"
        if on_cpu and (shared := too_few_cores(self._local_ranks, torch.get_num_threads(), cores())):
            return shared
        return f"{steps} step{'s' * (steps != 1)} of {ENOUGH} that it takes to tell" if steps < ENOUGH else ""
