"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1), tensor-parallel.

    x_sBD -> q_down, kv_down -> norms -> c_sBC --gather--> q_up, kv_up -> q_SBhN, k_SBhN, v_SBhV       C = Lq + L + R
    softmax(scale (q k^T + q_pe k_pe^T)) v -> o_SBhV @ W --scatter--> y_sBD

Queries and keys are compressed to latents of Lq and L channels, and expanded to heads: a key has N channels of its own
and R rotated ones, `k_pe`, that all heads share. Without `q_lora_rank`, queries come from x. The down projections are
replicated over tp, and each rank applies them to its shard of the sequence. Then one all-gather brings the latents to
all heads, C channels in place of D, and one reduce-scatter in backward sums their gradients, that of k_pe too.

Letters: N content channels of a head (`qk_head_dim`), R rotated ones, V of a value, Lq and L the ranks of the latents.

Saved per token and layer, in elements, besides x: Lq + L + R (before the norms, which are recomputed), and of this
rank's heads h (N + R) for q, h (N + V) for k and v, R for k_pe, h V for o. If "mla_up_proj" is recomputed, q, k, v and
k_pe are expanded again in backward: Lq + L + R + h V.

Context parallelism gathers latents and k_pe (context_parallel.py). Generation keeps these, L + R numbers per token, and
after the first pass attends to them directly: q (W_k c) = (q W_k) c, and the sum over p (W_v c) is W_v (sum over p c).
"""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megalite.config.layer_spec import LayerSpec
from megalite.config.options import ModelConfig
from megalite.kernels.attention import attention
from megalite.kernels.blocked_attention import AttentionDropout
from megalite.kernels.cached_attention import cached_attention
from megalite.kernels.dropout import fold_in
from megalite.kernels.matmul import matmul
from megalite.kernels.rope import interleaved_to_half
from megalite.nn.attention import rotate_qk
from megalite.nn.context_parallel import ContextParallelAttention
from megalite.nn.linear import (
    LOCAL,
    add_bias,
    column_parallel_linear,
    column_parallel_linear_of_parts,
    row_parallel_linear,
)
from megalite.nn.micro_batch import RNG_SITE_ATTENTION, Batch, ForwardContext, MixerCache
from megalite.nn.norm import Norm
from megalite.nn.parameter import ParamFactory, shapes
from megalite.nn.recompute import checkpoint_without_output, recompute
from megalite.parallel.spec import Constant, Normal, ParamSpec


class LatentAttention(nn.Module):
    """Multi-head latent attention of one layer.

    window          number of keys that a query sees, including its own; None: all up to its own
    sink            an additional logit per head in the sum of the softmax
    gate            a projection of x; its sigmoid multiplies o
    recompute_core  recompute scores and softmax in backward
    recompute_up    recompute queries, keys and values in backward
    """

    def __init__(
        self,
        make_param: ParamFactory,
        name: str,
        model: ModelConfig,
        layer: int,
        spec: LayerSpec,
        *,
        recompute_core: bool,
        recompute_up: bool,
    ):
        super().__init__()
        self.tp, self.cp = make_param.mesh.tp, make_param.mesh.cp
        self.model = model
        self.layer = layer
        self.seed = make_param.seed
        self.recompute_core = recompute_core
        self.recompute_up = recompute_up
        self.window = spec.window
        self.rope = spec.rope
        self.cp_comm_type = spec.cp_comm_type
        self.rotate_qk = rotate_qk  # or compiled (models/torch_compile.py)
        D, H = model.hidden_size, model.num_attention_heads
        N, R, V = model.qk_head_dim, model.qk_pos_emb_head_dim, model.v_head_dim
        Lq, L = model.q_lora_rank, model.kv_lora_rank
        qk_norm: Any = dict(decay=model.no_weight_decay_cond_type is not None, eps=model.qk_norm_eps)

        def matrix(part: str, rows: int, columns: int, **kwargs: Any) -> nn.Parameter:
            init = Normal(model.output_init_std if part == "out" else model.init_method_std)
            return make_param(ParamSpec(f"{name}.{part}", (rows, columns), init=init, **kwargs))

        by_rows: Any = dict(shards=((0, "tp"),))
        replicated: Any = dict(partial_grad_axes=("tp",))
        self.q = self.q_down = self.q_norm = self.q_up = self.kv_norm = self.gate = self.out_bias = None
        if Lq is None:
            self.q = matrix("q", H * (N + R), D, **by_rows)
        else:
            self.q_down = matrix("q_down", Lq, D, **replicated)
            if model.qk_layernorm:
                self.q_norm = Norm(make_param, f"{name}.q_norm", Lq, model, **qk_norm)
            self.q_up = matrix("q_up", H * (N + R), Lq, **by_rows)
        self.kv_down = matrix("kv_down", L + R, D, **replicated)
        if model.qk_layernorm:
            self.kv_norm = Norm(make_param, f"{name}.kv_norm", L, model, **qk_norm)
        self.kv_up = matrix("kv_up", H * (N + V), L, **by_rows)
        if model.attention_output_gate:
            self.gate = matrix("gate", H * V, D, **by_rows)
        sink = ParamSpec(
            f"{name}.sink", (H,), shards=((0, "tp"),), init=Normal(model.init_method_std), weight_decay=False
        )
        self.sink = make_param(sink) if model.softmax_type == "learnable" else None
        self.out = matrix("out", D, H * V, shards=((1, "tp"),))
        if model.add_bias_linear:
            zero = Constant(0.0)
            bias = ParamSpec(f"{name}.out_bias", (D,), partial_grad_axes=("tp",), init=zero, weight_decay=False)
            self.out_bias = make_param(bias)

    def extra_repr(self) -> str:
        return shapes(self)

    def forward(self, x_sBD: Tensor, batch: Batch, ctx: ForwardContext) -> Tensor:
        """Return y_sBD, the output of the layer before the residual is added."""
        wide_weights = [w for w in (self.q, self.gate) if w is not None]
        wide = list(column_parallel_linear(x_sBD, wide_weights, self.tp, ctx.wgrad_store)) if wide_weights else []
        gate_SBf = wide.pop() if self.gate is not None else None
        down_weights = [w for w in (self.q_down, self.kv_down) if w is not None]
        down = column_parallel_linear(x_sBD, down_weights, LOCAL, ctx.wgrad_store)
        keeps_latents = ctx.cache is not None or batch.cp_sharding is not None
        expand = partial(self._expand, keeps_latents=keeps_latents, ctx=ctx)
        if ctx.cache is not None:
            core = partial(self._cached_attention, cache=ctx.cache)
        elif keeps_latents:
            core = partial(self._context_parallel_attention, batch=batch, ctx=ctx)
        else:
            core = partial(self._attention, batch=batch, ctx=ctx)
        inputs = (*wide, *down)
        recompute_core = self.recompute_core and self.training
        if recompute_core and self.recompute_up:
            o_SBhV = recompute(lambda *inputs: core(*expand(*inputs)), *inputs)
        elif self.recompute_up and self.training:
            o_SBhV = checkpoint_without_output(partial(expand, *inputs), core)
        elif recompute_core:
            o_SBhV = recompute(core, *expand(*inputs))
        else:
            o_SBhV = core(*expand(*inputs))
        o_SBf = o_SBhV.flatten(-2)
        if gate_SBf is not None:
            o_SBf = o_SBf * gate_SBf.sigmoid()
        y_sBD = row_parallel_linear(o_SBf, self.out, self.tp, wgrad_store=ctx.wgrad_store)
        return add_bias(y_sBD, self.out_bias)

    def _expand(self, q_in: Tensor, kv_sBC: Tensor, *, keeps_latents: bool, ctx: ForwardContext) -> tuple[Tensor, ...]:
        """Return q_SBhN, then keys and values kv_SBhC of N + V channels, or with `keeps_latents` the latents c_SBC.

        If there are rotated channels, q_pe_SBhR follows, and k_pe_SBR, which is a part of c_SBC with `keeps_latents`.

        Args:
            q_in: the latent of the queries before its norm, or without `q_lora_rank` the queries.
            kv_sBC: the latent of keys and values before its norm, and k_pe.
            keeps_latents: do not expand keys and values.
            ctx: the context of the forward pass.
        """
        N, R, L = self.model.qk_head_dim, self.model.qk_pos_emb_head_dim, self.model.kv_lora_rank

        def normed_latents() -> Tensor:
            latent, k_pe = kv_sBC.split([L, R], -1)
            parts = [latent if self.kv_norm is None else self.kv_norm(latent), k_pe]
            if self.q_up is not None:
                parts.insert(0, q_in if self.q_norm is None else self.q_norm(q_in))
            return torch.cat(parts, -1)

        weights = [w for w in (self.q_up, None if keeps_latents else self.kv_up) if w is not None]
        project = partial(column_parallel_linear_of_parts, weights=weights, tp=self.tp, wgrad_store=ctx.wgrad_store)
        *projected, rest_SBC = checkpoint_without_output(normed_latents, project)
        q_SBf = q_in if self.q_up is None else projected.pop(0)
        q_SBhC = q_SBf.unflatten(-1, (-1, N + R))
        if keeps_latents:
            kv, k_pe_SBR = rest_SBC.split([L, R], -1)
        else:
            kv, k_pe_SBR = projected[0].unflatten(-1, (q_SBhC.shape[2], -1)), rest_SBC
        if not R:
            return q_SBhC, kv
        # copied, so that the storage with the channels before their rotation is freed
        q_SBhN, q_pe_SBhR = q_SBhC[..., :N].contiguous(), q_SBhC[..., N:]
        k_pe_SB1R = k_pe_SBR.unsqueeze(2)
        if self.rope is not None:
            if self.model.mla_rotary_interleaved:
                q_pe_SBhR, k_pe_SB1R = (interleaved_to_half(x, R) for x in (q_pe_SBhR, k_pe_SB1R))
            q_pe_SBhR, k_pe_SB1R = self.rotate_qk(q_pe_SBhR, k_pe_SB1R, *ctx.rope[self.rope])
        q_pe_SBhR = q_pe_SBhR.contiguous()
        if keeps_latents:
            return q_SBhN, torch.cat([kv, k_pe_SB1R.squeeze(2)], -1), q_pe_SBhR
        return q_SBhN, kv, q_pe_SBhR, k_pe_SB1R.squeeze(2)

    def _core_kwargs(self, q_SBhN: Tensor) -> dict[str, Any]:
        """Return the arguments of attention that do not depend on the batch."""
        sink = self.sink
        if self.model.softmax_type == "off-by-one":
            sink = q_SBhN.new_zeros(q_SBhN.shape[2])
        scale, softcap = self.model.attention_scale, self.model.attn_logit_softcapping
        return dict(scale=scale, window=self.window, sink_H=sink, softcap=softcap)

    def _training_kwargs(self, q_SBhN: Tensor, batch: Batch, ctx: ForwardContext) -> dict[str, Any]:
        """Return the arguments of attention in training: also documents and dropout."""
        dropout = None
        if self.model.attention_dropout and self.training:
            key = fold_in(self.seed, ctx.step, self.layer, RNG_SITE_ATTENTION)
            first_head = self.tp.shard_start(q_SBhN.shape[2])
            dropout = AttentionDropout(self.model.attention_dropout, key, batch.sample_ids_B, first_head)
        return {**self._core_kwargs(q_SBhN), "drop": dropout, "documents": batch.documents}

    def _attention(
        self, q_SBhN: Tensor, kv_SBhC: Tensor, q_pe: Tensor | None = None, k_pe: Tensor | None = None, *,
        batch: Batch, ctx: ForwardContext,
    ) -> Tensor:  # fmt: skip
        """Return o_SBhV of complete samples, with the rotated channels q_pe [S, B, h, R] and their keys [S, B, R]."""
        k_SBhN, v_SBhV = kv_SBhC.split([self.model.qk_head_dim, self.model.v_head_dim], -1)
        kwargs = self._training_kwargs(q_SBhN, batch, ctx)
        return attention(q_SBhN, k_SBhN, v_SBhV, q_pe_SBHR=q_pe, k_pe_TBR=k_pe, **kwargs)

    def _context_parallel_attention(
        self, q_SBhN: Tensor, c_SBC: Tensor, q_pe: Tensor | None = None, *, batch: Batch, ctx: ForwardContext
    ) -> Tensor:
        """Return o_SBhV of this rank's part of samples that are sharded over cp."""
        assert batch.cp_sharding is not None
        recomputed = ctx.in_full_recompute or (self.recompute_core and self.training)
        context_parallel = ContextParallelAttention(attention, self.cp, batch.cp_sharding, recomputed)
        attend = context_parallel.latent_all_gather_attention
        first_head, num_heads = 0, q_SBhN.shape[2]
        if self.cp_comm_type == "a2a":
            attend = context_parallel.latent_all_to_all_attention
            num_heads //= self.cp.size
            first_head = self.cp.shard_start(num_heads)
        N, V = self.model.qk_head_dim, self.model.v_head_dim
        kv_up = self.kv_up
        if num_heads < q_SBhN.shape[2]:
            kv_up = kv_up[first_head * (N + V) : (first_head + num_heads) * (N + V)]

        def expand(latent_TBL: Tensor) -> Tensor:
            (kv_TBf,) = column_parallel_linear(latent_TBL, [kv_up], LOCAL, ctx.wgrad_store)
            return kv_TBf.unflatten(-1, (num_heads, N + V))

        kwargs = self._training_kwargs(q_SBhN, batch, ctx)
        return attend(q_SBhN, c_SBC, q_pe_SBHR=q_pe, expand=expand, v_dim=V, **kwargs)

    def _cached_attention(
        self, q_SBhN: Tensor, c_SBC: Tensor, q_pe: Tensor | None = None, *, cache: MixerCache
    ) -> Tensor:
        """Return o_SBhV, attention of new tokens to all earlier ones, whose latents are in the cache."""
        N, L, V = self.model.qk_head_dim, self.model.kv_lora_rank, self.model.v_head_dim
        kwargs = self._core_kwargs(q_SBhN)
        is_first_pass, (c_TBC,) = cache.append(self.layer, c_SBC)
        if is_first_pass:  # there are no earlier tokens, and the expanded form needs fewer operations
            kv_SBhC = matmul(c_SBC[..., :L], self.kv_up.T).unflatten(-1, (q_SBhN.shape[2], N + V))
            k_pe = None if q_pe is None else c_SBC[..., L:]
            k_SBhN, v_SBhV = kv_SBhC.split([N, V], -1)
            return attention(q_SBhN, k_SBhN, v_SBhV, q_pe_SBHR=q_pe, k_pe_TBR=k_pe, **kwargs)
        k_up_hNL, v_up_hVL = self.kv_up.unflatten(0, (-1, N + V)).split([N, V], 1)
        q_SBhC = torch.einsum("sbhn,hnl->sbhl", q_SBhN, k_up_hNL)
        if q_pe is not None:
            q_SBhC = torch.cat([q_SBhC, q_pe], -1)
        start = cache.first_visible(self.window)
        c_TB1C = c_TBC[start:].unsqueeze(2)
        o_SBhL = cached_attention(q_SBhC, c_TB1C, c_TB1C[..., :L], cache.positions_SB - start, **kwargs)
        return torch.einsum("sbhl,hvl->sbhv", o_SBhL, v_up_hVL)
