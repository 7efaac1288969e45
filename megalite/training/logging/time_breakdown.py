"""Time breakdown: the wall time of a process by phase.

Start-up, evaluations, saves and the wait for data are always measured. The phases within a step are measured in some
steps only (parallel/phase_timer.py), and their shares are applied to the steps that follow: the first
TIMED_FIRST_STEPS of a process, then one of TIMED_EVERY, and each step after a save. This never waits for a device, and
ranks communicate only once, at the end.
"""

import contextlib
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping

import torch

from megalite.parallel.comm import all_reduce_
from megalite.parallel.mesh import Mesh
from megalite.parallel.phase_timer import OTHER_PHASE
from megalite.parallel.streams import synchronize
from megalite.training.callbacks import Callback
from megalite.training.state import Run, StepResult

TIMED_FIRST_STEPS = 10
TIMED_EVERY = 10
WINDOW = 8  # timed steps that `TimeBreakdown.recent` keeps
COMPUTE = ("forward", "backward", "graph")  # "graph" is forward and backward in one replay
PHASES = (
    "start-up",
    "data",
    *COMPUTE,
    "communication",
    "bubble",
    "optimizer",
    "checkpoint",
    "evaluation",
    "profiler",
    OTHER_PHASE,
)


class TimeBreakdown(Callback):
    """The wall time of a process, divided into PHASES.

    Args:
        start: The start of the process, by time.perf_counter(). The time until `end_startup` is the phase "start-up".

    Attributes:
        recent: The seconds by phase of the last WINDOW timed steps.
    """

    def __init__(self, mesh: Mesh, start: float):
        self._mesh = mesh
        self._phase_timer = mesh.phase_timer
        self._start = start
        self._seconds: dict[str, float] = defaultdict(float)
        self._shares: Mapping[str, float] = {OTHER_PHASE: 1.0}  # in the last timed step
        self._steps = 0
        self._unassigned_s = 0.0  # time of steps, without the wait for data, that no phase has got yet
        self._after_save = False
        self.recent: deque[Mapping[str, float]] = deque(maxlen=WINDOW)

    def end_startup(self) -> None:
        """End the phase "start-up"."""
        self._seconds["start-up"] = self.wall_s

    @property
    def wall_s(self) -> float:
        """The seconds since the start."""
        return time.perf_counter() - self._start

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Add the time within the context to a phase outside of steps."""
        start = time.perf_counter()
        yield
        self._seconds[phase] += time.perf_counter() - start
        if phase == "checkpoint":  # the next step may wait for the rest of the save, so it is timed
            self._after_save = True

    def on_train_step_start(self, run: Run) -> None:
        """Start a step."""
        self.before_step()

    def on_train_step_end(self, run: Run, result: StepResult) -> None:
        """Add a finished step."""
        self.after_step(result.data_s, result.step_s)

    def before_step(self) -> None:
        """Start a step; decides whether it is timed."""
        self._steps += 1
        if self._after_save or self._steps <= TIMED_FIRST_STEPS or self._steps % TIMED_EVERY == 0:
            self._assign_to_phases()
            self._after_save = False
            self._phase_timer.start_step(self._mesh.device)

    def after_step(self, data_s: float, step_s: float) -> None:
        """Add a step of `step_s` seconds, including `data_s` seconds of waiting for data."""
        if self._phase_timer.timed:
            self._phase_timer.end_step()
        self._seconds["data"] += data_s
        self._unassigned_s += step_s - data_s

    def _assign_to_phases(self) -> None:
        """Divide the time of the last timed step, and of the steps after it, among the phases."""
        spent = self._phase_timer.phase_seconds()
        if spent:
            self.recent.append(dict(spent))
        spent.pop("data", None)
        save_wait_s = spent.pop("checkpoint", 0.0)
        self._name_agreement(spent)
        if total := sum(spent.values()):
            self._shares = {phase: seconds / total for phase, seconds in spent.items()}
        self._seconds["checkpoint"] += save_wait_s
        for phase, share in self._shares.items():
            self._seconds[phase] += share * (self._unassigned_s - save_wait_s)
        self._unassigned_s = 0.0

    def _name_agreement(self, spent: dict[str, float]) -> None:
        """Rename the time of the step's all-reduce over all ranks, in which they wait for the last one."""
        if "agreement" in spent:
            wait_phase = "communication" if self._mesh.pp.size == 1 else "bubble"
            spent[wait_phase] = spent.get(wait_phase, 0.0) + spent.pop("agreement")

    def recent_seconds(self) -> dict[str, float]:
        """Return this rank's seconds by phase in the last timed steps; empty until one has been read."""
        spent: dict[str, float] = defaultdict(float)
        for step in self.recent:
            for phase, seconds in step.items():
                spent[phase] += seconds
        self._name_agreement(spent)
        return dict(spent)

    def average_over_ranks(self) -> None:
        """Replace the seconds by their mean over all ranks; collective, to be called once, after the last step."""
        synchronize(self._mesh.device)
        self._assign_to_phases()
        local = torch.tensor([self._seconds[phase] for phase in PHASES], dtype=torch.float64, device=self._mesh.device)
        mean = all_reduce_(local, self._mesh.world) / self._mesh.world.size
        self._seconds.update(zip(PHASES, mean.tolist(), strict=True))

    def seconds(self) -> dict[str, float]:
        """Return the seconds of each phase with more than 0 s; their sum is the wall time until now."""
        self._assign_to_phases()
        spent = {phase: self._seconds[phase] for phase in PHASES if self._seconds[phase] > 0}
        spent[OTHER_PHASE] = spent.get(OTHER_PHASE, 0.0) + max(0.0, self.wall_s - sum(spent.values()))
        return spent
