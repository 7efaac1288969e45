"""LayerNorm and RMSNorm over the last dim, optionally fused with the residual add before them.

    LayerNorm (arXiv:1607.06450)  y = xhat * w + b,  xhat = (x - mean) * rstd,  rstd = 1 / sqrt(var + eps)
                                  dx = rstd * (g - mean(g) - xhat * mean(g * xhat)),  g = dy * w
                                  dw = sum over rows of dy * xhat,  db = sum over rows of dy
    RMSNorm (arXiv:1910.07467)    the same without mean, mean(g) and b:  rstd = 1 / sqrt(mean(x^2) + eps)
    after an add                  h = x + residual,  y = norm(h);   dx = dresidual = dh + the dx above

Statistics are in fp32 (fp64 for fp64 input). Saved: x (or h), w, rstd per row, and for LayerNorm the mean per row.
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

# (max width, block_m, num_warps); for backward also programs_per_sm and num_stages
FORWARD, BACKWARD, BACKWARD_CENTERED = load_table(__file__, "tiles")["norms"].values()


class _RMSNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        x32 = x.to(accum_dtype(x), copy=True)
        rstd = torch.rsqrt(x32.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(x, weight, rstd)
        return x32.mul_(rstd).mul_(weight.to(rstd.dtype)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x, weight, rstd = ctx.saved_tensors
        xhat = x.to(rstd.dtype, copy=True).mul_(rstd)
        dy32 = dy.to(rstd.dtype, copy=True)
        w = weight.to(rstd.dtype)
        product = dy32 * xhat
        dw = product.flatten(0, -2).sum(0).to(weight.dtype)
        mean = (product @ w).div_(w.numel()).unsqueeze(-1)  # mean(dy * w * xhat)
        dx = dy32.mul_(w).addcmul_(xhat, mean, value=-1).mul_(rstd)
        return dx.to(x.dtype), dw, None


def norm_reference(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """Compute the norm in torch; this is the definition and the CPU path."""
    if bias is None:
        return _RMSNorm.apply(x, weight, eps)  # type: ignore[return-value]
    return F.layer_norm(x, (x.shape[-1],), weight, bias, eps)


@kernel
def _forward(
    x_ptr, residual_ptr, h_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr, M, N, stride_xm, stride_rm,
    EPS: tl.constexpr, HAS_RESIDUAL: tl.constexpr, CENTERED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    compute_dtype = rstd_ptr.dtype.element_ty
    offs_m = (tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
    offs_n = tl.arange(0, BLOCK_N)
    mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    out_offs = offs_m[:, None] * N + offs_n[None, :]
    x = tl.load(x_ptr + offs_m[:, None] * stride_xm + offs_n[None, :], mask=mask, other=0.0).to(compute_dtype)
    if HAS_RESIDUAL:
        x += tl.load(residual_ptr + offs_m[:, None] * stride_rm + offs_n[None, :], mask=mask, other=0.0).to(
            compute_dtype
        )
        h = x.to(h_ptr.dtype.element_ty)
        tl.store(h_ptr + out_offs, h, mask=mask)
        x = h.to(compute_dtype)  # normalize the rounded value, which backward reads
    if CENTERED:
        mean = tl.sum(x, 1) / N
        tl.store(mean_ptr + offs_m, mean, mask=offs_m < M)
        x = tl.where(mask, x - mean[:, None], 0.0)
    rstd = tl.rsqrt(tl.sum(x * x, 1) / N + EPS)
    tl.store(rstd_ptr + offs_m, rstd, mask=offs_m < M)
    y = x * rstd[:, None] * tl.load(w_ptr + offs_n, mask=offs_n < N, other=0.0).to(compute_dtype)[None, :]
    if CENTERED:
        y += tl.load(b_ptr + offs_n, mask=offs_n < N, other=0.0).to(compute_dtype)[None, :]
    tl.store(y_ptr + out_offs, y.to(y_ptr.dtype.element_ty), mask=mask)


@kernel
def _backward(
    dy_ptr, dh_ptr, x_ptr, w_ptr, mean_ptr, rstd_ptr, dx_ptr, partial_ptr,
    M, N, stride_dym, stride_dhm, stride_xm, stride_pm,
    HAS_RESIDUAL: tl.constexpr, CENTERED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    NUM_STAGES: tl.constexpr,
):  # fmt: skip
    compute_dtype = rstd_ptr.dtype.element_ty
    offs_n = tl.arange(0, BLOCK_N)
    w = tl.load(w_ptr + offs_n, mask=offs_n < N, other=0.0).to(compute_dtype)[None, :]
    inv_N = tl.full((), 1.0, compute_dtype) / N
    dw = tl.zeros((BLOCK_M, BLOCK_N), dtype=compute_dtype)
    if CENTERED:
        db = tl.zeros((BLOCK_M, BLOCK_N), dtype=compute_dtype)
    for start_m in tl.range(tl.program_id(0) * BLOCK_M, M, tl.num_programs(0) * BLOCK_M, num_stages=NUM_STAGES):  # type: ignore
        offs_m = (tl.arange(0, BLOCK_M) + start_m).to(tl.int64)
        mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
        rstd = tl.load(rstd_ptr + offs_m, mask=offs_m < M, other=0.0)[:, None]
        x = tl.load(x_ptr + offs_m[:, None] * stride_xm + offs_n[None, :], mask=mask, other=0.0).to(compute_dtype)
        dy = tl.load(dy_ptr + offs_m[:, None] * stride_dym + offs_n[None, :], mask=mask, other=0.0).to(compute_dtype)
        if CENTERED:
            x -= tl.load(mean_ptr + offs_m, mask=offs_m < M, other=0.0)[:, None]
            db += dy
        dy *= rstd  # a common factor of all terms below
        dw += dy * x
        g = dy * w
        if HAS_RESIDUAL:  # loaded before the sums, so that an iteration waits for memory once
            dh = tl.load(dh_ptr + offs_m[:, None] * stride_dhm + offs_n[None, :], mask=mask, other=0.0)
        if CENTERED:
            proj, mean = tl.split(tl.sum(tl.join(g * x, g), 1) * inv_N)
            g -= mean[:, None]
        else:
            proj = tl.sum(g * x, 1) * inv_N
        if HAS_RESIDUAL:
            g += dh.to(compute_dtype)
        dx = tl.fma(x, -proj[:, None] * rstd * rstd, g)
        tl.store(dx_ptr + offs_m[:, None] * N + offs_n[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)
    partial_ptrs = partial_ptr + tl.program_id(0).to(tl.int64) * stride_pm + offs_n
    tl.store(partial_ptrs, tl.sum(dw, 0), mask=offs_n < N)
    if CENTERED:
        tl.store(partial_ptrs + N, tl.sum(db, 0), mask=offs_n < N)


def forward(
    x_ND: Tensor, add_ND: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float, tile: TileConfig
) -> tuple[Tensor, Tensor, Tensor | None, Tensor]:
    """Launch the forward kernel. Rows may be strided; the results are contiguous.

    Returns:
        y, h (x itself without an add), mean (None without a bias), and rstd.
    """
    rows, columns = x_ND.shape
    y = torch.empty((rows, columns), dtype=x_ND.dtype, device=x_ND.device)
    h = x_ND if add_ND is None else torch.empty_like(y)
    rstd = torch.empty(rows, dtype=accum_dtype(x_ND), device=x_ND.device)
    mean = None if bias is None else torch.empty_like(rstd)
    # The kernel ignores the pointers of absent tensors; any tensor may take their place.
    a = x_ND if add_ND is None else add_ND
    tensors = (x_ND, a, h, weight, weight if bias is None else bias, y, rstd if mean is None else mean, rstd)
    sizes = (rows, columns, x_ND.stride(0), a.stride(0))
    constexprs = (eps, add_ND is not None, bias is not None, tile.block_m, tile.block_n)
    _forward[(ceil_div(rows, tile.block_m),)](*tensors, *sizes, *constexprs, num_warps=tile.num_warps)
    return y, h, mean, rstd


def backward(
    dy_ND: Tensor,
    dh_ND: Tensor | None,
    x_ND: Tensor,
    w_D: Tensor,
    mean_N: Tensor | None,
    rstd_N: Tensor,
    tile: TileConfig,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Launch the backward kernels and return dx, dw and db (None without a mean).

    With an add, `dh_ND` is the gradient of h; dx includes it.
    """
    rows, columns = x_ND.shape
    dx = torch.empty((rows, columns), dtype=x_ND.dtype, device=x_ND.device)
    programs = min(ceil_div(rows, tile.block_m), tile.programs_per_sm * num_sms(x_ND.device))
    sum_columns = columns if mean_N is None else 2 * columns  # dw, or dw and db
    partial = torch.empty((programs, sum_columns), dtype=rstd_N.dtype, device=x_ND.device)
    dh = dy_ND if dh_ND is None else dh_ND
    mean = rstd_N if mean_N is None else mean_N
    tensors = (dy_ND, dh, x_ND, w_D, mean, rstd_N, dx, partial)
    sizes = (rows, columns, dy_ND.stride(0), dh.stride(0), x_ND.stride(0), partial.stride(0))
    constexprs = (dh_ND is not None, mean_N is not None, tile.block_m, tile.block_n, tile.num_stages)
    _backward[(programs,)](*tensors, *sizes, *constexprs, num_warps=tile.num_warps)
    sums = sum_rows(partial, w_D.dtype)
    return dx, sums[:columns], None if mean_N is None else sums[columns:]


class _Norm(Function):
    """The Triton norm, with the result y, or with a residual (h, y)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor | None, weight: Tensor, bias: Tensor | None, eps: float) -> Any:
        weight, bias = weight.contiguous(), None if bias is None else bias.contiguous()
        add_ND = None if residual is None else as_2d(residual)
        y, h, mean, rstd = forward(as_2d(x), add_ND, weight, bias, eps, tile_for(FORWARD, x.shape[-1]))
        # Save x and not as_2d(x), which may be a copy.
        ctx.save_for_backward(x if residual is None else h, weight, mean, rstd)
        return y.view(x.shape) if residual is None else (h.view(x.shape), y.view(x.shape))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        *dh, dy = grads
        x, weight, mean, rstd = ctx.saved_tensors
        tile = tile_for(BACKWARD if mean is None else BACKWARD_CENTERED, dy.shape[-1])
        dh_ND = as_2d(dh[0]) if dh else None  # dh is empty without a residual
        dx, dw, db = backward(as_2d(dy), dh_ND, as_2d(x), weight, mean, rstd, tile)
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
