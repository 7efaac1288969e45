"""The training loop: prepare each step, then log, evaluate and save after it, until the last step or a stop request."""

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
from megalite.common.console import print_out
from megalite.common.exit_codes import ExitCode, RunResult
from megalite.common.fault_injection import inject_fault
from megalite.config.config_file import dump_config
from megalite.config.options import Config, DataConfig, effective_log_interval, effective_log_style
from megalite.nn.loss_sums import LossSums
from megalite.nn.micro_batch import ForwardContext
from megalite.parallel.comm import all_reduce_, all_reduce_int
from megalite.training.batch import to_device
from megalite.training.callbacks import run_callbacks
from megalite.training.checkpointing.resume import LoadOptions, resume
from megalite.training.checkpointing.save import save
from megalite.training.datasets import NamedDataset
from megalite.training.job.stop_signals import StopSignalHandler
from megalite.training.logging.device_memory import memory_line, memory_metrics, memory_tags
from megalite.training.logging.event_log import EventLog
from megalite.training.logging.garbage_collector import GarbageCollector
from megalite.training.logging.metrics_logger import MetricsLogger
from megalite.training.logging.profiler import Profiler
from megalite.training.logging.time_breakdown import TimeBreakdown
from megalite.training.logging.timers import Timers, write_timeline
from megalite.training.monitoring.health import HealthMonitor
from megalite.training.monitoring.rerun import AnomalyHandler
from megalite.training.monitoring.watchdog import Watchdog
from megalite.training.replica_check import check_replicas
from megalite.training.state import Loader, Run, StepResult
from megalite.training.train_step import parameter_norm

STOP_CHECK_S = 2.0  # interval at which ranks agree, during an evaluation, on whether to stop
STOP_FILE = "stop"  # creating this file in the run directory stops the run as a signal does


class Monitors:
    """The observers of a run: timers, profiler, garbage collector, time breakdown, event log, watchdog, health monitor.

    Args:
        hosts: The host names of all ranks.
        watchdog: The watchdog that has been running since the process started.
    """

    def __init__(
        self,
        config: Config,
        run: Run,
        directory: Path,
        time_breakdown: TimeBreakdown,
        hosts: list[str],
        watchdog: Watchdog,
    ) -> None:
        log, operations = config.log, config.operations
        timed = effective_log_style(config) == "megatron" or log.timing_log_level > 0 or log.log_timers_to_tensorboard
        self.timers = Timers(log.timing_log_level if timed else -1, run.mesh, log.barrier_with_level_1_timing)
        self.profiler = Profiler(operations, run.mesh, directory / "trace")
        self.collector = GarbageCollector(
            operations.manual_gc, operations.manual_gc_interval, operations.manual_gc_eval
        )
        self.time_breakdown = time_breakdown
        self.events = EventLog(directory, run.mesh.world.rank)
        watchdog.attach(run.mesh, 60 * config.parallel.distributed_timeout_minutes)
        watchdog.timers = self.timers
        self.watchdog = watchdog
        self.health = HealthMonitor(run.mesh, time_breakdown, hosts, self.events, operations)
        self.start_time = time.monotonic()


def _is_due(interval: int | None, step: int) -> bool:
    """Return True if `step` is a multiple of `interval` (in steps; None or 0 means never)."""
    return bool(interval) and step % (interval or 1) == 0


def why_no_label_counts(data: DataConfig) -> str:
    """Return the likely reason why no label counts, with the flag that causes it and a remedy."""
    reasons = []
    if data.eod_mask_loss:
        reasons.append("--eod-mask-loss masks the label after each end of a document, and every token seems to be one")
    if data.document_packing == "best-fit":
        reasons.append("--document-packing best-fit counts labels within a document, and all seem to be one token long")
    if data.fim_data:
        reasons.append("--fim-data does not count tokens filled with --fim-pad-token")
    if not reasons:
        return "the data masks all of them; look at the program that writes it"
    return f"{'; '.join(reasons)}; look at the data (tools/inspect_data.py) and at its tokenizer, or drop the flag"


class EvaluationInterrupted(Exception):
    """A rank asked to stop during an evaluation; raised on all ranks after the same batch."""


