"""RMSNorm of the output of a recurrence, times a function of its gate.

    gated delta net        y = o r w silu(z),  r = 1 / sqrt(mean(o^2) + eps)           (arXiv:2412.06464, section 3.3)
    Kimi delta attention   y = o r w sigmoid(z)                                        (arXiv:2510.26692)
    Mamba-2                y = n r w,  n = o silu(z),  r = 1 / sqrt(mean(n^2) + eps)   (arXiv:2405.21060, section 7.1)

Only o, z and w are saved. Statistics and products are in fp32 (fp64 for fp64 inputs). Bytes of the Triton kernels for N
rows of V elements of e bytes: forward 3 N V e, backward 5 N V e.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from megalite.common.tables import load_table
from megalite.kernels.dispatch import accum_dtype, ceil_div, kernel, num_sms, tile_for, use_triton
from megalite.kernels.row_sum import sum_rows

if TYPE_CHECKING:
    import triton.language as tl

# (max width, block_m, num_warps); for backward also programs_per_sm
FORWARD, BACKWARD = load_table(__file__, "tiles")["gated_norm"].values()


class _GatedNorm(Function):
    @staticmethod
    def forward(
        ctx: Any, o: Tensor, z: Tensor, weight: Tensor, eps: float, gate_first: bool, sigmoid_gate: bool
    ) -> Tensor:
        ctx.eps, ctx.gate_first, ctx.sigmoid_gate = eps, gate_first, sigmoid_gate
        ctx.save_for_backward(o, z, weight)
        dtype = accum_dtype(o)
        gate = z.to(dtype).sigmoid() if sigmoid_gate else F.silu(z.to(dtype))
        x = o.to(dtype) * gate if gate_first else o.to(dtype)
        y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight.to(dtype)
        return (y if gate_first else y * gate).to(o.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        o, z, weight = ctx.saved_tensors
        dtype = accum_dtype(o)
        o32, z32, w, dy32 = (x.to(dtype) for x in (o, z, weight, dy))
        sigmoid = z32.sigmoid()
        gate = sigmoid if ctx.sigmoid_gate else z32 * sigmoid
        x = o32 * gate if ctx.gate_first else o32
        rstd = torch.rsqrt(x.square().mean(-1, keepdim=True) + ctx.eps)
        xhat = x * rstd
        dnorm = dy32 if ctx.gate_first else dy32 * gate
        dw = (dnorm * xhat).flatten(0, -weight.dim() - 1).sum(0)
        dxhat = dnorm * w
        dx = rstd * (dxhat - xhat * (dxhat * xhat).mean(-1, keepdim=True))
        if ctx.gate_first:
            do, dgate = dx * gate, dx * o32
        else:
            do, dgate = dx, dy32 * xhat * w
        slope = 1 - sigmoid if ctx.sigmoid_gate else 1 + z32 * (1 - sigmoid)
        dz = dgate * sigmoid * slope
        return do.to(o.dtype), dz.to(z.dtype), dw.to(weight.dtype), None, None, None


def gated_norm_reference(
    o: Tensor, z: Tensor, weight: Tensor, eps: float, *, gate_first: bool = False, sigmoid_gate: bool = False
) -> Tensor:
    """Compute `gated_norm` in torch."""
    return _GatedNorm.apply(o, z, weight, eps, gate_first, sigmoid_gate)  # type: ignore[return-value]


@kernel
def _load_rows(x_ptr, offs_m, offs_n, mask, H, stride_xn, stride_xh):
    """Return rows of x [N, H, V], numbered in this order, in the dtype of sums."""
    rows = (offs_m // H) * stride_xn + (offs_m % H) * stride_xh
    x = tl.load(x_ptr + rows[:, None] + offs_n[None, :], mask=mask, other=0.0)
    return x.to(tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32)


@kernel
def _forward(
    o_ptr, z_ptr, w_ptr, y_ptr, M, N, H, R, stride_on, stride_oh, stride_zn, stride_zh,
    EPS: tl.constexpr, GATE_FIRST: tl.constexpr, SIGMOID_GATE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Normalize rows of N columns; row m has the weight of row m % R."""
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    x = _load_rows(o_ptr, offs_m, offs_n, mask, H, stride_on, stride_oh)
    z = _load_rows(z_ptr, offs_m, offs_n, mask, H, stride_zn, stride_zh)
    w = tl.load(w_ptr + (offs_m % R)[:, None] * N + offs_n[None, :], mask=mask, other=0.0).to(x.dtype)
    gate = tl.sigmoid(z) if SIGMOID_GATE else z * tl.sigmoid(z)
    if GATE_FIRST:
        x *= gate
    y = x * tl.rsqrt(tl.sum(x * x, 1) / N + EPS)[:, None] * w
    if not GATE_FIRST:
        y *= gate
    tl.store(y_ptr + offs_m[:, None] * N + offs_n[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)


@kernel
def _backward(
    dy_ptr, o_ptr, z_ptr, w_ptr, do_ptr, dz_ptr, partial_ptr, M, N, H, R,
    stride_dyn, stride_dyh, stride_on, stride_oh, stride_zn, stride_zh,
    EPS: tl.constexpr, GATE_FIRST: tl.constexpr, SIGMOID_GATE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute the gradients of the rows m with m % R = program_id(1), which share a weight."""
    r = tl.program_id(1)
    offs_n = tl.arange(0, BLOCK_N)
    compute_dtype = partial_ptr.dtype.element_ty
    w = tl.load(w_ptr + r * N + offs_n, mask=offs_n < N, other=0.0).to(compute_dtype)[None, :]
    dw = tl.zeros((BLOCK_M, BLOCK_N), dtype=compute_dtype)
    for start_m in range(tl.program_id(0) * BLOCK_M, M // R, tl.num_programs(0) * BLOCK_M):  # type: ignore
        offs_m = (tl.arange(0, BLOCK_M) + start_m).to(tl.int64) * R + r
        mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
        dy = _load_rows(dy_ptr, offs_m, offs_n, mask, H, stride_dyn, stride_dyh)
        o = _load_rows(o_ptr, offs_m, offs_n, mask, H, stride_on, stride_oh)
        z = _load_rows(z_ptr, offs_m, offs_n, mask, H, stride_zn, stride_zh)
        s = tl.sigmoid(z)
        if SIGMOID_GATE:
            gate, slope = s, s * (1.0 - s)
        else:
            gate = z * s
            slope = s * (1.0 + z * (1.0 - s))
        if GATE_FIRST:
            x, dnorm = o * gate, dy
        else:
            x, dnorm = o, dy * gate
        rstd = tl.rsqrt(tl.sum(x * x, 1) / N + EPS)[:, None]
        xhat = x * rstd
        dw += dnorm * xhat
        dxhat = dnorm * w
        dx = rstd * (dxhat - xhat * (tl.sum(dxhat * xhat, 1) / N)[:, None])
        if GATE_FIRST:
            do, dgate = dx * gate, dx * o
        else:
            do, dgate = dx, dy * xhat * w
        out_offs = offs_m[:, None] * N + offs_n[None, :]
        tl.store(do_ptr + out_offs, do.to(do_ptr.dtype.element_ty), mask=mask)
        tl.store(dz_ptr + out_offs, (dgate * slope).to(dz_ptr.dtype.element_ty), mask=mask)
    partial_ptrs = partial_ptr + (tl.program_id(0).to(tl.int64) * R + r) * N + offs_n
    tl.store(partial_ptrs, tl.sum(dw, 0), mask=offs_n < N)


def _as_3d(x: Tensor) -> Tensor:
    """Return x [..., H, V] as [N, H, V] with unit stride along V; a view if the layout allows it."""
    x = x.reshape(-1, *x.shape[-2:])
    return x if x.stride(2) == 1 or x.shape[2] == 1 else x.contiguous()


class _TritonGatedNorm(Function):
    @staticmethod
    def forward(
        ctx: Any, o: Tensor, z: Tensor, weight: Tensor, eps: float, gate_first: bool, sigmoid_gate: bool
    ) -> Tensor:
        ctx.constexprs = eps, gate_first, sigmoid_gate
        ctx.save_for_backward(o, z, weight)
        o_NHV, z_NHV = _as_3d(o), _as_3d(z)
        num_heads, columns = o.shape[-2:]
        rows = o.numel() // columns
        y = torch.empty(o.shape, dtype=o.dtype, device=o.device)
        tile = tile_for(FORWARD, columns)
        sizes = (rows, columns, num_heads, weight.numel() // columns, *o_NHV.stride()[:2], *z_NHV.stride()[:2])
        constexprs = (*ctx.constexprs, tile.block_m, tile.block_n)
        _forward[(ceil_div(rows, tile.block_m),)](
            o_NHV, z_NHV, weight.contiguous(), y, *sizes, *constexprs, num_warps=tile.num_warps
        )
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        o, z, weight = ctx.saved_tensors
        dy_NHV, o_NHV, z_NHV = _as_3d(dy), _as_3d(o), _as_3d(z)
        num_heads, columns = o.shape[-2:]
        rows, weight_rows = o.numel() // columns, weight.numel() // columns
        do, dz = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (o, z))
        tile = tile_for(BACKWARD, columns)
        max_programs = max(1, tile.programs_per_sm * num_sms(o.device) // weight_rows)
        programs = min(ceil_div(rows // weight_rows, tile.block_m), max_programs)
        partial = torch.empty((programs, weight.numel()), dtype=accum_dtype(o), device=o.device)
        strides = (*dy_NHV.stride()[:2], *o_NHV.stride()[:2], *z_NHV.stride()[:2])
        sizes = (rows, columns, num_heads, weight_rows, *strides)
        constexprs = (*ctx.constexprs, tile.block_m, tile.block_n)
        _backward[(programs, weight_rows)](
            dy_NHV, o_NHV, z_NHV, weight.contiguous(), do, dz, partial, *sizes, *constexprs, num_warps=tile.num_warps
        )
        return do, dz, sum_rows(partial, weight.dtype).view(weight.shape), None, None, None


def gated_norm(
    o: Tensor, z: Tensor, weight: Tensor, eps: float, *, gate_first: bool = False, sigmoid_gate: bool = False
) -> Tensor:
    """Return rmsnorm(o) weight silu(z), or with `gate_first` rmsnorm(o silu(z)) weight, in the dtype of o.

    Args:
        o: The output of a recurrence, [..., V]. The norm is over V.
        z: The gate, of the same shape.
        weight: The weight, of the shape of one or several of the last dims of o, less than all.
        eps: The number that is added to the mean of squares.
        gate_first: Multiply by the gate before the norm.
        sigmoid_gate: The gate is sigmoid(z) instead of silu(z).
    """
    function = _TritonGatedNorm if use_triton(o, o.shape[-1]) else _GatedNorm
    return function.apply(o, z, weight, eps, gate_first, sigmoid_gate)  # type: ignore[return-value]
