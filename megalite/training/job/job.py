"""The lifetime of a rank from preflight to exit code: set up, resume, train, write the status, and report errors."""

import contextlib
import datetime
import signal
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import replace
from types import TracebackType

import torch

from megalite.checkpoint.manager.saver import CheckpointSaver
from megalite.checkpoint.storage.location import CheckpointError, OtherRankError
from megalite.common.console import MAX_ERROR_CHARACTERS, print_err, shortened
from megalite.common.exit_codes import ExitCode, RunResult
from megalite.common.exits import error_text, exit_now
from megalite.common.fault_injection import inject_fault
from megalite.config.options import Config
from megalite.data.errors import DataError
from megalite.launch.process_group import process_group, torchrun_will_restart
from megalite.launch.rank_info import LaunchError, RankInfo
from megalite.optim.loss_scale import LossScaleExhausted
from megalite.parallel.comm import all_reduce_
from megalite.parallel.mesh import ABSTRACT, Axis, Mesh, world_axis
from megalite.parallel.self_test import check_collectives
from megalite.planning.run_plan import RunPlan
from megalite.training.builtin_callbacks import build_trainer
from megalite.training.checkpointing.initial_state import complete_config, load_initial_state, start_saving_from
from megalite.training.checkpointing.resume import load_message
from megalite.training.checkpointing.save import open_saver
from megalite.training.datasets import DatasetBundle
from megalite.training.job import preflight, startup
from megalite.training.job.command import TrainCommand
from megalite.training.job.export_hf import export
from megalite.training.job.stop_signals import DOUBLE_SIGNAL_S, STOP_SIGNALS, StopSignalHandler
from megalite.training.job.unused_resources import unused_resources
from megalite.training.logging import log_format
from megalite.training.logging.device_memory import keep_freed_heap
from megalite.training.logging.metrics_logger import MetricsLogger, NullLogger
from megalite.training.logging.plan_summary import format_plan, plan_as_json
from megalite.training.logging.rank_log import (
    claim_first_failure,
    first_failure_reason,
    log_to_rank_file,
    rank_log,
    report_failure_once,
    wait_for_first_failure,
)
from megalite.training.logging.run_dir import newest_checkpoint, resume_command, run_dir
from megalite.training.logging.run_report import RunReport
from megalite.training.logging.status import write_status
from megalite.training.logging.time_breakdown import TimeBreakdown
from megalite.training.logging.timers import Timers
from megalite.training.monitoring.monitors import Monitors
from megalite.training.monitoring.rank_consistency import check_ranks_match
from megalite.training.monitoring.watchdog import Heartbeat, Watchdog, is_lost_peer_error
from megalite.training.setup import SetupError, step_timeout
from megalite.training.state import InvalidResultError, Run
from megalite.training.trainer import Trainer

# Outcomes after which a process exits without waiting for other ranks, outside and inside the process group.
EXIT_IMMEDIATELY = (ExitCode.INTERRUPTED, ExitCode.HANG)
EXIT_IMMEDIATELY_IN_GROUP = (*EXIT_IMMEDIATELY, ExitCode.CRASH, ExitCode.PREFLIGHT)
# Outcomes after which a background save is not waited for.
NO_WAIT = (ExitCode.CRASH, ExitCode.USAGE, ExitCode.PREFLIGHT, ExitCode.HANG)


