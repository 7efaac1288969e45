"""The run: step, log, evaluate, save, until the last step or a reason to stop."""

from __future__ import annotations

import json
import math
import resource
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from megalite.checkpoint.clock import SaveClock
from megalite.checkpoint.saver import Saver
from megalite.data.batches import Prefetcher
from megalite.parallel.comm import all_reduce_
from megalite.parallel.mesh import Mesh
from megalite.train.batch import HostBatch, on_device
from megalite.train.checkpoints import save
from megalite.train.metrics import Interval, Reporter
from megalite.train.run_dir import Exit, write_atomically
from megalite.train.state import EvaluationSet, Run, StepResult
from megalite.train.step import train_step


@dataclass(frozen=True)
class Plan:
    """When to do what, in steps; None: never."""

    log_interval: int
    eval_interval: int | None
    eval_iters: int
    save_interval: int | None
    save_every_s: float | None
    save_optimizer: bool
    exit_interval: int | None
    exit_after_s: float | None
    profile_step: int | None


@dataclass
class StopSignal:
    """Set by SIGTERM or SIGINT; read at step boundaries, where all ranks agree on it. A second SIGINT stops at once."""

    seen: list[int] = field(default_factory=list)

    def install(self) -> None:
        signal.signal(signal.SIGTERM, self._note)
        signal.signal(signal.SIGINT, self._note)

    def _note(self, number: int, frame: object) -> None:
        if number == signal.SIGINT and number in self.seen:
            raise KeyboardInterrupt
        self.seen.append(number)


def evaluate(run: Run, data: Prefetcher[HostBatch], iters: int) -> float:
    """Mean loss per token over the first `iters` global batches of a set: the same ones each time; collective."""
    mesh, size = run.mesh, run.batch_sizes.final
    sums = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    for i in range(iters):
        hosts, _ = data.get(i * size, size)
        loss = run.pipeline.evaluate([on_device(host, mesh.device, run.state.step) for host in hosts])
        if mesh.pp.is_last and mesh.tp.is_first:
            sums[0] += loss
            sums[1:] += float(sum(host.counted_tokens for host in hosts))
    loss_sum, tokens = all_reduce_(sums, mesh.world).tolist()
    return loss_sum / tokens if tokens else math.nan


def memory_gib(mesh: Mesh) -> tuple[float, float]:
    """Peak memory of this rank and what there is: the card's, or the process's on CPU."""
    if mesh.device.type == "cuda":
        total = torch.cuda.get_device_properties(mesh.device).total_memory
        return torch.cuda.max_memory_allocated(mesh.device) / 2**30, total / 2**30
    import os

    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 2**30, total / 2**30


