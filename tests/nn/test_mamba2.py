"""Mamba-2 mixers: transformers' as a reference, generation from states, communicated and saved elements.

Layouts are rows of tests/layouts/layouts.toml.
"""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from train_cases import config_from, stage_from

from megalite.generate.generation import KVCache
from megalite.nn.micro_batch import Batch, ForwardContext
from megalite.nn.parameter import spec_of
from megalite.planning.layer_cost import CommStart, LayerCost
from megalite.planning.layer_kinds import LayerSetting, layer_kinds, layers_cost, single_document_sharding

D, G, H, P, N, W = 24, 2, 4, 12, 5, 4
S, B = 70, 3
LINE = f"""--num-layers 1 --hidden-size {D} --num-attention-heads 4 --seq-length {S} --hybrid-layer-pattern M
 --mamba-num-groups {G} --mamba-num-heads {H} --mamba-head-dim {P} --mamba-state-dim {N} --micro-batch-size {B}
 --train-iters 1 --lr 1 --mock-data --vocab-size 64 --init-method-std 0.3 --hidden-dropout 0 --attention-dropout 0
 --normalization RMSNorm --norm-epsilon 1e-2 --position-embedding-type rope"""


def _mixer(dtype: torch.dtype = torch.float64, flags: str = "") -> Any:
    return stage_from(f"{LINE} {flags}", dtype).blocks[0].mixer


def _batch() -> Batch:
    return Batch(torch.zeros(S, B, dtype=torch.int64), None, None, torch.arange(B))


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
    mixer = _mixer(dtype)
    weights = dict(mixer.named_parameters())
    for number, weight in enumerate(weights.values()):
        weight.data.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(number)) * 0.1)
    reference, expected_weights = _reference(mixer, dtype)
    x_SBD, dy_SBD = torch.randn(2, S, B, D, generator=torch.Generator().manual_seed(1)).to(dtype).unbind(0)
    x, hf_x = x_SBD.clone().requires_grad_(), x_SBD.transpose(0, 1).clone().requires_grad_()
    y = mixer(x, _batch(), ForwardContext())
    dx, *grads = torch.autograd.grad(y, [x, *weights.values()], dy_SBD)
    hf_weights = [dict(reference.named_parameters())[name] for name in expected_weights]
    with pytest.MonkeyPatch.context() as patch:
        if dtype == torch.float64:
            patch.setattr(torch.Tensor, "float", torch.Tensor.double)
            patch.setattr(torch, "float32", torch.float64)
        hf_y = reference(hf_x)
    hf_dx, *hf_grads = torch.autograd.grad(hf_y, [hf_x, *hf_weights], dy_SBD.transpose(0, 1))
    assert hf_y.dtype == dtype
    _assert_close(y, hf_y.transpose(0, 1), "y", tolerance)
    _assert_close(dx, hf_dx.transpose(0, 1), "dx", tolerance)
    # the gradients of the same function of the weights: those of transformers' layout, through the reordering
    expected = torch.autograd.grad([*expected_weights.values()], [*weights.values()], hf_grads)
    for name, grad, hf_grad in zip(weights, grads, expected, strict=True):
        _assert_close(grad, hf_grad, name, tolerance)


def _assert_close(actual: Tensor, expected: Tensor, name: str, tolerance: float) -> None:
    """Compare relative to the largest element; sums have different orders."""
    scale = expected.abs().max()
    error = ((actual - expected) / scale).abs().max().item()
    assert error <= tolerance, f"{name}: {error}"


