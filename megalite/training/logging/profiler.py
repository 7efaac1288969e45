"""The profiler of some steps of a rank."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megalite.common.console import print_err
from megalite.config.options import OperationsConfig
from megalite.parallel.mesh import Mesh
from megalite.training.callbacks import Callback
from megalite.training.logging.time_breakdown import TimeBreakdown
from megalite.training.state import Run, StepResult


class Profiler(Callback):
    """A profiler of steps `first` to `last` of this rank.

    With torch's profiler it writes `directory`/rank-NNN.json.gz, which includes the spans of the phase timer (the
    pipeline's actions, and collectives with their axis). For nsys (--capture-range=cudaProfilerApi) it only calls
    CUDA's profiler start and stop. It also writes CUDA memory snapshots if they are enabled.
    Its own time counts as the phase "profiler" of `time_breakdown`.
    """

    def __init__(self, options: OperationsConfig, mesh: Mesh, directory: Path, time_breakdown: TimeBreakdown):
        rank, is_cuda = mesh.world.rank, mesh.device.type == "cuda"
        selected = not options.profile_ranks or rank in options.profile_ranks
        self.on = options.profile and selected and (is_cuda or options.use_pytorch_profiler)
        self.first = options.profile_step_start + 1
        self.last = options.profile_step_end
        self.path = directory / f"rank-{rank:03d}.json.gz"
        self._phase_timer = mesh.phase_timer
        self._time_breakdown = time_breakdown
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

    def on_train_step_start(self, run: Run) -> None:
        """Start profiling before the first step to profile."""
        with self._time_breakdown("profiler"):
            self.before(run.progress.step + 1)

    def on_log(self, run: Run, metrics: Mapping[str, Any]) -> None:
        """Write a memory snapshot at each log line."""
        if self.history is not None:
            with self._time_breakdown("profiler"):
                self.write_memory_snapshot()

    def on_train_step_end(self, run: Run, result: StepResult) -> None:
        """Write the profile after the last step to profile."""
        with self._time_breakdown("profiler"):
            if run.progress.step == self.last:
                self.close()

    def before(self, step: int) -> None:
        """Start profiling if `step` is the first step to profile."""
        if self.on and step == self.first:
            self._running = True
            if self._torch is not None:
                self._torch.start()
            else:
                self._cuda().cudaProfilerStart()
            self._phase_timer.traced = self._torch is not None

    def write_memory_snapshot(self) -> None:
        """Write a snapshot of CUDA's memory, if they are enabled; after a failed write there are no more."""
        if self.history is not None:
            try:
                Path(self.history).unlink(missing_ok=True)  # CUDA would follow a link
                torch.cuda.memory._dump_snapshot(self.history)
            except OSError as error:
                print_err(f"WARNING: {self.history}: {error.strerror}; the memory history is no longer recorded")
                self.history = None

    def close(self) -> None:
        """Stop profiling and write the profile, if it is still running."""
        if not self._running:
            return
        self._running = self._phase_timer.traced = False
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
