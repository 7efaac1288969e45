"""Multi-head latent attention: transformers' as a reference, generation from latents, communicated and saved elements.

Layouts are rows of tests/layouts/layouts.toml.
"""

import math
from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from train_cases import config_from, stage_from

from megalite.generate.generation import KVCache
from megalite.nn.micro_batch import Batch, ForwardContext
from megalite.planning.layer_cost import CommStart, LayerCost
from megalite.planning.layer_kinds import LayerSetting, layer_kinds, layers_cost, single_document_sharding

D, H, N, R, V, LQ, L = 32, 4, 6, 4, 5, 10, 12
S, B = 17, 3
SIZES = f"""--num-layers 1 --hidden-size {D} --num-attention-heads {H} --seq-length {S} --multi-latent-attention
 --kv-lora-rank {L} --qk-head-dim {N} --qk-pos-emb-head-dim {R} --v-head-dim {V}"""
LINE = f"""{SIZES} --micro-batch-size {B} --train-iters 1 --lr 1 --mock-data --vocab-size 64 --init-method-std 0.3
 --hidden-dropout 0 --attention-dropout 0 --swiglu --normalization RMSNorm --norm-epsilon 1e-6 --disable-bias-linear
 --position-embedding-type rope --rotary-base 500"""
COMPRESSED = f"--q-lora-rank {LQ} --qk-layernorm"
YARN = "--rotary-scaling-factor 8 --yarn-original-max-position-embeddings 16 --mscale 0.7 --mscale-all-dim 0.9"
PARTS = {
    "q": "q_proj",
    "q_down": "q_a_proj",
    "q_norm.weight": "q_a_layernorm",
    "q_up": "q_b_proj",
    "kv_down": "kv_a_proj_with_mqa",
    "kv_norm.weight": "kv_a_layernorm",
    "kv_up": "kv_b_proj",
    "out": "o_proj",
}


ODD_R = 5
UNROTATED = f"--position-embedding-type none --qk-pos-emb-head-dim {ODD_R}"  # channels that are shared, and not rotated


def _mixer(flags: str) -> tuple[Any, ForwardContext]:
    """Return the attention of a layer in fp64, and the context of its forward pass."""
    stage = stage_from(f"{LINE} {flags}", torch.float64)
    mixer = stage.blocks[0].mixer
    return mixer, ForwardContext(rope={rope: (cos[:S], sin[:S]) for rope, (cos, sin) in stage.rope_tables.items()})


def _batch() -> Batch:
    return Batch(torch.zeros(S, B, dtype=torch.int64), None, None, torch.arange(B))


