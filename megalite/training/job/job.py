"""A rank from preflight to its exit code: set up, resume, train, leave a status behind; and what every error means."""

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
from megalite.common.fault_injection import inject_fault
from megalite.config.console import MOST_OF_AN_ERROR, print_err, shortened
from megalite.config.exits import end_at_once, text_of
from megalite.config.options import Config
from megalite.data.errors import DataError
from megalite.launch.rank_info import LaunchError, RankInfo, process_group, torchrun_will_restart
from megalite.optim.loss_scale import LossScaleExhausted
from megalite.parallel.comm import all_reduce_
from megalite.parallel.mesh import ABSTRACT, Axis, Mesh, world_axis
from megalite.parallel.self_test import check_collectives
from megalite.planning.run_plan import RunPlan
from megalite.training.checkpointing.initial_state import complete_config, load_initial_state, start_saving_from
from megalite.training.checkpointing.resume import load_message, open_saver
from megalite.training.datasets import DatasetBundle
from megalite.training.job import preflight
from megalite.training.job.command import TrainCommand
from megalite.training.job.export_hf import export
from megalite.training.job.stop_signals import DOUBLE_SIGNAL_S, STOP_SIGNALS, StopSignalHandler
from megalite.training.logging import log_format as lines
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
from megalite.training.logging.run_dir import ExitCode, newest_checkpoint, run_dir, to_resume, write_status
from megalite.training.logging.run_report import RunReport
from megalite.training.logging.timers import PhaseTimer, Timers
from megalite.training.monitoring.rank_consistency import check_ranks_match
from megalite.training.monitoring.watchdog import Heartbeat, Watchdog, is_lost_peer_error
from megalite.training.setup import SetupError, step_timeout
from megalite.training.state import InvalidResultError, Run
from megalite.training.trainer import Monitors, Trainer

EXIT_IMMEDIATELY = (
    ExitCode.INTERRUPTED,
    ExitCode.HANG,
)  # outcomes after which a process exits without waiting for others
NO_WAIT = (ExitCode.CRASH, ExitCode.USAGE, ExitCode.PREFLIGHT, ExitCode.HANG)  # for a save in the background
EXIT_IMMEDIATELY_IN_GROUP = (*EXIT_IMMEDIATELY, ExitCode.CRASH, ExitCode.PREFLIGHT)


def report_failure(
    error: BaseException, ranks: RankInfo, run: Run | None = None, begun: bool = False, dog: Watchdog | None = None
) -> tuple[ExitCode, str]:
    """The outcome and the reason of a run that an error ended; the rank that knows most reports it. `run`: if its parts
    are built. `begun`: so is the first step; before it, the next start would meet the same error of a checkpoint."""
    where = f"{run.mesh.describe()}, step {run.state.step + 1}" if run else f"rank {ranks.rank} of {ranks.world_size}"
    if dog is not None and (known := dog.explain_error(error)) is not None:
        report_failure_once(ranks, *known, f"{where}: {known[0].outcome}: {known[1]}")
        return known
    mesh, reason = run and run.mesh, shortened(text_of(error), MOST_OF_AN_ERROR)
    match error:
        case SetupError() | LaunchError() | DataError() if mesh is None:
            code = ExitCode.USAGE if isinstance(error, SetupError) else ExitCode.PREFLIGHT
            teller = getattr(error, "local_rank", 0)
            # on the rank that it is about, else on one rank of each machine, where all have the same error
            if claim_first_failure(ranks, code, reason) if teller is None else ranks.local_rank == teller:
                for line in reason.splitlines():
                    print_err(f"pretrain_gpt.py: {line}")
            return code, reason
        case KeyboardInterrupt():  # one Ctrl-C gives a rank two signals, the terminal's and the launcher's
            since = time.monotonic()
            leave = lambda *_: end_at_once(ExitCode.INTERRUPTED) if time.monotonic() > since + DOUBLE_SIGNAL_S else None  # noqa: E731
            for number in STOP_SIGNALS:
                signal.signal(number, leave)  # from now on a later one kills
            return ExitCode.INTERRUPTED, reason or "SIGINT"
        case InvalidResultError() | LossScaleExhausted():
            code, tells = ExitCode.BAD_RESULT, ranks.rank == 0
        case CheckpointError():
            code = ExitCode.CRASH if begun else ExitCode.PREFLIGHT
            # not those that heard of it from another, which reports it first: their exit would end that one
            tells = not isinstance(error, OtherRankError) or not wait_for_first_failure(ranks)
        case DataError():  # one rank of each dp position, whose ranks read the same samples
            code, tells = ExitCode.PREFLIGHT, mesh is not None and mesh.pp.is_first and mesh.tp.is_first
        case RuntimeError() if is_lost_peer_error(error):  # the lost rank, or its launcher, reports why
            reason = f"lost another rank ({reason.splitlines()[0]})" if dog is None else dog.lost(error)
            (print_err if ranks.rank == 0 else log_to_rank_file)(f"{where}: {reason}")
            return ExitCode.CRASH, first_failure_reason(ranks) or reason
        case _:
            reason = shortened(f"{type(error).__name__}: {text_of(error)}".rstrip(": "))
            text = "".join(traceback.format_exception(error)).rstrip()
            report_failure_once(ranks, ExitCode.CRASH, reason, f"{where}:\n{text}")
            return ExitCode.CRASH, reason
    if tells:
        report_failure_once(ranks, code, reason, f"pretrain_gpt.py: {reason}")
    return code, reason