def report_failure(
    error: BaseException,
    ranks: RankInfo,
    run: Run | None = None,
    training_started: bool = False,
    watchdog: Watchdog | None = None,
) -> RunResult:
    """Report the error that ended a run, on the rank that knows most about it, and return the run's result.

    Args:
        run: The run, if its parts were built.
        training_started: The first step was started. Before it, an error of a checkpoint has the outcome `preflight`,
            because the next start would raise the same error.
        watchdog: The watchdog, which may know that a hang or another rank caused the error.
    """
    position = f"rank {ranks.rank} of {ranks.world_size}"
    if run is not None:
        position = f"{run.mesh.describe()}, step {run.progress.step + 1}"
    if watchdog is not None and (explanation := watchdog.explain_error(error)) is not None:
        code, reason = explanation.exit_code, explanation.reason
        report_failure_once(ranks, code, reason, f"{position}: {code.outcome}: {reason}")
        return explanation
    mesh = None if run is None else run.mesh
    reason = shortened(error_text(error), MAX_ERROR_CHARACTERS)
    match error:
        case SetupError() | LaunchError() | DataError() if mesh is None:
            code = ExitCode.USAGE if isinstance(error, SetupError) else ExitCode.PREFLIGHT
            # An error may name the local rank that reports it, or None for the first one that fails. By default one
            # rank of each machine reports it, because all have the same error.
            local_rank = getattr(error, "local_rank", 0)
            if local_rank is None:
                reports = claim_first_failure(ranks, code, reason)
            else:
                reports = ranks.local_rank == local_rank
            if reports:
                for line in reason.splitlines():
                    print_err(f"pretrain_gpt.py: {line}")
            return RunResult(code, reason)
        case KeyboardInterrupt():
            _exit_on_next_signal()
            return RunResult(ExitCode.INTERRUPTED, reason or "SIGINT")
        case InvalidResultError() | LossScaleExhausted():
            code = ExitCode.BAD_RESULT
            reports = ranks.rank == 0
        case CheckpointError():
            code = ExitCode.CRASH if training_started else ExitCode.PREFLIGHT
            # A rank that knows of the error from another rank waits until that one has reported it, because its own
            # exit would end the other rank.
            reports = not isinstance(error, OtherRankError) or not wait_for_first_failure(ranks)
        case DataError():  # one rank of each dp position reports; its other ranks read the same samples
            code = ExitCode.PREFLIGHT
            reports = mesh is not None and mesh.pp.is_first and mesh.tp.is_first
        case RuntimeError() if is_lost_peer_error(error):  # the lost rank, or its launcher, reports why
            if watchdog is None:
                reason = f"lost another rank ({reason.splitlines()[0]})"
            else:
                reason = watchdog.describe_lost_rank(error)
            message = f"{position}: {reason}"
            if ranks.rank == 0:
                print_err(message)
            else:
                log_to_rank_file(message)
            return RunResult(ExitCode.CRASH, first_failure_reason(ranks) or reason)
        case _:
            reason = shortened(f"{type(error).__name__}: {error_text(error)}".rstrip(": "))
            stack = "".join(traceback.format_exception(error)).rstrip()
            report_failure_once(ranks, ExitCode.CRASH, reason, f"{position}:\n{stack}")
            return RunResult(ExitCode.CRASH, reason)
    if reports:
        report_failure_once(ranks, code, reason, f"pretrain_gpt.py: {reason}")
    return RunResult(code, reason)


def _exit_on_next_signal() -> None:
    """Let another stop signal end the process immediately.

    A single Ctrl-C gives a rank two signals, one from the terminal and one from the launcher, so signals within
    DOUBLE_SIGNAL_S are ignored.
    """
    start = time.monotonic()

    def on_signal(*_: object) -> None:
        if time.monotonic() > start + DOUBLE_SIGNAL_S:
            exit_now(ExitCode.INTERRUPTED)

    for number in STOP_SIGNALS:
        signal.signal(number, on_signal)


