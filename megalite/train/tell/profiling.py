"""Profiles of steps, the pipeline's timeline, and control over Python's garbage collector."""

import contextlib
import gc
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from megalite.config.console import complain
from megalite.config.options import OperationsConfig
from megalite.parallel.comm import all_reduce_, gather_texts
from megalite.parallel.mesh import Mesh
from megalite.pipeline.runtime import Pipeline
from megalite.train.tell.run_dir import write_atomically


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
        if self.on and o.use_pytorch_profiler:
            kinds = [torch.profiler.ProfilerActivity.CPU]
            kinds += [torch.profiler.ProfilerActivity.CUDA] if cuda else []
            self._torch = torch.profiler.profile(
                activities=kinds,
                record_shapes=o.pytorch_profiler_collect_shapes,
                with_stack=o.pytorch_profiler_collect_callstack,
            )
        self.history: str | None = None
        if o.record_memory_history and chosen and cuda:
            path = Path(o.memory_snapshot_path)
            self.history = str(path.with_name(f"{path.stem}_{rank}{path.suffix}"))
            torch.cuda.memory._record_memory_history(max_entries=100_000)
        if rank == 0 and chosen and not cuda:
            if o.profile and not self.on:
                complain("WARNING: profile does nothing on a CPU; add --use-pytorch-profiler")
            if o.record_memory_history:
                complain("WARNING: record_memory_history needs CUDA; nothing is recorded")

    def _cuda(self) -> Any:
        return torch.cuda.cudart()

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
                complain(f"WARNING: {self.history}: {error.strerror}; the memory history is no longer recorded")
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
            complain(f"WARNING: {self.path}: {error}; the profile is lost")


class Collector:
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
    texts = gather_texts(mine, mesh.pp, mesh.device, room=int(longest))
    if not mesh.world.is_first:
        return
    ranks = [{"pp_rank": rank, "spans": json.loads(text)} for rank, text in enumerate(texts)]
    head = {"schedule": pipeline.schedule, "pp": mesh.pp.size, "vpp": len(pipeline.stages)}
    microbatches = sum(s["action"].startswith("F") for s in spans) // len(pipeline.stages)
    try:
        write_atomically(folder / "timeline.json", json.dumps({**head, "microbatches": microbatches, "ranks": ranks}))
    except OSError as error:
        complain(f"WARNING: {folder / 'timeline.json'}: {error.strerror}; training continues without it")
