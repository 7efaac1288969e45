"""Activations of the feed-forward block, with their backward from the input alone.

    swiglu        a = silu(g) * u, input [g | u]       dg = da u s (1 + g (1 - s)),  du = da silu(g),  s = sigmoid(g)
    gelu          a = x/2 * (1 + tanh(k (x + 0.044715 x^3))), k = sqrt(2/pi)    (arXiv:1606.08415, tanh form)
    gelu_erf      a = x/2 * (1 + erf(x / sqrt(2)))     the same function exactly, not by its tanh form
    squared_relu  a = max(x, 0)^2                      dx = 2 max(x, 0) da      (arXiv:2109.08668)

Only the input is needed by backward, so a caller saves that and recomputes `a` (nn/linear.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class Activation:
    """`width`: how many input columns make one output column (2 for gated ones: [gate | up])."""

    forward: Callable[[Tensor], Tensor]
    backward: Callable[[Tensor, Tensor], Tensor]
    width: int


def swiglu_forward(u: Tensor) -> Tensor:
    """[..., 2F] = [gate | up] -> [..., F]."""
    gate, up = u.chunk(2, -1)
    return F.silu(gate) * up


def swiglu_backward(u: Tensor, da: Tensor) -> Tensor:
    gate, up = u.chunk(2, -1)
    s = torch.sigmoid(gate)
    du = torch.empty_like(u)
    dgate, dup = du.chunk(2, -1)
    torch.mul(da, gate * s, out=dup)
    torch.mul(da * up, s * (1 + gate * (1 - s)), out=dgate)
    return du


def gelu_forward(u: Tensor) -> Tensor:
    return F.gelu(u, approximate="tanh")


def gelu_backward(u: Tensor, da: Tensor) -> Tensor:
    return torch.ops.aten.gelu_backward(da, u, approximate="tanh")


def gelu_erf_forward(u: Tensor) -> Tensor:
    return F.gelu(u)


def gelu_erf_backward(u: Tensor, da: Tensor) -> Tensor:
    return torch.ops.aten.gelu_backward(da, u, approximate="none")


def squared_relu_forward(u: Tensor) -> Tensor:
    return F.relu(u).square()


def squared_relu_backward(u: Tensor, da: Tensor) -> Tensor:
    return 2 * F.relu(u) * da


ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    {
        "swiglu": Activation(swiglu_forward, swiglu_backward, 2),
        "gelu": Activation(gelu_forward, gelu_backward, 1),
        "gelu_erf": Activation(gelu_erf_forward, gelu_erf_backward, 1),
        "squared_relu": Activation(squared_relu_forward, squared_relu_backward, 1),
    }
)
