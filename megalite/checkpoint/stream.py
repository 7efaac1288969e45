"""Write a safetensors file tensor by tensor: its header first, made from shapes alone, hashed on the way.

    | header's bytes, 8, little endian | header, JSON, padded to 8 bytes with spaces | data of each tensor, no gaps |

`safetensors.torch.save_file` wants all tensors at once; here the largest one is all that is in memory.
Layout: https://huggingface.co/docs/safetensors (format).
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

CODES = {torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}
DTYPES = {code: dtype for dtype, code in CODES.items()}


@dataclass(frozen=True)
class Planned:
    """A tensor that will be written; `bytes` of its data."""

    key: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def cut(sizes: Sequence[int], limit: int) -> list[range]:
    """Consecutive items in as few files of at most `limit` bytes as their order allows; a larger item is alone.

    >>> cut([3, 4, 9, 1, 1], 8)
    [range(0, 2), range(2, 3), range(3, 5)]
    """
    files, start, held = [], 0, 0
    for i, size in enumerate(sizes):
        if i > start and held + size > limit:
            files.append(range(start, i))
            start, held = i, 0
        held += size
    return [*files, range(start, len(sizes))] if sizes else []


def write_tensors(path: Path, plan: Sequence[Planned], values: Iterable[Tensor]) -> tuple[int, str]:
    """Write `values`, which come in the plan's order, and sync. Returns (bytes, sha256 in hex). Raises OSError.

    Wider dtypes must come first, so that every tensor starts at a multiple of its element's size.
    """
    widths = [p.dtype.itemsize for p in plan]
    assert widths == sorted(widths, reverse=True), "narrower dtypes come last"
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for p in plan:
        header[p.key] = {"dtype": CODES[p.dtype], "shape": p.shape, "data_offsets": [offset, offset + p.bytes]}
        offset += p.bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with open(path, "wb") as file:
        for block in (len(text).to_bytes(8, "little"), text):
            file.write(block)
            digest.update(block)
        for p, tensor in zip(plan, values, strict=True):
            assert (tensor.dtype, tuple(tensor.shape)) == (p.dtype, p.shape), p.key
            data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data
            file.write(data)
            digest.update(data)
        file.flush()
        os.fsync(file.fileno())
        return file.tell(), digest.hexdigest()
