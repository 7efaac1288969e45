"""Activations of the feed-forward block, each with its backward from the input alone.

Each is a file of megalite/kernels/activations/ that defines ACTIVATION, and the file's name is the activation's:
`--activation` offers what the folder holds, and those of plugins (megalite/config/registry.py). Nothing else names
them one by one.

Backward needs only the input, so a caller saves that (nn/linear.py), and also returns `a` again.
"""

from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from megalite.config.registry import KINDS


@dataclass(frozen=True)
class Activation:
    """forward(u) -> a and backward(u, da) -> (a, du). `width`: how many input columns make one output column (2 for
    gated ones: [gate | up]). With `takes_bias` both take one as their last argument, which is added to u first, and
    backward returns its gradient as a third result. `swiglu`: of SwiGLU the constants (activations/swiglu.py), by which
    experts' matmuls compute it where they have its input in registers (gated_matmul.py)."""

    forward: Callable[..., Tensor]
    backward: Callable[..., tuple[Tensor, ...]]
    width: int = 1
    takes_bias: bool = False
    swiglu: tuple[float, float] | None = None


def activation_named(name: str) -> Activation:
    """Raises ValueError where there is none."""
    return KINDS["activation"].find(name)
