"""What memory a rank has taken, of its card or of the machine on CPU; and there, that it keeps what it frees."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource

import torch

from megalite.config.environment import variable
from megalite.parallel.mesh import Mesh

# name -> of the card's allocator
FIGURES = {
    "allocated": "allocated_bytes.all.current",
    "max allocated": "allocated_bytes.all.peak",
    "reserved": "reserved_bytes.all.current",
    "max reserved": "reserved_bytes.all.peak",
}

# Numbers of glibc's malloc.h, and bytes. Blocks of up to 64 MiB come from the heap, of which half a GiB may stay free;
# larger ones are mapped one by one as before, since holes of their size would add up (alignment keeps a freed block
# from being used by the next one of the same size before glibc 2.38). glibc before 2.35 refuses more than 32 MiB.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
FROM_THE_HEAP, KEPT = (64 << 20, 32 << 20), 512 << 20
VARIABLES = ("GLIBC_TUNABLES", "MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_")


def memory_of(mesh: Mesh) -> dict[str, float]:
    """Bytes by the names above; on CPU what the process holds and has held, and nothing is reserved."""
    if mesh.device.type == "cuda":
        stats = torch.cuda.memory_stats(mesh.device)
        return {name: stats[figure] for name, figure in FIGURES.items()}
    held = most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    with contextlib.suppress(OSError), open("/proc/self/statm", encoding="ascii") as file:
        held = int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return {"allocated": held, "max allocated": most}


def memory_there(device: torch.device) -> int:
    """Bytes of the card, or of the machine."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def memory_tags(mesh: Mesh) -> dict[str, float]:
    """Megatron-LM's TensorBoard tags."""
    tags = {f"mem-{name.replace(' ', '-')}-bytes": n for name, n in memory_of(mesh).items() if name != "max reserved"}
    if mesh.device.type == "cuda":
        tags["mem-allocated-count"] = torch.cuda.memory_stats(mesh.device)["allocation.all.current"]
    return tags


def memory_line(mesh: Mesh, step: int, device_memory: bool) -> str:
    """Megatron-LM's, of this rank. On CPU the process is what there is to look at."""
    parts = memory_of(mesh)
    if mesh.device.type == "cuda" and device_memory:
        free, total = torch.cuda.mem_get_info(mesh.device)
        parts["total device memory used"] = total - free
    text = " | ".join(f"{name}: {number / 2**20:.2f}" for name, number in parts.items())
    return f"[Rank {mesh.world.rank}] (after {step} iterations) memory (MB) | {text}"


def keep_freed_memory() -> bool:
    """Let this process keep what it frees: activations on a CPU then lie in pages that it already has.

    By default glibc returns large blocks to the system when they are freed, and every step pays for its pages again
    (docs/performance.md says how much). False where nothing was changed: another C library, or the user's variables.
    """
    if any(map(variable, VARIABLES)):
        return False
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    for size in FROM_THE_HEAP:
        if mallopt(M_MMAP_THRESHOLD, size) == 1:
            return mallopt(M_TRIM_THRESHOLD, KEPT) == 1
    return False  # the other one alone would fix the threshold of mapping where it is, at 128 KiB
