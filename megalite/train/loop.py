"""The run: step, log, evaluate, save, until the last step or a reason to stop."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from megalite.checkpoint.progress import show
from megalite.checkpoint.run.save_clock import SaveClock
from megalite.checkpoint.run.saver import Saver
from megalite.config.faults import fault
from megalite.data.samples.batches import Prefetcher
from megalite.parallel.comm import all_reduce_
from megalite.parallel.mesh import Mesh
from megalite.train.batch import HostBatch, on_device
from megalite.train.figures import Interval
from megalite.train.memory import memory_bytes_of, memory_gib, memory_line, reserved_gib
from megalite.train.metrics import Reporter
from megalite.train.phases import Phases
from megalite.train.profiling import Collector, Profiler, write_timeline
from megalite.train.replicas import check_replicas
from megalite.train.run_dir import Exit, leave_status
from megalite.train.start.resume import save
from megalite.train.state import EvaluationSet, Run, StepResult
from megalite.train.step import parameter_norm, train_step
from megalite.train.stop import StopSignal
from megalite.train.timers import Timers
from megalite.train.watch.doubts import Doubts
from megalite.train.watch.events import Events
from megalite.train.watch.hang import Watchdog
from megalite.train.watch.pulse import Pulse


@dataclass(frozen=True)
class Plan:
    """When to do what, in steps; None: never."""

    log_interval: int
    eval_interval: int | None
    eval_iters: int
    skip: frozenset[int] | None  # steps whose samples are not trained on
    save_interval: int | None
    save_every_s: float | None
    save_optimizer: bool
    exit_interval: int | None
    exit_after_s: float | None
    profile_step: int | None
    params_norm: bool = False  # at logged steps
    count_zeros: bool = False
    board_interval: int | None = None  # steps per point of TensorBoard
    board_memory: bool = False
    memory_interval: int | None = None
    memory_first: bool = False  # also with the first two lines, the second of which knows the optimizer's
    device_memory: bool = False
    check_weights: int | None = None
    replicas_action: str = "stop"
    max_skipped: int = 100  # steps in a row that updated nothing
    empty_level: int = 0
    save_ill: bool = False  # when something is wrong with a rank
    leave_ill: bool = False
    checkpoint: str | None = None  # where the run saves, for status.json


PROGRESS_S = 10.0  # between two lines of an evaluation; the first comes sooner
FIRST_PROGRESS_S = 2.0
BEAT_S = 10.0  # between two looks of others at status.json that are worth it
STOP_FILE = "stop"  # in the run directory: whoever makes it stops the run as a signal does


@dataclass
class Watch:
    """What looks on while a run trains."""

    timers: Timers = field(default_factory=Timers)
    profiler: Profiler | None = None
    collector: Collector = field(default_factory=Collector)
    phases: Phases = field(default_factory=lambda: Phases(Mesh.alone(), time.perf_counter()))
    dog: Watchdog | None = None
    pulse: Pulse | None = None
    begin: float = field(default_factory=time.monotonic)
    restore: Callable[[int], object] = lambda step: None  # loads this run's checkpoint of a step

    def at(self, doing: str, step: int) -> None:
        """What the watchdog is told."""
        if self.dog is not None:
            self.dog.at(doing, step)


def evaluate(
    run: Run, data: Prefetcher[HostBatch], iters: int, tell: Callable[[int], None] = lambda done: None
) -> float:
    """Mean loss per token over the first `iters` global batches of a set: the same ones each time; collective. `tell`
    is called with the number that is done."""
    mesh, size = run.mesh, run.eval_batch_size
    fault("eval.begin", mesh.world.rank, run.state.step)
    sums = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    for i in range(iters):
        hosts, _ = data.get(i * size, size)
        loss = run.pipeline.evaluate([on_device(host, mesh.device, run.state.step) for host in hosts])
        if mesh.pp.is_last and mesh.tp.is_first:
            sums[0] += loss
            sums[1:] += float(sum(host.counted_tokens for host in hosts))
        tell(i + 1)
    loss_sum, tokens = all_reduce_(sums, mesh.world).tolist()
    return loss_sum / tokens if tokens else math.nan


@dataclass
class Training:
    """A run on its way. `report` is rank 0's; `saved`: a step of which there is a checkpoint already."""

    run: Run
    plan: Plan
    config_toml: str  # what a checkpoint keeps of the options
    folder: Path
    report: Reporter | None
    stop: StopSignal
    saver: Saver | None = None
    saved: int | None = None
    watch: Watch = field(default_factory=Watch)

    def __post_init__(self) -> None:
        self._begin, self._first = time.monotonic(), self.run.state.step + 1
        self._since: list[StepResult] = []  # the last log line
        self._lines = 0
        self._asks: str | None = None  # to stop, before the step that agreed on it
        self._ill: str | None = None  # what the last line has found
        self._next_beat = 0.0
        self._stop_file = self.folder / STOP_FILE
        say = None if self.report is None else self.report.say
        events = Events(self.folder, self.run.mesh.world.rank)
        self._doubts = Doubts(self.run, events, say, self.plan.max_skipped)
        every = self.plan.save_every_s
        self._clock = None if every is None else SaveClock(every, self.run.mesh, self.run.state.step)

    def train(self) -> tuple[Exit, str]:
        """Train to the last step. Returns the outcome, the same on all ranks, and its reason as this rank knows it."""
        with contextlib.ExitStack() as steps:
            steps.enter_context(self.watch.collector.running())
            if self.watch.profiler is not None:
                steps.callback(self.watch.profiler.stop)
            outcome, reason = self._take_steps()
        if outcome is Exit.REQUEUE:
            signalled = torch.tensor(float(bool(self.stop.seen)), device=self.run.mesh.device)
            self.stop.final = all_reduce_(signalled, self.run.mesh.world).item() == 0
        self.run.buffer.wait_gather()
        self._save(last=True)
        if self.saver is not None:
            with self.watch.phases("checkpoint"):
                self.saver.wait()  # a save in the background that failed ends the run here, on all ranks
            self._tell_saves()
        if self.report is not None:
            self.report.saved_all()
        if outcome is Exit.REQUEUE and self.saver is None:  # there is nothing that a requeued run could resume from
            return Exit.DONE, f"{reason}; nothing was saved"
        if outcome is Exit.DONE:
            self._evaluate(self.run.valid, " on validation set")
            self._evaluate(self.run.test, " on test set")
        return outcome, reason

    def _take_steps(self) -> tuple[Exit, str]:
        run, plan, profiler = self.run, self.plan, self.watch.profiler
        while run.state.step < run.last_step:
            if plan.skip and run.state.step + 1 in plan.skip:
                run.pass_over()
                continue
            result = self._step()
            unreliable = self._doubts.after(result)
            step = run.state.step
            stopping = result.stop or bool(unreliable) or bool(plan.exit_interval and step % plan.exit_interval == 0)
            due = step % plan.log_interval == 0 or step in (self._first, run.last_step) or stopping
            self._log(result, due)
            self._beat()
            if profiler is not None:
                with self.watch.phases("profiler"):
                    profiler.after(step, due)
            if plan.check_weights and step % plan.check_weights == 0:
                self._check_replicas(step)
            self.watch.collector.after(step)
            if plan.eval_interval and step % plan.eval_interval == 0 and step < run.last_step:
                self._evaluate(run.valid, "")
            if result.skipped and result.doubt is not None and result.doubt.finite and run.spikes.action == "rollback":
                self._roll_back()
            by_clock = self._clock is not None and self._clock.due(step)
            if by_clock or (plan.save_interval and step % plan.save_interval == 0) or (self._ill and plan.save_ill):
                self._save()
            self._tell_saves()
            if self._ill and plan.leave_ill:
                return Exit.RERUN, self._ill
            if unreliable:
                return Exit.RERUN, unreliable
            if result.stop:
                return Exit.REQUEUE, self._asks or self._why() or "asked by another rank"
            if stopping and step < run.last_step:
                return Exit.REQUEUE, f"exit_interval={plan.exit_interval}"
        return Exit.DONE, "reached the last step"

    def _why(self) -> str | None:
        """Why this rank asks the run to stop. Only one rank reads the file, and removes it as it does."""
        if self.stop.seen:
            return self.stop.seen[0]
        if self.run.mesh.world.is_first and self._stop_file.is_file():
            self._stop_file.unlink(missing_ok=True)
            return str(self._stop_file)
        if self.plan.exit_after_s is not None and time.monotonic() - self._begin > self.plan.exit_after_s:
            return "exit_duration_in_mins"
        return "a save failed" if self.saver is not None and self.saver.failed else None

    def _check_replicas(self, step: int) -> None:
        found = check_replicas(self.run, step, self.plan.replicas_action)
        if self.report is None:
            return
        self.report.say(f"WARNING: {found}" if found else f">>> Weight hashes match after {step} iterations...")
        if found:
            self._doubts.events.add("replicas", step, text=found)

    def _roll_back(self) -> None:
        if self.saver is not None:
            self.saver.wait()  # for the checkpoint that is returned to
        if self._doubts.roll_back(self.saved, self.watch.restore):
            self._save()  # a restart would train on what was passed over

    def _step(self) -> StepResult:
        """One training step, with what looks on."""
        run, plan, timers = self.run, self.plan, self.watch.timers
        step = run.state.step + 1
        self.watch.at("step", step)
        fault("step.begin", run.mesh.world.rank, step)
        self._asks = self._why()
        drawn = step == plan.profile_step
        if drawn or timers.level == 2:
            run.pipeline.timeline = []
        if self.watch.profiler is not None:
            with self.watch.phases("profiler"):
                self.watch.profiler.before(step)
        self.watch.phases.before_step()
        result = train_step(
            run,
            want_stop=self._asks is not None,
            count_zeros=plan.count_zeros,
            timers=timers,
            empty_level=plan.empty_level,
        )
        self.watch.at("after the step", step)
        self.watch.phases.after_step(result.data_s, result.step_s)
        self._since.append(result)
        timers.add(run.pipeline.timeline or ())
        if drawn:
            write_timeline(run.pipeline, self.folder)
        run.pipeline.timeline = None
        return result

    def _log(self, result: StepResult, due: bool) -> None:
        """A line where it is due, a point of TensorBoard where that is; collective where something is asked for."""
        run, plan, report, step = self.run, self.plan, self.report, self.run.state.step
        point = plan.board_interval is not None and step % plan.board_interval == 0
        norm = parameter_norm(run) if plan.params_norm and (due or point) else None
        if report is not None and point:
            memory = memory_bytes_of(run.mesh) if plan.board_memory else {}
            report.step(run.state, result, run.loss_scaler.scale, norm, memory)
        if not due:
            return
        if report is not None:
            report.train(summarise(run, self._since, norm))
        self._lines += 1
        memory_due = bool(plan.memory_interval) and step % (plan.memory_interval or 1) == 0
        if (memory_due or (plan.memory_first and self._lines <= 2)) and run.mesh.dp.is_first:
            line = memory_line(run.mesh, step, plan.device_memory)
            report.say(line) if report is not None else show(line)
        self._tell_timers(self.watch.timers.of_step, len(self._since))
        if self.watch.pulse is not None:
            self._ill = self.watch.pulse.feel(self._since, step, memory_gib(run.mesh)[0], report)
        self._since.clear()

    def _beat(self) -> None:
        """status.json says that the run is alive."""
        if self.report is not None and time.monotonic() > self._next_beat and self.folder.is_dir():
            self._next_beat = time.monotonic() + BEAT_S
            now = {"step": self.run.state.step, "tokens": self.run.state.consumed_tokens}
            leave_status(self.folder, "running", checkpoint=self.plan.checkpoint, reason="", **now)

    def _save(self, last: bool = False) -> None:
        run, saver, report = self.run, self.saver, self.report
        if saver is None or self.saved == run.state.step:
            return
        if report is not None:
            report.say(saver.beginning(run.state.step))
        self.watch.at("save", run.state.step)
        with self.watch.timers("save-checkpoint", 0), self.watch.phases("checkpoint"):
            save(run, saver, self.config_toml, optimizer=self.plan.save_optimizer, last=last)
        self.saved = run.state.step
        if self._clock is not None:
            self._clock.saved(self.saved)
        self._tell_saves()
        if report is not None:
            report.saving(run.state, saver.background and not last)
        self._tell_timers(("save-checkpoint",))

    def _evaluate(self, sets: Sequence[EvaluationSet], what: str) -> None:
        report, state, iters = self.report, self.run.state, self.plan.eval_iters
        for one in sets if iters else ():
            next_line = time.monotonic() + FIRST_PROGRESS_S
            self.watch.at("evaluate", state.step)

            def progress(done: int, name: str = one.name) -> None:
                nonlocal next_line
                if report is not None and done < iters and time.monotonic() > next_line:
                    next_line = time.monotonic() + PROGRESS_S
                    report.evaluating(state.step, name, done, iters)

            with self.watch.collector.evaluation(), self.watch.timers("evaluate", 0), self.watch.phases("evaluation"):
                loss = evaluate(self.run, one.data, iters, progress)
            if report is not None:
                now = state.step, state.consumed_samples, state.consumed_tokens
                report.validation(*now, loss, what, name=one.name, bytes_per_token=one.bytes_per_token)
            self._tell_timers(("evaluate",))

    def _tell_saves(self) -> None:
        lines = self.saver.news() if self.saver is not None else []
        if self.report is not None:
            for line in lines:
                self.report.say(line)

    def _tell_timers(self, names: Sequence[str], steps: int = 1) -> None:
        """Collective where something was measured."""
        seconds = self.watch.timers.take(names, steps)
        if self.report is not None and seconds:
            self.report.timers(self.run.state.step, seconds)


def summarise(run: Run, since: list[StepResult], params_norm: float | None = None) -> Interval:
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
        steps=n,
        step_s=sum(r.step_s for r in since) / n,
        data_s=sum(r.data_s for r in since) / n,
        tokens_per_step=sum(r.batch_size for r in since) * run.seq_length // n,
        memory_gib=memory,
        memory_limit_gib=limit,
        reserved_gib=reserved_gib(run.mesh),
        nan=sum(not math.isfinite(r.loss) for r in since),
        params_norm=params_norm,
        zeros=last.zeros,
    )