class TrainingJob:
    """A context around everything that a rank does.

    An error within it ends the rank, with a report and a status. An error within `trainer` is reported before the rank
    leaves the process group, because leaving might block forever.
    """

    def __init__(self, command: TrainCommand, ranks: RankInfo, signals: StopSignalHandler):
        self.config = command.config
        self.ranks = ranks
        self.signals = signals
        self.directory = run_dir(command.config)
        self.warnings = [*command.warnings]
        self.hosts = list[str]()
        self.result = RunResult(ExitCode.DONE)
        self._startup_timeout = datetime.timedelta(minutes=self.config.parallel.distributed_timeout_minutes)

    @property
    def exit_code(self) -> int:
        """The exit code of this rank (common/exit_codes.py)."""
        return 0 if self.signals.is_final and torchrun_will_restart() else self.result.exit_code

    def __enter__(self) -> "TrainingJob":
        ranks = self.ranks
        self._mesh = Mesh.single_process()
        if self.config.train.dry_run:  # its ranks do not communicate
            self._log = contextlib.nullcontext()
        else:
            self._log = rank_log(self.directory, ranks)
            self._mesh = replace(self._mesh, world=Axis("world", ranks.world_size, ranks.rank, ABSTRACT))
        self._log.__enter__()
        self.watchdog = Watchdog(
            self._mesh, self.directory, Timers(), self._startup_timeout.total_seconds(), ranks.shared_dir
        )
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        failed = error is not None  # before training; `trainer` has handled later errors
        try:
            if failed:
                self.result = report_failure(error, self.ranks, watchdog=self.watchdog)
                code = self.result.exit_code
                writes_status = self.ranks.rank == 0 or code is ExitCode.HANG  # in a hang rank 0 may not reach this
                if writes_status and not self.config.train.dry_run:
                    write_status(
                        self.directory, code.outcome, self.config, self.result.reason, resumes=self.ranks.is_restart
                    )
                if code in EXIT_IMMEDIATELY:
                    exit_now(int(code))
        finally:
            self.watchdog.close()
            self._log.__exit__(None, None, None)
        return failed

    def preflight(self) -> tuple[RunPlan, DatasetBundle]:
        """Complete and check the configuration, and return the plan and the open datasets.

        Raises all errors that can be found before ranks communicate.
        """
        is_first = self.ranks.rank == 0
        command_config = self.config
        self.config = complete_config(command_config, print_err if is_first else lambda _: None)
        if is_first and not self.ranks.is_restart:
            for note in preflight.effects_of_completion(command_config, self.config):
                print_err(f"note: {note}")
        return preflight.preflight(self.config, self.ranks)

    def print_plan(self, plan: RunPlan, sources: DatasetBundle) -> int:
        """Print on rank 0 what a dry run would run, and return the exit code.

        Raises:
            CheckpointError: if the run could not save on this machine, unless --dry-run-rank plans for another one.
        """
        if self.ranks.rank == 0:
            try:
                preflight.check_save_of_dry_run(self.config)
            except CheckpointError as error:
                if self.config.train.dry_run_rank is None:
                    raise
                self.warnings.append(f"on this machine {error}")
            for warning in self.warnings:
                print_err(f"WARNING: {warning}")
            print(format_plan(plan, sources, self.ranks.local_world_size), flush=True)
            if self.config.train.dry_run_rank is not None:
                from megalite.training.dry_run import format_rank

                print(format_rank(plan, sources, self.ranks.local_world_size), flush=True)
        return ExitCode.DONE

    @contextlib.contextmanager
    def join_process_group(self, plan: RunPlan, sources: DatasetBundle) -> Iterator[torch.device]:
        """Join the process group of all ranks and compare their program, options and data; yields this rank's device.

        Checks the machine first.
        """
        ranks, timeout = self.ranks, self._startup_timeout
        backend = self.config.parallel.distributed_backend
        device_type = preflight.choose_device(self.config.parallel.device)
        preflight.check_machine(plan, device_type, ranks)
        preflight.check_save_writable(self.config, ranks)
        self.warnings += preflight.variable_warnings(device_type, ranks)
        self.warnings += preflight.thread_oversubscription_warning(device_type, ranks)
        if ranks.rank == 0:  # the only one that prints them; some are planned, which takes time
            self.warnings += unused_resources(plan, ranks, device_type)
        if self.config.train.deterministic_mode:
            torch.use_deterministic_algorithms(True)
        if device_type == "cpu":
            keep_freed_heap()
        self.watchdog.set_activity("rendezvous", 0)
        with process_group(ranks, device=device_type, backend=backend, startup_timeout=timeout) as device:
            self.watchdog.attach(replace(self._mesh, world=world_axis()), timeout.total_seconds())
            self.watchdog.set_activity("start-up", 0)
            inject_fault("init", ranks.rank, 0)
            # Compare before other groups are created: ranks with different options would create different ones.
            self.hosts, mismatches = check_ranks_match(plan.config, sources.ledger, self.watchdog.mesh.world, device)
            self.warnings += mismatches
            yield device

    @contextlib.contextmanager
    def trainer(self, run: Run, plan: RunPlan, sources: DatasetBundle) -> Iterator[Trainer]:
        """Load the initial state and yield the trainer; export the model after the last step.

        Always reports how the run ended and writes it into the run directory.
        """
        config, train, ranks = plan.config, plan.config.train, self.ranks
        training_started = False
        monitors = Monitors(
            config, run, self.directory, TimeBreakdown(run.mesh, self.watchdog.started), self.hosts, self.watchdog
        )
        check_collectives(run.mesh)
        if train.skip_train:
            config = replace(config, checkpoint=replace(config.checkpoint, save=None))
        saver = open_saver(run, config)  # before anything is written: another run may have the directory
        heartbeat = Heartbeat(self.directory, run, config, self.watchdog, ranks.is_restart)
        logger: MetricsLogger = NullLogger()
        run_report: RunReport | None = None
        self.result = RunResult(ExitCode.CRASH)
        try:
            loaded, load_notes = load_initial_state(run, config, ranks.is_restart)
            if train.skip_train:
                run.last_step = run.progress.step
            saved_step, saver_notes = start_saving_from(run, config, saver, loaded)
            if ranks.rank == 0:
                warnings = [*self.warnings, *preflight.shared_memory_warning(run.mesh)]
                logger = startup.open_metrics_logger(plan, config, run, sources, self.directory, ranks, warnings)
                heartbeat.start()
                run_info = logger.try_write("events.jsonl", plan_as_json, plan, sources, self.hosts, run.mesh.device)
                run_report = RunReport(
                    self.directory,
                    run,
                    monitors.time_breakdown,
                    logger.speed.flops_per_token,
                    config,
                    plan,
                    run_info or {},
                    ranks,
                    monitors.hardware,
                )
                if loaded is not None:
                    logger.info(load_message(run, config, loaded))
                for note in [*load_notes, *saver_notes, *startup.long_evaluation_note(run, train)]:
                    logger.info(f"note: {note}")
            startup.finish_startup(run, config, logger)
            inject_fault("init.ready", ranks.rank, 0)
            self._wait_for_all(run)
            monitors.start_time = time.monotonic()
            training_started = self.signals.training_started = True
            monitors.time_breakdown.end_startup()
            if ranks.rank == 0:
                monitors.hardware.start()
            trainer = build_trainer(run, config, self.directory, logger, self.signals, saver, saved_step, monitors)
            with monitors.collector.running(), contextlib.closing(monitors.profiler):
                yield trainer
            self.result = trainer.finish()
            monitors.time_breakdown.average_over_ranks()
            minutes = (time.monotonic() - monitors.start_time) / 60
            logger.megatron_timestamp(log_format.megatron_end(self.result.reason, run.progress.step, minutes))
            if self.result.exit_code is ExitCode.DONE and (line := export(run, config, sources.eod)):
                logger.info(line)
        except SetupError as error:
            self.result = RunResult(ExitCode.USAGE, str(error))
            raise
        except BaseException as error:  # includes SystemExit, which a plugin may raise
            try:
                self.result = report_failure(error, ranks, run, training_started, self.watchdog)
            except KeyboardInterrupt as interrupt:
                # Another rank ended by a signal, and this rank's own signal came while it handled the loss.
                self.result = report_failure(interrupt, ranks, run, training_started, self.watchdog)
        finally:
            heartbeat.close()
            self._finish(run, config, saver, logger, run_report, monitors)
        if self.result.exit_code in EXIT_IMMEDIATELY_IN_GROUP:
            sys.stdout.flush()
            exit_now(int(self.result.exit_code))

    def _wait_for_all(self, run: Run) -> None:
        """Wait for all ranks, then set the timeout of collectives from the start-up's to that for steps; collective.

        Rank 0 comes last, because it alone plans, measures and describes the run.
        """
        timeout = step_timeout(self.config)
        all_reduce_(torch.zeros(1, device=run.mesh.device), run.mesh.start)
        run.mesh.set_timeout(timeout)
        self.watchdog.attach(run.mesh, timeout.total_seconds())

    def _finish(
        self,
        run: Run,
        config: Config,
        saver: CheckpointSaver | None,
        logger: MetricsLogger,
        run_report: RunReport | None,
        monitors: Monitors,
    ) -> None:
        """Close everything that is open, and report how the run ended."""
        outcome, reason = self.result.exit_code, self.result.reason
        self.watchdog.close()
        monitors.hardware.close()
        run.close()
        if saver is not None and (lost_save := saver.close(wait=outcome not in NO_WAIT)):
            reason += f"; {lost_save}"
        if run_report is not None:
            for line in saver.pop_messages() if saver is not None else []:
                logger.info(line)
            report_rows = logger.try_write("report.json", run_report.close, outcome, saver)
            rows = {
                "outcome": f"{outcome.outcome}: {reason}".rstrip(": "),
                "steps": f"{run.progress.step:,} of {run.last_step:,}",
                "tokens": f"{run.progress.consumed_tokens:,}",
                "time": log_format.duration(time.monotonic() - monitors.start_time),
                "checkpoint": newest_checkpoint(config)[1],
            }
            if outcome not in (ExitCode.DONE, ExitCode.USAGE, ExitCode.PREFLIGHT):
                rows["to resume"] = resume_command(config)
            logger.log_summary(rows | (report_rows or {}))
            logger.close()
        if not run.mesh.world.is_first and outcome is not ExitCode.HANG:  # in a hang rank 0 may not reach this
            return
        if outcome is ExitCode.INTERRUPTED:
            progress = f"interrupted at step {run.progress.step}; checkpoint: {newest_checkpoint(config)[1]}"
            print_err(f"pretrain_gpt.py: {progress}; to resume: {resume_command(config)}")
        write_status(
            self.directory,
            outcome.outcome,
            config,
            reason,
            step=run.progress.step,
            tokens=run.progress.consumed_tokens,
            resumes=self.ranks.is_restart,
        )
