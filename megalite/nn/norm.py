"""LayerNorm and RMSNorm over the last dim, by name.

Weights are replicated over tp while each tp rank sees other positions (or other heads), so their gradients are
summands: grad="partial", summed over tp once per step by the optimizer's buffer.
"""

from __future__ import annotations

from torch import Tensor, nn

from megalite.kernels.layer_norm import add_layer_norm, layer_norm
from megalite.kernels.rms_norm import add_rms_norm, rms_norm
from megalite.nn.parameter import Maker
from megalite.parallel.spec import Constant, ParamSpec


class Norm(nn.Module):
    """`kind` is "LayerNorm" or "RMSNorm"; `one_plus` stores the weight as its difference from 1."""

    def __init__(self, make: Maker, name: str, size: int, kind: str, eps: float, one_plus: bool = False):
        super().__init__()
        self.eps, self.one_plus = eps, one_plus
        init = Constant(0.0 if one_plus else 1.0)
        self.weight = make(ParamSpec(f"{name}.weight", (size,), grad="partial", init=init, decay=False))
        self.bias = None
        if kind == "LayerNorm":
            self.bias = make(ParamSpec(f"{name}.bias", (size,), grad="partial", init=Constant(0.0), decay=False))

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight + 1 if self.one_plus else self.weight
        if self.bias is None:
            return rms_norm(x, weight, self.eps)
        return layer_norm(x, weight, self.bias, self.eps)

    def after_add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """h = x + residual and the norm of h, in one pass over both where the kernel is Triton's."""
        weight = self.weight + 1 if self.one_plus else self.weight
        if self.bias is None:
            return add_rms_norm(x, residual, weight, self.eps)
        return add_layer_norm(x, residual, weight, self.bias, self.eps)
