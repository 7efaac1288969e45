"""Mamba-2 mixers: transformers' as a reference, generation from states, communicated and saved elements.

Layouts are rows of tests/layouts/layouts.toml.
"""

from typing import Any

import pytest
import torch
from recurrent_cases import (
    B,
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

D, G, H, P, N, W = 24, 2, 4, 12, 5, 4
SIZES = f"""--hidden-size {D} --hybrid-layer-pattern M --mamba-num-groups {G} --mamba-num-heads {H} --mamba-head-dim {P}
 --mamba-state-dim {N}"""


def _reference(mixer: Any, dtype: torch.dtype) -> tuple[Any, dict[str, Tensor]]:
    """Return transformers' mixer with the same weights, and its weights as functions of the mixer's."""
    from transformers import Mamba2Config
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Mixer

    config = Mamba2Config(
        hidden_size=D, num_heads=H, head_dim=P, state_size=N, n_groups=G, conv_kernel=W, expand=2, chunk_size=16,
        layer_norm_epsilon=1e-2, use_bias=False, use_conv_bias=True, num_hidden_layers=1,
    )  # fmt: skip
    reference = Mamba2Mixer(config, 0).to(dtype)
    weights = {
        "in_proj.weight": torch.cat([mixer.z, mixer.x, mixer.bc.flatten(0, 1), mixer.dt]),
        "conv1d.weight": torch.cat([mixer.conv_x, mixer.conv_bc.flatten(0, 1)]).unsqueeze(1),
        "conv1d.bias": torch.cat([mixer.conv_x_bias, mixer.conv_bc_bias.flatten()]),
        "A_log": mixer.A_log,
        "dt_bias": mixer.dt_bias,
        "D": mixer.D,
        "norm.weight": mixer.out_norm,
        "out_proj.weight": mixer.out,
    }
    reference.load_state_dict({name: weight.detach() for name, weight in weights.items()})
    return reference, weights


@pytest.mark.parametrize("dtype,tolerance", [(torch.float32, 5e-6), (torch.float64, 1e-11)])
def test_mamba2_equals_that_of_transformers(dtype: torch.dtype, tolerance: float) -> None:
    """Compare the output and all gradients; transformers casts to fp32, which is replaced by fp64 for the second."""
    mixer = mixer_of(SIZES, dtype)
    disturb(mixer)
    reference, weights = _reference(mixer, dtype)
    x, _ = random_x_and_dy(D, dtype)
    hf_x = x.transpose(0, 1).clone().requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        if dtype == torch.float64:
            patch.setattr(torch.Tensor, "float", torch.Tensor.double)
            patch.setattr(torch, "float32", torch.float64)
        hf_y = reference(hf_x)
    compare_with_transformers(mixer, reference, weights, hf_y, hf_x, lambda _: tolerance)


def test_initial_weights_are_those_of_the_paper() -> None:
    """Decay rates are uniform in [1, 16], time steps log-uniform in [0.001, 0.1]; no gate has weight decay."""
    mixer = mixer_of(f"{SIZES} --mamba-num-heads 4000 --mamba-head-dim 1 --mamba-num-groups 1")
    rates, steps = mixer.A_log.exp(), torch.nn.functional.softplus(mixer.dt_bias)
    assert 1 <= rates.min() < 1.1 and 15.9 < rates.max() <= 16
    assert 0.000999 <= steps.min() < 0.00101 and 0.099 < steps.max() <= 0.1001
    assert steps.log().mean().exp().item() == pytest.approx(0.01, rel=0.1)
    assert (mixer.D == 1).all()
    decaying = {name for name, weight in mixer.named_parameters() if spec_of(weight).weight_decay}
    assert decaying == {"x", "bc", "z", "dt", "conv_x", "conv_bc", "out"}
    matrices = {name for name, weight in mixer.named_parameters() if spec_of(weight).is_matrix}
    assert matrices == decaying - {"conv_x", "conv_bc"}
    in_fp32 = {name for name, weight in mixer.named_parameters() if spec_of(weight).keep_fp32}
    assert in_fp32 == {"A_log", "dt_bias", "D"}


def test_generation_from_states_equals_the_full_sequence() -> None:
    state, earlier = generate_in_passes(mixer_of(SIZES), D)
    assert state.shape == (B, H, N, P) and earlier.shape == (W - 1, B, H * P + 2 * G * N)


NEMOTRON_H_8B = """--num-layers 1 --hidden-size 4096 --num-attention-heads 32 --seq-length 1024 --bf16
 --micro-batch-size 1 --lr 1 --train-iters 1 --mock-data --vocab-size 1000 --attention-dropout 0 --hidden-dropout 0
 --normalization RMSNorm --position-embedding-type none --hybrid-layer-pattern M"""
LENGTH, HIDDEN, HEADS, GROUPS, STATE, CHANNELS = 1024, 4096, 128, 8, 128, 64
WIDTH, CONVOLVED = HEADS * CHANNELS, HEADS * CHANNELS + 2 * GROUPS * STATE


def test_saved_activations_equal_the_formulas() -> None:
    """The formulas are in nn/mamba2.py; x is saved before and after its norm, whose statistics are fp32."""
    half = 2 * HIDDEN + 2 * CONVOLVED + 3 * WIDTH
    states = 4 * HEADS * STATE * CHANNELS // 512
    taps_and_biases = 2 * CONVOLVED * (W + 1)
    exp_A, its_negative = 4 * HEADS, 4 * HEADS
    expected = LENGTH * (2 * half + 4 * (3 * HEADS + 1) + states) + taps_and_biases + exp_A + its_negative
    assert layer_cost(NEMOTRON_H_8B).saved_bytes == expected
    recomputed = LENGTH * (2 * (2 * HIDDEN + CONVOLVED + 2 * WIDTH + HEADS) + 4)
    assert layer_cost(NEMOTRON_H_8B, recompute_modules=("mamba",)).saved_bytes == recomputed


def test_flops_equal_the_formula() -> None:
    """A chunk has 64 tokens, whose scores the kernels compute for each head."""
    projections = HIDDEN * (2 * WIDTH + 2 * GROUPS * STATE + HEADS) + WIDTH * HIDDEN
    scores = HEADS * 64 * STATE
    scan = HEADS * (64 * CHANNELS + 2 * STATE * CHANNELS)
    expected = 2 * (projections + scores + scan)
    assert layer_cost(NEMOTRON_H_8B).flops[0] / LENGTH == expected


@pytest.mark.parametrize("cp,tp", [(2, 1), (4, 2), (8, 1)])
def test_context_parallelism_exchanges_one_column_for_a_diagonal_map(cp: int, tp: int) -> None:
    """All layers are recurrent, so each rank has one range of positions; three tokens precede its two chunks."""
    maps, states = (4 * HEADS // tp * STATE * channels for channels in (1 + CHANNELS, CHANNELS))
    borders = 2 * 2 * cp * 3 * CONVOLVED // tp
    cost = layer_cost(f"{NEMOTRON_H_8B} --cp-comm-type allgather", cp=cp, tp=tp)
    assert collectives(cost, "cp") == collectives_of_maps(cp, maps, states, borders)


def test_tensor_parallelism_gathers_once_for_four_weights() -> None:
    assert collectives(layer_cost(NEMOTRON_H_8B, tp=8), "tp") == collectives_of_one_gather(2 * LENGTH * HIDDEN)


@pytest.mark.parametrize("cp,tp,groups_per_rank", [(2, 1, 4), (4, 2, 1), (8, 1, 1), (8, 2, 1), (16, 8, 1)])
def test_context_parallelism_exchanges_tokens_for_heads(cp: int, tp: int, groups_per_rank: int) -> None:
    """Several ranks share each group in the last two cases."""
    heads = HEADS // (cp * tp)
    channels = heads * CHANNELS + 2 * groups_per_rank * STATE + heads
    cost = layer_cost(f"{NEMOTRON_H_8B} --cp-comm-type a2a", cp=cp, tp=tp)
    assert collectives(cost, "cp") == collectives_of_heads(2 * LENGTH * channels, 2 * LENGTH * heads * CHANNELS)
