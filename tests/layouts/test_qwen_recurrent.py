"""Ten steps of a small Qwen3-Next and Qwen3.5 equal those of transformers' models with torch's AdamW.

Each has three gated delta nets and a layer with gated attention. Qwen3-Next has a dense layer, and experts with a gated
shared expert; Qwen3.5 is dense, and its head is tied. Both programs have the same initial weights and the same tokens. `transformers_weights` names and orders the
weights by itself, so that nothing is shared with megalite's conversion.
"""

import functools
from typing import Any

import pytest
import torch
from hugging_face_cases import in_fp64
from layout_cases import COMMON, expand
from pairwise import nightly_except
from ranks import run_ranks
from torch import Tensor
from train_cases import run_from
from transformers_steps import (
    LR,
    STEPS,
    RankResult,
    assert_equal_steps,
    initial_weights,
    train_rank,
    train_transformers,
    training_batches,
)

VOCAB_SIZE = 94
KEY_HEADS, VALUE_HEADS, HEADS = 2, 4, 4
DENSE = f"""{COMMON} {expand("GDN")} --train-iters {STEPS} --lr {LR} --attention-output-gate --qk-layernorm
 --apply-layernorm-1p --rotary-percent 0.5"""
FLAGS = {
    "qwen3_next": f"""{DENSE} --num-experts 8 --moe-router-topk 3 --moe-ffn-hidden-size 12 --moe-layer-freq [0,1,1,1]
 --moe-shared-expert-intermediate-size 16 --moe-shared-expert-gate --moe-router-load-balancing-type none""",
    "qwen3_5_text": f"{DENSE} --no-untie-embeddings-and-output-weights",
}
GUARDS = (
    "megalite/nn/gated_delta_net.py",
    "megalite/nn/recurrent_mixer.py",
    "megalite/nn/recurrent_context_parallel.py",
    "megalite/nn/attention.py",
)
LAYOUTS = [("qwen3_next", layout) for layout in ("tp2", "pp2", "cp2", "ZERO3", "ep2")]
LAYOUTS += [("qwen3_5_text", layout) for layout in ("tp2", "pp2", "cp2", "ZERO3")]

NAMES = {
    "attention.norm.weight": "input_layernorm.weight",
    "attention.q_norm.weight": "self_attn.q_norm.weight",
    "attention.k_norm.weight": "self_attn.k_norm.weight",
    "attention.out": "self_attn.o_proj.weight",
    "gated_delta_net.norm.weight": "input_layernorm.weight",
    "gated_delta_net.A_log": "linear_attn.A_log",
    "gated_delta_net.dt_bias": "linear_attn.dt_bias",
    "gated_delta_net.out_norm": "linear_attn.norm.weight",
    "gated_delta_net.out": "linear_attn.out_proj.weight",
    "mlp.norm.weight": "post_attention_layernorm.weight",
    "mlp.down": "mlp.down_proj.weight",
    "mlp.router": "mlp.gate.weight",
    "mlp.shared.down": "mlp.shared_expert.down_proj.weight",
    "mlp.experts.down": "mlp.experts.down_proj",
}


def _by_head(heads: int, *weights: Tensor) -> Tensor:
    """Return the rows of weights in groups, each with the rows of one head of every weight."""
    return torch.cat([weight.unflatten(0, (heads, -1)) for weight in weights], 1).flatten(0, 1)


