"""Gated delta nets: transformers' as a reference, generation from states, communicated and saved elements.

Layouts are rows of tests/layouts/layouts.toml.
"""

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

D, G, H, K, V, W = 32, 2, 4, 6, 5, 4
SIZES = f"""--hidden-size {D} --hybrid-layer-pattern G --linear-num-key-heads {G} --linear-num-value-heads {H}
 --linear-key-head-dim {K} --linear-value-head-dim {V}"""


def _grouped_by_key_head(*weights: Tensor) -> Tensor:
    """Return the rows of weights as transformers orders them: those of a key head and its value heads together."""
    return torch.cat([weight.unflatten(0, (G, -1)) for weight in weights], 1).flatten(0, 1)


def test_gated_delta_net_equals_that_of_transformers() -> None:
    """Compare the output and all gradients in fp32, in which transformers always computes the recurrence."""
    from transformers import Qwen3NextConfig
    from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

    mixer = mixer_of(SIZES, torch.float32)
    config = Qwen3NextConfig(
        hidden_size=D, linear_num_key_heads=G, linear_num_value_heads=H, linear_key_head_dim=K, linear_value_head_dim=V,
        linear_conv_kernel_dim=W, rms_norm_eps=1e-2, num_hidden_layers=1, layer_types=["linear_attention"],
    )  # fmt: skip
    reference = Qwen3NextGatedDeltaNet(config, 0).float()
    disturb(mixer)
    conv = torch.cat([mixer.conv_qk.flatten(0, 1), mixer.conv_v])
    weights = {
        "in_proj_qkvz.weight": _grouped_by_key_head(mixer.qk[0], mixer.qk[1], mixer.v, mixer.z),
        "in_proj_ba.weight": _grouped_by_key_head(mixer.ba[0], mixer.ba[1]),
        "conv1d.weight": conv.unsqueeze(1),
        "A_log": mixer.A_log,
        "dt_bias": mixer.dt_bias,
        "norm.weight": mixer.out_norm,
        "out_proj.weight": mixer.out,
    }
    reference.load_state_dict({name: weight.detach() for name, weight in weights.items()})
    x, _ = random_x_and_dy(D, torch.float32)
    hf_x = x.transpose(0, 1).clone().requires_grad_()

    def tolerance(name: str) -> float:
        # transformers subtracts running sums of decays, which loses digits of these two gradients
        return 5e-5 if name in ("A_log", "dt_bias") else 5e-6

    compare_with_transformers(mixer, reference, weights, reference(hf_x), hf_x, tolerance)


@pytest.mark.parametrize("allow_neg_eigval", [False, True])
def test_gated_delta_net_of_olmo_equals_that_of_transformers(allow_neg_eigval: bool) -> None:
    """Its update may be twice as strong, and the norm of the heads has an epsilon of its own."""
    from transformers import OlmoHybridConfig
    from transformers.models.olmo_hybrid.modeling_olmo_hybrid import OlmoHybridGatedDeltaNet

    flags = "--linear-norm-epsilon 1e-5" + (" --linear-allow-neg-eigval" if allow_neg_eigval else "")
    mixer = mixer_of(f"{SIZES} {flags}", torch.float32)
    config = OlmoHybridConfig(
        hidden_size=D, linear_num_key_heads=G, linear_num_value_heads=H, linear_key_head_dim=K, linear_value_head_dim=V,
        linear_conv_kernel_dim=W, rms_norm_eps=1e-2, num_hidden_layers=2, num_attention_heads=H,
        layer_types=["linear_attention", "full_attention"], linear_allow_neg_eigval=allow_neg_eigval,
    )  # fmt: skip
    reference = OlmoHybridGatedDeltaNet(config, 0).float()
    disturb(mixer)
    with torch.no_grad():
        mixer.v.mul_(0.02)  # so that the epsilon counts, without which norms magnify the rounding of small heads
    weights = {
        "q_proj.weight": mixer.qk[0],
        "k_proj.weight": mixer.qk[1],
        "v_proj.weight": mixer.v,
        "g_proj.weight": mixer.z,
        "b_proj.weight": mixer.ba[0],
        "a_proj.weight": mixer.ba[1],
        "conv1d.weight": torch.cat([mixer.conv_qk.flatten(0, 1), mixer.conv_v]).unsqueeze(1),
        "A_log": mixer.A_log,
        "dt_bias": mixer.dt_bias,
        "o_norm.weight": mixer.out_norm,
        "o_proj.weight": mixer.out,
    }
    reference.load_state_dict({name: weight.detach() for name, weight in weights.items()})
    x, _ = random_x_and_dy(D, torch.float32)
    hf_x = x.transpose(0, 1).clone().requires_grad_()
    compare_with_transformers(mixer, reference, weights, reference(hf_x), hf_x, lambda name: 5e-5)


def test_gradients_in_fp32_are_close_to_those_in_fp64() -> None:
    """Also those of the decay rates, where transformers' are off by 2e-5 with these numbers."""
    assert_gradients_in_fp32_are_close(SIZES, D, 2e-6)


@pytest.mark.parametrize(
    "flags", ["", "--linear-conv-kernel-dim 1", "--linear-conv-kernel-dim 7", "--linear-allow-neg-eigval"]
)
def test_generation_from_states_equals_the_full_sequence(flags: str) -> None:
    state, earlier = generate_in_passes(mixer_of(f"{SIZES} {flags}"), D)
    width = int(flags.split()[1]) if "conv" in flags else 4
    assert state.shape == (B, H, K, V) and earlier.shape == (width - 1, B, 2 * G * K + H * V)


