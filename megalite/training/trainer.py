"""The training loop: prepare each step, then run the callbacks, until the last step or an agreement to stop."""

import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from megalite.common.exit_codes import ExitCode, RunResult
from megalite.common.fault_injection import inject_fault
from megalite.config.options import Config
from megalite.parallel.comm import all_reduce_int
from megalite.training.callbacks import CallbackList
from megalite.training.checkpointing.checkpointer import Checkpointer
from megalite.training.evaluation import Evaluation
from megalite.training.job.stop_signals import StopSignalHandler
from megalite.training.logging.timers import Timers
from megalite.training.monitoring.watchdog import Watchdog
from megalite.training.state import Run, StepResult
from megalite.training.stop_requests import StopRequests


@dataclass
class Trainer:
    """The training loop around `train_step`. training/builtin_callbacks.py builds it and has its callbacks in order."""

    run: Run
    config: Config
    callbacks: CallbackList
    stops: StopRequests
    evaluation: Evaluation
    checkpointer: Checkpointer
    signals: StopSignalHandler
    watchdog: Watchdog
    timers: Timers

    def __post_init__(self) -> None:
        self._begin_step_s = 0.0  # duration of the work before the step that counts as its time
        self._early_end: RunResult | None = None  # if the run ends before its last step

    def steps(self) -> Iterator[dict[str, Any]]:
        """Yield the keyword arguments of `train_step` for each step; pass its result to `end_step`."""
        run = self.run
        skip = self.config.train.iterations_to_skip
        self.callbacks.run("on_train_start", run)
        while self._early_end is None and run.progress.step < run.last_step:
            if skip and run.progress.step + 1 in skip:
                run.skip_step()
            else:
                yield self._begin_step()

    def _begin_step(self) -> dict[str, Any]:
        run = self.run
        step = run.progress.step + 1
        self.watchdog.set_activity("step", step)
        self.callbacks.run("on_train_step_start", run)
        start = time.perf_counter()  # from here on, a slow rank makes all others wait
        inject_fault("step.begin", run.mesh.world.rank, step)
        want_stop = self.stops.update_reason()
        self._begin_step_s = time.perf_counter() - start
        return {
            "want_stop": want_stop,
            "count_zeros": self.config.log.log_num_zeros_in_grad,
            "timers": self.timers,
            "empty_cache_level": self.config.operations.empty_unused_memory_level,
        }

    def end_step(self, result: StepResult) -> None:
        """Run the callbacks on a finished step, and decide whether the run ends."""
        step = self.run.progress.step
        self.watchdog.set_activity("after the step", step)
        self.stops.agreed = result.stop
        self.callbacks.run("on_train_step_end", self.run, replace(result, step_s=self._begin_step_s + result.step_s))
        self._early_end = self.stops.result_after(step)

    def finish(self) -> RunResult:
        """Save and evaluate for the last time.

        Returns the result, whose exit code is the same on all ranks; the reason is this rank's. A background save that
        failed raises here, on all ranks.
        """
        run, stops = self.run, self.stops
        result = self._early_end or RunResult(ExitCode.DONE, "reached the last step")
        self.checkpointer.save_last_step(run)
        # A run that will be requeued evaluates after its real last step, not here.
        if result.exit_code is ExitCode.DONE:
            self.evaluation.evaluate_last_step(run)
            if stops.agreed:
                result = RunResult(ExitCode.REQUEUE, stops.agreed_reason)
        self.callbacks.run("on_train_end", run, result.exit_code.outcome)
        if result.exit_code is ExitCode.REQUEUE:
            self.signals.is_final = all_reduce_int(bool(self.signals.received), run.mesh) == 0
            if self.checkpointer.saver is None:  # without a checkpoint the requeued run could not resume
                return RunResult(ExitCode.DONE, f"{result.reason}; nothing was saved")
        return result
