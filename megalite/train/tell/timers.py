"""Where the time of a rank goes: always in seconds by phase, which add up to its wall time, and where asked by timers
under Megatron-LM's names.

Phases: start-up, evaluations, saves and the wait for data are always measured. The parts of a step come from the steps
that the clock times (parallel/clock.py), and hold for the steps after them: the FIRST of a process, then one of EVERY,
and each after a save. Nothing waits for a device, and ranks meet once, at the end.

Timers:

level 0  evaluate, save-checkpoint
level 1  also the parts of a step; at each, ranks wait for each other and for their devices, which costs time
level 2  also its micro-batches: forward-compute and backward-compute, without the wait for a neighbour's message
"""

import contextlib
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence

import torch

from megalite.parallel.clock import REST
from megalite.parallel.comm import all_reduce_
from megalite.parallel.mesh import Mesh
from megalite.parallel.streams import synchronize
from megalite.pipeline.runtime import Timed

FIRST, EVERY, WINDOW = 10, 10, 8
COMPUTE = ("forward", "backward", "graph")  # the last is both, in one replay
PHASES = (
    *("start-up", "data", *COMPUTE, "communication", "bubble"),
    *("optimizer", "checkpoint", "evaluation", "profiler", REST),
)
OF_STEP = ("forward-backward", "all-grads-sync", "params-all-gather", "optimizer-inner-step", "optimizer")
OF_MICROBATCHES = ("batch-generator", "forward-compute", "backward-compute")


class Timers:
    """`level` -1: nothing is measured. `barrier`: ranks wait for each other at the timers of level 1."""

    def __init__(self, level: int = -1, mesh: Mesh | None = None, barrier: bool = True):
        self.level, self.mesh, self.barrier = level, mesh or Mesh.alone(), barrier
        self.phase = ""  # the innermost timer that runs, measured or not
        self._seconds: dict[str, float] = defaultdict(float)

    @property
    def of_step(self) -> tuple[str, ...]:
        return OF_STEP * (self.level >= 1) + OF_MICROBATCHES * (self.level >= 2)

    @contextlib.contextmanager
    def __call__(self, name: str, level: int) -> Iterator[None]:
        before, self.phase = self.phase, name
        begin = self._now(level)
        yield
        self._seconds[name] += self._now(level) - begin
        self.phase = before  # not after an error: the phase then says where it came

    def _now(self, level: int) -> float:
        if level > self.level:
            return 0.0
        synchronize(self.mesh.device)
        if level == 1 and self.barrier:
            all_reduce_(torch.zeros((), device=self.mesh.device), self.mesh.world).item()
        return time.perf_counter()

    def add(self, spans: Sequence[Timed]) -> None:
        """Add the pipeline's forward and backward actions."""
        for span in spans:  # messages are counted, too, and taken by nobody
            name = {"F": "forward-compute", "B": "backward-compute"}.get(span.action[0], "")
            self._seconds[name] += span.end_s - span.start_s

    def take(self, names: Sequence[str], steps: int = 1) -> dict[str, list[float]]:
        """Name -> seconds of each rank, divided by `steps`, and reset; collective, unless nothing is measured."""
        if self.level < 0 or not names:
            return {}
        world = self.mesh.world
        times = torch.zeros(len(names), world.size, dtype=torch.float64, device=self.mesh.device)
        mine = [self._seconds.pop(name, 0.0) / steps for name in names]
        times[:, world.rank] = torch.tensor(mine, dtype=torch.float64)
        return dict(zip(names, all_reduce_(times, world).tolist(), strict=True))


class Phases:
    """`begin`: of the run, by time.perf_counter(); the time until `ready` is the start-up."""

    def __init__(self, mesh: Mesh, begin: float):
        self._mesh, self._clock, self._begin = mesh, mesh.clock, begin
        self._seconds: dict[str, float] = defaultdict(float)
        self._shares: Mapping[str, float] = {REST: 1.0}
        self._steps, self._open_s, self._due = 0, 0.0, False
        self.timed: deque[Mapping[str, float]] = deque(maxlen=WINDOW)  # seconds by phase of the last timed steps

    def ready(self) -> None:
        self._seconds["start-up"] = self.wall_s

    @property
    def wall_s(self) -> float:
        return time.perf_counter() - self._begin

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        begin = time.perf_counter()
        yield
        self._seconds[phase] += time.perf_counter() - begin
        self._due |= phase == "checkpoint"  # the next step may wait for the rest of the save

    def before_step(self) -> None:
        self._steps += 1
        if self._due or self._steps <= FIRST or self._steps % EVERY == 0:
            self._settle()
            self._due = False
            self._clock.begin(self._mesh.device)

    def after_step(self, data_s: float, step_s: float) -> None:
        if self._clock.timed:
            self._clock.end()
        self._seconds["data"] += data_s
        self._open_s += step_s - data_s

    def _settle(self) -> None:
        """Divide the seconds of the last timed step, and of those after it, among the phases."""
        spent = self._clock.read()
        if spent:
            self.timed.append(dict(spent))
        spent.pop("data", None)
        waited = spent.pop("checkpoint", 0.0)
        if "agreement" in spent:  # all ranks wait there for the last one
            where = "communication" if self._mesh.pp.size == 1 else "bubble"
            spent[where] = spent.get(where, 0.0) + spent.pop("agreement")
        if total := sum(spent.values()):
            self._shares = {phase: seconds / total for phase, seconds in spent.items()}
        self._seconds["checkpoint"] += waited
        for phase, share in self._shares.items():
            self._seconds[phase] += share * (self._open_s - waited)
        self._open_s = 0.0

    def over_ranks(self) -> None:
        """Replace the seconds by their mean over all ranks; collective, once, after the last step."""
        synchronize(self._mesh.device)
        self._settle()
        mine = torch.tensor([self._seconds[p] for p in PHASES], dtype=torch.float64, device=self._mesh.device)
        mean = all_reduce_(mine, self._mesh.world) / self._mesh.world.size
        self._seconds.update(zip(PHASES, mean.tolist(), strict=True))

    def seconds(self) -> dict[str, float]:
        """By phase, without those of 0 s; their sum is the wall time until now."""
        self._settle()
        spent = {phase: self._seconds[phase] for phase in PHASES if self._seconds[phase] > 0}
        spent[REST] = spent.get(REST, 0.0) + max(0.0, self.wall_s - sum(spent.values()))
        return spent
