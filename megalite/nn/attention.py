"""Tensor-parallel self-attention: heads split over tp, grouped key/value heads, rotary positions, q/k norm.

    x_sBD --gather--> q_SBhK, k_SBgK, v_SBgK -> rope -> softmax(scale q k^T) v -> o_SBhK @ W --scatter--> y_sBD

With an output gate, sigmoid(x @ W_gate) multiplies o (arXiv:2505.06708).

q [H*K, D] and kv [2, G*K, D] are two parameters. With G >= tp both are split over tp. With G < tp, kv is replicated,
each rank computes only the group that its query heads use, and the gradients of the replicas are summed over tp, like
the norms' gradients. A fused qkv tensor could not be described by one box in that case.
"""

from collections.abc import Callable
from functools import partial

from torch import Tensor, nn

from megalite.config.layer_spec import LayerSpec
from megalite.config.options import ModelConfig
from megalite.kernels.attention import attention
from megalite.kernels.blocked_attention import AttentionDropout
from megalite.kernels.dropout import fold_in
from megalite.kernels.rope import apply_rope, interleaved_to_half
from megalite.nn.context_parallel import ContextParallelAttention
from megalite.nn.linear import add_bias, column_parallel_linear, row_parallel_linear
from megalite.nn.micro_batch import RNG_SITE_ATTENTION, Batch, ForwardContext
from megalite.nn.norm import Norm, QKNormAllHeads
from megalite.nn.parameter import ParamFactory, shapes
from megalite.nn.recompute import recompute
from megalite.parallel.spec import Constant, Normal, ParamSpec


