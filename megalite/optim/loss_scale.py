"""Loss scaling for fp16 (arXiv:1710.03740): the loss is multiplied before backward, the gradients divided after.

A step whose gradients overflow is skipped. Dynamic, counted as in Megatron-LM: each overflow takes one of
`hysteresis` lives, and from the last on halves the scale; `window` clean steps in a row double it and give the lives
back. Fewer clean steps give none back, so that a scale on the edge comes down soon. fp32 and bf16: constant, 1.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class LossScaleExhausted(RuntimeError):
    """The scale is at its floor and gradients still overflow: no step would ever be taken again."""


@dataclass
class LossScaler:
    scale: float = 1.0
    dynamic: bool = False
    minimum: float = 1.0
    growth_interval: int = 1000
    hysteresis: int = 2
    good_steps: int = 0
    hysteresis_left: int | None = None  # overflows left before the scale halves; None: all of `hysteresis`

    def update(self, overflow: bool) -> None:
        if not self.dynamic:
            return
        if not overflow:
            self.good_steps += 1
            if self.good_steps == self.growth_interval:
                self.good_steps, self.hysteresis_left = 0, None
                self.scale *= 2
            return
        self.good_steps = 0
        self.hysteresis_left = max(0, (self.hysteresis if self.hysteresis_left is None else self.hysteresis_left) - 1)
        if self.hysteresis_left == 0:
            if self.scale <= self.minimum:
                raise LossScaleExhausted(
                    f"min_loss_scale={self.minimum:g} is reached and gradients still overflow; lower --lr or use --bf16"
                )
            self.scale = max(self.scale / 2, self.minimum)

    def to_json(self) -> dict[str, float | int | bool | None]:
        """The moving numbers; `dynamic` says whether they mean anything."""
        return {
            "dynamic": self.dynamic,
            "scale": self.scale,
            "clean_steps": self.good_steps,
            "patience": self.hysteresis_left,
        }

    def from_json(self, state: Mapping[str, Any]) -> None:
        """Go on from a saved state. The settings stay those of this run; a run that was not dynamic says nothing.
        Raises KeyError, ValueError for a damaged one: a scale of NaN, for instance, would skip all steps."""
        dynamic, scale = state["dynamic"], state["scale"]
        clean_steps, patience = state["clean_steps"], state["patience"]
        counts = [n for n in (clean_steps, patience or 0) if type(n) is not int]
        number = type(scale) in (int, float) and 0 < scale < math.inf
        if type(dynamic) is not bool or not number or counts or clean_steps < 0:
            raise ValueError(f"loss_scaler: {str(dict(state))[:160]}")
        if not (self.dynamic and dynamic):
            return
        self.scale = max(float(scale), self.minimum)
        self.good_steps = min(int(clean_steps), self.growth_interval - 1)  # the window may have been shortened
        self.hysteresis_left = (
            None if patience is None else max(0, min(patience, self.hysteresis))
        )  # older files have -1
