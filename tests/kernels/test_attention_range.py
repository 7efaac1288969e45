"""What --apply-query-key-layer-scaling and --attention-softmax-in-fp32 are for in Megatron-LM, which stores scores in
the dtype of q and k, holds without them: here no score has to fit into fp16."""

import functools
import math
from collections.abc import Callable

import pytest
import torch
from cases import attention_definition
from torch import Tensor

from megalite.kernels.attention import attention, attention_reference
from megalite.kernels.blocked_attention import Drop
from megalite.kernels.cached_attention import cached_attention

S, B, H, K = 24, 2, 2, 64
WINDOW = 9
LARGEST = torch.finfo(torch.float16).max


def inputs(size: float, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v; every score is near size^2 K / sqrt(K), and those of one query differ by some units."""
    generator = torch.Generator().manual_seed(0)
    common = size * torch.randn(K, generator=generator).sign()
    q, k, v = (torch.randn(S, B, H, K, generator=generator) for _ in range(3))
    return [x.to(dtype) for x in (common + q, common + k * min(1.0, 20 / size), v)]


def hidden(path: str = "plain") -> Tensor:
    later = torch.ones(S, S).triu(1).bool()
    return later | torch.ones(S, S).tril(-WINDOW).bool() if path == "window" else later


def definition(*qkv: Tensor, path: str = "plain") -> Tensor:
    return attention_definition(*qkv, scale=1 / math.sqrt(K), window=WINDOW if path == "window" else None)


PATHS: dict[str, Callable[..., Tensor]] = {
    "plain": attention,
    "window": functools.partial(attention, window=WINDOW),
    "dropout": functools.partial(attention, drop=Drop(1e-12, 3, torch.arange(B))),
    "explicit": attention_reference,
    "generation": lambda q, k, v, scale: cached_attention(
        q, k, v, torch.arange(S).unsqueeze(1).expand(S, B), scale=scale
    ),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_scores_above_the_largest_number_of_fp16(dtype: torch.dtype, path: str) -> None:
    given = [x.requires_grad_() for x in inputs(180.0, dtype)]
    doubles = [x.detach().double() for x in given]
    assert float((doubles[0][-1, 0, 0] @ doubles[1][-1, 0, 0]) / math.sqrt(K)) > 2 * LARGEST
    o = PATHS[path](*given, scale=1 / math.sqrt(K))
    o.float().square().sum().backward()
    assert all(x.isfinite().all() for x in (o, *(x.grad for x in given)) if x is not None)
    if dtype != torch.bfloat16 or path == "generation":  # a score of 260,000 is known to 0.016 in fp32, to 1000 in bf16
        torch.testing.assert_close(o.double(), definition(*doubles, path=path), rtol=0, atol=0.1)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_rounding_is_no_worse_than_of_a_softmax_in_fp32(dtype: torch.dtype, path: str) -> None:
    """Scores as of a model that trains, up to 40: stored in half precision, softmax in fp32, weights in half."""
    q, k, v = inputs(2.0, dtype)
    want = definition(q.double(), k.double(), v.double(), path=path)
    stored = torch.matmul(q.permute(1, 2, 0, 3), k.permute(1, 2, 3, 0)).float() / math.sqrt(K)
    weights = stored.masked_fill(hidden(path), -math.inf).softmax(-1).to(dtype)
    theirs = (weights @ v.permute(1, 2, 0, 3)).permute(2, 0, 1, 3)
    got = PATHS[path](q, k, v, scale=1 / math.sqrt(K))
    assert (got - want).square().mean() <= 1.5 * (theirs - want).square().mean()
