"""Dropout with a mask that is a function of coordinates, so that it is the same under every layout and never stored.

    y = x * keep / (1 - p),   keep[s, b, d] = hash(key, sample id of b, position s, channel d) >= p * 2^32

Rows start at position `first_position`, which may also be an int64 tensor [s] with the position of every row. The key
is folded from (seed, step, layer, site) on the host. The hash is the 32-bit finalizer of MurmurHash3 (A. Appleby,
public domain), chained over the coordinates, in int32 arithmetic that wraps: the bits are the same on every device.
Backward recomputes the mask, so nothing is saved for it. Bytes for N elements of e bytes: forward with the residual 3 N
e, backward 2 N e.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Function

from megalite.kernels.dispatch import TileConfig, as_2d, ceil_div, fit_tile, kernel, use_triton

if TYPE_CHECKING:
    import triton.language as tl

TILE = TileConfig(1, 1024, 4)  # 8 elements per thread: one 16-byte load of bf16, which hides the hash
_M32 = 0xFFFFFFFF


def fold_in(*coordinates: int) -> int:
    """Return a 32-bit key from integers (seed, step, layer, site)."""
    h = 0x9E3779B9
    for c in coordinates:
        h = _fmix32_int(h ^ ((c * 0x85EBCA6B + 0x27D4EB2F) & _M32))
    return h


def as_int32(bits: int) -> int:
    """Return the int32 with these 32 bits."""
    return bits - 2**32 if bits >= 2**31 else bits


def _fmix32_int(h: int) -> int:
    h = ((h ^ (h >> 16)) * 0x85EBCA6B) & _M32
    h = ((h ^ (h >> 13)) * 0xC2B2AE35) & _M32
    return h ^ (h >> 16)


def fmix32_(h: Tensor) -> Tensor:
    """Apply the finalizer to int32, in place because for attention's dropout `h` takes 4 bytes per score."""
    h.bitwise_xor_((h >> 16).bitwise_and_(0xFFFF)).mul_(as_int32(0x85EBCA6B))
    h.bitwise_xor_((h >> 13).bitwise_and_(0x7FFFF)).mul_(as_int32(0xC2B2AE35))
    return h.bitwise_xor_((h >> 16).bitwise_and_(0xFFFF))


def _low_bits(x: Tensor) -> Tensor:
    """Return the low 32 bits of int64, as int32."""
    return (((x & _M32) ^ 2**31) - 2**31).to(torch.int32)


def hash_coordinates(key: int | Tensor, *axes: Tensor) -> Tensor:
    """Return one 32-bit hash, as int32, per element of the broadcast of `axes`.

    Args:
        key: an integer, or an int64 scalar tensor on the device of the axes.
        *axes: int64 coordinates that broadcast against each other, outermost first.
    """
    h = _low_bits(key) if isinstance(key, Tensor) else axes[0].new_full((), as_int32(key), dtype=torch.int32)
    for axis in axes:
        h = fmix32_(h ^ _low_bits(axis * 0x9E3779B1 + 0x7F4A7C15))
    return h


def keep_mask(key: int | Tensor, p: float, *axes: Tensor) -> Tensor:
    """Return True for elements that are kept; False with probability `p`."""
    return (hash_coordinates(key, *axes) ^ as_int32(2**31)) >= int(p * 2**32) - 2**31  # compared as unsigned


def _mask_sBD(x: Tensor, key: int | Tensor, p: float, sample_ids_B: Tensor, first_position: int | Tensor) -> Tensor:
    """Return the mask for x [s, B, D]."""
    s, _, d = x.shape
    positions = first_position
    if not isinstance(positions, Tensor):
        positions = torch.arange(positions, positions + s, device=x.device)
    channels = torch.arange(d, device=x.device)
    return keep_mask(key, p, sample_ids_B.view(1, -1, 1), positions.view(-1, 1, 1), channels)


def dropout_reference(
    x_sBD: Tensor, residual: Tensor | None, p: float, key: int | Tensor, sample_ids_B: Tensor,
    first_position: int | Tensor,
) -> Tensor:  # fmt: skip
    """Compute dropout in torch."""
    y = x_sBD * _mask_sBD(x_sBD, key, p, sample_ids_B, first_position) / (1 - p)
    return y if residual is None else y + residual


@kernel
def fmix32(h):
    """Apply the finalizer to uint32."""
    h = (h ^ (h >> 16)) * 0x85EBCA6B
    h = (h ^ (h >> 13)) * 0xC2B2AE35
    return h ^ (h >> 16)


