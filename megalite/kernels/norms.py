"""LayerNorm and RMSNorm over the last dim, and the same fused with the residual add before them.

    LayerNorm (arXiv:1607.06450)  y = xhat * w + b,  xhat = (x - mean) * r,  r = 1 / sqrt(var + eps)
                                  dx = r * (g - mean(g) - xhat * mean(g * xhat)),  g = dy * w
                                  dw = sum over rows of dy * xhat,  db = sum over rows of dy
    RMSNorm (arXiv:1910.07467)    the same without mean, mean(g) and b:  r = 1 / sqrt(mean(x^2) + eps)
    after an add                  h = x + residual,  y = norm(h);   dx = dresidual = dh + the dx above

Statistics in fp32 (fp64 for fp64 input). Saved: x (or h), w, and one number per row: r, and of LayerNorm the mean.
Bytes for N rows of D elements of e bytes: forward 2 N D e, backward 3 N D e; with the add 4 N D e each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from megalite.common.tables import load_table
from megalite.kernels.dispatch import TileConfig, accum_dtype, as_2d, ceil_div, kernel, num_sms, tile_for, use_triton
from megalite.kernels.row_sum import sum_rows

if TYPE_CHECKING:
    import triton.language as tl

# (largest width, rows, warps); of backward also programs per multiprocessor and stages
FORWARD, BACKWARD, BACKWARD_CENTRED = load_table(__file__, "tiles")["norms"].values()


class _RMSNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x32 = x.to(accum_dtype(x), copy=True)
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


def norm_reference(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """The definition in torch, and the CPU path."""
    if bias is None:
        return _RMSNorm.apply(x, weight, eps)  # type: ignore[return-value]
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


@kernel
def _forward(
    X, A, H, W, B, Y, MEAN, R, rows, columns, stride_x, stride_a,
    EPS: tl.constexpr, ADD: tl.constexpr, CENTERED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    at = tl.arange(0, COLUMNS)
    inside = (row < rows)[:, None] & (at < columns)[None, :]
    out = row[:, None] * columns + at[None, :]
    x = tl.load(X + row[:, None] * stride_x + at[None, :], mask=inside, other=0.0).to(R.dtype.element_ty)
    if ADD:
        x += tl.load(A + row[:, None] * stride_a + at[None, :], mask=inside, other=0.0).to(R.dtype.element_ty)
        h = x.to(H.dtype.element_ty)
        tl.store(H + out, h, mask=inside)
        x = h.to(R.dtype.element_ty)  # of what backward will read
    if CENTERED:
        mean = tl.sum(x, 1) / columns
        tl.store(MEAN + row, mean, mask=row < rows)
        x = tl.where(inside, x - mean[:, None], 0.0)
    r = tl.rsqrt(tl.sum(x * x, 1) / columns + EPS)
    tl.store(R + row, r, mask=row < rows)
    y = x * r[:, None] * tl.load(W + at, mask=at < columns, other=0.0).to(R.dtype.element_ty)[None, :]
    if CENTERED:
        y += tl.load(B + at, mask=at < columns, other=0.0).to(R.dtype.element_ty)[None, :]
    tl.store(Y + out, y.to(Y.dtype.element_ty), mask=inside)


@kernel
def _backward(
    DY, DH, X, W, MEAN, R, DX, PARTIAL, rows, columns, stride_dy, stride_dh, stride_x, stride_partial,
    ADD: tl.constexpr, CENTERED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    at = tl.arange(0, COLUMNS)
    w = tl.load(W + at, mask=at < columns, other=0.0).to(R.dtype.element_ty)[None, :]
    inv_columns = tl.full((), 1.0, R.dtype.element_ty) / columns
    dw = tl.zeros((ROWS, COLUMNS), dtype=R.dtype.element_ty)
    if CENTERED:
        db = tl.zeros((ROWS, COLUMNS), dtype=R.dtype.element_ty)
    for first in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):  # type: ignore
        row = (tl.arange(0, ROWS) + first).to(tl.int64)
        inside = (row < rows)[:, None] & (at < columns)[None, :]
        r = tl.load(R + row, mask=row < rows, other=0.0)[:, None]
        x = tl.load(X + row[:, None] * stride_x + at[None, :], mask=inside, other=0.0).to(R.dtype.element_ty)
        dy = tl.load(DY + row[:, None] * stride_dy + at[None, :], mask=inside, other=0.0).to(R.dtype.element_ty)
        if CENTERED:
            x -= tl.load(MEAN + row, mask=row < rows, other=0.0)[:, None]
            db += dy
        dy *= r  # which every term below has, and dx in place of r times a sum of them
        dw += dy * x
        g = dy * w
        if ADD:  # asked for before the sums, so that a turn waits for memory once
            dh = tl.load(DH + row[:, None] * stride_dh + at[None, :], mask=inside, other=0.0)
        if CENTERED:
            proj, mean = tl.split(tl.sum(tl.join(g * x, g), 1) * inv_columns)
            g -= mean[:, None]
        else:
            proj = tl.sum(g * x, 1) * inv_columns
        if ADD:
            g += dh.to(R.dtype.element_ty)
        dx = tl.fma(x, -proj[:, None] * r * r, g)
        tl.store(DX + row[:, None] * columns + at[None, :], dx.to(DX.dtype.element_ty), mask=inside)
    partial_row = PARTIAL + tl.program_id(0).to(tl.int64) * stride_partial + at
    tl.store(partial_row, tl.sum(dw, 0), mask=at < columns)
    if CENTERED:
        tl.store(partial_row + columns, tl.sum(db, 0), mask=at < columns)


def forward(
    x_ND: Tensor, add_ND: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, block: TileConfig
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """y, h (x itself without an add), mean (None without a bias) and r; rows may be strided, the results are
    contiguous."""
    rows, columns = x_ND.shape
    y = torch.empty((rows, columns), dtype=x_ND.dtype, device=x_ND.device)
    h = x_ND if add_ND is None else torch.empty_like(y)
    a = x_ND if add_ND is None else add_ND
    r = torch.empty(rows, dtype=accum_dtype(x_ND), device=x_ND.device)
    mean = None if bias is None else torch.empty_like(r)
    _forward[(ceil_div(rows, block.rows),)](
        *(x_ND, a, h, weight, weight if bias is None else bias, y, r if mean is None else mean, r),
        *(rows, columns, x_ND.stride(0), a.stride(0)),
        *(eps, add_ND is not None, bias is not None, block.rows, block.columns),
        num_warps=block.warps,
    )
    return y, h, mean, r


def backward(
    dy_ND: Tensor,
    dh_ND: Tensor | None,
    x_ND: Tensor,
    w_D: Tensor,
    mean_N: Tensor | None,
    r_N: Tensor,
    block: TileConfig,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """dx, dw and db (None without a mean)."""
    rows, columns = x_ND.shape
    dx = torch.empty((rows, columns), dtype=x_ND.dtype, device=x_ND.device)
    programs = min(ceil_div(rows, block.rows), block.programs * num_sms(x_ND.device))
    partial = torch.empty((programs, columns * (1 + (mean_N is not None))), dtype=r_N.dtype, device=x_ND.device)
    dh, mean = (dy_ND if dh_ND is None else dh_ND), (r_N if mean_N is None else mean_N)
    _backward[(programs,)](
        *(dy_ND, dh, x_ND, w_D, mean, r_N, dx, partial),
        *(rows, columns, dy_ND.stride(0), dh.stride(0), x_ND.stride(0), partial.stride(0)),
        *(dh_ND is not None, mean_N is not None, block.rows, block.columns, block.stages),
        num_warps=block.warps,
    )
    sums = sum_rows(partial, w_D.dtype)
    return dx, sums[:columns], None if mean_N is None else sums[columns:]


class _Norm(Function):
    """y, or after an add (h, y)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float) -> Any:
        weight, bias = weight.contiguous(), None if bias is None else bias.contiguous()
        add_ND = None if residual is None else as_2d(residual)
        y, h, mean, r = forward(as_2d(x), add_ND, weight, bias, eps, tile_for(FORWARD, x.shape[-1]))
        # x as it came: where rows are apart the rows are a copy
        ctx.save_for_backward(x if residual is None else h, weight, mean, r)
        return y.view(x.shape) if residual is None else (h.view(x.shape), y.view(x.shape))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        *dh, dy = grads
        x, weight, mean, r = ctx.saved_tensors
        block = tile_for(BACKWARD if mean is None else BACKWARD_CENTRED, dy.shape[-1])
        dh_ND = as_2d(dh[0]) if dh else None
        dx, dw, db = backward(as_2d(dy), dh_ND, as_2d(x), weight, mean, r, block)
        dx = dx.view(dy.shape)
        return dx, dx if dh else None, dw, db, None


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Normalise the last dim of x [..., D]; weight and bias [D]. LayerNorm, or without a bias RMSNorm."""
    if use_triton(x, x.shape[-1]):
        return _Norm.apply(x, None, weight, bias, eps)  # type: ignore[return-value]
    return norm_reference(x, weight, bias, eps)


def add_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """h = x + residual and norm(h), both of x's shape and dtype; the Triton kernel computes both in one pass."""
    if use_triton(x, x.shape[-1]):
        return _Norm.apply(x, residual, weight, bias, eps)  # type: ignore[return-value]
    h = x + residual
    return h, norm_reference(h, weight, bias, eps)
