"""The cost of a layer by the formulas of the literature, which the recorded costs are compared with.

FLOPs per token of the forward. A multiply-add counts as 2, and recompute never counts:

    layer   2 D (q + 2 kv) + 2 q D + 2 D F w + 2 * 2 * q * keys      q = H K, kv = G K, w = 3 if gated, otherwise 2
    head    2 D V                                                    V is padded
    keys    S / 2: the causal half of S x S; with a window of W < S keys its band, W - W^2 / 2 S

A model with a window has fewer FLOPs, so scores that nobody needs do not raise its MFU. The backward has twice the FLOPs
of the forward. Borders of documents are not counted.

In a backward, the gradient of the input takes as long as the forward, plus the scores once more, which have no weights.
The gradients of the weights take as long as the forward's matmuls. The head has all of this in its forward (nn/loss.py).

A layer saves, in elements per token: x, norm(x), h and norm(h), of D each (no h if the residual is parallel); q and o;
k and v, and k once more if it is normed or rotated, since v is a view of the matmul's output; both forms of q if it is
normed; the MLP's u. It saves no scores and no dropout masks. x and its norms are split over tp along the sequence,
everything else by channels.

For the weights' gradients, the input and the output's gradient of each matmul are kept after the gradient of the layer's
input is complete: norm(x), dq, dk, dv; o, dy; norm(h), du; a of F, dy. Both dy of D are full, since the backward has
gathered them. Keys and values that tp ranks share are not kept, and neither is q then.
"""

from megalite.config.options import ModelConfig
from megalite.kernels.activation import get_activation

STAT_BYTES = 4  # a statistic of a row, in fp32


def layer_saved_bytes(model: ModelConfig, size: int, tp: int = 1, recompute_modules: tuple[str, ...] = ()) -> float:
    """Return the bytes that one layer saves for its backward, per token and tp rank.

    The backward of a fully recomputed layer has the same bytes.

    Args:
        size: bytes of an element.
        recompute_modules: the parts that save only their inputs.
    """
    m = model
    D, q, kv = m.hidden_size / tp, m.num_attention_heads * m.head_size / tp, max(m.num_kv_groups / tp, 1) * m.head_size
    up = m.ffn_size * get_activation(m.activation).width / tp
    k_is_copied = m.qk_layernorm or any(m.rope_layers)  # not a view of the output of the matmul, which v keeps alive
    elements = (
        (3 if m.parallel_residual else 4) * D + (3 if m.qk_layernorm else 2) * q + (3 if k_is_copied else 2) * kv + up
    )
    elements -= 2 * D * ("layernorm" in recompute_modules) + up * ("mlp" in recompute_modules)
    heads = m.num_attention_heads / tp
    num_norm_rows = (2 if m.qk_layernorm_over_heads else heads + max(m.num_kv_groups / tp, 1)) if m.qk_layernorm else 0
    stats = (2 / tp + num_norm_rows) * (1 if m.normalization == "RMSNorm" else 2) + heads
    return elements * size + stats * STAT_BYTES


def layer_wgrad_bytes(model: ModelConfig, size: int, tp: int = 1) -> float:
    """Return the bytes of one layer that are kept for its weights' gradients, per token and tp rank."""
    m = model
    D, q, F = m.hidden_size, m.num_attention_heads * m.head_size / tp, m.ffn_size / tp
    qkv = D / tp + q + 2 * m.num_kv_groups * m.head_size / tp if tp <= m.num_kv_groups else 0.0
    return size * (qkv + q + D + D / tp + F * get_activation(m.activation).width + F + D)


def mean_keys(model: ModelConfig, seq_length: int) -> float:
    """Return the number of keys that a token attends to, on average over positions and layers."""

    def mean_keys_of_layer(window: int | None) -> float:
        return seq_length / 2 if window is None or window >= seq_length else window - window**2 / (2 * seq_length)

    return sum(map(mean_keys_of_layer, model.layer_windows)) / model.num_layers


def layer_flops(model: ModelConfig, seq_length: int) -> float:
    """Return the forward FLOPs per token of one layer, or the mean of all layers if only some have a window."""
    return sum(layer_flops_by_part(model, seq_length))


def layer_flops_by_part(model: ModelConfig, seq_length: int) -> tuple[float, float, float]:
    """Return the forward FLOPs per token of the attention projections, the feed-forward block and the scores."""
    m = model
    D, F = m.hidden_size, m.ffn_size
    q, kv = m.num_attention_heads * m.head_size, m.num_kv_groups * m.head_size
    return (
        2.0 * D * (q + 2 * kv) + 2.0 * q * D,
        2.0 * D * F * (get_activation(m.activation).width + 1),
        4.0 * q * mean_keys(m, seq_length),
    )


def head_flops(model: ModelConfig, padded_vocab_size: int) -> float:
    """Return the forward FLOPs per token of the output projection."""
    return 2.0 * model.hidden_size * padded_vocab_size
