"""A second reading of a Hugging Face config.json, for tools/verification/independent_import.py.

It shares nothing with megalite/interop: keys and defaults stand here once more, in another form, after the source of
transformers. The rotary wavelengths are numbers here, not options, so that a wrong option shows too.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megalite.config.options import ModelConfig

Json = dict[str, Any]
EPSILON = {"gpt2": ("layer_norm_epsilon", 1e-5), "gpt_neox": ("layer_norm_eps", 1e-5)}
EPSILON |= dict.fromkeys(("mixtral", "gpt_oss", "olmoe"), ("rms_norm_eps", 1e-5))
BASE = {"mixtral": 1e6, "gpt_oss": 1.5e5}
CHOSEN = {"mixtral": 2, "gpt_oss": 4, "olmoe": 8, "qwen2_moe": 4, "qwen3_moe": 8}
GPT_OSS_SCALING = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": False}
ACTIVATIONS = {
    "silu": "swiglu",
    "gelu": "gelu_erf",
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "gelu_fast": "gelu",
}


class Waves(NamedTuple):
    """`inverse`: radians per position of each pair of channels, [R / 2]; cosines and sines are times `magnitude`."""

    inverse: list[float]
    magnitude: float

    def tables(self, length: int) -> tuple[Tensor, Tensor]:
        """cos and sin of the first `length` positions, in fp64."""
        angles = torch.arange(length, dtype=torch.float64)[:, None] * torch.tensor(self.inverse, dtype=torch.float64)
        return angles.cos() * self.magnitude, angles.sin() * self.magnitude


def read(folder: Path) -> Json:
    return json.loads((folder / "config.json").read_text("utf-8"))


def waves(config: Json) -> Waves | None:
    """None for a model without rotary positions."""
    kind = config["model_type"]
    if kind == "gpt2":
        return None
    neox = kind == "gpt_neox"
    table = dict(config.get("rope_scaling") or {})
    if not table:
        fallback = GPT_OSS_SCALING if kind == "gpt_oss" else {}
        table = dict(fallback if config.get("rope_parameters") is None else config["rope_parameters"])
    size = config.get("head_dim") or (64 if kind == "gpt_oss" else 128 if kind == "qwen3" else None)
    size = size or config["hidden_size"] // config["num_attention_heads"]
    if neox:
        size = int(size * table.get("partial_rotary_factor", config.get("rotary_pct", 0.25)))
    base = table.get("rope_theta", config.get("rotary_emb_base" if neox else "rope_theta", BASE.get(kind, 10000.0)))
    inverse = [base ** (-2 * i / size) for i in range((size + 1) // 2)]
    stretch = table.get("rope_type", table.get("type", "default"))
    if stretch == "default":
        return Waves(inverse, 1.0)
    if stretch == "linear":
        return Waves([one / table["factor"] for one in inverse], 1.0)
    length = table.get("original_max_position_embeddings", config["max_position_embeddings"])
    length = config.get("original_max_position_embeddings", length)
    if stretch == "llama3":
        return Waves([_llama3(one, table, length) for one in inverse], 1.0)
    return Waves(_yarn(inverse, base, size, table, length), _magnitude(table))


def _llama3(one: float, table: Json, length: float) -> float:
    """With fewer than low_freq_factor turns in `length` a wave is stretched, with more than high_freq_factor kept."""
    turns, low, high = length * one / (2 * math.pi), table["low_freq_factor"], table["high_freq_factor"]
    kept = min(max((turns - low) / (high - low), 0.0), 1.0)
    return one * kept + one / table["factor"] * (1 - kept)


def _yarn(inverse: list[float], base: float, size: int, table: Json, length: float) -> list[float]:
    fast, slow = table.get("beta_fast") or 32, table.get("beta_slow") or 1
    # the number of the pair of channels that turns so often in `length`
    first, last = (size / 2 * math.log(length / (2 * math.pi * turns), base) for turns in (fast, slow))
    if table.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    last = last if last != first else last + 0.001
    stretched = [min(max((i - first) / (last - first), 0.0), 1.0) for i in range(len(inverse))]
    return [one * (1 - part) + one / table["factor"] * part for one, part in zip(inverse, stretched, strict=True)]


def _magnitude(table: Json) -> float:
    if table.get("attention_factor") is not None:
        return table["attention_factor"]
    if table["factor"] <= 1:
        return 1.0
    one, other = table.get("mscale"), table.get("mscale_all_dim")
    if not one or not other:
        one, other = 1.0, 0.0
    return (0.1 * one * math.log(table["factor"]) + 1) / (0.1 * other * math.log(table["factor"]) + 1)


def model(config: Json, first: ModelConfig) -> ModelConfig:
    """`first`, which the importer made, with what changes the function of a layer read again."""
    kind = config["model_type"]
    again: Json = {"norm_epsilon": config.get(*EPSILON.get(kind, ("rms_norm_eps", 1e-6)))}
    named = config.get("activation_function", "gelu_new") if kind == "gpt2" else config.get("hidden_act")
    named = named or ("gelu" if kind == "gpt_neox" else "silu")
    again["activation"] = "clamped_swiglu" if kind == "gpt_oss" else ACTIVATIONS[named]
    if kind == "gpt_neox":
        again["parallel_residual"] = config.get("use_parallel_residual", True)
    if kind in CHOSEN:
        again["moe_router_topk"] = config.get("num_experts_per_tok", CHOSEN[kind])
        normed = kind in ("mixtral", "gpt_oss") or config.get("norm_topk_prob", False)
        again["moe_router_pre_softmax"] = not normed
    again |= _windows(config, kind, first.num_layers)
    return replace(first, **again)


def _windows(config: Mapping[str, Any], kind: str, layers: int) -> Json:
    """Query i sees keys i - sliding_window + 1 to i in the layers that have it."""
    window, types = config.get("sliding_window", {"mistral": 4096, "gpt_oss": 128}.get(kind)), config.get("layer_types")
    if kind in ("mistral", "mixtral"):
        limited = [window is not None] * layers
    elif kind == "gpt_oss":
        limited = [t == "sliding_attention" for t in types] if types else [n % 2 == 0 for n in range(layers)]
    elif kind in ("qwen2", "qwen3") and config.get("use_sliding_window"):
        window = config.get("sliding_window", 4096)
        late = [window is not None and n >= config.get("max_window_layers", 28) for n in range(layers)]
        limited = [t == "sliding_attention" for t in types] if types else late
    else:
        limited = [False] * layers
    if window is None or not any(limited):
        return {"window_size": None, "window_attn_skip_freq": None}
    return {"window_size": (window - 1, 0), "window_attn_skip_freq": str([int(one) for one in limited])}