QWEN3_NEXT = """--num-layers 1 --hidden-size 2048 --num-attention-heads 16 --seq-length 1024 --bf16 --micro-batch-size 1
 --lr 1 --train-iters 1 --mock-data --vocab-size 1000 --attention-dropout 0 --hidden-dropout 0 --swiglu
 --normalization RMSNorm --position-embedding-type rope --hybrid-layer-pattern G"""
LENGTH, HIDDEN, KEYS, VALUES, HEADS = 1024, 2048, 16 * 128, 32 * 128, 32


def test_saved_activations_equal_the_formulas() -> None:
    """The formulas are in nn/gated_delta_net.py; x is saved before and after its norm, whose statistics are fp32."""
    states = 4 * HEADS * 128 * 128 // 512
    projections = 2 * KEYS + VALUES
    half = 2 * HIDDEN + 2 * projections + 2 * VALUES
    taps = 2 * projections * W
    exp_A, its_negative = 4 * HEADS, 4 * HEADS
    expected = LENGTH * (2 * half + 4 * (4 * HEADS + 1) + states) + taps + exp_A + its_negative
    assert layer_cost(QWEN3_NEXT).saved_bytes == expected
    recomputed = LENGTH * (2 * (2 * HIDDEN + projections + 2 * VALUES + 2 * HEADS) + 4)
    assert layer_cost(QWEN3_NEXT, recompute_modules=("gdn",)).saved_bytes == recomputed


def test_flops_equal_the_formula() -> None:
    """A chunk has 64 tokens, whose scores the kernels compute for each value head; the inverse does not count."""
    projections = HIDDEN * (2 * KEYS + 2 * VALUES + 2 * HEADS) + VALUES * HIDDEN
    scores = HEADS * (2 * 64 * 128 + 64 * (128 + 128))
    scan = HEADS * (64 * 128 + 3 * 128 * 128)
    expected = 2 * (projections + scores + scan)
    assert layer_cost(QWEN3_NEXT).flops[0] / LENGTH == expected


def test_tensor_parallelism_gathers_once_for_four_weights() -> None:
    assert collectives(layer_cost(QWEN3_NEXT, tp=8), "tp") == collectives_of_one_gather(2 * LENGTH * HIDDEN)


@pytest.mark.parametrize("cp,tp", [(2, 1), (4, 2), (8, 1)])
def test_context_parallelism_scans_maps_of_states(cp: int, tp: int) -> None:
    """All layers are recurrent, so each rank has one range of positions; three tokens precede its two chunks."""
    maps, states = (4 * HEADS // tp * 128 * channels for channels in (128 + 128, 128))
    borders = 2 * 2 * cp * 3 * (2 * KEYS + VALUES) // tp
    cost = layer_cost(f"{QWEN3_NEXT} --cp-comm-type allgather", cp=cp, tp=tp)
    assert collectives(cost, "cp") == collectives_of_maps(cp, maps, states, borders)


@pytest.mark.parametrize("cp,tp,keys_per_rank", [(2, 1, 8), (8, 1, 2), (4, 2, 2), (8, 2, 1), (8, 4, 1), (16, 2, 1)])
def test_context_parallelism_exchanges_tokens_for_heads(cp: int, tp: int, keys_per_rank: int) -> None:
    """Two ranks share each key head in the last two cases."""
    heads = HEADS // (cp * tp)
    channels = 2 * keys_per_rank * 128 + heads * 128 + 2 * heads
    cost = layer_cost(f"{QWEN3_NEXT} --cp-comm-type a2a", cp=cp, tp=tp)
    assert collectives(cost, "cp") == collectives_of_heads(2 * LENGTH * channels, 2 * LENGTH * heads * 128)


@pytest.mark.parametrize("recompute_modules", [(), ("gdn",)])
def test_heads_save_what_tokens_do_and_are_exchanged_once(recompute_modules: tuple[str, ...]) -> None:
    """Also if the recurrence is recomputed, because the exchange is not part of it."""
    flags = f"{QWEN3_NEXT} --cp-comm-type a2a"
    cost, single = (layer_cost(flags, cp=cp, recompute_modules=recompute_modules) for cp in (8, 1))
    assert sum(collectives(cost, "cp").values()) == 4
    assert cost.saved_bytes == pytest.approx(single.saved_bytes / 8, rel=0.01)
    assert cost.flops[0] == pytest.approx(single.flops[0] / 8, rel=0.01)


@pytest.mark.parametrize("cp", [2, 4, 8, 32])
def test_heads_are_exchanged_by_default_where_they_are_fewer_bytes(cp: int) -> None:
    """Compare the bytes that a rank receives per sample, by the formulas in nn/recurrent_heads.py."""
    heads, keys = HEADS // cp, max(1, 16 // cp)
    states = HEADS * 128 * 128 * 4 * (2 * (cp.bit_length() - 1) - 1)  # a map is two states; the last one is a state
    borders = 2 * (cp - 1) * 2 * 3 * (2 * KEYS + VALUES)
    bytes_per_token = 2 * (cp - 1) * (2 * keys * 128 + 2 * heads * 128 + 2 * heads)
    limit = (states + borders) // bytes_per_token // 8 * 8
    for num_tokens, is_heads in ((limit, True), (limit + 8, False)):
        cost = layer_cost(f"{QWEN3_NEXT} --seq-length {cp * num_tokens}", cp=cp)
        gathers_borders = "all-gather" in {name for _, name, _ in collectives(cost, "cp")}
        assert gathers_borders != is_heads, num_tokens
