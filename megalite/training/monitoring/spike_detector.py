"""Detects a loss or a gradient norm that is out of line with the steps before it.

    z = (x - median) / max(1.4826 * MAD, 1 % of the median)     over the last `window` steps that were updated

MAD is the median distance to the median; times 1.4826 it is the deviation of a normal distribution. (Mean and deviation
would follow the very spike.) Only values that are too large count, once a quarter of the window is full. The values are
those of the step's all-reduce, so all ranks decide alike, and are kept in checkpoints, so a resumed run does too.
"""

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from megalite.config.options import TrainConfig

LEAST_DEVIATION = 0.01  # of the median: on a flat curve every ripple would be a spike


@dataclass
class SpikeDetector:
    """`watched`: "loss", "grad norm". `action`: log, skip or rollback. `threshold`: the largest z that is not a spike.
    `rollbacks`: since the last `window` updated steps in a row."""

    metrics: tuple[str, ...] = ()
    action: str = "log"
    threshold: float = 10.0
    window: int = 100
    rollbacks: int = 0
    clean_steps: int = 0  # steps in a row that were updated
    history: dict[str, list[float]] = field(default_factory=dict)

    @classmethod
    def of(cls, t: TrainConfig) -> "SpikeDetector":
        asked = (("loss", t.check_for_spiky_loss), ("grad norm", t.check_for_large_grads))
        metrics = tuple(name for name, yes in asked if yes)
        return cls(metrics, t.spike_action, t.spike_threshold, t.spike_window)

    def detect(self, loss: float, grad_norm: float) -> str | None:
        """The spike in a step, in words; None where there is none."""
        for name, value, before in self._values(loss, grad_norm):
            if 4 * len(before) < self.window:
                continue
            median = statistics.median(before)
            deviation = 1.4826 * statistics.median(abs(x - median) for x in before)
            z = (value - median) / max(deviation, LEAST_DEVIATION * abs(median), 1e-12)
            if z > self.threshold:
                return f"{name} {value:.4g} is {z:.1f} deviations above {median:.4g}, the median of {len(before)} steps"
        return None

    def record(self, loss: float, grad_norm: float, skipped: bool) -> None:
        """Record a step."""
        self.clean_steps = 0 if skipped else self.clean_steps + 1
        if self.clean_steps >= self.window:
            self.rollbacks = 0
        for _, value, before in self._values(loss, grad_norm) if not skipped else ():
            before.append(value)
            del before[: -self.window]

    def _values(self, loss: float, grad_norm: float) -> Iterator[tuple[str, float, list[float]]]:
        for name, value in (("loss", loss), ("grad norm", grad_norm)):
            if name in self.metrics:
                yield name, value, self.history.setdefault(name, [])

    def to_json(self) -> dict[str, Any]:
        return {"rollbacks": self.rollbacks, "quiet": self.clean_steps, "seen": self.history}

    def from_json(self, saved: Mapping[str, Any]) -> None:
        """Continue from a checkpoint's. Raises KeyError, TypeError, ValueError, AttributeError for damaged ones."""
        self.rollbacks, self.clean_steps = int(saved["rollbacks"]), int(saved["quiet"])
        self.history = {str(name): [float(x) for x in of][-self.window :] for name, of in saved["seen"].items()}
        if not all(math.isfinite(x) for of in self.history.values() for x in of):
            raise ValueError("a loss or norm among the steps before is not finite")
