"""The systems that tools/benchmark.py compares, and the measurement of one of them.

This module lists the systems, finds the flags that they cannot run with, runs one of them once, and has what each of
their ranks does: limit its memory, time steps and write its result.
"""

import argparse
import contextlib
import datetime
import json
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from megalite.checkpoint.storage.location import CheckpointError
from megalite.config import cli
from megalite.config.options import ConfigError
from megalite.config.validation import find_problems
from megalite.interop.huggingface.config_json import incompatibilities, unwritable_layers, write_config
from megalite.interop.name_mapping import FAMILIES
from megalite.launch.process_group import process_group
from megalite.launch.rank_info import RankInfo
from megalite.models.families import PRESETS
from tools.bench import timeout
from tools.cli_common import read_json, write_json

RANK_PROGRAM = Path(__file__).resolve().parent.parent / "benchmark_rank.py"
ALLOCATOR_SUFFIX = " + allocator"
ALLOCATOR_VARIABLES = {
    "GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=17179869184",
    "THP_MEM_ALLOC_ENABLE": "1",
}


def list_systems(options: argparse.Namespace, is_bf16: bool) -> list[tuple[str, dict[str, str]]]:
    """Return the name and the additional environment variables of every system to measure."""
    names = ["megalite"]
    if options.peer:
        precisions = ["bf16", "autocast"] if is_bf16 else ["fp32"]
        wrappers = [""] if options.nproc == 1 else [" ddp", " fsdp2"]
        names += [f"transformers {precision}{wrapper}" for precision in precisions for wrapper in wrappers]
    systems: list[tuple[str, dict[str, str]]] = [(name, {}) for name in names]
    if options.allocator:
        systems += [(name + ALLOCATOR_SUFFIX, ALLOCATOR_VARIABLES) for name in names]
    return systems


def measure(name: str, environment: dict[str, str], options: argparse.Namespace, flags: list[str]) -> dict[str, Any]:
    """Run one system once, in processes of its own, and return its measurement.

    If fewer ranks than options.nproc wrote a result, the measurement is `error`, `stderr` and `status`.
    """
    with tempfile.TemporaryDirectory(prefix="benchmark-") as directory:
        task = {
            "contender": name.removesuffix(ALLOCATOR_SUFFIX),
            "flags": flags,
            "output_dir": directory,
            "nproc": options.nproc,
            "warmup": options.warmup,
            "steps": options.steps,
            "memory_bytes": options.memory_gib and int(options.memory_gib * 2**30),
        }
        command = [sys.executable, str(RANK_PROGRAM), json.dumps(task)]
        log = options.json.with_suffix(".txt") if options.json else Path(directory) / "log.txt"
        status, lines = timeout.run(command, log, options.timeout, environment)
        ranks = [read_json(path) for path in sorted(Path(directory).glob("rank*.json"))]
        if status == "out of time":
            lines = [f"not done after {options.timeout:g} s; give more with --timeout", *lines]
        elif not lines:
            lines = [f"no message; {status}"]
        if len(ranks) < options.nproc:
            error = lines[0] if status == "out of time" else lines[-1]
            return {"error": error, "stderr": "\n".join(lines), "status": status}
        if status != "ok":  # it failed after all ranks had written their results
            print(*lines, sep="\n", file=sys.stderr)
    steps = [max(times) for times in zip(*(rank["steps"] for rank in ranks), strict=True)]
    return {
        **ranks[0],
        "step_s": statistics.median(steps),
        "memory": sum(rank["memory"] for rank in ranks),
        "parts": [rank.get("parts") for rank in ranks],
        "axes": [rank.get("axes") for rank in ranks],
    }


