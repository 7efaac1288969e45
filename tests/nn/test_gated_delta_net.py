"""Gated delta nets: transformers' as a reference, generation from states, communicated and saved elements.

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
from megalite.planning.layer_cost import CommStart, LayerCost
from megalite.planning.layer_kinds import LayerSetting, layer_kinds, layers_cost, single_document_sharding

D, G, H, K, V, W = 32, 2, 4, 6, 5, 4
S, B = 70, 3
SIZES = f"""--num-layers 1 --hidden-size {D} --num-attention-heads 4 --seq-length {S} --hybrid-layer-pattern G
 --linear-num-key-heads {G} --linear-num-value-heads {H} --linear-key-head-dim {K} --linear-value-head-dim {V}"""
LINE = f"""{SIZES} --micro-batch-size {B} --train-iters 1 --lr 1 --mock-data --vocab-size 64 --init-method-std 0.3
 --hidden-dropout 0 --attention-dropout 0 --normalization RMSNorm --norm-epsilon 1e-2 --position-embedding-type rope"""


def _mixer(dtype: torch.dtype = torch.float64, flags: str = "") -> Any:
    return stage_from(f"{LINE} {flags}", dtype).blocks[0].mixer


def _batch() -> Batch:
    return Batch(torch.zeros(S, B, dtype=torch.int64), None, None, torch.arange(B))


def _grouped_by_key_head(*weights: Tensor) -> Tensor:
    """Return the rows of weights as transformers orders them: those of a key head and its value heads together."""
    return torch.cat([weight.unflatten(0, (G, -1)) for weight in weights], 1).flatten(0, 1)


def test_gated_delta_net_equals_that_of_transformers() -> None:
    """Compare the output and all gradients in fp32, in which transformers always computes the recurrence."""
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    mixer = _mixer(torch.float32)
    config = Qwen3NextConfig(
        hidden_size=D, linear_num_key_heads=G, linear_num_value_heads=H, linear_key_head_dim=K, linear_value_head_dim=V,
        linear_conv_kernel_dim=W, rms_norm_eps=1e-2, num_hidden_layers=1, layer_types=["linear_attention"],
    )  # fmt: skip
    reference = Qwen3NextGatedDeltaNet(config, 0).float()
    weights = dict(mixer.named_parameters())
    for number, weight in enumerate(weights.values()):
        weight.data.add_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(number)) * 0.1)
    conv = torch.cat([mixer.conv_qk.flatten(0, 1), mixer.conv_v])
    expected_weights = {
        "in_proj_qkvz.weight": _grouped_by_key_head(mixer.qk[0], mixer.qk[1], mixer.v, mixer.z),
        "in_proj_ba.weight": _grouped_by_key_head(mixer.ba[0], mixer.ba[1]),
        "conv1d.weight": conv.unsqueeze(1),
        "A_log": mixer.A_log,
        "dt_bias": mixer.dt_bias,
        "norm.weight": mixer.out_norm,
        "out_proj.weight": mixer.out,
    }
    reference.load_state_dict({name: weight.detach() for name, weight in expected_weights.items()})
    x_SBD, dy_SBD = torch.randn(2, S, B, D, generator=torch.Generator().manual_seed(1)).unbind(0)
    x, hf_x = x_SBD.clone().requires_grad_(), x_SBD.transpose(0, 1).clone().requires_grad_()
    y = mixer(x, _batch(), ForwardContext())
    hf_y = reference(hf_x)
    _assert_close(y, hf_y.transpose(0, 1))
    # the gradients of the same function of the weights: those of transformers' layout, through the reordering
    hf_weights = [dict(reference.named_parameters())[name] for name in expected_weights]
    dx, *grads = torch.autograd.grad(y, [x, *weights.values()], dy_SBD)
    hf_dx, *hf_grads = torch.autograd.grad(hf_y, [hf_x, *hf_weights], dy_SBD.transpose(0, 1))
    _assert_close(dx, hf_dx.transpose(0, 1))
    expected = torch.autograd.grad([*expected_weights.values()], [*weights.values()], hf_grads)
    for name, grad, hf_grad in zip(weights, grads, expected, strict=True):
        # transformers subtracts running sums of decays, which loses digits of these two gradients
        _assert_close(grad, hf_grad, name, 5e-5 if name in ("A_log", "dt_bias") else 5e-6)


def _assert_close(actual: Tensor, expected: Tensor, name: str = "", tolerance: float = 5e-6) -> None:
    """Compare relative to the largest element; the sums of fp32 have different orders."""
    scale = expected.abs().max()
    torch.testing.assert_close(actual / scale, expected / scale, rtol=0, atol=tolerance, msg=name or None)


def test_gradients_in_fp32_are_close_to_those_in_fp64() -> None:
    """Also those of the decay rates, where transformers' are off by 2e-5 with these numbers."""
    mixers = {dtype: _mixer(dtype) for dtype in (torch.float32, torch.float64)}
    x_SBD, dy_SBD = torch.randn(2, S, B, D, generator=torch.Generator().manual_seed(1)).unbind(0)
    grads = []
    for dtype, mixer in mixers.items():
        mixer.load_state_dict(mixers[torch.float32].state_dict())
        y = mixer(x_SBD.to(dtype), _batch(), ForwardContext())
        grads.append(torch.autograd.grad(y, [*mixer.parameters()], dy_SBD.to(dtype)))
    for (name, _), grad, expected in zip(mixer.named_parameters(), *grads, strict=True):
        _assert_close(grad.double(), expected, name, 2e-6)


