"""Dropout whose mask is a function of coordinates, so that it is the same under every layout and never stored.

    y = x * keep / (1 - p),   keep[s, b, d] = hash(key, sample id of b, position s, channel d) >= p * 2^32

The key folds (seed, step, layer, site) on the host. The hash is the 32-bit finaliser of MurmurHash3 (A. Appleby,
public domain), chained over the coordinates, in int64 arithmetic masked to 32 bits: the same bits on every device.
Backward draws the mask again: 0 bytes saved.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

_M32 = 0xFFFFFFFF


def fold(*coordinates: int) -> int:
    """A 32-bit key from integers (seed, step, layer, site)."""
    h = 0x9E3779B9
    for c in coordinates:
        h = _mix_int(h ^ ((c * 0x85EBCA6B + 0x27D4EB2F) & _M32))
    return h


def _mix_int(h: int) -> int:
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & _M32
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & _M32
    return h ^ (h >> 16)


def _mix_(h: Tensor) -> Tensor:
    """In place: for attention's dropout `h` has 8 bytes per score."""
    h.bitwise_xor_(h >> 16).mul_(0x85EBCA6B).bitwise_and_(_M32)
    h.bitwise_xor_(h >> 13).mul_(0xC2B2AE35).bitwise_and_(_M32)
    return h.bitwise_xor_(h >> 16)


def hash_coordinates(key: int, *axes: Tensor) -> Tensor:
    """One 32-bit hash (as int64) per element of the broadcast of the int64 `axes`, outermost first."""
    h = torch.full((), key, dtype=torch.int64, device=axes[0].device)
    for axis in axes:
        h = _mix_(h ^ (axis * 0x9E3779B1 + 0x7F4A7C15 & _M32))
    return h


def keep_mask(key: int, p: float, *axes: Tensor) -> Tensor:
    """True where an element survives; False with probability `p`."""
    return hash_coordinates(key, *axes) >= int(p * 2**32)


def _mask_sBD(x: Tensor, key: int, p: float, sample_ids_B: Tensor, first_position: int) -> Tensor:
    s, _, d = x.shape
    positions = torch.arange(first_position, first_position + s, device=x.device).view(-1, 1, 1)
    channels = torch.arange(d, device=x.device)
    return keep_mask(key, p, sample_ids_B.view(1, -1, 1), positions, channels)


class _DropoutAdd(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor | None, p: float, key: int, sample_ids_B: Tensor, first_position: int
    ) -> Tensor:
        ctx.args = (key, p, sample_ids_B, first_position)
        y = x * _mask_sBD(x, *ctx.args) / (1 - p)
        return y if residual is None else y + residual

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        dx = dy * _mask_sBD(dy, *ctx.args) / (1 - ctx.args[1])
        return dx, dy if ctx.needs_input_grad[1] else None, None, None, None, None


def dropout(x_sBD: Tensor, p: float, key: int, sample_ids_B: Tensor, first_position: int = 0) -> Tensor:
    """Drop elements of x_sBD, whose row 0 is sequence position `first_position`."""
    return _DropoutAdd.apply(x_sBD, None, p, key, sample_ids_B, first_position)  # type: ignore[return-value]


def dropout_add(
    x_sBD: Tensor, residual_sBD: Tensor, p: float, key: int, sample_ids_B: Tensor, first_position: int = 0
) -> Tensor:
    """residual + dropout(x)."""
    return _DropoutAdd.apply(x_sBD, residual_sBD, p, key, sample_ids_B, first_position)  # type: ignore[return-value]
