"""Control of Python's garbage collector, so that all ranks pause at the same steps."""

import contextlib
import gc
from collections.abc import Iterator

from megalite.training.callbacks import Callback, is_due
from megalite.training.state import Run, StepResult


class GarbageCollector(Callback):
    """Control of Python's garbage collector.

    If `manual` is set, garbage is collected only after every `interval`-th step (0: never) and, with
    `around_evaluations`, around evaluations. All ranks then pause at the same steps and do not wait for each other.
    """

    def __init__(self, manual: bool = False, interval: int = 0, around_evaluations: bool = True):
        self.manual = manual
        self.interval = interval
        self.around = manual and around_evaluations

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Disable the automatic collector within the context, if `manual` is set."""
        if self.manual:
            gc.disable()
            gc.collect()
        try:
            yield
        finally:
            if self.manual:
                gc.enable()

    def on_train_step_end(self, run: Run, result: StepResult) -> None:
        """Collect garbage after a step, if it is due."""
        if self.manual and is_due(self.interval, run.progress.step):
            gc.collect()

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        """Collect garbage before and after an evaluation, if that is enabled."""
        if self.around:
            gc.collect()
        yield
        if self.around:
            gc.collect(0)  # the evaluation's garbage
