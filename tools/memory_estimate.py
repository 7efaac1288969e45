"""What one rank without model parallelism takes at its peak, in bytes, as tools/planning/memory.py counts it."""

from __future__ import annotations

from megalite.config.options import Config


def estimate(config: Config, vocab_size: int) -> dict[str, float]:
    from megalite.train.arrangement import arrange
    from tools.planning.memory import memory

    (found,) = memory(arrange(config, 1, vocab_size))
    state = found.weights + found.gradients + found.optimizer
    return {"peak": found.peak, "state": state, "activations": found.activations}
