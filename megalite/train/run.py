"""One rank from its place in the world to its exit code: set up, resume, train, leave a status behind."""

from __future__ import annotations

import datetime
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from megalite.checkpoint.format.manifest import CheckpointError, ElsewhereError
from megalite.checkpoint.run.saver import Saver
from megalite.checkpoint.storage.location import folder_of, is_url
from megalite.config import environment
from megalite.config.console import complain, show
from megalite.config.faults import VARIABLE, fault
from megalite.config.options import Config, resolved_style
from megalite.config.run_options import TrainConfig
from megalite.config.toml import differences, to_toml
from megalite.data.errors import DataError
from megalite.models.flops import train_flops_per_token
from megalite.optim.loss_scale import ScaleExhausted
from megalite.parallel.comm import all_reduce_
from megalite.parallel.launch import CUDA_VARIABLES, OTHER_NAMES, LaunchError, Ranks, process_group
from megalite.parallel.mesh import PLANNED, Axis, Mesh, world_axis
from megalite.parallel.self_test import check_collectives
from megalite.train import figures as lines
from megalite.train.arrangement import Arrangement
from megalite.train.export_hf import export
from megalite.train.figures import Speed
from megalite.train.loop import Training, Watch
from megalite.train.memory import keep_freed_memory
from megalite.train.metrics import Reporter, Silent
from megalite.train.overview import describe, facts
from megalite.train.peak_rates import find_peak
from megalite.train.phases import Phases
from megalite.train.preflight import check_machine, check_save, choose_device, many_threads, preflight
from megalite.train.progress_file import ProgressLog
from megalite.train.rank_log import complain_aside, complain_of, fails_first, rank_log, told_first, wait_until_told
from megalite.train.replicas import ReplicaError
from megalite.train.run_dir import (
    Exit,
    keep_rows_until,
    leave_status,
    newest_saved,
    run_folder,
    save_roots,
    write_atomically,
)
from megalite.train.setup import SetupError, build_run
from megalite.train.sources import Sources
from megalite.train.start import foreign_weights as foreign
from megalite.train.start.origin import begin_branch, continue_run, start_run
from megalite.train.start.resume import loaded_line, open_saver
from megalite.train.state import BadResult, Run
from megalite.train.stop import AGAIN_S, STOPPING, StopSignal
from megalite.train.timers import Timers
from megalite.train.warm_up import warm_up
from megalite.train.watch.fingerprint import compare_ranks
from megalite.train.watch.hang import Watchdog, lost_another
from megalite.train.watch.heartbeat import Heartbeat
from megalite.train.watch.report import Account

More = Callable[[Arrangement, Sources, int], str]  # what else a dry run tells; the last: ranks of a node


def pretrain(
    config: Config,
    ranks: Ranks,
    warnings: Sequence[str] = (),
    stop: StopSignal | None = None,
    more: More | None = None,
) -> int:
    """Returns the exit code of this rank (train/run_dir.py). `warnings`: protections that were asked for and are not
    there, to be told in the log, too. `stop`: what was seen so far. `more`: of a dry run."""
    if config.train.dry_run:
        return _run_or_refuse(config, ranks, warnings, stop or StopSignal(), more)
    with rank_log(run_folder(config), ranks):
        return _run_or_refuse(config, ranks, warnings, stop or StopSignal())


