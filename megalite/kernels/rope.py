"""Rotary position embedding (arXiv:2104.09864), halves convention: channel i turns with channel i + R/2.

    [a, b] -> [a cos - b sin, b cos + a sin];   backward is the rotation by the opposite angle, so only tables are saved

Partial rotary turns the first R channels. Llama-3 scaling stretches wavelengths beyond
original_length / low_factor by `factor`, leaves those below original_length / high_factor, and blends between
(arXiv:2407.21783, sec. 3.2; the released model's constants).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function


@dataclass(frozen=True)
class RopeScaling:
    """Llama-3 frequency scaling; lengths in tokens."""

    factor: float = 8.0
    low_factor: float = 1.0
    high_factor: float = 4.0
    original_length: int = 8192


def rope_tables(
    seq_length: int,
    rotary_dim: int,
    base: float,
    scaling: RopeScaling | None = None,
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> tuple[Tensor, Tensor]:
    """cos and sin, each [S, rotary_dim / 2]; angles are computed in fp64."""
    inverse = base ** -(torch.arange(0, rotary_dim, 2, dtype=torch.float64) / rotary_dim)
    if scaling is not None:
        wavelength = 2 * math.pi / inverse
        low = scaling.original_length / scaling.low_factor
        high = scaling.original_length / scaling.high_factor
        blend = (scaling.original_length / wavelength - scaling.low_factor) / (scaling.high_factor - scaling.low_factor)
        blended = (1 - blend) * inverse / scaling.factor + blend * inverse
        inverse = torch.where(
            wavelength > low, inverse / scaling.factor, torch.where(wavelength < high, inverse, blended)
        )
    angles = torch.outer(torch.arange(seq_length, dtype=torch.float64), inverse)
    return angles.cos().to(device, dtype), angles.sin().to(device, dtype)


def _rotate(x_SBHK: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    half = cos.shape[-1]
    c, s = cos.unsqueeze(-2), sin.unsqueeze(-2) * sign
    if cos.dim() == 2:  # the same angles for every sample
        c, s = c.unsqueeze(1), s.unsqueeze(1)
    a, b, rest = x_SBHK[..., :half], x_SBHK[..., half : 2 * half], x_SBHK[..., 2 * half :]
    y = torch.empty(x_SBHK.shape, dtype=x_SBHK.dtype, device=x_SBHK.device)
    y[..., :half] = a * c - b * s
    y[..., half : 2 * half] = b * c + a * s
    if rest.shape[-1]:
        y[..., 2 * half :] = rest
    return y


class _Rope(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _rotate(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        return _rotate(dy, cos, sin, -1.0), None, None


def apply_rope(x_SBHK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first 2 * cos.shape[-1] channels of each head. Tables as `rope_tables` makes them, [S, R / 2], or
    [S, B, R / 2] where each sample counts its positions in its own way."""
    return _Rope.apply(x_SBHK, cos, sin)  # type: ignore[return-value]
