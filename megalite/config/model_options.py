"""The model's options; properties give the effective values of those that are left open."""

from __future__ import annotations

import math
from dataclasses import dataclass

from megalite.config.field import how, model, training
from megalite.config.pattern import LONGEST, read_pattern
from megalite.config.registry import KINDS

ALL_DROPPED = (1, "drops everything; use less than 1")
MOST_LAYERS = (LONGEST, f"is more layers than any model has; use at most {LONGEST}")  # what is asked of each is a list


@dataclass(frozen=True)
class ModelConfig:
    num_layers: int = model(0, required=True, stand_in=2, most=MOST_LAYERS)
    hidden_size: int = model(0, required=True, stand_in=64)
    ffn_hidden_size: int | None = model(None, same_as="ffn_size")
    num_attention_heads: int = model(0, required=True, stand_in=1)
    kv_channels: int | None = model(None, same_as="head_size")
    group_query_attention: bool = model(False, through="num_query_groups")
    num_query_groups: int | None = model(None, same_as="groups")
    seq_length: int = training(0, required=True, stand_in=1)
    max_position_embeddings: int | None = training(None)
    normalization: str = model("LayerNorm", choices=("LayerNorm", "RMSNorm"))
    norm_epsilon: float = model(1e-5)
    apply_layernorm_1p: bool = model(False)
    add_bias_linear: bool = model(True)
    add_qkv_bias: bool = model(False)
    activation: str = model("gelu", choices=KINDS["activation"])
    bias_gelu_fusion: bool = model(True, through="activation")
    openai_gelu: bool = model(False, through="activation")
    parallel_residual: bool = model(False)
    position_embedding_type: str = model("learned_absolute", choices=("learned_absolute", "rope", "yarn", "none"))
    add_position_embedding: bool = model(True, through="position_embedding_type")
    rotary_base: float = model(10000.0, above=0)
    rotary_percent: float = model(1.0)
    rotary_interleaved: bool = model(False)
    rotary_seq_len_interpolation_factor: float = model(1.0, above=0)
    no_rope_freq: str | None = model(None, same_as="rotary")
    rotary_scaling_factor: float = model(1.0, above=0)
    yarn_original_max_position_embeddings: int = model(4096, above=0)
    yarn_beta_fast: float = model(32.0)
    yarn_beta_slow: float = model(1.0, above=0)
    yarn_correction_range_round_to_int: bool = model(True)
    mscale: float = model(1.0)
    mscale_all_dim: float = model(0.0)
    use_rope_scaling: bool = model(False)
    rope_scaling_factor: float = model(8.0, above=0)
    untie_embeddings_and_output_weights: bool = model(False)
    make_vocab_size_divisible_by: int = training(128, above=0)
    hidden_dropout: float = training(0.1, below=ALL_DROPPED)
    attention_dropout: float = training(0.1, below=ALL_DROPPED)
    init_method_std: float = training(0.02)
    embedding_init_method_std: float | None = training(None, least=0)
    softmax_type: str = model("vanilla", choices=("vanilla", "off-by-one", "learnable"))
    qk_layernorm: bool = model(False)
    qk_layernorm_over_heads: bool = model(False)
    no_weight_decay_cond_type: str | None = training(None, choices=("apply_wd_to_qk_layernorm",))
    window_size: tuple[int, ...] | None = model(None)
    window_attn_skip_freq: str | None = model(None, same_as="windows")
    cp_comm_type: tuple[str, ...] = how(("allgather",))
    num_experts: int | None = model(None, least=0)
    moe_layer_freq: str = model("1", same_as="experts")
    moe_router_topk: int = model(2, above=0)
    moe_ffn_hidden_size: int | None = model(None, same_as="expert_ffn_size")
    moe_shared_expert_intermediate_size: int | None = model(None)
    moe_shared_expert_gate: bool = model(False)
    moe_router_score_function: str = model("softmax", choices=("softmax", "sigmoid"))
    moe_router_pre_softmax: bool = model(False)
    moe_router_topk_scaling_factor: float = model(1.0)
    moe_router_num_groups: int | None = model(None)
    moe_router_group_topk: int | None = model(None)
    moe_router_enable_expert_bias: bool = model(False)
    moe_router_bias_update_rate: float = training(1e-3, above=0)
    moe_router_load_balancing_type: tuple[str, ...] = training(("aux_loss",))
    moe_aux_loss_coeff: tuple[float, ...] = training((0.0,))
    moe_z_loss_coeff: float = training(0.0)
    moe_router_dtype: str = training("fp32", choices=("fp32", "fp64"))
    moe_router_force_load_balancing: bool = training(False)

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
    def has_dense_ffn(self) -> bool:
        """Whether some layer has no experts; also where `moe_layer_freq` cannot be read, of which others complain."""
        try:
            return not all(self.experts)
        except ValueError:
            return True

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
