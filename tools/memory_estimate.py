"""What one rank without model parallelism takes at its peak, in bytes, counted from the shape: what the plan at start
prints of it (train/arrangement.py), state and activations, and what lives for a moment:

    head     one chunk of logits; x and its gradient are among the activations
    layer    or a layer's backward, where that is more: the MLP's gradients and x's. Weight gradients take nothing: they
             are added to the buffer, which is state

For the kernels in Triton, without recompute and dropout.
"""

from __future__ import annotations

from megalite.config.options import Config


def estimate(config: Config, vocab_size: int) -> dict[str, float]:
    from megalite.kernels.linear_cross_entropy import CHUNK_BYTES
    from megalite.train.arrangement import arrange

    plan, m = arrange(config, 1, vocab_size), config.model
    size, tokens, D = plan.dtype.itemsize, m.seq_length * config.train.micro_batch_size, m.hidden_size
    chunk = min(CHUNK_BYTES["cuda"], tokens * plan.padded_vocab * size)
    widths = 4 if m.activation == "swiglu" else 3  # gradients of a and u, and a again
    feed = max(widths * tokens, (widths - 1) * tokens + D) * m.ffn_size
    layer = (feed + D * tokens) * size - 2 * D * size * tokens  # the head's x and gradient are gone by then
    (held,), (activations,) = plan.holdings, plan.activations
    return {
        "peak": held.state + activations + max(chunk, layer),
        "state": held.state,
        "activations": activations,
    }
