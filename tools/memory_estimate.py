"""What one rank without model parallelism takes at its peak, counted from the shape: state and activations.

    state        weights, gradients, optimizer, as the plan at start prints it (padding of the vocabulary left out)
    activations  per layer and token, in elements: x, norm(x), q, o, h, norm(h), the MLP's u, and of keys and values
                 k and v as the attention kernel takes them; with rotary positions also v's other half, from which k
                 was made, since v is a view of both
    head         one chunk of logits, and of the tokens 2 D more
    or a layer's backward, where that is more: the MLP's gradients and x's. Weight gradients take nothing: they are
    added to the buffer, which is state

For the kernels in Triton, without recompute and dropout.
"""

from __future__ import annotations

from dataclasses import dataclass

from megalite.config import Config, padded_vocab_size
from megalite.models.flops import num_parameters

STAT_BYTES = 4  # of a statistic of a row: fp32


@dataclass(frozen=True)
class Estimate:
    """Bytes."""

    state: float
    activations: float
    transient: float

    @property
    def peak(self) -> float:
        return self.state + self.activations + self.transient


def layer_bytes(config: Config, size: int) -> int:
    """Saved by one layer for one token; `size`: bytes of an element."""
    m = config.model
    assert m.hidden_size and m.num_attention_heads
    D, q, kv = m.hidden_size, m.num_attention_heads * m.head_size, m.groups * m.head_size
    up = m.ffn_size * (2 if m.activation == "swiglu" else 1)
    keys = 3 * kv if any(m.rotary) or m.qk_layernorm else 2 * kv
    stats = 2 * (1 if m.normalization == "RMSNorm" else 2) + m.num_attention_heads
    return (4 * D + 2 * q + keys + up) * size + stats * STAT_BYTES


def estimate(config: Config, vocab_size: int) -> Estimate:
    from megalite.kernels.linear_cross_entropy import CHUNK_BYTES
    from megalite.train.setup import memory_bytes, state_bytes

    m = config.model
    assert m.hidden_size and m.num_layers and m.seq_length and config.train.micro_batch_size
    size = 2 if config.precision.bf16 or config.precision.fp16 else 4
    tokens, D = m.seq_length * config.train.micro_batch_size, m.hidden_size
    matrix = padded_vocab_size(vocab_size, m.make_vocab_size_divisible_by, 1) * D
    chunk = min(CHUNK_BYTES["cuda"], tokens * matrix // D * size)
    head = chunk + 2 * D * size * tokens
    widths = 4 if m.activation == "swiglu" else 3  # gradients of a and u, and a again
    feed = max(widths * tokens, (widths - 1) * tokens + D) * m.ffn_size
    layer = (feed + D * tokens) * size
    parameters, states = num_parameters(m, vocab_size), state_bytes(config.optim)
    return Estimate(
        state=memory_bytes(parameters, dp=1, half=size == 2, sharded=True, states=states),
        activations=m.num_layers * layer_bytes(config, size) * tokens,
        transient=max(head, layer),
    )
