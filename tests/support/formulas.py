"""The second reading of what a layer costs: the formulas of the literature, beside which the bills are held. Pure.

FLOPs per token, forward, a multiply-add counted as 2 (recompute never counts):

    layer   2 D (q + 2 kv) + 2 q D + 2 D F w + 2 * 2 * q * seen      q = H K, kv = G K, w = 3 gated, else 2
    head    2 D V                                                    V padded
    seen    S / 2: the causal half of S x S; in a window of W < S keys the band of it, W - W^2 / 2 S

So a model with a window has fewer FLOPs, and its MFU is not raised by scores that nobody needs. Backward is twice the
forward. Borders of documents are not counted.

Of a backward the input's gradient takes as long as the forward, and once more the scores, which have no weights; the
weights' gradients take as long as the forward's matmuls. The head has all of it in its forward (nn/loss.py).

What a layer saves, in elements per token: x, norm(x), h, norm(h) of D (without h where the residual is parallel); q
and o; k and v, once more k where it is normed or rotated, since v is a view of what the matmul gave; of normed q both;
the MLP's u. No scores, no dropout masks. x and its norms are split over tp along the sequence, all else by channels.
What then waits for the weights' gradients, of each matmul the input and the gradient of the output: norm(x), dq, dk,
dv; o, dy; norm(h), du; a of F, dy. Both dy of D are whole, since backward has gathered them; keys and values that tp
ranks share do not wait, nor does q then.
"""

from megalite.config.options import ModelConfig
from megalite.kernels.activation import get_activation

STAT_BYTES = 4  # of a statistic of a row: fp32


def layer_saved(model: ModelConfig, size: int, tp: int = 1, again: tuple[str, ...] = ()) -> float:
    """Bytes that one layer keeps for its backward, per token and tp rank; `size`: bytes of an element. Also the extra
    backward of a layer that is recomputed. `again`: the parts that leave nothing behind but their inputs."""
    m = model
    D, q, kv = m.hidden_size / tp, m.num_attention_heads * m.head_size / tp, max(m.num_kv_groups / tp, 1) * m.head_size
    up = m.ffn_size * get_activation(m.activation).width / tp
    moved = m.qk_layernorm or any(m.rope_layers)  # k is not what the matmul gave, which v still holds
    elements = (3 if m.parallel_residual else 4) * D + (3 if m.qk_layernorm else 2) * q + (3 if moved else 2) * kv + up
    elements -= 2 * D * ("layernorm" in again) + up * ("mlp" in again)
    heads = m.num_attention_heads / tp
    normed = (2 if m.qk_layernorm_over_heads else heads + max(m.num_kv_groups / tp, 1)) if m.qk_layernorm else 0
    stats = (2 / tp + normed) * (1 if m.normalization == "RMSNorm" else 2) + heads
    return elements * size + stats * STAT_BYTES


def layer_waiting(model: ModelConfig, size: int, tp: int = 1) -> float:
    """Bytes of one layer that wait from the gradient of its input for those of its weights, per token and tp rank."""
    m = model
    D, q, F = m.hidden_size, m.num_attention_heads * m.head_size / tp, m.ffn_size / tp
    qkv = D / tp + q + 2 * m.num_kv_groups * m.head_size / tp if tp <= m.num_kv_groups else 0.0
    return size * (qkv + q + D + D / tp + F * get_activation(m.activation).width + F + D)


def mean_keys(model: ModelConfig, seq_length: int) -> float:
    """How many keys a token sees, on average over positions and layers."""

    def seen(window: int | None) -> float:
        return seq_length / 2 if window is None or window >= seq_length else window - window**2 / (2 * seq_length)

    return sum(map(seen, model.layer_windows)) / model.num_layers


def layer_flops(model: ModelConfig, seq_length: int) -> float:
    """Forward FLOPs per token of one layer; where only some have a window, of the mean of them."""
    return sum(layer_parts(model, seq_length))


def layer_parts(model: ModelConfig, seq_length: int) -> tuple[float, float, float]:
    """Of a layer's forward FLOPs: projections of attention, feed-forward block, scores."""
    m = model
    D, F = m.hidden_size, m.ffn_size
    q, kv = m.num_attention_heads * m.head_size, m.num_kv_groups * m.head_size
    return (
        2.0 * D * (q + 2 * kv) + 2.0 * q * D,
        2.0 * D * F * (get_activation(m.activation).width + 1),
        4.0 * q * mean_keys(m, seq_length),
    )


def head_flops(model: ModelConfig, padded_vocab_size: int) -> float:
    """Forward FLOPs per token of the output projection."""
    return 2.0 * model.hidden_size * padded_vocab_size
