"""Where a rank's time goes: in seconds by phase, which add up to its wall time, and where asked by timers under
Megatron-LM's names, in profiles of steps and the pipeline's timeline. And control over Python's garbage collector.

Phases: start-up, evaluations, saves and the wait for data are always measured. The parts of a step come from the steps
that the clock times (parallel/phase_timer.py), and hold for the steps after them: the FIRST of a process, then one of EVERY,
and each after a save. Nothing waits for a device, and ranks meet once, at the end.

Timers:

level 0  evaluate, save-checkpoint
level 1  also the parts of a step; at each, ranks wait for each other and for their devices, which costs time
level 2  also its micro-batches: forward-compute and backward-compute, without the wait for a neighbour's message
"""

import contextlib
import gc
import json
import time
from collections import defaultdict, deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megalite.config.console import print_err
from megalite.config.options import OperationsConfig
from megalite.parallel.comm import all_gather_strings, all_reduce_
from megalite.parallel.mesh import Mesh
from megalite.parallel.phase_timer import OTHER_PHASE
from megalite.parallel.streams import synchronize
from megalite.pipeline.runtime import Pipeline, TimedAction
from megalite.training.logging.run_dir import write_atomically

TIMED_FIRST_STEPS, TIMED_EVERY, WINDOW = 10, 10, 8
COMPUTE = ("forward", "backward", "graph")  # the last is both, in one replay
PHASES = (
    *("start-up", "data", *COMPUTE, "communication", "bubble"),
    *("optimizer", "checkpoint", "evaluation", "profiler", OTHER_PHASE),
)
OF_STEP = ("forward-backward", "all-grads-sync", "params-all-gather", "optimizer-inner-step", "optimizer")
OF_MICROBATCHES = ("batch-generator", "forward-compute", "backward-compute")


class Timers:
    """`level` -1: nothing is measured. `barrier`: ranks wait for each other at the timers of level 1."""

    def __init__(self, level: int = -1, mesh: Mesh | None = None, barrier: bool = True):
        self.level, self.mesh, self.barrier = level, mesh or Mesh.single_process(), barrier
        self.phase = ""  # the innermost timer that runs, measured or not
        self._seconds: dict[str, float] = defaultdict(float)

    @property
    def step_names(self) -> tuple[str, ...]:
        return OF_STEP * (self.level >= 1) + OF_MICROBATCHES * (self.level >= 2)

    @contextlib.contextmanager
    def __call__(self, name: str, level: int) -> Iterator[None]:
        before, self.phase = self.phase, name
        begin = self._current(level)
        yield
        self._seconds[name] += self._current(level) - begin
        self.phase = before  # not after an error: the phase then says where it came

    def _current(self, level: int) -> float:
        if level > self.level:
            return 0.0
        synchronize(self.mesh.device)
        if level == 1 and self.barrier:
            all_reduce_(torch.zeros((), device=self.mesh.device), self.mesh.world).item()
        return time.perf_counter()

    def add_spans(self, spans: Sequence[TimedAction]) -> None:
        """Add the pipeline's forward and backward actions."""
        for span in spans:  # messages are counted, too, and taken by nobody
            name = {"F": "forward-compute", "B": "backward-compute"}.get(span.action[0], "")
            self._seconds[name] += span.end_s - span.start_s

    def reduce_and_reset(self, names: Sequence[str], steps: int = 1) -> dict[str, list[float]]:
        """Name -> seconds of each rank, divided by `steps`, and reset; collective, unless nothing is measured."""
        if self.level < 0 or not names:
            return {}
        world = self.mesh.world
        times = torch.zeros(len(names), world.size, dtype=torch.float64, device=self.mesh.device)
        mine = [self._seconds.pop(name, 0.0) / steps for name in names]
        times[:, world.rank] = torch.tensor(mine, dtype=torch.float64)
        return dict(zip(names, all_reduce_(times, world).tolist(), strict=True))


class PhaseTimer:
    """`begin`: of the run, by time.perf_counter(); the time until `ready` is the start-up."""

    def __init__(self, mesh: Mesh, begin: float):
        self._mesh, self._clock, self._begin = mesh, mesh.clock, begin
        self._seconds: dict[str, float] = defaultdict(float)
        self._shares: Mapping[str, float] = {OTHER_PHASE: 1.0}
        self._steps, self._open_s, self._due = 0, 0.0, False
        self.recent: deque[Mapping[str, float]] = deque(maxlen=WINDOW)  # seconds by phase of the last timed steps

    def end_startup(self) -> None:
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
        if self._due or self._steps <= TIMED_FIRST_STEPS or self._steps % TIMED_EVERY == 0:
            self._settle()
            self._due = False
            self._clock.start_step(self._mesh.device)

    def after_step(self, data_s: float, step_s: float) -> None:
        if self._clock.timed:
            self._clock.end_step()
        self._seconds["data"] += data_s
        self._open_s += step_s - data_s

    def _settle(self) -> None:
        """Divide the seconds of the last timed step, and of those after it, among the phases."""
        if spent := self._clock.phase_seconds():
            self.recent.append(dict(spent))
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

    def average_over_ranks(self) -> None:
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
        spent[OTHER_PHASE] = spent.get(OTHER_PHASE, 0.0) + max(0.0, self.wall_s - sum(spent.values()))
        return spent


