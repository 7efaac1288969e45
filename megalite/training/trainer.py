"""The training loop around the steps: what comes before and after each, until the last one or a reason to stop."""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megalite.checkpoint.manager.collective import SaveTimer
from megalite.checkpoint.manager.saver import CheckpointSaver
from megalite.common.fault_injection import inject_fault
from megalite.config.config_file import dump_config
from megalite.config.console import print_out
from megalite.config.options import Config, DataConfig, effective_log_interval, effective_log_style
from megalite.parallel.comm import all_reduce_, all_reduce_int
from megalite.training.batch import to_device
from megalite.training.callbacks import run_callbacks
from megalite.training.checkpointing.resume import LoadOptions, resume, save
from megalite.training.datasets import NamedDataset
from megalite.training.job.stop_signals import StopSignalHandler
from megalite.training.logging.device_memory import memory_line, memory_metrics, memory_tags
from megalite.training.logging.metrics_logger import MetricsLogger
from megalite.training.logging.run_dir import EventLog, ExitCode
from megalite.training.logging.timers import GarbageCollector, PhaseTimer, Profiler, Timers, write_timeline
from megalite.training.monitoring.health import HealthMonitor
from megalite.training.monitoring.rerun import AnomalyHandler
from megalite.training.monitoring.watchdog import Watchdog
from megalite.training.replica_check import check_replicas
from megalite.training.state import Loader, Run, StepResult
from megalite.training.train_step import parameter_norm

LOOK_S = 2.0  # between two agreements of the ranks, during an evaluation, on whether to stop
STOP_FILE = "stop"  # in the run directory: making it stops the run as a signal does


class Monitors:
    """Observers of a run. `hosts`: of all ranks. `dog`: runs since the start."""

    def __init__(
        self, config: Config, run: Run, folder: Path, phases: PhaseTimer, hosts: list[str], watchdog: Watchdog
    ) -> None:
        p, log, o = config.parallel, config.log, config.operations
        timed = effective_log_style(config) == "megatron" or log.timing_log_level > 0 or log.log_timers_to_tensorboard
        self.timers = Timers(log.timing_log_level if timed else -1, run.mesh, log.barrier_with_level_1_timing)
        self.profiler = Profiler(o, run.mesh, folder / "trace")
        self.collector = GarbageCollector(o.manual_gc, o.manual_gc_interval, o.manual_gc_eval)
        self.phases, self.events = phases, EventLog(folder, run.mesh.world.rank)
        watchdog.attach(run.mesh, 60 * p.distributed_timeout_minutes)
        self.dog, watchdog.timers = watchdog, self.timers
        self.pulse = HealthMonitor(run.mesh, phases, hosts, self.events, o)
        self.begin = time.monotonic()


def _is_due(every: int | None, step: int) -> bool:
    """`every`: steps; None or 0: never."""
    return bool(every) and step % (every or 1) == 0


def why_no_label_counts(data: DataConfig) -> str:
    """The likely reason, with the flag, and what to do."""
    reasons = []
    if data.eod_mask_loss:
        reasons.append("--eod-mask-loss masks the label after each end of a document, and all tokens seem to be one")
    if data.document_packing == "best-fit":
        reasons.append("--document-packing best-fit counts labels within a document, and all seem to have one token")
    if data.fim_data:
        reasons.append("--fim-data does not count what --fim-pad-token fills")
    if not reasons:
        return "the data masks them all; look at what makes it"
    return f"{'; '.join(reasons)}; look at the data (tools/inspect_data.py) and at its tokenizer, or drop the flag"


class EvaluationInterrupted(Exception):
    """Some rank wanted to stop an evaluation; raised on all, after the same batch."""


def evaluate(
    run: Run,
    data: Loader,
    iters: int,
    done: Callable[[int], None] = lambda batches: None,
    wants_end: Callable[[], bool] | None = None,
) -> float:
    """Mean loss per token over the first `iters` global batches of a set, NaN where no label counts; collective. `done`
    is called with 1 after each. `wants_end`: whether this rank wants to stop. Raises BrokenOffError."""
    loss_sum, labels = evaluation_sums(run, data, iters, done, wants_end)
    return loss_sum / labels if labels else math.nan


