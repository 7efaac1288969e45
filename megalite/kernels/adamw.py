"""AdamW with decoupled weight decay (arXiv:1711.05101), in place on flat tensors; equals torch.optim.AdamW.

    g = scale * grad;  m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
    w = w (1 - lr wd);  w -= lr / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^t) + eps);  copy = w in bf16

Moments are in fp32, or in bf16 with stochastic rounding: up or down with probabilities that keep the mean. Without it,
a second moment that changes by 1/1000 of its value would never change. The random bits are a hash of (step, weight,
gradient, old moments): the sum of their bits times odd numbers, through the 32-bit finalizer of MurmurHash3 (A.
Appleby, public domain). Therefore equal values are rounded the same way under every layout and after a resume, and no
map from flat positions to tensors is needed. On a CPU, layouts may differ in the last bit, because torch's update
rounds elements beyond a multiple of its vector length differently. fp64 always uses torch's update.

Bytes per weight, in one pass: 16 read and 12 written with fp32 moments, 8 fewer with bf16 moments; 2 for model_param.
With bf16 moments the torch implementation makes about 25 passes, so it loops over blocks that fit in the cache. `grad`
is overwritten: torch scales it in place.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megalite.kernels.dispatch import ceil_div, kernel, use_triton
from megalite.kernels.dropout import as_int32, fmix32, fmix32_, fold_in

if TYPE_CHECKING:
    import triton.language as tl

# elements and warps per program: 8 elements per thread are two 16-byte loads of each of the four inputs in flight
BLOCK_SIZE, NUM_WARPS = 1024, 4
# elements per block of the torch implementation with bf16 moments: on a CPU, 1 MiB per pass
REFERENCE_BLOCK_SIZE = {"cpu": 1 << 18, "cuda": 1 << 24}
_ODD = (0x9E3779B1, 0x85EBCA77, 0xC2B2AE3D, 0x27D4EB2F)


def rounding_seed(step: int) -> int:
    """Return a 31-bit key for the random bits of a step; Triton passes it as an int32."""
    return fold_in(step) >> 1


def random_bits(key: int, *values: Tensor) -> Tensor:
    """Return 32 random bits per element, as int32, from `key` and the bits of up to four fp32 values.

    Sums and products of int32 wrap.
    """
    h = torch.full_like(values[0], key, dtype=torch.int32)
    for value, odd in zip(values, _ODD, strict=False):
        h.add_(value.view(torch.int32), alpha=as_int32(odd))
    return fmix32_(h)


def stochastic_round(x: Tensor, bits16: Tensor) -> Tensor:
    """Round fp32 to bf16: up with a probability that equals the truncated fraction, otherwise down.

    Args:
        x: fp32, finite.
        bits16: random integers in [0, 2^16).
    """
    return ((x.view(torch.int32) + bits16) >> 16).to(torch.int16).view(torch.bfloat16)


def adamw_reference_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    betas: tuple[float, float],
    step: int,
    grad_scale: float = 1.0,
    **rates: float,
) -> None:
    """Compute `adamw_` with the function that torch.optim.AdamW(fused=True) calls; this is also the CPU path.

    It loops over blocks if a moment is in bf16. `rates` are lr, eps and weight_decay.
    """
    args = {"beta1": betas[0], "beta2": betas[1], **rates}
    if exp_avg.dtype == exp_avg_sq.dtype == param.dtype:
        _fused_(param, grad, exp_avg, exp_avg_sq, step, grad_scale, **args)
        return
    block = REFERENCE_BLOCK_SIZE.get(param.device.type, REFERENCE_BLOCK_SIZE["cuda"])
    for w, g, m, v in zip(*(x.split(block) for x in (param, grad, exp_avg, exp_avg_sq)), strict=True):
        first, second = (x.to(w.dtype) for x in (m, v))  # no copy of a moment that is not in bf16
        bits = random_bits(rounding_seed(step), *(x.float() for x in (w, g, first, second)))
        _fused_(w, g, first, second, step, grad_scale, **args)
        if m.dtype == torch.bfloat16:
            m.copy_(stochastic_round(first.float(), bits & 0xFFFF))
        if v.dtype == torch.bfloat16:
            v.copy_(stochastic_round(second.float(), (bits >> 16).bitwise_and_(0xFFFF)))


def _fused_(w: Tensor, grad: Tensor, m: Tensor, v: Tensor, step: int, scale: float, **args: float) -> None:
    """Call torch's fused AdamW."""
    if scale != 1.0:
        grad.mul_(scale)  # the scale argument of torch's function is an fp32 divisor, also for fp64
    steps = torch.full((), float(step), device=w.device)
    torch.ops.aten._fused_adamw_([w], [grad], [m], [v], [], [steps], amsgrad=False, maximize=False, **args)


