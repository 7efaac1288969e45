"""Counted from the shape alone: model FLOPs, activations that are saved. Pure.

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

from __future__ import annotations

from megalite.config.options import ModelConfig

STAT_BYTES = 4  # of a statistic of a row: fp32
How = tuple[str | None, str, int, tuple[str, ...]]  # of recompute, as models/gpt.py has it


def layer_saved(model: ModelConfig, size: int, tp: int = 1, again: tuple[str, ...] = ()) -> float:
    """Bytes that one layer keeps for its backward, per token and tp rank; `size`: bytes of an element. Also the extra
    backward of a layer that is recomputed. `again`: the parts that leave nothing behind but their inputs."""
    m = model
    D, q, kv = m.hidden_size / tp, m.num_attention_heads * m.head_size / tp, max(m.groups / tp, 1) * m.head_size
    up = m.ffn_size * (2 if m.activation == "swiglu" else 1) / tp
    moved = m.qk_layernorm or any(m.rotary)  # k is not what the matmul gave, which v still holds
    elements = (3 if m.parallel_residual else 4) * D + (3 if m.qk_layernorm else 2) * q + (3 if moved else 2) * kv + up
    elements -= 2 * D * ("layernorm" in again) + up * ("mlp" in again)
    heads = m.num_attention_heads / tp
    normed = heads + max(m.groups / tp, 1) if m.qk_layernorm else 0
    stats = (2 / tp + normed) * (1 if m.normalization == "RMSNorm" else 2) + heads
    return elements * size + stats * STAT_BYTES


def stage_saved(
    model: ModelConfig, layers: int, last: bool, recompute: How, size: int, tp: int = 1
) -> tuple[float, float]:
    """Bytes per token and tp rank that a stage of `layers` layers keeps of a micro-batch from its forward to its
    backward; and what its backward recomputes, once at a time."""
    granularity, method, n, modules = recompute
    layer, edge = layer_saved(model, size, tp), model.hidden_size / tp * size
    head = 2 * edge if last else 0.0  # x, and its gradient, which is computed in forward
    if granularity == "selective":
        kept = layer_saved(model, size, tp, modules)
        return layers * kept + head, layer - kept if layers else 0.0
    if granularity is None or not layers:
        return layers * layer + head, 0.0
    if method == "uniform":
        return -(-layers // n) * edge + head, min(n, layers) * layer
    again = min(n, layers)
    return again * edge + (layers - again) * layer + head, layer if again else 0.0


def layer_waiting(model: ModelConfig, size: int, tp: int = 1) -> float:
    """Bytes of one layer that wait from the gradient of its input for those of its weights, per token and tp rank."""
    m = model
    D, q, F = m.hidden_size, m.num_attention_heads * m.head_size / tp, m.ffn_size / tp
    qkv = D / tp + q + 2 * m.groups * m.head_size / tp if tp <= m.groups else 0.0
    return size * (qkv + q + D + D / tp + F * (2 if m.activation == "swiglu" else 1) + F + D)


def mean_keys(model: ModelConfig, seq_length: int) -> float:
    """How many keys a token sees, on average over positions and layers."""

    def seen(window: int | None) -> float:
        return seq_length / 2 if window is None or window >= seq_length else window - window**2 / (2 * seq_length)

    return sum(map(seen, model.windows)) / model.num_layers


def layer_flops(model: ModelConfig, seq_length: int) -> float:
    """Forward FLOPs per token of one layer; where only some have a window, of the mean of them."""
    return sum(layer_parts(model, seq_length))


def layer_parts(model: ModelConfig, seq_length: int) -> tuple[float, float, float]:
    """Of a layer's forward FLOPs: projections of attention, feed-forward block, scores."""
    m = model
    D, F = m.hidden_size, m.ffn_size
    q, kv = m.num_attention_heads * m.head_size, m.groups * m.head_size
    return (
        2.0 * D * (q + 2 * kv) + 2.0 * q * D,
        2.0 * D * F * (3 if m.activation == "swiglu" else 2),
        4.0 * q * mean_keys(m, seq_length),
    )


def stage_flops(
    model: ModelConfig, layers: int, padded_vocab_size: int | None, recompute: How, seq_length: int
) -> tuple[float, float, float]:
    """FLOPs per token of a stage of `layers` layers: forward; backward to its input, with what is computed again; the
    gradients of its weights. `padded_vocab_size`: of the last stage, which has the head; else None."""
    granularity, method, n, modules = recompute
    projections, mlp, scores = layer_parts(model, seq_length)
    layer, again = projections + mlp + scores, 0.0
    if granularity == "full":
        again = layer * (min(n, layers) if method == "block" else layers)
    elif granularity == "selective":
        again = layers * (scores * ("core_attn" in modules) + mlp * ("mlp" in modules))
    head = 0.0 if padded_vocab_size is None else 3 * head_flops(model, padded_vocab_size)
    return layers * layer + head, layers * (layer + scores) + again, layers * (projections + mlp)


def head_flops(model: ModelConfig, padded_vocab_size: int) -> float:
    """Forward FLOPs per token of the output projection."""
    return 2.0 * model.hidden_size * padded_vocab_size


def train_flops_per_token(model: ModelConfig, seq_length: int, padded_vocab_size: int) -> float:
    """Model FLOPs of forward and backward per token."""
    return 3.0 * (model.num_layers * layer_flops(model, seq_length) + head_flops(model, padded_vocab_size))
