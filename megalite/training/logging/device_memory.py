"""Memory used by a rank, on its card or on a CPU; and a way to let a process on a CPU keep the memory it frees."""

import contextlib
import ctypes
import os
import resource
from typing import Any

import torch

from megalite.config.environment import getenv
from megalite.parallel.mesh import Mesh

FIGURES = {  # name -> statistic of the card's allocator
    "allocated": "allocated_bytes.all.current",
    "max allocated": "allocated_bytes.all.peak",
    "reserved": "reserved_bytes.all.current",
    "max reserved": "reserved_bytes.all.peak",
}

# Parameters of glibc's malloc.h, and bytes. Blocks of up to 64 MiB come from the heap, of which 512 MiB may stay free;
# larger ones are still mapped one by one, since holes of their size would add up (before glibc 2.38 alignment keeps a
# freed block from being reused for one of the same size). glibc before 2.35 refuses more than 32 MiB.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
FROM_THE_HEAP, HEAP_KEEP_BYTES = (64 << 20, 32 << 20), 512 << 20
VARIABLES = ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_")


def memory_stats(mesh: Mesh) -> dict[str, float]:
    """Bytes by the names above; on a CPU the process's memory now and at its peak, and nothing is reserved."""
    if mesh.device.type == "cuda":
        stats = torch.cuda.memory_stats(mesh.device)
        return {name: stats[figure] for name, figure in FIGURES.items()}
    held = most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    with contextlib.suppress(OSError), open("/proc/self/statm", encoding="ascii") as file:
        held = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {"allocated": held, "max allocated": most}


def total_memory(device: torch.device) -> int:
    """Bytes that the card, or the machine, has."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def memory_metrics(mesh: Mesh) -> dict[str, Any]:
    """Those of a log line (training/logging/log_format.py)."""
    held = {name: size / 2**30 for name, size in memory_stats(mesh).items()}
    there = total_memory(mesh.device) / 2**30
    return {"memory_gib": held["max allocated"], "memory_limit_gib": there, "reserved_gib": held.get("max reserved")}


def memory_tags(mesh: Mesh) -> dict[str, float]:
    """Megatron-LM's TensorBoard tags."""
    tags = {
        f"mem-{name.replace(' ', '-')}-bytes": n for name, n in memory_stats(mesh).items() if name != "max reserved"
    }
    if mesh.device.type == "cuda":
        tags["mem-allocated-count"] = torch.cuda.memory_stats(mesh.device)["allocation.all.current"]
    return tags


def memory_line(mesh: Mesh, step: int, device_memory: bool) -> str:
    """Megatron-LM's line about this rank; on a CPU about its process."""
    parts = memory_stats(mesh)
    if mesh.device.type == "cuda" and device_memory:
        free, total = torch.cuda.mem_get_info(mesh.device)
        parts["total device memory used"] = total - free
    text = " | ".join(f"{name}: {number / 2**20:.2f}" for name, number in parts.items())
    return f"[Rank {mesh.world.rank}] (after {step} iterations) memory (MB) | {text}"


def keep_freed_heap() -> bool:
    """Let glibc keep large freed blocks, so that activations on a CPU reuse pages, which every step would pay for again
    otherwise (docs/experiments.md). False where nothing was changed: another C library, or the user's variables."""
    if any(map(getenv, VARIABLES)):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    # M_TRIM_THRESHOLD alone would fix the threshold of mapping at 128 KiB
    return (
        any(mallopt(M_MMAP_THRESHOLD, size) == 1 for size in FROM_THE_HEAP)
        and mallopt(M_TRIM_THRESHOLD, HEAP_KEEP_BYTES) == 1
    )