@kernel
def _hash_bits(seed, w, g, m, v):
    h = seed.to(tl.uint32) + w.to(tl.uint32, bitcast=True) * 0x9E3779B1 + g.to(tl.uint32, bitcast=True) * 0x85EBCA77
    return fmix32(h + m.to(tl.uint32, bitcast=True) * 0xC2B2AE3D + v.to(tl.uint32, bitcast=True) * 0x27D4EB2F)


@kernel
def _stochastic_round(x, bits16):
    return ((x.to(tl.uint32, bitcast=True) + bits16) & 0xFFFF0000).to(tl.float32, bitcast=True)


@kernel
def _adamw(
    param_ptr, grad_ptr, exp_avg_ptr, exp_avg_sq_ptr, model_param_ptr, n_elements, seed,
    scale, decay_factor, beta1, beta2, step_size, bias_correction2, eps,
    STOCHASTIC_ROUNDING: tl.constexpr, HAS_MODEL_PARAM: tl.constexpr, BLOCK_SIZE: tl.constexpr,
):  # fmt: skip
    offs = tl.program_id(0).to(tl.int64) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offs < n_elements
    w = tl.load(param_ptr + offs, mask=mask, other=0.0)
    g = tl.load(grad_ptr + offs, mask=mask, other=0.0)
    m = tl.load(exp_avg_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    v = tl.load(exp_avg_sq_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    bits = tl.zeros((BLOCK_SIZE,), dtype=tl.uint32)
    if STOCHASTIC_ROUNDING:
        bits = _hash_bits(seed, w, g, m, v)
    g *= scale
    m += (1.0 - beta1) * (g - m)
    v = beta2 * v + (1.0 - beta2) * g * g
    w = w * decay_factor - step_size * m / (tl.sqrt(v) * bias_correction2 + eps)
    if exp_avg_ptr.dtype.element_ty == tl.bfloat16:
        m = _stochastic_round(m, bits & 0xFFFF)
    if exp_avg_sq_ptr.dtype.element_ty == tl.bfloat16:
        v = _stochastic_round(v, bits >> 16)
    tl.store(param_ptr + offs, w, mask=mask)
    tl.store(exp_avg_ptr + offs, m.to(exp_avg_ptr.dtype.element_ty), mask=mask)
    tl.store(exp_avg_sq_ptr + offs, v.to(exp_avg_sq_ptr.dtype.element_ty), mask=mask)
    if HAS_MODEL_PARAM:
        tl.store(model_param_ptr + offs, w.to(model_param_ptr.dtype.element_ty), mask=mask)


@torch.no_grad()
def adamw_(
    param: Tensor,
    grad: Tensor,
    exp_avg: Tensor,
    exp_avg_sq: Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    weight_decay: float,
    step: int,
    grad_scale: float = 1.0,
    model_param: Tensor | None = None,
) -> None:
    """Update flat contiguous tensors of the same shape in place.

    Args:
        param: the weights.
        grad: their gradients, with the dtype of the weights; overwritten.
        exp_avg: the first moments, with the dtype of the weights or in bf16.
        exp_avg_sq: the second moments, with the dtype of the weights or in bf16.
        lr: the learning rate.
        betas: the decay rates of the moments.
        eps: the term added to the denominator.
        weight_decay: the decoupled weight decay.
        step: the number of this update, from 1.
        grad_scale: the factor of the gradients.
        model_param: gets the new weights, in its own dtype; None: no copy.
    """
    if param.dtype == torch.float32 and use_triton(param):
        beta1, beta2 = betas
        step_size = lr / (1 - beta1**step)
        bias_correction2 = 1 / math.sqrt(1 - beta2**step)
        is_stochastic = torch.bfloat16 in (exp_avg.dtype, exp_avg_sq.dtype)
        has_model_param = model_param is not None
        # The kernel ignores the pointer of an absent model_param; any tensor may take its place.
        copy = param if model_param is None else model_param
        scalars = (grad_scale, 1 - lr * weight_decay, beta1, beta2, step_size, bias_correction2, eps)
        tensors = (param, grad, exp_avg, exp_avg_sq, copy)
        constexprs = (is_stochastic, has_model_param, BLOCK_SIZE)
        _adamw[(ceil_div(param.numel(), BLOCK_SIZE),)](
            *tensors, param.numel(), rounding_seed(step), *scalars, *constexprs, num_warps=NUM_WARPS
        )
        return
    rates = {"lr": lr, "eps": eps, "weight_decay": weight_decay}
    adamw_reference_(param, grad, exp_avg, exp_avg_sq, betas=betas, step=step, grad_scale=grad_scale, **rates)
    if model_param is not None:
        model_param.copy_(param)
