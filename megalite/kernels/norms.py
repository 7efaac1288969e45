"""LayerNorm and RMSNorm over the last dim, optionally fused with the residual add before them.

    LayerNorm (arXiv:1607.06450)  y = xhat * w + b,  xhat = (x - mean) * r,  r = 1 / sqrt(var + eps)
                                  dx = r * (g - mean(g) - xhat * mean(g * xhat)),  g = dy * w
                                  dw = sum over rows of dy * xhat,  db = sum over rows of dy
    RMSNorm (arXiv:1910.07467)    the same without mean, mean(g) and b:  r = 1 / sqrt(mean(x^2) + eps)
    after an add                  h = x + residual,  y = norm(h);   dx = dresidual = dh + the dx above

Statistics are in fp32 (fp64 for fp64 input). Saved: x (or h), w, r per row, and for LayerNorm the mean per row. Bytes
for N rows of D elements of e bytes: forward 2 N D e, backward 3 N D e; with the add 4 N D e each.
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

# (max width, rows, warps); for backward also programs per multiprocessor and stages
FORWARD, BACKWARD, BACKWARD_CENTERED = load_table(__file__, "tiles")["norms"].values()


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
        xhat = x.to(r.dtype, copy=True).mul_(r)
        dy32 = dy.to(r.dtype, copy=True)
        w = weight.to(r.dtype)
        product = dy32 * xhat
        dw = product.flatten(0, -2).sum(0).to(weight.dtype)
        mean = (product @ w).div_(w.numel()).unsqueeze(-1)  # mean(dy * w * xhat)
        dx = dy32.mul_(w).addcmul_(xhat, mean, value=-1).mul_(r)
        return dx.to(x.dtype), dw, None


def norm_reference(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Compute the norm in torch; this is the definition and the CPU path."""
    if bias is None:
        return _RMSNorm.apply(x, weight, eps)  # type: ignore[return-value]
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


