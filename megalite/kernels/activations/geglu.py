"""GeGLU (arXiv:2002.05202) with the tanh form of gelu, on one tensor, [gate | up]; backward needs only the input.

    a = gelu(g) u,  gelu and its derivative as in bias_gelu.py
    dg = da u gelu'(g),  du = da gelu(g)

Backward also recomputes `a`, as swiglu.py does, with the same bytes. Arithmetic is in fp32 (fp64 for fp64).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.kernels.activation import Activation
from megalite.kernels.bias_gelu import gelu_tile
from megalite.kernels.dispatch import TileConfig, kernel, use_triton
from megalite.kernels.gated_activation import BACKWARD_TILE, FORWARD_TILE, launch_backward, launch_forward

if TYPE_CHECKING:
    import triton.language as tl


def geglu_forward_reference(u: Tensor) -> Tensor:
    """Compute `forward` in torch."""
    gate, up = u.chunk(2, -1)
    return F.gelu(gate, approximate="tanh") * up


def geglu_backward_reference(u: Tensor, da: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `backward` in torch."""
    gate, up = u.chunk(2, -1)
    gelu = F.gelu(gate, approximate="tanh")
    dgate = torch.ops.aten.gelu_backward(da * up, gate, approximate="tanh")
    return gelu * up, torch.cat((dgate, da * gelu), -1)


@kernel
def _forward(u_ptr, a_ptr, M, N, stride_um, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    compute_dtype = tl.float64 if u_ptr.dtype.element_ty == tl.float64 else tl.float32
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    mask = (offs_m < M) & (offs_n < N)
    g = tl.load(u_ptr + offs_m * stride_um + offs_n, mask=mask, other=0.0).to(compute_dtype)
    u = tl.load(u_ptr + offs_m * stride_um + N + offs_n, mask=mask, other=0.0).to(compute_dtype)
    gelu, _ = gelu_tile(g, True)
    tl.store(a_ptr + offs_m * N + offs_n, (gelu * u).to(a_ptr.dtype.element_ty), mask=mask)


@kernel
def _backward(
    u_ptr, da_ptr, a_ptr, du_ptr, M, N, stride_um, stride_dam, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr
):  # fmt: skip
    compute_dtype = tl.float64 if u_ptr.dtype.element_ty == tl.float64 else tl.float32
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    mask = (offs_m < M) & (offs_n < N)
    g = tl.load(u_ptr + offs_m * stride_um + offs_n, mask=mask, other=0.0).to(compute_dtype)
    u = tl.load(u_ptr + offs_m * stride_um + N + offs_n, mask=mask, other=0.0).to(compute_dtype)
    da = tl.load(da_ptr + offs_m * stride_dam + offs_n, mask=mask, other=0.0).to(compute_dtype)
    gelu, slope = gelu_tile(g, True)
    tl.store(a_ptr + offs_m * N + offs_n, (gelu * u).to(a_ptr.dtype.element_ty), mask=mask)
    du_ptrs = du_ptr + offs_m * 2 * N + offs_n
    tl.store(du_ptrs, (da * u * slope).to(du_ptr.dtype.element_ty), mask=mask)
    tl.store(du_ptrs + N, (da * gelu).to(du_ptr.dtype.element_ty), mask=mask)


def forward(u: Tensor, tile: TileConfig = FORWARD_TILE) -> Tensor:
    """Return a [..., F] for u [..., 2F] = [gate | up]."""
    return launch_forward(_forward, u, tile) if use_triton(u) else geglu_forward_reference(u)


def backward(u: Tensor, da: Tensor, tile: TileConfig = BACKWARD_TILE) -> tuple[Tensor, Tensor]:
    """Return a [..., F], recomputed, and the gradient du [..., 2F]."""
    return launch_backward(_backward, u, da, tile) if use_triton(u) else geglu_backward_reference(u, da)


ACTIVATION = Activation(forward, backward, width=2)
