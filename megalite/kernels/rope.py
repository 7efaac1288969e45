"""Rotary position embedding (arXiv:2104.09864), halves convention: channel i is rotated with channel i + R/2.

    [a, b] -> [a cos - b sin, b cos + a sin];   backward rotates by the opposite angle, so only the tables are saved

Partial rotary embedding rotates the first R channels. Llama-3 scaling stretches wavelengths above
original_length / low_factor by `factor`, does not change wavelengths below original_length / high_factor, and blends in
between (arXiv:2407.21783, sec. 3.2, with the constants of the released model); `Yarn` is another such rule. The tables
contain YaRN's magnitude, so cos^2 + sin^2 may exceed 1; backward then rotates by the opposite angle with the same
magnitude.

Arithmetic is in the dtype of the tables. Bytes for N elements of e bytes, forward and backward each: 2 N e and the
tables.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Function

from megalite.config.rope_spec import RopeScaling, RopeSpec, Yarn
from megalite.kernels.dispatch import TileConfig, ceil_div, kernel, power_of_two, use_triton

if TYPE_CHECKING:
    import triton.language as tl

# Columns are pairs of channels: a program rotates tokens x heads x R / 2 pairs, about this many, so that the heads of a
# token share its angles.
TILE = TileConfig(1, 1024, 4)


def _llama3_scaling(inverse: Tensor, scaling: RopeScaling) -> Tensor:
    """Scale the angles per token."""
    wavelength = 2 * math.pi / inverse
    low = scaling.original_length / scaling.low_factor
    high = scaling.original_length / scaling.high_factor
    blend = (scaling.original_length / wavelength - scaling.low_factor) / (scaling.high_factor - scaling.low_factor)
    blended = (1 - blend) * inverse / scaling.factor + blend * inverse
    return torch.where(wavelength > low, inverse / scaling.factor, torch.where(wavelength < high, inverse, blended))


def _yarn(inverse: Tensor, rotary_dim: int, base: float, yarn: Yarn) -> Tensor:
    """Scale the angles per token."""

    def channel(turns: float) -> float:
        """Return the number of the channel that makes this many turns in the original length."""
        return rotary_dim * math.log(yarn.original_length / (2 * math.pi * turns)) / (2 * math.log(base))

    low, high = channel(yarn.beta_fast), channel(yarn.beta_slow)
    if yarn.round_bounds:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    pair = torch.arange(len(inverse), dtype=inverse.dtype)
    ramp = ((pair - low) / ((high - low) or 0.001)).clamp(0, 1)
    return inverse * (1 - ramp + ramp / yarn.factor)


def rope_tables(
    seq_length: int, rope: RopeSpec, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Return cos and sin, each [S, R / 2], for the positions 0 .. seq_length - 1; angles are computed in fp64."""
    inverse = rope.base ** -(torch.arange(0, rope.dim, 2, dtype=torch.float64) / rope.dim)
    magnitude = 1.0
    scaling = rope.scaling
    if isinstance(scaling, RopeScaling):
        inverse = _llama3_scaling(inverse, scaling)
    elif scaling is not None:
        inverse = _yarn(inverse, rope.dim, rope.base, scaling)
        magnitude = scaling.magnitude
    angles = torch.outer(torch.arange(seq_length, dtype=torch.float64) / rope.interpolation, inverse)
    return (angles.cos() * magnitude).to(device, dtype), (angles.sin() * magnitude).to(device, dtype)


def interleaved_to_half(x_SBHK: Tensor, rotary_dim: int) -> Tensor:
    """Move channels 2i and 2i + 1 of the first `rotary_dim` to i and i + rotary_dim / 2.

    This turns pairs of the interleaved convention into pairs of the halves convention. Attention scores do not change
    if both queries and keys are converted.
    """
    rotary = x_SBHK[..., :rotary_dim].unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
    return torch.cat((rotary, x_SBHK[..., rotary_dim:]), -1)


def rotate_reference(x_SBHK: Tensor, cos: Tensor, sin: Tensor, sign: float) -> Tensor:
    """Rotate in torch, by the angles times `sign`."""
    half = cos.shape[-1]
    c, s = cos.unsqueeze(-2), sin.unsqueeze(-2) * sign
    if cos.dim() == 2:  # the same angles for every sample
        c, s = c.unsqueeze(1), s.unsqueeze(1)
    x = x_SBHK.to(cos.dtype)  # convert once; otherwise each operation with mixed dtypes would convert
    a, b = x[..., :half], x[..., half : 2 * half]
    cosines = torch.cat((c, c), -1)
    if x.shape[-1] == 2 * half:
        y = x * cosines
    else:
        y = x.clone(memory_format=torch.contiguous_format)
        y[..., : 2 * half].mul_(cosines)
    y[..., :half].addcmul_(b, s, value=-1)
    y[..., half : 2 * half].addcmul_(a, s)
    return y.to(x_SBHK.dtype)


