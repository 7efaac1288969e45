"""The contenders of tools/benchmark.py: who they are, which flags they refuse, one of them measured once, and what
every rank of it does: keep to its memory, time steps, write its figures."""

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

from megalite.config import cli
from megalite.config.options import ConfigError
from megalite.config.validation import find_problems
from megalite.launch.rank_info import RankInfo, process_group
from megalite.models.families import PRESETS
from tools.bench import timeout as limited
from tools.cli_common import read_json, write_json

RANK = Path(__file__).resolve().parent.parent / "benchmark_rank.py"
ALLOCATOR = {
    "GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=17179869184",
    "THP_MEM_ALLOC_ENABLE": "1",
}


def contenders(options: argparse.Namespace, half: bool) -> list[tuple[str, dict[str, str]]]:
    """(name, environment beside the usual one)."""
    names = ["megalite"]
    if options.peer:
        kinds = ["bf16", "autocast"] if half else ["fp32"]
        ways = [""] if options.nproc == 1 else [" ddp", " fsdp2"]
        names += [f"transformers {kind}{way}" for kind in kinds for way in ways]
    with_allocator = [(f"{name} + allocator", ALLOCATOR) for name in names] if options.allocator else []
    return [*((name, {}) for name in names), *with_allocator]


def measure(name: str, environment: dict[str, str], options: argparse.Namespace, flags: list[str]) -> dict[str, Any]:
    """One contender, once, in processes of its own."""
    with tempfile.TemporaryDirectory(prefix="benchmark-") as folder:
        task = {"contender": name.removesuffix(" + allocator"), "flags": flags, "folder": folder}
        task |= {name: getattr(options, name) for name in ("nproc", "warmup", "steps")}
        task |= {"memory_bytes": options.memory_gib and int(options.memory_gib * 2**30)}
        command = [sys.executable, str(RANK), json.dumps(task)]
        log = options.json.with_suffix(".txt") if options.json else Path(folder) / "log.txt"
        status, said = limited.run(command, log, options.timeout, environment)
        late = f"not done after {options.timeout:g} s; give more with --timeout" if status == "out of time" else None
        ranks = [read_json(path) for path in sorted(Path(folder).glob("rank*.json"))]
        lines = [late, *said] if late else said or [f"no message; {status}"]
        if len(ranks) < options.nproc:
            return {"error": late or lines[-1], "stderr": "\n".join(lines), "status": status}
        if status != "ok":  # after all ranks had told what they measured
            print(*lines, sep="\n", file=sys.stderr)
    steps = [max(times) for times in zip(*(rank["steps"] for rank in ranks), strict=True)]
    result = {**ranks[0], "step_s": statistics.median(steps), "memory": sum(rank["memory"] for rank in ranks)}
    return {**result, **{name: [rank.get(name) for rank in ranks] for name in ("parts", "axes")}}


def read_config(flags: list[str], options: argparse.Namespace) -> tuple[bool, list[str]]:
    """Whether the flags ask for bf16; and why they cannot run."""
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
        m = config.model
        is_llama = (m.activation, m.normalization, m.position_embedding_type) == ("swiglu", "RMSNorm", "rope")
        plain = all(m.moe_layers) or not m.num_experts
        shared, sigmoid = m.moe_shared_expert_intermediate_size, m.moe_router_score_function == "sigmoid"
        if not is_llama or not plain or shared or sigmoid or m.add_bias_linear or config.data.vocab_size is None:
            problems = ["peer=transformers is a Llama or a Mixtral; drop --peer, or the flags of another model"]
    try:
        if not problems and config.data.vocab_size is not None:
            make_run_plan(config, options.nproc, config.data.vocab_size)  # sees what the check of options cannot
    except ValueError as error:
        problems = [str(error)]
    return config.precision.bf16, problems


def limit_memory(size: int | None) -> None:
    """Limit this process's memory on a CPU, so that it alone runs out of memory, and not the machine."""
    if size is not None:
        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (size, most))


@contextlib.contextmanager
def built(ranks: RankInfo, task: dict[str, Any]) -> Iterator[tuple[Any, Any]]:
    """The configuration of the task's flags, and its run."""
    from megalite.training.job.preflight import choose_device
    from megalite.training.logging.device_memory import keep_freed_heap
    from megalite.training.setup import build_run

    config, _ = cli.read(task["flags"], PRESETS)
    limit_memory(task.get("memory_bytes"))
    wanted = choose_device(config.parallel.device)
    if wanted == "cpu":
        keep_freed_heap()  # as pretrain() does
    with process_group(ranks, device=wanted, startup_timeout=datetime.timedelta(minutes=5)) as device:
        run = build_run(config, ranks, device)
        yield config, run
        run.close()


def peak_memory(device: Any) -> int:
    """Bytes of this rank."""
    import torch  # as everything of torch here, after prepare_cuda has set its variables

    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def write(task: dict[str, Any], rank: int, **facts: Any) -> None:
    write_json(Path(task["folder"]) / f"rank{rank:05d}.json", facts)


def time_steps(step: Callable[[], Any], device: Any, warmup: int, steps: int) -> list[float]:
    """Seconds of each step after the warm-up, with a wait for the device."""
    from megalite.parallel.streams import synchronize

    times = []
    for _ in range(warmup + steps):
        synchronize(device)
        begin = time.perf_counter()
        step()
        synchronize(device)
        times.append(time.perf_counter() - begin)
    return times[warmup:]
