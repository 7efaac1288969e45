"""Published models as settings of models/gpt.py, and the names in their files. Pure data, without torch.

PRESETS map a model's name to values of options. A `Family` (family.py) says how the tensors of a `model_type` are named
and what its config.json means: a new family is an entry of FAMILIES.

Shapes from the papers and model cards: arXiv:2005.14165 table 2.1, arXiv:2307.09288, arXiv:2407.21783 table 3,
arXiv:2310.06825, arXiv:2412.15115, arXiv:2505.09388. tests/models/test_families.py holds the published counts.
"""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Any

from megalite.models.family import QKV, Family, rules


def _gpt_preset(layers: int, hidden: int, heads: int, length: int) -> dict[str, Any]:
    sizes = {"num_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "vocab_size": 50257}
    return sizes | {"seq_length": length, "max_position_embeddings": length}


def _llama_preset(
    layers: int, hidden: int, heads: int, groups: int, ffn: int, vocab: int, length: int, **more: Any
) -> dict[str, Any]:
    return {
        "num_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "group_query_attention": groups != heads,
        **({"num_query_groups": groups} if groups != heads else {}),
        "ffn_hidden_size": ffn,
        "vocab_size": vocab,
        "seq_length": length,
        "max_position_embeddings": length,
        "normalization": "RMSNorm",
        "activation": "swiglu",
        "position_embedding_type": "rope",
        "add_bias_linear": False,
        "untie_embeddings_and_output_weights": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        **more,
    }


_LLAMA3: dict[str, Any] = {"rotary_base": 500000.0}

PRESETS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        # for trying things out; their learning rates: docs/performance.md
        "tiny": _llama_preset(8, 256, 8, 4, 704, 8192, 256, lr=1e-3),
        "small": _llama_preset(12, 768, 12, 4, 2048, 8192, 1024, lr=1e-3),
        "gpt2": _gpt_preset(12, 768, 12, 1024),
        "gpt2-medium": _gpt_preset(24, 1024, 16, 1024),
        "gpt2-large": _gpt_preset(36, 1280, 20, 1024),
        "gpt2-xl": _gpt_preset(48, 1600, 25, 1024),
        "gpt3-175b": _gpt_preset(96, 12288, 96, 2048),
        "llama2-7b": _llama_preset(32, 4096, 32, 32, 11008, 32000, 4096),
        "llama2-13b": _llama_preset(40, 5120, 40, 40, 13824, 32000, 4096),
        "llama2-70b": _llama_preset(80, 8192, 64, 8, 28672, 32000, 4096),
        "llama3-8b": _llama_preset(32, 4096, 32, 8, 14336, 128256, 8192, **_LLAMA3),
        "llama3-70b": _llama_preset(80, 8192, 64, 8, 28672, 128256, 8192, **_LLAMA3),
        "llama3-405b": _llama_preset(126, 16384, 128, 8, 53248, 128256, 8192, **_LLAMA3),
        "mistral-7b": _llama_preset(32, 4096, 32, 8, 14336, 32000, 4096),
        "qwen2.5-7b": _llama_preset(
            28, 3584, 28, 4, 18944, 152064, 4096, add_qkv_bias=True, rotary_base=1000000.0, norm_epsilon=1e-6
        ),
        "qwen3-8b": _llama_preset(
            36, 4096, 32, 8, 12288, 151936, 4096, qk_layernorm=True, rotary_base=1000000.0, norm_epsilon=1e-6
        ),
    }
)

_LLAMA_RULES = rules(
    """
    model.embed_tokens.weight = embedding.word
    layer.input_layernorm.weight = our.attention.norm.weight
    layer.self_attn.q_proj.* = our.attention.q*
    layer.self_attn.k_proj.* = our.attention.kv*[0]
    layer.self_attn.v_proj.* = our.attention.kv*[1]
    layer.self_attn.q_norm.weight = our.attention.q_norm.weight
    layer.self_attn.k_norm.weight = our.attention.k_norm.weight
    layer.self_attn.o_proj.* = our.attention.out*
    layer.post_attention_layernorm.weight = our.mlp.norm.weight
    layer.mlp.gate_proj.* = our.mlp.gate_up*[0]
    layer.mlp.up_proj.* = our.mlp.gate_up*[1]
    layer.mlp.down_proj.* = our.mlp.down*
    model.norm.weight = final_norm.weight
    lm_head.weight = head | embedding.word
    """,
    "model.layers.{n}.",
)
_GPT2_RULES = rules(
    f"""
    transformer.wte.weight = embedding.word
    transformer.wpe.weight = embedding.position
    layer.ln_1.* = our.attention.norm.*
    layer.attn.c_attn.* = {QKV} (columns)
    layer.attn.c_proj.* = our.attention.out* (columns)
    layer.ln_2.* = our.mlp.norm.*
    layer.mlp.c_fc.* = our.mlp.up* (columns)
    layer.mlp.c_proj.* = our.mlp.down* (columns)
    transformer.ln_f.* = final_norm.*
    lm_head.weight = head | embedding.word
    """,
    "transformer.h.{n}.",
)
_NEOX_RULES = rules(
    f"""
    gpt_neox.embed_in.weight = embedding.word
    layer.input_layernorm.* = our.attention.norm.*
    layer.attention.query_key_value.* = {QKV} (groups)
    layer.attention.dense.* = our.attention.out*
    layer.post_attention_layernorm.* = our.mlp.norm.*
    layer.mlp.dense_h_to_4h.* = our.mlp.up*
    layer.mlp.dense_4h_to_h.* = our.mlp.down*
    gpt_neox.final_layer_norm.* = final_norm.*
    embed_out.weight = head | embedding.word
    """,
    "gpt_neox.layers.{n}.",
)

