"""Host memory for tensors that are offloaded from a GPU: pinned, or a mapped file on a disk."""

import mmap
import os
import tempfile
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megalite.kernels.dispatch import power_of_two


def _pack_into_blocks(sizes: Sequence[int]) -> list[list[int]]:
    """Return the sizes, in order, grouped into allocations.

    torch rounds a pinned allocation up to a power of two, so each allocation is the largest power of two that the
    remaining sizes fill.
    """
    blocks: list[list[int]] = []
    remaining = sum(sizes)
    capacity = 0
    for size in sizes:
        if not blocks or sum(blocks[-1]) + size > capacity:
            blocks.append([])
            capacity = power_of_two(remaining + 1) // 2
        blocks[-1].append(size)
        remaining -= size
    return blocks


def pinned_bytes(sizes: Sequence[int]) -> int:
    """Return the bytes that `allocate_pinned` allocates."""
    return sum(power_of_two(sum(block)) for block in _pack_into_blocks(sizes))


def allocate_pinned(sizes: Sequence[int], device: torch.device) -> Iterator[Tensor]:
    """Yield uint8 zeros of these sizes in bytes: pinned host memory if `device` is a GPU, else memory of `device`."""
    pinned = device.type == "cuda"
    options = dict(dtype=torch.uint8, device="cpu" if pinned else device, pin_memory=pinned)
    for block in _pack_into_blocks(sizes):
        used = sum(block)
        yield from torch.zeros(power_of_two(used), **options)[:used].split(block)  # type: ignore[call-overload]


def allocate_mapped(sizes: Sequence[int], directory: str, device: torch.device) -> Iterator[Tensor]:
    """Yield uint8 zeros of these sizes in bytes, in a mapped file in `directory` (on the meta device: without a file).

    The file has no name, so that it never outlives the process. Its space is reserved, since a full disk would
    otherwise be a SIGBUS later. Raises OSError if that fails.
    """
    if device.type == "meta":
        yield from torch.empty(sum(sizes), dtype=torch.uint8, device=device).split(list(sizes))
    elif sizes:
        with tempfile.TemporaryFile(dir=directory) as file:
            os.posix_fallocate(file.fileno(), 0, sum(sizes))
            memory = mmap.mmap(file.fileno(), sum(sizes))
        yield from torch.frombuffer(memory, dtype=torch.uint8).split(list(sizes))
