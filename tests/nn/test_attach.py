"""A loss inside a model counts as if it were added at the end, however the model is run."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from megalite.nn.attach import attach
from megalite.nn.recompute import recompute

WEIGHT = 0.25


def inner(y: Tensor) -> Tensor:
    return y.square().mean(dim=-1)


def block(x: Tensor, w: Tensor, weight: float | Tensor) -> Tensor:
    y = torch.tanh(x @ w)
    return attach(y, inner(y), weight)


RUNS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "once": lambda x, w: block(x, w, WEIGHT),
    "a weight on the device": lambda x, w: block(x, w, torch.tensor(WEIGHT, dtype=x.dtype)),
    "recomputed": lambda x, w: recompute(lambda a: block(a, w, WEIGHT), x),
}


@pytest.mark.parametrize("run", RUNS)
def test_is_part_of_the_loss(run: str) -> None:
    """Micro-batches, whose backward begins at another stage with a gradient of any size."""
    torch.manual_seed(0)
    w = torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    batches = torch.randn(3, 2, 4, dtype=torch.float64)
    whole, parts = torch.zeros((), dtype=torch.float64), []
    for x in batches:
        y = torch.tanh(x @ w)
        whole = whole + 3 * y.sum() + WEIGHT * inner(y).sum()
        leaf = x.clone().requires_grad_()
        out = RUNS[run](leaf, w)
        assert torch.equal(out, y)
        [dw] = torch.autograd.grad(out, w, torch.full_like(out, 3))  # as a stage after this one sends it
        parts.append(dw)
    [expected] = torch.autograd.grad(whole, w)
    torch.testing.assert_close(sum(parts), expected, rtol=1e-12, atol=1e-12)


def test_without_gradients_nothing_is_kept() -> None:
    with torch.no_grad():
        x = torch.ones(2)
        assert attach(x, x.sum(), 1.0).grad_fn is None
