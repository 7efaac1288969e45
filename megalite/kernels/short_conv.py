"""Causal convolution of each channel over the last W tokens of a document, and SiLU (Mamba, arXiv:2312.00752).

    u_t = c + sum over d < W of w_{W-1-d} x_{t-d},  without the tokens of other documents;   y_t = u_t sigmoid(u_t)

Only x is saved, and u is computed again in backward. Sums are in fp32 (fp64 for fp64 inputs).
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from megalite.kernels.dispatch import accum_dtype


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
    return _ShortConv.apply(x_SBC, weight_CW, documents_BS, earlier_TBC, bias_C)  # type: ignore[return-value]
