"""Adds weight gradients in place, in fp32 (fp64 for fp64), from inputs of any dtype.

    linear       dW_FD += dy_NF^T x_ND            one matmul with the gradient as an operand
    embedding    dW_VD[i_n] += dx_n               only the rows that were looked up

`begin` writes over the gradient instead, so that it needs no zeros first. Bytes beside the inputs' (bf16): 8 F D, or
4 F D to begin with. A gradient that goes through autograd is written and read once more, 4 F D in fresh memory; that
of the embedding, mostly zeros, is [V, D] there and [N, D] here.

CUDA: cuBLAS takes bf16 and fp16 inputs and adds in fp32. CPU: oneDNN gives the dtype of the inputs, so their product
exists, a block of rows at a time that stays in cache and is one piece of memory for all blocks. A CPU that multiplies
them in fp32 (kernels/matmul.py) adds to the gradient at once, without that rounding. Rejected: a Triton
matmul and apex's `fused_weight_gradient_mlp_cuda`; with the required torch they would never be chosen.
"""

import torch
from torch import Tensor

from megalite.kernels.dispatch import upcasts
from megalite.kernels.matmul import LEFT_BYTES, RIGHT_BYTES, blocks, mm_

# bytes of the product's block on a CPU: its second-level cache (32000 x 512 of 512 tokens: 0.65 of the whole's time)
BLOCK_BYTES = 2 << 20


def accumulate_weight_grad_(grad_FD: Tensor, dy_NF: Tensor, x_ND: Tensor, *, overwrite: bool) -> None:
    """grad += dy^T x, or grad = dy^T x to begin with. `grad`: fp32, or the dtype of the others; unit stride along D."""
    beta = 0 if overwrite else 1
    if grad_FD.dtype == x_ND.dtype and upcasts(x_ND):
        mm_(grad_FD, dy_NF.T, x_ND, add=not overwrite)
    elif grad_FD.dtype == x_ND.dtype:
        torch.addmm(grad_FD, dy_NF.T, x_ND, beta=beta, out=grad_FD)
    elif x_ND.device.type != "cpu":  # never rounded in between
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
            grad_rows_fD.copy_(product_fD) if overwrite else grad_rows_fD.add_(product_fD)


def _accumulate_in_fp32_(grad_FD: Tensor, dy_NF: Tensor, x_ND: Tensor, begin: bool) -> None:
    F, D = grad_FD.shape
    if begin and len(x_ND) == 0:
        grad_FD.zero_()
    for tokens in blocks(len(x_ND), D, LEFT_BYTES):
        x = x_ND[tokens].float()
        beta = 0 if begin and tokens.start == 0 else 1
        for rows in blocks(F, len(x), RIGHT_BYTES):
            grad = grad_FD[rows]
            torch.addmm(grad, dy_NF[tokens, rows].float().T, x, beta=beta, out=grad)


def accumulate_embedding_grad_(grad_VD: Tensor, index_N: Tensor, dx_ND: Tensor, *, overwrite: bool) -> None:
    """grad[index_n] += dx_n, or that on zeros to begin with; in one order of addition whatever the timing."""
    if overwrite:
        grad_VD.zero_()
    dx_ND = dx_ND.to(grad_VD.dtype)
    if grad_VD.is_cuda:  # sorted by index first; index_add_ is in order on a CPU only
        grad_VD.index_put_((index_N,), dx_ND, accumulate=True)
    else:
        grad_VD.index_add_(0, index_N, dx_ND)
