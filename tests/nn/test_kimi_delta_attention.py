"""Kimi delta attention: transformers' as a reference, generation from states, communicated and saved elements.

Layouts are rows of tests/layouts/layouts.toml.
"""

from typing import Any

import pytest
import torch
from recurrent_cases import (
    B,
    assert_gradients_in_fp32_are_close,
    collectives,
    collectives_of_heads,
    collectives_of_maps,
    collectives_of_one_gather,
    compare_with_transformers,
    disturb,
    generate_in_passes,
    layer_cost,
    mixer_of,
    random_x_and_dy,
)
from torch import Tensor

from megalite.nn.parameter import spec_of

D, H, K, W = 32, 4, 6, 4
SIZES = f"""--hidden-size {D} --hybrid-layer-pattern K --linear-num-key-heads {H} --linear-num-value-heads {H}
 --linear-key-head-dim {K} --linear-value-head-dim"""


def _reference(mixer: Any) -> tuple[Any, dict[str, Tensor]]:
    """Return transformers' module with the same weights, and its weights as functions of the mixer's."""
    from transformers import KimiLinearConfig
    from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDeltaAttention

    config = KimiLinearConfig(
        hidden_size=D, linear_head_dim=K, linear_num_heads=H, linear_conv_kernel_dim=W, rms_norm_eps=1e-2,
        num_hidden_layers=1, layer_types=["linear_attention"],
    )  # fmt: skip
    reference = KimiLinearDeltaAttention(config, 0).float()
    weights = {
        "q_proj.weight": mixer.qk[0],
        "k_proj.weight": mixer.qk[1],
        "v_proj.weight": mixer.v,
        "conv1d.weight": torch.cat([mixer.conv_qk.flatten(0, 1), mixer.conv_v]).unsqueeze(1),
        "b_proj.weight": mixer.b,
        "forget_gate.f_a_proj.weight": mixer.f_down,
        "forget_gate.f_b_proj.weight": mixer.f_up,
        "forget_gate.A_log": mixer.A_log.view(1, 1, H, 1),
        "forget_gate.dt_bias": mixer.dt_bias,
        "g_a_proj.weight": mixer.z_down,
        "g_b_proj.weight": mixer.z_up,
        "o_norm.weight": mixer.out_norm,
        "o_proj.weight": mixer.out,
    }
    reference.load_state_dict({name: weight.detach() for name, weight in weights.items()})
    return reference, weights


@pytest.mark.parametrize("flags", ["", "--norm-epsilon 0.1 --linear-norm-epsilon 1e-2"])
def test_kimi_delta_attention_equals_that_of_transformers(flags: str) -> None:
    """Compare the output and all gradients in fp32, in which transformers always computes the recurrence."""
    mixer = mixer_of(f"{SIZES} {K} {flags}", torch.float32)
    disturb(mixer)
    reference, weights = _reference(mixer)
    x, _ = random_x_and_dy(D, torch.float32)
    hf_x = x.transpose(0, 1).clone().requires_grad_()

    def tolerance(name: str) -> float:
        # transformers subtracts running sums of decays, which loses digits of the gradients of the decay
        return 5e-5 if name in ("A_log", "dt_bias", "f_up", "f_down") else 5e-6

    compare_with_transformers(mixer, reference, weights, reference(hf_x), hf_x, tolerance)


def test_gradients_in_fp32_are_close_to_those_in_fp64() -> None:
    assert_gradients_in_fp32_are_close(f"{SIZES} 5", D, 2e-6)


def test_initial_weights_are_those_of_the_reference() -> None:
    """Decay rates are uniform in [1, 16], time steps log-uniform in [0.001, 0.1]; no gate has weight decay."""
    mixer = mixer_of(f"{SIZES} 1 --linear-num-key-heads 4000 --linear-num-value-heads 4000 --linear-key-head-dim 1")
    rates, steps = mixer.A_log.exp(), torch.nn.functional.softplus(mixer.dt_bias)
    assert 1 <= rates.min() < 1.1 and 15.9 < rates.max() <= 16
    assert 0.000999 <= steps.min() < 0.00101 and 0.099 < steps.max() <= 0.1001
    assert steps.log().mean().exp().item() == pytest.approx(0.01, rel=0.1)
    matrices = {"qk", "v", "b", "f_down", "f_up", "z_down", "z_up", "out"}
    specs = {name: spec_of(weight) for name, weight in mixer.named_parameters()}
    assert {name for name, spec in specs.items() if spec.is_matrix} == matrices
    assert {name for name, spec in specs.items() if spec.weight_decay} == matrices | {"conv_qk", "conv_v"}
    assert {name for name, spec in specs.items() if spec.keep_fp32} == {"A_log", "dt_bias"}


