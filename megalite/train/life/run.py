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

from megalite.checkpoint.run.saver import Saver
from megalite.checkpoint.storage.location import CheckpointError, ElsewhereError
from megalite.config.console import MOST_OF_AN_ERROR, complain, shortened
from megalite.config.exits import end_at_once, text_of
from megalite.config.faults import fault
from megalite.config.options import Config
from megalite.data.errors import DataError
from megalite.launch.ranks import LaunchError, Ranks, process_group, torchrun_restarts
from megalite.optim.loss_scale import ScaleExhausted
from megalite.parallel.comm import all_reduce_
from megalite.parallel.mesh import PLANNED, Axis, Mesh, world_axis
from megalite.parallel.self_test import check_collectives
from megalite.plan.arrangement import Arrangement
from megalite.train.life import preflight
from megalite.train.life.command import Command
from megalite.train.life.export_hf import export
from megalite.train.life.stop import AGAIN_S, STOPPING, StopSignal
from megalite.train.loop import Training, Watch
from megalite.train.setup import SetupError, step_timeout
from megalite.train.sources import Sources
from megalite.train.start.origin import begin_branch, start_run, with_source
from megalite.train.start.resume import loaded_line, open_saver
from megalite.train.state import BadResult, Run
from megalite.train.tell import figures as lines
from megalite.train.tell.device_memory import keep_freed_memory
from megalite.train.tell.metrics import Reporter, Silent
from megalite.train.tell.overview import describe, facts
from megalite.train.tell.rank_log import complain_aside, complain_of, fails_first, rank_log, told_first, wait_until_told
from megalite.train.tell.report import Account
from megalite.train.tell.run_dir import Exit, leave_status, newest_saved, run_folder, to_resume
from megalite.train.tell.timers import Phases, Timers
from megalite.train.watch.fingerprint import compare_ranks
from megalite.train.watch.hang import Heartbeat, Watchdog, lost_another

AT_ONCE = (Exit.INTERRUPTED, Exit.HANG)  # outcomes after which a process exits without waiting for others
NO_WAIT = (Exit.CRASH, Exit.USAGE, Exit.PREFLIGHT, Exit.HANG)  # for a save in the background
AT_ONCE_IN_GROUP = (*AT_ONCE, Exit.CRASH, Exit.PREFLIGHT)


def failure(
    error: BaseException, ranks: Ranks, run: Run | None = None, begun: bool = False, dog: Watchdog | None = None
) -> tuple[Exit, str]:
    """The outcome and the reason of a run that an error ended; the rank that knows most reports it. `run`: if its parts
    are built. `begun`: so is the first step; before it, the next start would meet the same error of a checkpoint."""
    where = f"{run.mesh.describe()}, step {run.state.step + 1}" if run else f"rank {ranks.rank} of {ranks.world}"
    if dog is not None and (known := dog.explain(error)) is not None:
        complain_of(ranks, *known, f"{where}: {known[0].outcome}: {known[1]}")
        return known
    mesh, reason = run and run.mesh, shortened(text_of(error), MOST_OF_AN_ERROR)
    match error:
        case SetupError() | LaunchError() | DataError() if mesh is None:
            code = Exit.USAGE if isinstance(error, SetupError) else Exit.PREFLIGHT
            teller = getattr(error, "local_rank", 0)
            # on the rank that it is about, else on one rank of each machine, where all have the same error
            if fails_first(ranks, code, reason) if teller is None else ranks.local_rank == teller:
                for line in reason.splitlines():
                    complain(f"pretrain_gpt.py: {line}")
            return code, reason
        case KeyboardInterrupt():  # one Ctrl-C gives a rank two signals, the terminal's and the launcher's
            since = time.monotonic()
            leave = lambda *_: end_at_once(Exit.INTERRUPTED) if time.monotonic() > since + AGAIN_S else None  # noqa: E731
            for number in STOPPING:
                signal.signal(number, leave)  # from now on a later one kills
            return Exit.INTERRUPTED, reason or "SIGINT"
        case BadResult() | ScaleExhausted():
            code, tells = Exit.BAD_RESULT, ranks.rank == 0
        case CheckpointError():
            code = Exit.CRASH if begun else Exit.PREFLIGHT
            # not those that heard of it from another, which reports it first: their exit would end that one
            tells = not isinstance(error, ElsewhereError) or not wait_until_told(ranks)
        case DataError():  # one rank of each dp position, whose ranks read the same samples
            code, tells = Exit.PREFLIGHT, mesh is not None and mesh.pp.is_first and mesh.tp.is_first
        case RuntimeError() if lost_another(error):  # the lost rank, or its launcher, reports why
            reason = f"lost another rank ({reason.splitlines()[0]})" if dog is None else dog.lost(error)
            (complain if ranks.rank == 0 else complain_aside)(f"{where}: {reason}")
            return Exit.CRASH, told_first(ranks) or reason
        case _:
            reason = shortened(f"{type(error).__name__}: {text_of(error)}".rstrip(": "))
            text = "".join(traceback.format_exception(error)).rstrip()
            complain_of(ranks, Exit.CRASH, reason, f"{where}:\n{text}")
            return Exit.CRASH, reason
    if tells:
        complain_of(ranks, code, reason, f"pretrain_gpt.py: {reason}")
    return code, reason