def test_initial_weights_are_those_of_the_paper() -> None:
    """Decay rates are uniform in [1, 16], time steps log-uniform in [0.001, 0.1]; no gate has weight decay."""
    mixer = _mixer(flags="--mamba-num-heads 4000 --mamba-head-dim 1 --mamba-num-groups 1")
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
    """Samples continue from different lengths, a few tokens at a time; the rest of a pass is padding."""
    mixer = _mixer()
    mixer.eval()
    x_SBD = torch.randn(S, B, D, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = mixer(x_SBD, _batch(), ForwardContext())
        cache = KVCache(S)
        starts_B = torch.zeros(B, dtype=torch.int64)
        samples_B = torch.arange(B)
        for length, num_new in ((21, [21, 20, 2]), (1, [1, 1, 1]), (3, [3, 1, 0]), (4, [0, 4, 4]), (1, [1, 1, 1])):
            num_new_B = torch.tensor(num_new)
            positions_SB = starts_B + torch.arange(length)[:, None]
            cache.set_positions(positions_SB, torch.device("cpu"), num_new_B)
            is_new = torch.arange(length)[:, None] < num_new_B
            x = x_SBD[positions_SB, samples_B].where(is_new[..., None], 1e3)  # padding has other numbers
            y = mixer(x, _batch(), ForwardContext(cache=cache))
            torch.testing.assert_close(y[is_new], expected[positions_SB, samples_B][is_new], rtol=1e-10, atol=1e-10)
            starts_B = starts_B + num_new_B
    state, earlier = cache.states[0]
    assert state.shape == (B, H, N, P) and earlier.shape == (W - 1, B, H * P + 2 * G * N)


NEMOTRON_H_8B = """--num-layers 1 --hidden-size 4096 --num-attention-heads 32 --seq-length 1024 --bf16
 --micro-batch-size 1 --lr 1 --train-iters 1 --mock-data --vocab-size 1000 --attention-dropout 0 --hidden-dropout 0
 --normalization RMSNorm --position-embedding-type none --hybrid-layer-pattern M"""
LENGTH, HIDDEN, HEADS, GROUPS, STATE, CHANNELS = 1024, 4096, 128, 8, 128, 64
WIDTH, CONVOLVED = HEADS * CHANNELS, HEADS * CHANNELS + 2 * GROUPS * STATE


def _cost(flags: str = "", tp: int = 1, cp: int = 1, **options: Any) -> LayerCost:
    model = config_from(f"{NEMOTRON_H_8B} {flags}").model
    sharding = single_document_sharding(model, cp)
    setting = LayerSetting(tp, 1, torch.bfloat16, cp_sharding=sharding, **options)
    return layers_cost(layer_kinds(model), setting)


def test_saved_activations_equal_the_formulas() -> None:
    """The formulas are in nn/mamba2.py; x is saved before and after its norm, whose statistics are fp32."""
    half = 2 * HIDDEN + 2 * CONVOLVED + 3 * WIDTH
    states = 4 * HEADS * STATE * CHANNELS // 512
    taps_and_biases = 2 * CONVOLVED * (W + 1)
    exp_A, its_negative = 4 * HEADS, 4 * HEADS
    expected = LENGTH * (2 * half + 4 * (3 * HEADS + 1) + states) + taps_and_biases + exp_A + its_negative
    assert _cost().saved_bytes == expected
    recomputed = LENGTH * (2 * (2 * HIDDEN + CONVOLVED + 2 * WIDTH + HEADS) + 4)
    assert _cost(recompute_modules=("mamba",)).saved_bytes == recomputed


def test_flops_equal_the_formula() -> None:
    """A chunk has 64 tokens; products with a triangle of ones, which sum decays, count as well."""
    projections = HIDDEN * (2 * WIDTH + 2 * GROUPS * STATE + HEADS) + WIDTH * HIDDEN
    scores = GROUPS * 64 * STATE + HEADS * 64 * 64
    scan = HEADS * (64 * CHANNELS + 2 * STATE * CHANNELS)
    assert _cost().flops[0] / LENGTH == pytest.approx(2 * (projections + scores + scan), rel=0.01)


def _collectives(cost: LayerCost, axis: str) -> Counter[Any]:
    events = [event for event in cost.trace if isinstance(event, CommStart) and event.axis == axis]
    return Counter((event.phase, event.op, event.num_bytes) for event in events)


@pytest.mark.parametrize("cp,tp", [(2, 1), (4, 2), (8, 1)])
def test_context_parallelism_gathers_one_column_for_a_diagonal_map(cp: int, tp: int) -> None:
    """All layers are recurrent, so each rank has one range of positions; three tokens precede its two chunks."""
    maps = 4 * cp * HEADS // tp * STATE * (1 + CHANNELS)
    borders = 2 * 2 * cp * 3 * CONVOLVED // tp
    expected = {
        ("F", "all-gather", borders): 1,
        ("F", "all-gather", maps): 1,
        ("B", "all-gather", maps): 1,
        ("B", "reduce-scatter", borders): 1,
    }
    assert _collectives(_cost(cp=cp, tp=tp), "cp") == expected


def test_tensor_parallelism_gathers_once_for_four_weights() -> None:
    x = 2 * LENGTH * HIDDEN
    expected = {
        ("F", "all-gather", x): 1,
        ("F", "reduce-scatter", x): 1,
        ("B", "all-gather", x): 2,
        ("B", "reduce-scatter", x): 1,
    }
    assert _collectives(_cost(tp=8), "tp") == expected