@pytest.mark.parametrize("flags", ["", "--linear-conv-kernel-dim 1"])
def test_generation_from_states_equals_the_full_sequence(flags: str) -> None:
    state, earlier = generate_in_passes(mixer_of(f"{SIZES} 5 {flags}"), D)
    assert state.shape == (B, H, K, 5) and earlier.shape == (0 if flags else W - 1, B, 2 * H * K + H * 5)


KIMI_LINEAR = """--num-layers 1 --hidden-size 2304 --num-attention-heads 32 --seq-length 1024 --bf16
 --micro-batch-size 1 --lr 1 --train-iters 1 --mock-data --vocab-size 1000 --attention-dropout 0 --hidden-dropout 0
 --swiglu --normalization RMSNorm --position-embedding-type none --hybrid-layer-pattern K --linear-num-key-heads 32"""
LENGTH, HIDDEN, WIDTH, HEADS = 1024, 2304, 32 * 128, 32


@pytest.mark.parametrize("key_dim,value_dim", [(128, 128), (64, 128), (128, 64)])
def test_saved_activations_equal_the_formulas(key_dim: int, value_dim: int) -> None:
    """The formulas are in nn/kimi_delta_attention.py; x is saved before and after its norm, with statistics in fp32."""
    flags = f"{KIMI_LINEAR} --linear-key-head-dim {key_dim} --linear-value-head-dim {value_dim}"
    keys, values = HEADS * key_dim, HEADS * value_dim
    states = 4 * HEADS * key_dim * value_dim // 512
    half = 2 * HIDDEN + 2 * (2 * keys + values) + 2 * value_dim + 2 * values
    taps = 2 * (2 * keys + values) * W
    exp_A, its_negative = 4 * HEADS, 4 * HEADS
    expected = LENGTH * (2 * half + 4 * (3 * keys + HEADS + 1) + states) + taps + exp_A + its_negative
    assert layer_cost(flags).saved_bytes == expected
    recomputed = LENGTH * (2 * (2 * HIDDEN + 2 * keys + 3 * values + 2 * value_dim + HEADS) + 4)
    assert layer_cost(flags, recompute_modules=("kda",)).saved_bytes == recomputed


def test_tensor_parallelism_gathers_once_for_five_weights() -> None:
    assert collectives(layer_cost(KIMI_LINEAR, tp=8), "tp") == collectives_of_one_gather(2 * LENGTH * HIDDEN)


@pytest.mark.parametrize("cp,tp", [(2, 1), (4, 2)])
def test_context_parallelism_scans_maps_of_states(cp: int, tp: int) -> None:
    maps, states = (4 * HEADS // tp * 128 * channels for channels in (128 + 128, 128))
    borders = 2 * 2 * cp * 3 * 3 * WIDTH // tp
    cost = layer_cost(f"{KIMI_LINEAR} --cp-comm-type allgather", cp=cp, tp=tp)
    assert collectives(cost, "cp") == collectives_of_maps(cp, maps, states, borders)


@pytest.mark.parametrize("cp,tp", [(2, 1), (4, 2)])
def test_context_parallelism_exchanges_tokens_for_heads(cp: int, tp: int) -> None:
    """Every rank gets the 128 channels of the first product of the decay."""
    heads = HEADS // (cp * tp)
    channels = 3 * heads * 128 + heads + 128
    cost = layer_cost(f"{KIMI_LINEAR} --cp-comm-type a2a", cp=cp, tp=tp)
    assert collectives(cost, "cp") == collectives_of_heads(2 * LENGTH * channels, 2 * LENGTH * heads * 128)
