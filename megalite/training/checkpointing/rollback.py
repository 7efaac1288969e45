"""Rollback after a spike: back to the newest checkpoint, without the samples since."""

from megalite.config.options import Config
from megalite.training.callbacks import Callback
from megalite.training.checkpointing.checkpointer import Checkpointer
from megalite.training.checkpointing.resume import LoadOptions, resume
from megalite.training.monitoring.rerun import AnomalyHandler
from megalite.training.state import Run, StepResult


class SpikeRollback(Callback):
    """The rollback of --spike-action rollback."""

    def __init__(self, config: Config, checkpointer: Checkpointer, anomalies: AnomalyHandler) -> None:
        self._config = config
        self._checkpointer = checkpointer
        self._anomalies = anomalies

    def on_train_step_end(self, run: Run, result: StepResult) -> None:
        """Roll back if the step was skipped because of a spike; collective if it was."""
        is_spike = result.anomaly is not None and result.anomaly.finite
        if result.skipped and is_spike and run.spikes.action == "rollback":
            self._roll_back(run)

    def _roll_back(self, run: Run) -> None:
        checkpointer, options = self._checkpointer, self._config.checkpoint
        if checkpointer.saver is not None:
            checkpointer.saver.wait()  # the checkpoint to return to may still be written in the background

        def load(step: int) -> object:
            return resume(run, options.save or "", self._config, LoadOptions(step), options.save_local)

        if self._anomalies.roll_back(checkpointer.saved_step, load):
            checkpointer.save(run)  # otherwise a restart would train on the skipped samples
