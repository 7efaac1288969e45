"""Tensor-parallel feed-forward block.

    x_sBD --gather--> u_SBf = x @ up^T -> act(u) @ down^T --scatter--> y_sBD

Gated activations (swiglu) have gate and up in one tensor [2, F, D], split over F, so that one matmul gives [gate | up]
and any slice along F holds both halves of its columns.
"""

from torch import Tensor, nn

from megalite.config.options import ModelConfig
from megalite.kernels.activation import activation_named
from megalite.nn.later import Later
from megalite.nn.linear import add_bias, gather_linear, linear_scatter
from megalite.nn.parameter import Maker, shapes
from megalite.parallel.spec import Constant, Normal, ParamSpec


class MLP(nn.Module):
    """`width`: F. A gated activation of kernels/activations/ has width 2."""

    def __init__(self, make: Maker, name: str, model: ModelConfig, width: int, *, bias: bool):
        super().__init__()
        self.tp = make.mesh.tp
        self.activation = activation_named(model.activation)  # or compiled (models/compiled.py)
        D, F, std, zero = model.hidden_size, width, model.init_method_std, Constant(0.0)
        gated = self.activation.width == 2
        up, lead, shards = ("gate_up", (2, F), ((1, "tp"),)) if gated else ("up", (F,), ((0, "tp"),))
        self.up = make(ParamSpec(f"{name}.{up}", (*lead, D), shards=shards, init=Normal(std), stacked=gated))
        self.up_bias = self.down_bias = None
        if bias:
            self.up_bias = make(ParamSpec(f"{name}.{up}_bias", lead, shards, init=zero, decay=False, stacked=gated))
        self.down = make(ParamSpec(f"{name}.down", (D, F), shards=((1, "tp"),), init=Normal(model.out_std)))
        if bias:  # made in the order of use
            self.down_bias = make(ParamSpec(f"{name}.down_bias", (D,), partial=("tp",), init=zero, decay=False))

    def extra_repr(self) -> str:
        return shapes(self)

    def forward(self, x_sBD: Tensor, later: Later | None = None) -> Tensor:
        (u_SBf,) = gather_linear(x_sBD, [self.up], self.tp, later)
        y_sBD = linear_scatter(u_SBf, self.down, self.tp, self.activation, self.up_bias, later)
        return add_bias(y_sBD, self.down_bias)
