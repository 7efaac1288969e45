"""Learning rate as a pure function of the samples consumed: the curves of Megatron-LM.

    warm-up    init + (peak - init) * n / warm_up                        n <= warm_up
    linear     min + (peak - min) * (1 - r)            r = (n - warm_up) / (decay - warm_up)
    cosine     min + (peak - min) * (1 + cos(pi r)) / 2
    inverse-square-root   peak * sqrt(warm_up / n), at least min
    WSD        peak until decay - wsd, then to min by wsd_style          arXiv:2404.06395

Samples are the one unit, because a batch may grow: iterations count as iterations x global batch size. `n` includes
the batch of the step that uses the rate, so the first step is not spent at rate 0 (Megatron-LM logs this value too,
but its update uses the one before). Samples of steps that updated nothing (fp16 overflow) do not count.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


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

    def at(self, n: float) -> float:
        if self.warm_up and n <= self.warm_up:
            return self.warm_up_init + (self.peak - self.warm_up_init) * n / self.warm_up
        if self.style == "constant":
            return self.peak
        if n > self.decay:
            return self.minimum
        if self.style == "inverse-square-root":
            return max(self.minimum, self.peak * math.sqrt(max(self.warm_up, 1) / max(n, 1)))
        return self.minimum + (self.peak - self.minimum) * self._height(n)

    def _height(self, n: float) -> float:
        """1 at the peak, 0 at the minimum; for warm_up < n <= decay, so no length here is 0."""
        ratio = (n - self.warm_up) / (self.decay - self.warm_up)
        if self.style == "linear":
            return 1.0 - ratio
        if self.style == "cosine":
            return 0.5 * (1.0 + math.cos(math.pi * ratio))
        start = self.decay - self.wsd
        if n <= start:
            return 1.0
        r = (n - start) / self.wsd
        heights = {
            "linear": 1.0 - r,
            "cosine": 0.5 * (1.0 + math.cos(math.pi * r)),
            "exponential": 2.0 * 0.5**r - 1.0,
            "minus_sqrt": 1.0 - math.sqrt(r),
        }
        return heights[self.wsd_style]
