"""Learning rate and weight decay as pure functions of the samples consumed: the curves of Megatron-LM.

    warm-up    init + (peak - init) * n / warm_up                        n <= warm_up
    linear     min + (peak - min) * (1 - r)            r = (n - warm_up) / (decay - warm_up)
    cosine     min + (peak - min) * (1 + cos(pi r)) / 2
    inverse-square-root   peak * sqrt(warm_up / n), at least min
    WSD        peak until decay - wsd, then to min by wsd_style          arXiv:2404.06395

Samples are the one unit, because a batch may grow: iterations count as iterations x global batch size. `n` is what was
consumed before the step, as in Megatron-LM, which reads its scheduler and then moves it on: without warm-up the first
update is at the peak, with one at `init`. The rate in the log is the one after the move, that of the next update.
Samples of steps that updated nothing (fp16 overflow, --iterations-to-skip) do not count.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, TypeVar

from megalite.config.registry import REGISTRIES


@dataclass(frozen=True)
class LrSchedule:
    """Counts in samples. `decay` includes the warm-up; beyond it the rate is `minimum` (but for constant).

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
        """The same curve at other heights: a batch that is `factor` times as large moves as far with as many times the
        rate (linear scaling, arXiv:1706.02677)."""
        heights = {name: getattr(self, name) * factor for name in ("peak", "minimum", "warm_up_init")}
        return replace(self, **heights)

    def at(self, n: float) -> float:
        if self.warm_up and n <= self.warm_up:
            return self.warm_up_init + (self.peak - self.warm_up_init) * n / self.warm_up
        if n > self.decay and self.style != "constant":
            return self.minimum
        rate = REGISTRIES["lr_decay_style"].get(self.style)(self, n)
        if not isinstance(rate, int | float) or not 0 <= rate < math.inf:  # a plugin's may be anything
            raise ValueError(f"lr_decay_style={self.style!r} gives {rate!r} at sample {n:g}; give a finite rate from 0")
        return rate

    def decay_progress(self, n: float) -> float:
        """Of the decay that is over, from 0 to 1; for warm_up < n <= decay, so its length is not 0."""
        return (n - self.warm_up) / (self.decay - self.warm_up)

    def interpolate(self, height: float) -> float:
        """The rate at a height from 0, the minimum, to 1, the peak."""
        return self.minimum + (self.peak - self.minimum) * height


def constant(lr: LrSchedule, n: float) -> float:
    return lr.peak


def linear(lr: LrSchedule, n: float) -> float:
    return lr.interpolate(DECAY_CURVES["linear"](lr.decay_progress(n)))


def cosine(lr: LrSchedule, n: float) -> float:
    return lr.interpolate(DECAY_CURVES["cosine"](lr.decay_progress(n)))


def inverse_square_root(lr: LrSchedule, n: float) -> float:
    return max(lr.minimum, lr.peak * math.sqrt(max(lr.warm_up, 1) / max(n, 1)))


def wsd(lr: LrSchedule, n: float) -> float:
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
    """From `start` to `end` over `samples` samples, by `style`; `end` beyond them.

    >>> decay = WeightDecaySchedule(start=0.0, end=0.1, style="cosine", samples=100)
    >>> [round(decay.at(n), 3) for n in (0, 50, 100, 101)]
    [0.0, 0.05, 0.1, 0.1]
    """

    start: float
    end: float
    style: str
    samples: float

    def at(self, n: float) -> float:
        if self.style == "constant" or n > self.samples:
            return self.end
        ratio = n / self.samples
        height = ratio if self.style == "linear" else 0.5 * (1.0 + math.cos(math.pi * (1.0 - ratio)))
        return self.start + (self.end - self.start) * height


@dataclass(frozen=True)
class OptimSchedules:
    """All that a run follows; `decoupled`: the rate of word embedding and head, where it is another."""

    lr: LrSchedule
    weight_decay: WeightDecaySchedule
    decoupled: LrSchedule | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, saved: Mapping[str, Any]) -> "OptimSchedules":
        """Raises KeyError, TypeError, ValueError."""
        decoupled = saved["decoupled"]
        return cls(
            _from_saved(LrSchedule, saved["lr"]),
            _from_saved(WeightDecaySchedule, saved["weight_decay"]),
            None if decoupled is None else _from_saved(LrSchedule, decoupled),
        )

    def resume_facts(self) -> dict[str, float | str]:
        """What a resume must not change unasked: what Megatron-LM compares, without that which has no effect."""
        lr, decay, decoupled = self.lr, self.weight_decay, self.decoupled
        resume_facts: dict[str, float | str] = {
            "lr": lr.peak,
            "warm-up in samples": lr.warm_up,
            "lr_decay_style": lr.style,
        }
        if lr.style != "constant":
            resume_facts |= {"min_lr": lr.minimum, "decay in samples": lr.decay}
        if decay.style == "constant":
            resume_facts["weight_decay"] = decay.end
        else:
            resume_facts |= {"start_weight_decay": decay.start, "end_weight_decay": decay.end}
            resume_facts |= {"weight_decay_incr_style": decay.style, "growth of weight decay in samples": decay.samples}
        if decoupled is not None:
            resume_facts |= {"decoupled_lr": decoupled.peak, "decoupled_min_lr": decoupled.minimum}
        return resume_facts


T = TypeVar("T", LrSchedule, WeightDecaySchedule)


def _from_saved(cls: type[T], saved: Mapping[str, Any]) -> T:
    """From a file, where anything may be. Raises KeyError, TypeError, ValueError."""
    values: dict[str, Any] = {f.name: saved[f.name] for f in fields(cls)}
    for name, value in values.items():
        if name in STYLES:
            if value not in STYLES[name]:
                raise ValueError(f"{name} is {str(value)[:40]!r}")
        elif type(value) not in (int, float) or not 0 <= value < math.inf:
            raise ValueError(f"{name} is {str(value)[:40]!r}, not a number from 0")
    numbers: dict[str, Any] = {name: float(value) for name, value in values.items() if name not in STYLES}
    return cls(**{**values, **numbers})
