"""Timers under Megatron-LM's names and levels, and the pipeline's timeline.

level 0  evaluate, save-checkpoint
level 1  also the parts of a step; ranks wait for each other and for their devices at each timer, which costs time
level 2  also the micro-batches: forward-compute and backward-compute, without the wait for a neighbor's message
"""

import contextlib
import json
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

from megalite.common.console import print_err
from megalite.common.safe_open import write_atomically
from megalite.parallel.comm import all_gather_strings, all_reduce_
from megalite.parallel.mesh import Mesh
from megalite.parallel.streams import synchronize
from megalite.pipeline.runtime import Pipeline, TimedAction
from megalite.training.callbacks import Callback
from megalite.training.logging.metrics_logger import MetricsLogger
from megalite.training.state import Run, StepResult

STEP_TIMERS = ("forward-backward", "all-grads-sync", "params-all-gather", "optimizer-inner-step", "optimizer")
MICROBATCH_TIMERS = ("batch-generator", "forward-compute", "backward-compute")


class Timers:
    """Timers under Megatron-LM's names.

    Args:
        level: The highest level that is measured; -1 for none.
        barrier: Ranks wait for each other at the timers of level 1.

    Attributes:
        phase: The name of the innermost timer that runs, even if it is not measured.
    """

    def __init__(self, level: int = -1, mesh: Mesh | None = None, barrier: bool = True):
        self.level = level
        self.mesh = mesh or Mesh.single_process()
        self.barrier = barrier
        self.phase = ""
        self._seconds: dict[str, float] = defaultdict(float)

    @property
    def step_names(self) -> tuple[str, ...]:
        """The names of the timers within a step that are measured."""
        names: tuple[str, ...] = ()
        if self.level >= 1:
            names += STEP_TIMERS
        if self.level >= 2:
            names += MICROBATCH_TIMERS
        return names

    @contextlib.contextmanager
    def __call__(self, name: str, level: int) -> Iterator[None]:
        """Add the time within the context to the timer `name`."""
        outer_phase, self.phase = self.phase, name
        start = self._current(level)
        yield
        self._seconds[name] += self._current(level) - start
        self.phase = outer_phase  # not restored after an error, so that the phase says where it was raised

    def _current(self, level: int) -> float:
        """Return the time in seconds, after a wait for the device and maybe other ranks; 0 if `level` is off."""
        if level > self.level:
            return 0.0
        synchronize(self.mesh.device)
        if level == 1 and self.barrier:
            all_reduce_(torch.zeros((), device=self.mesh.device), self.mesh.world).item()
        return time.perf_counter()

    def add_spans(self, spans: Sequence[TimedAction]) -> None:
        """Add the pipeline's forward and backward actions."""
        for span in spans:  # messages are added under "", which is never logged
            name = {"F": "forward-compute", "B": "backward-compute"}.get(span.action[0], "")
            self._seconds[name] += span.end_s - span.start_s

    def reduce_and_reset(self, names: Sequence[str], steps: int = 1) -> dict[str, list[float]]:
        """Return the seconds of each rank by timer, divided by `steps`, and reset the timers.

        Collective, unless nothing is measured.
        """
        if self.level < 0 or not names:
            return {}
        world = self.mesh.world
        times = torch.zeros(len(names), world.size, dtype=torch.float64, device=self.mesh.device)
        local_times = [self._seconds.pop(name, 0.0) / steps for name in names]
        times[:, world.rank] = torch.tensor(local_times, dtype=torch.float64)
        return dict(zip(names, all_reduce_(times, world).tolist(), strict=True))


def write_timeline(pipeline: Pipeline, directory: Path) -> None:
    """Write timeline.json with the start and end of each pipeline rank's actions; collective over the pipeline."""
    mesh = pipeline.mesh
    spans = [{"action": s.action, "start_s": s.start_s, "end_s": s.end_s} for s in pipeline.timeline or []]
    text = json.dumps(spans)
    max_length = all_reduce_(torch.tensor(len(text), device=mesh.device), mesh.pp, dist.ReduceOp.MAX)
    texts = all_gather_strings(text, mesh.pp, mesh.device, max_bytes=int(max_length))
    if not mesh.world.is_first:
        return
    timeline = {
        "schedule": pipeline.schedule,
        "pp": mesh.pp.size,
        "vpp": len(pipeline.stages),
        "microbatches": sum(span["action"].startswith("F") for span in spans) // len(pipeline.stages),
        "ranks": [{"pp_rank": rank, "spans": json.loads(text)} for rank, text in enumerate(texts)],
    }
    try:
        write_atomically(directory / "timeline.json", json.dumps(timeline))
    except OSError as error:
        print_err(f"WARNING: {directory / 'timeline.json'}: {error.strerror}; training continues without it")


class PipelineTimeline(Callback):
    """The recorder of the pipeline's actions, for timeline.json (--profile-pipeline) and for timers of level 2.

    Args:
        profiled_step: The step of timeline.json, or None.
        directory: The directory of timeline.json.
    """

    def __init__(self, timers: Timers, profiled_step: int | None, directory: Path) -> None:
        self._timers = timers
        self._profiled_step = profiled_step
        self._directory = directory

    def on_train_step_start(self, run: Run) -> None:
        """Record the next step if it is needed."""
        if run.progress.step + 1 == self._profiled_step or self._timers.level == 2:
            run.pipeline.timeline = []

    def on_train_step_end(self, run: Run, result: StepResult) -> None:
        """Add the step's actions to the timers, and write timeline.json if that is due; collective if it is."""
        self._timers.add_spans(run.pipeline.timeline or ())
        if run.progress.step == self._profiled_step:
            write_timeline(run.pipeline, self._directory)
        run.pipeline.timeline = None


def log_timers(timers: Timers, logger: MetricsLogger, step: int, names: Sequence[str], num_steps: int = 1) -> None:
    """Log the timers `names`, divided by `num_steps`, and reset them; collective if timers are on."""
    if seconds := timers.reduce_and_reset(names, num_steps):
        logger.log_timers(step, seconds)
