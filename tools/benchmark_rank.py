"""Time the steps of one system of tools/benchmark.py, in processes of its own. Each rank writes a file of results."""

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
LAYOUT_AXES = {  # axis of the mesh -> axis of the layout
    "etp": "tp",
    "pp_grad": "pp",
    "tied_embedding": "pp",
    "dp_cp": "dp",
    "dp_shard": "dp",
    "dp_replicate": "dp",
    "edp": "dp",
    "edp_shard": "dp",
    "edp_replicate": "dp",
}


def time_by_part(phases: dict[str, float]) -> tuple[dict[str, float], dict[str, float]]:
    """Return (part -> seconds, axis -> seconds of communication) for the seconds of each phase.

    The idle part is the time that a rank waits for messages of the pipeline, and for the slowest rank at the end of the
    step.

    >>> parts, axes = time_by_part({"forward": 2.0, "communication dp": 1.0, "bubble": 0.5, "agreement": 0.25})
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


def profile_phases(run: Any, num_steps: int) -> dict[str, float]:
    """Run further steps and return phase -> seconds, by the run's own timer (parallel/phase_timer.py).

    On a GPU the timer measures the compute stream, so communication is only the part that does not overlap. From now on
    micro-batches are not replayed as CUDA graphs, in which forward and backward cannot be separated.
    """
    from megalite.parallel.streams import synchronize
    from megalite.pipeline.cuda_graph import CudaGraphPipeline
    from megalite.training.train_step import train_step

    if isinstance(run.pipeline, CudaGraphPipeline):
        run.pipeline.enabled = False
    timer = run.mesh.phase_timer
    original_span = timer.span

    def span(phase: str, *name: object) -> Any:
        """Add the axis to the phase of a collective, as in "communication tp"."""
        if phase == "communication":
            axis = str(name[1])
            phase = f"{phase} {LAYOUT_AXES.get(axis, axis)}"
        return original_span(phase, *name)

    totals: dict[str, float] = {}
    timer.span = span
    try:
        for _ in range(num_steps):
            timer.start_step(run.mesh.device)
            train_step(run)
            timer.end_step()
            synchronize(run.mesh.device)
            for phase, seconds in timer.phase_seconds().items():
                totals[phase] = totals.get(phase, 0.0) + seconds
    finally:
        del timer.span
    return totals


def run_megalite(ranks: RankInfo, task: dict[str, Any]) -> None:
    """Measure megalite on one rank."""
    from megalite.kernels.dispatch import triton_installed
    from megalite.training.train_step import train_step
    from tools.bench.kernel_bench import KernelTimer, copy_rate

    losses: list[float] = []
    with build_run_from_task(ranks, task) as (config, run):
        device = run.mesh.device

        def step() -> None:
            losses.append(train_step(run).loss)

        steps = time_steps(step, device, task["warmup"], task["steps"])
        memory = peak_memory(device)
        parts, axes = time_by_part(profile_phases(run, max(2, task["steps"] // 2)))
        run.sync.wait_param_sync()
        results: dict[str, Any] = {
            "steps": steps,
            "losses": losses,
            "memory": memory,
            "parts": parts,
            "axes": axes,
            **run_facts(run, config, ranks),
        }
        # the results are written before each further measurement, which may fail
        write(task, ranks.rank, **results)
        if ranks.rank == 0 and (device.type == "cpu" or triton_installed()):  # COPIED_BYTES do not fit into caches
            results["copy_bytes_per_s"] = copy_rate(KernelTimer(device, 3, True), COPIED_BYTES) * 1e9
            write(task, ranks.rank, **results)
        if device.type == "cuda" and ranks.world_size > 1:
            write(task, ranks.rank, **results, timeline=profile_overlap(run, Path(task["output_dir"])))


def run_facts(run: Any, config: Any, ranks: RankInfo) -> dict[str, Any]:
    """Return the sizes of a step and facts about the machine.

    Only rank 0 has the peak FLOP/s, which on a CPU is that of one rank's threads.
    """
    import torch

    from megalite.config.options import padded_vocab_size
    from megalite.planning.device_peaks import find_peak
    from megalite.planning.layer_kinds import flops_per_token
    from megalite.training.logging.device_memory import total_memory

    model = config.model
    device = run.mesh.device
    batch_size = run.batch_sizes.at(0)
    vocab_size = padded_vocab_size(run.vocab_size, model.make_vocab_size_divisible_by, run.mesh.tp.size)
    peak = find_peak(device, run.pipeline.dtype, None, ranks.local_world_size) if ranks.rank == 0 else None
    return {
        "samples_per_step": batch_size,
        "tokens_per_step": batch_size * run.seq_length,
        "flops_per_step": flops_per_token(model, vocab_size) * batch_size * run.seq_length,
        "peak_tflops": peak.tflops if peak else None,
        "memory_there": total_memory(device),
        "vocab_size": run.vocab_size,
        "devices": ranks.world_size,
        "per_node": ranks.local_world_size,
        "threads": torch.get_num_threads(),
        "cores": cpu_count() if device.type == "cpu" else None,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
        "torch": torch.__version__,
    }


def profile_overlap(run: Any, directory: Path) -> dict[str, float]:
    """Return `overlapped_seconds` of a further step, or {} if torch's profiler fails, to keep the other results."""
    import torch

    from megalite.training.train_step import train_step

    activities = torch.profiler.ProfilerActivity
    if activities.CUDA not in torch.profiler.supported_activities():
        return {}
    trace = directory / f"timeline{run.mesh.world.rank}.json"
    try:
        profiler = torch.profiler.profile(activities=[activities.CPU, activities.CUDA])
        profiler.start()
        train_step(run)
        torch.cuda.synchronize(run.mesh.device)
        profiler.stop()
        profiler.export_chrome_trace(str(trace))
        return overlapped_seconds(json.loads(trace.read_text())["traceEvents"])
    except (AssertionError, OSError, RuntimeError, ValueError, KeyError) as error:
        print(f"no timeline: {type(error).__name__}: {error}", file=sys.stderr)
        return {}


