"""Activations of the feed-forward block by name, with their backward from the input alone.

    swiglu        a = silu(g) * u, input [g | u]       (kernels/swiglu.py)
    gelu          a = x/2 * (1 + tanh(k (x + 0.044715 x^3))), k = sqrt(2/pi)    (kernels/bias_gelu.py)
    gelu_erf      a = x/2 * (1 + erf(x / sqrt(2)))     the same function exactly, not by its tanh form
    squared_relu  a = max(x, 0)^2                      dx = 2 max(x, 0) da      (arXiv:2109.08668)

Only the input is needed by backward, so a caller saves that (nn/linear.py); backward gives `a` once more.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch.nn.functional as F
from torch import Tensor

from megalite.kernels.bias_gelu import bias_gelu_backward, bias_gelu_forward
from megalite.kernels.swiglu import swiglu_backward, swiglu_forward


@dataclass(frozen=True)
class Activation:
    """forward(u) -> a and backward(u, da) -> (a, du). `width`: how many input columns make one output column (2 for
    gated ones: [gate | up]). With `takes_bias` both take one as their last argument, which is added to u first, and
    backward returns its gradient as a third result."""

    forward: Callable[..., Tensor]
    backward: Callable[..., tuple[Tensor, ...]]
    width: int
    takes_bias: bool = False


def squared_relu_forward(u: Tensor) -> Tensor:
    return F.relu(u).square()


def squared_relu_backward(u: Tensor, da: Tensor) -> tuple[Tensor, Tensor]:
    r = F.relu(u)
    return r.square(), 2 * r * da


def _gelu(tanh: bool) -> Activation:
    forward = functools.partial(bias_gelu_forward, tanh=tanh)
    return Activation(forward, functools.partial(bias_gelu_backward, tanh=tanh), 1, takes_bias=True)


ACTIVATIONS: Mapping[str, Activation] = MappingProxyType(
    {
        "swiglu": Activation(swiglu_forward, swiglu_backward, 2),
        "gelu": _gelu(tanh=True),
        "gelu_erf": _gelu(tanh=False),
        "squared_relu": Activation(squared_relu_forward, squared_relu_backward, 1),
    }
)
