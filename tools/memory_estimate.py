"""What one rank without model parallelism takes at its peak, counted from the shape: state and activations.

    state        weights, gradients, optimizer, as the plan at start prints it
    activations  what the layers save (models/flops.py)
    head         one chunk of logits, and of the tokens 2 D more
    or a layer's backward, where that is more: the MLP's gradients and x's. Weight gradients take nothing: they are
    added to the buffer, which is state

For the kernels in Triton, without recompute and dropout.
"""

from __future__ import annotations

from dataclasses import dataclass

from megalite.config.options import Config, padded_vocab_size
from megalite.models.flops import layer_saved


@dataclass(frozen=True)
class Estimate:
    """Bytes."""

    state: float
    activations: float
    transient: float

    @property
    def peak(self) -> float:
        return self.state + self.activations + self.transient


def estimate(config: Config, vocab_size: int) -> Estimate:
    from megalite.kernels.linear_cross_entropy import CHUNK_BYTES
    from megalite.train.arrangement import arrange

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
    return Estimate(
        state=arrange(config, 1, vocab_size).holdings[0].state,
        activations=m.num_layers * layer_saved(m, size) * tokens,
        transient=max(head, layer),
    )