def evaluate(
    run: Run,
    data: Loader,
    iters: int,
    on_batch: Callable[[int], None] = lambda batches: None,
    stop_requested: Callable[[], bool] | None = None,
) -> float:
    """Return the mean loss per token over the first `iters` global batches of a set, or NaN if no label counts.

    Collective over all ranks.

    Args:
        on_batch: Called with 1 after each global batch.
        stop_requested: Returns True if this rank wants to stop.

    Raises:
        EvaluationInterrupted: if some rank wants to stop.
    """
    return evaluation_losses(run, data, iters, on_batch, stop_requested).get("loss", math.nan)


def evaluation_losses(
    run: Run,
    data: Loader,
    iters: int,
    on_batch: Callable[[int], None] = lambda batches: None,
    stop_requested: Callable[[], bool] | None = None,
) -> dict[str, float]:
    """Return the mean of each loss of the head per label, by name; {} if no label counts.

    Arguments and errors are those of `evaluate`.
    """
    mesh = run.mesh
    size = run.eval_batch_size
    inject_fault("eval.begin", mesh.world.rank, run.progress.step)
    loss_sums = LossSums(run.loss_sums.head_losses, (), mesh.device)
    labels = 0  # of this rank's samples
    start = time.monotonic()
    next_check = 1  # in batches
    ctx = ForwardContext(run.progress.step, loss_sums=loss_sums)
    for i in range(iters):
        host_batches, _ = data.get(i * size, size)
        run.pipeline.evaluate([to_device(batch, mesh.device) for batch in host_batches], ctx)
        labels += sum(batch.num_targets for batch in host_batches)
        on_batch(1)
        # All ranks check after the same batch: every STOP_CHECK_S at the pace of the slowest rank.
        if stop_requested is not None and i + 1 == next_check < iters:
            status = [time.monotonic() - start, stop_requested()]
            reduced = all_reduce_(
                torch.tensor(status, dtype=torch.float64, device=mesh.device), mesh.world, dist.ReduceOp.MAX
            )
            seconds, should_stop = reduced.tolist()
            if should_stop:
                raise EvaluationInterrupted(f"after {next_check} of {iters} batches")
            next_check += max(1, min(next_check, int(STOP_CHECK_S * next_check / seconds))) if seconds else 1
    local_labels = torch.zeros(1, dtype=torch.float64, device=mesh.device)
    if mesh.pp.is_last and mesh.tp.is_first:
        local_labels.fill_(float(labels))
    sums = torch.cat([loss_sums.local_values(mesh), local_labels])
    *global_sums, global_labels = all_reduce_(sums, mesh.world).tolist()
    return loss_sums.means(global_sums, global_labels, 0) if global_labels else {}


