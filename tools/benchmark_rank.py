"""A contender of tools/benchmark.py, in processes of its own: steps are timed, a file per rank tells the result."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from megalite.config import cli  # noqa: E402
from megalite.models.families import PRESETS  # noqa: E402
from megalite.parallel.launch import Ranks, prepare_cuda  # noqa: E402
from megalite.parallel.local_ranks import start_local  # noqa: E402
from tools.bench.gpu_report_parts import write_whole  # noqa: E402

PARTS = ("data", "forward", "backward", "optimizer", "communication", "idle", "other")


@dataclass
class Stopwatch:
    """Seconds by part, each exclusive of the parts inside it. `synchronise` first waits for the device."""

    synchronise: Callable[[], None]
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    stack: list[str] = field(default_factory=list)
    since: float = 0.0
    wrapped: list[tuple[Any, str, Any]] = field(default_factory=list)

    def _turn(self) -> None:
        self.synchronise()
        now = time.perf_counter()
        if self.stack:
            self.seconds[self.stack[-1]] += now - self.since
        self.since = now

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        self._turn()
        self.stack.append(name)
        try:
            yield
        finally:
            self._turn()
            self.stack.pop()

    def wrap(self, owner: Any, name: str, part: str | Callable[[], str]) -> None:
        """Count all calls of owner.name for `part`."""
        real = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            with self.part(part if isinstance(part, str) else part()):
                return real(*args, **kwargs)

        setattr(owner, name, call)
        self.wrapped.append((owner, name, real))

    def unwrap(self) -> None:
        for owner, name, real in reversed(self.wrapped):
            setattr(owner, name, real)


def watch(run: Any, synchronise: Callable[[], None]) -> Stopwatch:
    """A stopwatch on the parts of `run`'s steps. Only for a process that ends soon: methods are replaced. Micro-batches
    that were replayed as a graph run eagerly from now on: in a replay forward and backward are one."""
    import torch.distributed as dist

    from megalite.nn.later import Later
    from megalite.parallel import comm
    from megalite.pipeline.graphed import GraphedPipeline

    stopwatch = Stopwatch(synchronise)
    if isinstance(run.pipeline, GraphedPipeline):
        run.pipeline.replays = False

    def waiting() -> str:  # messages between stages are waited for outside of collectives
        return "communication" if "communication" in stopwatch.stack else "idle"

    stopwatch.wrap(run.data, "get", "data")
    stopwatch.wrap(run.pipeline, "step", "idle")  # what is left of it is messages and gaps
    stopwatch.wrap(run.pipeline, "_forward", "forward")
    stopwatch.wrap(run.pipeline, "_backward", "backward")
    stopwatch.wrap(Later, "run", "backward")
    for owner, names in ((run.optimizer, ("step", "local_norm_sq")), (run.buffer, ("zero_grad",))):
        for name in names:
            stopwatch.wrap(owner, name, "optimizer")
    for owner, name in ((run.buffer, "finish"), (run.buffer, "gather"), (run.buffer.param_gather, "_finish")):
        stopwatch.wrap(owner, name, "communication")
    stopwatch.wrap(comm.Pending, "wait", "communication")
    stopwatch.wrap(dist.Work, "wait", waiting)
    return stopwatch


def megalite_rank(ranks: Ranks, task: dict[str, Any]) -> None:
    import datetime

    import torch

    from megalite.config.options import padded_vocab_size
    from megalite.models.flops import train_flops_per_token
    from megalite.parallel.launch import process_group
    from megalite.train.memory import keep_freed_memory
    from megalite.train.peak_rates import find_peak
    from megalite.train.run import choose_device
    from megalite.train.setup import build_run
    from megalite.train.step import train_step

    config, _ = cli.read(task["flags"], PRESETS)
    wanted = choose_device(config.parallel.device)
    if wanted == "cpu":
        keep_freed_memory()  # as pretrain() does
    with process_group(ranks, device=wanted, startup_timeout=datetime.timedelta(minutes=5)) as device:
        run = build_run(config, ranks, device)

        def synchronise() -> None:
            if device.type == "cuda":
                torch.cuda.synchronize(device)

        steps, losses = [], []
        for _ in range(task["warmup"] + task["steps"]):
            synchronise()
            begin = time.perf_counter()
            losses.append(train_step(run).loss)
            synchronise()
            steps.append(time.perf_counter() - begin)
        memory = peak_memory(device)
        stopwatch = watch(run, synchronise)
        for _ in range(max(2, task["steps"] // 2)):
            with stopwatch.part("other"):
                train_step(run)
        run.buffer.wait_gather()
        stopwatch.unwrap()
        m = config.model
        padded = padded_vocab_size(run.vocab_size, m.make_vocab_size_divisible_by, run.mesh.tp.size)
        tokens = run.batch_sizes.at(0) * run.seq_length
        peak = find_peak(device, run.pipeline.dtype, None) if ranks.rank == 0 else None
        facts: dict[str, Any] = dict(
            steps=steps[task["warmup"] :],
            losses=losses,
            memory=memory,
            parts=stopwatch.seconds,
            tokens_per_step=tokens,
            flops_per_step=train_flops_per_token(m, run.seq_length, padded) * tokens,
            peak_tflops=peak.tflops if peak else None,
            devices=ranks.world,  # on CPU the peak is that of one rank's threads
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
            torch=torch.__version__,
        )
        write(task, ranks.rank, **facts)
        if device.type == "cuda" and ranks.world > 1:  # last: what is measured stays, whatever becomes of the profiler
            write(task, ranks.rank, **facts, timeline=profile(run, Path(task["folder"])))
        run.close()


def profile(run: Any, folder: Path) -> dict[str, float]:
    """`hidden` of a further step, by torch's profiler; {} where it cannot: what was measured before is worth more."""
    import torch

    from megalite.train.step import train_step

    kinds, trace = torch.profiler.ProfilerActivity, folder / f"timeline{run.mesh.world.rank}.json"
    if kinds.CUDA not in torch.profiler.supported_activities():
        return {}
    try:
        profiler = torch.profiler.profile(activities=[kinds.CPU, kinds.CUDA])
        profiler.start()
        train_step(run)
        torch.cuda.synchronize(run.mesh.device)
        profiler.stop()
        profiler.export_chrome_trace(str(trace))
        return hidden(json.loads(trace.read_text())["traceEvents"])
    except (AssertionError, OSError, RuntimeError, ValueError, KeyError) as error:  # the same on every rank, or its end
        print(f"no timeline: {type(error).__name__}: {error}", file=sys.stderr)
        return {}


