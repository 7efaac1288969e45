"""Published models as settings of models/gpt.py. Pure data; a preset gives option names to values.

Shapes from the papers and model cards: arXiv:2005.14165 table 2.1, arXiv:2307.09288, arXiv:2407.21783 table 3,
arXiv:2310.06825, arXiv:2412.15115, arXiv:2505.09388. tests/models/test_families.py holds the published counts.
"""

from __future__ import annotations

from collections.abc import Mapping
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
        "tiny": _llama(8, 256, 8, 4, 704, 8192, 256),
        "small": _llama(12, 768, 12, 4, 2048, 8192, 1024),
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
