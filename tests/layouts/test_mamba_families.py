"""Ten steps of a small Mamba-2 and Nemotron-H equal those of transformers' models with torch's AdamW.

Mamba-2 has no other layers, and its head is tied. Nemotron-H has Mamba-2 mixers, attention, MLPs with the square of
ReLU, and experts, each as a layer with one norm. Both programs have the same initial weights and the same tokens.
`transformers_weights` names and orders the weights by itself, so that nothing is shared with megalite's conversion.
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
HEADS, GROUPS, STATE, CHANNELS = 8, 2, 5, 8  # of a Mamba-2 mixer
MIXER = f"""--normalization RMSNorm --norm-epsilon 0.01 --position-embedding-type none --disable-bias-linear
 --hidden-dropout 0 --attention-dropout 0 --mamba-num-heads {HEADS} --mamba-num-groups {GROUPS}
 --mamba-state-dim {STATE} --mamba-head-dim {CHANNELS} --train-iters {STEPS} --lr {LR} --micro-batch-size 4"""
PATTERNS = {"mamba2": "MMMM", "nemotron_h": "M-M*EM-"}
FLAGS = {
    "mamba2": f"{COMMON} {MIXER} --hybrid-layer-pattern {PATTERNS['mamba2']}",
    "nemotron_h": f"""{COMMON} {MIXER} --hybrid-layer-pattern {PATTERNS["nemotron_h"]} --squared-relu
 --untie-embeddings-and-output-weights --group-query-attention --num-query-groups 2 --ffn-hidden-size 48
 --num-experts 8 --moe-router-topk 3 --moe-ffn-hidden-size 12 --moe-shared-expert-intermediate-size 16
 --moe-router-score-function sigmoid --moe-router-topk-scaling-factor 2.5 --moe-router-load-balancing-type none""",
}
GUARDS = (
    "megalite/nn/mamba2.py",
    "megalite/nn/recurrent_mixer.py",
    "megalite/nn/recurrent_context_parallel.py",
    "megalite/kernels/delta_rule.py",
)
LAYOUTS = [("mamba2", layout) for layout in ("tp2", "pp2", "cp2", "ZERO3")]
LAYOUTS += [("nemotron_h", layout) for layout in ("tp2", "pp2", "cp2", "ZERO3", "ep2")]

NAMES = {
    "mamba2.A_log": "A_log",
    "mamba2.D": "D",
    "mamba2.dt_bias": "dt_bias",
    "mamba2.out_norm": "norm.weight",
    "mamba2.out": "out_proj.weight",
    "attention.q": "q_proj.weight",
    "attention.out": "o_proj.weight",
    "mlp.up": "up_proj.weight",
    "mlp.down": "down_proj.weight",
    "mlp.router": "gate.weight",
    "mlp.experts.up": "experts.up_proj",
    "mlp.experts.down": "experts.down_proj",
    "mlp.shared.up": "shared_experts.up_proj.weight",
    "mlp.shared.down": "shared_experts.down_proj.weight",
}


def _mixer_weights(part: str, weights: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return the weights of a mixer, or of an MLP, under the names of transformers' mixers."""
    result = {NAMES[name]: values for name, values in weights.items() if name in NAMES}
    if part == "mamba2":
        z, x, bc, dt = (weights[f"mamba2.{name}"] for name in ("z", "x", "bc", "dt"))
        result["in_proj.weight"] = torch.cat([z, x, *bc, dt])
        result["conv1d.weight"] = torch.cat([weights["mamba2.conv_x"], *weights["mamba2.conv_bc"]]).unsqueeze(1)
        result["conv1d.bias"] = torch.cat([weights["mamba2.conv_x_bias"], *weights["mamba2.conv_bc_bias"]])
    elif part == "attention":
        result["k_proj.weight"], result["v_proj.weight"] = weights["attention.kv"]
    return result


def transformers_weights(weights: dict[str, Tensor], family: str) -> dict[str, Tensor]:
    """Return the weights of a megalite model under transformers' names."""
    body = {"mamba2": "backbone", "nemotron_h": "model"}[family]
    result = {
        f"{body}.embeddings.weight": weights["embedding.word"],
        "lm_head.weight": weights.get("head", weights["embedding.word"]),
        f"{body}.norm_f.weight": weights["final_norm.weight"],
    }
    number, previous = -1, ""
    for position, letter in enumerate(PATTERNS[family]):
        part = {"M": "mamba2", "*": "attention"}.get(letter, "mlp")
        number += part != "mlp" or previous == "mlp"  # an MLP is in the layer of the mixer before it
        previous = part
        prefix = f"layers.{number}."
        own = {name.removeprefix(prefix): x for name, x in weights.items() if name.startswith(f"{prefix}{part}.")}
        result[f"{body}.layers.{position}.norm.weight"] = own[f"{part}.norm.weight"]
        mixer = _mixer_weights(part, own)
        result |= {f"{body}.layers.{position}.mixer.{name}": values for name, values in mixer.items()}
        if letter == "E":  # the experts' biases are 0
            result[f"{body}.layers.{position}.mixer.gate.e_score_correction_bias"] = torch.zeros(8)
    return result


def build_transformers_model(family: str, dtype: torch.dtype) -> Any:
    from transformers import AutoModelForCausalLM, Mamba2Config, NemotronHConfig

    shape: dict[str, Any] = dict(vocab_size=VOCAB_SIZE, hidden_size=32, layer_norm_epsilon=0.01, n_groups=GROUPS)
    shape["chunk_size"] = 8  # shorter than the sequences; with longer chunks, it pads them
    if family == "mamba2":
        config: Any = Mamba2Config(
            **shape, num_hidden_layers=4, num_heads=HEADS, head_dim=CHANNELS, state_size=STATE, tie_word_embeddings=True
        )
    else:
        kinds = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
        config = NemotronHConfig(
            **shape,
            layers_block_type=[kinds[letter] for letter in PATTERNS[family]],
            mamba_num_heads=HEADS,
            mamba_head_dim=CHANNELS,
            ssm_state_size=STATE,
            time_step_min=1e-30,  # shorter time steps would be raised to it
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            intermediate_size=48,
            n_routed_experts=8,
            num_experts_per_tok=3,
            moe_intermediate_size=12,
            moe_shared_expert_intermediate_size=16,
            routed_scaling_factor=2.5,
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

    def rename(weights: dict[str, Tensor]) -> dict[str, Tensor]:
        names = transformers_weights(weights, family)
        return {name: values for name, values in names.items() if not name.endswith("e_score_correction_bias")}

    assert_equal_steps(ranks, expected, reference(family, torch.float32)[0], rename, fp32_tolerance=5e-6)


@pytest.mark.parametrize("family", FLAGS)
def test_one_process_equals_transformers(family: str) -> None:
    _assert_equals_transformers(family, [train_rank(FLAGS[family])])


@pytest.mark.parametrize(
    "family_and_layout", nightly_except(LAYOUTS, [("mamba2", "cp2"), ("nemotron_h", "tp2")], " ".join, guards=GUARDS)
)
def test_layout_equals_transformers(family_and_layout: tuple[str, str]) -> None:
    family, layout = family_and_layout
    flags = f"{FLAGS[family]} {expand(layout)}"
    _assert_equals_transformers(family, run_ranks(2, train_rank, flags, timeout=150))