@dataclass
class Trainer:
    """The training loop around `train_step`.

    Attributes:
        config: The configuration that checkpoints store.
        logger: The logger.
        saved_step: The step of the newest checkpoint, or None.
        monitors: The observers.
    """

    run: Run
    config: Config
    directory: Path
    logger: MetricsLogger
    signals: StopSignalHandler
    saver: CheckpointSaver | None
    saved_step: int | None
    monitors: Monitors

    def __post_init__(self) -> None:
        self._start = time.monotonic()
        self._first_step = self.run.progress.step + 1
        self._config_toml = dump_config(self.config)
        self._log_interval = effective_log_interval(self.config, self.run.last_step)
        self._steps_since_log: list[StepResult] = []  # steps since the last log line
        self._num_log_lines = 0
        self._begin_step_s = 0.0  # duration of `_begin_step`, part of the step's time
        self._stop_reason: str | None = None  # why this rank asks to stop
        self._health_problem: str | None = None  # found by the health monitor after the current step
        self._early_end: RunResult | None = None  # if the run ends before its last step
        self._anomalies = AnomalyHandler(
            self.run,
            self.monitors.events,
            self.logger.info,
            self.config.train.max_skipped_steps,
            why_no_label_counts(self.config.data),
        )
        minutes = self.config.checkpoint.save_interval_mins
        self._save_timer = None if minutes is None else SaveTimer(60 * minutes, self.run.mesh, self.run.progress.step)

    def steps(self) -> Iterator[dict[str, Any]]:
        """Yield the keyword arguments of `train_step` for each step; pass its result to `end_step`."""
        run = self.run
        skip = self.config.train.iterations_to_skip
        run_callbacks("on_train_start", run)
        while self._early_end is None and run.progress.step < run.last_step:
            if skip and run.progress.step + 1 in skip:
                run.skip_step()
            else:
                yield self._begin_step()

    def finish(self) -> RunResult:
        """Save and evaluate for the last time.

        Returns the result, whose exit code is the same on all ranks; the reason is this rank's. A background save that
        failed raises here, on all ranks.
        """
        result = self._early_end or RunResult(ExitCode.DONE, "reached the last step")
        self.run.buffer.wait_param_sync()
        self._save(last=True)
        if self.saver is not None:
            with self.monitors.time_breakdown("checkpoint"):
                self.saver.wait()
            self._log_saves()
        self.logger.log_saves_done()
        # A run that will be requeued evaluates after its real last step, not here.
        if result.exit_code is ExitCode.DONE:
            final_sets = ((self.run.valid_loaders, " on validation set"), (self.run.test_loaders, " on test set"))
            if any(self._evaluate(loaders, suffix) for loaders, suffix in final_sets):
                result = RunResult(ExitCode.REQUEUE, self._stop_reason or "requested by another rank")
        run_callbacks("on_train_end", self.run, result.exit_code.outcome)
        if result.exit_code is ExitCode.REQUEUE:
            self.signals.is_final = all_reduce_int(bool(self.signals.received), self.run.mesh) == 0
            if self.saver is None:  # without a checkpoint the requeued run could not resume
                return RunResult(ExitCode.DONE, f"{result.reason}; nothing was saved")
        return result

    def _begin_step(self) -> dict[str, Any]:
        """Prepare the observers for a step and return the keyword arguments of `train_step`."""
        run, log, timers = self.run, self.config.log, self.monitors.timers
        step = run.progress.step + 1
        self.monitors.watchdog.set_activity("step", step)
        if step == log.profile_pipeline or timers.level == 2:
            run.pipeline.timeline = []
        with self.monitors.time_breakdown("profiler"):
            self.monitors.profiler.before(step)
        self.monitors.time_breakdown.before_step()
        start = time.perf_counter()  # from here on, a slow rank makes all others wait
        inject_fault("step.begin", run.mesh.world.rank, step)
        self._stop_reason = self._find_stop_reason()
        self._begin_step_s = time.perf_counter() - start
        return dict(
            want_stop=self._stop_reason is not None,
            count_zeros=log.log_num_zeros_in_grad,
            timers=timers,
            empty_cache_level=self.config.operations.empty_unused_memory_level,
        )

    def end_step(self, result: StepResult) -> None:
        """Log, check the replicas, evaluate and save if due, and decide whether the run ends."""
        run, train, operations = self.run, self.config.train, self.config.operations
        result = replace(result, step_s=self._begin_step_s + result.step_s)
        self._record_step(result)
        if result.replica_mismatch:
            self._log_replica_mismatch(result.replica_mismatch, run.progress.step)
        unreliable = self._anomalies.handle(result)
        step, stop = run.progress.step, result.stop
        stopping = result.stop or bool(unreliable) or _is_due(train.exit_interval, step)
        logged = _is_due(self._log_interval, step) or step in (self._first_step, run.last_step) or stopping
        run_callbacks("on_train_step_end", run, result)
        self._log(result, logged)
        self.logger.update_bar(step, run.last_step, result.loss)
        with self.monitors.time_breakdown("profiler"):
            self.monitors.profiler.after(step, logged)
        if _is_due(operations.check_weight_hash_across_dp_replicas_interval, step):
            if mismatch := check_replicas(run, step, operations.check_replicas_action):
                self._log_replica_mismatch(mismatch, step)
            else:
                self.logger.info(f">>> Weight hashes match after {step} iterations...")
        self.monitors.collector.after(step)
        if _is_due(train.eval_interval, step) and step < run.last_step:
            stop = self._evaluate(run.valid_loaders, "") or stop
        if result.skipped and result.anomaly is not None and result.anomaly.finite and run.spikes.action == "rollback":
            self._roll_back()
        save_due = self._save_timer is not None and self._save_timer.is_due(step)
        save_due = save_due or _is_due(self.config.checkpoint.save_interval, step)
        if save_due or (self._health_problem and operations.health_action == "checkpoint"):
            self._save()
        self._log_saves()
        health_problem = self._health_problem if operations.health_action == "exit" else None
        if problem := unreliable or health_problem:
            self._early_end = RunResult(ExitCode.RERUN, problem)
        elif stop:
            reason = self._stop_reason or self._find_stop_reason() or "requested by another rank"
            self._early_end = RunResult(ExitCode.REQUEUE, reason)
        elif stopping and step < run.last_step:
            self._early_end = RunResult(ExitCode.REQUEUE, f"exit_interval={train.exit_interval}")

    def _record_step(self, result: StepResult) -> None:
        """Pass a finished step to the observers."""
        run = self.run
        step = run.progress.step
        self.monitors.watchdog.set_activity("after the step", step)
        self.monitors.time_breakdown.after_step(result.data_s, result.step_s)
        self._steps_since_log.append(result)
        self.monitors.timers.add_spans(run.pipeline.timeline or ())
        if step == self.config.log.profile_pipeline:
            write_timeline(run.pipeline, self.directory)
        run.pipeline.timeline = None

    def _stop_requested(self) -> bool:
        """Return True if a signal or the stop file asks this rank to stop; only rank 0 reads and removes the file."""
        file = self.directory / STOP_FILE
        if self.signals.received:
            self._stop_reason = self.signals.received[0]
        elif self.run.mesh.world.is_first and file.is_file():
            file.unlink(missing_ok=True)
            self._stop_reason = str(file)
        return bool(self.signals.received) or self._stop_reason == str(file)

    def _find_stop_reason(self) -> str | None:
        """Return why this rank asks the run to stop, or None."""
        if self._stop_requested():
            return self._stop_reason
        minutes = self.config.train.exit_duration_in_mins
        if minutes is not None and time.monotonic() - self._start > 60 * minutes:
            return "exit_duration_in_mins"
        return "a save failed" if self.saver is not None and self.saver.failed else None

    def _log_replica_mismatch(self, mismatch: str, step: int) -> None:
        self.logger.info(f"WARNING: {mismatch}")
        if self.run.mesh.world.is_first:
            self.monitors.events.add("replica-mismatch", step, text=mismatch)

    def _roll_back(self) -> None:
        """Return to the last checkpoint and skip the samples since."""
        if self.saver is not None:
            self.saver.wait()  # the checkpoint to return to may still be written in the background
        checkpoint = self.config.checkpoint

        def load(step: int) -> object:
            return resume(self.run, checkpoint.save or "", self.config, LoadOptions(step), checkpoint.save_local)

        if self._anomalies.roll_back(self.saved_step, load):
            self._save()  # otherwise a restart would train on the skipped samples

    def _log(self, result: StepResult, due: bool) -> None:
        """Write a log line if `due`, and a TensorBoard point if its interval is due.

        Collective if a line is due, or if a point needs the norm of the parameters.
        """
        run, log, logger = self.run, self.config.log, self.logger
        step = run.progress.step
        self._health_problem = None
        tensorboard_due = log.tensorboard_dir is not None and _is_due(log.tensorboard_log_interval, step)
        norm = parameter_norm(run) if log.log_params_norm and (due or tensorboard_due) else None
        if tensorboard_due:
            memory = memory_tags(run.mesh) if log.log_memory_to_tensorboard else {}
            logger.log_step(step_metrics(run, [result], norm), memory)
        if not due:
            return
        metrics: dict[str, Any] = {"plugin_metrics": run.plugin_metrics.reduce_and_reset(), **memory_metrics(run.mesh)}
        metrics |= step_metrics(run, self._steps_since_log, norm)
        logger.log_train(metrics)
        self._num_log_lines += 1
        # In Megatron-LM's style the first two lines report memory: by the second the optimizer state is allocated.
        early = self._num_log_lines <= 2 and effective_log_style(self.config) == "megatron"
        if (early or _is_due(log.log_memory_interval, step)) and run.mesh.dp.is_first:
            line = memory_line(run.mesh, step, log.log_device_memory_used)
            if run.mesh.world.is_first:
                logger.info(line)
            else:
                print_out(line)
        self._log_timers(self.monitors.timers.step_names, len(self._steps_since_log))
        self._health_problem = self.monitors.health.check(self._steps_since_log, step, metrics["memory_gib"], logger)
        self._steps_since_log.clear()

    def _save(self, last: bool = False) -> None:
        """Save a checkpoint of the current step, unless there is one already; collective."""
        run, saver, logger = self.run, self.saver, self.logger
        if saver is None or self.saved_step == run.progress.step:
            return
        logger.info(saver.save_message(run.progress.step))
        self.monitors.watchdog.set_activity("save", run.progress.step)
        with self.monitors.timers("save-checkpoint", 0), self.monitors.time_breakdown("checkpoint"):
            save(run, saver, self._config_toml, optimizer=not self.config.checkpoint.no_save_optim, last=last)
        self.saved_step = run.progress.step
        run_callbacks("on_save_checkpoint", run)
        if self._save_timer is not None:
            self._save_timer.restart(self.saved_step)
        self._log_saves()
        logger.log_save(run.progress, saver.background and not last)
        self._log_timers(("save-checkpoint",))

    def _evaluate(self, sets: Sequence[NamedDataset[Loader]], suffix: str) -> bool:
        """Evaluate the sets and return True if a stop request interrupted that; an unfinished set is not logged.

        Args:
            suffix: "" during training, " on validation set" or " on test set" at its end (`log_validation`).
        """
        logger, progress, monitors = self.logger, self.run.progress, self.monitors
        iters = self.config.train.eval_iters
        for named in sets if iters > 0 else ():
            monitors.watchdog.set_activity("evaluate", progress.step)
            with monitors.collector.evaluation(), monitors.timers("evaluate", 0), monitors.time_breakdown("evaluation"):
                with logger.evaluation_bar(progress.step, named.name, iters) as bar:
                    try:
                        losses = evaluation_losses(self.run, named.data, iters, bar.add, self._stop_requested)
                    except EvaluationInterrupted as error:
                        reason = self._stop_reason or "requested by another rank"
                        logger.info(
                            f"stopping ({reason}): the evaluation of step {progress.step} ends {error}, without a loss"
                        )
                        return True
            if not losses:
                set_name = f"the set {named.name}" if named.name else "an evaluation"
                reason = why_no_label_counts(self.config.data)
                logger.info(
                    f"WARNING: step {progress.step}: no label of {set_name} counts, so it has no loss: {reason}"
                )
                continue
            logger.log_validation(progress, losses, named, suffix)
            run_callbacks("on_eval_end", self.run, named.name, losses["loss"])
            self._log_timers(("evaluate",))
        return False

    def _log_saves(self) -> None:
        if self.saver is not None:
            for line in self.saver.pop_messages():
                self.logger.info(line)

    def _log_timers(self, names: Sequence[str], steps: int = 1) -> None:
        """Log the timers `names` per step and reset them; collective if timers are on."""
        if seconds := self.monitors.timers.reduce_and_reset(names, steps):
            self.logger.log_timers(self.run.progress.step, seconds)


def step_metrics(run: Run, results: Sequence[StepResult], params_norm: float | None) -> dict[str, Any]:
    """Return the metrics of the steps since the last log line, by name.

    Losses (nats per token) are means over the steps that updated the weights, and times (seconds) are means over all
    steps. Every value that is not computed here is the last step's.
    """
    num_steps = len(results)
    updated = [result for result in results if not result.skipped]
    losses: dict[str, float | None] = dict.fromkeys(results[-1].losses)
    if updated:
        losses = {name: sum(result.losses[name] for result in updated) / len(updated) for name in losses}
    return {
        **vars(results[-1]),
        **results[-1].moe_metrics,
        **run.progress.to_json(),
        **losses,
        "losses": losses,
        "layer_losses": results[-1].layer_losses if updated else {},
        "last_step": run.last_step,
        "loss_scale": run.loss_scaler.scale,
        "skipped": num_steps - len(updated),
        "nan": sum(not math.isfinite(result.loss) for result in results),
        "steps": num_steps,
        "step_s": sum(result.step_s for result in results) / num_steps,
        "data_s": sum(result.data_s for result in results) / num_steps,
        "tokens_per_step": sum(result.tokens for result in results) // num_steps,
        "params_norm": params_norm,
    }
