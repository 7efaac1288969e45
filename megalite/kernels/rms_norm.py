"""RMSNorm over the last dim (arXiv:1910.07467), and the same fused with the residual add before it.

    y = x * r * w,  r = 1 / sqrt(mean(x^2) + eps)
    dx = r * (dy * w - xhat * mean(dy * w * xhat)),  xhat = x * r;   dw = sum over rows of dy * xhat
    after an add: h = x + residual,  y = norm(h);   dx = dresidual = dh + the dx above

Statistics in fp32 (fp64 for fp64 input). Saved: x (or h), w and r (one number per row).
Bytes for N rows of D elements of e bytes: forward 2 N D e, backward 3 N D e; with the add 4 N D e each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd import Function

from megalite.kernels.columns import sum_rows
from megalite.kernels.dispatch import TileSizes, as_rows, ceil_div, kernel, processors, stat_dtype, tile_for, use_triton

if TYPE_CHECKING:
    import triton.language as tl

# (largest width, rows, warps). One program holds whole rows, so that x is read once. Narrow rows (q/k norms have
# 64 to 128 columns) are taken several at a time, or a program would have less than one 16-byte load per thread.
FORWARD = ((128, 32, 4), (256, 16, 4), (512, 8, 4), (1024, 4, 4), (2048, 2, 4), (4096, 1, 4), (8192, 1, 8))
FORWARD += ((16384, 1, 16), (32768, 1, 32))
# (largest width, rows, warps, programs per multiprocessor). Backward walks over rows, so that each program leaves one
# row of weight gradients, and holds dy and that row too. All programs are resident at once: ptxas gives 80 registers a
# thread at 4096 columns, so three of 8 warps fit.
BACKWARD = ((128, 16, 4, 4), (256, 8, 4, 4), (512, 4, 4, 4), (1024, 2, 4, 4), (2048, 1, 8, 4), (4096, 1, 16, 2))
BACKWARD += ((8192, 1, 16, 1), (16384, 1, 32, 1), (32768, 1, 32, 1))


class _Reference(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x32 = x.to(stat_dtype(x), copy=True)
        r = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, r)
        return x32.mul_(r).mul_(weight.to(r.dtype)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, r = ctx.saved_tensors
        xhat, dy32, w = x.to(r.dtype, copy=True).mul_(r), dy.to(r.dtype, copy=True), weight.to(r.dtype)
        product = dy32 * xhat
        dw = product.flatten(0, -2).sum(0).to(weight.dtype)
        mean = (product @ w).div_(w.numel()).unsqueeze(-1)  # of dy * w * xhat
        dx = dy32.mul_(w).addcmul_(xhat, mean, value=-1).mul_(r)
        return dx.to(x.dtype), dw, None


def rms_norm_reference(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The definition in torch, and the CPU path."""
    return _Reference.apply(x, weight, eps)  # type: ignore[return-value]


