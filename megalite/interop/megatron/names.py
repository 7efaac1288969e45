"""Tables of Megatron-LM's names of tensors: Megatron core's, and those of other releases for the same tensors."""

import re

from megalite.models.family import QKV, Naming, rules

_CORE_RULES = rules(
    f"""
    embedding.word_embeddings.weight = embedding.word
    embedding.position_embeddings.weight = embedding.position
    layer.input_layernorm.* = our.attention.norm.*
    layer.self_attention.linear_qkv.* = {QKV} (groups)
    layer.self_attention.q_layernorm.* = our.attention.q_norm.*
    layer.self_attention.k_layernorm.* = our.attention.k_norm.*
    layer.self_attention.core_attention.softmax_offset = our.attention.sink
    layer.self_attention.linear_proj.* = our.attention.out*
    layer.pre_mlp_layernorm.* = our.mlp.norm.*
    layer.mlp.linear_fc1.* = our.mlp.up*
    layer.mlp.linear_fc1.* = our.mlp.gate_up*
    layer.mlp.linear_fc2.* = our.mlp.down*
    layer.mlp.router.weight = our.mlp.router
    layer.mlp.router.expert_bias = our.mlp.router.bias
    layer.mlp.experts.local_experts.{{e}}.linear_fc1.weight = our.mlp.experts.up[{{e}}]
    layer.mlp.experts.local_experts.{{e}}.linear_fc1.weight = our.mlp.experts.gate_up[{{e}}]
    layer.mlp.experts.local_experts.{{e}}.linear_fc2.weight = our.mlp.experts.down[{{e}}]
    layer.mlp.shared_experts.linear_fc1.weight = our.mlp.shared.up
    layer.mlp.shared_experts.linear_fc1.weight = our.mlp.shared.gate_up
    layer.mlp.shared_experts.linear_fc2.weight = our.mlp.shared.down
    layer.mlp.shared_experts.gate_weight = our.mlp.shared_gate (row)
    decoder.final_layernorm.* = final_norm.*
    output_layer.weight = head | embedding.word
    """,
    "decoder.layers.{n}.",
)
_DIST_RULES = rules(  # of torch_dist, where all experts are one tensor
    """
    layer.linear_fc1.weight = our.mlp.experts.up (experts)
    layer.linear_fc1.weight = our.mlp.experts.gate_up (experts)
    layer.linear_fc2.weight = our.mlp.experts.down (experts)
    """,
    "decoder.layers.{n}.mlp.experts.experts.",
)
MEGATRON = Naming(name="megatron", rules=_CORE_RULES, others=_DIST_RULES, ignored=("._extra_state", ".inv_freq"))
GROUPED = re.compile(r"\.mlp\.experts\.(linear_fc[12])\.weight(\d+)$")  # an expert of Transformer Engine's layers
LAYER = re.compile(r"decoder\.layers\.(\d+)\.")  # numbered
STACKED_LAYERS = re.compile(r"decoder\.layers\.(?!\d)")  # [L, ...] under one name
WORD = "embedding.word_embeddings.weight"

# (other name, the name above): norms that are part of the matmul after them, in Transformer Engine's layers
FUSED: tuple[tuple[str, str], ...] = (
    (".self_attention.linear_qkv.layer_norm_", ".input_layernorm."),
    (".mlp.linear_fc1.layer_norm_", ".pre_mlp_layernorm."),
)
# FUSED, and the names before Megatron core; each is replaced wherever it occurs
SYNONYMS: tuple[tuple[str, str], ...] = (
    *FUSED,
    ("word_embeddings_for_head.", "output_layer."),
    ("language_model.embedding.", "embedding."),
    ("language_model.output_layer.", "output_layer."),
    ("language_model.encoder.", "decoder."),
    ("language_model.transformer.", "decoder."),
    (".input_norm.", ".input_layernorm."),
    (".post_attention_layernorm.", ".pre_mlp_layernorm."),
    (".post_attention_norm.", ".pre_mlp_layernorm."),
    (".attention.", ".self_attention."),
    (".self_attention.query_key_value.", ".self_attention.linear_qkv."),
    (".self_attention.dense.", ".self_attention.linear_proj."),
    (".mlp.dense_h_to_4h.", ".mlp.linear_fc1."),
    (".mlp.dense_4h_to_h.", ".mlp.linear_fc2."),
    ("decoder.final_norm.", "decoder.final_layernorm."),
)


def core_name(name: str) -> str:
    """Megatron core's name of a tensor of any release."""
    for other, core in SYNONYMS:
        name = name.replace(other, core)
    return GROUPED.sub(r".mlp.experts.local_experts.\2.\1.weight", name)