@kernel
def hash_next(h, axis):
    """Return the hash extended by one coordinate."""
    return fmix32(h ^ (axis.to(tl.uint32) * 0x9E3779B1 + 0x7F4A7C15))


@kernel(do_not_specialize=["key"])
def _dropout_kernel(
    x_ptr, residual_ptr, sample_ids_ptr, y_ptr, key, first_position, batch_size, M, N, stride_xm, stride_rm,
    HAS_POSITIONS: tl.constexpr, DROPOUT_P: tl.constexpr, THRESHOLD: tl.constexpr, HAS_RESIDUAL: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    compute_dtype = tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    mask = (offs_m < M) & (offs_n < N)
    h = hash_next(key.to(tl.uint32), tl.load(sample_ids_ptr + offs_m % batch_size))
    if HAS_POSITIONS:
        h = hash_next(h, tl.load(first_position + offs_m // batch_size, mask=offs_m < M, other=0))
    else:
        h = hash_next(h, offs_m // batch_size + first_position)
    keep = hash_next(h, offs_n) >= THRESHOLD
    x = tl.load(x_ptr + offs_m * stride_xm + offs_n, mask=mask, other=0.0).to(compute_dtype)
    y = tl.where(keep, x * (1.0 / (1.0 - DROPOUT_P)), 0.0)
    if HAS_RESIDUAL:
        y += tl.load(residual_ptr + offs_m * stride_rm + offs_n, mask=mask, other=0.0).to(compute_dtype)
    tl.store(y_ptr + offs_m * N + offs_n, y.to(y_ptr.dtype.element_ty), mask=mask)


def dropout_triton(
    x_sBD: Tensor, residual: Tensor | None, p: float, key: int, sample_ids_B: Tensor, first_position: int | Tensor,
    tile: TileConfig = TILE,
) -> Tensor:  # fmt: skip
    """Compute dropout with one kernel launch."""
    x_ND = as_2d(x_sBD)
    a_ND = x_ND if residual is None else as_2d(residual)
    rows, columns = x_ND.shape
    tile = fit_tile(tile, columns)
    y = torch.empty(x_sBD.shape, dtype=x_sBD.dtype, device=x_sBD.device)
    key_int32 = as_int32(key)  # always 32 bits, because Triton would compile one kernel per width
    has_positions = isinstance(first_position, Tensor)
    if isinstance(first_position, Tensor):
        first_position = first_position.contiguous()
    grid = (ceil_div(rows, tile.block_m), ceil_div(columns, tile.block_n))
    sizes = (x_sBD.shape[1], rows, columns, x_ND.stride(0), a_ND.stride(0))
    constexprs = (has_positions, p, int(p * 2**32), residual is not None, tile.block_m, tile.block_n)
    tensors = (x_ND, a_ND, sample_ids_B.contiguous(), y)
    _dropout_kernel[grid](*tensors, key_int32, first_position, *sizes, *constexprs, num_warps=tile.num_warps)
    return y


class _DropoutAdd(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor | None, fn: Callable[..., Tensor], *args: Any) -> Tensor:
        ctx.fn = fn
        ctx.args = args
        return fn(x, residual, *args)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        dx = ctx.fn(dy, None, *ctx.args)
        return dx, dy if ctx.needs_input_grad[1] else None, None, *(None for _ in ctx.args)


def dropout(
    x_sBD: Tensor,
    p: float,
    key: int | Tensor,
    sample_ids_B: Tensor,
    first_position: int | Tensor = 0,
    residual_sBD: Tensor | None = None,
    impl: Callable[..., Tensor] | None = None,
) -> Tensor:
    """Return dropout(x), or residual + dropout(x).

    Args:
        x_sBD: the input.
        p: the probability that an element is dropped.
        key: the key of the mask (`fold_in`).
        sample_ids_B: global sample numbers.
        first_position: the position of row 0, or an int64 tensor [s] with the position of every row.
        residual_sBD: added to the result, or None.
        impl: the implementation, with the signature of `dropout_reference`, instead of the default; forward and
            backward call it.
    """
    impl = impl or (dropout_triton if use_triton(x_sBD) else dropout_reference)
    return _DropoutAdd.apply(x_sBD, residual_sBD, impl, p, key, sample_ids_B, first_position)  # type: ignore[return-value]
