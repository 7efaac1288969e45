"""Memory of the host for what a card lends it: pinned, or a mapped file on a disk."""

import mmap
import os
import tempfile
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from megalite.kernels.dispatch import power_of_two


def _pack_into_blocks(parts: Sequence[int]) -> list[list[int]]:
    """Parts, in order, that share a block. torch rounds what it pins up to a power of two: each block is the largest
    that what is left fills."""
    blocks, left, size = list[list[int]](), sum(parts), 0
    for part in parts:
        if not blocks or sum(blocks[-1]) + part > size:
            blocks.append([])
            size = power_of_two(left + 1) // 2
        blocks[-1].append(part)
        left -= part
    return blocks


def pinned_bytes(parts: Sequence[int]) -> int:
    return sum(power_of_two(sum(block)) for block in _pack_into_blocks(parts))


def allocate_pinned(parts: Sequence[int], device: torch.device) -> Iterator[Tensor]:
    """Zeros, uint8: each of `parts` bytes, pinned where `device` is a card, else on `device`."""
    pinned = device.type == "cuda"
    options = dict(dtype=torch.uint8, device="cpu" if pinned else device, pin_memory=pinned)
    for block in _pack_into_blocks(parts):
        yield from torch.zeros(power_of_two(sum(block)), **options)[: sum(block)].split(block)  # type: ignore[call-overload]


def allocate_mapped(parts: Sequence[int], folder: str, device: torch.device) -> Iterator[Tensor]:
    """The same in a file of `folder` that has no name, so that no end of the process leaves it behind. Its blocks are
    reserved, or a full disk would be a SIGBUS later. Raises OSError."""
    if device.type == "meta":
        yield from torch.empty(sum(parts), dtype=torch.uint8, device=device).split(list(parts))
    elif parts:
        with tempfile.TemporaryFile(dir=folder) as file:
            os.posix_fallocate(file.fileno(), 0, sum(parts))
            memory = mmap.mmap(file.fileno(), sum(parts))
        yield from torch.frombuffer(memory, dtype=torch.uint8).split(list(parts))