@kernel
def _rotate(
    x_ptr, cos_ptr, sin_ptr, y_ptr, M, batch_size, num_heads, half_dim, head_dim,
    stride_xs, stride_xb, stride_xh, stride_cs, stride_cb,
    SIGN: tl.constexpr, BLOCK_REST: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    s, b = offs_m // batch_size, offs_m % batch_size
    offs_h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    offs_d = tl.arange(0, BLOCK_D)
    table_offs = (s * stride_cs + b * stride_cb)[:, None] + offs_d[None, :]
    table_mask = (offs_m < M)[:, None] & (offs_d < half_dim)[None, :]
    cos = tl.load(cos_ptr + table_offs, mask=table_mask, other=0.0)[:, None, :]
    sin = tl.load(sin_ptr + table_offs, mask=table_mask, other=0.0)[:, None, :] * SIGN
    head_mask = ((offs_m < M)[:, None] & (offs_h < num_heads)[None, :])[:, :, None]
    x_ptrs = x_ptr + ((s * stride_xs + b * stride_xb)[:, None] + (offs_h * stride_xh)[None, :])[:, :, None]
    y_ptrs = y_ptr + ((offs_m * num_heads)[:, None] + offs_h[None, :])[:, :, None] * head_dim
    channel = offs_d[None, None, :]
    mask = head_mask & (channel < half_dim)
    first = tl.load(x_ptrs + channel, mask=mask, other=0.0).to(cos_ptr.dtype.element_ty)
    second = tl.load(x_ptrs + half_dim + channel, mask=mask, other=0.0).to(cos_ptr.dtype.element_ty)
    tl.store(y_ptrs + channel, (first * cos - second * sin).to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(y_ptrs + half_dim + channel, (second * cos + first * sin).to(y_ptr.dtype.element_ty), mask=mask)
    if BLOCK_REST > 0:
        rest = 2 * half_dim + tl.arange(0, BLOCK_REST)[None, None, :]
        mask = head_mask & (rest < head_dim)
        tl.store(y_ptrs + rest, tl.load(x_ptrs + rest, mask=mask, other=0.0), mask=mask)


def rotate_triton(x_SBHK: Tensor, cos: Tensor, sin: Tensor, sign: float, tile: TileConfig = TILE) -> Tensor:
    """Rotate with one kernel launch, by the angles times `sign`.

    x may be a view (a slice of the packed keys and values); the result is contiguous.
    """
    S, B, H, K = x_SBHK.shape
    x = x_SBHK if x_SBHK.stride(3) == 1 else x_SBHK.contiguous()
    cos, sin = cos.contiguous(), sin.contiguous()
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    half = cos.shape[-1]
    width = power_of_two(half)
    heads = min(power_of_two(H), max(1, tile.block_n // width))
    tokens = max(1, tile.block_n // (width * heads))
    rest = K - 2 * half
    grid = (ceil_div(S * B, tokens), ceil_div(H, heads))
    sizes = (S * B, B, H, half, K)
    strides = (*x.stride()[:3], cos.stride(0), cos.stride(1) if cos.dim() == 3 else 0)
    constexprs = (sign, power_of_two(rest) if rest else 0, tokens, heads, width)
    _rotate[grid](x, cos, sin, y, *sizes, *strides, *constexprs, num_warps=tile.num_warps)
    return y


class _Rope(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor, rotate_fn: Callable[..., Tensor]) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.rotate_fn = rotate_fn
        return rotate_fn(x, cos, sin, 1.0)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        cos, sin = ctx.saved_tensors
        return ctx.rotate_fn(dy, cos, sin, -1.0), None, None, None


def apply_rope(x_SBHK: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first 2 * cos.shape[-1] channels of each head.

    The tables are those of `rope_tables`, [S, R / 2], or [S, B, R / 2] if samples have different positions.
    """
    rotate_fn = rotate_triton if use_triton(x_SBHK, x_SBHK.shape[-1]) else rotate_reference
    return _Rope.apply(x_SBHK, cos, sin, rotate_fn)  # type: ignore[return-value]
