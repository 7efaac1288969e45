"""LayerNorm and RMSNorm over the last dim, by name.

Weights are replicated over tp, and each tp rank sees other positions (or other heads). So each has a summand of their
gradient: they are `partial`, and the optimizer's buffer sums them over tp once per step.
"""

from torch import Tensor, nn

from megalite.kernels.norms import add_norm, norm
from megalite.nn.parameter import Maker
from megalite.parallel.spec import Constant, ParamSpec


def normalise(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float, one_plus: bool) -> Tensor:
    """RMSNorm if there is no bias, otherwise LayerNorm."""
    return norm(x, weight + 1 if one_plus else weight, bias, eps)


def add_and_normalise(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor | None, eps: float, one_plus: bool
) -> tuple[Tensor, Tensor]:
    """h = x + residual and the norm of h."""
    return add_norm(x, residual, weight + 1 if one_plus else weight, bias, eps)


class Norm(nn.Module):
    """`kind` is "LayerNorm" or "RMSNorm"; `one_plus` stores the weight as its difference from 1."""

    def __init__(
        self, make: Maker, name: str, size: int, kind: str, eps: float, one_plus: bool = False, decay: bool = False
    ):
        super().__init__()
        self.eps, self.one_plus = eps, one_plus
        self.normalise, self.add_and_normalise = normalise, add_and_normalise  # or compiled (models/compiled.py)
        offset = 1.0 if one_plus else 0.0
        init = Constant(1.0 - offset)
        self.weight = make(ParamSpec(f"{name}.weight", (size,), partial=("tp",), init=init, decay=decay, offset=offset))
        self.bias = None
        if kind == "LayerNorm":
            self.bias = make(ParamSpec(f"{name}.bias", (size,), partial=("tp",), init=Constant(0.0), decay=decay))

    def forward(self, x: Tensor, residual: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """The norm of x; with a residual, their sum and the norm of the sum."""
        if residual is None:
            return self.normalise(x, self.weight, self.bias, self.eps, self.one_plus)
        return self.add_and_normalise(x, residual, self.weight, self.bias, self.eps, self.one_plus)
