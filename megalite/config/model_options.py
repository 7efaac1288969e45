"""The model's options; properties give the effective values of those that are left open."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megalite.config.field import how, model, training
from megalite.config.pattern import read_pattern
from megalite.config.registry import KINDS

ALL_DROPPED = (1, "drops everything; use less than 1")


@dataclass(frozen=True)
class ModelConfig:
    num_layers: int = model(0, "transformer layers", required=True, stand_in=2)
    hidden_size: int = model(0, "model width D", required=True, stand_in=64)
    ffn_hidden_size: int | None = model(
        None, "feed-forward width; default 4 D, or 8/3 D in steps of 64 with --swiglu", same_as="ffn_size"
    )
    num_attention_heads: int = model(0, "query heads H", required=True, stand_in=1)
    kv_channels: int | None = model(None, "head size K; default D / H", same_as="head_size")
    group_query_attention: bool = model(False, "share key/value heads in groups", through="num_query_groups")
    num_query_groups: int | None = model(None, "K/V heads G with --group-query-attention; default 1", same_as="groups")
    seq_length: int = training(0, "tokens per sequence", required=True, stand_in=1)
    max_position_embeddings: int | None = training(None, "length of the table of positions; default seq_length")
    normalization: str = model("LayerNorm", "kind of norm", choices=("LayerNorm", "RMSNorm"))
    norm_epsilon: float = model(1e-5, "added to the variance in norms")
    apply_layernorm_1p: bool = model(False, "store norm weights as their difference from 1")
    add_bias_linear: bool = model(True, "biases in all linear layers")
    add_qkv_bias: bool = model(False, "biases in the query, key, value projections only")
    activation: str = model(
        "gelu", "feed-forward activation; gelu is the tanh form, gelu_erf the exact one", choices=KINDS["activation"]
    )
    bias_gelu_fusion: bool = model(True, "tanh form of gelu; off: exact, where none is named", through="activation")
    openai_gelu: bool = model(False, "tanh form of gelu where none is named", through="activation")
    parallel_residual: bool = model(False, "attention and feed-forward side by side on the same input, as in GPT-NeoX")
    position_embedding_type: str = model(
        "learned_absolute", "positions", choices=("learned_absolute", "rope", "yarn", "none")
    )
    add_position_embedding: bool = model(True, "off: no learned positions", through="position_embedding_type")
    rotary_base: float = model(10000.0, "base of the rotary wavelengths", above=0)
    rotary_percent: float = model(1.0, "part of each head that rotates")
    rotary_interleaved: bool = model(False, "channels 2i and 2i + 1 turn as a pair, instead of i and i + half")
    rotary_seq_len_interpolation_factor: float = model(1.0, "rope: positions are divided by this", above=0)
    no_rope_freq: str | None = model(
        None, "N: every N-th layer has no rotary positions; or a list, 1: without, as [0,0,0,1]*8", same_as="rotary"
    )
    rotary_scaling_factor: float = model(1.0, "yarn: stretch of the context", above=0)
    yarn_original_max_position_embeddings: int = model(4096, "yarn: context length before the stretch, tokens", above=0)
    yarn_beta_fast: float = model(32.0, "yarn: channels with more turns in that length keep their wavelength")
    yarn_beta_slow: float = model(1.0, "yarn: channels with fewer turns are stretched by the whole factor", above=0)
    yarn_correction_range_round_to_int: bool = model(True, "yarn: the borders between them are rounded to channels")
    mscale: float = model(1.0, "yarn: queries and keys are multiplied by (1 + 0.1 x this x log(factor)) ...")
    mscale_all_dim: float = model(0.0, "yarn: ... divided by (1 + 0.1 x this x log(factor))")
    use_rope_scaling: bool = model(False, "Llama-3 scaling of rotary wavelengths")
    rope_scaling_factor: float = model(8.0, "stretch of the longest wavelengths with --use-rope-scaling", above=0)
    untie_embeddings_and_output_weights: bool = model(False, "the head has its own weights")
    make_vocab_size_divisible_by: int = training(128, "vocabulary is padded to a multiple of this (and of tp)", above=0)
    hidden_dropout: float = training(0.1, "dropout after embedding, attention and feed-forward", below=ALL_DROPPED)
    attention_dropout: float = training(0.1, "dropout of attention weights", below=ALL_DROPPED)
    init_method_std: float = training(0.02, "standard deviation of initial weights")
    embedding_init_method_std: float | None = training(None, "that of embeddings; default init_method_std", least=0)
    softmax_type: str = model(
        "vanilla",
        "learnable: the softmax of attention has one more logit per head, a sink (GPT-OSS); off-by-one: a sink of 0",
        choices=("vanilla", "off-by-one", "learnable"),
    )
    qk_layernorm: bool = model(False, "norm on each query and key head")
    qk_layernorm_over_heads: bool = model(False, "instead a norm on all query heads of a token, one on all key heads")
    no_weight_decay_cond_type: str | None = training(
        None,
        "apply_wd_to_qk_layernorm: weight decay on the norms of query and key heads too",
        choices=("apply_wd_to_qk_layernorm",),
    )
    window_size: tuple[int, ...] | None = model(None, "LEFT,0: earlier keys that a query sees; default, -1: all")
    window_attn_skip_freq: str | None = model(
        None, "N: every N-th layer has no window; or a list, 1: with, 0: without, as [1,1,0]*8", same_as="windows"
    )
    cp_comm_type: tuple[str, ...] = how(
        ("allgather",), "cp: what attention exchanges: allgather keys and values, a2a heads; one, or one for each layer"
    )
    num_experts: int | None = model(None, "experts E of each layer that has them; default, 0: a dense model", least=0)
    moe_layer_freq: str = model(
        "1",
        "N: layers 0, N, 2 N ... have experts, the others are dense; or a list, 1: with, as [0]*3+[1]*9",
        same_as="experts",
    )
    moe_router_topk: int = model(2, "experts k that each token goes to", above=0)
    moe_ffn_hidden_size: int | None = model(
        None, "feed-forward width of an expert; default ffn_hidden_size", same_as="expert_ffn_size"
    )
    moe_shared_expert_intermediate_size: int | None = model(
        None, "width of a feed-forward block that all tokens go through beside their experts; default: there is none"
    )
    moe_shared_expert_gate: bool = model(False, "the shared block's output is scaled by a sigmoid of the token")
    moe_router_score_function: str = model("softmax", "what becomes of logits", choices=("softmax", "sigmoid"))
    moe_router_pre_softmax: bool = model(False, "softmax over all experts, not over the k that are chosen")
    moe_router_topk_scaling_factor: float = model(1.0, "probabilities of the chosen experts are multiplied by this")
    moe_router_num_groups: int | None = model(None, "groups of experts, of which a token's best ones remain")
    moe_router_group_topk: int | None = model(None, "groups that remain; one is as good as its best k / this experts")
    moe_router_enable_expert_bias: bool = model(
        False, "balance without a loss: experts are chosen by score + bias, and the bias follows the load"
    )
    moe_router_bias_update_rate: float = training(1e-3, "by how much an expert's bias moves after a step", above=0)
    moe_router_load_balancing_type: tuple[str, ...] = training(
        ("aux_loss",),
        "losses that balance experts: aux_loss, of a micro-batch; seq_aux_loss, of each sample; global_aux_loss, of a "
        "step so far; sinkhorn: choices are balanced, without a loss; or none",
    )
    moe_aux_loss_coeff: tuple[float, ...] = training((0.0,), "the coefficient of each of these losses")
    moe_z_loss_coeff: float = training(0.0, "z-loss of the router: this times log^2 of its softmax's sum")
    moe_router_dtype: str = training("fp32", "dtype in which a router computes", choices=("fp32", "fp64"))
    moe_router_force_load_balancing: bool = training(False, "experts are drawn, not chosen: for benchmarks alone")

    @property
    def head_size(self) -> int:
        assert self.hidden_size and self.num_attention_heads
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def groups(self) -> int:
        assert self.num_attention_heads
        if not self.group_query_attention:
            return self.num_attention_heads
        return self.num_query_groups or self.num_attention_heads  # None in a configuration that is not `completed`

    @property
    def out_std(self) -> float:
        """The standard deviation of the initial weights of projections that are added to the hidden states."""
        return self.init_method_std / math.sqrt(2.0 * self.num_layers)

    @property
    def ffn_size(self) -> int:
        assert self.hidden_size
        if self.ffn_hidden_size:
            return self.ffn_hidden_size
        return int(4 * self.hidden_size * 2 / 3 / 64) * 64 if self.activation == "swiglu" else 4 * self.hidden_size

    @property
    def experts(self) -> tuple[bool, ...]:
        """Whether each layer has experts."""
        if not self.num_experts:
            return (False,) * self.num_layers
        if self.moe_layer_freq.strip().isdigit() and (period := int(self.moe_layer_freq)) > 0:
            return tuple(layer % period == 0 for layer in range(self.num_layers))
        return read_pattern(self.moe_layer_freq, self.num_layers)

    @property
    def expert_ffn_size(self) -> int:
        """0 in a dense model."""
        return (self.moe_ffn_hidden_size or self.ffn_size) if self.num_experts else 0

    @property
    def balancing(self) -> dict[str, float]:
        """The losses that balance experts, with their coefficients."""
        given = zip(self.moe_router_load_balancing_type, self.moe_aux_loss_coeff, strict=False)
        return {kind: coeff for kind, coeff in given if kind != "none" and coeff}

    @property
    def positions(self) -> int:
        assert self.seq_length
        return self.max_position_embeddings or self.seq_length

    @property
    def rotary(self) -> tuple[bool, ...]:
        """Whether each layer has rotary positions."""
        some, pattern = self.position_embedding_type in ("rope", "yarn"), self.no_rope_freq
        if pattern is None or not some:
            return (some,) * self.num_layers
        bits = read_pattern(pattern, self.num_layers)
        return bits if pattern.strip().isdigit() else tuple(not bit for bit in bits)

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The number of keys that a query of each layer sees, its own included; None: all up to its own."""
        if self.window_size is None or self.window_size[0] == -1:
            return (None,) * self.num_layers
        window, pattern = self.window_size[0] + 1, self.window_attn_skip_freq
        bits = (True,) * self.num_layers if pattern is None else read_pattern(pattern, self.num_layers)
        return tuple(window if bit else None for bit in bits)

    @property
    def exchanges(self) -> tuple[str, ...]:
        """How the attention of each layer exchanges over cp: allgather (p2p is taken as it) or a2a."""
        given = tuple("allgather" if one == "p2p" else one for one in self.cp_comm_type)
        return given * self.num_layers if len(given) == 1 else given
