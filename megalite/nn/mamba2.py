"""Mamba-2 (arXiv:2405.21060), tensor-parallel: a recurrence with a matrix per head in place of attention.

    x_sBD --gather--> x, B, C, z, dt -> convolution and SiLU of x, B, C -> dt = softplus(dt + dt_bias)
    S_t = exp(-exp(A_log) dt_t) S_{t-1} + B_t (dt_t x_t)^T, o_t = S_t^T C_t + D x_t
    o -> norm(o silu(z)) @ W --scatter--> y_sBD

Letters: H heads of P channels (`--mamba-num-heads`, `--mamba-head-dim`), G groups (`--mamba-num-groups`) with N numbers
each in B and C (`--mamba-state-dim`), which H / G heads share, W tokens of the convolution. The recurrence is that of
kernels/delta_rule.py without a correction: C are its queries, B its keys, K = N, and dt x its values, V = P, which are
rounded to the precision of the activations. The norm is over the channels of a group. B and C are one parameter, and x,
z and dt are others, so that tp, which divides the groups, cuts each by groups.

Saved per token, layer and rank, in elements: h P + 2 g N before the convolution and after it, h P for dt x, z and o,
and in fp32 3 h for dt and the decay, and h N P / 512 for states. If "mamba" is recomputed: 3 h P + 2 g N and h for dt.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.config.layer_spec import LayerSpec
from megalite.config.options import ModelConfig
from megalite.kernels.delta_rule import Recurrence, RecurrenceInputs
from megalite.kernels.dispatch import accum_dtype
from megalite.kernels.gated_norm import gated_norm
from megalite.nn.parameter import ParamFactory
from megalite.nn.recurrent_heads import ALL_HEADS, Channels, RecurrentShape
from megalite.nn.recurrent_mixer import DECAY_RATES, TIME_STEPS, RecurrentMixer, rows_of_heads
from megalite.parallel.spec import Constant, InverseSoftplus, Normal, ParamSpec, Uniform

CONV_WIDTH = 4  # tokens; Megatron-LM has no option for it


class Mamba2(RecurrentMixer):
    """The Mamba-2 mixer of one layer."""

    def __init__(
        self, make_param: ParamFactory, name: str, model: ModelConfig, layer: int, spec: LayerSpec, recompute_core: bool
    ):
        super().__init__(make_param.mesh, model, layer, spec, Recurrence(), recompute_core)
        self.eps = model.norm_epsilon
        self.head_dim = P = model.mamba_head_dim
        self.state_dim = N = model.mamba_state_dim
        self.num_groups = model.mamba_num_groups // self.tp.size  # of this rank
        D, G, H = model.hidden_size, model.mamba_num_groups, model.mamba_heads

        def parameter(part: str, *shape: int, **kwargs: Any) -> nn.Parameter:
            return make_param(ParamSpec(f"{name}.{part}", shape, **kwargs))

        by_heads: Any = dict(shards=((0, "tp"),))
        by_groups: Any = dict(shards=((1, "tp"),), stacked=True)
        conv: Any = dict(init=Uniform(-(CONV_WIDTH**-0.5), CONV_WIDTH**-0.5))  # that of torch's Conv1d
        init = Normal(model.init_method_std)
        self.x = parameter("x", H * P, D, init=init, **by_heads)
        self.bc = parameter("bc", 2, G * N, D, init=init, **by_groups)
        self.z = parameter("z", H * P, D, init=init, **by_heads)
        self.dt = parameter("dt", H, D, init=init, **by_heads)
        self.conv_x = parameter("conv_x", H * P, CONV_WIDTH, is_filter=True, **conv, **by_heads)
        self.conv_bc = parameter("conv_bc", 2, G * N, CONV_WIDTH, is_filter=True, **conv, **by_groups)
        self.conv_x_bias = parameter("conv_x_bias", H * P, weight_decay=False, **conv, **by_heads)
        self.conv_bc_bias = parameter("conv_bc_bias", 2, G * N, weight_decay=False, **conv, **by_groups)
        gate: Any = dict(weight_decay=False, keep_fp32=True, **by_heads)
        self.A_log = parameter("A_log", H, init=Uniform(*DECAY_RATES, of_log=True), **gate)
        self.dt_bias = parameter("dt_bias", H, init=InverseSoftplus(*TIME_STEPS), **gate)
        self.D = parameter("D", H, init=Constant(1.0), **gate)
        self.out_norm = parameter("out_norm", H * P, init=Constant(1.0), weight_decay=False, **by_heads)
        self.out = parameter("out", D, H * P, init=Normal(model.output_init_std), shards=((1, "tp"),))

    @staticmethod
    def shape_of(model: ModelConfig, tp_size: int) -> RecurrentShape:
        P, N = model.mamba_head_dim, model.mamba_state_dim
        return RecurrentShape(
            heads=model.mamba_heads // tp_size,
            key_heads=model.mamba_num_groups // tp_size,
            key_dim=N,
            value_dim=P,
            map_columns=1,
            conv_width=CONV_WIDTH,
            conv_channels=(Channels("head", P), Channels("key head", N), Channels("key head", N)),
            gate_channels=((Channels("head", 1),),),
        )

    def projections(self) -> tuple[list[Tensor], Tensor, list[Tensor]]:
        return [self.x, self.bc], self.z, [self.dt]

    def taps(self) -> tuple[Tensor, Tensor]:
        taps = torch.cat([self.conv_x, self.conv_bc.flatten(0, 1)])
        return taps, torch.cat([self.conv_x_bias, self.conv_bc_bias.flatten()])

    def recurrence_inputs(
        self, convolved_SBf: Tensor, gates: tuple[Tensor, ...], heads: slice = ALL_HEADS
    ) -> RecurrenceInputs:
        (gates_SBf,) = gates
        x_SBhP, keys_SBf, queries_SBf = self._split(convolved_SBf, gates_SBf.shape[-1])
        dt_SBh = F.softplus(gates_SBf.to(accum_dtype(gates_SBf)) + rows_of_heads(self.dt_bias, heads))
        k, q = (x.unflatten(-1, (-1, self.state_dim)) for x in (keys_SBf, queries_SBf))
        v = (x_SBhP * dt_SBh.unsqueeze(-1)).to(x_SBhP.dtype)
        return RecurrenceInputs(q, k, v, -rows_of_heads(self.A_log, heads).exp() * dt_SBh, None)

    def add_skip(self, o_SBhV: Tensor, convolved_SBf: Tensor, heads: slice = ALL_HEADS) -> Tensor:
        x_SBhP, _, _ = self._split(convolved_SBf, o_SBhV.shape[2])
        return (o_SBhV + rows_of_heads(self.D, heads).unsqueeze(-1) * x_SBhP).to(o_SBhV.dtype)

    def gated_norm(self, o_SBhV: Tensor, z_SBf: Tensor) -> Tensor:
        by_group = (self.num_groups, -1)
        o, z = o_SBhV.flatten(-2).unflatten(-1, by_group), z_SBf.unflatten(-1, by_group)
        return gated_norm(o, z, self.out_norm.unflatten(0, by_group), self.eps, gate_first=True).flatten(-2)

    def _split(self, convolved_SBf: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return x_SBhP of the heads, and B and C of their groups, [S, B, g N]."""
        x_width = num_heads * self.head_dim
        width = (convolved_SBf.shape[-1] - x_width) // 2
        x_SBf, b_SBf, c_SBf = convolved_SBf.split([x_width, width, width], -1)
        return x_SBf.unflatten(-1, (-1, self.head_dim)), b_SBf, c_SBf
