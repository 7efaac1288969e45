"""Timers for the parts of a run, under Megatron-LM's names.

level 0  evaluate, save-checkpoint
level 1  also the parts of a step; at each, ranks wait for each other and for their devices, which costs time
level 2  also its micro-batches: forward-compute and backward-compute, without the wait for a neighbour's message
"""

import contextlib
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch

from megalite.parallel.comm import all_reduce_
from megalite.parallel.mesh import Mesh
from megalite.parallel.streams import synchronize
from megalite.pipeline.runtime import Timed

OF_STEP = ("forward-backward", "all-grads-sync", "params-all-gather", "optimizer-inner-step", "optimizer")
OF_MICROBATCHES = ("batch-generator", "forward-compute", "backward-compute")


class Timers:
    """`level` None: nothing is measured. `barrier`: ranks wait for each other at the timers of level 1."""

    def __init__(self, level: int | None = None, mesh: Mesh | None = None, barrier: bool = True):
        self.level, self.mesh, self.barrier = level, mesh or Mesh.alone(), barrier
        self.phase = ""  # the innermost timer that runs, measured or not
        self._seconds: dict[str, float] = defaultdict(float)

    @property
    def of_step(self) -> tuple[str, ...]:
        return (OF_STEP if (self.level or 0) >= 1 else ()) + (OF_MICROBATCHES if (self.level or 0) >= 2 else ())

    @contextlib.contextmanager
    def __call__(self, name: str, level: int) -> Iterator[None]:
        before, self.phase = self.phase, name
        if self.level is None or level > self.level:
            yield
        else:
            begin = self._now(level)
            yield
            self._seconds[name] += self._now(level) - begin
        self.phase = before  # not after an error: the phase then says where it came

    def _now(self, level: int) -> float:
        synchronize(self.mesh.device)
        if level == 1 and self.barrier:
            all_reduce_(torch.zeros((), device=self.mesh.device), self.mesh.world).item()
        return time.perf_counter()

    def add(self, spans: Sequence[Timed]) -> None:
        """Add the pipeline's forward and backward actions."""
        for span in spans:
            name = {"F": "forward-compute", "B": "backward-compute"}.get(span.action[0])
            if name is not None:
                self._seconds[name] += span.end_s - span.start_s

    def take(self, names: Sequence[str], steps: int = 1) -> dict[str, list[float]]:
        """Name -> seconds of each rank, divided by `steps`, and reset; collective, unless nothing is measured."""
        if self.level is None or not names:
            return {}
        world = self.mesh.world
        times = torch.zeros(len(names), world.size, dtype=torch.float64, device=self.mesh.device)
        mine = [self._seconds.pop(name, 0.0) / steps for name in names]
        times[:, world.rank] = torch.tensor(mine, dtype=torch.float64)
        return dict(zip(names, all_reduce_(times, world).tolist(), strict=True))
