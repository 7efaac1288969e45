"""The parts of tools/gpu_report.py: the command, the time limit and the results of each.

A part is a command in a process of its own that writes files to a directory. The results of a part that is killed still
count. Parts are sorted by their value, so that the last ones are cut off if time runs out.
"""

import json
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tools.bench import gpu_report_tests
from tools.bench.gpu_report_runs import ABLATION_RUN_FLAGS, TINY_TIMING, TRAINING_RUNS
from tools.cli_common import read_json

TOOLS_DIR = Path(__file__).resolve().parent.parent
FUSED_KERNELS = "layer_norm,rms_norm,rope,swiglu,bias_gelu,dropout_add,cross_entropy,linear_cross_entropy"
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "message")
TINY_SLOWDOWN = 4  # of time limits, because times do not matter and machines for tests may be slow
TIMING_BY_RUN = {run.name: run.timing for run in TRAINING_RUNS}
NO_PLAN = "no plan for its memory could be made"
Result = dict[str, Any]


@dataclass(frozen=True)
class ReportSetting:
    """The machine and the sizes of the parts.

    Attributes:
        cpu: True for a dry run without a GPU.
        plans: the flags and the memory estimate of each training run, by gpu_report_probe.py.
        num_gpus: the number of GPUs.
        tiny: True for tiny sizes.
        shares_gpu: True if a GPU takes several processes at once.
        has_triton: True if Triton is installed.
    """

    cpu: bool
    plans: dict[str, Any]
    num_gpus: int = 1
    tiny: bool = False
    shares_gpu: bool = True
    has_triton: bool = True

    @property
    def device(self) -> str:
        """The type of the device, as in --device."""
        return "cpu" if self.cpu else "cuda"

    def num_jobs(self, max_jobs: int) -> int:
        """Return the number of processes to run at once."""
        if not self.shares_gpu:
            return 1
        cores = os.cpu_count() or 1
        return max(1, min(max_jobs, cores if self.tiny else cores // 2))


@dataclass(frozen=True)
class ReportPart:
    """One part of the report.

    Attributes:
        name: its name.
        limit_s: its time limit in seconds.
        command: returns the command for a directory and a number of seconds.
        read: returns the results in the directory, {} if there are none yet.
        skip: the reason why it cannot run here, if there is one.
    """

    name: str
    limit_s: float
    command: Callable[[Path, float], list[str]]
    read: Callable[[Path], Result]
    skip: str | None = None


def tool_command(program: str, *args: object) -> list[str]:
    """Return the command line of a program in tools/."""
    return [sys.executable, str(TOOLS_DIR / program), *map(str, args)]


def kernels_part(name: str, limit_s: float, flags: str, setting: ReportSetting) -> ReportPart:
    """Return a part that runs kernels.py with `flags`."""

    def command(directory: Path, seconds: float) -> list[str]:
        args = [*flags.split(), "--device", setting.device]
        if setting.tiny:
            args += ["--tiny", "--repeats", "1"]
        args += ["--seconds", str(max(5, seconds - 10)), "--json", str(directory / "kernels.json")]
        return tool_command("bench/kernels.py", *args)

    skip = None
    if not setting.has_triton and not setting.cpu:
        skip = "triton is not installed: all of it runs torch's kernels here"
    return ReportPart(name, limit_s, command, lambda directory: read_json(directory / "kernels.json"), skip)


def smoke_part(name: str, limit_s: float, setting: ReportSetting, num_gpus: int = 1) -> ReportPart:
    """Return a part that compares losses with a CPU's or, with several GPUs, those of layouts with one GPU's."""

    def command(directory: Path, seconds: float) -> list[str]:
        num_jobs = setting.num_jobs(6 if num_gpus == 1 else 3)
        args = ["--device", setting.device, "--gpus", num_gpus, "--jobs", num_jobs]
        if setting.tiny:
            args.append("--tiny")
        return tool_command("bench/gpu_report_smoke.py", directory, *args, "--seconds", seconds - 3)

    return ReportPart(name, limit_s, command, lambda directory: read_json(directory / "smoke.json"))


def nccl_part(limit_s: float, setting: ReportSetting) -> ReportPart:
    """Return a part that times collectives over all GPUs."""

    def command(directory: Path, seconds: float) -> list[str]:
        min_bytes, max_bytes = (1 << 12, 1 << 12) if setting.tiny else (1 << 20, 1 << 28)
        ranks = ["--device", setting.device, "--nproc", setting.num_gpus, "--json", directory / "nccl.json"]
        sizes = ["--min-bytes", min_bytes, "--max-bytes", max_bytes, "--factor", 16, "--kinds", *COLLECTIVES]
        return tool_command("benchmark_comm.py", *ranks, *sizes)

    return ReportPart("nccl", limit_s, command, lambda directory: read_json(directory / "nccl.json"))


def training_part(
    run_name: str, limit_s: float, setting: ReportSetting, layout: str = "", num_gpus: int = 1
) -> ReportPart:
    """Return a part that times the steps of a training run.

    Args:
        run_name: the name of a TrainingRun.
        limit_s: the time limit; most of it is needed to draw the weights, on one core.
        setting: the machine.
        layout: the flags of the parallel layout.
        num_gpus: the number of GPUs.
    """
    plan = setting.plans.get(run_name)

    def command(directory: Path, seconds: float) -> list[str]:
        assert plan is not None
        timing = TINY_TIMING if setting.tiny else TIMING_BY_RUN[run_name]
        args = ["--timeout", seconds - 10, "--json", directory / "training.json", "--nproc", num_gpus]
        device = ["--device", setting.device]
        return tool_command("benchmark.py", *timing.split(), *args, *plan["flags"], *device, *layout.split())

    def read(directory: Path) -> Result:
        return training_result(read_json(directory / "training.json"), plan or {})

    axes = [flag.removeprefix("--").partition("-")[0] for flag in layout.split()[::2]]
    name = "-".join([run_name, *axes])
    return ReportPart(f"train {name}", limit_s, command, read, NO_PLAN if plan is None else None)


def training_result(bench: Result, plan: Result) -> Result:
    """Return the values of the report from the results of tools/benchmark.py and the plan of the run."""
    runs = [run for row in bench.get("rows", []) for run in row["runs"]]
    if not runs:  # the output of the part has the reason
        return {}
    run = runs[-1]
    parts = {name: statistics.mean(rank[name] for rank in run["parts"]) for name in run["parts"][0]}
    total = sum(parts.values())
    tflops = run["flops_per_step"] / run["step_s"] / 1e12 / run["devices"]
    return {
        **{key: plan[key] for key in ("layers", "of_layers", "moments", "seq_length")},
        "flags": " ".join(plan["flags"]),
        "tokens_per_s": run["tokens_per_step"] / run["step_s"],
        "tflops": tflops,
        "mfu": tflops / run["peak_tflops"] if run["peak_tflops"] else None,
        "estimate": plan["estimate"],
        "parts": {name: seconds / total for name, seconds in parts.items()},
        "overhead": 1 - (parts["forward"] + parts["backward"]) / total,
        **{key: run.get(key) for key in ("tokens_per_step", "step_s", "peak_tflops", "memory", "losses", "timeline")},
    }


def ablations_part(name: str, limit_s: float, setting: ReportSetting) -> ReportPart:
    """Return a part that runs the ablations of this name on the training run of this name."""
    plan = setting.plans.get(name)

    def command(directory: Path, seconds: float) -> list[str]:
        assert plan is not None
        task = {
            "contender": "ablations",
            "nproc": 1,
            "group": name,
            "flags": [*ABLATION_RUN_FLAGS.split(), *plan["flags"], "--device", setting.device],
            "tiny": setting.tiny,
            "output_dir": str(directory),
            "seconds": seconds - 20,
            "plan": plan,
        }
        return tool_command("benchmark_rank.py", json.dumps(task))

    skip = NO_PLAN if plan is None else None
    return ReportPart(name, limit_s, command, lambda directory: read_json(directory / "ablations.json"), skip)


def tests_part(limit_s: float, setting: ReportSetting) -> ReportPart:
    """Return a part that runs the GPU tests."""
    num_jobs = 1 if setting.tiny else setting.num_jobs(8)

    def command(directory: Path, seconds: float) -> list[str]:
        return tool_command("bench/gpu_report_tests.py", directory, "--jobs", num_jobs)

    return ReportPart("tests", limit_s, command, gpu_report_tests.read)


def multi_gpu_parts(setting: ReportSetting) -> tuple[ReportPart, ReportPart, list[ReportPart]]:
    """Return the parts for several GPUs, skipped with one: losses of layouts, collectives, and training."""
    num_gpus = min(8, 1 << (setting.num_gpus.bit_length() - 1))
    tp, pp = "--tensor-model-parallel-size", "--pipeline-model-parallel-size"
    layouts = [  # with the number of GPUs that they need at least
        (f"{tp} {num_gpus}", 2),
        (f"{pp} {num_gpus}", 2),
        (f"--dp {num_gpus}", 2),
        (f"{tp} 2 {pp} 2 --dp {num_gpus // 4}", 4),
    ]
    if setting.tiny:
        layouts = [layouts[0], layouts[2]]

    def skip_if_below(min_gpus: int, part: ReportPart) -> ReportPart:
        if setting.num_gpus >= min_gpus:
            return part
        return replace(part, skip=f"needs {min_gpus} GPUs; torch sees {setting.num_gpus}")

    training = [
        skip_if_below(min_gpus, training_part("llama-2b", 75, setting, layout, num_gpus))
        for layout, min_gpus in layouts
    ]
    smoke = skip_if_below(2, smoke_part("layouts", 70, setting, max(2, num_gpus)))
    return smoke, skip_if_below(2, nccl_part(40, setting)), training


def list_parts(setting: ReportSetting) -> list[ReportPart]:
    """Return all parts, most valuable first."""
    kernel_flags = "--peers megalite triton cudnn flash"
    peer_flags = (
        f"--hidden-sizes 4096 --peers megalite torch compile liger --only {FUSED_KERNELS},grouped_matmul,gated_matmul"
    )
    tile_flags = (
        "--sweep --half backward --only rms_norm,add_rms_norm,layer_norm,add_layer_norm,bias_gelu --hidden-sizes 4096"
    )
    if setting.tiny:
        kernel_flags = "--peers megalite torch triton --only rms_norm,attention,adamw"
        peer_flags = "--only swiglu --peers megalite torch"
        tile_flags = "--sweep --half backward --only rms_norm --tiles 2"
    layouts, nccl, multi_gpu_training = multi_gpu_parts(setting)
    other_runs = {
        "gpt-1.3b-2048": 70,
        "gpt-1.3b-4096": 70,
        "llama3-8b-4096-mb4": 150,
        "gpt-125m-1024": 40,
        "gpt-125m-1024-graphs": 40,
        "qwen3-30b-a3b-4096": 200,
        "llama3-8b-4096-64": 240,
        "llama3-8b-4096-128": 300,
    }
    other_training = []
    if not setting.tiny:
        other_training = [training_part(name, limit_s, setting) for name, limit_s in other_runs.items()]
    parts = [
        smoke_part("smoke", 60, setting),
        layouts,
        training_part("llama3-8b-4096", 170, setting),
        nccl,
        *multi_gpu_training,
        tests_part(120, setting),
        kernels_part("kernels", 100, kernel_flags, setting),
        *other_training[:2],
        kernels_part("peers", 150, peer_flags, setting),
        *other_training[2:],
        ablations_part("ablations", 560, setting),
        ablations_part("ablations-mb4", 330, setting),
        ablations_part("ablations-moe", 330, setting),
        kernels_part("tiles", 560, tile_flags, setting),
    ]
    if setting.tiny:
        parts = [replace(part, limit_s=TINY_SLOWDOWN * part.limit_s) for part in parts]
    return parts