@pytest.mark.parametrize("flags", ["", "--linear-conv-kernel-dim 1", "--linear-conv-kernel-dim 7"])
def test_generation_from_states_equals_the_full_sequence(flags: str) -> None:
    """Samples continue from different lengths, a few tokens at a time; the rest of a pass is padding."""
    mixer = _mixer(flags=flags)
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
    width = 4 if not flags else int(flags.split()[1])
    assert state.shape == (B, H, K, V) and earlier.shape == (width - 1, B, 2 * G * K + H * V)


QWEN3_NEXT = """--num-layers 1 --hidden-size 2048 --num-attention-heads 16 --seq-length 1024 --bf16 --micro-batch-size 1
 --lr 1 --train-iters 1 --mock-data --vocab-size 1000 --attention-dropout 0 --hidden-dropout 0 --swiglu
 --normalization RMSNorm --position-embedding-type rope --hybrid-layer-pattern G"""
LENGTH, HIDDEN, KEYS, VALUES, HEADS = 1024, 2048, 16 * 128, 32 * 128, 32


def _cost(flags: str = "", tp: int = 1, cp: int = 1, **options: Any) -> LayerCost:
    model = config_from(f"{QWEN3_NEXT} {flags}").model
    sharding = single_document_sharding(model, cp)
    setting = LayerSetting(tp, 1, torch.bfloat16, cp_sharding=sharding, **options)
    return layers_cost(layer_kinds(model), setting)


def test_saved_activations_equal_the_formulas() -> None:
    """The formulas are in nn/gated_delta_net.py; x is saved before and after its norm, whose statistics are fp32."""
    states = 4 * HEADS * 128 * 128 // 512
    projections = 2 * KEYS + VALUES
    half = 2 * HIDDEN + 2 * projections + 2 * VALUES
    taps = 2 * projections * W
    exp_A, its_negative = 4 * HEADS, 4 * HEADS
    assert _cost().saved_bytes == LENGTH * (2 * half + 4 * (4 * HEADS + 1) + states) + taps + exp_A + its_negative
    recomputed = LENGTH * (2 * (2 * HIDDEN + projections + 2 * VALUES + 2 * HEADS) + 4)
    assert _cost(recompute_modules=("gdn",)).saved_bytes == recomputed


def test_flops_equal_the_formula() -> None:
    """A chunk has 64 tokens; products with a triangle of ones, which sum decays, count as well."""
    projections = HIDDEN * (2 * KEYS + 2 * VALUES + 2 * HEADS) + VALUES * HIDDEN
    scores = 16 * 2 * 64 * 128 + HEADS * 64 * 64
    scan = HEADS * (64 * 128 + 3 * 128 * 128)
    assert _cost().flops[0] / LENGTH == pytest.approx(2 * (projections + scores + scan), rel=0.01)


def _collectives(cost: LayerCost, axis: str) -> Counter[Any]:
    events = [event for event in cost.trace if isinstance(event, CommStart) and event.axis == axis]
    return Counter((event.phase, event.op, event.num_bytes) for event in events)


def test_tensor_parallelism_gathers_once_for_four_weights() -> None:
    x = 2 * LENGTH * HIDDEN
    expected = {
        ("F", "all-gather", x): 1,
        ("F", "reduce-scatter", x): 1,
        ("B", "all-gather", x): 2,
        ("B", "reduce-scatter", x): 1,
    }
    assert _collectives(_cost(tp=8), "tp") == expected


@pytest.mark.parametrize("cp,tp", [(2, 1), (4, 2), (8, 1)])
def test_context_parallelism_gathers_maps_of_states(cp: int, tp: int) -> None:
    """All layers are recurrent, so each rank has one range of positions; three tokens precede its two chunks."""
    maps = 4 * cp * HEADS // tp * 128 * (128 + 128)
    borders = 2 * 2 * cp * 3 * (2 * KEYS + VALUES) // tp
    expected = {
        ("F", "all-gather", borders): 1,
        ("F", "all-gather", maps): 1,
        ("B", "all-gather", maps): 1,
        ("B", "reduce-scatter", borders): 1,
    }
    assert _collectives(_cost(cp=cp, tp=tp), "cp") == expected
