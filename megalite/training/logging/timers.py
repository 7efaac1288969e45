"""Timing of a rank: time breakdown by phase, Megatron-LM's timers, profiles, the pipeline's timeline; GC control.

`TimeBreakdown` divides the wall time into phases. Start-up, evaluations, saves and the wait for data are always
measured. The phases within a step are measured in some steps only (parallel/phase_timer.py), and their shares are
applied to the steps that follow: the first TIMED_FIRST_STEPS of a process, then one of TIMED_EVERY, and each step after
a save. This never waits for a device, and ranks communicate only once, at the end.

`Timers` have Megatron-LM's names and levels:

level 0  evaluate, save-checkpoint
level 1  also the parts of a step; ranks wait for each other and for their devices at each timer, which costs time
level 2  also the micro-batches: forward-compute and backward-compute, without the wait for a neighbor's message
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

from megalite.common.console import print_err
from megalite.common.safe_open import write_atomically
from megalite.config.options import OperationsConfig
from megalite.parallel.comm import all_gather_strings, all_reduce_
from megalite.parallel.mesh import Mesh
from megalite.parallel.phase_timer import OTHER_PHASE
from megalite.parallel.streams import synchronize
from megalite.pipeline.runtime import Pipeline, TimedAction

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
        """Return the names of the timers within a step that are measured."""
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


class TimeBreakdown:
    """The wall time of a process, divided into PHASES.

    Args:
        start: The start of the process, by time.perf_counter(). The time until `end_startup` is the phase "start-up".

    Attributes:
        recent: The seconds by phase of the last WINDOW timed steps.
    """

    def __init__(self, mesh: Mesh, start: float):
        self._mesh = mesh
        self._clock = mesh.clock
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
        """Return the seconds since the start."""
        return time.perf_counter() - self._start

    @contextlib.contextmanager
    def __call__(self, phase: str) -> Iterator[None]:
        """Add the time within the context to a phase outside of steps."""
        start = time.perf_counter()
        yield
        self._seconds[phase] += time.perf_counter() - start
        if phase == "checkpoint":  # the next step may wait for the rest of the save, so it is timed
            self._after_save = True

    def before_step(self) -> None:
        """Start a step; decides whether it is timed."""
        self._steps += 1
        if self._after_save or self._steps <= TIMED_FIRST_STEPS or self._steps % TIMED_EVERY == 0:
            self._assign_to_phases()
            self._after_save = False
            self._clock.start_step(self._mesh.device)

    def after_step(self, data_s: float, step_s: float) -> None:
        """Add a step of `step_s` seconds, including `data_s` seconds of waiting for data."""
        if self._clock.timed:
            self._clock.end_step()
        self._seconds["data"] += data_s
        self._unassigned_s += step_s - data_s

    def _assign_to_phases(self) -> None:
        """Divide the time of the last timed step, and of the steps after it, among the phases."""
        spent = self._clock.phase_seconds()
        if spent:
            self.recent.append(dict(spent))
        spent.pop("data", None)
        save_wait_s = spent.pop("checkpoint", 0.0)
        if "agreement" in spent:  # the step's all-reduce over all ranks, in which they wait for the last one
            wait_phase = "communication" if self._mesh.pp.size == 1 else "bubble"
            spent[wait_phase] = spent.get(wait_phase, 0.0) + spent.pop("agreement")
        if total := sum(spent.values()):
            self._shares = {phase: seconds / total for phase, seconds in spent.items()}
        self._seconds["checkpoint"] += save_wait_s
        for phase, share in self._shares.items():
            self._seconds[phase] += share * (self._unassigned_s - save_wait_s)
        self._unassigned_s = 0.0

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


class Profiler:
    """A profiler of steps `first` to `last` of this rank.

    With torch's profiler it writes `directory`/rank-NNN.json.gz, which includes the spans of the phase timer (the
    pipeline's actions, and collectives with their axis). For nsys (--capture-range=cudaProfilerApi) it only calls
    CUDA's profiler start and stop. It also writes CUDA memory snapshots if they are enabled.
    """

    def __init__(self, options: OperationsConfig, mesh: Mesh, directory: Path):
        rank, is_cuda = mesh.world.rank, mesh.device.type == "cuda"
        selected = not options.profile_ranks or rank in options.profile_ranks
        self.on = options.profile and selected and (is_cuda or options.use_pytorch_profiler)
        self.first = options.profile_step_start + 1
        self.last = options.profile_step_end
        self.path = directory / f"rank-{rank:03d}.json.gz"
        self._clock = mesh.clock
        self._running = False
        self._torch: Any = None
        self._cuda: Any = torch.cuda.cudart
        if self.on and options.use_pytorch_profiler:
            activities = [torch.profiler.ProfilerActivity.CPU]
            if is_cuda:
                activities.append(torch.profiler.ProfilerActivity.CUDA)
            self._torch = torch.profiler.profile(
                activities=activities,
                record_shapes=options.pytorch_profiler_collect_shapes,
                with_stack=options.pytorch_profiler_collect_callstack,
            )
        self.history: str | None = None  # path of the memory snapshot
        if options.record_memory_history and selected and is_cuda:
            path = Path(options.memory_snapshot_path)
            self.history = str(path.with_name(f"{path.stem}_{rank}{path.suffix}"))
            torch.cuda.memory._record_memory_history(max_entries=100_000)
        if rank == 0 and selected and not is_cuda:
            if options.profile and not self.on:
                print_err("WARNING: profile does nothing on a CPU; add --use-pytorch-profiler")
            if options.record_memory_history:
                print_err("WARNING: record_memory_history needs CUDA; nothing is recorded")

    def before(self, step: int) -> None:
        """Start profiling if `step` is the first step to profile."""
        if self.on and step == self.first:
            self._running = True
            if self._torch is not None:
                self._torch.start()
            else:
                self._cuda().cudaProfilerStart()
            self._clock.traced = self._torch is not None

    def after(self, step: int, logged: bool) -> None:
        """Write a memory snapshot if the step was logged, and the profile after the last step."""
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
        """Stop profiling and write the profile, if it is still running."""
        if not self._running:
            return
        self._running = self._clock.traced = False
        if self._torch is None:
            self._cuda().cudaProfilerStop()
            return
        self._torch.stop()
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.unlink(missing_ok=True)  # torch would follow a link
            self._torch.export_chrome_trace(str(self.path))
        except (OSError, RuntimeError) as error:
            print_err(f"WARNING: {self.path}: {error}; the profile is lost")


class GarbageCollector:
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

    def after(self, step: int) -> None:
        """Collect garbage after `step`, if it is due."""
        if self.manual and self.interval and step % self.interval == 0:
            gc.collect()

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        """Collect garbage before and after an evaluation, if that is enabled."""
        if self.around:
            gc.collect()
        yield
        if self.around:
            gc.collect(0)  # the evaluation's garbage


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
