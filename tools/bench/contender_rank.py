"""What every rank of a contender of tools/benchmark.py does: keep to its memory, time steps, write its figures."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tools.outputs import write_json


def limit_memory(size: int | None) -> None:
    """What this process may hold on a CPU: beyond it memory is out for it alone, before the machine's is."""
    if size is not None:
        import resource

        _, most = resource.getrlimit(resource.RLIMIT_DATA)
        resource.setrlimit(resource.RLIMIT_DATA, (size, most))


def peak_memory(device: Any) -> int:
    """Bytes of this rank."""
    import resource

    import torch

    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def write(task: dict[str, Any], rank: int, **facts: Any) -> None:
    write_json(Path(task["folder"]) / f"rank{rank:05d}.json", facts)


def time_steps(step: Callable[[], Any], task: dict[str, Any], device: Any) -> list[float]:
    """Seconds of each step after the warm-up, with a wait for the device."""
    from megalite.parallel.streams import synchronize

    times = []
    for _ in range(task["warmup"] + task["steps"]):
        synchronize(device)
        begin = time.perf_counter()
        step()
        synchronize(device)
        times.append(time.perf_counter() - begin)
    return times[task["warmup"] :]
