"""Memory as counts: attention saves no scores.

The activations of a layer are tested in planning/test_layer_cost.py, and the collectives in test_dry_run_rank.py.
"""

import pytest
import torch
from planning.test_rank_memory import Live
from train_cases import stage_from

from megalite.kernels.dispatch import kernel_option, set_kernel_options
from megalite.nn.micro_batch import Batch, ForwardContext

MODEL = """--num-layers 4 --hidden-size 32 --num-attention-heads 4 --seq-length 16 --max-position-embeddings 16
 --micro-batch-size 2 --train-iters 2 --lr 0.01 --mock-data --vocab-size 64 --eval-iters 0 --hidden-dropout 0
 --attention-dropout 0"""
GPT = "--hidden-dropout 0.1"
LLAMA = """--swiglu --normalization RMSNorm --position-embedding-type rope --disable-bias-linear
 --untie-embeddings-and-output-weights --ffn-hidden-size 340"""


def _saved_bytes_per_layer(flags: str, s: int, b: int) -> float:
    """Return the bytes that one layer saves for its backward."""

    def saved_bytes(layers: int) -> int:
        stage = stage_from(f"{MODEL} {flags} --num-layers {layers}", torch.bfloat16)
        tokens = torch.zeros(s, b, dtype=torch.int64)
        with Live() as memory:
            loss = stage(None, Batch(tokens, tokens, None, torch.arange(b)), ForwardContext(step=1))
        assert loss.requires_grad  # the loss keeps the graph alive
        return memory.live

    return (saved_bytes(5) - saved_bytes(1)) / 4


@pytest.mark.parametrize("style", [GPT, LLAMA], ids=["gpt", "llama"])
def test_attention_saves_no_scores(style: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """No scores are saved, even with dropout of attention weights; explicit scores are not with selective recompute.

    Everything else is linear in s. If scores take c s^2 bytes, doubling s adds 2 c s^2 to twice the bytes.
    """
    s, b, heads = 32, 2, 4

    def quadratic(options: str) -> float:
        flags = f"{style} --bf16 --attention-dropout 0.1 --num-attention-heads {heads} {options}"
        sizes = "--seq-length {0} --max-position-embeddings {0}"
        short, long = (_saved_bytes_per_layer(f"{flags} {sizes.format(n)}", n, b) for n in (s, 2 * s))
        return (long - 2 * short) / (2 * s * s)

    set_kernel_options("auto", "auto")  # an earlier test of this process may have set others
    assert quadratic("") == 0
    softmax, keep_mask, dropped, hidden = (
        4,
        1,
        2,
        1,
    )  # bytes: fp32, bool, bf16; one causal mask for all heads and samples
    kernel_option.cache_clear()
    monkeypatch.setenv("MEGALITE_ATTENTION", "torch")
    try:
        assert quadratic("") == b * heads * (softmax + keep_mask + dropped) + hidden
        assert quadratic("--recompute-granularity selective") == 0
    finally:
        kernel_option.cache_clear()
