"""Activations of the feed-forward block, each with a backward that needs only the input.

Each activation is a file in megalite/kernels/activations/ that defines ACTIVATION; its name is the file's name.
`--activation` offers all files of that directory and the activations of plugins (megalite/config/registry.py). No other
code lists the activations.

Backward needs only the input u, so callers save only u (nn/linear.py). Backward also returns the recomputed output `a`.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megalite.config.registry import REGISTRIES


@dataclass(frozen=True)
class Activation:
    """An activation with forward(u) -> a and backward(u, da) -> (a, du).

    width             input columns per output column: 2 for gated activations ([gate | up]), otherwise 1
    takes_bias        both functions take a bias as their last argument, which is added to u first, and backward returns
                      the bias gradient as a third result
    swiglu_constants  the constants (limit, alpha) of a SwiGLU (activations/swiglu.py), with which the experts' matmuls
                      compute it while its input is in registers (gated_matmul.py); None for other activations
    surrogate         backward intentionally differs from the derivative of forward (a straight-through estimator), so
                      the gradient check of plugins is skipped
    """

    forward: Callable[..., Tensor]
    backward: Callable[..., tuple[Tensor, ...]]
    width: int = 1
    takes_bias: bool = False
    swiglu_constants: tuple[float, float] | None = None
    surrogate: bool = False


def get_activation(name: str) -> Activation:
    """Return the activation of this name.

    Raises:
        ValueError: if there is none.
    """
    return REGISTRIES["activation"].get(name)


def find_activation_error(activation: Any) -> str:
    """Return the error in a plugin's activation, or "" if there is none.

    Checks shapes and dtypes, and compares backward with finite differences of forward in fp64. `verify` cannot detect
    such errors, since both of its runs use the same activation.
    """
    if not isinstance(activation, Activation):
        return f"is {activation!r}; give an Activation of megalite.kernels.activation"
    generator = torch.Generator().manual_seed(0)
    rows, columns = 5, 4
    u = 3 * torch.randn(rows, columns * activation.width, generator=generator, dtype=torch.float64)
    da = torch.randn(rows, columns, generator=generator, dtype=torch.float64)
    bias = [torch.randn(u.shape[1], generator=generator, dtype=torch.float64)] if activation.takes_bias else []
    with torch.no_grad():
        return (
            _wrong_form(activation, u, da, bias)
            or _wrong_form(activation, u.bfloat16(), da.bfloat16(), [b.bfloat16() for b in bias])
            or _wrong_constants(activation, u, bias)
            or _wrong_gradient(activation, u, da, bias)
        )


def _wrong_form(activation: Activation, u: Tensor, da: Tensor, bias: list[Tensor]) -> str:
    """Check shapes and dtypes of the results, that the input does not change, and that backward recomputes a."""
    u_before = u.clone()
    a = activation.forward(u, *bias)
    if fault := _mismatch("forward's a", a, da.shape, activation, u):
        return fault
    results = activation.backward(u, da, *bias)
    names = ["a", "du", "dbias"][: 2 + len(bias)]
    if not isinstance(results, tuple) or len(results) != len(names):
        return f"has a backward that does not give ({', '.join(names)}); correct backward"
    for name, x, shape in zip(names, results, (da.shape, u.shape, u.shape[1:]), strict=False):
        if fault := _mismatch(f"backward's {name}", x, shape, activation, u):
            return fault
    if not torch.equal(u, u_before):
        return "changes its input, which backward needs; write into a new tensor"
    if not torch.allclose(results[0].double(), a.double(), rtol=0.02, atol=0.02):
        return "has a backward whose first result is not forward's; give a again, and then du"
    return ""


def _mismatch(name: str, x: Any, shape: torch.Size, activation: Activation, u: Tensor) -> str:
    """Check that a result is a tensor with this shape and the dtype of u."""
    if isinstance(x, Tensor) and x.shape == shape and x.dtype == u.dtype:
        return ""
    actual = f"{tuple(x.shape)} in {x.dtype}" if isinstance(x, Tensor) else repr(x)
    expected = f"{tuple(shape)} in {u.dtype}"
    return f"with width={activation.width} gives {actual} as {name} where {expected} is expected; correct it, or width"


def _wrong_constants(activation: Activation, u: Tensor, bias: list[Tensor]) -> str:
    """Check that forward is the SwiGLU that swiglu_constants describe."""
    if activation.swiglu_constants is None:
        return ""
    limit, alpha = activation.swiglu_constants
    gate, up = u.chunk(2, -1)
    if limit > 0:
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit) + 1
    swiglu = gate * torch.sigmoid(alpha * gate) * up
    if activation.width == 2 and torch.allclose(activation.forward(u, *bias), swiglu, rtol=1e-5):
        return ""
    return (
        f"is not SwiGLU with swiglu_constants={activation.swiglu_constants}, as experts would compute it; "
        "leave swiglu_constants out"
    )


def _wrong_gradient(activation: Activation, u: Tensor, da: Tensor, bias: list[Tensor]) -> str:
    """Compare du of backward, and its sum for a bias, with finite differences of forward.

    At a kink, every value between the slopes on both sides is accepted.
    """
    if activation.surrogate:
        return ""
    a = activation.forward(u, *bias)
    in_fp32 = torch.equal(a, a.float().double())  # forward computes in a lower precision than its input has
    step, tolerance = (1e-2, 2e-2) if in_fp32 else (1e-6, 1e-4)
    steps = step * torch.eye(u.numel(), dtype=u.dtype).view(-1, *u.shape)  # one element each
    right = ((activation.forward(u + steps, *bias) - a) * da).sum((1, 2)) / step
    left = ((a - activation.forward(u - steps, *bias)) * da).sum((1, 2)) / step
    _, du, *dbias = activation.backward(u, da, *bias)
    margin = tolerance * torch.maximum(left.abs(), right.abs()).clamp_min(1)
    min_du = torch.minimum(left, right) - margin
    max_du = torch.maximum(left, right) + margin
    is_wrong = ~((min_du <= du.flatten()) & (du.flatten() <= max_du))
    if is_wrong.any():
        index = int(is_wrong.int().argmax())
        slope = (left + right) / 2
        actual = float(du.flatten()[index])
        expected = float(slope[index])
        factor = float((du.flatten() * slope).sum() / slope.square().sum().clamp_min(1e-300))
        is_scaled = torch.allclose(du.flatten(), factor * slope, rtol=0.02, atol=0.02)
        times = f", {factor:.3g} times as much" if is_scaled else ""
        position = f"at u={float(u.flatten()[index]):.4g}"
        difference = f"{actual:.6g} {position} where forward's derivative is {expected:.6g}{times}"
        return f"has a wrong gradient: backward gives {difference}; correct backward, or set surrogate if it is meant"
    if dbias and not torch.allclose(dbias[0], du.sum(0), rtol=tolerance, atol=tolerance):
        return "has a wrong gradient: backward's dbias is not the sum of du over the rows; correct backward"
    return ""