def _transformers_attention(flags: str) -> tuple[Any, tuple[Tensor, Tensor]]:
    """Return DeepseekV3Attention of transformers, and cos and sin of its positions."""
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek

    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 500.0}
    if YARN in flags:
        rope |= {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 16}
        rope |= {"mscale": 0.7, "mscale_all_dim": 0.9, "beta_fast": 32, "beta_slow": 1}
    config = DeepseekV3Config(
        hidden_size=D, num_attention_heads=H, num_key_value_heads=H, q_lora_rank=LQ if COMPRESSED in flags else None,
        kv_lora_rank=L, qk_nope_head_dim=N, qk_rope_head_dim=R, v_head_dim=V, rope_parameters=rope,
        max_position_embeddings=128,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    rotary = deepseek.DeepseekV3RotaryEmbedding(config)
    tables = rotary(torch.zeros(1, dtype=torch.float64), torch.arange(S)[None])
    if UNROTATED in flags:
        # set afterwards, because its configuration refuses an odd size; with cos 1 and sin 0 nothing is rotated
        config.qk_rope_head_dim, config.qk_head_dim, config.rope_interleave = ODD_R, N + ODD_R, False
        tables = (torch.ones(1, S, ODD_R, dtype=torch.float64), torch.zeros(1, S, ODD_R, dtype=torch.float64))
    attention = deepseek.DeepseekV3Attention(config, 0)
    # transformers' norms are always in fp32
    attention.kv_a_layernorm = nn.RMSNorm(L, eps=1e-6)
    if attention.q_lora_rank is not None:
        attention.q_a_layernorm = nn.RMSNorm(LQ, eps=1e-6)
    return attention.double(), tables


@pytest.mark.parametrize("flags", [COMPRESSED, f"{COMPRESSED} {YARN}", "--qk-layernorm", f"{COMPRESSED} {UNROTATED}"])
def test_latent_attention_equals_that_of_transformers(flags: str) -> None:
    """Compare the output and all gradients in fp64; the tables of positions of transformers are in fp32."""
    mixer, ctx = _mixer(flags)
    reference, tables = _transformers_attention(flags)
    assert (mixer.rope is None) == (UNROTATED in flags)
    if mixer.rope is not None:
        ctx.rope[mixer.rope][0].copy_(tables[0][0, :, : R // 2])
        ctx.rope[mixer.rope][1].copy_(tables[1][0, :, : R // 2])
    weights = dict(mixer.named_parameters())
    hf_weights = {part: getattr(reference, PARTS[part]).weight for part in weights}
    with torch.no_grad():
        for part, weight in weights.items():
            weight.copy_(torch.randn(weight.shape, generator=torch.Generator().manual_seed(len(part))) * 0.3 + 0.1)
            hf_weights[part].copy_(weight)
    x_SBD, dy_SBD = torch.randn(2, S, B, D, dtype=torch.float64, generator=torch.Generator().manual_seed(1)).unbind(0)
    x, hf_x = x_SBD.clone().requires_grad_(), x_SBD.transpose(0, 1).clone().requires_grad_()
    y = mixer(x, _batch(), ctx)
    mask = torch.full((S, S), -math.inf, dtype=torch.float64).triu(1)[None, None]
    hf_y, _ = reference(hf_x, tables, mask)
    torch.testing.assert_close(y, hf_y.transpose(0, 1), rtol=1e-10, atol=1e-10)
    grads = torch.autograd.grad(y, [x, *weights.values()], dy_SBD)
    hf_grads = torch.autograd.grad(hf_y, [hf_x, *hf_weights.values()], dy_SBD.transpose(0, 1))
    torch.testing.assert_close(grads[0], hf_grads[0].transpose(0, 1), rtol=1e-10, atol=1e-10)
    for part, grad, expected in zip(weights, grads[1:], hf_grads[1:], strict=True):
        torch.testing.assert_close(grad, expected, rtol=1e-10, atol=1e-10, msg=part)


CACHED = [
    COMPRESSED,
    f"{COMPRESSED} {YARN} --attention-output-gate",
    f"{COMPRESSED} --qk-pos-emb-head-dim 0",
    f"{COMPRESSED} {UNROTATED}",
    "--window-size 3,0 --softmax-type learnable",
    f"{COMPRESSED} --window-size 3,0 --attn-logit-softcapping 0.7",
]


@pytest.mark.parametrize("flags", CACHED)
def test_generation_from_latents_equals_the_expanded_form(flags: str) -> None:
    """The cache has L + R numbers per token; samples continue from different lengths, a few tokens at a time."""
    mixer, ctx = _mixer(flags)
    mixer.eval()
    x_SBD = torch.randn(S, B, D, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    rope = ctx.rope
    with torch.no_grad():
        expected = mixer(x_SBD, _batch(), ctx)
        cache = KVCache(S)
        starts_B = torch.zeros(B, dtype=torch.int64)
        samples_B = torch.arange(B)
        for length in (5, 1, 3, 1, 1):
            positions_SB = starts_B + torch.arange(length)[:, None]
            cache.set_positions(positions_SB, torch.device("cpu"))
            tables = {key: (cos[positions_SB], sin[positions_SB]) for key, (cos, sin) in rope.items()}
            y = mixer(x_SBD[positions_SB, samples_B], _batch(), ForwardContext(rope=tables, cache=cache))
            torch.testing.assert_close(y, expected[positions_SB, samples_B], rtol=1e-12, atol=1e-12)
            # a sample whose last tokens were padding goes on before these
            starts_B = starts_B + length - samples_B * (length > 3)
    (latents_TBC,) = cache.states[0]
    rotated = 0 if "--qk-pos-emb-head-dim 0" in flags else ODD_R if UNROTATED in flags else R
    assert latents_TBC.shape == (S, B, L + rotated)


DEEPSEEK_V3 = """--num-layers 1 --hidden-size 7168 --num-attention-heads 128 --seq-length 256 --bf16 --micro-batch-size 1
 --lr 1 --train-iters 1 --mock-data --vocab-size 1000 --attention-dropout 0 --hidden-dropout 0 --swiglu
 --normalization RMSNorm --position-embedding-type rope --disable-bias-linear --multi-latent-attention
 --qk-layernorm --q-lora-rank 1536 --kv-lora-rank 512 --hybrid-layer-pattern +"""
X, HEADS, LATENTS = 7168, 128, 1536 + 512 + 64


def _cost(flags: str = "", tp: int = 1, cp: int = 1, **options: Any) -> LayerCost:
    model = config_from(f"{DEEPSEEK_V3} {flags}").model
    sharding = single_document_sharding(model, cp)
    setting = LayerSetting(tp, 1, torch.bfloat16, cp_sharding=sharding, **options)
    return layers_cost(layer_kinds(model), setting)


# recomputed modules, saved elements of half precision per token besides x, and of fp32: one of each norm, and per head
SAVED = [((), 75_904, 3 + HEADS), (("mla_up_proj",), 18_496, 3 + HEADS), (("mla_up_proj", "core_attn"), 18_496, 1)]


@pytest.mark.parametrize("recompute_modules,num_half,num_fp32", SAVED)
def test_saved_activations_equal_the_formulas(recompute_modules: tuple[str, ...], num_half: int, num_fp32: int) -> None:
    """The formulas are in nn/latent_attention.py; x is saved before and after its norm."""
    formula = LATENTS + HEADS * 128
    if "mla_up_proj" not in recompute_modules:
        formula += HEADS * (192 + 256) + 64
    assert formula == num_half
    saved_bytes = _cost(recompute_modules=recompute_modules).saved_bytes
    assert saved_bytes == 256 * (2 * (2 * X + num_half) + 4 * num_fp32)


def _collectives(cost: LayerCost, axis: str) -> Counter[Any]:
    events = [event for event in cost.trace if isinstance(event, CommStart) and event.axis == axis]
    return Counter((event.phase, event.op, event.num_bytes) for event in events)


def test_tensor_parallelism_gathers_latents_once() -> None:
    """The latents are 29 % of the channels of x; the output is scattered as in other attention."""
    latents, x = 2 * 256 * LATENTS, 2 * 256 * X
    expected = {
        ("F", "all-gather", latents): 1,
        ("F", "reduce-scatter", x): 1,
        ("B", "all-gather", x): 1,
        ("B", "all-gather", latents): 1,
        ("B", "reduce-scatter", latents): 1,
    }
    assert _collectives(_cost(tp=8), "tp") == expected
    expected["B", "all-gather", latents] = 2
    assert _collectives(_cost(tp=8, recompute_modules=("mla_up_proj",)), "tp") == expected


@pytest.mark.parametrize("cp,tp", [(2, 1), (4, 2)])
def test_context_parallelism_gathers_latents(cp: int, tp: int) -> None:
    """Each gather has L + R channels, 1 / 57 of the keys and values of all heads; gradients are in fp32."""
    latents = 2 * 256 * (512 + 64)
    gathers = {
        ("F", "all-gather", latents): 1,
        ("B", "all-gather", latents): 1,
        ("B", "reduce-scatter", 2 * latents): 1,
    }
    cost = _cost(tp=tp, cp=cp)
    assert _collectives(cost, "cp") == gathers
    heads = HEADS // tp
    q, o = (2 * 256 // cp * heads * width for width in (192, 128))
    by_heads = _cost("--cp-comm-type a2a", tp=tp, cp=cp)
    assert _collectives(by_heads, "cp") == {
        **gathers,
        ("F", "all-to-all", q): 1,
        ("F", "all-to-all", o): 1,
        ("B", "all-to-all", o): 2,
        ("B", "all-to-all", q): 1,
    }
    # neither keys nor values are saved, only the latents that are gathered again
    without_kv = _cost(tp=tp).saved_bytes / cp - 2 * 256 // cp * heads * 256
    assert cost.saved_bytes == pytest.approx(without_kv + 2 * 256 // cp * 512, rel=0.01)


def test_flops_equal_the_formula() -> None:
    """Each score is computed once, half of them are masked, and the shared keys add R channels to their product."""
    down = X * LATENTS
    up = HEADS * (1536 * 192 + 512 * 256)
    scores = HEADS * (192 + 128) * 256 / 2
    assert _cost().flops[0] / 256 == 2 * (down + up + HEADS * 128 * X + scores)