class TrainingJob:
    """Surrounds everything that a rank does. An error inside ends it, with a report and a status; one in `training`
    does so before the process group is left, as that might wait for ever."""

    def __init__(self, asked: TrainCommand, ranks: RankInfo, signals: StopSignalHandler):
        self.config, self.ranks, self.stop, self.folder = asked.config, ranks, signals, run_dir(asked.config)
        self.warnings, self.hosts = [*asked.warnings], list[str]()
        self.result = ExitCode.DONE, ""
        self._startup = datetime.timedelta(minutes=self.config.parallel.distributed_timeout_minutes)

    @property
    def exit_code(self) -> int:
        """The exit code of this rank (training/logging/run_dir.py)."""
        return 0 if self.stop.is_final and torchrun_will_restart() else self.result[0]

    def __enter__(self) -> "TrainingJob":
        ranks, rehearses = self.ranks, self.config.train.dry_run
        self._log = contextlib.nullcontext() if rehearses else rank_log(self.folder, ranks)
        self._log.__enter__()
        alone = Mesh.single_process()  # also in a dry run, whose rank meets no others
        self._mesh = alone if rehearses else replace(alone, world=Axis("world", ranks.world_size, ranks.rank, ABSTRACT))
        self.watchdog = Watchdog(self._mesh, self.folder, Timers(), self._startup.total_seconds(), ranks.shared_dir)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        refused = error is not None  # `training` has handled later ones
        try:
            if refused:
                code, reason = self.result = report_failure(error, self.ranks, dog=self.watchdog)
                writes = self.ranks.rank == 0 or code is ExitCode.HANG  # in a hang rank 0 may not get here
                if writes and not self.config.train.dry_run:
                    write_status(self.folder, code.outcome, self.config, reason, resumes=self.ranks.is_restart)
                if code in EXIT_IMMEDIATELY:
                    end_at_once(int(code))
        finally:
            self.watchdog.close()
            self._log.__exit__(None, None, None)
        return refused

    def preflight(self) -> tuple[RunPlan, DatasetBundle]:
        """What will run, on which data; raises all errors that can be found before ranks meet."""
        is_first = self.ranks.rank == 0
        self.config = complete_config(asked := self.config, print_err if is_first else lambda _: None)
        if is_first and not self.ranks.is_restart:
            for note in preflight.effects_of_source(asked, self.config):
                print_err(f"note: {note}")
        return preflight.preflight(self.config, self.ranks)

    def print_plan(self, plan: RunPlan, sources: DatasetBundle) -> int:
        """A dry run: rank 0 prints what would run. Raises CheckpointError where the run could not save on this machine,
        unless it is that of another one."""
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
        """The process group of all ranks, whose program, options and data are compared; yields this rank's device."""
        p, ranks, startup = self.config.parallel, self.ranks, self._startup
        device = preflight.choose_device(p.device)
        preflight.check_machine(plan, device, ranks)
        preflight.check_save_writable(self.config, ranks)
        self.warnings += preflight.thread_oversubscription_warning(device, ranks)
        if self.config.train.deterministic_mode:
            torch.use_deterministic_algorithms(True)
        if device == "cpu":
            keep_freed_heap()
        self.watchdog.set_activity("meeting", 0)
        with process_group(ranks, device=device, backend=p.distributed_backend, startup_timeout=startup) as own_device:
            self.watchdog.attach(replace(self._mesh, world=world_axis()), startup.total_seconds())
            self.watchdog.set_activity("start-up", 0)
            inject_fault("init", ranks.rank, 0)
            # before groups are made, which options that differ would make differently
            self.hosts, unlike = check_ranks_match(plan.config, sources.ledger, self.watchdog.mesh.world, own_device)
            self.warnings += unlike
            yield own_device

    @contextlib.contextmanager
    def trainer(self, run: Run, plan: RunPlan, sources: DatasetBundle) -> Iterator[Trainer]:
        """Load before the steps, export after; in any case report the end, and leave it in the run directory."""
        config, t, ranks, begun = plan.config, plan.config.train, self.ranks, False
        watch = Monitors(
            config, run, self.folder, PhaseTimer(run.mesh, self.watchdog.started), self.hosts, self.watchdog
        )
        check_collectives(run.mesh)
        if t.skip_train:
            config = replace(config, checkpoint=replace(config.checkpoint, save=None))
        saver = open_saver(run, config)  # before anything is written: another run may have the directory
        heart = Heartbeat(self.folder, run, config, self.watchdog, ranks.is_restart)
        report: MetricsLogger = NullLogger()
        account: RunReport | None = None
        self.result = ExitCode.CRASH, ""
        try:
            loaded, notes = load_initial_state(run, config, ranks.is_restart)
            if t.skip_train:
                run.last_step = run.state.step
            saved, of_branch = start_saving_from(run, config, saver, loaded)
            if ranks.rank == 0:
                warnings = [*self.warnings, *preflight.not_shared(run.mesh)]
                report = preflight.open_metrics_logger(plan, config, run, sources, self.folder, ranks, warnings)
                heart.begin()
                about = report.try_write("events.jsonl", plan_as_json, plan, sources, self.hosts, run.mesh.device)
                account = RunReport(
                    self.folder, run, watch.phases, report.speed.flops_per_token, config, plan, about or {}, ranks
                )
                if loaded is not None:
                    report.info(load_message(run, config, loaded))
                for note in [*notes, *of_branch, *preflight.long_evaluation_note(run, t)]:
                    report.info(f"note: {note}")
            preflight.finish_startup(run, config, report)
            inject_fault("init.ready", ranks.rank, 0)
            self._wait_for_all(run)
            watch.begin, begun, self.stop.training_started = time.monotonic(), True, True
            watch.phases.end_startup()
            training = Trainer(run, config, self.folder, report, self.stop, saver, saved, watch)
            with watch.collector.running(), contextlib.closing(watch.profiler):
                yield training
            self.result = training.finish()
            watch.phases.average_over_ranks()
            report.megatron_timestamp(
                lines.megatron_end(self.result[1], run.state.step, (time.monotonic() - watch.begin) / 60)
            )
            if self.result[0] is ExitCode.DONE and (line := export(run, config, sources.eod)):
                report.info(line)
        except SetupError as error:
            self.result = ExitCode.USAGE, str(error)
            raise
        except BaseException as error:  # also SystemExit, and what else a plugin may raise
            try:
                self.result = report_failure(error, ranks, run, begun, self.watchdog)
            except KeyboardInterrupt as asked:  # this rank's signal came while it handled a lost rank that had one
                self.result = report_failure(asked, ranks, run, begun, self.watchdog)
        finally:
            heart.close()
            self._conclude(run, config, saver, report, account, watch)
        if self.result[0] in EXIT_IMMEDIATELY_IN_GROUP:
            sys.stdout.flush()
            end_at_once(int(self.result[0]))

    def _wait_for_all(self, run: Run) -> None:
        """Wait for rank 0, which alone has planned, measured and described the run, and from then on limit collectives
        by the time-out of steps; collective."""
        limit = step_timeout(self.config)
        all_reduce_(torch.zeros(1, device=run.mesh.device), run.mesh.start)
        run.mesh.set_timeout(limit)
        self.watchdog.attach(run.mesh, limit.total_seconds())

    def _conclude(
        self,
        run: Run,
        config: Config,
        saver: CheckpointSaver | None,
        report: MetricsLogger,
        account: RunReport | None,
        watch: Monitors,
    ) -> None:
        """Close what is open, and report how the run ended."""
        outcome, reason = self.result
        self.watchdog.close()
        run.close()
        if saver is not None and (lost := saver.close(wait=outcome not in NO_WAIT)):
            reason += f"; {lost}"
        if account is not None:
            for line in saver.pop_messages() if saver is not None else []:
                report.info(line)
            costs = report.try_write("report.json", account.close, outcome, saver)
            rows = {
                "outcome": f"{outcome.outcome}: {reason}".rstrip(": "),
                "steps": f"{run.state.step:,} of {run.last_step:,}",
                "tokens": f"{run.state.consumed_tokens:,}",
                "time": lines.duration(time.monotonic() - watch.begin),
                "checkpoint": newest_checkpoint(config)[1],
            }
            if outcome not in (ExitCode.DONE, ExitCode.USAGE, ExitCode.PREFLIGHT):
                rows["to resume"] = to_resume(config)
            report.summary(rows | (costs or {}))
            report.close()
        if not run.mesh.world.is_first and outcome is not ExitCode.HANG:  # in a hang rank 0 may not get here
            return
        if outcome is ExitCode.INTERRUPTED:
            where = f"interrupted at step {run.state.step}; checkpoint: {newest_checkpoint(config)[1]}"
            print_err(f"pretrain_gpt.py: {where}; to resume: {to_resume(config)}")
        steps = {"step": run.state.step, "tokens": run.state.consumed_tokens}
        write_status(self.folder, outcome.outcome, config, reason, resumes=self.ranks.is_restart, **steps)
