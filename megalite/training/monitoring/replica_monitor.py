"""Replica checks of a run at --check-weight-hash-across-dp-replicas-interval, and the log of mismatches."""

from megalite.training.callbacks import Callback, is_due
from megalite.training.logging.event_log import EventLog
from megalite.training.logging.metrics_logger import MetricsLogger
from megalite.training.replica_check import check_replicas
from megalite.training.state import Run, StepResult


class ReplicaMismatchLog(Callback):
    """The log of replicas that differ, as a WARNING and as an event of rank 0."""

    def __init__(self, logger: MetricsLogger, events: EventLog) -> None:
        self._logger = logger
        self._events = events

    def on_train_step_end(self, run: Run, result: StepResult) -> None:
        """Log the mismatch that the step found in its checksums."""
        if result.replica_mismatch:
            self.log(run, result.replica_mismatch)

    def log(self, run: Run, mismatch: str) -> None:
        """Log a mismatch that was found after the current step."""
        self._logger.info(f"WARNING: {mismatch}")
        if run.mesh.world.is_first:
            self._events.add("replica-mismatch", run.progress.step, text=mismatch)


class ReplicaCheck(Callback):
    """The comparison of all replicas every `interval` steps.

    Args:
        interval: The interval in steps, or None.
        action: --check-replicas-action.
    """

    def __init__(
        self, interval: int | None, action: str, mismatches: ReplicaMismatchLog, logger: MetricsLogger
    ) -> None:
        self._interval = interval
        self._action = action
        self._mismatches = mismatches
        self._logger = logger

    def on_train_step_end(self, run: Run, result: StepResult) -> None:
        """Compare the replicas if that is due; collective if it is.

        Raises:
            InvalidResultError: as `check_replicas` does.
        """
        step = run.progress.step
        if not is_due(self._interval, step):
            return
        if mismatch := check_replicas(run, step, self._action):
            self._mismatches.log(run, mismatch)
        else:
            self._logger.info(f">>> Weight hashes match after {step} iterations...")