@kernel
def _forward(
    X, A, H, W, B, Y, MEAN, R, rows, columns, stride_x, stride_a,
    EPS: tl.constexpr, ADD: tl.constexpr, CENTERED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    offs = tl.arange(0, COLUMNS)
    mask = (row < rows)[:, None] & (offs < columns)[None, :]
    out_offs = row[:, None] * columns + offs[None, :]
    x = tl.load(X + row[:, None] * stride_x + offs[None, :], mask=mask, other=0.0).to(R.dtype.element_ty)
    if ADD:
        x += tl.load(A + row[:, None] * stride_a + offs[None, :], mask=mask, other=0.0).to(R.dtype.element_ty)
        h = x.to(H.dtype.element_ty)
        tl.store(H + out_offs, h, mask=mask)
        x = h.to(R.dtype.element_ty)  # normalize the rounded value, which backward reads
    if CENTERED:
        mean = tl.sum(x, 1) / columns
        tl.store(MEAN + row, mean, mask=row < rows)
        x = tl.where(mask, x - mean[:, None], 0.0)
    r = tl.rsqrt(tl.sum(x * x, 1) / columns + EPS)
    tl.store(R + row, r, mask=row < rows)
    y = x * r[:, None] * tl.load(W + offs, mask=offs < columns, other=0.0).to(R.dtype.element_ty)[None, :]
    if CENTERED:
        y += tl.load(B + offs, mask=offs < columns, other=0.0).to(R.dtype.element_ty)[None, :]
    tl.store(Y + out_offs, y.to(Y.dtype.element_ty), mask=mask)


@kernel
def _backward(
    DY, DH, X, W, MEAN, R, DX, PARTIAL, rows, columns, stride_dy, stride_dh, stride_x, stride_partial,
    ADD: tl.constexpr, CENTERED: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    offs = tl.arange(0, COLUMNS)
    w = tl.load(W + offs, mask=offs < columns, other=0.0).to(R.dtype.element_ty)[None, :]
    inv_columns = tl.full((), 1.0, R.dtype.element_ty) / columns
    dw = tl.zeros((ROWS, COLUMNS), dtype=R.dtype.element_ty)
    if CENTERED:
        db = tl.zeros((ROWS, COLUMNS), dtype=R.dtype.element_ty)
    for first in tl.range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS, num_stages=STAGES):  # type: ignore
        row = (tl.arange(0, ROWS) + first).to(tl.int64)
        mask = (row < rows)[:, None] & (offs < columns)[None, :]
        r = tl.load(R + row, mask=row < rows, other=0.0)[:, None]
        x = tl.load(X + row[:, None] * stride_x + offs[None, :], mask=mask, other=0.0).to(R.dtype.element_ty)
        dy = tl.load(DY + row[:, None] * stride_dy + offs[None, :], mask=mask, other=0.0).to(R.dtype.element_ty)
        if CENTERED:
            x -= tl.load(MEAN + row, mask=row < rows, other=0.0)[:, None]
            db += dy
        dy *= r  # a common factor of all terms below
        dw += dy * x
        g = dy * w
        if ADD:  # loaded before the sums, so that an iteration waits for memory once
            dh = tl.load(DH + row[:, None] * stride_dh + offs[None, :], mask=mask, other=0.0)
        if CENTERED:
            proj, mean = tl.split(tl.sum(tl.join(g * x, g), 1) * inv_columns)
            g -= mean[:, None]
        else:
            proj = tl.sum(g * x, 1) * inv_columns
        if ADD:
            g += dh.to(R.dtype.element_ty)
        dx = tl.fma(x, -proj[:, None] * r * r, g)
        tl.store(DX + row[:, None] * columns + offs[None, :], dx.to(DX.dtype.element_ty), mask=mask)
    partial_row = PARTIAL + tl.program_id(0).to(tl.int64) * stride_partial + offs
    tl.store(partial_row, tl.sum(dw, 0), mask=offs < columns)
    if CENTERED:
        tl.store(partial_row + columns, tl.sum(db, 0), mask=offs < columns)


def forward(
    x_ND: Tensor, add_ND: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, block: TileConfig
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Launch the forward kernel. Rows may be strided; the results are contiguous.

    Returns:
        y, h (x itself without an add), mean (None without a bias), and r.
    """
    rows, columns = x_ND.shape
    y = torch.empty((rows, columns), dtype=x_ND.dtype, device=x_ND.device)
    h = x_ND if add_ND is None else torch.empty_like(y)
    r = torch.empty(rows, dtype=accum_dtype(x_ND), device=x_ND.device)
    mean = None if bias is None else torch.empty_like(r)
    # The kernel ignores the pointers of absent tensors; any tensor may take their place.
    a = x_ND if add_ND is None else add_ND
    tensors = (x_ND, a, h, weight, weight if bias is None else bias, y, r if mean is None else mean, r)
    sizes = (rows, columns, x_ND.stride(0), a.stride(0))
    constexprs = (eps, add_ND is not None, bias is not None, block.rows, block.columns)
    _forward[(ceil_div(rows, block.rows),)](*tensors, *sizes, *constexprs, num_warps=block.warps)
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
    """Launch the backward kernels and return dx, dw and db (None without a mean).

    With an add, `dh_ND` is the gradient of h; dx includes it.
    """
    rows, columns = x_ND.shape
    dx = torch.empty((rows, columns), dtype=x_ND.dtype, device=x_ND.device)
    programs = min(ceil_div(rows, block.rows), block.programs * num_sms(x_ND.device))
    sum_columns = columns if mean_N is None else 2 * columns  # dw, or dw and db
    partial = torch.empty((programs, sum_columns), dtype=r_N.dtype, device=x_ND.device)
    dh = dy_ND if dh_ND is None else dh_ND
    mean = r_N if mean_N is None else mean_N
    tensors = (dy_ND, dh, x_ND, w_D, mean, r_N, dx, partial)
    sizes = (rows, columns, dy_ND.stride(0), dh.stride(0), x_ND.stride(0), partial.stride(0))
    constexprs = (dh_ND is not None, mean_N is not None, block.rows, block.columns, block.stages)
    _backward[(programs,)](*tensors, *sizes, *constexprs, num_warps=block.warps)
    sums = sum_rows(partial, w_D.dtype)
    return dx, sums[:columns], None if mean_N is None else sums[columns:]


class _Norm(Function):
    """The Triton norm, with the result y, or with a residual (h, y)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float) -> Any:
        weight, bias = weight.contiguous(), None if bias is None else bias.contiguous()
        add_ND = None if residual is None else as_2d(residual)
        y, h, mean, r = forward(as_2d(x), add_ND, weight, bias, eps, tile_for(FORWARD, x.shape[-1]))
        # Save x and not as_2d(x), which may be a copy.
        ctx.save_for_backward(x if residual is None else h, weight, mean, r)
        return y.view(x.shape) if residual is None else (h.view(x.shape), y.view(x.shape))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        *dh, dy = grads
        x, weight, mean, r = ctx.saved_tensors
        block = tile_for(BACKWARD if mean is None else BACKWARD_CENTERED, dy.shape[-1])
        dh_ND = as_2d(dh[0]) if dh else None  # dh is empty without a residual
        dx, dw, db = backward(as_2d(dy), dh_ND, as_2d(x), weight, mean, r, block)
        dx = dx.view(dy.shape)
        return dx, dx if dh else None, dw, db, None


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Normalize the last dim of x [..., D]; weight and bias are [D]. LayerNorm, or without a bias RMSNorm."""
    if use_triton(x, x.shape[-1]):
        return _Norm.apply(x, None, weight, bias, eps)  # type: ignore[return-value]
    return norm_reference(x, weight, bias, eps)


def add_norm(x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """Return h = x + residual and norm(h), both with x's shape and dtype; one Triton kernel computes both."""
    if use_triton(x, x.shape[-1]):
        return _Norm.apply(x, residual, weight, bias, eps)  # type: ignore[return-value]
    h = x + residual
    return h, norm_reference(h, weight, bias, eps)