def _run_or_refuse(
    config: Config, ranks: Ranks, warnings: Sequence[str], stop: StopSignal, more: More | None = None
) -> int:
    folder, p = run_folder(config), config.parallel
    startup = datetime.timedelta(minutes=p.distributed_timeout_minutes)
    alone = Mesh.alone()  # a dry run is, too: nobody waits for it
    mesh = alone if config.train.dry_run else replace(alone, world=Axis("world", ranks.world, ranks.rank, PLANNED))
    dog = Watchdog(mesh, folder, Timers(), startup.total_seconds(), ranks.shared)
    try:
        config = foreign.with_source(config)
        sources, plan = preflight(config, ranks)
        if config.train.dry_run:
            if ranks.rank == 0:
                for warning in warnings:
                    complain(f"WARNING: {warning}")
                print(describe(plan, sources, ranks.local_world), flush=True)
                if more is not None:
                    print(more(plan, sources, ranks.local_world), flush=True)
            return Exit.DONE
        device = choose_device(config.parallel.device)
        check_machine(plan, device, ranks)
        check_save(config, ranks)
        warnings = [*warnings, *many_threads(device, ranks)]
        if config.train.deterministic_mode:
            torch.use_deterministic_algorithms(True)
        if device == "cpu":
            keep_freed_memory()
        dog.at("meeting", 0)
        with process_group(ranks, device=device, backend=p.distributed_backend, startup_timeout=startup) as here:
            dog.join(replace(mesh, world=world_axis()), startup.total_seconds())
            dog.at("start-up", 0)
            fault("init", ranks.rank, 0)
            return _pretrain(plan, ranks, here, sources, folder, warnings, stop, dog)
    except (Exception, KeyboardInterrupt) as error:  # before the first step
        code, reason = _failure(error, ranks, dog=dog)
        told = ranks.rank == 0 or code is Exit.HANG  # a rank 0 that hangs cannot tell
        if told and folder.is_dir() and not config.train.dry_run:
            leave_status(folder, code.outcome, config, reason, resumes=ranks.resumes)
        if code in (Exit.INTERRUPTED, Exit.HANG):
            os._exit(int(code))
        return code
    finally:
        dog.close()


def _pretrain(
    plan: Arrangement,
    ranks: Ranks,
    device: torch.device,
    sources: Sources,
    folder: Path,
    warnings: Sequence[str],
    stop: StopSignal,
    dog: Watchdog,
) -> int:
    """Build, load, train; whatever happens, tell how it ended and leave it in the directory of the run."""
    config, t = plan.config, plan.config.train
    hosts, unlike = compare_ranks(config, sources.ledger, dog.mesh.world, device)  # before these options make groups
    run = build_run(config, ranks, device, sources=sources, arrangement=plan)
    watch = Watch(config, run, folder, Phases(run.mesh, dog.started), hosts, dog, ranks.resumes)
    check_collectives(run.mesh)
    report: Reporter = Silent()
    account: Account | None = None
    ended, begun = (Exit.CRASH, ""), False
    if t.skip_train:
        config = replace(config, checkpoint=replace(config.checkpoint, save=None))
    saver = open_saver(run, config)  # before anything is written there: another run may have the directory
    heart = Heartbeat(folder, run, config, dog, ranks.resumes)
    try:
        loaded, notes = continue_run(run, config, ranks) or foreign.start(run, config) or start_run(run, config)
        if t.skip_train:
            run.last_step = run.state.step
        saved, more = begin_branch(run, config, saver, loaded)
        notes += more
        if ranks.rank == 0:
            report = _reporter(plan, config, run, sources, folder, ranks, [*warnings, *unlike])
            heart.begin()
            about = report.attempt("events.jsonl", facts, plan, sources, hosts, device)
            account = Account(folder, run, watch.phases, report.speed.flops_per_token, config, plan, about or {}, ranks)
            if loaded is not None:
                report.say(loaded_line(run, config, loaded))
            for note in [*notes, *many_evaluations(run, t)]:
                report.say(f"note: {note}")
        _get_ready(run, config, report)
        watch.begin, begun, stop.begun = time.monotonic(), True, True
        watch.phases.ready()
        ended = Training(run, config, folder, report, stop, saver, saved, watch).train()
        watch.phases.over_ranks()
        report.moment(lines.megatron_end(ended[1], run.state.step, (time.monotonic() - watch.begin) / 60))
        if ended[0] is Exit.DONE and (line := export(run, config, sources.eod)):
            report.say(line)
    except SetupError:
        raise
    except (Exception, KeyboardInterrupt) as error:
        try:
            ended = _failure(error, ranks, run, begun, watch.dog)
        except KeyboardInterrupt as asked:  # its signal came in a collective, which a rank that had it too has left
            ended = _failure(asked, ranks, run, begun, watch.dog)
    finally:
        heart.close()
        _conclude(run, config, saver, report, account, folder, ended, watch)
    if ended[0] in (Exit.CRASH, Exit.PREFLIGHT, Exit.HANG, Exit.INTERRUPTED):
        sys.stdout.flush()
        os._exit(int(ended[0]))  # the group may be in the middle of a collective that never ends: do not wait for it
    return ended[0]