def hidden(events: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds in which a kernel of NCCL ran, and of these those in which one that computes ran too.

    >>> kernel = lambda name, ts, dur: {"cat": "kernel", "name": name, "ts": ts, "dur": dur}
    >>> found = hidden([kernel("ncclDevKernel_AllReduce", 0, 4e6), kernel("nccl", 1e6, 1e6), kernel("gemm", 3e6, 9e6)])
    >>> found["communication_s"], found["hidden_s"]
    (4.0, 1.0)
    """
    edges = []
    for event in events:
        if event.get("cat") == "kernel":
            kind = "nccl" in event["name"].lower()
            edges += [(event["ts"], 1, kind), (event["ts"] + event["dur"], -1, kind)]
    running, since, whole, both = {True: 0, False: 0}, 0.0, 0.0, 0.0
    for at, change, kind in sorted(edges):
        whole += (at - since) * (running[True] > 0)
        both += (at - since) * (running[True] > 0 and running[False] > 0)
        running[kind] += change
        since = at
    return {"communication_s": whole / 1e6, "hidden_s": both / 1e6}


def peak_memory(device: Any) -> int:
    """Bytes of this rank."""
    import resource

    import torch

    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def write(task: dict[str, Any], rank: int, **facts: Any) -> None:
    write_whole(Path(task["folder"]) / f"rank{rank:05d}.json", facts)


def main(task: dict[str, Any]) -> int:
    config, _ = cli.read(task["flags"], PRESETS)
    if config.parallel.device != "cpu":
        prepare_cuda(config.parallel.tensor_model_parallel_size, Path(task["folder"]))
    if task["contender"] == "megalite":
        target = megalite_rank
    else:
        from tools.bench.peer import peer_rank as target
    if task["nproc"] > 1:
        return start_local(task["nproc"], target, (task,))
    target(Ranks(), task)
    return 0


if __name__ == "__main__":
    from tools import benchmark_rank  # by its own name, so that other processes can import what they run

    sys.exit(benchmark_rank.main(json.loads(sys.argv[1])))