def overlapped_seconds(events: list[dict[str, Any]]) -> dict[str, float]:
    """Return the seconds in which NCCL kernels ran, and the part of them in which other kernels ran, too.

    >>> kernel = lambda name, ts, dur: {"cat": "kernel", "name": name, "ts": ts, "dur": dur}
    >>> events = [kernel("ncclDevKernel_AllReduce", 0, 4e6), kernel("nccl", 1e6, 1e6), kernel("gemm", 3e6, 9e6)]
    >>> overlapped_seconds(events)
    {'communication_s': 4.0, 'hidden_s': 1.0}
    """
    edges = []  # (time in us, change of the number of running kernels, it is a kernel of NCCL)
    for event in events:
        if event.get("cat") == "kernel":
            is_nccl = "nccl" in event["name"].lower()
            edges += [(event["ts"], 1, is_nccl), (event["ts"] + event["dur"], -1, is_nccl)]
    running = {True: 0, False: 0}  # kernels of NCCL, other kernels
    previous = communication_us = overlapped_us = 0.0
    for time, change, is_nccl in sorted(edges):
        if running[True] > 0:
            communication_us += time - previous
            if running[False] > 0:
                overlapped_us += time - previous
        running[is_nccl] += change
        previous = time
    return {"communication_s": communication_us / 1e6, "hidden_s": overlapped_us / 1e6}


def main(task: dict[str, Any]) -> int:
    """Run the task of tools/bench/systems.py and return the exit code."""
    config, _ = cli.read(task["flags"], PRESETS)
    if config.parallel.device != "cpu":
        set_cuda_environment(config.parallel.tensor_model_parallel_size, Path(task["output_dir"]))
    if task["contender"] == "megalite":
        target = run_megalite
    else:
        from tools.bench.hf_baseline import run_baseline as target
    with safe_path():  # inductor starts `python -c`
        if task["nproc"] > 1:
            return launch_local(task["nproc"], target, (task,))
        return target(RankInfo(), task) or 0


if __name__ == "__main__":
    from tools import benchmark_rank  # under its own name, so that other processes can import what they run

    sys.exit(benchmark_rank.main(json.loads(sys.argv[1])))