class Profiler:
    """Profiles steps first .. last of this rank: with torch's profiler, into `folder`/rank-NNN.json.gz, with the
    clock's spans by name (the pipeline's actions, collectives and their axis); or for nsys
    (--capture-range=cudaProfilerApi), by CUDA's start and stop alone."""

    def __init__(self, options: OperationsConfig, mesh: Mesh, folder: Path):
        o, rank, cuda = options, mesh.world.rank, mesh.device.type == "cuda"
        chosen = not o.profile_ranks or rank in o.profile_ranks
        self.on = o.profile and chosen and (cuda or o.use_pytorch_profiler)
        self.first, self.last = o.profile_step_start + 1, o.profile_step_end
        self.path, self._clock, self._running = folder / f"rank-{rank:03d}.json.gz", mesh.clock, False
        self._torch: Any = None
        self._cuda: Any = torch.cuda.cudart
        if self.on and o.use_pytorch_profiler:
            of = torch.profiler.ProfilerActivity
            shapes, stacks = o.pytorch_profiler_collect_shapes, o.pytorch_profiler_collect_callstack
            kinds = [of.CPU, *[of.CUDA] * cuda]
            self._torch = torch.profiler.profile(activities=kinds, record_shapes=shapes, with_stack=stacks)
        self.history: str | None = None
        if o.record_memory_history and chosen and cuda:
            path = Path(o.memory_snapshot_path)
            self.history = str(path.with_name(f"{path.stem}_{rank}{path.suffix}"))
            torch.cuda.memory._record_memory_history(max_entries=100_000)
        if rank == 0 and chosen and not cuda:
            if o.profile and not self.on:
                print_err("WARNING: profile does nothing on a CPU; add --use-pytorch-profiler")
            if o.record_memory_history:
                print_err("WARNING: record_memory_history needs CUDA; nothing is recorded")

    def before(self, step: int) -> None:
        if self.on and step == self.first:
            self._running = True
            self._torch.start() if self._torch is not None else self._cuda().cudaProfilerStart()
            self._clock.traced = self._torch is not None

    def after(self, step: int, logged: bool) -> None:
        if logged and self.history is not None:
            try:
                Path(self.history).unlink(missing_ok=True)  # CUDA would follow a link
                torch.cuda.memory._dump_snapshot(self.history)
            except OSError as error:
                print_err(f"WARNING: {self.history}: {error.strerror}; the memory history is no longer recorded")
                self.history = None
        if step == self.last:
            self.close()

    def close(self) -> None:
        """Also of a run that ends before the last step to profile."""
        if not self._running:
            return
        self._running = self._clock.traced = False
        if self._torch is None:
            self._cuda().cudaProfilerStop()
            return
        self._torch.stop()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.unlink(missing_ok=True)  # as above
            self._torch.export_chrome_trace(str(self.path))
        except (OSError, RuntimeError) as error:
            print_err(f"WARNING: {self.path}: {error}; the profile is lost")


class GarbageCollector:
    """With `manual`, Python's garbage is collected only after every `interval`-th step (0: none) and, with
    `around_evaluations`, around evaluations: ranks then pause at the same steps, and do not wait for each other."""

    def __init__(self, manual: bool = False, interval: int = 0, around_evaluations: bool = True):
        self.manual, self.interval, self.around = manual, interval, manual and around_evaluations

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Around all steps."""
        if self.manual:
            gc.disable()
            gc.collect()
        try:
            yield
        finally:
            if self.manual:
                gc.enable()

    def after(self, step: int) -> None:
        if self.manual and self.interval and step % self.interval == 0:
            gc.collect()

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        if self.around:
            gc.collect()
        yield
        if self.around:
            gc.collect(0)  # the evaluation's garbage


def write_timeline(pipeline: Pipeline, folder: Path) -> None:
    """Write timeline.json: when each pipeline rank did what; collective over the pipeline."""
    mesh = pipeline.mesh
    spans = [{"action": s.action, "start_s": s.start_s, "end_s": s.end_s} for s in pipeline.timeline or []]
    mine = json.dumps(spans)
    longest = all_reduce_(torch.tensor(len(mine), device=mesh.device), mesh.pp, dist.ReduceOp.MAX)
    texts = all_gather_strings(mine, mesh.pp, mesh.device, max_bytes=int(longest))
    if not mesh.world.is_first:
        return
    ranks = [{"pp_rank": rank, "spans": json.loads(text)} for rank, text in enumerate(texts)]
    head = {"schedule": pipeline.schedule, "pp": mesh.pp.size, "vpp": len(pipeline.stages)}
    microbatches = sum(s["action"].startswith("F") for s in spans) // len(pipeline.stages)
    try:
        write_atomically(folder / "timeline.json", json.dumps({**head, "microbatches": microbatches, "ranks": ranks}))
    except OSError as error:
        print_err(f"WARNING: {folder / 'timeline.json'}: {error.strerror}; training continues without it")