def train(
    run: Run,
    plan: Plan,
    config_toml: str,
    folder: Path,
    report: Reporter | None,
    stop: StopSignal,
    saver: Saver | None = None,
    saved: int | None = None,
) -> tuple[Exit, str]:
    """Train to the last step. `report` is rank 0's; `saved`: a step of which there is a checkpoint already. Returns
    the outcome and its reason; the same on all ranks."""
    begin = time.monotonic()
    since: list[StepResult] = []
    outcome, reason = Exit.DONE, "reached the last step"

    clock = None if plan.save_every_s is None else SaveClock(plan.save_every_s, run.mesh, run.state.step)

    def tell() -> None:
        lines = saver.news() if saver is not None else []
        if report is not None:
            for line in lines:
                report.say(line)

    def checkpoint(last: bool = False) -> None:
        nonlocal saved
        if saver is None or saved == run.state.step:
            return
        if report is not None:
            report.say(saver.beginning(run.state.step))
        save(run, saver, config_toml, optimizer=plan.save_optimizer, last=last)
        saved = run.state.step
        if clock is not None:
            clock.saved(saved)
        tell()

    def validate(sets: Sequence[EvaluationSet], what: str) -> None:
        for one in sets if plan.eval_iters else ():
            loss = evaluate(run, one.data, plan.eval_iters)
            if report is not None:
                s = run.state
                report.validation(
                    *(s.step, s.consumed_samples, s.consumed_tokens, loss, what),
                    name=one.name,
                    bytes_per_token=one.bytes_per_token,
                )

    while run.state.step < run.last_step:
        late = plan.exit_after_s is not None and time.monotonic() - begin > plan.exit_after_s
        timing = run.state.step + 1 == plan.profile_step
        if timing:
            run.pipeline.timeline = []
        broken = saver is not None and saver.failed
        result = train_step(run, want_stop=late or bool(stop.seen) or broken)
        since.append(result)
        step = run.state.step
        if timing:
            _write_timeline(run, folder)
        if report is not None and (step % plan.log_interval == 0 or step == 1):
            report.train(summarise(run, since))
        if step % plan.log_interval == 0 or step == 1:
            since = []
        if plan.eval_interval and step % plan.eval_interval == 0 and step < run.last_step:
            validate(run.valid, "")
        by_clock = clock is not None and clock.due(step)
        if by_clock or (plan.save_interval and step % plan.save_interval == 0):
            checkpoint()
        tell()
        if result.stop:
            seen = signal.Signals(stop.seen[0]).name if stop.seen else None
            outcome, reason = Exit.REQUEUE, seen or "exit_duration_in_mins, or a signal on another rank"
            break
        if plan.exit_interval and step % plan.exit_interval == 0 and step < run.last_step:
            outcome, reason = Exit.REQUEUE, f"exit_interval={plan.exit_interval}"
            break
    run.buffer.wait_gather()
    checkpoint(last=True)
    if saver is not None:
        saver.wait()  # a save in the background that failed ends the run here, on all ranks
        tell()
    if outcome is Exit.REQUEUE and saver is None:  # there is nothing that a requeued run could go on from
        return Exit.DONE, f"{reason}; nothing was saved"
    if outcome is Exit.DONE:
        validate(run.valid, " on validation set")
        validate(run.test, " on test set")
    return outcome, reason


def summarise(run: Run, since: list[StepResult]) -> Interval:
    """The log's view of the steps since the last line."""
    n, last, used = len(since), since[-1], [r for r in since if not r.skipped]
    memory, limit = memory_gib(run.mesh)
    return Interval(
        step=run.state.step,
        last_step=run.last_step,
        consumed_samples=run.state.consumed_samples,
        consumed_tokens=run.state.consumed_tokens,
        batch_size=last.batch_size,
        loss=sum(r.loss for r in used) / len(used) if used else None,
        z_loss=sum(r.z_loss for r in used) / len(used) or None if used else None,  # one that is on is never 0
        lr=last.lr,
        grad_norm=last.grad_norm,
        loss_scale=run.loss_scaler.scale,
        skipped=n - len(used),
        step_s=sum(r.step_s for r in since) / n,
        data_s=sum(r.data_s for r in since) / n,
        tokens_per_step=sum(r.batch_size for r in since) * run.seq_length // n,
        memory_gib=memory,
        memory_limit_gib=limit,
        reserved_gib=torch.cuda.max_memory_reserved() / 2**30 if run.mesh.device.type == "cuda" else None,
        nan=sum(not math.isfinite(r.loss) for r in since),
    )


def _write_timeline(run: Run, folder: Path) -> None:
    """timeline.json: what each pipeline rank did when; collective, through files beside it (no object travels)."""
    spans = run.pipeline.timeline or []
    run.pipeline.timeline = None
    mesh = run.mesh
    write = mesh.dp.is_first and mesh.tp.is_first
    part: Callable[[int], Path] = lambda rank: folder / f".timeline-{rank}.json"  # noqa: E731
    if write:
        rows = [{"action": s.action, "start_s": s.start_s, "end_s": s.end_s} for s in spans]
        write_atomically(part(mesh.pp.rank), json.dumps(rows))
    all_reduce_(torch.zeros((), device=mesh.device), mesh.world)  # every part is there
    if mesh.world.is_first:
        ranks = []
        for rank in range(mesh.pp.size):
            ranks.append({"pp_rank": rank, "spans": json.loads(part(rank).read_text(encoding="utf-8"))})
            part(rank).unlink()
        head = {"schedule": run.pipeline.schedule, "pp": mesh.pp.size, "vpp": len(run.pipeline.stages)}
        microbatches = sum(s["action"].startswith("F") for s in ranks[0]["spans"]) // len(run.pipeline.stages)
        write_atomically(folder / "timeline.json", json.dumps({**head, "microbatches": microbatches, "ranks": ranks}))
