"""Learning rate and weight decay as pure functions of the consumed samples, with Megatron-LM's decay styles.

    warmup     init + (peak - init) * n / warm_up                        n <= warm_up
    linear     min + (peak - min) * (1 - r)            r = (n - warm_up) / (decay - warm_up)
    cosine     min + (peak - min) * (1 + cos(pi r)) / 2
    inverse-square-root   peak * sqrt(warm_up / n), at least min
    WSD        peak until decay - wsd, then to min by wsd_style          arXiv:2404.06395

The unit is samples, because the batch size may grow; iterations are converted by the global batch size. `n` is the
number of samples consumed before the step, as in Megatron-LM, which advances its scheduler after the update: without
warmup the first update is at the peak, with warmup at `init`. The logged rate is that of the next update. Samples of
steps without an update (fp16 overflow, --iterations-to-skip) do not count.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, TypeVar

from megalite.config.registry import REGISTRIES


@dataclass(frozen=True)
class LrSchedule:
    """The learning rate by the number of consumed samples.

    `warm_up`, `decay` and `wsd` are numbers of samples. `decay` includes the warmup; after it the rate is `minimum`
    (except with style "constant").

    >>> lr = LrSchedule(peak=1.0, minimum=0.1, style="linear", warm_up=10, decay=100)
    >>> [round(lr.at(n), 3) for n in (5, 10, 55, 100, 101)]
    [0.5, 1.0, 0.55, 0.1, 0.1]
    """

    peak: float
    minimum: float
    style: str
    warm_up: float
    decay: float
    warm_up_init: float = 0.0
    wsd: float = 0.0
    wsd_style: str = "exponential"

    def scaled(self, factor: float) -> "LrSchedule":
        """Return this schedule with all rates multiplied by `factor`.

        It is for a batch that is `factor` times as large (linear scaling, arXiv:1706.02677).
        """
        rates = {name: getattr(self, name) * factor for name in ("peak", "minimum", "warm_up_init")}
        return replace(self, **rates)

    def at(self, n: float) -> float:
        """Return the rate of an update before which `n` samples were consumed.

        Raises ValueError if a plugin's style returns anything but a finite rate from 0.
        """
        if self.warm_up and n <= self.warm_up:
            return self.warm_up_init + (self.peak - self.warm_up_init) * n / self.warm_up
        if n > self.decay and self.style != "constant":
            return self.minimum
        rate = REGISTRIES["lr_decay_style"].get(self.style)(self, n)
        if not isinstance(rate, int | float) or not 0 <= rate < math.inf:  # a plugin's may be anything
            raise ValueError(
                f"lr_decay_style={self.style!r} gives {rate!r} at sample {n:g}; give a finite rate of 0 or more"
            )
        return rate

    def decay_progress(self, n: float) -> float:
        """Return the completed fraction of the decay, from 0 to 1. Requires warm_up < n <= decay."""
        return (n - self.warm_up) / (self.decay - self.warm_up)

    def interpolate(self, fraction: float) -> float:
        """Return the rate between `minimum` (fraction 0) and `peak` (fraction 1)."""
        return self.minimum + (self.peak - self.minimum) * fraction


def constant(lr: LrSchedule, n: float) -> float:
    """Return the peak."""
    return lr.peak


def linear(lr: LrSchedule, n: float) -> float:
    """Return the rate of a linear decay."""
    return lr.interpolate(DECAY_CURVES["linear"](lr.decay_progress(n)))


def cosine(lr: LrSchedule, n: float) -> float:
    """Return the rate of a cosine decay."""
    return lr.interpolate(DECAY_CURVES["cosine"](lr.decay_progress(n)))


def inverse_square_root(lr: LrSchedule, n: float) -> float:
    """Return the rate of an inverse-square-root decay."""
    return max(lr.minimum, lr.peak * math.sqrt(max(lr.warm_up, 1) / max(n, 1)))


def wsd(lr: LrSchedule, n: float) -> float:
    """Return the rate of a warmup-stable-decay schedule."""
    start = lr.decay - lr.wsd
    return lr.interpolate(1.0 if n <= start else DECAY_CURVES[lr.wsd_style]((n - start) / lr.wsd))


DECAY_CURVES: Mapping[str, Callable[[float], float]] = {
    "linear": lambda r: 1.0 - r,
    "cosine": lambda r: 0.5 * (1.0 + math.cos(math.pi * r)),
    "exponential": lambda r: 2.0 * 0.5**r - 1.0,
    "minus_sqrt": lambda r: 1.0 - math.sqrt(r),
}
STYLES = {"style": REGISTRIES["lr_decay_style"], "wsd_style": DECAY_CURVES}


@dataclass(frozen=True)
class WeightDecaySchedule:
    """The weight decay, from `start` to `end` over `samples` samples; afterwards it is `end`.

    >>> decay = WeightDecaySchedule(start=0.0, end=0.1, style="cosine", samples=100)
    >>> [round(decay.at(n), 3) for n in (0, 50, 100, 101)]
    [0.0, 0.05, 0.1, 0.1]
    """

    start: float
    end: float
    style: str
    samples: float

    def at(self, n: float) -> float:
        """Return the weight decay of an update before which `n` samples were consumed."""
        if self.style == "constant" or n > self.samples:
            return self.end
        ratio = n / self.samples
        fraction = ratio if self.style == "linear" else 0.5 * (1.0 + math.cos(math.pi * (1.0 - ratio)))
        return self.start + (self.end - self.start) * fraction


@dataclass(frozen=True)
class OptimSchedules:
    """All schedules of a run; `decoupled` is that of word embedding and head, if they have a separate learning rate."""

    lr: LrSchedule
    weight_decay: WeightDecaySchedule
    decoupled: LrSchedule | None = None

    def to_json(self) -> dict[str, Any]:
        """Return the fields, for a checkpoint."""
        return asdict(self)

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> "OptimSchedules":
        """Return the schedules in a checkpoint. Raises KeyError, TypeError or ValueError if they are damaged."""
        decoupled = saved["decoupled"]
        return cls(
            _from_saved(LrSchedule, saved["lr"]),
            _from_saved(WeightDecaySchedule, saved["weight_decay"]),
            None if decoupled is None else _from_saved(LrSchedule, decoupled),
        )

    def resume_facts(self) -> dict[str, float | str]:
        """Return the values that a resume must not change by accident.

        These are the values that Megatron-LM compares, without those that have no effect.
        """
        lr, decay, decoupled = self.lr, self.weight_decay, self.decoupled
        facts: dict[str, float | str] = {"lr": lr.peak, "warmup in samples": lr.warm_up, "lr_decay_style": lr.style}
        if lr.style != "constant":
            facts["min_lr"] = lr.minimum
            facts["decay in samples"] = lr.decay
        if decay.style == "constant":
            facts["weight_decay"] = decay.end
        else:
            facts["start_weight_decay"] = decay.start
            facts["end_weight_decay"] = decay.end
            facts["weight_decay_incr_style"] = decay.style
            facts["growth of weight decay in samples"] = decay.samples
        if decoupled is not None:
            facts["decoupled_lr"] = decoupled.peak
            facts["decoupled_min_lr"] = decoupled.minimum
        return facts


T = TypeVar("T", LrSchedule, WeightDecaySchedule)


def _from_saved(cls: type[T], saved: Mapping[str, Any]) -> T:
    """Return a schedule with saved values, which are checked. Raises KeyError, TypeError or ValueError."""
    values: dict[str, Any] = {field.name: saved[field.name] for field in fields(cls)}
    for name, value in values.items():
        if name in STYLES:
            if value not in STYLES[name]:
                raise ValueError(f"{name} is {str(value)[:40]!r}")
        elif type(value) not in (int, float) or not 0 <= value < math.inf:
            raise ValueError(f"{name} is {str(value)[:40]!r}, not a number of 0 or more")
        else:
            values[name] = float(value)
    return cls(**values)
