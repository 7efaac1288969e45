"""A contender of tools/benchmark.py, in processes of its own: steps are timed, a file per rank tells the result."""

import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from megalite.common.environment import safe_path
from megalite.config import cli
from megalite.launch.local_launcher import cpu_count, launch_local
from megalite.launch.process_group import set_cuda_environment
from megalite.launch.rank_info import RankInfo
from megalite.models.families import PRESETS
from tools.bench.systems import build_run_from_task, peak_memory, time_steps, write

COPIED_BYTES = 1 << 27
PARTS = ("data", "forward", "backward", "optimizer", "communication", "idle", "other")
AXES = {"etp": "tp", "pp_grad": "pp", "tied_embedding": "pp"} | dict.fromkeys(
    ("dp_cp", "dp_shard", "dp_replicate", "edp", "edp_shard", "edp_replicate"), "dp"
)  # axis of the mesh -> the one of a layout that it belongs to


def parts_of(phases: dict[str, float]) -> tuple[dict[str, float], dict[str, float]]:
    """Seconds by PARTS, and of communication by axis. Idle: the wait for a message of the pipeline, and that for the
    last rank at the step's agreement.

    >>> parts, axes = parts_of({"forward": 2.0, "communication dp": 1.0, "bubble": 0.5, "agreement": 0.25})
    >>> parts["communication"], parts["idle"], axes
    (1.0, 0.75, {'dp': 1.0})
    """
    parts: dict[str, float] = {name: 0.0 for name in PARTS}
    axes: dict[str, float] = {}
    for phase, seconds in phases.items():
        name, _, axis = phase.partition(" ")
        if axis:
            axes[axis] = axes.get(axis, 0.0) + seconds
        if name in ("bubble", "agreement"):
            name = "idle"
        parts[name if name in parts else "other"] += seconds
    return parts, axes


def timed_steps(run: Any, steps: int) -> dict[str, float]:
    """Seconds by phase of further steps, by the run's own clock (parallel/phase_timer.py): on a GPU of its stream, so
    that communication is what nothing hides. Micro-batches that were replayed as a graph run eagerly from now on: in a
    replay forward and backward are one."""
    from megalite.parallel.streams import synchronize
    from megalite.pipeline.cuda_graph import CudaGraphPipeline
    from megalite.training.train_step import train_step

    if isinstance(run.pipeline, CudaGraphPipeline):
        run.pipeline.enabled = False
    clock, spent = run.mesh.phase_timer, {}
    real = clock.span

    def span(phase: str, *name: object) -> Any:
        """Communication is a phase by its axis, as "communication tp"."""
        axis = str(name[1]) if phase == "communication" else ""
        return real(f"{phase} {AXES.get(axis, axis)}" if axis else phase, *name)

    clock.span = span
    try:
        for _ in range(steps):
            clock.start_step(run.mesh.device)
            train_step(run)
            clock.end_step()
            synchronize(run.mesh.device)
            for phase, seconds in clock.phase_seconds().items():
                spent[phase] = spent.get(phase, 0.0) + seconds
    finally:
        del clock.span
    return spent


def megalite_rank(ranks: RankInfo, task: dict[str, Any]) -> None:
    from megalite.training.train_step import train_step
    from tools.bench.kernel_bench import KernelTimer, copy_rate

    losses: list[float] = []
    with build_run_from_task(ranks, task) as (config, run):
        device = run.mesh.device
        step = lambda: losses.append(train_step(run).loss)  # noqa: E731
        steps = time_steps(step, device, task["warmup"], task["steps"])
        memory = peak_memory(device)
        parts, axes = parts_of(timed_steps(run, max(2, task["steps"] // 2)))
        run.buffer.wait_param_sync()
        facts: dict[str, Any] = dict(steps=steps, losses=losses, memory=memory, parts=parts, axes=axes)
        facts |= facts_of(run, config, ranks)
        write(task, ranks.rank, **facts)
        if ranks.rank == 0:  # of memory that is beyond the caches; what is measured stays, whatever becomes of it
            facts["copy_bytes_per_s"] = copy_rate(KernelTimer(device, 3, True), COPIED_BYTES) * 1e9
            write(task, ranks.rank, **facts)
        if device.type == "cuda" and ranks.world_size > 1:  # last, as the copy
            write(task, ranks.rank, **facts, timeline=profile(run, Path(task["folder"])))


def facts_of(run: Any, config: Any, ranks: RankInfo) -> dict[str, Any]:
    """The sizes of a step and the machine. Rank 0 alone knows the peak; on a CPU it is that of one rank's threads."""
    import torch

    from megalite.config.options import padded_vocab_size
    from megalite.planning.cluster import find_peak
    from megalite.planning.layer_kinds import flops_per_token
    from megalite.training.logging.device_memory import total_memory

    m, device, size = config.model, run.mesh.device, run.batch_sizes.at(0)
    padded = padded_vocab_size(run.vocab_size, m.make_vocab_size_divisible_by, run.mesh.tp.size)
    peak = find_peak(device, run.pipeline.dtype, None, ranks.local_world_size) if ranks.rank == 0 else None
    return dict(
        samples_per_step=size,
        tokens_per_step=size * run.seq_length,
        flops_per_step=flops_per_token(m, padded) * size * run.seq_length,
        peak_tflops=peak.tflops if peak else None,
        memory_there=total_memory(device),
        vocab_size=run.vocab_size,
        devices=ranks.world_size,
        per_node=ranks.local_world_size,
        threads=torch.get_num_threads(),
        cores=cpu_count() if device.type == "cpu" else None,
        device=torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        torch=torch.__version__,
    )


def profile(run: Any, folder: Path) -> dict[str, float]:
    """`hidden` of a further step, by torch's profiler; {} where it cannot: what was measured before is worth more."""
    import torch

    from megalite.training.train_step import train_step

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
    running = {True: 0, False: 0}  # communication, other kernels
    since = whole = both = 0.0
    for at, change, kind in sorted(edges):
        if running[True] > 0:
            whole += at - since
            if running[False] > 0:
                both += at - since
        running[kind] += change
        since = at
    return {"communication_s": whole / 1e6, "hidden_s": both / 1e6}


def main(task: dict[str, Any]) -> int:
    config, _ = cli.read(task["flags"], PRESETS)
    if config.parallel.device != "cpu":
        set_cuda_environment(config.parallel.tensor_model_parallel_size, Path(task["folder"]))
    if task["contender"] == "megalite":
        target = megalite_rank
    elif task["contender"] == "ablations":
        from tools.bench.ablations import run_ablations as target
    else:
        from tools.bench.hf_baseline import run_baseline as target
    with safe_path():  # inductor starts `python -c`
        if task["nproc"] > 1:
            return launch_local(task["nproc"], target, (task,))
        return target(RankInfo(), task) or 0


if __name__ == "__main__":
    from tools import benchmark_rank  # by its own name, so that other processes can import what they run

    sys.exit(benchmark_rank.main(json.loads(sys.argv[1])))
