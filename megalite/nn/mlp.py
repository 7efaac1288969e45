"""The tensor-parallel feed-forward block.

    x_sBD --gather--> u_SBf = x @ up^T -> act(u) @ down^T --scatter--> y_sBD

Gated activations (swiglu) have gate and up in one tensor [2, F, D], split over F, so that one matmul gives [gate | up]
and any slice along F contains both halves of its columns.
"""

from torch import Tensor, nn

from megalite.config.options import ModelConfig
from megalite.kernels.activation import get_activation
from megalite.nn.linear import add_bias, column_parallel_linear, row_parallel_linear
from megalite.nn.micro_batch import Batch, ForwardContext
from megalite.nn.parameter import ParamFactory, shapes
from megalite.parallel.spec import Constant, Normal, ParamSpec


class MLP(nn.Module):
    """The feed-forward block with `ffn_size` F. Gated activations (kernels/activations/) have width 2."""

    def __init__(self, make_param: ParamFactory, name: str, model: ModelConfig, ffn_size: int, *, bias: bool):
        super().__init__()
        self.tp = make_param.mesh.tp
        self.activation = get_activation(model.activation)  # or compiled (models/torch_compile.py)
        D = model.hidden_size
        F = ffn_size
        std = model.init_method_std
        zero = Constant(0.0)
        gated = self.activation.width == 2
        up, leading_dims, shards = ("gate_up", (2, F), ((1, "tp"),)) if gated else ("up", (F,), ((0, "tp"),))
        self.up = make_param(
            ParamSpec(f"{name}.{up}", (*leading_dims, D), shards=shards, init=Normal(std), stacked=gated)
        )
        self.up_bias = self.down_bias = None
        if bias:
            self.up_bias = make_param(
                ParamSpec(f"{name}.{up}_bias", leading_dims, shards, init=zero, weight_decay=False, stacked=gated)
            )
        self.down = make_param(
            ParamSpec(f"{name}.down", (D, F), shards=((1, "tp"),), init=Normal(model.output_init_std))
        )
        if bias:  # parameters are created in the order of use
            self.down_bias = make_param(
                ParamSpec(f"{name}.down_bias", (D,), partial_grad_axes=("tp",), init=zero, weight_decay=False)
            )

    def extra_repr(self) -> str:
        return shapes(self)

    def forward(self, x_sBD: Tensor, batch: Batch, ctx: ForwardContext) -> Tensor:
        """Return y_sBD, the output of the block before the residual is added."""
        (u_SBf,) = column_parallel_linear(x_sBD, [self.up], self.tp, ctx.wgrad_store)
        y_sBD = row_parallel_linear(u_SBf, self.down, self.tp, self.activation, self.up_bias, ctx.wgrad_store)
        return add_bias(y_sBD, self.down_bias)