def rotate_qk(q_SBhK: Tensor, k_SBgK: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """Apply rotary position embeddings to queries and keys."""
    return apply_rope(q_SBhK, cos, sin), apply_rope(k_SBgK, cos, sin)


class Attention(nn.Module):
    """Self-attention of one layer, with H query heads and G groups of keys and values of K channels each.

    The model may have a norm on each head of q and k, or on all heads of a token at once.

    window          number of keys that a query sees, including its own; None: all up to its own
    sink            an additional logit per head in the sum of the softmax
    recompute_core  recompute scores and softmax in backward
    """

    def __init__(
        self, make_param: ParamFactory, name: str, model: ModelConfig, layer: int, spec: LayerSpec, recompute_core: bool
    ):
        super().__init__()
        tp = make_param.mesh.tp
        self.cp = make_param.mesh.cp
        self.tp = tp
        self.model = model
        self.layer = layer
        self.seed = make_param.seed
        self.recompute_core = recompute_core
        self.window = spec.window
        self.rope = spec.rope
        self.cp_comm_type = spec.cp_comm_type
        self.rotate_qk = rotate_qk  # or compiled (models/torch_compile.py)
        D, H, G, K = model.hidden_size, model.num_attention_heads, model.num_kv_groups, model.head_size
        std = model.init_method_std
        qk_weight_decay = model.no_weight_decay_cond_type is not None
        self.kv_replicated = tp.size > G
        self.kv_group = tp.rank * G // tp.size  # this rank's only group if kv is replicated
        kv_shards, partial_grad_axes = ((), ("tp",)) if self.kv_replicated else (((1, "tp"),), ())
        zero = Constant(0.0)
        self.q = make_param(ParamSpec(f"{name}.q", (H * K, D), shards=((0, "tp"),), init=Normal(std)))
        kv_spec = partial(ParamSpec, shards=kv_shards, partial_grad_axes=partial_grad_axes, stacked=True)
        self.kv = make_param(kv_spec(f"{name}.kv", (2, G * K, D), init=Normal(std)))
        self.gate = self.gate_bias = None
        if model.attention_output_gate:
            self.gate = make_param(ParamSpec(f"{name}.gate", (H * K, D), shards=((0, "tp"),), init=Normal(std)))
        self.q_bias = self.kv_bias = self.out_bias = None
        if model.add_bias_linear or model.add_qkv_bias:
            self.q_bias = make_param(
                ParamSpec(f"{name}.q_bias", (H * K,), shards=((0, "tp"),), init=zero, weight_decay=False)
            )
            self.kv_bias = make_param(kv_spec(f"{name}.kv_bias", (2, G * K), init=zero, weight_decay=False))
            if model.attention_output_gate:
                self.gate_bias = make_param(
                    ParamSpec(f"{name}.gate_bias", (H * K,), shards=((0, "tp"),), init=zero, weight_decay=False)
                )
        self.q_norm = self.k_norm = self.qk_norm = None
        if model.qk_layernorm and model.qk_layernorm_over_heads:
            widths = (H * K, G * K)
            self.qk_norm = QKNormAllHeads(
                make_param, name, widths, not self.kv_replicated, model, decay=qk_weight_decay
            )
        elif model.qk_layernorm:
            eps = model.qk_norm_eps
            self.q_norm = Norm(make_param, f"{name}.q_norm", K, model, decay=qk_weight_decay, eps=eps)
            self.k_norm = Norm(make_param, f"{name}.k_norm", K, model, decay=qk_weight_decay, eps=eps)
        sink = ParamSpec(f"{name}.sink", (H,), shards=((0, "tp"),), init=Normal(std), weight_decay=False)
        self.sink = make_param(sink) if model.softmax_type == "learnable" else None
        self.out = make_param(
            ParamSpec(f"{name}.out", (D, H * K), shards=((1, "tp"),), init=Normal(model.output_init_std))
        )
        if model.add_bias_linear:
            self.out_bias = make_param(
                ParamSpec(f"{name}.out_bias", (D,), partial_grad_axes=("tp",), init=zero, weight_decay=False)
            )

    def extra_repr(self) -> str:
        return shapes(self)

    def forward(self, x_sBD: Tensor, batch: Batch, ctx: ForwardContext) -> Tensor:
        """Return y_sBD, the output of the layer before the residual is added."""
        K = self.model.head_size
        kv = self.kv
        kv_bias = self.kv_bias
        rows = slice(None)
        if self.kv_replicated:
            rows = slice(self.kv_group * K, (self.kv_group + 1) * K)
            kv = kv[:, rows]
            kv_bias = None if kv_bias is None else kv_bias[:, rows]
        weights = [self.q, kv] if self.gate is None else [self.q, kv, self.gate]
        q, kv_out, *gate = column_parallel_linear(x_sBD, weights, self.tp, ctx.wgrad_store)
        q_SBhK = add_bias(q, self.q_bias).unflatten(-1, (-1, K))
        k_SBgK, v_SBgK = add_bias(kv_out, kv_bias).unflatten(-1, (2, -1, K)).unbind(-3)
        if self.qk_norm is not None:
            normed = self.qk_norm(q_SBhK.flatten(-2), k_SBgK.flatten(-2), rows)
            q_SBhK, k_SBgK = (x.unflatten(-1, (-1, K)) for x in normed)
        elif self.q_norm is not None and self.k_norm is not None:
            q_SBhK, k_SBgK = self.q_norm(q_SBhK), self.k_norm(k_SBgK)
        if self.rope is not None:
            if self.model.rotary_interleaved:
                q_SBhK, k_SBgK = (interleaved_to_half(x, self.rope.dim) for x in (q_SBhK, k_SBgK))
            q_SBhK, k_SBgK = self.rotate_qk(q_SBhK, k_SBgK, *ctx.rope[self.rope])
        dropout = None
        if self.model.attention_dropout and self.training:
            key = fold_in(self.seed, ctx.step, self.layer, RNG_SITE_ATTENTION)
            dropout = AttentionDropout(
                self.model.attention_dropout, key, batch.sample_ids_B, self.tp.shard_start(q_SBhK.shape[2])
            )
        scale = self.model.attention_scale
        sink = self.sink
        if self.model.softmax_type == "off-by-one":
            sink = q_SBhK.new_zeros(q_SBhK.shape[2])
        core_kwargs = dict(scale=scale, drop=dropout, documents=batch.documents, window=self.window, sink_H=sink)
        core_kwargs["softcap"] = self.model.attn_logit_softcapping
        core = partial(self._select_core_attention(batch, ctx), **core_kwargs)
        qkv = (q_SBhK, k_SBgK, v_SBgK)
        o_SBhK = recompute(core, *qkv) if self.recompute_core and self.training else core(*qkv)
        o_SBf = o_SBhK.flatten(-2)
        if gate:
            o_SBf = o_SBf * add_bias(gate[0], self.gate_bias).sigmoid()
        y_sBD = row_parallel_linear(o_SBf, self.out, self.tp, wgrad_store=ctx.wgrad_store)
        return add_bias(y_sBD, self.out_bias)

    def _select_core_attention(self, batch: Batch, ctx: ForwardContext) -> Callable[..., Tensor]:
        """Return attention over full samples; with cp, one that exchanges this rank's part with others."""
        if ctx.cache is not None:
            return partial(ctx.cache.attend, self.layer)
        if batch.cp_sharding is None:
            return attention
        context_parallel = ContextParallelAttention(
            attention, self.cp, batch.cp_sharding, ctx.in_full_recompute or (self.recompute_core and self.training)
        )
        if self.cp_comm_type == "a2a":
            return context_parallel.all_to_all_attention
        return context_parallel.kv_all_gather_attention
