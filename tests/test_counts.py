"""Memory as counts: no scores are saved. Activations of a layer: planning/test_bill.py; collectives: test_as_rank.py."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks
from train_cases import config_from

from megalite.kernels.dispatch import chosen
from megalite.models.gpt import Batch
from megalite.nn import recompute
from megalite.parallel.mesh import Mesh
from megalite.plan.arrangement import arrange, build_stages

MODEL = """--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16
 --micro-batch-size 2 --train-iters 2 --lr 0.01 --mock-data --vocab-size 64 --eval-iters 0 --hidden-dropout 0
 --attention-dropout 0"""
GPT = "--hidden-dropout 0.1"
LLAMA = """--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear
 --untie-embeddings-and-output-weights --ffn-hidden-size 340"""


def _saved_per_layer(flags: str, s: int, b: int) -> float:
    """Bytes that one layer keeps for its backward."""

    def saved(layers: int) -> int:
        config = config_from([*MODEL.split(), *flags.split(), "--num-layers", str(layers)])
        (stage,) = build_stages(arrange(config, 1, 64), Mesh.alone(), torch.bfloat16)
        known = {p.untyped_storage().data_ptr() for p in stage.parameters()}
        known |= {t.untyped_storage().data_ptr() for t in stage.rope or ()}
        kept: dict[int, int] = {}

        def pack(t: torch.Tensor) -> torch.Tensor:
            if t.untyped_storage().data_ptr() not in known:
                kept[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        class Inner(saved_tensors_hooks):  # of hooks inside hooks autograd calls the inner ones alone
            def __init__(self, keep: Callable[[Any], Any], restore: Callable[[Any], Any]):
                def keep_and_count(t: torch.Tensor) -> Any:
                    left = keep(t)
                    return left if left is None else pack(left)

                super().__init__(keep_and_count, restore)

        tokens = torch.zeros(s, b, dtype=torch.int64)
        with mock.patch.object(recompute, "saved_tensors_hooks", Inner), saved_tensors_hooks(pack, lambda t: t):
            loss = stage(None, Batch(tokens, tokens, None, torch.arange(b), 1))
        loss.backward()
        return sum(kept.values())

    return (saved(5) - saved(1)) / 4


@pytest.mark.parametrize("style", [GPT, LLAMA], ids=["gpt", "llama"])
def test_no_scores_are_saved(style: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with dropout of attention weights; where the scores are asked to be explicit, selective recompute saves none.
    Everything else grows with s alone, so what doubling s adds beyond twice the bytes is theirs: 2 c s^2 of c s^2."""
    s, b, heads = 32, 2, 4

    def quadratic(more: str) -> float:
        flags = f"{style} --bf16 --attention-dropout 0.1 --num-attention-heads {heads} {more}"
        sizes = "--seq-length {0} --max-position-embeddings {0}"
        one, two = (_saved_per_layer(f"{flags} {sizes.format(n)}", n, b) for n in (s, 2 * s))
        return (two - 2 * one) / (2 * s * s)

    assert quadratic("") == 0
    softmax, keep, dropped, hidden = 4, 1, 2, 1  # bytes: fp32, bool, bf16; one causal mask for all heads and samples
    chosen.cache_clear()
    monkeypatch.setenv("MEGALITE_ATTENTION", "torch")
    try:
        assert quadratic("") == b * heads * (softmax + keep + dropped) + hidden
        assert quadratic("--recompute-granularity selective") == 0
    finally:
        chosen.cache_clear()
