"""A second reading of a Hugging Face config.json, for tools/verification/independent_import.py.

It shares no code with megalite/interop: keys and defaults are written down here a second time, in another form, after
the source code of transformers. The rotary wavelengths are numbers here, not options, so a wrong option is found too.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megalite.config.options import ModelConfig

Json = dict[str, Any]
# Defaults of transformers by model_type; all other families have those in the functions below.
EPSILON = {  # (key, default)
    "gpt2": ("layer_norm_epsilon", 1e-5),
    "gpt_neox": ("layer_norm_eps", 1e-5),
    "mixtral": ("rms_norm_eps", 1e-5),
    "gpt_oss": ("rms_norm_eps", 1e-5),
    "olmoe": ("rms_norm_eps", 1e-5),
}
ROPE_BASE = {"mixtral": 1e6, "gpt_oss": 1.5e5}
HEAD_SIZE = {"gpt_oss": 64, "qwen3": 128, "gemma2": 256, "gemma3_text": 256}
WINDOW = {"mistral": 4096, "gpt_oss": 128, "qwen2": 4096, "qwen3": 4096, "gemma2": 4096, "gemma3_text": 4096}
EXPERTS_PER_TOKEN = {"mixtral": 2, "gpt_oss": 4, "olmoe": 8, "qwen2_moe": 4, "qwen3_moe": 8}
GPT_OSS_SCALING = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}
GEMMA_ACTIVATIONS = ("gelu_pytorch_tanh", "gelu_new", "gelu_fast")  # all are the tanh form
ACTIVATIONS = {
    "silu": "swiglu",
    "gelu": "gelu_erf",
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_fast": "gelu",
}


@dataclass(frozen=True)
class Waves:
    """The rotary wavelengths of a head with R rotated channels.

    Attributes:
        frequencies: radians per position of each pair of channels, [R / 2].
        magnitude: factor of all cosines and sines.
    """

    frequencies: list[float]
    magnitude: float

    def tables(self, length: int) -> tuple[Tensor, Tensor]:
        """Return cos and sin of the first `length` positions, in fp64."""
        positions = torch.arange(length, dtype=torch.float64)
        angles = positions[:, None] * torch.tensor(self.frequencies, dtype=torch.float64)
        return angles.cos() * self.magnitude, angles.sin() * self.magnitude


def read(directory: Path) -> Json:
    """Read the config.json of a model directory."""
    return json.loads((directory / "config.json").read_text("utf-8"))


def waves(config: Json, layer: int) -> Waves | None:
    """Return the rotary wavelengths of a layer, or None for a model without rotary positions."""
    family = config["model_type"]
    if family == "gpt2":
        return None
    scaling = _gemma3_rope(config, layer) if family == "gemma3_text" else _rope_scaling(config)
    size = config.get("head_dim") or HEAD_SIZE.get(family)
    size = size or config["hidden_size"] // config["num_attention_heads"]
    base_key = "rope_theta"
    if family == "gpt_neox":
        size = int(size * scaling.get("partial_rotary_factor", config.get("rotary_pct", 0.25)))
        base_key = "rotary_emb_base"
    base = scaling.get("rope_theta", config.get(base_key, ROPE_BASE.get(family, 10000.0)))
    frequencies = [base ** (-2 * i / size) for i in range((size + 1) // 2)]
    rope_type = scaling.get("rope_type", scaling.get("type", "default"))
    if rope_type == "default":
        return Waves(frequencies, 1.0)
    if rope_type == "linear":
        return Waves([frequency / scaling["factor"] for frequency in frequencies], 1.0)
    trained_length = scaling.get("original_max_position_embeddings", config["max_position_embeddings"])
    if family != "gemma3_text":  # whose positions are in two tables, which this key does not belong to
        trained_length = config.get("original_max_position_embeddings", trained_length)
    if rope_type == "llama3":
        return Waves([_llama3(frequency, scaling, trained_length) for frequency in frequencies], 1.0)
    return Waves(_yarn(frequencies, base, size, scaling, trained_length), _yarn_magnitude(scaling))


def _rope_scaling(config: Json) -> Json:
    """Return the parameters of the rotary positions: rope_scaling, or rope_parameters as of transformers 5."""
    if config.get("rope_scaling"):
        return dict(config["rope_scaling"])
    if config.get("rope_parameters") is not None:
        return dict(config["rope_parameters"])
    return dict(GPT_OSS_SCALING) if config["model_type"] == "gpt_oss" else {}


def _gemma3_rope(config: Json, layer: int) -> Json:
    """Return the parameters of the rotary positions of a layer of Gemma 3, which depend on its window."""
    tables = config.get("rope_parameters") or {}
    if _layers_with_window(config, "gemma3_text", layer + 1)[layer]:
        return {"rope_theta": config.get("rope_local_base_freq", 10000.0), **(tables.get("sliding_attention") or {})}
    scaling = {**(tables.get("full_attention") or {}), **(config.get("rope_scaling") or {})}
    return {"rope_theta": config.get("rope_theta", 1000000.0), **scaling}


def _llama3(frequency: float, scaling: Json, length: float) -> float:
    """Scale a wave.

    A wave with fewer than low_freq_factor turns in `length` is stretched by the full factor, one with more than
    high_freq_factor turns is not.
    """
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = length * frequency / (2 * math.pi)
    unscaled = min(max((turns - low) / (high - low), 0.0), 1.0)
    return frequency * unscaled + frequency / scaling["factor"] * (1 - unscaled)


def _yarn(frequencies: list[float], base: float, size: int, scaling: Json, length: float) -> list[float]:
    """Scale all waves, with a linear ramp between the pairs of channels that turn beta_fast and beta_slow times."""

    def pair_with(turns: float) -> float:
        """Return the index of the pair of channels with this number of turns in `length`."""
        return size / 2 * math.log(length / (2 * math.pi * turns), base)

    first = pair_with(scaling.get("beta_fast") or 32)
    last = pair_with(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    if last == first:
        last += 0.001
    scaled = []
    for i, frequency in enumerate(frequencies):
        stretched = min(max((i - first) / (last - first), 0.0), 1.0)
        scaled.append(frequency * (1 - stretched) + frequency / scaling["factor"] * stretched)
    return scaled


def _yarn_magnitude(scaling: Json) -> float:
    if scaling.get("attention_factor") is not None:
        return scaling["attention_factor"]
    if scaling["factor"] <= 1:
        return 1.0
    mscale, mscale_all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    if not mscale or not mscale_all_dim:
        mscale, mscale_all_dim = 1.0, 0.0
    log_factor = 0.1 * math.log(scaling["factor"])
    return (mscale * log_factor + 1) / (mscale_all_dim * log_factor + 1)


def model(config: Json, imported: ModelConfig) -> ModelConfig:
    """Return the imported model, with every option that changes the function of a layer read again from `config`."""
    family = config["model_type"]
    options: Json = {"norm_epsilon": config.get(*EPSILON.get(family, ("rms_norm_eps", 1e-6)))}
    if family == "gpt_oss":
        options["activation"] = "clamped_swiglu"
    elif family.startswith("gemma"):
        assert config.get("hidden_activation", "gelu_pytorch_tanh") in GEMMA_ACTIVATIONS
        options |= {
            "activation": "geglu",
            "sandwich_norm": True,
            "embedding_multiplier": math.sqrt(config["hidden_size"]),
            "qk_layernorm": family != "gemma2",
            "attn_logit_softcapping": config.get("attn_logit_softcapping", 50.0) if family == "gemma2" else None,
            "final_logit_softcapping": config.get("final_logit_softcapping", 30.0 if family == "gemma2" else None),
            "softmax_scale": 1 / math.sqrt(config.get("query_pre_attn_scalar", 256)),
        }
    elif family == "gpt2":
        options["activation"] = ACTIVATIONS[config.get("activation_function", "gelu_new") or "silu"]
    else:
        default = "gelu" if family == "gpt_neox" else "silu"
        options["activation"] = ACTIVATIONS[config.get("hidden_act") or default]
    if family == "gpt_neox":
        options["parallel_residual"] = config.get("use_parallel_residual", True)
    if family in EXPERTS_PER_TOKEN:
        options["moe_router_topk"] = config.get("num_experts_per_tok", EXPERTS_PER_TOKEN[family])
        normalizes_topk = family in ("mixtral", "gpt_oss") or config.get("norm_topk_prob", False)
        options["moe_router_pre_softmax"] = not normalizes_topk
    options |= _windows(config, family, imported.num_layers)
    return replace(imported, **options)


def _windows(config: Mapping[str, Any], family: str, num_layers: int) -> Json:
    """Return the options of sliding windows.

    In a layer with a window, query i sees the keys i - sliding_window + 1 to i.
    """
    window = config.get("sliding_window", WINDOW.get(family))
    has_window = _layers_with_window(config, family, num_layers)
    if window is None or not any(has_window):
        return {"window_size": None, "window_attn_skip_freq": None}
    return {"window_size": (window - 1, 0), "window_attn_skip_freq": str([int(windowed) for windowed in has_window])}


def _layers_with_window(config: Mapping[str, Any], family: str, num_layers: int) -> list[bool]:
    """Return True for each layer with a window."""
    by_type = [layer_type == "sliding_attention" for layer_type in config.get("layer_types") or ()]
    window = config.get("sliding_window", WINDOW.get(family))
    if family in ("mistral", "mixtral"):
        return [window is not None] * num_layers
    if family in ("gpt_oss", "gemma2"):
        return by_type or [layer % 2 == 0 for layer in range(num_layers)]
    if family == "gemma3_text":
        every = config.get("sliding_window_pattern", 6)
        return by_type or [layer % every != every - 1 for layer in range(num_layers)]
    if family in ("qwen2", "qwen3") and config.get("use_sliding_window"):
        first = config.get("max_window_layers", 28)
        return by_type or [window is not None and layer >= first for layer in range(num_layers)]
    return [False] * num_layers
