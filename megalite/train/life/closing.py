"""The end of a run: close what is open, and report how the run ended."""

import time
from pathlib import Path

from megalite.checkpoint.run.saver import Saver
from megalite.checkpoint.storage.location import folder_of, is_url
from megalite.config.console import complain
from megalite.config.options import Config
from megalite.train.loop import Watch
from megalite.train.state import Run
from megalite.train.tell import figures as lines
from megalite.train.tell.metrics import Reporter
from megalite.train.tell.report import Account
from megalite.train.tell.run_dir import Exit, leave_status, newest_saved, save_roots


def conclude(
    run: Run,
    config: Config,
    saver: Saver | None,
    report: Reporter,
    account: Account | None,
    folder: Path,
    ended: tuple[Exit, str],
    watch: Watch,
) -> None:
    outcome, reason = ended
    watch.dog.close()
    run.close()
    if saver is not None and (lost := saver.close(wait=outcome not in (Exit.CRASH, Exit.PREFLIGHT, Exit.HANG))):
        reason += f"; {lost}"
    if account is not None:
        for line in saver.news() if saver is not None else []:
            report.say(line)
        costs = report.attempt("report.json", account.close, outcome, saver)
        report.summary(
            {
                "outcome": f"{outcome.outcome}: {reason}".rstrip(": "),
                "steps": f"{run.state.step:,} of {run.last_step:,}",
                "tokens": f"{run.state.consumed_tokens:,}",
                "time": lines.duration(time.monotonic() - watch.begin),
                "checkpoint": newest_checkpoint(config),
                **({"to continue": to_continue(config)} if outcome in (Exit.REQUEUE, Exit.INTERRUPTED) else {}),
                **(costs or {}),
            }
        )
        report.close()
    if not run.mesh.world.is_first and outcome is not Exit.HANG:  # in a hang rank 0 may not get here
        return
    if outcome is Exit.INTERRUPTED:
        where = f"interrupted at step {run.state.step}; checkpoint: {newest_checkpoint(config)}"
        complain(f"pretrain_gpt.py: {where}; to continue: {to_continue(config)}")
    if folder.is_dir():
        steps = {"step": run.state.step, "tokens": run.state.consumed_tokens}
        leave_status(folder, outcome.outcome, config, reason, resumes=watch.resumes, **steps)


def newest_checkpoint(config: Config) -> str:
    """Where to continue from, in words; never raises."""
    c = config.checkpoint
    if c.save is None:
        return "none, there is no --save"
    if all(is_url(root) for root in save_roots(config)):
        return f"see {c.save}"  # not asked: the run may have ended because it does not answer
    try:
        saved = newest_saved(config)
    except OSError as error:
        return f"{c.save} cannot be read: {error.strerror}"
    return f"none in {c.save} yet" if saved is None else str(folder_of(saved[1], saved[0]))


def to_continue(config: Config) -> str:
    """The command for the remaining steps, in words."""
    c = config.checkpoint
    if c.save is None:
        return "from step 1 by the same command; --save DIR keeps what a run has done"
    return "the same command" + ("" if c.load == c.save else f" with --load {c.save}")
