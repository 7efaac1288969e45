"""In-place accumulation of weight gradients, in fp32 (fp64 for fp64), from inputs of any dtype.

    linear       dW_FD += dy_NF^T x_ND            one matmul that accumulates into the gradient
    embedding    dW_VD[i_n] += dx_n               only the rows that were looked up

`overwrite` overwrites the gradient instead, so that it need not be zeroed first. Bytes in addition to the inputs
(bf16): 8 F D, or 4 F D with `overwrite`. A gradient that goes through autograd is written and read once more, which
takes 4 F D of additional memory; for the embedding autograd would allocate [V, D], mostly zeros, and this module only
[N, D].

CUDA: cuBLAS takes bf16 and fp16 inputs and accumulates in fp32. CPU: oneDNN returns the dtype of the inputs, so the
product is computed one block of rows at a time, in a workspace that fits in the cache and is shared by all blocks. A
CPU that multiplies half precision in fp32 (kernels/matmul.py) adds to the gradient directly, without that rounding.
Rejected: a Triton matmul and apex's `fused_weight_gradient_mlp_cuda`; with the required torch version neither would
ever be selected.
"""

import torch
from torch import Tensor

from megalite.kernels.dispatch import upcasts
from megalite.kernels.matmul import LEFT_BYTES, RIGHT_BYTES, blocks, mm_

# Bytes of a block of the product on a CPU: its second-level cache. For 32000 x 512 and 512 tokens this takes 0.65 times
# as long as the full product at once.
BLOCK_BYTES = 2 << 20


def accumulate_weight_grad_(grad_FD: Tensor, dy_NF: Tensor, x_ND: Tensor, *, overwrite: bool) -> None:
    """Compute grad += dy^T x, or grad = dy^T x with `overwrite`.

    grad is in fp32 or in the dtype of the inputs, and has unit stride along D.
    """
    beta = 0 if overwrite else 1
    if grad_FD.dtype == x_ND.dtype and upcasts(x_ND):
        mm_(grad_FD, dy_NF.T, x_ND, add=not overwrite)
    elif grad_FD.dtype == x_ND.dtype:
        torch.addmm(grad_FD, dy_NF.T, x_ND, beta=beta, out=grad_FD)
    elif x_ND.device.type != "cpu":  # accumulates in fp32 without rounding the product
        torch.addmm(grad_FD, dy_NF.T, x_ND, out_dtype=grad_FD.dtype, beta=beta, out=grad_FD)  # type: ignore[call-overload]
    elif upcasts(x_ND):
        _accumulate_in_fp32_(grad_FD, dy_NF, x_ND, overwrite)
    else:
        F, D = grad_FD.shape
        rows = min(F, max(1, BLOCK_BYTES // (D * x_ND.dtype.itemsize)))
        workspace_fD = x_ND.new_empty(rows, D)
        for start in range(0, F, rows):
            grad_rows_fD = grad_FD[start : start + rows]
            product_fD = torch.mm(dy_NF[:, start : start + rows].T, x_ND, out=workspace_fD[: grad_rows_fD.shape[0]])
            if overwrite:
                grad_rows_fD.copy_(product_fD)
            else:
                grad_rows_fD.add_(product_fD)


def _accumulate_in_fp32_(grad_FD: Tensor, dy_NF: Tensor, x_ND: Tensor, overwrite: bool) -> None:
    """Accumulate products of fp32 copies of the inputs, one block of tokens and of rows at a time."""
    F, D = grad_FD.shape
    if overwrite and len(x_ND) == 0:
        grad_FD.zero_()
    for tokens in blocks(len(x_ND), D, LEFT_BYTES):
        x = x_ND[tokens].float()
        beta = 0 if overwrite and tokens.start == 0 else 1
        for rows in blocks(F, len(x), RIGHT_BYTES):
            grad = grad_FD[rows]
            torch.addmm(grad, dy_NF[tokens, rows].float().T, x, beta=beta, out=grad)


def accumulate_embedding_grad_(grad_VD: Tensor, index_N: Tensor, dx_ND: Tensor, *, overwrite: bool) -> None:
    """Compute grad[index_n] += dx_n; with `overwrite` the gradient is zeroed first.

    The order of additions is fixed, so results do not depend on timing.
    """
    if overwrite:
        grad_VD.zero_()
    dx_ND = dx_ND.to(grad_VD.dtype)
    if grad_VD.is_cuda:  # index_put_ sorts by index first; index_add_ is deterministic only on a CPU
        grad_VD.index_put_((index_N,), dx_ND, accumulate=True)
    else:
        grad_VD.index_add_(0, index_N, dx_ND)