def evaluation_sums(
    run: Run,
    data: Loader,
    iters: int,
    done: Callable[[int], None] = lambda batches: None,
    wants_end: Callable[[], bool] | None = None,
) -> tuple[float, float]:
    """(sum of the losses, labels that count); the rest as of `evaluate`."""
    mesh, size = run.mesh, run.eval_batch_size
    inject_fault("eval.begin", mesh.world.rank, run.state.step)
    sums = torch.zeros(2, dtype=torch.float64, device=mesh.device)
    begin, look = time.monotonic(), 1
    for i in range(iters):
        hosts, _ = data.get(i * size, size)
        loss = run.pipeline.evaluate([to_device(host, mesh.device, run.state.step) for host in hosts])
        if mesh.pp.is_last and mesh.tp.is_first:
            sums[0] += loss
            sums[1:] += float(sum(host.num_targets for host in hosts))
        done(1)
        if wants_end is not None and i + 1 == look < iters:  # the same on all ranks: LOOK_S at the slowest rank's pace
            now = torch.tensor([time.monotonic() - begin, wants_end()], dtype=torch.float64, device=mesh.device)
            seconds, ends = all_reduce_(now, mesh.world, dist.ReduceOp.MAX).tolist()
            if ends:
                raise EvaluationInterrupted(f"after {look} of {iters} batches")
            look += max(1, min(look, int(LOOK_S * look / seconds))) if seconds else 1
    loss_sum, labels = all_reduce_(sums, mesh.world).tolist()
    return loss_sum, labels


