"""Callbacks on the events of a run, those of the trainer and of plugins."""

from collections.abc import Iterable, Mapping
from typing import Any

from megalite.training.plugin_metrics import leave_layers
from megalite.training.state import Run, StepResult


class Callback:
    """The events of a run. A callback overrides those that it needs; a plugin's may be an object of any class.

    Every event occurs on all ranks, in the same order, so a callback may communicate. An exception ends the run.
    """

    def on_train_start(self, run: Run) -> None:
        """Prepare for the first step, when everything is loaded."""

    def on_train_step_start(self, run: Run) -> None:
        """Prepare for step `run.progress.step + 1`."""

    def on_train_step_end(self, run: Run, result: StepResult) -> None:
        """Handle the result of step `run.progress.step`."""

    def on_log(self, run: Run, metrics: Mapping[str, Any]) -> None:
        """Handle the metrics of a log line (training/logging/step_log.py: step_metrics), after it was written."""

    def on_eval_end(self, run: Run, name: str, loss: float) -> None:
        """Handle the loss of a dataset, in nats per token."""

    def on_save_checkpoint(self, run: Run) -> None:
        """Handle a checkpoint that was written, or started in the background."""

    def on_train_end(self, run: Run, outcome: str) -> None:
        """Handle the end of training, with the outcome for status.json."""


class CallbackList:
    """The callbacks of a run, in their fixed order.

    The order is the same on all ranks and for all events, except that `on_train_step_start` has the reverse order. What
    the first callback measures between the start and the end of a step is therefore the step alone.
    """

    def __init__(self) -> None:
        self._callbacks: list[Any] = []

    def extend(self, callbacks: Iterable[Any]) -> None:
        """Add callbacks after those of the list."""
        self._callbacks.extend(callbacks)

    def run(self, event: str, *args: Any) -> None:
        """Call the method `event` of each callback that has it."""
        leave_layers()
        for callback in reversed(self._callbacks) if event == "on_train_step_start" else self._callbacks:
            method = getattr(callback, event, None)
            if method is not None:
                method(*args)


def is_due(interval: int | None, step: int) -> bool:
    """Return True if `step` is a multiple of `interval` (in steps; None or 0 means never)."""
    return bool(interval) and step % (interval or 1) == 0
