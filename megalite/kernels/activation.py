"""Activations of the feed-forward block, each with its backward from the input alone.

Each is a file of megalite/kernels/activations/ that defines ACTIVATION, and the file's name is the activation's:
`--activation` offers what the folder holds, and those of plugins (megalite/config/registry.py). Nothing else names
them one by one.

Backward needs only the input, so a caller saves that (nn/linear.py), and also returns `a` again.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megalite.config.registry import REGISTRIES


@dataclass(frozen=True)
class Activation:
    """forward(u) -> a and backward(u, da) -> (a, du). `width`: how many input columns make one output column (2 for
    gated ones: [gate | up]). With `takes_bias` both take one as their last argument, which is added to u first, and
    backward returns its gradient as a third result. `swiglu`: of SwiGLU the constants (activations/swiglu.py), by which
    experts' matmuls compute it where they have its input in registers (gated_matmul.py). `surrogate`: backward is not
    the derivative of forward, on purpose (a straight-through estimator), so a plugin's is not compared with it."""

    forward: Callable[..., Tensor]
    backward: Callable[..., tuple[Tensor, ...]]
    width: int = 1
    takes_bias: bool = False
    swiglu_constants: tuple[float, float] | None = None
    surrogate: bool = False


def get_activation(name: str) -> Activation:
    """Raises ValueError where there is none."""
    return REGISTRIES["activation"].get(name)


def fault_of(part: Any) -> str:
    """What is wrong with a plugin's activation, "" if nothing: its backward against differences of its forward in fp64,
    shapes and dtypes. `verify` cannot find it, since both of its runs use the same activation."""
    if not isinstance(part, Activation):
        return f"is {part!r}; give an Activation of megalite.kernels.activation"
    draw = torch.Generator().manual_seed(0)
    rows, columns = 5, 4
    u = 3 * torch.randn(rows, columns * part.width, generator=draw, dtype=torch.float64)
    da = torch.randn(rows, columns, generator=draw, dtype=torch.float64)
    bias = [torch.randn(u.shape[1], generator=draw, dtype=torch.float64)] if part.takes_bias else []
    with torch.no_grad():
        return (
            _wrong_form(part, u, da, bias)
            or _wrong_form(part, u.bfloat16(), da.bfloat16(), [b.bfloat16() for b in bias])
            or _wrong_constants(part, u, bias)
            or _wrong_gradient(part, u, da, bias)
        )


def _wrong_form(part: Activation, u: Tensor, da: Tensor, bias: list[Tensor]) -> str:
    """Shapes, dtypes, and what must stay as it was."""
    given = u.clone()
    a = part.forward(u, *bias)
    if fault := _unlike("forward's a", a, da.shape, part, u):
        return fault
    results, names = part.backward(u, da, *bias), ["a", "du", "dbias"][: 2 + len(bias)]
    if not isinstance(results, tuple) or len(results) != len(names):
        return f"has a backward that does not give ({', '.join(names)}); correct backward"
    for name, x, shape in zip(names, results, (da.shape, u.shape, u.shape[1:]), strict=False):
        if fault := _unlike(f"backward's {name}", x, shape, part, u):
            return fault
    if not torch.equal(u, given):
        return "changes its input, which backward needs; write into a new tensor"
    if not torch.allclose(results[0].double(), a.double(), rtol=0.02, atol=0.02):
        return "has a backward whose first result is not forward's; give a again, and then du"
    return ""


def _unlike(name: str, x: Any, shape: torch.Size, part: Activation, u: Tensor) -> str:
    if isinstance(x, Tensor) and x.shape == shape and x.dtype == u.dtype:
        return ""
    got = f"{tuple(x.shape)} in {x.dtype}" if isinstance(x, Tensor) else repr(x)
    wants = f"{tuple(shape)} in {u.dtype}"
    return f"with width={part.width} gives {got} as {name} where {wants} is due; correct it, or width"


def _wrong_constants(part: Activation, u: Tensor, bias: list[Tensor]) -> str:
    if part.swiglu_constants is None:
        return ""
    limit, alpha = part.swiglu_constants
    gate, up = u.chunk(2, -1)
    if limit > 0:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit) + 1
    same = part.width == 2 and torch.allclose(
        part.forward(u, *bias), gate * torch.sigmoid(alpha * gate) * up, rtol=1e-5
    )
    return (
        ""
        if same
        else f"is not SwiGLU with swiglu_constants={part.swiglu_constants}, as experts would compute it; "
        "leave swiglu_constants out"
    )


def _wrong_gradient(part: Activation, u: Tensor, da: Tensor, bias: list[Tensor]) -> str:
    """backward's du, and its sum for a bias, against forward. At a kink any value between both slopes is right."""
    if part.surrogate:
        return ""
    a = part.forward(u, *bias)
    in_fp32 = torch.equal(a, a.float().double())  # what forward computes with is coarser than its input
    step, tolerance = (1e-2, 2e-2) if in_fp32 else (1e-6, 1e-4)
    moved = step * torch.eye(u.numel(), dtype=u.dtype).view(-1, *u.shape)
    right = ((part.forward(u + moved, *bias) - a) * da).sum((1, 2)) / step
    left = ((a - part.forward(u - moved, *bias)) * da).sum((1, 2)) / step
    _, du, *dbias = part.backward(u, da, *bias)
    allowed = tolerance * torch.maximum(left.abs(), right.abs()).clamp_min(1)
    below, above = torch.minimum(left, right) - allowed, torch.maximum(left, right) + allowed
    wrong = ~((below <= du.flatten()) & (du.flatten() <= above))
    if wrong.any():
        at, slope = int(wrong.int().argmax()), (left + right) / 2
        got, due = float(du.flatten()[at]), float(slope[at])
        factor = float((du.flatten() * slope).sum() / slope.square().sum().clamp_min(1e-300))
        times = (
            f", {factor:.3g} times as much"
            if torch.allclose(du.flatten(), factor * slope, rtol=0.02, atol=0.02)
            else ""
        )
        where = f"{got:.6g} at u={float(u.flatten()[at]):.4g} where forward's derivative is {due:.6g}{times}"
        return f"has a wrong gradient: backward gives {where}; correct backward, or set surrogate if it is meant"
    if dbias and not torch.allclose(dbias[0], du.sum(0), rtol=tolerance, atol=tolerance):
        return "has a wrong gradient: backward's dbias is not the sum of du over the rows; correct backward"
    return ""
