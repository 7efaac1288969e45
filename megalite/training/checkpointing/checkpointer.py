"""The checkpoints of a run: when it saves, and what it logs about that."""

from megalite.checkpoint.manager.collective import SaveTimer
from megalite.checkpoint.manager.saver import CheckpointSaver
from megalite.config.config_file import dump_config
from megalite.config.options import Config
from megalite.training.callbacks import Callback, CallbackList, is_due
from megalite.training.checkpointing.save import save
from megalite.training.logging.metrics_logger import MetricsLogger
from megalite.training.logging.timers import log_timers
from megalite.training.monitoring.monitors import Monitors
from megalite.training.state import Run, StepResult


class Checkpointer(Callback):
    """The checkpoints of a run: at --save-interval, at --save-interval-mins, on request, and after the last step.

    Args:
        config: The configuration that checkpoints store.
        saver: The saver; None if the run does not save.
        saved_step: The step of the newest checkpoint, or None.

    Attributes:
        saved_step: As above.
    """

    def __init__(
        self,
        run: Run,
        config: Config,
        logger: MetricsLogger,
        saver: CheckpointSaver | None,
        saved_step: int | None,
        monitors: Monitors,
        callbacks: CallbackList,
    ) -> None:
        self.saver = saver
        self.saved_step = saved_step
        self._options = config.checkpoint
        self._config_toml = dump_config(config)
        self._logger = logger
        self._monitors = monitors
        self._callbacks = callbacks
        self._is_requested = False
        minutes = config.checkpoint.save_interval_mins
        self._save_timer = None if minutes is None else SaveTimer(60 * minutes, run.mesh, run.progress.step)

    def request_save(self) -> None:
        """Save after the current step; to be called on all ranks, before `on_train_step_end`."""
        self._is_requested = True

    def on_train_step_end(self, run: Run, result: StepResult) -> None:
        """Save if that is due, and log saves that are done."""
        step = run.progress.step
        save_due = self._save_timer is not None and self._save_timer.is_due(step)
        if save_due or is_due(self._options.save_interval, step) or self._is_requested:
            self.save(run)
        self._is_requested = False
        self._log_messages()

    def save(self, run: Run, last: bool = False) -> None:
        """Save a checkpoint of the current step, unless there is one already; collective."""
        saver, logger, monitors, step = self.saver, self._logger, self._monitors, run.progress.step
        if saver is None or self.saved_step == step:
            return
        logger.info(saver.save_message(step))
        monitors.watchdog.set_activity("save", step)
        with monitors.timers("save-checkpoint", 0), monitors.time_breakdown("checkpoint"):
            save(run, saver, self._config_toml, optimizer=not self._options.no_save_optim, last=last)
        self.saved_step = step
        self._callbacks.run("on_save_checkpoint", run)
        if self._save_timer is not None:
            self._save_timer.restart(step)
        self._log_messages()
        logger.log_save(run.progress, saver.background and not last)
        log_timers(monitors.timers, logger, step, ("save-checkpoint",))

    def save_last_step(self, run: Run) -> None:
        """Save after the last step, and wait for all saves. Raises CheckpointError on all ranks if one has failed."""
        run.sync.wait_param_sync()
        self.save(run, last=True)
        if self.saver is not None:
            with self._monitors.time_breakdown("checkpoint"):
                self.saver.wait()
            self._log_messages()
        self._logger.log_saves_done()

    def _log_messages(self) -> None:
        if self.saver is not None:
            for line in self.saver.pop_messages():
                self._logger.info(line)
