"""Loss scaling for fp16 (arXiv:1710.03740): the loss is multiplied before backward, the gradients divided after.

Dynamic: an overflow skips the step; after `hysteresis` of them in a row of windows the scale halves, and after
`window` clean steps it doubles. Scale 1 and not dynamic for fp32 and bf16.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass


class ScaleExhausted(RuntimeError):
    """The scale is at its floor and gradients still overflow."""


@dataclass
class LossScaler:
    scale: float = 1.0
    dynamic: bool = False
    minimum: float = 1.0
    window: int = 1000
    hysteresis: int = 2
    clean_steps: int = 0
    patience: int | None = None  # overflows left before the scale halves

    def update(self, overflow: bool) -> None:
        if not self.dynamic:
            return
        patience = self.hysteresis if self.patience is None else self.patience
        if overflow:
            self.clean_steps = 0
            self.patience = patience - 1
            if self.patience <= 0:
                if self.scale <= self.minimum:
                    raise ScaleExhausted(
                        f"min_loss_scale={self.minimum} is reached and gradients still overflow; lower --lr or use --bf16"
                    )
                self.scale = max(self.scale / 2, self.minimum)
        else:
            self.clean_steps += 1
            if self.clean_steps == self.window:
                self.clean_steps, self.patience = 0, self.hysteresis
                self.scale *= 2

    def to_json(self) -> dict[str, float | int | bool | None]:
        return asdict(self)

    def from_json(self, state: dict[str, float | int | bool | None]) -> None:
        """Take the moving numbers of a saved state; the settings stay those of this run."""
        if self.dynamic and state.get("dynamic"):
            self.scale = float(state["scale"] or self.scale)
            self.clean_steps = int(state["clean_steps"] or 0)
            patience = state["patience"]
            self.patience = None if patience is None else int(patience)
