"""The rotary positions of a layer as data; kernels/rope.py computes their tables. Imports no torch."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class RopeScaling:
    """The parameters of Llama-3 frequency scaling; lengths are in tokens."""

    factor: float = 8.0
    low_factor: float = 1.0
    high_factor: float = 4.0
    original_length: int = 8192


@dataclass(frozen=True)
class Yarn:
    """The parameters of YaRN (arXiv:2309.00071, sec. 3.2 to 3.4).

    A channel that makes more than `beta_fast` turns in `original_length` tokens keeps its wavelength, and a channel
    that makes fewer than `beta_slow` turns is stretched by `factor`. Between these two channels the blend is linear in
    the channel's number; with `round_bounds` the numbers of the two channels are rounded outwards. Queries and keys are
    multiplied by (1 + 0.1 mscale log factor) / (1 + 0.1 mscale_all_dim log factor).
    """

    factor: float = 1.0
    original_length: int = 4096
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    round_bounds: bool = True
    mscale: float = 1.0
    mscale_all_dim: float = 0.0

    @property
    def magnitude(self) -> float:
        """Return the factor of the tables."""
        log = math.log(max(self.factor, 1.0))
        return (1 + 0.1 * self.mscale * log) / (1 + 0.1 * self.mscale_all_dim * log)


Scaling = RopeScaling | Yarn | None


@dataclass(frozen=True)
class RopeSpec:
    """The rotary position embedding of a layer; layers with equal specs share one table.

    Attributes:
        dim: The number of rotated channels of each head, R.
        base: The base of the wavelengths (theta).
        interpolation: The divisor of the positions (arXiv:2306.15595).
        scaling: A rule that stretches the wavelengths, or None.
    """

    dim: int
    base: float
    interpolation: float = 1.0
    scaling: Scaling = None
