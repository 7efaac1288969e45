"""Causal convolution of each channel over the last W tokens of a document, and SiLU (Mamba, arXiv:2312.00752).

    u_t = c + sum over d < W of w_{W-1-d} x_{t-d},  without the tokens of other documents;   y_t = u_t sigmoid(u_t)

Only x is saved, and u is computed again in backward. Sums are in fp32 (fp64 for fp64 inputs).

Bytes of the Triton kernels for N elements of e bytes: forward 2 N e, backward 3 N e. The program of a token computes in
backward u of all W tokens that read it, so that each gradient is written once and no intermediate one is stored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from megalite.common.tables import load_table
from megalite.kernels.dispatch import (
    TileConfig,
    accum_dtype,
    ceil_div,
    fit_tile,
    kernel,
    num_sms,
    power_of_two,
    unit_stride,
    use_triton,
)
from megalite.kernels.row_sum import sum_rows

if TYPE_CHECKING:
    import triton.language as tl

FORWARD_TILE, BACKWARD_TILE = (TileConfig(*tile) for tile in load_table(__file__, "tiles")["short_conv"].values())


def short_conv_reference(
    x_SBC: Tensor,
    weight_CW: Tensor,
    documents_BS: Tensor | None = None,
    earlier_TBC: Tensor | None = None,
    bias_C: Tensor | None = None,
) -> Tensor:
    """Compute the convolution and SiLU token by token; arguments are those of `short_conv`."""
    width = weight_CW.shape[1]
    outputs = []
    for t in range(len(x_SBC)):
        u_BC = torch.zeros_like(x_SBC[0]) if bias_C is None else bias_C.expand_as(x_SBC[0])
        for d in range(width):
            if t - d >= 0:
                x_BC = x_SBC[t - d]
            elif earlier_TBC is not None:
                x_BC = earlier_TBC[width - 1 + t - d]
            else:
                continue
            if documents_BS is not None:
                first = width - 1 if documents_BS.shape[1] > len(x_SBC) else 0
                if first + t - d < 0:
                    continue
                same = documents_BS[:, first + t] == documents_BS[:, first + t - d]
                x_BC = x_BC * same[:, None]
            u_BC = u_BC + weight_CW[:, width - 1 - d] * x_BC
        outputs.append(F.silu(u_BC))
    return torch.stack(outputs)


def _same_document(documents_BS: Tensor | None, distance: int, length: int) -> Tensor | None:
    """Return [S, B, 1], whether each token is of the document of the token `distance` before it; None: all are.

    The documents of tokens before the first one may precede those of the S tokens. Without them, these tokens count
    as zeros.
    """
    if documents_BS is None or not distance:
        return None
    documents_SB1 = documents_BS.T.unsqueeze(-1)
    before = F.pad(documents_SB1, (0, 0, 0, 0, distance, 0), value=-1)[: len(documents_SB1)]
    return (documents_SB1 == before)[len(documents_SB1) - length :]


def _convolve(x_TBC: Tensor, weight_CW: Tensor, documents_BS: Tensor | None, bias_C: Tensor | None) -> Tensor:
    """Return u [S, B, C] of x, which starts with W - 1 earlier tokens."""
    width = weight_CW.shape[1]
    length = len(x_TBC) - width + 1
    u_SBC = x_TBC[width - 1 :] * weight_CW[:, -1]
    for d in range(1, width):
        term = x_TBC[width - 1 - d : len(x_TBC) - d] * weight_CW[:, width - 1 - d]
        same = _same_document(documents_BS, d, length)
        u_SBC += term if same is None else term.where(same, 0.0)
    if bias_C is not None:
        u_SBC += bias_C.to(u_SBC.dtype)
    return u_SBC


def _with_earlier(x_SBC: Tensor, earlier_TBC: Tensor | None, width: int) -> Tensor:
    """Return x after W - 1 earlier tokens, in the dtype of sums."""
    dtype = accum_dtype(x_SBC)
    if earlier_TBC is None:
        return F.pad(x_SBC.to(dtype), (0, 0, 0, 0, width - 1, 0))
    return torch.cat([earlier_TBC.to(dtype), x_SBC.to(dtype)])


class _ShortConv(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_SBC: Tensor,
        weight_CW: Tensor,
        documents_BS: Tensor | None,
        earlier_TBC: Tensor | None,
        bias_C: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(x_SBC, weight_CW, documents_BS, earlier_TBC, bias_C)
        x_TBC = _with_earlier(x_SBC, earlier_TBC, weight_CW.shape[1])
        return F.silu(_convolve(x_TBC, weight_CW.to(x_TBC.dtype), documents_BS, bias_C)).to(x_SBC.dtype)

    @staticmethod
    def backward(ctx: Any, dy_SBC: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x_SBC, weight_CW, documents_BS, earlier_TBC, bias_C = ctx.saved_tensors
        width, length = weight_CW.shape[1], len(x_SBC)
        x_TBC = _with_earlier(x_SBC, earlier_TBC, width)
        w = weight_CW.to(x_TBC.dtype)
        u_SBC = _convolve(x_TBC, w, documents_BS, bias_C)
        sigmoid = u_SBC.sigmoid()
        du_SBC = dy_SBC.to(u_SBC.dtype) * sigmoid * (1 + u_SBC * (1 - sigmoid))
        dx_TBC = torch.zeros_like(x_TBC)
        dw_CW = torch.empty_like(w)
        for d in range(width):
            same = _same_document(documents_BS, d, length)
            du = du_SBC if same is None else du_SBC.where(same, 0.0)
            span = slice(width - 1 - d, len(x_TBC) - d)
            dx_TBC[span] += du * w[:, width - 1 - d]
            dw_CW[:, width - 1 - d] = (du * x_TBC[span]).sum((0, 1))
        dearlier = None if earlier_TBC is None else dx_TBC[: width - 1].to(earlier_TBC.dtype)
        dbias = None if bias_C is None else du_SBC.sum((0, 1)).to(bias_C.dtype)
        return dx_TBC[width - 1 :].to(x_SBC.dtype), dw_CW.to(weight_CW.dtype), None, dearlier, dbias


def short_conv_torch(
    x_SBC: Tensor,
    weight_CW: Tensor,
    documents_BS: Tensor | None = None,
    earlier_TBC: Tensor | None = None,
    bias_C: Tensor | None = None,
) -> Tensor:
    """Compute `short_conv` in torch."""
    return _ShortConv.apply(x_SBC, weight_CW, documents_BS, earlier_TBC, bias_C)  # type: ignore[return-value]


@kernel
def _load_tokens(
    x_ptr, earlier_ptr, offs_s, offs_c, S, C, stride_xs, stride_es, WIDTH: tl.constexpr, HAS_EARLIER: tl.constexpr
):
    """Return x of these positions in the dtype of sums; from -1 down they are earlier tokens, or zeros."""
    mask = ((offs_s >= 0) & (offs_s < S))[:, None] & (offs_c < C)[None, :]
    rows = offs_s.to(tl.int64)[:, None]
    x = tl.load(x_ptr + rows * stride_xs + offs_c[None, :], mask=mask, other=0.0)
    if HAS_EARLIER:
        mask = ((offs_s < 0) & (offs_s > -WIDTH))[:, None] & (offs_c < C)[None, :]
        x += tl.load(earlier_ptr + (rows + WIDTH - 1) * stride_es + offs_c[None, :], mask=mask, other=0.0)
    return x.to(tl.float64 if x_ptr.dtype.element_ty == tl.float64 else tl.float32)


@kernel
def _load_documents(documents_ptr, offs_s, S, first, HAS_DOCUMENTS: tl.constexpr):
    """Return the documents of these positions, -1 if they are unknown; `first` of them precede the first position."""
    if HAS_DOCUMENTS:
        mask = (offs_s >= -first) & (offs_s < S)
        return tl.load(documents_ptr + offs_s + first, mask=mask, other=-1).to(tl.int64)
    return offs_s.to(tl.int64)


@kernel
def _load_column(w_ptr, offs_c, C, index, stride_wc, stride_ww, dtype: tl.constexpr):
    """Return a column of [C, W] as a row [1, C]."""
    return tl.load(w_ptr + offs_c * stride_wc + index * stride_ww, mask=offs_c < C, other=0.0).to(dtype)[None, :]


@kernel
def _convolve_tile(
    x_ptr, earlier_ptr, w_ptr, bias_ptr, documents_ptr, offs_s, offs_c, S, C, first,
    stride_xs, stride_es, stride_wc, stride_ww,
    WIDTH: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, HAS_EARLIER: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Return u of these positions."""
    x = _load_tokens(x_ptr, earlier_ptr, offs_s, offs_c, S, C, stride_xs, stride_es, WIDTH, HAS_EARLIER)
    u = x * _load_column(w_ptr, offs_c, C, WIDTH - 1, stride_wc, stride_ww, x.dtype)
    documents = _load_documents(documents_ptr, offs_s, S, first, HAS_DOCUMENTS)
    for d in tl.static_range(1, WIDTH):  # type: ignore[attr-defined]
        x = _load_tokens(x_ptr, earlier_ptr, offs_s - d, offs_c, S, C, stride_xs, stride_es, WIDTH, HAS_EARLIER)
        term = x * _load_column(w_ptr, offs_c, C, WIDTH - 1 - d, stride_wc, stride_ww, x.dtype)
        if HAS_DOCUMENTS:
            same = documents == _load_documents(documents_ptr, offs_s - d, S, first, True)
            term = tl.where(same[:, None], term, 0.0)
        u += term
    if HAS_BIAS:
        u += _load_column(bias_ptr, offs_c, C, 0, 1, 0, x.dtype)
    return u


