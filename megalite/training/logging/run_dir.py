"""The run directory: its path, and the newest checkpoint of its run.

    run_config.toml   starts the same run again
    log.txt           the lines of the console
    metrics.jsonl     one JSON object per log line and evaluation
    status.json       how the run ended (status.py)
    events.jsonl      one JSON object per other event, of launcher and ranks (event_log.py)

Imports no torch.
"""

import itertools
import os
from pathlib import Path
from typing import Any

from megalite.checkpoint.storage.location import is_url
from megalite.checkpoint.storage.storage import checkpoint_dir, steps_in
from megalite.config.options import Config

RUN_LOCK = ".run.lock"  # locked by the run in this directory (training/job/restarts.py)


def run_dir(config: Config) -> Path:
    """Return the run directory; it is local even if checkpoints go to a URL, because URLs cannot be appended to."""
    save = config.checkpoint.save
    if save is not None and is_url(save):
        save = f"runs/{save.rstrip('/').rpartition('/')[2]}"
    return Path(config.log.run_dir or (config.log.name and f"runs/{config.log.name}") or save or "runs/last")


def name_conflict(config: Config) -> list[str]:
    """Return an error if --name is the name of another run that --load does not resume, else []."""
    name, directory, checkpoint = config.log.name, run_dir(config), config.checkpoint
    if name is None or config.train.dry_run or not os.path.exists(directory / "status.json"):
        return []
    if checkpoint.load is not None and checkpoint.load == checkpoint.save:
        return []
    free_name = next(f"{name}-{n}" for n in itertools.count(2) if not os.path.exists(f"{directory}-{n}"))
    alternative = f"--load {checkpoint.save} to continue it" if checkpoint.save else "remove it"
    return [f"name={name!r}: {directory} already holds a run; give --name {free_name}, or {alternative}"]


def checkpoint_dirs(config: Config) -> list[str]:
    """Return the directories of a run's checkpoints, the fastest first."""
    return [root for root in (config.checkpoint.save_local, config.checkpoint.save) if root is not None]


def newest_checkpoint(config: Config) -> tuple[dict[str, Any], str]:
    """Return the newest complete checkpoint, as (fields of status.json, text); URLs are not accessed.

    A URL may not answer, so its text refers the user to it.
    """
    save, roots = config.checkpoint.save, checkpoint_dirs(config)
    if save is None:
        return dict(checkpoint=None, checkpoint_step=None), "none, because --save is not set"
    try:
        saved = [(step, root) for root in roots if not is_url(root) for step in steps_in(root)]
        saved = [(step, root) for step, root in saved if Path(str(checkpoint_dir(root, step)), "COMPLETE").is_file()]
    except OSError as error:
        return dict(checkpoint=save, checkpoint_step=None), f"{save} cannot be read: {error.strerror}"
    if saved:
        step, root = max(saved)
        return dict(checkpoint=root, checkpoint_step=step), str(checkpoint_dir(root, step))
    text = f"see {save}" if all(map(is_url, roots)) else f"none in {save} yet"
    return dict(checkpoint=save if is_url(save) else None, checkpoint_step=None), text


def resume_command(config: Config) -> str:
    """Describe the command that trains the remaining steps."""
    checkpoint = config.checkpoint
    if checkpoint.save is None:
        return "from step 1 with the same command; --save DIR saves the progress of a run"
    if checkpoint.load == checkpoint.save:
        return "the same command"
    return f"the same command with --load {checkpoint.save}"