@kernel
def _forward(
    X, A, H, W, Y, R, rows, columns, stride_x, stride_a,
    EPS: tl.constexpr, ADD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    at = tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (at < columns)[None, :]
    out = row[:, None] * columns + at[None, :]
    x = tl.load(X + row[:, None] * stride_x + at[None, :], mask=inside, other=0.0).to(R.dtype.element_ty)
    if ADD:
        x += tl.load(A + row[:, None] * stride_a + at[None, :], mask=inside, other=0.0).to(R.dtype.element_ty)
        h = x.to(H.dtype.element_ty)
        tl.store(H + out, h, mask=inside)
        x = h.to(R.dtype.element_ty)  # of what backward will read
    r = 1.0 / tl.sqrt(tl.sum(x * x, 1) / columns + EPS)
    tl.store(R + row, r, mask=row < rows)
    w = tl.load(W + at, mask=at < columns, other=0.0).to(R.dtype.element_ty)
    tl.store(Y + out, (x * r[:, None] * w[None, :]).to(Y.dtype.element_ty), mask=inside)


@kernel
def _backward(
    DY, DH, X, W, R, DX, PARTIAL, rows, columns, stride_dy, stride_dh, stride_x,
    ADD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, COLUMNS)
    w = tl.load(W + at, mask=at < columns, other=0.0).to(R.dtype.element_ty)[None, :]
    dw = tl.zeros((ROWS, COLUMNS), dtype=R.dtype.element_ty)
    for first in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = tl.arange(0, ROWS).to(tl.int64) + first
        inside = (row < rows)[:, None] & (at < columns)[None, :]
        r = tl.load(R + row, mask=row < rows, other=0.0)[:, None]
        xhat = tl.load(X + row[:, None] * stride_x + at[None, :], mask=inside, other=0.0).to(R.dtype.element_ty) * r
        dy = tl.load(DY + row[:, None] * stride_dy + at[None, :], mask=inside, other=0.0).to(R.dtype.element_ty)
        dw += dy * xhat
        g = dy * w
        dx = (g - xhat * (tl.sum(g * xhat, 1) / columns)[:, None]) * r
        if ADD:
            dx += tl.load(DH + row[:, None] * stride_dh + at[None, :], mask=inside, other=0.0).to(R.dtype.element_ty)
        tl.store(DX + row[:, None] * columns + at[None, :], dx.to(DX.dtype.element_ty), mask=inside)
    tl.store(PARTIAL + tl.program_id(0).to(tl.int64) * columns + at, tl.sum(dw, 0), mask=at < columns)


def forward(x_ND: Tensor, add_ND: Tensor | None, weight: Tensor, eps: float, block: TileSizes) -> tuple[Tensor, ...]:
    """y, h (x itself without an add) and r; rows may be strided, the results are contiguous."""
    rows, columns = x_ND.shape
    y = torch.empty((rows, columns), dtype=x_ND.dtype, device=x_ND.device)
    h = x_ND if add_ND is None else torch.empty_like(y)
    r = torch.empty(rows, dtype=stat_dtype(x_ND), device=x_ND.device)
    a = x_ND if add_ND is None else add_ND
    _forward[(ceil_div(rows, block.rows),)](
        *(x_ND, a, h, weight, y, r, rows, columns, x_ND.stride(0), a.stride(0)),
        *(eps, add_ND is not None, block.rows, block.columns),
        num_warps=block.warps,
    )
    return y, h, r


def backward(
    dy_ND: Tensor, dh_ND: Tensor | None, x_ND: Tensor, weight: Tensor, r_N: Tensor, block: TileSizes
) -> tuple[Tensor, Tensor]:
    """dx and dw."""
    rows, columns = x_ND.shape
    dx = torch.empty((rows, columns), dtype=x_ND.dtype, device=x_ND.device)
    programs = min(ceil_div(rows, block.rows), block.programs * processors(x_ND.device))
    partial = torch.empty((programs, columns), dtype=r_N.dtype, device=x_ND.device)
    dh = dy_ND if dh_ND is None else dh_ND
    _backward[(programs,)](
        *(dy_ND, dh, x_ND, weight, r_N, dx, partial, rows, columns, dy_ND.stride(0), dh.stride(0), x_ND.stride(0)),
        *(dh_ND is not None, block.rows, block.columns),
        num_warps=block.warps,
    )
    return dx, sum_rows(partial, weight.dtype)


class _RMSNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x_ND, weight = as_rows(x), weight.contiguous()
        y, _, r = forward(x_ND, None, weight, eps, tile_for(FORWARD, x.shape[-1]))
        ctx.save_for_backward(x, weight, r)  # as it came: where rows are apart x_ND is a copy
        return y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, r = ctx.saved_tensors
        dx, dw = backward(as_rows(dy), None, as_rows(x), weight, r, tile_for(BACKWARD, dy.shape[-1]))
        return dx.view(dy.shape), dw, None


class _AddRMSNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        weight = weight.contiguous()
        y, h, r = forward(as_rows(x), as_rows(residual), weight, eps, tile_for(FORWARD, x.shape[-1]))
        ctx.save_for_backward(h, weight, r)
        return h.view(x.shape), y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, dh: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        h, weight, r = ctx.saved_tensors
        dx, dw = backward(as_rows(dy), as_rows(dh), h, weight, r, tile_for(BACKWARD, dy.shape[-1]))
        return dx.view(dy.shape), dx.view(dy.shape), dw, None


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise the last dim of x [..., D] by its root mean square; weight [D]."""
    if use_triton(x, x.shape[-1]):
        return _RMSNorm.apply(x, weight, eps)  # type: ignore[return-value]
    return rms_norm_reference(x, weight, eps)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """h = x + residual and rms_norm(h), both of x's shape and dtype."""
    if use_triton(x, x.shape[-1]):
        return _AddRMSNorm.apply(x, residual, weight, eps)  # type: ignore[return-value]
    return add_rms_norm_reference(x, residual, weight, eps)


def add_rms_norm_reference(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    h = x + residual
    return h, rms_norm_reference(h, weight, eps)
