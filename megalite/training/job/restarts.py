"""The launcher's part of a run: one run per run directory, and restarts after a rank has died.

All ranks are restarted and resume from the newest checkpoint of --save, at most --max-restarts times in an hour. After
a few failures in a row without a new checkpoint there is no further restart. A restart that fails in preflight (a full
disk, a missing mount) is retried later.
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
from megalite.common.console import print_err
from megalite.common.exit_codes import ExitCode
from megalite.config.options import Config
from megalite.launch.local_launcher import LaunchResult
from megalite.training.logging.event_log import EventLog
from megalite.training.logging.rank_log import RANK_LOG_DIR, crash_stack
from megalite.training.logging.run_dir import RUN_LOCK, checkpoint_dirs, newest_checkpoint, resume_command, run_dir
from megalite.training.logging.status import finalize_status, read_status

WINDOW_S = 3600.0
MAX_RESTARTS_WITHOUT_PROGRESS = 3  # failures in a row without a new checkpoint
FIRST_WAIT_S = 15.0  # before the retry of a restart that failed in preflight; doubled each time
MAX_WAIT_S = 900.0
POLL_S = 0.5
# Ends for which the run has printed the cause itself, and those before the first step.
ORDERLY_ENDS = (ExitCode.DONE, ExitCode.USAGE, ExitCode.PREFLIGHT, ExitCode.REQUEUE, ExitCode.INTERRUPTED)
STARTUP_FAILURES = (ExitCode.USAGE.outcome, ExitCode.PREFLIGHT.outcome)
# Ends that a restart would lead to again, or that were intended; RERUN needs another machine.
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
    """Lock the run directory and yield True, or False with a warning if its file system prevents that.

    A directory that was created here is removed if the run fails at start-up.

    Raises:
        CheckpointError: if another run has the lock.
    """
    directory = run_dir(config)
    lock = None
    is_new = not directory.exists()
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = DirectoryLock(directory, RUN_LOCK, "run_dir", "give another --run-dir")
    except OSError as error:
        path = error.filename or directory
        print_err(f"WARNING: {path}: {error.strerror}; nothing prevents a second run from writing there")
    try:
        yield lock is not None
    finally:
        if lock is not None:
            lock.close()
            with contextlib.suppress(OSError):
                names = {path.name for path in directory.iterdir()}
                is_unused = is_new and names <= {RUN_LOCK, "status.json", RANK_LOG_DIR}
                if is_unused and read_status(directory).get("outcome") in STARTUP_FAILURES:
                    shutil.rmtree(directory, ignore_errors=True)


class RestartPolicy:
    """The decision, each time all ranks of a run have ended, whether to restart them."""

    def __init__(self, config: Config):
        self._config = config
        self._directory = run_dir(config)
        self._max_restarts = config.operations.max_restarts
        self._checkpoint_dirs = checkpoint_dirs(config)
        self._events = EventLog(self._directory)
        self._started = time.time()  # of the current ranks
        self._restart_times = list[float]()  # within the last WINDOW_S
        self._initial_checkpoints = self._newest_checkpoints = self._find_checkpoints()
        self._ends_without_progress = 0  # in a row
        self._failed_restarts = 0  # in preflight, in a row
        self._is_restart = False

    def _find_checkpoints(self) -> dict[str, object]:
        """Return the newest checkpoint of each directory, with its completion time unless the directory is a URL."""
        newest: dict[str, object] = {}
        for root in self._checkpoint_dirs if self._max_restarts else []:
            try:
                step = max(steps_in(root), default=None)
                newest[root] = step
                if step is not None and not is_url(root):
                    newest[root] = step, Path(str(checkpoint_dir(root, step)), "COMPLETE").stat().st_mtime_ns
            except (OSError, CheckpointError):  # a storage that does not answer, or a checkpoint that was just deleted
                newest[root] = object()  # unequal to everything, which counts as a new checkpoint
        return newest

    def _report(self, end: LaunchResult, status: Mapping[str, Any] | None) -> None:
        """Record how a run ended that is not restarted.

        Args:
            status: The run's status if rank 0 could not report it, otherwise None.
        """
        if end.code not in ORDERLY_ENDS and not end.signals:
            self._events.add("failed", cause=end.cause, code=end.code)
            if status is not None:
                summary = f"{end.cause} at step {status['step']}; checkpoint: {newest_checkpoint(self._config)[1]}"
                print_err(f"pretrain_gpt.py: {summary}; to resume: {resume_command(self._config)}")

    def _exhausted_limit(self) -> str | None:
        """Return the limit of restarts that is reached, or None."""
        max_restarts = self._max_restarts
        if self._failed_restarts >= max_restarts:
            return f"{max_restarts} restarts in a row were refused, as many as --max-restarts allows"
        if len(self._restart_times) >= max_restarts:
            return f"{max_restarts} restarts within an hour, as many as --max-restarts allows"
        if self._ends_without_progress >= MAX_RESTARTS_WITHOUT_PROGRESS:
            return f"it died {MAX_RESTARTS_WITHOUT_PROGRESS} times in a row without a new checkpoint"
        return None

    def __call__(self, end: LaunchResult) -> bool | None:
        """Handle the end of all ranks; returns after the wait if they are to be restarted.

        Returns None for no restart, otherwise whether the run has saved a checkpoint since its first start.
        """
        status = finalize_status(self._directory, self._config, end.code, end.cause, self._started, self._is_restart)
        if stack := crash_stack(self._directory, end.cause, self._started):
            print_err(stack)
        # The same command has passed preflight before, so the cause may be temporary.
        restart_failed = end.code == ExitCode.PREFLIGHT and self._is_restart
        if (end.code in NO_RESTART_CODES and not restart_failed) or end.signals or not self._max_restarts:
            self._report(end, status)
            return None
        checkpoints, now = self._find_checkpoints(), time.time()
        progressed = checkpoints != self._newest_checkpoints
        self._failed_restarts = self._failed_restarts + 1 if restart_failed else 0
        self._ends_without_progress = 0 if progressed or restart_failed else self._ends_without_progress + 1
        self._newest_checkpoints = checkpoints
        self._restart_times = [restarted for restarted in self._restart_times if restarted > now - WINDOW_S]
        if limit := self._exhausted_limit():
            self._events.add("restarts-exhausted", cause=end.cause, code=end.code, reason=limit)
            hint = f"see {self._directory / RANK_LOG_DIR}; to resume: {resume_command(self._config)}"
            print_err(f"pretrain_gpt.py: {end.cause}: no restart, {limit}; {hint}")
            return None
        self._restart_times.append(now)
        count = len(self._restart_times)
        self._events.add("restart", cause=end.cause, code=end.code, count=count, max_restarts=self._max_restarts)
        wait_s = 0.0
        delay = ""
        if restart_failed:
            wait_s = min(FIRST_WAIT_S * 2 ** (self._failed_restarts - 1), MAX_WAIT_S)
            delay = f" in {wait_s:.0f} s"
        count_text = f"{count} of {self._max_restarts} within an hour"
        print_err(f"pretrain_gpt.py: {end.cause}: restarting all ranks{delay} ({count_text})")
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline:
            time.sleep(POLL_S)
            if end.signals:
                return None
        self._started, self._is_restart = time.time(), True
        return checkpoints != self._initial_checkpoints