def read_config(flags: list[str], options: argparse.Namespace) -> tuple[bool, list[str]]:
    """Return whether the flags select bf16, and the problems that prevent a run."""
    from megalite.planning.run_plan import make_run_plan
    from megalite.training.job.preflight import choose_device
    from megalite.training.setup import SetupError

    try:
        config, _ = cli.read(flags, PRESETS)
        problems: list[str] = [*find_problems(config, options.nproc)]
        if choose_device(config.parallel.device) == "cuda" and options.memory_gib is not None:
            problems.append(f"memory_gib={options.memory_gib:g} is for a CPU; drop it, or use --device cpu")
    except (ConfigError, SetupError) as error:
        return False, getattr(error, "problems", [str(error)])
    if options.peer and not problems:
        if config.data.vocab_size is None:
            problems = ["peer=transformers needs the size of its vocabulary; set --vocab-size"]
        else:
            try:
                transformers_config(config)
            except CheckpointError as error:
                problems = [f"peer=transformers: {error}"]
    try:
        if not problems and config.data.vocab_size is not None:
            make_run_plan(config, options.nproc, config.data.vocab_size)  # finds more than the check of the options
    except ValueError as error:
        problems = [str(error)]
    return config.precision.bf16, problems


def transformers_config(config: Any) -> dict[str, Any]:
    """Return the config.json of the same model in transformers.

    Raises:
        CheckpointError: transformers has no such model, or would not do the same work.
    """
    model = config.model
    if model.attention_dropout or model.hidden_dropout:
        problem = f"attention_dropout={model.attention_dropout:g} and hidden_dropout={model.hidden_dropout:g}"
        raise CheckpointError(f"{problem}: transformers runs without dropout; set both to 0")
    if model.num_mtp_depths:
        raise CheckpointError(f"mtp_num_layers={model.num_mtp_depths}: transformers drops these depths; set it to 0")
    reasons = {name: incompatibilities(model, FAMILIES.get(name)) for name in FAMILIES}

    def difference(name: str) -> tuple[bool, int]:
        return bool(unwritable_layers(model, FAMILIES.get(name))), len(reasons[name])

    family = min(reasons, key=difference)
    if reasons[family]:
        raise CheckpointError(f"the most similar model is {family}, but {'; '.join(reasons[family])}")
    return write_config(model, family, config.data.vocab_size, "float32", {}) | {"use_cache": False}


def limit_memory(size: int | None) -> None:
    """Limit this process's memory on a CPU, so that this process runs out of memory before the machine does."""
    if size is not None:
        _, hard_limit = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (size, hard_limit))


@contextlib.contextmanager
def build_run_from_task(ranks: RankInfo, task: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """Yield the configuration of the task's flags and the run that is built from it."""
    from megalite.training.job.preflight import choose_device
    from megalite.training.logging.device_memory import keep_freed_heap
    from megalite.training.setup import build_run

    config, _ = cli.read(task["flags"], PRESETS)
    limit_memory(task.get("memory_bytes"))
    device_type = choose_device(config.parallel.device)
    if device_type == "cpu":
        keep_freed_heap()  # as pretrain() does
    with process_group(ranks, device=device_type, startup_timeout=datetime.timedelta(minutes=5)) as device:
        run = build_run(config, ranks, device)
        yield config, run
        run.close()


def peak_memory(device: Any) -> int:
    """Return this rank's peak memory in bytes: allocated on a GPU, resident on a CPU."""
    import torch  # like all uses of torch here, after set_cuda_environment

    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def write(task: dict[str, Any], rank: int, **facts: Any) -> None:
    """Write a rank's result, which `measure` reads."""
    write_json(Path(task["output_dir"]) / f"rank{rank:05d}.json", facts)


def time_steps(step: Callable[[], Any], device: Any, warmup: int, steps: int) -> list[float]:
    """Return the seconds of each step after the warmup, including the wait for the device."""
    from megalite.parallel.streams import synchronize

    times = []
    for _ in range(warmup + steps):
        synchronize(device)
        start = time.perf_counter()
        step()
        synchronize(device)
        times.append(time.perf_counter() - start)
    return times[warmup:]