@kernel
def _forward(
    x_ptr, earlier_ptr, w_ptr, bias_ptr, documents_ptr, y_ptr, S, C, first,
    stride_xs, stride_xb, stride_es, stride_eb, stride_wc, stride_ww, stride_ys, stride_db,
    WIDTH: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, HAS_EARLIER: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    offs_s = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_c = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    off_b = tl.program_id(2).to(tl.int64)
    u = _convolve_tile(
        x_ptr + off_b * stride_xb, earlier_ptr + off_b * stride_eb, w_ptr, bias_ptr, documents_ptr + off_b * stride_db,
        offs_s, offs_c, S, C, first, stride_xs, stride_es, stride_wc, stride_ww,
        WIDTH, HAS_DOCUMENTS, HAS_EARLIER, HAS_BIAS,
    )  # fmt: skip
    y_ptrs = y_ptr + off_b * C + offs_s.to(tl.int64)[:, None] * stride_ys + offs_c[None, :]
    y = (u * tl.sigmoid(u)).to(y_ptr.dtype.element_ty)
    tl.store(y_ptrs, y, mask=(offs_s < S)[:, None] & (offs_c < C)[None, :])


@kernel
def _backward(
    dy_ptr, x_ptr, earlier_ptr, w_ptr, bias_ptr, documents_ptr, dx_ptr, dearlier_ptr, partial_ptr, S, C, first,
    stride_dys, stride_dyb, stride_xs, stride_xb, stride_es, stride_eb, stride_wc, stride_ww, stride_dxs, stride_db,
    stride_pm,
    WIDTH: tl.constexpr, HAS_DOCUMENTS: tl.constexpr, HAS_EARLIER: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_W: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Compute dx of the positions of a program, and its partial sums of the weight's and the bias's gradients."""
    offs_c = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    off_b = tl.program_id(2).to(tl.int64)
    dy_ptr += off_b * stride_dyb
    x_ptr += off_b * stride_xb
    earlier_ptr += off_b * stride_eb
    documents_ptr += off_b * stride_db
    compute_dtype = partial_ptr.dtype.element_ty
    offs_w = tl.arange(0, BLOCK_W)
    dw = tl.zeros((BLOCK_W, BLOCK_N), dtype=compute_dtype)  # row W is that of the bias
    start = 1 - WIDTH if HAS_EARLIER else 0
    for start_s in range(start + tl.program_id(0) * BLOCK_M, S, tl.num_programs(0) * BLOCK_M):  # type: ignore
        offs_s = start_s + tl.arange(0, BLOCK_M)
        x = _load_tokens(x_ptr, earlier_ptr, offs_s, offs_c, S, C, stride_xs, stride_es, WIDTH, HAS_EARLIER)
        documents = _load_documents(documents_ptr, offs_s, S, first, HAS_DOCUMENTS)
        dx = tl.zeros((BLOCK_M, BLOCK_N), dtype=compute_dtype)
        for d in tl.static_range(WIDTH):  # type: ignore[attr-defined]
            out_s = offs_s + d  # the tokens whose convolution reads those of the tile with the weight W - 1 - d
            u = _convolve_tile(
                x_ptr, earlier_ptr, w_ptr, bias_ptr, documents_ptr, out_s, offs_c, S, C, first,
                stride_xs, stride_es, stride_wc, stride_ww, WIDTH, HAS_DOCUMENTS, HAS_EARLIER, HAS_BIAS,
            )  # fmt: skip
            mask = ((out_s >= 0) & (out_s < S))[:, None] & (offs_c < C)[None, :]
            dy_ptrs = dy_ptr + out_s.to(tl.int64)[:, None] * stride_dys + offs_c[None, :]
            s = tl.sigmoid(u)
            du = tl.load(dy_ptrs, mask=mask, other=0.0).to(compute_dtype) * s * (1.0 + u * (1.0 - s))
            if HAS_DOCUMENTS:
                same = documents == _load_documents(documents_ptr, out_s, S, first, True)
                du = tl.where(same[:, None], du, 0.0)
            dx += du * _load_column(w_ptr, offs_c, C, WIDTH - 1 - d, stride_wc, stride_ww, compute_dtype)
            dw += tl.where((offs_w == WIDTH - 1 - d)[:, None], tl.sum(du * x, 0, keep_dims=True), 0.0)
            if HAS_BIAS and d == 0:
                dw += tl.where((offs_w == WIDTH)[:, None], tl.sum(du, 0, keep_dims=True), 0.0)
        dx_ptrs = dx_ptr + off_b * C + offs_s.to(tl.int64)[:, None] * stride_dxs + offs_c[None, :]
        dx = dx.to(dx_ptr.dtype.element_ty)
        tl.store(dx_ptrs, dx, mask=((offs_s >= 0) & (offs_s < S))[:, None] & (offs_c < C)[None, :])
        if HAS_EARLIER:
            offs_t = offs_s.to(tl.int64) + WIDTH - 1
            dearlier_ptrs = dearlier_ptr + off_b * C + offs_t[:, None] * stride_dxs + offs_c[None, :]
            tl.store(dearlier_ptrs, dx, mask=(offs_s < 0)[:, None] & (offs_c < C)[None, :])
    row = (tl.program_id(2) * tl.num_programs(0) + tl.program_id(0)).to(tl.int64)  # type: ignore[operator]
    # the gradient of [C, W], then that of [C]
    columns = tl.where(
        (offs_w < WIDTH)[:, None], offs_c[None, :] * WIDTH + offs_w[:, None], C * WIDTH + offs_c[None, :]
    )
    num_sums = WIDTH + 1 if HAS_BIAS else WIDTH
    mask = (offs_w < num_sums)[:, None] & (offs_c < C)[None, :]
    tl.store(partial_ptr + row * stride_pm + columns, dw, mask=mask)


def _launch_args(
    x_SBC: Tensor, weight_CW: Tensor, documents_BS: Tensor | None, earlier_TBC: Tensor | None, bias_C: Tensor | None
) -> tuple[list[Tensor], list[int], list[int], list[int]]:
    """Return tensors, sizes, strides and constants that both kernels take; x has unit stride along C.

    The kernels ignore the pointers of absent tensors; any tensor may take their place.
    """
    length, _, channels = x_SBC.shape
    width = weight_CW.shape[1]
    has_earlier = earlier_TBC is not None and width > 1
    earlier = unit_stride(earlier_TBC) if has_earlier and earlier_TBC is not None else x_SBC
    documents = x_SBC if documents_BS is None else unit_stride(documents_BS)
    first = 0 if documents_BS is None else documents_BS.shape[1] - length
    tensors = [x_SBC, earlier, weight_CW, weight_CW if bias_C is None else bias_C.contiguous(), documents]
    strides = [*x_SBC.stride()[:2], *earlier.stride()[:2], *weight_CW.stride()]
    constants = [width, documents_BS is not None, has_earlier, bias_C is not None]
    return tensors, [length, channels, first], strides, constants


class _TritonShortConv(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_SBC: Tensor,
        weight_CW: Tensor,
        documents_BS: Tensor | None,
        earlier_TBC: Tensor | None,
        bias_C: Tensor | None,
    ) -> Tensor:
        ctx.save_for_backward(x_SBC, weight_CW, documents_BS, earlier_TBC, bias_C)
        x_SBC = unit_stride(x_SBC)
        tensors, sizes, strides, constants = _launch_args(x_SBC, weight_CW, documents_BS, earlier_TBC, bias_C)
        length, batch, channels = x_SBC.shape
        y_SBC = torch.empty(x_SBC.shape, dtype=x_SBC.dtype, device=x_SBC.device)
        tile = fit_tile(FORWARD_TILE, channels)
        strides += [y_SBC.stride(0), tensors[-1].stride(0)]
        grid = (ceil_div(length, tile.block_m), ceil_div(channels, tile.block_n), batch)
        _forward[grid](
            *tensors, y_SBC, *sizes, *strides, *constants, tile.block_m, tile.block_n, num_warps=tile.num_warps
        )
        return y_SBC

    @staticmethod
    def backward(ctx: Any, dy_SBC: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        x_SBC, weight_CW, documents_BS, earlier_TBC, bias_C = ctx.saved_tensors
        dy_SBC, x_SBC = unit_stride(dy_SBC), unit_stride(x_SBC)
        tensors, sizes, strides, constants = _launch_args(x_SBC, weight_CW, documents_BS, earlier_TBC, bias_C)
        length, batch, channels = x_SBC.shape
        width = weight_CW.shape[1]
        dx_SBC = torch.empty(x_SBC.shape, dtype=x_SBC.dtype, device=x_SBC.device)
        dearlier = (
            None if earlier_TBC is None else torch.empty(earlier_TBC.shape, dtype=x_SBC.dtype, device=x_SBC.device)
        )
        tile = fit_tile(BACKWARD_TILE, channels)
        blocks_of_channels = ceil_div(channels, tile.block_n)
        max_programs = max(1, tile.programs_per_sm * num_sms(x_SBC.device) // (batch * blocks_of_channels))
        programs = min(ceil_div(length + width - 1, tile.block_m), max_programs)
        num_columns = channels * (width + (bias_C is not None))
        partial = torch.empty((programs * batch, num_columns), dtype=accum_dtype(x_SBC), device=x_SBC.device)
        all_strides = [*dy_SBC.stride()[:2], *strides, dx_SBC.stride(0), tensors[-1].stride(0), partial.stride(0)]
        block_w = power_of_two(width + 1)
        _backward[(programs, blocks_of_channels, batch)](
            dy_SBC, *tensors, dx_SBC, dx_SBC if dearlier is None else dearlier, partial, *sizes, *all_strides,
            *constants, block_w, tile.block_m, tile.block_n, num_warps=tile.num_warps,
        )  # fmt: skip
        sums = sum_rows(partial, weight_CW.dtype)
        dw_CW = sums[: channels * width].view(channels, width)
        dbias = None if bias_C is None else sums[channels * width :].to(bias_C.dtype)
        dearlier = None if earlier_TBC is None or dearlier is None else dearlier.to(earlier_TBC.dtype)
        return dx_SBC, dw_CW, None, dearlier, dbias


def short_conv(
    x_SBC: Tensor,
    weight_CW: Tensor,
    documents_BS: Tensor | None = None,
    earlier_TBC: Tensor | None = None,
    bias_C: Tensor | None = None,
) -> Tensor:
    """Return silu(conv(x)) in the dtype of x.

    Args:
        x_SBC: The input.
        weight_CW: The weight of each channel for the W last tokens, the current one last.
        documents_BS: A number for each token that differs between documents; with `earlier_TBC`, for these and the S
            tokens, [B, W - 1 + S]. None: each sample is one document.
        earlier_TBC: The W - 1 tokens before the first one; None: zeros.
        bias_C: The bias c of each channel; None: zeros.
    """
    function = _TritonShortConv if use_triton(x_SBC) else _ShortConv
    return function.apply(x_SBC, weight_CW, documents_BS, earlier_TBC, bias_C)  # type: ignore[return-value]
