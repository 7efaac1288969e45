"""The reasons to end a run before its last step, and the result of a run that ends early.

A rank asks to stop because of a signal, the stop file, --exit-duration-in-mins or a failed save. All ranks stop after
the same step, because the step's all-reduce, or an evaluation's, counts the requests. Unreliable machines and
--exit-interval are known to all ranks without that.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from megalite.common.exit_codes import ExitCode, RunResult
from megalite.config.options import TrainConfig
from megalite.training.callbacks import is_due
from megalite.training.state import Run

if TYPE_CHECKING:
    from megalite.training.job.stop_signals import StopSignalHandler

STOP_FILE = "stop"  # creating this file in the run directory stops the run as a signal does


class StopRequests:
    """The requests of this rank to stop, and what all ranks have agreed on.

    Args:
        directory: The run directory, which may get a stop file.
        save_failed: Returns True if this rank's pending save has failed.

    Attributes:
        reason: Why this rank asks to stop; None if it does not.
        agreed: All ranks know that some rank asks to stop.
        problem: Why a machine of the run is unreliable, the same on all ranks; None if none is known.
    """

    def __init__(
        self,
        run: Run,
        train: TrainConfig,
        directory: Path,
        signals: "StopSignalHandler",
        save_failed: Callable[[], bool],
    ) -> None:
        self.reason: str | None = None
        self.agreed = False
        self.problem: str | None = None
        self._run = run
        self._train = train
        self._file = directory / STOP_FILE
        self._signals = signals
        self._save_failed = save_failed
        self._start = time.monotonic()

    def update_reason(self) -> bool:
        """Look for a reason to stop after the next step, and return True if there is one."""
        self.reason = self._find_reason()
        return self.reason is not None

    def is_requested(self) -> bool:
        """Return True if a signal or the stop file asks this rank to stop; only rank 0 reads and removes the file."""
        file = self._file
        if self._signals.received:
            self.reason = self._signals.received[0]
        elif self._run.mesh.world.is_first and file.is_file():
            file.unlink(missing_ok=True)
            self.reason = str(file)
        return bool(self._signals.received) or self.reason == str(file)

    def report_problem(self, problem: str) -> None:
        """End the run after this step because a machine is unreliable; to be called on all ranks."""
        self.problem = self.problem or problem

    def ends_after(self, step: int) -> bool:
        """Return True if the run is known to end early after this step, or at a multiple of --exit-interval."""
        return self.agreed or self.problem is not None or is_due(self._train.exit_interval, step)

    def result_after(self, step: int) -> RunResult | None:
        """Return the result of a run that ends early after this step, or None if it continues.

        The exit code is the same on all ranks; the reason is this rank's.
        """
        if self.problem is not None:
            return RunResult(ExitCode.RERUN, self.problem)
        if self.agreed:
            self.reason = self.reason or self._find_reason()
            return RunResult(ExitCode.REQUEUE, self.agreed_reason)
        if is_due(self._train.exit_interval, step) and step < self._run.last_step:
            return RunResult(ExitCode.REQUEUE, f"exit_interval={self._train.exit_interval}")
        return None

    @property
    def agreed_reason(self) -> str:
        """The reason to stop that this rank reports once all ranks have agreed."""
        return self.reason or "requested by another rank"

    def _find_reason(self) -> str | None:
        if self.is_requested():
            return self.reason
        minutes = self._train.exit_duration_in_mins
        if minutes is not None and time.monotonic() - self._start > 60 * minutes:
            return "exit_duration_in_mins"
        return "a save failed" if self._save_failed() else None
