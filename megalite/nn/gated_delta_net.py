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

Context parallelism exchanges affine maps of states (recurrent_context_parallel.py). Generation keeps the state and the
last W - 1 inputs of the convolution, whatever the number of tokens.
"""

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from megalite.config.layer_spec import LayerSpec
from megalite.config.options import ModelConfig
from megalite.kernels.delta_rule import Recurrence, RecurrenceInputs, delta_rule
from megalite.kernels.dispatch import accum_dtype
from megalite.kernels.gated_norm import gated_norm
from megalite.kernels.short_conv import short_conv
from megalite.nn.linear import column_parallel_linear, row_parallel_linear
from megalite.nn.micro_batch import Batch, ForwardContext, MixerCache
from megalite.nn.parameter import ParamFactory, shapes
from megalite.nn.recompute import checkpoint_without_output, recompute
from megalite.nn.recurrent_context_parallel import context_parallel_delta_rule, documents_of_range, earlier_tokens
from megalite.parallel.spec import Constant, Normal, ParamSpec, Uniform

DECAY_RATES = (1.0, 16.0)  # the range of initial decay rates exp(A_log), as in Megatron-LM


class GatedDeltaNet(nn.Module):
    """The gated delta net of one layer.

    recompute_core  recompute convolution, gates and recurrence in backward
    """

    def __init__(
        self, make_param: ParamFactory, name: str, model: ModelConfig, layer: int, spec: LayerSpec, recompute_core: bool
    ):
        super().__init__()
        self.tp, self.cp = make_param.mesh.tp, make_param.mesh.cp
        self.layer = layer
        self.recompute_core = recompute_core
        self.eps = model.norm_epsilon
        self.key_dim = K = model.linear_key_head_dim
        self.value_dim = V = model.linear_value_head_dim
        D, W = model.hidden_size, model.linear_conv_kernel_dim
        G, H = model.linear_num_key_heads, model.linear_num_value_heads
        self.qk_replicated = self.tp.size > G
        self.key_head = self.tp.rank * G // self.tp.size  # this rank's only key head if q and k are replicated
        self.recurrence = Recurrence(scale=K**-0.5, normalize_qk=True)

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

    def extra_repr(self) -> str:
        return shapes(self)

    def forward(self, x_sBD: Tensor, batch: Batch, ctx: ForwardContext) -> Tensor:
        """Return y_sBD, the output of the layer before the residual is added."""
        weights = [self._own_key_heads(self.qk), self.v, self.z, self.ba]
        qk_SBf, v_SBf, z_SBf, ba_SBf = column_parallel_linear(x_sBD, weights, self.tp, ctx.wgrad_store)
        qkv_SBf = torch.cat([qk_SBf, v_SBf], -1)
        if ctx.cache is not None:
            core = partial(self._cached_core, cache=ctx.cache)
        else:
            core = partial(self._core, batch=batch)
        recomputed = self.recompute_core and self.training
        o_SBhV = recompute(core, qkv_SBf, ba_SBf) if recomputed else core(qkv_SBf, ba_SBf)
        gated = partial(self._gated_norm, o_SBhV, z_SBf)
        return checkpoint_without_output(
            gated, partial(row_parallel_linear, weight_Df=self.out, tp=self.tp, wgrad_store=ctx.wgrad_store)
        )

    def _own_key_heads(self, stacked: Tensor) -> Tensor:
        """Return the rows [2, g K, ...] of this rank's key heads."""
        if not self.qk_replicated:
            return stacked
        return stacked[:, self.key_head * self.key_dim : (self.key_head + 1) * self.key_dim]

    def _gated_norm(self, o_SBhV: Tensor, z_SBf: Tensor) -> Tensor:
        z_SBhV = z_SBf.unflatten(-1, (-1, self.value_dim))
        return gated_norm(o_SBhV, z_SBhV, self.out_norm, self.eps).flatten(-2)

    def _taps(self) -> Tensor:
        """Return the taps of this rank's queries, keys and values, [2 g K + h V, W]."""
        return torch.cat([self._own_key_heads(self.conv_qk).flatten(0, 1), self.conv_v])

    def _recurrence_inputs(self, qkv_SBf: Tensor, ba_SBf: Tensor) -> RecurrenceInputs:
        """Return the inputs of the recurrence, given q, k and v after the convolution, and the projections b and a."""
        K, V = self.key_dim, self.value_dim
        dtype = accum_dtype(ba_SBf)
        b_SBh, a_SBh = ba_SBf.to(dtype).chunk(2, -1)
        values = V * b_SBh.shape[-1]
        keys = (qkv_SBf.shape[-1] - values) // 2
        q, k, v = qkv_SBf.split([keys, keys, values], -1)
        q, k = (x.unflatten(-1, (-1, K)) for x in (q, k))
        log_decay_SBh = -self.A_log.exp() * F.softplus(a_SBh + self.dt_bias)
        return RecurrenceInputs(q, k, v.unflatten(-1, (-1, V)), log_decay_SBh, b_SBh.sigmoid())

    def _core(self, qkv_SBf: Tensor, ba_SBf: Tensor, *, batch: Batch) -> Tensor:
        """Return o_SBhV of complete samples, or of this rank's part of samples that are sharded over cp."""
        document_start = None if batch.documents is None else batch.documents.document_start_BS
        if batch.cp_sharding is None:
            convolved = short_conv(qkv_SBf, self._taps(), document_start)
            recurrence = Recurrence(self.recurrence.scale, normalize_qk=True, documents_BS=document_start)
            return delta_rule(self._recurrence_inputs(convolved, ba_SBf), recurrence)[0]
        taps = self._taps()
        width = taps.shape[1] - 1
        ranges = batch.cp_sharding.contiguous_ranges(self.cp.rank)
        earlier = earlier_tokens(qkv_SBf, width, self.cp, batch.cp_sharding)
        parts = qkv_SBf.split([len(positions) for positions in ranges])
        outputs = [
            short_conv(part, taps, documents_of_range(document_start, positions, width), earlier_TBC)
            for part, positions, earlier_TBC in zip(parts, ranges, earlier, strict=True)
        ]
        inputs = self._recurrence_inputs(torch.cat(outputs), ba_SBf)
        return context_parallel_delta_rule(inputs, self.recurrence, document_start, self.cp, batch.cp_sharding)

    def _cached_core(self, qkv_SBf: Tensor, ba_SBf: Tensor, *, cache: MixerCache) -> Tensor:
        """Return o_SBhV of new tokens, and replace the layer's state and last inputs by those after them.

        Padding after the new tokens of a sample has no decay and no correction, so it leaves the state as it is.
        """
        S, B, f = qkv_SBf.shape
        taps = self._taps()
        width = taps.shape[1] - 1
        if self.layer in cache.states:
            state, earlier = cache.states[self.layer]
        else:
            state, earlier = None, qkv_SBf.new_zeros(width, B, f)
        inputs = self._recurrence_inputs(short_conv(qkv_SBf, taps, None, earlier), ba_SBf)
        is_new_SB1 = (torch.arange(S, device=qkv_SBf.device)[:, None] < cache.num_new_B).unsqueeze(-1)
        beta = inputs.beta
        assert beta is not None
        inputs = inputs._replace(log_decay=inputs.log_decay.where(is_new_SB1, 0.0), beta=beta.where(is_new_SB1, 0.0))
        o_SBhV, state = delta_rule(inputs, self.recurrence, state)
        seen = torch.cat([earlier, qkv_SBf])
        last_TB = cache.num_new_B + torch.arange(width, device=qkv_SBf.device)[:, None]
        cache.states[self.layer] = state, seen[last_TB, torch.arange(B, device=qkv_SBf.device)]
        return o_SBhV
