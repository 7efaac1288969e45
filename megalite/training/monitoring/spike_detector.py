"""Detect a loss or a gradient norm that is much larger than in the previous steps.

    z = (x - median) / max(1.4826 * MAD, 1 % of the median)     over the last `window` steps that updated the weights

MAD is the median distance to the median; for a normal distribution, 1.4826 * MAD is the standard deviation. (Mean and
standard deviation would be distorted by the spike.) Only values that are too large are spikes, and only once a quarter
of the window is full. The values come from the step's all-reduce, so all ranks make the same decision. They are saved
in checkpoints, so a resumed run makes the same decision too.
"""

import math
import statistics
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from megalite.config.options import TrainConfig

MIN_DEVIATION = 0.01  # of the median; otherwise every ripple of a flat curve would be a spike


@dataclass
class SpikeDetector:
    """A detector of spikes in the loss and the gradient norm."""

    metrics: tuple[str, ...] = ()  # the checked metrics: "loss", "grad norm"
    action: str = "log"  # log, skip or rollback
    threshold: float = 10.0  # the largest z that is not a spike
    window: int = 100
    rollbacks: int = 0  # since there were last `window` updated steps in a row
    clean_steps: int = 0  # steps in a row that updated the weights
    history: dict[str, list[float]] = field(default_factory=dict)  # the last `window` values of each metric

    @classmethod
    def from_config(cls, train: TrainConfig) -> "SpikeDetector":
        """Build the detector that the options describe."""
        metrics = []
        if train.check_for_spiky_loss:
            metrics.append("loss")
        if train.check_for_large_grads:
            metrics.append("grad norm")
        return cls(tuple(metrics), train.spike_action, train.spike_threshold, train.spike_window)

    def detect(self, loss: float, grad_norm: float) -> str | None:
        """Return a description of the spike in a step, or None if there is none."""
        for name, value, history in self._values(loss, grad_norm):
            if 4 * len(history) < self.window:
                continue
            median = statistics.median(history)
            deviation = 1.4826 * statistics.median(abs(x - median) for x in history)
            z = (value - median) / max(deviation, MIN_DEVIATION * abs(median), 1e-12)
            if z > self.threshold:
                return (
                    f"{name} {value:.4g} is {z:.1f} deviations above {median:.4g}, the median of {len(history)} steps"
                )
        return None

    def record(self, loss: float, grad_norm: float, skipped: bool) -> None:
        """Record a step; `skipped` if it did not update the weights."""
        self.clean_steps = 0 if skipped else self.clean_steps + 1
        if self.clean_steps >= self.window:
            self.rollbacks = 0
        if not skipped:
            for _, value, history in self._values(loss, grad_norm):
                history.append(value)
                del history[: -self.window]

    def _values(self, loss: float, grad_norm: float) -> Iterator[tuple[str, float, list[float]]]:
        """Yield (name, value, history) of each checked metric."""
        for name, value in (("loss", loss), ("grad norm", grad_norm)):
            if name in self.metrics:
                yield name, value, self.history.setdefault(name, [])

    def to_json(self) -> dict[str, Any]:
        return {"rollbacks": self.rollbacks, "quiet": self.clean_steps, "seen": self.history}

    def from_json(self, saved: Mapping[str, Any]) -> None:
        """Restore a saved state; raises KeyError, TypeError, ValueError or AttributeError if it is damaged."""
        self.rollbacks, self.clean_steps = int(saved["rollbacks"]), int(saved["quiet"])
        self.history = {
            str(name): [float(value) for value in values][-self.window :] for name, values in saved["seen"].items()
        }
        if not all(math.isfinite(value) for values in self.history.values() for value in values):
            raise ValueError("a loss or norm of the previous steps is not finite")
