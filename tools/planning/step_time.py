"""Seconds of a training step, by simulation of the real schedule."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StepTime:
    """parts      seconds of the ranks' mean that sum to `seconds`: compute, bubble, optimizer, what shows of tp, pp, dp
    mfu           of train_flops_per_token, per device, causal, as the trainer logs it
    tokens_per_s  of the whole cluster
    """

    seconds: float
    parts: dict[str, float]
    mfu: float
    tokens_per_s: float
