"""SwiGLU (arXiv:2002.05202) on one tensor, [gate | up] along the last dim; backward needs only the input.

    a = silu(g) * u,  silu(g) = g s,  s = sigmoid(g)
    dg = da u s (1 + g (1 - s)),  du = da silu(g)
    clamped (GPT-OSS, arXiv:2508.10925)     a = g sigmoid(1.702 g) (u + 1),  g at most 7,  u between -7 and 7

Backward also recomputes `a`, in the same pass, for the weight gradient of the next matmul, so `a` is never saved.
Arithmetic is in fp32 (fp64 for fp64). Bytes for N rows of F outputs of e bytes: forward 3 N F e, backward 6 N F e.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from megalite.kernels.activation import Activation
from megalite.kernels.dispatch import TileConfig, kernel, use_triton
from megalite.kernels.gated_activation import BACKWARD_TILE, FORWARD_TILE, launch_backward, launch_forward

if TYPE_CHECKING:
    import triton.language as tl

LIMIT = 7.0  # of the clamped form
ALPHA = 1.702
# (limit, alpha) as the kernels expect them; a limit of 0 means none
PLAIN = (0.0, 1.0)
CLAMPED = (LIMIT, ALPHA)


def swiglu_forward_reference(u: Tensor, clamped: bool = False) -> Tensor:
    """Compute `forward` in torch."""
    gate, up = u.chunk(2, -1)
    if clamped:
        gate = gate.clamp(max=LIMIT)
        return gate * torch.sigmoid(ALPHA * gate) * (up.clamp(-LIMIT, LIMIT) + 1)
    return F.silu(gate) * up


def swiglu_backward_reference(u: Tensor, da: Tensor, clamped: bool = False) -> tuple[Tensor, Tensor]:
    """Compute `backward` in torch."""
    gate, up = u.chunk(2, -1)
    if clamped:
        g = gate.clamp(max=LIMIT)
        up_plus_1 = up.clamp(-LIMIT, LIMIT) + 1
        s = torch.sigmoid(ALPHA * g)
        dgate = da * up_plus_1 * s * (1 + ALPHA * g * (1 - s)) * (gate <= LIMIT)
        return g * s * up_plus_1, torch.cat((dgate, da * g * s * (up.abs() <= LIMIT)), -1)
    if torch.compiler.is_compiling():  # it does not support writing into halves, and fuses this into one pass
        s = torch.sigmoid(gate)
        silu = gate * s
        return silu * up, torch.cat((da * up * (s + silu * (1 - s)), da * silu), -1)
    silu = F.silu(gate)
    du = torch.empty(u.shape, dtype=u.dtype, device=u.device)
    dgate, dup = du.chunk(2, -1)
    torch.mul(da, silu, out=dup)
    torch.ops.aten.silu_backward.grad_input(da * up, gate, grad_input=dgate)
    return silu.mul_(up), du


@kernel
def swiglu_tile(g, u, LIMIT: tl.constexpr, ALPHA: tl.constexpr):
    """Return a for a tile of gate g and up u; LIMIT is 0 for the plain form."""
    if LIMIT > 0:
        g, u = tl.minimum(g, LIMIT), tl.minimum(tl.maximum(u, -LIMIT), LIMIT) + 1.0
    return g * tl.sigmoid(ALPHA * g) * u


@kernel
def swiglu_grad_tile(g, u, da, LIMIT: tl.constexpr, ALPHA: tl.constexpr):
    """Return a, dg and du for a tile of gate g and up u; LIMIT is 0 for the plain form."""
    da_gate = da
    if LIMIT > 0:
        da_gate, da = tl.where(g <= LIMIT, da, 0.0), tl.where(tl.abs(u) <= LIMIT, da, 0.0)
        g, u = tl.minimum(g, LIMIT), tl.minimum(tl.maximum(u, -LIMIT), LIMIT) + 1.0
    s = tl.sigmoid(ALPHA * g)
    silu = g * s
    return silu * u, da_gate * u * (s + ALPHA * silu * (1.0 - s)), da * silu


@kernel
def _forward(
    u_ptr, a_ptr, M, N, stride_um,
    LIMIT: tl.constexpr, ALPHA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    compute_dtype = tl.float64 if u_ptr.dtype.element_ty == tl.float64 else tl.float32
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    mask = (offs_m < M) & (offs_n < N)
    g = tl.load(u_ptr + offs_m * stride_um + offs_n, mask=mask, other=0.0).to(compute_dtype)
    u = tl.load(u_ptr + offs_m * stride_um + N + offs_n, mask=mask, other=0.0).to(compute_dtype)
    tl.store(a_ptr + offs_m * N + offs_n, swiglu_tile(g, u, LIMIT, ALPHA).to(a_ptr.dtype.element_ty), mask=mask)


@kernel
def _backward(
    u_ptr, da_ptr, a_ptr, du_ptr, M, N, stride_um, stride_dam,
    LIMIT: tl.constexpr, ALPHA: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    compute_dtype = tl.float64 if u_ptr.dtype.element_ty == tl.float64 else tl.float32
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)[:, None]
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
    mask = (offs_m < M) & (offs_n < N)
    g = tl.load(u_ptr + offs_m * stride_um + offs_n, mask=mask, other=0.0).to(compute_dtype)
    u = tl.load(u_ptr + offs_m * stride_um + N + offs_n, mask=mask, other=0.0).to(compute_dtype)
    da = tl.load(da_ptr + offs_m * stride_dam + offs_n, mask=mask, other=0.0).to(compute_dtype)
    a, dg, du = swiglu_grad_tile(g, u, da, LIMIT, ALPHA)
    tl.store(a_ptr + offs_m * N + offs_n, a.to(a_ptr.dtype.element_ty), mask=mask)
    du_ptrs = du_ptr + offs_m * 2 * N + offs_n
    tl.store(du_ptrs, dg.to(du_ptr.dtype.element_ty), mask=mask)
    tl.store(du_ptrs + N, du.to(du_ptr.dtype.element_ty), mask=mask)


def forward(u: Tensor, tile: TileConfig = FORWARD_TILE, *, clamped: bool = False) -> Tensor:
    """Return a [..., F] for u [..., 2F] = [gate | up]."""
    if not use_triton(u):
        return swiglu_forward_reference(u, clamped)
    return launch_forward(_forward, u, tile, *(CLAMPED if clamped else PLAIN))


def backward(
    u: Tensor, da: Tensor, tile: TileConfig = BACKWARD_TILE, *, clamped: bool = False
) -> tuple[Tensor, Tensor]:
    """Return a [..., F], recomputed, and the gradient du [..., 2F]."""
    if not use_triton(u):
        return swiglu_backward_reference(u, da, clamped)
    return launch_backward(_backward, u, da, tile, *(CLAMPED if clamped else PLAIN))


ACTIVATION = Activation(forward, backward, width=2, swiglu_constants=PLAIN)
