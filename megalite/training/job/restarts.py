"""The launcher's part of a run: one run per run directory, and restarts after the death of a rank.

All ranks are started again, and continue from the newest checkpoint of --save, at most --max-restarts times in an hour.
A run that dies a few times in a row without a new checkpoint is given up. A restart that is refused (a full disk, a
mount that is gone) is tried again later.
"""

import contextlib
import shutil
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from megalite.checkpoint.storage.local_storage import DirectoryLock
from megalite.checkpoint.storage.location import CheckpointError, is_url
from megalite.checkpoint.storage.storage import checkpoint_dir, steps_in
from megalite.config.console import print_err
from megalite.config.options import Config
from megalite.launch.local_launcher import LaunchResult
from megalite.training.logging.rank_log import RANK_LOG_DIR, crash_stack
from megalite.training.logging.run_dir import (
    RUN_LOCK,
    EventLog,
    ExitCode,
    checkpoint_dirs,
    finalize_status,
    newest_checkpoint,
    read_status,
    run_dir,
    to_resume,
)

WINDOW_S = 3600.0
MAX_RESTARTS_WITHOUT_PROGRESS = 3  # ends in a row without a new checkpoint
FIRST_WAIT_S, LONGEST_WAIT_S, POLL_S = 15.0, 900.0, 0.5  # after a refused restart; doubled each time
ORDERLY_ENDS = (
    ExitCode.DONE,
    ExitCode.USAGE,
    ExitCode.PREFLIGHT,
    ExitCode.REQUEUE,
    ExitCode.INTERRUPTED,
)  # explained, or not begun
STARTUP_FAILURES = (ExitCode.USAGE.outcome, ExitCode.PREFLIGHT.outcome)
# the same command would end the same way, or was meant to end; RERUN needs another machine
NO_RESTART_CODES = (
    ExitCode.DONE,
    ExitCode.USAGE,
    ExitCode.PREFLIGHT,
    ExitCode.RERUN,
    ExitCode.BAD_RESULT,
    ExitCode.REQUEUE,
    ExitCode.INTERRUPTED,
)


@contextlib.contextmanager
def lock_run_dir(config: Config) -> Iterator[bool]:
    """Lock the run directory; False where that is impossible, which ends no training. A directory made for a run that
    is then refused is removed. Raises CheckpointError where another run has the lock."""
    folder, lock = run_dir(config), None
    fresh = not folder.exists()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = DirectoryLock(folder, RUN_LOCK, "run_dir", "give another --run-dir")
    except OSError as error:
        where = error.filename or folder
        print_err(f"WARNING: {where}: {error.strerror}; nothing keeps a second run from writing there")
    try:
        yield lock is not None
    finally:
        if lock is not None:
            lock.close()
            with contextlib.suppress(OSError):
                alone = fresh and {path.name for path in folder.iterdir()} <= {RUN_LOCK, "status.json", RANK_LOG_DIR}
                if alone and read_status(folder).get("outcome") in STARTUP_FAILURES:
                    shutil.rmtree(folder, ignore_errors=True)


class RestartPolicy:
    """Decides at each end of a run's ranks whether they are started again."""

    def __init__(self, config: Config):
        self._config, self._folder = config, run_dir(config)
        self._most, self._roots = config.operations.max_restarts, checkpoint_dirs(config)
        self._events, self._began, self._times = EventLog(self._folder), time.time(), list[float]()
        self._at_first = self._newest = self._saved()
        self._fruitless, self._refused, self._again = 0, 0, False

    def _saved(self) -> dict[str, object]:
        """By directory: the newest checkpoint and, unless the directory is a URL, the time of its completion."""
        newest: dict[str, object] = {}
        for root in self._roots if self._most else []:
            try:
                newest[root] = step = max(steps_in(root), default=None)
                if step is not None and not is_url(root):
                    newest[root] = step, Path(str(checkpoint_dir(root, step)), "COMPLETE").stat().st_mtime_ns
            except (OSError, CheckpointError):  # a store that does not answer, or a checkpoint that was just deleted
                newest[root] = object()  # equal to nothing, so that the ranks will look
        return newest

    def _report(self, end: LaunchResult, silent: Mapping[str, Any] | None) -> None:
        """Record how a run ended that is not started again. `silent`: its status, where rank 0 could not report it."""
        if end.code not in ORDERLY_ENDS and not end.signals:
            self._events.add("failed", cause=end.cause, code=end.code)
            if silent is not None:
                where = f"{end.cause} at step {silent['step']}; checkpoint: {newest_checkpoint(self._config)[1]}"
                print_err(f"pretrain_gpt.py: {where}; to resume: {to_resume(self._config)}")

    def __call__(self, end: LaunchResult) -> bool | None:
        """None: they are not; else whether the run has saved anything since its first start."""
        silent = finalize_status(self._folder, self._config, (end.code, end.cause), self._began, self._again)
        if stack := crash_stack(self._folder, end.cause, self._began):
            print_err(stack)
        refused = end.code == ExitCode.PREFLIGHT and self._again  # though the same command ran before
        if (end.code in NO_RESTART_CODES and not refused) or end.signals or not self._most:
            self._report(end, silent)
            return None
        saved, now = self._saved(), time.time()
        self._refused = self._refused + 1 if refused else 0
        self._fruitless = self._fruitless + 1 if saved == self._newest and not refused else 0
        self._newest, self._times = saved, [t for t in self._times if t > now - WINDOW_S]
        most = self._most
        limits = {
            f"{most} restarts in a row were refused, as many as --max-restarts allows": self._refused >= most,
            f"{most} restarts within an hour, as many as --max-restarts allows": len(self._times) >= most,
            f"it died {MAX_RESTARTS_WITHOUT_PROGRESS} times in a row without a new checkpoint": self._fruitless
            >= MAX_RESTARTS_WITHOUT_PROGRESS,
        }
        if why := next((why for why, reached in limits.items() if reached), None):
            self._events.add("restarts-exhausted", cause=end.cause, code=end.code, reason=why)
            resume = f"to resume: {to_resume(self._config)}"
            print_err(f"pretrain_gpt.py: {end.cause}: no restart, {why}; see {self._folder / RANK_LOG_DIR}; {resume}")
            return None
        self._times.append(now)
        count = f"{len(self._times)} of {self._most} within an hour"
        self._events.add("restart", cause=end.cause, code=end.code, count=len(self._times), max_restarts=self._most)
        wait_s = min(FIRST_WAIT_S * 2 ** (self._refused - 1), LONGEST_WAIT_S) if refused else 0.0
        when = f" in {wait_s:.0f} s" if refused else ""
        print_err(f"pretrain_gpt.py: {end.cause}: all ranks are started again{when} ({count})")
        until = time.monotonic() + wait_s
        while time.monotonic() < until:
            time.sleep(POLL_S)
            if end.signals:
                return None
        self._began, self._again = time.time(), True
        return saved != self._at_first