def _layer_weights(layer: dict[str, Tensor], family: str) -> dict[str, Tensor]:
    """Return the weights of a layer under transformers' names."""
    result = {NAMES[part]: values for part, values in layer.items() if part in NAMES}
    if "attention.q" in layer:
        result["self_attn.q_proj.weight"] = _by_head(HEADS, layer["attention.q"], layer["attention.gate"])
        result["self_attn.k_proj.weight"], result["self_attn.v_proj.weight"] = layer["attention.kv"]
    else:
        qk, ba, conv_qk = (layer[f"gated_delta_net.{part}"] for part in ("qk", "ba", "conv_qk"))
        v, z, conv_v = (layer[f"gated_delta_net.{part}"] for part in ("v", "z", "conv_v"))
        if family == "qwen3_next":
            result["linear_attn.in_proj_qkvz.weight"] = _by_head(KEY_HEADS, *qk, v, z)
            result["linear_attn.in_proj_ba.weight"] = _by_head(KEY_HEADS, *ba)
        else:
            result["linear_attn.in_proj_qkv.weight"], result["linear_attn.in_proj_z.weight"] = torch.cat([*qk, v]), z
            result["linear_attn.in_proj_b.weight"], result["linear_attn.in_proj_a.weight"] = ba
        result["linear_attn.conv1d.weight"] = torch.cat([*conv_qk, conv_v]).unsqueeze(1)
    if "mlp.gate_up" in layer:
        result["mlp.gate_proj.weight"], result["mlp.up_proj.weight"] = layer["mlp.gate_up"]
    else:
        result["mlp.experts.gate_up_proj"] = layer["mlp.experts.gate_up"].flatten(1, 2)
        gate, up = layer["mlp.shared.gate_up"]
        result["mlp.shared_expert.gate_proj.weight"], result["mlp.shared_expert.up_proj.weight"] = gate, up
        result["mlp.shared_expert_gate.weight"] = layer["mlp.shared_gate"].reshape(1, -1)
    return result


def transformers_weights(weights: dict[str, Tensor], family: str) -> dict[str, Tensor]:
    """Return the weights of a megalite model under transformers' names."""
    result = {
        "model.embed_tokens.weight": weights["embedding.word"],
        "lm_head.weight": weights.get("head", weights["embedding.word"]),
        "model.norm.weight": weights["final_norm.weight"],
    }
    for number in range(4):
        prefix = f"layers.{number}."
        layer = {name.removeprefix(prefix): values for name, values in weights.items() if name.startswith(prefix)}
        result |= {f"model.layers.{number}.{name}": values for name, values in _layer_weights(layer, family).items()}
    return result


def build_transformers_model(family: str, dtype: torch.dtype) -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM

    experts: dict[str, Any] = {}
    if family == "qwen3_next":
        experts = dict(num_experts=8, num_experts_per_tok=3, moe_intermediate_size=12, mlp_only_layers=[0])
        experts["shared_expert_intermediate_size"] = 16
    config = AutoConfig.for_model(
        family,
        vocab_size=VOCAB_SIZE,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=HEADS,
        num_key_value_heads=2,
        head_dim=8,
        rms_norm_eps=0.01,
        max_position_embeddings=16,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        linear_num_key_heads=KEY_HEADS,
        linear_num_value_heads=VALUE_HEADS,
        linear_key_head_dim=6,
        linear_value_head_dim=5,
        tie_word_embeddings=family == "qwen3_5_text",
        **experts,
    )
    config._experts_implementation = "eager"
    return AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="eager")


@functools.cache
def reference(family: str, dtype: torch.dtype) -> tuple[list[float], dict[str, Tensor]]:
    """Return the losses and final weights of transformers, from the initial weights of a run in `dtype`."""
    run = run_from(FLAGS[family], dtype=dtype)
    model = build_transformers_model(family, dtype)
    model.load_state_dict(transformers_weights(initial_weights(run), family))
    return train_transformers(model, training_batches(run))


def _assert_equals_transformers(family: str, ranks: list[RankResult]) -> None:
    with in_fp64():
        expected = reference(family, torch.float64)
    rename = functools.partial(transformers_weights, family=family)
    assert_equal_steps(ranks, expected, reference(family, torch.float32)[0], rename, fp32_tolerance=5e-6)


@pytest.mark.parametrize("family", FLAGS)
def test_one_process_equals_transformers(family: str) -> None:
    _assert_equals_transformers(family, [train_rank(FLAGS[family])])


@pytest.mark.parametrize(
    "family_and_layout",
    nightly_except(LAYOUTS, [("qwen3_next", "tp2"), ("qwen3_next", "cp2")], " ".join, guards=GUARDS),
)
def test_layout_equals_transformers(family_and_layout: tuple[str, str]) -> None:
    family, layout = family_and_layout
    _assert_equals_transformers(family, run_ranks(2, train_rank, f"{FLAGS[family]} {expand(layout)}"))
