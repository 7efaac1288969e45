"""What each family's config.json means, as tables read in both directions. Data only.

A `Form` says of a family: which key is which option, which options it fixes (set on import, required on export), and
which other keys must have one value because the model knows no other. Defaults are those of the families' classes in
transformers, since old files leave keys out.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any


@dataclass(frozen=True)
class Form:
    """`keys`: option -> key. `optional`: key -> default. `fixed`: option -> value. `only`: key -> allowed values,
    the first being the default. `activations`: key's value -> ours; the first of a kind is written."""

    architecture: str
    keys: Mapping[str, str]
    fixed: Mapping[str, Any]
    activation_key: str
    activations: Mapping[str, str]
    optional: Mapping[str, Any] = field(default_factory=dict)
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    tied_by_default: bool = False


_KEYS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "max_position_embeddings": "max_position_embeddings",
    "init_method_std": "initializer_range",
    "attention_dropout": "attention_dropout",
}
_LLAMA_KEYS = {**_KEYS, "norm_epsilon": "rms_norm_eps"}
_GELU = {"gelu_new": "gelu", "gelu_pytorch_tanh": "gelu", "gelu_fast": "gelu", "gelu": "gelu_erf"}
TRAINING = ("hidden_dropout",)  # no part of what the model computes
_OPTIONAL = {"initializer_range": 0.02, "attention_dropout": 0.0, "rms_norm_eps": 1e-6}


def _llama(architecture: str, only: Mapping[str, tuple[Any, ...]], **fixed: Any) -> Form:
    common = {"normalization": "RMSNorm", "position_embedding_type": "rope", "rotary_percent": 1.0}
    common |= {"parallel_residual": False, "qk_layernorm": False, "add_qkv_bias": False, "hidden_dropout": 0.0}
    return Form(architecture, _LLAMA_KEYS, common | fixed, "hidden_act", {"silu": "swiglu"}, _OPTIONAL, only)


FORMS: Mapping[str, Form] = MappingProxyType(
    {
        "llama": _llama("LlamaForCausalLM", {}),
        "mistral": _llama("MistralForCausalLM", {}, add_bias_linear=False),
        "qwen2": _llama("Qwen2ForCausalLM", {}, add_bias_linear=False, add_qkv_bias=True),
        "qwen3": _llama("Qwen3ForCausalLM", {"attention_bias": (False,)}, add_bias_linear=False, qk_layernorm=True),
        "gpt_neox": Form(
            "GPTNeoXForCausalLM",
            {
                **_KEYS,
                "norm_epsilon": "layer_norm_eps",
                "hidden_dropout": "hidden_dropout",
                "parallel_residual": "use_parallel_residual",
            },
            {
                "normalization": "LayerNorm",
                "position_embedding_type": "rope",
                "add_bias_linear": True,
                "add_qkv_bias": False,
                "qk_layernorm": False,
                "use_rope_scaling": False,
            },
            "hidden_act",
            {"gelu": "gelu_erf", **{key: ours for key, ours in _GELU.items() if key != "gelu"}},
            {
                "initializer_range": 0.02,
                "attention_dropout": 0.0,
                "hidden_dropout": 0.0,
                "layer_norm_eps": 1e-5,
                "use_parallel_residual": True,
            },
            {"attention_bias": (True,)},
        ),
        "gpt2": Form(
            "GPT2LMHeadModel",
            {
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
            {
                "normalization": "LayerNorm",
                "position_embedding_type": "learned_absolute",
                "add_bias_linear": True,
                "add_qkv_bias": False,
                "qk_layernorm": False,
                "parallel_residual": False,
            },
            "activation_function",
            _GELU,
            {
                "n_inner": None,
                "layer_norm_epsilon": 1e-5,
                "initializer_range": 0.02,
                "resid_pdrop": 0.1,
                "attn_pdrop": 0.1,
            },
            {
                "scale_attn_weights": (True,),
                "scale_attn_by_inverse_layer_idx": (False,),
                "add_cross_attention": (False,),
            },
            tied_by_default=True,
        ),
    }
)
LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen3")
