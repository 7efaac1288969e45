"""Kimi delta attention (arXiv:2510.26692), tensor-parallel: a gated delta net whose decay differs between channels.

    x_sBD --gather--> q, k, v, b, f, z -> convolution and SiLU of q, k, v -> g = -exp(A_log) softplus(W_f f + dt_bias)
    S_t = exp(g_t) S_{t-1} + k_t b_t (v_t - (exp(g_t) S_{t-1})^T k_t)^T, o_t = S_t^T q_t       with |q| = |k| = 1
    o -> norm(o) sigmoid(W_z z) @ W --scatter--> y_sBD

Letters: H heads (`--linear-num-key-heads` and `--linear-num-value-heads`, which are equal) of K key and V value
channels, W tokens of the convolution. g has a number for each key channel, A_log one for each head. The projections of
f and z have rank V: their first matrices are replicated over tp, and the second ones are cut by heads, so that each
rank computes a summand of the gradients of the first.

Saved per token, layer and rank, in elements: h (2 K + V) before the convolution and after it, V for f and z, h V
for W_z z and for o, and in fp32 3 h K for the decay, h for b, and h K V / 512 for states. If "kda" is
recomputed: h (2 K + 3 V) + 2 V + h.
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
from megalite.nn.linear import LOCAL, column_parallel_linear
from megalite.nn.parameter import ParamFactory
from megalite.nn.recurrent_heads import ALL_HEADS, Channels, RecurrentShape
from megalite.nn.recurrent_mixer import DECAY_RATES, TIME_STEPS, RecurrentMixer, rows_of_heads
from megalite.parallel.spec import Constant, InverseSoftplus, Normal, ParamSpec, Uniform


class KimiDeltaAttention(RecurrentMixer):
    """The Kimi delta attention of one layer."""

    def __init__(
        self, make_param: ParamFactory, name: str, model: ModelConfig, layer: int, spec: LayerSpec, recompute_core: bool
    ):
        recurrence = Recurrence(scale=model.linear_key_head_dim**-0.5, normalize_qk=True)
        super().__init__(make_param.mesh, model, layer, spec, recurrence, recompute_core)
        self.eps = model.linear_norm_eps or model.norm_epsilon
        self.doubles_beta = model.linear_allow_neg_eigval
        self.key_dim = K = model.linear_key_head_dim
        self.value_dim = V = model.linear_value_head_dim
        D, W, H = model.hidden_size, model.linear_conv_kernel_dim, model.linear_num_value_heads

        def parameter(part: str, *shape: int, **kwargs: Any) -> nn.Parameter:
            return make_param(ParamSpec(f"{name}.{part}", shape, **kwargs))

        by_heads: Any = dict(shards=((0, "tp"),))
        qk_heads: Any = dict(shards=((1, "tp"),), stacked=True)
        taps: Any = dict(init=Uniform(-(W**-0.5), W**-0.5), is_filter=True)  # that of torch's Conv1d
        init = Normal(model.init_method_std)
        self.qk = parameter("qk", 2, H * K, D, init=init, **qk_heads)
        self.v = parameter("v", H * V, D, init=init, **by_heads)
        self.b = parameter("b", H, D, init=init, **by_heads)
        self.f_down = parameter("f_down", V, D, init=init, partial_grad_axes=("tp",), width_role="output")
        self.f_up = parameter("f_up", H * K, V, init=init, width_role="input", **by_heads)
        self.z_down = parameter("z_down", V, D, init=init, partial_grad_axes=("tp",), width_role="output")
        self.z_up = parameter("z_up", H * V, V, init=init, width_role="input", **by_heads)
        self.conv_qk = parameter("conv_qk", 2, H * K, W, **taps, **qk_heads)
        self.conv_v = parameter("conv_v", H * V, W, **taps, **by_heads)
        gate: Any = dict(weight_decay=False, keep_fp32=True, **by_heads)
        self.A_log = parameter("A_log", H, init=Uniform(*DECAY_RATES, of_log=True), **gate)
        self.dt_bias = parameter("dt_bias", H * K, init=InverseSoftplus(*TIME_STEPS), **gate)
        self.out_norm = parameter("out_norm", V, init=Constant(1.0), partial_grad_axes=("tp",), weight_decay=False)
        self.out = parameter("out", D, H * V, init=Normal(model.output_init_std), shards=((1, "tp"),))

    @staticmethod
    def shape_of(model: ModelConfig, tp_size: int) -> RecurrentShape:
        K, V = model.linear_key_head_dim, model.linear_value_head_dim
        heads = model.linear_num_value_heads // tp_size
        return RecurrentShape(
            heads=heads,
            key_heads=heads,
            key_dim=K,
            value_dim=V,
            map_columns=K,
            conv_width=model.linear_conv_kernel_dim,
            conv_channels=(Channels("head", K), Channels("head", K), Channels("head", V)),
            gate_channels=((Channels("head", 1),), (Channels("all", V),)),
        )

    def projections(self) -> tuple[list[Tensor], Tensor, list[Tensor]]:
        return [self.qk, self.v], self.z_down, [self.b, self.f_down]

    def taps(self) -> tuple[Tensor, None]:
        return torch.cat([self.conv_qk.flatten(0, 1), self.conv_v]), None

    def recurrence_inputs(
        self, convolved_SBf: Tensor, gates: tuple[Tensor, ...], heads: slice = ALL_HEADS
    ) -> RecurrenceInputs:
        b_SBh, f_SBR = gates
        K, V, h = self.key_dim, self.value_dim, b_SBh.shape[-1]
        q, k, v = convolved_SBf.split([h * K, h * K, h * V], -1)
        (f_SBf,) = column_parallel_linear(f_SBR, [rows_of_heads(self.f_up, heads, K)], LOCAL)
        dtype = accum_dtype(b_SBh)
        steps_SBhK = F.softplus(f_SBf.to(dtype) + rows_of_heads(self.dt_bias, heads, K)).unflatten(-1, (h, K))
        log_decay_SBhK = -rows_of_heads(self.A_log, heads).exp().unsqueeze(-1) * steps_SBhK
        q, k, v = q.unflatten(-1, (h, K)), k.unflatten(-1, (h, K)), v.unflatten(-1, (h, V))
        beta_SBh = b_SBh.to(dtype).sigmoid()
        if self.doubles_beta:
            beta_SBh = 2 * beta_SBh
        return RecurrenceInputs(q, k, v, log_decay_SBhK, beta_SBh)

    def output_gate(self, z_SBf: Tensor) -> Tensor:
        (gate_SBf,) = column_parallel_linear(z_SBf, [self.z_up], LOCAL)
        return gate_SBf

    def gated_norm(self, o_SBhV: Tensor, z_SBf: Tensor) -> Tensor:
        z_SBhV = z_SBf.unflatten(-1, (-1, self.value_dim))
        return gated_norm(o_SBhV, z_SBhV, self.out_norm, self.eps, sigmoid_gate=True).flatten(-2)