class Life:
    """Surrounds everything that a rank does. An error inside ends it, with a report and a status; one in `training`
    does so before the process group is left, as that might wait for ever."""

    def __init__(self, asked: Command, ranks: Ranks, stop: StopSignal):
        self.config, self.ranks, self.stop, self.folder = asked.config, ranks, stop, run_folder(asked.config)
        self.warnings, self.hosts = [*asked.warnings], list[str]()
        self.ended = Exit.DONE, ""
        self._startup = datetime.timedelta(minutes=self.config.parallel.distributed_timeout_minutes)

    @property
    def code(self) -> int:
        """The exit code of this rank (train/tell/run_dir.py)."""
        return 0 if self.stop.final and torchrun_restarts() else self.ended[0]

    def __enter__(self) -> "Life":
        ranks, rehearses = self.ranks, self.config.train.dry_run
        self._log = contextlib.nullcontext() if rehearses else rank_log(self.folder, ranks)
        self._log.__enter__()
        alone = Mesh.alone()  # also in a dry run, whose rank meets no others
        self._mesh = alone if rehearses else replace(alone, world=Axis("world", ranks.world, ranks.rank, PLANNED))
        self.dog = Watchdog(self._mesh, self.folder, Timers(), self._startup.total_seconds(), ranks.shared)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> bool:
        refused = error is not None  # `training` has handled later ones
        try:
            if refused:
                code, reason = self.ended = failure(error, self.ranks, dog=self.dog)
                writes = self.ranks.rank == 0 or code is Exit.HANG  # in a hang rank 0 may not get here
                if writes and not self.config.train.dry_run:
                    leave_status(self.folder, code.outcome, self.config, reason, resumes=self.ranks.resumes)
                if code in AT_ONCE:
                    end_at_once(int(code))
        finally:
            self.dog.close()
            self._log.__exit__(None, None, None)
        return refused

    def preflight(self) -> tuple[Arrangement, Sources]:
        """What will run, on which data; raises all errors that can be found before ranks meet."""
        is_first = self.ranks.rank == 0
        self.config = with_source(asked := self.config, complain if is_first else lambda _: None)
        if is_first and not self.ranks.resumes:
            for note in preflight.effects_of_source(asked, self.config):
                complain(f"note: {note}")
        return preflight.preflight(self.config, self.ranks)

    def tell(self, plan: Arrangement, sources: Sources) -> int:
        """A dry run: rank 0 prints what would run. Raises CheckpointError where the run could not save on this machine,
        unless it is that of another one."""
        if self.ranks.rank == 0:
            try:
                preflight.check_save_of_dry_run(self.config)
            except CheckpointError as error:
                if self.config.train.as_rank is None:
                    raise
                self.warnings.append(f"on this machine {error}")
            for warning in self.warnings:
                complain(f"WARNING: {warning}")
            print(describe(plan, sources, self.ranks.local_world), flush=True)
            if self.config.train.as_rank is not None:
                from megalite.train.rehearsal import tell

                print(tell(plan, sources, self.ranks.local_world), flush=True)
        return Exit.DONE

    @contextlib.contextmanager
    def group(self, plan: Arrangement, sources: Sources) -> Iterator[torch.device]:
        """The process group of all ranks, whose program, options and data are compared; yields this rank's device."""
        p, ranks, startup = self.config.parallel, self.ranks, self._startup
        device = preflight.choose_device(p.device)
        preflight.check_machine(plan, device, ranks)
        preflight.check_save(self.config, ranks)
        self.warnings += preflight.many_threads(device, ranks)
        if self.config.train.deterministic_mode:
            torch.use_deterministic_algorithms(True)
        if device == "cpu":
            keep_freed_memory()
        self.dog.at("meeting", 0)
        with process_group(ranks, device=device, backend=p.distributed_backend, startup_timeout=startup) as own_device:
            self.dog.join(replace(self._mesh, world=world_axis()), startup.total_seconds())
            self.dog.at("start-up", 0)
            fault("init", ranks.rank, 0)
            # before groups are made, which options that differ would make differently
            self.hosts, unlike = compare_ranks(plan.config, sources.ledger, self.dog.mesh.world, own_device)
            self.warnings += unlike
            yield own_device

    @contextlib.contextmanager
    def training(self, run: Run, plan: Arrangement, sources: Sources) -> Iterator[Training]:
        """Load before the steps, export after; in any case report the end, and leave it in the run directory."""
        config, t, ranks, begun = plan.config, plan.config.train, self.ranks, False
        watch = Watch(config, run, self.folder, Phases(run.mesh, self.dog.started), self.hosts, self.dog)
        check_collectives(run.mesh)
        if t.skip_train:
            config = replace(config, checkpoint=replace(config.checkpoint, save=None))
        saver = open_saver(run, config)  # before anything is written: another run may have the directory
        heart = Heartbeat(self.folder, run, config, self.dog, ranks.resumes)
        report: Reporter = Silent()
        account: Account | None = None
        self.ended = Exit.CRASH, ""
        try:
            loaded, notes = start_run(run, config, ranks.resumes)
            if t.skip_train:
                run.last_step = run.state.step
            saved, of_branch = begin_branch(run, config, saver, loaded)
            if ranks.rank == 0:
                warnings = [*self.warnings, *preflight.not_shared(run.mesh)]
                report = preflight.open_reporter(plan, config, run, sources, self.folder, ranks, warnings)
                heart.begin()
                about = report.attempt("events.jsonl", facts, plan, sources, self.hosts, run.mesh.device)
                account = Account(
                    self.folder, run, watch.phases, report.speed.flops_per_token, config, plan, about or {}, ranks
                )
                if loaded is not None:
                    report.say(loaded_line(run, config, loaded))
                for note in [*notes, *of_branch, *preflight.many_evaluations(run, t)]:
                    report.say(f"note: {note}")
            preflight.get_ready(run, config, report)
            fault("init.ready", ranks.rank, 0)
            self._wait_for_all(run)
            watch.begin, begun, self.stop.begun = time.monotonic(), True, True
            watch.phases.ready()
            training = Training(run, config, self.folder, report, self.stop, saver, saved, watch)
            with watch.collector.running(), contextlib.closing(watch.profiler):
                yield training
            self.ended = training.finish()
            watch.phases.over_ranks()
            report.moment(lines.megatron_end(self.ended[1], run.state.step, (time.monotonic() - watch.begin) / 60))
            if self.ended[0] is Exit.DONE and (line := export(run, config, sources.eod)):
                report.say(line)
        except SetupError as error:
            self.ended = Exit.USAGE, str(error)
            raise
        except BaseException as error:  # also SystemExit, and what else a plugin may raise
            try:
                self.ended = failure(error, ranks, run, begun, self.dog)
            except KeyboardInterrupt as asked:  # this rank's signal came while it handled a lost rank that had one
                self.ended = failure(asked, ranks, run, begun, self.dog)
        finally:
            heart.close()
            self._conclude(run, config, saver, report, account, watch)
        if self.ended[0] in AT_ONCE_IN_GROUP:
            sys.stdout.flush()
            end_at_once(int(self.ended[0]))

    def _wait_for_all(self, run: Run) -> None:
        """Wait for rank 0, which alone has planned, measured and described the run, and from then on limit collectives
        by the time-out of steps; collective."""
        limit = step_timeout(self.config)
        all_reduce_(torch.zeros(1, device=run.mesh.device), run.mesh.start)
        run.mesh.set_timeout(limit)
        self.dog.join(run.mesh, limit.total_seconds())

    def _conclude(
        self, run: Run, config: Config, saver: Saver | None, report: Reporter, account: Account | None, watch: Watch
    ) -> None:
        """Close what is open, and report how the run ended."""
        outcome, reason = self.ended
        self.dog.close()
        run.close()
        if saver is not None and (lost := saver.close(wait=outcome not in NO_WAIT)):
            reason += f"; {lost}"
        if account is not None:
            for line in saver.news() if saver is not None else []:
                report.say(line)
            costs = report.attempt("report.json", account.close, outcome, saver)
            rows = {
                "outcome": f"{outcome.outcome}: {reason}".rstrip(": "),
                "steps": f"{run.state.step:,} of {run.last_step:,}",
                "tokens": f"{run.state.consumed_tokens:,}",
                "time": lines.duration(time.monotonic() - watch.begin),
                "checkpoint": newest_saved(config)[1],
            }
            if outcome not in (Exit.DONE, Exit.USAGE, Exit.PREFLIGHT):
                rows["to resume"] = to_resume(config)
            report.summary(rows | (costs or {}))
            report.close()
        if not run.mesh.world.is_first and outcome is not Exit.HANG:  # in a hang rank 0 may not get here
            return
        if outcome is Exit.INTERRUPTED:
            where = f"interrupted at step {run.state.step}; checkpoint: {newest_saved(config)[1]}"
            complain(f"pretrain_gpt.py: {where}; to resume: {to_resume(config)}")
        steps = {"step": run.state.step, "tokens": run.state.consumed_tokens}
        leave_status(self.folder, outcome.outcome, config, reason, resumes=self.ranks.resumes, **steps)
