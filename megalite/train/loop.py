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
from typing import Any

import torch

from megalite.checkpoint import reader, writer
from megalite.data.batches import Prefetcher
from megalite.parallel.comm import all_reduce_
from megalite.parallel.mesh import Mesh
from megalite.train.batch import HostBatch, on_device
from megalite.train.metrics import Interval, Reporter
from megalite.train.run_dir import Exit, write_atomically
from megalite.train.state import EvaluationSet, Run, StepResult
from megalite.train.step import train_step


@dataclass(frozen=True)
class Plan:
    """When to do what, in steps; None: never. `save` is a directory."""

    log_interval: int
    eval_interval: int | None
    eval_iters: int
    save: str | None
    save_interval: int | None
    keep_last: int | None
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


def save(run: Run, directory: str, config_toml: str, keep_last: int | None) -> Path:
    """Write a checkpoint of the run as it is; collective."""
    run.buffer.wait_gather()
    owned = [entry.piece for entry in run.optimizer.pieces() if entry.owned]
    state = {
        "progress": run.state.to_json(),
        "updates": run.optimizer.updates,
        "loss_scaler": run.loss_scaler.to_json(),
        "config": config_toml,
    }
    if run.ledger is not None and run.mesh.world.is_first:  # the first rank's copy is the one that is written
        state["data"] = run.ledger.to_json(run.state.consumed_samples)
    folder = writer.save(directory, run.state.step, owned, state, run.mesh)
    if keep_last is not None:
        writer.prune(directory, keep_last, run.mesh)
    return folder


def resume(run: Run, directory: str) -> tuple[Path, list[str]] | None:
    """Continue from the newest valid checkpoint of `directory`: (it, what is worth telling); None where there is
    none; collective."""
    found = reader.newest(directory, run.mesh)
    if found is None:
        return None
    folder, manifest = found
    reader.fill(folder, manifest, [entry.piece for entry in run.optimizer.pieces()], run.mesh)
    progress: dict[str, Any] = manifest.state["progress"]
    for name in run.state.to_json():
        setattr(run.state, name, int(progress.get(name, 0)))
    run.optimizer.updates = int(manifest.state["updates"])
    run.loss_scaler.from_json(manifest.state["loss_scaler"])
    run.optimizer.after_load()
    ledger = manifest.state.get("data")
    notes = run.ledger.go_on(ledger) if run.ledger is not None and ledger is not None else []
    return folder, notes


def memory_gib(mesh: Mesh) -> tuple[float, float]:
    """Peak memory of this rank and what there is: the card's, or the process's on CPU."""
    if mesh.device.type == "cuda":
        total = torch.cuda.get_device_properties(mesh.device).total_memory
        return torch.cuda.max_memory_allocated(mesh.device) / 2**30, total / 2**30
    import os

    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 2**30, total / 2**30


def train(
    run: Run, plan: Plan, config_toml: str, folder: Path, report: Reporter | None, stop: StopSignal
) -> tuple[Exit, str]:
    """Train to the last step. `report` is rank 0's. Returns the outcome and its reason; the same on all ranks."""
    begin, saved = time.monotonic(), -1
    since: list[StepResult] = []
    outcome, reason = Exit.DONE, "reached the last step"

    def checkpoint() -> None:
        nonlocal saved
        if plan.save is not None and saved != run.state.step:
            start = time.perf_counter()
            where = save(run, plan.save, config_toml, plan.keep_last)
            saved = run.state.step
            if report is not None:
                report.say(f"saved {where.name} in {time.perf_counter() - start:.2f} s")

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
        result = train_step(run, want_stop=late or bool(stop.seen))
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
        if plan.save_interval and step % plan.save_interval == 0:
            checkpoint()
        if result.stop:
            seen = signal.Signals(stop.seen[0]).name if stop.seen else None
            outcome, reason = Exit.REQUEUE, seen or "exit_duration_in_mins, or a signal on another rank"
            break
        if plan.exit_interval and step % plan.exit_interval == 0 and step < run.last_step:
            outcome, reason = Exit.REQUEUE, f"exit_interval={plan.exit_interval}"
            break
    run.buffer.wait_gather()
    checkpoint()
    if outcome is Exit.REQUEUE and plan.save is None:  # there is nothing that a requeued run could go on from
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
