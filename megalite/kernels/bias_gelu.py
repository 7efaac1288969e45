"""GELU (arXiv:1606.08415) after an optional bias, exact or in its tanh form; backward needs only the input.

    x = u + b
    tanh form   a = x s,  s = sigmoid(2 k (x + 0.044715 x^3)),  k = sqrt(2/pi)   (1 + tanh z = 2 sigmoid(2 z))
                dx = da (s + x s (1 - s) 2 k (1 + 0.134145 x^2))
    exact       a = x P,  P = (1 + erf(x / sqrt(2))) / 2;   dx = da (P + x exp(-x^2 / 2) / sqrt(2 pi))
    du = dx,  db = sum over rows of dx

Backward also recomputes `a`, in the same pass, for the weight gradient of the next matmul, so neither x nor a is saved.
Arithmetic is in fp32 (fp64 for fp64). Bytes for N x F elements of e bytes: forward 2 N F e, backward 4 N F e.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.kernels.activation import Activation
from megalite.kernels.dispatch import TileConfig, accum_dtype, as_2d, ceil_div, fit_tile, kernel, num_sms, use_triton
from megalite.kernels.row_sum import sum_rows

if TYPE_CHECKING:
    import triton.language as tl

FORWARD_TILE = TileConfig(1, 2048, 4)  # 16 elements per thread: two 16-byte loads of bf16
# A backward program loops over rows and keeps the sums of its columns for db; 4 programs of 4 warps per multiprocessor.
BACKWARD_TILE = TileConfig(1, 1024, 4, 4)


def bias_gelu_forward_reference(u: Tensor, bias: Tensor | None = None, *, tanh: bool) -> Tensor:
    """Compute `forward` in torch."""
    return F.gelu(u if bias is None else u + bias, approximate="tanh" if tanh else "none")


def bias_gelu_backward_reference(
    u: Tensor, da: Tensor, bias: Tensor | None = None, *, tanh: bool
) -> tuple[Tensor, ...]:
    """Compute `backward` in torch."""
    x = u if bias is None else u + bias
    approximate = "tanh" if tanh else "none"
    dx = torch.ops.aten.gelu_backward(da, x, approximate=approximate)
    a = F.gelu(x, approximate=approximate)
    return (a, dx) if bias is None else (a, dx, dx.flatten(0, -2).sum(0))


@kernel
def _log2_tail(z):
    """Return log2 of (1 - erf(z / sqrt(2))) / 2 for z >= 0 in fp32.

    The polynomial is a minimax fit of exp2 of the result and of z times that; both have a maximum error of 5e-8. tl.erf
    takes 30 instructions, most of them to select one of two polynomials.
    """
    q = -2.3349489e-06 * z + 3.3737816e-05
    q = ((q * z - 0.00016129384) * z - 0.00019170354) * z + 0.0071268651
    return (((q * z - 0.052533613) * z - 0.45919828) * z - 1.151106) * z - 1.0


@kernel
def gelu_tile(x, TANH: tl.constexpr):
    """Return gelu(x) and its derivative.

    Instructions may limit the speed: exp takes 5, 1 / x takes 8, exp2 and rsqrt take 1 each.
    """
    square = x * x
    if TANH:
        e = tl.exp2(x * (-2.302208198144325 - 0.1029432395800235 * square))
        root = tl.rsqrt(1.0 + e)
        s = root * root
        a = x * s
        slope = s + a * s * tl.minimum(e, 1e30) * (1.5957691216057308 + 0.21406444881780073 * square)  # 1 - s = s e
    else:
        if x.dtype == tl.float64:
            tail = 0.5 - 0.5 * tl.erf(tl.abs(x) * 0.7071067811865476)
        else:
            tail = tl.exp2(_log2_tail(tl.abs(x)))
        a = tl.maximum(x, 0.0) - tl.abs(x) * tail
        slope = tl.where(x < 0.0, tail, 1.0 - tail) + x * tl.exp2(-0.7213475204444817 * square) * 0.3989422804014327
    return a, slope


@kernel
def _forward(
    u_ptr, bias_ptr, a_ptr, M, N, stride_um,
    HAS_BIAS: tl.constexpr, TANH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    compute_dtype = tl.float64 if u_ptr.dtype.element_ty == tl.float64 else tl.float32
    offs_m = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]).to(tl.int64)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    mask = (offs_m < M) & (offs_n < N)
    x = tl.load(u_ptr + offs_m * stride_um + offs_n, mask=mask, other=0.0).to(compute_dtype)
    if HAS_BIAS:
        x += tl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0).to(compute_dtype)
    a, _ = gelu_tile(x, TANH)
    tl.store(a_ptr + offs_m * N + offs_n, a.to(a_ptr.dtype.element_ty), mask=mask)


@kernel
def _backward(
    u_ptr, bias_ptr, da_ptr, a_ptr, du_ptr, partial_ptr, M, N, stride_um, stride_dam,
    HAS_BIAS: tl.constexpr, TANH: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, NUM_STAGES: tl.constexpr,
):  # fmt: skip
    compute_dtype = tl.float64 if u_ptr.dtype.element_ty == tl.float64 else tl.float32
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    if HAS_BIAS:
        b = tl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0).to(compute_dtype)
        db = tl.zeros((BLOCK_M, BLOCK_N), dtype=compute_dtype)
    for start_m in tl.range(tl.program_id(0) * BLOCK_M, M, tl.num_programs(0) * BLOCK_M, num_stages=NUM_STAGES):  # type: ignore
        offs_m = (tl.arange(0, BLOCK_M)[:, None] + start_m).to(tl.int64)
        mask = (offs_m < M) & (offs_n < N)
        x = tl.load(u_ptr + offs_m * stride_um + offs_n, mask=mask, other=0.0).to(compute_dtype)
        if HAS_BIAS:
            x += b
        a, slope = gelu_tile(x, TANH)
        dx = tl.load(da_ptr + offs_m * stride_dam + offs_n, mask=mask, other=0.0).to(compute_dtype) * slope
        tl.store(a_ptr + offs_m * N + offs_n, a.to(a_ptr.dtype.element_ty), mask=mask)
        tl.store(du_ptr + offs_m * N + offs_n, dx.to(du_ptr.dtype.element_ty), mask=mask)
        if HAS_BIAS:
            db += dx
    if HAS_BIAS:
        partial_ptrs = partial_ptr + tl.program_id(0).to(tl.int64) * N + offs_n
        tl.store(partial_ptrs, tl.sum(db, 0, keep_dims=True), mask=offs_n < N)


def forward(u: Tensor, bias: Tensor | None = None, tanh: bool = True, tile: TileConfig = FORWARD_TILE) -> Tensor:
    """Return gelu(u + bias) for u [..., F] and bias [F], in its tanh form or exactly."""
    if not use_triton(u):
        return bias_gelu_forward_reference(u, bias, tanh=tanh)
    u_NF = as_2d(u)
    rows, columns = u_NF.shape
    tile = fit_tile(tile, columns)
    a = torch.empty(u.shape, dtype=u.dtype, device=u.device)
    b = u if bias is None else bias.contiguous()
    grid = (ceil_div(rows, tile.block_m), ceil_div(columns, tile.block_n))
    constexprs = (bias is not None, tanh, tile.block_m, tile.block_n)
    _forward[grid](u_NF, b, a, rows, columns, u_NF.stride(0), *constexprs, num_warps=tile.num_warps)
    return a


def backward(
    u: Tensor, da: Tensor, bias: Tensor | None = None, tanh: bool = True, tile: TileConfig = BACKWARD_TILE
) -> tuple[Tensor, ...]:
    """Return a, recomputed, and du, both with u's shape, and with a bias also db [F]."""
    if not use_triton(u):
        return bias_gelu_backward_reference(u, da, bias, tanh=tanh)
    u_NF = as_2d(u)
    da_NF = as_2d(da)
    rows, columns = u_NF.shape
    tile = fit_tile(tile, columns)
    column_programs = ceil_div(columns, tile.block_n)
    row_programs = ceil_div(rows, tile.block_m)
    if bias is not None:
        row_programs = min(row_programs, ceil_div(tile.programs_per_sm * num_sms(u.device), column_programs))
    a = torch.empty(u.shape, dtype=u.dtype, device=u.device)
    du = torch.empty(u.shape, dtype=u.dtype, device=u.device)
    partial_rows = 0 if bias is None else row_programs
    partial = torch.empty((partial_rows, columns), dtype=accum_dtype(u), device=u.device)
    b = u if bias is None else bias.contiguous()
    tensors = (u_NF, b, da_NF, a, du, partial)
    sizes = (rows, columns, u_NF.stride(0), da_NF.stride(0))
    constexprs = (bias is not None, tanh, tile.block_m, tile.block_n, tile.num_stages)
    _backward[(row_programs, column_programs)](*tensors, *sizes, *constexprs, num_warps=tile.num_warps)
    return (a, du) if bias is None else (a, du, sum_rows(partial, bias.dtype))


def gelu(*, tanh: bool) -> Activation:
    """Return GELU as an activation."""
    return Activation(functools.partial(forward, tanh=tanh), functools.partial(backward, tanh=tanh), takes_bias=True)
