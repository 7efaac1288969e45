"""Gated delta net (arXiv:2412.06464), tensor-parallel: a recurrence with a matrix per head in place of attention.

    x_sBD --gather--> q, k, v, z, b, a -> convolution and SiLU of q, k, v -> g = -exp(A_log) softplus(a + dt_bias)
    S_t = exp(g_t) S_{t-1} + k_t b_t (v_t - (exp(g_t) S_{t-1})^T k_t)^T, o_t = S_t^T q_t       with |q| = |k| = 1
    o -> norm(o) silu(z) @ W --scatter--> y_sBD

Letters: G key heads of K channels (`--linear-num-key-heads`), H value heads of V channels, W tokens of the convolution.
Each key head serves H / G value heads. Queries and keys are one parameter, and v, z and [b, a] are others, so that tp
cuts each by heads. With G < tp, queries and keys are replicated, and each rank computes only the key head that its
value heads use, like the key and value groups of attention.

Saved per token, layer and rank, in elements: 2 g K + h V before the convolution and after it, h V for z and for o, and
in fp32 4 h for the gates and h K V / 512 for states. If "gdn" is recomputed: 2 g K + 3 h V and 2 h for b and a.
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
from megalite.nn.recurrent_mixer import DECAY_RATES, RecurrentMixer, rows_of_heads
from megalite.parallel.spec import Constant, Normal, ParamSpec, Uniform


class GatedDeltaNet(RecurrentMixer):
    """The gated delta net of one layer."""

    def __init__(
        self, make_param: ParamFactory, name: str, model: ModelConfig, layer: int, spec: LayerSpec, recompute_core: bool
    ):
        recurrence = Recurrence(scale=model.linear_key_head_dim**-0.5, normalize_qk=True)
        super().__init__(make_param.mesh, model, layer, spec, recurrence, recompute_core)
        self.eps = model.linear_norm_eps or model.norm_epsilon
        self.doubles_beta = model.linear_allow_neg_eigval
        self.key_dim = K = model.linear_key_head_dim
        self.value_dim = V = model.linear_value_head_dim
        D, W = model.hidden_size, model.linear_conv_kernel_dim
        G, H = model.linear_num_key_heads, model.linear_num_value_heads
        self.qk_replicated = self.tp.size > G
        self.key_head = self.tp.rank * G // self.tp.size  # this rank's only key head if q and k are replicated

        def parameter(part: str, *shape: int, **kwargs: Any) -> nn.Parameter:
            return make_param(ParamSpec(f"{name}.{part}", shape, **kwargs))

        by_heads: Any = dict(shards=((0, "tp"),))
        qk_heads: Any = dict(shards=((1, "tp"),), stacked=True)
        if self.qk_replicated:
            qk_heads = dict(partial_grad_axes=("tp",), stacked=True)
        taps: Any = dict(init=Uniform(-(W**-0.5), W**-0.5), is_filter=True)  # that of torch's Conv1d
        init = Normal(model.init_method_std)
        self.qk = parameter("qk", 2, G * K, D, init=init, **qk_heads)
        self.v = parameter("v", H * V, D, init=init, **by_heads)
        self.z = parameter("z", H * V, D, init=init, **by_heads)
        self.ba = parameter("ba", 2, H, D, init=init, shards=((1, "tp"),), stacked=True)
        self.conv_qk = parameter("conv_qk", 2, G * K, W, **taps, **qk_heads)
        self.conv_v = parameter("conv_v", H * V, W, **taps, **by_heads)
        gate: Any = dict(weight_decay=False, keep_fp32=True, **by_heads)
        self.A_log = parameter("A_log", H, init=Uniform(*DECAY_RATES, of_log=True), **gate)
        self.dt_bias = parameter("dt_bias", H, init=Constant(1.0), **gate)
        self.out_norm = parameter("out_norm", V, init=Constant(1.0), partial_grad_axes=("tp",), weight_decay=False)
        self.out = parameter("out", D, H * V, init=Normal(model.output_init_std), shards=((1, "tp"),))

    @staticmethod
    def shape_of(model: ModelConfig, tp_size: int) -> RecurrentShape:
        K, V = model.linear_key_head_dim, model.linear_value_head_dim
        return RecurrentShape(
            heads=model.linear_num_value_heads // tp_size,
            key_heads=max(1, model.linear_num_key_heads // tp_size),
            key_dim=K,
            value_dim=V,
            map_columns=K,
            conv_width=model.linear_conv_kernel_dim,
            conv_channels=(Channels("key head", K), Channels("key head", K), Channels("head", V)),
            gate_channels=((Channels("head", 1), Channels("head", 1)),),
        )

    def projections(self) -> tuple[list[Tensor], Tensor, list[Tensor]]:
        return [self._own_key_heads(self.qk), self.v], self.z, [self.ba]

    def taps(self) -> tuple[Tensor, None]:
        return torch.cat([self._own_key_heads(self.conv_qk).flatten(0, 1), self.conv_v]), None

    def recurrence_inputs(
        self, convolved_SBf: Tensor, gates: tuple[Tensor, ...], heads: slice = ALL_HEADS
    ) -> RecurrenceInputs:
        (gates_SBf,) = gates
        K, V = self.key_dim, self.value_dim
        dtype = accum_dtype(gates_SBf)
        b_SBh, a_SBh = gates_SBf.to(dtype).chunk(2, -1)
        values = V * b_SBh.shape[-1]
        keys = (convolved_SBf.shape[-1] - values) // 2
        q, k, v = convolved_SBf.split([keys, keys, values], -1)
        q, k = (x.unflatten(-1, (-1, K)) for x in (q, k))
        A_log, dt_bias = rows_of_heads(self.A_log, heads), rows_of_heads(self.dt_bias, heads)
        log_decay_SBh = -A_log.exp() * F.softplus(a_SBh + dt_bias)
        beta_SBh = b_SBh.sigmoid()
        if self.doubles_beta:
            beta_SBh = 2 * beta_SBh
        return RecurrenceInputs(q, k, v.unflatten(-1, (-1, V)), log_decay_SBh, beta_SBh)

    def gated_norm(self, o_SBhV: Tensor, z_SBf: Tensor) -> Tensor:
        z_SBhV = z_SBf.unflatten(-1, (-1, self.value_dim))
        return gated_norm(o_SBhV, z_SBhV, self.out_norm, self.eps).flatten(-2)

    def _own_key_heads(self, stacked: Tensor) -> Tensor:
        """Return the rows [2, g K, ...] of this rank's key heads."""
        if not self.qk_replicated:
            return stacked
        return stacked[:, self.key_head * self.key_dim : (self.key_head + 1) * self.key_dim]
