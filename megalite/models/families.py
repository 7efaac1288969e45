"""Published models as settings of models/gpt.py, and how other programs name their tensors. Pure data.

A preset gives option names to values. A family is a list of rules, read from theirs to ours and from ours to theirs.

Shapes from the papers and model cards: arXiv:2005.14165 table 2.1, arXiv:2307.09288, arXiv:2407.21783 table 3,
arXiv:2310.06825, arXiv:2412.15115, arXiv:2505.09388. tests/models/test_families.py holds the published counts.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any


def _gpt(layers: int, hidden: int, heads: int, length: int) -> dict[str, Any]:
    return {
        "num_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "seq_length": length,
        "max_position_embeddings": length,
        "vocab_size": 50257,
    }


def _llama(
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
        # to try out; the rates: docs/performance.md
        "tiny": _llama(8, 256, 8, 4, 704, 8192, 256, lr=1e-3),
        "small": _llama(12, 768, 12, 4, 2048, 8192, 1024, lr=1e-3),
        "gpt2": _gpt(12, 768, 12, 1024),
        "gpt2-medium": _gpt(24, 1024, 16, 1024),
        "gpt2-large": _gpt(36, 1280, 20, 1024),
        "gpt2-xl": _gpt(48, 1600, 25, 1024),
        "gpt3-175b": _gpt(96, 12288, 96, 2048),
        "llama2-7b": _llama(32, 4096, 32, 32, 11008, 32000, 4096),
        "llama2-13b": _llama(40, 5120, 40, 40, 13824, 32000, 4096),
        "llama2-70b": _llama(80, 8192, 64, 8, 28672, 32000, 4096),
        "llama3-8b": _llama(32, 4096, 32, 8, 14336, 128256, 8192, **_LLAMA3),
        "llama3-70b": _llama(80, 8192, 64, 8, 28672, 128256, 8192, **_LLAMA3),
        "llama3-405b": _llama(126, 16384, 128, 8, 53248, 128256, 8192, **_LLAMA3),
        "mistral-7b": _llama(32, 4096, 32, 8, 14336, 32000, 4096),
        "qwen2.5-7b": _llama(
            28, 3584, 28, 4, 18944, 152064, 4096, add_qkv_bias=True, rotary_base=1000000.0, norm_epsilon=1e-6
        ),
        "qwen3-8b": _llama(
            36, 4096, 32, 8, 12288, 151936, 4096, qk_layernorm=True, rotary_base=1000000.0, norm_epsilon=1e-6
        ),
    }
)


@dataclass(frozen=True)
class Rule:
    """One tensor of a foreign checkpoint and the parameters of ours that it is made of. Read in both directions.

    theirs  its name; {n} is the layer's number
    ours    our parameters in the order of its rows; NAME[i] is the i-th half of a stacked one (kv, gate_up)
    form    "rows": our parameters one below the other
            "columns": that, transposed ([in, out] instead of [out, in])
            "groups": of q, kv[0], kv[1]; rows by key/value group [G, H/G + 2, K]: the queries of a group, its key,
            its value
    """

    theirs: str
    ours: tuple[str, ...]
    form: str = "rows"


@dataclass(frozen=True)
class Family:
    """`rules`: a rule counts where the model has its parameters (a bias, a head of its own).

    prefix    of the names, that some files leave away
    ignored   names beside the weights: tables that are computed, ends of names
    """

    name: str
    rules: tuple[Rule, ...]
    prefix: str = ""
    ignored: tuple[str, ...] = ()


def _rules(text: str, layer: str) -> tuple[Rule, ...]:
    """`THEIRS = OURS + OURS (FORM)` per line; `layer.` and `our.` stand for the names of layer n."""
    rules = []
    for line in text.strip().splitlines():
        theirs, _, right = line.partition(" = ")
        ours, _, form = right.partition(" (")
        theirs = re.sub(r"^layer\.", layer, theirs.strip())
        names = tuple(re.sub(r"^our\.", "layers.{n}.", name.strip()) for name in ours.split("+"))
        rules.append(Rule(theirs, names, form.strip(" )") or "rows"))
    return tuple(rules)


_QKV = "our.attention.q + our.attention.kv[0] + our.attention.kv[1]"
_QKV_BIAS = "our.attention.q_bias + our.attention.kv_bias[0] + our.attention.kv_bias[1]"
_LLAMA_RULES = _rules(
    """
    model.embed_tokens.weight = embedding.word
    layer.input_layernorm.weight = our.attention.norm.weight
    layer.self_attn.q_proj.weight = our.attention.q
    layer.self_attn.k_proj.weight = our.attention.kv[0]
    layer.self_attn.v_proj.weight = our.attention.kv[1]
    layer.self_attn.q_proj.bias = our.attention.q_bias
    layer.self_attn.k_proj.bias = our.attention.kv_bias[0]
    layer.self_attn.v_proj.bias = our.attention.kv_bias[1]
    layer.self_attn.q_norm.weight = our.attention.q_norm.weight
    layer.self_attn.k_norm.weight = our.attention.k_norm.weight
    layer.self_attn.o_proj.weight = our.attention.out
    layer.self_attn.o_proj.bias = our.attention.out_bias
    layer.post_attention_layernorm.weight = our.mlp.norm.weight
    layer.mlp.gate_proj.weight = our.mlp.gate_up[0]
    layer.mlp.gate_proj.bias = our.mlp.gate_up_bias[0]
    layer.mlp.up_proj.weight = our.mlp.gate_up[1]
    layer.mlp.up_proj.bias = our.mlp.gate_up_bias[1]
    layer.mlp.down_proj.weight = our.mlp.down
    layer.mlp.down_proj.bias = our.mlp.down_bias
    model.norm.weight = final_norm.weight
    lm_head.weight = head
    """,
    "model.layers.{n}.",
)
_GPT2_RULES = _rules(
    f"""
    transformer.wte.weight = embedding.word
    transformer.wpe.weight = embedding.position
    layer.ln_1.weight = our.attention.norm.weight
    layer.ln_1.bias = our.attention.norm.bias
    layer.attn.c_attn.weight = {_QKV} (columns)
    layer.attn.c_attn.bias = {_QKV_BIAS}
    layer.attn.c_proj.weight = our.attention.out (columns)
    layer.attn.c_proj.bias = our.attention.out_bias
    layer.ln_2.weight = our.mlp.norm.weight
    layer.ln_2.bias = our.mlp.norm.bias
    layer.mlp.c_fc.weight = our.mlp.up (columns)
    layer.mlp.c_fc.bias = our.mlp.up_bias
    layer.mlp.c_proj.weight = our.mlp.down (columns)
    layer.mlp.c_proj.bias = our.mlp.down_bias
    transformer.ln_f.weight = final_norm.weight
    transformer.ln_f.bias = final_norm.bias
    lm_head.weight = head
    """,
    "transformer.h.{n}.",
)
_NEOX_RULES = _rules(
    f"""
    gpt_neox.embed_in.weight = embedding.word
    layer.input_layernorm.weight = our.attention.norm.weight
    layer.input_layernorm.bias = our.attention.norm.bias
    layer.attention.query_key_value.weight = {_QKV} (groups)
    layer.attention.query_key_value.bias = {_QKV_BIAS} (groups)
    layer.attention.dense.weight = our.attention.out
    layer.attention.dense.bias = our.attention.out_bias
    layer.post_attention_layernorm.weight = our.mlp.norm.weight
    layer.post_attention_layernorm.bias = our.mlp.norm.bias
    layer.mlp.dense_h_to_4h.weight = our.mlp.up
    layer.mlp.dense_h_to_4h.bias = our.mlp.up_bias
    layer.mlp.dense_4h_to_h.weight = our.mlp.down
    layer.mlp.dense_4h_to_h.bias = our.mlp.down_bias
    gpt_neox.final_layer_norm.weight = final_norm.weight
    gpt_neox.final_layer_norm.bias = final_norm.bias
    embed_out.weight = head
    """,
    "gpt_neox.layers.{n}.",
)

# model_type of config.json -> how its tensors are named
HUGGING_FACE: Mapping[str, Family] = MappingProxyType(
    {
        "llama": Family("llama", _LLAMA_RULES, "model.", (".rotary_emb.inv_freq",)),
        "mistral": Family("mistral", _LLAMA_RULES, "model.", (".rotary_emb.inv_freq",)),
        "qwen2": Family("qwen2", _LLAMA_RULES, "model.", (".rotary_emb.inv_freq",)),
        "qwen3": Family("qwen3", _LLAMA_RULES, "model.", (".rotary_emb.inv_freq",)),
        "gpt2": Family("gpt2", _GPT2_RULES, "transformer.", (".attn.bias", ".attn.masked_bias")),
        "gpt_neox": Family(
            "gpt_neox",
            _NEOX_RULES,
            "gpt_neox.",
            (".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq"),
        ),
    }
)

_CORE_RULES = _rules(
    f"""
    embedding.word_embeddings.weight = embedding.word
    embedding.position_embeddings.weight = embedding.position
    layer.input_layernorm.weight = our.attention.norm.weight
    layer.input_layernorm.bias = our.attention.norm.bias
    layer.self_attention.linear_qkv.weight = {_QKV} (groups)
    layer.self_attention.linear_qkv.bias = {_QKV_BIAS} (groups)
    layer.self_attention.q_layernorm.weight = our.attention.q_norm.weight
    layer.self_attention.q_layernorm.bias = our.attention.q_norm.bias
    layer.self_attention.k_layernorm.weight = our.attention.k_norm.weight
    layer.self_attention.k_layernorm.bias = our.attention.k_norm.bias
    layer.self_attention.linear_proj.weight = our.attention.out
    layer.self_attention.linear_proj.bias = our.attention.out_bias
    layer.pre_mlp_layernorm.weight = our.mlp.norm.weight
    layer.pre_mlp_layernorm.bias = our.mlp.norm.bias
    layer.mlp.linear_fc1.weight = our.mlp.up
    layer.mlp.linear_fc1.bias = our.mlp.up_bias
    layer.mlp.linear_fc1.weight = our.mlp.gate_up
    layer.mlp.linear_fc1.bias = our.mlp.gate_up_bias
    layer.mlp.linear_fc2.weight = our.mlp.down
    layer.mlp.linear_fc2.bias = our.mlp.down_bias
    decoder.final_layernorm.weight = final_norm.weight
    decoder.final_layernorm.bias = final_norm.bias
    output_layer.weight = head
    """,
    "decoder.layers.{n}.",
)
MEGATRON = Family("megatron", _CORE_RULES, ignored=("._extra_state", ".inv_freq"))

# (other name, the name above): norms that are part of the matmul after them, in Transformer Engine's layers
MEGATRON_FUSED: tuple[tuple[str, str], ...] = (
    (".self_attention.linear_qkv.layer_norm_", ".input_layernorm."),
    (".mlp.linear_fc1.layer_norm_", ".pre_mlp_layernorm."),
)
# those, and the names from before Megatron core; each is replaced wherever it occurs
MEGATRON_SYNONYMS: tuple[tuple[str, str], ...] = (
    *MEGATRON_FUSED,
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
