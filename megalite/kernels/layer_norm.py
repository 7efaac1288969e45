"""LayerNorm over the last dim (arXiv:1607.06450), and the same fused with the residual add before it.

    y = xhat * w + b,  xhat = (x - mean) * r,  r = 1 / sqrt(var + eps)
    dx = r * (g - mean(g) - xhat * mean(g * xhat)),  g = dy * w;   dw = sum dy * xhat,  db = sum dy
    after an add: h = x + residual,  y = norm(h);   dx = dresidual = dh + the dx above

Statistics in fp32 (fp64 for fp64 input). Saved: x (or h), mean and r (one number each per row), w.
Bytes for N rows of D elements of e bytes: forward 2 N D e, backward 3 N D e; with the add 4 N D e each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from megalite.kernels.columns import sum_rows
from megalite.kernels.dispatch import TileSizes, as_rows, ceil_div, kernel, processors, stat_dtype, tile_for, use_triton

if TYPE_CHECKING:
    import triton.language as tl

# (largest width, rows, warps). Whole rows, so that x is read once; narrow rows several at a time.
FORWARD = ((128, 32, 4), (256, 16, 4), (512, 8, 4), (1024, 4, 4), (2048, 2, 4), (4096, 1, 4), (8192, 1, 8))
FORWARD += ((16384, 1, 16), (32768, 1, 32))
# (largest width, rows, warps, programs per multiprocessor). Two rows of sums are held: fewer rows than in rms_norm.
BACKWARD = ((128, 16, 4, 4), (256, 8, 4, 4), (512, 4, 4, 4), (1024, 2, 4, 4), (2048, 1, 4, 4), (4096, 1, 8, 2))
BACKWARD += ((8192, 1, 16, 1), (16384, 1, 32, 1), (32768, 1, 32, 1))


def layer_norm_reference(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Torch's own kernel, and the CPU path."""
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


