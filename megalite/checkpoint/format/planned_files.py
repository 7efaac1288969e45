"""Plan safetensors files from shapes alone, and fill them tensor by tensor (tensor_file.py), so that the largest tensor
is all that is in memory. `safetensors.torch.save_file` wants all of them at once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from megalite.checkpoint.format import tensor_file

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


def header_of(plan: Sequence[Planned]) -> bytes:
    """The begin of a safetensors file whose data are the tensors of `plan` in order.

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
    return len(text).to_bytes(8, "little") + text


def flat(plan: Sequence[Planned], values: Iterable[Tensor]) -> Iterator[Tensor]:
    """`values`, which come in the plan's order, as the 1-D tensors that a file is written from."""
    for p, tensor in zip(plan, values, strict=True):
        assert (tensor.dtype, tuple(tensor.shape)) == (p.dtype, p.shape), p.key
        yield tensor.detach().contiguous().view(-1)


def write_tensors(path: Path, plan: Sequence[Planned], values: Iterable[Tensor]) -> None:
    """Write a new file and sync it. Raises OSError."""
    tensor_file.write(path, header_of(plan), flat(plan, values))
