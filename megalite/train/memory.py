"""What memory a rank has taken: of its card, or of the machine on CPU."""

from __future__ import annotations

import contextlib
import os
import resource

import torch

from megalite.parallel.mesh import Mesh


def memory_gib(mesh: Mesh) -> tuple[float, float]:
    """Peak memory of this rank and what there is: the card's, or the process's on CPU."""
    if mesh.device.type == "cuda":
        total = torch.cuda.get_device_properties(mesh.device).total_memory
        return torch.cuda.max_memory_allocated(mesh.device) / 2**30, total / 2**30
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 2**30, total / 2**30


def reserved_gib(mesh: Mesh) -> float | None:
    """What the allocator has taken of the card at most; None on CPU."""
    return torch.cuda.max_memory_reserved(mesh.device) / 2**30 if mesh.device.type == "cuda" else None


def memory_bytes_of(mesh: Mesh) -> dict[str, float]:
    """Megatron-LM's TensorBoard tags; on CPU what the process holds and has held."""
    if mesh.device.type != "cuda":
        held = most = memory_gib(mesh)[0] * 2**30
        with contextlib.suppress(OSError), open("/proc/self/statm", encoding="ascii") as file:
            held = float(int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
        return {"mem-allocated-bytes": held, "mem-max-allocated-bytes": most}
    stats = torch.cuda.memory_stats(mesh.device)
    return {
        "mem-reserved-bytes": stats["reserved_bytes.all.current"],
        "mem-allocated-bytes": stats["allocated_bytes.all.current"],
        "mem-max-allocated-bytes": stats["allocated_bytes.all.peak"],
        "mem-allocated-count": stats["allocation.all.current"],
    }


def memory_line(mesh: Mesh, step: int, device_memory: bool) -> str:
    """Megatron-LM's, of this rank. On CPU the process is what there is to look at."""
    if mesh.device.type == "cuda":
        parts = {
            "allocated": torch.cuda.memory_allocated(mesh.device),
            "max allocated": torch.cuda.max_memory_allocated(mesh.device),
            "reserved": torch.cuda.memory_reserved(mesh.device),
            "max reserved": torch.cuda.max_memory_reserved(mesh.device),
        }
        if device_memory:
            free, total = torch.cuda.mem_get_info(mesh.device)
            parts["total device memory used"] = total - free
    else:
        used = memory_bytes_of(mesh)
        parts = {"allocated": used["mem-allocated-bytes"], "max allocated": used["mem-max-allocated-bytes"]}
    text = " | ".join(f"{name}: {number / 2**20:.2f}" for name, number in parts.items())
    return f"[Rank {mesh.world.rank}] (after {step} iterations) memory (MB) | {text}"
