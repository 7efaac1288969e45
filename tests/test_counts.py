"""Memory as counts: activations saved per layer. Collectives and their bytes: planning/test_as_rank.py."""

from collections.abc import Callable
from dataclasses import replace
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
from megalite.plan.kinds import kinds_of, layers_bill

MODEL = """--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16
 --micro-batch-size 2 --train-iters 2 --lr 0.01 --mock-data --vocab-size 64 --eval-iters 0 --hidden-dropout 0
 --attention-dropout 0"""
GPT = "--hidden-dropout 0.1"
NEOX = "--parallel-residual --position-embedding-type rope --rotary-percent 0.5 --group-query-attention --num-query-groups 1"
LLAMA = """--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear
 --untie-embeddings-and-output-weights --ffn-hidden-size 340"""
QWEN = LLAMA + " --qk-layernorm --add-qkv-bias"


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


@pytest.mark.parametrize("style", [GPT, LLAMA, NEOX, QWEN], ids=["gpt", "llama", "neox", "qwen"])
@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
def test_saved_activations_per_layer(style: str, recompute: str) -> None:
    """bf16, no recompute: at most 34 s b h bytes per layer (arXiv:2205.05198, eq. 2, without its attention scores)."""
    s, b, h = 64, 2, 128
    flags = f"""--hidden-size {h} --num-attention-heads 2 --seq-length {s} --max-position-embeddings {s} --bf16
     --attention-dropout 0 --hidden-dropout 0 {style}"""
    if recompute != "none":
        flags += f" --recompute-granularity {recompute}"
    if recompute == "full":
        flags += " --recompute-method uniform"
    per_layer, config = _saved_per_layer(flags, s, b), config_from(f"{MODEL} {flags}")
    config = replace(config, train=replace(config.train, micro_batch_size=b))
    kind, setting = kinds_of(config.model)[0], arrange(config, 1, 64).layers.setting
    assert layers_bill((kind,), setting, recompute == "full").saved == pytest.approx(per_layer, rel=0.01)
    bound = {"none": 34, "selective": 34, "full": 2.1}[recompute]
    assert 0 < per_layer <= bound * s * b * h, per_layer / (s * b * h)


@pytest.mark.parametrize("style,width", [(GPT, 4 * 128), (LLAMA, 2 * 340)], ids=["gpt", "llama"])
def test_what_a_part_that_is_recomputed_does_not_save(style: str, width: int) -> None:
    """bf16: two outputs of norms; what goes into the activation, `width` wide; of a norm that is recomputed with the
    feed-forward block also its statistics, 4 bytes per token: torch's mean and deviation in bf16, or ours in fp32."""
    s, b, h = 64, 2, 128
    flags = f"""--hidden-size {h} --num-attention-heads 2 --seq-length {s} --max-position-embeddings {s} --bf16
     --attention-dropout 0 --hidden-dropout 0 {style}"""
    all_of_it = _saved_per_layer(flags, s, b)
    for modules, fewer in (
        ("layernorm", 2 * (2 * s * b * h)),
        ("mlp", 2 * s * b * width),
        ("layernorm mlp", 2 * (2 * s * b * h) + 2 * s * b * width + 4 * s * b),
    ):
        more = f" --recompute-granularity selective --recompute-modules {modules}"
        assert all_of_it - _saved_per_layer(flags + more, s, b) == fewer, modules


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