def _get_ready(run: Run, config: Config, report: Reporter) -> None:
    """What comes between the parts of a run and its first step."""
    if resolved_style(config) == "megatron" and run.mesh.dp.is_first:  # Megatron-LM's line of each model-parallel rank
        number = sum(entry.numel for entry in run.buffer.layout.entries)
        line = lines.megatron_parameters(run.mesh.tp.rank, run.mesh.pp.rank, number)
        report.say(line) if run.mesh.world.is_first else show(line)
    report.moment("after model, optimizer, and learning rate scheduler are built")
    report.moment("after dataloaders are built")
    if config.train.compile:  # now, and not in the first step: its time is of the training
        seconds = torch.tensor(warm_up(run, config), device=run.mesh.device)
        slowest = float(all_reduce_(seconds, run.mesh.world, dist.ReduceOp.MAX))  # waits until every rank has compiled
        report.say(f"compiled in {slowest:.1f} s")
    if report.megatron:
        report.say("done with setup ...\ntraining ...")
        report.moment("before the start of training step")


def _failure(
    error: BaseException, ranks: Ranks, run: Run | None = None, begun: bool = False, dog: Watchdog | None = None
) -> tuple[Exit, str]:
    """The outcome and the reason of a run that an error ended; the rank that knows most tells it. Before training has
    `begun`, a checkpoint's error is one that the next start would find again."""
    where = f"{run.mesh.describe()}, step {run.state.step + 1}" if run else f"rank {ranks.rank} of {ranks.world}"
    if dog is not None and (known := dog.explain(error)) is not None:
        complain_of(ranks, *known, f"{where}: {known[0].outcome}: {known[1]}")
        return known
    match error:
        case SetupError() | LaunchError() | DataError() if run is None:
            code = Exit.USAGE if isinstance(error, SetupError) else Exit.PREFLIGHT
            teller = getattr(error, "local_rank", 0)  # else every rank found the same
            if fails_first(ranks, code, str(error)) if teller is None else ranks.local_rank == teller:
                for line in str(error).splitlines():
                    complain(f"pretrain_gpt.py: {line}")
            return code, str(error)
        case KeyboardInterrupt():
            since = time.monotonic()
            # of one Ctrl-C ranks get two, the terminal's and the launcher's; one that comes later means: now
            leave = lambda *_: os._exit(int(Exit.INTERRUPTED)) if time.monotonic() > since + AGAIN_S else None  # noqa: E731
            for number in STOPPING:
                signal.signal(number, leave)
            return Exit.INTERRUPTED, str(error) or "SIGINT"
        case ReplicaError() | BadResult() | ScaleExhausted():
            outcome, knows = Exit.BAD_RESULT, ranks.rank == 0
        case CheckpointError():
            outcome, knows = Exit.CRASH if begun else Exit.PREFLIGHT, True
            if isinstance(error, ElsewhereError):  # it is to say why; who ends before it has makes the launcher end it
                knows = not wait_until_told(ranks)
        case DataError():  # the ranks of a dp position read the same samples
            outcome, knows = Exit.PREFLIGHT, run is not None and run.mesh.pp.is_first and run.mesh.tp.is_first
        case RuntimeError() if lost_another(error):
            reason = f"lost another rank ({str(error).splitlines()[0]})"
            tell = complain if ranks.rank == 0 else complain_aside  # who was lost has said why, or its launcher has
            tell(f"{where}: {reason}")
            return Exit.CRASH, told_first(ranks) or reason
        case _:
            reason = f"{type(error).__name__}: {error}".rstrip(": ")
            text = "".join(traceback.format_exception(error)).rstrip()
            complain_of(ranks, Exit.CRASH, reason, f"{where}:\n{text}")
            return Exit.CRASH, reason
    if knows:
        complain_of(ranks, outcome, str(error), f"pretrain_gpt.py: {error}")
    return outcome, str(error)


