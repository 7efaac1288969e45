"""Counted from the shape alone: parameters, model FLOPs, memory per rank. Pure.

FLOPs per token, forward, a multiply-add counted as 2 (recompute never counts):

    layer   2 D (q + 2 kv) + 2 q D + 2 D F w + 2 * 2 * q * seen      q = H K, kv = G K, w = 3 gated, else 2
    head    2 D V                                                    V padded
    seen    S / 2: the causal half of S x S; in a window of W < S keys the band of it, W - W^2 / 2 S

So a model with a window has fewer FLOPs, and its MFU is not raised by scores that nobody needs. Backward is twice the
forward. Borders of documents are not counted. Parameters count the true vocabulary, as published figures do.
"""

from __future__ import annotations

from megalite.config import ModelConfig


def num_parameters(model: ModelConfig, vocab_size: int) -> int:
    """Every parameter once.

    >>> from megalite.models.families import PRESETS
    >>> from megalite.config import ModelConfig
    >>> num_parameters(ModelConfig(**{k: v for k, v in PRESETS["gpt2"].items() if k != "vocab_size"}), 50257)
    124439808
    """
    m = model
    assert m.num_layers and m.hidden_size and m.num_attention_heads
    D, K, F = m.hidden_size, m.head_size, m.ffn_size
    q, kv = m.num_attention_heads * K, m.groups * K
    up = 2 * F if m.activation == "swiglu" else F
    norm = 2 * D if m.normalization == "LayerNorm" else D
    layer = D * (q + 2 * kv) + q * D + D * up + F * D + 2 * norm
    if m.add_bias_linear or m.add_qkv_bias:
        layer += q + 2 * kv
    if m.add_bias_linear:
        layer += D + up + D
    if m.qk_layernorm:
        layer += 2 * K * (2 if m.normalization == "LayerNorm" else 1)
    total = m.num_layers * layer + norm + vocab_size * D * (2 if m.untie_embeddings_and_output_weights else 1)
    return total + (m.positions * D if m.position_embedding_type == "learned_absolute" else 0)


def mean_keys(model: ModelConfig, seq_length: int) -> float:
    """How many keys a token sees, on average over positions and layers."""

    def seen(window: int | None) -> float:
        return seq_length / 2 if window is None or window >= seq_length else window - window**2 / (2 * seq_length)

    return sum(map(seen, model.windows)) / model.num_layers


def layer_flops(model: ModelConfig, seq_length: int) -> float:
    """Forward FLOPs per token of one layer; where only some have a window, of the mean of them."""
    m = model
    assert m.hidden_size and m.num_attention_heads
    D, F = m.hidden_size, m.ffn_size
    q, kv = m.num_attention_heads * m.head_size, m.groups * m.head_size
    return (
        2.0 * D * (q + 2 * kv)
        + 2.0 * q * D
        + 2.0 * D * F * (3 if m.activation == "swiglu" else 2)
        + 4.0 * q * mean_keys(model, seq_length)
    )


def head_flops(model: ModelConfig, padded_vocab_size: int) -> float:
    """Forward FLOPs per token of the output projection."""
    assert model.hidden_size
    return 2.0 * model.hidden_size * padded_vocab_size


def train_flops_per_token(model: ModelConfig, seq_length: int, padded_vocab_size: int) -> float:
    """Model FLOPs of forward and backward per token."""
    assert model.num_layers
    return 3.0 * (model.num_layers * layer_flops(model, seq_length) + head_flops(model, padded_vocab_size))
