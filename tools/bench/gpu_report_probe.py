"""Examine the machine for tools/gpu_report.py, and find how many layers of each model fit on its GPU.

This is a process of its own, so that the report's process holds no memory of the GPU.
"""

import os
import platform
import re
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent))

import torch

from megalite.config import cli
from megalite.models.families import PRESETS
from megalite.planning.memory import rank_memory
from megalite.planning.run_plan import make_run_plan
from tools.bench.gpu_report_runs import TINY_LLAMA, TRAINING_RUNS
from tools.cli_common import write_json

MOCK_DATA_FLAGS = "--mock-data --train-iters 1000 --eval-iters 0 --lr 1e-4 --lr-decay-style constant"
BF16_MOMENTS = ["--exp-avg-dtype", "bf16", "--exp-avg-sq-dtype", "bf16"]
# fraction of the GPU's memory for a run; the rest is needed by the driver, libraries and gaps of the allocator
USABLE_MEMORY = 0.93
MIN_FREE_MEMORY = 0.9  # fraction below which other programs use the GPU
MAX_UTILIZATION = 5  # percent, of an idle GPU
QUERY = (
    "name",
    "driver_version",
    "compute_mode",
    "mig.mode.current",
    "ecc.errors.uncorrected.volatile.total",
    "utilization.gpu",
    "memory.used",
    "temperature.gpu",
    "power.limit",
    "power.default_limit",
)


def facts() -> dict[str, Any]:
    """Return the versions of the software, and the names and sizes of the hardware."""
    machine: dict[str, Any] = {
        "python": platform.python_version(),
        "machine": platform.platform(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
    }
    for name in ("triton", "numpy", "pytest"):
        try:
            machine[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            machine[name] = None
    machine["device"] = "CPU"
    machine["memory"] = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    machine["gpus"] = 0
    if not torch.cuda.is_available():
        try:
            torch.cuda.init()
        except (AssertionError, RuntimeError) as error:  # its message has the reason
            machine["why"] = " ".join(str(error).split())
        return machine
    properties = torch.cuda.get_device_properties(0)
    num_gpus = torch.cuda.device_count()
    machine["device"] = properties.name
    machine["memory"] = properties.total_memory
    machine["gpus"] = num_gpus
    machine["cudnn"] = torch.backends.cudnn.version()
    machine["capability"] = f"{properties.major}.{properties.minor}"
    machine["free"] = min(torch.cuda.mem_get_info(gpu)[0] for gpu in range(num_gpus))
    machine["gpu_status"] = query_gpus()
    return machine


def query_gpus(query: tuple[str, ...] = QUERY) -> list[dict[str, str]]:
    """Return nvidia-smi's values of `query` for each GPU, or nothing if it fails."""
    command = ["nvidia-smi", f"--query-gpu={','.join(query)}", "--format=csv,noheader,nounits"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return []
    lines = result.stdout.splitlines() if result.returncode == 0 else []
    return [dict(zip(query, map(str.strip, line.split(",")), strict=False)) for line in lines if line.strip()]


def warnings_of(machine: dict[str, Any]) -> list[str]:
    """Return the reasons why results of this machine mean less than usual, or why some parts cannot run."""
    warnings = []
    if machine["triton"] is None:
        warnings.append("triton is not installed: everything runs torch's kernels")
    memory = machine["memory"]
    free = machine.get("free", memory)
    if free < MIN_FREE_MEMORY * memory:
        used = (memory - free) / 2**30
        warnings.append(f"others hold {used:.1f} GiB of a GPU's memory: it is not quiet")
    for number, gpu in enumerate(machine.get("gpu_status", [])):
        warnings += [f"GPU {number} {text}" for text in _gpu_warnings(gpu)]
    return warnings


def _gpu_warnings(gpu: dict[str, str]) -> list[str]:
    warnings = []
    if gpu.get("mig.mode.current") == "Enabled" or "MIG" in gpu.get("name", ""):
        warnings.append("is divided (MIG): rates are those of a slice, goals those of a complete GPU")
    if gpu.get("ecc.errors.uncorrected.volatile.total", "0") not in ("0", "[N/A]", "N/A"):
        warnings.append("has uncorrected memory errors (ECC): no result can be trusted")
    utilization = gpu.get("utilization.gpu", "0")
    if utilization.isdigit() and int(utilization) > MAX_UTILIZATION:
        warnings.append(f"is {utilization} % busy with the work of others")
    compute_mode = gpu.get("compute_mode", "Default")
    if compute_mode not in ("Default", "[N/A]"):
        warnings.append(f"takes one process at a time ({compute_mode}): parts do not share it")
    limit, default_limit = gpu.get("power.limit", ""), gpu.get("power.default_limit", "")
    are_numbers = all(re.fullmatch(r"[\d.]+", text) for text in (limit, default_limit))
    if are_numbers and float(limit) < float(default_limit):
        warnings.append(f"may take {limit} W of its {default_limit}: its clock is lower under load")
    return warnings


def gpu_self_test() -> None:
    """Do a small computation on every GPU. Raises RuntimeError if a result is wrong or CUDA fails."""
    expected = 1104700047360.0
    for gpu in range(torch.cuda.device_count() or 1):
        x = torch.arange(4096.0, device=f"cuda:{gpu}").view(64, 64)
        total = (x @ x).sum().item()
        if not abs(total / expected - 1) < 1e-3:
            raise RuntimeError(f"GPU {gpu} computes {total:g} in place of {expected:g}")


def fit_layers_to_memory(flags: list[str], memory: float) -> dict[str, Any]:
    """Return the plan of a run with as many layers as fit by the memory estimate, and at least one.

    Moments are in fp32 if all layers fit with them, otherwise in bf16.
    """
    config, _ = cli.read([*MOCK_DATA_FLAGS.split(), *flags], PRESETS)
    num_layers, vocab_size = config.model.num_layers, config.data.vocab_size
    assert num_layers and vocab_size
    no_flags: list[str] = []
    attempts = [(num_layers, no_flags), *((n, BF16_MOMENTS) for n in range(num_layers, 0, -1))]
    for layers, moment_flags in attempts:
        run_flags = [*flags, "--num-layers", str(layers), *moment_flags]
        config, _ = cli.read([*MOCK_DATA_FLAGS.split(), *run_flags], PRESETS)
        (estimate,) = rank_memory(make_run_plan(config, 1, vocab_size))
        if estimate.peak <= memory:
            break
    return {
        "flags": run_flags,
        "layers": layers,
        "of_layers": num_layers,
        "moments": "bf16" if moment_flags else "fp32",
        "seq_length": config.model.seq_length,
        "estimate": estimate.peak,
    }


def main(tiny: bool, file: Path) -> int:
    """Write the facts, and then the plan of every training run, to a JSON file, and return the exit code.

    The facts are written first, because a plan may fail.
    """
    machine = facts()
    machine["warnings"] = warnings_of(machine)
    write_json(file, machine)
    memory = min(USABLE_MEMORY * machine["memory"], machine.get("free", machine["memory"]))
    flags_by_run = {run.name: TINY_LLAMA if tiny else run.flags for run in TRAINING_RUNS}
    machine["plans"] = {name: fit_layers_to_memory(flags.split(), memory) for name, flags in flags_by_run.items()}
    write_json(file, machine)
    return 0


if __name__ == "__main__":
    if sys.argv[1:] == ["--self-test"]:
        gpu_self_test()
        sys.exit()
    sys.exit(main(sys.argv[1] == "tiny", Path(sys.argv[2])))
