"""The options of the model. Properties return the effective values of options whose default depends on others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

from megalite.config.hybrid_pattern import (
    DEPTH,
    PatternLayer,
    first_letters,
    num_parts,
    num_pattern_depths,
    num_pattern_layers,
    parse_depth_pattern,
    parse_hybrid_pattern,
    pattern_of_parts,
    without_borders,
)
from megalite.config.layer_spec import ATTENTION_MIXERS, ROUTER_LOSSES, LayerSpec
from megalite.config.option import execution, model, training
from megalite.config.option_parsers import MAX_LAYERS_IN_PATTERN, format_layer_pattern, parse_layer_pattern
from megalite.config.registry import REGISTRIES
from megalite.config.rope_spec import RopeScaling, RopeSpec, Scaling, Yarn

T = TypeVar("T")
MAX_DROPOUT = (1, "drops everything; use less than 1")
MAX_LAYERS = (
    MAX_LAYERS_IN_PATTERN,
    f"is more layers than any model has; use at most {MAX_LAYERS_IN_PATTERN}",
)  # several properties are lists with a value for each layer


@dataclass(frozen=True)
class ModelConfig:
    """The shape, attention, positions, experts and dropout of the model."""

    num_layers: int = model(
        0,
        required=True,
        placeholder=2,
        maximum=MAX_LAYERS,
        aliases=("--encoder-num-layers",),
        help="number of transformer layers; default with --hybrid-layer-pattern: those of the pattern",
    )
    hidden_size: int = model(0, required=True, placeholder=64, help="model width D")
    ffn_hidden_size: int | None = model(
        None,
        effective_property="ffn_size",
        help="feed-forward width; default: 4 D, or 8/3 D rounded down to a multiple of 64 with --swiglu",
    )
    num_attention_heads: int = model(0, required=True, placeholder=1, help="number of attention (query) heads H")
    kv_channels: int | None = model(
        None, effective_property="head_size", help="size K of each attention head; default: D / H"
    )
    group_query_attention: bool = model(
        False,
        acts_through="num_query_groups",
        help="share key and value heads between groups of query heads; see --num-query-groups",
    )
    num_query_groups: int | None = model(
        None,
        effective_property="num_kv_groups",
        help="number of key and value heads G with --group-query-attention; default: 1",
    )
    seq_length: int = training(
        0, required=True, placeholder=1, aliases=("--encoder-seq-length",), help="tokens per sequence"
    )
    max_position_embeddings: int | None = training(
        None, help="length of the position table, tokens; default: --seq-length"
    )
    normalization: str = model("LayerNorm", choices=("LayerNorm", "RMSNorm"), help="type of normalization layer")
    norm_epsilon: float = model(1e-5, aliases=("--layernorm-epsilon",), help="epsilon that norms add to the variance")
    apply_layernorm_1p: bool = model(False, help="store norm weights as their difference from 1")
    add_bias_linear: bool = model(
        True, aliases=("--disable-bias-linear=false",), help="use biases in all linear layers"
    )
    add_qkv_bias: bool = model(False, help="use biases in the query, key and value projections only")
    activation: str = model(
        "gelu",
        choices=REGISTRIES["activation"],
        aliases=("--swiglu=swiglu", "--squared-relu=squared_relu"),
        help="feed-forward activation; gelu and geglu have the tanh form, gelu_erf the exact one",
    )
    bias_gelu_fusion: bool = model(
        True,
        acts_through="activation",
        help="use the tanh form of gelu; off: the exact form, unless --activation names one",
    )
    openai_gelu: bool = model(
        False,
        acts_through="activation",
        aliases=("--use-te-activation-func=true",),
        help="use the tanh form of gelu, unless --activation names one",
    )
    quick_geglu: bool = model(
        False,
        acts_through="activation",
        help=(
            "Megatron-LM's name of the activation clamped_swiglu, with --glu-linear-offset 1 and "
            "--activation-func-clamp-value 7"
        ),
    )
    glu_linear_offset: float = model(0.0, acts_through="activation", help="see --quick-geglu")
    activation_func_clamp_value: float | None = model(None, acts_through="activation", help="see --quick-geglu")
    parallel_residual: bool = model(
        False, help="compute attention and feed-forward in parallel from the same input, as GPT-NeoX does"
    )
    position_embedding_type: str = model(
        "learned_absolute",
        choices=("learned_absolute", "rope", "yarn", "none"),
        aliases=("--use-rotary-position-embeddings=rope",),
        help="type of position embeddings",
    )
    add_position_embedding: bool = model(
        True,
        acts_through="position_embedding_type",
        aliases=("--no-position-embedding=false",),
        help="learned position embeddings",
    )
    enable_gpt_oss: bool = model(
        False,
        acts_through="position_embedding_type",
        help=(
            "yarn positions with Megatron-LM's values for GPT-OSS: factor 32, original context 131072, limits that are "
            "not rounded"
        ),
    )
    rotary_base: float = model(10000.0, exclusive_min=0, help="base of the rotary wavelengths")
    rotary_percent: float = model(1.0, help="fraction of each head's channels that rotary embeddings rotate")
    rotary_interleaved: bool = model(
        False, help="rope: rotate channels 2i and 2i + 1 as a pair, instead of i and i + half"
    )
    rotary_seq_len_interpolation_factor: float = model(
        1.0, exclusive_min=0, help="rope: divide positions by this factor"
    )
    no_rope_freq: str | None = model(
        None,
        effective_property="rope_layers",
        help="N: every N-th layer has no rotary embeddings; or a list, 1 for each layer without them, as [0,0,0,1]*8",
    )
    rotary_scaling_factor: float = model(1.0, exclusive_min=0, help="yarn: factor by which the context is extended")
    yarn_original_max_position_embeddings: int = model(
        4096, exclusive_min=0, help="yarn: context length before the extension, tokens"
    )
    yarn_beta_fast: float = model(
        32.0, help="yarn: channels with more turns than this in the original context keep their wavelength"
    )
    yarn_beta_slow: float = model(
        1.0,
        exclusive_min=0,
        help="yarn: channels with fewer turns than this in the original context are scaled by the full factor",
    )
    yarn_correction_range_round_to_int: bool = model(
        True, help="yarn: round the limits set by --yarn-beta-fast and --yarn-beta-slow to whole channels"
    )
    mscale: float = model(1.0, help="yarn: multiply queries and keys by 1 + 0.1 x this x log(factor)")
    mscale_all_dim: float = model(0.0, help="yarn: divide queries and keys by 1 + 0.1 x this x log(factor)")
    use_rope_scaling: bool = model(False, help="rope: scale the wavelengths as Llama 3 does")
    rope_scaling_factor: float = model(
        8.0, exclusive_min=0, help="scaling factor of the longest wavelengths with --use-rope-scaling"
    )
    untie_embeddings_and_output_weights: bool = model(
        False, help="give the output layer its own weights, instead of those of the word embedding"
    )
    make_vocab_size_divisible_by: int = training(
        128, exclusive_min=0, help="pad the vocabulary to a multiple of this number and of the tensor-parallel size"
    )
    hidden_dropout: float = training(
        0.1, exclusive_max=MAX_DROPOUT, help="dropout probability after embedding, attention and feed-forward"
    )
    attention_dropout: float = training(0.1, exclusive_max=MAX_DROPOUT, help="dropout probability of attention weights")
    init_method_std: float = training(0.02, help="standard deviation of initial weights")
    embedding_init_method_std: float | None = training(
        None, minimum=0, help="initial standard deviation of embeddings; default: --init-method-std"
    )
    softmax_type: str = model(
        "vanilla",
        choices=("vanilla", "off-by-one", "learnable"),
        help=(
            "softmax of attention; learnable: with one more logit per head, a sink (GPT-OSS); off-by-one: a sink of 0"
        ),
    )
    qk_layernorm: bool = model(False, help="normalize each query and key head")
    qk_layernorm_over_heads: bool = model(
        False, help="with --qk-layernorm: normalize all query heads of a token together, and all its key heads"
    )
    no_weight_decay_cond_type: str | None = training(
        None,
        choices=("apply_wd_to_qk_layernorm",),
        aliases=("--apply-wd-to-qk-layernorm=apply_wd_to_qk_layernorm",),
        help="apply_wd_to_qk_layernorm: apply weight decay to the norms of query and key heads, too",
    )
    window_size: tuple[int, ...] | None = model(
        None, help="sliding window LEFT,0: LEFT is the number of earlier keys that a query sees; default, -1: all"
    )
    window_attn_skip_freq: str | None = model(
        None,
        effective_property="layer_windows",
        help="N: every N-th layer has no window; or a list, 1 for each layer with a window, as [1,1,0]*8",
    )
    cp_comm_type: tuple[str, ...] = execution(
        ("auto",),
        help=(
            "communication of context parallelism: a2a (heads), or allgather (keys and values; maps of states in "
            "recurrent layers); auto: in recurrent layers what receives fewer bytes, otherwise allgather; one value, "
            "or one for each layer, or for each letter of --hybrid-layer-pattern"
        ),
    )
    hybrid_layer_pattern: str | None = model(
        None,
        effective_property="layer_parts",
        may_look_like_flag=True,
        aliases=("--hybrid-override-pattern",),
        help=(
            "layers as a letter for each part: * attention, + multi-latent attention, G gated delta net, M Mamba-2, "
            "- MLP, E experts, | a pipeline border, / the start of a depth of multi-token prediction; a mixer and the "
            "MLP or experts after it are one layer, as in *-*E"
        ),
    )
    num_experts: int | None = model(
        None, minimum=0, help="number of experts E in each mixture-of-experts layer; default, 0: a dense model"
    )
    moe_layer_freq: str = model(
        "1",
        effective_property="moe_layers",
        help=(
            "N: layers 0, N, 2 N ... have experts, the others are dense; or a list, 1 for each layer with experts, as "
            "[0]*3+[1]*9"
        ),
    )
    moe_router_topk: int = model(2, exclusive_min=0, help="number of experts k for each token")
    moe_ffn_hidden_size: int | None = model(
        None, effective_property="expert_ffn_size", help="feed-forward width of an expert; default: --ffn-hidden-size"
    )
    moe_shared_expert_intermediate_size: int | None = model(
        None, help="feed-forward width of the shared expert, which processes all tokens; default: no shared expert"
    )
    moe_shared_expert_gate: bool = model(
        False, help="scale the output of the shared expert by a sigmoid gate of the token"
    )
    moe_router_score_function: str = model(
        "softmax", choices=("softmax", "sigmoid"), help="activation of router logits"
    )
    moe_router_pre_softmax: bool = model(False, help="apply the softmax over all experts, instead of the k chosen ones")
    moe_router_topk_scaling_factor: float = model(
        1.0, help="factor by which the probabilities of the chosen experts are multiplied"
    )
    moe_router_num_groups: int | None = model(None, help="number of groups of experts; see --moe-router-group-topk")
    moe_router_group_topk: int | None = model(
        None,
        help=(
            "number of groups from which a token's experts are chosen; a group is ranked by its best k / this number "
            "experts, or --moe-router-group-score-topk"
        ),
    )
    moe_router_enable_expert_bias: bool = model(
        False, help="balance experts without a loss: choose them by score + bias, and adapt the bias to the load"
    )
    moe_router_bias_update_rate: float = training(1e-3, exclusive_min=0, help="step size of the expert bias")
    moe_router_load_balancing_type: tuple[str, ...] = training(
        ("aux_loss",),
        help=(
            "losses that balance experts: aux_loss is computed over a micro-batch, seq_aux_loss over each sample, "
            "global_aux_loss over the step so far; sinkhorn balances without a loss; none"
        ),
    )
    moe_aux_loss_coeff: tuple[float, ...] = training(
        (0.0,), help="coefficient of each loss of --moe-router-load-balancing-type"
    )
    moe_z_loss_coeff: float = training(0.0, help="coefficient of the router's z-loss, log^2 of the sum in its softmax")
    moe_router_dtype: str = training("fp32", choices=("fp32", "fp64"), help="dtype of the router's computation")
    moe_router_force_load_balancing: bool = training(False, help="choose experts at random, for benchmarks only")
    attn_logit_softcapping: float | None = model(
        None, help="bound C of attention scores s, which become C tanh(s / C) (Gemma 2: 50); default: no bound"
    )
    final_logit_softcapping: float | None = model(
        None, help="bound C of the output logits x, which become C tanh(x / C) (Gemma 2: 30); default: no bound"
    )
    sandwich_norm: bool = model(
        False, help="normalize the outputs of attention and feed-forward, too, before they are added (Gemma 2 and 3)"
    )
    embedding_multiplier: float = model(
        1.0,
        exclusive_min=0,
        help="factor of the word embedding, rounded to the dtype of the model; a tied head does not have it",
    )
    softmax_scale: float | None = model(
        None,
        effective_property="attention_scale",
        help="factor of attention scores before the softmax; default: 1 / sqrt(K)",
    )
    rotary_local_base: float | None = model(
        None,
        help=(
            "base of the rotary wavelengths in layers with a window, which have no scaling; default: base and scaling "
            "of the other layers"
        ),
    )
    mtp_num_layers: int | None = model(
        None,
        minimum=0,
        maximum=MAX_LAYERS,
        effective_property="num_mtp_depths",
        help=(
            "number of depths of multi-token prediction, each a layer like the last one; depth k predicts the token "
            "k + 1 ahead; default: those of --hybrid-layer-pattern"
        ),
    )
    mtp_loss_scaling_factor: float = training(
        0.1, exclusive_min=0, help="weight of the losses of multi-token prediction, divided by the number of depths"
    )
    mtp_use_repeated_layer: bool = model(False, help="use the same weights for all depths of multi-token prediction")
    multi_latent_attention: bool = model(
        False, help="compress keys and values to a latent of --kv-lora-rank channels (DeepSeek-V2 and V3)"
    )
    q_lora_rank: int | None = model(None, help="rank of the compressed queries; default: queries are not compressed")
    kv_lora_rank: int = model(32, exclusive_min=0, help="rank L of the compressed keys and values")
    qk_head_dim: int = model(128, exclusive_min=0, help="channels of a query and key head without rotary positions")
    qk_pos_emb_head_dim: int = model(
        64, minimum=0, help="channels R of a query head with rotary positions, whose key all heads share; 0: none"
    )
    v_head_dim: int = model(128, exclusive_min=0, help="channels of a value head")
    rope_type: str | None = model(
        None,
        choices=("rope", "yarn"),
        acts_through="position_embedding_type",
        help=(
            "Megatron-LM's choice of rotary positions with --multi-latent-attention; default: yarn if "
            "--rotary-scaling-factor is not 1"
        ),
    )
    attention_output_gate: bool = model(
        False, help="multiply the output of attention by the sigmoid of a projection of its input"
    )
    experimental_attention_variant: str | None = model(
        None,
        choices=("gated_delta_net", "kda"),
        acts_through="hybrid_layer_pattern",
        help=(
            "a recurrence in place of attention, in the layers of --linear-attention-freq: gated_delta_net, or kda "
            "(Kimi delta attention)"
        ),
    )
    linear_attention_freq: str | None = model(
        None,
        acts_through="hybrid_layer_pattern",
        help=(
            "N: every N-th layer keeps its attention; or a list, 1 for each layer of "
            "--experimental-attention-variant, as [1,1,1,0]*12"
        ),
    )
    linear_conv_kernel_dim: int = model(
        4,
        exclusive_min=0,
        help="gated delta net, Kimi delta attention: tokens W that the convolution of queries, keys and values spans",
    )
    linear_key_head_dim: int = model(
        128, exclusive_min=0, help="gated delta net, Kimi delta attention: channels of a query and key head"
    )
    linear_value_head_dim: int = model(
        128, exclusive_min=0, help="gated delta net, Kimi delta attention: channels of a value head"
    )
    linear_num_key_heads: int = model(
        16, exclusive_min=0, help="gated delta net, Kimi delta attention: number of query and key heads"
    )
    linear_num_value_heads: int = model(
        32,
        exclusive_min=0,
        help=(
            "gated delta net: number of value heads, a multiple of the key heads; Kimi delta attention: as many as key "
            "heads"
        ),
    )
    mla_rotary_interleaved: bool = model(
        True, help="multi-latent attention: rotate channels 2i and 2i + 1 as a pair; off: i and i + half"
    )
    qk_norm_epsilon: float | None = model(
        None,
        exclusive_min=0,
        effective_property="qk_norm_eps",
        help="epsilon of the norms of --qk-layernorm; default: --norm-epsilon",
    )
    moe_router_group_score_topk: int | None = model(
        None,
        exclusive_min=0,
        effective_property="group_score_topk",
        help=(
            "number of a group's best experts whose scores rank it; default: --moe-router-topk / "
            "--moe-router-group-topk"
        ),
    )
    norm_placement: str = model(
        "input",
        choices=("input", "output", "attention_output"),
        help=(
            "what the norms of a layer normalize: the inputs of its mixer and feed-forward; their outputs, before they "
            "are added (OLMo 2); or the outputs in layers with attention, and the inputs in the others (OLMo Hybrid)"
        ),
    )
    linear_allow_neg_eigval: bool = model(
        False,
        help=(
            "gated delta net, Kimi delta attention: double the strength of the update, so that the state's transition "
            "may have negative eigenvalues"
        ),
    )
    linear_norm_epsilon: float | None = model(
        None,
        exclusive_min=0,
        effective_property="linear_norm_eps",
        help="gated delta net, Kimi delta attention: epsilon of the norm of the heads; default: --norm-epsilon",
    )
    mamba_state_dim: int = model(
        128, exclusive_min=0, help="Mamba-2: numbers N of the state of a channel, and of a group in B and C"
    )
    mamba_head_dim: int = model(64, exclusive_min=0, help="Mamba-2: channels P of a head")
    mamba_num_groups: int = model(8, exclusive_min=0, help="Mamba-2: number of groups of heads that share B and C")
    mamba_num_heads: int | None = model(
        None,
        exclusive_min=0,
        effective_property="mamba_heads",
        help="Mamba-2: number of heads, a multiple of the groups; default: 2 * --hidden-size / --mamba-head-dim",
    )
    use_mup: bool = model(
        False,
        help=(
            "maximal update parametrization: initial weights, learning rates, logits and attention scores follow the "
            "width, so that hyperparameters of a narrow base model are the best ones of a wide model, too"
        ),
    )
    mup_base_hidden_size: int | None = model(
        None,
        exclusive_min=0,
        effective_property="mup_base_width",
        help="muP: hidden size of the base model, whose hyperparameters these are; default: --hidden-size",
    )
    mup_embedding_mult: float = model(1.0, exclusive_min=0, help="muP: factor of the sum of all embeddings")
    mup_output_mult: float = model(
        1.0,
        exclusive_min=0,
        effective_property="logit_multiplier",
        help="muP: factor of the logits; default, 1: base hidden size / hidden size",
    )
    mup_base_head_dim: float | None = model(
        None,
        exclusive_min=0,
        acts_through="softmax_scale",
        help=(
            "muP: attention scores have the factor sqrt(this) / K^power; give the base model's K for its 1 / sqrt(K); "
            "default: 1"
        ),
    )
    mup_attn_scale_power: float = model(
        1.0,
        maximum=(2, "divides scores by more than the square of the head size; use 1"),
        acts_through="softmax_scale",
        help="muP: power of the head size K by which attention scores are divided; 0.5: as without muP",
    )

    @property
    def head_size(self) -> int:
        assert self.hidden_size and self.num_attention_heads
        return self.kv_channels or self.hidden_size // self.num_attention_heads

    @property
    def attention_scale(self) -> float:
        """The factor of attention scores before the softmax.

        With multi-latent attention, YaRN also scales the channels that it does not rotate (DeepSeek-V2's code).
        """
        if self.softmax_scale is not None:
            return self.softmax_scale
        yarn_factor = 1.0
        if self.multi_latent_attention and isinstance(self.rope_scaling, Yarn):
            yarn_factor = 1 + 0.1 * self.mscale_all_dim * math.log(max(self.rotary_scaling_factor, 1.0))
        return self.mup_attention_factor * yarn_factor**2 / math.sqrt(self.qk_channels)

    @property
    def qk_channels(self) -> int:
        """The number of channels of a query and key head."""
        return self.qk_head_dim + self.qk_pos_emb_head_dim if self.multi_latent_attention else self.head_size

    @property
    def width_mult(self) -> float:
        """The hidden size over that of muP's base model (width_scaling.py); 1 without muP."""
        assert self.hidden_size
        return self.hidden_size / (self.mup_base_width or self.hidden_size)

    @property
    def mup_base_width(self) -> int | None:
        """The hidden size of muP's base model; None without muP."""
        return (self.mup_base_hidden_size or self.hidden_size) if self.use_mup else None

    @property
    def embedding_sum_multiplier(self) -> float:
        """The factor of the sum of all embeddings: muP's; 1 without it."""
        return self.mup_embedding_mult if self.use_mup else 1.0

    @property
    def logit_multiplier(self) -> float:
        """The factor of the logits: muP's, by default 1/m; 1 without it."""
        if not self.use_mup:
            return 1.0
        return self.mup_output_mult if self.mup_output_mult != 1 else 1.0 / self.width_mult

    @property
    def mup_attention_factor(self) -> float:
        """The factor that muP adds to the usual scale of attention scores; 1 without it."""
        if not self.use_mup or self.softmax_scale is not None:
            return 1.0
        base_head_dim = 1.0 if self.mup_base_head_dim is None else self.mup_base_head_dim
        return math.sqrt(base_head_dim / self.qk_channels) * self.qk_channels ** (1 - self.mup_attn_scale_power)

    @property
    def num_kv_groups(self) -> int:
        assert self.num_attention_heads
        if not self.group_query_attention:
            return self.num_attention_heads
        # None only without apply_megatron_defaults
        return self.num_query_groups or self.num_attention_heads

    @property
    def qk_norm_eps(self) -> float | None:
        """The epsilon of the norms of queries and keys, or of their latents; None: that of the other norms."""
        return self.qk_norm_epsilon if self.qk_layernorm and self.qk_norm_epsilon != self.norm_epsilon else None

    @property
    def linear_norm_eps(self) -> float | None:
        """The epsilon of the norm of the heads of recurrences by the delta rule; None: that of the other norms."""
        return self.linear_norm_epsilon if self.linear_norm_epsilon != self.norm_epsilon else None

    @property
    def group_score_topk(self) -> int | None:
        """The number of best experts that rank a group of experts; None without groups."""
        if self.moe_router_num_groups is None or self.moe_router_group_topk is None:
            return None
        if self.moe_router_group_score_topk is not None:
            return self.moe_router_group_score_topk
        return self.moe_router_topk // self.moe_router_group_topk

    @property
    def output_init_std(self) -> float:
        """The standard deviation of the initial weights of projections that are added to the hidden states."""
        pattern = self.hybrid_layer_pattern
        num_outputs = 2 * self.num_layers if pattern is None else num_parts(pattern)
        return self.init_method_std / math.sqrt(float(num_outputs))

    @property
    def ffn_size(self) -> int:
        assert self.hidden_size
        if self.ffn_hidden_size:
            return self.ffn_hidden_size
        return int(4 * self.hidden_size * 2 / 3 / 64) * 64 if self.activation == "swiglu" else 4 * self.hidden_size

    @property
    def moe_layers(self) -> tuple[bool, ...]:
        """True for each layer with experts, in the order of the layers."""
        if self.hybrid_layer_pattern is not None:
            moe_layers = {layer.number for layer in self._pattern_layers if layer.mlp == "moe"}
            return tuple(number in moe_layers for number in range(self.num_layers))
        if not self.num_experts:
            return (False,) * self.num_layers
        if self.moe_layer_freq.strip().isdigit() and (period := int(self.moe_layer_freq)) > 0:
            return tuple(layer % period == 0 for layer in range(self.num_layers))
        return parse_layer_pattern(self.moe_layer_freq, self.num_layers)

    @property
    def has_dense_ffn(self) -> bool:
        """True if any layer has no experts, or if `moe_layer_freq` is invalid, which the validation reports."""
        try:
            if self.hybrid_layer_pattern is not None:
                return any(layer.mlp == "mlp" for layer in self._pattern_layers)
            return not all(self.moe_layers)
        except ValueError:
            return True

    @property
    def expert_ffn_size(self) -> int:
        """The feed-forward width of an expert; 0 in a dense model."""
        return (self.moe_ffn_hidden_size or self.ffn_size) if self.num_experts else 0

    @property
    def aux_loss_coeffs(self) -> dict[str, float]:
        """The losses that balance experts, with their nonzero coefficients."""
        coefficients = zip(self.moe_router_load_balancing_type, self.moe_aux_loss_coeff, strict=False)
        return {kind: coeff for kind, coeff in coefficients if kind != "none" and coeff}

    @property
    def router_loss_coeffs(self) -> dict[str, float]:
        """The auxiliary losses of routers, keys of ROUTER_LOSSES, with their nonzero coefficients."""
        z_loss = {"z_loss": self.moe_z_loss_coeff} if self.moe_z_loss_coeff else {}
        return self.aux_loss_coeffs | z_loss

    @property
    def layer_losses(self) -> tuple[tuple[str, int], ...]:
        """The losses of routers and of plugins' mixers: (name in the log, number of the layer)."""
        losses: list[tuple[str, int]] = []
        for number, layer in self.numbered_layers:
            if layer.mixer is not None:
                mixer = REGISTRIES["mixer"].plugin_components.get(layer.mixer)
                losses += [(name, number) for name in getattr(mixer, "losses", ())]
            if layer.has_experts:
                losses += [(ROUTER_LOSSES[kind], number) for kind in ROUTER_LOSSES if kind in self.router_loss_coeffs]
        return tuple(losses)

    @property
    def max_positions(self) -> int:
        assert self.seq_length
        return self.max_position_embeddings or self.seq_length

    @property
    def allows_rope(self) -> bool:
        """True if attention rotates queries and keys, unless `no_rope_freq` excepts its layer.

        Multi-latent attention does so beside learned positions, too, as in Megatron-LM.
        """
        if self.multi_latent_attention:
            return self.qk_pos_emb_head_dim > 0 and self.position_embedding_type != "none"
        return self.position_embedding_type in ("rope", "yarn")

    @property
    def rope_layers(self) -> tuple[bool, ...]:
        """True for each layer with rotary positions, in the order of the layers."""
        pattern = self.no_rope_freq
        if pattern is None or not self.allows_rope:
            return (self.allows_rope,) * self.num_layers
        bits = parse_layer_pattern(pattern, self.num_layer_values)
        return self._values_of_layers(bits if pattern.strip().isdigit() else [not bit for bit in bits])

    @property
    def recurrent_layers(self) -> tuple[str | None, ...]:
        """The recurrent mixer of each layer of a model without a pattern; None: it has attention.

        Raises ValueError if `linear_attention_freq` is invalid.
        """
        variant, freq = self.experimental_attention_variant, self.linear_attention_freq
        if variant is None or freq is None:
            return (None,) * self.num_layers
        return tuple(variant if bit else None for bit in parse_layer_pattern(freq, self.num_layers))

    @property
    def uses_gated_delta_net(self) -> bool:
        """True if any layer is a gated delta net."""
        if self.hybrid_layer_pattern is not None:
            return "G" in self.hybrid_layer_pattern
        return self.experimental_attention_variant == "gated_delta_net"

    @property
    def uses_kda(self) -> bool:
        """True if any layer is a Kimi delta attention."""
        if self.hybrid_layer_pattern is not None:
            return "K" in self.hybrid_layer_pattern
        return self.experimental_attention_variant == "kda"

    @property
    def uses_delta_rule(self) -> bool:
        """True if any layer is a gated delta net or a Kimi delta attention, which have the options linear_*."""
        return self.uses_gated_delta_net or self.uses_kda

    @property
    def uses_mamba2(self) -> bool:
        """True if any layer has a Mamba-2 mixer."""
        return "M" in (self.hybrid_layer_pattern or "")

    @property
    def mamba_heads(self) -> int:
        """The number of heads of a Mamba-2 mixer."""
        return self.mamba_num_heads or 2 * self.hidden_size // self.mamba_head_dim

    @property
    def layer_windows(self) -> tuple[int | None, ...]:
        """The number of keys that a query of each layer attends to, including its own; None: all earlier ones."""
        if not self.window_size or self.window_size[0] == -1:
            return (None,) * self.num_layers
        window = self.window_size[0] + 1
        pattern = self.window_attn_skip_freq
        if pattern is None:
            return (window,) * self.num_layers
        bits = parse_layer_pattern(pattern, self.num_layer_values)
        return self._values_of_layers([window if bit else None for bit in bits])

    @property
    def num_layer_values(self) -> int:
        """The length of a list with a value for each layer. Megatron-LM counts each letter of a pattern as a layer."""
        pattern = self.hybrid_layer_pattern
        return self.num_layers if pattern is None else num_parts(pattern)

    def _values_of_layers(self, values: Sequence[T]) -> tuple[T, ...]:
        """Return the value of each layer from those of a list; in a pattern that of its first letter, the mixer's."""
        if self.hybrid_layer_pattern is None:
            return tuple(values)
        return tuple(values[position] for position in first_letters(self.hybrid_layer_pattern))

    @cached_property
    def pattern_stages(self) -> tuple[tuple[PatternLayer, ...], ...]:
        """The layers of each stage of the pattern, () without one. Raises ValueError if it is invalid."""
        return () if self.hybrid_layer_pattern is None else parse_hybrid_pattern(self.hybrid_layer_pattern)

    def for_any_pipeline(self) -> ModelConfig:
        """Return the same model without the pipeline borders of its pattern."""
        if len(self.pattern_stages) < 2:
            return self
        return replace(self, hybrid_layer_pattern=without_borders(self.hybrid_layer_pattern or ""))

    def without_mtp(self) -> ModelConfig:
        """Return the same model without multi-token prediction."""
        pattern = self.hybrid_layer_pattern
        return replace(
            self, hybrid_layer_pattern=None if pattern is None else pattern.partition(DEPTH)[0], mtp_num_layers=None
        )

    def with_pattern(self) -> ModelConfig:
        """Return the same model with a pattern, and lists for its letters in place of the options of single layers."""
        layer_of_letter: list[LayerSpec | None] = []  # None: the letter is an MLP
        for layer in self.layers:
            if layer.mixer is not None:
                layer_of_letter.append(layer)
            if layer.mlp is not None:
                layer_of_letter.append(None)
        attending = [None if layer is None or layer.is_recurrent else layer for layer in layer_of_letter]
        has_window = [layer is not None and layer.window is not None for layer in attending]
        without_rope = [layer is not None and layer.rope is None for layer in attending]
        some_windows = len({layer.window for layer in attending if layer is not None}) > 1
        cp_comm_type = self.cp_comm_type
        if len(cp_comm_type) > 1:
            cp_comm_type = tuple("auto" if layer is None else layer.cp_comm_type for layer in layer_of_letter)
        return replace(
            self,
            hybrid_layer_pattern=self.hybrid_layer_pattern or self._pattern,
            window_attn_skip_freq=format_layer_pattern(has_window, periods=False) if some_windows else None,
            no_rope_freq=format_layer_pattern(without_rope, periods=False)
            if self.allows_rope and any(without_rope)
            else None,
            moe_layer_freq="1",
            cp_comm_type=cp_comm_type,
            experimental_attention_variant=None,
            linear_attention_freq=None,
        )

    @property
    def _pattern(self) -> str:
        """The pattern of a model without one."""
        depth_parts = [part for layer in self.mtp_layers for part in (layer.mixer, layer.mlp) if part is not None]
        return pattern_of_parts(self.layer_parts) + self.num_mtp_depths * (DEPTH + pattern_of_parts(depth_parts))

    @property
    def _pattern_layers(self) -> list[PatternLayer]:
        return [layer for stage in self.pattern_stages for layer in stage]

    @cached_property
    def layers(self) -> tuple[LayerSpec, ...]:
        """The layers, in order. With a pattern whose borders split a layer, its halves are two, so there are more.

        Raises:
            ValueError: if the pattern, or an option with a value for each layer, is invalid.
        """
        pattern = self.hybrid_layer_pattern
        if pattern is not None and (num_layers := num_pattern_layers(pattern)) != self.num_layers:
            raise ValueError(f"has {num_layers} layers, num_layers={self.num_layers}")
        if pattern is None:
            return self._full_layers
        full_layers = self._full_layers
        # the halves of a layer that a border splits have the norms of the layer
        mixers = {part.number: part.mixer for part in self._pattern_layers if part.mixer is not None}
        return tuple(
            replace(
                full_layers[part.number].with_parts(part.mixer, part.mlp),
                normalizes_outputs=self._normalizes_outputs(mixers.get(part.number)),
            )
            for part in self._pattern_layers
        )

    @cached_property
    def _full_layers(self) -> tuple[LayerSpec, ...]:
        """The layers as if each had attention and an MLP or experts."""
        cp_comm_types = tuple(kind if kind in ("auto", "a2a") else "allgather" for kind in self.cp_comm_type)
        if len(cp_comm_types) == 1:
            cp_comm_types *= self.num_layers
        elif len(cp_comm_types) == self.num_layer_values:
            cp_comm_types = self._values_of_layers(cp_comm_types)
        rope = local_rope = self._rope if any(self.rope_layers) else None
        if rope is not None and self.rotary_local_base is not None:
            local_rope = RopeSpec(rope.dim, self.rotary_local_base)
        attention_layers = [
            LayerSpec(
                "latent_attention" if self.multi_latent_attention else "attention",
                "moe" if has_experts else "mlp",
                window,
                None if not has_rope else rope if window is None else local_rope,
                cp_comm_type,
            )
            for has_experts, window, has_rope, cp_comm_type in zip(
                self.moe_layers, self.layer_windows, self.rope_layers, cp_comm_types, strict=True
            )
        ]
        if self.hybrid_layer_pattern is not None:
            return tuple(attention_layers)
        layers = [
            layer if mixer is None else layer.with_parts(mixer, layer.mlp)
            for layer, mixer in zip(attention_layers, self.recurrent_layers, strict=True)
        ]
        return tuple(replace(layer, normalizes_outputs=self._normalizes_outputs(layer.mixer)) for layer in layers)

    def _normalizes_outputs(self, mixer: str | None) -> bool:
        """Return True if a layer with this mixer normalizes the outputs of its parts."""
        return self.norm_placement == "output" or (
            self.norm_placement == "attention_output" and mixer in ATTENTION_MIXERS
        )

    @cached_property
    def layer_numbers(self) -> tuple[int, ...]:
        """The number of each layer in the names of its parameters; the halves of a split layer have the same."""
        if self.hybrid_layer_pattern is None:
            return tuple(range(self.num_layers))
        return tuple(layer.number for layer in self._pattern_layers)

    @property
    def num_mtp_depths(self) -> int:
        """The number of depths of multi-token prediction."""
        if self.hybrid_layer_pattern is not None:
            return num_pattern_depths(self.hybrid_layer_pattern)
        return self.mtp_num_layers or 0

    @cached_property
    def mtp_layers(self) -> tuple[LayerSpec, ...]:
        """The layers of each depth of multi-token prediction, () without it.

        A depth is like the last layer. A pattern has other parts, but window and positions are those of the last
        attention.
        """
        if not self.num_mtp_depths:
            return ()
        if self.hybrid_layer_pattern is None:
            return self.layers[-1:]
        mixers = (spec for spec in reversed(self.layers) if spec.mixer is not None and not spec.is_recurrent)
        last_mixer = next(mixers, self._full_layers[-1])
        return tuple(
            replace(
                last_mixer.with_parts(part.mixer, part.mlp), normalizes_outputs=self._normalizes_outputs(part.mixer)
            )
            for part in parse_depth_pattern(self.hybrid_layer_pattern)
        )

    @property
    def mtp_layer_numbers(self) -> tuple[range, ...]:
        """The numbers of the layers of each depth, after those of the model; one range if all depths share weights."""
        size = len(self.mtp_layers)
        num_ranges = min(1, self.num_mtp_depths) if self.mtp_use_repeated_layer else self.num_mtp_depths
        starts = [self.num_layers + depth * size for depth in range(num_ranges)]
        return tuple(range(start, start + size) for start in starts)

    @property
    def layer_uses(self) -> dict[int, int]:
        """The uses in a forward of each layer that a forward uses several times, by the number of the layer."""
        if not self.mtp_use_repeated_layer:
            return {}
        return {number: self.num_mtp_depths for numbers in self.mtp_layer_numbers for number in numbers}

    @property
    def numbered_layers(self) -> list[tuple[int, LayerSpec]]:
        """(number, spec) of each layer, including those of the depths of multi-token prediction."""
        layers = list(zip(self.layer_numbers, self.layers, strict=True))
        for numbers in self.mtp_layer_numbers:
            layers += zip(numbers, self.mtp_layers, strict=True)
        return layers

    @property
    def layer_parts(self) -> tuple[str, ...]:
        """The names of the mixers and MLPs, in order, without pipeline borders."""
        return tuple(part for layer in self.layers for part in (layer.mixer, layer.mlp) if part is not None)

    @property
    def has_only_full_layers(self) -> bool:
        """True if every layer has attention and then an MLP."""
        return all(layer.has_attention and layer.mlp is not None for layer in self.layers)

    @property
    def has_experts(self) -> bool:
        """True if any layer has experts, in the model or in the depths of multi-token prediction."""
        depth_pattern = parse_depth_pattern(self.hybrid_layer_pattern or "*")
        return any(self.moe_layers) or any(layer.mlp == "moe" for layer in depth_pattern)

    @property
    def uses_rope(self) -> bool:
        """True if any layer has rotary positions."""
        return any(layer.rope is not None for layer in self.layers)

    @property
    def rope_scaling(self) -> Scaling:
        """The rule that stretches the rotary wavelengths, or None."""
        if self.position_embedding_type == "yarn":
            return Yarn(
                self.rotary_scaling_factor,
                self.yarn_original_max_position_embeddings,
                self.yarn_beta_fast,
                self.yarn_beta_slow,
                self.yarn_correction_range_round_to_int,
                self.mscale,
                self.mscale_all_dim,
            )
        return RopeScaling(factor=self.rope_scaling_factor) if self.use_rope_scaling else None

    @property
    def _rope(self) -> RopeSpec:
        head_size = self.qk_pos_emb_head_dim if self.multi_latent_attention else self.head_size
        return RopeSpec(
            int(head_size * self.rotary_percent),
            self.rotary_base,
            self.rotary_seq_len_interpolation_factor,
            self.rope_scaling,
        )

    @property
    def attention_windows(self) -> tuple[int | None, ...]:
        """The window of each layer with attention; None: no window."""
        return tuple(layer.window for layer in self.layers if layer.has_attention)