_KEYS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "max_position_embeddings": "max_position_embeddings",
    "init_method_std": "initializer_range",
    "attention_dropout": "attention_dropout",
}
_OPTIONAL = {"initializer_range": 0.02, "attention_dropout": 0.0}
_GROUPED = {"num_key_value_heads": "groups", "head_dim": "head_size", "rope_theta": "rotary_base"}
_VANILLA = {"softmax_type": "vanilla"}
_LLAMA = Family(
    name="llama",
    rules=_LLAMA_RULES,
    prefix="model.",
    ignored=(".rotary_emb.inv_freq",),
    architecture="LlamaForCausalLM",
    keys=_KEYS | {"norm_epsilon": "rms_norm_eps"},
    fixed={"normalization": "RMSNorm", "position_embedding_type": "rope", "rotary_percent": 1.0, "hidden_dropout": 0.0}
    | {"parallel_residual": False, "qk_layernorm": False, "add_qkv_bias": False, **_VANILLA},
    activations={"silu": "swiglu"},
    optional=_OPTIONAL | {"rms_norm_eps": 1e-6},
    written=_GROUPED | {"attention_bias": "add_bias_linear", "mlp_bias": "add_bias_linear"},
    scalings=("linear", "llama3", "yarn"),
    even_heads=True,
)
_UNBIASED = replace(_LLAMA, fixed={**_LLAMA.fixed, "add_bias_linear": False}, written=_GROUPED, even_heads=False)
_MISTRAL = replace(_UNBIASED, name="mistral", architecture="MistralForCausalLM", windows="all")
_QWEN2 = replace(
    _UNBIASED,
    name="qwen2",
    architecture="Qwen2ForCausalLM",
    fixed={**_UNBIASED.fixed, "add_qkv_bias": True},
    windows="by layer",
)
_QWEN3 = replace(
    _UNBIASED,
    name="qwen3",
    architecture="Qwen3ForCausalLM",
    fixed={**_UNBIASED.fixed, "qk_layernorm": True},
    only={"attention_bias": (False,)},
    windows="by layer",
)

_PLAIN = {"normalization": "LayerNorm", "add_bias_linear": True, "add_qkv_bias": False, "qk_layernorm": False}
_PLAIN |= _VANILLA
_GELU = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu_fast": "gelu"}
_NEOX = Family(
    name="gpt_neox",
    rules=_NEOX_RULES,
    prefix="gpt_neox.",
    ignored=(".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"),
    architecture="GPTNeoXForCausalLM",
    keys=_KEYS
    | {"norm_epsilon": "layer_norm_eps", "hidden_dropout": "hidden_dropout"}
    | {"parallel_residual": "use_parallel_residual"},
    fixed=_PLAIN | {"position_embedding_type": "rope", "use_rope_scaling": False},
    activations={"gelu": "gelu_erf"} | _GELU,
    optional=_OPTIONAL
    | {"hidden_dropout": 0.0, "layer_norm_eps": 1e-5, "use_parallel_residual": True, "rotary_pct": 0.25},
    only={"attention_bias": (True,)},
    written={"rotary_emb_base": "rotary_base", "rotary_pct": "rotary_percent"},
)
_GPT2 = Family(
    name="gpt2",
    rules=_GPT2_RULES,
    prefix="transformer.",
    ignored=(".attn.bias", ".attn.masked_bias"),
    architecture="GPT2LMHeadModel",
    keys={
        "num_layers": "n_layer",
        "hidden_size": "n_embd",
        "ffn_hidden_size": "n_inner",
        "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions",
        "norm_epsilon": "layer_norm_epsilon",
        "init_method_std": "initializer_range",
        "hidden_dropout": "resid_pdrop",
        "attention_dropout": "attn_pdrop",
    },
    fixed=_PLAIN | {"position_embedding_type": "learned_absolute", "parallel_residual": False},
    activation_key="activation_function",
    activations=_GELU | {"gelu": "gelu_erf"},
    optional={"n_inner": None, "layer_norm_epsilon": 1e-5, "initializer_range": 0.02}
    | {"resid_pdrop": 0.1, "attn_pdrop": 0.1},
    only={"scale_attn_weights": (True,), "scale_attn_by_inverse_layer_idx": (False,), "add_cross_attention": (False,)},
    written={"embd_pdrop": "hidden_dropout"},
    tied_by_default=True,
)

# in the order in which an export tries them
FAMILIES: Mapping[str, Family] = MappingProxyType(
    {family.name: family for family in (_LLAMA, _MISTRAL, _QWEN2, _QWEN3, _NEOX, _GPT2)}
)
