"""Steps under a profiler, drawn, and the garbage collector under control: what a run does around steps when asked."""

from __future__ import annotations

import contextlib
import gc
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from megalite.config.options import OperationsConfig
from megalite.parallel.comm import all_reduce_
from megalite.parallel.mesh import Mesh
from megalite.pipeline.runtime import Pipeline
from megalite.train.run_dir import complain, write_atomically


class Profiler:
    """Steps first .. last of this rank: torch's profiler, written to `folder`/rank-NNN.json.gz, with the clock's spans
    by name (the pipeline's actions, collectives and their axis), or, for nsys (--capture-range=cudaProfilerApi), only
    CUDA's own start and stop. On a CPU nsys has nothing to see: a warning."""

    def __init__(self, options: OperationsConfig, mesh: Mesh, folder: Path):
        o, rank, device = options, mesh.world.rank, mesh.device
        chosen = not o.profile_ranks or rank in o.profile_ranks
        self.on = o.profile and chosen
        self.first, self.last = o.profile_step_start + 1, o.profile_step_end
        self.path, self.device, self._running = folder / f"rank-{rank:03d}.json.gz", device, False
        self._clock = mesh.clock
        self._torch: Any = None
        if self.on and o.use_pytorch_profiler:
            kinds = [torch.profiler.ProfilerActivity.CPU]
            kinds += [torch.profiler.ProfilerActivity.CUDA] if device.type == "cuda" else []
            self._torch = torch.profiler.profile(
                activities=kinds,
                record_shapes=o.pytorch_profiler_collect_shapes,
                with_stack=o.pytorch_profiler_collect_callstack,
            )
        elif self.on and device.type != "cuda":
            self.on = False
            if rank == 0:
                complain("WARNING: profile does nothing on a CPU; add --use-pytorch-profiler")
        self.history = o.memory_snapshot_path if o.record_memory_history and chosen else None
        if self.history is not None and device.type != "cuda":
            self.history = None
            if rank == 0:
                complain("WARNING: record_memory_history needs CUDA; nothing is recorded")
        if self.history is not None:
            path = Path(self.history)
            self.history = str(path.with_name(f"{path.stem}_{rank}{path.suffix}"))
            torch.cuda.memory._record_memory_history(max_entries=100_000)

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
                torch.cuda.memory._dump_snapshot(self.history)
            except OSError as error:
                complain(f"WARNING: {self.history}: {error.strerror}; the memory history is not recorded any more")
                self.history = None
        if step == self.last:
            self.stop()

    def stop(self) -> None:
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
            self._torch.export_chrome_trace(str(self.path))
        except (OSError, RuntimeError) as error:
            complain(f"WARNING: {self.path}: {error}; the profile is lost")


class Collector:
    """Python's garbage collector: its own, or (`manual`) only after every `interval`-th step (0: none) and, with
    `around_evaluations`, there. Ranks that collect at the same steps do not wait for each other's pauses."""

    def __init__(self, manual: bool = False, interval: int = 0, around_evaluations: bool = True):
        self.manual, self.interval, self.around = manual, interval, around_evaluations

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        """Around all steps."""
        if not self.manual:
            yield
            return
        gc.disable()
        gc.collect()
        try:
            yield
        finally:
            gc.enable()

    def after(self, step: int) -> None:
        if self.manual and self.interval and step % self.interval == 0:
            gc.collect()

    @contextlib.contextmanager
    def evaluation(self) -> Iterator[None]:
        collects = self.manual and self.around
        if collects:
            gc.collect()
        yield
        if collects:
            gc.collect(0)  # what the evaluation has made


def write_timeline(pipeline: Pipeline, folder: Path) -> None:
    """timeline.json: what each pipeline rank did when; collective, through files beside it (no object travels)."""
    spans, mesh = pipeline.timeline or [], pipeline.mesh
    write = mesh.dp.is_first and mesh.tp.is_first
    part: Callable[[int], Path] = lambda rank: folder / f".timeline-{rank}.json"  # noqa: E731
    try:
        if write:
            rows = [{"action": s.action, "start_s": s.start_s, "end_s": s.end_s} for s in spans]
            write_atomically(part(mesh.pp.rank), json.dumps(rows))
    except OSError as error:
        complain(f"WARNING: {part(mesh.pp.rank)}: {error.strerror}; training continues without timeline.json")
    all_reduce_(torch.zeros((), device=mesh.device), mesh.world)  # every part is there
    if not mesh.world.is_first:
        return
    try:
        ranks = []
        for rank in range(mesh.pp.size):
            ranks.append({"pp_rank": rank, "spans": json.loads(part(rank).read_text(encoding="utf-8"))})
            part(rank).unlink()
        head = {"schedule": pipeline.schedule, "pp": mesh.pp.size, "vpp": len(pipeline.stages)}
        microbatches = sum(s["action"].startswith("F") for s in ranks[0]["spans"]) // len(pipeline.stages)
        write_atomically(folder / "timeline.json", json.dumps({**head, "microbatches": microbatches, "ranks": ranks}))
    except OSError as error:
        complain(f"WARNING: {folder / 'timeline.json'}: {error.strerror}; training continues without it")