def add_layer_norm_reference(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    h = x + residual
    return h, layer_norm_reference(h, weight, bias, eps)


@kernel
def _forward(
    X, A, H, W, B, Y, MEAN, R, rows, columns, stride_x, stride_a,
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
    mean = tl.sum(x, 1) / columns
    centred = tl.where(inside, x - mean[:, None], 0.0)
    r = 1.0 / tl.sqrt(tl.sum(centred * centred, 1) / columns + EPS)
    tl.store(MEAN + row, mean, mask=row < rows)
    tl.store(R + row, r, mask=row < rows)
    w = tl.load(W + at, mask=at < columns, other=0.0).to(R.dtype.element_ty)
    b = tl.load(B + at, mask=at < columns, other=0.0).to(R.dtype.element_ty)
    tl.store(Y + out, (centred * r[:, None] * w[None, :] + b[None, :]).to(Y.dtype.element_ty), mask=inside)


@kernel
def _backward(
    DY, DH, X, W, MEAN, R, DX, PARTIAL, rows, columns, stride_dy, stride_dh, stride_x,
    ADD: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, COLUMNS)
    w = tl.load(W + at, mask=at < columns, other=0.0).to(R.dtype.element_ty)[None, :]
    dw = tl.zeros((ROWS, COLUMNS), dtype=R.dtype.element_ty)
    db = tl.zeros((ROWS, COLUMNS), dtype=R.dtype.element_ty)
    for first in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row = tl.arange(0, ROWS).to(tl.int64) + first
        inside = (row < rows)[:, None] & (at < columns)[None, :]
        r = tl.load(R + row, mask=row < rows, other=0.0)[:, None]
        mean = tl.load(MEAN + row, mask=row < rows, other=0.0)[:, None]
        x = tl.load(X + row[:, None] * stride_x + at[None, :], mask=inside, other=0.0).to(R.dtype.element_ty)
        xhat = tl.where(inside, (x - mean) * r, 0.0)
        dy = tl.load(DY + row[:, None] * stride_dy + at[None, :], mask=inside, other=0.0).to(R.dtype.element_ty)
        dw += dy * xhat
        db += dy
        g = dy * w
        dx = (g - (tl.sum(g, 1) / columns)[:, None] - xhat * (tl.sum(g * xhat, 1) / columns)[:, None]) * r
        if ADD:
            dx += tl.load(DH + row[:, None] * stride_dh + at[None, :], mask=inside, other=0.0).to(R.dtype.element_ty)
        tl.store(DX + row[:, None] * columns + at[None, :], dx.to(DX.dtype.element_ty), mask=inside)
    own = PARTIAL + tl.program_id(0).to(tl.int64) * 2 * columns + at
    tl.store(own, tl.sum(dw, 0), mask=at < columns)
    tl.store(own + columns, tl.sum(db, 0), mask=at < columns)


def forward(
    x_ND: Tensor, add_ND: Tensor | None, weight: Tensor, bias: Tensor, eps: float, block: TileSizes
) -> tuple[Tensor, ...]:
    """y, h (x itself without an add), mean and r; rows may be strided, the results are contiguous."""
    rows, columns = x_ND.shape
    y = torch.empty((rows, columns), dtype=x_ND.dtype, device=x_ND.device)
    h = x_ND if add_ND is None else torch.empty_like(y)
    mean, r = (torch.empty(rows, dtype=stat_dtype(x_ND), device=x_ND.device) for _ in range(2))
    a = x_ND if add_ND is None else add_ND
    _forward[(ceil_div(rows, block.rows),)](
        *(x_ND, a, h, weight, bias, y, mean, r, rows, columns, x_ND.stride(0), a.stride(0)),
        *(eps, add_ND is not None, block.rows, block.columns),
        num_warps=block.warps,
    )
    return y, h, mean, r


def backward(
    dy_ND: Tensor, dh_ND: Tensor | None, x_ND: Tensor, weight: Tensor, mean_N: Tensor, r_N: Tensor, block: TileSizes
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, dw and db."""
    rows, columns = x_ND.shape
    dx = torch.empty((rows, columns), dtype=x_ND.dtype, device=x_ND.device)
    programs = min(ceil_div(rows, block.rows), block.programs * processors(x_ND.device))
    partial = torch.empty((programs, 2 * columns), dtype=r_N.dtype, device=x_ND.device)
    dh = dy_ND if dh_ND is None else dh_ND
    _backward[(programs,)](
        *(dy_ND, dh, x_ND, weight, mean_N, r_N, dx, partial),
        *(rows, columns, dy_ND.stride(0), dh.stride(0), x_ND.stride(0)),
        *(dh_ND is not None, block.rows, block.columns),
        num_warps=block.warps,
    )
    dw, db = sum_rows(partial, weight.dtype).chunk(2)
    return dx, dw, db


class _LayerNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, eps: float) -> Tensor:
        x_ND, weight = as_rows(x), weight.contiguous()
        y, _, mean, r = forward(x_ND, None, weight, bias.contiguous(), eps, tile_for(FORWARD, x.shape[-1]))
        ctx.save_for_backward(x, weight, mean, r)  # as it came: where rows are apart x_ND is a copy
        return y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, *rest = ctx.saved_tensors
        dx, dw, db = backward(as_rows(dy), None, as_rows(x), *rest, block=tile_for(BACKWARD, dy.shape[-1]))
        return dx.view(dy.shape), dw, db, None


class _AddLayerNorm(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, eps: float
    ) -> tuple[Tensor, Tensor]:
        weight, block = weight.contiguous(), tile_for(FORWARD, x.shape[-1])
        y, h, mean, r = forward(as_rows(x), as_rows(residual), weight, bias.contiguous(), eps, block)
        ctx.save_for_backward(h, weight, mean, r)
        return h.view(x.shape), y.view(x.shape)

    @staticmethod
    def backward(ctx: Any, dh: Tensor, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        block = tile_for(BACKWARD, dy.shape[-1])
        dx, dw, db = backward(as_rows(dy), as_rows(dh), *ctx.saved_tensors, block=block)
        return dx.view(dy.shape), dx.view(dy.shape), dw, db, None


def layer_norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Normalise the last dim of x [..., D]; weight and bias [D]. Without a bias torch's kernel runs."""
    if bias is not None and use_triton(x, x.shape[-1]):
        return _LayerNorm.apply(x, weight, bias, eps)  # type: ignore[return-value]
    return layer_norm_reference(x, weight, bias, eps)


def add_layer_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """h = x + residual and layer_norm(h), both of x's shape and dtype."""
    if bias is not None and use_triton(x, x.shape[-1]):
        return _AddLayerNorm.apply(x, residual, weight, bias, eps)  # type: ignore[return-value]
    return add_layer_norm_reference(x, residual, weight, bias, eps)