def _conclude(
    run: Run,
    config: Config,
    saver: Saver | None,
    report: Reporter,
    account: Account | None,
    folder: Path,
    ended: tuple[Exit, str],
    watch: Watch,
) -> None:
    """Close what is open, and tell how the run ended."""
    outcome, reason = ended
    watch.dog.close()
    run.close()
    if saver is not None and (lost := saver.close(wait=outcome not in (Exit.CRASH, Exit.PREFLIGHT, Exit.HANG))):
        reason += f"; {lost}"
    if account is not None:
        for line in saver.news() if saver is not None else []:
            report.say(line)
        told = report.attempt("report.json", account.close, outcome, saver)
        report.summary(
            {
                "outcome": f"{outcome.outcome}: {reason}".rstrip(": "),
                "steps": f"{run.state.step:,} of {run.last_step:,}",
                "tokens": f"{run.state.consumed_tokens:,}",
                "time": lines.duration(time.monotonic() - watch.begin),
                "checkpoint": newest_checkpoint(config),
                **({"to go on": to_go_on(config)} if outcome in (Exit.REQUEUE, Exit.INTERRUPTED) else {}),
                **(told or {}),
            }
        )
        report.close()
    if not run.mesh.world.is_first and outcome is not Exit.HANG:  # a rank 0 that hangs cannot tell
        return
    if outcome is Exit.INTERRUPTED:
        where = f"interrupted at step {run.state.step}; checkpoint: {newest_checkpoint(config)}"
        complain(f"pretrain_gpt.py: {where}; to go on: {to_go_on(config)}")
    if folder.is_dir():
        steps = {"step": run.state.step, "tokens": run.state.consumed_tokens}
        leave_status(folder, outcome.outcome, config, reason, resumes=watch.resumes, **steps)


def newest_checkpoint(config: Config) -> str:
    """Where to continue from; for people, so it never raises."""
    c = config.checkpoint
    if c.save is None:
        return "none, there is no --save"
    if all(is_url(root) for root in save_roots(config)):
        return f"see {c.save}"  # a store that does not answer may be why the run has ended
    try:
        saved = newest_saved(config)
    except OSError as error:
        return f"{c.save} cannot be read: {error.strerror}"
    return f"none in {c.save} yet" if saved is None else str(folder_of(saved[1], saved[0]))


def to_go_on(config: Config) -> str:
    """What to type for the steps that are left."""
    c = config.checkpoint
    if c.save is None:
        return "from step 1 by the same command; --save DIR keeps what a run has done"
    return "the same command" + ("" if c.load == c.save else f" with --load {c.save}")


def many_evaluations(run: Run, t: TrainConfig) -> list[str]:
    """A line where they take longer than the training: forward is about a third of a step."""
    steps = run.last_step - run.state.step
    times = 1 + (steps - 1) // t.eval_interval if t.eval_interval else 1
    batches = t.eval_iters * (times * len(run.valid) + len(run.test))
    if not 0 < 3 * steps < batches:
        return []
    few = "fewer --eval-iters do, 0 evaluates nothing"
    return [f"eval_iters={t.eval_iters}: {batches:,} batches are evaluated for {steps:,} steps of training; {few}"]


def _reporter(
    plan: Arrangement, config: Config, run: Run, sources: Sources, folder: Path, ranks: Ranks, warnings: Sequence[str]
) -> Reporter:
    m, log = config.model, replace(config.log, log_style=resolved_style(config))
    peak = find_peak(run.mesh.device, plan.dtype, log.peak_tflops, ranks.local_world)
    speed = Speed(train_flops_per_token(m, m.seq_length, plan.padded_vocab), ranks.world, peak.tflops)
    save = config.checkpoint.save
    progress = None
    if log.log_progress and save is not None:
        where = folder if is_url(save) else Path(save)
        progress = ProgressLog(where, ranks.world, speed.flops_per_token, run.state.consumed_tokens)
    report = Reporter(folder, speed, log, world=ranks.world, wandb_config=differences(config), progress=progress)
    report.attempt(str(folder), lambda: folder.mkdir(parents=True, exist_ok=True))
    rows, validated = folder / "metrics.jsonl", run.state.step < run.last_step
    report.attempt(str(rows), keep_rows_until, rows, run.state.step, validated)
    report.attempt(str(folder / "run_config.toml"), write_atomically, folder / "run_config.toml", to_toml(config))
    if progress is not None:
        report.attempt(str(progress.path), progress.starting)
    if report.megatron:
        report.say(lines.megatron_sizes(ranks.world, run.mesh.sizes))
        report.say(lines.megatron_arguments(config))
    report.say(describe(plan, sources, ranks.local_world, peak, run.mesh.device.type))
    for warning in warnings:
        report.warn(warning)
    for note in sources.notes:
        report.say(f"note: {note}")
    cuda = run.mesh.device.type == "cuda"
    set_ = environment.values_of(
        [*((*CUDA_VARIABLES, *OTHER_NAMES.values()) if cuda else ()), *environment.OVERRIDES.values(), VARIABLE]
    )
    if set_ or cuda:
        report.say(f"environment: {set_}")
    return report
