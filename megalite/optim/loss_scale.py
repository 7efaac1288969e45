"""Loss scaling for fp16 (arXiv:1710.03740): the loss is multiplied before the backward, the gradients divided after it.

A step whose gradients overflow is skipped. Dynamic scaling counts as Megatron-LM does: the `hysteresis`-th overflow and
each one after it halve the scale. `growth_interval` steps in a row without overflow double the scale and restart the
count of overflows. Fewer such steps don't restart it, so that a scale near the limit is lowered soon. For fp32 and bf16
the scale is a constant 1.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


class LossScaleExhausted(RuntimeError):
    """Error: the scale is at its minimum and gradients still overflow, so all further steps would be skipped."""


@dataclass
class LossScaler:
    """The loss scale.

    Attributes:
        scale: the current scale.
        dynamic: True if the scale is adapted; False if it is constant.
        minimum: lower limit of the scale.
        growth_interval: number of steps in a row without overflow that double the scale.
        hysteresis: number of overflows that halve the scale.
        good_steps: steps in a row without overflow so far.
        hysteresis_left: overflows left before the scale is halved; None: all of `hysteresis`.
    """

    scale: float = 1.0
    dynamic: bool = False
    minimum: float = 1.0
    growth_interval: int = 1000
    hysteresis: int = 2
    good_steps: int = 0
    hysteresis_left: int | None = None

    def update(self, overflow: bool) -> None:
        """Adapt the scale after a step. Raises LossScaleExhausted if it would fall below the minimum."""
        if not self.dynamic:
            return
        if not overflow:
            self.good_steps += 1
            if self.good_steps == self.growth_interval:
                self.good_steps = 0
                self.hysteresis_left = None
                self.scale *= 2
            return
        self.good_steps = 0
        hysteresis_left = self.hysteresis if self.hysteresis_left is None else self.hysteresis_left
        self.hysteresis_left = max(0, hysteresis_left - 1)
        if self.hysteresis_left == 0:
            if self.scale <= self.minimum:
                raise LossScaleExhausted(
                    f"min_loss_scale={self.minimum:g} is reached and gradients still overflow; lower --lr or use --bf16"
                )
            self.scale = max(self.scale / 2, self.minimum)

    def to_json(self) -> dict[str, float | int | bool | None]:
        """Return the state; if `dynamic` is False the other values are not used."""
        return {
            "dynamic": self.dynamic,
            "scale": self.scale,
            "clean_steps": self.good_steps,
            "patience": self.hysteresis_left,
        }

    def from_json(self, state: Mapping[str, Any]) -> None:
        """Restore a saved state; the settings remain those of this run. If either run has a constant scale, do nothing.

        Raises KeyError or ValueError if the state is damaged. A scale of NaN, for instance, would skip all steps.
        """
        dynamic, scale = state["dynamic"], state["scale"]
        good_steps, hysteresis_left = state["clean_steps"], state["patience"]
        are_counts = type(good_steps) is int and type(hysteresis_left or 0) is int
        is_scale = type(scale) in (int, float) and 0 < scale < math.inf
        if type(dynamic) is not bool or not is_scale or not are_counts or good_steps < 0:
            raise ValueError(f"loss_scaler: {str(dict(state))[:160]}")
        if not (self.dynamic and dynamic):
            return
        self.scale = max(float(scale), self.minimum)
        self.good_steps = min(int(good_steps), self.growth_interval - 1)  # the interval may have been shortened
        if hysteresis_left is None:
            self.hysteresis_left = None
        else:
            self.hysteresis_left = max(0, min(hysteresis_left, self.hysteresis))  # older files contain -1
