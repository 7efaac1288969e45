"""GELU (arXiv:1606.08415) after an optional bias, in its tanh form and exactly, with backward from the input alone.

    x = u + b
    tanh form   a = x s,  s = sigmoid(2 k (x + 0.044715 x^3)),  k = sqrt(2/pi)   (1 + tanh z = 2 sigmoid(2 z))
                dx = da (s + x s (1 - s) 2 k (1 + 0.134145 x^2))
    exact       a = x P,  P = (1 + erf(x / sqrt(2))) / 2;   dx = da (P + x exp(-x^2 / 2) / sqrt(2 pi))
    du = dx,  db = sum over rows of dx

Backward gives `a` once more, for the weight gradient of the matmul after it, in the same pass: neither x nor a is
stored. Arithmetic in fp32 (fp64 for fp64). Bytes for N x F elements of e bytes: forward 2 N F e, backward 4 N F e.
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
# Backward walks down the rows of its columns and holds their sums for db; 4 programs of 4 warps per multiprocessor.
BACKWARD_TILE = TileConfig(1, 1024, 4, 4)


def bias_gelu_forward_reference(u: Tensor, bias: Tensor | None = None, *, tanh: bool) -> Tensor:
    form = "tanh" if tanh else "none"
    return F.gelu(u if bias is None else u + bias, approximate=form)


def bias_gelu_backward_reference(
    u: Tensor, da: Tensor, bias: Tensor | None = None, *, tanh: bool
) -> tuple[Tensor, ...]:
    x, form = u if bias is None else u + bias, "tanh" if tanh else "none"
    dx = torch.ops.aten.gelu_backward(da, x, approximate=form)
    a = F.gelu(x, approximate=form)
    return (a, dx) if bias is None else (a, dx, dx.flatten(0, -2).sum(0))


@kernel
def _log2_below(z):
    """log2 of (1 - erf(z / sqrt(2))) / 2 for z >= 0 in fp32: fitted to the least greatest error of its power of two and
    of z times that, which are 5e-8. tl.erf is 30 instructions, most of them to choose between two polynomials."""
    q = -2.3349489e-06 * z + 3.3737816e-05
    q = ((q * z - 0.00016129384) * z - 0.00019170354) * z + 0.0071268651
    return (((q * z - 0.052533613) * z - 0.45919828) * z - 1.151106) * z - 1.0


@kernel
def _gelu(x, TANH: tl.constexpr):
    """gelu(x) and its derivative. Instructions may be what takes the time: exp is 5, 1 / x 8, exp2 and rsqrt 1."""
    square = x * x
    if TANH:
        e = tl.exp2(x * (-2.302208198144325 - 0.1029432395800235 * square))
        root = tl.rsqrt(1.0 + e)
        s = root * root
        a = x * s
        slope = s + a * s * tl.minimum(e, 1e30) * (1.5957691216057308 + 0.21406444881780073 * square)  # 1 - s = s e
    else:
        if x.dtype == tl.float64:
            below = 0.5 - 0.5 * tl.erf(tl.abs(x) * 0.7071067811865476)
        else:
            below = tl.exp2(_log2_below(tl.abs(x)))
        a = tl.maximum(x, 0.0) - tl.abs(x) * below
        slope = tl.where(x < 0.0, below, 1.0 - below) + x * tl.exp2(-0.7213475204444817 * square) * 0.3989422804014327
    return a, slope


@kernel
def _forward(
    U, B, A, rows, columns, stride,
    BIAS: tl.constexpr, TANH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    wide = tl.float64 if U.dtype.element_ty == tl.float64 else tl.float32
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (at < columns)
    x = tl.load(U + row * stride + at, mask=inside, other=0.0).to(wide)
    if BIAS:
        x += tl.load(B + at, mask=at < columns, other=0.0).to(wide)
    a, _ = _gelu(x, TANH)
    tl.store(A + row * columns + at, a.to(A.dtype.element_ty), mask=inside)


@kernel
def _backward(
    U, B, DA, A, DU, PARTIAL, rows, columns, stride_u, stride_da,
    BIAS: tl.constexpr, TANH: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    wide = tl.float64 if U.dtype.element_ty == tl.float64 else tl.float32
    at = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    if BIAS:
        b = tl.load(B + at, mask=at < columns, other=0.0).to(wide)
        db = tl.zeros((ROWS, COLUMNS), dtype=wide)
    for first in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):  # type: ignore
        row = (tl.arange(0, ROWS)[:, None] + first).to(tl.int64)
        inside = (row < rows) & (at < columns)
        x = tl.load(U + row * stride_u + at, mask=inside, other=0.0).to(wide)
        if BIAS:
            x += b
        a, slope = _gelu(x, TANH)
        dx = tl.load(DA + row * stride_da + at, mask=inside, other=0.0).to(wide) * slope
        tl.store(A + row * columns + at, a.to(A.dtype.element_ty), mask=inside)
        tl.store(DU + row * columns + at, dx.to(DU.dtype.element_ty), mask=inside)
        if BIAS:
            db += dx
    if BIAS:
        own = PARTIAL + tl.program_id(0).to(tl.int64) * columns + at
        tl.store(own, tl.sum(db, 0, keep_dims=True), mask=at < columns)


def forward(u: Tensor, bias: Tensor | None = None, tanh: bool = True, block: TileConfig = FORWARD_TILE) -> Tensor:
    """gelu(u + bias), u [..., F], bias [F]."""
    if not use_triton(u):
        return bias_gelu_forward_reference(u, bias, tanh=tanh)
    u_NF = as_2d(u)
    rows, columns = u_NF.shape
    block = fit_tile(block, columns)
    a = torch.empty(u.shape, dtype=u.dtype, device=u.device)
    b = u if bias is None else bias.contiguous()
    _forward[(ceil_div(rows, block.rows), ceil_div(columns, block.columns))](
        *(u_NF, b, a, rows, columns, u_NF.stride(0), bias is not None, tanh, block.rows, block.columns),
        num_warps=block.warps,
    )
    return a


def backward(
    u: Tensor, da: Tensor, bias: Tensor | None = None, tanh: bool = True, block: TileConfig = BACKWARD_TILE
) -> tuple[Tensor, ...]:
    """a again and du, both of u's shape, and with a bias db [F]."""
    if not use_triton(u):
        return bias_gelu_backward_reference(u, da, bias, tanh=tanh)
    u_NF, da_NF = as_2d(u), as_2d(da)
    rows, columns = u_NF.shape
    block = fit_tile(block, columns)
    across, programs = ceil_div(columns, block.columns), ceil_div(rows, block.rows)
    if bias is not None:
        programs = min(programs, ceil_div(block.programs * num_sms(u.device), across))
    a, du = (torch.empty(u.shape, dtype=u.dtype, device=u.device) for _ in range(2))
    partial = torch.empty((programs if bias is not None else 0, columns), dtype=accum_dtype(u), device=u.device)
    b = u if bias is None else bias.contiguous()
    _backward[(programs, across)](
        *(u_NF, b, da_NF, a, du, partial, rows, columns, u_NF.stride(0), da_NF.stride(0)),
        *(bias is not None, tanh, block.rows, block.columns, block.stages),
        num_warps=block.warps,
    )
    return (a, du) if bias is None else (a, du, sum_rows(partial, bias.dtype))


def gelu(*, tanh: bool) -> Activation:
    return Activation(functools.partial(forward, tanh=tanh), functools.partial(backward, tanh=tanh), takes_bias=True)
