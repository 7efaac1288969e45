"""Activations of the feed-forward block, each with its backward from the input alone.

Each is a file of megalite/kernels/activations/ that defines ACTIVATION, and the file's name is the activation's:
`--activation` offers what the folder holds (megalite/config/activations.py). Nothing else names them one by one.

Backward needs only the input, so a caller saves that (nn/linear.py), and also returns `a` again.
"""

import functools
import importlib
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from megalite.config.activations import ACTIVATIONS


@dataclass(frozen=True)
class Activation:
    """forward(u) -> a and backward(u, da) -> (a, du). `width`: how many input columns make one output column (2 for
    gated ones: [gate | up]). With `takes_bias` both take one as their last argument, which is added to u first, and
    backward returns its gradient as a third result."""

    forward: Callable[..., Tensor]
    backward: Callable[..., tuple[Tensor, ...]]
    width: int = 1
    takes_bias: bool = False


@functools.cache
def activation_named(name: str) -> Activation:
    """The activation that megalite/kernels/activations/<name>.py defines. Raises ValueError where there is no such
    file: only what is in that folder is ever imported by name."""
    if name not in ACTIVATIONS:
        raise ValueError(f"activation={name!r} is unknown; use one of {', '.join(ACTIVATIONS)}")
    return importlib.import_module(f"megalite.kernels.activations.{name}").ACTIVATION
