"""Soft-capping: the tanh of the kernels, its torch form, and attention as transformers' Gemma 2 computes it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

import pytest
import torch
from torch import Tensor
from train_cases import stage_from
from transformers import Gemma2Config
from transformers.models.gemma2.modeling_gemma2 import Gemma2Attention, Gemma2RotaryEmbedding

from megalite.kernels.dispatch import kernel
from megalite.kernels.softcap import soft_cap, soft_cap_with_slope, tanh
from megalite.nn.micro_batch import Batch, ForwardContext

if TYPE_CHECKING:
    import triton.language as tl


@kernel
def _tanh(x_ptr, y_ptr, n_elements, EXACT_NEAR_0: tl.constexpr, BLOCK_SIZE: tl.constexpr):
    offs = tl.program_id(0) * BLOCK_SIZE + tl.arange(0, BLOCK_SIZE)
    mask = offs < n_elements
    x = tl.load(x_ptr + offs, mask=mask, other=0.0)
    tl.store(y_ptr + offs, tanh(x, EXACT_NEAR_0), mask=mask)


def _in_triton(x: Tensor, exact_near_0: bool) -> Tensor:
    y = torch.empty_like(x)
    _tanh[(1,)](x, y, len(x), exact_near_0, 1 << (len(x) - 1).bit_length())
    return y


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_tanh_is_accurate_at_every_magnitude(interpreter: Callable[..., Tensor], dtype: torch.dtype) -> None:
    magnitudes = torch.cat([torch.logspace(-30, 2, 3000, dtype=dtype), torch.linspace(0.2, 0.8, 1000, dtype=dtype)])
    edges = torch.tensor([0.0, 0.5, 1e30, math.inf], dtype=dtype)
    x = torch.cat([magnitudes, -magnitudes, edges, -edges])
    expected = torch.tanh(x.double())
    eps = torch.finfo(dtype).eps
    assert (interpreter(_in_triton, x, False).double() - expected).abs().max() <= 2 * eps
    if dtype == torch.float32:
        relative = (interpreter(_in_triton, x, True).double() / expected.where(expected != 0, 1.0) - 1).abs()
        assert relative[expected != 0].max() <= 3 * eps


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_soft_cap_bounds_and_keeps_the_dtype(dtype: torch.dtype) -> None:
    x = torch.tensor([-1e4, -3.0, -1e-3, 0.0, 0.5, 8.0, 1e4], dtype=dtype)
    expected = 4 * torch.tanh(x.double() / 4)
    capped = soft_cap(x, 4.0)
    assert capped.dtype == dtype and capped.abs().max() <= 4 and soft_cap(x, None) is x
    torch.testing.assert_close(capped, expected.to(dtype))
    _, slope = soft_cap_with_slope(x, 4.0)
    torch.testing.assert_close(slope.double(), 1 - (expected / 4).square(), rtol=0, atol=1e-6)


H, G, K, D, S, B, CAP = 4, 2, 8, 32, 12, 2, 0.3
FLAGS = f"""--num-layers 1 --hidden-size {D} --num-attention-heads {H} --group-query-attention --num-query-groups {G}
 --kv-channels {K} --seq-length {S} --micro-batch-size 1 --train-iters 1 --lr 1 --mock-data --vocab-size 16
 --position-embedding-type rope --disable-bias-linear --attention-dropout 0 --init-method-std 0.3
 --attn-logit-softcapping {CAP}"""


def test_attention_layer_equals_transformers_gemma2() -> None:
    """Compare the output of the layer, with rotary positions, and the gradient of its input."""
    stage = stage_from(FLAGS, torch.float64)
    mixer = stage.blocks[0].mixer
    config = Gemma2Config(
        hidden_size=D, num_attention_heads=H, num_key_value_heads=G, head_dim=K, query_pre_attn_scalar=K,
        num_hidden_layers=1, layer_types=["full_attention"], attn_logit_softcapping=CAP,
    )  # fmt: skip
    config._attn_implementation = "eager"
    reference = Gemma2Attention(config, layer_idx=0).double()
    weights = {"q_proj": mixer.q, "k_proj": mixer.kv[0], "v_proj": mixer.kv[1], "o_proj": mixer.out}
    reference.load_state_dict({f"{name}.weight": weight.detach() for name, weight in weights.items()})
    generator = torch.Generator().manual_seed(5)
    x_SBD, dy_SBD = torch.randn(2, S, B, D, generator=generator, dtype=torch.float64)
    x_SBD.requires_grad_()
    batch = Batch(torch.zeros(S, B, dtype=torch.int64), None, None, torch.arange(B))
    ctx = ForwardContext(rope=stage.rope_of(batch))
    y_SBD = mixer(x_SBD, batch, ctx)
    x_BSD = x_SBD.detach().transpose(0, 1).requires_grad_()
    angles = Gemma2RotaryEmbedding(config)(x_BSD, torch.arange(S).unsqueeze(0))
    mask = torch.full((S, S), -math.inf, dtype=torch.float64).triu(1)[None, None]
    y_BSD, _ = reference(x_BSD, position_embeddings=angles, attention_mask=mask)
    torch.testing.assert_close(y_SBD, y_BSD.transpose(0, 1), rtol=1e-6, atol=1e-7)  # its angles are in fp32
    (dx_SBD,), (dx_BSD,) = (
        torch.autograd.grad(y, x, dy) for y, x, dy in ((y_SBD, x_SBD, dy_SBD), (y_BSD, x_BSD, dy_SBD.transpose(0, 1)))
    )
    torch.testing.assert_close(dx_SBD, dx_BSD.transpose(0, 1), rtol=1e-6, atol=1e-6)
    mixer.model = stage_from(FLAGS.replace(f"--attn-logit-softcapping {CAP}", ""), torch.float64).blocks[0].mixer.model
    assert (mixer(x_SBD, batch, ctx) - y_SBD).abs().max() > 1e-2
