"""Memory statistics of a rank, on a GPU or a CPU, and a way to let a CPU process keep the memory that it frees."""

import contextlib
import ctypes
import os
import resource
from typing import Any

import torch

from megalite.common.environment import getenv
from megalite.parallel.mesh import Mesh

STATISTICS = {  # name -> statistic of torch's CUDA allocator
    "allocated": "allocated_bytes.all.current",
    "max allocated": "allocated_bytes.all.peak",
    "reserved": "reserved_bytes.all.current",
    "max reserved": "reserved_bytes.all.peak",
}

# Parameters of mallopt in glibc's malloc.h, and their values in bytes. Blocks of up to 64 MiB are allocated from the
# heap, and 512 MiB of it may remain free. Larger blocks are still mapped one by one, since holes of their size would
# add up: before glibc 2.38, alignment prevents a freed block from being reused for one of the same size. glibc before
# 2.35 does not accept more than 32 MiB.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
MAX_HEAP_BLOCK_BYTES = (64 << 20, 32 << 20)  # the first value that glibc accepts is used
HEAP_KEEP_BYTES = 512 << 20
MALLOC_VARIABLES = ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_")


def memory_stats(mesh: Mesh) -> dict[str, float]:
    """Return bytes by the names of STATISTICS; on a CPU only the process's current and peak resident memory."""
    if mesh.device.type == "cuda":
        stats = torch.cuda.memory_stats(mesh.device)
        return {name: stats[statistic] for name, statistic in STATISTICS.items()}
    current = peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    with contextlib.suppress(OSError), open("/proc/self/statm", encoding="ascii") as file:
        current = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {"allocated": current, "max allocated": peak}


def total_memory(device: torch.device) -> int:
    """Return the memory of the GPU, or of the machine, in bytes."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def memory_metrics(mesh: Mesh) -> dict[str, Any]:
    """Return the memory metrics of a log line (training/logging/log_format.py)."""
    gib = {name: size / 2**30 for name, size in memory_stats(mesh).items()}
    return {
        "memory_gib": gib["max allocated"],
        "memory_limit_gib": total_memory(mesh.device) / 2**30,
        "reserved_gib": gib.get("max reserved"),
    }


def memory_tags(mesh: Mesh) -> dict[str, float]:
    """Return the memory by Megatron-LM's TensorBoard tags."""
    tags = {
        f"mem-{name.replace(' ', '-')}-bytes": size
        for name, size in memory_stats(mesh).items()
        if name != "max reserved"
    }
    if mesh.device.type == "cuda":
        tags["mem-allocated-count"] = torch.cuda.memory_stats(mesh.device)["allocation.all.current"]
    return tags


def memory_line(mesh: Mesh, step: int, device_memory: bool) -> str:
    """Return Megatron-LM's line about this rank's memory; `device_memory` adds all memory in use on its GPU."""
    stats = memory_stats(mesh)
    if mesh.device.type == "cuda" and device_memory:
        free, total = torch.cuda.mem_get_info(mesh.device)
        stats["total device memory used"] = total - free
    text = " | ".join(f"{name}: {size / 2**20:.2f}" for name, size in stats.items())
    return f"[Rank {mesh.world.rank}] (after {step} iterations) memory (MB) | {text}"


def keep_freed_heap() -> bool:
    """Let glibc keep large freed blocks, so that activations on a CPU reuse their pages in the next step.

    Otherwise every step pays for new pages (docs/experiments.md). Returns False if nothing was changed, because of
    another C library, or because the user has set malloc's variables.
    """
    if any(map(getenv, MALLOC_VARIABLES)):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    # M_TRIM_THRESHOLD alone would fix the mmap threshold at 128 KiB.
    if not any(mallopt(M_MMAP_THRESHOLD, size) == 1 for size in MAX_HEAP_BLOCK_BYTES):
        return False
    return mallopt(M_TRIM_THRESHOLD, HEAP_KEEP_BYTES) == 1