@dataclass
class Trainer:
    """A run in training. `config` is kept in checkpoints. `saved`: the step of the newest checkpoint, if any."""

    run: Run
    config: Config
    folder: Path
    report: MetricsLogger
    signals: StopSignalHandler
    saver: CheckpointSaver | None
    saved_step: int | None
    watch: Monitors

    def __post_init__(self) -> None:
        self._begin, self._first = time.monotonic(), self.run.state.step + 1
        self._config_toml = dump_config(self.config)
        self._log_interval = effective_log_interval(self.config, self.run.last_step)
        self._steps_since_log: list[StepResult] = []  # steps since the last log line
        self._lines = 0
        self._stop_reason: str | None = None  # why this rank asks to stop
        self._health_problem: str | None = None  # what the pulse found at the last log line
        self._exit: tuple[ExitCode, str] | None = None  # how the run ends before its last step
        most, why_empty = self.config.train.max_skipped_steps, why_no_label_counts(self.config.data)
        self._anomalies = AnomalyHandler(self.run, self.watch.events, self.report.info, most, why_empty)
        minutes = self.config.checkpoint.save_interval_mins
        self._save_timer = None if minutes is None else SaveTimer(60 * minutes, self.run.mesh, self.run.state.step)

    def steps(self) -> Iterator[dict[str, Any]]:
        """The arguments of `train_step` for each step; `after` takes its result."""
        run, skip = self.run, self.config.train.iterations_to_skip
        run_callbacks("on_train_start", run)
        while self._exit is None and run.state.step < run.last_step:
            if skip and run.state.step + 1 in skip:
                run.skip_step()
            else:
                yield self._begin_step()

    def finish(self) -> tuple[ExitCode, str]:
        """Save and evaluate for the last time. Returns the outcome, the same on all ranks, and this rank's reason."""
        outcome, reason = self._exit or (ExitCode.DONE, "reached the last step")
        self.run.buffer.wait_param_sync()
        self._save(last=True)
        if self.saver is not None:
            with self.watch.phases("checkpoint"):
                self.saver.wait()  # a failed save in the background ends the run here, on all ranks
            self._log_saves()
        self.report.log_saves_done()
        last = (self.run.valid_loaders, " on validation set"), (self.run.test_loaders, " on test set")
        if outcome is ExitCode.DONE and any(self._evaluate(*sets) for sets in last):  # a requeued run evaluates again
            outcome, reason = ExitCode.REQUEUE, self._stop_reason or "asked by another rank"
        run_callbacks("on_train_end", self.run, outcome.outcome)
        if outcome is ExitCode.REQUEUE:
            self.signals.is_final = all_reduce_int(bool(self.signals.received), self.run.mesh) == 0
        if outcome is ExitCode.REQUEUE and self.saver is None:  # a requeued run could not resume
            return ExitCode.DONE, f"{reason}; nothing was saved"
        return outcome, reason

    def _begin_step(self) -> dict[str, Any]:
        """Prepare the observers for a step; returns its arguments."""
        run, log, timers = self.run, self.config.log, self.watch.timers
        step = run.state.step + 1
        self.watch.dog.set_activity("step", step)
        if step == log.profile_pipeline or timers.level == 2:
            run.pipeline.timeline = []
        with self.watch.phases("profiler"):
            self.watch.profiler.before(step)
        self.watch.phases.before_step()
        begin = time.perf_counter()  # from here on it is this rank's own time, for which the others wait
        inject_fault("step.begin", run.mesh.world.rank, step)
        self._stop_reason = self._find_stop_reason()
        self._before_s = time.perf_counter() - begin
        zeros, level = log.log_num_zeros_in_grad, self.config.operations.empty_unused_memory_level
        return dict(want_stop=self._stop_reason is not None, count_zeros=zeros, timers=timers, empty_cache_level=level)

    def end_step(self, result: StepResult) -> None:
        """Log, evaluate, save, and check the run, where each is due."""
        run, t, c, o = self.run, self.config.train, self.config.checkpoint, self.config.operations
        result = replace(result, step_s=self._before_s + result.step_s)
        self._record_step(result)
        if result.replica_mismatch:
            self._log_replica_mismatch(result.replica_mismatch, run.state.step)
        unreliable = self._anomalies.handle(result)
        step, stop = run.state.step, result.stop
        stopping = result.stop or bool(unreliable) or _is_due(t.exit_interval, step)
        logged = _is_due(self._log_interval, step) or step in (self._first, run.last_step) or stopping
        run_callbacks("on_train_step_end", run, result)
        self._log(result, logged)
        self.report.update_bar(step, run.last_step, result.loss)
        with self.watch.phases("profiler"):
            self.watch.profiler.after(step, logged)
        if _is_due(o.check_weight_hash_across_dp_replicas_interval, step):
            if differing := check_replicas(run, step, o.check_replicas_action):
                self._log_replica_mismatch(differing, step)
            else:
                self.report.info(f">>> Weight hashes match after {step} iterations...")
        self.watch.collector.after(step)
        if _is_due(t.eval_interval, step) and step < run.last_step:
            stop = self._evaluate(run.valid_loaders, "") or stop
        if result.skipped and result.anomaly is not None and result.anomaly.finite and run.spikes.action == "rollback":
            self._roll_back()
        by_clock = self._save_timer is not None and self._save_timer.is_due(step)
        if by_clock or _is_due(c.save_interval, step) or (self._health_problem and o.health_action == "checkpoint"):
            self._save()
        self._log_saves()
        if wrong := unreliable or (self._health_problem if o.health_action == "exit" else None):
            self._exit = ExitCode.RERUN, wrong
        elif stop:
            self._exit = ExitCode.REQUEUE, self._stop_reason or self._find_stop_reason() or "asked by another rank"
        elif stopping and step < run.last_step:
            self._exit = ExitCode.REQUEUE, f"exit_interval={t.exit_interval}"

    def _record_step(self, result: StepResult) -> None:
        """Tell the observers of a step."""
        run, step = self.run, self.run.state.step
        self.watch.dog.set_activity("after the step", step)
        self.watch.phases.after_step(result.data_s, result.step_s)
        self._steps_since_log.append(result)
        self.watch.timers.add_spans(run.pipeline.timeline or ())
        if step == self.config.log.profile_pipeline:
            write_timeline(run.pipeline, self.folder)
        run.pipeline.timeline = None

    def _stop_requested(self) -> bool:
        """Whether a signal or the stop file asks to stop; one rank alone reads the file, and removes it."""
        file = self.folder / STOP_FILE
        if self.signals.received:
            self._stop_reason = self.signals.received[0]
        elif self.run.mesh.world.is_first and file.is_file():
            file.unlink(missing_ok=True)
            self._stop_reason = str(file)
        return bool(self.signals.received) or self._stop_reason == str(file)

    def _find_stop_reason(self) -> str | None:
        """Why this rank asks the run to stop."""
        if self._stop_requested():
            return self._stop_reason
        minutes = self.config.train.exit_duration_in_mins
        if minutes is not None and time.monotonic() - self._begin > 60 * minutes:
            return "exit_duration_in_mins"
        return "a save failed" if self.saver is not None and self.saver.failed else None

    def _log_replica_mismatch(self, differing: str, step: int) -> None:
        self.report.info(f"WARNING: {differing}")
        if self.run.mesh.world.is_first:
            self.watch.events.add("replica-mismatch", step, text=differing)

    def _roll_back(self) -> None:
        if self.saver is not None:
            self.saver.wait()  # for the checkpoint to return to
        c = self.config.checkpoint
        load = lambda step: resume(self.run, c.save or "", self.config, LoadOptions(step), c.save_local)  # noqa: E731
        if self._anomalies.roll_back(self.saved_step, load):
            self._save()  # else a restart would train on the samples that were passed over

    def _log(self, result: StepResult, due: bool) -> None:
        """Write a log line if `due`, and a point of TensorBoard if that is due; collective where it needs all ranks."""
        run, log, report, step = self.run, self.config.log, self.report, self.run.state.step
        point = log.tensorboard_dir is not None and _is_due(log.tensorboard_log_interval, step)
        norm = parameter_norm(run) if log.log_params_norm and (due or point) else None
        if point:
            memory = memory_tags(run.mesh) if log.log_memory_to_tensorboard else {}
            report.log_step(step_metrics(run, [result], norm), memory)
        if not due:
            return
        figures: dict[str, Any] = {"of_plugins": run.plugin_metrics.reduce_and_reset(), **memory_metrics(run.mesh)}
        figures |= step_metrics(run, self._steps_since_log, norm)
        report.log_train(figures)
        self._lines += 1
        # at the second line the optimizer has its state
        early = self._lines <= 2 and effective_log_style(self.config) == "megatron"
        if (early or _is_due(log.log_memory_interval, step)) and run.mesh.dp.is_first:
            line = memory_line(run.mesh, step, log.log_device_memory_used)
            report.info(line) if run.mesh.world.is_first else print_out(line)
        self._log_timers(self.watch.timers.step_names, len(self._steps_since_log))
        self._health_problem = self.watch.pulse.check(self._steps_since_log, step, figures["memory_gib"], report)
        self._steps_since_log.clear()

    def _save(self, last: bool = False) -> None:
        run, saver, report = self.run, self.saver, self.report
        if saver is None or self.saved_step == run.state.step:
            return
        report.info(saver.save_message(run.state.step))
        self.watch.dog.set_activity("save", run.state.step)
        with self.watch.timers("save-checkpoint", 0), self.watch.phases("checkpoint"):
            save(run, saver, self._config_toml, optimizer=not self.config.checkpoint.no_save_optim, last=last)
        self.saved_step = run.state.step
        run_callbacks("on_save_checkpoint", run)
        if self._save_timer is not None:
            self._save_timer.restart(self.saved_step)
        self._log_saves()
        report.log_save(run.state, saver.background and not last)
        self._log_timers(("save-checkpoint",))

    def _evaluate(self, sets: Sequence[NamedDataset[Loader]], what: str) -> bool:
        """Whether a wish to stop has ended it; a set that was not finished is not logged."""
        report, state, iters, watch = self.report, self.run.state, self.config.train.eval_iters, self.watch
        for named in sets if iters > 0 else ():
            watch.dog.set_activity("evaluate", state.step)
            with watch.collector.evaluation(), watch.timers("evaluate", 0), watch.phases("evaluation"):
                with report.evaluation_bar(state.step, named.name, iters) as bar:
                    try:
                        loss_sum, labels = evaluation_sums(self.run, named.data, iters, bar.add, self._stop_requested)
                    except EvaluationInterrupted as end:
                        why = self._stop_reason or "asked by another rank"
                        report.info(f"stopping ({why}): the evaluation of step {state.step} ends {end}, without a loss")
                        return True
            if not labels:
                which = f"the set {named.name}" if named.name else "an evaluation"
                why = why_no_label_counts(self.config.data)
                report.info(f"WARNING: step {state.step}: no label of {which} counts, so it has no loss: {why}")
                continue
            loss = loss_sum / labels
            report.log_validation(state, loss, named, what)
            run_callbacks("on_eval_end", self.run, named.name, loss)
            self._log_timers(("evaluate",))
        return False

    def _log_saves(self) -> None:
        for line in self.saver.pop_messages() if self.saver is not None else ():
            self.report.info(line)

    def _log_timers(self, names: Sequence[str], steps: int = 1) -> None:
        """Collective if timers are on."""
        if seconds := self.watch.timers.reduce_and_reset(names, steps):
            self.report.timers(self.run.state.step, seconds)


def step_metrics(run: Run, since: Sequence[StepResult], params_norm: float | None) -> dict[str, Any]:
    """By name, over the steps since the last line: losses (nats per token) are means over those that updated, times
    (seconds) over all; what is not named here is the last step's."""
    n, used = len(since), [r for r in since if not r.skipped]
    means = {name: sum(getattr(r, name) for r in used) / len(used) if used else None for name in ("loss", "z_loss")}
    return {
        **vars(since[-1]),
        **since[-1].moe_metrics,
        **run.state.to_json(),
        **means,
        "z_loss": means["z_loss"] or None,  # 0 only where it is off
        "last_step": run.last_step,
        "loss_scale": run.loss_scaler.scale,
        "skipped": n - len(used),
        "nan": sum(not math.isfinite(r.loss) for r in since),
        "steps": n,
        "step_s": sum(r.step_s for r in since) / n,
        "data_s": sum(r.data_s for r in since) / n,
        "tokens_per_step": sum(r.tokens for r in since) // n,
        "params_norm": params_norm,
    }
